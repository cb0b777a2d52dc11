"""One request, forward pass by forward pass, with marks and without, eagerly or by CUDA graphs."""

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
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
    "mark_seconds",
    "uncaptured",
]


#: More cycles in a second than any GPU's clock has: `torch.cuda._sleep` then lasts at least as long
#: as asked.
CYCLES = 2.5e9

_KERNELS = 200  # with their events fewer than a stream queues before it blocks the host
_SAMPLES = 9


def mark_seconds(device: torch.device, *, captured: bool) -> float:
    """Return the seconds that an event adds to a chain of small kernels, between two of them.

    Measured as the difference of the same chain with events and without, nothing else being
    different; never below 0.

    Parameters
    ----------
    device : torch.device
        A GPU.
    captured : bool
        In a CUDA graph; otherwise in a stream, all queued before the first kernel begins.
    """
    with torch.cuda.device(device):
        values = torch.zeros(32, device=device)
        events: list[Any] = [
            # torch leaves it without types.
            torch.cuda.Event(enable_timing=True, external=captured)
            for _ in range(_KERNELS)
        ]

        def bare() -> None:
            for _ in events:
                values.add_(1)

        def marked() -> None:
            stream = torch.cuda.current_stream()
            for event in events:
                values.add_(1)
                event.record(stream)

        chains: list[Callable[[], None]] = [bare, marked]
        for chain in chains:
            chain() if not captured else bare()  # loads the kernel
        torch.cuda.synchronize()
        if captured:
            chains = [_captured(chain) for chain in chains]
        samples = [[_seconds(chain) for chain in chains] for _ in range(_SAMPLES + 1)][1:]
        return max(0.0, statistics.median(b - a for a, b in samples) / _KERNELS)


def _captured(chain: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        chain()

    def replay() -> None:
        graph.replay()

    return replay


def _seconds(chain: Callable[[], None]) -> float:
    """Return the GPU's time for a chain that it takes up when it is queued whole."""
    # torch leaves it without types.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    chain()
    queued = time.perf_counter() - begin
    torch.cuda.synchronize()
    # torch leaves it without types.
    torch.cuda._sleep(int((2 * queued + 5e-4) * CYCLES))
    start.record()
    chain()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


_SPARE = 1.5  # times what the host took to queue the same step before
_SPARE_SECONDS = 5e-4


@dataclass(frozen=True)
class Step:
    """A forward pass and the choice of its token.

    Attributes
    ----------
    seconds : float
        From its first call until the token was on the host.
    queued : float
        Until everything was queued; on a CPU until everything was done.
    tokens : list of int
        One per row.
    stretches : list of Stretch
        Empty without marks.
    """

    seconds: float
    queued: float
    tokens: list[int]
    stretches: list[Stretch]


class Runner:
    """Runs a request as often as wanted: prefill, then a greedy token at a time.

    The end of a text is not looked for: every run has the same steps. Each token is brought to the
    host, as whoever reads the text would have it; that is the only time a step waits.

    Parameters
    ----------
    loaded : LoadedModel
    session : Compression
        Open.
    input_ids : Tensor
        ``[batch, tokens]``, on the model's device.
    output_len : int
        Tokens to write; the first is prefill's.
    graph : bool
        Replay decoding steps as CUDA graphs, which only layers on the kernels can be captured in.

    Raises
    ------
    UsageError
        When the model's steps cannot be captured, or its parts cannot be told apart.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Compression,
        input_ids: Tensor,
        output_len: int,
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
        #: What a mark adds to a stretch and is taken off it: in eager steps, and in graphs.
        self.own_seconds = (0.0, 0.0)
        # Events are made once and used in every step.
        self._clock: Clock = WallClock()
        self._watched: Clock = self._clock
        if self.on_gpu:
            eager = mark_seconds(loaded.device, captured=False)
            self.own_seconds = eager, mark_seconds(loaded.device, captured=True) if graph else eager
            self._clock = EventClock(own=eager)
            self._watched = EventClock(watched=True, own=eager)
        # Of a graph, which reads and writes them: the token that is fed, and its position.
        self._token = torch.zeros_like(input_ids[:, :1])
        # No prompt is padded: one position serves all rows, as in steps that are not captured.
        self._position = torch.zeros_like(self._token[:1])
        self._steps_done = 0
        self._captures: dict[tuple[tuple[int, ...] | None, bool], tuple[Any, Clock | None]] = {}
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

    def step(
        self,
        layers: tuple[int, ...] | None = None,
        *,
        after: float | None = None,
        outside: bool = True,
    ) -> Step:
        """Run the next forward pass: prefill, then decoding steps.

        Parameters
        ----------
        layers : tuple of int, optional
            Which to time part by part; None for a pass without marks.
        after : float, optional
            On a GPU: keep it waiting until the host has queued the step, which took it so many
            seconds before, so that no stretch holds a gap. A replayed graph has none anyway.
        outside : bool
            Time what belongs to no layer too, where anything is timed.
        """
        prefill = self._steps_done == 0
        self._steps_done += 1
        if self._graph and not prefill and self._ran_eagerly:
            return self._replayed(layers, outside)
        self._ran_eagerly = self._ran_eagerly or not prefill
        clock = None
        if layers is not None:
            clock = self._clock if after is None else self._watched
        return self._eager(prefill, layers, clock, after, outside)

    @torch.no_grad()
    def _eager(
        self,
        prefill: bool,
        layers: tuple[int, ...] | None,
        clock: Clock | None,
        after: float | None,
        outside: bool,
    ) -> Step:
        marked = self._marked(clock, layers, outside)
        with marked:
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
    def _replayed(self, layers: tuple[int, ...] | None, outside: bool) -> Step:
        assert self.cache is not None
        key = layers, outside
        if key not in self._captures:
            self._captures[key] = self._captured(layers, outside)
        graph, clock = self._captures[key]
        self._settle()
        start = time.perf_counter()
        graph.replay()
        self.cache.replayed()
        queued = time.perf_counter() - start
        tokens = self._token.flatten().tolist()
        seconds = time.perf_counter() - start
        return Step(seconds, queued, tokens, [] if clock is None else clock.read())

    def _captured(self, layers: tuple[int, ...] | None, outside: bool) -> tuple[Any, Clock | None]:
        """Capture a decoding step; nothing runs and nothing is stored by that."""
        clock = None if layers is None else EventClock(captured=True, own=self.own_seconds[1])
        marked = self._marked(clock, layers, outside)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with marked, capturing(graph), nullcontext() if clock is None else timing(clock):
            self._forward(self._token, {"position_ids": self._position})
            self._position.add_(1)
        return graph, clock

    def _marked(
        self, clock: Clock | None, layers: tuple[int, ...] | None, outside: bool
    ) -> AbstractContextManager[None]:
        if clock is None:
            return nullcontext()
        return self.instrument.attached(clock, layers or (), outside=outside)

    def _settle(self) -> None:
        """Let what came between the steps (reading events, new hooks) not count."""
        if self.on_gpu:
            torch.cuda.synchronize(self._prompt.device)


def uncaptured(loaded: LoadedModel, session: Compression) -> str | None:
    """Return why a model's decoding steps cannot be captured in a CUDA graph; None where they can.

    Parameters
    ----------
    loaded : LoadedModel
    session : Compression
        Open.
    """
    if loaded.device.type != "cuda":
        return f"the model is on {loaded.device}"
    reasons: Sequence[str | None] = session.kernel_reasons
    for index, reason in enumerate(reasons):
        if reason is not None:
            return f"layer {index} does not run on the kernels ({reason})"
    return None
