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
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kvprof.benchmark.jct.narrator import Narrator, layer_facts, told
from kvprof.benchmark.jct.passes import Pass, apart, doubts, run_pass, step_seconds
from kvprof.benchmark.jct.sampling import Sampling, choose_sampling
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.benchmark.timing import Interrupted, median_interval
from kvprof.errors import LackingError, UsageError
from kvprof.methods.accounting import rate
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.models.noise import quiet
from kvprof.records.events import CaseFinished, CaseStarted, Event, LayerMeasured, Preview, Warned
from kvprof.runtime.compressed import compressed
from kvprof.runtime.session import Compression

__all__ = [
    "Captured",
    "ErrorSample",
    "Turns",
    "error_sample",
    "layer_errors",
    "look_at_case",
    "measure_case",
]

# --- How far each layer's attention is from full width in float64, on the very same inputs.


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


# --- A request run without marks and with them, in turns, until what its parts are told as
# stays.


_SETTLED = 0.02  # half the width of an interval of the share of the time that is in parts
_SILENCE = 1.0  # seconds of a long run of the request between two words on how far it is
_LONG_SECONDS = 60.0  # after which no more turns are made than were asked for


class Turns:
    """Runs of one request.

    Parameters
    ----------
    runner : Runner
        Warm.
    narrator : Narrator
    sampling : Sampling
        Which layers to time in which step.
    should_stop, now : callable

    Attributes
    ----------
    plain, marked : list of Pass
        Without marks, and with them.
    timed : list of Pass
        Those whose parts are told: on a GPU the ones that were held back.
    """

    def __init__(
        self,
        runner: Runner,
        narrator: Narrator,
        sampling: Sampling,
        should_stop: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._runner, self._narrator, self._sampling = runner, narrator, sampling
        self._should_stop, self._now = should_stop, now
        self._turn, self._last = 0, False
        self._done = self._least = self._most = 0  # runs of the request
        self._said = 0.0
        self.plain: list[Pass] = []
        self.marked: list[Pass] = []
        self.timed: list[Pass] = [] if runner.on_gpu else self.marked

    def run(self, repeats: int, most: int) -> None:
        """Take turns, and tell each step and its parts.

        Parameters
        ----------
        repeats, most : int
            At least and at most so many turns; between them only as many as change the share of
            the time that is in parts.

        Raises
        ------
        Interrupted
            When `should_stop` says so; what was measured so far is told.
        """
        ways = [self._without, self._with, *([self._held] if self._runner.on_gpu else [])]
        begun = time.perf_counter()
        try:
            while not self._last:
                late = time.perf_counter() - begun > _LONG_SECONDS
                enough = self._turn + 1 >= repeats
                self._last = enough and (self._turn + 1 >= most or late or self._settled())
                fewest, highest = (self._turn + 1,) * 2 if self._last else (repeats, most)
                self._least = max(fewest, self._turn + 1) * len(ways)
                self._most = max(highest, self._turn + 1) * len(ways)
                # Each way goes first as often as the other: a machine that warms up hits both.
                for way in ways[::-1] if self._turn % 2 else ways:
                    self._tell_progress(0)
                    way()
                    self._done += 1
                self._turn += 1
        finally:
            # Also when memory runs out: nothing that was measured is lost.
            self._narrator.rest(self.plain, self.timed)

    def whole(self) -> tuple[list[Pass], list[Pass], list[Pass]]:
        """Return `plain`, `marked` and `timed` as far as they ran to their end."""
        plain, marked, timed = (
            [one for one in passes if one.ended is not None]
            for passes in (self.plain, self.marked, self.timed)
        )
        return plain, marked, timed

    def named(self) -> list[float]:
        """Return the share of a request's time that is in parts, of each pair of runs."""
        plain, _, timed = self.whole()
        return [
            self._narrator.named(other) / one.seconds
            for one, other in zip(plain, timed, strict=False)
        ]

    def alike(self) -> list[object]:
        """Return per decoding step what it times, as `doubts` takes it."""
        sampling = self._sampling
        steps = range(1, sampling.steps + 1)
        return [(len(sampling.at(step)), sampling.outside(step)) for step in steps]

    def energy(self, joules: Callable[[float, float], float | None]) -> float | None:
        """Return the median energy of the runs without marks; None where none is known."""
        found = [
            known
            for one in self.plain
            if one.ended is not None and (known := joules(one.started, one.ended)) is not None
        ]
        return statistics.median(found) if found else None

    def seconds(self, passes: Sequence[Pass]) -> tuple[float, float]:
        """Return the seconds of prefill, and of all decoding steps."""
        prefill, *decode = step_seconds(passes)
        return prefill, sum(decode)

    def intervals(self, passes: Sequence[Pass]) -> tuple[list[float] | None, list[float] | None]:
        """Return 95 % intervals of what `seconds` returns; None for a single run."""
        found: list[list[float] | None] = []
        for middle, own in zip(self.seconds(passes), (slice(0, 1), slice(1, None)), strict=True):
            runs = [sum(step.seconds for step in one.steps[own]) for one in passes]
            ends = median_interval(runs)
            # Sums of every step's median may lie outside what whole runs took.
            found.append(None if ends is None else [min(ends[0], middle), max(ends[1], middle)])
        return found[0], found[1]

    def _settled(self) -> bool:
        named = self.named()
        if len(named) < 2:
            return False
        low, high = apart(named)
        return (high - low) / 2 <= _SETTLED

    def _go(
        self,
        into: list[Pass],
        *,
        marks: bool = True,
        after: list[float] | None = None,
        on_step: Callable[[int, Step], None] | None = None,
    ) -> None:
        run_pass(
            self._runner,
            self._sampling.steps,
            self._should_stop,
            self._now,
            into,
            sampling=self._sampling if marks else None,
            after=after,
            on_step=partial(self._stepped, on_step),
        )

    def _stepped(
        self, on_step: Callable[[int, Step], None] | None, number: int, step: Step
    ) -> None:
        if on_step is not None:
            on_step(number, step)
        if time.perf_counter() - self._said > _SILENCE:
            self._tell_progress(number + 1)

    def _tell_progress(self, step: int) -> None:
        self._said = time.perf_counter()
        steps = self._sampling.steps + 1
        self._narrator.progress(self._done, self._least, self._most, step, steps)

    def _without(self) -> None:
        self._go(self.plain, marks=False, on_step=None if self._turn else self._narrator.step)

    def _with(self) -> None:
        self._go(self.marked, on_step=None if self._runner.on_gpu else self._tell)

    def _held(self) -> None:
        queued = [step.queued for step in self.whole()[1][-1].steps]
        self._go(self.timed, after=queued, on_step=self._tell)

    def _tell(self, number: int, _: Step) -> None:
        if self._turn == 0:
            self._narrator.memory(number, self._runner)
        if self._last:
            self._narrator.parts(number, self.timed)


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
                loaded,
                plan,
                session,
                case,
                input_ids.to(loaded.device),
                output_len,
                emit,
                now,
                should_stop,
            )
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
    loaded: LoadedModel,
    plan: Plan,
    *,
    case: str,
    input_ids: Tensor,
    output_len: int,
    emit: Emit,
    now: Callable[[], float],
    kernels: str | None = None,
) -> None:
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
            loaded,
            plan,
            session,
            case,
            input_ids.to(loaded.device),
            output_len,
            emit,
            now,
            lambda: False,
        )
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
            self._runner,
            sample_layers,
            layers=len(self._plan.layers),
            steps=self._output_len - 1,
            look=self._look,
        )

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
            self._now(),
            self._case,
            self._plan.method,
            rate(self._plan, tokens, itemsize=itemsize),
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
        sampling = self._sampling(sample_layers)
        narrator = Narrator(
            self._loaded,
            self._plan,
            self._case,
            self._ids,
            sampling,
            runner.on_gpu,
            self._emit,
            self._now,
        )
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
            self._now(),
            self._case,
            *self._turns.seconds(plain),
            *self._turns.seconds(marked),
            None if energy is None else self._turns.energy(energy),
            *self._turns.intervals(plain),
        )
        self._emit(finished)
        return finished
