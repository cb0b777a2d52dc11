# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Rotate, multiply by a head's basis, store: a program per block of rows and unit of columns."""

import triton
import triton.language as tl

from kvprof.kernels.dispatch import wait_for_earlier
from kvprof.kernels.project.args import KEYS, QUERY, VALUES, Case, Unit
from kvprof.kernels.tables import column as number_of

__all__ = ["project_rows"]

_QUERY = tl.constexpr(QUERY)
_KEYS = tl.constexpr(KEYS)
_VALUES = tl.constexpr(VALUES)
_CASE_SIZE = tl.constexpr(len(Case._fields))
_OPERAND = tl.constexpr(number_of(Case, "operand"))
_WIDTH = tl.constexpr(number_of(Case, "width"))
_UNIT = tl.constexpr(len(Unit._fields))
_CASE = tl.constexpr(number_of(Unit, "case"))
_HEAD = tl.constexpr(number_of(Unit, "head"))
_BASIS = tl.constexpr(number_of(Unit, "basis"))
_LENGTH = tl.constexpr(number_of(Unit, "length"))
_PLANE = tl.constexpr(number_of(Unit, "plane"))
_STRIDE = tl.constexpr(number_of(Unit, "stride"))
_COLUMN = tl.constexpr(number_of(Unit, "column"))


