import xml.etree.ElementTree as ElementTree

import pytest

from kvprof.reproduction.ledger import ledger_data
from kvprof.views.export import page_html, page_markdown
from kvprof.views.ledger import ledger, setting_words
from kvprof.views.page import render_text
from kvprof.views.recipe import model_words, ratios_of, report, verdict_words
from tests.views.synthetic_recipe import recipe_entry, recipe_result

RESULT = recipe_result()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_has_claimed_measured_interval_and_verdict(width: int) -> None:
    text = render_text(report(RESULT, width, colour=False), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "4 recipes: 1 reproduced, 1 reproduced in direction, 1 not reproduced" in flat
    assert "0.9700" in flat
    assert "[0.9500, 0.9900]" in flat
    for verdict in ("REPRODUCED", "NOT REPRODUCED", "CANNOT BE JUDGED HERE"):
        assert verdict in flat
    assert "fdc-table-10: it needs a GPU" in flat


def test_the_wide_table_says_what_must_hold_with_the_tolerance() -> None:
    flat = " ".join(render_text(report(RESULT, 140, colour=False), 140).split())
    assert "0.95 share of accuracy; ≥ 0.94" in flat
    assert "open: limit inside the interval" in flat


def test_a_ratio_is_over_what_was_published() -> None:
    (ratio,) = ratios_of(recipe_entry("a", "reproduced"))
    assert ratio.value == pytest.approx(0.97 / 0.95)
    assert (ratio.low, ratio.high) == (1, 1)
    assert ratio.interval == pytest.approx((0.95 / 0.95, 0.99 / 0.95))
    ranged, limit = ratios_of(RESULT["data"]["entries"][1])
    assert (ranged.low, ranged.high) == pytest.approx((0.93 / 0.95, 0.97 / 0.95))
    assert (limit.stated, limit.high / limit.low) == (False, 2)


def test_what_holds_by_construction_is_told_from_a_finding() -> None:
    line = recipe_entry("a", "reproduced")["lines"][0]
    made = {**line, "by_construction": "a count of bytes"}
    alone = recipe_entry("a", "reproduced", lines=[made])
    assert verdict_words(alone) == "reproduced, by construction"
    assert verdict_words(recipe_entry("a", "reproduced", lines=[made, line])) == "reproduced"
    # What fails or is open adds nothing to what holds.
    fails = {**line, "holds": False}
    mixed = recipe_entry("a", "reproduced in direction", lines=[made, fails])
    assert verdict_words(mixed) == "reproduced in direction, by construction"
    assert verdict_words(recipe_entry("a", "not reproduced", lines=[fails])) == "not reproduced"
    result = {**RESULT, "data": ledger_data([alone, recipe_entry("b", "reproduced")])}
    text = page_markdown("Ledger", ledger(result))
    assert "2 recipes: 2 reproduced (1 by construction)." in text
    assert "kept: a count of bytes" in text
    assert "holds by construction" in text


def test_a_published_number_in_another_unit_is_no_reference() -> None:
    line = recipe_entry("a", "reproduced")["lines"][0]
    percent = {**recipe_entry("a", "reproduced")["published"][0], "value": 81.9}
    (ratio,) = ratios_of(recipe_entry("a", "reproduced", published=[percent]))
    assert not ratio.stated
    assert ratio.value == pytest.approx(line["measured"] / line["limit"][0])


def test_what_has_no_ratio_has_none_drawn() -> None:
    line = {**recipe_entry("a", "reproduced")["lines"][0], "measured": -1.0}
    assert ratios_of(recipe_entry("a", "reproduced", lines=[line])) == []
    for interval in ([-0.1, 1.2], [0.0, 1.2], [1e-300, 1.2], [0.5, 1e300]):
        line = {**recipe_entry("a", "reproduced")["lines"][0], "interval": interval}
        (ratio,) = ratios_of(recipe_entry("a", "reproduced", lines=[line]))
        assert ratio.interval is None


def test_what_is_not_reproduced_says_what_ran_at_the_papers_setting() -> None:
    cell = recipe_entry("a", "not reproduced")["cells"][0]
    commands = (
        "kvprof eval m --method palu:paper-3bit,kq:grid=32,minimum=8 --option window=0 --rate 0.5",
        "kvprof frontier m --methods fdc:paper+kvquant,kvquant --calibrate-tokens 16k",
    )
    papers = [{"name": name, "differs": []} for name in ("fdc:paper", "palu:paper")]
    cells = [{**cell, "command": command} for command in commands]
    entry = recipe_entry("a", "not reproduced", papers=papers, cells=cells)
    said = setting_words(entry)
    assert said == (
        "At the paper's setting: fdc:paper, palu:paper. The commands add "
        "--option window=0, --calibrate-tokens 16k. At kvprof's: kq, kvquant."
    )
    for verdict, shown in (("not reproduced", True), ("reproduced", False)):
        result = {**RESULT, "data": ledger_data([{**entry, "verdict": verdict}])}
        text = page_markdown("Ledger", ledger(result)).replace("\\", "")
        assert (said in text) is shown
    bench = {**cell, "command": "kvprof bench --methods full,fdc:no-balancing --rate 0.6"}
    assert setting_words(recipe_entry("a", "not reproduced", cells=[bench])) == (
        "At the paper's setting: no method. At kvprof's: full, fdc:no-balancing."
    )
    spectrum = {**cell, "command": "kvprof spectrum m --tokens 64k"}
    assert "no method takes part" in setting_words(
        recipe_entry("a", "not reproduced", cells=[spectrum])
    )


def test_the_ledger_as_pages() -> None:
    text = page_markdown("Ledger", ledger(RESULT))
    assert "## FDC, Table 7: not reproduced" in text
    assert "| 0.93 to 0.97 share of accuracy | Llama-3.1-8B | Table 7, row FDC |" in text
    pytest.importorskip("matplotlib")
    page = page_html("Ledger", "Ledger", ledger(RESULT), "now")
    drawn = page.split("<svg")[1:]
    assert len(drawn) == 3
    for svg in drawn:
        ElementTree.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")


def test_a_ledger_of_several_runs_says_what_ran_where_and_keeps_a_recipe_together() -> None:
    small = {"profile": "small", "machine": "an H200", "created": "2025-11-23T12:00:00Z"}
    entries = [
        recipe_entry("a", "reproduced"),
        recipe_entry("b", "not reproduced"),
        recipe_entry("c", "cannot be judged here", lines=[], cells=[]),
        recipe_entry("a", "not reproduced", **small),
        recipe_entry("b", "reproduced", **{**small, "created": "2025-11-22T12:00:00Z"}),
    ]
    text = page_markdown("Ledger", ledger({**RESULT, "data": ledger_data(entries)}))
    assert "3 recipes, 5 verdicts: 2 reproduced" in text
    # The order in which the runs are read does not matter where one is longer.
    turned = ledger_data([*entries[3:], *entries[:3]])
    assert page_markdown("Ledger", ledger({**RESULT, "data": turned})) == text
    assert "- profile smoke: 2 of the recipes ran, a CPU, 2 threads, 2025-11-21" in text
    assert "- profile small: 2 of the recipes ran, an H200, 2025-11-22 to 2025-11-23" in text
    assert "| FDC | smoke | – | 1 | 0 | 1 | 1 |" in text
    assert "| FDC | small | – | 1 | 0 | 1 | 0 |" in text
    rows = [line for line in text.splitlines() if line.startswith("| Table 7 |")]
    assert [row.split(" | ")[1:3] for row in rows] == [
        ["a", "smoke"],
        ["a", "small"],
        ["b", "smoke"],
        ["b", "small"],
        ["c", "smoke"],
    ]


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (["frontier smollm2 --methods kq", "eval smollm2 --method kq"], "smollm2"),
        (["eval reference --method fdc", "spectrum meta/llama"], "reference, meta/llama"),
        (["bench --jct --composed --model Llama-3.1-8B"], "shape of Llama-3.1-8B"),
        (["bench --jct --real --model smollm2"], "smollm2"),
        (["bench --jct --real --methods full"], "reference"),
        (["bench --seq 1k", "plan --rate 0.5"], "–"),
        ([], "–"),
    ],
)
def test_a_verdict_says_which_model_it_rests_on(commands: list[str], said: str) -> None:
    entry = recipe_entry("a", "reproduced")
    cell = entry["cells"][0]
    entry["cells"] = [{**cell, "command": f"kvprof {command}"} for command in commands]
    assert model_words(entry) == said


