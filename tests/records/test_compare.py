"""What two results differ in: by how much, with what interval, and whether that is too much."""

import copy
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.records.compare import _change, compare, environment_differences, ratio_interval
from kvprof.records.figures import Figure, figures_of
from kvprof.records.fold import result_of
from kvprof.records.result import build_result, to_plain
from kvprof.records.schema import validate_result
from kvprof.views.compare import report
from kvprof.views.page import render_text
from tests.records.load_stream import load_stream
from tests.records.sample import ENVIRONMENT, benchmark_result, spectrum_result, stability_result
from tests.records.streams import stream
from tests.views.synthetic_bench import bench_result
from tests.views.synthetic_evaluation import evaluation_result
from tests.views.synthetic_frontier import frontier_result


def slower(result: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same result with every sample of a bench row longer."""
    changed = copy.deepcopy(result)
    for row in changed["data"]["rows"]:
        if row["seconds"]:
            row["seconds"] = [value * factor for value in row["seconds"]]
            row["seconds_interval"] = [value * factor for value in row["seconds_interval"]]
    return changed


def built(data: dict[str, Any], fail_over: float) -> dict[str, Any]:
    return build_result(
        "compare",
        environment=ENVIRONMENT,
        inputs={"runs": ["a", "b"], "fail_over": fail_over},
        data=data,
    )


def answer_of(data: dict[str, Any], fail_over: float) -> str:
    """The report's words, a line each between spaces."""
    return " ".join(render_text(report(built(data, fail_over)), 120).split())


def rows_of(data: dict[str, Any], figure: str) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if row["figure"] == figure]


def figure(value: float, **more: Any) -> Figure:
    return Figure((("of", "x"),), "seconds", value, "lower", **more)


def steady(centre: float, spread: float = 0.01) -> list[float]:
    return [centre * (1 + spread * (place - 10) / 10) for place in range(21)]


def test_a_slower_run_is_worse_and_certainly_so() -> None:
    base = bench_result()
    data = compare([base, slower(base, 1.2)], ["a", "b"], fail_over=0.05)
    times = [row for row in rows_of(data, "seconds") if row["values"][0] != row["values"][1]]
    assert times
    for row in times:
        change = row["changes"][0]
        assert change["share"] == pytest.approx(0.2)
        assert change["verdict"] == "worse"
        assert change["failed"] is (change["certain"] is not False)
    assert data["failed"] == sum(row["changes"][0]["failed"] for row in times) > 0


def test_the_same_result_twice_differs_in_nothing() -> None:
    base = bench_result()
    data = compare([base, base], ["a", "b"], fail_over=0.0)
    assert {row["changes"][0]["verdict"] for row in data["rows"]} == {"same"}
    assert (data["failed"], data["unmatched"], data["environment"]) == (0, [], [])


def test_an_interval_from_samples_tells_a_shift_from_noise() -> None:
    base = figure(1.0, samples=steady(1.0))
    low, high = ratio_interval(base, figure(1.1, samples=steady(1.1))) or (0, 0)
    assert 0.08 < low < 0.1 < high < 0.12
    low, high = ratio_interval(base, figure(1.001, samples=steady(1.001))) or (0, 0)
    assert low < 0 < high


def test_intervals_of_both_results_add_in_squares() -> None:
    # ln 1.1 each way for both: the ratio's interval reaches √2 as far.
    base = figure(1.0, interval=(1 / 1.1, 1.1))
    other = figure(2.0, interval=(2 / 1.1, 2.2))
    low, high = ratio_interval(base, other) or (0, 0)
    assert low == pytest.approx(2 * 1.1 ** -(2**0.5) - 1)
    assert high == pytest.approx(2 * 1.1 ** (2**0.5) - 1)
    assert ratio_interval(base, figure(2.0)) is None


