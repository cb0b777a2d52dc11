"""What the runtime asks of tensors and their device, whichever layer asks."""

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvprof.runtime.clock import is_timing

__all__ = [
    "Pool",
    "aside",
    "capturing",
    "concatenated",
    "index_of",
    "inverse_of",
    "is_capturing",
    "on",
    "unflatten",
]

#: Memory that graphs share, as `torch.cuda.graph_pool_handle` names it.
Pool = Any


def unflatten(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Split dimension `dim` into `sizes`, one of which may be -1: a view."""
    return torch.unflatten(tensor, dim, sizes)


def concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return tensors concatenated along `dim`; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=dim)


@lru_cache(maxsize=1024)
def index_of(indices: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `indices` as an index on `device`, ``[len(indices)]`` int64; not to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(indices, device=device)


@lru_cache(maxsize=1024)
def inverse_of(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the index that puts what lies in `order` back into ascending order."""
    with torch.inference_mode(False):
        return torch.tensor(order, device=device).argsort()


def is_capturing(device: torch.device) -> bool:
    """Whether what runs on a device now is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on(device: torch.device | None) -> AbstractContextManager[Any]:
    """Make a GPU the current one, which kernels that are not torch's own are launched on."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device)


@lru_cache(maxsize=64)
def _stream(device: torch.device, name: str = "capture") -> torch.cuda.Stream:
    """Return the stream of that name on a device."""
    return torch.cuda.Stream(device)


class _Capture(threading.local):
    """What a thread captures."""

    under_way = False  # whether `capturing` captures anything
    branch: torch.cuda.Stream | None = None  # of the graph, once it has one (`aside`)

    def join(self, device: torch.device | None) -> None:
        """Let what is queued now wait for the branch: a graph has to end in one stream."""
        if self.branch is not None:
            torch.cuda.current_stream(device).wait_stream(self.branch)


_capture = _Capture()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run the body on a parallel branch of a captured graph; elsewhere in order."""
    if not _capture.under_way or is_timing() or not is_capturing(device):
        yield
        return
    branch = _capture.branch = _stream(device, "aside")
    branch.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(branch):
        yield


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, pool: Pool = None, device: torch.device | None = None
) -> Iterator[None]:
    """Capture the body in a CUDA graph, with the garbage collector disabled."""
    before = gc.isenabled()
    options: dict[str, Any] = {}
    if device is not None:
        options = {"stream": _stream(device), "capture_error_mode": "thread_local"}
    gc.disable()
    try:
        with on(device), torch.cuda.graph(graph, pool=pool, **options):
            _capture.under_way = True
            try:
                yield
            except BaseException:
                # Else the end of the capture fails in its place.
                with suppress(RuntimeError):
                    _capture.join(device)
                raise
            _capture.join(device)
    finally:
        _capture.under_way, _capture.branch = False, None
        if before:
            gc.enable()
