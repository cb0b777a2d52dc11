"""Prefill attention on a CPU: torch on all threads, in float32.

The fused kernel serves equal or padded widths; online softmax in blocks serves the others.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvprof.kernels.planes import RaggedLayout, of_sequence

__all__ = ["KEYS", "padding_pays", "prefill_cpu", "prefill_rows_cpu"]

#: Keys of a block: scores of a thread's rows stay in its cache.
KEYS = 1024
_ROWS_PER_THREAD, _LEAST_ROWS, _MOST_ROWS = 128, 256, 4096


def prefill_cpu(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Tensor | Sequence[int],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Return what `kvprof.kernels.prefill.step.prefill` does, on the CPU."""
    listed = [int(length) for length in lengths]
    batch, tokens, _ = query.shape
    output = query.new_zeros(batch, tokens, layout.output_offsets[-1])
    for head in range(layout.heads):
        keys, values = layout.head(buffer, head)
        for row, length in enumerate(listed):
            stop = min(length, layout.capacity)
            _attend(
                query[row],
                output[row],
                layout,
                head,
                keys[row, :stop],
                values[row, :stop],
                scaling,
                softcap,
                sinks,
                window,
            )
    return output


def prefill_rows_cpu(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    starts: Tensor | Sequence[int],
    lengths: Tensor | Sequence[int],
    scaling: float,
    table: Tensor | None = None,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
    logs: Tensor | None = None,
) -> Tensor:
    """Return what `kvprof.kernels.prefill.rows.RowsStep` does, on the CPU."""
    begins, listed = [int(start) for start in starts], [int(length) for length in lengths]
    room = layout.capacity * (1 if table is None else table.shape[1])
    output = query.new_zeros(len(query), layout.output_offsets[-1])
    for head in range(layout.heads):
        planes = layout.planes(buffer, head)
        for row, (begin, end) in enumerate(pairwise(begins)):
            stop = max(0, min(listed[row], room)) if begin < end else 0
            keys, values = (
                torch.cat([of_sequence(plane, row, table, stop) for plane in side], dim=-1)
                for side in planes
            )
            _attend(
                query[begin:end],
                output[begin:end],
                layout,
                head,
                keys,
                values,
                scaling,
                softcap,
                sinks,
                window,
                None if logs is None else logs[begin:end],
            )
    return output


def _attend(
    query: Tensor,
    output: Tensor,
    layout: RaggedLayout,
    head: int,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
    window: int,
    logs: Tensor | None = None,
) -> None:
    """Attend with a head's queries of one sequence, the last of `keys` being the last query's."""
    tokens = len(query)
    past = len(keys) - tokens
    fresh = max(0, -past)
    own = slice(head * layout.group, (head + 1) * layout.group)
    if logs is not None:
        logs[:fresh, own] = float("-inf")
    if fresh >= tokens:
        return
    q = query[fresh:, slice(*layout.query_offsets[head : head + 2])].float()
    q = q.view(tokens - fresh, layout.group, -1)
    k, v = keys.float(), values.float()
    if (
        not softcap
        and sinks is None
        and not window
        and logs is None
        and past <= 0
        and padding_pays(k.shape[-1], v.shape[-1])
    ):
        found = _fused(q, k, v, scaling)
    else:
        sink = None if sinks is None else sinks[head]
        found, sums = _blocked(q * scaling, k, v, max(0, past), softcap, sink, window)
        if logs is not None:
            logs[fresh:, own] = sums
    columns = slice(*layout.output_offsets[head : head + 2])
    output[fresh:, columns] = found.flatten(1).to(output.dtype)


def padding_pays(key_width: int, value_width: int) -> bool:
    """Tell whether padding to the wider width adds a third of the columns or less."""
    return 3 * 2 * max(key_width, value_width) <= 4 * (key_width + value_width)


def _fused(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend with ``[tokens, G, dk]`` queries to as many keys and values, padded to one width."""
    group, width = query.shape[1], values.shape[-1]
    widest = max(keys.shape[-1], width)
    query, keys, values = (pad(s, (0, widest - s.shape[-1])) for s in (query, keys, values))
    found: Tensor = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.expand(1, group, -1, -1),
        values.expand(1, group, -1, -1),
        is_causal=True,
        scale=scaling,
    )
    return found[0, ..., :width].transpose(0, 1)


def _blocked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    softcap: float,
    sinks: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend with ``[tokens, G, dk]`` scaled queries to ``[past + tokens, …]`` keys and values.

    Returns ``[tokens, G, dv]``, and ``[tokens, G]``, log2 of the sums of exponentiated scores.
    """
    tokens, group, _ = query.shape
    threads = torch.get_num_threads()
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, _ROWS_PER_THREAD * threads))
    step = max(1, rows // group)
    output = query.new_empty(tokens, group, values.shape[-1])
    logs = query.new_empty(tokens, group)
    for first in range(0, tokens, step):
        block = query[first : first + step]
        count = len(block)
        positions = torch.arange(past + first, past + first + count)
        stop = past + first + count
        top = query.new_full((count * group, 1), -1e30)
        total = query.new_zeros(count * group, 1)
        if sinks is not None:
            top = sinks.to(query.dtype).clamp(min=-1e30).repeat(count)[:, None]
            total = torch.ones_like(top)
        result = query.new_zeros(count * group, values.shape[-1])
        low = max(0, past + first - window + 1) if window else 0
        for at in range(low, stop, KEYS):
            end = min(stop, at + KEYS)
            scores = block.flatten(0, 1) @ keys[at:end].T
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
            if end > past + first + 1 or window:
                places = torch.arange(at, end)
                hidden = places > positions[:, None]
                if window:
                    hidden |= places <= positions[:, None] - window
                scores.view(count, group, -1).masked_fill_(hidden[:, None], float("-inf"))
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            fade = torch.exp(top - higher)
            scores.sub_(higher).exp_()
            total.mul_(fade).add_(scores.sum(-1, keepdim=True))
            result.mul_(fade).addmm_(scores, values[at:end])
            top = higher
        output[first : first + count] = (result / total).view(count, group, -1)
        logs[first : first + count] = (top * math.log2(math.e) + total.log2()).view(count, group)
    return output, logs