def test_a_change_within_its_interval_does_not_fail() -> None:
    base = bench_result()
    wide = slower(base, 1.08)
    for result in (base, wide):
        for row in result["data"]["rows"]:
            if row["seconds"]:
                row["seconds"] = [
                    value * (1 + 0.5 * (i % 3 - 1))
                    for i, value in enumerate([row["seconds"][0]] * 9)
                ]
    data = compare([base, wide], ["a", "b"], fail_over=0.05)
    # What the intervals leave open is no verdict that all is well.
    said = answer_of(data, 0.05)
    assert "No figure got significantly worse by more than 5 %." in said
    assert re.search(r"\d+ of \d+ may have: their intervals reach further\.", said)
    assert "for sure" not in answer_of(compare([base, base], ["a", "b"], fail_over=5.0), 5.0)
    changes = [row["changes"][0] for row in rows_of(data, "seconds")]
    assert any(change["certain"] is False and change["verdict"] == "worse" for change in changes)
    assert data["failed"] == 0


def noisy(
    chance: random.Random, *, between: float, drift: float, within: float = 0.02, slow: float = 1.0
) -> dict[str, Any]:
    """A bench run as a machine gives it: noise of samples, of kernels, of the whole run."""
    result = bench_result(batches=(8,))
    whole = chance.lognormvariate(0, drift)
    own: dict[tuple[str, str], float] = {}

    def samples(middle: float, rounds: Sequence[float]) -> list[float]:
        late = [1.5 if chance.random() < 0.02 else 1.0 for _ in rounds]
        return [
            middle * whole * one * wake * chance.lognormvariate(0, within)
            for one, wake in zip(rounds, late, strict=True)
        ]

    for entry in result["data"]["baselines"]:
        if entry["seconds"]:
            middle = entry["seconds"][0] * chance.lognormvariate(0, between)
            own[entry["name"], entry["phase"]] = middle
            entry["seconds"] = samples(middle, [1.0] * 15)
    for entry in result["data"]["rows"]:
        rounds = [chance.lognormvariate(0, within) for _ in range(15)]
        middle = entry["seconds"][2] * chance.lognormvariate(0, between)
        factor = slow if entry["method"] == "fdc" else 1.0
        entry["seconds"] = samples(middle * factor, rounds)
        entry["baseline_seconds"] = samples(own[entry["baseline"], entry["phase"]], rounds)
    return result


@pytest.mark.parametrize(("between", "drift"), [(0.003, 0.02), (0.03, 0.4)])
def test_twenty_runs_of_one_machine_raise_no_alarm(between: float, drift: float) -> None:
    chance = random.Random(0)
    base = noisy(chance, between=between, drift=drift)
    for _ in range(20):
        again = noisy(chance, between=between, drift=drift)
        assert compare([base, again], ["a", "b"], fail_over=0.05)["failed"] == 0


def test_a_fifth_slower_is_caught_on_a_steady_machine() -> None:
    chance = random.Random(0)
    caught = 0
    for _ in range(10):
        base = noisy(chance, between=0.003, drift=0.02)
        slowed = noisy(chance, between=0.003, drift=0.02, slow=1.2)
        data = compare([base, slowed], ["a", "b"], fail_over=0.05)
        failed = [row for row in data["rows"] if row["changes"][0]["failed"]]
        assert {row["key"]["method"] for row in failed} <= {"fdc"}
        caught += bool(failed)
    assert caught >= 9


def test_a_gate_judges_methods_and_nothing_without_an_interval_but_what_is_exact() -> None:
    base = bench_result()
    other = copy.deepcopy(base)
    for entry in other["data"]["baselines"]:
        if entry["seconds"] and entry["name"] == "flash":
            entry["seconds"] = [10 * value for value in entry["seconds"]]
    assert compare([base, other], ["a", "b"], fail_over=0.05)["failed"] == 0
    other = copy.deepcopy(base)
    for entry in other["data"]["rows"]:
        entry["seconds"] = [3 * value for value in entry["seconds"][:2]]
        entry["seconds_interval"] = None
    data = compare([base, other], ["a", "b"], fail_over=0.05)
    assert data["failed"] == 0
    own = [row for row in rows_of(data, "seconds") if row["headline"]]
    assert {row["changes"][0]["gated"] for row in own} == {False}
    other = copy.deepcopy(base)
    other["data"]["rows"][2]["cache_bytes"] *= 2
    assert compare([base, other], ["a", "b"], fail_over=0.05)["failed"] == 1


