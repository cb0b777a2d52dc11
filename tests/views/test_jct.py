"""The report of job completion time: the parts, their shares, and what a reader must know."""

import copy
import csv
import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from kvprof.records.cases import accounts
from kvprof.records.events import Event, PartSample
from kvprof.records.figures import figures_of
from kvprof.records.fold import result_of
from kvprof.records.parts import PARTS, UNTIMED, part_of
from kvprof.records.schema import validate_result
from kvprof.views.bars import Bar, StackedBars, columns
from kvprof.views.figure import figure_bytes
from kvprof.views.jct import figure, report, to_csv
from kvprof.views.jct_data import (
    byte_unit,
    detailed,
    groups,
    memory_curves,
    step_curves,
    sweep_curves,
    sweeps,
)
from kvprof.views.numbers import duration, signed_percent, unit_of
from kvprof.views.page import render_text
from tests.records.streams import cuts, stream, whole_first

WHOLE = result_of(stream())
SWEEP = result_of(stream(("full", "fdc"), layers=2, steps=3, inputs=(128, 1024, 8192, 65536)))
EXTRA: dict[str, Any] = {
    "requests": {
        "trace": "fdc/arxiv", "count": 200, "seed": 0,
        "ttft": [{"method": "fdc", "mean_seconds": 0.2, "p99_seconds": 0.9}],
        "overheads": [{"method": "fdc", "part": "compress", "p99_share": 0.007}],
    },
}  # fmt: skip


def text(result: dict[str, Any], width: int = 100) -> str:
    return render_text(report(result), width)


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("result", [WHOLE, SWEEP], ids=["request", "sweep"])
def test_no_line_is_wider_than_the_terminal(result: dict[str, Any], width: int) -> None:
    assert max(map(len, text(result, width).splitlines())) <= width


def test_the_answer_comes_first_and_names_the_baseline() -> None:
    first = text(WHOLE, 200).splitlines()[0]
    by_method = {case["method"]: case["jct_seconds"] for case in WHOLE["data"]["cases"]}
    less = 1 - by_method["fdc"] / by_method["full"]
    assert "against full" in first
    assert f"({100 * less:.1f} % less)" in first


def with_intervals(*widths: float | None) -> dict[str, Any]:
    """Return the request with the time of each case known to plus and minus a share of it."""
    result = copy.deepcopy(WHOLE)
    for case, width in zip(result["data"]["cases"], widths, strict=True):
        total = case["jct_seconds"]
        ends = None if width is None else [total * (1 - width), total * (1 + width)]
        case["jct_seconds_interval"] = ends
    return result


def test_a_difference_has_an_interval_where_both_times_have_one() -> None:
    cases = len(WHOLE["data"]["cases"])
    for widths in ([0.1] * cases, [0.02] * cases):
        result = with_intervals(*widths)
        (group,) = groups(result)
        other = next(case for case in group.cases if case is not group.baseline)
        ends = group.apart(other)
        assert ends is not None
        assert group.baseline is not None
        ratio = other["jct_seconds"] / group.baseline["jct_seconds"]
        # Wider than either alone, and not as wide as if both were off to the worst at once.
        width = widths[0]
        assert ratio * (1 - width) / (1 + width) < 1 + ends[0] < ratio * (1 - width)
        assert ratio * (1 + width) < 1 + ends[1] < ratio * (1 + width) / (1 - width)
        assert group.apart(group.baseline) is None
        first = text(result, 200).splitlines()[0]
        assert f" [{signed_percent(ends[0])}, {signed_percent(ends[1])}])" in first


@pytest.mark.parametrize("known", range(len(WHOLE["data"]["cases"])))
def test_a_difference_of_a_single_pass_has_no_interval(known: int) -> None:
    widths: list[float | None] = [None] * len(WHOLE["data"]["cases"])
    widths[known] = 0.1
    shown = text(with_intervals(*widths), 200)
    assert "[" not in shown.splitlines()[0]
    assert "In brackets" not in shown


