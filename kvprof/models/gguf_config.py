"""Whether the model that transformers makes of a GGUF file is the one that the file describes.

transformers translates a list of keys for each architecture. What is not in its list it leaves out
without a word, and the default of the model's class takes its place: a sliding window, a cap on
the logits, a base of RoPE, a norm's epsilon of another model. So every key of the architecture is
held against what the config says by its own names; what the class has a place for is put there,
and what it has none for is refused, as is a key whose meaning is not known here. So is what
llama.cpp knows without being told, where transformers takes something else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvprof.errors import FailedError, UsageError
from kvprof.models.gguf import ARCHITECTURES, GgufFile

__all__ = ["hold_against_file"]

# Of a file's history, and of what only counts where something else is said that is looked at.
_IDLE = ("tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length")
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_EXPERTS = ("num_experts", "num_local_experts")
# llama.cpp knows Gemma's largest by their layers: their queries are scaled by another width.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# What models divide by, or take the root or a power of.
_POSITIVE = (
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.scale"),
    *("rope.freq_base", "rope.freq_base_swa"),
)
_ENDS = ("eos_token_id", "eot_token_id")
_CLOSE = 1e-6  # of numbers that a file holds in 32 bits


@dataclass(frozen=True)
class _Setting:
    """A key of a GGUF file.

    Attributes
    ----------
    read : callable
        From a config to what the model computes with; 0 where it has nothing of the sort.
    names : tuple of str
        Of the config, one of which takes the value where the class has it.
    otherwise : callable, optional
        From the file's keys to what llama.cpp takes where this one is not among them. Without it a
        file that does not say means what the class does.
    """

    read: Callable[[Any], Any]
    names: tuple[str, ...] = ()
    otherwise: Callable[[Mapping[str, Any]], Any] | None = None


def hold_against_file(spec: str, gguf: GgufFile, config: Any) -> None:
    """Hold a config against the file that transformers made it of; mend what it left out.

    Parameters
    ----------
    spec : str
        Named in errors.
    gguf : GgufFile
    config : PretrainedConfig
        Changed where its class has a place for what the file says.

    Raises
    ------
    UsageError
        The file says what transformers' model cannot be told, or what is not known here.
    FailedError
        The file lacks what its architecture cannot be without.
    """
    file, architecture, settings = gguf.path.name, gguf.architecture, gguf.settings
    if config.model_type != ARCHITECTURES[architecture]:
        raise UsageError(
            f"{spec}: {file} is of the architecture {architecture}, of which transformers makes "
            f"{config.model_type}: it would be another model; use the model's safetensors"
        )
    if not {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"} & set(settings):
        raise FailedError(f"{spec}: {file} lacks {architecture}.attention.layer_norm_epsilon")
    for key in _POSITIVE:
        value = settings.get(key, 1)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise FailedError(
                f"{spec}: {file} says {architecture}.{key} is {_short(value)}, and not a number "
                "above 0"
            )
    known = _settings(architecture)
    for key in settings:
        if key not in known and key not in (*_IDLE, *_SCALING):
            raise UsageError(
                f"{spec}: {file} says {architecture}.{key} is {_short(settings[key])}, which "
                f"transformers leaves out: it would be another model; use the model's safetensors"
            )
    for mending in (True, False):  # what was mended may have moved something else
        for key, setting in known.items():
            _hold(spec, gguf, config, key, setting, mending)
        _hold_scaling(spec, gguf, config, mending)
    if gguf.tied != bool(getattr(config, "tie_word_embeddings", False)):
        raise UsageError(
            f"{spec}: {file} has {'no ' if gguf.tied else ''}output weights of its own, and "
            f"{type(config).__name__} says otherwise: it would be another model; use the model's "
            "safetensors"
        )
    _set_ends(gguf, config)


def _hold(
    spec: str, gguf: GgufFile, config: Any, key: str, setting: _Setting, mending: bool
) -> None:
    said = gguf.settings.get(key)
    if said is None and setting.otherwise is None:
        return
    wanted = _one(said) if said is not None else setting.otherwise(gguf.settings)  # type: ignore[misc]
    found = setting.read(config)
    if _same(found, wanted):
        return
    place = next((name for name in setting.names if name in _declared(config)), None)
    # None of something is no number everywhere: a window of 0 would leave nothing to attend to.
    if mending and place is not None and wanted:
        _put(config, place, wanted)
        if _same(setting.read(config), wanted):
            return
    what = f"{gguf.architecture}.{key}"
    told = f"says {what} is" if said is not None else f"says no {what}, which means"
    raise UsageError(
        f"{spec}: {gguf.path.name} {told} {_short(wanted)}, and transformers takes "
        f"{_short(found)}: it would be another model; use the model's safetensors"
    )


def _settings(architecture: str) -> dict[str, _Setting]:
    """Return what a file of an architecture may say, and how a config says it."""
    return {
        "embedding_length": _Setting(lambda c: c.hidden_size),
        "block_count": _Setting(lambda c: c.num_hidden_layers),
        "context_length": _Setting(
            lambda c: getattr(c, "max_position_embeddings", None),
            ("max_position_embeddings", "n_positions"),
        ),
        "vocab_size": _Setting(lambda c: c.vocab_size),
        "feed_forward_length": _Setting(_inner),
        "attention.head_count": _Setting(lambda c: c.num_attention_heads),
        "attention.head_count_kv": _Setting(
            _kv_heads, (), lambda s: _one(s["attention.head_count"])
        ),
        "attention.key_length": _Setting(_head_dim, ("head_dim",), _width_of_a_head),
        "attention.value_length": _Setting(_head_dim, (), _width_of_a_head),
        "attention.layer_norm_rms_epsilon": _Setting(_epsilon, _EPSILONS),
        "attention.layer_norm_epsilon": _Setting(_epsilon, _EPSILONS),
        "attention.scale": _Setting(
            _scale, ("query_pre_attn_scalar",), lambda s: _scale_of(architecture, s)
        ),
        "attention.causal": _Setting(lambda c: True),
        "attention.clamp_kqv": _Setting(lambda c: 0),
        "attention.max_alibi_bias": _Setting(lambda c: 0),
        "attention.sliding_window": _Setting(
            _window, ("sliding_window",), None if architecture == "gemma2" else lambda s: 0
        ),
        "attention.sliding_window_pattern": _Setting(_pattern),
        "attn_logit_softcapping": _Setting(
            lambda c: getattr(c, "attn_logit_softcapping", None) or 0, ("attn_logit_softcapping",)
        ),
        "final_logit_softcapping": _Setting(
            lambda c: getattr(c, "final_logit_softcapping", None) or 0, ("final_logit_softcapping",)
        ),
        "use_parallel_residual": _Setting(lambda c: getattr(c, "use_parallel_residual", None)),
        "rope.freq_base": _Setting(
            lambda c: _rope(c).get("rope_theta", 0),
            ("rope_theta",),
            None if architecture == "gpt2" else lambda s: 10_000.0,
        ),
        "rope.freq_base_swa": _Setting(
            lambda c: _rope(c, "sliding_attention").get("rope_theta", 0),
            (),
            (lambda s: 10_000.0) if architecture == "gemma3" else None,
        ),
        "rope.dimension_count": _Setting(
            lambda c: round(_head_dim(c) * _rope(c).get("partial_rotary_factor", 1.0)),
            ("partial_rotary_factor",),
            None if architecture == "gpt2" else _key_width,
        ),
        "rope.scaling.attn_factor": _Setting(lambda c: 1),
        "expert_count": _Setting(
            lambda c: next((n for n in (getattr(c, name, 0) for name in _EXPERTS) if n), 0),
            (),
            lambda s: 0,
        ),
        "expert_used_count": _Setting(lambda c: getattr(c, "num_experts_per_tok", 0)),
        "expert_feed_forward_length": _Setting(
            lambda c: getattr(c, "moe_intermediate_size", 0), ("moe_intermediate_size",)
        ),
        "expert_shared_feed_forward_length": _Setting(
            lambda c: getattr(c, "shared_expert_intermediate_size", 0),
            ("shared_expert_intermediate_size",),
        ),
        "expert_weights_norm": _Setting(
            lambda c: getattr(c, "norm_topk_prob", False), ("norm_topk_prob",)
        ),
        "expert_gating_func": _Setting(lambda c: 1 if _has_experts(c) else 0),  # 1: softmax
    }


def _put(config: Any, name: str, value: Any) -> None:
    """Give a config a value under one of its names."""
    if name == "rope_theta":
        _rope(config)["rope_theta"] = float(value)
    elif name == "partial_rotary_factor":
        _rope(config)["partial_rotary_factor"] = value / _head_dim(config)
    elif name == "query_pre_attn_scalar":
        width = value**-2
        whole = round(width)
        config.query_pre_attn_scalar = (
            whole if math.isclose(width, whole, rel_tol=_CLOSE) else width
        )
    else:
        setattr(config, name, value)


def _declared(config: Any) -> set[str]:
    """Return the names that a config's class has, those of its RoPE among them.

    A config takes any name, and most models look at none but those of their class.
    """
    usual = type(config)().to_dict()
    rope = usual.get("rope_parameters") or {}
    nested = rope.get("full_attention")
    return {*usual, *(nested if isinstance(nested, Mapping) else rope)}


# --- What a config says, by whatever names its class has.


def _rope(config: Any, kind: str = "full_attention") -> dict[str, Any]:
    """Return a config's parameters of RoPE, to be read and changed: a kind of layer's, if any."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = found.get(kind)
    if isinstance(nested, dict):
        return nested
    return found if kind == "full_attention" else {}


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _kv_heads(config: Any) -> int:
    # GPT-2 knows no such name.
    return int(getattr(config, "num_key_value_heads", config.num_attention_heads))


