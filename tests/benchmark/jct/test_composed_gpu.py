"""Composed runs on a GPU: graphs, the merge apart, and the sum over several GPUs."""

import pytest
import torch

from kvprof.benchmark.jct.layer_bench import measure_all_reduce
from kvprof.benchmark.jct.request import JctRequest
from kvprof.benchmark.jct.run import run_jct
from kvprof.records.events import LayerMeasured
from kvprof.records.fold import result_of
from kvprof.records.journal import Journal, read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
METHODS = (
    "full",
    "fp8",
    "fdc",
    "kq",
    "palu",
    "tale",
    "fdc-4bit",
    "strawman",
    "fdc:no-post-rope",
    "fdc:no-adaptive-rates",
    "fdc:no-balancing",
)


def ran(tmp_path, **options):
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:
        run_jct(JctRequest(model="Llama-3.1-8B", device="cuda:0", **options), journal)
    events = read_events(path).events
    return events, result_of(events)


def test_every_method_is_composed_and_its_parts_add_up(tmp_path):
    events, result = ran(
        tmp_path, mode="composed", methods=METHODS, input_lens=(4096,), output_lens=(64,), repeats=5
    )
    cases = {case["method"]: case for case in result["data"]["cases"]}
    assert set(cases) == set(METHODS), result["warnings"]
    for method, case in cases.items():
        assert case["complete"], result["warnings"]
        assert abs(case["unattributed_share"]) < 0.1, method
    assert not any("cannot be captured" in text for text in result["warnings"])
    assert all(event.error < 1e-2 for event in events if isinstance(event, LayerMeasured))
    waits = {
        (row["method"], row["phase"]): row
        for row in result["data"]["parts"]
        if row["part"] == "host"
    }
    assert set(waits) == {(method, phase) for method in METHODS for phase in ("prefill", "decode")}
    for method in METHODS:
        # Once in a pass: 63 steps wait 63 times as long as the prompt does.
        ratio = waits[method, "decode"]["seconds"] / waits[method, "prefill"]["seconds"]
        assert ratio == pytest.approx(63, rel=1e-3)
        # Far below the time for which the GPU is kept busy meanwhile.
        assert 0 < waits[method, "prefill"]["seconds"] < 2.5e-4
    merged = {row["method"] for row in result["data"]["parts"] if row["part"] == "merge"}
    assert {"fdc", "kq", "fdc:no-balancing"} <= merged
    measured = [row for row in result["data"]["balance"] if row["measured"]]
    assert {row["schedule"] for row in measured} == {"equal", "lpt"}


def test_a_real_run_of_few_layers_is_near_its_composition(tmp_path):
    _, result = ran(
        tmp_path,
        mode="real",
        check=True,
        methods=("full", "fdc"),
        layers=4,
        batches=(8,),
        input_lens=(8192,),
        output_lens=(16,),
    )
    decode = [row for row in result["data"]["check"]["rows"] if row["phase"] == "decode"]
    assert decode
    assert all(abs(row["difference"]) < 0.25 for row in decode), decode


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_sum_what_they_have():
    found = measure_all_reduce(2)
    assert found is not None
    assert 0 < found.seconds[0] < found.seconds[-1]
