"""Capturing a CUDA graph without Python getting in between."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Pool", "capturing"]

#: Memory that graphs share, as `torch.cuda.graph_pool_handle` names it.
Pool = Any


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Pool = None) -> Iterator[None]:
    """Capture what the body queues.

    The garbage collector is held off meanwhile: a graph or an event that it finds frees memory of
    the GPU, and CUDA gives up every capture under which that happens.

    Parameters
    ----------
    graph : torch.cuda.CUDAGraph
    pool : Pool, optional
        Of graphs that never run at the same time; what one of them leaves there another overwrites.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if before:
            gc.enable()
