"""``run_bench``: phases, batches and contexts, each with its baselines and methods."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from kvprof.benchmark.case import Place
from kvprof.benchmark.limits import flop_rate, prefill_length, shortage
from kvprof.benchmark.machine import Machine, all_threads, free_bytes, gpu_doubts, open_machine
from kvprof.benchmark.methods import Method, method_widths
from kvprof.benchmark.point import Budget, Point, measure
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.request import BenchRequest
from kvprof.benchmark.rows import Found
from kvprof.benchmark.shapes import Shape, load_shape
from kvprof.benchmark.timing import DeviceLost, Interrupted
from kvprof.calibration.options import Progress, silent
from kvprof.errors import LackingError
from kvprof.models.placement import main_device, parse_dtype

__all__ = ["BenchRequest", "run_bench"]

_REPEATS = {"cuda": 30, "cpu": 7}
_SECONDS = {"cuda": (10.0, 10.0), "cpu": (1.5, 2.5)}


def run_bench(
    request: BenchRequest,
    *,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], list[str]]:
    """Time attention over compressed caches against the best full-width kernel found here.

    Parameters
    ----------
    request : BenchRequest
    progress : Progress
        Shows how far the rows are.
    should_stop : callable
        Asked between samples; True ends the run, and complete rows are kept.

    Returns
    -------
    tuple of dict and list of str
        ``rows``, ``shape``, ``ranks``, ``bandwidth``, ``compute``, ``baselines``, ``schedules`` and
        ``stopped`` (why the run ended before its end, or None), as JSON values; and what makes
        figures doubtful or was left out.

    Raises
    ------
    UsageError
        For an unknown shape, ranks of another shape, a rate out of reach.
    LackingError
        When the device is not there, or nothing that was asked for fits its memory.
    """
    shape = load_shape(request.shape)
    device = main_device(request.device)
    dtype = parse_dtype(request.dtype, device)
    found = Found()
    chosen: list[tuple[Method, Widths | None]] = []
    for method in request.parsed_methods():
        ranks = str(request.ranks) if request.ranks is not None else None
        widths = method_widths(method, shape, request.rate, ranks)
        for text in widths.warnings if widths is not None else ():
            found.warn(text)
        chosen.append((method, widths))
    with all_threads():
        for text in gpu_doubts(device, before=True):
            found.warn(text)
        with progress("measuring memory bandwidth and arithmetic", 1) as bar:
            machine = open_machine(device)
            rate = flop_rate(machine, dtype)
            bar.advance()
        places = _places(request, shape, machine, dtype, rate, found)
        with suppress(Interrupted):  # the caller knows that it asked
            try:
                _measure_all(places, chosen, request, machine, found, progress, should_stop)
            except DeviceLost as lost:
                found.stopped = f"the GPU stopped ({lost}); what comes after it was not measured"
    data = {
        "rows": found.rows,
        "shape": shape.described(),
        "ranks": _ranks(chosen),
        "bandwidth": {"tb_per_s": machine.tb_per_s, "what": machine.bandwidth_what},
        "compute": {
            "flop_per_s": rate,
            "what": f"a product of square matrices in {str(dtype).removeprefix('torch.')}, the "
            "best of 3",
        },
        "baselines": found.baselines,
        "schedules": found.schedules,
        "stopped": found.stopped,
    }
    return data, found.warnings


def _places(
    request: BenchRequest,
    shape: Shape,
    machine: Machine,
    dtype: torch.dtype,
    rate: float,
    found: Found,
) -> list[Place]:
    """Return what is measured, cut to what fits the time and the memory, and say what is not.

    Raises
    ------
    LackingError
        When nothing is left.
    """
    free = free_bytes(machine.device)
    places: list[Place] = []
    refused: list[str] = []
    for phase in request.phases:
        for batch in request.batches:
            for seq in sorted(set(request.seqs)):
                place = Place(
                    shape, phase, batch, _windowed(seq, shape, found), dtype, machine.device,
                    machine.cache_bytes, request.seed,
                )  # fmt: skip
                if phase == "prefill":
                    place = _shortened(place, machine, rate, found)
                if (why := shortage(place, free)) is not None:
                    refused.append(why)
                    found.warn(f"left out: {why}")
                elif place not in places:
                    places.append(place)
    if not places:
        raise LackingError(refused[0])
    return places


def _windowed(seq: int, shape: Shape, found: Found) -> int:
    window = shape.measured_window
    if window is None or seq <= window:
        return seq
    found.warn(
        f"every layer of {shape.name} has a sliding window of {window:,} tokens, so no step reads "
        f"more: {seq:,} tokens are measured as {window:,}"
    )
    return window


def _shortened(place: Place, machine: Machine, rate: float, found: Found) -> Place:
    length = prefill_length(place, machine, rate)
    if length < place.seq:
        found.warn(
            f"prefill at batch {place.batch} is measured at {length:,} tokens: at {place.seq:,} "
            "one call would take too long here"
        )
    return replace(place, seq=length)


def _measure_all(
    places: list[Place],
    chosen: list[tuple[Method, Widths | None]],
    request: BenchRequest,
    machine: Machine,
    found: Found,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    kind = machine.device.type
    budget = Budget(request.repeats or _REPEATS[kind], *_SECONDS[kind])
    for place in places:
        present = []
        for method, widths in chosen:
            if (why := method.lacks(place.phase)) is not None:
                found.warn(f"{method.name} has no {place.phase} row: {why}")
            else:
                present.append((method, widths))
        if not present:
            continue
        with progress(place.name, len(present) + 1) as bar:
            point = Point(place, machine, budget, should_stop, bar.advance, found)
            measure(point, present, request.schedules)
        for text in gpu_doubts(machine.device, before=False):
            found.warn(f"{place.name}: {text}")


def _ranks(chosen: list[tuple[Method, Widths | None]]) -> dict[str, Any] | None:
    """Return the ragged widths that methods were given, the first one's on top."""
    known = {method.name: widths for method, widths in chosen if widths is not None}
    if not known:
        return None
    first = next((known[method.name] for method, _ in chosen if method.low_rank), None)
    if first is None:
        first = next(iter(known.values()))
    return {
        **first.described(),
        "methods": {name: widths.described() for name, widths in known.items()},
    }
