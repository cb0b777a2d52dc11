import math

import pytest

from kvprof.views.page import render_text
from kvprof.views.plot import LinePlot, Series, line_plot

DIMS = range(1, 129)
CURVES = [
    Series("qk", DIMS, [math.exp(-x / 20) for x in DIMS], method="full"),
    Series("vo", DIMS, [math.exp(-x / 50) for x in DIMS], method="fp8"),
    Series("k", DIMS, [0.5 for _ in DIMS], method="full+mine"),
]


def draw(series, width=80, **options):
    options = {"title": "T", "x_label": "dimension", "y_label": "σ", "colour": False, **options}
    return line_plot(series, width=width, **options)


def canvas(text):
    """Rows between the y label and the x axis, without the gutter."""
    rows = text.plain.splitlines()
    cut = next(row for row in rows if "└" in row).index("└")
    return [row[cut + 1 :] for row in rows if "│" in row or "┤" in row]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("log_y", [False, True])
def test_no_line_is_wider_than_asked(width, log_y):
    lines = draw(CURVES, width, log_y=log_y).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) >= width - 2


def test_monochrome_has_no_style_and_colour_only_adds():
    plain, coloured = draw(CURVES), draw(CURVES, colour=True)
    assert plain.spans == []
    assert plain.plain == coloured.plain
    assert len({str(span.style) for span in coloured.spans if span.style != "bold"}) == 3


def test_each_curve_has_markers_of_its_own_in_canvas_and_legend():
    text = draw(CURVES)
    rows = "".join(canvas(text))
    for sign, label in (("●", "qk"), ("▲", "vo"), ("■", "k")):
        assert rows.count(sign) >= 4
        assert f"{sign} {label}" in text.plain.splitlines()[-1]


def test_a_point_stands_where_its_value_is():
    rows = canvas(draw([Series("a", [0, 10], [0.0, 1.0])], height=12))
    assert rows[0].rstrip().index("●") == 80 - len("0.5┤") - 1
    assert rows[-1].index("●") == 0


def test_log_axes_are_logarithmic():
    tokens = [1024, 2048, 4096]
    rows = canvas(draw([Series("a", tokens, [1.0, 0.1, 0.01])], log_x=True, log_y=True, height=15))
    places = sorted((row.index("●"), y) for y, row in enumerate(rows) if "●" in row)
    (x0, y0), (x1, y1), (x2, y2) = places
    assert abs((x1 - x0) - (x2 - x1)) <= 1
    assert abs((y1 - y0) - (y2 - y1)) <= 1


def test_counts_on_a_log_axis():
    tokens = [1024 * 2**i for i in range(6)]
    axis = draw([Series("prose", tokens, [1.0] * 6)], log_x=True).plain.splitlines()[-3]
    assert axis.split() == ["1k", "2k", "4k", "8k", "16k", "32k"]


def test_gaps_are_not_bridged():
    values = [1.0 if x < 20 or x > 100 else None for x in DIMS]
    row = next(row for row in canvas(draw([Series("a", DIMS, values)])) if "●" in row)
    assert " " * 40 in row


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("values", [[3.0], [3.0] * 5, [1e-9, 1e-9], [1e9] * 2])
def test_single_points_and_constants(values, log_y):
    text = draw([Series("a", range(1, len(values) + 1), values)], log_y=log_y)
    assert sum(row.count("●") for row in canvas(text)) == len(values)


def test_zero_constant_on_a_linear_axis():
    assert "●" in draw([Series("a", [1, 2], [0.0, 0.0])]).plain


def test_twelve_curves_keep_apart():
    many = [Series(f"s{i}", [1, 2], [i, i + 1]) for i in range(12)]
    legend = draw(many, 60).plain.split("dimension\n")[1]
    signs = [entry.split()[0] for entry in legend.replace("\n", "   ").split("   ")]
    assert len(set(signs)) == 12


def test_ascii_terminal():
    text = draw(CURVES, ascii_only=True, y_label="s").plain
    assert text.isascii()
    for sign in "ox+":
        assert text.count(sign) >= 4


def test_the_renderable_takes_the_consoles_width():
    plot = LinePlot(CURVES, "T", "x", "y", log_y=True)
    for width in (50, 90):
        widest = max(map(len, render_text(plot, width).splitlines()))
        assert width - 2 <= widest <= width


def test_two_plots_do_not_share_state():
    first = draw(CURVES).plain
    draw([Series("other", [5], [7])], width=40, log_x=True)
    assert draw(CURVES).plain == first
