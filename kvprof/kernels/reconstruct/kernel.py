"""Split-context decode that rebuilds keys from latents before RoPE (Palu §3.1.2, appendix B).

A tile of latents is loaded once for all KV heads that share it. Rebuilding costs ``r·n·d``
multiplications per token and group against ``r_k + r_v`` columns read, so this is bound by
arithmetic from about two heads per group on, and everything here is about tensor cores:

- Tokens are the rows of every large product: ``z [tokens, r] @ up_jᵀ [r, columns]``. What comes out
  lies in registers just as the next product takes it in, ``K_j [tokens, columns] @ q_jᵀ``.
- RoPE pairs a head's two halves. They are two products, ``k1`` and ``k2``, so a pair meets in one
  thread without a shuffle; ``k1 cos - k2 sin`` is consumed before ``k2 cos + k1 sin`` is made. Four
  score products of unrotated keys would keep four tiles of scores and need cos and sin per query.
  Columns go by blocks, so no more than one block of both halves is ever held. Interleaved pairs are
  the same kernel: the rows of ``up`` are sorted beforehand and queries are read with a stride of 2.
- The scores of all heads of a group share one tile ``[tokens, rows]``: head j's queries meet K_j
  with the other heads' rows zero. So there is one softmax and one product with the shared value
  latents for the group, and the loop over heads carries nothing but the scores.

Small ``up`` matrices are kept by the program and tiles of latents are pipelined; large ones come
from L2 block by block, pipelined over the heads, and the next tile's latents are called into L2.
"""

import triton
import triton.language as tl

from kvprof.kernels.planes import MOST_CHUNKS
from kvprof.kernels.reconstruct.rebuild_config import (
    Group,
    Item,
    RebuiltColumn,
    RebuiltHead,
    SeenPage,
)
from kvprof.kernels.tables import Kind, column, columns

__all__ = ["load_rows", "rebuild_pages", "rebuilt_scores", "reconstruct_pieces", "stored_scores"]

# --- Scores of one tile of latents: rebuild, RoPE and dot (Palu appendix B), or the dot alone.


# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler, and it
# unpacks no tuples.
# ruff: noqa: RUF005


_CHUNKS = tl.constexpr(MOST_CHUNKS)
_KIND = tl.constexpr(len(columns(Kind)))
# Chunks of a side are counted from BASE, its first column: those of V like those of K.
_K0 = tl.constexpr(column(Kind, "k0"))
_K1 = tl.constexpr(column(Kind, "k1"))
_K2 = tl.constexpr(column(Kind, "k2"))
_K3 = tl.constexpr(column(Kind, "k3"))
_V0 = tl.constexpr(column(Kind, "v0"))
_HEIGHT = tl.constexpr(column(Kind, "height"))
_GROUP = tl.constexpr(len(Group._fields))
_QUERIES = tl.constexpr(column(Group, "queries"))
_KEYS = tl.constexpr(column(Group, "keys"))
_VALUES = tl.constexpr(column(Group, "values"))
_UP = tl.constexpr(column(Group, "up"))
_GROUP_KIND = tl.constexpr(column(Group, "kind"))
_HEADS = tl.constexpr(column(Group, "heads"))
_ITEM = tl.constexpr(len(Item._fields))
_ITEM_ROW = tl.constexpr(column(Item, "row"))
_ITEM_GROUP = tl.constexpr(column(Item, "group"))
_ITEM_START = tl.constexpr(column(Item, "start"))
_ITEM_STOP = tl.constexpr(column(Item, "stop"))
_SEEN = tl.constexpr(len(SeenPage._fields))
_SEEN_PAGE = tl.constexpr(column(SeenPage, "page"))
_SEEN_BEGIN = tl.constexpr(column(SeenPage, "begin"))
_HEAD = tl.constexpr(len(RebuiltHead._fields))
_HEAD_KEYS = tl.constexpr(column(RebuiltHead, "keys"))
_HEAD_VALUES = tl.constexpr(column(RebuiltHead, "values"))
_HEAD_UP = tl.constexpr(column(RebuiltHead, "value_up"))
_COLUMN = tl.constexpr(len(RebuiltColumn._fields))
_COLUMN_START = tl.constexpr(column(RebuiltColumn, "start"))
_COLUMN_WIDTH = tl.constexpr(column(RebuiltColumn, "width"))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(at, far, rows, mask, WIDTH: tl.constexpr, SPREAD: tl.constexpr):
    """Load dense rows of a plane, zeros where they do not count; with SPREAD each is `far`."""
    offsets = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if SPREAD:
        at += far[:, None]
    return tl.load(at + offsets, mask=mask[:, None], other=0.0)


