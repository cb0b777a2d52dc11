"""Triton kernels for compressed caches, how their work is cut, and a plain reference for each."""
