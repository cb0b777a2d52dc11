"""The names of methods: which there are, which stand in every table, which are compared by default.

Names only, so that a command can say them in its help, the shell complete them, and others be
refused, without loading torch. `kvprof.methods.registry` knows what stands behind each.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points

from kvprof.errors import UsageError
from kvprof.methods.papers import PAPERS

__all__ = [
    "ALWAYS",
    "COMBINATIONS",
    "COMPARED",
    "ENTRY_POINTS",
    "METHOD_NAMES",
    "MODIFIERS",
    "Modifier",
    "check_names",
    "method_names",
    "names_in",
    "parts_of",
    "plain_name",
    "unknown_method",
]

#: Group of the entry points by which a package brings methods of its own.
ENTRY_POINTS = "kvprof.methods"

#: What most people would use instead; they have no knob.
ALWAYS = ("full", "fp8")

#: The four papers' methods and the optimal bases, as ``--methods`` writes them.
COMPARED = "fdc,zack,palu,tale,kq"

#: Quantisers and evictors, which also go on top of other methods.
MODIFIERS = (
    "per-token",
    "kivi",
    "kvquant",
    "hqq",
    "quanto",
    "sink-recent",
    "h2o",
    "keyformer",
)

#: kvprof's own, in the order in which they are listed.
METHOD_NAMES = (
    *ALWAYS,
    *COMPARED.split(","),
    "svd-kv",
    "svd-k",
    "svd-v",
    "strawman",
    "tale+kivi",
    *MODIFIERS,
    *PAPERS,
)

#: Combinations that the papers have, and the quantised optimum.
COMBINATIONS = (
    "fdc+keyformer",
    "fdc+kvquant",
    "zack+keyformer",
    "zack+kvquant",
    "palu+keyformer",
    "palu+kvquant",
    "palu-3bit",
    "fdc-4bit",
    "kq-4bit",
)

_BIT_SUFFIX = re.compile(r"(.+)-([2348])bit(?:-(?:g([1-9][0-9]{0,5})|(row)))?")
# Columns that share a scale after ``-4bit``; None is a token's whole row, which Palu takes (§4.1).
_GROUP = 32
_GROUPS: dict[str, int | None] = {"palu": None}


@dataclass(frozen=True)
class Modifier:
    """What comes on top of a method.

    Attributes
    ----------
    name : str
        One of `MODIFIERS`.
    bits : int or None
        None for those that the user gives, or the quantiser's own.
    group : int or None
        Columns that share a scale, where `bits` are said; None for a token's whole row.
    """

    name: str
    bits: int | None = None
    group: int | None = None


def method_names() -> list[str]:
    """Return every name that is listed: own methods, named combinations, then installed ones."""
    return [*METHOD_NAMES, *COMBINATIONS, *_installed()]


def plain_name(base: str) -> str:
    """Return the name of a method without its paper's setting."""
    return PAPERS[base].method if base in PAPERS else base


def _installed() -> list[str]:
    return [point.name for point in entry_points(group=ENTRY_POINTS)]


def parts_of(name: str, bases: Iterable[str]) -> tuple[str, list[Modifier]] | None:
    """Split a name into its method and what comes on top, with the bits where they are given.

    Parameters
    ----------
    name : str
    bases : iterable of str
        Methods that something may come on top of.

    Returns
    -------
    tuple or None
        None where the name is neither a method nor a combination.
    """
    known = set(bases)
    if name in known:
        return name, []
    match = _BIT_SUFFIX.fullmatch(name)
    base, *rest = (match[1] if match else name).split("+")
    if base not in known or any(part not in MODIFIERS for part in rest):
        return None
    modifiers = [Modifier(part) for part in rest]
    if match:
        group = None if match[4] else int(match[3] or 0) or _GROUPS.get(plain_name(base), _GROUP)
        modifiers.append(Modifier("per-token", int(match[2]), group))
    return base, modifiers


def check_names(names: Iterable[str]) -> None:
    """Refuse a name that is neither a method nor a combination, at once.

    Raises
    ------
    UsageError
        Naming the nearest one.
    """
    for name in names:
        if parts_of(name, (*METHOD_NAMES, *_installed())) is None:
            raise unknown_method(name, method_names())


def names_in(text: str) -> list[str]:
    """Return the methods that ``--methods`` names: ``fdc,kq:grid=32,minimum=8`` are two."""
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    return [piece.partition(":")[0].strip() for piece in pieces if ":" in piece or "=" not in piece]


def unknown_method(name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is no method, with the nearest that is one."""
    every = list(known)
    near = get_close_matches(name, every, n=1)
    hint = f"did you mean {near[0]}? There are" if near else "choose from"
    return UsageError(f"--method: {name[:80]!r} is unknown; {hint} {', '.join(every)}")
