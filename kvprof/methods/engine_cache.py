"""What vLLM allocates for a model's cache: layers by a config, pages as vLLM plans them.

Plain Python on ``config.json``: neither torch nor transformers is imported. The planning is that of
vLLM 0.32.0 (``vllm/v1/core/kv_cache_utils.py``); ``benchmarks/vllm_cache_plans.py`` asks vLLM
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
from kvprof.models.locate import INNER

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
    copies: int = 0  # of it that vLLM keeps, for prefixes of it to be found again

    def __post_init__(self) -> None:
        sizes = (self.heads, self.width, self.reach, self.state, self.copies)
        whole = all(isinstance(size, int) and 0 <= size < 1 << 40 for size in sizes)
        if not (whole and self.values + self.state):
            raise ValueError(f"a layer of {self.heads} heads of {self.width}, window {self.reach}")

    @property
    def values(self) -> int:
        """Numbers that it keeps of a token."""
        return self.heads * self.width * (1 if self.kind == "latent" else 2)


# --- A config's layers.


#: Of a model_type, what `benchmarks/cache_defaults.py` found that a config.json may leave unsaid.
_FAMILIES = json.loads((files("kvprof") / "assets" / "cache-defaults.json").read_text("utf-8"))
#: Kinds of attention as transformers calls them; the layer of a hybrid has a state as well.
_ATTENTION = {
    **dict.fromkeys(("full_attention", "attention", "hybrid"), "full"),
    **{"sliding_attention": "window", "chunked_attention": "chunk"},
}
_STATELESS = {*_ATTENTION, "moe", "mlp"} - {"hybrid"}
#: What states their reach; null turns them off, though the class has a number.
_REACH = {"window": "sliding_window", "chunk": "attention_chunk_size"}
# What else may be kept that this does not know.
_UNKNOWN = re.compile(
    r"mamba|ssm|linear_(num|key|value|conv|attn)|conv_L|kv_lora|recurrent|lru_|rwkv|state_size|"
    r"index_(n_heads|topk)|compress_ratio|cross_attention_layers|kda_|short_conv|retention|"
    r"v_head_dim|swa_"
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model's decoder, with what its class takes where it says nothing."""
    kind = str(config.get("model_type") or "a config without model_type")
    default = _FAMILIES.get(kind)
    if config.get("is_encoder_decoder"):
        raise UsageError(f"{kind}: encoder-decoder caches are not supported")
    for inner in INNER:
        if isinstance(config.get(inner), Mapping):
            return text_config({"model_type": (default or {}).get(inner), **config[inner]})
    if default is None:
        raise UsageError(f"{kind}: transformers has no such decoder, whose cache could be counted")
    stated = {x: value for x, value in config.items() if value is not None or x in _REACH.values()}
    renamed = default.get("renamed", {}).items()
    stated |= {name: stated[given] for name, given in renamed if given in stated}
    return {**default, **stated, "model_type": kind}


def cache_layers(own: Mapping[str, Any]) -> list[CacheLayer]:
    """Return what each layer of a model keeps, of what `text_config` returned."""
    try:
        if found := _layers(own):
            return found
        raise ValueError("none has its own")
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as problem:
        raise UsageError(
            f"{own['model_type']}: config.json lacks a size, or has another than expected "
            f"({problem}), so no layer's cache can be counted"
        ) from None


def _layers(own: Mapping[str, Any]) -> list[CacheLayer]:
    """Return the layers that have a cache of their own."""
    if own.get("latent"):  # of all heads together, as vLLM keeps them
        latent = CacheLayer("latent", 1, own["kv_lora_rank"] + own["qk_rope_head_dim"])
        return [latent] * own["num_hidden_layers"]
    types, found = _layer_types(own), list[CacheLayer]()
    count = own.get("num_hidden_layers", len(types))  # Nemotron-H's own config says types alone
    if len(types) < count:
        raise ValueError(f"layer_types has {len(types)} entries for {count} layers")
    types = types[:count]
    types[-1:] = own.get("last", types[-1:])
    layers = {int(index): each for index, each in (own.get("per_layer_config") or {}).items()}
    if layers:  # instead of what Gemma 4's full layers have
        own = {**own, "global_head_dim": None, "num_global_key_value_heads": None}
    unknown = [key for key in own if _UNKNOWN.search(key) and own[key]]
    unknown += [name for name in types if name not in _STATELESS]
    if unknown and "state_sizes" not in own:
        raise UsageError(f"{own['model_type']}: a cache of {unknown[0]} is not supported")
    for index, name in enumerate(types[: count - own.get("num_kv_shared_layers", 0)]):
        if name not in _STATELESS:
            found.append(_state(own))
        if name in _ATTENTION:
            found.append(_attention({**own, **layers.get(index, {})}, _ATTENTION[name]))
    return found


