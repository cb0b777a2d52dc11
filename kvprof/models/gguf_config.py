"""Check that the model that transformers builds from a GGUF file is the one described.

transformers ignores keys that it does not know. RoPE, heads, windows and caps are set here, and
unknown keys are refused.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from kvprof.errors import FailedError, UsageError
from kvprof.models.gguf import ARCHITECTURES, GgufFile

__all__ = ["hold_against_file"]

#: Where a config has what transformers does not translate, if its class has it at all.
_PLACES = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "context_length": "n_positions",  # of GPT-2
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "use_parallel_residual": "use_parallel_residual",
}
# What llama.cpp takes for a key that is not there, where that is not nothing.
_NEUTRAL = {"attention.causal": True, "rope.scaling.attn_factor": 1, "expert_gating_func": 1}
# Held against the config by themselves, or without effect on the model.
_HELD = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.scale", "attention.sliding_window_pattern", "rope.freq_base"),
    *("rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scale_linear", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
    *("tensor_data_layout", "vocab_size"),
)
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_EPSILON_NAMES = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "norm_eps",
)
# What models divide by, or take the root or a power of.
_POSITIVE = (*_EPSILONS, "attention.scale", "rope.freq_base", "rope.freq_base_swa")
# llama.cpp knows Gemma's largest by their layers: their queries are scaled by another width.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_ENDS = ("eos_token_id", "eot_token_id")
_CLOSE = 1e-6  # of numbers that a file holds in 32 bits


def hold_against_file(spec: str, gguf: GgufFile, config: Any) -> None:
    """Give a config what transformers left out of a file; refuse what it has no place for."""
    _File(spec, gguf, config).hold()


class _File:
    def __init__(self, spec: str, gguf: GgufFile, config: Any) -> None:
        self._spec, self._gguf, self._config = spec, gguf, config
        self._said = {key: _one(value) for key, value in gguf.settings.items()}
        usual = type(config)().to_dict()
        rope = usual.get("rope_parameters") or {}
        nested = rope.get("full_attention")
        # A config takes any name, and most models look at none but those of their class.
        self._declared = {*usual, *(nested if isinstance(nested, Mapping) else rope)}

    def hold(self) -> None:
        gguf, config, said = self._gguf, self._config, self._said
        kind = ARCHITECTURES[gguf.architecture]
        if config.model_type != kind:
            raise UsageError(
                f"{self._spec}: {gguf.path.name} has architecture {gguf.architecture}, which "
                f"transformers would load as {config.model_type}; use the model's safetensors"
            )
        if not any(key in said for key in _EPSILONS):
            raise FailedError(
                f"{self._spec}: {gguf.path.name} lacks {gguf.architecture}.{_EPSILONS[1]}"
            )
        for key in _POSITIVE:
            value = said.get(key, 1)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise FailedError(
                    f"{self._spec}: {gguf.path.name}: {gguf.architecture}.{key} is "
                    f"{_short(value)}; it must be a number above 0"
                )
        epsilon = next(said[key] for key in _EPSILONS if key in said)
        for name in self._declared.intersection(_EPSILON_NAMES):
            setattr(config, name, epsilon)
        table = GGUF_CONFIG_MAPPING.get(gguf.architecture) or GGUF_CONFIG_MAPPING[kind]
        read = {key for key, name in table.items() if name}
        for key, value in said.items():
            if (name := _PLACES.get(key, "")) in self._declared and value:
                setattr(config, name, value)
            elif key not in (*read, *_HELD, *_EPSILONS) and value != _NEUTRAL.get(key, 0):
                self._refuse(key, value, "nothing")
        self._hold_heads()
        self._hold_windows()
        self._hold_rope()
        if gguf.tied != bool(getattr(config, "tie_word_embeddings", False)):
            self._refuse("tied", gguf.tied, not gguf.tied)
        self._set_ends()

    def _hold(self, key: str, found: Any, wanted: Any) -> None:
        numbers = (int, float)
        alike = found == wanted
        if isinstance(found, numbers) and isinstance(wanted, numbers):
            alike = math.isclose(found, wanted, rel_tol=_CLOSE)
        if not alike:
            self._refuse(key, wanted, found)

    def _refuse(self, key: str, wanted: Any, found: Any) -> None:
        says = "says" if key in self._said else "means"
        raise UsageError(
            f"{self._spec}: {self._gguf.path.name} {says} {self._gguf.architecture}.{key} is "
            f"{_short(wanted)}, but transformers would use {_short(found)}; use the model's "
            "safetensors"
        )

    def _hold_heads(self) -> None:
        config, said = self._config, self._said
        own = int(said["embedding_length"]) // int(said["attention.head_count"])
        width = int(said.get("attention.key_length", own))
        if "head_dim" in self._declared:
            config.head_dim = width
        self._hold("attention.key_length", self._head_dim, width)
        self._hold("attention.value_length", width, said.get("attention.value_length", own))
        found = getattr(config, "num_key_value_heads", config.num_attention_heads)
        heads = said.get("attention.head_count_kv", said["attention.head_count"])
        self._hold("attention.head_count_kv", found, heads)
        scaled = said["block_count"] == _SCALED_BY_WIDTH.get(self._gguf.architecture)
        scale = said.get("attention.scale", (own if scaled else width) ** -0.5)
        if "query_pre_attn_scalar" in self._declared:
            scalar = scale**-2
            whole = round(scalar)
            close = math.isclose(scalar, whole, rel_tol=_CLOSE)
            config.query_pre_attn_scalar = whole if close else scalar
        else:
            self._hold("attention.scale", width**-0.5, scale)

    @property
    def _head_dim(self) -> int:
        config = self._config
        return int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

    def _hold_windows(self) -> None:
        config, said = self._config, self._said
        kinds = getattr(config, "layer_types", None) or []
        window = getattr(config, "sliding_window", None) or 0
        if getattr(config, "use_sliding_window", True) is False or (
            kinds and "sliding_attention" not in kinds
        ):
            window = 0
        usual = window if self._gguf.architecture == "gemma2" else 0
        self._hold("attention.sliding_window", window, said.get("attention.sliding_window", usual))
        every = said.get("attention.sliding_window_pattern")
        if every is not None:
            slides = [kind == "sliding_attention" for kind in kinds]
            if isinstance(every, int) and not isinstance(every, bool) and every:
                every = [bool((layer + 1) % every) for layer in range(len(kinds))]
            self._hold("attention.sliding_window_pattern", slides, every)

    def _rope(self, kind: str = "full_attention") -> dict[str, Any]:
        """Return the config's parameters of RoPE, to be changed: a kind of layer's, if any."""
        found = getattr(self._config, "rope_parameters", None) or {}
        nested = found.get(kind)
        if isinstance(nested, dict):
            return nested
        return found if kind == "full_attention" else {}

    def _hold_rope(self) -> None:
        if self._gguf.architecture == "gpt2":
            return
        said, rope = self._said, self._rope()
        rope["rope_theta"] = float(said.get("rope.freq_base", 10_000.0))
        if (rotated := said.get("rope.dimension_count", self._head_dim)) != self._head_dim or (
            "partial_rotary_factor" in rope
        ):
            if "partial_rotary_factor" not in self._declared:
                self._refuse("rope.dimension_count", rotated, self._head_dim)
            rope["partial_rotary_factor"] = rotated / self._head_dim
        gemma3 = self._gguf.architecture == "gemma3"
        swa = self._rope("sliding_attention").get("rope_theta", 0)
        self._hold("rope.freq_base_swa", swa, said.get("rope.freq_base_swa", 1e4 if gemma3 else 0))
        wanted = self._scaling()
        beside = ("rope_theta", "partial_rotary_factor")
        found = {name: value for name, value in rope.items() if name not in beside}
        if found in ({}, {"rope_type": "default"}):
            rope.update(wanted)
        elif found != wanted:
            self._refuse("rope.scaling.type", wanted, found)

    def _scaling(self) -> dict[str, Any]:
        """Return how a file scales its positions, in transformers' words."""
        said, gguf = self._said, self._gguf
        factor = said.get("rope.scaling.factor", said.get("rope.scale_linear", 0)) or 1
        kind = said.get("rope.scaling.type", "linear")  # which llama.cpp takes for a factor alone
        wanted: dict[str, Any] = {"rope_type": "default"}
        if kind == "linear" and factor != 1:
            wanted = {"rope_type": "linear", "factor": float(factor)}
        elif kind not in ("none", "linear"):
            self._refuse("rope.scaling.type", kind, "nothing")
        factors = gguf.rope_factors
        if all(one == 1 for one in factors):
            return wanted
        fitted = _as_llama3(factors, float(said.get("rope.freq_base", 10_000.0)))
        if fitted is None or wanted != {"rope_type": "default"} or gguf.architecture != "llama":
            raise UsageError(
                f"{self._spec}: {gguf.path.name} scales positions by rope_freqs.weight in a way "
                "that transformers does not support; use the model's safetensors"
            )
        return fitted

    def _set_ends(self) -> None:
        """Give the config the tokens that the file names: a chat's turn ends at one of its own."""
        ids = self._gguf.token_ids
        ends = list(dict.fromkeys(ids[name] for name in _ENDS if name in ids))
        self._config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
        self._config.bos_token_id = ids.get("bos_token_id")
        self._config.pad_token_id = ids.get("padding_token_id")


