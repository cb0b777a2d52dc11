"""The same quantities by stacking every vector and taking numpy's SVD: slow, and independent."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvprof.analysis.moments import LayerMoments, Moments

Array = NDArray[np.float64]
KEYS = ("q", "k", "v", "q_pre", "k_pre")


def rows(chunks: Sequence[Tensor], *, skip_first: int = 0) -> Array:
    """Stack ``[batch, heads, T, d]`` chunks to ``[heads, all tokens, d]`` float64."""
    parts = [
        sequence[:, skip_first:].double().cpu().numpy() for chunk in chunks for sequence in chunk
    ]
    return np.concatenate(parts, axis=1)


def singular_values(stacked: Array) -> Array:
    """Return ``[d]`` descending; zeros where fewer rows than columns were stacked."""
    values = np.linalg.svd(stacked, compute_uv=False)
    return np.pad(values, (0, stacked.shape[-1] - len(values)))


def pair_rows(
    vectors: Mapping[str, Array], w_o: Array, pair: str, head: int, *, weight_tokens: float | None
) -> Array:
    """Return the vectors that a pair stacks for one KV head, ``[rows, d]``.

    `w_o` is ``[num_heads, d_v, hidden]``; None as `weight_tokens` is the raw form.
    """
    kv_heads = vectors["k"].shape[0]

    def group(key: str) -> Array:
        own = np.split(vectors[key], kv_heads)[head]
        return np.concatenate(list(own))

    if pair == "qk":
        return np.concatenate([group("q"), vectors["k"][head]])
    if pair == "vo":
        values = vectors["v"][head]
        scale = 1.0 if weight_tokens is None else (weight_tokens / len(values)) ** 0.5
        outputs = w_o.reshape(kv_heads, -1, *w_o.shape[1:])[head]
        return np.concatenate([scale * values, *(slice_.T for slice_ in outputs)])
    return group(pair)


def close_to_largest(ours: Sequence[float] | Tensor | Array, exact: Array) -> None:
    """Assert agreement to 1e-6 of the largest singular value, dimension by dimension."""
    values = np.asarray(ours)
    assert values.shape == exact.shape
    assert np.all(np.diff(values) <= 0), "not in descending order"
    assert np.abs(values - exact).max() <= 1e-6 * max(exact[0], 1e-300)


def held_bytes(moments: Moments) -> int:
    """Return how many bytes the tensors of moments take."""

    def of(layer: LayerMoments) -> int:
        tensors = [*layer.rest.values(), *layer.first.values(), layer.c_o]
        tensors += [layer.c_wv] if layer.c_wv is not None else []
        return sum(t.untyped_storage().nbytes() for t in tensors)

    return sum(of(layer) for layer in moments.layers)
