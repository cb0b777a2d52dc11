"""What an engine allocates for a model's cache: layers by a config, pages as vLLM plans them.

Plain Python on ``config.json``: neither torch nor transformers is imported. The planning is that of
vLLM 0.27.1 (``vllm/v1/core/kv_cache_utils.py``); ``benchmarks/vllm_cache_plans.py`` asks vLLM
itself, and a test holds this against its answers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import ceil
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.named import EDGE, TURBOQUANT

__all__ = [
    "CacheLayer",
    "Pool",
    "cache_layers",
    "plan_pool",
    "text_config",
    "token_bytes",
]

_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_MOST = 100_000  # layers, or heads
_BLOCK = 16  # tokens of a page, where nothing makes it larger


@dataclass(frozen=True)
class CacheLayer:
    """What a layer keeps of a token, or (a state) of a sequence.

    Attributes
    ----------
    kind : str
        ``full``, ``window``, ``chunk``, ``latent`` (MLA) or ``state``.
    heads, width : int
        KV heads, and columns of a head's keys, as many as of its values.
    reach : int
        Tokens of a window or a chunk.
    state : int
        Bytes of a sequence's state.
    """

    kind: str
    heads: int = 0
    width: int = 0
    reach: int = 0
    state: int = 0


# --- A config's layers.


@cache
def _defaults() -> dict[str, Any]:
    text = (files("kvprof") / "assets" / "cache-defaults.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model's decoder, with what its class takes where it says nothing."""
    kind, known = str(config.get("model_type")), _defaults()
    if config.get("is_encoder_decoder"):
        raise UsageError(f"{kind}: encoder-decoder caches are not supported")
    for inner in _INNER:
        if isinstance(config.get(inner), Mapping):
            own = dict(config[inner])
            own.setdefault("model_type", known.get(kind, {}).get(inner))
            return text_config(own)
    if kind not in known:
        raise UsageError(
            f"{kind}: transformers has no decoder of this model_type, so its cache cannot be "
            "counted"
        )
    stated = {key: value for key, value in config.items() if value is not None}
    default = dict(known[kind])
    for name, given in default.pop("renamed", {}).items():
        if given in stated:
            stated[name] = stated.pop(given)
    if "head_dim" in stated or "hidden_size" not in stated:
        default.pop("head_dim", None)
    pattern = default.pop("layer_types", None)
    merged = default | {"model_type": kind, "pattern": pattern} | stated
    for needed in ("num_hidden_layers", "num_attention_heads"):
        value = merged.get(needed)
        if not isinstance(value, int) or not 0 < value <= _MOST:
            raise UsageError(f"{kind}: config.json lacks {needed}, so the cache cannot be counted")
    return merged


#: Families whose layers hold latents of all heads together, as vLLM keeps them.
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
# What else may be kept that this does not know.
_UNKNOWN = re.compile(
    r"mamba|ssm|linear_(num|key|value|conv|attn)|conv_L|kv_lora|recurrent|lru_|rwkv|state_size|"
    r"index_(n_heads|topk)|compress_ratio|cross_attention_layers|kda_|short_conv|retention"
)


def cache_layers(config: Mapping[str, Any]) -> list[CacheLayer]:
    """Return what each layer of a model keeps, of a ``config.json``.

    Raises
    ------
    UsageError
        For a model whose cache is not known.
    """
    own = text_config(config)
    try:
        return _layers(own)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as problem:
        kind = own["model_type"]
        raise UsageError(
            f"{kind}: config.json has a value of an unexpected type, so the cache cannot be counted"
        ) from problem


def _layers(own: dict[str, Any]) -> list[CacheLayer]:
    kind, layers = own["model_type"], own["num_hidden_layers"]
    if kind in _STATES:
        return _with_states(own)
    if kind in _LATENT:
        width = own["kv_lora_rank"] + own["qk_rope_head_dim"]
        return [CacheLayer("latent", 1, width)] * layers
    if found := next((key for key in own if _UNKNOWN.search(key) and own[key]), None):
        raise UsageError(f"{kind}: {found} in config.json names a cache that is not supported")
    kept = layers - (own.get("num_kv_shared_layers") or 0)
    each = own.get("per_layer_config") or {}
    if kind.startswith("gemma4") and not each:
        own.setdefault("global_head_dim", 512)
    return [
        _attention(own | (each.get(str(index)) or {}), one)
        for index, one in enumerate(_types(own)[:kept])
    ]


