"""Plain float64 projection, token by token: what the kernels are held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout

__all__ = ["reference_project", "reference_rotate", "reference_store"]


def reference_rotate(
    states: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    dim: int,
    offset: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Turn ``[batch, tokens, heads, d]``, pair after pair, as float64.

    Parameters
    ----------
    states : Tensor
    cos, sin : Tensor
        ``[batch or 1, tokens, dim or dim/2]``.
    dim, offset : int
        Dimensions that turn, and where they begin.
    interleaved : bool
        Pairs are neighbours, and not halves.
    """
    result = states.double().clone()
    for pair in range(dim // 2):
        members = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
        entries = members if cos.shape[-1] == dim else (pair, pair)
        first, second = (states[..., offset + member].double() for member in members)
        cos_first, cos_second = (cos[..., entry, None].double() for entry in entries)
        sin_first, sin_second = (sin[..., entry, None].double() for entry in entries)
        result[..., offset + members[0]] = first * cos_first - second * sin_first
        result[..., offset + members[1]] = second * cos_second + first * sin_second
    return result


def reference_project(states: Tensor, bases: Sequence[Tensor]) -> list[Tensor]:
    """Return ``[batch, tokens, G · width]`` per KV head, float64.

    Parameters
    ----------
    states : Tensor
        ``[batch, tokens, heads · G, d]``.
    bases : sequence of Tensor
        ``[d, width]`` per KV head.
    """
    group = states.shape[2] // len(bases)
    return [
        torch.cat(
            [
                states[:, :, head * group + member].double() @ basis.double()
                for member in range(group)
            ],
            dim=-1,
        )
        for head, basis in enumerate(bases)
    ]


def reference_store(
    layout: RaggedLayout,
    buffer: Tensor,
    keys: Sequence[Tensor] | None,
    values: Sequence[Tensor] | None,
    start: Sequence[int] | None,
    *,
    valid: Sequence[int] | None = None,
    slots: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the buffer, float64, after latents ``[batch, tokens, width]`` were stored.

    Parameters
    ----------
    layout : RaggedLayout
    buffer : Tensor
        What was there before.
    keys, values : sequence of Tensor or None
        Per KV head.
    start, valid, slots
        As `step.project_keys` takes them.
    """
    heads = [layout.head(buffer.double(), head) for head in range(layout.heads)]
    for side, given in enumerate((keys, values)):
        for head, latents in enumerate(given or ()):
            for row, tokens in enumerate(latents.double()):
                for token, latent in enumerate(tokens):
                    if slots is not None:
                        where, at = divmod(slots[row][token], layout.capacity)
                    else:
                        skipped = 0 if valid is None else valid[row]
                        assert start is not None
                        where, at = row, start[row] + token - skipped
                        if start[row] < 0 or token < skipped or at >= layout.capacity:
                            continue
                    if 0 <= where < layout.batch:
                        heads[head][side][where, at] = latent
    return layout.packed([pair[0] for pair in heads], [pair[1] for pair in heads])
