"""What a run's events become: the times add up, and a run that was cut off still has a result."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.analysis.stats import weighted_quantile
from kvprof.errors import FailedError
from kvprof.records.cases import accounts
from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    Event,
    PartSample,
    RunFinished,
    RunStarted,
    StepFinished,
    TelemetrySample,
    Warned,
)
from kvprof.records.files import render_result
from kvprof.records.fold import fold, result_of
from kvprof.records.parts import PARTS, UNTIMED
from kvprof.records.perfetto import trace_of
from kvprof.records.schema import validate_result
from tests.records.streams import case_name, stream

CASE = "fdc b2 in8 out4"


def small_run(*events: Event, labels: dict[str, str] | None = None) -> list[Event]:
    """A run of one case that holds `events`."""
    started = stream(layers=1, steps=1)[0]
    assert isinstance(started, RunStarted)
    case = CaseStarted(
        time=0.0,
        case=CASE,
        method="fdc",
        rate=0.5,
        batch=2,
        input_len=8,
        output_len=4,
        labels=labels or {},
    )
    return [started, case, *events]


def part(phase: str, name: str, seconds: float, **more: Any) -> PartSample:
    return PartSample(
        time=0.1, case=CASE, phase=phase, part=name, seconds=seconds, step=1, context=9, **more
    )


def step(seconds: float, weight: float = 1.0) -> StepFinished:
    return StepFinished(
        time=0.2, case=CASE, phase="decode", step=1, context=9, seconds=seconds, weight=weight
    )


def finished(prefill: float, decode: float, **more: Any) -> CaseFinished:
    return CaseFinished(time=0.3, case=CASE, prefill_seconds=prefill, decode_seconds=decode, **more)


def costs(data: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(row["phase"], row["part"]): row["seconds"] for row in data["parts"]}


def test_a_part_costs_its_seconds_times_what_it_stands_for() -> None:
    data = fold(
        small_run(
            part("prefill", "mlp", 2.0),
            part("decode", "attention", 0.1, layer=0, weight=10.0),
            part("decode", "attention", 0.2, layer=1, weight=5.0),
            finished(3.0, 2.5),
        )
    )
    assert costs(data) == {
        ("prefill", "mlp"): 2.0,
        ("prefill", "unattributed"): 1.0,
        ("decode", "attention"): 2.0,
        ("decode", "unattributed"): 0.5,
    }
    assert [row["share"] for row in data["parts"]] == pytest.approx(
        [2 / 5.5, 1 / 5.5, 2 / 5.5, 0.5 / 5.5]
    )
    assert data["cases"][0]["unattributed_share"] == pytest.approx(1.5 / 5.5)


def test_steps_of_several_runs_take_the_place_of_one_runs() -> None:
    """Or the time between tokens would be another request's than the time of the request."""
    first = [step(9.0), step(7.0), step(8.0)]
    medians = [
        replace(one, seconds=seconds, runs=5)
        for one, seconds in zip(first, (1.0, 3.0, 2.0), strict=True)
    ]
    run = small_run(*first, *medians)
    data = fold(run)
    assert [row["seconds"] for row in data["steps"]] == [1.0, 3.0, 2.0]
    assert data["cases"][0]["itl_seconds"] == 2.0
    assert data["cases"][0]["measured_seconds"] == 6.0
    passes = [event for event in trace_of(run)["traceEvents"] if event["ph"] == "X"]
    assert [event["dur"] for event in passes] == pytest.approx([9e6, 7e6, 8e6])


def test_parts_that_exceed_the_wall_time_show_it() -> None:
    data = fold(small_run(part("decode", "attention", 3.0), finished(0.0, 2.0)))
    assert costs(data)["decode", "unattributed"] == -1.0
    assert data["cases"][0]["unattributed_share"] == -0.5


@pytest.mark.parametrize(("seconds", "told"), [(0.85, "15.0 %"), (1.15, "115 %")])
def test_more_than_a_tenth_without_a_part_is_a_warning(seconds: float, told: str) -> None:
    result = result_of(small_run(part("decode", "mlp", seconds), finished(0.0, 1.0)))
    assert [warning for warning in result["warnings"] if told in warning]
    near = result_of(small_run(part("decode", "mlp", 0.95), finished(0.0, 1.0)))
    assert near["warnings"] == []


