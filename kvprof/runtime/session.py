"""A model's forward passes under a plan: from the attention function to each layer and back."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils import ModelOutput

from kvprof.errors import FailedError, UsageError
from kvprof.methods.plan import Plan, unfolded
from kvprof.models.interface import Interception, Rotation, before_rotation
from kvprof.models.load import LoadedModel
from kvprof.progress import Progress, silent
from kvprof.runtime.backends.route import KernelRoute
from kvprof.runtime.cache import CompressedCache
from kvprof.runtime.clock import part
from kvprof.runtime.folding import OutputSwitch
from kvprof.runtime.layer import LayerRuntime
from kvprof.runtime.masks import mask_facts, visible_keys
from kvprof.runtime.retention import OwnTokens
from kvprof.runtime.rows import RowGroup
from kvprof.runtime.tensors import index_of

if TYPE_CHECKING:
    from kvprof.runtime.backends.state import KernelState, KernelStore
    from kvprof.runtime.graphs import DecodingGraphs

__all__ = ["Compression"]


_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def _uncompiled(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Mark a function that ``torch.compile`` runs as it is: it keeps count on the host."""
    marked: Callable[_Given, _Returned] = torch.compiler.disable(function)
    return marked


@lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return what a function takes, which every pass asks."""
    return inspect.signature(function)


class Compression:
    """A model running with a plan; `compressed` makes one."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        kernels: str | None = None,
        prompt: int | None = None,
    ) -> None:
        if prompt is not None and (plan.across is not None or plan.eviction is not None):
            raise UsageError(
                f"{plan.method} evicts tokens or shares layers, so one pass cannot evaluate it"
            )
        plan = plan if prompt is None else unfolded(plan)
        self.loaded = loaded
        self.plan = plan
        #: Where passes are over whole sequences, attended as prefill of so many columns and
        #: decoding of the rest would, with nothing stored: how many, for the next pass; else None.
        self.prompt = prompt
        #: The one that the last forward pass used, for looking at its bytes.
        self.cache: CompressedCache | None = None
        self.active = False  # whether the context is open
        self._readings: dict[Any, Any] = {}
        self._shape: Any = None
        self._layers = [
            LayerRuntime(plan, index, facts, self._readings)
            for index, facts in enumerate(loaded.layout.layers)
        ]
        #: Which layers run on the kernels.
        self.route = KernelRoute(loaded, plan, kernels if prompt is None else "off")
        #: Per layer, the columns that its attention puts out (but for a lazy plan's prefill).
        self.widths = [sum(self._widths(runtime, False)) for runtime in self._layers]
        self.switches: dict[int, OutputSwitch] = {}
        self.watching = Interception("compressed", lambda call: None)
        self._starts: list[int] = []
        self._fired: set[int] = set()
        #: What replays decoding steps while the context is open; None where nothing does.
        self.graphs: DecodingGraphs | None = None
        self._lent = False  # a cache for this pass alone, which the caller must not get to see
        self.packed: CompressedCache | None = None  # such a cache, of texts packed into rows

    @property
    def kernel_reasons(self) -> list[str | None]:
        """Per layer, why it does not run on the kernels in the last pass; None where it does."""
        left = None if self.cache is None else self.cache.left
        return [reason or left for reason in self.route.reasons]

    @property
    def kernel_notes(self) -> list[str]:
        """What the kernels do otherwise than the plan or a reader would think, in words."""
        if self.plan.across is not None and self.plan.across.at_rest:
            return [
                "a prompt's cache is coded once and then decoded uncompressed; the size after "
                "DEFLATE depends on the text"
            ]
        running = self.cache is None or self.cache.kernels is not None
        if not running:
            return []
        reason = self.graph_reason
        slow = [] if reason is None else [f"decoding runs without CUDA graphs: {reason}"]
        return [*self.route.notes, *slow]

    @property
    def graph_reason(self) -> str | None:
        """Why decoding steps are not replayed as CUDA graphs; None where they are."""
        return None if self.graphs is None else self.graphs.reason

    @property
    def graph_bytes(self) -> int:
        """Bytes of the GPU's memory that captured decoding steps hold, beside the cache."""
        return 0 if self.graphs is None else self.graphs.nbytes

    @property
    def opaque(self) -> bool:
        """Whether a layer's attention can be one operator: nothing reaches it but its arguments."""
        return not (self.takes_angles or self.switches)

    @property
    def takes_angles(self) -> bool:
        """Whether some layer needs the cosines and sines of stored tokens."""
        return any(layer.takes_angles for layer in self._layers)

    def compile_ahead(self, progress: Progress = silent) -> int:
        """Compile what the plan's layers run on the kernels, on all cores at once.

        The first prompt does it by itself; a process that comes later finds it on disk.
        """
        return self.route.compile_ahead(1, progress)

    def new_kernel_state(self) -> "KernelState | None":
        """Return what a new cache's layers share; None where no layer runs on the kernels."""
        return self.route.new_state()

    def new_kernel_store(self, index: int, capacity: int | None) -> "KernelStore | None":
        """Return a layer's empty store; None where it does not run on the kernels."""
        return self.route.new_store(index, capacity)

    def leave_kernels(self, cache: CompressedCache, reason: str) -> None:
        """Take a cache off the kernels, with what is in it."""
        self.route.leave(cache, cache.get_seq_length(), self._layers, reason)

    def new_cache(self, capacity: int | None = None) -> CompressedCache:
        """Make an empty cache to pass as ``past_key_values``."""
        across = self.plan.across
        if capacity is not None and across is not None and not across.at_rest:
            raise UsageError(
                f"{self.plan.method} shares latents across layers, so it has no static cache; "
                "leave out capacity"
            )
        if capacity is not None and capacity < 1:
            raise UsageError(f"capacity {capacity}: a static cache needs at least 1 token")
        return CompressedCache(self, capacity)

    # Forward passes.

    @property
    def _text(self) -> Any:
        return self.loaded.model.config.get_text_config(decoder=True)

    @_uncompiled
    def bring(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before what is around the decoder: some such models would make a cache of their own."""
        wanted = kwargs.get("use_cache", self._text.use_cache)
        if wanted is not False and kwargs.get("past_key_values") is None:
            kwargs = {**kwargs, "past_key_values": self.new_cache()}
        return args, kwargs

    @_uncompiled
    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the decoder's forward: see to the cache and to where real tokens begin."""
        bound = _signature(type(module).forward).bind_partial(module, *args, **kwargs)
        given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        if not isinstance(inputs, Tensor):
            raise UsageError("a compressed model needs input_ids or inputs_embeds")
        if bounds := [n for n in FlashAttentionKwargs.__annotations__ if given.get(n) is not None]:
            raise UsageError(f"{bounds[0]} is for flash attention; separate texts by position_ids")
        cache = given.get("past_key_values")
        self._lent = False
        if cache is None:
            if "past_key_values" in bound.arguments and "past_key_values" not in kwargs:
                raise UsageError("pass past_key_values by name, or leave it out")
            cache = self.new_cache()
            kwargs = {**kwargs, "past_key_values": cache}
            wanted = given.get("use_cache")
            self._lent = not (self._text.use_cache if wanted is None else wanted)
        self._check_cache(cache)
        if self.prompt is not None and cache.get_seq_length():
            raise UsageError("a pass over whole sequences keeps no cache, so no pass can follow it")
        self.cache = cache
        decodes = inputs.shape[1] == 1 and cache.get_seq_length() > 0
        across = self.plan.across
        if across is not None and across.at_rest and decodes and cache.rest_bytes is None:
            from kvprof.runtime.across import at_rest

            cache.rest_bytes = at_rest(self.plan, cache)
        cache.begin_pass()
        self._fired.clear()
        self.watching.rotations.clear()
        past = cache.get_seq_length()
        batch, tokens = inputs.shape[:2]
        hiding, positions = given.get("attention_mask"), given.get("position_ids")
        mask = mask_facts(hiding, batch, tokens, past, positions if self._lent else None)
        self.packed = cache if hiding is None and mask.holes else None
        self._starts = mask.starts
        if self._shape != (shape := (past, tokens, {*mask.starts})):
            self._shape = shape
            self._readings.clear()  # as large as masks
        self.route.begin(cache, mask, past, tokens, self._layers)
        if self.plan.eviction is not None and mask.holes:
            raise UsageError(
                "eviction requires left padding; this mask hides tokens after the first real one"
            )
        return args, kwargs

    def _check_cache(self, cache: Any) -> None:
        if not isinstance(cache, CompressedCache):
            raise UsageError(
                f"past_key_values is a {type(cache).__name__}, which cannot store the plan's "
                "cache; leave it out, or pass the context's own new_cache()"
            )
        if cache.compression is not self:
            raise UsageError(
                "past_key_values belongs to another kvprof.compressed context; create one with "
                "this context's new_cache()"
            )

    @_uncompiled
    def end(self, module: nn.Module, args: Any, result: Any) -> Any:
        """After it: make sure that every layer attended through the cache."""
        missing = [x.facts.index for x in self._layers if x.facts.index not in self._fired]
        if missing:
            raise FailedError(
                f"{self.loaded.layout.architecture}: layer {missing[0]} bypassed the compressed "
                "cache, so the output is wrong"
            )
        if self.cache is not None:
            self.route.end(self.cache)
            if self.plan.across is not None and not self.plan.across.at_rest:
                from kvprof.runtime.across import into_latents

                into_latents(self.plan, self.cache)
        if self._lent and isinstance(result, ModelOutput):
            return replace(result, past_key_values=None)
        return result[:1] if self._lent else result

    @_uncompiled
    @torch.no_grad()
    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Run one layer's attention for a whole batch; returns ``[B, T, 1, Σ_h w_h]``."""
        with part("attention", index):
            return self._attend(index, query, key, value, mask, options)

    def _attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        runtime, cache = self._layers[index], self.cache
        if cache is None or cache.layers[index].pending != query.shape[2]:
            raise UsageError(
                f"layer {index} attends without its compressed cache; leave out past_key_values"
            )
        if options.get("dropout"):
            raise UsageError("the model is in training mode; call model.eval() first")
        store = cache.layers[index]
        several = query.shape[2] > 1
        exact = runtime.exact(several)
        if index in self.switches:
            self.switches[index].exact = exact
        # Taken from the list by every layer that rebuilds, so that it holds the next one's alone.
        rotation = self._last_rotation(index) if runtime.takes_angles else None
        key = runtime.without_mean(key)
        done = self.route.run(index, cache, query, key, value, options, rotation)
        if done is not None:
            store.stored()
            self._fired.add(index)
            return done.unsqueeze(2)
        batch, _, tokens, _ = query.shape
        unrotated = table = None
        if rotation is not None:
            facts = runtime.facts
            assert facts.rotary_offset is not None  # check_fits has seen to it
            if runtime.rebuilds:
                _, unrotated = before_rotation(
                    rotation, query, key, facts.rotary_offset, facts.rotary_transposed
                )
            with part("decompress"):
                table = cache.angles(index, rotation, batch)
        store.trim()
        self._regroup(store.row_groups, store.seen)
        output: Tensor | None = None
        for row_group in store.row_groups:
            row_group.record = store.record_past
            hidden = (
                max(0, self._starts[row_group.rows[0]] - store.seen) if not row_group.seen else 0
            )
            if hidden >= tokens:
                continue
            whole = len(row_group.rows) == batch and row_group.rows == list(range(batch))
            rows = None if whole else index_of(tuple(row_group.rows), query.device)

            def own(states: Tensor | None, rows: Any = rows, hidden: int = hidden) -> Any:
                if states is None:
                    return None
                states = states if rows is None else states[rows]
                return states[:, :, hidden:] if hidden else states

            tokens_of_rows = OwnTokens(
                own(query),
                own(key),
                own(value),
                own(unrotated),
                visible_keys(
                    own(mask.expand(batch, -1, -1, -1)) if mask is not None else None,
                    row_group.stored,
                    tokens - hidden,
                ),
                store.seen + hidden,
                several,
                options,
                rotation,
                table,
                cache.reach or self.loaded.context_length,
            )
            if self.prompt is None:
                result = runtime.run(row_group, tokens_of_rows)
            else:
                result = runtime.run_whole(row_group, tokens_of_rows, max(0, self.prompt - hidden))
            if whole and not hidden:
                output = result
                break
            if output is None:
                output = result.new_zeros(batch, tokens, result.shape[-1])
            output[slice(None) if rows is None else rows, hidden:] = result
        store.stored()
        self._fired.add(index)
        if output is None:  # nothing but padding so far
            width = sum(self._widths(runtime, exact))
            output = query.new_zeros(batch, tokens, width)
        return output.unsqueeze(2)

    def _widths(self, runtime: LayerRuntime, exact: bool) -> list[int]:
        values, facts = runtime.layer.values, runtime.facts
        folded = values.fold_up and not exact
        return [
            group.rank if folded and group.up is not None else facts.v_head_dim
            for group in values.groups
            for _ in range(group.heads * facts.group)
        ]

    def _last_rotation(self, index: int) -> Rotation:
        if not self.watching.rotations:
            raise FailedError(f"layer {index}: its rotary function was not called in this pass")
        rotation = self.watching.rotations[-1]
        self.watching.rotations.clear()
        return rotation

    def _regroup(self, row_groups: list[RowGroup], past: int) -> None:
        """Put rows that have no real token yet together with those that start where they do."""
        begun = [row_group for row_group in row_groups if row_group.seen]
        placed = {row for row_group in begun for row in row_group.rows}
        groups: dict[int, list[int]] = {}
        for row, start in enumerate(self._starts):
            if row not in placed:
                groups.setdefault(max(start, past), []).append(row)
        row_groups[:] = [*begun, *(RowGroup(rows) for rows in groups.values())]

    # Generation.

    def prepare_cache(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap generate's own choice of a cache, so that it gets a compressed one."""
        signature = inspect.signature(original)

        def prepare(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            inputs, reach = bound["model_kwargs"], bound["max_cache_length"]
            if inputs.get("past_key_values") is not None:
                self._check_cache(inputs["past_key_values"])
            result = original(*args, **kwargs)
            made = inputs.get("past_key_values")
            if isinstance(made, Cache) and not isinstance(made, CompressedCache):
                static = isinstance(made, StaticCache)
                if made.offloading or not (static or type(made) is DynamicCache):
                    wanted = bound["generation_config"].cache_implementation
                    raise UsageError(
                        f"cache_implementation {wanted!r} cannot store a plan's cache; leave it "
                        "out or use 'static'"
                    )
                inputs["past_key_values"] = self.new_cache(reach if static else None)
            if isinstance(inputs.get("past_key_values"), CompressedCache):
                inputs["past_key_values"].reach = reach
            return result

        return prepare
