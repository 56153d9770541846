"""Blackwell backward for head dims above 128, in two kernels. ``config`` says which; ``kernel`` how the roles fit."""
