"""Moments on disk: safetensors with metadata, refused when damaged or of another model."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.analysis.outliers import empty_counts
from kvprof.analysis.rotary import RotaryPairs
from kvprof.errors import FailedError, UsageError
from kvprof.records.files import parse_json
from kvprof.tensor_files import FORMER_NOTE, UNKNOWN, load_tensors, other_model, save_tensors

__all__ = ["FORMAT", "load_moments", "save_moments"]

FORMAT = "kvprof-moments/2"  # since 2, a model is known by its files
_FORMER = ("kvprof-moments/1",)
_KV_HEADS = ("k", "v", "k_pre", "c_o", "c_wv")
_KEYS = {"q", "q_pre", "o", "k", "v", "k_pre", "v_joint", "k_pre_joint"}
_MOST_DIGITS = 18


def save_moments(moments: Moments, path: Path, *, force: bool = False) -> None:
    """Write moments so that `load_moments` finds them unchanged, or not at all."""
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(moments.layers):
        for part, grams in (("rest", layer.rest), ("first", layer.first)):
            for key, value in grams.items():
                tensors[f"layers.{index}.{part}.{key}"] = value
        for key, counts in layer.magnitudes.items():
            tensors[f"layers.{index}.magnitudes.{key}"] = counts
        for key, total in layer.sums.items():
            tensors[f"layers.{index}.sums.{key}"] = total
        for key, bias in layer.biases.items():
            tensors[f"layers.{index}.biases.{key}"] = bias
        if layer.pairs is not None:
            pairs = [layer.pairs.first, layer.pairs.second, layer.pairs.sign, layer.pairs.column]
            # safetensors takes no empty tensor: of a layer without RoPE, one row of zeros.
            rows = torch.stack([x.double() for x in pairs])
            tensors[f"layers.{index}.pairs"] = rows if rows.numel() else torch.zeros(4, 1).double()
        whole = (("c_o", layer.c_o), ("c_wv", layer.c_wv), ("cross", layer.cross))
        for name, weight in (*whole, ("table", layer.table)):
            if weight is not None:
                tensors[f"layers.{index}.{name}"] = weight
    metadata = {
        "fingerprint": moments.fingerprint,
        "tokens": str(moments.tokens),
        "sequences": str(moments.sequences),
        "layers": str(len(moments.layers)),
        "info": json.dumps(moments.info, sort_keys=True),
        "complete": str(int(moments.complete)),
    }
    save_tensors(path, tensors, metadata, format_name=FORMAT, force=force)


def load_moments(path: Path, *, fingerprint: str | None = None) -> Moments:
    """Read saved moments."""
    tensors, metadata = load_tensors(
        path,
        format_name=FORMAT,
        what="moments",
        made_by="kvprof spectrum --save",
        former=_FORMER,
    )
    try:
        if not _count(metadata, "tokens"):
            raise ValueError("it was collected from no tokens")
        layers = _layers(tensors, _count(metadata, "layers"))
        for index, layer in enumerate(layers):
            _check(f"layer {index}", layer)
        moments = Moments(
            layers,
            metadata["fingerprint"],
            _count(metadata, "tokens"),
            _count(metadata, "sequences"),
            _info(metadata["info"]),
            complete=bool(_count(metadata, "complete")),
        )
    except (KeyError, ValueError) as cause:
        raise FailedError(f"{path.name}: damaged file of moments: {cause}") from None
    if metadata["format"] in _FORMER:
        moments.fingerprint = UNKNOWN
        moments.info["labels"] = [*moments.info.get("labels", []), FORMER_NOTE]
    if fingerprint is not None and other_model(moments.fingerprint, fingerprint):
        raise UsageError(
            f"{path.name} contains moments of {moments.info.get('model', 'another model')} "
            f"({moments.fingerprint[:12]}), not of this model ({fingerprint[:12]})"
        )
    return moments


def _layers(tensors: dict[str, Tensor], count: int) -> list[LayerMoments]:
    """Return the layers that tensors called ``layers.N.…`` are of, every one of them."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        start, number, key = name.split(".", 2)
        if start != "layers":
            raise ValueError(f"{name} is not a tensor of moments")
        parts.setdefault(number, {})[key] = value
    if count < 1 or set(parts) != {str(index) for index in range(len(parts))}:
        raise ValueError(f"it has only the layers {', '.join(sorted(parts)[:8])}")
    if count != len(parts):
        raise ValueError(f"it declares {count:,} layers and has {len(parts):,}")
    return [_layer(parts[str(index)]) for index in range(count)]


