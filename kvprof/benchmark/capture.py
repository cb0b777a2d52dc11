"""Capturing a CUDA graph without Python getting in between."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["capturing"]


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what the body queues.

    The garbage collector is held off meanwhile: a graph or an event that it finds frees memory of
    the GPU, and CUDA gives up every capture under which that happens.

    Parameters
    ----------
    graph : torch.cuda.CUDAGraph
    """
    before = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        if before:
            gc.enable()
