"""Find a model's layout from one tiny forward pass, not from a list of classes.

Two rows of eight tokens go through the decoder: distinct tokens, and one repeated token. Values
decide: the value projection is the module that outputs V, the output projection the one that takes
the heads' outputs.
"""

import contextlib
import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.pytorch_utils import Conv1D

from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.models.interface import (
    AttentionCall,
    find_rotation,
    intercept,
    refusal,
    rotary_pairs,
    text_decoder,
)
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.models.noise import quiet
from kvprof.models.weights import input_device

__all__ = ["inspect_config", "inspect_layout", "model_class"]

_LENGTH = 8
_Event = tuple[nn.Module, Tensor, Tensor]


@dataclass(frozen=True)
class _Kept:
    """What the model's own cache is for a layer."""

    window: int | None
    shared: bool
    recurrent: bool


def _own_cache(model: PreTrainedModel) -> list[_Kept] | None:
    """Look at the cache that transformers makes for a model; None where it has another kind."""
    config = model.config.get_text_config(decoder=True)
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # code of its own, with its own cache
        return None
    if not layers:  # as long as it gets, all alike
        return None
    found = [
        _Kept(
            int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None,
            type(layer).__name__ == "DummyLayer",
            isinstance(layer, LinearAttentionCacheLayerMixin),
        )
        for layer in layers
    ]
    # Older versions end the cache before the layers that share another's.
    return found + [_Kept(None, True, False)] * (config.num_hidden_layers - len(found))


