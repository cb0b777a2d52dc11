"""All rows of one phase, batch and context: the baselines first, then each method against the best.

The fastest full-width kernel is kept beside every method and sampled in turn with it, so a
speed-up is a ratio of medians of the same minutes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from triton.errors import TritonError

from kvprof.benchmark import schedules as loads
from kvprof.benchmark.baselines import FullWidth, baseline_builders, full_width
from kvprof.benchmark.case import Case, Lack, Place
from kvprof.benchmark.cases import build_case
from kvprof.benchmark.limits import largest_context
from kvprof.benchmark.machine import Machine, free_bytes
from kvprof.benchmark.methods import Method
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.rows import TOLERANCE, Doubts, Found, Timed, add_row
from kvprof.benchmark.timing import DeviceLost, Sampler, interleaved, sampler
from kvprof.errors import UsageError

__all__ = ["Budget", "Point", "measure"]


# How often slower than the best a kernel is that further samples do not help: after one, after two.
_HOPELESS = (4.0, 2.0)


@dataclass(frozen=True)
class Budget:
    """How long to sample.

    Attributes
    ----------
    repeats : int
        Samples per row.
    baseline_seconds, method_seconds : float
        See `kvprof.benchmark.timing.interleaved`.
    """

    repeats: int
    baseline_seconds: float
    method_seconds: float


@dataclass(frozen=True)
class Point:
    """One phase, batch and context, and how it is measured.

    Attributes
    ----------
    place : Place
    machine : Machine
    budget : Budget
    should_stop, advance : callable
        Whether the user asked for the end; and that one more method is done.
    found : Found
        Where rows go.
    doubts : Doubts
        What is said once, of all rows together.
    """

    place: Place
    machine: Machine
    budget: Budget
    should_stop: Callable[[], bool]
    advance: Callable[[], None]
    found: Found
    doubts: Doubts = field(default_factory=Doubts)


@dataclass(frozen=True, eq=False)
class _Full:
    """A full-width kernel that ran, with its first samples."""

    case: Case
    sampler: Sampler
    seconds: list[float]
    error: float


def measure(
    point: Point,
    methods: list[tuple[Method, Widths | None]],
    schedules: tuple[str, ...],
) -> None:
    """Measure one place and add what is found to `point.found`.

    Parameters
    ----------
    point : Point
    methods : list of (Method, Widths or None)
        Those that this phase has.
    schedules : tuple of str

    Raises
    ------
    Interrupted
        When the user asked for the end; rows that were complete are in `point.found`.
    """
    place, found = point.place, point.found
    best: _Full | None = None
    with _spared(point, "full width"):
        best = _baselines(point)
    point.advance()
    if best is None:
        found.warn(f"{place.name}: no full-width kernel ran, so there are no speed-ups")
    # Strips are of one method: those of the others would tell the same of other widths.
    shown = next((method for method, _ in methods if method.cut), None)
    shown = shown if len(schedules) > 1 else None
    try:
        for method, widths in methods:
            if method.kind != "full":
                for schedule in _chosen(point, method, schedules):
                    with _spared(point, method.name):
                        _method(point, method, widths, schedule, best, shown=method is shown)
                if method is shown and not point.machine.is_gpu and widths is not None:
                    _predict(point, widths, schedules)
            elif best is not None:
                timed = Timed(
                    "full", best.case, best.seconds, best.error, best.seconds, best.case.name
                )
                _add(point, timed)
            point.advance()
    finally:
        name = best.case.name if best is not None else None
        for text in point.doubts.said(place.name, point.budget.repeats, name):
            found.warn(text)


def _tell(point: Point, name: str, case: Case, timed: Sampler) -> None:
    if case.note is not None:
        point.found.warn(case.note)
    if timed.note is not None:
        point.found.warn(f"{name}: {timed.note}")


def _add(point: Point, timed: Timed) -> None:
    add_row(timed, point.machine, point.budget.repeats, point.found, point.doubts)


def _chosen(point: Point, method: Method, asked: tuple[str, ...]) -> list[str | None]:
    """Return the schedules to run: those asked for that the kernel knows; [None] without choice."""
    if not method.cut or not point.machine.is_gpu:
        return [None]
    known = loads.kernel_schedules(point.place.phase)
    chosen: list[str | None] = [name for name in asked if name in known]
    if not chosen:
        point.found.warn(
            f"{point.place.phase} has no schedule {' or '.join(asked)} (it has "
            f"{', '.join(known)}), so {method.name} has no row there"
        )
    return chosen


def _predict(point: Point, widths: Widths, asked: tuple[str, ...]) -> None:
    """Add what the cost models say of each schedule where there are no clocks to read."""
    for schedule in asked:
        if schedule in loads.kernel_schedules(point.place.phase):
            expected = loads.predicted(point.place, widths, schedule, None)
            point.found.schedules.append(loads.entry(point.place, schedule, expected, None))
    point.found.warn(
        "without a GPU schedules change no time: their loads are predicted, for "
        f"{loads.ASSUMED_MULTIPROCESSORS} multiprocessors, and not measured"
    )


@contextmanager
def _spared(point: Point, name: str) -> Iterator[None]:
    """Let one row fail, for lack of memory or because a kernel does not run, and go on.

    Raises
    ------
    DeviceLost
        When nothing more can run on the GPU in this process.
    """
    place = point.place
    try:
        yield
    except UsageError as refusal:
        point.found.warn(f"{name}, {place.name}: not measured: {refusal}")
    except (MemoryError, RuntimeError, TritonError) as problem:
        if _short_of_memory(problem):
            most = largest_context(place, free_bytes(place.device))
            point.found.warn(
                f"{name}, {place.name}: not enough memory; about {most:,} tokens would fit at "
                f"batch {place.batch}"
            )
        elif _lost(problem):
            raise DeviceLost(f"{name}, {place.name}: {_words(problem)}") from problem
        else:
            point.found.warn(f"{name}, {place.name}: it failed: {_words(problem)}")
    finally:
        if place.device.type == "cuda":
            with suppress(RuntimeError):  # a GPU that was lost
                torch.cuda.empty_cache()


def _lost(problem: Exception) -> bool:
    """Whether CUDA itself failed: every later call in this process fails too."""
    return "CUDA error" in str(problem) or "illegal memory access" in str(problem)


def _words(problem: Exception) -> str:
    """Return the first line of what a library says, not longer than a line should be."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[0] if lines else type(problem).__name__)[:160]


