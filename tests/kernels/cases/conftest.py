"""Triton's interpreter, which does at every call what it needs to do once; memory that is NaN."""

from collections.abc import Iterator

import pytest
import torch

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


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory holds NaN: a workspace or an output that is read before it is written tells."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(1).new_empty(9, dtype=torch.float32).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
