"""Composed runs of a request's cases, of a trace's requests, and what fits into memory."""

import itertools
import json
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch

from kvprof.analysis.jct import interpolated, ladder
from kvprof.benchmark.jct.ablations import Variant, parse_variant
from kvprof.benchmark.jct.composed import measure_case
from kvprof.benchmark.jct.composer import Composer
from kvprof.benchmark.jct.composition import Composition
from kvprof.benchmark.jct.lengths import Request
from kvprof.benchmark.jct.measured import Bench
from kvprof.benchmark.jct.model_shape import ModelShape, load_model_shape
from kvprof.benchmark.jct.request import JctRequest, case_name
from kvprof.benchmark.jct.requests import load_trace, sample_requests, summary, trace_doubts
from kvprof.benchmark.jct.run import Run
from kvprof.benchmark.jct.storage import cache_bytes, weight_bytes
from kvprof.benchmark.jct.telemetry import Telemetry
from kvprof.benchmark.limits import flop_rate, shortage
from kvprof.benchmark.machine import free_bytes, open_machine
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.timing import Interrupted
from kvprof.child import child_environment, child_python
from kvprof.errors import FailedError, UsageError
from kvprof.leash import Leash
from kvprof.models.placement import parse_dtype
from kvprof.records.events import Progress
from kvprof.sizes import format_bytes

__all__ = ["AllReduce", "capacity", "largest", "measure_all_reduce", "run_composed"]

# --- What fits into a GPU's memory, and throughput against batch at equal memory (TALE Fig. 5,
# 6).


_MOST_CONTEXT, _MOST_SEQUENCES = 2**26, 2**16
_MOST_BATCH = {"cuda": 512, "cpu": 16}
#: Of what is free; a pass's own states need the rest.
_SHARE = 0.95
_TRIED_ON_A_CPU = 2**30


@dataclass(frozen=True, eq=False)
class _Method:
    """A method whose bytes are counted."""

    variant: Variant
    widths: Widths | None
    bench: Bench

    def cache(self, batch: int, tokens: int) -> float:
        """Return the bytes of the cache; 0 for contexts too short for the method's levels."""
        try:
            return cache_bytes(
                self.variant,
                self.bench.model.attention,
                self.widths,
                batch,
                tokens,
                self.bench.dtype,
            )
        except UsageError:  # too short for levels: nothing to compare
            return 0.0

    def longest(self, batch: int, room: float) -> int:
        """Return the longest context whose cache fits into so many bytes."""
        return largest(lambda tokens: self.cache(batch, tokens) <= room, _MOST_CONTEXT)

    def widest(self, tokens: int, room: float) -> int:
        """Return the largest batch whose cache fits into so many bytes."""
        return largest(lambda batch: self.cache(batch, tokens) <= room, _MOST_SEQUENCES)

    @property
    def weights(self) -> int:
        return weight_bytes(self.variant, self.bench.model, self.widths, self.bench.dtype)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest whole number up to `most` that fits; 0 where 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def capacity(
    bench: Bench, methods: list[tuple[Variant, Widths | None]], context: int, batch: int
) -> dict[str, Any]:
    """Return ``data.capacity``.

    Parameters
    ----------
    bench : Bench
    methods : list of (Variant, Widths or None)
    context : int
        Tokens per sequence at which throughput is measured.
    batch : int
        At which the largest context is sought.

    Returns
    -------
    dict
        Per method: bytes of weights and of a token, the largest context that fits beside the
        weights (``tried`` says whether as many bytes were really allocated), the largest batch at
        `context`; and throughput of decoding at batches up to it.
    """
    bench.release()  # a model's weights are counted, and these are in the way
    memory = free_bytes(bench.machine.device)
    rows: list[dict[str, Any]] = []
    throughput: list[dict[str, Any]] = []
    for variant, widths in methods:
        method = _Method(variant, widths, bench)
        room = _SHARE * memory - method.weights
        most_context = method.longest(batch, room)
        most_batch = method.widest(context, room)
        held = method.weights + (method.cache(batch, most_context) if most_context else 0)
        rows.append(
            {
                "method": variant.name,
                "weights_bytes": method.weights,
                "token_bytes": method.cache(1, 2 * context) / (2 * context),
                "largest_context": most_context,
                "tried": _tried(bench, int(held)) if most_context else None,
                "largest_batch": most_batch,
            }
        )
        throughput += _throughput(bench, method, context, most_batch)
    return {
        "memory_bytes": memory,
        "batch": batch,
        "context": context,
        "methods": rows,
        "throughput": throughput,
    }