@triton.jit
def _angles(
    table, at, pair, real, HALF: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr,
):
    """Load one table's entries for both members of some pairs."""
    inside = real[:, None] & (pair < HALF)[None, :]
    if not FULL:
        first = tl.load(table[:, None] + pair[None, :], mask=inside, other=0.0)
        second = first
    elif INTERLEAVED:
        both = 2 * at + tl.arange(0, 2 * PAIRS)
        wanted = real[:, None] & (both < DIM)[None, :]
        loaded = tl.load(table[:, None] + both[None, :], mask=wanted, other=0.0)
        first, second = tl.split(tl.reshape(loaded, [ROWS, PAIRS, 2]))
    else:
        first = tl.load(table[:, None] + pair[None, :], mask=inside, other=0.0)
        second = tl.load(table[:, None] + HALF + pair[None, :], mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotated(
    sums, states, cos, sin, basis, length, real, DIM: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):
    """Add what the dimensions that turn give: both members of a pair meet their own basis rows."""
    HALF: tl.constexpr = DIM // 2
    columns = tl.arange(0, WIDTH)[None, :]
    for at in tl.range(0, HALF, PAIRS, num_stages=STAGES):
        pair = at + tl.arange(0, PAIRS)
        inside = real[:, None] & (pair < HALF)[None, :]
        if INTERLEAVED:
            # Loaded as they lie and split in registers: a load with a gap would be 2 bytes wide.
            both = 2 * at + tl.arange(0, 2 * PAIRS)
            wanted = real[:, None] & (both < DIM)[None, :]
            loaded = tl.load(states[:, None] + OFFSET + both[None, :], mask=wanted, other=0.0)
            first, second = tl.split(tl.reshape(loaded, [ROWS, PAIRS, 2]))
            upper = OFFSET + 2 * pair
            lower = upper + 1
        else:
            first = tl.load(states[:, None] + OFFSET + pair[None, :], mask=inside, other=0.0)
            second = tl.load(
                states[:, None] + (OFFSET + HALF) + pair[None, :], mask=inside, other=0.0
            )
            upper = OFFSET + pair
            lower = upper + HALF
        cos_first, cos_second = _angles(
            cos, at, pair, real, HALF, DIM, PAIRS, ROWS, INTERLEAVED, FULL
        )
        sin_first, sin_second = _angles(
            sin, at, pair, real, HALF, DIM, PAIRS, ROWS, INTERLEAVED, FULL
        )
        there = (pair < HALF)[:, None]
        above = tl.load(basis + upper[:, None] * length + columns, mask=there, other=0.0)
        below = tl.load(basis + lower[:, None] * length + columns, mask=there, other=0.0)
        left = first.to(tl.float32)
        right = second.to(tl.float32)
        turned = (left * cos_first - right * sin_first).to(above.dtype)
        sums = tl.dot(turned, above, sums, input_precision="ieee")
        turned = (right * cos_second + left * sin_second).to(above.dtype)
        sums = tl.dot(turned, below, sums, input_precision="ieee")
    return sums


@triton.jit
def _plain(
    sums, states, basis, length, real, DEPTH: tl.constexpr, DIM: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):
    """Add what the dimensions that do not turn give: all but ``OFFSET … OFFSET + DIM - 1``."""
    REST: tl.constexpr = DEPTH - DIM
    columns = tl.arange(0, WIDTH)[None, :]
    for at in tl.range(0, REST, BLOCK, num_stages=STAGES):
        place = at + tl.arange(0, BLOCK)
        inside = place < REST
        if OFFSET == 0:
            place += DIM
        elif OFFSET < REST:
            place = tl.where(place < OFFSET, place, place + DIM)
        wanted = real[:, None] & inside[None, :]
        loaded = tl.load(states[:, None] + place[None, :], mask=wanted, other=0.0)
        rows = tl.load(basis + place[:, None] * length + columns, mask=inside[:, None], other=0.0)
        sums = tl.dot(loaded, rows, sums, input_precision="ieee")
    return sums


@triton.jit
def _places(first, skipped, slot, sequence, token, real, pool, capacity, SLOTS: tl.constexpr):
    """Return each row's row of the cache and place in it, and whether it has one."""
    if SLOTS:
        stored = real & (slot >= 0) & (slot < pool * capacity)
        slot = slot.to(tl.int32)
        own = slot // capacity
        place = slot % capacity
    else:
        own = sequence
        place = first - skipped + token
        stored = real & (first >= 0) & (token >= skipped) & (place < capacity)
    return own.to(tl.int64), place, stored


@triton.jit
def _unit(
    query, keys, values, query_bases, key_bases, value_bases, cos, sin, output, buffer, start,
    valid, slots, head, basis_at, length, plane, stride, column, row, real, tokens, pool, capacity,
    distance, query_row, query_token, query_head, key_row, key_token, key_head, value_row,
    value_token, value_head, cos_row, cos_token, sin_row, sin_token, OPERAND: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, DEPTH: tl.constexpr, VALUE_DEPTH: tl.constexpr,
    DIM: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Make and store ``[ROWS, WIDTH]``; see `project_rows`."""
    sequence = row // tokens
    token = row % tokens
    # 64 bits: a long prompt of a wide layer has more than 2^31 values.
    across = sequence.to(tl.int64)
    along = token.to(tl.int64)
    if OPERAND != _QUERY:
        # Loaded before the product, which does not need them, so that nothing waits after it.
        first = sequence
        slot = sequence
        skipped = tl.zeros([ROWS], tl.int32)
        if slots is not None:
            slot = tl.load(slots + row, mask=real, other=-1)
        else:
            first = tl.load(start + sequence, mask=real, other=-1)
            if valid is not None:
                skipped = tl.load(valid + sequence, mask=real, other=0)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    if OPERAND == _QUERY:
        states = query + across * query_row + along * query_token + head * query_head
        basis = query_bases + basis_at
    elif OPERAND == _KEYS:
        states = keys + across * key_row + along * key_token + head * key_head
        basis = key_bases + basis_at
    else:
        states = values + across * value_row + along * value_token + head * value_head
        basis = value_bases + basis_at if VALUE_DEPTH > 0 else states
    # Said here, at the sums themselves: the compiler loses what is said of a function's argument.
    if ALIGNED:
        states = tl.multiple_of(states, 16)
        basis = tl.multiple_of(basis, 16)
    if OPERAND != _VALUES:
        if DIM > 0:
            cos_at = cos + across * cos_row + along * cos_token
            sin_at = sin + across * sin_row + along * sin_token
            if ALIGNED:
                cos_at = tl.multiple_of(cos_at, 16)
                sin_at = tl.multiple_of(sin_at, 16)
            sums = _rotated(
                sums, states, cos_at, sin_at, basis, length, real, DIM, OFFSET, INTERLEAVED, FULL,
                PAIRS, ROWS, WIDTH, STAGES,
            )
        if DIM < DEPTH:
            sums = _plain(
                sums, states, basis, length, real, DEPTH, DIM, OFFSET, BLOCK, WIDTH, STAGES
            )
    elif VALUE_DEPTH > 0:
        sums = _plain(
            sums, states, basis, length, real, VALUE_DEPTH, 0, 0, VALUE_BLOCK, WIDTH, STAGES
        )
    else:
        latents = states[:, None] + tl.arange(0, WIDTH)[None, :]
        sums = tl.load(latents, mask=real[:, None], other=0.0)
    if OPERAND == _QUERY:
        target = output + row.to(tl.int64) * stride + column
        stored = real
    else:
        own, place, stored = _places(
            first, skipped, slot, sequence, token, real, pool, capacity, slots is not None
        )
        target = buffer + own * distance + plane * capacity + place * stride + column
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    target = target[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(target, sums.to(target.dtype.element_ty), mask=stored[:, None])


@triton.jit(do_not_specialize=["count", "rows", "tokens", "pool"])
def project_rows(
    query, keys, values, query_bases, key_bases, value_bases, cos, sin, output, buffer, units,
    start, valid, slots, count, rows, tokens, pool, capacity, distance, query_row, query_token,
    query_head, key_row, key_token, key_head, value_row, value_token, value_head, cos_row,
    cos_token, sin_row, sin_token, CASES: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr,
    DEPTH: tl.constexpr, VALUE_DEPTH: tl.constexpr, DIM: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Make one unit's columns of one block of rows.

    Parameters
    ----------
    query, keys, values
        States, each with its strides (row of the batch, token, head); None where there are none.
    query_bases, key_bases, value_bases
        `BasisSet.packed`.
    cos, sin
        Tables, with their strides; None where DIM is 0.
    output
        Dense rows of projected queries.
    buffer
        The layer's cache.
    units
        ``[count]`` rows of `kvprof.kernels.project.args.Unit`, int64.
    start, valid, slots
        See `step.project_keys`.
    pool, capacity, distance
        Rows of the cache, tokens of each, and values from one to the next.
    rows, tokens
        Tokens of the whole pass, and of one sequence.
    CASES
        A row of `kvprof.kernels.project.args.Case` each.
    ALIGNED
        Whether every tensor begins at, and every stride is, a multiple of 16 bytes.
    DEPTH, VALUE_DEPTH
        Widths of a head before projection; VALUE_DEPTH 0: values are latents already.
    DIM, OFFSET
        Dimensions that turn, and where they begin.
    FULL
        Whether a table has an entry per dimension, and not per pair.
    PAIRS, BLOCK, VALUE_BLOCK
        Pairs, and other dimensions, of one step of a product.
    DEPENDENT
        Whether the launch did not wait for what comes before, nor the next one for this
        (`kvprof.kernels.dispatch.early_launch`).
    """
    wait_for_earlier(DEPENDENT)
    program = tl.program_id(0)
    unit = units + (program % count) * _UNIT
    # All at once, before the branch: at decode every wait shows.
    case = tl.load(unit + _CASE)
    head = tl.load(unit + _HEAD)
    basis_at = tl.load(unit + _BASIS)
    # A multiple of 16 by construction: said, so that a basis is loaded as widely as it can be.
    length = tl.multiple_of(tl.load(unit + _LENGTH), 16)
    plane = tl.load(unit + _PLANE)
    stride = tl.load(unit + _STRIDE)
    column = tl.load(unit + _COLUMN)
    row = (program // count) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    for number in tl.static_range(COUNT):
        if case == number:
            _unit(
                query, keys, values, query_bases, key_bases, value_bases, cos, sin, output, buffer,
                start, valid, slots, head, basis_at, length, plane, stride, column, row, real,
                tokens, pool, capacity, distance, query_row, query_token, query_head, key_row,
                key_token, key_head, value_row, value_token, value_head, cos_row, cos_token,
                sin_row, sin_token, CASES[number * _CASE_SIZE + _OPERAND],
                CASES[number * _CASE_SIZE + _WIDTH], ALIGNED, DEPTH, VALUE_DEPTH, DIM, OFFSET,
                INTERLEAVED, FULL, ROWS, PAIRS, BLOCK, VALUE_BLOCK, STAGES,
            )
