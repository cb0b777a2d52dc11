"""Layers of a plan on kvprof's kernels: what they store, how they run, and which cannot."""
