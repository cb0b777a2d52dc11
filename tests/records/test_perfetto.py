"""The trace of a run: what Perfetto needs, every slice as long as it was measured."""

import json
from itertools import pairwise
from typing import Any

import pytest

from kvprof.records.events import PartSample, StepFinished
from kvprof.records.perfetto import trace_of
from tests.records.streams import stream

EVENTS = stream(methods=("full", "fdc"), layers=2, steps=4)


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [entry for entry in trace["traceEvents"] if entry["ph"] == phase]


def test_every_part_and_every_pass_is_a_slice_as_long_as_measured() -> None:
    trace = trace_of(EVENTS)
    slices = of_phase(trace, "X")
    parts = sorted(entry["dur"] for entry in slices if entry["cat"] == "part")
    measured = sorted(event.seconds * 1e6 for event in EVENTS if isinstance(event, PartSample))
    assert parts == pytest.approx(measured)
    passes = [entry for entry in slices if entry["cat"] == "pass"]
    assert len(passes) == sum(isinstance(event, StepFinished) for event in EVENTS)


def test_slices_of_a_track_do_not_overlap() -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in of_phase(trace_of(EVENTS), "X"):
        tracks.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["dur"]))
    assert len(tracks) == 8  # passes and parts of two phases of two cases
    for slices in tracks.values():
        slices.sort()
        for (start, length), (following, _) in pairwise(slices):
            assert start + length <= following + 1e-6


def test_cases_are_processes_with_named_tracks() -> None:
    names = {
        (entry["pid"], entry["name"]): entry["args"]["name"]
        for entry in of_phase(trace_of(EVENTS), "M")
        if entry["name"] == "process_name"
    }
    assert sorted(names.values()) == ["fdc b1 in2048 out5", "full b1 in2048 out5", "machine"]
    tracks = {
        entry["args"]["name"]
        for entry in of_phase(trace_of(EVENTS), "M")
        if entry["name"] == "thread_name"
    }
    assert tracks == {"prefill: passes", "prefill: parts", "decode: passes", "decode: parts"}


def test_memory_and_telemetry_are_counters() -> None:
    names = {entry["name"] for entry in of_phase(trace_of(EVENTS), "C")}
    assert {"cache (bytes)", "device memory (bytes)", "cpu load"} <= names


def test_a_killed_run_keeps_the_parts_of_its_last_step() -> None:
    end = max(place for place, event in enumerate(EVENTS) if isinstance(event, PartSample))
    cut = EVENTS[: end + 1]
    slices = [entry for entry in of_phase(trace_of(cut), "X") if entry["cat"] == "part"]
    assert len(slices) == sum(isinstance(event, PartSample) for event in cut)
    json.dumps(trace_of(cut), allow_nan=False)


def test_parts_that_are_told_after_their_step_stay_in_their_phase() -> None:
    # The runtime tells uninstrumented steps first, then the parts of an instrumented run.
    steps = [event for event in EVENTS if isinstance(event, StepFinished)]
    late = [
        *(
            event
            for event in EVENTS
            if not isinstance(event, PartSample | StepFinished)
            and event.event not in ("case_finished", "run_finished")
        ),
        *steps,
        *(event for event in EVENTS if isinstance(event, PartSample)),
    ]
    slices = of_phase(trace_of(late), "X")
    decode = [entry for entry in slices if entry["tid"] == 4]
    assert decode
    assert all(entry["args"]["step"] > 0 for entry in decode)
