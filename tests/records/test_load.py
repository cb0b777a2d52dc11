"""Events of a load into its result: a queue whose largest rate is known."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvprof.records.compare import compare
from kvprof.records.event_lines import event_from
from kvprof.records.events import LoadRateFinished, LoadRequest, event_line
from kvprof.records.fold import result_of
from kvprof.records.journal import EVENTS_NAME, read_events
from kvprof.records.load import SHED, LoadFold
from kvprof.records.load_names import load_case
from kvprof.records.load_served import is_beyond, is_within, largest
from kvprof.records.schema import validate_result
from tests.records.load_stream import METHODS, load_result, load_stream
from tests.records.streams import write

EVENTS = load_stream()
RESULT = load_result()


def row(case, result=RESULT):
    return next(one for one in result["data"]["rates"] if one["case"] == case)


def method(name, result=RESULT):
    return next(one for one in result["data"]["methods"] if one["method"] == name)


#: Served so fast that nobody waits, and few requests tell that.
SHORT = "in=2k,out=2"


def capacity(name):
    slots, token, context = METHODS[name]
    return slots / (51 * (token + context * 2048))


def test_the_result_passes_the_schema_and_comes_back_from_disk(tmp_path):
    validate_result(RESULT)
    path = write(tmp_path / EVENTS_NAME, EVENTS)
    assert result_of(read_events(path).events) == RESULT
    assert [event_from(event_line(event)) for event in EVENTS] == EVENTS


def test_latencies_are_those_of_the_requests_in_the_window():
    one = row("full @ 2/s")
    events = [e for e in EVENTS if isinstance(e, LoadRequest) and e.case == "full @ 2/s"]
    begin, end = one["window"]
    counted = [e for e in events if begin <= e.arrival <= end]
    assert one["counted"] == len(counted)
    latency = [(e.last - e.arrival) / e.tokens for e in counted]
    assert one["normalised_latency_seconds"]["mean"] == pytest.approx(np.mean(latency))
    assert one["normalised_latency_seconds"]["p50"] == pytest.approx(np.median(latency))
    assert one["ttft_seconds"]["mean"] == pytest.approx(
        np.mean([e.first - e.arrival for e in counted])
    )
    step = METHODS["full"][1] + METHODS["full"][2] * 2048
    assert one["tpot_seconds"]["p90"] == pytest.approx(step)
    assert one["longest_gap_seconds"]["mean"] == pytest.approx(step)
    inside = sum(begin <= e.last < end for e in events)
    assert one["completed_per_s"] == pytest.approx(inside / (end - begin))
    assert one["tokens_per_s"] == pytest.approx(200 * one["completed_per_s"], rel=0.15)


def test_the_largest_rate_is_the_last_below_what_the_slots_give():
    assert 8 < capacity("full") < 20 < capacity("fdc") < 48
    many = load_stream(rates=(8.0, 20.0, 48.0), requests=4000, lengths="in=2k,out=50", objective={})
    sure = result_of(many)
    for name, within, beyond in (("full", 8.0, 20.0), ("fdc", 20.0, 48.0)):
        own = method(name, sure)
        assert own["largest_rate"] == within
        assert own["largest_rate_interval"] == [within, beyond]
        assert own["limited_by"] == "queue"
        growth = row(f"{name} @ {beyond:g}/s", sure)
        assert growth["grows"] is True
        low, high = growth["growth_per_s_interval"]
        assert low <= beyond - capacity(name) <= high
        # What ever more requests wait for has no mean; what is served has one.
        served = row(f"{name} @ {within:g}/s", sure)["ttft_seconds"]
        assert growth["ttft_seconds"]["mean_interval"] is None
        assert served["mean_interval"][0] <= served["mean"] <= served["mean_interval"][1]
    assert method("fdc", sure)["ratio"] == 2.5
    assert method("fdc", sure)["ratio_interval"] == [1.0, 6.0]
    assert method("full")["pays"] is None


@pytest.mark.parametrize(
    ("own", "other", "ratio", "interval"),
    [
        ("ss", "sss", None, [None, None]),
        ("sss", "sss", 1.0, [None, None]),
        ("ssss", "sss", None, [None, None]),
        ("ss", "ssg", None, [0.5, None]),
        ("ssg", "ss", None, [None, 2.0]),
        ("s", "ssg", None, [0.25, None]),
        ("sssg", "s", None, [None, 8.0]),
        ("sss", "suu", None, [None, None]),
        ("suu", "sss", None, [None, None]),
        ("ssg", "sg", 2.0, [1.0, 4.0]),
        ("sss", "sg", 4.0, [2.0, None]),
    ],
)
def test_a_rate_whose_end_nobody_saw_has_no_ratio_to_a_larger_one(own, other, ratio, interval):
    """Of rates of 1, 2, 4 …: steady, growing, or still filling the system.

    An interrupted load, of which one method has fewer rates, tells of no smaller capacity.
    """

    def rows(states):
        none = {"attained_share": None, "attained_share_interval": None, "objective_share": 0.9}
        known = {"complete": True, "failed": 0, "requests": 100, **none}
        grows = {"s": False, "g": True, "u": None}
        return [
            {**known, "rate": 2**place, "grows": grows[state], "settled": state != "u"}
            for place, state in enumerate(states)
        ]

    found = largest(rows(own), rows(other))
    assert (found["ratio"], found["ratio_interval"]) == (ratio, interval)


def test_an_objective_ends_what_the_queue_does_not():
    limits = {"share": 0.9, "tpot_seconds": 1e-3}
    strict = result_of(load_stream(rates=(0.5, 1.0), lengths=SHORT, objective=limits))
    own = method("full", strict)
    assert (own["largest_rate"], own["limited_by"]) == (None, "objective")
    assert own["largest_rate_interval"] == [None, 0.5]
    assert row("full @ 1/s", strict)["goodput_per_s"] == 0
    limits = {"share": 0.9, "tpot_seconds": 1.0}
    loose = result_of(load_stream(rates=(0.5, 1.0), lengths=SHORT, objective=limits))
    own = method("full", loose)
    assert (own["largest_rate"], own["limited_by"]) == (1.0, None)
    assert own["largest_rate_interval"] == [1.0, None]
    one = row("full @ 1/s", loose)
    assert one["goodput_per_s"] == pytest.approx(one["arrived_per_s"])


def test_a_request_that_failed_is_within_no_objective_and_has_no_latency():
    result = result_of(load_stream(rates=(1.0,), fails=(20, 21, 22)))
    one = row("full @ 1/s", result)
    assert one["failures"] == {"timeout": 3}
    assert (one["failed"], one["answered"]) == (3, 117)
    assert one["attained_share"] == pytest.approx(1 - 3 / one["counted"])
    assert one["normalised_latency_seconds"]["count"] == one["counted"] - 3
    validate_result(result)


@pytest.mark.parametrize("failure", SHED)
def test_requests_that_a_server_sheds_are_no_queue_and_no_failures(failure):
    third = range(0, 120, 3)
    lost = load_stream(rates=(1.0,), fails=third, objective={}, failure="timeout")
    assert row("full @ 1/s", result_of(lost))["grows"] is True
    shedding = load_stream(rates=(1.0,), fails=third, objective={}, failure=failure, lengths=SHORT)
    result = result_of(shedding)
    validate_result(result)
    one = row("full @ 1/s", result)
    assert one["grows"] is not True
    assert (one["shed"], one["failed"], one["failures"]) == (40, 0, {})
    assert one["growth_per_s"] == pytest.approx(0, abs=0.1)
    # Without an objective nothing else says that a third was not served.
    own = method("full", result)
    assert (own["largest_rate"], own["limited_by"]) == (None, "shed")
    assert own["largest_rate_interval"] == [None, 1.0]


def test_one_request_in_hundreds_that_is_shed_ends_no_sweep():
    result = result_of(load_stream(rates=(1.0,), fails=(50,), objective={}, failure="HTTP 503"))
    assert row("full @ 1/s", result)["shed"] == 1
    assert method("full", result)["largest_rate"] == 1.0


def test_requests_that_fail_are_no_queue_and_end_what_is_served():
    third = range(0, 120, 3)
    result = result_of(
        load_stream(
            rates=(1.0, 2.0), fails=third, objective={}, failure="server error", lengths=SHORT
        )
    )
    validate_result(result)
    one = row("full @ 1/s", result)
    assert one["grows"] is not True
    assert (one["shed"], one["failures"]) == (0, {"server error": 40})
    own = method("full", result)
    assert (own["largest_rate"], own["limited_by"]) == (None, "failures")
    assert own["largest_rate_interval"] == [None, 1.0]


@pytest.mark.parametrize(("failed", "sure"), [(1, 1.0), (3, None)])
def test_few_failures_end_no_sweep_and_leave_it_open(failed, sure):
    lost = range(50, 50 + failed)
    stream = load_stream(rates=(1.0,), fails=lost, objective={}, failure="abort", lengths=SHORT)
    own = method("full", result_of(stream))
    assert (own["largest_rate"], own["limited_by"]) == (1.0, None)
    # One of 120 is less than a hundredth; three may be of a hundredth, by chance.
    assert own["largest_rate_interval"] == [sure, None]


def test_answers_that_are_well_short_are_told():
    def with_share(share):
        return result_of(
            replace(event, tokens=round(share * event.output))
            if isinstance(event, LoadRequest) and event.tokens and "full" in event.case
            else event
            for event in EVENTS
        )["warnings"]

    (said,) = (one for one in with_share(0.5) if "answers have" in one)
    assert said.startswith("full: answers have 50 % of the requested tokens")
    assert not [one for one in (*with_share(1.0), *with_share(0.95)) if "answers have" in one]


def test_a_rate_that_did_not_end_is_kept_and_not_judged():
    result = result_of(load_stream(rates=(1.0, 2.0), ends=False))
    validate_result(result)
    assert not result["complete"]
    one = row("fdc @ 2/s", result)
    assert (one["complete"], one["reason"]) == (False, "it had not ended")
    assert one["counted"] > 0
    assert method("fdc", result)["largest_rate"] == 1.0
    assert [r["rate"] for r in method("fdc", result)["pays"]["ratios"]] == [1.0]


def test_where_time_goes_adds_up_to_the_engines_own_end():
    parts = row("full @ 6/s")["parts"]
    named = sum(parts[f"{name}_seconds"] for name in ("waiting", "prefill", "decode", "elsewhere"))
    assert named == pytest.approx(parts["end_to_end_seconds"])
    assert parts["waiting_seconds"] > row("full @ 1/s")["parts"]["waiting_seconds"]
    assert parts["preempted_seconds"] is None


def quicker_engines(events, seconds, more=0):
    """Let engines count `seconds` less of each request's time, all of it waiting; and of others."""
    found = []
    for event in events:
        if isinstance(event, LoadRateFinished):
            engine = dict(event.engine)
            whole = seconds * engine["requests"]
            engine["waiting"] = max(0.0, engine["waiting"] - whole)
            engine["end_to_end"] -= whole
            engine["requests"] += more
            event = replace(event, engine=engine)
        found.append(event)
    return found


