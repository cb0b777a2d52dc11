"""A prompt's attention over compressed keys and values of unlike widths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.checks import (
    check_cache,
    check_contexts,
    check_device,
    check_numbers,
    check_queries,
    check_scaling,
    check_softcap,
    checked_sinks,
)
from kvprof.kernels.dispatch import check_interpreter, interpreted, layout_of
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.cpu import prefill_cpu
from kvprof.kernels.prefill.launch import PrefillStep, prefill_step
from kvprof.kernels.prefill.paths import (
    PATHS,
    library_refuses,
    measured_path,
    quick_path,
    run_paths,
)
from kvprof.kernels.prefill.schedules import SCHEDULES
from kvprof.kernels.prefill.tuning import Tile, Tuning

__all__ = [
    "PrefillStep",
    "Tile",
    "Tuning",
    "measured_path",
    "prefill",
    "prefill_operator",
    "prefill_step",
]

# --- A prompt's attention as an operator of torch, ``kvprof::prefill``.
#
# So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with
# tensors and numbers. What it needs beside them (the table of blocks, the measured path) is
# made on the first call and remembered, so a graph is captured after one run.


@torch.library.custom_op("kvprof::prefill", mutates_args=())
def prefill_operator(
    query: Tensor,  # as there
    buffer: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
    schedule: str,
    path: str,
    host_lengths: Sequence[int] | None,
    key_widths: Sequence[int],  # of the layout; the sizes are its group, batch and capacity
    value_widths: Sequence[int],
    sizes: Sequence[int],
    tuning: Sequence[int],  # `Tuning.numbers`; empty for the default
) -> Tensor:
    """Attend: see `kvprof.kernels.prefill.step.prefill`, which checks what is given."""
    layout = layout_of(tuple(key_widths), tuple(value_widths), tuple(sizes))
    tokens, device = query.shape[1], query.device
    known = host_lengths
    if device.type == "cpu" and known is None:
        known = lengths.tolist()
    refusal = library_refuses(
        layout, tokens, known, softcap=softcap, sinks=sinks is not None, window=window
    )
    if path == "library" and refusal is not None:
        raise UsageError(f"the library path cannot run this: {refusal}; use path triton")
    if device.type == "cpu" and not interpreted() and path != "library":
        if path == "triton":
            raise UsageError("path triton requires a GPU or TRITON_INTERPRET=1; use auto")
        return prefill_cpu(
            query, buffer, layout, lengths, scaling, softcap=softcap, sinks=sinks, window=window
        )
    query, lengths = query.contiguous(), lengths.contiguous()
    settings = Tuning.of(tuple(tuning)) if tuning else Tuning()
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
        layout,
        tokens,
        device,
        past=past,
        window=window,
        schedule=schedule,
        tuning=settings,
        element_size=query.element_size(),
    )
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


def prefill(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Tensor,
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
    schedule: str = "equal",
    path: str = "auto",
    tuning: Tuning | None = None,
    host_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Return causal attention of new tokens, ``[batch, tokens, Σ_g G·dv_g]`` (FDC §5.3).

    Query ``i`` of sequence ``b`` stands at position ``lengths[b] - tokens + i``; its keys and
    values, and those of all before it, are in the cache. A query at a negative position is padding
    and gets zeros.

    Parameters
    ----------
    query : Tensor
        ``[batch, tokens, Σ_g G·dk_g]``.
    buffer : Tensor
        The layer's cache in the same dtype: flat, or ``[batch, RaggedLayout.row or more]``.
    layout : RaggedLayout
    lengths : Tensor
        ``[batch]`` int32, tokens of each sequence, the new ones included. Not read on the host when
        it lies on a GPU, and not beyond the capacity.
    scaling : float
        Factor of ``q · k``, above 0.
    softcap : float
        Scores become ``softcap · tanh(score / softcap)``; 0 leaves them.
    sinks : Tensor, optional
        ``[heads, G]`` float32: a further logit per query head that takes weight and gives nothing.
    window : int
        Tokens that a token sees, itself included; 0 for all.
    schedule : str
        How the Triton kernel's work is cut, one of `kvprof.kernels.prefill.schedules.SCHEDULES`:
        ``equal`` (blocks of equal cost) or ``plain`` (as a kernel for equal heads).
    path : str
        ``triton``; ``library`` (torch's own kernels, a call per class of widths: neither soft-cap,
        sinks, window nor tokens before the prompt's); or ``auto``: on a GPU the faster as
        measured on the first call (`measured_path`), Triton where the library cannot run; on a CPU
        blocked torch (`kvprof.kernels.prefill.cpu`), or Triton when it is interpreted; or
        ``quick``: as ``auto``, but measuring only where that is soon done (`quick_path`).
    tuning : Tuning, optional
        Of the Triton kernel.
    host_lengths : sequence of int, optional
        The same as `lengths` where the host knows them. They decide how work is cut, and without
        them nothing can tell that the library's kernels apply to tensors on a GPU.

    Raises
    ------
    UsageError
        When shapes or dtypes do not fit together, an option makes no sense or the path cannot run
        it, or bf16 is to be interpreted.
    FailedError
        When a CUDA graph captures a call that never ran before.
    """
    check_queries(query, (layout.batch, None, layout.query_offsets[-1]), query.dtype)
    check_cache(buffer, layout.batch, layout.row, query.dtype)
    check_numbers("lengths", lengths, (layout.batch,), query.device)
    check_device(query.device, cache=buffer)
    if host_lengths is not None:
        check_contexts(host_lengths, layout.batch, layout.capacity)
    check_scaling(scaling)
    check_softcap(softcap)
    check_interpreter(query.dtype)
    sinks = checked_sinks(sinks, layout.heads, layout.group)
    if window < 0:
        raise UsageError(f"window must be 0 (none) or more, not {window}")
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule {schedule!r}: use {', '.join(SCHEDULES)}")
    if path not in PATHS:
        raise UsageError(f"path {path!r}: use {', '.join(PATHS)}")
    if not query.numel():
        return query.new_empty(layout.batch, query.shape[1], layout.output_offsets[-1])
    found: Tensor = prefill_operator(
        query,
        buffer,
        lengths,
        sinks,
        float(scaling),
        float(softcap),
        # A window that holds the whole cache hides nothing.
        0 if window >= layout.capacity else window,
        schedule,
        path,
        None if host_lengths is None else list(host_lengths),
        list(layout.key_widths),
        list(layout.value_widths),
        [layout.group, layout.batch, layout.capacity],
        () if tuning is None else tuning.numbers,
    )
    return found
