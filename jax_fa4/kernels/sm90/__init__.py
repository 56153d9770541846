"""Hopper kernels (sm_90a)."""