def test_what_clients_wait_beside_the_engine_is_told():
    parts = row("full @ 6/s")["parts"]
    assert parts["outside_seconds"] == 0
    requests = [e for e in EVENTS if isinstance(e, LoadRequest) and e.case == "full @ 6/s"]
    waited = np.mean([one.last - one.arrival for one in requests])
    seconds = 0.6 * parts["waiting_seconds"]
    quicker = quicker_engines(EVENTS, seconds)
    beside = result_of(quicker)
    validate_result(beside)
    one = row("full @ 6/s", beside)
    assert one["parts"]["outside_seconds"] == pytest.approx(seconds)
    assert one["parts"]["end_to_end_seconds"] == pytest.approx(waited - seconds)
    served = ("largest_rate", "largest_rate_interval", "limited_by")
    assert [method("full", beside)[name] for name in served] == [method("full")[n] for n in served]
    # Where others ask the same server, or a request failed, nobody knows what these waited.
    others = row("full @ 6/s", result_of(quicker_engines(EVENTS, seconds, more=1)))
    first = requests[0]
    failed = [replace(e, failure="timeout") if e is first else e for e in quicker]
    lost = row("full @ 6/s", result_of(failed))
    assert lost["failed"] == 1
    for unknown in (others, lost):
        assert unknown["parts"]["outside_seconds"] is None


