"""What transformers' config classes take where a config.json says nothing: a table of the package.

Run it with the newest transformers, of which the table's families are: ``python
benchmarks/cache_defaults.py``. What no class says (`_BY_HAND`) stays as it stands in the table.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from kvprof.models.locate import INNER

TABLE = Path(__file__).resolve().parents[1] / "kvprof" / "assets" / "cache-defaults.json"

# Of configs that have one a layer, too.
PreTrainedConfig.allow_global_per_layer_attribute_access = True

_STATED = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"),
    *("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "kv_lora_rank"),
    *("qk_rope_head_dim", "attention_chunk_size", "max_window_layers", "use_sliding_window"),
    *("attn_layer_offset", "n_recurrent_loops", "v_head_dim"),
)
#: What no config class says: how states are sized, and how many vLLM keeps, whether latents are
#: kept, what Gemma 4's last layer is and how wide its full ones are.
_BY_HAND = ("state_sizes", "state_copies", "mamba_ssm_dtype", "latent", "last", "global_head_dim")
_RENAMED = (*_STATED, "num_hidden_layers", "hidden_size", "max_position_embeddings")


def _default_of(kind: str, config: Any) -> dict[str, Any]:
    """Return a kind's defaults; `pattern` is what repeats over the layers."""
    names = (config.attribute_map or {}).items()
    renamed = {a: b for a, b in names if a in _RENAMED}
    fields = dataclasses.fields(CONFIG_MAPPING[kind])
    given = {one.name: one.default for one in fields if isinstance(one.default, int)}
    found = {key: given[at] for key in _STATED if (at := renamed.get(key, key)) in given}
    renamed |= {b: a for a, b in names if b in _RENAMED and a not in _RENAMED}
    if found.get("num_kv_shared_layers") == 0:
        del found["num_kv_shared_layers"]
    types = list(getattr(config, "layer_types", None) or ())
    for length in range(1, len(types) // 2 + 1):
        # The last layer of some is of full attention whatever the pattern says.
        if all(types[i] == types[i % length] for i in range(len(types) - 1)):
            found["pattern"] = types[:length]
            break
    return found | ({"renamed": renamed} if renamed else {})


def main() -> None:
    """Write the table."""
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, Any] = {}
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]()
            text = config.get_text_config(decoder=True)
        except Exception:  # needs arguments, or another library
            continue
        inner = next((n for n in INNER if getattr(config, n, None) is text), None)
        if getattr(config, "is_encoder_decoder", False):
            continue
        if hasattr(getattr(config, "attn_config", None), "kv_n_heads"):
            continue  # it states its heads where nothing looks (DBRX)
        if inner is not None:
            found[kind] = {inner: text.model_type}
            causal.add(text.model_type)
        else:
            found[kind] = _default_of(kind, config)
    kept = {k: v for k, v in sorted(found.items()) if k in causal or set(v) & set(INNER)}
    for kind, known in json.loads(TABLE.read_text("utf-8")).items():
        if stated := {key: known[key] for key in _BY_HAND if key in known}:
            kept[kind] = kept.get(kind, {}) | stated  # of Kimi K2 transformers has no class
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(kept.items()))
    TABLE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
