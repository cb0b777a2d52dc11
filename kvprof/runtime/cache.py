"""The compressed cache: transformers' cache interface around what each layer stores."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvprof.errors import UsageError
from kvprof.models.interface import Rotation
from kvprof.runtime.arena import Arena
from kvprof.runtime.cache_layer import CompressedLayer, not_croppable
from kvprof.runtime.kernels.state import KernelState
from kvprof.runtime.rotary import RotaryTable, angles

if TYPE_CHECKING:
    from kvprof.runtime.session import Compression

__all__ = ["CompressedCache"]


class CompressedCache(Cache):  # type: ignore[misc]
    """A model's compressed cache; `Compression.new_cache` makes one.

    Parameters
    ----------
    compression : Compression
        What it belongs to.
    capacity : int or None
        Tokens to reserve room for at once (a static cache); None grows with the sequence.

    Attributes
    ----------
    kernels : KernelState or None
        What the layers that run on the kernels share; None where none does.
    left : str or None
        Why layers that could have are not, or no longer, run on them.
    """

    def __init__(self, compression: "Compression", capacity: int | None = None) -> None:
        self.compression = compression
        self.capacity = capacity
        self.reach = capacity
        self.kernels = compression.route.new_state()
        self.left: str | None = None
        layers: list[CompressedLayer] = []
        for layer in compression.plan.layers:
            arena = None
            if capacity is not None:
                arena = Arena(compression.plan, layer, capacity)
            planes = compression.route.new_store(len(layers), capacity)
            layers.append(CompressedLayer(layer, compression, arena, planes))
        super().__init__(layers=layers)
        self._tables: list[RotaryTable] = []
        self._table_of: dict[int, int] = {}
        self._extended: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored, as `kvprof.methods.accounting` counts them."""
        return sum(self.layer_bytes)

    @property
    def layer_bytes(self) -> list[int]:
        """`nbytes` of each layer."""
        found = []
        for layer in self.layers:
            total = sum(t.nbytes for cohort in layer.cohorts for t in cohort.tensors())
            if layer.planes is not None and self.kernels is not None:
                total += layer.planes.bytes_at(self.kernels.seen(layer.seen))
            found.append(total)
        return found

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory behind it: with a static cache its whole capacity."""
        planes = [layer.planes.buffer for layer in self.layers if layer.planes is not None]
        tensors = [*self._tensors(), *planes]
        behind = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in behind.values())

    def _tensors(self) -> list[Tensor]:
        return [t for layer in self.layers for cohort in layer.cohorts for t in cohort.tensors()]

    def begin_pass(self) -> None:
        """Start a forward pass."""
        self._extended.clear()

    def angles(self, layer: int, rotation: Rotation, batch: int) -> RotaryTable:
        """Return cosines and sines of all tokens so far, the pass's own included."""
        fresh = angles(rotation, batch)
        source = id(rotation.args[2] if len(rotation.args) > 2 else rotation.kwargs["cos"])
        known = self._table_of.get(layer)
        if source not in self._extended:
            if known is None:
                known = len(self._tables)
                self._tables.append(fresh)
            else:
                self._tables[known] = self._tables[known].extended(fresh.cos, fresh.sin)
            self._extended[source] = known
        self._table_of[layer] = self._extended[source]
        return self._tables[self._extended[source]]

    def take_angles(self, kernels: KernelState, past: int) -> None:
        """Take over the angles of the tokens that the kernels have stored.

        Parameters
        ----------
        kernels : KernelState
            Which the layers leave.
        past : int
            Tokens so far, padding included.
        """
        for layers, table in kernels.tables.unslotted(kernels.first, past):
            self._table_of.update(dict.fromkeys(layers, len(self._tables)))
            self._tables.append(table)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._tables.clear()
        self._table_of.clear()
        if self.left is not None:
            # What made the layers leave the kernels was of the sequences that are forgotten.
            route, self.left = self.compression.route, None
            self.kernels = route.new_state()
            for index, layer in enumerate(self.layers):
                layer.planes = route.new_store(index, self.capacity)
        elif self.kernels is not None:
            self.kernels.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens (assisted decoding), where every layer can.

        Parameters
        ----------
        tokens_to_remove : int
            Negative; a positive number is how many are to be left, as older versions of
            transformers count.

        Raises
        ------
        UsageError
            As `CompressedLayer.crop` does; then no layer has changed.
        """
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.get_seq_length())
        reasons = [layer.fixed(-tokens_to_remove) for layer in self.layers]
        if tokens_to_remove and any(reasons):
            raise UsageError(not_croppable(next(filter(None, reasons))))
        super().crop(tokens_to_remove)
        total = self.get_seq_length()
        for place, table in enumerate(self._tables):
            self._tables[place] = RotaryTable(table.cos[:, :total], table.sin[:, :total])
        if self.kernels is not None:
            self.kernels.crop(total)

    def activate_past_recording(self) -> None:
        """Prepare for passes that are taken back in part (assisted decoding).

        Layers with a sliding window keep what a pass pushes out of it until then. On the kernels
        there is no room for it, so such a cache leaves them.

        Raises
        ------
        UsageError
            Where what is stored of a token is not what its pass made of it, and where nothing but
            the kernels is to run.
        """
        if reason := next(filter(None, (layer.lossy for layer in self.layers)), None):
            raise UsageError(not_croppable(reason))
        windows = [layer for layer in self.layers if layer.sliding_window is not None]
        if self.kernels is not None and any(layer.planes is not None for layer in windows):
            self.compression.leave_kernels(self, "tokens are taken back out of a sliding window")
        for layer in windows:
            layer.record_past = True

    def replayed(self, tokens: int = 1) -> None:
        """Take notice of passes that a CUDA graph has replayed.

        While a pass is captured nothing is stored. A replay stores, and the device counts; the host
        has to be told, or lengths and bytes that it reports stay behind.

        Parameters
        ----------
        tokens : int
            New tokens of every row, over all replays.

        Raises
        ------
        UsageError
            When they had no room (what came after the last slot was lost), or when nothing runs on
            the kernels.
        """
        if self.kernels is None or any(layer.planes is None for layer in self.layers):
            raise UsageError("only a cache that the kernels keep can be captured and replayed")
        for layer in self.layers:
            layer.seen += tokens
        most = max(self.kernels.seen(self.get_seq_length()), default=0)
        if self.capacity is not None and most > self.capacity:
            raise UsageError(
                f"the static cache has room for {self.capacity} tokens, not for {most}"
            )

    def _select_tables(self, index: list[int]) -> None:
        for place, table in enumerate(self._tables):
            rows = torch.tensor(index, device=table.cos.device)
            self._tables[place] = RotaryTable(table.cos[rows], table.sin[rows])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        super().reorder_cache(beam_idx)
        self._select_tables(beam_idx.tolist())
        if self.kernels is not None:
            self.kernels.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        for place, table in enumerate(self._tables):
            self._tables[place] = RotaryTable(table.cos[indices], table.sin[indices])
        if self.kernels is not None:
            rows = torch.arange(len(self.kernels.first))
            self.kernels.select(rows[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        for place, table in enumerate(self._tables):
            cos, sin = (x.repeat_interleave(repeats, dim=0) for x in (table.cos, table.sin))
            self._tables[place] = RotaryTable(cos, sin)
        if self.kernels is not None:
            rows = range(len(self.kernels.first))
            self.kernels.select([row for row in rows for _ in range(repeats)])
