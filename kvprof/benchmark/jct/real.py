"""A real run: a model with weights answers a request, and every part of it is timed.

The request runs without marks and with them, in turns; its times are those without. Where a clock
runs, and what its figures are:

- On a CPU a monotonic clock is read at every mark. ``host`` is what lies within a forward pass and
  in no other part: Python between modules, masks, positions.
- On a GPU events are recorded into the stream and read between steps. Steps that are not replayed
  from a CUDA graph leave the GPU waiting for the host; for their parts the request runs another
  time, and each step is held back until the host has queued it whole, so that a part's time is the
  GPU's. What the events themselves add between kernels is measured and taken off.
  ``host`` is what the GPU waited: a step's wall time without marks minus the GPU's time from its
  first mark to its last. Kernels that belong to no part stay unattributed.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from kvprof.benchmark.jct.case_facts import layer_facts
from kvprof.benchmark.jct.layer_errors import Captured, ErrorSample, error_sample, layer_errors
from kvprof.benchmark.jct.narrator import Narrator, told
from kvprof.benchmark.jct.passes import Pass, doubts
from kvprof.benchmark.jct.sampling import Sampling, choose_sampling
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.benchmark.jct.turns import Turns
from kvprof.benchmark.timing import Interrupted
from kvprof.errors import LackingError, UsageError
from kvprof.methods.accounting import rate
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    Event,
    LayerMeasured,
    Preview,
    Warned,
)
from kvprof.runtime.compressed import compressed
from kvprof.runtime.session import Compression

__all__ = ["look_at_case", "measure_case"]

Emit = Callable[[Event], None]


def measure_case(
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
    sample_layers: str | int = "auto",
    kernels: str | None = None,
    graph: bool = False,
    energy: Callable[[float, float], float | None] | None = None,
) -> CaseFinished | None:
    """Measure one request under one plan and tell what happens as events.

    Steps are told as the first run without marks takes them. Parts are told in the last run with
    marks, each step's as its median run had them; the times of the whole request are sums of every
    step's median.

    Parameters
    ----------
    loaded : LoadedModel
        On one CPU or one GPU.
    plan : Plan
    case : str
        Its name in the run.
    input_ids : Tensor
        ``[batch, input_len]`` token ids, no padding.
    output_len : int
        Tokens to write, greedily and past any end of text: prefill gives the first, then there are
        ``output_len - 1`` decoding steps.
    emit : callable
        Given every event.
    now : callable
        Seconds since the start of the run.
    should_stop : callable
        Asked after every forward pass.
    repeats : int
        Runs without marks, and as many with them.
    most : int, optional
        Up to so many are made, until the share of the time that is in parts stays the same from
        pair to pair. Without it, exactly `repeats`.
    sample_layers : str or int
        As `kvprof.benchmark.jct.sampling.choose_sampling` takes it.
    kernels : str, optional
        As `kvprof.runtime.compressed.compressed` takes it.
    graph : bool
        Replay decoding steps as CUDA graphs.
    energy : callable, optional
        From two times of `now` to joules (`kvprof.benchmark.jct.telemetry`).

    Returns
    -------
    CaseFinished or None
        The last event; None when the request was interrupted before it had run once each way.

    Raises
    ------
    UsageError
        For a request that makes no sense or does not fit the model's context, a model spread over
        several devices, and whatever `compressed` refuses.
    LackingError
        When memory runs out.
    """
    _check(loaded, input_ids, output_len, repeats, sample_layers)
    on_gpu = loaded.device.type == "cuda"
    try:
        with (
            torch.cuda.device(loaded.device) if on_gpu else nullcontext(),
            compressed(loaded, plan, kernels) as session,
        ):
            measured = _Measured(
                loaded, plan, session, case, input_ids.to(loaded.device), output_len, emit, now,
                should_stop,
            )  # fmt: skip
            measured.start(graph)
            measured.run(repeats, repeats if most is None else most, sample_layers)
            if not measured.pairs:
                return None
            captured = measured.captured()
        measured.tell_layers(captured)
    except torch.OutOfMemoryError as problem:
        raise LackingError(
            f"out of memory on {loaded.device}: {case}; a smaller batch or a shorter input may fit"
        ) from problem
    return measured.finish(energy)


def look_at_case(
    loaded: LoadedModel, plan: Plan, *, case: str, input_ids: Tensor, output_len: int, emit: Emit,
    now: Callable[[], float], kernels: str | None = None,
) -> None:  # fmt: skip
    """Run a prompt and a few steps of a request, and tell what it may be made of.

    Nothing of it is measured; parameters and errors are those of `measure_case`.
    """
    _check(loaded, input_ids, output_len, 1, 1)
    on_gpu = loaded.device.type == "cuda"
    with (
        torch.cuda.device(loaded.device) if on_gpu else nullcontext(),
        compressed(loaded, plan, kernels) as session,
    ):
        seen = _Measured(
            loaded, plan, session, case, input_ids.to(loaded.device), output_len, emit, now,
            lambda: False,
        )  # fmt: skip
        seen.look()


def _check(
    loaded: LoadedModel, ids: Tensor, output_len: int, repeats: int, sample_layers: str | int
) -> None:
    if ids.dim() != 2 or not ids.numel():
        raise UsageError(f"input ids of shape {tuple(ids.shape)} are no batch of prompts")
    if output_len < 1:
        raise UsageError(f"an output of {output_len} tokens makes no sense")
    if repeats < 1:
        raise UsageError(f"{repeats} repeats measure nothing")
    if sample_layers != "auto" and not (isinstance(sample_layers, int) and sample_layers > 0):
        raise UsageError(f"sample_layers is {sample_layers!r}; give auto, or one of how many")
    total = ids.shape[1] + output_len
    if total > loaded.context_length:
        raise UsageError(
            f"{ids.shape[1]:,} tokens in and {output_len:,} out are more than the "
            f"{loaded.context_length:,} that {loaded.spec} accepts"
        )
    places = {parameter.device for parameter in loaded.model.parameters()}
    if len(places) > 1 or loaded.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"a real run is timed on one CPU or one NVIDIA GPU, and {loaded.spec} lies on "
            f"{', '.join(sorted(map(str, places)))}; choose another device"
        )


class _Measured:
    """One case while it is measured."""

    def __init__(
        self, loaded: LoadedModel, plan: Plan, session: Compression, case: str, ids: Tensor,
        output_len: int, emit: Emit, now: Callable[[], float], should_stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._loaded, self._plan, self._session = loaded, plan, session
        self._case, self._ids, self._output_len = case, ids, output_len
        self._emit, self._now, self._should_stop = emit, now, should_stop
        self._turns: Turns | None = None
        self._sample: ErrorSample | None = None
        self._layer_bytes: list[int] = []
        if loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(loaded.device)

    @property
    def pairs(self) -> int:
        """How often the request has run both ways, its parts told."""
        return 0 if self._turns is None else len(self._turns.named())

    def look(self) -> None:
        """Run the first, short pass alone."""
        self._runner = Runner(self._loaded, self._session, self._ids, self._output_len, False)
        self._sampling("auto")

    def _sampling(self, sample_layers: str | int) -> Sampling:
        return choose_sampling(
            self._runner, sample_layers, layers=len(self._plan.layers), steps=self._output_len - 1,
            look=self._look,
        )  # fmt: skip

    def start(self, graph: bool) -> None:
        """Tell what will be measured."""
        batch, input_len = self._ids.shape
        tokens, itemsize = input_len + self._output_len - 1, self._loaded.dtype.itemsize
        self._runner = Runner(self._loaded, self._session, self._ids, self._output_len, graph)
        self._sample = error_sample(self._loaded, input_len, self._output_len)
        labels: dict[str, str] = {"error": self._sample.label} if self._sample else {}
        route = self._session.route
        if None in route.reasons and input_len >= route.least_tokens:
            labels["merge"] = "within attention: one operator does both"
            if route.notes:
                labels["storage"] = "; ".join(route.notes)
        if self._runner.on_gpu:
            labels["decode"] = "CUDA graph" if graph else "eager"
            labels["by_difference"] = "host"
            eager, captured = (1e6 * seconds for seconds in self._runner.own_seconds)
            labels["marks"] = (
                f"what a mark adds between two kernels is taken off: {captured:.2g} µs in decoding "
                f"steps, {eager:.2g} µs in prefill"
            )
        facts = layer_facts(self._plan, tokens, itemsize=itemsize, batch=batch)
        event = CaseStarted(
            self._now(), self._case, self._plan.method, rate(self._plan, tokens, itemsize=itemsize),
            batch, input_len, self._output_len, facts, labels,
        )  # fmt: skip
        self._emit(event)

    def run(self, repeats: int, most: int, sample_layers: str | int) -> None:
        """Run the request without marks and with them, in turns."""
        runner = self._runner
        sampling = self._sampling(sample_layers)
        narrator = Narrator(
            self._loaded, self._plan, self._case, self._ids, sampling, runner.on_gpu, self._emit,
            self._now,
        )  # fmt: skip
        turns = self._turns = Turns(runner, narrator, sampling, self._should_stop, self._now)
        try:
            turns.run(repeats, most)
        except Interrupted:
            if self.pairs:
                self._warn(f"interrupted after {self.pairs} of {repeats} runs each way")
        if not self.pairs:
            return
        assert runner.cache is not None
        self._layer_bytes = runner.cache.layer_bytes
        self._compare([one for passes in turns.whole() for one in passes])
        if runner.on_gpu and (doubt := narrator.doubt(turns.timed)) is not None:
            self._warn(doubt)

    def _look(self, marked: Sequence[Step]) -> None:
        """Tell what the request may be made of, by the steps of a first, short pass."""
        phases: list[dict[str, float]] = []
        for steps, times in ((marked[:1], 1), (marked[1:], self._output_len - 1)):
            found: dict[str, float] = {}
            middle = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2 :][:1]
            for stretch in (one for step in middle for one in step.stretches):
                if told((stretch.part, stretch.layer), self._runner.on_gpu):
                    cost = stretch.seconds * times
                    found[stretch.part] = found.get(stretch.part, 0.0) + cost
            phases.append(found)
        batch, input_len = self._ids.shape
        event = Preview(
            self._now(), self._case, self._plan.method, batch, input_len, self._output_len, *phases
        )
        self._emit(event)

    def _compare(self, passes: list[Pass]) -> None:
        first, *others = ([step.tokens for step in one.steps] for one in passes)
        for other in others:
            if other != first:
                place = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
                self._warn(
                    f"two runs of the same request wrote different tokens from the {place + 1}. "
                    "on: what was timed part by part is not quite what was timed whole"
                )
                return

    def _warn(self, message: str) -> None:
        self._emit(Warned(self._now(), message, self._case))

    def captured(self) -> Captured | None:
        """Run part of the request once more for the layers' errors; None where they are not had."""
        if self._sample is None or self._should_stop():
            return None
        assert self._turns is not None
        written = [step.tokens[0] for step in self._turns.plain[0].steps]
        try:
            return self._sample.captured(self._session, self._ids[0].tolist() + written)
        except torch.OutOfMemoryError:
            self._warn("the layers' errors were not measured: memory ran out")
            return None

    def tell_layers(self, captured: Captured | None) -> None:
        """Hold what was captured against the uncompressed model; outside the context."""
        errors: list[float | None] = [None] * len(self._layer_bytes)
        if captured is not None:
            try:
                errors = layer_errors(self._loaded, captured)
            except torch.OutOfMemoryError:
                self._warn("the layers' errors were not measured: memory ran out")
        for index, (error, nbytes) in enumerate(zip(errors, self._layer_bytes, strict=True)):
            self._emit(LayerMeasured(self._now(), self._case, index, error, nbytes))

    def finish(self, energy: Callable[[float, float], float | None] | None) -> CaseFinished:
        """Tell the times of the whole request."""
        assert self._turns is not None
        plain, marked, _ = self._turns.whole()
        for doubt in doubts(plain, marked, self._turns.named(), self._turns.alike()):
            self._warn(doubt)
        finished = CaseFinished(
            self._now(), self._case, *self._turns.seconds(plain), *self._turns.seconds(marked),
            None if energy is None else self._turns.energy(energy),
            *self._turns.intervals(plain),
        )  # fmt: skip
        self._emit(finished)
        return finished