def test_models_stand_beside_each_other_in_the_ledger() -> None:
    first = recipe_entry("fdc-table-7", "not reproduced")
    second = recipe_entry("fdc-table-7", "reproduced", settings={"model": "smollm2"})
    for entry, model in ((first, "reference"), (second, "smollm2")):
        entry["cells"] = [{**entry["cells"][0], "command": f"kvprof eval {model} --method fdc"}]
    result = {**RESULT, "data": ledger_data([first, second])}
    text = page_markdown("Ledger", ledger(result))
    assert "| Table 7 | fdc-table-7 | smoke | reference | not reproduced |" in text
    assert "| Table 7 | fdc-table-7 | smoke | smollm2 | reproduced |" in text
    assert "| FDC | smoke | smollm2 | 1 | 0 | 0 | 0 |" in text
    assert "- profile smoke with --model smollm2: 1 of the recipes ran" in text
    assert "(fdc-table-7, profile smoke, on smollm2)" in text
    assert "versions 3 and 2 of one preprint (arXiv 2408.04107)" in text
    # A model's profiles stand together, whichever run was the longer.
    smaller = {**second, "profile": "smoke", "machine": "a CPU"}
    larger = {**second, "profile": "small", "machine": "an H200"}
    other = {**larger, "recipe": "fdc-table-8"}
    of_three = {**RESULT, "data": ledger_data([larger, other, first, smaller])}
    rows = [
        line.split(" | ")[2:4]
        for line in page_markdown("Ledger", ledger(of_three)).splitlines()
        if line.startswith("| Table 7 | fdc-table-7 |")
    ]
    assert rows == [["smoke", "reference"], ["smoke", "smollm2"], ["small", "smollm2"]]
    flat = " ".join(render_text(report(result, 80, colour=False), 80).split())
    assert "- fdc-table-7 on reference: A small model. - fdc-table-7 on smollm2: A small" in flat
