"""One request, forward pass by forward pass, with marks and without, eagerly or by CUDA graphs."""

import functools
import inspect
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from kvprof.errors import UsageError
from kvprof.methods.accounting import full_bytes
from kvprof.methods.plan import Plan
from kvprof.methods.tokens import segments
from kvprof.models.interface import text_decoder, wrapped_rotations
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.models.projections import head_columns
from kvprof.records.events import MemorySample
from kvprof.runtime.cache import CompressedCache
from kvprof.runtime.clock import REST, Clock, EventClock, Stretch, WallClock, part, timing
from kvprof.runtime.session import Compression
from kvprof.runtime.tensors import capturing

__all__ = [
    "OTHER_LAYERS",
    "Runner",
    "Step",
    "level_tokens",
    "mark_seconds",
    "memory_sample",
    "peak_bytes",
    "uncaptured",
]

# --- A clock's marks around a model's modules, each with its part, and none left afterwards.


_NO_WORK = (nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class TimedModules:
    """The modules whose forward passes are parts.

    Attributes
    ----------
    outside : list of (module, part)
        What belongs to no layer.
    layers : list of list of (module, part)
        Per layer, the layer itself first. Its own time, without its modules', is the residual
        additions'; that of its attention module is nobody's (`REST`).
    """

    outside: list[tuple[nn.Module, str]]
    layers: list[list[tuple[nn.Module, str]]]


def find_timed_modules(loaded: LoadedModel) -> TimedModules:
    """Sort a model's modules into parts, by where they lie and by the names of their classes.

    Inside `kvprof.runtime.compressed.compressed` these are the modules with bases folded in.

    Raises
    ------
    UsageError
        When a layer is no entry of a list of layers, so that nothing tells where it begins.
    """
    model, layers = loaded.model, []
    stacks: set[int] = set()
    for facts in loaded.layout.layers:
        name = _layer_name(loaded, facts)
        layer = model.get_submodule(name)
        stacks.add(id(model.get_submodule(name.rpartition(".")[0])))
        layers.append([(layer, "norm"), *_inside(loaded, facts, name, layer)])
    outside = [
        (child, part)
        for child in text_decoder(model).children()
        if id(child) not in stacks and (part := _outside(child)) is not None
    ]
    for module, part in (
        (model.get_input_embeddings(), "embedding"),
        (model.get_output_embeddings(), "head"),
    ):
        if module is not None and all(module is not known for known, _ in outside):
            outside.append((module, part))
    return TimedModules(outside, layers)


def _layer_name(loaded: LoadedModel, facts: LayerLayout) -> str:
    parts = facts.attention.split(".")
    for end in range(len(parts), 0, -1):
        parent = loaded.model.get_submodule(".".join(parts[: end - 1]))
        if isinstance(parent, nn.ModuleList):
            return ".".join(parts[:end])
    raise UsageError(
        f"{loaded.layout.architecture}: layer {facts.index} is no entry of a list of layers, so "
        "its parts cannot be timed"
    )


def _projections(loaded: LoadedModel, facts: LayerLayout) -> dict[str, str]:
    found = {
        head_columns(loaded.model, facts, kind, [0])[0]: "qkv_proj"
        for kind in ("q", "k", "v")
        if facts.value_projection is not None
    }
    if facts.output_projection is not None:
        found[f"{facts.attention}.{facts.output_projection}"] = "o_proj"
    return found


def _inside(
    loaded: LoadedModel, facts: LayerLayout, name: str, layer: nn.Module
) -> list[tuple[nn.Module, str]]:
    projections = _projections(loaded, facts)
    found: list[tuple[nn.Module, str]] = []

    def walk(prefix: str, module: nn.Module, in_attention: bool) -> None:
        for child_name, child in module.named_children():
            full = f"{prefix}.{child_name}"
            if full in projections:
                found.append((child, projections[full]))
            elif full == facts.attention:
                found.append((child, REST))
                walk(full, child, True)
            elif facts.attention.startswith(full + "."):
                walk(full, child, in_attention)
            elif (part := _kind(child)) is not None:
                found.append((child, part))
            elif not in_attention and not isinstance(child, _NO_WORK):
                found.append((child, "mlp"))

    walk(name, layer, False)
    return found


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__.lower()
    if "norm" in name:
        return "norm"
    return "rope" if "rotary" in name else None


def _outside(module: nn.Module) -> str | None:
    kind = _kind(module)
    if kind is None and "embedding" in type(module).__name__.lower():
        return "embedding"
    return kind


#: Work in layers that are not sampled. It is no part: the sampled layers stand for it.
OTHER_LAYERS = "others"


class Instrument:
    """Marks for one model, to be made where it will run (see `find_timed_modules`).

    Parameters
    ----------
    loaded : LoadedModel

    Raises
    ------
    UsageError
        As `find_timed_modules` does.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._modules = find_timed_modules(loaded)
        self._decoder = text_decoder(loaded.model)

    @contextmanager
    def attached(
        self, clock: Clock, layers: Collection[int], *, outside: bool = True
    ) -> Iterator[None]:
        """Mark the modules of some layers, and those that belong to none, while the body runs.

        Parameters
        ----------
        clock : Clock
            Running (`kvprof.runtime.clock.timing`) whenever the model runs.
        layers : collection of int
            The layers that are sampled.
        outside : bool
            Otherwise all that belongs to no layer is left without a name.
        """
        with ExitStack() as stack:
            every = self._modules.layers
            some = not outside or len(set(layers)) < len(every)
            if outside:
                for module, name in self._modules.outside:
                    _marked(stack, module, clock, name, None)
            else:
                clock.muted = True
                stack.callback(setattr, clock, "muted", False)
            if some and outside:
                _surrounded(stack, clock, every[0][0][0], every[-1][0][0])
            for layer in layers:
                (own, name), *modules = every[layer]
                _sampled(stack, own, clock, name, layer, some)
                for module, inner in modules:
                    _marked(stack, module, clock, inner, layer)
            stack.enter_context(wrapped_rotations(self._decoder, _rotating))
            yield


def _rotating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with part("rope"):
            return function(*args, **kwargs)

    return wrapper


def _marked(
    stack: ExitStack, module: nn.Module, clock: Clock, name: str, layer: int | None
) -> None:
    def before(*_: Any) -> None:
        clock.enter(name, layer)

    def after(*_: Any) -> None:
        clock.leave()

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _sampled(
    stack: ExitStack, module: nn.Module, clock: Clock, name: str, layer: int, some: bool
) -> None:
    """Mark a layer that is sampled among others that are not: only there the runtime's own."""

    def before(*_: Any) -> None:
        clock.muted = False
        clock.enter(name, layer)

    def after(*_: Any) -> None:
        clock.leave()
        clock.muted = some

    stack.callback(module.register_forward_pre_hook(before).remove)
    # Before the hook that ends the whole stack of layers.
    stack.callback(module.register_forward_hook(after, prepend=True).remove)


def _surrounded(stack: ExitStack, clock: Clock, first: nn.Module, last: nn.Module) -> None:
    """Mark everything from the first layer to the last."""

    def before(*_: Any) -> None:
        clock.enter(OTHER_LAYERS)
        clock.muted = True

    def after(*_: Any) -> None:
        clock.muted = False
        clock.leave()

    stack.callback(first.register_forward_pre_hook(before).remove)
    stack.callback(last.register_forward_hook(after).remove)


# --- A request's forward passes, and what recording a CUDA event adds between two kernels.


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


# --- What a cache holds after a step, level by level, and the peak of memory.


def level_tokens(plan: Plan, tokens: int) -> dict[str, int]:
    """Return how many of a sequence's tokens are stored at each level; empty without levels.

    Those of the first layer without a sliding window. Levels are counted from the lowest; sinks
    are apart, and so is what is not quantised yet.

    Parameters
    ----------
    plan : Plan
    tokens : int
        Seen so far.
    """
    aged = (x for x in plan.layers if x.sliding_window is None and not x.left_out)
    layer = next(aged, None)
    if layer is None or len(plan.levels.shares) == 1:
        return {}
    found: dict[str, int] = {}
    for segment in segments(plan, layer, tokens):
        name = f"level {segment.level}"
        if segment.start == 0 and plan.levels.sink:
            name = "sinks"
        elif plan.quantiser is not None and not segment.quantised:
            name += ", full precision"
        found[name] = found.get(name, 0) + segment.tokens
    return found


def peak_bytes(device: torch.device) -> int:
    """Return a GPU's most allocated bytes since they were last reset, or a CPU's resident ones."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def memory_sample(
    time: float,
    case: str,
    plan: Plan,
    cache: CompressedCache,
    context: int,
    *,
    batch: int,
    itemsize: int,
    peak: int,
) -> MemorySample:
    """Return what a cache holds at a context.

    Parameters
    ----------
    time, case, context, peak
        As in the event.
    plan, cache
    batch, itemsize : int
        Sequences, and bytes of a value at full width.
    """
    return MemorySample(
        time,
        case,
        context,
        cache.nbytes,
        cache.allocated_bytes,
        full_bytes(plan, context, itemsize=itemsize, batch=batch),
        peak,
        level_tokens(plan, context),
    )
