"""One decoding step of attention over latents from before RoPE (Palu §3.1.2, appendix B)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from kvprof.errors import LackingError, UsageError
from kvprof.kernels.dispatch import interpreted, uses_triton
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.reconstruct.form import Form, element_of
from kvprof.kernels.reconstruct.operator import (
    cut_operator,
    reconstruct_operator,
)
from kvprof.kernels.reconstruct.tuning import Target, Tuning
from kvprof.kernels.reconstruct.weights import arranged, flat

__all__ = ["ReconstructStep", "Schedule", "Tuning", "reconstruct_step", "stored_step"]


class Schedule(NamedTuple):
    """A step's work as it was cut; layers of the same widths and heads may share it.

    Attributes
    ----------
    lengths : Tensor
        ``[batch]`` int32, tokens of each sequence.
    scheduled : list of Tensor
        Items and parts; empty where no Triton kernel runs.
    """

    lengths: Tensor
    scheduled: list[Tensor]


@dataclass(frozen=True, eq=False)
class ReconstructStep:
    """A decoding step of a layer; `cut` its work once per step, `run` it.

    Attributes
    ----------
    form : Form
        Widths, heads, RoPE's form and tuning.
    dtype : torch.dtype
    multiprocessors : int
    up : Tensor or None
        What rebuilds keys, as the kernel reads it; None where nothing is rebuilt.
    groups : Tensor
        ``[groups, COLUMNS]`` int64, see `kvprof.kernels.reconstruct.kernel`.
    """

    form: Form
    dtype: torch.dtype
    multiprocessors: int
    up: Tensor | None
    groups: Tensor

    def cut(self, lengths: Tensor | Sequence[int]) -> Schedule:
        """Cut the step's work on the device; a CUDA graph may hold it.

        Parameters
        ----------
        lengths : Tensor or sequence of int
            ``[batch]`` int32, tokens of each sequence. A tensor is not read on the host: the
            kernel clamps what it finds to 0 … capacity, and a sequence without tokens gets zeros.
            Numbers are checked instead.

        Raises
        ------
        UsageError
            When a tensor's shape, dtype or device does not fit, or a number is out of range.
        """
        form, device = self.form, self.groups.device
        if not isinstance(lengths, Tensor):
            for length in lengths:
                if not 0 <= length <= form.capacity:
                    raise UsageError(
                        f"a context of {length} tokens cannot run: the cache holds 0 to "
                        f"{form.capacity}"
                    )
            lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        if tuple(lengths.shape) != (form.batch,) or lengths.dtype != torch.int32:
            raise UsageError(
                f"lengths of shape {tuple(lengths.shape)} in {lengths.dtype} do not fit: "
                f"[{form.batch}] in int32 do"
            )
        _on(device, lengths=lengths)
        if not uses_triton(device):
            return Schedule(lengths.clamp(0, form.capacity), [])
        pieces = form.tuning.pieces * self.multiprocessors
        found = cut_operator(lengths.contiguous(), self.groups, form.capacity, pieces)
        return Schedule(lengths, list(found))

    def run(
        self, query: Tensor, buffer: Tensor, schedule: Schedule, cos: Tensor | None,
        sin: Tensor | None, scaling: float, *, softcap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``[batch, Σ_groups n·G·r_v]`` in the dtype of `query`.

        Parameters
        ----------
        query : Tensor
            After RoPE, ``[batch, KV heads · G · d]``, head after head; of a `stored_step`
            ``[batch, Σ_groups n·G·r_k]``.
        buffer : Tensor
            The layer's latents (`kvprof.kernels.planes`), in the step's dtype.
        schedule : Schedule
        cos, sin : Tensor or None
            ``[capacity, rotary_dim / 2]`` or ``[batch, capacity, rotary_dim / 2]`` in float32 or
            the step's dtype, one column per pair, in any strides: of the token in that place, from
            the model's own rotary embedding (which has its θ, scaling type and factor in them).
            None for a `stored_step`.
        scaling : float
            Factor of ``q · k``.
        softcap : float
            Scores become ``softcap * tanh(score / softcap)``; 0 for none.
        sinks : Tensor, optional
            ``[groups, n·G]`` float32 logits that take their share of the softmax.

        Returns
        -------
        Tensor
            In the order of ``RaggedLayout.output_offsets`` with the group's n·G query heads. The
            value latents are not rebuilt: that is W_O's (Palu eq. 6).

        Raises
        ------
        UsageError
            When shapes, dtypes or devices do not fit, or bf16 is to be interpreted.
        """
        self._check(query, buffer, schedule, sinks)
        self._check_tables(cos, sin)
        found: Tensor = reconstruct_operator(
            query.contiguous(), buffer, self.up, schedule.lengths, schedule.scheduled, self.groups,
            cos, sin, None if sinks is None else sinks.contiguous(), scaling, softcap,
            self.form.encoded(),
        )  # fmt: skip
        return found

    def _check(
        self, query: Tensor, buffer: Tensor, schedule: Schedule, sinks: Tensor | None
    ) -> None:
        form = self.form
        wanted = (form.batch, form.query_row)
        if tuple(query.shape) != wanted or query.dtype != self.dtype:
            raise UsageError(
                f"queries of shape {tuple(query.shape)} in {query.dtype} do not fit a step for "
                f"{wanted} in {self.dtype}"
            )
        if buffer.numel() != form.layout.elements or buffer.dtype != self.dtype:
            raise UsageError(
                f"a cache of {buffer.numel():,} values in {buffer.dtype} does not fit "
                f"{form.layout.elements:,} in {self.dtype}"
            )
        if not buffer.is_contiguous():
            raise UsageError("the cache is no dense buffer; pass the layout's own")
        if sinks is not None and (
            tuple(sinks.shape) != (len(form.key_widths), form.queries)
            or sinks.dtype != torch.float32
        ):
            raise UsageError(
                f"sinks of shape {tuple(sinks.shape)} in {sinks.dtype} do not fit: "
                f"{(len(form.key_widths), form.queries)} in float32 do"
            )
        if self.dtype == torch.bfloat16 and interpreted():
            raise UsageError("Triton's interpreter computes bf16 wrongly; use float16 or float32")
        given = {"queries": query, "the cache": buffer, "lengths": schedule.lengths}
        _on(self.groups.device, **given, **({} if sinks is None else {"sinks": sinks}))

    def _check_tables(self, cos: Tensor | None, sin: Tensor | None) -> None:
        form = self.form
        if not form.rebuild:
            if cos is not None or sin is not None:
                raise UsageError("a step that rebuilds no keys takes no cos and sin; pass None")
            return
        if cos is None or sin is None:
            raise UsageError("keys are rebuilt before RoPE: pass cos and sin of every token")
        if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.stride() != sin.stride():
            raise UsageError("cos and sin differ in shape, dtype or strides")
        half = form.rotary_dim // 2
        fits = cos.shape[-1] == half and cos.dim() in (2, 3) and cos.shape[-2] >= form.capacity
        if not fits or (cos.dim() == 3 and cos.shape[0] != form.batch):
            raise UsageError(
                f"tables of shape {tuple(cos.shape)} do not fit: [{form.capacity}, {half}] or "
                f"[{form.batch}, {form.capacity}, {half}] do"
            )
        if cos.dtype not in (torch.float32, self.dtype):
            raise UsageError(f"tables in {cos.dtype} do not fit a step in {self.dtype}")
        _on(self.groups.device, cos=cos, sin=sin)


