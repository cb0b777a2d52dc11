"""Percentiles over a trace's requests."""

import pytest

from kvprof.benchmark.jct.composer import ComposedRequest, RequestLengths
from kvprof.benchmark.jct.serving import summary
from kvprof.serving.load.traces import load_trace


def composition(given, written, prefill, decode, compress):
    return ComposedRequest(
        RequestLengths(given, written),
        {"attention": prefill, "compress": compress},
        {"attention": decode},
        prefill,
        decode,
        [],
        None,
        None,
    )


def test_percentiles_are_over_requests():
    found = {
        "fdc": [composition(10, 11, 1.0 * n, 2.0 * n, 0.03 * n) for n in range(1, 101)],
        "full": [composition(10, 1, 1.0, 0.0, 0.0)] * 100,
    }
    data = summary(load_trace("fdc/arxiv"), 5, found)
    (ttft, _), (tpot,) = data["ttft"], data["tpot"]
    assert ttft["p50_seconds"] == pytest.approx(50.5)
    assert tpot["method"] == "fdc"  # a request of one token has no time between tokens
    assert tpot["p99_seconds"] == pytest.approx(99.01 * 2 / 10)
    assert data["normalised_latency"][0]["mean_seconds"] == pytest.approx(3 * 50.5 / 11)
    overhead = data["overheads"][0]
    assert (overhead["method"], overhead["part"]) == ("fdc", "compress")
    assert overhead["p99_share"] == pytest.approx(0.01)
    assert (data["count"], data["seed"], data["mean_input_len"]) == (100, 5, 10)
