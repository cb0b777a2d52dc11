"""Layers over pages that are filled already, and steps of any sequences over them."""

from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import basis_set
from kvprof.runtime.backends.rotary import RotaryForm
from kvprof.serving.model import ServedModel
from kvprof.serving.pages import Codes, quantised_layout
from kvprof.serving.steps import EngineStep, Rebuilding, ServedLayer, attend, value_lifts

DEPTH, GROUP, SCALE = 64, 2, 64**-0.5
#: Of K and of V, by layer and head.
WIDTHS = (((16, 32), (48, 16)), ((32, 16), (16, 64)))


@dataclass(frozen=True)
class Batch:
    """Sequences of a step: those that decode come first."""

    past: tuple[int, ...]  # tokens of each that are stored, and that come
    new: tuple[int, ...]
    tokens: int  # with padding
    rows: int

    @property
    def decodes(self) -> int:
        """Sequences in front that have one new token each."""
        single = [new == 1 for new in self.new]
        return single.index(False) if False in single else len(single)


@dataclass(frozen=True)
class Numbers:
    """What an engine says of a batch, and with padding what a graph reads of it."""

    slots: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor


class FilledModel:
    """A model whose every page holds tokens; a sequence has pages of its own.

    Parameters
    ----------
    page, columns, rows : int
        Tokens of a page, pages of a sequence, and sequences at most.
    dtype, device
    codes : Codes, optional
        Pages are quantised by them, and empty.
    most : int, optional
        Tokens of a step.
    captured : tuple of int, optional
        Tokens and sequences of the largest step in the form that a graph holds.
    widths
        As `WIDTHS`.
    shared : int
        KV heads that share each latent, whose keys are rebuilt; 0 where none are.
    valued : bool
        Whether values are rebuilt too.
    """

    def __init__(
        self,
        page: int,
        columns: int,
        rows: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        codes: Codes | None = None,
        most: int | None = None,
        captured: tuple[int, int] = (0, 0),
        widths: tuple[tuple[tuple[int, int], ...], ...] = WIDTHS,
        shared: int = 0,
        valued: bool = False,
        seed: int = 0,
    ) -> None:
        self.codes, self.shared, self.longest = codes, shared, columns * page
        self.valued = valued
        self.page, self.columns, self.device, self.dtype = page, columns, device, dtype
        self.generator = torch.Generator().manual_seed(seed)
        pages = columns * rows + 1
        self.model = ServedModel([self._layer(pages, own) for own in widths])
        self.filled = [layer.attention.kv_cache.clone() for layer in self.model.layers]
        # The first page is nobody's, as in an engine.
        order = torch.randperm(pages - 1, generator=self.generator) + 1
        self.table = order.view(rows, columns).int()
        self.model.bind(page, most or columns * page, columns * page, columns, captured)

    def random(self, *shape: int) -> Tensor:
        """Return normal numbers in sixteenths: projected, they have exact sums in any order."""
        drawn = torch.randn(shape, generator=self.generator)
        return ((drawn * 16).round() / 16).to(self.device, self.dtype)

    def _layer(self, pages: int, widths: tuple[tuple[int, int], ...]) -> ServedLayer:
        keys, values = zip(*widths, strict=True)
        row = RaggedLayout(keys, values, GROUP, 1, self.page).row
        if self.shared:
            return self._rebuilt_layer(pages, row, keys, values)
        bases = [
            basis_set(
                [self.random(DEPTH, width) / 4 for width in keys],
                dtype=self.dtype,
                device=self.device,
            )
            for _ in range(2)
        ]
        attention = SimpleNamespace(kv_cache=self.random(pages, row + 64), layer_name="layer")
        layer = ServedLayer(attention, bases[0], bases[1], values, GROUP, self.codes)
        if self.codes is not None:
            layout = quantised_layout(layer.layout(pages, self.page), self.codes, self.dtype)
            attention.kv_cache = torch.zeros(
                pages, layout.row + 64, dtype=torch.uint8, device=self.device
            )
        return layer

    def _rebuilt_layer(
        self, pages: int, row: int, keys: tuple[int, ...], values: tuple[int, ...]
    ) -> ServedLayer:
        down, ups, value_ups = (
            [self.random(self.shared * DEPTH, width) / 8 for width in widths]
            for widths in (keys, keys, values if self.valued else ())
        )
        turned = DEPTH // 2
        tokens = torch.arange(self.longest)[:, None]
        angles = tokens / 20 ** torch.linspace(0, 1, turned // 2)
        rebuilding = Rebuilding(
            tuple(ups),
            self.shared,
            RotaryForm(turned, False, 1),
            angles.cos().to(self.device),
            angles.sin().to(self.device),
            tuple(value_ups),
            value_lifts(value_ups, self.shared, GROUP),
        )
        attention = SimpleNamespace(kv_cache=self.random(pages, row + 64), layer_name="layer")
        group = self.shared * GROUP
        return ServedLayer(attention, None, basis_set(down), values, group, None, rebuilding)

    def store_past(self, batch: Batch) -> None:
        """Store what came before a batch; from here on it is what pages hold in the beginning."""
        for row, past in enumerate(batch.past):
            if not past:
                continue
            new = tuple(past if at == row else 0 for at in range(len(batch.past)))
            numbers = self.numbers(Batch((0,) * len(new), new, past, len(new)))
            step = self.step(Batch((0,), (past,), past, 1))
            step.slots, step.table = numbers.slots, numbers.table[row : row + 1].clone()
            self.run(step, self.states(past))
        self.filled = self.stored()

    def refill(self) -> None:
        """Let pages hold what they held in the beginning."""
        for layer, filled in zip(self.model.layers, self.filled, strict=True):
            layer.attention.kv_cache.copy_(filled)

    def stored(self) -> list[Tensor]:
        """Return a copy of all pages, layer by layer."""
        return [layer.attention.kv_cache.clone() for layer in self.model.layers]

    def states(self, tokens: int) -> list[list[Tensor]]:
        """Return queries, keys and values of every layer."""
        return [
            [
                self.random(tokens, len(layer.value_widths) * (self.shared or 1) * size, DEPTH)
                for size in (GROUP, 1, 1)
            ]
            for layer in self.model.layers
        ]

    def numbers(self, batch: Batch) -> Numbers:
        """Return a batch as an engine has it for a graph: padded."""
        slots = []
        for row, (past, new) in enumerate(zip(batch.past, batch.new, strict=True)):
            for token in range(past, past + new):
                slots.append(int(self.table[row, token // self.page]) * self.page)
                slots[-1] += token % self.page
        starts, count = [0, *accumulate(batch.new)], len(batch.new)
        table = torch.zeros(batch.rows, self.columns, dtype=torch.int32)
        table[:count] = self.table[:count]
        lengths = [past + new for past, new in zip(batch.past, batch.new, strict=True)]
        spare = batch.rows - count

        def whole(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=self.device)

        return Numbers(
            torch.tensor(slots + [-1] * (batch.tokens - len(slots)), device=self.device),
            table.to(self.device),
            whole(starts + starts[-1:] * spare),
            whole(lengths + [0] * spare),
        )

    def step(self, batch: Batch) -> EngineStep:
        """Return a batch as a step outside of a graph is cut."""
        numbers, rows = self.numbers(batch), len(batch.new)
        return EngineStep(
            self.model.alike,
            numbers.slots,
            numbers.table[:rows],
            numbers.starts[: rows + 1],
            numbers.lengths[:rows],
            batch.decodes,
            rows,
            numbers.starts[: rows + 1].tolist(),
            numbers.lengths[:rows].tolist(),
        )

    def run(self, step: EngineStep, states: list[list[Tensor]]) -> list[Tensor]:
        """Return what every layer puts out."""
        return [
            attend(layer, step, *own, SCALE)
            for layer, own in zip(self.model.layers, states, strict=True)
        ]