def test_from_which_rate_a_method_pays():
    pays = method("fdc")["pays"]
    # fdc is slower a token by itself, and has twice the slots.
    assert [one["rate"] for one in pays["ratios"]] == [1.0, 2.0, 6.0, 12.0]
    assert pays["ratios"][0]["ratio"] > 1
    assert pays["ratios"][2]["interval"][1] < 1
    assert pays["from_rate"] == 6.0
    never = result_of(load_stream(rates=(0.5, 1.0)))
    assert method("fdc", never)["pays"]["from_rate"] is None


@pytest.mark.parametrize("rate", [2, 6, 12])
def test_ratios_are_those_of_the_means_over_requests_that_both_served(rate):
    found = {}
    for name in ("fdc", "full"):
        begin, end = row(f"{name} @ {rate}/s")["window"]
        found[name] = {
            one.number: one
            for one in EVENTS
            if isinstance(one, LoadRequest)
            and one.case == load_case(name, rate)
            and begin <= one.arrival <= end
        }
    both = sorted(found["fdc"].keys() & found["full"].keys())
    (own,) = (one for one in method("fdc")["pays"]["ratios"] if one["rate"] == rate)
    assert own["count"] == len(both)
    figures = {
        "ttft": lambda one: one.first - one.arrival,
        "tpot": lambda one: (one.last - one.first) / (one.tokens - 1),
    }
    for key, figure in figures.items():
        mine, theirs = (np.mean([figure(found[name][n]) for n in both]) for name in found)
        assert own[f"{key}_ratio"] == pytest.approx(mine / theirs)
        low, high = own[f"{key}_ratio_interval"]
        assert low - 1e-9 <= own[f"{key}_ratio"] <= high + 1e-9


