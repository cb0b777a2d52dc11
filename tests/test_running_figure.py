"""The figure of several frontiers has every row of each, with what is known of it."""

from copy import deepcopy
from typing import Any

import pytest

from tests.views.test_frontier import with_speeds
from tools.running_figure import rows_of, running_figure


def _two_models() -> list[dict[str, Any]]:
    """Return one frontier on random tokens, the same rows on text, and another model's."""
    random, text, other = (deepcopy(with_speeds()) for _ in range(3))
    text["inputs"]["calibration"]["kq"]["source"] = "calibration"
    other["inputs"]["model"] = "smollm2"
    return [random, text, other]


def test_a_row_that_two_frontiers_have_alike_is_one() -> None:
    found = rows_of(_two_models())
    assert list(found) == ["reference", "smollm2"]
    own = found["reference"]
    assert [one["data"] for one in own["kq"]] == ["random", "calibration"]
    assert len(own["fp8"]) == len(own["full"]) == 1
    assert own["kq"][0]["speeds"] == {1: 1.31, 8: 1.72}
    # The fewest bytes first; one that keeps no target stands at its lowest rate, and says so.
    assert list(own) == ["fp8", "kq:allocation=budget", "kq", "fdc", "palu", "full"]
    assert own["palu"][0]["smaller"] == pytest.approx(1 / (1 - 0.05))
    assert [one["kept"] for one in (own["palu"][0], own["kq"][0])] == [False, True]
    assert [own[name][0]["kernel"] for name in ("fdc", "kq")] == [False, True]


def test_the_figure_names_every_row_and_says_where_no_speed_is() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    figure = running_figure(_two_models())
    assert len(figure.axes) == 6
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names == ["fp8", "kq:allocation=budget", "kq", "fdc", "palu", "full"]
    words = [text.get_text() for text in figure.axes[1].texts]
    assert words == [
        "not timed at its rate", "no kernel", "keeps no target", "not timed at its rate",
    ]  # fmt: skip
    drawn = sorted(
        float(line.get_xdata()[0]) for line in figure.axes[1].lines if len(line.get_xdata()) == 1
    )
    assert drawn == [1.31, 1.31, 1.72, 1.72, 1.88]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        "batch 1", "batch 8", "calibrated on random", "calibrated on calibration",
        "not calibrated", "no rate keeps the targets",
    }  # fmt: skip


def test_a_row_that_was_scored_where_all_of_it_is_exact_has_no_share() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    [frontier, *_] = _two_models()
    for method in frontier["data"]["methods"]:
        if method["label"] == "fp8":
            method["max_rate"] = method["points"][0]["rate"] = 0.0
    assert rows_of([frontier])["reference"]["fp8"][0]["exact"]
    assert not rows_of([frontier])["reference"]["full"][0]["exact"]
    shares = running_figure([frontier]).axes[2]
    assert [text.get_text() for text in shares.texts] == ["all exact where it was scored"]
    marks = [line for line in shares.lines if len(line.get_xdata()) == 1]
    assert len(marks) == 5  # of six rows
