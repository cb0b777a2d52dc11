"""A prompt's attention as an operator of torch, ``kvprof::prefill``.

So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with tensors and
numbers. What it needs beside them (the table of blocks, the measured path) is made on the first
call and remembered, so a graph is captured after one run.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import interpreted
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.cpu import prefill_cpu
from kvprof.kernels.prefill.launch import prefill_step
from kvprof.kernels.prefill.library import library_refuses
from kvprof.kernels.prefill.measured import measured_path, quick_path
from kvprof.kernels.prefill.paths import run_paths
from kvprof.kernels.prefill.tuning import Tuning

__all__ = ["prefill_operator"]


@lru_cache(maxsize=1024)
def _layout(
    key_widths: tuple[int, ...], value_widths: tuple[int, ...], sizes: tuple[int, ...]
) -> RaggedLayout:
    return RaggedLayout(key_widths, value_widths, *sizes)


@torch.library.custom_op("kvprof::prefill", mutates_args=())
def prefill_operator(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
    schedule: str,
    path: str,
    host_lengths: Sequence[int] | None,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    sizes: Sequence[int],
    tuning: Sequence[int],
) -> Tensor:
    """Attend: see `kvprof.kernels.prefill.step.prefill`, which checks what is given.

    Parameters
    ----------
    query, buffer, lengths, sinks, scaling, softcap, window, schedule, path, host_lengths
        As there.
    key_widths, value_widths, sizes
        Of the layout; the sizes are its group, batch and capacity.
    tuning
        `Tuning.numbers`; empty for the default.

    Returns
    -------
    Tensor
        ``[batch, tokens, Σ_g G·dv_g]``.
    """
    layout = _layout(tuple(key_widths), tuple(value_widths), tuple(sizes))
    tokens, device = query.shape[1], query.device
    known = host_lengths
    if device.type == "cpu" and known is None:
        known = lengths.tolist()
    refusal = library_refuses(
        layout, tokens, known, softcap=softcap, sinks=sinks is not None, window=window
    )
    if path == "library" and refusal is not None:
        raise UsageError(f"the library path cannot run this: {refusal}; choose path triton")
    if device.type == "cpu" and not interpreted() and path != "library":
        if path == "triton":
            raise UsageError("path triton needs a GPU, or TRITON_INTERPRET=1; choose auto")
        return prefill_cpu(
            query, buffer, layout, lengths, scaling, softcap=softcap, sinks=sinks, window=window
        )
    query, lengths = query.contiguous(), lengths.contiguous()
    settings = Tuning.of(tuning) if tuning else Tuning()
    paths = ("library",) * layout.heads if path == "library" else ("triton",) * layout.heads
    if path == "auto" and refusal is None and device.type == "cuda":
        paths = measured_path(
            layout, tokens, query.dtype, device, schedule=schedule, tuning=settings
        ).paths
    if path == "quick" and refusal is None and device.type == "cuda":
        found = quick_path(layout, tokens, query.dtype, device, schedule=schedule, tuning=settings)
        paths = (found,) * layout.heads
    if "library" in paths:
        return run_paths(
            paths, query, buffer, layout, lengths, scaling, schedule=schedule, tuning=settings
        )
    past = None if known is None else tuple(length - tokens for length in known)
    step = prefill_step(
        layout, tokens, device, past=past, window=window, schedule=schedule, tuning=settings,
        element_size=query.element_size(),
    )  # fmt: skip
    return step.run(query, buffer, lengths, scaling, softcap=softcap, sinks=sinks)


@prefill_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
    schedule: str,
    path: str,
    host_lengths: Sequence[int] | None,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    sizes: Sequence[int],
    tuning: Sequence[int],
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], sizes[0] * sum(value_widths))
