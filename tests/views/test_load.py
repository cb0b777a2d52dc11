"""The report of a load."""

import json

from kvprof.records.fold import result_of
from kvprof.views.load import report
from kvprof.views.page import render_text
from tests.records.load_stream import load_stream

RESULT = result_of(load_stream())


def text_of(result):
    return " ".join(render_text(report(result), 100).split())


def test_where_a_method_is_faster_at_some_rates_only_they_are_named():
    result = json.loads(json.dumps(RESULT))
    pays = next(m for m in result["data"]["methods"] if m["method"] == "fdc")["pays"]
    pays["from_rate"] = None
    pays["ratios"] = [
        {"rate": 1.0, "ratio": 0.9, "interval": [0.85, 0.95], "count": 90},
        {"rate": 2.0, "ratio": 0.9, "interval": [0.7, 1.1], "count": 90},
    ]
    assert "fdc is surely faster than full only at 1/s; latency per token" in text_of(result)
    pays["ratios"] = pays["ratios"][1:]
    assert "fdc is at no measured rate surely faster than full" in text_of(result)
