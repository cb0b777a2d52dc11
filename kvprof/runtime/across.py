"""A prompt's cache coded across layers and back, as it is stored or moved before decoding."""

import torch
from torch import Tensor

from kvprof.analysis.transform_coding import decoded, encoded
from kvprof.methods.across import Across, LayerGroup, coded_tokens
from kvprof.methods.plan import Plan
from kvprof.runtime.cache import CompressedCache, CompressedLayer
from kvprof.runtime.rows import Part, RowGroup, plain_part

__all__ = ["at_rest"]


def at_rest(plan: Plan, cache: CompressedCache) -> int:
    """Code what a cache holds, put back what comes out, and return the bytes in between.

    Parameters
    ----------
    plan : Plan
        With `Plan.across`.
    cache : CompressedCache
        Of the plan, after its prompt; every tensor in it is plain.

    Returns
    -------
    int
        Of all sequences: streams, and everything that stays at full precision.
    """
    across = plan.across
    assert across is not None
    total = cache.nbytes
    for group in across.groups:
        layers = [cache.layers[index] for index in group.layers]
        # Rows begin with their first real token, in all layers alike.
        for number in range(len(layers[0].row_groups)):
            total += _coded(plan, across, group, layers, number)
    for index in sorted({index for group in across.groups for index in group.layers}):
        cache.layers[index].changed()
    return total


def _coded(
    plan: Plan, across: Across, group: LayerGroup, layers: list[CompressedLayer], number: int
) -> int:
    """Code one group of rows, and return what that adds to the bytes of the cache."""
    row_groups = [layer.row_groups[number] for layer in layers]
    seen, sink = row_groups[0].seen, plan.levels.sink
    count = coded_tokens(across, sink, seen)
    if not count:
        return 0
    states = [_states(row_group, group.side) for row_group in row_groups]
    device = states[0].device
    taken = slice(sink, sink + count)
    # [rows, tokens, w]: the KV heads of all layers side by side.
    joined = torch.cat(
        [one[:, :, taken].transpose(1, 2).flatten(2).to(device, torch.float32) for one in states],
        dim=-1,
    )
    basis, mean = group.basis.to(device), group.mean.to(device)
    added, back = 0, []
    for rows in joined:
        stream = encoded((rows - mean) @ basis, group.blocks, deflate=across.deflate)
        added += len(stream)
        coefficients = decoded(stream, count, group.blocks, deflate=across.deflate)
        back.append(mean + coefficients.to(device) @ basis.T)
    whole, start = torch.stack(back), 0
    for row_group, one in zip(row_groups, states, strict=True):
        heads, width = one.shape[1], one.shape[3]
        piece = whole[..., start : start + heads * width].unflatten(-1, (heads, width))
        start += heads * width
        added -= one[:, :, taken].numel() * one.element_size()
        changed = torch.cat(
            [
                one[:, :, :sink],
                piece.transpose(1, 2).to(one.device, one.dtype),
                one[:, :, sink + count :],
            ],
            dim=2,
        )
        _put(row_group, group.side, changed)
    return added


def _states(row_group: RowGroup, side: str) -> Tensor:
    """Return what a layer's heads hold, ``[rows, heads, tokens, d]``."""
    (parts,) = _side(row_group, side)  # heads that are all alike are one bundle
    return torch.cat([part.rows() for part in parts], dim=2)


def _put(row_group: RowGroup, side: str, states: Tensor) -> None:
    ((*parts,),) = _side(row_group, side)
    sizes = [part.tokens for part in parts]
    _side(row_group, side)[:] = [[plain_part(one) for one in states.split(sizes, dim=2)]]


def _side(row_group: RowGroup, side: str) -> list[list[Part]]:
    found: list[list[Part]] = getattr(row_group, side)
    return found
