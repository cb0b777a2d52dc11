"""A model's identity: the values of its weights and its whole configuration.

It guards plans, moments, recorded rates and evaluations: what was made for one model is not taken
for another. It does not depend on where a checkpoint lies, what its file is called, how it is cut
into files, whether a tied weight is written once or twice, or the dtype that it is loaded in. A
model that was made or changed in memory counts as it is there, so that one that was rounded to a
narrower dtype is another model than the checkpoint it came from.
"""

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kvprof.errors import FailedError, KvprofError
from kvprof.models.gguf import open_gguf
from kvprof.models.layout import ModelLayout
from kvprof.models.noise import quiet
from kvprof.models.weights import named_weights
from kvprof.records.files import write_text_atomic

__all__ = [
    "LEFT_OUT",
    "ModelIdentity",
    "checksum",
    "configuration",
    "file_digests",
    "fingerprint",
    "tensor_digests",
]

# --- Digests of weights: of tensors by their values, of safetensors files by the tensors in
# them.
#
# A value that was widened without loss (bfloat16 or float16 kept as float32) is the same value, and
# which file of a checkpoint a tensor lies in is no matter. Every bit counts.
#
# What a file holds is kept among the user's caches, so that it is read once. It is found again
# while the file system says that the file is the same: device, inode, size, and the times of its
# last change, the one that nobody can set back (ctime) among them. The hub names its files by their
# SHA-256: one that was moved with its times, or lies on a device that is numbered anew, is found by
# that name. A file that has changed just now is read, but not kept, as clocks of file systems are
# coarse; nor is anything kept where nothing can be written.


# Grows with what a digest is of; older files are then left where they are.
_FORMAT = "kvprof-weights/1"
_CHUNK = 1 << 24  # elements that are looked at together
_THREADS = 4
_HUB_NAME = re.compile(r"[0-9a-f]{64}")


def tensor_digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of the values of each tensor, on whatever device it is.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Names that share one tensor have it read once. What is no tensor (a quantiser's settings
        in a state dict) counts as it is written.
    """
    storages: dict[Any, list[str]] = {}
    for name, value in tensors.items():
        storages.setdefault(_storage(name, value), []).append(name)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda names: _digest(tensors[names[0]]), storages.values())
        return {
            name: digest
            for names, digest in zip(storages.values(), found, strict=True)
            for name in names
        }


def _storage(name: str, value: Any) -> Any:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.numel() == 0:
        return name
    return value.data_ptr(), value.device, value.dtype, value.shape, value.stride()


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    if hasattr(value, "__tensor_flatten__"):  # a quantised weight made of several tensors
        names, facts = value.__tensor_flatten__()
        inner = [_digest(getattr(value, name)) for name in names]
        return hashlib.sha256(f"{type(value).__name__}{facts}{inner}".encode()).hexdigest()
    flat = value.detach().reshape(-1)
    if flat.dtype == torch.float64 and _all(flat, lambda x: x == x.float().double()):
        flat = flat.float()
    if flat.dtype == torch.float16:
        flat = flat.float()
    if flat.dtype == torch.float32 and _all(flat, lambda x: x.view(torch.int32) & 0xFFFF == 0):
        flat = flat.to(torch.bfloat16)
    digest = hashlib.sha256(f"{flat.dtype} {tuple(value.shape)}".encode())
    for chunk in _chunks(flat):
        digest.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _chunks(flat: Tensor) -> Iterable[Tensor]:
    return (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))


def _all(flat: Tensor, holds: Any) -> bool:
    return all(bool(holds(chunk.contiguous()).all()) for chunk in _chunks(flat))


def checksum(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums over the bits of tensors, at the speed of their device's memory.

    One changed bit changes a sum; it tells whether tensors are still what they were, not what they
    are. Tensors that are not there (offloaded ones) are left out.
    """
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if type(value) not in (Tensor, torch.nn.Parameter) or value.device.type == "meta":
            continue
        flat = value.detach().reshape(-1)
        flat = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        # Words of eight bytes are summed several times faster than numbers that are widened first.
        numbers = 8 // flat.itemsize
        whole = flat.numel() % numbers == 0 and flat.storage_offset() % numbers == 0
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        kind = torch.int64 if whole else kinds[flat.itemsize]
        summed = flat.view(kind).sum(dtype=torch.int64)
        sums.setdefault(value.device, {})[f"{name} {value.dtype} {tuple(value.shape)}"] = summed
    return {
        name: number
        for entries in sums.values()
        for name, number in zip(entries, torch.stack(list(entries.values())).tolist(), strict=True)
    }


