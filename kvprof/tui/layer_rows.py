"""The table of layers: its rows, their order, and which of them a filter lets through."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvprof.tui.state import CaseState

__all__ = ["COLUMNS", "LayerFilter", "LayerRow", "layer_rows"]

#: Columns in the order of the table, each with what it is called in a filter.
COLUMNS = {"layer": "layer", "ms": "ms", "bytes": "bytes", "K": "k", "V": "v", "error": "error"}

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
_COMPARISON = re.compile(r"([a-zA-Z]+)\s*(<=|>=|<|>|=)\s*([0-9][0-9.eE+-]*)")
_RANGE = re.compile(r"([0-9]{1,5})(?:\s*[-–]\s*([0-9]{1,5}))?")
_HOW = "write layers (0-7, 12) or a comparison (error>0.01, k<64, ms>=2, bytes>1e6)"


@dataclass(frozen=True)
class LayerRow:
    """One layer's figures; None was not measured.

    Attributes
    ----------
    layer : int
    seconds : float or None
    nbytes : int or None
    key_ranks, value_ranks : list of float
        Per KV head.
    error : float or None
    """

    layer: int
    seconds: float | None
    nbytes: int | None
    key_ranks: list[float]
    value_ranks: list[float]
    error: float | None

    def figure(self, column: str) -> float | None:
        """Return what a column sorts and filters by; ranks by their mean."""
        match column:
            case "ms":
                return self.seconds * 1e3 if self.seconds is not None else None
            case "bytes":
                return self.nbytes
            case "K":
                return _mean(self.key_ranks)
            case "V":
                return _mean(self.value_ranks)
            case "error":
                return self.error
        return self.layer


@dataclass(frozen=True)
class LayerFilter:
    """Which layers to show.

    Attributes
    ----------
    text : str
        As it was written; empty shows all.
    ranges : tuple of (first, last)
        Layers, ends included; any of them lets a row through. Empty is no condition.
    comparisons : tuple of (column, sign, value)
        Every one of them must hold; what was not measured holds none.
    """

    text: str = ""
    ranges: tuple[tuple[int, int], ...] = ()
    comparisons: tuple[tuple[str, str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "LayerFilter":
        """Read a filter: ``0-7,12``, ``error>0.01``, or both, joined by commas.

        Raises
        ------
        ValueError
            When an entry is neither, with what to write.
        """
        ranges, comparisons = [], []
        called = {name: column for column, name in COLUMNS.items()}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            if match := _RANGE.fullmatch(entry):
                first = int(match[1])
                ranges.append((first, int(match[2] or first)))
            elif (match := _COMPARISON.fullmatch(entry)) and match[1].lower() in called:
                value = _number(match[3])
                if value is None:
                    raise ValueError(f"{match[3]!r} is no number: {_HOW}")
                comparisons.append((called[match[1].lower()], match[2], value))
            else:
                raise ValueError(f"{entry!r} is no filter: {_HOW}")
        return cls(text.strip(), tuple(ranges), tuple(comparisons))

    def lets(self, row: LayerRow) -> bool:
        """Tell whether a row is shown."""
        if self.ranges and not any(first <= row.layer <= last for first, last in self.ranges):
            return False
        for column, sign, value in self.comparisons:
            figure = row.figure(column)
            if figure is None or not _OPERATORS[sign](figure, value):
                return False
        return True


def layer_rows(
    case: CaseState, *, sort: str, descending: bool, shown: LayerFilter
) -> list[LayerRow]:
    """Return the rows of a case in order; what was not measured comes last either way."""
    rows = [
        LayerRow(
            number, layer.seconds, layer.nbytes, layer.key_ranks, layer.value_ranks, layer.error
        )
        for number, layer in sorted(case.layers.items())
    ]
    rows = [row for row in rows if shown.lets(row)]
    sign = -1 if descending else 1

    def key(row: LayerRow) -> tuple[bool, float]:
        figure = row.figure(sort)
        return (True, 0.0) if figure is None else (False, sign * figure)

    return sorted(rows, key=key)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