def _inner(config: Any) -> int:
    if config.model_type == "gpt2":
        return int(config.n_inner or 4 * config.hidden_size)
    return int(config.intermediate_size)


def _epsilon(config: Any) -> float:
    declared = _declared(config)
    return float(next(getattr(config, name) for name in _EPSILONS if name in declared))


def _scale(config: Any) -> float:
    return 1 / math.sqrt(getattr(config, "query_pre_attn_scalar", None) or _head_dim(config))


def _window(config: Any) -> int:
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) is False:
        return 0
    if kinds is not None and "sliding_attention" not in kinds:
        return 0
    return int(getattr(config, "sliding_window", None) or 0)


def _pattern(config: Any) -> Any:
    """Return which layers have a window, comparable with either way to say so."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return 0
    slides = [kind == "sliding_attention" for kind in kinds]
    every = slides.index(False) + 1 if False in slides else 0
    regular = every and slides == [bool((i + 1) % every) for i in range(len(slides))]
    return _Pattern(slides, every if regular else 0)


@dataclass(frozen=True)
class _Pattern:
    """Which layers have a window, and every how many has none where that says it."""

    slides: list[bool]
    every: int

    def __eq__(self, other: object) -> bool:
        return other == self.every if isinstance(other, int) else other == self.slides

    def __hash__(self) -> int:
        return hash((tuple(self.slides), self.every))

    def __str__(self) -> str:
        return str(self.every or self.slides)


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, 0) for name in _EXPERTS)


# --- What llama.cpp takes where a file does not say.


def _width_of_a_head(settings: Mapping[str, Any]) -> int:
    return int(settings["embedding_length"]) // int(_one(settings["attention.head_count"]))


def _key_width(settings: Mapping[str, Any]) -> int:
    return int(_one(settings.get("attention.key_length") or _width_of_a_head(settings)))


def _scale_of(architecture: str, settings: Mapping[str, Any]) -> float:
    if settings["block_count"] == _SCALED_BY_WIDTH.get(architecture):
        return 1 / math.sqrt(_width_of_a_head(settings))
    return 1 / math.sqrt(_key_width(settings))


# --- RoPE that is scaled.


def _hold_scaling(spec: str, gguf: GgufFile, config: Any, mending: bool) -> None:
    """Hold how positions are scaled, by keys or by a factor for each frequency."""
    wanted = _scaling(spec, gguf, config)
    rope = _rope(config)
    found = {
        name: rope[name] for name in rope if name not in ("rope_theta", "partial_rotary_factor")
    }
    found = {"rope_type": "default", **found}
    if found == wanted:
        return
    if mending and found == {"rope_type": "default"} and rope:
        rope.update(wanted)
        return
    raise UsageError(
        f"{spec}: {gguf.path.name} scales its positions by {_short(wanted)}, and transformers "
        f"takes {_short(found)}: it would be another model; use the model's safetensors"
    )


def _scaling(spec: str, gguf: GgufFile, config: Any) -> dict[str, Any]:
    """Return how a file scales its positions, in transformers' words."""
    settings = gguf.settings
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0)) or 1
    kind = settings.get("rope.scaling.type", "linear")  # which llama.cpp takes for a factor alone
    if kind == "none" or (kind == "linear" and factor == 1):
        wanted: dict[str, Any] = {"rope_type": "default"}
    elif kind == "linear":
        wanted = {"rope_type": "linear", "factor": float(factor)}
    else:
        raise UsageError(
            f"{spec}: {gguf.path.name} says {gguf.architecture}.rope.scaling.type is "
            f"{_short(kind)}, which transformers leaves out: it would be another model; use the "
            "model's safetensors"
        )
    factors = gguf.rope_factors
    if all(one == 1 for one in factors):
        return wanted
    fitted = _as_llama3(factors, float(settings.get("rope.freq_base", 10_000.0)))
    if fitted is None or wanted != {"rope_type": "default"} or gguf.architecture != "llama":
        raise UsageError(
            f"{spec}: {gguf.path.name} scales its positions by rope_freqs.weight, and not as "
            "Llama 3 does, which is all that transformers can be told; use the model's safetensors"
        )
    return fitted


