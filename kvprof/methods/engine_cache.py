"""What vLLM allocates for a model's cache: layers by a config, pages as vLLM plans them.

Plain Python on ``config.json``: neither torch nor transformers is imported. The planning is that of
vLLM 0.27.1 (``vllm/v1/core/kv_cache_utils.py``); ``benchmarks/vllm_cache_plans.py`` asks vLLM
itself, and a test holds this against its answers.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.named import EDGE, TURBOQUANT

__all__ = ["CacheLayer", "Pool", "cache_layers", "plan_pool", "text_config", "token_bytes"]

_BLOCK = 16  # tokens of a page, where nothing makes it larger


@dataclass(frozen=True)
class CacheLayer:
    """What a layer keeps of a token, or (a state) of a sequence."""

    kind: str  # full, window, chunk, latent (MLA) or state
    heads: int = 0  # of keys
    width: int = 0  # of a head's keys, and of its values
    reach: int = 0  # tokens of a window or a chunk
    state: int = 0  # bytes of a sequence's state

    def __post_init__(self) -> None:
        sizes = (self.heads, self.width, self.reach, self.state)
        whole = all(isinstance(size, int) and size >= 0 for size in sizes)
        if not whole or self.values + self.state == 0:
            raise ValueError(f"no such layer: {self}")

    @property
    def values(self) -> int:
        """Numbers that it keeps of a token."""
        return self.heads * self.width * (1 if self.kind == "latent" else 2)


# --- A config's layers.


_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
#: What a config turns off by null; its class has a number.
_NULLABLE = ("sliding_window", "attention_chunk_size")
#: Families whose layers hold latents of all heads together, as vLLM keeps them.
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
# What else may be kept that this does not know.
_UNKNOWN = re.compile(
    r"mamba|ssm|linear_(num|key|value|conv|attn)|conv_L|kv_lora|recurrent|lru_|rwkv|state_size|"
    r"index_(n_heads|topk)|compress_ratio|cross_attention_layers|kda_|short_conv|retention"
)
#: Kinds of attention as transformers calls them, and what states their reach.
_ATTENTION = {
    **dict.fromkeys(("full_attention", "attention", "hybrid"), ("full", "")),  # hybrid: and a state
    "sliding_attention": ("window", "sliding_window"),
    "chunked_attention": ("chunk", "attention_chunk_size"),
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model's decoder, with what its class takes where it says nothing."""
    kind = str(config.get("model_type"))
    known = json.loads((files("kvprof") / "assets" / "cache-defaults.json").read_text("utf-8"))
    default = known.get(kind, {})
    if config.get("is_encoder_decoder"):
        raise UsageError(f"{kind}: encoder-decoder caches are not supported")
    for inner in _INNER:
        if isinstance(config.get(inner), Mapping):
            return text_config({"model_type": default.get(inner), **config[inner]})
    if kind not in known and kind not in _LATENT:
        raise UsageError(
            f"{kind}: transformers has no decoder of this model_type, so its cache cannot be "
            "counted"
        )
    stated = {x: value for x, value in config.items() if value is not None or x in _NULLABLE}
    renamed = default.get("renamed", {})
    stated |= {name: stated[given] for name, given in renamed.items() if given in stated}
    return {**default, **stated, "model_type": kind}


def cache_layers(own: Mapping[str, Any]) -> list[CacheLayer]:
    """Return what each layer of a model keeps, of what `text_config` returned."""
    kind = own["model_type"]
    try:
        found = _layers(own)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as problem:
        raise UsageError(
            f"{kind}: config.json lacks a size, or has another than expected ({problem}), so the "
            "cache cannot be counted"
        ) from None
    if not found:
        raise UsageError(f"{kind}: no layer of this model has a cache")
    return found


