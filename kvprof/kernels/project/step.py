"""FDC's online compression: what a layer calls between its projections and its attention.

Q and K of a token are multiplied by their head's basis and cut to its width; K goes into the packed
cache at once, Q to the dense rows that `decode` and `prefill` take. V goes into the cache beside K:
as latents where its basis was folded into ``W_V``, through its basis where not. `project_step` does
all three in one launch, and turns Q and K by RoPE before where it is given tables (FDC §5.1, §5.2;
ZACK §4.3).

Where tokens go: token i of sequence b is stored at place ``start[b] + i``. With `valid`, the first
``valid[b]`` tokens (left padding) are not stored and leave no gap: token i lies at
``start[b] + i - valid[b]``. A sequence whose start is -1 stores nothing, and a token for which
there is no room behind the capacity is not stored. In a pool of pages, and wherever sequences have
unlike numbers of new tokens, `slots` tell instead where each token goes, ``page · C + place``, with
C tokens to a page; one that is negative, or of no page, is not stored. An engine has them as its
slot mapping, for all sequences' tokens one after another: a batch of one to this module.

RoPE: without `cos` and `sin` states come turned already, as transformers hands them to an attention
function. Tables are ``[batch or 1, tokens, rotary_dim]``, an entry per dimension, or
``[batch or 1, tokens, rotary_dim / 2]``, one per pair (GLM's and DeepSeek's tables hold every angle
twice, half after half, and pair neighbours: give their first half).

The arithmetic is fp32: turned states are rounded to their dtype once, then multiplied.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.checks import check_cache, check_device, check_numbers
from kvprof.kernels.operators import direct
from kvprof.kernels.planes import LARGEST_WIDTH, RaggedLayout
from kvprof.kernels.project.args import CacheSlots, Operand, ProjectArgs, Rotary
from kvprof.kernels.project.bases import BasisSet
from kvprof.kernels.project.cpu import project_cpu

__all__ = [
    "check_destination",
    "check_latents",
    "check_states",
    "check_widths",
    "checked_rotary",
    "keys_operator",
    "project_keys",
    "project_queries",
    "project_step",
    "project_values",
    "queries_operator",
    "step_operator",
    "store_values",
    "values_operator",
]

# --- What ``torch.compile`` and CUDA graphs see: operators that take tensors and numbers only. Each
# runs Triton on a GPU (and where Triton interprets its kernels), and the CPU path elsewhere. A
# shape must have run once before a graph captures it.


@cache
def _interpreted() -> bool:
    """Whether Triton is there and was told to interpret."""
    if find_spec("triton") is None:
        return False
    from kvprof.kernels.dispatch import interpreted  # Triton is for Linux only

    return interpreted()


def _run(args: ProjectArgs) -> Tensor | None:
    if args.states.is_cuda or _interpreted():
        from kvprof.kernels.project.launch import launch  # Triton is for Linux only

        return launch(args)
    return project_cpu(args)


def _rotary(cos: Tensor | None, sin: Tensor | None, rotation: Sequence[int]) -> Rotary | None:
    """Read ``(dim, offset, interleaved)``."""
    if cos is None or sin is None:
        return None
    return Rotary(cos, sin, rotation[0], rotation[1], bool(rotation[2]))


@torch.library.custom_op("kvprof::project_queries", mutates_args=())
def queries_operator(
    query: Tensor,
    bases: Tensor,
    widths: Sequence[int],
) -> Tensor:
    """Return dense rows of projected queries; see `project_queries`."""
    output = _run(ProjectArgs(query=Operand(query, bases, tuple(widths))))
    assert output is not None
    return output


def _dense(query: Tensor, widths: Sequence[int]) -> Tensor:
    """Return an empty tensor of the queries' shape after projection."""
    group = query.shape[2] // len(widths)
    return query.new_empty(query.shape[0], query.shape[1], group * sum(widths))


@queries_operator.register_fake
def _(query: Tensor, bases: Tensor, widths: Sequence[int]) -> Tensor:
    return _dense(query, widths)