def test_rows_are_within_beyond_or_open():
    base = {"complete": True, "grows": False, "attained_share": 0.95}
    assert is_within(base, 0.9)
    assert is_beyond(base | {"attained_share_interval": [0.91, 0.97]}, 0.9) is False
    assert is_beyond(base | {"attained_share_interval": [0.85, 0.97]}, 0.9) is None
    assert is_beyond(base | {"attained_share_interval": [0.5, 0.8]}, 0.9) is True
    assert is_beyond(base | {"attained_share_interval": None, "grows": None}, 0.9) is None
    assert not is_within(base | {"grows": True}, 0.9)
    assert not is_within(base | {"complete": False}, 0.9)


def test_a_case_that_begins_again_replaces_what_was_there():
    fold = LoadFold()
    case = load_case("full", 1.0)
    own = [event for event in EVENTS if getattr(event, "case", None) == case]
    for event in [*own[:50], *own]:
        fold.add(event)
    assert len(fold.cases[case].requests) == 120


def test_two_loads_are_compared_rate_by_rate():
    other = result_of(load_stream(methods=("full", "fp8")))
    data = compare([RESULT, other], ["a", "b"])
    keys = {json.dumps(one["key"], sort_keys=True) for one in data["rows"]}
    assert any('"rate": 2.0' in key for key in keys)
    assert {one["figure"] for one in data["rows"]} >= {"ttft_seconds", "largest_rate"}
    assert all('"fdc"' not in key for key in keys)


@pytest.mark.parametrize(("requests", "told"), [(99, False), (100, True)])
def test_how_late_one_in_a_hundred_is_takes_a_hundred_requests_to_tell(requests, told):
    few = result_of(load_stream(methods=("full",), rates=(2.0,), requests=requests))
    late = row("full @ 2/s", few)["lateness_seconds"]
    assert (late["p99"] is not None) is told
    assert late["most"] is not None
    validate_result(few)