def _layers(own: Mapping[str, Any]) -> list[CacheLayer]:
    """Return the layers that have a cache of their own."""
    kind, count = own["model_type"], own["num_hidden_layers"]
    if count not in range(100_001):
        raise ValueError(f"num_hidden_layers {count}")
    if kind in _LATENT:
        return [CacheLayer("latent", 1, own["kv_lora_rank"] + own["qk_rope_head_dim"])] * count
    stateful = "state_sizes" in own
    if not stateful and (other := [key for key in own if _UNKNOWN.search(key) and own[key]]):
        raise UsageError(f"{kind}: {other[0]} in config.json names a cache that is not supported")
    types = [*_layer_types(own)][:count]
    if len(types) < count:
        raise UsageError(f"{kind}: layer_types in config.json must have {count} entries")
    if kind.startswith("gemma4"):
        types[-1] = "full_attention"
        own = own if own.get("per_layer_config") else {"global_head_dim": 512, **own}
    found = []
    for index, name in enumerate(types[: count - own.get("num_kv_shared_layers", 0)]):
        has_state = name == "hybrid" or name not in (*_ATTENTION, "moe", "mlp")
        if has_state and not stateful:
            raise UsageError(f"{kind}: caches of {name} are not supported")
        if has_state:
            found.append(CacheLayer("state", state=_state_bytes(own)))
        if name in _ATTENTION:
            each = own.get("per_layer_config", {}).get(str(index), {})
            found.append(_attention({**own, **each}, *_ATTENTION[name]))
    return found


def _layer_types(own: Mapping[str, Any]) -> Sequence[str]:
    """Return the kind of each layer, as transformers calls it."""
    count, get = own["num_hidden_layers"], own.get
    other = "linear_attention" if "state_sizes" in own else "sliding_attention"
    if types := get("layer_types") or get("layers_block_type"):
        return list(types)
    if letters := get("hybrid_override_pattern"):
        return [{"M": other, "*": "full_attention"}.get(letter, "mlp") for letter in letters]
    if get("attention_chunk_size") and (rotated := get("no_rope_layers")):
        return ["chunked_attention" if one else "full_attention" for one in rotated]
    every = get("full_attention_interval") or get("sliding_window_pattern")
    full: Sequence[int] = range(count)
    if indices := get("attn_layer_indices") or get("full_attn_idxs"):
        full = indices
    elif period := get("attn_layer_period"):
        full = range(own["attn_layer_offset"], count, period)
    elif isinstance(every, int) and every > 0:
        full = range(every - 1, count, every)
    elif get("use_sliding_window"):
        full = range(get("max_window_layers", 0))
    elif pattern := get("pattern"):  # of the family, in the table of defaults
        return [pattern[index % len(pattern)] for index in range(count)]
    elif "state_sizes" in own:
        raise KeyError("layer_types")
    elif get("sliding_window") and get("use_sliding_window", True):
        full = ()
    return ["full_attention" if index in full else other for index in range(count)]


def _attention(own: Mapping[str, Any], kind: str, reach: str) -> CacheLayer:
    """Return a layer of attention: its heads and their width by the names that families use."""
    heads = own["num_attention_heads"]
    single = own.get("multi_query") and not own.get("new_decoder_architecture")
    kv = own.get("num_key_value_heads") or (1 if single else own.get("num_kv_heads") or heads)
    width = own.get("head_dim") or own["hidden_size"] // heads
    if kind == "full":
        width = own.get("global_head_dim") or width
        kv = (own.get("attention_k_eq_v") and own.get("num_global_key_value_heads")) or kv
    return CacheLayer(kind, kv, width, reach=own[reach] if reach else 0)


def _state_bytes(own: Mapping[str, Any]) -> int:
    """Return the bytes of a sequence's convolution and recurrence in a layer."""
    # The table of defaults has what states each of these, or its number.
    sizes = (own[x] if isinstance(x, str) else x for x in own["state_sizes"])
    heads, width, size, groups, kernel = sizes
    convolution = 2 * (kernel - 1) * (heads * width + 2 * groups * size)
    bytes_each = 4 if own.get("mamba_ssm_dtype") == "float32" else 2
    return int(convolution + bytes_each * heads * width * size)


# --- Pages, as vLLM plans them.


