"""Where a call goes: to Triton's kernels, compiled or interpreted, or to torch on a CPU."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.remembered import launcher
from kvprof.kernels.variants import DEPENDENT_FROM

__all__ = [
    "check_interpreter",
    "compiling_ahead",
    "dependent",
    "interpreted",
    "launching",
    "layout_of",
    "multiprocessors_of",
    "placed",
    "uses_triton",
]


@triton.jit  # type: ignore[untyped-decorator]
def _nothing() -> None:
    pass


def interpreted() -> bool:
    """Tell whether Triton interprets its kernels, which it decides when it is first imported."""
    return isinstance(_nothing, InterpretedFunction)


def uses_triton(device: torch.device) -> bool:
    """Tell whether tensors of a device go to the Triton kernels: on a GPU, or interpreted."""
    return device.type == "cuda" or interpreted()


def check_interpreter(dtype: torch.dtype) -> None:
    """Refuse bf16 where Triton interprets its kernels."""
    if dtype == torch.bfloat16 and interpreted():
        raise UsageError("Triton's interpreter computes bf16 wrongly; use float16 or float32")


@lru_cache(maxsize=1024)
def layout_of(
    key_widths: tuple[int, ...], value_widths: tuple[int, ...], sizes: tuple[int, ...]
) -> RaggedLayout:
    """Return the layout of the numbers that an operator of torch takes.

    Parameters
    ----------
    key_widths, value_widths : tuple of int
    sizes : tuple of int
        Group, batch and capacity.
    """
    return RaggedLayout(key_widths, value_widths, *sizes)


def placed(device: torch.device | str) -> torch.device:
    """Return a device with its index, as tensors on it have it."""
    return torch.empty(0, device=device).device


def multiprocessors_of(device: torch.device) -> int:
    """Return a GPU's multiprocessors, 1 for a CPU: what work is cut for."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def dependent(device: torch.device) -> bool:
    """Tell whether a kernel can be launched before the one that it depends on has ended.

    Its programs take their places meanwhile and wait there, which saves most of the time between
    two kernels.
    """
    if interpreted():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= DEPENDENT_FROM


class _Ahead(threading.local):
    """Whether this thread compiles ahead, as Triton's own mode is a thread's own."""

    compiles = False


_ahead = _Ahead()


def launching(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return what launches a kernel on a grid; within `compiling_ahead` it is only compiled."""
    if _ahead.compiles:
        return partial(kernel.warmup, grid=grid)
    return launcher(kernel, grid)


@contextmanager
def compiling_ahead() -> Iterator[Sequence["Future[Any]"]]:
    """Compile what the body would launch, all of it at once; what it computes is undefined.

    At the end everything is compiled, and kept on disk as everything that Triton compiles. A kernel
    that cannot be compiled says so when it is launched.

    Yields
    ------
    sequence of Future
        Of what is being compiled, or was found; it grows.
    """
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        _ahead.compiles = True
        try:
            yield mode.raw_futures
        finally:
            _ahead.compiles = False
