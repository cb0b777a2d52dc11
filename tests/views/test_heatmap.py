import random
import re

import pytest

from kvprof.views.page import render_text
from kvprof.views.plot import _BARS, HeatMap


def ranks(layers, heads, low=16, high=128):
    rng = random.Random(0)
    return [[rng.randint(low, high) for _ in range(heads)] for _ in range(layers)]


def whole(value):
    return f"{value:.0f}"


def shown(values, width, **options):
    return render_text(HeatMap(values, "ranks", show=whole, **options), width)


def figures(text, heads):
    """Read the figures back: layer to its list, from any number of blocks side by side."""
    found = {}
    for row in text.splitlines():
        for block in re.findall(rf"(\d+)((?: +\d+[{_BARS}]){{1,{heads}}})", row):
            found[int(block[0])] = [int(x) for x in re.findall(rf"(\d+)[{_BARS}]", block[1])]
    return found


@pytest.mark.parametrize("layers", [1, 6, 17, 80])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_layer_and_head_is_printed(layers, heads, width):
    values = ranks(layers, heads)
    text = shown(values, width)
    assert figures(text, heads) == dict(enumerate(values))
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("layers", [1, 32, 80])
@pytest.mark.parametrize("heads", [20, 32, 64, 96])
@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_folded_map_has_one_bar_per_head(layers, heads, width):
    values = ranks(layers, heads)
    text = shown(values, width)
    assert max(map(len, text.splitlines())) <= width
    body = text.splitlines()[3:-1]
    legend = next(i for i, row in enumerate([*body, "from"]) if row.startswith("from"))
    bars = sum(sum(row.count(bar) for bar in _BARS) for row in body[:legend])
    assert bars == layers * heads


def test_folded_bars_and_summary_are_those_of_the_figures():
    values = [[0, 15, 16, 31, 127, 128] * 5]
    # Eighths of 0 … 128: a bar for every 16.
    text = shown(values, 60)
    row = next(line for line in text.splitlines() if line.startswith("    0 "))
    assert row.split()[1] == "▁▁▂▂██" * 5
    assert row.split()[-3:] == ["0", "53", "128"]
    assert "▂ 16" in text
    assert "to 128" in text
    # With less room the mean alone stays beside the bars.
    narrow = next(line for line in shown(values, 45).splitlines() if line.startswith("    0 "))
    assert narrow.split()[1:] == ["▁▁▂▂██" * 5, "53"]


def test_legend_lower_ends_are_exact():
    values = [list(range(24, 109))]
    text = shown(values, 100)
    legend = dict(re.findall(rf"([{_BARS}]) (\d+)", text.splitlines()[-1]))
    row = "".join(re.findall(rf"[{_BARS}]+", "\n".join(text.splitlines()[2:-1])))
    for bar, low in legend.items():
        assert values[0][row.index(bar)] == int(low)


def test_ragged_layers_and_heads_not_measured():
    text = render_text(HeatMap([[1.0, 2.0, None], [3.5], [0.25, 0.75]], "cost"), 60)
    rows = [line for line in text.splitlines() if re.match(r" +[012] ", line)]
    assert [len(re.findall(rf"[{_BARS}]", row)) for row in rows[-3:]] == [2, 1, 2]
    assert rows[-3].rstrip().endswith("n/a")
    assert "n/a not measured" in text


def test_all_alike_and_nothing():
    assert "all 61" in shown([[61, 61]], 60)
    assert "nothing measured" in shown([[None]], 60)
    assert "nothing measured" in shown([], 60)


def test_a_scale_too_narrow_is_widened():
    assert "from  ▁ 5" in shown([[5, 200]], 80, low=10, high=100)
    assert "to 200" in shown([[5, 200]], 80, low=10, high=100)


def test_names_of_layers():
    text = shown(ranks(2, 2), 60, layers=["first", "the last"])
    assert "   first " in text
    assert "the last " in text


def test_monochrome_differs_from_colour_in_escapes_only():
    values = ranks(6, 4)
    coloured = render_text(HeatMap(values, "ranks", show=whole), 80, colour=True)
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [row.rstrip() for row in stripped.splitlines()] == shown(values, 80).splitlines()


def test_bars_of_a_log_scale_are_equal_factors():
    values = [[10.0 ** -(i / 2) for i in range(8)]]
    text = shown(values, 60, log=True)
    row = next(line for line in text.splitlines() if line.strip().startswith("0 "))
    assert [bar for bar in row if bar in _BARS] == list(reversed(_BARS))


def test_a_log_scale_ends_four_powers_below_the_highest():
    drawn = HeatMap([[1e-12, 0.0, -1e-13, 1.0]], "nats", log=True)
    text = render_text(drawn, 100)
    row = next(line for line in text.splitlines() if line.strip().startswith("0 "))
    assert [bar for bar in row if bar in _BARS] == ["▁", "▁", "▁", "█"]
    assert "log scale: below 0.000316 ▁" in text
    assert "log scale" not in shown([[0.0, 0.0]], 100, log=True)
