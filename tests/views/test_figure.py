import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvprof.errors import LackingError, UsageError
from kvprof.report.blocks import Curves, HeatMap
from kvprof.report.figure import drawn as figure_of
from kvprof.views.figure import draw_map, figure_bytes, new_figure
from kvprof.views.plot import Series

TOKENS = [1024, 2048, 4096]
CURVES = [
    Series("prose", TOKENS, [1.5, None, 1.1], [1.4, None, 1.0], [1.6, None, 1.2]),
    Series("code", TOKENS, [1.0, 0.9, 0.0]),
]


def drawn():
    return figure_of(Curves(CURVES, "", "tokens", "ratio", log_x=True, log_y=True), "T")


def test_svg_is_valid_and_the_same_every_time():
    first, second = figure_bytes(drawn(), "svg"), figure_bytes(drawn(), "svg")
    assert first == second
    root = ET.fromstring(first)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert b"<dc:date>" not in first


def test_png_is_valid_and_the_same_every_time():
    first = figure_bytes(drawn(), "png", dpi=60)
    assert first == figure_bytes(drawn(), "png", dpi=60)
    assert first.startswith(b"\x89PNG\r\n\x1a\n")
    assert first[-8:-4] == b"IEND"


def test_layouts_that_a_user_has_set_change_no_figure():
    import matplotlib

    own = figure_bytes(drawn(), "svg")
    for name in ("figure.autolayout", "figure.constrained_layout.use"):
        figure = drawn()
        with matplotlib.rc_context({name: True}):
            assert figure_bytes(figure, "svg") == own


def test_token_axis_and_gaps():
    axes = drawn().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "2k", "4k"]
    prose, code = axes.get_lines()
    assert prose.get_ydata()[0] == 1.5
    assert prose.get_ydata()[1] != prose.get_ydata()[1]
    assert code.get_ydata()[2] != code.get_ydata()[2]  # zero has no place on a log axis


def test_map_says_its_figures_and_leaves_absent_heads_out():
    axes = new_figure(3, 3).subplots()
    draw_map(axes, HeatMap([[16, 32], [48], [None, 96]], ""), title="ranks")
    texts = {tuple(map(round, t.get_position())): t.get_text() for t in axes.texts}
    assert texts == {(0, 0): "16", (1, 0): "32", (0, 1): "48", (1, 2): "96"}


def test_a_map_of_powers_has_a_log_scale_and_names():
    axes = new_figure(3, 3).subplots()
    chart = HeatMap([[1e-7, 1e-1], [0.0, 1e-2]], "", names=("k", "v"), columns="side", log=True)
    image = draw_map(axes, chart, title="costs")
    assert (image.norm.vmin, image.norm.vmax) == (pytest.approx(1e-5), 1e-1)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["k", "v"]
    assert axes.get_xlabel() == "side"


def test_unknown_format():
    with pytest.raises(UsageError, match="'pdf' is unknown; choose from svg, png"):
        figure_bytes(drawn(), "pdf")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LackingError, match=r"-m pip install .*matplotlib"):
        new_figure(1, 1)


def test_views_load_without_matplotlib_plotext_torch_or_textual():
    code = (
        "import sys, kvprof.report.spectrum, kvprof.report.terminal\n"
        "print([m for m in ('matplotlib', 'plotext', 'torch', 'textual', 'transformers')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("rc", [b"text.usetex: True\nfont.size: 40\nno.such: key\n", b"\xff\xfe"])
def test_a_matplotlibrc_of_the_folder_counts_for_nothing(tmp_path: Path, rc: bytes) -> None:
    (tmp_path / "matplotlibrc").write_bytes(rc)
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.views.test_figure import drawn
from kvprof.views.figure import figure_bytes
sys.stdout.buffer.write(figure_bytes(drawn(), "svg"))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stderr == b""
    assert done.stdout == figure_bytes(drawn(), "svg")
