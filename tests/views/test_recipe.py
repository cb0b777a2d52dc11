import xml.etree.ElementTree as ElementTree

import pytest

from kvprof.views.export_html import page_html
from kvprof.views.export_md import page_markdown
from kvprof.views.page import render_text
from kvprof.views.recipe import report
from kvprof.views.recipe_ledger import ledger
from kvprof.views.recipe_plot import strips_of
from tests.views.synthetic_recipe import recipe_entry, recipe_result

RESULT = recipe_result()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_has_claimed_measured_interval_and_verdict(width: int) -> None:
    text = render_text(report(RESULT, width, colour=False), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "4 recipes: 1 reproduced, 1 reproduced in direction, 1 not reproduced" in flat
    assert "0.9700" in flat
    assert "[0.9300, 0.9900]" in flat
    for verdict in ("REPRODUCED", "NOT REPRODUCED", "CANNOT BE JUDGED HERE"):
        assert verdict in flat
    assert "fdc-table-10: it needs a GPU" in flat


def test_the_wide_table_says_what_must_hold_with_the_tolerance() -> None:
    flat = " ".join(render_text(report(RESULT, 140, colour=False), 140).split())
    assert "0.95 share of accuracy; ≥ 0.94" in flat
    assert "holds, limit inside the interval" in flat


def test_a_strip_is_over_what_was_published() -> None:
    (strip,) = strips_of(recipe_entry("a", "reproduced"))
    assert strip.value == pytest.approx(0.97 / 0.95)
    assert (strip.low, strip.high) == (1, 1)
    assert strip.interval == pytest.approx((0.93 / 0.95, 0.99 / 0.95))
    ranged, limit = strips_of(RESULT["data"]["entries"][1])
    assert (ranged.low, ranged.high) == pytest.approx((0.93 / 0.95, 0.97 / 0.95))
    assert (limit.stated, limit.high / limit.low) == (False, 2)


def test_a_published_number_in_another_unit_is_no_reference() -> None:
    line = recipe_entry("a", "reproduced")["lines"][0]
    percent = {**recipe_entry("a", "reproduced")["published"][0], "value": 81.9}
    (strip,) = strips_of(recipe_entry("a", "reproduced", published=[percent]))
    assert not strip.stated
    assert strip.value == pytest.approx(line["measured"] / line["limit"][0])


def test_what_has_no_ratio_has_no_strip() -> None:
    line = {**recipe_entry("a", "reproduced")["lines"][0], "measured": -1.0}
    assert strips_of(recipe_entry("a", "reproduced", lines=[line])) == []


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
