"""``run_bench``: phases, batches and contexts, each with its baselines and methods."""

from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from subprocess import CalledProcessError
from typing import Any

import torch
from triton.errors import TritonError

from kvprof.benchmark.baselines import UncompressedInputs, baseline_builders, uncompressed_inputs
from kvprof.benchmark.case import Case, Lack, Workload
from kvprof.benchmark.cases import build_case, ragged_case
from kvprof.benchmark.limits import flop_rate, largest_context, prefill_length, shortage
from kvprof.benchmark.machine import Machine, all_threads, free_bytes, gpu_warnings, open_machine
from kvprof.benchmark.methods import Method, make_methods, named_plans
from kvprof.benchmark.plans import full_widths
from kvprof.benchmark.request import BenchRequest
from kvprof.benchmark.rows import TOLERANCE, Found, SampleWarnings, Timed, add_row
from kvprof.benchmark.shapes import Shape, load_shape
from kvprof.benchmark.timing import DeviceLost, Sampler, interleaved, sampler
from kvprof.errors import Interrupted, KvprofError, LackingError, UsageError, no_memory
from kvprof.kernels.dispatch import compiling_ahead
from kvprof.models.placement import main_device, parse_dtype
from kvprof.progress import Progress, silent

__all__ = ["BenchRequest", "Budget", "Point", "measure", "run_bench"]

# --- All rows of one phase, batch and context: the baselines first, then each method against
# the best.
#
# The fastest uncompressed kernel is kept beside every method and sampled in turn with it, so a
# speed-up is a ratio of medians of the same minutes.


# How often slower than the best a kernel is that further samples do not help: after one, two and
# three.
_HOPELESS = (4.0, 2.0, 1.5)


@dataclass(frozen=True)
class Budget:
    """How long to sample."""

    repeats: int  # samples per row
    baseline_seconds: float  # see `kvprof.benchmark.timing.interleaved`
    method_seconds: float


@dataclass(frozen=True)
class Point:
    """One phase, batch and context, and how it is measured."""

    workload: Workload
    machine: Machine
    budget: Budget
    #: Whether the user asked for the end; and that one more method is done.
    should_stop: Callable[[], bool]
    advance: Callable[[], None]
    found: Found  # where rows go
    #: What is said once, of all rows together.
    unsteady: SampleWarnings = field(default_factory=SampleWarnings)


@dataclass(frozen=True, eq=False)
class _Full:
    """An uncompressed kernel that ran, with its first samples."""

    case: Case
    sampler: Sampler
    seconds: list[float]
    error: float


def measure(point: Point, methods: list[Method]) -> None:
    """Measure one workload and add what is found to `point.found`."""
    workload, found = point.workload, point.found
    best: _Full | None = None
    with _row_may_fail(point, "uncompressed (BF16)"):
        best = _baselines(point)
    point.advance()
    if best is None:
        found.warn(f"{workload.name}: no uncompressed kernel ran, so there are no speed-ups")
    try:
        for method in methods:
            if method.form != "full":
                with _row_may_fail(point, method.name):
                    _method(point, method, best)
            elif best is not None:
                timed = Timed(
                    "full",
                    best.case,
                    workload.full_bytes,
                    0.0,
                    best.seconds,
                    best.error,
                    best.seconds,
                    best.case.name,
                )
                _add(point, timed)
            point.advance()
    finally:
        name = best.case.name if best is not None else None
        for text in point.unsteady.texts(workload.name, point.budget.repeats, name):
            found.warn(text)


def _tell(point: Point, name: str, case: Case, timed: Sampler) -> None:
    if case.note is not None:
        point.found.warn(case.note)
    if timed.note is not None:
        point.found.warn(f"{name}: {timed.note}")


def _add(point: Point, timed: Timed) -> None:
    add_row(timed, point.machine, point.budget.repeats, point.found, point.unsteady)


@contextmanager
def _row_may_fail(point: Point, name: str) -> Iterator[None]:
    """Let one row fail, for lack of memory or because a kernel does not run, and go on."""
    workload = point.workload
    try:
        yield
    except UsageError as refusal:
        point.found.warn(f"{name}, {workload.name}: not measured: {refusal}")
    except (MemoryError, RuntimeError, TritonError, CalledProcessError) as problem:
        if point.should_stop() and isinstance(problem, CalledProcessError):
            raise Interrupted from problem  # a compiler heard the same Ctrl-C
        if no_memory(problem):
            most = largest_context(workload, free_bytes(workload.device))
            point.found.warn(
                f"{name}, {workload.name}: not enough memory; about {most:,} tokens would fit at "
                f"batch {workload.batch}"
            )
        elif _is_cuda_failure(problem):
            raise DeviceLost(f"{name}, {workload.name}: {_words(problem)}") from problem
        else:
            point.found.warn(f"{name}, {workload.name}: failed: {_words(problem)}")
    finally:
        if workload.device.type == "cuda":
            with suppress(RuntimeError):  # a GPU that was lost
                torch.cuda.empty_cache()


