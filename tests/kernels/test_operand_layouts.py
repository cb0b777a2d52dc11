"""What an operand layout of segments has to say: all of it in one class, and nobody else asks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvprof
from kvprof.errors import UsageError
from kvprof.kernels.quantized import layout_registry
from kvprof.kernels.quantized.append import append
from kvprof.kernels.quantized.codes import NumberFormat
from kvprof.kernels.quantized.cpu import segments_cpu
from kvprof.kernels.quantized.layout import SegmentsLayout, segment_of
from kvprof.kernels.quantized.operand_layout import (
    OperandLayout,
    Plane,
    SideAddresses,
    StoredColumns,
    replace_bits,
)
from kvprof.kernels.quantized.reference import reference_segments

PACKAGE = Path(kvprof.__file__).parent
#: Where a class of sides is given its place: the list, and the kernels that are launched.
PLACES = {"layout_registry.py", "kernel.py", "move.py"}


class SignLayout(OperandLayout):
    """Only a sign and a token's mean size, the last column first: 8 tokens to a byte."""

    forms: ClassVar = {"sign": NumberFormat(-77, 1, ("scale",))}
    words = "signs"

    @classmethod
    def of(cls, values, kind, bits, columns, slots, dtype):
        return cls(values, kind, bits, None, slots, dtype)

    @property
    def planes(self):
        return tuple(Plane(start, 16, 0) for start in range(0, self.width, 16))

    groups = 1

    @property
    def code_bytes(self):
        return 32 * self.width

    scale_bytes = 2 * 32 * 8

    def plane_at(self, plane):
        return 32 * plane.start

    def store(self, blocks, states):
        byte = states.flip(-1).unflatten(1, (-1, 32, 8)) > 0
        weight = 2 ** torch.arange(8, dtype=torch.uint8)[:, None]
        blocks[..., : self.code_bytes] = (byte * weight).sum(3).to(torch.uint8).flatten(2)
        size = states.float().abs().mean(-1).to(torch.float16).unflatten(1, (-1, 256))
        blocks[..., self.code_bytes :].view(torch.float16).copy_(size)

    def raw(self, blocks):
        octets = blocks[..., : self.code_bytes].unflatten(-1, (32, self.width))
        signs = octets[:, :, None] >> torch.arange(8, dtype=torch.uint8)[:, None, None] & 1
        scale = blocks[..., self.code_bytes :].view(torch.float16).unflatten(-1, (32, 8)).mT
        codes = 2.0 * signs.flatten(1, 3).flip(-1).float() - 1.0
        return codes, scale.float().flatten(1)[:, None], None

    def table(self, before):
        raise NotImplementedError

    def kept_from(self, name, before):
        raise NotImplementedError

    def moved(self, start, size, came, lowest, free):
        raise NotImplementedError

    @classmethod
    def stored(cls, heads, device):
        own = [head.side for head in heads]
        starts = (0, *accumulate(side.width for side in own))
        first = torch.cat([head.start + torch.arange(head.side.width).flip(0) for head in heads])
        step = torch.cat([torch.full((side.width,), side.width) for side in own])
        kept = torch.tensor([head.start + head.side.code_bytes for head in heads]) // 2
        return SignColumns(starts, first, step, kept, heads[0].size)


@dataclass(frozen=True, eq=False)
class SignColumns(StoredColumns):
    first: Tensor
    step: Tensor
    kept: Tensor
    size: int

    def at(self, tokens):
        begin = (tokens.far + tokens.block * self.size)[..., None]
        values = self.first + begin + tokens.place[..., None] * self.step
        shift = tokens.slot.to(torch.uint8)[..., None]
        kept = self.kept + begin // 2 + tokens.token[..., None]
        return SideAddresses(self, tokens.there, values, shift, (kept,))

    def write(self, buffer, places, states):
        sizes = [own.float().abs().mean(-1) for own in states.split(self.widths, -1)]
        scales = torch.stack(sizes, -1).to(torch.float16).view(torch.int16)
        replace_bits(buffer.view(torch.int16), places.kept[0], places.there, scales, -1)
        bits = (states > 0).to(torch.uint8) << places.shift
        one = torch.ones_like(places.shift) << places.shift
        replace_bits(buffer, places.values, places.there, bits, one)

    def read(self, buffer, places):
        raise NotImplementedError

    @property
    def widths(self) -> list[int]:
        return [stop - start for start, stop in zip(self.starts, self.starts[1:], strict=False)]


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (*layout_registry.OPERAND_LAYOUTS, SignLayout)
    monkeypatch.setattr(layout_registry, "OPERAND_LAYOUTS", known)
    monkeypatch.setitem(layout_registry.FORMATS, "sign", SignLayout.forms["sign"])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("signs")
def test_a_layout_in_the_list_is_stored_and_attended_to() -> None:
    widths = [(48, 32), (16, 64)]
    exact = segment_of(widths, 2, 2, 40)
    layout = SegmentsLayout((exact, segment_of(widths, 2, 2, 300, "sign", "sign")), torch.float32)

    def states(capacity: int, side: int) -> list[Tensor]:
        return [random(2, capacity, pair[side], seed=side) for pair in widths]

    own = [(states(40, 0), states(40, 1)), (states(300, 0), states(300, 1))]
    buffer = layout.packed(own)
    for head in range(2):
        for found, given in zip(layout.head(buffer, 1, head), own[1], strict=True):
            rows = given[head]
            size = rows.abs().mean(-1, keepdim=True).half().float()
            assert torch.equal(found, torch.where(rows > 0, size, -size))
    other = layout.packed([own[0], [[torch.zeros_like(x) for x in side] for side in own[1]]])
    append(other, layout, 1, *own[1], start=torch.zeros(2, dtype=torch.int32))
    for head in range(2):
        for found, wanted in zip(
            layout.head(other, 1, head), layout.head(buffer, 1, head), strict=True
        ):
            assert torch.equal(found, wanted)
    query = random(2, layout.widest.query_offsets[-1], seed=7)
    lengths = [[40, 3], [300, 171]]
    wanted = reference_segments(query, buffer, layout, lengths, 0.2).float()
    found = segments_cpu(query, buffer, layout, torch.tensor(lengths), 0.2)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def named(text: str) -> Sequence[str]:
    return re.findall(r"\b(?:(?:Row|Column)sLayout|(?:Row|Piece)Columns|COLUMN_SLOTS)\b", text)


def test_nothing_else_asks_which_layout_a_side_has() -> None:
    own = {"rows.py", "row_kernel.py", "columns.py", "column_kernel.py"}
    asking = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if named(text := path.read_text()) or re.search(r"quantized\.(columns|rows) import", text)
    }
    assert asking <= PLACES | own
    assert layout_registry.OPERAND_LAYOUTS[0].forms.keys() >= {None, "fp8", 4}


@pytest.mark.usefixtures("signs")
def test_keys_and_values_have_one_layout() -> None:
    with pytest.raises(UsageError):
        segment_of([(32, 32)], 2, 1, 64, "sign", 4)
    with pytest.raises(UsageError):
        segment_of([(((32, 4),), 32)], 2, 1, 64, 4, 4)
    with pytest.raises(UsageError):
        segment_of([(32, 32)], 2, 1, 64, "uniform-rms", "uniform-rms")
