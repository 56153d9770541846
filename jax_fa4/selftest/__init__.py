"""Checks the shipped kernels on the GPU at hand: correctness, bitwise repeatability, speed next to cuDNN."""