def _throughput(bench: Bench, method: _Method, context: int, most: int) -> list[dict[str, Any]]:
    """Measure decoding steps at growing batches, all layers in the same memory."""
    kind = bench.machine.device.type
    if most < 1:
        return []
    found = []
    capped = min(most, _MOST_BATCH[kind])
    for batch in ladder({1, capped}, ratio=4):
        place = bench.place("decode", batch, context)
        if shortage(place, free_bytes(place.device)) is not None:
            bench.warn(
                f"{method.variant.name}: batch {batch} at {context:,} tokens is not timed: "
                "one layer and its reference do not fit beside each other"
            )
            break
        one = Request(max(1, context - 1), 2)  # one step, at this context
        composer = Composer(bench, method.variant, method.widths, batch, [one], inf, powered=False)
        _, steps, _ = composer.decode(one)
        seconds = steps[0][1]
        found.append(
            {
                "method": method.variant.name,
                "batch": batch,
                "step_seconds": seconds,
                "tokens_per_s": batch / seconds,
                "fills_memory": batch == most,
            }
        )
    return found


def _tried(bench: Bench, nbytes: int) -> bool | None:
    """Allocate as many bytes at once; None where that would say nothing.

    A CPU hands out memory that it does not have: there only what can be filled quickly is tried.
    """
    device = bench.machine.device
    if device.type == "cpu" and nbytes > _TRIED_ON_A_CPU:
        return None
    block = None
    try:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            block.fill_(1)
    except (torch.OutOfMemoryError, RuntimeError):
        return False
    finally:
        del block
        if device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
    return True


# --- What summing hidden states over the GPUs of tensor parallelism costs: measured, or left
# out.


_LEAST, _MOST = 2**12, 2**30  # bytes
_SECONDS = 300
# One process per GPU: NCCL, then medians of a graph's replays as elsewhere.
_PROGRAM = """
from kvprof.leash import follow_parent
follow_parent()
import gc, json, os, sys, statistics, torch, torch.distributed as dist
rank, world, sizes = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=world,
                        init_method="tcp://127.0.0.1:" + sys.argv[4],
                        device_id=torch.device("cuda", rank))
found = []
gc.disable()  # what it frees would end a capture
for size in sizes:
    data = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), 8
    # NCCL's own threads ask for events meanwhile, which only this mode lets them.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            dist.all_reduce(data)
    samples = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record(); graph.replay(); end.record(); end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / calls)
    found.append(statistics.median(samples[2:]))
    del graph, data
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class AllReduce:
    """Measured times by size.

    Attributes
    ----------
    sizes : list of int
        Bytes on each GPU, ascending.
    seconds : list of float
    """

    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __call__(self, nbytes: int) -> float:
        """Return the seconds of summing so many bytes over all GPUs."""
        if nbytes >= self.sizes[-1]:
            return self.seconds[-1] * nbytes / self.sizes[-1]  # bandwidth is all that counts there
        return interpolated(self.sizes, self.seconds, max(nbytes, self.sizes[0]))


def measure_all_reduce(
    tp: int,
    *,
    count: Callable[[], int] = torch.cuda.device_count,
    program: Sequence[str] = tuple(child_python("-c", _PROGRAM)),
) -> AllReduce | None:
    """Measure NCCL's all-reduce over `tp` GPUs; None where there are not as many.

    Parameters
    ----------
    tp : int
    count : callable
        How many GPUs there are.
    program : sequence of str
        What each process runs; given its rank, the number of processes, sizes and a port.

    Raises
    ------
    FailedError
        When the processes fail, with their last words.
    """
    if count() < tp:
        return None
    sizes = [size for power in range(12, 31, 2) if _LEAST <= (size := 2**power) <= _MOST]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    leashes = [Leash() for _ in range(tp)]
    running = [
        leashes[rank].start(
            [*program, str(rank), str(tp), json.dumps(sizes), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for rank in range(tp)
    ]
    try:
        said = [one.communicate(timeout=_SECONDS) for one in running]
    except subprocess.TimeoutExpired:
        raise FailedError(f"all-reduce over {tp} GPUs did not end within {_SECONDS} s") from None
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
        for leash in leashes:
            leash.close()
    if any(one.returncode for one in running):
        words = next(err for one, (_, err) in zip(running, said, strict=True) if one.returncode)
        last = [line for line in words.splitlines() if line.strip()][-1:]
        raise FailedError(f"all-reduce over {tp} GPUs failed: {(last or ['no word why'])[0][:200]}")
    return AllReduce(sizes, json.loads(said[0][0].splitlines()[-1]))


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
    run: Run,
    bench: Bench,
    chosen: Chosen,
    cases: list[tuple[str, int, int, int]],
    lengths: Sequence[tuple[int, int]],
    rate: float,
) -> dict[tuple[str, int], Composer]:
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
    run: Run,
    bench: Bench,
    variant: Variant,
    widths: Widths | None,
    batch: int,
    requests: Sequence[Request],
) -> None:
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
                composer.bench.model,
                method,
                case=name,
                batch=batch,
                input_len=given,
                output_len=written,
                dtype=composer.bench.dtype,
                device=run.device,
                emit=run.emit,
                now=run.now,
                should_stop=run.should_stop,
                composer=composer,
            )
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