def _types(own: Mapping[str, Any]) -> list[str]:
    """Return the kind of attention of each layer."""
    layers, kind = own["num_hidden_layers"], own["model_type"]
    if isinstance(given := own.get("layer_types"), list):
        found = [str(one) for one in given][:layers]
    elif own.get("no_rope_layers") and own.get("attention_chunk_size"):
        found = [
            "chunked_attention" if rotated else "full_attention"
            for rotated in own["no_rope_layers"]
        ]
    elif isinstance(every := own.get("sliding_window_pattern"), int) and every > 0:
        found = [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
        ]
    elif own.get("use_sliding_window"):
        first = own.get("max_window_layers", 0)
        found = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    elif pattern := own["pattern"]:
        found = [pattern[i % len(pattern)] for i in range(layers)]
    else:
        windowed = own.get("sliding_window") and own.get("use_sliding_window", True)
        found = ["sliding_attention" if windowed else "full_attention"] * layers
    if kind.startswith("gemma4"):
        found[-1] = "full_attention"
    if len(found) != layers:
        raise UsageError(f"{kind}: layer_types in config.json must have {layers} entries")
    return found


def _attention(own: Mapping[str, Any], type_: str) -> CacheLayer:
    heads = own["num_attention_heads"]
    kv = own.get("num_key_value_heads") or (1 if own.get("multi_query") else heads)
    width = own.get("head_dim") or own["hidden_size"] // heads
    if not isinstance(kv, int) or not isinstance(width, int):
        raise UsageError(
            f"{own['model_type']}: heads differ between layers, so the cache cannot be counted"
        )
    if type_ in ("full_attention", "attention"):
        if own.get("attention_k_eq_v") and own.get("num_global_key_value_heads"):
            kv = own["num_global_key_value_heads"]
        return CacheLayer("full", kv, own.get("global_head_dim") or width)
    if type_ == "sliding_attention":
        return CacheLayer("window", kv, width, reach=_reach(own, "sliding_window"))
    if type_ == "chunked_attention":
        return CacheLayer("chunk", kv, width, reach=_reach(own, "attention_chunk_size"))
    raise UsageError(f"{own['model_type']}: caches of {type_} are not supported")


def _reach(own: Mapping[str, Any], name: str) -> int:
    if not isinstance(own.get(name), int):
        raise UsageError(
            f"{own['model_type']}: config.json lacks {name}, so the cache cannot be counted"
        )
    return int(own[name])


# --- Layers with a state: bytes of a sequence's convolution and recurrence, 2 a number by default.


def _mamba2(own: Mapping[str, Any], *names: str) -> int:
    heads, width, size, groups, kernel = (own[name] for name in names)
    inner = own.get("mamba_d_ssm") or heads * width
    exact = 4 if own["model_type"] == "nemotron_h" else 2
    return int((kernel - 1) * (inner + 2 * groups * size) * 2 + heads * width * size * exact)


_MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def _mamba1(own: Mapping[str, Any]) -> int:
    inner = own["mamba_expand"] * own["hidden_size"]
    return int(2 * inner * (own["mamba_d_conv"] - 1 + own["mamba_d_state"]))