@triton.jit
def _block(up, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load dense rows of `up`."""
    return tl.load(up + tl.arange(0, COLUMNS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def _product(latents, up, COLUMNS: tl.constexpr, KINDS: tl.constexpr, BASE: tl.constexpr):
    """Return ``z @ upᵀ`` for one block of rows of `up`, ``[tokens, COLUMNS]`` float32."""
    states = tl.dot(latents[0], tl.trans(_block(up, COLUMNS, KINDS[BASE])), input_precision="ieee")
    at = up + COLUMNS * KINDS[BASE]
    for i in tl.static_range(1, _CHUNKS):
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
    scores, latents, cos, sin, query, rows, head, up, pairs, COLUMNS: tl.constexpr,
    KINDS: tl.constexpr, BASE: tl.constexpr, RANK: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):
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
    scores, latents, query, rows, head, up, columns, COLUMNS: tl.constexpr, KINDS: tl.constexpr,
    BASE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):
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
):
    """Return ``RoPE(z @ up_jᵀ) @ q_jᵀ`` of all heads of a group, ``[tokens, ROWS]`` float32."""
    RANK: tl.constexpr = KINDS[BASE] + KINDS[BASE + _K1] + KINDS[BASE + _K2] + KINDS[BASE + _K3]
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
                    scores, latents, turn, lift, query, rows, head, weights + head * PADDED * RANK,
                    pairs, BLOCKS[block], KINDS, BASE, RANK, GROUP, HEAD_DIM, HALF, INTERLEAVED,
                )
        else:
            for head in tl.range(0, heads, num_stages=STAGES):
                scores = _rotated(
                    scores, latents, turn, lift, query, rows, head, weights + head * PADDED * RANK,
                    pairs, BLOCKS[block], KINDS, BASE, RANK, GROUP, HEAD_DIM, HALF, INTERLEAVED,
                )
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
                )
        else:
            for head in tl.range(0, heads, num_stages=STAGES):
                scores = _plain(
                    scores, latents, query, rows, head, weights + head * PADDED * RANK, columns,
                    BLOCKS[block], KINDS, BASE, GROUP, HEAD_DIM,
                )
        plain += BLOCKS[block]
        weights += BLOCKS[block] * RANK
    return scores


@triton.jit
def stored_scores(
    latents,
    query,
    rows,
    real,
    KINDS: tl.constexpr,
    BASE: tl.constexpr,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return ``z @ qᵀ`` for queries of the latent's own width, ``[tokens, ROWS]`` float32."""
    RANK: tl.constexpr = KINDS[BASE] + KINDS[BASE + _K1] + KINDS[BASE + _K2] + KINDS[BASE + _K3]
    scores = tl.zeros([HEIGHT, ROWS], tl.float32)
    done = 0
    for i in tl.static_range(_CHUNKS):
        if KINDS[BASE + i] > 0:
            columns = done + tl.arange(0, KINDS[BASE + i])
            at = query + rows[:, None] * RANK + columns[None, :]
            scores = _score(scores, latents[i], at, real[:, None])
            done += KINDS[BASE + i]
    return scores


@triton.jit
def _places(
    keys, values, pages, at, tokens, mask, stride, PAGE: tl.constexpr, SPREAD: tl.constexpr
):
    """Return plane offsets of a tile's page, those of its tokens, and rows in the page."""
    far = tokens
    if SPREAD:
        page = tl.load(pages + tokens // PAGE, mask=mask, other=0)
        far = tl.multiple_of(page.to(tl.int64) * stride, 16)
        tokens = tokens % PAGE
    elif PAGE > 0:
        page = tl.load(pages + at // PAGE).to(tl.int64) * stride
        keys = tl.multiple_of(keys + page, 16)
        values = tl.multiple_of(values + page, 16)
        tokens -= at // PAGE * PAGE
    return keys, values, far, tokens


@triton.jit
def _planes(
    cache, plane, far, places, mask, KINDS: tl.constexpr, BASE: tl.constexpr, SPREAD: tl.constexpr
):
    """Load a tile of every chunk of a latent."""
    found = ()
    start = cache
    for i in tl.static_range(_CHUNKS):
        if KINDS[BASE + i] > 0:
            found = found + (load_rows(start, far, places, mask, KINDS[BASE + i], SPREAD),)
            # Said to the compiler, so that loads are as wide as they can be.
            start = tl.multiple_of(start + plane * KINDS[BASE + i], 16)
    return found


@triton.jit
def _call(at, far, tokens, WIDTH: tl.constexpr, SPREAD: tl.constexpr):
    """Call rows of a plane into L2, one request for every line of 128 bytes."""
    BYTES: tl.constexpr = at.dtype.element_ty.primitive_bitwidth // 8
    LINE: tl.constexpr = 128 // BYTES
    LINES: tl.constexpr = (WIDTH + LINE - 1) // LINE
    lines = at + tokens[:, None] * WIDTH + tl.arange(0, LINES)[None, :] * LINE
    if SPREAD:
        lines += far[:, None]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _call_planes(
    cache, plane, far, places, KINDS: tl.constexpr, BASE: tl.constexpr, SPREAD: tl.constexpr
):
    """Call a tile of every chunk of a latent into L2."""
    start = cache
    for i in tl.static_range(_CHUNKS):
        if KINDS[BASE + i] > 0:
            _call(start, far, places, KINDS[BASE + i], SPREAD)
            start += plane * KINDS[BASE + i]


@triton.jit
def _zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    # A function of its own: a number out of KINDS is a compile-time one only as an argument.
    return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def _piece(
    queries, keys, values, up, cos, sin, partial, logs, item, row, query_at, pages, stride, up_at,
    heads, start, stop, capacity, angle_batch, angle_rows, angle_columns, scale, cap,
    KINDS: tl.constexpr, BASE: tl.constexpr, BLOCKS: tl.constexpr, PAIRED: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, REBUILD: tl.constexpr, CAPPED: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, WIDEST: tl.constexpr,
    AHEAD: tl.constexpr, KEPT: tl.constexpr, HEIGHT: tl.constexpr, PAGE: tl.constexpr,
):
    """Attend to the tokens of one piece and leave its part of the result."""
    QUERIES: tl.constexpr = HEADS * GROUP
    rows = tl.arange(0, ROWS)
    real = rows < QUERIES
    SPREAD: tl.constexpr = PAGE > 0 and PAGE % HEIGHT != 0
    plane = tl.full([], capacity, tl.int64)
    query = tl.multiple_of(queries + query_at, 16)
    matrices = tl.multiple_of(up + up_at, 16)
    acc = ()
    for i in tl.static_range(_CHUNKS):
        if KINDS[BASE + _V0 + i] > 0:
            acc = acc + (_zeros(ROWS, KINDS[BASE + _V0 + i]),)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for at in tl.range(start, stop, HEIGHT, num_stages=STAGES if KEPT else 1):
        tokens = at + tl.arange(0, HEIGHT)
        mask = tokens < stop
        if AHEAD:
            # Behind the last tile all of it is the last token, which is no further than a page.
            soon = tl.minimum(tokens + HEIGHT, stop - 1)
            next_keys, next_values, far, soon = _places(
                keys, values, pages, tl.minimum(at + HEIGHT, stop - 1), soon, mask, stride, PAGE,
                SPREAD,
            )
            _call_planes(next_keys, plane, far, soon, KINDS, BASE, SPREAD)
            _call_planes(next_values, plane, far, soon, KINDS, BASE + _V0, SPREAD)
        own_keys, own_values, far, places = _places(
            keys, values, pages, at, tokens, mask, stride, PAGE, SPREAD
        )
        latents = _planes(own_keys, plane, far, places, mask, KINDS, BASE, SPREAD)
        if REBUILD:
            scores = rebuilt_scores(
                latents,
                cos + row.to(tl.int64) * angle_batch,
                sin + row.to(tl.int64) * angle_batch,
                tokens,
                mask,
                angle_rows,
                angle_columns,
                query,
                matrices,
                rows,
                heads,
                KINDS,
                BASE,
                BLOCKS,
                PAIRED,
                COUNT,
                HEADS,
                GROUP,
                HEAD_DIM,
                HALF,
                INTERLEAVED,
                KEPT,
                STAGES,
                HEIGHT,
                ROWS,
                PADDED,
            )
        else:
            scores = stored_scores(latents, query, rows, real, KINDS, BASE, HEIGHT, ROWS)
        scores = scores * scale
        if CAPPED:
            # cap * tanh(scores / cap), by exp2, in base-2 units like the scores.
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * _LOG2E / cap)))
        scores = tl.where(mask[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[None, :])
        total = total * fade + tl.sum(weights, 0)
        top = higher
        weights = tl.trans(weights.to(keys.dtype.element_ty))
        found = _planes(own_values, plane, far, places, mask, KINDS, BASE + _V0, SPREAD)
        new = ()
        for i in tl.static_range(_CHUNKS):
            if KINDS[BASE + _V0 + i] > 0:
                faded = acc[i] * fade[:, None]
                new = new + (tl.dot(weights, found[i], faded, input_precision="ieee"),)
        acc = new
    result = partial + (item.to(tl.int64) * QUERIES + rows[:, None]) * WIDEST
    share = 1.0 / total[:, None]
    done = 0
    for i in tl.static_range(_CHUNKS):
        if KINDS[BASE + _V0 + i] > 0:
            columns = done + tl.arange(0, KINDS[BASE + _V0 + i])
            tl.store(result + columns[None, :], acc[i] * share, mask=real[:, None])
            done += KINDS[BASE + _V0 + i]
    tl.store(logs + item * QUERIES + rows, top + tl.log2(total), mask=real)


@triton.jit
def reconstruct_pieces(
    queries, cache, up, cos, sin, partial, logs, items, groups, table, table_row, capacity, stride,
    angle_batch, angle_rows, angle_columns, scale, cap, KINDS: tl.constexpr,
    KIND_COUNT: tl.constexpr, BLOCKS: tl.constexpr, PAIRED: tl.constexpr, COUNT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, REBUILD: tl.constexpr, CAPPED: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, PADDED: tl.constexpr, WIDEST: tl.constexpr, QUERY_ROW: tl.constexpr,
    AHEAD: tl.constexpr, KEPT: tl.constexpr, PAGE: tl.constexpr,
):
    """Run one piece per program.

    Parameters
    ----------
    queries, cache
        ``[rows, QUERY_ROW]``, and the layer's cache (`kvprof.kernels.planes`).
    up
        From `rebuild_config.arranged`.
    cos, sin
        Tables; `angle_batch`, `angle_rows`, `angle_columns` are their strides (0: shared by rows).
    partial, logs
        ``[items, HEADS * GROUP, WIDEST]`` and ``[items, HEADS * GROUP]`` float32: results and log2
        of the sums.
    items
        Rows of `rebuild_config.Item`, int32. An empty one leaves nothing.
    groups
        Rows of `rebuild_config.Group`, int64.
    table
        ``[rows, table_row]`` int32 pages, read when PAGE (tokens of a page) is not 0.
    capacity, stride
        Tokens of a plane, and values from one row of the cache to the next.
    scale, cap
        The model's scaling and soft-cap times log2(e).
    KINDS
        A row of `kvprof.kernels.tables.Kind` per kind of group.
    AHEAD, KEPT, STAGES
        See `Tuning`.
    BLOCKS
        Columns of a head that are rebuilt at once: PAIRED blocks of each half, then those that
        RoPE leaves alone; COUNT in all, PADDED rows of `up` per head.
    """
    item = tl.program_id(0)
    row = tl.load(items + item * _ITEM + _ITEM_ROW)
    group = tl.load(items + item * _ITEM + _ITEM_GROUP)
    start = tl.load(items + item * _ITEM + _ITEM_START)
    stop = tl.load(items + item * _ITEM + _ITEM_STOP)
    if start < stop:
        own = groups + group * _GROUP
        query_at = tl.load(own + _QUERIES) + row.to(tl.int64) * QUERY_ROW
        pages = table
        far = row.to(tl.int64) * stride
        if PAGE > 0:
            pages = table + row.to(tl.int64) * table_row
            far = row.to(tl.int64) * 0
        keys = tl.multiple_of(cache + (tl.load(own + _KEYS) + far), 16)
        values = tl.multiple_of(cache + (tl.load(own + _VALUES) + far), 16)
        up_at = tl.load(own + _UP)
        kind = tl.load(own + _GROUP_KIND)
        # Loaded, though HEADS is known: a loop over a single head would be dissolved, and its
        # blocks of `up` kept where there is no room for them.
        heads = tl.load(own + _HEADS).to(tl.int32)
        for number in tl.static_range(KIND_COUNT):
            if kind == number:
                _piece(
                    queries, keys, values, up, cos, sin, partial, logs, item, row, query_at, pages,
                    stride, up_at, heads, start, stop, capacity, angle_batch, angle_rows,
                    angle_columns, scale, cap, KINDS, number * _KIND + _K0, BLOCKS, PAIRED, COUNT,
                    HEADS, GROUP, HEAD_DIM, HALF, INTERLEAVED, REBUILD, CAPPED, STAGES, ROWS,
                    PADDED, WIDEST, AHEAD, KEPT, KINDS[number * _KIND + _HEIGHT], PAGE,
                )


# --- Whole pages, rebuilt once for queries that see them many times.


@triton.jit
def _put(planes, states, places, numbers, there, columns, PAGE: tl.constexpr):
    """Store columns of a head into its planes."""
    start = tl.load(columns + numbers * _COLUMN + _COLUMN_START, mask=there, other=0)
    width = tl.load(columns + numbers * _COLUMN + _COLUMN_WIDTH, mask=there, other=0)
    base = start * PAGE + numbers - start
    at = base[None, :] + places[:, None] * width[None, :]
    tl.store(planes + at, states.to(planes.dtype.element_ty), mask=there[None, :])


@triton.jit
def _raise(
    latents, up, planes, columns, places, KINDS: tl.constexpr, BASE: tl.constexpr,
    BLOCKS: tl.constexpr, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
):
    """Rebuild a head's values of a tile."""
    RANK: tl.constexpr = KINDS[BASE] + KINDS[BASE + _K1] + KINDS[BASE + _K2] + KINDS[BASE + _K3]
    done = 0
    for block in tl.static_range(COUNT):
        numbers = done + tl.arange(0, BLOCKS[block])
        states = _product(latents, up, BLOCKS[block], KINDS, BASE)
        _put(planes, states, places, numbers, numbers < HEAD_DIM, columns, PAGE)
        up += BLOCKS[block] * RANK
        done += BLOCKS[block]


@triton.jit
def _rebuilt_tile(
    keys, values, up, value_up, cos, sin, key_planes, value_planes, columns, places, positions,
    head, angle_rows, angle_columns, KINDS: tl.constexpr, BASE: tl.constexpr,
    BLOCKS: tl.constexpr, PAIRED: tl.constexpr, COUNT: tl.constexpr, VALUE_BLOCKS: tl.constexpr,
    VALUE_COUNT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
):
    """Rebuild and rotate a head's keys of a tile, and its values, or copy its group's."""
    RANK: tl.constexpr = KINDS[BASE] + KINDS[BASE + _K1] + KINDS[BASE + _K2] + KINDS[BASE + _K3]
    mask = places >= 0
    latents = _planes(keys, PAGE, places, places, mask, KINDS, BASE, False)
    weights = up + head * PADDED * RANK
    done = 0
    for block in tl.static_range(PAIRED):
        pairs = done + tl.arange(0, BLOCKS[block])
        there = pairs < HALF
        at = positions[:, None] * angle_rows + pairs[None, :] * angle_columns
        turn = tl.load(cos + at, mask=there[None, :], other=0.0).to(tl.float32)
        lift = tl.load(sin + at, mask=there[None, :], other=0.0).to(tl.float32)
        first = _product(latents, weights, BLOCKS[block], KINDS, BASE)
        second = _product(latents, weights + BLOCKS[block] * RANK, BLOCKS[block], KINDS, BASE)
        one = 2 * pairs if INTERLEAVED else pairs
        other = one + 1 if INTERLEAVED else pairs + HALF
        _put(key_planes, first * turn - second * lift, places, one, there, columns, PAGE)
        _put(key_planes, second * turn + first * lift, places, other, there, columns, PAGE)
        weights += 2 * BLOCKS[block] * RANK
        done += BLOCKS[block]
    plain = 2 * HALF
    for block in tl.static_range(PAIRED, COUNT):
        numbers = plain + tl.arange(0, BLOCKS[block])
        states = _product(latents, weights, BLOCKS[block], KINDS, BASE)
        _put(key_planes, states, places, numbers, numbers < HEAD_DIM, columns, PAGE)
        weights += BLOCKS[block] * RANK
        plain += BLOCKS[block]
    stored = _planes(values, PAGE, places, places, mask, KINDS, BASE + _V0, False)
    if VALUE_COUNT > 0:
        _raise(
            stored, value_up, value_planes, columns, places, KINDS, BASE + _V0, VALUE_BLOCKS,
            VALUE_COUNT, HEAD_DIM, PAGE,
        )
    else:
        for i in tl.static_range(_CHUNKS):
            if KINDS[BASE + _V0 + i] > 0:
                _copy(value_planes, stored[i], places, KINDS[BASE + _V0 + i])
                value_planes += PAGE * KINDS[BASE + _V0 + i]


@triton.jit
def _copy(planes, rows, places, WIDTH: tl.constexpr):
    tl.store(planes + places[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], rows)


@triton.jit
def rebuild_pages(
    cache, up, value_up, cos, sin, planes, seen, groups, heads, columns, stride, row, positions,
    angle_rows, angle_columns, KINDS: tl.constexpr, KIND_COUNT: tl.constexpr,
    BLOCKS: tl.constexpr, PAIRED: tl.constexpr, COUNT: tl.constexpr, VALUE_BLOCKS: tl.constexpr,
    VALUE_COUNT: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):
    """Run a tile of a page and one KV head per program.

    Parameters
    ----------
    cache, up, cos, sin, groups
        As `reconstruct_pieces` takes them; cos and sin are shared by all sequences.
    value_up
        What rebuilds values; not read where they are copied.
    planes
        Pages of whole keys and of values; written.
    seen
        Rows of `rebuild_config.SeenPage`, int32, one for every page of `planes`;
        one that is none is left as it is.
    heads
        Rows of `rebuild_config.RebuiltHead`, int64.
    columns
        ``[HEAD_DIM]`` rows of `rebuild_config.RebuiltColumn`, int32, of keys and
        of rebuilt values.
    stride, row
        Values from page to page of the cache, and of `planes`.
    positions
        That `cos` and `sin` have; behind them there are no tokens, and the last one's are taken.
    angle_rows, angle_columns
        Strides of `cos` and `sin`.
    KINDS, KIND_COUNT, BLOCKS, PAIRED, COUNT, HEADS, HEAD_DIM, HALF, INTERLEAVED, PADDED
        As `reconstruct_pieces` takes them.
    VALUE_BLOCKS, VALUE_COUNT
        Columns of the blocks in which a head's values are rebuilt; none where they are copied.
    PAGE, TILE
        Tokens of a page, and of a tile: a power of two that divides it.
    """
    TILES: tl.constexpr = PAGE // TILE
    number = tl.program_id(0) // TILES
    page = tl.load(seen + number * _SEEN + _SEEN_PAGE)
    if page >= 0:
        places = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
        begin = tl.load(seen + number * _SEEN + _SEEN_BEGIN)
        far = page.to(tl.int64) * stride
        own = groups + tl.program_id(1) // HEADS * _GROUP
        keys = tl.multiple_of(cache + (tl.load(own + _KEYS) + far), 16)
        values = tl.multiple_of(cache + (tl.load(own + _VALUES) + far), 16)
        matrices = tl.multiple_of(up + tl.load(own + _UP), 16)
        head = heads + tl.program_id(1) * _HEAD
        raised = tl.multiple_of(value_up + tl.load(head + _HEAD_UP), 16)
        found = planes + number.to(tl.int64) * row
        kind = tl.load(own + _GROUP_KIND)
        for each in tl.static_range(KIND_COUNT):
            if kind == each:
                _rebuilt_tile(
                    keys, values, matrices, raised, cos, sin, found + tl.load(head + _HEAD_KEYS),
                    found + tl.load(head + _HEAD_VALUES), columns, places,
                    tl.minimum(begin + places, positions - 1), tl.program_id(1) % HEADS,
                    angle_rows, angle_columns, KINDS, each * _KIND + _K0, BLOCKS, PAIRED, COUNT,
                    VALUE_BLOCKS, VALUE_COUNT, HEAD_DIM, HALF, INTERLEAVED, PADDED, PAGE,
                )
