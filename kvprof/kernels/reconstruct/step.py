"""One decoding step of attention over latents from before RoPE (Palu §3.1.2, appendix B)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from kvprof.errors import UsageError
from kvprof.kernels.checks import (
    check_cache,
    check_contexts,
    check_device,
    check_dtype,
    check_pages,
    check_pool,
    check_queries,
    check_softcap,
    checked_sinks,
    whole_numbers,
)
from kvprof.kernels.dispatch import (
    check_interpreter,
    interpreted,
    launching,
    multiprocessors_of,
    placed,
    uses_triton,
)
from kvprof.kernels.operators import direct
from kvprof.kernels.planes import MOST_TOKENS, RaggedLayout, row_stride
from kvprof.kernels.reconstruct.cpu import reconstruct_cpu
from kvprof.kernels.reconstruct.cuts import cut_pieces
from kvprof.kernels.reconstruct.kernel import reconstruct_pieces
from kvprof.kernels.reconstruct.rebuild_config import (
    Item,
    RebuildConfig,
    Target,
    Tuning,
    arranged,
    flat,
)
from kvprof.kernels.split_kv import Schedule, empty_parts, launch_combine
from kvprof.kernels.tables import Part

__all__ = [
    "ReconstructStep",
    "Tuning",
    "constants_of",
    "cut_operator",
    "reconstruct_operator",
    "reconstruct_step",
    "stored_step",
]

# --- The reconstruction step as operators, ``kvprof::reconstruct`` and
# ``kvprof::reconstruct_cut``.
#
# So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with
# tensors and numbers, and its workspace is allocated inside it, where nobody sees it.


def constants_of(config: RebuildConfig, *, capped: bool) -> dict[str, Any]:
    """Return the compile-time arguments of `reconstruct_pieces`."""
    return {
        "KINDS": config.numbers,
        "KIND_COUNT": len(config.kinds),
        "BLOCKS": (*config.paired, *config.plain) or (0,),
        "PAIRED": len(config.paired),
        "COUNT": len(config.paired) + len(config.plain),
        "HEADS": config.heads,
        "GROUP": config.group,
        "HEAD_DIM": config.head_dim,
        "HALF": config.rotary_dim // 2,
        "INTERLEAVED": config.interleaved,
        "REBUILD": config.rebuild,
        "CAPPED": capped,
        # A tile that waits for the number of its page takes the pipeline two stages.
        "STAGES": 2 * config.tuning.stages - 1
        if config.paged and config.tuning.kept
        else config.tuning.stages,
        "ROWS": config.query_rows,
        "PADDED": config.padded,
        "WIDEST": max(config.value_widths),
        "QUERY_ROW": config.query_row,
        # The request to L2 is inline assembly, which the interpreter has none of.
        "AHEAD": config.tuning.ahead and not interpreted(),
        "KEPT": config.tuning.kept,
        "PAGE": config.capacity if config.paged else 0,
    }


@torch.library.custom_op("kvprof::reconstruct_cut", mutates_args=())
def cut_operator(
    lengths: Tensor, groups: Tensor, capacity: int, pieces: int
) -> tuple[Tensor, Tensor]:
    """Return the items and parts of a step, as `cut_pieces` writes them."""
    tasks = len(lengths) * len(groups)
    items = lengths.new_empty(pieces + tasks, len(Item._fields))
    parts = lengths.new_empty(tasks, len(Part._fields))
    launching(cut_pieces, (tasks,))(
        lengths,
        groups,
        items,
        parts,
        capacity,
        pieces,
        tasks,
        len(items),
        GROUPS=len(groups),
        MOST=triton.next_power_of_2(tasks),
        BLOCK=128,
        num_warps=4,
    )
    return items, parts


@cut_operator.register_fake
def _(lengths: Tensor, groups: Tensor, capacity: int, pieces: int) -> tuple[Tensor, Tensor]:
    tasks = lengths.shape[0] * groups.shape[0]
    items = lengths.new_empty(pieces + tasks, len(Item._fields))
    return items, lengths.new_empty(tasks, len(Part._fields))


@torch.library.custom_op("kvprof::reconstruct", mutates_args=())
def reconstruct_operator(
    query: Tensor,  # as for `ReconstructStep.run`, which checks them
    buffer: Tensor,
    up: Tensor | None,  # from `weights.arranged` for Triton, from `weights.flat` for a CPU
    lengths: Tensor,  # of a `Schedule`
    scheduled: Sequence[Tensor],
    groups: Tensor,  # rows of `Group`, int64
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    table: Tensor | None,
    scaling: float,
    softcap: float,
    config: Sequence[int],  # from `RebuildConfig.encoded`
) -> Tensor:
    """Run a step: Triton on a GPU (or interpreted), blocked torch on a CPU."""
    made = RebuildConfig.decoded(config)
    if not uses_triton(query.device):
        return reconstruct_cpu(
            query,
            buffer,
            up,
            made,
            lengths,
            cos,
            sin,
            scaling,
            softcap=softcap,
            sinks=sinks,
            table=table,
        )
    items, parts = scheduled
    partial, logs = empty_parts(query, len(items), made.queries, max(made.value_widths))
    output = query.new_empty(made.rows, made.layout.output_offsets[-1])
    _launch_pieces(
        query,
        buffer,
        up,
        cos,
        sin,
        partial,
        logs,
        items,
        groups,
        table,
        made,
        scaling * math.log2(math.e),
        softcap * math.log2(math.e),
    )
    launch_combine(partial, logs, parts, output, groups, len(groups), sinks=sinks)
    return output


@reconstruct_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    up: Tensor | None,
    lengths: Tensor,
    scheduled: Sequence[Tensor],
    groups: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    table: Tensor | None,
    scaling: float,
    softcap: float,
    config: Sequence[int],
) -> Tensor:
    made = RebuildConfig.decoded(config)
    return query.new_empty(made.rows, made.layout.output_offsets[-1])


def _launch_pieces(
    query: Tensor,
    buffer: Tensor,
    up: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    partial: Tensor,
    logs: Tensor,
    items: Tensor,
    groups: Tensor,
    table: Tensor | None,
    config: RebuildConfig,
    scale: float,
    cap: float,
) -> None:
    # Where nothing is rebuilt the kernel reads no table; any tensor takes its place.
    cos, sin = (query if angles is None else angles for angles in (cos, sin))
    strides = (cos.stride(0) if cos.dim() == 3 else 0, *cos.stride()[-2:])
    launching(reconstruct_pieces, (len(items),))(
        query,
        buffer,
        query if up is None else up,
        cos,
        sin,
        partial,
        logs,
        items,
        groups,
        items if table is None else table,
        0 if table is None else table.shape[1],
        config.capacity,
        row_stride(buffer, config.batch),
        *strides,
        scale,
        cap,
        **constants_of(config, capped=cap > 0),
        num_warps=config.tuning.warps,
    )


@dataclass(frozen=True, eq=False)
class ReconstructStep:
    """A decoding step of a layer; `cut` its work once per step, `run` it."""

    config: RebuildConfig  # widths, heads, RoPE's form and tuning
    dtype: torch.dtype
    multiprocessors: int
    up: Tensor | None  # what rebuilds keys, as the kernel reads it; None where nothing is rebuilt
    groups: Tensor  # rows of `Group`, int64

    def cut(self, lengths: Tensor | Sequence[int]) -> Schedule:
        """Cut the step's work on the device; a CUDA graph may hold it.

        Parameters
        ----------
        lengths : Tensor or sequence of int
            ``[rows]`` int32, tokens of each sequence. A tensor is not read on the host: the
            kernel clamps what it finds to 0 … `RebuildConfig.most`, and a sequence without tokens
            gets zeros. Numbers are checked instead.

        Raises
        ------
        UsageError
            When a tensor's shape, dtype or device does not fit, or a number is out of range.
        """
        config, device = self.config, self.groups.device
        if not isinstance(lengths, Tensor):
            check_contexts(lengths, config.rows, config.most, least=0)
        lengths = whole_numbers("lengths", lengths, (config.rows,), device)
        if not uses_triton(device):
            return Schedule(lengths.clamp(0, config.most), None, [])
        pieces = config.tuning.pieces * self.multiprocessors
        found = direct(cut_operator)(lengths, self.groups, config.most, pieces)
        return Schedule(lengths, None, list(found))

    def run(
        self,
        query: Tensor,
        buffer: Tensor,
        schedule: Schedule,
        cos: Tensor | None,
        sin: Tensor | None,
        scaling: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Return ``[rows, Σ_groups n·G·r_v]`` in the dtype of `query`.

        Parameters
        ----------
        query : Tensor
            After RoPE, ``[rows, KV heads · G · d]``, head after head; of a `stored_step`
            ``[rows, Σ_groups n·G·r_k]``.
        buffer : Tensor
            The layer's latents (`kvprof.kernels.planes`), in the step's dtype: flat, or ``[batch,
            RaggedLayout.row or more]`` such as an engine's pool of pages.
        schedule : Schedule
        cos, sin : Tensor or None
            ``[tokens, rotary_dim / 2]`` or ``[rows, tokens, rotary_dim / 2]``, of as many tokens as
            a sequence may have, in float32 or the step's dtype, one column per pair, in any
            strides: of the token in that place, from the model's own rotary embedding (which has
            its θ, scaling type and factor in them).
            None for a `stored_step`.
        scaling : float
            Factor of ``q · k``.
        softcap : float
            Scores become ``softcap * tanh(score / softcap)``; 0 for none.
        sinks : Tensor, optional
            ``[groups, n·G]`` float32 logits that take their share of the softmax.
        table : Tensor, optional
            ``[rows, most pages]`` int32, for a paged step. What it names is not checked.

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
        config = self.config
        check_queries(query, (config.rows, config.query_row), self.dtype)
        check_cache(buffer, config.batch, config.layout.row, self.dtype)
        check_pages(table, config.rows, paged=config.paged)
        if table is not None and table.shape[1] * config.capacity < config.most:
            raise UsageError(
                f"{table.shape[1]} pages of {config.capacity} tokens are fewer than this step's "
                f"most_tokens ({config.most:,})"
            )
        check_softcap(softcap)
        check_interpreter(self.dtype)
        sinks = checked_sinks(sinks, len(config.key_widths), config.queries)
        check_device(
            self.groups.device, queries=query, cache=buffer, lengths=schedule.lengths, sinks=sinks
        )
        self.check_tables(cos, sin)
        found: Tensor = direct(reconstruct_operator)(
            query.contiguous(),
            buffer,
            self.up,
            schedule.lengths,
            schedule.scheduled,
            self.groups,
            cos,
            sin,
            sinks,
            table,
            scaling,
            softcap,
            config.encoded(),
        )
        return found

    def check_tables(self, cos: Tensor | None, sin: Tensor | None) -> None:
        """Refuse tables that do not fit what `run` takes."""
        config = self.config
        if not config.rebuild:
            if cos is not None or sin is not None:
                raise UsageError("this step rebuilds no keys; pass None for cos and sin")
            return
        if cos is None or sin is None:
            raise UsageError("keys are rebuilt before RoPE; pass cos and sin of every token")
        if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.stride() != sin.stride():
            raise UsageError("cos and sin have different shapes, dtypes or strides")
        half = config.rotary_dim // 2
        fits = cos.shape[-1] == half and cos.dim() in (2, 3) and cos.shape[-2] >= config.most
        if not fits or (cos.dim() == 3 and cos.shape[0] != config.rows):
            raise UsageError(
                f"cos and sin have shape {tuple(cos.shape)}; required is "
                f"[{config.most}, {half}] or [{config.rows}, {config.most}, {half}]"
            )
        if cos.dtype not in (torch.float32, self.dtype):
            raise UsageError(f"cos and sin are {cos.dtype}, the step {self.dtype}")
        check_device(self.groups.device, cos=cos, sin=sin)


def reconstruct_step(
    layout: RaggedLayout,
    up: Sequence[Tensor],
    head_dim: int,
    heads_per_group: int,
    device: torch.device | str,
    *,
    tuning: Tuning | None = None,
    multiprocessors: int | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    page_tokens: int | None = None,
    rows: int | None = None,
    most_tokens: int | None = None,
) -> ReconstructStep:
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
    page_tokens : int, optional
        Tokens of a page, a multiple of 16, and the layout's capacity; contiguous by default.
    rows : int, optional
        Sequences of the paged form.
    most_tokens : int, optional
        That a sequence of the paged form may have: no more than its pages hold and RoPE's tables
        have; those of the pool by default.

    Raises
    ------
    UsageError
        When something does not fit or cannot run.
    """
    if not up:
        raise UsageError("no matrix to rebuild keys with was given")
    check_dtype("latents", up[0].dtype)
    dtype, device = up[0].dtype, placed(device)
    if layout.group % heads_per_group:
        raise UsageError(
            f"{layout.group} query heads per latent are not divisible by {heads_per_group} KV heads"
        )
    rows = check_pool(layout, page_tokens, rows)
    config = RebuildConfig(
        layout.key_widths,
        layout.value_widths,
        layout.batch,
        layout.capacity,
        heads_per_group,
        layout.group // heads_per_group,
        head_dim,
        head_dim if rotary_dim is None else rotary_dim,
        interleaved,
        dtype.itemsize,
        tuning or Tuning(),
    )
    if page_tokens is not None:
        room = min(layout.batch * layout.capacity, MOST_TOKENS)
        config = replace(config, sequences=rows, longest=most_tokens or room)
    if tuning is None:
        config = replace(config, tuning=config.tuned(_target(device)))
    whole = flat(up, config)
    matrices = (arranged(up, config) if uses_triton(device) else whole).to(device)
    if multiprocessors is None:
        multiprocessors = multiprocessors_of(device)
    return ReconstructStep(config, dtype, multiprocessors, matrices, config.table().to(device))


def stored_step(step: ReconstructStep) -> ReconstructStep:
    """Return a step's kernel without the rebuild: what decompression costs, by difference.

    Tiles, pieces, loads and the products with the values are the same, and the step's own schedule
    serves; queries come in the latents' widths and meet the latents themselves, as if ``up`` were
    folded into them.

    Parameters
    ----------
    step : ReconstructStep
        To measure.
    """
    config = replace(
        step.config, heads=1, group=step.config.queries, head_dim=0, rotary_dim=0, interleaved=False
    )
    table = config.table().to(step.groups.device)
    return replace(step, config=config, up=None, groups=table)


def _target(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target()
    major, minor = torch.cuda.get_device_capability(device)
    found = driver.active.utils.get_device_properties(device.index)
    return Target(10 * major + minor, found["max_shared_mem"])
