"""Triton's interpreter, which does again at every call what it needs to do once."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from kvprof.kernels.dispatch import interpreted


@pytest.fixture(scope="session", autouse=True)
def _interpreter_that_remembers() -> Iterator[None]:
    """Let a grid patch a language module once, and not in every call of a function inside of it.

    What is patched already is found by going through all its members, and left as it is: a quarter
    of the time of these tests. The table of dtypes, too, is made anew for every tensor.
    """
    if not interpreted():
        yield
        return
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_fresh)
        patch.setattr(interpreter, "_get_np_dtype", named)
        yield