def test_a_bar_is_as_long_as_its_sum() -> None:
    bar = Bar("x", dict.fromkeys(("attention", "mlp", "host", "norm", "rope"), 1.0))
    assert sum(length for _, length in columns(bar, 10.0, 73)) == round(73 / 2)
    assert columns(Bar("x", {"attention": 1.0, "unattributed": -0.5}), 1.0, 10) == [
        ("attention", 10)
    ]


def test_no_part_is_drawn_longer_than_a_larger_one() -> None:
    """Parts of the recorded run: one of 0.2 s lies where a column begins, one of 9.4 s does not."""
    parts = {
        "attention": 110.7,
        "compress": 9.6,
        "merge": 9.4,
        "schedule": 0.3,
        "embedding": 0.2,
        "norm": 100.4,
        "mlp": 536.4,
    }
    for slots in range(40, 160):
        lengths = dict(columns(Bar("fdc", parts), 1114.0, slots))
        by_size = sorted(parts, key=parts.__getitem__)
        drawn = [lengths[part] for part in by_size]
        assert drawn == sorted(drawn)
        assert sum(drawn) == round(sum(parts.values()) / 1114.0 * slots)


def test_parts_are_told_apart_without_colour() -> None:
    for form in ("fill", "ascii"):
        forms = [getattr(part_of(part), form) for part in (*PARTS, UNTIMED)]
        assert len(set(forms)) == len(forms)
    plain = text(WHOLE, 80)
    assert re.search(rf"full {part_of('attention').fill}+", plain)
    assert part_of("decompress").fill * 2 + " decompress" in plain


def test_the_longest_bar_fills_the_width_and_others_are_in_proportion() -> None:
    drawn = render_text(StackedBars([Bar("a", {"mlp": 2.0}), Bar("b", {"mlp": 1.0})]), 60)
    lengths = [line.count(part_of("mlp").fill) for line in drawn.splitlines()[:2]]
    assert lengths[0] == 2 * lengths[1] or abs(lengths[0] - 2 * lengths[1]) == 1
    shares = render_text(
        StackedBars([Bar("a", {"mlp": 2.0}), Bar("b", {"mlp": 1.0})], shares=True), 60
    )
    assert len({line.count(part_of("mlp").fill) for line in shares.splitlines()[:2]}) == 1


def test_the_table_of_parts_holds_times_shares_and_differences() -> None:
    known = accounts(WHOLE["data"])
    full, fdc = WHOLE["data"]["cases"][0], WHOLE["data"]["cases"][2]
    row = next(line for line in text(WHOLE, 120).splitlines() if line.startswith("attention"))
    ours, base = (known[case["case"]].by_part()["attention"] * 1e3 for case in (fdc, full))
    assert f"{base:.2f}" in row
    assert f"{100 * ours / 1e3 / fdc['jct_seconds']:.1f} %" in row
    assert f"−{base - ours:.2f}" in row


def test_a_part_by_difference_has_a_star() -> None:
    assert re.search(r"decompress .*\d\*", text(WHOLE, 120))
    assert "a difference of two measured times" in text(WHOLE, 120)
    assert "*" not in text(result_of(stream(("full",))), 120)


def test_an_incomplete_run_says_so_and_why() -> None:
    shown = text(result_of(stream()[:900]))
    assert shown.count("INCOMPLETE") == 2
    assert "killed, or is still running" in shown
    assert "so far" in shown


@pytest.mark.parametrize(
    "events", [stream(steps=4), whole_first(stream(steps=4))], ids=["composed", "real"]
)
def test_a_run_that_was_killed_anywhere_has_a_report(events: list[Event]) -> None:
    for end in cuts(events):
        result = result_of(events[:end])
        validate_result(result)
        shown = text(result)
        assert to_csv(result).count("\n") > 0
        figures_of(result)
        for case in result["data"]["cases"]:
            if not case["complete"] and case["measured_seconds"]:
                assert f"{duration(case['measured_seconds'])} so far" in shown


