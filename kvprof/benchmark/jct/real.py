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

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kvprof.benchmark.jct.held import layer_facts
from kvprof.benchmark.jct.interleaved import (
    CaseEvents,
    InterleavedRuns,
    RequestRun,
    is_part,
    run_warnings,
)
from kvprof.benchmark.jct.steps import Runner, Step, uncaptured
from kvprof.benchmark.jct.timed_layers import TimedLayers, choose_timed_layers
from kvprof.benchmark.timing import Interrupted
from kvprof.errors import LackingError, UsageError
from kvprof.methods.accounting import rate
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.models.noise import quiet
from kvprof.records.events import CaseFinished, CaseStarted, Event, LayerMeasured, Preview, Warned
from kvprof.runtime.compressed import compressed
from kvprof.runtime.session import Compression

__all__ = ["layer_errors", "measure_real", "preview_real"]

# --- How far each layer's attention is from full width in float64, on the very same inputs.
#
# Inputs and outputs of every attention module are caught while the model decodes through the
# compressed cache. Then the uncompressed model runs over the same tokens, and a float64 copy of
# each module attends to what its compressed twin was given. Both ends are hidden states, so
# that folded projections and rotated bases do not matter.


# Attention in float64 over more tokens would take longer than the run itself.
_CPU_TOKENS = 1024
_GPU_TOKENS = 4096
_HELD_BYTES = 2**29  # of hidden states
_DECODED = 16


@dataclass(frozen=True)
class Captured:
    """What went through the attention modules of one sequence.

    Attributes
    ----------
    ids : Tensor
        ``[1, T]``.
    inputs, outputs : list of Tensor
        Per layer ``[1, T, hidden]``; the outputs of the decoded tokens alone, ``[1, n, hidden]``.
    """

    ids: Tensor
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True)
class ErrorSample:
    """The part of a request on which errors are measured.

    Attributes
    ----------
    prefill, decoded : int
        Tokens; only what is decoded is compared.
    """

    prefill: int
    decoded: int

    @property
    def label(self) -> str:
        """What a reader of the errors must know."""
        return (
            f"of {self.decoded} decoded tokens after the first {self.prefill:,}, one sequence, "
            "behind the output projection"
        )

    @torch.no_grad()
    def captured(self, session: Compression, tokens: list[int]) -> Captured:
        """Run the sample through a compressed cache.

        Parameters
        ----------
        session : Compression
            Open.
        tokens : list of int
            Of the request, prompt first; as many as the sample has at least.
        """
        loaded = session.loaded
        total = self.prefill + self.decoded
        ids = torch.tensor([tokens[:total]], device=loaded.device)
        inputs: list[list[Tensor]] = [[] for _ in loaded.layout.layers]
        outputs: list[list[Tensor]] = [[] for _ in loaded.layout.layers]

        def catch(index: int, args: Any, kwargs: Any, result: Any) -> None:
            inputs[index].append(_hidden(args, kwargs).detach().clone())
            output = result[0] if isinstance(result, tuple) else result
            outputs[index].append(output.detach().clone())

        with ExitStack() as stack:
            for facts in loaded.layout.layers:
                hook = loaded.model.get_submodule(facts.attention).register_forward_hook(
                    lambda m, a, k, r, i=facts.index: catch(i, a, k, r), with_kwargs=True
                )
                stack.callback(hook.remove)
            cache = session.new_cache()
            cache.reach = total
            cuts = [0, *range(self.prefill, total + 1)]
            for start, stop in pairwise(cuts):
                loaded.model(ids[:, start:stop], past_key_values=cache, use_cache=True)
        return Captured(
            ids, [torch.cat(x, 1) for x in inputs], [torch.cat(x[1:], 1) for x in outputs]
        )


