"""Decoding in stretches of time, against what the requests' own times say."""

import numpy as np
import pytest

from kvprof.serving.load.arrivals import Arrivals
from kvprof.serving.load.lengths import arriving, load_lengths
from kvprof.serving.load.requests import Outcome, Request
from kvprof.serving.load.sweep import longest_gap, spans_of
from tests.records.load_stream import served


def test_one_request_decodes_alone():
    times = [1.0 + 0.1 * n for n in range(101)]
    found = spans_of([Outcome(Request(0, 0.5, 1000, 101), 0.5, times)])
    for span in found:
        assert span["between"] == pytest.approx(0.1)
        assert span["batch"] == pytest.approx(1.0)
        assert span["context"] == pytest.approx(1000 + (span["at"] - 1.0) / 0.1, abs=1.1)
        assert span["prefill"] == pytest.approx(0, abs=1e-9)
    assert sum(span["tokens"] for span in found) == pytest.approx(100, abs=6)


def test_stretches_hold_what_the_requests_hold():
    requests = arriving(load_lengths("in=500,out=50"), Arrivals(), 4.0, 100, 0)
    outcomes = served(requests, 8, 0.02, 0.0)
    found = spans_of(outcomes)
    assert len(found) > 20
    for span in found[:: len(found) // 10]:
        now = span["at"]
        batch = sum(one.tokens[0] <= now <= one.tokens[-1] for one in outcomes)
        assert abs(span["batch"] - batch) <= 2
        held = [one for one in outcomes if one.tokens[0] <= now <= one.tokens[-1]]
        context = sum(500 + np.searchsorted(one.tokens, now) for one in held)
        assert span["context"] == pytest.approx(context, abs=1100)
    # Prompts are read once: what all steps together read is what came.
    width = found[1]["at"] - found[0]["at"]
    read = sum(span["prefill"] / span["between"] * width for span in found)
    assert read == pytest.approx(sum(one.request.prompt for one in outcomes), rel=0.1)


def test_a_step_of_several_engines_is_one_of_theirs():
    requests = arriving(load_lengths("in=500,out=50"), Arrivals(), 4.0, 100, 0)
    outcomes = served(requests, 8, 0.02, 0.0)
    for one, all_together in zip(spans_of(outcomes, 4), spans_of(outcomes), strict=True):
        for name in ("batch", "context", "prefill"):
            assert one[name] == pytest.approx(all_together[name] / 4)
        assert (one["between"], one["tokens"]) == (all_together["between"], all_together["tokens"])


def test_requests_without_two_tokens_have_no_stretches():
    assert spans_of([]) == []
    assert spans_of([Outcome(Request(0, 0.0, 5, 1), 0.0, (1.0,))]) == []
    assert longest_gap(Outcome(Request(0, 0.0, 5, 1), 0.0, (1.0,))) is None
    assert longest_gap(Outcome(Request(0, 0.0, 5, 3), 0.0, (1.0, 1.5, 1.6))) == 0.5
