"""A capture is left alone by the garbage collector, and afterwards all is as it was."""

import gc
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from kvprof.benchmark.capture import capturing


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_within_a_capture(
    enabled: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph: Any = object()
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph", lambda one: given.append(one) or nullcontext())
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(RuntimeError), capturing(graph):
            assert not gc.isenabled()
            if fails:
                raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert given == [graph]
