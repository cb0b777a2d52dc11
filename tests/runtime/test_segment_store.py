"""Which tokens of a prompt go into which segment, and in which order."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.quantized.operand_layout import PLACES
from kvprof.methods.storage import Levels
from kvprof.runtime.backends.segment_store import Format, SegmentStore
from kvprof.runtime.backends.stages import Stages

WIDTHS = (32, 48)
PLANES = RaggedLayout(WIDTHS, WIDTHS, 2, 2, 90)
OLD, NEW = [0, 3], [90, 71]


def once() -> Callable[[Hashable, Callable[[], Any]], Any]:
    """Return what keeps what the first of several layers has made."""
    known: dict[Hashable, Any] = {}

    def kept(key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = make()
        return known[key]

    return kept


def store_of(bits: int, stages: Stages) -> SegmentStore:
    formats = [Format(WIDTHS, WIDTHS), Format(WIDTHS, WIDTHS, bits, bits, 32)]
    store = SegmentStore(stages, formats, 2, 128)
    store.make_room(2, 90, None, torch.device("cpu"), torch.float32)
    return store


@pytest.mark.parametrize("window", [0, 5])
def test_layers_of_unlike_bits_share_what_goes_where(window: int) -> None:
    stages = Stages(Levels(sink=2), True, window)
    shared = once()
    for bits in (8, 4, 2):
        store = store_of(bits, stages)
        layout = store.layout
        assert layout is not None
        stored: dict[int, tuple[int, int]] = {}
        for segment, origins, targets in store.launches(PLANES, OLD, NEW, shared):
            own = layout.segments[segment]
            slots = targets % own.layout.capacity
            # So those of one place, which share bytes, stand beside one another.
            assert (targets.diff() > 0).all()
            assert int(slots.max()) // own.slots < PLACES * own.blocks
            for origin, slot in zip(origins.tolist(), slots.tolist(), strict=True):
                assert origin not in stored
                stored[origin] = segment, slot
        for row, (first, total) in enumerate(zip(OLD, NEW, strict=True)):
            segments, slots = stages.slots_of(first, total, total)
            wanted = zip(segments.tolist(), slots.tolist(), strict=True)
            for token, place in enumerate(wanted, first):
                assert stored.pop(row * PLANES.capacity + token) == place
        assert not stored
