"""The report of a load."""

import json

from kvprof.records.fold import result_of
from kvprof.views.load import report
from kvprof.views.numbers import duration
from kvprof.views.page import render_text
from tests.records.load_stream import load_result, load_stream

RESULT = load_result()


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
    said = text_of(result)
    assert "fdc is significantly faster than full only at 1 req/s, by latency per token" in said
    lost = json.loads(json.dumps(result))
    row = next(r for r in lost["data"]["rates"] if r["case"] == "fdc @ 1/s")
    row["failed"] = row["requests"] // 10
    said_of_lost = text_of(lost)
    assert "fdc is significantly faster than full at no tested rate (too many" in said_of_lost
    # A record of before knows no other ratios.
    assert "req/s latency per token requests" in said
    assert "1 0.900 [0.850, 0.950] 90" in said
    for one in pays["ratios"]:
        one |= {"ttft_ratio": 1.2, "ttft_ratio_interval": [1.1, 1.3]}
        one |= {"tpot_ratio": 0.8, "tpot_ratio_interval": None}
    said = text_of(result)
    assert "req/s latency per token TTFT TPOT requests" in said
    assert "1 0.900 [0.850, 0.950] 1.20 [1.10, 1.30] 0.800 90" in said
    pays["ratios"] = pays["ratios"][1:]
    assert "fdc is significantly faster than full at no tested rate, by" in text_of(result)
    pays["ratios"][0]["interval"] = [1.05, 1.2]
    assert "at no tested rate and significantly slower at 2 req/s" in text_of(result)


def test_a_cost_that_may_be_below_zero_is_not_resolved():
    result = json.loads(json.dumps(RESULT))
    fit = next(m for m in result["data"]["methods"] if m["method"] == "fdc")["fit"]
    fit |= {
        "intercept_seconds": -0.001,
        "intercept_seconds_interval": [-0.003, 0.002],
        "slopes": {
            "context": {"seconds": 2e-7, "seconds_interval": [1e-7, 3e-7]},
            "batch": {"seconds": 1e-3, "seconds_interval": [-1e-4, 2e-3]},
            "prefill": {"seconds": -1e-6, "seconds_interval": None},
        },
        "left_out": [],
    }
    said = text_of(result)
    assert "200 [100, 300] µs per 1,000 context tokens; per-token, per-request" in said


def test_what_passes_beside_the_engine_is_told_where_it_is_much():
    result = json.loads(json.dumps(RESULT))
    assert "outside the engine" not in text_of(result)
    parts = next(r for r in result["data"]["rates"] if r["case"] == "full @ 6/s")["parts"]
    whole = parts["end_to_end_seconds"]
    parts["outside_seconds"] = whole / 3
    of_all = f"{duration(whole / 3)} of a request's {duration(whole * 4 / 3)}"
    said = text_of(result)
    assert f"full @ 6/s: {of_all} are outside the engine: {duration(whole / 3)} client" in said
    assert "front end all client side preemptions" in said
    assert "--api-server-count" not in said
    parts["elsewhere_seconds"] = whole / 2
    assert "--api-server-count" in text_of(result)
    # A record of before knows nothing of what lies outside.
    del parts["outside_seconds"]
    assert "are outside" not in text_of(result)
    parts |= {"elsewhere_seconds": 0.0, "outside_seconds": whole / 20}
    assert "are outside" not in text_of(result)
    parts |= dict.fromkeys(parts, 0.0)
    assert "are outside" not in text_of(result)


def test_requests_that_were_shed_are_told_and_no_growth_of_the_queue():
    events = load_stream(rates=(1.0,), fails=range(0, 120, 3), objective={}, failure="HTTP 503")
    said = text_of(result_of(events))
    assert "full @ 1/s: the server rejected 40 of 120 requests" in said
    assert "full sustained no tested rate: the server sheds requests" in said
    assert "the queue grows;" not in said
    assert " sheds " in said


def test_what_a_method_serves_at_least_is_told_where_the_baseline_serves_no_rate():
    result = json.loads(json.dumps(RESULT))
    full, fdc = (next(m for m in result["data"]["methods"] if m["method"] == name)
                 for name in ("full", "fdc"))  # fmt: skip
    full |= {"largest_rate": None, "largest_rate_interval": [None, 2.0], "limited_by": "objective"}
    fdc |= {"largest_rate": 4.0, "largest_rate_interval": [3.0, None], "limited_by": None}
    fdc |= {"ratio": None, "ratio_interval": [1.5, None]}
    assert "[1.50, n/a]× the rate of full" in text_of(result)
    fdc["ratio_interval"] = [None, 8.0]
    assert "[n/a, 8.00]× the rate of full" in text_of(result)
    fdc["ratio_interval"] = [1.5, 8.0]
    assert "[1.50, 8.00]× the rate of full" in text_of(result)
    fdc["ratio_interval"] = [None, None]
    assert "fdc sustained 4 req/s [3, n/a]," in text_of(result)
