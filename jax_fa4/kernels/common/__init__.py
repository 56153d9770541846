"""Pieces that kernels of more than one architecture share. Modules that import the DSL say so in their first line."""