def _on(device: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise UsageError(f"{name} on {tensor.device} do not fit a step on {device}")


def reconstruct_step(
    layout: RaggedLayout, up: Sequence[Tensor], head_dim: int, heads_per_group: int,
    device: torch.device | str, *, tuning: Tuning | None = None,
    multiprocessors: int | None = None, interleaved: bool = False, rotary_dim: int | None = None,
) -> ReconstructStep:  # fmt: skip
    """Prepare a layer's decoding step: what rebuilds its keys is sorted once, here.

    Parameters
    ----------
    layout : RaggedLayout
        Of the latents: one "head" per group of KV heads, ``group`` the group's n·G query heads.
    up : sequence of Tensor
        Per group ``[n·d, r_k]`` in the run's dtype; the rows of KV head j from ``j·d`` on
        (`kvprof.methods.plan`).
    head_dim : int
        d, of a query and of a rebuilt key: a multiple of 8 to 512.
    heads_per_group : int
        n, KV heads that share a latent.
    device : torch.device or str
    tuning : Tuning, optional
        The device's and the layer's own by default.
    multiprocessors : int, optional
        That the work is cut for; the device's own by default.
    interleaved : bool
        Whether RoPE pairs neighbouring columns (GPT-J, Cohere) instead of a head's halves.
    rotary_dim : int, optional
        Columns that RoPE turns, the first of each head; all by default.

    Raises
    ------
    UsageError
        When something does not fit or cannot run.
    """
    if not up:
        raise UsageError("there is no matrix to rebuild keys with")
    dtype, device = up[0].dtype, _placed(device)
    if layout.group % heads_per_group:
        raise UsageError(
            f"{layout.group} query heads per latent are no whole number for each of "
            f"{heads_per_group} KV heads"
        )
    form = Form(
        layout.key_widths, layout.value_widths, layout.batch, layout.capacity, heads_per_group,
        layout.group // heads_per_group, head_dim, head_dim if rotary_dim is None else rotary_dim,
        interleaved, element_of(dtype), tuning or Tuning(),
    )  # fmt: skip
    if tuning is None:
        form = replace(form, tuning=form.tuned(_target(device)))
    whole = flat(up, form)
    matrices = (arranged(up, form) if uses_triton(device) else whole).to(device)
    if multiprocessors is None:
        multiprocessors = _multiprocessors(device)
    return ReconstructStep(form, dtype, multiprocessors, matrices, form.table().to(device))


def stored_step(step: ReconstructStep) -> ReconstructStep:
    """Return a step's kernel without the rebuild: what decompression costs, by difference.

    Tiles, pieces, loads and the products with the values are the same, and the step's own schedule
    serves; queries come in the latents' widths and meet the latents themselves, as if ``up`` were
    folded into them (`kvprof.kernels.reconstruct.folded.folded_queries`).

    Parameters
    ----------
    step : ReconstructStep
        To measure.
    """
    form = replace(
        step.form, heads=1, group=step.form.queries, head_dim=0, rotary_dim=0, interleaved=False
    )
    table = form.table().to(step.groups.device)
    return replace(step, form=form, up=None, groups=table)


def _placed(device: torch.device | str) -> torch.device:
    """Return the device with its number, as tensors on it tell it."""
    return torch.empty(0, device=device).device


def _target(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target()
    major, minor = torch.cuda.get_device_capability(device)
    found = driver.active.utils.get_device_properties(device.index)
    return Target(10 * major + minor, found["max_shared_mem"])


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if uses_triton(device):
        raise LackingError("the interpreter has no multiprocessors: say how many to cut for")
    return 1
