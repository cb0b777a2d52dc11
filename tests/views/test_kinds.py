"""Any result again: the very report that its command shows, and pages for those without a shell."""

import re
import xml.etree.ElementTree as ElementTree
from functools import cache

import pytest

from kvprof.records.fold import result_of
from kvprof.records.schema import kinds
from kvprof.report.blocks import Curves, Heading, Table
from kvprof.views.export import blocks_of, to_html, to_markdown
from kvprof.views.kinds import csv_of, figure_of, report
from kvprof.views.page import render_text
from tests.records.load_stream import load_result
from tests.records.sample import benchmark_result
from tests.records.streams import stream
from tests.views.synthetic import spectrum_result
from tests.views.synthetic_advise import advise_result
from tests.views.synthetic_bench import bench_result
from tests.views.synthetic_evaluation import evaluation_result
from tests.views.synthetic_frontier import frontier_result
from tests.views.synthetic_generate import generate_result
from tests.views.synthetic_recipe import recipe_result
from tests.views.synthetic_sensitivity import sensitivity_result
from tests.views.synthetic_stability import stability_result

RESULTS = {
    "bench": bench_result(),
    "benchmark": benchmark_result(),
    "eval": evaluation_result(),
    "frontier": frontier_result(),
    "generate": generate_result(),
    "jct": result_of(stream(steps=6)),
    "load": load_result(),
    "recipe": recipe_result(),
    "sensitivity": sensitivity_result(),
    "advise": advise_result(),
    "spectrum": spectrum_result(),
    "stability": stability_result(counts=(1024, 2048), seeds=2, heads=(2,), targets=("prose",)),
}


@cache
def page_of(kind: str) -> str:
    """Return a result's page, with its figures drawn once."""
    return to_html(RESULTS[kind])


@pytest.mark.parametrize("kind", RESULTS)
def test_a_page_needs_nothing_but_itself(kind: str) -> None:
    pytest.importorskip("matplotlib")
    page = page_of(kind)
    assert f"<h1>kvprof {kind}" in page
    # Addresses may only name namespaces.
    links = set(re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!#)([^\"'\s)>]+)", page))
    assert not {link for link in links if not link.startswith(("#", "data:"))}
    assert "<script" not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("kind", RESULTS)
def test_markdown_tables_have_equally_many_cells(kind: str) -> None:
    text = re.sub(r"^(`{3,})text\n.*?^\1$", "", to_markdown(RESULTS[kind]), flags=re.M | re.S)
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_page_shows_what_the_report_says() -> None:
    pytest.importorskip("matplotlib")
    page = page_of("jct")
    assert page.count("<svg") == 3  # bars, steps, memory
    assert "<th class=w>part (ms)</th>" in page
    assert "Time between tokens by context" in page


@pytest.mark.parametrize("kind", ["eval", "frontier", "jct", "bench"])
def test_a_page_is_dark_in_a_dark_window_and_light_on_paper(kind: str) -> None:
    pytest.importorskip("matplotlib")
    style = page_of(kind).split("<style>")[1].split("</style>")[0]
    screen, paper = style.split("@media print")
    dark = screen.split("@media screen and (prefers-color-scheme: dark)")[1]
    assert "svg { filter: invert(1)" in dark  # figures are drawn on white
    assert "background: var(--ground)" in screen
    # Paper does not scroll: a table is one, and may break its words.
    assert "display: table" in paper
    assert "overflow-x: auto" not in paper


def test_text_of_a_run_cannot_break_out_of_a_page() -> None:
    result = RESULTS["eval"] | {"warnings": ["<script>alert(1)</script> | `x`"]}
    page = to_html(result)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "\\<script\\>alert(1)\\</script\\> \\| \\`x\\`" in to_markdown(result)


def test_blocks_keep_the_order_and_the_kind_of_what_they_show() -> None:
    blocks = blocks_of(report(RESULTS["jct"]))
    headings = [block.text for block in blocks if isinstance(block, Heading)]
    assert headings[0] == "Batch 1, 2k in, 7 out"
    assert headings[-1] == "Warnings"
    assert sum(isinstance(block, Curves) for block in blocks) == 2
    tables = [block for block in blocks if isinstance(block, Table)]
    parts = next(table for table in tables if table.columns[0].title == "part (ms)")
    # However many methods there are, the page has room for one table.
    assert [
        title for title in (one.title for one in parts.columns) if title in ("full", "palu", "fdc")
    ] == ["full", "palu", "fdc"]


def test_kinds_say_what_they_have() -> None:
    with_csv = {kind for kind, result in RESULTS.items() if csv_of(result) is not None}
    with_figure = {kind for kind, result in RESULTS.items() if figure_of(result) is not None}
    drawn = {"bench", "eval", "frontier", "jct", "load", "spectrum", "stability"}
    assert with_csv == drawn | {"advise", "sensitivity"}
    assert with_figure == drawn | {"generate", "sensitivity"}


def test_every_kind_has_a_report() -> None:
    shown = {*RESULTS, "plan", "doctor", "compare"}
    assert shown == set(kinds())


def test_a_load_without_a_stated_memory_says_that_caches_need_not_be_alike() -> None:
    made = RESULTS["load"]
    free = {**made, "inputs": made["inputs"] | {"memory": None}}
    said = "each server sized its own cache"
    texts = [
        " ".join(render_text(report(one, 100, colour=False), 100).split()) for one in (made, free)
    ]
    assert [said in text for text in texts] == [False, True]
