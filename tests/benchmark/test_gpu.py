"""On a GPU: graphs, samples in turn. Small: figures come from benchmarks/."""

import pytest
import torch

from kvprof.benchmark.request import BenchRequest
from kvprof.benchmark.run import run_bench
from kvprof.benchmark.timing import sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_all_methods_run_and_are_right():
    data, warnings = run_bench(BenchRequest(seqs=(4096,), batches=(1, 2), repeats=5, device="cuda"))
    for phase, methods in (
        ("decode", {"full", "fp8", "fdc", "kq", "palu", "tale"}),
        ("prefill", {"full", "fdc", "kq"}),
    ):
        rows = [row for row in data["rows"] if row["phase"] == phase]
        assert {row["method"] for row in rows} == methods, warnings
        assert all(row["speedup"] is not None for row in rows), warnings
        told = [row for row in rows if row["schedule"]]
        assert all(1 <= row["makespan_over_mean"] < 1.5 for row in told)
        assert told or phase == "prefill"
    ran = {entry["name"] for entry in data["baselines"] if entry["seconds"]}
    assert {"sdpa-flash", "kvprof"} <= ran


def test_what_a_captured_call_does_not_write_is_poisoned():
    source = torch.ones(8, device="cuda")
    kept = torch.zeros(8, device="cuda")

    def forgets():
        kept[:4] = source[:4]
        return kept

    output = sampler([forgets], torch.device("cuda")).output()
    assert output[:4].tolist() == [1.0] * 4
    assert torch.isnan(output[4:]).all()