def test_a_real_run_that_was_killed_shows_what_it_measured() -> None:
    events = whole_first(stream(("full",), steps=4))
    first = next(n for n, event in enumerate(events) if event.event == "part")
    result = result_of(events[:first])
    walked = sum(event.seconds for event in events[:first] if event.event == "step")
    shown = text(result)
    assert f"{duration(walked)} so far" in shown
    assert "No part was timed yet." in shown
    assert re.search(rf"full {part_of(UNTIMED).fill}+ ", shown)


def misfit_result(factor: float) -> dict[str, Any]:
    """A run whose parts are timed `factor` times as long in one case, as on a busy machine."""
    events = [
        replace(event, seconds=event.seconds * factor)
        if isinstance(event, PartSample) and event.case.startswith("fdc")
        else event
        for event in stream(steps=4)
    ]
    return result_of(events)


def test_parts_that_do_not_add_up_are_told_beside_their_bar_and_have_no_share() -> None:
    result = misfit_result(1.5)
    shown = text(result, 120)
    bars = shown.split("JCT by part")[1].splitlines()[1:4]
    assert re.search(rf"fdc +{part_of(UNTIMED).fill}+ .*! parts sum to 1[45]\d % of it", bars[2])
    assert "!" not in bars[0] + bars[1]
    # Not longer than its time says.
    case = result["data"]["cases"][2]
    lengths = [
        sum(line.count(fill) for fill in (part_of(part).fill for part in (*PARTS, UNTIMED)))
        for line in bars
    ]
    longest = max(case["jct_seconds"] for case in result["data"]["cases"])
    assert lengths[2] == pytest.approx(max(lengths) * case["jct_seconds"] / longest, abs=1.01)
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    own = [row for row in rows if row["kind"] == "part" and row["method"] == "fdc"]
    assert own
    assert all(row["share"] == "" for row in own)
    assert all(row["share"] for row in rows if row["kind"] == "part" and row["method"] == "full")


def test_a_record_of_an_earlier_version_has_no_shares_either() -> None:
    result = misfit_result(1.5)
    for case in result["data"]["cases"]:
        del case["excess_share"], case["measured_seconds"]
    for row in result["data"]["parts"]:
        row["share"] = 0.95
    validate_result(result)
    assert "95.0 %" not in text(result)
    rows = csv.DictReader(io.StringIO(to_csv(result)))
    assert not [row for row in rows if row["share"] and row["method"] == "fdc"]
    figure(result)


def test_a_sweep_plots_ratios_where_its_curves_would_be_one() -> None:
    assert sweep_curves(sweeps(SWEEP)[0]).log_y  # at 64k one takes twice as long
    close = copy.deepcopy(SWEEP)
    for case, base in zip(close["data"]["cases"][1::2], close["data"]["cases"][::2], strict=True):
        case["jct_seconds"] = 1.1 * base["jct_seconds"]
    (sweep,) = sweeps(close)
    near = sweep_curves(sweep)
    assert near.unit == ""
    assert not near.log_y
    assert near.series[0].y == [1.0] * 4
    assert near.series[1].y == pytest.approx([1.1] * 4)
    assert "over full's" in text(close)


def test_a_run_that_has_only_begun_has_a_report() -> None:
    assert "No request was measured completely." in text(result_of(stream()[:1]))
    assert "No request was measured completely." in text(result_of(stream()[:5]))


def test_one_method_twice_in_a_request_goes_by_its_case() -> None:
    result = copy.deepcopy(WHOLE)
    result["data"]["cases"][1]["method"] = "fdc"
    assert [name.split()[0] for name in groups(result)[0].names] == ["full", "palu", "fdc"]
    assert groups(result)[0].names[1:] == [case["case"] for case in result["data"]["cases"][1:]]


def test_a_sweep_shows_shares_by_length_and_the_longest_in_full() -> None:
    swept = sweeps(SWEEP)
    assert [(sweep.varied, len(sweep.members)) for sweep in swept] == [("input_len", 4)]
    assert [group.input_len for group in detailed(SWEEP)] == [65536]
    shown = text(SWEEP, 100)
    assert "full: share of JCT by part and input tokens" in shown
    assert "3 more requests" in shown


