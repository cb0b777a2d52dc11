"""A prompt's attention over compressed keys and values of unlike widths."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import interpreted
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


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        The layer's cache, `RaggedLayout.elements` values of the same dtype.
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
        ``equal`` (blocks of equal cost), ``rows`` (FDC's growing of row blocks) or ``plain``.
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
    tokens = _checked(query, buffer, layout, lengths, host_lengths)
    if not (scaling > 0 and math.isfinite(scaling)):
        raise UsageError(f"a scaling of {scaling} cannot run: it must be above 0")
    if not (softcap >= 0.0 and math.isfinite(softcap)):
        raise UsageError(f"a soft-cap of {softcap} makes no sense: 0 (none) or more")
    if window < 0:
        raise UsageError(f"a window of {window} tokens makes no sense: 0 (none) or more")
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
    if path not in PATHS:
        raise UsageError(f"path {path!r} is none of {', '.join(PATHS)}")
    if sinks is not None and (
        tuple(sinks.shape) != (layout.heads, layout.group) or sinks.dtype != torch.float32
    ):
        raise UsageError(
            f"sinks of shape {tuple(sinks.shape)} in {sinks.dtype} do not fit: "
            f"{(layout.heads, layout.group)} in torch.float32 are wanted"
        )
    if query.dtype == torch.bfloat16 and query.device.type != "cuda" and interpreted():
        raise UsageError("Triton's interpreter computes bf16 wrongly; use float16 or float32")
    if not query.numel():
        return query.new_empty(layout.batch, tokens, layout.output_offsets[-1])
    found: Tensor = prefill_operator(
        query,
        buffer,
        lengths,
        None if sinks is None else sinks.contiguous(),
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
        [] if tuning is None else tuning.numbers(),
    )
    return found


def _checked(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Tensor,
    host_lengths: Sequence[int] | None,
) -> int:
    """Refuse what does not fit together; return the new tokens."""
    shape = tuple(query.shape)
    if len(shape) != 3 or (shape[0], shape[2]) != (layout.batch, layout.query_offsets[-1]):
        raise UsageError(
            f"queries of shape {shape} do not fit the layout, which wants "
            f"({layout.batch}, tokens, {layout.query_offsets[-1]})"
        )
    if query.dtype not in DTYPES:
        raise UsageError(f"{query.dtype} cannot run: bfloat16, float16 or float32 can")
    if buffer.numel() != layout.elements or buffer.dtype != query.dtype:
        raise UsageError(
            f"a cache of {buffer.numel():,} values in {buffer.dtype} does not fit "
            f"{layout.elements:,} in {query.dtype}"
        )
    if not buffer.is_contiguous():
        raise UsageError("a cache is one flat buffer, and this one has gaps")
    if lengths.shape != (layout.batch,) or lengths.dtype != torch.int32:
        raise UsageError(
            f"lengths of shape {tuple(lengths.shape)} in {lengths.dtype} do not fit: "
            f"{(layout.batch,)} in torch.int32 is wanted"
        )
    if not lengths.device == buffer.device == query.device:
        raise UsageError(
            f"queries on {query.device}, cache on {buffer.device} and lengths on {lengths.device} "
            "must lie on one device"
        )
    if host_lengths is not None:
        if len(host_lengths) != layout.batch:
            raise UsageError(f"{len(host_lengths)} lengths for {layout.batch} sequences")
        for length in host_lengths:
            if not 1 <= length <= layout.capacity:
                raise UsageError(
                    f"a context of {length} tokens cannot run: the cache holds 1 to "
                    f"{layout.capacity}"
                )
    return shape[1]
