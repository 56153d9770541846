"""Blackwell backward on pairs of CTAs, one file per role. ``kernel`` says how the roles fit together."""
