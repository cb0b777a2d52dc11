"""What a model's small files say, without its weights and without torch: sizes, and bytes."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvprof.errors import KvprofError, UsageError
from kvprof.models.gguf import ARCHITECTURES, choose_gguf, gguf_parts, read_gguf, smollm2_file
from kvprof.models.hub import INDEX, hub_file
from kvprof.models.locate import check_config_sizes, read_json, shape_named
from kvprof.sizes import parse_bytes

__all__ = ["hub_name", "read_config_file", "read_share", "served_name", "weight_bytes"]

#: What a config calls the keys of a shape that ships, and those of a GGUF file.
_NAMES = {
    **dict.fromkeys(("layers", "block_count"), "num_hidden_layers"),
    **dict.fromkeys(("num_heads", "attention.head_count"), "num_attention_heads"),
    **dict.fromkeys(("num_kv_heads", "attention.head_count_kv"), "num_key_value_heads"),
    **dict.fromkeys(("context", "context_length"), "max_position_embeddings"),
    **{"embedding_length": "hidden_size", "attention.key_length": "head_dim"},
    "attention.sliding_window": "sliding_window",
    **{"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
}


def hub_name(model: str) -> str:
    """Return a shape's hub id, or what was given."""
    found = shape_named(model)
    return str(found[1]["source"]) if found else model


def served_name(model: str) -> str:
    """Return what engines take: a shape's hub id, a shipped model's path, or what was given."""
    return str(_path(model)) if model in ("reference", "smollm2") else hub_name(model)


def _path(model: str, revision: str | None = None, gguf: str | None = None) -> Path:
    """Return a local model's folder or file; of others what was given."""
    if model == "smollm2":
        return smollm2_file()
    shipped = Path(str(files("kvprof"))) / "assets" / "reference"
    path = shipped if model == "reference" else Path(model).expanduser()
    if gguf is not None and not path.exists():
        return hub_file(model, gguf, revision)
    return (path.is_dir() and choose_gguf(model, path, gguf)) or path


def read_config_file(
    model: str, revision: str | None = None, gguf: str | None = None
) -> dict[str, Any]:
    """Return the config of a shape that ships, a folder, a GGUF file, or a hub id."""
    if found := shape_named(model):
        return {"model_type": "llama", "sliding_window": None, **_renamed(found[1])}
    path = _path(model, revision, gguf)
    if path.suffix == ".gguf" and not path.exists():
        raise UsageError(f"no model {model!r}: no such file")
    if path.is_file():
        file = read_gguf(model, path)
        told = {**_renamed(file.settings), "model_type": ARCHITECTURES[file.architecture]}
    else:
        told = _read(model, path, "config.json", revision)
    check_config_sizes(model, told, file=path.name if path.is_file() else "config.json")
    return dict(told)


def _renamed(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a shape or a GGUF file says by a config's names."""
    return {_NAMES.get(key, key): value for key, value in told.items()}


def _read(model: str, path: Path, name: str, revision: str | None) -> Any:
    """Return a JSON file of a folder, or of a hub model."""
    return read_json(model, path / name if path.exists() else hub_file(model, name, revision))


#: As names have it: Llama-3.1-8B, SmolLM2-135M, Qwen3-30B-A3B.
_COUNT = re.compile(r"(?<![a-z0-9.])(\d{1,6}(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
#: What configs call the number of experts, and of those that a token is sent to.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ASKED = ("num_experts_per_tok", "moe_k", "moe_topk")


def read_share(config: Mapping[str, Any]) -> float:
    """Return at least which share of its weights a token reads: of experts those it is sent to."""
    experts, asked = (
        next((config[x] for x in names if isinstance(config.get(x), int) and config[x] > 0), 1)
        for names in (_EXPERTS, _ASKED)
    )
    return float(min(asked, experts) / experts)


def weight_bytes(
    model: str, config: Mapping[str, Any], revision: str | None = None, gguf: str | None = None
) -> tuple[int, str]:
    """Return the bytes of a model's weights, and where they are told."""
    path = _path(model, revision, gguf)
    if path.suffix == ".gguf":
        return sum(one.stat().st_size for one in gguf_parts(path)), "its GGUF file"
    if stored := [*path.glob("*.safetensors")]:
        return sum(one.stat().st_size for one in stored), "its safetensors files"
    if shape := shape_named(model):
        if "weights" in shape[1]:  # its name does not tell them
            return parse_bytes(shape[1]["weights"], what="weights"), "its model card"
    else:
        with suppress(KvprofError, ArithmeticError, LookupError, TypeError, ValueError):
            return int(_read(model, path, INDEX, revision)["metadata"]["total_size"]), INDEX
    counted = _COUNT.search(name := Path(model).absolute().name)
    # Of a model with experts a name may count what a token reads alone, unless it says that too.
    partly = read_share(config) < 1 and not re.search(r"-A\d", name, re.IGNORECASE)
    if counted is None or partly or config.get("quantization_config"):
        raise UsageError(f"{model}: the size of its weights is unknown; give --weights")
    unit = {"b": 2e9, "m": 2e6}[counted[2].lower()]
    return int(float(counted[1]) * unit), "the parameter count in its name at 16 bits"
