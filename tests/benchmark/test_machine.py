"""What is told of a GPU before a run."""

from types import SimpleNamespace

import pytest
import torch

from kvprof.benchmark import machine


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([2], None),
        ([35, 0], None),  # what this process did before
        ([35, 41], "41 % busy"),
    ],
)
def test_only_work_that_goes_on_is_another_programs(monkeypatch, shares, told):
    asked, slept = iter(shares), []
    monkeypatch.setattr(machine, "_handle", lambda device: device)
    monkeypatch.setattr(machine.time, "sleep", slept.append)
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(machine.pynvml, name, lambda: None)
    monkeypatch.setattr(
        machine.pynvml,
        "nvmlDeviceGetUtilizationRates",
        lambda handle: SimpleNamespace(gpu=next(asked)),
    )
    found = machine.gpu_warnings(torch.device("cuda"), before=True)
    assert [told in text for text in found] == ([True] if told else [])
    assert sum(slept) > 1.0 or len(shares) == 1
    assert next(asked, None) is None
