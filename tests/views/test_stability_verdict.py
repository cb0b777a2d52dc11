import re

import pytest

from kvprof.views.page import render_text
from kvprof.views.stability import NOISE_FLOOR, report, share_text, verdict

from .synthetic_stability import averages, made


def joined(result, width=100):
    """Return the report as one line, for sentences that may wrap anywhere."""
    return re.sub(r"\s+", " ", render_text(report(result), width))


def test_verdict_is_about_the_cost_at_the_largest_count():
    result = made()
    paragraphs = verdict(result)
    row = averages(result, pair="qk", target="tasks", tokens=16384)[1]
    assert row["rank"] == 8
    assert paragraphs[1].startswith(
        "qk: kept at rank 8, the basis from 16k random tokens loses "
        f"{100 * row['extra_energy_loss']:.1f} % more energy than the data's own on tasks "
        f"(whose own loses {share_text(row['own_energy_loss'])} of all) and"
    )
    noise = averages(result, pair="qk", target=NOISE_FLOOR, tokens=16384)[1]
    assert f"another seed cost {100 * noise['extra_energy_loss']:.2f} %" in paragraphs[1]
    assert "1.41 (√2)" in paragraphs[-1]
    assert "1.34–1.36" in paragraphs[-1]


def changed(costs, ratio=0.1):
    """Return a result in which every average has the cost of its target."""
    result = made()
    for row in averages(result):
        row["extra_energy_loss"] = costs[row["target"]]
        row["ratio_sign_aligned"] = ratio
    return verdict(result)[0]


@pytest.mark.parametrize(
    ("costs", "ratio", "answer"),
    [
        ((0.3, 0.2, 0.1, 0.02), 0.1, "qk: no. vo: no."),
        ((0.3, 0.002, 0.001, 0.02), 0.1, "for code and tasks yes in what it costs, for prose no."),
        ((0.01, 0.01, 0.0, 0.02), 0.1, "by its elements no, but the difference costs nothing."),
        ((0.01, 0.01, 0.0, 0.02), 0.004, "qk: yes. vo: yes."),
        ((0.03, 0.02, 0.01, 0.04), 0.1, "it cannot be told, another seed costs as much"),
        ((0.03, 0.05, 0.01, 0.04), 0.1, "for code no, for prose it cannot be told, another seed"),
        ((None, None, None, None), 0.1, "it cannot be told, no cost was measured."),
        ((None, 0.5, None, None), None, "no, not for code."),
    ],
)
def test_the_answer_follows_the_cost_and_the_noise_floor(costs, ratio, answer):
    names = ("prose", "code", "tasks", NOISE_FLOOR)
    assert answer in changed(dict(zip(names, costs, strict=True)), ratio)


def test_recommendation_and_its_evidence():
    result = made()
    found = result["data"]["recommendation"]
    entry = found["pairs"]["qk"]
    entry |= {"tokens": 4096, "stopped_falling": True}
    found |= {"tokens": 4096, "stopped_falling": True}
    for step, removed in zip(entry["evidence"], (0.21, 0.034), strict=True):
        step["removed_per_doubling"] = removed
    text = joined(result)
    assert "Calibrate with 4k tokens (random tokens)" in text
    assert "qk: 4k; a doubling after it removes 3.40 % at most, under 5 %" in text
    assert "the one before it removed 21.0 %." in text
    assert re.search(r"qk, 4k to 16k [\d.]+ % [\d.]+ % 3.40 %", text)
    assert "qk: more tokens of this source do not help" in text


def test_a_cost_that_still_falls_is_no_recommendation():
    result = made()
    for entry in result["data"]["recommendation"]["pairs"].values():
        entry |= {"tokens": 16384, "stopped_falling": False}
        entry["evidence"][-1]["removed_per_doubling"] = 0.123
    result["data"]["recommendation"] |= {"tokens": 16384, "stopped_falling": False}
    text = joined(result)
    assert "At least 16k tokens" in text
    assert "vo: still falling at 16k; the last doubling removed 12.3 %." in text
    assert "do not help" not in text


def test_no_recommendation_without_a_sweep():
    assert "No recommendation: it takes a sweep" in joined(made("one count"))
