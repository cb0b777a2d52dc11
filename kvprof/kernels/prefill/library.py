"""A prompt's attention through torch's own kernels, heads grouped by what those reward.

Libraries want dense heads of one width, keys and values apart. On an H200 cuDNN's time falls at 64
and 128 and hardly between, so widths are padded to those and heads of the same padded pair share a
call. What a library knows no option for (soft-cap, sinks, windows, tokens before the prompt's) it
does not run.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from kvprof.errors import LackingError, UsageError
from kvprof.kernels.planes import RaggedLayout, chunks

__all__ = ["REWARDED", "library_jobs", "library_refuses", "padded_width", "width_classes"]

#: Widths at which a library's time falls.
REWARDED = (64, 128, 256)

_ON_GPU = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
)  # fmt: skip
_ON_CPU = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


def padded_width(width: int) -> int:
    """Return the rewarded width that holds `width` columns.

    Raises
    ------
    UsageError
        When there is none.
    """
    found = next((rewarded for rewarded in REWARDED if rewarded >= width), None)
    if found is None:
        raise UsageError(
            f"no library takes heads of width {width} (at most {REWARDED[-1]}); choose path triton"
        )
    return found


def width_classes(
    layout: RaggedLayout, heads: Sequence[int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return heads by padded key and value width."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for head in heads:
        widths = padded_width(layout.key_widths[head]), padded_width(layout.value_widths[head])
        found[widths] = (*found.get(widths, ()), head)
    return found


def library_refuses(
    layout: RaggedLayout,
    tokens: int,
    lengths: Sequence[int] | None,
    *,
    softcap: float = 0.0,
    sinks: bool = False,
    window: int = 0,
) -> str | None:
    """Tell why the library path cannot run this, or None when it can.

    Parameters
    ----------
    layout : RaggedLayout
    tokens : int
    lengths : sequence of int or None
        As the host knows them; None when it does not.
    softcap : float
    sinks : bool
        Whether there are any.
    window : int
    """
    if softcap or sinks or window:
        return "torch's kernels know no soft-cap, sinks or window"
    if lengths is None:
        return "it must be known on the host that every sequence is new (host_lengths)"
    if any(length != tokens for length in lengths):
        return f"torch's causal kernels want {tokens} tokens in every sequence, and none before"
    widest = max(layout.key_widths + layout.value_widths)
    if widest > REWARDED[-1]:
        return f"no library takes heads of width {widest} (at most {REWARDED[-1]})"
    return None


def library_jobs(
    query: Tensor,
    buffer: Tensor,
    output: Tensor,
    layout: RaggedLayout,
    scaling: float,
    heads: Sequence[int],
) -> list[Callable[[], None]]:
    """Return one call per class of widths, for streams of their own.

    Parameters
    ----------
    query : Tensor
        ``[batch, tokens, Σ_g G·dk_g]``, contiguous; every sequence is as long.
    buffer : Tensor
    output : Tensor
        ``[batch, tokens, Σ_g G·dv_g]``; the columns of `heads` are written.
    layout : RaggedLayout
    scaling : float
    heads : sequence of int
        KV heads to compute.
    """
    grouped = width_classes(layout, heads).items()

    def job(widths: tuple[int, int], own: tuple[int, ...]) -> Callable[[], None]:
        return lambda: _attend(query, buffer, output, layout, scaling, own, widths)

    # What takes longest starts first.
    ordered = sorted(grouped, key=lambda item: -len(item[1]) * sum(item[0]))
    return [job(widths, own) for widths, own in ordered]


def _attend(
    query: Tensor,
    buffer: Tensor,
    output: Tensor,
    layout: RaggedLayout,
    scaling: float,
    heads: tuple[int, ...],
    widths: tuple[int, int],
) -> None:
    """Attend for the heads of one class."""
    tokens = query.shape[1]
    queries = _queries(query, layout, heads, widths[0])
    keys = _dense(buffer, layout, heads, 0, widths[0], tokens)
    values = _dense(buffer, layout, heads, 1, widths[1], tokens)
    try:
        with sdpa_kernel(list(_ON_GPU if query.is_cuda else _ON_CPU), set_priority=True):
            found = scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
            )
    except RuntimeError as error:
        # The second is what cuDNN says of widths that it was asked for and has no plan for.
        if not any(words in str(error) for words in ("No available kernel", "cuDNN")):
            raise
        raise LackingError(
            f"none of torch's attention kernels here takes keys {widths[0]} and values "
            f"{widths[1]} wide in {query.dtype}; choose path triton"
        ) from error
    side_by_side = heads == tuple(range(heads[0], heads[-1] + 1))
    if side_by_side and {layout.value_widths[head] for head in heads} == {widths[1]}:
        columns = slice(layout.output_offsets[heads[0]], layout.output_offsets[heads[-1] + 1])
        target = _in_heads(output[..., columns], len(heads) * layout.group)
        target.copy_(found.transpose(1, 2))  # one launch: many small ones outlast a short prompt
        return
    found = found.view(query.shape[0], len(heads), layout.group, tokens, widths[1])
    for number, head in enumerate(heads):
        columns = slice(*layout.output_offsets[head : head + 2])
        target = _in_heads(output[..., columns], layout.group)
        target.copy_(found[:, number, ..., : layout.value_widths[head]].transpose(1, 2))


def _in_heads(columns: Tensor, heads: int) -> Tensor:
    """Return ``[batch, tokens, heads · width]`` as ``[batch, tokens, heads, width]``, a view."""
    return columns.view(*columns.shape[:2], heads, -1)


def _queries(query: Tensor, layout: RaggedLayout, heads: tuple[int, ...], width: int) -> Tensor:
    """Return ``[batch, heads·G, tokens, width]``: a view where the heads lie side by side."""
    own = {layout.key_widths[head] for head in heads}
    if own == {width} and heads == tuple(range(heads[0], heads[-1] + 1)):
        columns = slice(layout.query_offsets[heads[0]], layout.query_offsets[heads[-1] + 1])
        return _in_heads(query[..., columns], len(heads) * layout.group).transpose(1, 2)
    parts = []
    for head in heads:
        columns = slice(*layout.query_offsets[head : head + 2])
        part = _in_heads(query[..., columns], layout.group).transpose(1, 2)
        parts.append(pad(part, (0, width - part.shape[-1])))
    return torch.cat(parts, dim=1)


def _dense(
    buffer: Tensor, layout: RaggedLayout, heads: tuple[int, ...], side: int, width: int, tokens: int
) -> Tensor:
    """Return K (side 0) or V of heads as ``[batch, heads, tokens, width]``: a view if possible."""
    widths = (layout.key_widths, layout.value_widths)[side]
    starts = [layout.offsets[head][side] for head in heads]
    steps = {later - start for start, later in pairwise(starts)}
    if {widths[head] for head in heads} == {width} and chunks(width) == (width,) and len(steps) < 2:
        return buffer.as_strided(
            (layout.batch, len(heads), tokens, width),
            (layout.capacity * width, min(steps, default=0), width, 1),
            buffer.storage_offset() + starts[0],
        )
    dense = buffer.new_zeros(layout.batch, len(heads), tokens, width)
    for number, head in enumerate(heads):
        start, column = starts[number], 0
        for chunk in chunks(widths[head]):
            size = layout.batch * layout.capacity * chunk
            plane = buffer[start : start + size].view(layout.batch, layout.capacity, chunk)
            dense[:, number, :, column : column + chunk] = plane[:, :tokens]
            start, column = start + size, column + chunk
    return dense
