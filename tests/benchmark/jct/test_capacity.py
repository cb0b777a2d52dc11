"""What fits into memory, and what summing over GPUs costs."""

import json
import sys

import pytest
import torch

from kvprof.benchmark.jct import serving
from kvprof.benchmark.jct.layer_bench import AllReduce, LayerTimes, measure_all_reduce
from kvprof.benchmark.jct.serving import capacity, weight_bytes
from kvprof.errors import FailedError
from kvprof.methods.accounting import bytes_at
from tests.benchmark.jct.shapes import tiny_bench, tiny_shape
from tests.benchmark.on_shapes import method_on

FREE = 8 * 2**20


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(serving, "free_bytes", lambda device: FREE)
    bench = tiny_bench()
    methods = [method_on(name, bench.model.attention) for name in ("full", "fdc", "fp8")]
    with torch.inference_mode():
        return bench, methods, capacity(bench, methods, 256, 2)


def test_the_largest_context_fills_memory_and_one_token_more_does_not(found):
    bench, methods, data = found
    for method, row in zip(methods, data["methods"], strict=True):
        held = weight_bytes(method, bench.model, bench.dtype)
        plan = method.plan

        def total(tokens, held=held, plan=plan):
            return held + bytes_at(plan, tokens, itemsize=4, batch=2).total

        assert total(row["largest_context"]) <= 0.95 * FREE < total(row["largest_context"] + 1)
        assert row["tried"] is True
    full, fdc, fp8 = data["methods"]
    assert fdc["largest_context"] > 1.9 * full["largest_context"]
    assert fp8["largest_batch"] > fdc["largest_batch"] > full["largest_batch"] > 1
    assert full["token_bytes"] == 2 * 2 * 2 * 32 * 4


def test_throughput_is_measured_up_to_what_fits(found):
    _, _, data = found
    for row in data["methods"]:
        own = [one for one in data["throughput"] if one["method"] == row["method"]]
        assert own[0]["batch"] == 1
        assert own[-1]["batch"] == min(16, row["largest_batch"])
        assert own[-1]["fills_memory"] == (row["largest_batch"] <= 16)
        for one in own:
            assert one["tokens_per_s"] == pytest.approx(one["batch"] / one["step_seconds"])


def test_a_step_reads_no_more_than_the_window_of_layers_that_have_one(monkeypatch):
    monkeypatch.setattr(serving, "free_bytes", lambda device: FREE)
    bench = tiny_bench(tiny_shape(sliding_window=100, window_pattern="WF"))
    released = []
    monkeypatch.setattr(bench, "release", lambda: released.append(1))
    monkeypatch.setattr(
        bench,
        "point",
        lambda v, workload, window=None, powered=False: LayerTimes(
            workload.seq,
            {"attention": 1.0 * workload.seq},
            {"head": 0.5},
            1.0 * workload.seq,
            None,
            {},
        ),
    )
    data = capacity(bench, [method_on("full", bench.model.attention)], 256, 1)
    assert data["methods"][0]["largest_context"] > 100
    assert {one["step_seconds"] for one in data["throughput"]} == {256 + 100 + 0.5}
    assert released


def test_nothing_fits_beside_weights_that_fill_memory(monkeypatch):
    monkeypatch.setattr(serving, "free_bytes", lambda device: 1000)
    bench = tiny_bench()
    data = capacity(bench, [method_on("full", bench.model.attention)], 256, 1)
    assert data["methods"][0]["largest_context"] == 0
    assert data["methods"][0]["tried"] is None
    assert data["throughput"] == []


def test_a_cache_that_stops_growing_has_no_largest_context(monkeypatch):
    monkeypatch.setattr(serving, "free_bytes", lambda device: FREE)
    bench = tiny_bench(tiny_shape(sliding_window=100, window_pattern="W"))
    monkeypatch.setattr(serving, "_throughput", lambda *_: [])
    (row,) = capacity(bench, [method_on("full", bench.model.attention)], 256, 2)["methods"]
    assert row["largest_context"] is None
    assert row["tried"] is None
    # K and V of 99 tokens in two layers are all that a sequence ever holds.
    each = 2 * 99 * 2 * 2 * 32 * 4
    assert row["largest_batch"] == (int(0.95 * FREE) - row["weights_bytes"]) // each


# --- communication ------------------------------------------------------------------------------


def test_without_the_gpus_nothing_is_measured():
    assert measure_all_reduce(2, count=lambda: 1) is None


def test_every_process_gets_its_rank_and_the_first_answers():
    program = """
import json, sys
rank, world, sizes, port = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
assert world == 3 and int(port) > 0
if rank == 0:
    print(json.dumps([size / 1e9 for size in sizes]))
"""
    found = measure_all_reduce(3, count=lambda: 4, program=(sys.executable, "-c", program))
    assert found.seconds == [size / 1e9 for size in found.sizes]
    assert found(3 * 2**14) == pytest.approx(3 * 2**14 / 1e9)
    assert found(1) == found.seconds[0]
    assert found(4 * found.sizes[-1]) == pytest.approx(4 * found.seconds[-1])
    json.dumps(found.sizes)


def test_a_process_that_fails_says_why():
    program = "import sys; sys.exit('NCCL is not built in')"
    with pytest.raises(FailedError, match="NCCL is not built in"):
        measure_all_reduce(2, count=lambda: 2, program=(sys.executable, "-c", program))


def test_summing_is_a_part_of_a_layer_twice():
    bench = tiny_bench(tiny_shape(), all_reduce=AllReduce([1, 2**20], [0.0, 1.0]))
    with torch.inference_mode():
        point = bench.point(
            method_on("full", bench.model.attention), bench.workload("decode", 4, 32)
        )
    assert point.parts["communication"] == pytest.approx(2 * (4 * 128 * 4 - 1) / (2**20 - 1))
    assert point.layer > point.parts["communication"]
