"""One request, forward pass by forward pass, with marks and without, eagerly or by CUDA graphs."""

import inspect
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.benchmark.jct.marks import Instrument
from kvprof.errors import UsageError
from kvprof.models.load import LoadedModel
from kvprof.runtime.cache import CompressedCache
from kvprof.runtime.clock import Clock, EventClock, Stretch, WallClock, part, timing
from kvprof.runtime.session import Compression
from kvprof.runtime.tensors import capturing

__all__ = [
    "Runner",
    "Step",
    "uncaptured",
    "warm_up",
]


#: More cycles in a second than any GPU's clock has: `torch.cuda._sleep` then lasts at least as long
#: as asked.
CYCLES = 2.5e9

_SPARE = 1.5  # times what the host took to queue the same step before
_SPARE_SECONDS = 5e-4
_WARMING = 3  # passes: a prompt, a step that is run eagerly, one that may be captured


@dataclass(frozen=True)
class Step:
    """A forward pass and the choice of its token."""

    seconds: float  # from its first call until the token was on the host
    queued: float  # until everything was queued; on a CPU until everything was done
    tokens: list[int]  # one per row
    stretches: list[Stretch]  # empty without marks


class Runner:
    """Runs a request repeatedly: prefill, then greedy tokens without an end of text."""

    def __init__(
        self,
        loaded: LoadedModel,
        session: Compression,  # open
        input_ids: Tensor,  # `[batch, tokens]`, on the model's device
        output_len: int,  # tokens to write; the first is prefill's
        #: Replay decoding steps as CUDA graphs, which only layers on the kernels can be captured
        #: in.
        graph: bool,
    ) -> None:
        if graph and (reason := uncaptured(loaded, session)) is not None:
            raise UsageError(f"decoding cannot be captured in a CUDA graph: {reason}")
        self.instrument = Instrument(loaded)
        self.on_gpu = loaded.device.type == "cuda"
        self.cache: CompressedCache | None = None
        self._model: Any = loaded.model
        self._session = session
        self._prompt = input_ids
        self._room = input_ids.shape[1] + output_len
        self._graph = graph
        self._keep: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            self._keep = {"logits_to_keep": 1}
        # Events are made once and used in every step.
        self._clock: Clock = WallClock()
        self._watched: Clock = self._clock
        if self.on_gpu:
            self._clock = EventClock()
            self._watched = EventClock(watched=True)
        # Of a graph, which reads and writes them: the token that is fed, and its position.
        self._token = torch.zeros_like(input_ids[:, :1])
        # No prompt is padded: one position serves all rows, as in steps that are not captured.
        self._position = torch.zeros_like(self._token[:1])
        self._steps_done = 0
        self._captures: dict[bool, tuple[Any, Clock | None]] = {}
        self._ran_eagerly = False

    def begin(self) -> None:
        """Begin the request anew, with an empty cache."""
        if self._graph and self.cache is not None:
            self.cache.reset()  # graphs know where it lies
        else:
            self.cache = None  # its memory goes before the next one's is asked for
            self.cache = self._session.new_cache(self._room if self._graph else None)
            self.cache.reach = self._room
        self._steps_done = 0

    def step(self, marked: bool = False, *, after: float | None = None) -> Step:
        """Run the next forward pass: prefill, then decoding steps."""
        prefill = self._steps_done == 0
        self._steps_done += 1
        if self._graph and not prefill and self._ran_eagerly:
            return self._replayed(marked)
        self._ran_eagerly = self._ran_eagerly or not prefill
        clock = None
        if marked:
            clock = self._clock if after is None else self._watched
        return self._eager(prefill, clock, after)

    @torch.no_grad()
    def _eager(self, prefill: bool, clock: Clock | None, after: float | None) -> Step:
        with self._marked(clock):
            self._settle()
            start = time.perf_counter()
            if after is not None and self.on_gpu:
                seconds = _SPARE * after + _SPARE_SECONDS
                # torch leaves it without types.
                torch.cuda._sleep(int(seconds * CYCLES))
            with nullcontext() if clock is None else timing(clock):
                self._forward(self._prompt if prefill else self._token, {})
            queued = time.perf_counter() - start
            tokens = self._token.flatten().tolist()
            seconds = time.perf_counter() - start
        self._position.fill_(self._prompt.shape[1] + self._steps_done - 1)
        return Step(seconds, queued, tokens, [] if clock is None else clock.read())

    def _forward(self, ids: Tensor, given: dict[str, Any]) -> None:
        output = self._model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, **self._keep, **given
        )
        with part("sampling"):
            self._token.copy_(output.logits[:, -1].argmax(-1, keepdim=True))

    @torch.no_grad()
    def _replayed(self, marked: bool) -> Step:
        assert self.cache is not None
        if marked not in self._captures:
            self._captures[marked] = self._captured(marked)
        graph, clock = self._captures[marked]
        self._settle()
        start = time.perf_counter()
        graph.replay()
        self.cache.replayed()
        queued = time.perf_counter() - start
        tokens = self._token.flatten().tolist()
        seconds = time.perf_counter() - start
        return Step(seconds, queued, tokens, [] if clock is None else clock.read())

    def _captured(self, marked: bool) -> tuple[Any, Clock | None]:
        """Capture a decoding step; nothing runs and nothing is stored by that."""
        clock = EventClock(captured=True) if marked else None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        timed = nullcontext() if clock is None else timing(clock)
        with self._marked(clock), capturing(graph), timed:
            self._forward(self._token, {"position_ids": self._position})
            self._position.add_(1)
        return graph, clock

    def _marked(self, clock: Clock | None) -> AbstractContextManager[None]:
        return nullcontext() if clock is None else self.instrument.attached(clock)

    def _settle(self) -> None:
        """Let what came between the steps (reading events, new hooks) not count."""
        if self.on_gpu:
            torch.cuda.synchronize(self._prompt.device)


def warm_up(runner: Runner, steps: int) -> None:
    """Run the beginning of a request: what is compiled or awaited then would stand in its times."""
    for marked in (False, True) if runner.on_gpu else (True,):
        runner.begin()
        for _ in range(min(_WARMING, 1 + steps)):
            runner.step(marked)


def uncaptured(loaded: LoadedModel, session: Compression) -> str | None:
    """Return why a model's decoding steps cannot be captured in a CUDA graph; None if they can."""
    if loaded.device.type != "cuda":
        return f"the model is on {loaded.device}"
    reasons: Sequence[str | None] = session.kernel_reasons
    for index, reason in enumerate(reasons):
        if reason is not None:
            return f"layer {index} does not run on the kernels ({reason})"
    return None