@dataclass(frozen=True)
class Pool:
    """Blocks of the cache: the bytes of one, and how many a sequence of a length takes."""

    block_bytes: int
    blocks: Callable[[int], int]

    def users(self, available: int, context: int) -> float:
        """Return how many sequences of a length fit, as vLLM's log has it."""
        return available // self.block_bytes / self.blocks(context)


def token_bytes(layers: Sequence[CacheLayer], dtype: str) -> list[int]:
    """Return what vLLM stores of a token by layer, scales counted; 0 of a state."""
    edge = EDGE if _leaves_edges(layers, dtype) else 0
    inner = range(edge, len(layers) - edge)
    return [_token_bytes(x, dtype if i in inner else "auto") for i, x in enumerate(layers)]


def _leaves_edges(layers: Sequence[CacheLayer], dtype: str) -> bool:
    """Tell whether a type leaves the outer layers at 16 bits: turboquant_*, but of hybrids."""
    return dtype.startswith("turboquant") and all(one.kind != "state" for one in layers)


def _token_bytes(layer: CacheLayer, dtype: str) -> int:
    """Return what vLLM stores of a token in a layer that has the type."""
    heads, width = layer.heads, layer.width
    if dtype == "auto":
        return 2 * layer.values
    if dtype == "int4_per_token_head" and layer.kind == "full":
        return heads * (width + 8)
    if dtype.startswith("turboquant"):
        keys, values = TURBOQUANT[dtype]
        stored = width if keys == 8 else ceil(width * keys / 8) + 2
        slot = stored + ceil(width * values / 8) + 4
        return heads * (slot + slot % 2)
    # vLLM gives windows and chunks at int4 the bytes of int8.
    return layer.values + (8 * heads if "per_token_head" in dtype else 0)


def _pages(layer: CacheLayer, tokens: int, context: int, in_flight: int) -> int:
    """Return how many pages of so many tokens a sequence takes of a layer, at most."""
    window = layer.kind == "window"
    if layer.kind == "state":
        return 1
    if layer.reach:
        context = min(layer.reach - window + in_flight, context)
    return -(-context // tokens) + window


def plan_pool(layers: Sequence[CacheLayer], dtype: str, *, step_tokens: int = 8192) -> Pool:
    """Return the pool of pages that vLLM plans for a ``--kv-cache-dtype``; refuse what it refuses.

    Two steps are in flight, for which windows keep room.
    """
    kinds = {one.kind for one in layers}
    if "latent" in kinds and dtype not in ("auto", "fp8"):
        raise UsageError(f"{dtype}: vLLM stores latents (MLA) as auto or fp8 only")
    if dtype.startswith("turboquant") and kinds - {"full", "state"}:
        raise UsageError(f"{dtype}: vLLM does not support it with sliding windows")
    # The page of a layer left at 16 bits takes that of one that is not.
    tokens = 2 * _BLOCK if _leaves_edges(layers, dtype) else _BLOCK
    state = max(one.state for one in layers)
    if state and (full := next((one for one in layers if one.kind == "full"), None)):
        tokens *= -(-state // (tokens * _token_bytes(full, dtype)))
    held = [_BLOCK if one.kind == "window" else tokens for one in layers]
    stored = zip(layers, held, token_bytes(layers, dtype), strict=True)
    sizes = [one.state or count * size for one, count, size in stored]
    block = sum(sizes)
    groups = {(layers[0], held[0]): 1}
    if len({(one.kind, one.reach) for one in layers}) > 1:
        # Pages of one size, in groups of one number of layers: a smaller page holds more tokens,
        # or else is not full.
        largest = max(sizes)
        alike = Counter(
            (layer, count if largest % size else count * (largest // size))
            for layer, count, size in zip(layers, held, sizes, strict=True)
        )
        least, most = min(alike.values()), max(alike.values())
        group = most if most < 1.5 * least else least
        block = largest * group
        groups = {pages: -(-number // group) for pages, number in alike.items()}

    def blocks(context: int) -> int:
        return sum(n * _pages(*one, context, 2 * step_tokens) for one, n in groups.items())

    return Pool(block, blocks)
