"""A simulated load against one that was served, on figures that are known."""

import io

import pytest
from rich.console import Console, Group

from kvprof.records.load_against import against, differing
from kvprof.views.load import against_section, against_verdict


def printed(parts):
    console = Console(file=io.StringIO(), width=100)
    console.print(Group(*parts))
    return " ".join(console.file.getvalue().split())


def latency(mean, half=None):
    interval = None if half is None else [mean - half, mean + half]
    return {"mean": mean, "mean_interval": interval}


def row(method, rate, mean, *, half=None, grows=False, complete=True):
    return {
        "case": f"{method} @ {rate:g}/s",
        "method": method,
        "rate": rate,
        "grows": grows,
        "complete": complete,
        "normalised_latency_seconds": latency(mean, half),
        "ttft_seconds": latency(10 * mean, half),
        "tbt_seconds": latency(None),
    }


SERVED = {
    "rates": [
        row("full", 1.0, 0.010),
        row("full", 2.0, 0.020),
        row("full", 4.0, 0.100, half=0.03, grows=True),
        row("full", 8.0, 0.5, complete=False),
        row("fdc", 1.0, 0.010),
    ]
}
SIMULATED = {
    "rates": [
        row("full", 1.0, 0.0109),
        row("full", 2.0, 0.0179),
        row("full", 4.0, 0.120),
        row("full", 8.0, 0.5),
        row("kq", 1.0, 0.010),
    ]
}


def test_rates_are_held_against_what_was_measured():
    found = against(SIMULATED, SERVED)
    shown = {one["case"]: one["normalised_latency_seconds"] for one in found["rates"]}
    assert list(shown) == ["full @ 1/s", "full @ 2/s", "full @ 4/s"]
    assert shown["full @ 1/s"]["difference"] == pytest.approx(0.09)
    assert shown["full @ 2/s"]["difference"] == pytest.approx(-0.105)
    # A fifth off, but as far as the measurement itself is sure.
    assert [one["within"] for one in shown.values()] == [True, False, True]
    assert [one["grows"] for one in found["rates"]][-1] == [False, True]
    assert all(one["tbt_seconds"] is None for one in found["rates"])
    assert found["missing"] == ["fdc @ 1/s", "full @ 8/s", "kq @ 1/s"]


def test_the_report_says_where_it_is_not_near():
    found = against(SIMULATED, SERVED)
    assert against_verdict(found) == (
        "2 of 3 rates are within 10 % of the measured latency per token, or within its interval; "
        "the farthest is +20.0 % off"
    )
    text = printed(against_section(found))
    assert "not within: full @ 2/s (−10.5 %)" in text
    assert "completed by one of them alone: fdc @ 1/s, full @ 8/s, kq @ 1/s" in text
    assert "no growth, measured grows" in text
    nothing = against({"rates": []}, SERVED)
    assert "nothing is told of the simulation" in printed(against_section(nothing))


def test_other_requests_are_no_ground_for_a_comparison():
    own = {"lengths": {"name": "arxiv"}, "arrivals": "poisson", "seed": 0, "requests": 10}
    assert differing(own, dict(own)) == []
    assert differing(own, {**own, "seed": 1, "lengths": {"name": "b"}}) == ["lengths", "seed"]