def _short_of_memory(problem: Exception) -> bool:
    # On a CPU torch raises a bare RuntimeError.
    named = isinstance(problem, torch.OutOfMemoryError | MemoryError)
    return named or "not enough memory" in str(problem)


def _baselines(point: Point) -> _Full | None:
    """Time every full-width kernel; the fastest of those that compute what they should is kept."""
    place = point.place
    inputs = full_width(place)
    best: _Full | None = None
    for name, build in baseline_builders(place, free_bytes(place.device)).items():
        entry: dict[str, Any] = {
            "name": name, "phase": place.phase, "batch": place.batch, "seq": place.seq,
            "seconds": None, "reason": None,
        }  # fmt: skip
        try:
            tried = _baseline(point, name, build, inputs, best)
        except (Lack, UsageError) as why:
            entry["reason"] = str(why)
        except (MemoryError, RuntimeError, TritonError) as problem:
            if _lost(problem):
                raise
            short = _short_of_memory(problem)
            entry["reason"] = "it needs more memory than is free" if short else _words(problem)
        else:
            entry["seconds"] = tried.seconds
            if best is None or median(tried.seconds) < median(best.seconds):
                best = tried
        point.found.baselines.append(entry)
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    return best


def _baseline(
    point: Point, name: str, build: Callable[[FullWidth], Case], inputs: FullWidth,
    best: _Full | None,
) -> _Full:  # fmt: skip
    case = build(inputs)
    timed = sampler(case.runs, point.place.device)
    error = case.error(timed.output())
    if error > TOLERANCE[point.place.dtype]:
        raise Lack(f"its result is wrong (error {error:.1g} against float64)")
    _tell(point, name, case, timed)
    if best is not None:
        early: list[float] = []
        for hopeless in _HOPELESS:
            early.append(timed.sample())
            if min(early) > hopeless * median(best.seconds):
                return _Full(case, timed, early, error)
    budget = point.budget
    # Anew: those that came early say how slow it is, under conditions of their own.
    (seconds,) = interleaved(
        [timed], budget.repeats, seconds=budget.baseline_seconds, should_stop=point.should_stop
    )
    return _Full(case, timed, seconds, error)


def _method(
    point: Point,
    method: Method,
    widths: Widths | None,
    schedule: str | None,
    best: _Full | None,
    *,
    shown: bool,
) -> None:
    """Time one method in turn with the best baseline, and add its row."""
    # A library would ignore the schedules that are compared.
    path = "triton" if shown and point.machine.is_gpu else "auto"
    case = build_case(method, point.place, widths, schedule, path=path)
    timed = sampler(case.runs, point.place.device)
    error = case.error(timed.output())
    _tell(point, method.name, case, timed)
    beside = [best.sampler] if best is not None else []
    budget = point.budget
    *others, seconds = interleaved(
        [*beside, timed], budget.repeats, seconds=budget.method_seconds,
        should_stop=point.should_stop,
    )  # fmt: skip
    count = point.machine.multiprocessors
    traced = loads.traced(case.trace, count) if case.trace is not None and count else None
    row = Timed(
        method.name, case, seconds, error, others[0] if others else None,
        best.case.name if best is not None else None, traced.evenness if traced else None,
    )  # fmt: skip
    _add(point, row)
    if best is not None and others:
        point.doubts.compare(method.name, median(others[0]), median(best.seconds))
    if shown and schedule is not None and widths is not None:
        expected = loads.predicted(point.place, widths, schedule, count)
        point.found.schedules.append(loads.entry(point.place, schedule, expected, traced))