def _delta_net(own: Mapping[str, Any]) -> int:
    keys = own["linear_num_key_heads"] * own["linear_key_head_dim"]
    values = own["linear_num_value_heads"] * own["linear_value_head_dim"]
    exact = 4 if own.get("mamba_ssm_dtype") == "float32" else 2
    conv = (own["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    return int(2 * conv + exact * values * own["linear_key_head_dim"])


def _short_conv(own: Mapping[str, Any]) -> int:
    return int(2 * own.get("conv_dim", own["hidden_size"]) * (own["conv_L_cache"] - 1))


_STATES = {
    "bamba": lambda own: _mamba2(own, *_MAMBA2),
    "falcon_h1": lambda own: _mamba2(own, *_MAMBA2),
    "granitemoehybrid": lambda own: _mamba2(own, *_MAMBA2),
    "jamba": _mamba1,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "nemotron_h": lambda own: _mamba2(
        own, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"
    ),
    "qwen3_5_moe_text": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_next": _delta_net,
}


def _with_states(own: Mapping[str, Any]) -> list[CacheLayer]:
    """Return the layers of a hybrid: attention, states, or both in each."""
    kind = own["model_type"]
    try:
        state = CacheLayer("state", state=_STATES[kind](own))
        full = _attention(own, "full_attention")
        return [
            one
            for type_ in _hybrid_types(own)
            for one in {"M": [state], "*": [full], "both": [state, full]}.get(type_, [])
        ]
    except KeyError as missing:
        raise UsageError(
            f"{kind}: config.json lacks {missing.args[0]}, so the cache cannot be counted"
        ) from None


def _hybrid_types(own: Mapping[str, Any]) -> list[str]:
    """Return of each layer ``M`` (a state), ``*`` (attention), ``both``, or another letter."""
    count = range(own["num_hidden_layers"])
    if own["model_type"] == "falcon_h1":
        return ["both" for _ in count]
    if "hybrid_override_pattern" in own:
        return list(own["hybrid_override_pattern"])
    for name in ("layer_types", "layers_block_type"):
        if name in own:
            types = {"full_attention": "*", "attention": "*", "moe": "-", "mlp": "-"}
            return [types.get(one, "M") for one in own[name]]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if name in own:
            return ["*" if i in own[name] else "M" for i in count]
    if "attn_layer_period" in own:
        every, first = own["attn_layer_period"], own["attn_layer_offset"]
        return ["*" if i % every == first else "M" for i in count]
    every = own.get("full_attention_interval", 4)
    return ["*" if (i + 1) % every == 0 else "M" for i in count]


# --- Pages, as vLLM plans them.


@dataclass(frozen=True)
class _Page:
    """One layer's page: its tokens, and its bytes."""

    layer: CacheLayer
    tokens: int
    bytes: int

    def needed(self, context: int, in_flight: int) -> int:
        """Return how many pages a sequence takes, at most."""
        if self.layer.kind == "state":
            return 1
        if self.layer.kind == "window":
            return -(-min(self.layer.reach - 1 + in_flight, context) // self.tokens) + 1
        reach = self.layer.reach + in_flight if self.layer.kind == "chunk" else context
        return -(-min(reach, context) // self.tokens)


@dataclass(frozen=True)
class Pool:
    """What one block of the pool takes, and which layers draw blocks of it.

    Attributes
    ----------
    block_bytes : int
        One block, of all layers that share it.
    groups : tuple of (int, _Page)
        Layers of each group, and their page.
    in_flight : int
        Tokens that may be scheduled and not settled, for which windows keep room.
    """

    block_bytes: int
    groups: tuple[tuple[int, _Page], ...]
    in_flight: int

    def blocks(self, context: int) -> int:
        """Return the blocks that a sequence of a length takes."""
        return sum(page.needed(context, self.in_flight) for _, page in self.groups)

    def bytes(self, context: int) -> int:
        """Return the bytes that a sequence of a length takes."""
        return self.blocks(context) * self.block_bytes

    def users(self, available: int, context: int) -> float:
        """Return how many sequences of a length fit, as vLLM's log has it."""
        return available // self.block_bytes / self.blocks(context)

    def tokens(self, available: int, context: int) -> int:
        """Return how many tokens fit in sequences of a length."""
        return int(self.users(available, context) * context)


def _token_bytes(layer: CacheLayer, dtype: str) -> int:
    """Return what a layer stores of a token, scales counted."""
    heads, width = layer.heads, layer.width
    if layer.kind == "latent":
        return heads * width * (2 if dtype == "auto" else 1)
    if dtype == "auto":
        return heads * width * 4
    if dtype == "int4_per_token_head" and layer.kind == "full":
        return heads * (width + 8)
    if dtype.startswith("turboquant"):
        keys, values = TURBOQUANT[dtype]
        stored = width if keys == 8 else ceil(width * keys / 8) + 2
        slot = stored + ceil(width * values / 8) + 4
        return heads * (slot + slot % 2)
    # vLLM gives windows and chunks at int4 the bytes of int8.
    return heads * (2 * width + (8 if "per_token_head" in dtype else 0))


def _dtypes(layers: Sequence[CacheLayer], dtype: str) -> list[str]:
    """Return each layer's type: turboquant_* leaves outer layers at 16 bits, but of hybrids."""
    states = any(one.kind == "state" for one in layers)
    edge = EDGE if dtype.startswith("turboquant") and not states else 0
    return [dtype if edge <= i < len(layers) - edge else "auto" for i in range(len(layers))]


def token_bytes(layers: Sequence[CacheLayer], dtype: str) -> list[int]:
    """Return what vLLM stores of a token, by layer; layers with a state left out."""
    pairs = zip(layers, _dtypes(layers, dtype), strict=True)
    return [_token_bytes(layer, kept) for layer, kept in pairs if layer.kind != "state"]


def plan_pool(layers: Sequence[CacheLayer], dtype: str, *, step_tokens: int = 8192) -> Pool:
    """Return the pool of pages that vLLM plans for a cache type.

    Parameters
    ----------
    layers : sequence of CacheLayer
    dtype : str
        What ``--kv-cache-dtype`` takes.
    step_tokens : int
        vLLM's ``max_num_batched_tokens``; two steps are in flight.

    Raises
    ------
    UsageError
        Where vLLM refuses the type for these layers.
    """
    kinds = {one.kind for one in layers}
    if not layers:
        raise UsageError("no layer of this model has a cache")
    if "latent" in kinds and dtype not in ("auto", "fp8"):
        raise UsageError(f"{dtype}: vLLM stores latents (MLA) as auto or fp8 only")
    if dtype.startswith("turboquant") and kinds - {"full", "state"}:
        raise UsageError(f"{dtype}: vLLM does not support it with sliding windows")
    full = next((one for one in layers if one.kind in ("full", "latent")), None)
    dtypes = _dtypes(layers, dtype)
    tokens = _BLOCK
    if dtypes[0] != dtype and full is not None:  # its page takes one at 16 bits
        tokens *= 2
    state = max((one.state for one in layers), default=0)
    if state and full is not None:
        aligned = max(tokens, 128) if full.kind == "latent" else tokens
        tokens = aligned * -(-state // (aligned * _token_bytes(full, dtype)))
    pages = [
        _Page(
            layer,
            tokens if layer.kind in ("full", "latent") or layer.kind == "chunk" else _BLOCK,
            layer.state
            or _token_bytes(layer, kept) * (_BLOCK if layer.kind == "window" else tokens),
        )
        for layer, kept in zip(layers, dtypes, strict=True)
    ]
    if kinds <= {"full", "latent"} or len({(p.layer.kind, p.layer.reach) for p in pages}) == 1:
        return Pool(sum(one.bytes for one in pages), ((len(pages), pages[0]),), 2 * step_tokens)
    return _grouped(pages, 2 * step_tokens)


def _grouped(pages: Sequence[_Page], in_flight: int) -> Pool:
    """Return a pool whose layers differ: pages of one size, groups of one number of layers."""
    largest = max(one.bytes for one in pages)
    alike: dict[_Page, int] = {}
    for page in pages:
        ratio, rest = divmod(largest, page.bytes)
        if page.layer.kind == "state":
            one = replace(page, bytes=largest)
        else:  # more tokens in a page, or else a page that is not full
            one = replace(page, bytes=largest, tokens=page.tokens * (1 if rest else ratio))
        alike[one] = alike.get(one, 0) + 1
    least, most = min(alike.values()), max(alike.values())
    size = most if most < 1.5 * least else least
    groups = tuple(
        (min(size, count), page) for page, count in alike.items() for _ in range(-(-count // size))
    )
    return Pool(largest * size, groups, in_flight)
