from typing import Any

import pytest

from kvprof.views.generation import cache_line, comparison, decoding_line
from kvprof.views.page import render_text

LONG = "The pages of a process are found through tables that the kernel keeps. " * 9


def result(**changes: Any) -> dict[str, Any]:
    found = {
        "text": LONG,
        "tokens": [1, 2, 4],
        "ended": "length",
        "position": 2,
        "common_text": LONG,
        "compressed_rest": "goes left " * 30,
        "full_rest": "goes right " * 25,
        "compressed_token": {
            "id": 3,
            "text": " left",
            "compressed_probability": 0.5,
            "full_probability": 0.25,
        },
        "full_token": {
            "id": 4,
            "text": " right",
            "compressed_probability": 0.125,
            "full_probability": 0.625,
        },
        "kl": [0.001, 0.002, 0.25],
    }
    cache = {
        "tokens": 9,
        "measured_bytes": 2048,
        "account_bytes": 2048,
        "full_bytes": 4096,
        "rate": 0.5,
    }
    return {
        "kind": "generate",
        "complete": True,
        "warnings": [],
        "inputs": {"dtype": "bfloat16"},
        "data": {"tokens": [1, 2, 3], "cache": cache, "difference": {**found, **changes}},
    }


@pytest.mark.parametrize("width", [40, 60, 80, 99, 100, 120, 200])
def test_no_line_is_too_wide_and_no_word_is_lost(width: int) -> None:
    text = render_text(comparison(result()), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("left") == 30 + 1
    assert text.count("right") == 25 + 1


def test_wide_reports_put_the_texts_side_by_side() -> None:
    def line_of(width: int, words: str) -> int:
        lines = render_text(comparison(result()), width).splitlines()
        return next(i for i, line in enumerate(lines) if words in line)

    assert line_of(120, "compressed goes on") == line_of(120, "uncompressed goes on")
    assert (
        "uncompressed"
        not in render_text(comparison(result()), 80).splitlines()[line_of(80, "compressed goes on")]
    )


def test_figures_of_the_departure() -> None:
    text = render_text(comparison(result()), 200)
    assert "departs at new token 3 of 3; the 2 before it are the same" in text
    assert "0.0843 nats a step on average, 0.250 at most" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if line.startswith(("comp", "uncomp"))]
    assert rows[-2:] == [
        ["compressed", "'", "left'", "0.5000", "0.2500"],
        ["uncompressed", "'", "right'", "0.1250", "0.6250"],
    ]
    assert "(399 characters …)" in text  # of the common text


def test_texts_that_are_the_same() -> None:
    text = render_text(
        comparison(result(position=None, compressed_token=None, full_token=None)), 80
    )
    assert "All 3 new tokens are the uncompressed model's own." in text
    assert "goes on" not in text
    first = render_text(comparison(result(position=0, common_text="", kl=[0.5])), 80)
    assert "departs at the first of 3 new tokens" in first


def test_of_many_steps_the_largest_and_the_last_are_shown() -> None:
    kl = [0.001 * (step % 50) for step in range(100)] + [0.0]
    text = render_text(comparison(result(kl=kl)), 80)
    assert "the largest of 101, and the last" in text
    assert " 50: 0.049" in text
    assert "101: 0" in text
    assert "  1: " not in text


def test_the_cache_in_one_line() -> None:
    assert cache_line(result()) == (
        "cache after 9 tokens: 2.0 KiB measured, 2.0 KiB by the plan's account, of 4.0 KiB at full "
        "width in bfloat16; rate 0.500"
    )


def test_how_steps_were_launched_is_told_where_there_was_a_choice() -> None:
    made = result()
    assert decoding_line(made) is None
    made["data"]["decoding"] = {"replayed_steps": 38, "graph_bytes": 22 * 2**20, "reason": None}
    assert decoding_line(made) == (
        "38 decoding steps replayed as a CUDA graph, which holds 22.0 MiB"
    )
    made["data"]["decoding"] = {"replayed_steps": 0, "graph_bytes": 0, "reason": "it asks"}
    assert decoding_line(made) == "decoding steps were launched one by one: it asks"


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        (
            (57, 45, True, True),
            "ends after 57 tokens, the uncompressed model's after 45: 1.27 times as long",
        ),
        (
            (128, 45, False, True),
            "ends not within 128 tokens, the uncompressed model's after 45: at least",
        ),
        (
            (45, 128, True, False),
            "after 45 tokens, the uncompressed model's not within 128: at most",
        ),
        ((128, 128, False, False), "Neither text ends within 128 tokens"),
        ((45, 45, True, True), "ends after 45 tokens, the uncompressed model's after 45."),
    ],
)
def test_how_long_the_texts_are(lengths: tuple[int, int, bool, bool], says: str) -> None:
    own, full, ends, full_ends = lengths
    length = {
        "tokens": own,
        "full_tokens": full,
        "ratio": own / full,
        "ends": ends,
        "full_ends": full_ends,
    }
    assert says in " ".join(render_text(comparison(result(length=length)), 80).split())