class _Observer:
    """Makes of the stream of module outputs and attention calls one layout per layer."""

    def __init__(self, model: PreTrainedModel, hidden_size: int) -> None:
        self.layers: list[LayerLayout] = []
        self._names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        self._hidden_size = hidden_size
        self._events: list[_Event] = []
        self._before = 0
        self._call: AttentionCall | None = None
        self._learned = False
        self._own = _own_cache(model)
        # OLMo and DBRX clamp what the projections give: nothing can be folded across that.
        config = model.config.get_text_config(decoder=True)
        self._clips = any(
            getattr(one, "clip_qkv", None) is not None
            for one in (config, getattr(config, "attn_config", None))
        )
        self._architecture = type(model).__name__

    def attention(self, call: AttentionCall) -> None:
        if self._call is not None or self._name(call.module) in {x.attention for x in self.layers}:
            raise UsageError(
                f"{type(call.module).__name__} is not supported: it attends more than once per "
                "forward pass (shared or nested layers)"
            )
        if getattr(call.module, "is_causal", True) is False:
            raise UsageError(
                f"{type(call.module).__name__} is not supported: it attends to later tokens, so "
                "the model is not a decoder"
            )
        if call.key.shape[2] != call.query.shape[2]:
            raise UsageError(
                f"{self._architecture} is not supported: it attends to {call.key.shape[2]} keys "
                f"for {call.query.shape[2]} tokens"
            )
        self._call = call
        self._before = len(self._events)

    def output(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self._call is not None and module is self._call.module:
            inside = {id(child) for child in module.modules()} - {id(module)}
            before = [e for e in self._events[: self._before] if id(e[0]) in inside]
            after = [e for e in self._events[self._before :] if id(e[0]) in inside]
            self.layers.append(self._layer(self._call, before, after))
            self._events.clear()
            self._call = None
        elif args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            self._events.append((module, args[0], result))

    def _name(self, module: nn.Module) -> str:
        return self._names[id(module)]

    def _layer(self, call: AttentionCall, before: list[_Event], after: list[_Event]) -> LayerLayout:
        _, heads, _, width = call.query.shape
        kv_heads, v_width = call.value.shape[1], call.value.shape[3]
        if heads % kv_heads or call.key.shape[1] != kv_heads:
            raise UsageError(
                f"{type(call.module).__name__} has {heads} query, {call.key.shape[1]} key and "
                f"{kv_heads} value heads; query heads must divide evenly among KV heads"
            )
        if not self.layers:
            self._learned = bool(before) and _differs_by_position(before[0][1])
        value = None if self._clips else _value_projection(call.value, before)
        # MLA: V comes out of a projection that reads a latent, not the layer's input.
        latent = hasattr(call.module, "kv_lora_rank") or (
            value is not None and value[0][1].shape[-1] != self._hidden_size
        )
        prefix = f"{self._name(call.module)}."
        output = next(
            (e[0] for e in after if _is_projection(e[0]) and _holds(e[1], call.output)), None
        )
        rotation = find_rotation(call)
        if rotation is None and not _holds_key(call, before):
            # Neither a known rotary function ran nor does K come straight out of a projection or
            # norm: something turned it that cannot be undone.
            position, rotary_dim, offset, transposed = "rope", width, None, False
        elif rotation is None:
            position, rotary_dim, offset, transposed = self._unrotated(call), 0, 0, False
        else:
            rotary_dim, offset, transposed = rotation
            position = "rope" if rotary_dim == width else "partial_rope"
        pairs: tuple[tuple[int, int, int, int], ...] | None = None if offset is None else ()
        if rotation is not None and offset is not None:
            pairs = rotary_pairs(call.rotations[0], offset, transposed)
        options = call.options
        scaling = options.get("scaling")
        index = len(self.layers)
        seen = int(options.get("sliding_window") or 0) or None
        kept = seen if self._own is None else self._own[index].window
        shared = self._own is not None and self._own[index].shared
        return LayerLayout(
            index=index,
            num_heads=heads,
            num_kv_heads=kv_heads,
            qk_head_dim=width,
            v_head_dim=v_width,
            position=position,
            rotary_dim=rotary_dim,
            qk_norm=not latent and (self._clips or _normalises(call, before)),
            fused_qkv=value is not None
            and not latent
            and value[0][2].shape[-1] > kv_heads * v_width,
            sliding_window=seen if shared else kept,
            softcap=options.get("softcap"),
            masked=not shared and seen != kept,
            shared=shared,
            recurrent=self._own is not None and self._own[index].recurrent,
            sinks=options.get("s_aux") is not None,
            mla=latent,
            scaling=float(width**-0.5 if scaling is None else scaling),
            attention=self._name(call.module),
            output_projection=None if output is None else self._name(output).removeprefix(prefix),
            value_projection=None
            if value is None
            else self._name(value[0][0]).removeprefix(prefix),
            biased=value is not None and getattr(value[0][0], "bias", None) is not None,
            value_interleaved=value is not None and value[1],
            rotary_offset=offset,
            rotary_transposed=transposed,
            rotary_pairs=pairs,
        )

    def _unrotated(self, call: AttentionCall) -> str:
        if self._learned:
            return "learned"
        if call.options.get("position_bias") is not None:
            return "alibi"
        mask = call.mask
        if mask is not None and mask.is_floating_point():
            visible = mask[mask > torch.finfo(mask.dtype).min / 2]
            if visible.numel() and not torch.all(visible == visible[0]):
                return "alibi"
        return "none"


def _differs_by_position(states: Tensor) -> bool:
    """Whether the row of one repeated token is not the same everywhere."""
    row = states.reshape(2, _LENGTH, -1)[1]
    return not torch.equal(row, row[:1].expand_as(row))


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _holds(flat: Tensor, heads_last: Tensor) -> bool:
    return flat.numel() == heads_last.numel() and torch.equal(
        flat.reshape(-1), heads_last.reshape(-1).to(flat)
    )


def _value_projection(value: Tensor, events: list[_Event]) -> tuple[_Event, bool] | None:
    """Find the projection whose output holds V: at its end, or at the end of each head's share."""
    # Of weights that are zero all do: then the last of the narrowest is it.
    found: list[tuple[_Event, bool]] = []
    _, heads, _, width = value.shape
    wanted = value.transpose(1, 2)  # [B, T, heads, width]
    for event in events:
        module, _, result = event
        features = result.shape[-1]
        if not _is_projection(module) or features < heads * width:
            continue
        if _holds(result[..., -heads * width :], wanted):
            found.append((event, False))
        elif features % heads == 0:
            share = result.reshape(*result.shape[:-1], heads, features // heads)
            if _holds(share[..., -width:], wanted):
                found.append((event, True))
    return min(reversed(found), key=lambda one: one[0][2].shape[-1], default=None)


def _holds_key(call: AttentionCall, events: list[_Event]) -> bool:
    """Whether K is, unchanged, part of what a projection or a norm put out."""
    _, heads, _, width = call.key.shape
    v_width = call.value.shape[3]
    wanted = call.key.transpose(1, 2)
    for _, _, result in events:
        if result.numel() == wanted.numel():
            if _holds(result, wanted):
                return True
            # a norm that works on [B, heads, T, width]
            if result.shape == call.key.shape and torch.equal(result, call.key):
                return True
            continue
        features, size = result.shape[-1], heads * width
        starts = {0, features - size, features - size - heads * v_width}
        if any(s >= 0 and _holds(result[..., s : s + size], wanted) for s in starts):
            return True
        if features % heads == 0 and features // heads >= width + v_width:
            share = result.reshape(*result.shape[:-1], heads, features // heads)
            if _holds(share[..., -width - v_width : -v_width], wanted):
                return True
    return False


def _normalises(call: AttentionCall, events: list[_Event]) -> bool:
    """Whether anything but a projection changed a tensor of Q's or K's size."""
    sizes = {call.query.numel(), call.key.numel()}
    return any(
        not any(_is_projection(part) for part in module.modules())
        and source.numel() == result.numel()
        and result.numel() in sizes
        and not torch.equal(source.reshape(-1), result.reshape(-1))
        for module, source, result in events
    )


def _hook(observer: _Observer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        observer.output(module, args or tuple(kwargs.values())[:1], result)

    return hook


def inspect_layout(model: PreTrainedModel) -> ModelLayout:
    """Find how each layer's attention is built, by one forward pass of 16 tokens."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    expected, hidden_size = config.num_hidden_layers, config.hidden_size
    decoder = text_decoder(model)
    embedding = model.get_input_embeddings()
    vocabulary = embedding.weight.shape[0]
    rows = torch.stack([torch.arange(_LENGTH) * 7 + 3, torch.full((_LENGTH,), 5)]) % vocabulary
    observer = _Observer(model, hidden_size)
    with ExitStack() as stack:
        stack.enter_context(intercept(model, observer.attention, rotary=True))
        for module in decoder.modules():
            handle = module.register_forward_hook(_hook(observer), with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(torch.inference_mode())
        try:
            decoder(input_ids=rows.to(input_device(model)), use_cache=False)
        except KvprofError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise FailedError(
                f"{name}: a forward pass of 16 tokens fails: {' '.join(str(error).split())}"
            ) from error
    layers = tuple(observer.layers)
    if not layers:
        raise UsageError(refusal(model))
    if len(layers) != expected:
        raise UsageError(
            f"{name} is not supported: only {len(layers)} of its {expected} layers use "
            "transformers' attention interface (a hybrid model?)"
        )
    return ModelLayout(layers, hidden_size, name)


# --- The same of a config alone: heads, widths, windows and sinks do not depend on hidden size, MLP
# and vocabulary, which are cut down, nor on how many layers of a kind there are.


_HIDDEN = 64
_SMALL = {
    "vocab_size": 128, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 1, "ffn_dim": 64,
}  # fmt: skip
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def model_class(config: Any) -> Any:
    """Return the class that builds a config's model; ``AutoModel`` for unknown heads."""
    with_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    alone = with_code or type(config) in AutoModelForCausalLM._model_mapping
    around = config.get_text_config(decoder=True) is not config
    if (around or not alone) and type(config) in AutoModelForMultimodalLM._model_mapping:
        return AutoModel if config.is_encoder_decoder else AutoModelForMultimodalLM
    return AutoModelForCausalLM if alone else AutoModel


def inspect_config(
    config: Any, width: int, *, narrow: bool = True, whole: bool = False
) -> ModelLayout:
    """Probe a small model of a decoder's config, of random weights."""
    small = _cut(config, _HIDDEN if narrow else None, width, whole)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return inspect_layout(model_class(small).from_config(small).eval())


def _cut(config: Any, hidden: int | None, width: int, whole: bool) -> Any:
    small = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    # As many layers as show every kind once; two where all are said to be alike.
    layers = max(map(kinds.index, set(kinds))) + 1 if kinds else min(2, config.num_hidden_layers)
    if whole or getattr(config, "num_kv_shared_layers", False):
        layers = config.num_hidden_layers  # those that share are the last ones
    elif kinds:
        # Some kinds make it up of the number of layers.
        with contextlib.suppress(AttributeError):
            small.layer_types = kinds[:layers]
    small.num_hidden_layers = layers
    for name in _SPECIAL:
        setattr(small, name, None)
    for name, value in _SMALL.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(value, getattr(small, name)))
    if hidden is not None:
        small.hidden_size = hidden
        small.head_dim = width
    return small