def file_digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint's files, by its name.

    Of a GGUF file it is of the tensor as it is stored, in blocks, by its name there.

    Parameters
    ----------
    files : iterable of Path

    Raises
    ------
    FailedError
        When a file cannot be read, or changes meanwhile.
    """
    found: dict[str, str] = {}
    for path in files:
        found |= _of_file(path)
    return found


def _of_file(path: Path) -> dict[str, str]:
    begun = time.time_ns()
    stamp = _stamp(path)
    name = path.resolve().name
    hub = name if _HUB_NAME.fullmatch(name) and path.resolve().parent.name == "blobs" else None
    if (known := _kept(_own_name(stamp), stamp)) is not None:
        return known
    # Of another inode; one whose inode is known has been written to.
    if hub is not None and (known := _kept(hub, stamp, ("size", "mtime"))) is not None:
        _keep(_own_name(stamp), stamp, known)
        return known
    try:
        digests = _read(path)
    except (SafetensorError, OSError) as error:
        raise FailedError(f"{path} cannot be read: {error}") from error
    if _stamp(path) != stamp:
        raise FailedError(f"{path} changes while it is read; try again when it is complete")
    coarse = stamp["mtime"] % 10**9 == 0 and stamp["ctime"] % 10**9 == 0
    if begun - max(stamp["mtime"], stamp["ctime"]) > (2 * 10**9 if coarse else 5 * 10**7):
        _keep(_own_name(stamp), stamp, digests)
        if hub is not None:
            _keep(hub, stamp, digests)
    return digests


def _read(path: Path) -> dict[str, str]:
    if path.suffix == ".gguf":
        return _read_gguf(path)
    with safe_open(path, framework="pt") as tensors, ThreadPoolExecutor(_THREADS) as pool:
        names = list(tensors.keys())
        return dict(
            zip(names, pool.map(lambda name: _digest(tensors.get_tensor(name)), names), strict=True)
        )


def _read_gguf(path: Path) -> dict[str, str]:
    def digest(tensor: Any) -> str:
        head = f"{tensor.tensor_type.name} {tensor.shape.tolist()}"
        return hashlib.sha256(head.encode() + tensor.data.tobytes()).hexdigest()

    with ThreadPoolExecutor(_THREADS) as pool:
        tensors = open_gguf(path).tensors
        names = [tensor.name for tensor in tensors]
        return dict(zip(names, pool.map(digest, tensors), strict=True))


def _stamp(path: Path) -> dict[str, int]:
    facts = path.stat()
    return {
        "device": facts.st_dev,
        "inode": facts.st_ino,
        "size": facts.st_size,
        "mtime": facts.st_mtime_ns,
        "ctime": facts.st_ctime_ns,
    }


def _own_name(stamp: Mapping[str, int]) -> str:
    return hashlib.sha256(f"{stamp['device']}:{stamp['inode']}".encode()).hexdigest()[:32]


def _path(name: str) -> Path:
    return user_cache_path("kvprof") / "weights" / f"{name}.json"


def _content(stored: Mapping[str, Any]) -> str:
    parts = json.dumps([stored["stamp"], stored["tensors"]], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


def _kept(
    name: str, stamp: Mapping[str, int], keys: Iterable[str] | None = None
) -> dict[str, str] | None:
    """Return what is kept under a name, if the file is the one that it is of."""
    try:
        stored = json.loads(_path(name).read_text("utf-8"))
        if stored["format"] != _FORMAT or stored["digest"] != _content(stored):
            return None
        if any(stored["stamp"][key] != stamp[key] for key in keys or stamp):
            return None
        if keys is not None and _own_name(stored["stamp"]) == _own_name(stamp):
            return None
        return dict(stored["tensors"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # none there, or damaged: the file is read again


def _keep(name: str, stamp: Mapping[str, int], tensors: Mapping[str, str]) -> None:
    stored: dict[str, Any] = {"format": _FORMAT, "stamp": dict(stamp), "tensors": dict(tensors)}
    stored["digest"] = _content(stored)
    with contextlib.suppress(KvprofError, OSError):  # a full disk costs time, not a result
        write_text_atomic(_path(name), json.dumps(stored), force=True)


#: Entries of a configuration, at any depth, that say nothing about what a model computes: where it
#: came from and with what it was written, the dtype it is loaded in, what it returns beside the
#: logits, the names of token ids and labels. With them go names that begin with an underscore and
#: the defaults of generation (``temperature``, ``max_length`` and the like), unless the class of a
#: configuration has an entry of that name itself.
LEFT_OUT = frozenset(
    {
        "architectures",
        "auto_map",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "id2label",
        "label2id",
        "problem_type",
        "tokenizer_class",
        "task_specific_params",
        "attn_implementation",
    }
)

_GENERATION = frozenset(GenerationConfig().to_dict())


def configuration(config: Any) -> dict[str, Any]:
    """Return what a configuration says about what a model computes, as JSON values.

    Entries that have their class's default are left out with those of `LEFT_OUT`, so that a
    checkpoint that spells a default out is the same model, in other versions of transformers too.
    So is what transformers notes of a GGUF file, its name among it: how the weights are rounded is
    in their digests.

    Parameters
    ----------
    config : PretrainedConfig
    """
    kind: Callable[[], Any] = type(config)
    usual = _defaults(kind)
    dropped = LEFT_OUT | (_GENERATION - _names(usual))
    own = config.to_dict()
    if (own.get("quantization_config") or {}).get("quant_method") == "gguf":
        del own["quantization_config"]
    described: dict[str, Any] = _differing(_plain(own, dropped), _plain(usual, dropped))
    return {"model_type": getattr(config, "model_type", ""), **described}


@cache
def _defaults(kind: Callable[[], Any]) -> dict[str, Any]:
    """Return what a class of configurations says of its own; nobody changes it."""
    try:
        usual: dict[str, Any] = kind().to_dict()
    except Exception:  # a class that needs arguments has no defaults to leave out
        usual = {}
    return usual


def _names(value: Any) -> set[str]:
    """Return the names of a nest of mappings."""
    if not isinstance(value, Mapping):
        return set()
    return {str(key) for key in value}.union(*(_names(entry) for entry in value.values()))


def _plain(value: Any, dropped: Set[str]) -> Any:
    """Return a value as JSON holds it, numbers alike whether written 1 or 1.0."""
    if isinstance(value, Mapping):
        return {
            str(key): _plain(entry, dropped)
            for key, entry in value.items()
            if str(key) not in dropped and not str(key).startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_plain(entry, dropped) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return str(value)


def _differing(value: Any, usual: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(usual, dict):
        return value
    return {
        key: _differing(entry, usual.get(key))
        for key, entry in value.items()
        if key not in usual or entry != usual[key]
    }


def fingerprint(model: PreTrainedModel, layout: ModelLayout, digests: Mapping[str, str]) -> str:
    """Identify a model by 32 hexadecimal digits.

    Parameters
    ----------
    model : PreTrainedModel
        Its configuration counts, and its code where it brought it along.
    layout : ModelLayout
        Its layout: the same weights split into other heads are another model.
    digests : mapping of str to str
        Of its weights, by the names that a checkpoint has for them.
    """
    facts = {
        "architecture": layout.architecture,
        "config": configuration(model.config),
        "code": _code(model),
        "layers": [
            [
                x.num_heads,
                x.num_kv_heads,
                x.qk_head_dim,
                x.v_head_dim,
                x.position,
                x.rotary_dim,
                x.sliding_window,
                x.softcap,
                x.scaling,
            ]
            for x in layout.layers
        ],
        "weights": _own(model, digests),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _own(model: PreTrainedModel, digests: Mapping[str, str]) -> dict[str, str]:
    """Leave out what the model ignores, and a tied weight that is written a second time."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    found = {
        name: digest
        for name, digest in digests.items()
        if not any(re.search(pattern, name) for pattern in ignored)
    }
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in dict(tied).items():
        if name in found and found.get(source) == found[name]:
            del found[name]
    return found


