"""What the sizes of a ``config.json`` may be: looked at before anything of that size is built."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvprof.errors import FailedError

__all__ = ["check_config_sizes"]

# Well above the largest models that there are.
_LIMITS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 2**18),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2**12),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_kv_heads"), 2**13
    ),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 2**14),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), 2**21),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2**14),
    "vocab_size": 2**24,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2**30),
}  # fmt: skip
# Of experts, which a model without them says it has none of.
_MAY_BE_NONE = ("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts")
_SPLIT = (
    ("hidden_size", "num_attention_heads"), ("n_embd", "n_head"),
    ("num_attention_heads", "num_key_value_heads"),
)  # fmt: skip
_LEAST_BYTES = 0.1  # of a parameter, however it is quantised


def check_config_sizes(what: str, config: Any, stored: int | None = None) -> None:
    """Refuse sizes that no model has.

    Parameters
    ----------
    what : str
        Named in the error.
    config : Any
        The content of a ``config.json``.
    stored : int, optional
        Bytes of the weights beside it: a model that is many times larger is another one.

    Raises
    ------
    FailedError
        Naming the size.
    """
    if not isinstance(config, Mapping):
        raise FailedError(f"{what}: config.json is damaged (it is no object)")
    for part in _parts(config):
        for name, limit in _LIMITS.items():
            value = part.get(name)
            if value is None or (name == "num_key_value_heads" and isinstance(value, list)):
                continue
            least = 0 if name in _MAY_BE_NONE else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
                if isinstance(value, list) and len(value) <= limit:
                    continue  # one per layer, in some kinds of model
                raise FailedError(
                    f"{what}: config.json says {name} is {str(value)[:40]}, and not a whole number "
                    f"from 1 to {limit:,}"
                )
        for whole, parts in _SPLIT:
            large, small = part.get(whole), part.get(parts)
            own = parts == "num_attention_heads" and part.get("head_dim") is not None
            if isinstance(large, int) and isinstance(small, int) and large % small and not own:
                raise FailedError(
                    f"{what}: config.json says {whole} is {large}, which {parts}, {small}, does "
                    "not divide"
                )
        layers, width = part.get("num_hidden_layers"), part.get("hidden_size")
        if stored is not None and isinstance(layers, int) and isinstance(width, int):
            # Attention alone has more than this.
            smallest = layers * width * width * _LEAST_BYTES
            if smallest > max(stored, 1 << 20):
                raise FailedError(
                    f"{what}: config.json describes {layers:,} layers of {width:,}, far more than "
                    "the weights beside it hold; it belongs to another model"
                )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and those of the models within it."""
    yield config
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            yield config[key]
