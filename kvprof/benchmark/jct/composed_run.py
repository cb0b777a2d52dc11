"""Composed runs of a request's cases, of a trace's requests, and what fits into memory."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvprof.benchmark.jct.ablations import Variant, parse_variant
from kvprof.benchmark.jct.capacity import capacity
from kvprof.benchmark.jct.communication import measure_all_reduce
from kvprof.benchmark.jct.composed import measure_case
from kvprof.benchmark.jct.composer import Composer
from kvprof.benchmark.jct.composition import Composition
from kvprof.benchmark.jct.lengths import Request
from kvprof.benchmark.jct.measured import Bench
from kvprof.benchmark.jct.model_shape import ModelShape, load_model_shape
from kvprof.benchmark.jct.request import JctRequest, case_name
from kvprof.benchmark.jct.requests import summary, trace_doubts
from kvprof.benchmark.jct.run import Run
from kvprof.benchmark.jct.storage import cache_bytes, weight_bytes
from kvprof.benchmark.jct.telemetry import Telemetry
from kvprof.benchmark.jct.traces import load_trace, sample_requests
from kvprof.benchmark.limits import flop_rate
from kvprof.benchmark.machine import free_bytes, open_machine
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.timing import Interrupted
from kvprof.models.placement import parse_dtype
from kvprof.records.events import Progress
from kvprof.sizes import format_bytes

__all__ = ["run_composed"]

Chosen = list[tuple[Variant, Widths | None]]


def run_composed(run: Run) -> None:
    """Measure one layer of the shape and compose every case.

    Parameters
    ----------
    run : Run
    """
    request = run.request
    model = load_model_shape(request.model).of_layers(request.layers).per_gpu(request.tp)
    dtype = parse_dtype(request.dtype, run.device)
    chosen: Chosen = []
    for name in dict.fromkeys(request.methods):
        variant = parse_variant(name)
        variant.refuse_on(run.device.type)
        chosen.append((variant, variant.widths(model.attention, request.rate, request.ranks)))
    cases, lengths = _cases(request)
    run.start([case_name(*case) for case in cases], model.described())
    for _, widths in chosen:
        for text in widths.warnings if widths is not None else ():
            run.warn(text)
    with torch.inference_mode(), Telemetry(run.emit, run.now, run.device) as telemetry:
        with run.progress("measuring memory bandwidth", 1) as bar:
            machine = open_machine(run.device)
            rate = flop_rate(machine, dtype)
            bar.advance()
        bench = Bench(
            model, machine, dtype, request.seed, request.repeats,
            all_reduce=_all_reduce(run), should_stop=run.should_stop, warn=run.warn,
            clock=run.now, energy=telemetry.energy_joules,
        )  # fmt: skip
        composers = _composers(run, bench, chosen, cases, lengths, rate)
        total = sum(composer.points for composer in composers.values())
        with run.progress(f"one layer of {model.name}", total) as bar:
            bench.advance = _advance(bar, partial(_tell_points, run, total))
            try:
                _tell_points(run, total, 0)
                _run_cases(run, composers, cases)
                if lengths:
                    _run_trace(run, composers, lengths)
            finally:
                if not request.capacity:
                    _tell_doubts(run, bench)
        if request.capacity:
            with run.progress("capacity", 1) as bar, run.spared("capacity"):
                bench.advance = _advance(None)
                context = max(given for _, _, given, _ in cases)
                try:
                    run.extra["capacity"] = capacity(bench, chosen, context, request.batches[0])
                finally:
                    _tell_doubts(run, bench)
                bar.advance()


def _tell_doubts(run: Run, bench: Bench) -> None:
    for text in bench.doubts():
        run.warn(text)


def _cases(
    request: JctRequest,
) -> tuple[list[tuple[str, int, int, int]], list[tuple[int, int]]]:
    """Return the cases, and the lengths of a trace's requests, whose mean is then the case."""
    if request.trace is None:
        return request.cases(), []
    trace = load_trace(request.trace)
    lengths = sample_requests(trace, request.requests, request.seed)
    means = replace(request, input_lens=(trace.input.average,), output_lens=(trace.output.average,))
    return means.cases(), lengths


