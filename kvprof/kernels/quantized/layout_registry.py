"""The operand layouts that segments can have, and their formats by name and by number."""

from kvprof.errors import UsageError
from kvprof.kernels.quantized.codes import FORMATS, Bits, NumberFormat
from kvprof.kernels.quantized.columns import ColumnsLayout
from kvprof.kernels.quantized.operand_layout import OperandLayout
from kvprof.kernels.quantized.rows import RowsLayout

__all__ = ["OPERAND_LAYOUTS", "bits_numbered", "format_of", "operand_layout_of"]

#: A class for each way in which the numbers of a block lie.
OPERAND_LAYOUTS: tuple[type[OperandLayout], ...] = (RowsLayout, ColumnsLayout)


def operand_layout_of(bits: Bits) -> type[OperandLayout]:
    """Return the operand layout that a format belongs to."""
    for layout in OPERAND_LAYOUTS:
        if bits in layout.forms:
            return layout
    known = sorted((name for name in FORMATS if name is not None), key=str)
    raise UsageError(
        f"{bits!r} bits cannot be stored; use {', '.join(map(repr, known))} or None (uncompressed)"
    )


def format_of(bits: Bits) -> NumberFormat:
    """Return the format of a name."""
    return operand_layout_of(bits).forms[bits]


def bits_numbered(number: int) -> Bits:
    """Return the name of the format that a number stands for."""
    return next(bits for bits, form in FORMATS.items() if form.number == number)
