"""What tests make up of results is valid whatever the class, and a report shows it."""

from typing import Any

import pytest

from kvprof.records.schema import validate_result
from kvprof.report import report_of
from kvprof.report.terminal import renderable
from kvprof.results import KINDS
from kvprof.results.stability import Step
from kvprof.views.page import render_text
from tests.results.made import made, part

_ONE = {"singular_values": [[[2.0]]], "energy_kept": [[[1.0]]], "effective_rank": [[1.0]]}
#: Without which a result says nothing.
_LEAST: dict[str, Any] = {
    "advise": {"plans": [{}]},
    "plan": {"plan": {"bytes": {"full": 1}}},
    "spectrum": {"pairs": {"k": {**_ONE, "mean": [2.0]}}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_any_kind_is_valid_and_has_a_report(kind: str) -> None:
    result = made(kind, _LEAST.get(kind))
    validate_result(result)
    assert "reference" in render_text(renderable(report_of(result)), 80)


def test_what_is_named_is_kept_and_made_whole_unless_the_class_has_no_such_name() -> None:
    result = made("frontier", {"methods": [{"label": "kq", "points": [{"rate": 0.25}]}]})
    (method,) = result["data"]["methods"]
    assert (method["label"], method["max_rate"], method["max_rates"]) == ("kq", None, {})
    assert method["points"][0] | {"rate": 0.25, "accuracy": 0.5} == method["points"][0]
    assert result["data"]["target"] > 0
    assert part(Step, **{"from": 3}) | {"from": 3, "to": 0} == part(Step, **{"from": 3})
    with pytest.raises(TypeError) as refused:
        made("plan", {"plan": {"rates": 0.5}})
    assert "rates" in str(refused.value)
    assert made("eval", inputs={"more": 1})["inputs"]["more"] == 1