def _as_llama3(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Return the parameters of Llama 3's scaling that give these factors; None where none do.

    Frequencies whose wavelengths are short stay, those of long ones are divided by one factor, and
    between the two ``1 / factor`` grows linearly with the number of waves in the context that the
    model was trained at first. Only the products of that context with the two borders count, so
    that the lower one may be taken for 1.

    Parameters
    ----------
    factors : sequence of float
        What each frequency is divided by, highest frequency first.
    theta : float
    """
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


# --- Tokens at which texts end.


def _set_ends(gguf: GgufFile, config: Any) -> None:
    """Give a config the tokens that the file names, in place of its class's.

    A chat's turn ends at a token of its own, which transformers does not read.
    """
    ids = gguf.token_ids
    ends = list(dict.fromkeys(ids[name] for name in _ENDS if name in ids))
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    config.bos_token_id = ids.get("bos_token_id")
    config.pad_token_id = ids.get("padding_token_id")


def _one(value: Any) -> Any:
    """Return the value of a list that has the same for every layer."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        return value[0]
    return value


def _same(found: Any, wanted: Any) -> bool:
    numbers = (int, float)
    if isinstance(found, numbers) and isinstance(wanted, numbers):
        return math.isclose(found, wanted, rel_tol=_CLOSE)
    return bool(found == wanted)


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:60]
