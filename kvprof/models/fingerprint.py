"""A model's fingerprint: a digest of its files, or of samples of its weights in memory.

It ties plans, moments, recorded rates and evaluations to one model. Of a file it reads the size,
the beginning and blocks at equal distances; of a tensor in memory 4,096 values.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvprof.errors import FailedError

__all__ = ["ModelIdentity", "file_digest", "files_fingerprint"]

_WHOLE = 64 << 20
_HEAD = 4 << 20  # holds the head of most files: names, shapes and places of tensors
_BLOCK = 16 << 10
_BLOCKS = 1024
_SAMPLES = 4096
# Of a configuration, what says nothing about what a model computes.
_BESIDE = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


def file_digest(path: Path) -> str:
    """Digest a file by its size and contents; above 64 MiB by samples of its contents."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(str(size).encode())
            digest.update(file.read(size if size <= _WHOLE else _HEAD))
            for number in range(_BLOCKS if size > _WHOLE else 0):
                file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    except OSError as error:
        raise FailedError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _samples(value: Any) -> bytes:
    """Return values of a tensor at equal distances; what is no tensor counts as it is written."""
    if not isinstance(value, Tensor):
        return repr(value).encode()
    if hasattr(value, "__tensor_flatten__"):  # a quantised weight made of several tensors
        return b"".join(_samples(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    facts = str(tuple(value.shape)).encode()
    if value.device.type == "meta" or not value.numel():  # offloaded: its shape alone
        return facts
    flat = value.detach().reshape(-1)
    if flat.itemsize == 1:
        flat = flat.view(torch.uint8)
    count = min(flat.numel(), _SAMPLES)
    at = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long()
    return facts + flat[at.to(flat.device)].double().cpu().numpy().tobytes()


def _code(model: PreTrainedModel) -> list[str]:
    """Return digests of the code that is of neither torch nor transformers."""
    names = {type(module).__module__ for module in model.modules()}
    files = {
        getattr(sys.modules.get(name), "__file__", None)
        for name in names
        if name.split(".")[0] not in ("torch", "transformers", "kvprof")
    }
    paths = (Path(file) for file in files if file)
    return sorted(file_digest(path) for path in paths if path.is_file())


def _joined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def files_fingerprint(files: Iterable[Path], code: Iterable[str] = ()) -> str:
    """Return the fingerprint of a checkpoint, with digests of the code that it brings along."""
    return _joined([*map(file_digest, files), *code])


class ModelIdentity:
    """Knows a model's fingerprint, and whether it still is the model's.

    Parameters
    ----------
    model : PreTrainedModel
    files : iterable of Path
        The checkpoint that it was just loaded from: weights, and a configuration beside them. None
        counts what is in memory.

    Attributes
    ----------
    held : bool
        Whether the model is changed for a while, by kvprof itself (`kvprof.runtime.compressed`).

    Raises
    ------
    FailedError
        When a file cannot be read.
    """

    def __init__(self, model: PreTrainedModel, files: Iterable[Path] = ()) -> None:
        self.held = False
        self._model = model
        self._loaded = self._in_memory()
        paths = list(files)
        self._known = files_fingerprint(paths, _code(model)) if paths else self._loaded
        self._now = self._known

    def _in_memory(self) -> str:
        digest = hashlib.sha256()
        for name, value in self._model.state_dict().items():
            digest.update(name.encode() + _samples(value))
        said = self._model.config.to_dict()
        told = {k: v for k, v in said.items() if k not in _BESIDE and not k.startswith("_")}
        config = json.dumps(told, sort_keys=True, default=str)
        return _joined([digest.hexdigest(), config, *_code(self._model)])

    def current(self) -> str:
        """Return the fingerprint; a model that was changed in memory has that of its samples."""
        if not self.held:
            now = self._in_memory()
            self._now = self._known if now == self._loaded else now
        return self._now
