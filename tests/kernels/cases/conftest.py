"""Triton's interpreter, which does again at every call what it needs to do once."""

from collections.abc import Iterator

import pytest

from kvprof.kernels.dispatch import interpreted


@pytest.fixture(scope="session", autouse=True)
def _interpreter_that_remembers() -> Iterator[None]:
    """Run kernels in an interpreter that asks once what the types of its numbers decide."""
    if not interpreted():
        yield
        return
    from tests.kernels.cases.interpreter import forget, remember

    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        yield
        forget()