def error_sample(loaded: LoadedModel, input_len: int, output_len: int) -> ErrorSample | None:
    """Choose how much of a request errors are measured on; None where not even two tokens fit.

    Parameters
    ----------
    loaded : LoadedModel
    input_len, output_len : int
    """
    layout = loaded.layout
    each = len(layout.layers) * layout.hidden_size * loaded.dtype.itemsize
    most = _GPU_TOKENS if loaded.device.type == "cuda" else _CPU_TOKENS
    tokens = min(input_len + output_len, most, _HELD_BYTES // each)
    if tokens < 2:
        return None
    decoded = min(_DECODED, tokens // 2)
    return ErrorSample(tokens - decoded, decoded)


@torch.no_grad()
def layer_errors(loaded: LoadedModel, captured: Captured) -> list[float | None]:
    """Return each layer's relative Frobenius error; None where nothing was put out.

    Parameters
    ----------
    loaded : LoadedModel
        Uncompressed.
    captured : Captured
    """
    found: list[float | None] = [None] * len(loaded.layout.layers)
    decoded = captured.outputs[0].shape[1]

    def compare(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        exact = _in_float64(module)
        given = captured.inputs[index].double()
        kwargs = {name: _wide(value) for name, value in kwargs.items()}
        if args:
            result = exact(given, *map(_wide, args[1:]), **kwargs)
        else:
            result = exact(**{**kwargs, "hidden_states": given})
        wanted = (result[0] if isinstance(result, tuple) else result)[:, -decoded:]
        norm = float(wanted.norm())
        if norm > 0:
            found[index] = float((captured.outputs[index].double() - wanted).norm()) / norm

    with ExitStack() as stack, quiet():
        for facts in loaded.layout.layers:
            hook = loaded.model.get_submodule(facts.attention).register_forward_pre_hook(
                lambda m, a, k, i=facts.index: compare(i, m, a, k), with_kwargs=True
            )
            stack.callback(hook.remove)
        loaded.model(captured.ids, use_cache=False)
    return found


def _hidden(args: Any, kwargs: Any) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _in_float64(module: nn.Module) -> nn.Module:
    made = copy.deepcopy(module)
    made._forward_pre_hooks.clear()  # the one that asks for this copy is among them
    return made.double()


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(map(_wide, value))
    return value


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
    sample_layers: str | int = "auto",
    kernels: str | None = None,
    graph: bool | None = False,
    fused: bool = True,
    energy: Callable[[float, float], float | None] | None = None,
) -> CaseFinished | None:
    """Measure one request under one plan and tell what happens as events.

    Steps are emitted as the first run without marks takes them, and again as the medians of all
    such runs; parts in the last run with marks, each step's as its median run had them; the times
    of the whole request are sums of every step's median.

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
        As `kvprof.benchmark.jct.timed_layers.choose_timed_layers` takes it.
    kernels : str, optional
        As `kvprof.runtime.compressed.compressed` takes it.
    graph : bool or None
        Replay decoding steps as CUDA graphs; None where that can be, as ``generate`` does.
    fused : bool
        As `kvprof.runtime.compressed.compressed` takes it.
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
    try:
        with _opened(
            loaded, plan, kernels, case, input_ids, output_len, emit, now, should_stop, fused
        ) as measured:
            measured.start(measured.replays(graph))
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


def preview_real(
    loaded: LoadedModel,
    plan: Plan,
    *,
    case: str,
    input_ids: Tensor,
    output_len: int,
    emit: Emit,
    now: Callable[[], float],
    should_stop: Callable[[], bool],
    kernels: str | None = None,
) -> None:
    """Run a prompt and a few steps of a request, and tell what it may be made of.

    Nothing of it is measured; parameters and errors are those of `measure_real`.
    """
    _check(loaded, input_ids, output_len, 1, 1)
    with _opened(
        loaded, plan, kernels, case, input_ids, output_len, emit, now, should_stop
    ) as seen:
        seen.preview()


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
    fused: bool = True,
) -> Iterator["_RealCase"]:
    """Compress the model while the body runs a request on it."""
    on_gpu = loaded.device.type == "cuda"
    with (
        torch.cuda.device(loaded.device) if on_gpu else nullcontext(),
        # Steps are replayed by the runner, which marks what is in them.
        compressed(loaded, plan, kernels, graphs=False, fused=fused) as session,
    ):
        ids = input_ids.to(loaded.device)
        yield _RealCase(loaded, plan, session, case, ids, output_len, emit, now, should_stop)


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
    devices = {parameter.device for parameter in loaded.model.parameters()}
    if len(devices) > 1 or loaded.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"a real run is timed on one CPU or one NVIDIA GPU, and {loaded.spec} lies on "
            f"{', '.join(sorted(map(str, devices)))}; choose another device"
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
        self._runs: InterleavedRuns | None = None
        self._sample: ErrorSample | None = None
        self._layer_bytes: list[int] = []
        if loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(loaded.device)

    @property
    def pairs(self) -> int:
        """How often the request has run both ways, its parts emitted."""
        return 0 if self._runs is None else len(self._runs.attributed())

    def preview(self) -> None:
        """Run the first, short pass alone."""
        self._runner = Runner(self._loaded, self._session, self._ids, self._output_len, False)

        def show(marked: Sequence[Step]) -> None:
            self._preview(marked)
            if self._should_stop():
                raise Interrupted

        self._choose_layers("auto", show)

    def _choose_layers(
        self, sample_layers: str | int, preview: Callable[[Sequence[Step]], None]
    ) -> TimedLayers:
        return choose_timed_layers(
            self._runner,
            sample_layers,
            layers=len(self._plan.layers),
            steps=self._output_len - 1,
            preview=preview,
        )

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

    def run(self, repeats: int, most: int, sample_layers: str | int) -> None:
        """Run the request without marks and with them, in turns."""
        runner = self._runner
        choice = self._choose_layers(sample_layers, self._preview)
        events = CaseEvents(
            self._loaded,
            self._plan,
            self._case,
            self._ids,
            choice,
            runner.on_gpu,
            self._emit,
            self._now,
        )
        runs = self._runs = InterleavedRuns(runner, events, choice, self._should_stop, self._now)
        try:
            runs.run(repeats, most)
        except Interrupted:
            if self.pairs:
                self._warn(f"interrupted after {self.pairs} of {repeats} runs each way")
        if not self.pairs:
            return
        assert runner.cache is not None
        self._layer_bytes = runner.cache.layer_bytes
        self._compare([one for ended in runs.whole() for one in ended])
        if runner.on_gpu and (warning := events.wait_warning(runs.timed)) is not None:
            self._warn(warning)

    def _preview(self, marked: Sequence[Step]) -> None:
        """Emit what the request may be made of, by the steps of a first, short pass."""
        phases: list[dict[str, float]] = []
        for steps, times in ((marked[:1], 1), (marked[1:], self._output_len - 1)):
            found: dict[str, float] = {}
            middle = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2 :][:1]
            for stretch in (one for step in middle for one in step.stretches):
                if is_part((stretch.part, stretch.layer), self._runner.on_gpu):
                    cost = stretch.seconds * times
                    found[stretch.part] = found.get(stretch.part, 0.0) + cost
            phases.append(found)
        batch, input_len = self._ids.shape
        event = Preview(
            self._now(), self._case, self._plan.method, batch, input_len, self._output_len, *phases
        )
        self._emit(event)

    def _compare(self, runs: list[RequestRun]) -> None:
        first, *others = ([step.tokens for step in one.steps] for one in runs)
        for other in others:
            if other != first:
                index = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
                self._warn(
                    f"two runs of the same request wrote different tokens from the {index + 1}. "
                    "on: what was timed part by part is not quite what was timed whole"
                )
                return

    def _warn(self, message: str) -> None:
        self._emit(Warned(self._now(), message, self._case))

    def captured(self) -> Captured | None:
        """Run part of the request once more for the layers' errors; None where they are not had."""
        if self._sample is None or self._should_stop():
            return None
        assert self._runs is not None
        written = [step.tokens[0] for step in self._runs.plain[0].steps]
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
        """Emit the times of the whole request."""
        assert self._runs is not None
        plain, marked, _ = self._runs.whole()
        for warning in run_warnings(plain, marked, self._runs.attributed(), self._runs.alike()):
            self._warn(warning)
        finished = CaseFinished(
            self._now(),
            self._case,
            *self._runs.seconds(plain),
            *self._runs.seconds(marked),
            None if energy is None else self._runs.energy(energy),
            *self._runs.intervals(plain),
        )
        self._emit(finished)
        return finished