def _code(model: PreTrainedModel) -> list[str]:
    """Return digests of the code that is of neither torch nor transformers."""
    names = {type(module).__module__ for module in model.modules()}
    files = {
        getattr(sys.modules.get(name), "__file__", None)
        for name in names
        if name.split(".")[0] not in ("torch", "transformers", "kvprof")
    }
    paths = (Path(file) for file in files if file)
    return sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file())


def _live(model: PreTrainedModel) -> dict[str, str]:
    """Return the digests of a model's weights as they are in memory."""
    state = _state(model)
    if any(isinstance(value, Tensor) and value.device.type == "meta" for value in state.values()):
        digests: dict[str, str] = {}
        for name, weight in named_weights(model):  # offloaded: one module at a time
            digests |= tensor_digests({name: weight})
        rest = {name: value for name, value in state.items() if name not in digests}
        return digests | tensor_digests({n: v for n, v in rest.items() if not _away(v)})
    with quiet():
        # Experts are put together when they are loaded; a checkpoint has them one by one.
        state = revert_weight_conversion(model, state)
    return tensor_digests(state)


def _away(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _state(model: PreTrainedModel) -> dict[str, Any]:
    state: dict[str, Any] = model.state_dict()
    return state


class ModelIdentity:
    """Knows a model's fingerprint, and whether it still is the model's.

    Parameters
    ----------
    model : PreTrainedModel
    layout : ModelLayout
    files : iterable of Path or None
        The checkpoint that it was just loaded from, whole and unchanged; None counts what is in
        memory.

    Attributes
    ----------
    held : bool
        Whether the model is changed for a while, by kvprof itself (`kvprof.runtime.compressed`).

    Raises
    ------
    FailedError
        As `kvprof.models.fingerprint.file_digests` does.
    """

    def __init__(
        self, model: PreTrainedModel, layout: ModelLayout, files: Iterable[Path] | None = None
    ) -> None:
        self.held = False
        self._model = model
        self._layout = layout
        digests = _live(model) if files is None else file_digests(files)
        self._known = fingerprint(model, layout, digests)
        self._now = self._sums()

    def _sums(self) -> Any:
        return checksum(_state(self._model)), json.dumps(configuration(self._model.config))

    def current(self) -> str:
        """Return the fingerprint; a model whose weights were changed in memory has another."""
        if not self.held and (now := self._sums()) != self._now:
            self._known = fingerprint(self._model, self._layout, _live(self._model))
            self._now = now
        return self._known