@pytest.mark.parametrize("decode", [2.9, 1.4])
def test_parts_that_do_not_add_up_have_no_shares(decode: float) -> None:
    """Too much in one phase, the other made up for it or not (2.9 s of 4.0 s are one request's)."""
    data = fold(
        small_run(
            part("prefill", "mlp", 1.6), part("decode", "attention", decode), finished(1.0, 3.0)
        )
    )
    case, (account,) = data["cases"][0], accounts(data).values()
    assert case["excess_share"] == pytest.approx(0.6 / 4)
    assert {row["share"] for row in data["parts"]} == {None}
    assert not account.adds_up()
    assert account.stack() == {UNTIMED: 4.0}
    assert account.misfit() == "parts of prefill sum to 160 % of it"
    # The times are what was measured, whatever they add up to.
    assert costs(data)["decode", "attention"] == decode


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prefill", "decode"]), st.sampled_from(PARTS[:4]), st.floats(0.0, 10.0)
        ),
        max_size=6,
    ),
    st.one_of(st.none(), st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0))),
)
def test_shares_never_exceed_what_they_are_of(
    parts: list[tuple[str, str, float]], walls: tuple[float, float] | None
) -> None:
    events: list[Event] = [part(*one) for one in parts]
    data = fold(small_run(*events, *([finished(*walls)] if walls else [])))
    (account,) = accounts(data).values()
    shares = [row["share"] for row in data["parts"] if row["share"] is not None]
    assert math.fsum(share for share in shares if share > 0) <= 1 + 0.1 + 1e-9
    if walls and sum(walls):
        assert shares == [] or math.fsum(shares) == pytest.approx(1.0)
    drawn = account.stack()
    assert all(value >= 0 for value in drawn.values())
    assert math.fsum(drawn.values()) <= account.seconds * (1 + 0.1 + 1e-9)


def test_every_case_of_a_run_adds_up_to_its_wall_time() -> None:
    data = fold(stream(seed=3))
    for case in data["cases"]:
        own = [row["seconds"] for row in data["parts"] if row["case"] == case["case"]]
        assert math.fsum(own) == pytest.approx(case["jct_seconds"])
        assert case["ttft_seconds"] + case["decode_seconds"] == case["jct_seconds"]


def test_time_between_tokens_counts_the_passes_that_a_step_stands_for() -> None:
    data = fold(small_run(step(1.0, 90.0), step(2.0, 9.5), step(5.0, 0.5), finished(1.0, 1.0)))
    assert data["cases"][0]["itl_seconds"] == 1.0
    assert data["cases"][0]["itl_p99_seconds"] == 2.0


def test_the_intervals_of_two_phases_add_up() -> None:
    done = finished(1.0, 3.0, prefill_interval=[0.9, 1.2], decode_interval=[2.5, 3.5])
    case = fold(small_run(done))["cases"][0]
    assert case["ttft_seconds_interval"] == [0.9, 1.2]
    assert case["jct_seconds_interval"] == pytest.approx([3.4, 4.7])
    case = fold(small_run(finished(1.0, 3.0, prefill_interval=[0.9, 1.2])))["cases"][0]
    assert case["jct_seconds_interval"] is None


def test_energy_is_of_the_uninstrumented_run() -> None:
    done = finished(1.0, 3.0, energy_joules=16.0)
    case = fold(small_run(done))["cases"][0]
    assert case["energy_per_token_joules"] == 2.0  # of 2 sequences with 4 tokens each


def test_a_part_by_difference_is_marked() -> None:
    run = small_run(
        part("decode", "decompress", 0.1),
        part("decode", "attention", 0.1),
        labels={"by_difference": "decompress, merge"},
    )
    assert {row["part"] for row in fold(run)["parts"] if row["by_difference"]} == {"decompress"}


