"""Kernels for Blackwell (sm_100f: the 10.x family)."""