def _all_reduce(run: Run) -> Callable[[int], float] | None:
    tp = run.request.tp
    if tp == 1:
        return None
    with run.progress(f"all-reduce over {tp} GPUs", 1) as bar:
        found = measure_all_reduce(tp)
        bar.advance()
    if found is None:
        run.warn(
            f"communication is left out: there are no {tp} GPUs here to measure an all-reduce on; "
            "the figures are one GPU's own work"
        )
    return found


def _composers(
    run: Run, bench: Bench, chosen: Chosen, cases: list[tuple[str, int, int, int]],
    lengths: Sequence[tuple[int, int]], rate: float,
) -> dict[tuple[str, int], Composer]:  # fmt: skip
    """Return what composes each method at each batch; those that cannot are told and left out."""
    found: dict[tuple[str, int], Composer] = {}
    for variant, widths in chosen:
        for batch in run.request.batches:
            own = [
                Request(given, written)
                for name, at, given, written in cases
                if name == variant.name and at == batch
            ]
            sampled = (
                [Request(*pair) for pair in lengths] if batch == run.request.batches[0] else []
            )
            with run.spared(f"{variant.name} b{batch}"):
                found[variant.name, batch] = Composer(
                    bench, variant, widths, batch, own, rate, sampled
                )
                _tell_memory(run, bench, variant, widths, batch, [*own, *sampled])
    return found


def _tell_memory(
    run: Run, bench: Bench, variant: Variant, widths: Widths | None, batch: int,
    requests: Sequence[Request],
) -> None:  # fmt: skip
    """Say where a whole request would not fit into this machine, though one layer does."""
    model: ModelShape = bench.model
    tokens = max(one.input_len + one.output_len for one in requests)
    stated = model.attention.context
    if stated is not None and tokens > stated:
        run.warn(
            f"{model.name} states a context of {stated:,} tokens, and requests here have up to "
            f"{tokens:,}: the times are of its shape alone"
        )
    needed = weight_bytes(variant, model, widths, bench.dtype)
    needed += cache_bytes(variant, model.attention, widths, batch, tokens, bench.dtype)
    free = free_bytes(run.device)
    if needed > free:
        run.warn(
            f"{variant.name}: weights and a cache of {batch} × {tokens:,} tokens take "
            f"{format_bytes(needed)}, and {format_bytes(free)} are free: one layer is measured "
            "here, the whole request needs a larger machine"
        )


def _tell_points(run: Run, total: int, done: int) -> None:
    run.emit(Progress(run.now(), None, "point", done, total, max(total, done)))


def _advance(bar: Any, tell: Callable[[int], None] = lambda _: None) -> Callable[[str], None]:
    done = itertools.count(1)

    def advance(text: str) -> None:
        tell(next(done))
        if bar is None:
            return
        describe = getattr(bar, "describe", None)
        if describe is not None:
            describe(text)
        bar.advance()

    return advance


def _run_cases(
    run: Run, composers: dict[tuple[str, int], Composer], cases: list[tuple[str, int, int, int]]
) -> None:
    for method, batch, given, written in cases:
        name = case_name(method, batch, given, written)
        composer = composers.get((method, batch))
        if composer is None:
            continue
        if run.should_stop():
            raise Interrupted
        with run.case(name):
            found = measure_case(
                composer.bench.model, method, case=name, batch=batch, input_len=given,
                output_len=written, dtype=composer.bench.dtype, device=run.device, emit=run.emit,
                now=run.now, should_stop=run.should_stop, composer=composer,
            )  # fmt: skip
            run.extra.setdefault("integration", []).append(_integration(name, found))


def _integration(case: str, found: Composition) -> dict[str, Any]:
    return {
        "case": case,
        "rungs": len(found.steps),
        "error_seconds": found.error,
        "prefill_predicted_from": found.predicted_from,
    }


def _run_trace(
    run: Run, composers: dict[tuple[str, int], Composer], lengths: Sequence[tuple[int, int]]
) -> None:
    """Compose every sampled request of every method, at the first batch size."""
    request = run.request
    assert request.trace is not None
    found: dict[str, list[Composition]] = {}
    for (method, batch), composer in composers.items():
        if batch != request.batches[0]:
            continue
        with run.spared(f"{method}, {request.trace}"):
            made = found[method] = [composer.compose(Request(*pair)) for pair in lengths]
            for text in trace_doubts(method, made):
                run.warn(text)
    if found:
        run.extra["requests"] = summary(load_trace(request.trace), request.seed, found)
