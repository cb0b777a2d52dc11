"""A composed run: requests predicted from the measured parts of one layer, as events."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvprof.benchmark.jct.ablations import make_variants
from kvprof.benchmark.jct.cache_memory import level_tokens
from kvprof.benchmark.jct.composer import ComposedRequest, Composer, RequestLengths
from kvprof.benchmark.jct.layer_bench import LayerBench, LayerTimes, measure_all_reduce
from kvprof.benchmark.jct.model_shape import ModelShape, load_model_shape
from kvprof.benchmark.jct.request import JctRequest, Run, case_name
from kvprof.benchmark.jct.serving import (
    WARNED_ERROR,
    summary,
    trace_warnings,
    weight_bytes,
)
from kvprof.benchmark.jct.telemetry import Telemetry
from kvprof.benchmark.limits import flop_rate
from kvprof.benchmark.machine import free_bytes, open_machine
from kvprof.benchmark.methods import Method, named_plans
from kvprof.errors import Interrupted
from kvprof.methods.accounting import bytes_at, full_bytes, rate
from kvprof.models.placement import parse_dtype
from kvprof.progress import Counter
from kvprof.records import events
from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    Event,
    MemorySample,
    PartSample,
    StepFinished,
    Warned,
)
from kvprof.serving.load.traces import load_trace, sample_requests
from kvprof.sizes import format_bytes

__all__ = ["measure_composed", "run_composed"]
Emit = Callable[[Event], None]


def measure_composed(
    composer: Composer,
    request: RequestLengths,
    *,
    case: str,
    emit: Emit,
    now: Callable[[], float],
) -> ComposedRequest:
    """Compose one request and tell what happens as events."""
    return _ComposedCase(composer, request, case, emit, now).run()


@dataclass(frozen=True, eq=False)
class _ComposedCase:
    """Composes one request, and tells it."""

    composer: Composer
    request: RequestLengths
    case: str
    emit: Emit
    now: Callable[[], float]

    def run(self) -> ComposedRequest:
        composer, request, now = self.composer, self.request, self.now
        named = composer.points_of(request)
        self._start(named)
        prefill, seconds = composer.prefill(request.input_len, self._prefill_part)
        self.emit(StepFinished(now(), self.case, "prefill", 0, request.input_len, seconds))
        decode, steps, error = composer.decode(request, self._decode_part, self._step)
        found = composer.composition(request, prefill, seconds, decode, steps, error)
        if found.predicted_from is not None:
            self._warn(
                f"prefill of {request.input_len:,} tokens is extrapolated from prompts of up to "
                f"{found.predicted_from:,} (limited by time or memory)"
            )
        if error is not None and error > WARNED_ERROR * found.decode_seconds:
            self._warn(
                f"decode may be off by {error / found.decode_seconds:.1%}: times between measured "
                "contexts are not linear"
            )
        self.emit(
            CaseFinished(
                now(),
                self.case,
                found.prefill_seconds,
                found.decode_seconds,
                found.energy_joules,
                list(found.prefill_interval) if found.prefill_interval else None,
                list(found.decode_interval) if found.decode_interval else None,
            )
        )
        return found

    def _warn(self, text: str) -> None:
        self.emit(Warned(self.now(), text, self.case))

    def _start(self, named: Sequence[LayerTimes]) -> None:
        composer, request = self.composer, self.request
        method, shape = composer.method, composer.bench.model.attention
        plan, widths, tokens = method.plan, method.widths, request.stored
        sizes = {"itemsize": composer.bench.dtype.itemsize, "batch": composer.batch}
        stored = bytes_at(plan, tokens, **sizes).total
        labels = {key: text for point in named for key, text in point.labels.items()}
        if composer.bench.machine.is_gpu:
            labels["host"] = "launch of the (assumed) CUDA graph and sampling on the CPU"
        else:
            labels["host"] = "counted in the parts that it calls"
        if request.input_len > composer.longest:
            labels["predicted"] = f"prefill, from prompts of up to {composer.longest:,} tokens"
        if any("schedule" in point.passes for point in named):
            labels["schedule"] = "once per pass, assuming the same widths in all layers"
        if composer.watts(request)[0] is not None:
            labels["energy"] = "mean power while a layer repeats, times each phase's seconds"
        if widths is not None:
            labels["widths"] = widths.source
        whole = [shape.head_dim] * shape.num_kv_heads
        layers = [
            {
                "layer": layer,
                "key_ranks": list(widths.keys) if widths is not None else whole,
                "value_ranks": list(widths.values) if widths is not None else whole,
                "nbytes": stored // shape.layers,
            }
            for layer in range(shape.layers)
        ]
        self.emit(
            CaseStarted(
                self.now(),
                self.case,
                method.name,
                rate(plan, tokens),
                composer.batch,
                request.input_len,
                request.output_len,
                layers,
                labels,
            )
        )
        for context in sorted({request.input_len, tokens}):
            held = bytes_at(plan, context, **sizes).total
            self.emit(
                MemorySample(
                    self.now(),
                    self.case,
                    context,
                    held,
                    held,
                    full_bytes(plan, context, **sizes),
                    None,
                    level_tokens(plan, context),
                )
            )

    def _prefill_part(self, parts: dict[str, float], weight: float) -> None:
        for part, seconds in parts.items():
            self.emit(
                PartSample(
                    self.now(),
                    self.case,
                    "prefill",
                    part,
                    seconds,
                    0,
                    self.request.input_len,
                    None,
                    weight,
                )
            )

    def _decode_part(
        self, context: int, steps: float, parts: dict[str, float], count: float
    ) -> None:
        for part, seconds in parts.items():
            self.emit(
                PartSample(
                    self.now(),
                    self.case,
                    "decode",
                    part,
                    seconds,
                    context - self.request.input_len,
                    context,
                    None,
                    steps * count,
                )
            )

    def _step(self, context: int, seconds: float, weight: float) -> None:
        self.emit(
            StepFinished(
                self.now(),
                self.case,
                "decode",
                context - self.request.input_len,
                context,
                seconds,
                weight,
            )
        )


# --- Composed runs: a request's cases, and a trace's requests.


def run_composed(run: Run) -> None:
    """Measure one layer of the shape and compose every case."""
    request = run.request
    model = load_model_shape(request.model).of_layers(request.layers).per_gpu(request.tp)
    dtype = parse_dtype(request.dtype, run.device)
    cases, lengths = _cases(request)
    chosen = make_variants(
        request.methods,
        model.attention,
        model=request.model,
        rate=request.rate,
        rate_given=request.rate_given,
        ranks=request.ranks,
        plans=named_plans(request.plans),
        device=run.device,
        dtype=dtype,
        tokens=max(given + written for _, _, given, written in cases),
        seed=request.seed,
        progress=run.progress,
        should_stop=run.should_stop,
    )
    run.start([case_name(*case) for case in cases], model.described())
    for method in chosen:
        for text in method.warnings:
            run.warn(text)
    with torch.inference_mode(), Telemetry(run.emit, run.now, run.device) as telemetry:
        with run.progress("measuring memory bandwidth", 1) as bar:
            machine = open_machine(run.device)
            rate = flop_rate(machine, dtype)
            bar.advance()
        bench = LayerBench(
            model,
            machine,
            dtype,
            request.seed,
            request.repeats,
            all_reduce=_all_reduce(run),
            should_stop=run.should_stop,
            warn=run.warn,
            clock=run.now,
            energy=telemetry.energy_joules,
        )
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
                for text in bench.spread_warnings():
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
            f"communication is not included: this machine lacks {tp} GPUs to measure an "
            "all-reduce; times are one GPU's own work"
        )
    return found


def _composers(
    run: Run,
    bench: LayerBench,
    chosen: list[Method],
    cases: list[tuple[str, int, int, int]],
    lengths: Sequence[tuple[int, int]],
    rate: float,
) -> dict[tuple[str, int], Composer]:
    """Return what composes each method at each batch; those that cannot are left out."""
    found: dict[tuple[str, int], Composer] = {}
    for method in chosen:
        for batch in run.request.batches:
            own = [
                RequestLengths(given, written)
                for name, at, given, written in cases
                if name == method.name and at == batch
            ]
            sampled = (
                [RequestLengths(*pair) for pair in lengths]
                if batch == run.request.batches[0]
                else []
            )
            with run.spared(f"{method.name} b{batch}"):
                found[method.name, batch] = Composer(bench, method, batch, own, rate, sampled)
                _tell_memory(run, bench, method, batch, [*own, *sampled])
    return found


def _tell_memory(
    run: Run,
    bench: LayerBench,
    method: Method,
    batch: int,
    requests: Sequence[RequestLengths],
) -> None:
    """Say where a whole request would not fit into this machine, though one layer does."""
    model: ModelShape = bench.model
    tokens = max(one.input_len + one.output_len for one in requests)
    stated = model.attention.context
    if stated is not None and tokens > stated:
        run.warn(
            f"{model.name} has a context of {stated:,} tokens, but requests have up to "
            f"{tokens:,}; times apply to its shape only"
        )
    plan = method.plan
    needed = weight_bytes(method, model, bench.dtype)
    needed += bytes_at(plan, tokens, itemsize=bench.dtype.itemsize, batch=batch).total
    free = free_bytes(run.device)
    if needed > free:
        run.warn(
            f"{method.name}: weights and a cache of {batch} × {tokens:,} tokens need "
            f"{format_bytes(needed)}, and {format_bytes(free)} are free; only one layer is "
            "measured"
        )


def _tell_points(run: Run, total: int, done: int) -> None:
    run.emit(events.Progress(run.now(), None, "point", done, total, max(total, done)))


def _advance(bar: Counter, tell: Callable[[int], None]) -> Callable[[str], None]:
    done = itertools.count(1)

    def advance(text: str) -> None:
        tell(next(done))
        bar.describe(text)
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
            asked = RequestLengths(given, written)
            found = measure_composed(composer, asked, case=name, emit=run.emit, now=run.now)
            run.extra.setdefault("integration", []).append(_integration(name, found))


def _integration(case: str, found: ComposedRequest) -> dict[str, Any]:
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
    found: dict[str, list[ComposedRequest]] = {}
    for (method, batch), composer in composers.items():
        if batch != request.batches[0]:
            continue
        with run.spared(f"{method}, {request.trace}"):
            made = found[method] = [composer.compose(RequestLengths(*pair)) for pair in lengths]
            for text in trace_warnings(method, made):
                run.warn(text)
    if found:
        run.extra["requests"] = summary(load_trace(request.trace), request.seed, found)
