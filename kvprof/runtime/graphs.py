"""Decoding steps of a compressed model as CUDA graphs, by themselves and behind ``generate``.

A step launches some thousand kernels of microseconds each, one after the other, which takes the
host longer than the GPU needs for them. So the model's own ``forward`` is put behind
`DecodingGraphs.forward`: the second step of a cache is captured, and from then on steps are
replayed, as long as they are what was captured. All else goes to the model as before: prompts,
steps of another shape, masks that hide more than padding, modules that somebody watches. A cache
that moves because it grows is captured anew.

What a step needs to know of its tokens is counted on the device (`kvprof.runtime.backends.state`);
tokens and positions are copied to where the graph reads them.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from kvprof.errors import KvprofError
from kvprof.models.interface import text_decoder
from kvprof.models.load import LoadedModel
from kvprof.runtime.backends.route import KernelRoute
from kvprof.runtime.cache import CacheOwner, CompressedCache
from kvprof.runtime.clock import is_timing
from kvprof.runtime.masks import mask_facts
from kvprof.runtime.pointwise import few_launches
from kvprof.runtime.tensors import Pool, capturing, is_capturing

__all__ = ["DecodingGraphs", "faster", "replaying"]


class GraphOwner(CacheOwner, Protocol):
    """The context whose steps are replayed, `kvprof.runtime.session.Compression`."""

    loaded: LoadedModel
    cache: CompressedCache | None  # the one that the last forward pass used
    route: KernelRoute
    graphs: "DecodingGraphs | None"

    @property
    def takes_angles(self) -> bool:
        """Whether some layer needs the cosines and sines of stored tokens."""


# What a step may be called with beside what a graph is fed; anything else is the model's business.
_FED = {"input_ids", "position_ids", "attention_mask", "past_key_values"}
_PASSED_ON = {"use_cache", "logits_to_keep", "return_dict"}


_Form = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Step:
    """A pass over one token of every row, as the model was called for it."""

    cache: CompressedCache
    ids: Tensor  # `[batch, 1]`
    position: Tensor | None  # as it was given
    mask: Tensor | None  # `[batch, keys]`
    options: dict[str, Any]  # what is passed on

    @property
    def form(self) -> _Form:
        """What must be alike for one graph to serve two steps."""
        position = None
        if self.position is not None:
            position = (tuple(self.position.shape), self.position.dtype)
        options = tuple(sorted((name, repr(value)) for name, value in self.options.items()))
        return tuple(self.ids.shape), self.ids.dtype, position, options


@dataclass(eq=False)
class _Captured:
    """A step's graph, and what it reads and writes where it lies."""

    graph: torch.cuda.CUDAGraph
    form: _Form  # of the step (`_Step.form`)
    cache: "weakref.ref[CompressedCache]"  # A graph does not keep a cache that nobody else holds
    buffers: list[Tensor]  # the cache's tensors as they lay
    room: float  # tokens of a row up to which they suffice
    token: Tensor  # what a replay is fed
    position: Tensor
    output: ModelOutput  # where it leaves its results
    held: list[Any]  # what it reads and only the cache's state may hold
    mask: Tensor | None  # the last one that was seen to hide nothing but padding