def test_a_request_on_a_slower_machine_is_not_a_slower_method() -> None:
    def run(machine: float, attention: float) -> dict[str, Any]:
        result = result_of(stream(("full", "fdc"), steps=4))
        for case in result["data"]["cases"]:
            factor = machine * (attention if case["method"] == "fdc" else 1.0)
            for name in ("jct_seconds", "ttft_seconds", "decode_seconds"):
                case[name] *= factor
                case[f"{name}_interval"] = [0.99 * case[name], 1.01 * case[name]]
        for part in result["data"]["parts"]:
            part["seconds"] *= machine
        return result

    base = run(1.0, 1.0)
    assert compare([base, run(1.3, 1.0)], ["a", "b"], fail_over=0.05)["failed"] == 0
    data = compare([base, run(1.0, 1.2)], ["a", "b"], fail_over=0.05)
    failed = [row for row in data["rows"] if row["changes"][0]["failed"]]
    assert {row["key"]["case"].split()[0] for row in failed} == {"fdc"}


def test_a_report_folds_what_is_the_same() -> None:
    base = bench_result()
    result = built(compare([base, slower(base, 1.2)], ["a", "b"], fail_over=0.05), 0.05)
    folded, whole = (render_text(report(result, whole=one), 120) for one in (False, True))
    assert "are unchanged; --all lists them" in folded
    assert len(whole.splitlines()) > len(folded.splitlines())
    assert "Machine: 29 control figures" in folded


def test_what_is_better_never_fails() -> None:
    base = bench_result()
    data = compare([base, slower(base, 0.5)], ["a", "b"], fail_over=0.05)
    assert data["failed"] == 0
    assert "better" in {row["changes"][0]["verdict"] for row in data["rows"]}


def test_job_completion_time_is_matched_by_case_phase_and_part() -> None:
    base = result_of(stream(methods=("full", "palu"), seed=0))
    other = result_of(stream(methods=("full", "fdc"), seed=1))
    data = compare([base, other], ["a", "b"])
    assert {row["key"]["case"] for row in data["rows"]} == {"full b1 in2048 out21"}
    assert {row["figure"] for row in data["rows"] if row["headline"]} == {
        "jct_seconds",
        "ttft_seconds",
        "decode_seconds",
    }
    parts = {(row["key"]["phase"], row["key"]["part"]) for row in rows_of(data, "seconds")}
    assert ("decode", "attention") in parts
    assert ("prefill", "unattributed") in parts
    # Steps are the samples of the time between tokens; there is one prefill.
    assert rows_of(data, "itl_seconds")[0]["changes"][0]["share_interval"] is not None
    assert rows_of(data, "ttft_seconds")[0]["changes"][0]["share_interval"] is None
    held = {row["key"]["case"]: row["in"] for row in data["unmatched"]}
    assert held == {"palu b1 in2048 out21": ["a"], "fdc b1 in2048 out21": ["b"]}


def test_three_runs_are_held_against_the_first() -> None:
    base = bench_result()
    data = compare([base, slower(base, 2.0), slower(base, 0.5)], ["a", "b", "c"])
    row = next(row for row in rows_of(data, "seconds") if row["values"][0] != row["values"][1])
    assert [change["share"] for change in row["changes"]] == pytest.approx([1.0, -0.5])
    assert [change["verdict"] for change in row["changes"]] == ["worse", "better"]


def test_accuracy_is_better_when_higher() -> None:
    base = evaluation_result()
    other = copy.deepcopy(base)
    for row in other["data"]["evaluations"]:
        row["relative_accuracy"] *= 0.9
        row["kl"]["mean"] *= 2
    data = compare([base, other], ["a", "b"])
    assert {row["changes"][0]["verdict"] for row in rows_of(data, "relative_accuracy")} == {"worse"}


