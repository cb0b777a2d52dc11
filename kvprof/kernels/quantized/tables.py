"""The tables that the kernels over segments read (`kvprof.kernels.tables`)."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "EYE_HALVES",
    "EYE_ONE",
    "EYE_THREE",
    "MOST_SHARES",
    "Counter",
    "Item",
    "Kind",
    "MovedColumn",
    "PlaneColumns",
    "Stretch",
    "Unit",
    "eye",
]

#: Of the bytes of `eye`: which is 1, and where those of 16 columns of 3 bits begin, and of halves.
EYE_ONE, EYE_THREE, EYE_HALVES = 128, 256, 288
#: Shares of the work that are looked at together; further multiprocessors have none of their own.
MOST_SHARES = 256


def eye(device: torch.device) -> Tensor:
    """Return constants that kernels read, so that they are laid out as what is read beside them.

    Bytes: 1 at `EYE_ONE`, from which on rows of the identity are read, and the bits that the first
    token of a place has in a byte, by columns of 3 bits: from `EYE_THREE` on of the lower two for
    16 columns, of the highest for the first eight and for the others, and from `EYE_HALVES` on of
    the highest for a plane's first half and for its second.
    """
    found = torch.zeros(EYE_HALVES + 2, dtype=torch.uint8)
    found[EYE_ONE] = 1
    found[EYE_THREE:EYE_HALVES] = torch.tensor([3, 3, 1, 2]).repeat_interleave(8)
    found[EYE_HALVES:] = torch.tensor([1, 2])
    return found.to(device)


class Unit(NamedTuple):
    """A head of a segment; the first columns are `kvprof.kernels.tables.Output`."""

    outputs: int
    output_width: int
    queries: int  # where its queries begin in a row of them, and how wide one is
    query_width: int
    begin: int  # byte of a row at which the head begins
    capacity: int  # tokens that a sequence has room for
    cost: int  # of a token
    height: int  # tokens of a tile
    kind: int


class Item(NamedTuple):
    """A piece of work: tokens ``start … stop - 1`` of one head of one row in one segment."""

    row: int
    head: int
    segment: int  # -1 where there is no item
    start: int
    stop: int


class Counter(NamedTuple):
    """What stands before the numbers of what was taken from each share."""

    shared: int  # 1 where multiprocessors have shares of the work; set when the work is cut


class Kind(NamedTuple):
    """A head configuration, before its planes: both sides, then what they share."""

    key_format: int  # `kvprof.kernels.quantized.codes.NumberFormat.read_as`
    key_factor: float  # what codes lack of the numbers that they stand for
    key_boost: float  # by which queries are multiplied before they meet the codes of K
    key_parts: int  # bytes of a place that lie apart
    key_groups: int  # scales of a token
    key_planes: int
    #: Where they begin in a block, as the layout's kernel counts: rows in float16, columns with
    #: bits of their own in bytes; 0 where the format keeps none.
    key_scales: int
    key_middles: int
    key_block: int  # from block to block: bytes, or values at full precision
    value_format: int
    value_factor: float
    shift: float  # weights go up to 2 to the power of it
    value_parts: int
    value_groups: int
    value_planes: int
    value_scales: int
    value_middles: int
    value_block: int
    value_width: int
    block_halfs: int  # from block to block, in float16
    slots: int  # tokens of a place, and places of a tile
    places: int
    stages: int  # tiles on their way at once
    rows: int  # of the product with middles of V
    int8: int  # 1 where codes are multiplied as int8


class PlaneColumns(NamedTuple):
    """A plane of a side."""

    start: int  # columns
    width: int
    depth: int  # its width in a product
    #: Of scales; where columns have bits of their own, of those whose products share a sum.
    group: int
    first: int  # 1 where it is the first, or the last, of its group
    last: int
    at: int  # where it begins in a block: bytes, or values at full precision
    #: Of its codes where columns have bits of their own, else 0. Of K 3 bits are two planes, but
    #: for 16 columns: of 2, and of 1 for the highest.
    bits: int = 0
    step: float = 1.0  # of codes of V


class Stretch(NamedTuple):
    """Columns of a token that a program moves: those of one scale, or as many as it takes."""

    side: int  # 0 for K, 1 for V
    first: int  # rows of the table of `MovedColumn`
    columns: int
    #: Where a block's begin, from block to block, and from scales to what is kept next, as the
    #: layout counts; 0 where there is no scale.
    scale_first: int
    scale_block: int
    to_next: int
    tops: int = 0  # rows of that table behind those of the columns: the highest of 3 bits
    scale_head: int = 0  # for each block of a head, of all heads before


class MovedColumn(NamedTuple):
    """Where a column comes from and goes to, whatever room there is."""

    #: At full precision, in values behind the segment's first: `first + head·b + block·n + place·t`
    #: in a row, for heads of b blocks, block n and its token t; of planes b is the tokens of a row.
    source_first: int
    source_head: int
    source_block: int
    source_place: int
    #: Where it goes: `first + head·b + block·n + part·p + place·q` behind the segment's first, for
    #: heads of b blocks, block n, part p and place q.
    first: int
    block: int
    part: int
    place: int
    behind: int  # 1 where the lowest level has lost it
    #: Of a piece of a column's code, if codes lie in pieces (`kvprof.kernels.quantized.columns`).
    bits: int = 0
    below: int = 0
    shift: int = 0
    apart: int = 0
    code: int = 0  # all bits of its code
    #: Rows from its own to another: of a highest bit to that of the one with which it shares a
    #: byte, of the bits below one to it; 0 where there is none.
    mate: int = 0
    head: int = 0  # for each block of a head, of all heads before
