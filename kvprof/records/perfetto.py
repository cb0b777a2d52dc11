"""Events of a run as a trace in Chrome's format, which Perfetto and chrome://tracing open.

A process per case, with a track for the parts of each phase and one for its forward passes;
counters for the cache's bytes and for telemetry. Parts are recorded as durations that are read
after a step, so that the parts of a step are laid end to end from the step's start, in the order
of recording; every duration is as measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    Event,
    MemorySample,
    PartSample,
    RunStarted,
    StepFinished,
    TelemetrySample,
    Warned,
)

__all__ = ["trace_of"]

_MACHINE = 0  # process of what belongs to no case
_TRACKS = {"prefill": (1, 2), "decode": (3, 4)}  # phase to the tracks of its passes and its parts
_MICRO = 1e6


@dataclass
class _Case:
    process: int
    waiting: dict[tuple[str, int], list[PartSample]] = field(default_factory=dict)
    # When each track is free again: what is laid out must not overlap.
    free: dict[int, float] = field(default_factory=dict)

    def slice(
        self, track: int, start: float, seconds: float, name: str, args: Mapping[str, Any]
    ) -> dict[str, Any]:
        begin = max(start, self.free.get(track, start))
        self.free[track] = begin + seconds
        return {
            "ph": "X",
            "pid": self.process,
            "tid": track,
            "ts": begin * _MICRO,
            "dur": seconds * _MICRO,
            "name": name,
            "cat": "part" if track in (2, 4) else "pass",
            "args": dict(args),
        }


def trace_of(events: Iterable[Event]) -> dict[str, Any]:
    """Return a trace, ready to be written as JSON; times in microseconds."""
    cases: dict[str, _Case] = {}
    made: list[dict[str, Any]] = [_named(_MACHINE, "machine")]
    other: dict[str, Any] = {}
    for event in events:
        match event:
            case RunStarted():
                other = {
                    "kvprof_version": event.kvprof_version,
                    "created": event.created,
                    "mode": event.mode,
                    "shape": event.shape,
                    "layout": "parts of a step stand end to end from the step's start",
                }
            case CaseStarted():
                own = cases[event.case] = _Case(len(cases) + 1)
                made += _case_tracks(own.process, event)
            case PartSample():
                key = event.phase, event.step
                cases[event.case].waiting.setdefault(key, []).append(event)
            case StepFinished(runs=1):  # a median of several runs was at no time
                made += _step(cases[event.case], event)
            case CaseFinished():
                made += _unfinished_parts(cases[event.case])
            case MemorySample():
                values = {
                    "stored": event.logical,
                    "allocated": event.allocated,
                    "full width": event.full_width,
                }
                process = cases[event.case].process
                made.append(_counter(process, event.time, "cache (bytes)", values))
                if event.peak is not None:
                    peak = {"at most so far": event.peak}
                    made.append(_counter(process, event.time, "device memory (bytes)", peak))
            case TelemetrySample():
                made += [
                    _counter(_MACHINE, event.time, f"{event.device} {name}", {name: value})
                    for name, value in event.values.items()
                ]
            case Warned():
                process = cases[event.case].process if event.case in cases else _MACHINE
                made.append(
                    {
                        "ph": "i",
                        "s": "p",
                        "pid": process,
                        "tid": 0,
                        "ts": event.time * _MICRO,
                        "name": "warning",
                        "args": {"message": event.message},
                    }
                )
            case _:
                pass
    for own in cases.values():
        made += _unfinished_parts(own)
    return {"traceEvents": made, "displayTimeUnit": "ms", "otherData": other}


def _step(own: _Case, event: StepFinished) -> Iterator[dict[str, Any]]:
    passes, parts = _TRACKS.get(event.phase, _TRACKS["decode"])
    start = max(0.0, event.time - event.seconds)
    about = {"step": event.step, "context": event.context, "stands for": event.weight}
    made = own.slice(passes, start, event.seconds, f"{event.phase} {event.step}", about)
    yield made
    begin = made["ts"] / _MICRO
    for sample in own.waiting.pop((event.phase, event.step), ()):
        yield _part(own, parts, begin, sample)


def _unfinished_parts(own: _Case) -> Iterator[dict[str, Any]]:
    """Yield the parts of steps that never finished, or that no pass was recorded of."""
    for (phase, _), samples in own.waiting.items():
        begin = min(sample.time - sample.seconds for sample in samples)
        for sample in samples:
            yield _part(own, _TRACKS.get(phase, _TRACKS["decode"])[1], max(0.0, begin), sample)
    own.waiting.clear()


def _part(own: _Case, track: int, start: float, sample: PartSample) -> dict[str, Any]:
    about = {
        "step": sample.step,
        "context": sample.context,
        "layer": sample.layer,
        "stands for": sample.weight,
    }
    return own.slice(track, start, sample.seconds, sample.part, about)


def _case_tracks(process: int, event: CaseStarted) -> Iterator[dict[str, Any]]:
    yield _named(process, event.case)
    for phase, (passes, parts) in _TRACKS.items():
        for track, what in ((passes, "passes"), (parts, "parts")):
            yield {
                "ph": "M",
                "pid": process,
                "tid": track,
                "name": "thread_name",
                "args": {"name": f"{phase}: {what}"},
            }


def _named(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}


def _counter(process: int, time: float, name: str, values: Mapping[str, float]) -> dict[str, Any]:
    return {"ph": "C", "pid": process, "ts": time * _MICRO, "name": name, "args": dict(values)}
