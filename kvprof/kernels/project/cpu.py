"""The CPU path: torch's own products, heads of one width together, a block of tokens at a time."""

import torch
from torch import Tensor

from kvprof.kernels.planes import in_rows
from kvprof.kernels.project.args import CacheSlots, Operand, ProjectArgs, Rotary

__all__ = ["project_cpu"]

#: Rows (tokens times heads) of a block: its states stay in a core's cache.
_ROWS = 4096


def project_cpu(args: ProjectArgs) -> Tensor | None:
    """Run a pass; return the queries ``[batch, tokens, Σ_g G·dk_g]`` where there are any."""
    output = None
    if args.query is not None:
        output = _queries(args.query, args.rotary)
    if args.destination is not None:
        destination = args.destination
        kept, slots = _slots(destination, args.states.shape[1])
        begins = destination.begins
        if args.keys is not None:
            _store(args.keys, args.rotary, destination, begins[0::2], kept, slots)
        if args.values is not None:
            _store(args.values, None, destination, begins[1::2], kept, slots)
    return output


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """Turn ``[rows, heads, d]`` by tables ``[rows, dim or dim/2]``, in fp32."""
    dim, half = rotary.dim, rotary.dim // 2
    if rotary.interleaved:
        members = (slice(0, dim, 2), slice(1, dim, 2))
    else:
        members = (slice(0, half), slice(half, dim))
    part = states[..., rotary.offset : rotary.offset + dim]
    first, second = (part[..., member].float() for member in members)
    tables = [
        (table if table.shape[-1] == half else table[..., member]).float()[:, None]
        for table in (cos, sin)
        for member in members
    ]
    result = torch.empty_like(states) if dim == states.shape[-1] else states.clone()
    turned = result[..., rotary.offset : rotary.offset + dim]
    turned[..., members[0]] = (first * tables[0]).addcmul_(second, tables[2], value=-1)
    turned[..., members[1]] = (second * tables[1]).addcmul_(first, tables[3])
    return result


def _rows(operand: Operand, rotary: Rotary | None, rows: slice) -> Tensor:
    """Return some rows of ``[batch · tokens, heads, d]``, turned."""
    batch, tokens = operand.states.shape[:2]
    states = operand.states.flatten(0, 1)[rows]
    if rotary is None:
        return states
    cos, sin = (
        table.expand(batch, tokens, -1).flatten(0, 1)[rows] for table in (rotary.cos, rotary.sin)
    )
    return _rotate(states, cos, sin, rotary)


def _by_width(operand: Operand) -> list[tuple[list[int], Tensor]]:
    """Return heads of one width and their stacked bases ``[heads, d, width]``."""
    assert operand.bases is not None
    depth = operand.states.shape[-1]
    matrices = torch.split(operand.bases, [depth * width for width in operand.widths])
    found = []
    for width in dict.fromkeys(operand.widths):
        heads = [head for head, own in enumerate(operand.widths) if own == width]
        found.append((heads, torch.stack([matrices[h].view(depth, width) for h in heads])))
    return found


def _blocks(operand: Operand) -> list[slice]:
    batch, tokens = operand.states.shape[:2]
    heads = operand.states.shape[2] if operand.states.dim() == 4 else len(operand.widths)
    size = max(16, _ROWS // heads)
    return [slice(at, at + size) for at in range(0, batch * tokens, size)]


def _queries(operand: Operand, rotary: Rotary | None) -> Tensor:
    batch, tokens, heads, depth = operand.states.shape
    group = heads // len(operand.widths)
    output = operand.states.new_empty(batch * tokens, group * sum(operand.widths))
    columns = torch.split(output, [group * width for width in operand.widths], dim=1)
    stacks = _by_width(operand)
    for rows in _blocks(operand):
        states = _rows(operand, rotary, rows)
        states = states.reshape(len(states), -1, group, depth).transpose(0, 1)
        for own, bases in stacks:
            made = torch.bmm(states[own].flatten(1, 2), bases).view(
                len(own), -1, group, len(bases[0].T)
            )
            for head, latents in zip(own, made, strict=True):
                columns[head][rows] = latents.flatten(1)
    return output.view(batch, tokens, -1)


def _slots(destination: CacheSlots, tokens: int) -> tuple[Tensor, Tensor]:
    """Return which tokens are stored, ``[batch · tokens]``, and each one's slot in the cache."""
    if destination.slots is not None:
        slots = destination.slots.flatten()
        return (slots >= 0) & (slots < destination.pool * destination.capacity), slots
    assert destination.start is not None
    start = destination.start.long()[:, None]
    token = torch.arange(tokens)[None]
    skipped = (
        torch.zeros_like(start) if destination.valid is None else destination.valid.long()[:, None]
    )
    place = start + token - skipped
    kept = (start >= 0) & (token >= skipped) & (place < destination.capacity)
    return kept.flatten(), (
        torch.arange(len(start))[:, None] * destination.capacity + place
    ).flatten()


def _store(
    operand: Operand,
    rotary: Rotary | None,
    destination: CacheSlots,
    begins: tuple[int, ...],
    kept: Tensor,
    slots: Tensor,
) -> None:
    """Make one operand's latents and copy them into their planes."""
    capacity = destination.capacity
    cache = in_rows(destination.buffer, destination.pool)
    stacks = None if operand.bases is None else _by_width(operand)
    for rows in _blocks(operand):
        chosen, targets = kept[rows], slots[rows][kept[rows]]
        whole = len(targets) == len(chosen)
        states = _rows(operand, rotary, rows)
        states = states if whole else states[chosen]
        if stacks is None and states.dim() == 3:
            made = [(head, states[:, head, :width]) for head, width in enumerate(operand.widths)]
        elif stacks is None:
            made = list(enumerate(torch.split(states, list(operand.widths), dim=1)))
        else:
            made = [
                pair
                for own, bases in stacks
                for pair in zip(own, torch.bmm(states.transpose(0, 1)[own], bases), strict=True)
            ]
        for head, latents in made:
            at, before = begins[head] * capacity, 0
            for width in destination.planes(operand.widths[head]):
                plane = cache[:, at : at + capacity * width].unflatten(1, (capacity, width))
                plane[targets // capacity, targets % capacity] = latents[:, before : before + width]
                at, before = at + capacity * width, before + width
