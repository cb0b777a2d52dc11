"""Composed runs on a GPU: graphs, the merge apart, and the sum over several GPUs."""

import pytest
import torch

from kvprof.benchmark.jct.layer_bench import measure_all_reduce
from kvprof.benchmark.jct.request import JctRequest
from kvprof.benchmark.jct.run import run_jct
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
#: Methods whose attention is cut and joined.
MERGED = ("fdc", "kq", "fdc:no-balancing")


def ran(tmp_path, **options):
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:
        run_jct(JctRequest(model="Llama-3.1-8B", device="cuda:0", **options), journal)
    events = read_events(path).events
    return events, result_of(events)


COMPOSED = {"mode": "composed", "input_lens": (4096,), "output_lens": (64,), "repeats": 5}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_composed(tmp_path, method):
    """One by one, so that kernels are compiled side by side, and found by what is timed alone."""
    rate = 0.8 if method == "fdc-4bit" else 0.5  # 4 bits alone store a quarter
    _, result = ran(tmp_path, methods=(method,), rate=rate, **COMPOSED)
    (case,) = result["data"]["cases"]
    assert case["method"] == method
    assert case["complete"], result["warnings"]
    assert not any("cannot be captured" in text for text in result["warnings"])
    waits = {
        row["phase"]: row["seconds"] for row in result["data"]["parts"] if row["part"] == "host"
    }
    assert set(waits) == {"prefill", "decode"}
    # Once in a pass: 63 steps wait 63 times as long as the prompt does.
    assert waits["decode"] / waits["prefill"] == pytest.approx(63, rel=1e-3)
    if method in MERGED:
        assert any(row["part"] == "merge" for row in result["data"]["parts"])


@pytest.mark.alone
def test_the_parts_of_every_method_add_up(tmp_path):
    _, result = ran(tmp_path, methods=METHODS, **COMPOSED)
    cases = {case["method"]: case for case in result["data"]["cases"]}
    assert set(cases) == set(METHODS), result["warnings"]
    waits = {
        row["method"]: row["seconds"]
        for row in result["data"]["parts"]
        if row["part"] == "host" and row["phase"] == "prefill"
    }
    for method, case in cases.items():
        assert case["complete"], result["warnings"]
        # A singular value decomposition takes as long as the host lets it: by itself it took up to
        # two fifths longer than inside its layer. Counted twice, or not at all, it is all of it.
        decomposed = sum(
            row["seconds"]
            for row in result["data"]["parts"]
            if row["method"] == method and row["part"] == "basis"
        )
        allowed = 0.1 + 0.4 * decomposed / case["jct_seconds"]
        assert abs(case["unattributed_share"]) < allowed, method
        # Far below the time for which the GPU is kept busy meanwhile.
        assert 0 < waits[method] < 0.04 * case["itl_seconds"], method


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_sum_what_they_have():
    found = measure_all_reduce(2)
    assert found is not None
    assert 0 < found.seconds[0] < found.seconds[-1]
