import xml.etree.ElementTree as ET

import numpy as np
import pytest

from kvprof.views.figure import figure_bytes
from kvprof.views.stability import figure

from .synthetic_stability import stability_result

SMALL = {"counts": (1024, 4096, 16384), "heads": (2, 2), "widths": (16, 16), "apart": 0.04}


@pytest.fixture(scope="module")
def result():
    return stability_result(**SMALL)


@pytest.fixture(scope="module")
def drawn(result):
    return figure(result)


@pytest.mark.parametrize(
    ("panel", "pair", "key", "scale"),
    [
        (0, "qk", "ratio_sign_aligned", 1),
        (1, "qk", "subspace_distance", 1),
        (2, "qk", "extra_energy_loss", 100),
        (3, "qk", "extra_score_error", 100),
        (6, "vo", "extra_energy_loss", 100),
        (7, "vo", "extra_output_error", 100),
    ],
)
def test_panels_hold_the_averages_and_their_spread(result, drawn, panel, pair, key, scale):
    axes = drawn.axes[panel]
    assert axes.get_title().startswith(f"{pair}: ")
    rows = [
        row
        for row in result["data"]["curves"]
        if row["layer"] is None
        and (row["pair"], row["target"], row["rank"]) == (pair, "code", 8)
        and row["removal_rate"] is None
    ]
    assert [row["tokens"] for row in rows] == [1024, 4096, 16384]
    line = axes.get_lines()[1]
    assert line.get_label() == "code"
    np.testing.assert_allclose(line.get_xdata(), [1024, 4096, 16384])
    np.testing.assert_allclose(line.get_ydata(), [scale * row[key] for row in rows])
    band = axes.collections[1].get_paths()[0].vertices
    ends = np.unique(band[band[:, 0] == 4096][:, 1])
    np.testing.assert_allclose(ends, np.array(rows[1]["spread"][key]) * scale)


def test_one_legend_for_all_panels(drawn):
    assert len(drawn.axes) == 8
    assert all(axes.get_legend() is None for axes in drawn.axes)
    texts = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert texts == ["prose", "code", "tasks", "random, another seed (noise floor)"]


@pytest.mark.parametrize(
    "shape",
    [
        {"counts": (4096,)},
        {"targets": ("prose",), "pairs": ("k",)},
        {
            "source": "a.txt",
            "pairs": ("qk",),
            "noise_floor": False,
            "counts": (8192,),
            "model": None,
        },
        {
            "source": "prose",
            "targets": ("prose",),
            "pairs": ("vo",),
            "apart": 0.0,
            "noise_floor": False,
        },
    ],
)
def test_every_shape_gives_a_valid_svg(shape):
    ET.fromstring(figure_bytes(figure(stability_result(**{**SMALL, **shape})), "svg"))


def test_rounding_is_not_drawn_as_a_curve():
    result = stability_result(
        **{**SMALL, "source": "prose", "targets": ("prose",), "apart": 0.0, "noise_floor": False},
        pairs=("qk",),
    )
    final = figure(result).axes[1].get_lines()[0].get_ydata()[-1]
    assert final == 0


def test_costs_far_apart_get_a_log_axis(result):
    for row in result["data"]["curves"]:
        assert row["extra_energy_loss"] > 0
    one = {**SMALL, "pairs": ("qk",)}
    apart = stability_result(**{**one, "apart": 0.5})
    assert figure(apart).axes[2].get_yscale() == "log"
    near = stability_result(**{**one, "apart": 0.001})
    assert figure(near).axes[0].get_yscale() == "linear"


def test_nothing_compared_and_incomplete(result):
    empty = {**result, "complete": False, "data": {**result["data"], "curves": []}}
    drawing = figure(empty)
    assert drawing.get_suptitle().endswith("(incomplete)")
    ET.fromstring(figure_bytes(drawing, "svg"))
