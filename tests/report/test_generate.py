"""The report of ``kvprof generate``, as blocks."""

from typing import Any

import pytest

from kvprof.records.figures import figures_of
from kvprof.report.blocks import Curves, Paragraph, Table
from kvprof.report.generate import decoding_line
from tests.report.approved import blocks
from tests.views.synthetic_generate import generate_result


def said(result: dict[str, Any]) -> list[str]:
    return [one.text for one in blocks(Paragraph, result)]


def test_the_verdict_is_where_the_texts_part() -> None:
    none: dict[str, Any] = {"compressed_token": None, "full_token": None}
    for changes, position in (({}, "token 3 of 3"), ({"position": 0, **none}, "the first of 3")):
        assert position in said(generate_result(**changes))[0]
    same = generate_result(position=None, **none)
    assert said(same)[0].startswith("All 3 new tokens equal the uncompressed model's.")
    assert not blocks(Table, same)


def test_the_tables_hold_both_texts_and_how_probable_their_tokens_are() -> None:
    texts, tokens = blocks(Table, generate_result())
    assert [cell.split()[1] for cell in texts.cells()[0]] == ["left", "right"]
    assert tokens.cells() == [
        ["compressed", "' left'", "0.5000", "0.2500"],
        ["uncompressed", "' right'", "0.1250", "0.6250"],
    ]
    assert any("(399 characters …)" in one for one in said(generate_result()))


def test_divergences_are_a_curve_where_there_are_two() -> None:
    (curve,) = blocks(Curves, generate_result())
    assert (list(curve.series[0].x), curve.series[0].y) == ([1, 2, 3], [0.001, 0.002, 0.25])
    assert "0.0843 nats on average, at most 0.250" in curve.title
    one = generate_result(kl=[0.5])
    assert not blocks(Curves, one)
    assert any("0.500 nats" in line for line in said(one))


def test_a_cache_and_how_steps_were_launched_are_told() -> None:
    result = generate_result(diff=False)
    assert "2.0 KiB for 9 tokens (plan: 2.0 KiB; uncompressed: 4.0 KiB" in said(result)[0]
    decoding: dict[str, Any] = {"replayed_steps": 38, "graph_bytes": 22 * 2**20, "reason": None}
    for changes, told in (({}, "38 decoding"), ({"reason": "it asks"}, "CUDA graphs: it asks")):
        result["data"]["decoding"] = decoding | changes
        assert told in str(decoding_line(decoding | changes))
        assert any(told in line for line in said(result))
    result["data"]["cache"] = None
    assert said(result)[0] == "Nothing was cached."


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ((57, 45, True, True), "after 57 tokens, the uncompressed model's after 45: 1.27×"),
        ((128, 45, False, True), "not within 128 tokens, the uncompressed model's after 45: at le"),
        ((45, 128, True, False), "the uncompressed model's not within 128: at most"),
        ((128, 128, False, False), "Neither text ends within 128 tokens"),
        ((45, 45, True, True), "ends after 45 tokens, the uncompressed model's after 45."),
    ],
)
def test_how_long_the_texts_are(lengths: tuple[int, int, bool, bool], says: str) -> None:
    names = ("tokens", "full_tokens", "ends", "full_ends")
    length = {**dict(zip(names, lengths, strict=True)), "ratio": lengths[0] / lengths[1]}
    assert any(says in line for line in said(generate_result(length=length)))


def test_the_cache_and_the_divergence_are_compared() -> None:
    found = {(one.key, one.name): one for one in figures_of(generate_result())}
    rate = found[(("of", "cache"),), "rate"]
    assert (rate.value, rate.better, rate.headline, rate.exact) == (0.5, "higher", True, True)
    assert found[(("of", "cache"),), "measured_bytes"].value == 2048
    assert found[(("of", "difference"),), "kl_mean"].value == pytest.approx(0.253 / 3)
    assert len(found) == 3