def test_requests_of_a_trace_are_shown_when_measured() -> None:
    result = copy.deepcopy(WHOLE)
    result["data"] |= EXTRA
    shown = text(result, 100)
    for expected in ("fdc/arxiv", "900 ms", "0.7 %"):
        assert expected in shown
    assert "fdc/arxiv" not in text(WHOLE, 100)


def test_what_is_told_of_one_request_names_it() -> None:
    result = copy.deepcopy(SWEEP)
    cases = result["data"]["cases"]
    for case in cases:
        case["labels"] = {"error": f"after {case['input_len']} tokens"}
    cases[0]["labels"]["kernel"] = "slow"
    found = " ".join(text(result, 500).split())
    first = groups(result)[0]
    assert f"Error ({first.name}): after {first.input_len} tokens." in found
    assert f"Kernel ({cases[0]['case']}): slow." in found


def test_several_steps_at_a_context_are_one_point() -> None:
    result = copy.deepcopy(WHOLE)
    again = [row | {"seconds": row["seconds"] * 3} for row in result["data"]["steps"]]
    again += [row | {"seconds": row["seconds"] * 9} for row in result["data"]["steps"]]
    result["data"]["steps"] += again
    once, thrice = (step_curves(one, groups(one)[0])[0] for one in (WHOLE, result))
    assert list(thrice.x) == list(once.x)
    assert thrice.y == pytest.approx([3 * y for y in once.y if y is not None])


def test_csv_holds_every_observation_and_adds_up() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(WHOLE))))
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in {r["kind"] for r in rows}}
    data = WHOLE["data"]
    assert counts["case"] == 3
    assert counts["part"] == len(data["parts"])
    assert counts["step"] == len(data["steps"])
    assert counts["layer"] == len(data["layers"])
    for case in data["cases"]:
        own = [
            float(row["seconds"])
            for row in rows
            if row["kind"] == "part" and row["case"] == case["case"]
        ]
        assert math.fsum(own) == pytest.approx(case["jct_seconds"])


@pytest.mark.parametrize(
    "result",
    [WHOLE, SWEEP, result_of(stream()[:900]), result_of(stream()[:1])],
    ids=["request", "sweep", "killed", "begun"],
)
def test_the_figure_is_drawn(result: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert figure_bytes(figure(result), "svg").startswith(b"<?xml")


def test_times_have_the_unit_that_suits_them() -> None:
    assert [duration(value) for value in (2310.0, 1.234, 0.0412, 4.1e-4, 0.0, None, -0.002)] == [
        "2,310 s",
        "1.23 s",
        "41.2 ms",
        "410 µs",
        "0 s",
        "n/a",
        "−2.00 ms",
    ]
    assert unit_of([1e-7, None, 0.5]) == (1e3, "ms")
    assert [signed_percent(value) for value in (-0.34, 0.021, 1e-5, -1e-5, None)] == [
        "−34.0 %",
        "+2.1 %",
        "0.0 %",
        "0.0 %",
        "n/a",
    ]


def test_bytes_of_the_cache_are_drawn_in_a_unit_of_their_size() -> None:
    assert byte_unit(2**31 - 1) == (2**20, "MiB")
    large = copy.deepcopy(WHOLE)
    for row in large["data"]["memory"]:
        row["logical"] = 2**32
    (group,) = groups(large)
    curves, unit = memory_curves(large, group)
    assert unit == "GiB"
    assert {value for curve in curves for value in curve.y} == {4.0}
    assert memory_curves(WHOLE, groups(WHOLE)[0])[1] == "MiB"


def test_layers_that_were_not_timed_have_no_column_of_times() -> None:
    composed = copy.deepcopy(WHOLE)
    for row in composed["data"]["layers"]:
        row["seconds"] = None
    assert "a layer)" in text(WHOLE)
    assert "a layer)" not in text(composed)
    assert "key ranks" in text(composed)
