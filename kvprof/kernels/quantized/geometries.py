"""The geometries that segments can have, and their formats by name and by number."""

from kvprof.errors import UsageError
from kvprof.kernels.quantized.codes import FORMATS, Bits, NumberFormat
from kvprof.kernels.quantized.columns import ColumnSide
from kvprof.kernels.quantized.rows import RowSide
from kvprof.kernels.quantized.side import Side

__all__ = ["GEOMETRIES", "bits_numbered", "format_of", "geometry_of"]

#: A class for each way in which the numbers of a block lie.
GEOMETRIES: tuple[type[Side], ...] = (RowSide, ColumnSide)


def geometry_of(bits: Bits) -> type[Side]:
    """Return the geometry that a format belongs to."""
    for geometry in GEOMETRIES:
        if bits in geometry.forms:
            return geometry
    known = sorted((name for name in FORMATS if name is not None), key=str)
    raise UsageError(
        f"{bits!r} bits cannot be stored; use {', '.join(map(repr, known))} or None (uncompressed)"
    )


def format_of(bits: Bits) -> NumberFormat:
    """Return the format of a name."""
    return geometry_of(bits).forms[bits]


def bits_numbered(number: int) -> Bits:
    """Return the name of the format that a number stands for."""
    return next(bits for bits, form in FORMATS.items() if form.number == number)
