"""From what the user wrote to a local folder whose checkpoint is whole."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import yaml
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open

from kvprof.errors import FailedError, UsageError
from kvprof.models.hub import HUB_ID, INDEX, SINGLE, fetching, hub_answers
from kvprof.models.noise import quiet

if TYPE_CHECKING:
    from kvprof.models.gguf import GgufFile

__all__ = [
    "INNER",
    "Checkpoint",
    "check_config_sizes",
    "gguf_file",
    "locate",
    "read_json",
    "shape_named",
    "shipped_shapes",
]

# --- What the sizes of a ``config.json`` may be: looked at before anything of that size is
# built.


#: Where the config of a model with more than text has that of its decoder.
INNER = ("text_config", "llm_config", "language_config", "thinker_config")
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
}
# Of experts, which a model without them says it has none of.
_MAY_BE_NONE = ("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts")
_SPLIT = (
    ("hidden_size", "num_attention_heads"),
    ("n_embd", "n_head"),
    ("num_attention_heads", "num_key_value_heads"),
)
_LEAST_BYTES = 0.1  # of a parameter, however it is quantised


def check_config_sizes(
    what: str, config: Any, stored: int | None = None, file: str = "config.json"
) -> None:
    """Refuse sizes that no model has."""
    if not isinstance(config, Mapping):
        raise FailedError(f"{what}: {file} is damaged (not a JSON object)")
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
                    f"{what}: {file}: {name} is {json.dumps(value)[:40]}; it must be a whole "
                    f"number from 1 to {limit:,}"
                )
        for whole, parts in _SPLIT:
            large, small = part.get(whole), part.get(parts)
            own = parts == "num_attention_heads" and part.get("head_dim") is not None
            if isinstance(large, int) and isinstance(small, int) and large % small and not own:
                raise FailedError(
                    f"{what}: {file}: {whole} ({large}) is not divisible by {parts} ({small})"
                )
        layers, width = part.get("num_hidden_layers"), part.get("hidden_size")
        if stored is not None and isinstance(layers, int) and isinstance(width, int):
            # Attention alone has more than this.
            smallest = layers * width * width * _LEAST_BYTES
            if smallest > max(stored, 1 << 20):
                raise FailedError(
                    f"{what}: {file} describes {layers:,} layers of {width:,} dimensions, far "
                    "more than the weights contain; it belongs to another model"
                )


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a config and those of the models within it, however deep."""
    parts = [config]
    for part in parts:  # which grow
        parts += [part[key] for key in INNER if isinstance(part.get(key), Mapping)]
    return parts


@cache
def shipped_shapes() -> dict[str, dict[str, Any]]:
    """Return the shapes that ship, by name."""
    text = (files("kvprof") / "assets" / "shapes" / "models.yaml").read_text("utf-8")
    return dict(yaml.safe_load(text))


def shape_named(given: str) -> tuple[str, dict[str, Any]] | None:
    """Return the shape of a name, whatever its case."""
    return next((one for one in shipped_shapes().items() if one[0].lower() == given.lower()), None)


# What a model needs beside its weights; a repository may hold the weights several times over.
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder, the files of its weights, and what they take in bytes."""

    folder: Path  # where its config and tokenizer lie
    revision: str | None  # commit on the hub
    files: tuple[Path, ...]  # safetensors files, or GGUF's, which hold config and tokenizer as well
    size: int  # of the files
    stored_itemsize: float  # bytes of a number in them
    gguf: "GgufFile | None" = None  # what the GGUF file says of itself

    @property
    def identifying(self) -> list[Path]:
        """The files that say which model it is: weights, and their configuration."""
        config = self.folder / "config.json"
        return [*self.files, config] if self.gguf is None and config.is_file() else [*self.files]


def locate(
    spec: str, *, revision: str | None = None, with_code: bool = False, gguf: str | None = None
) -> Checkpoint:
    """Find a model's files and check that they are whole."""
    path = Path(spec).expanduser()
    chosen: Path | None = None
    if spec == "reference":
        folder = Path(str(files("kvprof"))) / "assets" / "reference"
    elif path.is_dir():
        from kvprof.models.gguf import choose_gguf

        folder = path
        chosen = choose_gguf(spec, folder, gguf)
    elif spec == "smollm2" or path.suffix == ".gguf":
        from kvprof.models.gguf import smollm2_file

        chosen = smollm2_file() if spec == "smollm2" else path
        folder = chosen.parent
        if not chosen.is_file():
            raise UsageError(f"no model {spec!r}: no such file")
    elif path.exists():
        raise UsageError(
            f"{spec} is a file but not .gguf; name the folder that contains config.json"
        )
    elif not HUB_ID.fullmatch(spec):
        raise UsageError(f"no model {spec!r}: no such folder, and not a hub id")
    elif gguf is not None:
        return _gguf(spec, _from_hub(spec, revision, with_code, gguf), of_hub=True)
    else:
        folder = _from_hub(spec, revision, with_code)
        return _checked(spec, folder, folder.name)
    if revision is not None:
        raise UsageError(f"{spec} is local and has no revisions; leave out --revision")
    if gguf is not None and (chosen is None or not path.is_dir()):
        raise UsageError(
            f"--gguf requires a folder or a repository, and {spec} is neither; leave it out"
        )
    return _checked(spec, folder, None) if chosen is None else _gguf(spec, chosen)


