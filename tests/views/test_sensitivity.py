"""The report of ``kvprof sensitivity`` answers in words what its cells say."""

from typing import Any

from kvprof.views.page import render_text
from kvprof.views.sensitivity import report
from tests.views.synthetic_sensitivity import sensitivity_result


def said(result: dict[str, Any]) -> str:
    return " ".join(render_text(report(result, width=100, colour=False), width=100).split())


def test_it_says_how_many_bits_each_part_needs() -> None:
    result = sensitivity_result()
    # A quarter of 0.01 nats each: 4 bits cost 0.001 and 0.002, 2 bits 0.02 and 0.04.
    whole = "By layer, within an equal share of 0.0100 nats, keys need 4 bits in each of the 2, and"
    assert f"{whole} values need 4 bits in each of the 2." in said(result)
    first, *_, last = result["data"]["needed"]
    first |= {"setting": "2 bits", "bits": 2}
    last |= {"setting": "full", "bits": None}
    told = said(result)
    assert "keys need 2 bits in 1 and 4 bits in 1, and" in told
    assert "values need 4 bits in 1 and more than 4 bits in 1." in told
    for one in result["data"]["needed"]:
        one["kv_head"] = 0
    assert "By head, within" in said(result)


def test_it_says_what_an_attention_sink_explains() -> None:
    result = sensitivity_result()
    told = (
        "An attention sink explains 25 % of the cost at 2 bits: so much less is it with the first"
    )
    assert f"{told} token exact." in said(result)
    result["data"]["first_tokens"] = []
    assert "Whether an attention sink explains the cost was not measured (--exact" in said(result)


def test_layers_that_stay_are_written_as_spans() -> None:
    result = sensitivity_result()
    data = result["data"]
    data["heads"] = [2] * 9
    data["layers"][1]["stay"] = [0, 2, 3, 4, 7, 8]
    assert "At 2 bits layers 0, 2–4, 7, 8 would have to stay." in said(result)
    data["layers"][1]["stay"] = list(range(9))
    assert "At 2 bits layers 0–8 (all) would have to stay." in said(result)


def test_its_maps_are_on_a_log_scale_that_the_legend_names() -> None:
    # Costs of 0.02 and 0.04: the lower one has the lowest bar, the higher one the highest.
    told = said(sensitivity_result())
    assert "log scale: below 0.0218 ▁ ▂ 0.0218" in told
    assert "0.0200▁ 0.0200▁ 1 0.0400█ 0.0400█" in told