def _is_cuda_failure(problem: Exception) -> bool:
    """Whether CUDA itself failed: every later call in this process fails too."""
    return "CUDA error" in str(problem) or "illegal memory access" in str(problem)


def _words(problem: Exception) -> str:
    """Return the first line of what a library says, not longer than a line should be."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[0] if lines else type(problem).__name__)[:160]


def _baselines(point: Point) -> _Full | None:
    """Time every uncompressed kernel; the fastest of those with correct results is kept."""
    workload = point.workload
    inputs = uncompressed_inputs(workload)
    best: _Full | None = None
    for name, build in baseline_builders(workload, free_bytes(workload.device)).items():
        entry: dict[str, Any] = {
            "name": name,
            "phase": workload.phase,
            "batch": workload.batch,
            "seq": workload.seq,
            "seconds": None,
            "reason": None,
        }
        try:
            tried = _baseline(point, name, build, inputs, best)
        except (Lack, UsageError) as why:
            entry["reason"] = str(why)
        except (MemoryError, RuntimeError, TritonError) as problem:
            if _is_cuda_failure(problem):
                raise
            short = no_memory(problem)
            entry["reason"] = "it needs more memory than is free" if short else _words(problem)
        else:
            entry["seconds"] = tried.seconds
            if best is None or median(tried.seconds) < median(best.seconds):
                best = tried
        point.found.baselines.append(entry)
        if workload.device.type == "cuda":
            torch.cuda.empty_cache()
    return best


def _baseline(
    point: Point,
    name: str,
    build: Callable[[UncompressedInputs], Case],
    inputs: UncompressedInputs,
    best: _Full | None,
) -> _Full:
    case = build(inputs)
    timed = sampler(case.runs, point.workload.device)
    error = case.error(timed.output())
    if error > TOLERANCE[point.workload.dtype]:
        raise Lack(f"its result is wrong (error {error:.1g} vs float64)")
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


def _method(point: Point, method: Method, best: _Full | None) -> None:
    """Time one method in turn with the best baseline, and add its row."""
    case = build_case(method, point.workload)
    timed = sampler(case.runs, point.workload.device)
    error = case.error(timed.output())
    _tell(point, method.name, case, timed)
    beside = [best.sampler] if best is not None else []
    budget = point.budget
    *others, seconds = interleaved(
        [*beside, timed],
        budget.repeats,
        seconds=budget.method_seconds,
        should_stop=point.should_stop,
    )
    row = Timed(
        method.name,
        case,
        method.nbytes(point.workload.batch, point.workload.seq, point.workload.dtype),
        method.rate(point.workload.seq),
        seconds,
        error,
        others[0] if others else None,
        best.case.name if best is not None else None,
    )
    _add(point, row)
    if best is not None and others:
        point.unsteady.compare(method.name, median(others[0]), median(best.seconds))


_REPEATS = {"cuda": 30, "cpu": 7}
_SECONDS = {"cuda": (10.0, 10.0), "cpu": (1.5, 2.5)}


def run_bench(
    request: BenchRequest,
    *,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], list[str]]:
    """Time attention over compressed caches against the fastest uncompressed kernel found here."""
    shape = load_shape(request.shape)
    device = main_device(request.device)
    dtype = parse_dtype(request.dtype, device)
    found = Found()
    chosen = make_methods(
        list(dict.fromkeys(request.methods)),
        shape,
        model=str(request.shape),
        rate=request.rate,
        rate_given=request.rate_given,
        ranks=str(request.ranks) if request.ranks is not None else None,
        plans=named_plans(request.plans),
        device=device,
        dtype=dtype,
        tokens=max(request.seqs),
        seed=request.seed,
        progress=progress,
        should_stop=should_stop,
    )
    for method in chosen:
        for text in method.warnings:
            found.warn(text)
    with all_threads():
        for text in gpu_warnings(device, before=True):
            found.warn(text)
        with progress("measuring memory bandwidth and arithmetic", 1) as bar:
            machine = open_machine(device)
            rate = flop_rate(machine, dtype)
            bar.advance()
        workloads = _workloads(request, shape, machine, dtype, rate, found)
        if machine.is_gpu:
            _compile(workloads, chosen, progress)
        with suppress(Interrupted):  # the caller knows that it asked
            try:
                _measure_all(workloads, chosen, request, machine, found, progress, should_stop)
            except DeviceLost as lost:
                found.stopped = f"the GPU stopped ({lost}); later cases were not measured"
    data = {
        "rows": found.rows,
        "shape": shape.described(),
        "ranks": _ranks(chosen),
        "bandwidth": {"tb_per_s": machine.tb_per_s, "what": machine.bandwidth_what},
        "compute": {
            "flop_per_s": rate,
            "what": f"matrix multiplication in {str(dtype).removeprefix('torch.')}, best of 3",
        },
        "baselines": found.baselines,
        "stopped": found.stopped,
    }
    return data, found.warnings


def _workloads(
    request: BenchRequest,
    shape: Shape,
    machine: Machine,
    dtype: torch.dtype,
    rate: float,
    found: Found,
) -> list[Workload]:
    """Return what is measured, cut to what fits the time and the memory, and say what is not."""
    free = free_bytes(machine.device)
    workloads: list[Workload] = []
    refused: list[str] = []
    for phase in request.phases:
        for batch in request.batches:
            for seq in sorted(set(request.seqs)):
                workload = Workload(
                    shape,
                    phase,
                    batch,
                    _windowed(seq, shape, found),
                    dtype,
                    machine.device,
                    machine.device_cache_bytes,
                    request.seed,
                )
                if phase == "prefill":
                    workload = _shortened(workload, machine, rate, found)
                if (why := shortage(workload, free)) is not None:
                    refused.append(why)
                    found.warn(f"left out: {why}")
                elif workload not in workloads:
                    workloads.append(workload)
    if not workloads:
        raise LackingError(refused[0])
    return workloads


def _windowed(seq: int, shape: Shape, found: Found) -> int:
    window = shape.measured_window
    if window is None or seq <= window:
        return seq
    found.warn(
        f"every layer of {shape.name} has a sliding window of {window:,} tokens: {seq:,} tokens "
        f"are measured as {window:,}"
    )
    return window


def _shortened(workload: Workload, machine: Machine, rate: float, found: Found) -> Workload:
    length = prefill_length(workload, machine, rate)
    if length < workload.seq:
        found.warn(
            f"prefill at batch {workload.batch} is measured at {length:,} tokens; one call at "
            f"{workload.seq:,} would take too long"
        )
    return replace(workload, seq=length)


def _compile(workloads: list[Workload], chosen: list[Method], progress: Progress) -> None:
    """Compile the kernels of all rows in parallel; rows that fail report it when measured."""
    with torch.cuda.device(workloads[0].device), compiling_ahead() as pending:
        for workload in workloads:
            full = full_widths(workload.shape)
            cases = [partial(ragged_case, "kvprof", workload, full, path="triton")]
            cases += [
                partial(build_case, method, workload, path="triton")
                for method in chosen
                if method.form != "full" and method.lacks(workload.phase) is None
            ]
            for build in cases:
                with suppress(KvprofError, Lack, MemoryError, RuntimeError, TritonError):
                    build().runs[0]()
                torch.cuda.empty_cache()
        with progress("compiling kernels", len(pending)) as bar:
            for _ in as_completed(pending):
                bar.advance()


def _measure_all(
    workloads: list[Workload],
    chosen: list[Method],
    request: BenchRequest,
    machine: Machine,
    found: Found,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    kind = machine.device.type
    budget = Budget(request.repeats or _REPEATS[kind], *_SECONDS[kind])
    for workload in workloads:
        present = []
        for method in chosen:
            if (why := method.lacks(workload.phase)) is not None:
                found.warn(f"{method.name} has no {workload.phase} row: {why}")
            else:
                present.append(method)
        if not present:
            continue
        with progress(workload.name, len(present) + 1) as bar:
            point = Point(workload, machine, budget, should_stop, bar.advance, found)
            measure(point, present)
        for text in gpu_warnings(machine.device, before=False):
            found.warn(f"{workload.name}: {text}")


def _ranks(chosen: list[Method]) -> dict[str, Any] | None:
    """Return the widths that methods were given, the first one's per KV head on top."""
    known = {method.name: method.widths for method in chosen if method.widths is not None}
    if not known:
        return None
    first = next((method.name for method in chosen if method.low_rank), next(iter(known)))
    return {
        **known[first].described(),
        "methods": {name: widths.described() for name, widths in known.items()},
    }
