"""What of the prefill kernel is chosen for a GPU and a pair of widths, and not for a model."""

from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.tables import Chunks

__all__ = [
    "HOPPER_WIDEST",
    "SHARED_MEMORY",
    "Head",
    "Kind",
    "Tile",
    "TiledWidths",
    "Tuning",
    "head_tiles",
    "shared_bytes",
]

#: Bytes that the programs of one multiprocessor share on an H100 or H200.
SHARED_MEMORY = 227 * 1024


class Head(NamedTuple):
    """What the kernel looks up of a KV head.

    Attributes
    ----------
    outputs, queries : int
        Where they begin in a row of them.
    k0, …, v3 : int
        Where the plane of each chunk of K and of V begins in a row of the cache; 0 where there is
        none.
    """

    outputs: int
    queries: int
    k0: int
    k1: int
    k2: int
    k3: int
    v0: int
    v1: int
    v2: int
    v3: int


class Kind(NamedTuple):
    """A head configuration as the kernel reads it: its chunks, a tile's rows and keys."""

    chunks: Chunks
    rows: int
    keys: int


@dataclass(frozen=True)
class Tile:
    """How one head configuration is computed."""

    rows: int  # of a tile of scores, powers of two
    keys: int
    warps: int  # of a program
    #: Tiles of K and V on their way at once, fewer where shared memory does not suffice, but two
    #: (`kvprof.kernels.prefill.kernel` says why).
    stages: int
    #: That are to fit on a multiprocessor at once, so that one computes softmax while another
    #: multiplies.
    programs: int
    registers: int = 0  # most of a thread; 0 leaves it to the compiler


class TiledWidths(NamedTuple):
    """Widths that heads have, and the tile that they are computed in."""

    key_width: int
    value_width: int
    tile: Tile


#: For heads of up to 256 columns in 16 bits on Hopper, where each four warps have 64 rows of their
#: own and nothing is spilled; on A100 and B200 registers would be.
HOPPER_WIDEST = Tile(128, 32, 8, 3, 1)


@dataclass(frozen=True)
class Tuning:
    """How the prefill kernel is built and its work cut."""

    #: For heads with values up to `narrow_values` wide, keys and values up to `wide_widths`, up to
    #: `widest_widths`, and wider.
    narrow: Tile = Tile(128, 64, 8, 3, 2, 128)
    wide: Tile = Tile(128, 64, 8, 3, 2, 128)
    widest: Tile = Tile(64, 32, 8, 2, 1)
    latent: Tile = Tile(32, 32, 8, 2, 1)
    narrow_values: int = 64
    wide_widths: int = 128
    widest_widths: int = 256
    #: Programs per place for one (`Tile.programs` on every multiprocessor), schedule `equal`.
    pieces: int = 16

    def __post_init__(self) -> None:
        found: list[int] = []
        for value in (getattr(self, field.name) for field in fields(self)):
            found += astuple(value) if isinstance(value, Tile) else (value,)
        # Once: every layer asks for them at every step. It is no field: fields are numbered.
        object.__setattr__(self, "_numbers", tuple(found))

    @property
    def numbers(self) -> tuple[int, ...]:
        """All of it as whole numbers, as an operator of torch can take it."""
        return self._numbers  # type: ignore[attr-defined, no-any-return]

    @classmethod
    @cache
    def of(cls, numbers: tuple[int, ...]) -> "Tuning":
        """Return what `numbers` told."""
        rest = list(numbers)
        size = len(fields(Tile))

        def tile() -> Tile:
            return Tile(*(rest.pop(0) for _ in range(size)))

        found: dict[str, Any] = {
            field.name: tile() if isinstance(field.default, Tile) else rest.pop(0)
            for field in fields(cls)
        }
        return cls(**found)

    def tile(
        self,
        key_width: int,
        value_width: int,
        element_size: int = 2,  # bytes of a value; four make the tile half as large both ways
        shared: int = SHARED_MEMORY,  # bytes that the programs of a multiprocessor share
    ) -> Tile:
        """Return the tile of a pair of widths, made to fit."""
        widths = (key_width, value_width)
        if max(widths) > self.wide_widths:
            found = self.widest if max(widths) <= self.widest_widths else self.latent
        else:
            found = self.narrow if value_width <= self.narrow_values else self.wide
        if element_size == 4:
            smaller = {"rows": max(16, found.rows // 2), "keys": max(16, found.keys // 2)}
            found = replace(found, **smaller, programs=1, registers=0)
        while (taken := shared_bytes(found, *widths, element_size)) > shared // found.programs:
            if found.stages > 2:
                found = replace(found, stages=found.stages - 1)
            elif found.keys > 16:
                found = replace(found, keys=found.keys // 2)
            elif taken > shared and found.rows > 16:
                found = replace(found, rows=found.rows // 2)
            else:
                break
        return found


def shared_bytes(tile: Tile, key_width: int, value_width: int, element_size: int) -> int:
    """Return what a program keeps in shared memory, in bytes, with what the system takes of it."""
    tiles = tile.rows * key_width + tile.stages * tile.keys * (key_width + value_width)
    return tiles * element_size + 1024


def head_tiles(
    layout: RaggedLayout,
    tuning: Tuning,
    element_size: int = 2,
    shared: int = SHARED_MEMORY,
) -> tuple[Tile, ...]:
    """Return every head's tile; parameters are those of `Tuning.tile`."""
    pairs = zip(layout.key_widths, layout.value_widths, strict=True)
    return tuple(tuning.tile(*pair, element_size, shared) for pair in pairs)
