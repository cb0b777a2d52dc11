import pytest

from kvprof.records.events import CaseStarted, PartSample
from kvprof.tui.figures import COLUMNS, LayerFilter, layer_rows
from kvprof.tui.state import RunState


@pytest.fixture
def case():
    state = RunState()
    layers = [
        {"layer": n, "key_ranks": [8 * (4 - n)] * 2, "value_ranks": [16], "nbytes": 100 + n}
        for n in range(4)
    ]
    state.add(CaseStarted(0.0, "c", "fdc", 0.5, 1, 8, 8, layers))
    for n in (0, 2, 3):
        state.add(PartSample(0.0, "c", "decode", "attention", (3 - n) * 1e-3, 1, 8, n))
    return state.cases["c"]


def shown(case, text="", sort="layer", descending=False):
    shown = LayerFilter.parse(text)
    return [row.layer for row in layer_rows(case, sort=sort, descending=descending, shown=shown)]


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("", [0, 1, 2, 3]),
        ("2", [2]),
        ("0-1,3", [0, 1, 3]),
        ("1–2", [1, 2]),
        (" 3 , 0 ", [0, 3]),
        ("k<=16", [2, 3]),
        ("ms>=1,0-1", [0]),
        ("bytes=102", [2]),
        ("V>16", []),
        ("9-12", []),
    ],
)
def test_a_filter_lets_through_what_it_says(case, text, layers):
    assert shown(case, text) == layers


@pytest.mark.parametrize("text", ["x", "ms>", "ms>1.2.3", "rank<3", "1-", "-1", "k<1e999"])
def test_what_is_no_filter_is_said_with_the_way_out(text):
    with pytest.raises(ValueError, match="give layers"):
        LayerFilter.parse(text)


@pytest.mark.parametrize(
    ("sort", "descending", "layers"),
    [
        ("ms", True, [0, 2, 3, 1]),
        ("ms", False, [3, 2, 0, 1]),
        ("K", False, [3, 2, 1, 0]),
        ("layer", True, [3, 2, 1, 0]),
    ],
)
def test_what_was_not_measured_comes_last_either_way(case, sort, descending, layers):
    assert shown(case, sort=sort, descending=descending) == layers


def test_every_column_can_be_filtered_by(case):
    for name in COLUMNS.values():
        assert shown(case, f"{name}>=0")
