"""A composed run of one request, as events: one layer's parts, put together.

Nobody runs the request: `kvprof.benchmark.jct.composer` says how its time comes about.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvprof.benchmark.case import Workload
from kvprof.benchmark.cases import ragged_case
from kvprof.benchmark.jct.composer import ComposedRequest, Composer, RequestLengths
from kvprof.benchmark.jct.layer import PartSeconds
from kvprof.benchmark.jct.layer_bench import LayerTimes
from kvprof.benchmark.jct.serving import WARNED_ERROR
from kvprof.benchmark.jct.steps import level_tokens
from kvprof.benchmark.methods import Method
from kvprof.benchmark.plans import Widths
from kvprof.benchmark.schedules import ASSUMED_MULTIPROCESSORS
from kvprof.kernels.decode.cuts import COST_PER_TOKEN, equal_shares, longest_first, tuning_for
from kvprof.kernels.planes import RaggedLayout
from kvprof.methods.accounting import bytes_at, full_bytes
from kvprof.records.events import (
    Balance,
    CaseFinished,
    CaseStarted,
    Event,
    LayerMeasured,
    MemorySample,
    PartSample,
    Preview,
    StepFinished,
    Warned,
)

__all__ = ["balances", "measure_composed"]

# --- How a decoding step loads the multiprocessors: by the cost model, and by their clocks.


def balances(
    method: Method,
    workload: Workload,
    multiprocessors: int | None,
    *,
    case: str,
    time: float,
) -> list[Balance]:
    """Return the loads of one decoding step, for the cut that runs and for FDC §5.3's heuristic.

    Parameters
    ----------
    method : Method
        Whose heads lie in ragged planes.
    workload : Workload
        A decoding step.
    multiprocessors : int or None
        None (a CPU) assumes an H200's; nothing is measured there.
    case : str
    time : float
        Of the events.
    """
    widths = method.kept
    group = workload.shape.num_heads // len(widths.keys)
    layout = RaggedLayout(widths.keys, widths.values, group, workload.batch, workload.seq)
    count = multiprocessors or ASSUMED_MULTIPROCESSORS
    found = []
    for schedule in ("equal", "lpt") if method.balanced else ("lpt",):
        measured = _measured_loads(workload, widths, schedule, count) if multiprocessors else None
        loads = _predicted_loads(layout, workload, schedule, count)
        mean = sum(loads) / count
        found.append(
            Balance(time, case, schedule, "decode", [load / mean for load in loads], measured)
        )
    return found


def _predicted_loads(
    layout: RaggedLayout, workload: Workload, schedule: str, count: int
) -> list[float]:
    widths = list(zip(layout.key_widths, layout.value_widths, strict=True))
    costs = [sum(pair) + COST_PER_TOKEN for pair in widths]
    lengths = [workload.seq] * workload.batch
    if schedule == "lpt":
        tasks = [cost * workload.seq for _ in lengths for cost in costs]
        return [float(sum(tasks[task] for task in own)) for own in longest_first(tasks, count)]
    tuning = tuning_for(layout, schedule)
    # In order, each to whichever multiprocessor is free first, as the hardware hands them out.
    loads = [(0.0, worker) for worker in range(count)]
    for _, head, start, stop, _ in equal_shares(
        layout, lengths, tuning.pieces * count, tuning.tile
    ).items:
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + costs[head] * (stop - start), worker))
    return [load for load, _ in sorted(loads, key=lambda pair: pair[1])]


def _measured_loads(
    workload: Workload, widths: Widths, schedule: str, count: int
) -> list[float] | None:
    """Return when each multiprocessor ended its last piece, in seconds from the first start."""
    case = ragged_case("balance", workload, widths, schedule=schedule)
    if case.trace is None:
        return None
    case.trace()  # compiles
    found = case.trace()
    first = int(found.begin.min())
    ends = [0.0] * count
    for where, end in zip(found.multiprocessor.tolist(), found.end.tolist(), strict=True):
        ends[where] = max(ends[where], (end - first) / 1e9)
    return ends


Emit = Callable[[Event], None]


def measure_composed(
    composer: Composer,
    request: RequestLengths,
    *,
    case: str,
    emit: Emit,
    now: Callable[[], float],
) -> ComposedRequest:
    """Compose one request and tell what happens as events.

    Parameters
    ----------
    composer : Composer
        Of the method and the batch; it may have measured other requests already.
    request : RequestLengths
    case : str
        Its name in the run.
    emit : callable
        Given every event.
    now : callable
        Seconds since the start of the run.

    Raises
    ------
    Interrupted
        When the bench was asked to stop; what was measured has been emitted.
    UsageError, LackingError, RuntimeError
        When the method cannot run there.
    """
    return _ComposedCase(composer, request, case, emit, now).run()


@dataclass(frozen=True, eq=False)
class _ComposedCase:
    """Composes one request, and tells it."""

    composer: Composer
    request: RequestLengths
    case: str
    emit: Emit
    now: Callable[[], float]
    #: Parts of prefill and of decode as they were last looked at.
    seen: list[PartSeconds] = field(default_factory=lambda: [{}, {}])

    def run(self) -> ComposedRequest:
        composer, request, now = self.composer, self.request, self.now
        bench = composer.bench
        before, bench.preview = bench.preview, self._preview
        try:
            return self._composed(composer, request, now)
        finally:
            bench.preview = before

    def _composed(
        self, composer: Composer, request: RequestLengths, now: Callable[[], float]
    ) -> ComposedRequest:
        named = composer.points_of(request)
        self._start(named)
        prefill, seconds = composer.prefill(request.input_len, self._prefill_part)
        self.emit(StepFinished(now(), self.case, "prefill", 0, request.input_len, seconds))
        decode, steps, error = composer.decode(request, self._decode_part, self._step)
        found = composer.composition(request, prefill, seconds, decode, steps, error)
        if found.predicted_from is not None:
            self._warn(
                f"prefill of {request.input_len:,} tokens is predicted from prompts of up to "
                f"{found.predicted_from:,}: one layer would take too long or too much memory here"
            )
        if error is not None and error > WARNED_ERROR * found.decode_seconds:
            self._warn(
                f"decode may be off by {error / found.decode_seconds:.1%}: times between the "
                "contexts that were measured do not lie on a line"
            )
        self._layer(named)
        self.emit(
            CaseFinished(
                now(),
                self.case,
                found.prefill_seconds,
                found.decode_seconds,
                None,
                None,
                found.energy_joules,
                list(found.prefill_interval) if found.prefill_interval else None,
                list(found.decode_interval) if found.decode_interval else None,
            )
        )
        return found

    def _preview(self, workload: Workload, parts: PartSeconds, passes: PartSeconds) -> None:
        """Emit what the request may take, by the first samples of one layer at one length."""
        request, layers = self.request, self.composer.bench.model.attention.layers
        decode = workload.phase == "decode"
        times = request.output_len - 1 if decode else request.input_len / workload.seq
        found = {part: times * layers * seconds for part, seconds in parts.items()}
        for part, seconds in passes.items():
            found[part] = found.get(part, 0.0) + times * seconds
        # As a difference of two single samples a part may be left with less than nothing.
        self.seen[decode] = {part: seconds for part, seconds in found.items() if seconds > 0}
        self.emit(
            Preview(
                self.now(),
                self.case,
                self.composer.method.name,
                self.composer.batch,
                request.input_len,
                request.output_len,
                *self.seen,
            )
        )

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
            labels["host"] = (
                "of a pass taken to be a CUDA graph, a prompt's too: its start, and its token on "
                "the host"
            )
        else:
            labels["host"] = "counted in the parts that it calls"
        if request.input_len > composer.longest:
            labels["predicted"] = f"prefill, from prompts of up to {composer.longest:,} tokens"
        if any("schedule" in point.passes for point in named):
            labels["schedule"] = "once per pass: all layers are taken to have the same widths"
        if composer.watts(request)[0] is not None:
            labels["energy"] = "power while a layer was repeated, times each phase's seconds"
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
                1 - stored / full_bytes(plan, tokens, **sizes),
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

    def _layer(self, named: Sequence[LayerTimes]) -> None:
        """Emit the measured layer's error, and how its work is spread."""
        composer = self.composer
        bench, method, shape = composer.bench, composer.method, composer.bench.model.attention
        known = [point.error for point in named if point.error is not None]
        if known:
            plan, itemsize = method.plan, bench.dtype.itemsize
            stored = bytes_at(plan, self.request.stored, itemsize=itemsize, batch=composer.batch)
            each = stored.total // shape.layers
            self.emit(LayerMeasured(self.now(), self.case, 0, max(known), each))
        if method.form == "ragged":
            context = max(self.request.first, self.request.last)
            workload = bench.workload("decode", composer.batch, context)
            for one in balances(
                method,
                workload,
                bench.machine.multiprocessors,
                case=self.case,
                time=self.now(),
            ):
                self.emit(one)