def test_a_layer_has_what_was_said_and_what_was_measured_of_it() -> None:
    run = stream(methods=("palu",), layers=3, steps=2)
    data = fold(run)
    assert [row["layer"] for row in data["layers"]] == [0, 1, 2]
    spent = sum(
        event.seconds
        for event in run
        if isinstance(event, PartSample)
        and event.layer == 1
        and event.part in ("attention", "compress", "decompress")
    )
    assert data["layers"][1]["seconds"] == pytest.approx(spent)
    assert len(data["layers"][1]["key_ranks"]) == 4


def _telemetry(values: Sequence[dict[str, float]]) -> list[Event]:
    return [
        TelemetrySample(
            time=float(place),
            device="gpu 0",
            values=one,
            throttled=("power cap",) if place < 2 else (),
        )
        for place, one in enumerate(values)
    ]


def test_telemetry_keeps_its_extremes_though_its_series_is_thinned() -> None:
    values = [{"power_w": 100.0} for _ in range(2500)]
    values[1] = {"power_w": 700.0, "sm_mhz": 1980.0}
    found = fold(small_run(*_telemetry(values)))["telemetry"]["gpu 0"]
    assert found["samples"] == 2500
    assert found["values"]["power_w"] == {"median": 100.0, "least": 100.0, "most": 700.0}
    assert found["throttled"] == {"power cap": 2}
    assert len(found["series"]["time"]) == len(found["series"]["sm_mhz"]) <= 1000
    assert found["series"]["time"][-1] > 2400


@pytest.mark.parametrize("kept", [1, 2, 60, 300, -1])
def test_a_run_that_was_killed_has_a_result_marked_incomplete(kept: int) -> None:
    result = result_of(stream(steps=5)[:kept])
    validate_result(result)
    assert not result["complete"]
    assert "killed" in result["incomplete_reason"]


def test_a_case_that_did_not_finish_has_parts_and_no_total() -> None:
    result = result_of(stream(methods=("full", "fdc"), steps=5)[:-100])
    whole, broken = result["data"]["cases"]
    assert (whole["complete"], broken["complete"]) == (True, False)
    assert broken["jct_seconds"] is None
    own = [row for row in result["data"]["parts"] if row["case"] == broken["case"]]
    for row in own:
        assert row["share"] == pytest.approx(row["seconds"] / broken["measured_seconds"])
    assert sum(row["seconds"] for row in own) <= broken["measured_seconds"]
    assert "unattributed" not in {row["part"] for row in own}


def test_a_finished_run_is_complete_and_valid() -> None:
    result = result_of(stream())
    validate_result(result)
    assert result["complete"]
    assert result["created"] == "2025-11-21T12:00:00Z"
    assert result["warnings"] == [f"{case_name('fdc', 20)}: the first step was slow and is kept"]
    # Written and folded again, it is the same: no hidden state.
    assert render_result(result) == render_result(result_of(stream()))


def test_damage_is_the_reason_for_being_incomplete() -> None:
    result = result_of(stream(steps=2), damage="line 7 is cut off")
    assert not result["complete"]
    assert "line 7 is cut off" in result["incomplete_reason"]


def test_what_only_the_end_of_a_run_knows_is_in_its_data() -> None:
    end = RunFinished(
        time=1.0,
        complete=False,
        reason="out of memory",
        extra={"requests": {"count": 1}, "parts": "not these"},
    )
    result = result_of([*small_run(Warned(time=0.1, message="careful")), end])
    validate_result(result)
    assert result["data"]["requests"] == {"count": 1}
    assert result["data"]["parts"] == []
    assert result["incomplete_reason"] == "out of memory"
    assert result["warnings"] == ["careful"]


def test_no_event_is_no_result() -> None:
    with pytest.raises(FailedError, match="no event yet"):
        result_of([])


def test_quantiles_weigh() -> None:
    assert weighted_quantile([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 0.5) == 2.0
    assert weighted_quantile([1.0, 2.0], [1.0, 1.0], 0.5) == 1.5
    assert weighted_quantile([1.0, 2.0, 3.0], [0.1, 0.1, 0.9], 0.5) == 3.0
    assert weighted_quantile([], [], 0.5) is None
