# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Scores of one tile of latents: rebuild, RoPE and dot (Palu appendix B), or the dot alone."""

import triton
import triton.language as tl

__all__ = ["load_rows", "rebuilt_scores", "stored_scores"]


@triton.jit
def load_rows(at, rows, mask, WIDTH: tl.constexpr):
    """Load dense rows of a plane, zeros where they do not count."""
    return tl.load(
        at + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=mask[:, None], other=0.0
    )


@triton.jit
def _block(up, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load dense rows of `up`."""
    return tl.load(up + tl.arange(0, COLUMNS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def _product(latents, up, COLUMNS: tl.constexpr, KINDS: tl.constexpr, BASE: tl.constexpr):
    """Return ``z @ upᵀ`` for one block of rows of `up`, ``[tokens, COLUMNS]`` float32."""
    states = tl.dot(latents[0], tl.trans(_block(up, COLUMNS, KINDS[BASE])), input_precision="ieee")
    at = up + COLUMNS * KINDS[BASE]
    for i in tl.static_range(1, 4):
        if KINDS[BASE + i] > 0:
            block = _block(at, COLUMNS, KINDS[BASE + i])
            states = tl.dot(latents[i], tl.trans(block), states, input_precision="ieee")
            at += COLUMNS * KINDS[BASE + i]
    return states


@triton.jit
def _score(scores, keys, query, mask):
    """Add ``keys @ queryᵀ``; the queries of other heads are masked."""
    queries = tl.load(query, mask=mask, other=0.0)
    return tl.dot(keys.to(queries.dtype), tl.trans(queries), scores, input_precision="ieee")


@triton.jit
def _rotated(
    scores, latents, cos, sin, query, rows, head, up, pairs,
    COLUMNS: tl.constexpr, KINDS: tl.constexpr, BASE: tl.constexpr, RANK: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Go on with one head's scores by a block of rotated pairs."""
    first = _product(latents, up, COLUMNS, KINDS, BASE)
    second = _product(latents, up + COLUMNS * RANK, COLUMNS, KINDS, BASE)
    mask = (rows // GROUP == head)[:, None] & (pairs < HALF)[None, :]
    if INTERLEAVED:
        at = query + rows[:, None] * HEAD_DIM + 2 * pairs[None, :]
        other = at + 1
    else:
        at = query + rows[:, None] * HEAD_DIM + pairs[None, :]
        other = at + HALF
    scores = _score(scores, first * cos - second * sin, at, mask)
    return _score(scores, second * cos + first * sin, other, mask)


@triton.jit
def _plain(
    scores, latents, query, rows, head, up, columns,
    COLUMNS: tl.constexpr, KINDS: tl.constexpr, BASE: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Go on with one head's scores by a block of columns that RoPE leaves alone."""
    keys = _product(latents, up, COLUMNS, KINDS, BASE)
    mask = (rows // GROUP == head)[:, None] & (columns < HEAD_DIM)[None, :]
    return _score(scores, keys, query + rows[:, None] * HEAD_DIM + columns[None, :], mask)


@triton.jit
def rebuilt_scores(
    latents, cos, sin, tokens, mask, angle_rows, angle_columns, query, up, rows, heads,
    KINDS: tl.constexpr, BASE: tl.constexpr, BLOCKS: tl.constexpr, PAIRED: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, KEPT: tl.constexpr, STAGES: tl.constexpr,
    HEIGHT: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return ``RoPE(z @ up_jᵀ) @ q_jᵀ`` of all heads of a group, ``[tokens, ROWS]`` float32."""
    RANK: tl.constexpr = KINDS[BASE] + KINDS[BASE + 1] + KINDS[BASE + 2] + KINDS[BASE + 3]
    scores = tl.zeros([HEIGHT, ROWS], tl.float32)
    done = 0
    for block in tl.static_range(PAIRED):
        pairs = done + tl.arange(0, BLOCKS[block])
        at = tokens[:, None] * angle_rows + pairs[None, :] * angle_columns
        there = mask[:, None] & (pairs < HALF)[None, :]
        turn = tl.load(cos + at, mask=there, other=0.0).to(tl.float32)
        lift = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
        weights = up + 2 * done * RANK
        if KEPT:
            for head in tl.static_range(HEADS):
                scores = _rotated(
                    scores, latents, turn, lift, query, rows, head,
                    weights + head * PADDED * RANK, pairs, BLOCKS[block], KINDS, BASE, RANK,
                    GROUP, HEAD_DIM, HALF, INTERLEAVED,
                )  # fmt: skip
        else:
            for head in tl.range(0, heads, num_stages=STAGES):
                scores = _rotated(
                    scores, latents, turn, lift, query, rows, head,
                    weights + head * PADDED * RANK, pairs, BLOCKS[block], KINDS, BASE, RANK,
                    GROUP, HEAD_DIM, HALF, INTERLEAVED,
                )  # fmt: skip
        done += BLOCKS[block]
    weights = up + 2 * done * RANK
    plain = 2 * HALF
    for block in tl.static_range(PAIRED, COUNT):
        columns = plain + tl.arange(0, BLOCKS[block])
        if KEPT:
            for head in tl.static_range(HEADS):
                scores = _plain(
                    scores, latents, query, rows, head, weights + head * PADDED * RANK, columns,
                    BLOCKS[block], KINDS, BASE, GROUP, HEAD_DIM,
                )  # fmt: skip
        else:
            for head in tl.range(0, heads, num_stages=STAGES):
                scores = _plain(
                    scores, latents, query, rows, head, weights + head * PADDED * RANK, columns,
                    BLOCKS[block], KINDS, BASE, GROUP, HEAD_DIM,
                )  # fmt: skip
        plain += BLOCKS[block]
        weights += BLOCKS[block] * RANK
    return scores


@triton.jit
def stored_scores(
    latents, query, rows, real,
    KINDS: tl.constexpr, BASE: tl.constexpr, HEIGHT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return ``z @ qᵀ`` for queries of the latent's own width, ``[tokens, ROWS]`` float32."""
    RANK: tl.constexpr = KINDS[BASE] + KINDS[BASE + 1] + KINDS[BASE + 2] + KINDS[BASE + 3]
    scores = tl.zeros([HEIGHT, ROWS], tl.float32)
    done = 0
    for i in tl.static_range(4):
        if KINDS[BASE + i] > 0:
            columns = done + tl.arange(0, KINDS[BASE + i])
            at = query + rows[:, None] * RANK + columns[None, :]
            scores = _score(scores, latents[i], at, real[:, None])
            done += KINDS[BASE + i]
    return scores
