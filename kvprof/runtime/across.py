"""Tokens stored across layers: coded and back, to be moved, or as latents to decode from."""

import torch
from torch import Tensor

from kvprof.analysis.transform_coding import decoded, encoded
from kvprof.methods.across import Across, LayerGroup, coded_tokens
from kvprof.methods.plan import Plan
from kvprof.runtime.cache import CompressedCache, CompressedLayer
from kvprof.runtime.clock import part
from kvprof.runtime.rows import Part, RowGroup, SharedLatents, SharedPart, plain_part

__all__ = ["at_rest", "into_latents"]


def at_rest(plan: Plan, cache: CompressedCache) -> int:
    """Code what a cache holds, put back what comes out, and return the bytes in between."""
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
    joined = _joined([one[:, :, taken] for one in states], device)
    assert group.basis is not None  # check_plan has seen to it
    assert group.mean is not None
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


def into_latents(plan: Plan, cache: CompressedCache) -> None:
    """Let what is due become latents of several layers, after a pass."""
    across = plan.across
    assert across is not None
    for layers in dict.fromkeys(group.layers for group in across.groups):
        sides = {group.side: group for group in across.groups if group.layers == layers}
        stores = [cache.layers[index] for index in layers]
        for number in range(len(stores[0].row_groups)):
            row_groups = [store.row_groups[number] for store in stores]
            seen, sink = row_groups[0].seen, plan.levels.sink
            known = row_groups[0].shared
            due = coded_tokens(across, sink, seen) - (known.shared.tokens if known else 0)
            if due > 0:
                with part("compress"):
                    _move(sides, row_groups, sink, due)


def _move(sides: dict[str, LayerGroup], row_groups: list[RowGroup], sink: int, due: int) -> None:
    """Move the oldest tokens behind the sinks, `due` of them, of a group of layers."""
    known = row_groups[0].shared
    latents, bases, columns = {}, {}, [dict[str, slice]() for _ in row_groups]
    for side, group in sides.items():
        states = [_states(row_group, side) for row_group in row_groups]
        device, dtype = states[0].device, states[0].dtype
        rows = _joined([one[:, :, sink : sink + due] for one in states], device)
        if known is not None:
            bases[side] = known.shared.bases[side]
        elif group.basis is not None:
            bases[side] = group.basis.to(device, dtype).unsqueeze(0)
        else:
            bases[side] = _own_basis(rows, group.rank).to(dtype)
        fresh = (rows @ bases[side].float()).to(dtype)
        latents[side] = fresh
        if known is not None:
            latents[side] = torch.cat([known.shared.latents[side], fresh], dim=1)
        start = 0
        for row_group, one, own in zip(row_groups, states, columns, strict=True):
            stop = start + one.shape[1] * one.shape[3]
            own[side] = slice(start, stop)
            start = stop
            rest = one[:, :, sink + due :]
            pieces = [one[:, :, :sink], rest] if sink else [rest]
            _side(row_group, side)[:] = [[plain_part(piece) for piece in pieces]]
    shared = SharedLatents(latents, bases, own=any(x.basis is None for x in sides.values()))
    for number, (row_group, own) in enumerate(zip(row_groups, columns, strict=True)):
        row_group.shared = SharedPart(shared, sink, own, first=not number)


def _own_basis(rows: Tensor, rank: int) -> Tensor:
    """Return each sequence's top right singular vectors, ``[rows, w, rank]``, padded with zeros."""
    found = torch.linalg.svd(rows, full_matrices=False).Vh[:, :rank].mT
    return torch.nn.functional.pad(found, (0, rank - found.shape[-1]))


def _joined(states: list[Tensor], device: torch.device) -> Tensor:
    """Lay the KV heads of all layers side by side, ``[rows, tokens, w]`` float32."""
    every = [one.transpose(1, 2).flatten(2).to(device, torch.float32) for one in states]
    return torch.cat(every, dim=-1)


def _states(row_group: RowGroup, side: str) -> Tensor:
    """Return what a layer's heads hold, ``[rows, heads, tokens, d]``."""
    (parts,) = _side(row_group, side)  # heads that are all alike are one stack
    return torch.cat([part.rows() for part in parts], dim=2)


def _put(row_group: RowGroup, side: str, states: Tensor) -> None:
    ((*parts,),) = _side(row_group, side)
    sizes = [part.tokens for part in parts]
    _side(row_group, side)[:] = [[plain_part(one) for one in states.split(sizes, dim=2)]]


def _side(row_group: RowGroup, side: str) -> list[list[Part]]:
    found: list[list[Part]] = getattr(row_group, side)
    return found