def test_a_gate_judges_accuracy_by_its_interval_and_bytes_as_they_are() -> None:
    base = evaluation_result()
    row = base["data"]["evaluations"][-1]
    row |= {"relative_accuracy": 0.99, "relative_accuracy_interval": [0.985, 0.995]}
    for change, failed in (
        ({"relative_accuracy": 0.93, "relative_accuracy_interval": [0.92, 0.94]}, 1),
        ({"relative_accuracy": 0.93, "relative_accuracy_interval": [0.8, 1.0]}, 0),
        ({"bytes_per_token": 1.1 * row["bytes_per_token"]}, 1),
    ):
        other = copy.deepcopy(base)
        other["data"]["evaluations"][-1] |= change
        assert compare([base, other], ["a", "b"], fail_over=0.02)["failed"] == failed


@pytest.mark.parametrize(
    "result",
    [
        spectrum_result(),
        stability_result(),
        frontier_result(),
        evaluation_result(),
        bench_result(),
        result_of(stream(steps=3)),
        benchmark_result(),
    ],
    ids=lambda result: result["kind"],
)
def test_every_kind_that_measures_has_figures_to_compare(result: dict[str, Any]) -> None:
    found = figures_of(result)
    assert found
    data = compare([result, result], ["a", "b"], fail_over=0.01)
    assert len(data["rows"]) == len(found)
    validate_result(
        build_result(
            "compare",
            environment=ENVIRONMENT,
            inputs={"runs": ["a", "b"], "fail_over": 0.01},
            data=data,
        )
    )


def test_unlike_kinds_and_nothing_in_common_are_told() -> None:
    left = result_of(stream(methods=("full",), steps=3))
    right = result_of(stream(methods=("fdc",), steps=3))
    with pytest.raises(UsageError, match="no jct figure in common"):
        compare([left, right], ["one", "two"])
    empty = build_result("doctor", environment=ENVIRONMENT, inputs={}, data={})
    with pytest.raises(UsageError, match="doctor"):
        compare([empty, empty], ["one", "two"])


def test_the_first_line_says_that_inputs_differ() -> None:
    one = result_of(load_stream(rates=(1.0,)))
    other = result_of(load_stream(rates=(1.0,), lengths="in=1k,out=200"))
    data = compare([one, other], ["a", "b"])
    first = render_text(report(built(data, 0.0)), 120).splitlines()[0]
    assert first.endswith(", with different inputs (lengths).")
    assert "unlike" not in answer_of(compare([one, one], ["a", "b"]), 0.0)


def test_environments_are_compared_entry_by_entry() -> None:
    other = copy.deepcopy(ENVIRONMENT)
    other["packages"]["torch"] = "2.14.0"
    other["gpus"] = [{"name": "H200", "memory_bytes": 1, "compute_capability": "9.0"}]
    found = environment_differences([ENVIRONMENT, other])
    assert {"path": "packages.torch", "values": ["2.13.0", "2.14.0"]} in found
    assert {"path": "gpus[0].name", "values": [None, "H200"]} in found


def test_rows_that_nothing_tells_apart_are_matched_in_order() -> None:
    def result(*seconds: float) -> dict[str, Any]:
        made = benchmark_result()
        made["data"] = {"rows": [{"total_s": value} for value in seconds]}
        return made

    data = compare([result(1.0, 2.0), result(1.0, 3.0)], ["a", "b"])
    assert [row["values"] for row in data["rows"]] == [[1.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("value", [5e-324, 1e-308, 1.7e308])
def test_what_no_float_holds_is_no_ratio(value: float) -> None:
    for pair in ((value, 0.5), (0.5, value), (value, 1e300)):
        results = [benchmark_result() for _ in pair]
        for result, seconds in zip(results, pair, strict=True):
            result["data"]["rows"][0]["total_s"] = seconds
        data = compare(results, ["a", "b"], fail_over=0.1)
        assert to_plain(data) == data
        assert answer_of(data, 0.1)
        change = _change(*(figure(one, samples=[one] * 20) for one in pair), None, None)
        assert to_plain(change) == change