def gguf_file(spec: str, name: str) -> Path:
    """Return the GGUF file of a name in a folder or in a repository, whole or not."""
    from kvprof.models.gguf import choose_gguf

    path = Path(spec).expanduser()
    if path.is_dir() and (chosen := choose_gguf(spec, path, name)) is not None:
        return chosen
    if spec in ("reference", "smollm2") or path.exists() or not HUB_ID.fullmatch(spec):
        raise UsageError(
            f"--gguf requires a folder or a repository, and {spec} is neither; leave it out"
        )
    return _from_hub(spec, None, False, name)


def _gguf(spec: str, path: Path, of_hub: bool = False) -> Checkpoint:
    from kvprof.models.gguf import gguf_parts, read_gguf

    found = read_gguf(spec, path)
    revision, parts = path.parent.name if of_hub else None, tuple(gguf_parts(found.path))
    itemsize = found.size / max(found.numbers, 1)
    return Checkpoint(path.parent, revision, parts, found.size, itemsize, found)


def _from_hub(spec: str, revision: str | None, with_code: bool, gguf: str | None = None) -> Path:
    if hub_answers():
        return _fetched(spec, revision, with_code, gguf, local=False)
    constants = huggingface_hub.constants
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True  # not a word to the network
    try:
        return _fetched(spec, revision, with_code, gguf, local=True)
    finally:
        constants.HF_HUB_OFFLINE = offline


def _fetched(
    spec: str, revision: str | None, with_code: bool, gguf: str | None, *, local: bool
) -> Path:

    def fetch(name: str) -> Path:
        return Path(
            huggingface_hub.hf_hub_download(spec, name, revision=revision, local_files_only=local)
        )

    with fetching(spec, revision, gguf):
        if gguf is not None:
            with quiet():
                from kvprof.models.gguf import gguf_parts

                parts = [fetch(str(part)) for part in gguf_parts(Path(gguf))]
            return parts[0]
        with quiet():  # without a network the hub's client tells of every retry
            folder = fetch("config.json").parent
        try:
            shards = set(_shards(spec, fetch(INDEX)))
        except EntryNotFoundError:
            shards = {SINGLE}
        for shard in sorted(shards):
            fetch(shard)
        patterns = [*_SMALL_FILES, "*.py"] if with_code else _SMALL_FILES
        huggingface_hub.snapshot_download(
            spec, revision=revision, allow_patterns=patterns, local_files_only=local
        )
    return folder


def read_json(spec: str, path: Path) -> Any:
    """Return the content of a JSON file of a model."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or numbers without an end
        raise FailedError(f"{spec}: {path.name} is damaged ({error})") from error
    except OSError as error:
        raise FailedError(f"{spec}: {path.name} cannot be read: {error.strerror}") from error


def _shards(spec: str, path: Path) -> list[str]:
    """Return the names of the weight files that an index lists."""
    index = read_json(spec, path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise FailedError(f"{spec}: {path.name} is damaged (no weight_map)")
    if not all(isinstance(name, str) for name in weights.values()):
        raise FailedError(f"{spec}: {path.name} is damaged (weight_map does not name files)")
    far = (one for one in weights.values() if Path(one).is_absolute() or ".." in Path(one).parts)
    if beyond := next(far, None):
        raise FailedError(
            f"{spec}: {path.name} names {beyond[:60]!r}, which is outside the model's folder"
        )
    return sorted(set(weights.values()))


def _checked(spec: str, folder: Path, revision: str | None) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{spec} is not a model folder: config.json is missing")
    config = read_json(spec, folder / "config.json")
    check_config_sizes(spec, config)
    if (folder / INDEX).is_file():
        names = _shards(spec, folder / INDEX)
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        others = sorted(p.name for p in folder.glob("*.bin"))
        found = f"only {others[0]}" if others else f"no {SINGLE}"
        raise UsageError(
            f"{spec} has {found}; kvprof reads safetensors and GGUF weights only (convert with "
            "model.save_pretrained)"
        )
    itemsize = 2.0
    for name in names:
        if not (folder / name).is_file():
            raise FailedError(f"{spec}: {name} is missing; the checkpoint is incomplete")
        try:
            # Opening reads the header and compares it with the file's length.
            with safe_open(folder / name, framework="pt") as tensors:
                for key in list(tensors.keys())[:1]:
                    itemsize = {"F32": 4.0, "F64": 8.0}.get(tensors.get_slice(key).get_dtype(), 2.0)
        except (SafetensorError, OSError) as error:
            raise FailedError(f"{spec}: {name} is truncated or damaged ({error})") from error
    paths = tuple(folder / name for name in names)
    size = sum(p.stat().st_size for p in paths)
    check_config_sizes(spec, config, size)
    return Checkpoint(folder, revision, paths, size, itemsize)
