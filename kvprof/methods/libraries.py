"""Quantisers of other projects: HQQ and quanto, what they can do and how they lay out a row.

Both are called as they are (`kvprof.runtime.codecs`); nothing here imitates them. What is
here without them is the arithmetic of what they store, for the byte account.
"""

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvprof.errors import LackingError
from kvprof.requirements import extra_command

__all__ = ["LIBRARIES", "Library", "RowLayout", "load_library", "row_layout"]


@dataclass(frozen=True)
class Library:
    """One project that quantises.

    Attributes
    ----------
    package : str
        As pip knows it.
    module : str
        What is imported.
    bits : tuple of int
        That it has.
    """

    package: str
    module: str
    bits: tuple[int, ...]


#: By the kind of quantiser, which is also the name of kvprof's extra.
LIBRARIES = {
    "hqq": Library("hqq", "hqq.core.quantize", (2, 3, 4, 8)),
    "quanto": Library("optimum-quanto", "optimum.quanto", (2, 4, 8)),
}


@dataclass(frozen=True)
class RowLayout:
    """How a library stores one token's row of a latent.

    Attributes
    ----------
    groups : int
        Of columns with a scale of their own.
    width : int
        Columns of a group, filled up where the row is shorter than ``groups * width``.
    words : int
        Stored words of codes per group.
    word_bytes : int
        Of one word.
    zeros : bool
        Whether a group has a zero point beside its scale.
    """

    groups: int
    width: int
    words: int
    word_bytes: int
    zeros: bool

    @property
    def code_bytes(self) -> int:
        """Bytes of the row's codes."""
        return self.groups * self.words * self.word_bytes


def row_layout(kind: str, bits: int, columns: int, group: int | None) -> RowLayout:
    """Return how a library stores a row.

    A row is cut into groups of equal width, as few as `group` allows: 80 columns in groups of at
    most 64 are two of 40, not one of 64 and one of 16 filled up to 64. A group fills whole bytes,
    as the libraries ask. HQQ packs ten codes of 3 bits into a 32-bit word; quanto is symmetric at
    8 bits (no zero point).

    Parameters
    ----------
    kind : str
        A key of `LIBRARIES`.
    bits : int
        One of its bits.
    columns : int
        Of the row, r.
    group : int or None
        Most columns that share a scale; None for the whole row.
    """
    fill = 1 if bits == 3 else 8 // bits
    groups = math.ceil(columns / (group or columns))
    width = math.ceil(math.ceil(columns / groups) / fill) * fill
    # Filling up may have left a narrow row's last group without a column of its own.
    groups = math.ceil(columns / width)
    words = math.ceil(width / 10) if bits == 3 else width * bits // 8
    zeros = kind != "quanto" or bits < 8
    return RowLayout(groups, width, words, 4 if bits == 3 else 1, zeros)


def load_library(kind: str) -> Any:
    """Return the module of a library.

    Parameters
    ----------
    kind : str
        A key of `LIBRARIES`.

    Raises
    ------
    LackingError
        When it is not installed, or cannot be imported.
    """
    library = LIBRARIES[kind]
    try:
        return import_module(library.module)
    except ImportError as cause:
        raise LackingError(
            f"{kind} needs the package {library.package}, which cannot be imported ({cause}); "
            f"{extra_command(kind)}"
        ) from cause
