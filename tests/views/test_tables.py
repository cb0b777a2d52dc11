import pytest

from kvprof.views.page import render_text
from kvprof.views.tables import Column, DataTable, key_values

COLUMNS = (
    Column("name", words=True),
    Column("mean rank of qk"),
    Column("dim_rate with ranks rounded up"),
    Column("lost"),
)
ROWS = [[f"row{i} with some words", f"{i}.5", f"0.{i}23", "12.0–104.7"] for i in range(3)]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_figures_are_whole_and_lines_fit(width):
    text = render_text(DataTable(COLUMNS, ROWS, title="Title"), width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    for row in ROWS:
        assert set(row[1:]) <= set(words)
    for word in " ".join(column.title for column in COLUMNS).split():
        assert any(word in found for found in words)


def test_where_it_does_not_fit_rows_become_blocks():
    assert "mean rank of qk: 1.5\n" in render_text(DataTable(COLUMNS, ROWS), 30)
    assert "mean rank of qk:" not in render_text(DataTable(COLUMNS, ROWS), 60)


def test_no_rows():
    assert "dim_rate" in render_text(DataTable(COLUMNS, []), 80)


def test_names_and_values():
    text = render_text(key_values({"seed": "0", "source": "a b " * 30}), 40)
    assert text.startswith("seed    0\n")
    assert max(map(len, text.splitlines())) <= 40
    assert text.split().count("a") == 30


def test_markup_is_literal():
    assert "[red]" in render_text(key_values({"model": "[red]x"}), 40)
    assert "[bold]" in render_text(DataTable([Column("[bold]", words=True)], [["[/x]"]]), 40)
