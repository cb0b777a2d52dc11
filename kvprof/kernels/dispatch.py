"""Where a call goes, to Triton's kernels or to torch on a CPU, and how a kernel is launched."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.compiler import CompiledKernel
from triton.language.extra import cuda
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.variants import DEPENDENT_FROM

__all__ = [
    "EARLY_ROWS",
    "argument_key",
    "check_interpreter",
    "compiling_ahead",
    "early_launch",
    "interpreted",
    "launching",
    "layout_of",
    "multiprocessors_of",
    "placed",
    "uses_triton",
    "wait_for_earlier",
]


@triton.jit  # type: ignore[untyped-decorator]  # types mean nothing to Triton
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
        raise UsageError("Triton's interpreter computes bf16 incorrectly; use float16 or float32")


@lru_cache(maxsize=1024)
def layout_of(
    key_widths: tuple[int, ...], value_widths: tuple[int, ...], sizes: tuple[int, ...]
) -> RaggedLayout:
    """Return the layout of the numbers that an operator of torch takes."""
    return RaggedLayout(key_widths, value_widths, *sizes)


def placed(device: torch.device | str) -> torch.device:
    """Return a device with its index, as tensors on it have it."""
    return torch.empty(0, device=device).device


def multiprocessors_of(device: torch.device) -> int:
    """Return a GPU's multiprocessors, 1 for a CPU: what work is cut for."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


#: Rows of a step up to which a kernel is launched early. On an H200 a step's attention takes up to
#: 0.93 of the time so where few decode, and 1.04 where some hundred tokens of prompts go with them:
#: the places that waiting programs take are missing elsewhere.
EARLY_ROWS = 128


@cache
def _launches_early(device: torch.device) -> bool:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= DEPENDENT_FROM


def early_launch(device: torch.device, rows: int) -> dict[str, bool]:
    """Return the options that launch a kernel before the one it depends on ends.

    Such a kernel begins with `wait_for_earlier`; the combine waits where it first reads.
    """
    if interpreted() or rows > EARLY_ROWS or not _launches_early(device):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@triton.jit  # type: ignore[untyped-decorator]  # types mean nothing to Triton
def wait_for_earlier(DEPENDENT: tl.constexpr) -> None:
    """Wait for the earlier kernel, then allow the next launch; before that no write is certain."""
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


# --- Launches of kernels that are compiled already, without what Triton does for each. Triton binds
# and classifies the arguments of every launch to find what it has compiled, and compares every
# global of the kernel; with dozens of named columns that is most of a launch's time on the host.
# Here a kernel is found by a key of its own, which tells apart all that Triton tells apart, and
# more: what is not known by it goes Triton's way, and what comes of that is remembered.

#: The key of an argument that Triton may treat in a way not known here.
_UNKNOWN = object()

_LOWEST, _HIGHEST = -(2**31), 2**31

#: By the key of a launch: what is launched, its compile-time arguments, and the kernel, which is
#: kept so that its identity, a part of the key, is nobody else's.
_compiled: dict[Any, tuple[Any, tuple[Any, ...], JITFunction]] = {}


def argument_key(argument: Any) -> Any:
    """Return what a kernel may be compiled for of an argument that is not compile-time.

    That is whether a tensor begins at a multiple of 16 bytes and its dtype, and whether a number of
    32 bits is 1 or a multiple of 16. Arguments with equal keys are the same to Triton; a kernel
    that is not specialised on one is found under several keys.
    """
    kind = type(argument)
    if kind is Tensor or kind is Parameter:
        return argument.dtype, argument.data_ptr() % 16 == 0
    if kind is int:
        if argument == 1:
            return "1"
        if _LOWEST <= argument < _HIGHEST:
            return "16" if argument % 16 == 0 else "int"
    elif kind is float or kind is bool or argument is None:
        return kind
    return _UNKNOWN


def _launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return what launches a kernel on a grid, as ``kernel[grid]`` does."""
    if type(kernel) is not JITFunction or kernel.pre_run_hooks:
        ordinary: Callable[..., Any] = kernel[grid]
        return ordinary

    def launch(*arguments: Any, **constants: Any) -> Any:
        keys = [argument_key(argument) for argument in arguments]
        if _UNKNOWN in keys:
            return kernel[grid](*arguments, **constants)
        device = driver.active.get_current_device()
        # By type too: 1, True and 1.0 are equal, and need not be the same in a kernel.
        named = ((name, type(value), value) for name, value in constants.items())
        key = (id(kernel), device, *keys, *named)
        found = _compiled.get(key)
        if found is None:
            compiled = kernel[grid](*arguments, **constants)
            names = kernel.arg_names[len(arguments) :]
            by_name = kernel.constexprs == list(range(len(arguments), len(kernel.arg_names)))
            if isinstance(compiled, CompiledKernel) and by_name and constants.keys() >= {*names}:
                last = tuple(constants[name] for name in names)
                _compiled[key] = (compiled, last, kernel)
            return compiled
        compiled, last, _ = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *last)
        return compiled

    return launch


# --- A launch, and compiling ahead of the first one.


class _Ahead(threading.local):
    """Whether this thread compiles ahead, as Triton's own mode is a thread's own."""

    compiles = False


_ahead = _Ahead()


def launching(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return what launches a kernel on a grid; within `compiling_ahead` it is only compiled."""
    if _ahead.compiles:
        return partial(kernel.warmup, grid=grid)
    return _launcher(kernel, grid)


@contextmanager
def compiling_ahead() -> Iterator[Sequence["Future[Any]"]]:
    """Compile what the body would launch, all at once; what it computes is undefined."""
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        _ahead.compiles = True
        try:
            yield mode.raw_futures
        finally:
            _ahead.compiles = False
