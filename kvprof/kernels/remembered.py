"""Launches of Triton kernels that are compiled already, without what Triton does for each.

Triton binds and classifies the arguments of every launch to find what it has compiled, and compares
every global of the kernel; with dozens of named columns that is most of a launch's time on the
host. Here a kernel is found by a key of its own, which tells apart all that Triton tells apart, and
more: what is not known by it goes Triton's way, and what comes of that is remembered.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

__all__ = ["argument_key", "launcher"]

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

    Parameters
    ----------
    argument : Any
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


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return what launches a kernel on a grid, as ``kernel[grid]`` does.

    Settings of Triton's own, such as those of its debugger, count as they were when a kernel was
    first launched.

    Parameters
    ----------
    kernel : JITFunction
        Compile-time arguments are given by name, and all others by place.
    grid : tuple of int
    """
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