class DecodingGraphs:
    """Stands before a model's ``forward`` and replays what it has captured.

    Parameters
    ----------
    session : GraphOwner
    model : PreTrainedModel
        Whose decoder, another module than itself, the session's hooks are on.

    Attributes
    ----------
    reason : str or None
        Why steps are launched one by one; None as long as nothing speaks against graphs.
    replays : int
        Steps that were replayed.
    """

    def __init__(self, session: GraphOwner, model: PreTrainedModel) -> None:
        self.reason: str | None = None
        self.replays = 0
        self._session = session
        self._model = model
        self._forward: Callable[..., Any] = model.forward
        self._captured: _Captured | None = None
        self._pool: Pool = None
        self._padding_counted: bool | None = None
        # The cache, form and buffers of the last step that the model itself has run.
        self._ready: tuple[weakref.ref[CompressedCache], _Form, list[Tensor]] | None = None
        # Hooks of others would see a capture, and never a replay.
        self._hooks: list[dict[int, Any]] = []
        # Modules whose adapters can be switched between steps (peft's names).
        self._adapted: list[nn.Module] = []
        self._harmless: set[int] = set()
        # The number of the next hook of any module when no other's was found.
        self._unwatched_until: int | None = None
        # A model of images too counts places from what it saw in its prompt.
        self._counts_text = model.config.get_text_config(decoder=True) is model.config

    def watch_hooks(self) -> None:
        """Find where the hooks of the model's modules are registered."""
        self._hooks = [
            hooks
            for module in self._model.modules()
            if module is not self._model
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._adapted = [
            module for module in self._model.modules() if hasattr(module, "_active_adapter")
        ]

    def _adapters(self) -> Iterator[str]:
        """Yield what each switchable module has on."""
        for module in self._adapted:
            active, off = module._active_adapter, getattr(module, "_disable_adapters", False)
            yield f"{active} {off}"

    def _watched(self) -> bool:
        """Whether somebody else's hook wants to be called in a step."""
        if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
            return True
        # To look at all modules at every step is what the device would wait for.
        if self._unwatched_until == RemovableHandle.next_id:
            return False
        for hooks in self._hooks:
            for number in hooks.keys() - self._harmless if hooks else ():
                if not self._is_own(hooks[number]):
                    return True
                self._harmless.add(number)
        self._unwatched_until = RemovableHandle.next_id
        return False

    def _is_own(self, hook: Any) -> bool:
        """Whether a hook is the session's, or one that transformers records outputs with."""
        origin = str(getattr(hook, "__module__", ""))
        return getattr(hook, "__self__", None) is self._session or origin.startswith(
            "transformers."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the GPU's memory that graphs hold: what steps leave behind between kernels."""
        if self._captured is None or self._pool is None:
            return 0
        return sum(
            int(segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", ())) == tuple(self._pool)
        )

    def release(self) -> None:
        """Let go of the graph and its memory."""
        self._captured = self._ready = None

    def _known(self, cache: CompressedCache) -> "weakref.ref[CompressedCache]":
        """Return a cache's reference, with which its memory goes when nobody else holds it."""

        def gone(reference: "weakref.ref[CompressedCache]") -> None:
            held = [None if known is None else known[0] for known in (self._ready,)]
            if self._captured is not None:
                held.append(self._captured.cache)
            if any(reference is own for own in held):
                self.release()

        return weakref.ref(cache, gone)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: by a replay where one serves, else as it is."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        step = self._step(args, kwargs)
        if step is None:
            return self._forward(*args, **kwargs)
        state = step.cache.kernels
        assert state is not None
        buffers, form = self._buffers(step.cache), (*step.form, *self._adapters())
        known = self._captured
        if known is not None and not self._serves(known, step, form, buffers):
            self.release()
            known = None
        if known is None and self._prepared(step, form, buffers) and self._plain(step, None):
            known = self._captured = self._capture(step, form, buffers)
        elif known is not None and not self._plain(step, known):
            known = None
        if known is None:
            output = self._forward(*args, **kwargs)
            if step.cache.kernels is not None:
                # What it has moved or compiled is where it will stay.
                self._ready = (self._known(step.cache), form, self._buffers(step.cache))
            return output
        return self._replayed(known, step)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Step | None:
        """Return what the model is called for, where a graph might do it."""
        ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
        if (
            self.reason is not None
            or args
            or not isinstance(ids, Tensor)
            or ids.dim() != 2
            or ids.shape[1] != 1
            or not isinstance(cache, CompressedCache)
            or cache.compression is not self._session
            or cache.kernels is None
            or any(layer.planes is None for layer in cache.layers)
            or kwargs.get("use_cache") is False
            or not self._returns_dict(kwargs.get("return_dict"))
        ):
            return None
        mask, position = kwargs.get("attention_mask"), kwargs.get("position_ids")
        others = (
            value for name, value in kwargs.items() if name not in _FED and name not in _PASSED_ON
        )
        if (
            any(value is not None and value is not False for value in others)
            or (mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2))
            or (not isinstance(position, Tensor) if position is not None else not self._counts_text)
            or isinstance(kwargs.get("logits_to_keep"), Tensor)
            or torch.is_grad_enabled()
            # Its copies of weights are let go with it, which a graph would go on reading.
            or torch.is_autocast_enabled(self._session.loaded.device.type)
            or is_capturing(ids.device)
            or is_timing()
            or self._watched()
        ):
            return None
        options = {name: kwargs[name] for name in _PASSED_ON if name in kwargs}
        return _Step(cache, ids, position, mask, options)

    def _returns_dict(self, wanted: bool | None) -> bool:
        known = getattr(self._model.config, "return_dict", True) if wanted is None else wanted
        return bool(known)

    def _buffers(self, cache: CompressedCache) -> list[Tensor]:
        state = cache.kernels
        assert state is not None
        return [*(layer.planes.buffer for layer in cache.layers), *state.buffers()]

    def _serves(self, known: _Captured, step: _Step, form: _Form, buffers: list[Tensor]) -> bool:
        return (
            known.cache() is step.cache
            and known.form == form
            and _same(known.buffers, buffers)
            and self._longest(step) <= known.room
        )

    def _prepared(self, step: _Step, form: _Form, buffers: list[Tensor]) -> bool:
        """Whether the model itself has run such a step, from and to the same buffers."""
        return (
            self._ready is not None
            and self._ready[0]() is step.cache
            and self._ready[1] == form
            and _same(self._ready[2], buffers)
            and self._longest(step) <= _room(step.cache)
        )

    @staticmethod
    def _longest(step: _Step) -> int:
        """Return the tokens that the longest row has after a step."""
        state = step.cache.kernels
        assert state is not None
        return max([1, *state.seen(step.cache.get_seq_length() + 1)])

    def _plain(self, step: _Step, known: _Captured | None) -> bool:
        """Whether a mask hides nothing but the padding that the cache knows; asks the device."""
        past, state, mask = step.cache.get_seq_length(), step.cache.kernels, step.mask
        assert state is not None
        if any(first >= past for first in state.first) or len(state.first) != len(step.ids):
            return False
        if any(state.first) and step.position is None and not self._counts_padding():
            return False
        if mask is None:
            return True
        if mask.shape != (len(step.ids), past + 1):
            return False
        last = None if known is None else known.mask
        if last is not None and last.shape[1] == past:
            # Mostly a token more than before, which takes one short question.
            found = bool(((mask[:, :-1] == last).all() & mask[:, -1].bool().all()).item())
        else:
            facts = mask_facts(mask, len(step.ids), 1, past)
            found = facts.plain and state.continues(facts.starts, past)
        if known is not None:
            # A copy: the caller may write into its own.
            known.mask = mask.clone() if found else None
        return found

    def _counts_padding(self) -> bool:
        """Whether the model derives positions from the mask, which a captured step cannot."""
        if self._padding_counted is None:
            device, before = self._session.loaded.device, self._session.cache
            ids = torch.arange(8, device=device).view(2, 4) % self._session.loaded.vocab_size
            mask = torch.ones_like(ids)
            mask[0, :2] = 0
            shared: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
            found = self._forward(**shared).logits
            given = self._forward(**shared, position_ids=torch.arange(4, device=device)[None])
            self._padding_counted = torch.equal(found[:, -1], given.logits[:, -1])
            self._session.cache = before
        return self._padding_counted

    def _capture(self, step: _Step, form: _Form, buffers: list[Tensor]) -> _Captured | None:
        """Capture a step, which neither runs nor stores anything by that; None where it cannot."""
        past, device, state = step.cache.get_seq_length(), step.ids.device, step.cache.kernels
        assert state is not None
        held = len(state.held)
        with torch.inference_mode(False):  # replays may be outside of it
            token = step.ids.clone()
            position = (
                torch.full((1, 1), past, device=device)
                if step.position is None
                else step.position.clone()
            )
        graph = torch.cuda.CUDAGraph()
        # Another pool each time: one that no graph holds any more cannot be captured into.
        self._pool = torch.cuda.graph_pool_handle()
        fed = {"input_ids": token, "position_ids": position, "past_key_values": step.cache}
        marks = _marks(step.cache)
        before = [mark.captured for mark in marks]
        try:
            torch.cuda.synchronize(device)
            with capturing(graph, self._pool, device):
                output = self._forward(**fed, **{**step.options, "return_dict": True})
        except torch.OutOfMemoryError:
            self.reason = "no memory is left for a CUDA graph of a step"
            return None
        except (KvprofError, RuntimeError) as error:
            # A model that asks the device about its own states cannot be captured, and runs as
            # it is.
            self.reason = f"a step cannot be captured: {' '.join(str(error).split())[:160]}"
            return None
        finally:
            # Whether it may move is looked at before each replay; nothing has to be refused.
            for mark, was in zip(marks, before, strict=True):
                mark.captured = was
        if not isinstance(output, ModelOutput):
            self.reason = f"the model returns {type(output).__name__}"
            return None
        return _Captured(
            graph,
            form,
            self._known(step.cache),
            buffers,
            _room(step.cache),
            token,
            position,
            replace(output, past_key_values=None),
            [state.prepared_steps(), state.held[held:]],
            None if step.mask is None else step.mask.clone(),
        )

    def _replayed(self, known: _Captured, step: _Step) -> ModelOutput:
        known.token.copy_(step.ids)
        if step.position is None:
            known.position.fill_(step.cache.get_seq_length())
        else:
            known.position.copy_(step.position)
        known.graph.replay()
        step.cache.replayed()
        self._session.cache = step.cache
        self.replays += 1
        # The next replay writes where this one has left its results.
        kept = {name: _copied(value) for name, value in known.output.items()}
        return type(known.output)(**kept, past_key_values=step.cache)


def _copied(value: Any) -> Any:
    """Return a result, several of them, or what is none, with tensors of its own."""
    if isinstance(value, list | tuple):
        return tuple(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value


def _same(known: list[Tensor], now: list[Tensor]) -> bool:
    return len(known) == len(now) and all(a is b for a, b in zip(known, now, strict=True))


def _room(cache: CompressedCache) -> float:
    """Return how many tokens a row can have before something has to move."""
    rooms: list[float] = [layer.planes.room for layer in cache.layers]
    return min(rooms)


def _marks(cache: CompressedCache) -> list[Any]:
    """Return everything that notes that a graph reads it."""
    assert cache.kernels is not None
    return [*(layer.planes for layer in cache.layers), *cache.kernels.tables.all()]


def capturable(session: GraphOwner, model: PreTrainedModel) -> bool:
    """Whether steps of a model may be captured: on one GPU, with all layers on the kernels."""
    decoder = text_decoder(model)
    placed = getattr(model, "hf_device_map", None)
    return (
        session.loaded.device.type == "cuda"
        and decoder is not model
        and (placed is None or len(set(placed.values())) == 1)
        and not any(session.route.reasons)
        and "position_ids" in inspect.signature(type(decoder).forward).parameters
    )


@contextmanager
def replaying(session: GraphOwner, model: PreTrainedModel) -> Iterator[DecodingGraphs]:
    """Let decoding steps of a model be captured and replayed while the body runs."""
    graphs = DecodingGraphs(session, model)
    before = model.__dict__.get("forward")

    # Callers look at the signature of a model's forward, and a copy of the model runs itself.
    @functools.wraps(type(model).forward)
    def forward(own: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if own is not model:
            return type(own).forward(own, *args, **kwargs)
        return graphs.forward(*args, **kwargs)

    # Found for every step otherwise, by way of what is wrapped. Types know no such attribute of a
    # function, which inspect looks for.
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    graphs.watch_hooks()
    model.forward = MethodType(forward, model)
    try:
        yield graphs
    finally:
        graphs.release()
        model.__dict__.pop("forward", None)
        if before is not None:
            model.forward = before


@contextmanager
def faster(session: GraphOwner, graphs: bool) -> Iterator[None]:
    """Spare a GPU what the host would launch piece by piece."""
    model = session.loaded.model
    with ExitStack() as stack:
        if capturable(session, model):
            if graphs:
                session.graphs = stack.enter_context(replaying(session, model))
                stack.callback(setattr, session, "graphs", None)
            stack.enter_context(few_launches(model, rotations=not session.takes_angles))
        yield
