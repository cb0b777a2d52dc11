"""RMS norm, rotary embedding and gated SiLU of single tokens: a program per row or head."""

import triton
import triton.language as tl

__all__ = ["gate_rows", "normalise_rows", "rotate_heads"]

# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.


@triton.jit
def normalise_rows(
    states, weight, output, row_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Divide a row by the root of its mean square, round, and multiply by the weight.

    Parameters
    ----------
    states, output
        Rows of WIDTH, `row_stride` apart; the output's lie side by side.
    weight
        ``[WIDTH]``.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    given = tl.load(states + row * row_stride + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(given * given, 0) / WIDTH + eps)
    own = tl.load(weight + column, mask=there, other=0.0)
    rounded = (given * scale).to(states.dtype.element_ty)
    found = own.to(tl.float32) * rounded.to(tl.float32)
    tl.store(output + row * WIDTH + column, found.to(output.dtype.element_ty), mask=there)


@triton.jit
def _turned(source, target, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    there = column < HALF
    kind = source.dtype.element_ty
    low = tl.load(source + column, mask=there, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + column, mask=there, other=0.0).to(tl.float32)
    first = (low * tl.load(cos + column, mask=there, other=0.0).to(tl.float32)).to(kind)
    second = (high * tl.load(cos + HALF + column, mask=there, other=0.0).to(tl.float32)).to(kind)
    below = (-high * tl.load(sin + column, mask=there, other=0.0).to(tl.float32)).to(kind)
    above = (low * tl.load(sin + HALF + column, mask=there, other=0.0).to(tl.float32)).to(kind)
    one = first.to(tl.float32) + below.to(tl.float32)
    other = second.to(tl.float32) + above.to(tl.float32)
    tl.store(target + column, one.to(kind), mask=there)
    tl.store(target + HALF + column, other.to(kind), mask=there)


@triton.jit
def rotate_heads(
    query, keys, query_out, keys_out, cos, sin, query_row, query_head, key_row, key_head,
    query_out_row, query_out_head, key_out_row, key_out_head, cos_row, sin_row,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):
    """Turn one head of one row's queries or keys; halves of a head are pairs.

    Parameters
    ----------
    query, keys, query_out, keys_out
        One token of every row; the strides of rows and heads, an output's its own: an input may be
        a view of a wider product.
    cos, sin
        ``[2 * HALF]`` for a row.
    """
    row = (tl.program_id(0) // (QUERY_HEADS + KEY_HEADS)).to(tl.int64)
    head = tl.program_id(0) % (QUERY_HEADS + KEY_HEADS)
    cos += row * cos_row
    sin += row * sin_row
    if head < QUERY_HEADS:
        source = query + row * query_row + head * query_head
        target = query_out + row * query_out_row + head * query_out_head
        _turned(source, target, cos, sin, HALF, BLOCK)
    else:
        head -= QUERY_HEADS
        source = keys + row * key_row + head * key_head
        target = keys_out + row * key_out_row + head * key_out_head
        _turned(source, target, cos, sin, HALF, BLOCK)


@triton.jit(do_not_specialize=["count"])
def gate_rows(gate, up, output, count, BLOCK: tl.constexpr):
    """Multiply ``silu(gate)``, rounded, by `up`, `count` values of each side by side."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    given = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    silu = (given / (1.0 + tl.exp(-given))).to(gate.dtype.element_ty)
    found = silu.to(tl.float32) * tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    tl.store(output + at, found.to(output.dtype.element_ty), mask=there)
