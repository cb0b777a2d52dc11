"""Digests of weights: of tensors by their values, of safetensors files by the tensors in them.

A value that was widened without loss (bfloat16 or float16 kept as float32) is the same value, and
which file of a checkpoint a tensor lies in is no matter. Every bit counts.

What a file holds is kept among the user's caches, so that it is read once. It is found again while
the file system says that the file is the same: device, inode, size, and the times of its last
change, the one that nobody can set back (ctime) among them. The hub names its files by their
SHA-256: one that was moved with its times, or lies on a device that is numbered anew, is found by
that name. A file that has changed just now is read, but not kept, as clocks of file systems are
coarse; nor is anything kept where nothing can be written.
"""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvprof.errors import FailedError, KvprofError
from kvprof.records.files import write_text_atomic

__all__ = ["checksum", "file_digests", "tensor_digests"]

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
    places: dict[Any, list[str]] = {}
    for name, value in tensors.items():
        places.setdefault(_place(name, value), []).append(name)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda names: _digest(tensors[names[0]]), places.values())
        return {
            name: digest
            for names, digest in zip(places.values(), found, strict=True)
            for name in names
        }


def _place(name: str, value: Any) -> Any:
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
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.itemsize, torch.int64)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        summed = flat.view(kind).sum(dtype=torch.int64)
        sums.setdefault(value.device, {})[f"{name} {value.dtype} {tuple(value.shape)}"] = summed
    return {
        name: number
        for entries in sums.values()
        for name, number in zip(entries, torch.stack(list(entries.values())).tolist(), strict=True)
    }


def file_digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint's safetensors files, by its name.

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
    with safe_open(path, framework="pt") as tensors, ThreadPoolExecutor(_THREADS) as pool:
        names = list(tensors.keys())
        return dict(
            zip(names, pool.map(lambda name: _digest(tensors.get_tensor(name)), names), strict=True)
        )


def _stamp(path: Path) -> dict[str, int]:
    facts = path.stat()
    return {
        "device": facts.st_dev, "inode": facts.st_ino, "size": facts.st_size,
        "mtime": facts.st_mtime_ns, "ctime": facts.st_ctime_ns,
    }  # fmt: skip


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
