"""Blackwell backward: dQ, dK and dV, one file per role. ``kernel`` says how the roles fit together."""
