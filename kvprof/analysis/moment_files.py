"""Moments on disk: safetensors with metadata, refused when damaged or of another model."""

import json
from pathlib import Path

from torch import Tensor

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.errors import FailedError, UsageError
from kvprof.tensor_files import load_tensors, save_tensors

__all__ = ["FORMAT", "load_moments", "save_moments"]

FORMAT = "kvprof-moments/1"


def save_moments(moments: Moments, path: Path, *, force: bool = False) -> None:
    """Write moments so that `load_moments` finds them unchanged, or not at all.

    Raises
    ------
    UsageError
        When the file exists and `force` is not given.
    """
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(moments.layers):
        for part, grams in (("rest", layer.rest), ("first", layer.first)):
            for key, value in grams.items():
                tensors[f"layers.{index}.{part}.{key}"] = value
        for name, weight in (("c_o", layer.c_o), ("c_wv", layer.c_wv)):
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
    """Read saved moments.

    Parameters
    ----------
    path : Path
        Written by `save_moments`.
    fingerprint : str or None
        Of the model that they must belong to; None accepts any.

    Raises
    ------
    FailedError
        When the file is damaged, from a newer version, or no file of moments.
    UsageError
        When it belongs to another model, or does not exist.
    """
    tensors, metadata = load_tensors(
        path, format_name=FORMAT, what="moments", made_by="kvprof spectrum --save"
    )
    try:
        moments = Moments(
            [_layer(tensors, index) for index in range(int(metadata["layers"]))],
            metadata["fingerprint"],
            int(metadata["tokens"]),
            int(metadata["sequences"]),
            json.loads(metadata["info"]),
            complete=bool(int(metadata["complete"])),
        )
    except (KeyError, ValueError) as cause:
        raise FailedError(f"{path.name}: damaged file of moments: {cause}") from None
    if fingerprint is not None and moments.fingerprint != fingerprint:
        raise UsageError(
            f"{path.name}: moments of {moments.info.get('model', 'another model')} "
            f"({moments.fingerprint[:12]}), not of the model given ({fingerprint[:12]})"
        )
    return moments


def _layer(tensors: dict[str, Tensor], index: int) -> LayerMoments:
    prefix = f"layers.{index}."

    def part(name: str) -> dict[str, Tensor]:
        start = f"{prefix}{name}."
        return {
            key.removeprefix(start): value
            for key, value in tensors.items()
            if key.startswith(start)
        }

    return LayerMoments(
        part("rest"), part("first"), tensors.get(f"{prefix}c_o"), tensors.get(f"{prefix}c_wv")
    )
