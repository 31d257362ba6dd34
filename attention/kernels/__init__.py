"""Triton kernels and the functions that launch them: pointers, shapes and constants, no policy."""