def _layer_types(own: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, as transformers calls it."""
    get = own.get
    other = "linear_attention" if "state_sizes" in own else "sliding_attention"
    if types := get("layer_types") or get("layers_block_type"):
        return list(types)
    if letters := get("hybrid_override_pattern"):
        return [{"M": other, "*": "full_attention"}.get(letter, "mlp") for letter in letters]
    count = own["num_hidden_layers"]
    if get("attention_chunk_size") and (rotated := get("no_rope_layers")):
        return ["chunked_attention" if one else "full_attention" for one in rotated]
    periods = ("full_attention_interval", "sliding_window_pattern", "attn_layer_period")
    every = next((own[x] for x in periods if isinstance(get(x), int) and own[x] > 0), None)
    full: Sequence[int] = range(count)
    if indices := get("attn_layer_indices") or get("full_attn_idxs"):
        full = indices
    elif every:
        full = range(get("attn_layer_offset", every - 1), count, every)
    elif get("use_sliding_window"):
        full = range(get("max_window_layers", 0))
    elif pattern := get("pattern"):  # of the family, in the table of defaults
        return [pattern[index % len(pattern)] for index in range(count)]
    elif "state_sizes" in own:
        raise KeyError("layer_types")
    elif get("sliding_window") and get("use_sliding_window", True):
        full = ()
    return ["full_attention" if index in full else other for index in range(count)]


def _attention(own: Mapping[str, Any], kind: str) -> CacheLayer:
    """Return a layer of attention: its heads and their width by the names that families use."""
    heads = own["num_attention_heads"]
    single = own.get("multi_query") and not own.get("new_decoder_architecture")
    kv = own.get("num_key_value_heads") or (1 if single else own.get("num_kv_heads") or heads)
    width = own.get("head_dim") or own["hidden_size"] // heads
    if kind == "full":
        width = own.get("global_head_dim") or width
        kv = (own.get("attention_k_eq_v") and own.get("num_global_key_value_heads")) or kv
    return CacheLayer(kind, kv, width, reach=own[_REACH[kind]] if kind in _REACH else 0)


def _state(own: Mapping[str, Any]) -> CacheLayer:
    """Return a layer's state: its convolution and its recurrence."""
    # The table of families has what states each of these, or its number.
    sizes = (own[x] if isinstance(x, str) else x for x in own["state_sizes"])
    heads, width, size, groups, kernel = sizes
    convolution = 2 * (kernel - 1) * (heads * width + 2 * groups * size)
    bytes_each = 4 if own.get("mamba_ssm_dtype") == "float32" else 2
    state = int(convolution + bytes_each * heads * width * size)
    return CacheLayer("state", state=state, copies=own.get("state_copies", 2))


# --- Pages, as vLLM plans them.


@dataclass(frozen=True)
class Pool:
    """Blocks of the cache: the bytes of one, and how many a sequence of a length takes."""

    block_bytes: int
    blocks: Callable[[int], int]

    def users(self, available: int, context: int) -> float:
        """Return how many sequences of a length fit, as vLLM's log has it."""
        return available // self.block_bytes / self.blocks(context)


def token_bytes(layers: Sequence[CacheLayer], dtype: str | float) -> list[float]:
    """Return what is stored of a token by layer: by vLLM's type, or bits with scales counted."""
    if isinstance(dtype, float):
        return [one.values * dtype / 8 for one in layers]
    edge = EDGE if dtype in TURBOQUANT and not any(one.state for one in layers) else 0
    inner = range(edge, len(layers) - edge)
    return [_token_bytes(x, dtype if i in inner else "auto") for i, x in enumerate(layers)]


def _token_bytes(layer: CacheLayer, dtype: str) -> int:
    """Return what vLLM stores of a token in a layer that has the type."""
    if dtype in TURBOQUANT:
        keys, values = (ceil(layer.width * bits / 8) for bits in TURBOQUANT[dtype])
        # Both have a scale, of values with a minimum; FP8 keys have none.
        slot = keys + values + (4 if keys == layer.width else 6)
        return layer.heads * (slot + slot % 2)
    bits = 16 if dtype == "auto" else 4 if dtype.startswith("int4") else 8
    return layer.values * bits // 8 + (8 * layer.heads if "per_token_head" in dtype else 0)


def plan_pool(layers: Sequence[CacheLayer], dtype: str, *, step_tokens: int = 8192) -> Pool:
    """Return vLLM's pool for a ``--kv-cache-dtype``; windows keep room for two steps in flight."""
    kinds = Counter(one.kind for one in layers)
    if "latent" in kinds and dtype not in ("auto", "fp8"):
        raise UsageError(f"{dtype}: vLLM stores latents (MLA) as auto or fp8 only")
    if dtype in TURBOQUANT and set(kinds) - {"full", "state"}:
        raise UsageError(f"{dtype}: its pages beside sliding windows are not counted")
    if dtype in TURBOQUANT and kinds["state"] == kinds["full"]:
        raise UsageError(f"{dtype}: vLLM does not start with it where each layer has a state, too")
    stored = [int(size) for size in token_bytes(layers, dtype)]
    state = max(one.state for one in layers)
    # The page of a layer left at 16 bits takes that of one that is not.
    tokens = 2 * _BLOCK if dtype in TURBOQUANT and not state else _BLOCK
    full = [size for one, size in zip(layers, stored, strict=True) if one.kind == "full"]
    if state and full:
        tokens *= ceil(state / (tokens * full[0]))
    pages = [(one, _BLOCK if one.kind == "window" else tokens) for one in layers]
    sizes = [one.state or held * size for (one, held), size in zip(pages, stored, strict=True)]
    block, groups = sum(sizes), {pages[0]: 1}
    if len({(one.kind, one.reach) for one in layers}) > 1:
        # Pages of one size, in groups of one number of layers: a smaller page holds more tokens,
        # or else is not full.
        largest = max(sizes)
        alike = Counter(
            (one, held if largest % size else held * (largest // size))
            for (one, held), size in zip(pages, sizes, strict=True)
        )
        least, most = min(alike.values()), max(alike.values())
        group = most if most < 1.5 * least else least
        block = largest * group
        groups = {page: ceil(number / group) for page, number in alike.items()}

    def blocks(context: int) -> int:
        """Return how many a sequence takes at most."""
        total = 0
        for (layer, held), number in groups.items():
            window = layer.kind == "window"
            seen = min(layer.reach - window + 2 * step_tokens, context) if layer.reach else context
            total += number * (layer.copies if layer.state else ceil(seen / held) + window)
        return total

    return Pool(block, blocks)
