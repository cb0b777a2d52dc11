import xml.etree.ElementTree as ElementTree

import pytest

from kvprof.recipes.ledger import ledger_data
from kvprof.views.export import page_html, page_markdown
from kvprof.views.ledger import ledger, table
from kvprof.views.page import render_text
from kvprof.views.recipe import ratios_of, report
from tests.views.synthetic_recipe import recipe_entry, recipe_result

RESULT = recipe_result()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_has_claimed_measured_interval_and_verdict(width: int) -> None:
    text = render_text(report(RESULT, width, colour=False), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "4 recipes: 1 reproduced, 1 trend only, 1 not reproduced" in flat
    assert "0.9700" in flat
    assert "[0.9500, 0.9900]" in flat
    for verdict in ("REPRODUCED", "NOT REPRODUCED", "NOT TESTABLE HERE"):
        assert verdict in flat
    assert "fdc-table-10: it needs a GPU" in flat


def test_a_ratio_is_over_what_was_published() -> None:
    (ratio,) = ratios_of(recipe_entry("a", "reproduced"))
    assert ratio.value == pytest.approx(0.97 / 0.95)
    assert (ratio.low, ratio.high) == (1, 1)
    assert ratio.interval == pytest.approx((0.95 / 0.95, 0.99 / 0.95))
    ranged, limit = ratios_of(RESULT["data"]["entries"][1])
    assert (ranged.low, ranged.high) == pytest.approx((0.93 / 0.95, 0.97 / 0.95))
    assert (limit.stated, limit.high / limit.low) == (False, 2)


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


def test_the_table_has_the_larger_sample_of_each_model_that_could_test_a_claim() -> None:
    fails = {**recipe_entry("a", "reproduced")["lines"][0], "holds": False, "measured": 0.5}
    entries = [
        recipe_entry("a", "not testable here", model="reference"),
        recipe_entry("a", "reproduced"),
        recipe_entry("a", "not reproduced", profile="small", gpu="an H200", lines=[fails]),
        recipe_entry("a", "reproduced", model="reference", profile="small"),
        recipe_entry("b", "not testable here", model=None, lines=[], cells=[]),
        recipe_entry("c", "reproduced", model="reference"),
    ]
    text = page_markdown("Ledger", table({**RESULT, "data": ledger_data(entries)}))
    rows = [line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| It keeps")]
    assert rows == [
        ["FDC, Table 7", "kept 0.5000, must be ≥ 0.94", "not reproduced", "smollm2", "an H200 |"],
        ["FDC, Table 7", "n/a", "not testable here", "n/a", "n/a |"],
        ["FDC, Table 7", "kept 0.9700, must be ≥ 0.94", "reproduced", "reference", "n/a |"],
    ]