def _layer(own: dict[str, Tensor]) -> LayerMoments:
    def part(name: str) -> dict[str, Tensor]:
        start = f"{name}."
        return {
            key.removeprefix(start): value for key, value in own.items() if key.startswith(start)
        }

    pairs = None
    if "pairs" in own:
        rows = own["pairs"]
        if rows.dim() != 2 or len(rows) != 4 or bool((rows[:2] < 0).any()):
            raise ValueError("its rotary pairs are invalid")
        turned = rows[:, rows[0] != rows[1]]  # a layer without RoPE has one row of zeros
        first, second, sign, column = turned
        pairs = RotaryPairs(first.long(), second.long(), sign.double(), column.long())
    return LayerMoments(
        part("rest"),
        part("first"),
        own.get("c_o"),
        own.get("c_wv"),
        part("magnitudes"),
        pairs,
        own.get("cross"),
        own.get("table"),
        part("sums"),
        part("biases"),
    )


def _check(name: str, layer: LayerMoments) -> None:
    """Refuse what no layer's moments are: other code divides by them and takes their roots."""
    if not layer.rest.keys() >= {"q", "k", "v"} or layer.rest.keys() != layer.first.keys():
        raise ValueError(f"{name} lacks moments of Q, K or V for the first or the other tokens")
    unknown = (layer.rest.keys() - _KEYS) | (layer.magnitudes.keys() - {"k", "v"})
    if unknown:
        raise ValueError(f"{name}: {min(unknown)[:40]!r} is not a known kind of moments")
    weights = {name: one for name in ("c_o", "c_wv") if (one := getattr(layer, name)) is not None}
    for key, gram in (*layer.rest.items(), *layer.first.items(), *weights.items()):
        if gram.dim() != 3 or gram.shape[1] != gram.shape[2] or gram.dtype != torch.float64:
            raise ValueError(f"{name}: {key} {tuple(gram.shape)} is not a square matrix per head")
        if bool((gram.diagonal(dim1=1, dim2=2) < 0).any()):
            raise ValueError(f"{name}: {key} has a negative diagonal")
    for key, gram in layer.rest.items():
        if gram.shape != layer.first[key].shape:
            raise ValueError(f"{name}: {key} differs in shape between first and other tokens")
    for key, counts in layer.magnitudes.items():
        shape = (len(layer.rest[key]), empty_counts(1, counts.device).shape[1])
        if counts.shape != shape or counts.dtype != torch.float64 or bool((counts < 0).any()):
            raise ValueError(f"{name}: {key[:40]!r} has invalid magnitude counts")
    if (layer.pairs is None) is not (layer.cross is None) or (layer.cross is None) is not (
        layer.table is None
    ):
        raise ValueError(f"{name} lacks a part of the key means by position")
    if layer.cross is not None and layer.table is not None and layer.pairs is not None:
        width, size = layer.rest["k"].shape[-1], 2 * layer.pairs.count + 1
        shapes = (tuple(layer.cross.shape), tuple(layer.table.shape))
        inside = all(bool((x < width).all()) for x in (layer.pairs.first, layer.pairs.second))
        if shapes != ((len(layer.rest["k"]), width, size), (size, size)) or not inside:
            raise ValueError(f"{name}: the key means by position have the wrong shape")
    if layer.cross is not None and "v" not in layer.sums:
        raise ValueError(f"{name} lacks the sum of its values")
    for key, row in (*layer.sums.items(), *layer.biases.items()):
        if key not in layer.rest or row.shape != layer.rest[key].shape[:2]:
            raise ValueError(f"{name}: the sum or bias of {key[:40]!r} has the wrong shape")
    heads = {key: len(gram) for key, gram in {**layer.rest, **weights}.items() if key in _KV_HEADS}
    queries = {len(layer.rest[key]) for key in ("q", "q_pre", "o") if key in layer.rest}
    if len(set(heads.values())) > 1 or any(
        count % own for count in queries for own in heads.values()
    ):
        raise ValueError(f"{name}: the numbers of heads are inconsistent")


def _count(metadata: dict[str, str], key: str) -> int:
    text = metadata[key]
    if not text.isdecimal() or not text.isascii() or len(text) > _MOST_DIGITS:
        raise ValueError(f"{key} is {text[:40]!r}, not a count")
    return int(text)


def _info(text: str) -> dict[str, Any]:
    info = parse_json(text)
    if not isinstance(info, dict):
        raise ValueError("its description of the data is not a JSON object")
    words = {key: isinstance(info.get(key, ""), str) for key in ("model", "source")}
    counts = {
        key: type(info.get(key, 0)) is int and info.get(key, 0) >= 0
        for key in ("seq_len", "skip_first")
    }
    labels = info.get("labels", [])
    listed = isinstance(labels, list) and all(isinstance(one, str) for one in labels)
    for key, fits in {**words, **counts, "labels": listed}.items():
        if not fits:
            raise ValueError(f"{key} has an invalid value: {str(info[key])[:40]!r}")
    return info