@torch.library.custom_op("kvprof::project_keys", mutates_args={"buffer"})
def keys_operator(
    keys: Tensor,
    bases: Tensor,
    buffer: Tensor,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    pool: int,
    capacity: int,
    start: Tensor | None,
    valid: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Store projected keys; see `project_keys`."""
    widths = (tuple(key_widths), tuple(value_widths))
    destination = CacheSlots(buffer, *widths, pool, capacity, start, valid, slots)
    _run(ProjectArgs(keys=Operand(keys, bases, widths[0]), destination=destination))


@keys_operator.register_fake
def _(*given: object) -> None:
    return None


@torch.library.custom_op("kvprof::project_values", mutates_args={"buffer"})
def values_operator(
    values: Tensor,
    bases: Tensor | None,
    buffer: Tensor,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    pool: int,
    capacity: int,
    start: Tensor | None,
    valid: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Store values, projected or latents already; see `project_values`."""
    widths = (tuple(key_widths), tuple(value_widths))
    destination = CacheSlots(buffer, *widths, pool, capacity, start, valid, slots)
    _run(ProjectArgs(values=Operand(values, bases, widths[1]), destination=destination))


@values_operator.register_fake
def _(*given: object) -> None:
    return None


@torch.library.custom_op("kvprof::project_step", mutates_args={"buffer"})
def step_operator(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_bases: Tensor,
    key_bases: Tensor,
    value_bases: Tensor | None,
    buffer: Tensor,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    pool: int,
    capacity: int,
    start: Tensor | None,
    valid: Tensor | None,
    slots: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotation: Sequence[int],
    blocks: int,
    widest: int,
) -> Tensor:
    """Project queries, store keys and values in one launch; see `project_step`."""
    widths = (tuple(key_widths), tuple(value_widths))
    output = _run(
        ProjectArgs(
            query=Operand(query, query_bases, widths[0]),
            keys=Operand(keys, key_bases, widths[0]),
            values=Operand(values, value_bases, widths[1]),
            rotary=_rotary(cos, sin, rotation),
            destination=CacheSlots(
                buffer, *widths, pool, capacity, start, valid, slots, blocks, widest
            ),
        )
    )
    assert output is not None
    return output


@step_operator.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_bases: Tensor,
    key_bases: Tensor,
    value_bases: Tensor | None,
    buffer: Tensor,
    key_widths: Sequence[int],
    *rest: object,
) -> Tensor:
    return _dense(query, key_widths)


# --- What a projection refuses: shapes, dtypes and devices that do not fit together.


def check_states(name: str, states: Tensor, bases: BasisSet, heads: int) -> None:
    """Refuse states that are not ``[batch, tokens, heads, d]`` of the bases' dtype and device."""
    shape = tuple(states.shape)
    if len(shape) != 4 or shape[2:] != (heads, bases.depth):
        raise UsageError(
            f"{name} have shape {shape}; required is [batch, tokens, {heads}, {bases.depth}]"
        )
    if states.dtype != bases.packed.dtype or states.device != bases.packed.device:
        raise UsageError(
            f"{name} are {states.dtype} on {states.device}, bases {bases.packed.dtype} on "
            f"{bases.packed.device}; they must match"
        )
    if states.stride(3) != 1:
        raise UsageError(f"a head's values must be contiguous: call contiguous() on the {name}")


def check_latents(values: Tensor, layout: RaggedLayout) -> None:
    """Refuse latents that are neither ``[batch, tokens, Σ dv]`` nor heads that begin with them."""
    if values.dim() == 4:
        shape, widest = tuple(values.shape), max(layout.value_widths)
        if shape[2] != layout.heads or shape[3] < widest or values.stride(3) != 1:
            raise UsageError(
                f"values have shape {shape}; required is [batch, tokens, {layout.heads}, {widest} "
                "or more], contiguous per head"
            )
        return
    width = sum(layout.value_widths)
    if values.dim() != 3 or values.shape[2] != width or values.stride(2) != 1:
        raise UsageError(
            f"values have shape {tuple(values.shape)}; required are contiguous rows [batch, "
            f"tokens, {width}]"
        )


def check_widths(name: str, bases: BasisSet, widths: tuple[int, ...]) -> None:
    """Refuse bases that keep other widths than the layout stores."""
    if bases.widths != widths:
        raise UsageError(f"bases of widths {bases.widths} do not match the {name} widths {widths}")


def check_destination(
    states: Tensor,
    layout: RaggedLayout,
    buffer: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    slots: Tensor | None,
    blocks: int = 1,
) -> None:
    """Refuse a cache, starts or slots that do not fit the states."""
    check_cache(buffer, layout.batch, blocks * layout.row, states.dtype)
    batch, tokens = states.shape[:2]
    if slots is not None:
        _check_slots(slots, batch * tokens, layout, states.device)
    elif start is None:
        raise UsageError("give start, or slots for a pool of pages")
    elif layout.batch != batch:
        raise UsageError(f"{batch} sequences exceed the cache's {layout.batch}; give slots")
    if slots is not None and (start is not None or valid is not None):
        raise UsageError("slots exclude start and valid")
    for name, given in (("start", start), ("valid", valid)):
        if given is None:
            continue
        check_numbers(name, given, (batch,), states.device)
        if not given.is_contiguous():
            raise UsageError(f"{name} must be contiguous: call contiguous() on it")
    check_device(states.device, cache=buffer)


