"""Named tensors on disk: safetensors with metadata and a digest, written whole or not at all."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvprof.errors import FailedError, UsageError
from kvprof.records.files import write_bytes_atomic

__all__ = ["FORMER_NOTE", "UNKNOWN", "load_tensors", "other_model", "save_tensors"]

#: Of which model files are that were written before a model was known by its files.
UNKNOWN = ""
FORMER_NOTE = "the file does not record its model's fingerprint; only shapes were compared"

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOST_TENSORS = 1_000_000
_MOST_DIMENSIONS = 3


def other_model(one: str, other: str) -> bool:
    """Whether two fingerprints are of two models; an unknown one may be of any."""
    return one != other and UNKNOWN not in (one, other)


def save_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    *,
    format_name: str,
    force: bool = False,
) -> None:
    """Write tensors so that `load_tensors` finds them unchanged, or not at all."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        own = value.detach().cpu().contiguous()
        address = own.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, as the two sides of an orthogonal basis do.
        stored[name] = own.clone() if address in seen else own
        seen.add(address)
    described = {**metadata, "format": format_name}
    described["digest"] = _digest(stored, described)
    write_bytes_atomic(path, save(stored, described), force=force)


def load_tensors(
    path: Path, *, format_name: str, what: str, made_by: str, former: Sequence[str] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `save_tensors` wrote."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a file of {what} ({made_by})")
    if not path.is_file():
        raise UsageError(f"{path}: no such file of {what}")
    try:
        with path.open("rb") as file:
            begins_as_json = file.read(1) == b"{"
        if begins_as_json:  # a tensor file begins with the length of its head
            raise FailedError(f"{path.name}: JSON, not a file of {what} ({made_by})")
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            written = metadata.get("format", "")
            if written not in (format_name, *former):
                if written.startswith(format_name.partition("/")[0] + "/"):
                    raise FailedError(
                        f"{path.name}: format {written}, but this kvprof reads {format_name}; "
                        f"create it again ({made_by})"
                    )
                raise FailedError(f"{path.name}: not a file of {what} ({made_by})")
            names = list(file.keys())
            if len(names) > _MOST_TENSORS:
                raise ValueError(f"{len(names):,} tensors are more than any model has")
            tensors = {name: file.get_tensor(name) for name in names}
        if _digest(tensors, metadata) != metadata["digest"]:
            raise FailedError(f"{path.name}: damaged: its contents do not match its digest")
        for name, value in tensors.items():
            _check(name, value)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as cause:
        raise FailedError(f"{path.name}: damaged file of {what}: {cause}") from None
    return tensors, metadata


def _check(name: str, value: Tensor) -> None:
    """Refuse what no matrix of kvprof's is, whoever wrote the file and its digest."""
    shape = tuple(value.shape)
    if value.dtype not in _DTYPES or len(shape) > _MOST_DIMENSIONS or 0 in shape:
        kind = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"{name[:80]} has an unsupported dtype or shape: {kind} {shape}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name[:80]} contains NaN or infinity")


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Return the SHA-256 of every tensor and of the metadata but for the digest itself."""
    described = {key: value for key, value in metadata.items() if key != "digest"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.to(torch.float64).numpy().tobytes())
    return digest.hexdigest()