def _as_llama3(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Return the Llama 3 RoPE scaling that gives these factors; None where none does."""
    most = max(factors)
    if not (min(factors) >= 1 and 1 < most < math.inf):
        return None
    count = len(factors)
    waves = [theta ** (-i / count) / (2 * math.pi) for i in range(count)]  # in a token
    shares = [(1 / one - 1 / most) / (1 - 1 / most) for one in factors]
    between = [i for i, share in enumerate(shares) if _CLOSE < share < 1 - _CLOSE]
    if len(between) < 2:
        return None
    first, last = between[0], between[-1]
    slope = (shares[first] - shares[last]) / (waves[first] - waves[last])
    offset = slope * waves[first] - shares[first]  # low / (high - low), and low is 1
    if offset <= 0 or slope <= 0:
        return None
    high = 1 + 1 / offset
    context = slope / offset
    rule = {
        "rope_type": "llama3",
        "factor": _rounded(most),
        "low_freq_factor": 1.0,
        "high_freq_factor": _rounded(high),
        "original_max_position_embeddings": round(context),
    }
    return rule if _gives(rule, waves, factors) else None


def _gives(rule: Mapping[str, Any], waves: Sequence[float], factors: Sequence[float]) -> bool:
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    for wave, factor in zip(waves, factors, strict=True):
        share = (wave * rule["original_max_position_embeddings"] - low) / (high - low)
        share = min(max(share, 0.0), 1.0)
        if not math.isclose(1 / (share + (1 - share) / rule["factor"]), factor, rel_tol=1e-4):
            return False
    return True


def _rounded(number: float) -> float:
    """Return a number without what 32 bits added to it."""
    return float(f"{number:.4g}")


def _one(value: Any) -> Any:
    """Return the value of a list that has the same for every layer."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        return value[0]
    return value


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:60]