def _check_slots(slots: Tensor, tokens: int, layout: RaggedLayout, device: torch.device) -> None:
    if slots.numel() != tokens or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise UsageError(
            f"slots have shape {tuple(slots.shape)} and dtype {slots.dtype}; required are "
            f"{tokens} contiguous torch.int64"
        )
    if layout.batch * layout.capacity >= 2**31:
        raise UsageError(
            f"a pool of {layout.batch:,} pages of {layout.capacity} tokens exceeds the limit of "
            "2^31 slots"
        )
    check_device(device, slots=slots)


def checked_rotary(
    states: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_dim: int | None,
    offset: int,
    interleaved: bool,
) -> list[int]:
    """Check the tables and return what turns: dimensions, offset, and 1 for neighbours as pairs."""
    if cos is None and sin is None:
        if rotary_dim is not None or offset or interleaved:
            raise UsageError("rotary dimensions require cos and sin")
        return [0, 0, 0]
    if cos is None or sin is None:
        raise UsageError("RoPE requires both cos and sin")
    depth = states.shape[3]
    dim = depth - offset if rotary_dim is None else rotary_dim
    if offset < 0 or dim < 2 or dim % 2 or offset + dim > depth:
        raise UsageError(f"RoPE cannot rotate {dim} dimensions from {offset} of a head of {depth}")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, states.shape[0])
        if not fits or table.shape[1] != states.shape[1] or table.shape[2] not in (dim, dim // 2):
            raise UsageError(
                f"{name} has shape {tuple(table.shape)}; required is [{states.shape[0]} or 1, "
                f"{states.shape[1]}, {dim} or {dim // 2}]"
            )
        if table.stride(2) != 1 or not table.is_floating_point() or table.device != states.device:
            raise UsageError(
                f"{name} must contain real numbers on {states.device}, contiguous per token"
            )
    if cos.shape[2] != sin.shape[2]:
        raise UsageError(f"cos has {cos.shape[2]} entries per token and sin {sin.shape[2]}")
    return [dim, offset, int(interleaved)]


# --- The calls.


def project_queries(query: Tensor, bases: BasisSet, layout: RaggedLayout) -> Tensor:
    """Return projected queries, ``[batch, tokens, Σ_g G·dk_g]``.

    Parameters
    ----------
    query : Tensor
        ``[batch, tokens, heads·G, d]``; any strides, but heads' values side by side.
    bases : BasisSet
        ``[d, dk]`` per KV head, which its G query heads share.
    layout : RaggedLayout
        Of the cache they will meet.

    Raises
    ------
    UsageError
        When shapes, dtypes or devices do not fit together.
    """
    check_states("queries", query, bases, layout.heads * layout.group)
    check_widths("key", bases, layout.key_widths)
    made: Tensor = queries_operator(query, bases.packed, list(bases.widths))
    return made


def project_keys(
    keys: Tensor,
    bases: BasisSet,
    layout: RaggedLayout,
    buffer: Tensor,
    start: Tensor | None,
    *,
    valid: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Multiply keys by their heads' bases and store them.

    Parameters
    ----------
    keys : Tensor
        ``[batch, tokens, heads, d]``; any strides, but a head's values side by side.
    bases : BasisSet
        ``[d, dk]`` per KV head.
    layout : RaggedLayout
        Of the cache; its batch and capacity are pages and tokens of a page where there are slots.
    buffer : Tensor
        The cache: flat, or ``[batch, RaggedLayout.row or more]``. Nothing but the tokens' own
        columns is written.
    start : Tensor or None
        ``[batch]`` int32, on the device: where each sequence's first stored token goes; -1 for a
        sequence that stores nothing. None where there are slots.
    valid : Tensor, optional
        ``[batch]`` int32: leading tokens that are padding and are skipped.
    slots : Tensor, optional
        One for each of ``batch · tokens`` tokens, int64, on the device.

    Raises
    ------
    UsageError
        When shapes, dtypes or devices do not fit together.
    """
    check_states("keys", keys, bases, layout.heads)
    check_widths("key", bases, layout.key_widths)
    check_destination(keys, layout, buffer, start, valid, slots)
    keys_operator(keys, bases.packed, buffer, *_shape(layout), start, valid, slots)


def store_values(
    values: Tensor,
    layout: RaggedLayout,
    buffer: Tensor,
    start: Tensor | None,
    *,
    valid: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Store values that a folded ``W_V`` has made as latents.

    Parameters
    ----------
    values : Tensor
        ``[batch, tokens, Σ dv]``, head after head, or ``[batch, tokens, heads, d]``, of which each
        head's first dv columns are stored.
    layout, buffer, start, valid, slots
        As `project_keys` takes them.

    Raises
    ------
    UsageError
        When shapes, dtypes or devices do not fit together.
    """
    check_latents(values, layout)
    check_destination(values, layout, buffer, start, valid, slots)
    values_operator(values, None, buffer, *_shape(layout), start, valid, slots)


def project_values(
    values: Tensor,
    bases: BasisSet,
    layout: RaggedLayout,
    buffer: Tensor,
    start: Tensor | None,
    *,
    valid: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Multiply values by their heads' bases and store them, where ``W_V`` is not folded.

    Parameters
    ----------
    values : Tensor
        ``[batch, tokens, heads, d]``.
    bases : BasisSet
        ``[d, dv]`` per KV head.
    layout, buffer, start, valid, slots
        As `project_keys` takes them.

    Raises
    ------
    UsageError
        When shapes, dtypes or devices do not fit together.
    """
    check_states("values", values, bases, layout.heads)
    check_widths("value", bases, layout.value_widths)
    check_destination(values, layout, buffer, start, valid, slots)
    values_operator(values, bases.packed, buffer, *_shape(layout), start, valid, slots)


def project_step(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bases: BasisSet,
    layout: RaggedLayout,
    buffer: Tensor,
    start: Tensor | None,
    *,
    query_bases: BasisSet | None = None,
    value_bases: BasisSet | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_dim: int | None = None,
    offset: int = 0,
    interleaved: bool = False,
    valid: Tensor | None = None,
    slots: Tensor | None = None,
    blocks: int = 1,
    widest: int = LARGEST_WIDTH,
) -> Tensor:
    """Project Q, K and V of one pass in one launch; return Q, ``[batch, tokens, Σ_g G·dk_g]``.

    Parameters
    ----------
    query, keys : Tensor
        ``[batch, tokens, heads·G, d]`` and ``[batch, tokens, heads, d]``.
    values : Tensor
        As `store_values` takes them, or ``[batch, tokens, heads, d]`` with `value_bases`.
    bases : BasisSet
        Of K, and of Q too unless `query_bases` is given (methods whose pair of bases differs).
    query_bases, value_bases : BasisSet, optional
    layout, buffer, start, valid, slots
        As `project_keys` takes them.
    cos, sin : Tensor, optional
        Tables of angles.
    rotary_dim : int, optional
        Dimensions that turn; by default all from `offset` on.
    offset : int
        Where they begin in a head.
    interleaved : bool
        Pairs are (2i, 2i + 1) and not (i, i + rotary_dim/2).
    blocks : int
        Of a head, where these lie one after another in a row, each with planes for the layout's
        capacity (`kvprof.kernels.quantized.layout`); tokens go into the first.
    widest : int
        Columns of a plane at most.

    Raises
    ------
    UsageError
        When shapes, dtypes or devices do not fit together.
    """
    query_bases = bases if query_bases is None else query_bases
    check_states("queries", query, query_bases, layout.heads * layout.group)
    check_states("keys", keys, bases, layout.heads)
    check_widths("key", query_bases, layout.key_widths)
    check_widths("key", bases, layout.key_widths)
    if value_bases is None:
        check_latents(values, layout)
    else:
        check_states("values", values, value_bases, layout.heads)
        check_widths("value", value_bases, layout.value_widths)
    check_destination(keys, layout, buffer, start, valid, slots, blocks)
    for name, states in (("queries", query), ("values", values)):
        if states.shape[:2] != keys.shape[:2] or states.dtype != keys.dtype:
            raise UsageError(
                f"{name} {tuple(states.shape)} in {states.dtype} and keys {tuple(keys.shape)} in "
                f"{keys.dtype} are not of the same pass"
            )
    if query.shape[3] != keys.shape[3]:
        raise UsageError(f"queries have {query.shape[3]} columns, keys {keys.shape[3]}")
    rotation = checked_rotary(keys, cos, sin, rotary_dim, offset, interleaved)
    made: Tensor = direct(step_operator)(
        query,
        keys,
        values,
        query_bases.packed,
        bases.packed,
        None if value_bases is None else value_bases.packed,
        buffer,
        *_shape(layout),
        start,
        valid,
        slots,
        cos,
        sin,
        rotation,
        blocks,
        widest,
    )
    return made


def _shape(layout: RaggedLayout) -> tuple[list[int], list[int], int, int]:
    """Return a layout as an operator takes it."""
    return list(layout.key_widths), list(layout.value_widths), layout.batch, layout.capacity
