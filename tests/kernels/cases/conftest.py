"""Triton's interpreter, which does again at every call what it needs to do once."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from kvprof.kernels.dispatch import interpreted


@pytest.fixture(scope="session", autouse=True)
def _interpreter_that_remembers() -> Iterator[None]:
    """Let a grid patch a language module once, and not in every call of a function inside of it.

    What is patched already is found by going through all its members, and left as it is: a quarter
    of the time of these tests. The table of dtypes, too, is made anew for every tensor, and so are
    shapes, of which a kernel has few. And sums of integers are worked out a second time as int64
    and compared with what their type holds, which without `debug` nobody looks at: 40 % of what is
    left.
    """
    if not interpreted():
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    patch_lang, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    dtype_of = interpreter._get_np_dtype
    patched: set[frozenset[str]] = set()
    dtypes: dict[str, Any] = {}

    @cache
    def modules(function: Any) -> frozenset[str]:
        known = (interpreter.tl, interpreter.tl.core)
        found = [value for value in function.__globals__.values() if value in known]
        return frozenset(one.__name__ for one in found)

    def patch_once(function: Any) -> Any:
        own = modules(function)
        if own in patched:
            return interpreter._LangPatchScope()
        patched.add(own)
        return patch_lang(function)

    def run_fresh(executor: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        return run_grid(executor, *arguments, **options)

    def named(kind: Any) -> Any:
        name = str(kind.scalar)
        if name not in dtypes:
            dtypes[name] = dtype_of(kind.scalar)
        return dtypes[name]

    new_block = core.block_type.__init__
    blocks: dict[tuple[int, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_of_known_shape(block: Any, element: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in blocks:
            new_block(block, element, shape)
            blocks[sizes] = {"shape": block.shape, "numel": block.numel}
        block.__dict__.update(blocks[sizes], element_ty=element, name=f"<{sizes}, {element}>")

    def tensor_of_known_shape(tensor: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in shapes:
            number = core.constexpr(math.prod(sizes))
            shapes[sizes] = core.tuple([core.constexpr(size) for size in sizes]), number
        tensor.shape, tensor.numel = shapes[sizes]
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(core.block_type, "__init__", block_of_known_shape)
        patch.setattr(core.tensor, "__init__", tensor_of_known_shape)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_fresh)
        patch.setattr(interpreter, "_get_np_dtype", named)
        yield
