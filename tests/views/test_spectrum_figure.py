import xml.etree.ElementTree as ET

import numpy as np
import pytest

from kvprof.views.figure import figure_bytes
from kvprof.views.spectrum import figure

from .synthetic import spectrum_result


def test_curves_and_bands_are_those_of_the_heads():
    result = spectrum_result()
    axes = figure(result).axes[0]
    pair = result["data"]["pairs"]["qk"]
    first = pair["mean"][0]
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), np.array(pair["mean"]) / first)
    heads = np.array([head for layer in pair["singular_values"] for head in layer]) / first
    band = axes.collections[0].get_paths()[0].vertices
    at_ten = np.unique(band[band[:, 0] == 10][:, 1])
    np.testing.assert_allclose(at_ten, np.percentile(heads[:, 9], [2.5, 97.5]))
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["qk", "vo", "k", "v"]


def test_maps_hold_the_ranks_of_the_rate_nearest_half():
    result = spectrum_result(heads=[4, 2], widths=[128, 64])
    drawing = figure(result)
    ranks = result["data"]["removal"][2]["ranks_vo"]
    image = drawing.axes[2].get_images()[0].get_array()
    assert image[0].tolist() == ranks[0]
    assert image[1, :2].tolist() == ranks[1]
    assert image.mask[1, 2:].all()
    assert drawing.axes[2].get_title() == "rank of vo at 5 % removed"


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": [4, 2, 1], "widths": [128, 64, 256], "pairs": ("qk", "v")},
        {"heads": [1], "widths": [1], "grid": 1, "pairs": ("qk",)},
        {"pairs": ("k", "v")},
        {"heads": [8] * 80, "widths": [16] * 80, "pairs": ("vo",), "complete": False},
    ],
)
def test_every_shape_gives_a_valid_svg(shape):
    ET.fromstring(figure_bytes(figure(spectrum_result(**shape)), "svg"))


def test_the_same_result_gives_the_same_svg():
    first, second = (
        figure_bytes(figure(spectrum_result(pairs=("qk", "v"))), "svg") for _ in range(2)
    )
    assert first == second


def test_an_incomplete_run_says_so():
    drawing = figure(spectrum_result(complete=False))
    assert drawing.axes[0].get_title().endswith("(incomplete)")
