"""A real run: a model with weights answers a request, and every part of it is timed.

The request runs without marks and with them, in turns; its times are those without. Where a clock
runs, and what its figures are:

- On a CPU a monotonic clock is read at every mark. ``host`` is what lies within a forward pass and
  in no other part: Python between modules, masks, positions.
- On a GPU events are recorded into the stream and read between steps. Steps that are not replayed
  from a CUDA graph leave the GPU waiting for the host: with marks each is held back until the host
  has queued it whole, so that a part's time is the GPU's. Where a step's parts take longer than
  the step without marks, its marks are taken to have added the same to each stretch.
  ``host`` is what the GPU waited: a step's wall time without marks minus the GPU's time from its
  first mark to its last. Kernels that belong to no part stay unattributed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from kvprof.benchmark.jct.cache_memory import layer_facts
from kvprof.benchmark.jct.paired_runs import (
    CaseEvents,
    PairedRuns,
    RequestRun,
    run_warnings,
)
from kvprof.benchmark.jct.steps import Runner, uncaptured, warm_up
from kvprof.errors import Interrupted, LackingError, UsageError
from kvprof.methods.accounting import rate
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.events import CaseFinished, CaseStarted, Event, Warned
from kvprof.runtime.compressed import compressed
from kvprof.runtime.session import Compression

__all__ = ["measure_real"]

Emit = Callable[[Event], None]


def measure_real(
    loaded: LoadedModel,
    plan: Plan,
    *,
    case: str,
    input_ids: Tensor,
    output_len: int,
    emit: Emit,
    now: Callable[[], float],
    should_stop: Callable[[], bool],
    repeats: int,
    most: int | None = None,
    kernels: str | None = None,
    graph: bool | None = False,
    energy: Callable[[float, float], float | None] | None = None,
) -> CaseFinished | None:
    """Measure one request under one plan, as events; times are medians without marks."""
    _check(loaded, input_ids, output_len, repeats)
    try:
        with _opened(
            loaded, plan, kernels, case, input_ids, output_len, emit, now, should_stop
        ) as measured:
            measured.start(measured.replays(graph))
            measured.run(repeats, repeats if most is None else most)
            if not measured.pairs:
                return None
    except torch.OutOfMemoryError as problem:
        raise LackingError(
            f"out of memory on {loaded.device}: {case}; try a smaller batch or a shorter input"
        ) from problem
    return measured.finish(energy)


@contextmanager
def _opened(
    loaded: LoadedModel,
    plan: Plan,
    kernels: str | None,
    case: str,
    input_ids: Tensor,
    output_len: int,
    emit: Emit,
    now: Callable[[], float],
    should_stop: Callable[[], bool],
) -> Iterator["_RealCase"]:
    """Compress the model while the body runs a request on it."""
    on_gpu = loaded.device.type == "cuda"
    with (
        torch.cuda.device(loaded.device) if on_gpu else nullcontext(),
        # Steps are replayed by the runner, which marks what is in them.
        compressed(loaded, plan, kernels, graphs=False) as session,
    ):
        ids = input_ids.to(loaded.device)
        yield _RealCase(loaded, plan, session, case, ids, output_len, emit, now, should_stop)


def _check(loaded: LoadedModel, ids: Tensor, output_len: int, repeats: int) -> None:
    if ids.dim() != 2 or not ids.numel():
        raise UsageError(f"input ids have shape {tuple(ids.shape)}; required is [batch, tokens]")
    if output_len < 1:
        raise UsageError(f"output_len must be 1 or more, not {output_len}")
    if repeats < 1:
        raise UsageError(f"repeats must be 1 or more, not {repeats}")
    total = ids.shape[1] + output_len
    if total > loaded.context_length:
        raise UsageError(
            f"{ids.shape[1]:,} input and {output_len:,} output tokens exceed the context of "
            f"{loaded.spec} ({loaded.context_length:,})"
        )
    devices = {parameter.device for parameter in loaded.model.parameters()}
    if len(devices) > 1 or loaded.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"a real run requires one CPU or one NVIDIA GPU, but {loaded.spec} is on "
            f"{', '.join(sorted(map(str, devices)))}; use another --device"
        )


class _RealCase:
    """One case while it is measured."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        session: Compression,
        case: str,
        ids: Tensor,
        output_len: int,
        emit: Emit,
        now: Callable[[], float],
        should_stop: Callable[[], bool],
    ) -> None:
        self._loaded, self._plan, self._session = loaded, plan, session
        self._case, self._ids, self._output_len = case, ids, output_len
        self._emit, self._now, self._should_stop = emit, now, should_stop
        self._runs: PairedRuns | None = None
        if loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(loaded.device)

    @property
    def pairs(self) -> int:
        """How often the request has run both ways, its parts emitted."""
        return 0 if self._runs is None else len(self._runs.attributed())

    def replays(self, graph: bool | None) -> bool:
        """Say whether steps are replayed, where `measure_real` was not told."""
        if graph is not None:
            return graph
        long_enough = self._ids.shape[1] >= self._session.route.least_tokens
        return long_enough and uncaptured(self._loaded, self._session) is None

    def start(self, graph: bool) -> None:
        """Emit what will be measured."""
        batch, input_len = self._ids.shape
        tokens, itemsize = input_len + self._output_len - 1, self._loaded.dtype.itemsize
        self._runner = Runner(self._loaded, self._session, self._ids, self._output_len, graph)
        labels: dict[str, str] = {}
        route = self._session.route
        if None in route.reasons and input_len >= route.least_tokens:
            labels["merge"] = "in attention: one operator does both"
            if route.notes:
                labels["storage"] = "; ".join(route.notes)
        if self._runner.on_gpu:
            labels["decode"] = "CUDA graph" if graph else "eager"
            labels["by_difference"] = "host"
            labels["marks"] = (
                "where a step's parts take longer than the unmarked step, each mark is assumed "
                "to add the same time"
            )
        facts = layer_facts(self._plan, tokens, itemsize=itemsize, batch=batch)
        event = CaseStarted(
            self._now(),
            self._case,
            self._plan.method,
            rate(self._plan, tokens),
            batch,
            input_len,
            self._output_len,
            facts,
            labels,
        )
        self._emit(event)

    def run(self, repeats: int, most: int) -> None:
        """Run the request without marks and with them, in turns."""
        runner = self._runner
        steps = self._output_len - 1
        warm_up(runner, steps)
        events = CaseEvents(
            self._loaded,
            self._plan,
            self._case,
            self._ids,
            steps,
            runner.on_gpu,
            self._emit,
            self._now,
        )
        runs = self._runs = PairedRuns(runner, events, steps, self._should_stop, self._now)
        try:
            runs.run(repeats, most)
        except Interrupted:
            if self.pairs:
                self._warn(f"interrupted after {self.pairs} of {repeats} pairs of runs")
        if not self.pairs:
            return
        self._compare([one for ended in runs.whole() for one in ended])
        if runner.on_gpu and (warning := events.wait_warning(runs.marked)) is not None:
            self._warn(warning)

    def _compare(self, runs: list[RequestRun]) -> None:
        first, *others = ([step.tokens for step in one.steps] for one in runs)
        for other in others:
            if other != first:
                index = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
                self._warn(
                    f"two runs of the same request differ from token {index + 1}; the parts and "
                    "the total may be of different work"
                )
                return

    def _warn(self, message: str) -> None:
        self._emit(Warned(self._now(), message, self._case))

    def finish(self, energy: Callable[[float, float], float | None] | None) -> CaseFinished:
        """Emit the times of the whole request."""
        assert self._runs is not None
        plain, marked = self._runs.whole()
        for warning in run_warnings(plain, marked, self._runs.attributed()):
            self._warn(warning)
        finished = CaseFinished(
            self._now(),
            self._case,
            *self._runs.seconds(plain),
            None if energy is None else self._runs.energy(energy),
            *self._runs.intervals(plain),
        )
        self._emit(finished)
        return finished
