"""A real run: a model with weights answers a request, and every part of it is timed.

The request runs without marks and with them, in turns; its times are those without. Where a clock
runs, and what its figures are:

- On a CPU a monotonic clock is read at every mark. ``host`` is what lies within a forward pass and
  in no other part: Python between modules, masks, positions.
- On a GPU events are recorded into the stream and read between steps. Steps that are not replayed
  from a CUDA graph leave the GPU waiting for the host; for their parts the request runs once more,
  and each step is held back until the host has queued it whole, so that a part's time is the GPU's.
  ``host`` is what the GPU waited: a step's wall time without marks minus the GPU's time from its
  first mark to its last. Kernels that belong to no part stay unattributed.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvprof.benchmark.jct.case_facts import layer_facts
from kvprof.benchmark.jct.layer_errors import Captured, ErrorSample, error_sample, layer_errors
from kvprof.benchmark.jct.passes import Narrator, Pass, doubts, run_pass
from kvprof.benchmark.jct.sampling import choose_sampling
from kvprof.benchmark.jct.steps import Runner
from kvprof.benchmark.timing import Interrupted
from kvprof.errors import LackingError, UsageError
from kvprof.methods.accounting import rate
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.events import CaseFinished, CaseStarted, Event, LayerMeasured, Warned
from kvprof.runtime.compressed import compressed
from kvprof.runtime.session import Compression

__all__ = ["measure_case"]

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
    sample_layers: str | int = "auto",
    kernels: str | None = None,
    graph: bool = False,
    energy: Callable[[float, float], float | None] | None = None,
) -> CaseFinished | None:
    """Measure one request under one plan and tell what happens as events.

    Steps are told from the first run without marks, parts from a run with marks right after it.

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
            measured.run(repeats, sample_layers, graph)
            if not measured.pairs:
                return None
            captured = measured.captured()
        measured.tell_layers(captured)
    except torch.OutOfMemoryError as problem:
        raise LackingError(
            f"out of memory on {loaded.device}: {case}; a smaller batch or a shorter input may fit"
        ) from problem
    return measured.finish(energy)


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
        self._plain: list[Pass] = []
        self._marked: list[Pass] = []
        self._sample: ErrorSample | None = None
        self._layer_bytes: list[int] = []
        if loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(loaded.device)

    @property
    def pairs(self) -> int:
        """How often the request has run both ways, its parts told."""
        return min(len(self._plain), len(self._marked))

    def start(self, graph: bool) -> None:
        """Tell what will be measured."""
        batch, input_len = self._ids.shape
        tokens, itemsize = input_len + self._output_len - 1, self._loaded.dtype.itemsize
        self._sample = error_sample(self._loaded, input_len, self._output_len)
        labels: dict[str, str] = {"error": self._sample.label} if self._sample else {}
        route = self._session.route
        if None in route.reasons and input_len >= route.least_tokens:
            labels["merge"] = "within attention: one operator does both"
        if self._loaded.device.type == "cuda":
            labels["decode"] = "CUDA graph" if graph else "eager"
        facts = layer_facts(self._plan, tokens, itemsize=itemsize, batch=batch)
        event = CaseStarted(
            self._now(), self._case, self._plan.method, rate(self._plan, tokens, itemsize=itemsize),
            batch, input_len, self._output_len, facts, labels,
        )  # fmt: skip
        self._emit(event)

    def run(self, repeats: int, sample_layers: str | int, graph: bool) -> None:
        """Run the request without marks and with them, in turns."""
        runner = Runner(self._loaded, self._session, self._ids, self._output_len, graph)
        steps = self._output_len - 1
        sampling = choose_sampling(
            runner, sample_layers, layers=len(self._plan.layers), steps=steps
        )
        narrator = Narrator(
            self._loaded, self._plan, self._case, self._ids, sampling, self._emit, self._now
        )

        def go(**how: Any) -> Pass:
            return run_pass(runner, steps, self._should_stop, self._now, **how)

        try:
            self._plain.append(go(on_step=narrator.step))
            if runner.on_gpu:
                marked = go(sampling=sampling)
                held = go(
                    sampling=sampling, after=[step.queued for step in marked.steps],
                    on_step=narrator.parts_of(self._plain[0], runner),
                )  # fmt: skip
                self._compare(held)
                if (doubt := narrator.doubt()) is not None:
                    self._warn(doubt)
            else:
                marked = go(sampling=sampling, on_step=narrator.parts_of(self._plain[0], runner))
            self._marked.append(marked)
            self._compare(marked)
            assert runner.cache is not None
            self._layer_bytes = runner.cache.layer_bytes
            for turn in range(1, repeats):
                for found, how in self._in_turns(turn, sampling):
                    found.append(go(**how))
                    self._compare(found[-1])
        except Interrupted:
            if self.pairs:
                self._warn(f"interrupted after {self.pairs} of {repeats} runs each way")

    def _in_turns(self, turn: int, sampling: Any) -> list[tuple[list[Pass], dict[str, Any]]]:
        """Let each way go first as often as the other: a machine that warms up hits both."""
        ways: list[tuple[list[Pass], dict[str, Any]]] = [
            (self._plain, {}), (self._marked, {"sampling": sampling}),
        ]  # fmt: skip
        return ways[::-1] if turn % 2 else ways

    def _compare(self, other: Pass) -> None:
        mine, theirs = ([step.tokens for step in run.steps] for run in (self._plain[0], other))
        if mine != theirs:
            place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            self._warn(
                f"two runs of the same request wrote different tokens from the {place + 1}. on: "
                "what was timed part by part is not quite what was timed whole"
            )

    def _warn(self, message: str) -> None:
        self._emit(Warned(self._now(), message, self._case))

    def captured(self) -> Captured | None:
        """Run part of the request once more for the layers' errors; None where they are not had."""
        if self._sample is None or self._should_stop():
            return None
        written = [step.tokens[0] for step in self._plain[0].steps]
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
        for doubt in doubts(self._plain, self._marked):
            self._warn(doubt)
        joules = [
            found
            for run in self._plain
            if energy is not None and (found := energy(run.started, run.ended)) is not None
        ]
        finished = CaseFinished(
            self._now(), self._case,
            statistics.median(run.prefill for run in self._plain),
            statistics.median(run.decode for run in self._plain),
            statistics.median(run.prefill for run in self._marked),
            statistics.median(run.decode for run in self._marked),
            statistics.median(joules) if joules else None,
        )  # fmt: skip
        self._emit(finished)
        return finished
