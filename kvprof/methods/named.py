"""The names of methods, and the one grammar in which commands list them with their options.

Names only, so that a command can say them in its help, the shell complete them, and others be
refused, without loading torch. `kvprof.methods.registry` knows what stands behind each.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.papers import PAPERS, papers_named

__all__ = [
    "ALWAYS",
    "BENCHED",
    "COMBINATIONS",
    "COMPARED",
    "ENGINE_FORMATS",
    "MEASURED_QUANTISERS",
    "METHOD_NAMES",
    "MODIFIERS",
    "Wrapper",
    "check_names",
    "installed_points",
    "listed",
    "method_entries",
    "method_names",
    "options_in",
    "parts_of",
    "plain_name",
    "side_bits",
    "unknown_method",
]

# Group of the entry points by which a package brings methods of its own.
_ENTRY_POINTS = "kvprof.methods"

#: What most people would use instead; they have no knob.
ALWAYS = ("full", "fp8")

#: The four papers' methods and the optimal bases, as ``--methods`` writes them.
COMPARED = "fdc,zack,palu,tale,kq"

#: What ``bench`` measures besides methods (`kvprof.benchmark.shape_plans`).
BENCHED = ("uniform", "palu-folded")

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
    "snapkv",
)

#: Quantisers whose bits ``sensitivity`` measures and hands out. What HQQ makes of a
#: token depends on the tokens that are quantised with it, so one pass is not decoding.
MEASURED_QUANTISERS = ("per-token", "kivi", "kvquant", "quanto")

#: Types that engines store a KV cache in, by the engines' own names, and what asks for each there.
ENGINE_FORMATS = {
    "fp8_e4m3": ("vLLM", "--kv-cache-dtype fp8"),
    **{
        name: ("vLLM", f"--kv-cache-dtype {name}")
        for name in (
            *("fp8_e5m2", "int8_per_token_head", "int4_per_token_head", "turboquant_k8v4"),
            *("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
        )
    },
    **{
        name: ("llama.cpp", f"-ctk {name} -ctv {name}")
        for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
    },
}

# Names that stand for several methods wherever a list of methods is read.
_SETS = {"engine-formats": tuple(ENGINE_FORMATS)}

#: kvprof's own, in the order in which they are listed.
METHOD_NAMES = (
    *ALWAYS,
    *COMPARED.split(","),
    "kq-wf",
    "svd-kv",
    "svd-k",
    "svd-v",
    "strawman",
    "tale+kivi",
    "hadamard-int4",
    "hadamard-int3",
    "hadamard-int2",
    "turboquant",
    "oscar",
    "kvtc",
    "xkv",
    *MODIFIERS,
    *ENGINE_FORMATS,
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

# Evictors that users ask for, and that only a library has which cannot be installed beside kvprof.
_KVPRESS = ("expected-attention", "kvzap")

_OWN_OPTIONS = re.compile(r"([^=]*?)(:)([^=:]*=.*)")
_BIT_SUFFIX = re.compile(r"(.+)-(?:([2348])bit|(k[2348]v[2348]))(?:-(?:g([1-9][0-9]{0,5})|(row)))?")
_NUMBER = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?")
_SIDES = re.compile(r"k([1-9][0-9]?)v([1-9][0-9]?)")
# Columns that share a scale after ``-4bit`` or ``-k8v4``; None is a token's whole row, which Palu
# takes (§4.1).
_GROUP = 32
_GROUPS: dict[str, int | None] = {"palu": None}


@dataclass(frozen=True)
class Wrapper:
    """What comes on top of a method.

    Attributes
    ----------
    name : str
        One of `MODIFIERS`.
    bits : int, str or None
        ``k8v4`` where keys and values have unlike ones (`side_bits`); None for those that the user
        gives, or the quantiser's own.
    group : int or None
        Columns that share a scale, where `bits` are said; None for a token's whole row.
    """

    name: str
    bits: int | str | None = None
    group: int | None = None


def method_names() -> list[str]:
    """Return every name that is listed: own methods, named combinations, then installed ones."""
    return [*METHOD_NAMES, *COMBINATIONS, *installed_points()]


def plain_name(base: str) -> str:
    """Return the name of a method without its paper's setting."""
    return PAPERS[base].method if base in PAPERS else base


def installed_points() -> dict[str, EntryPoint]:
    """Return the entry points of the methods that packages bring, by name; none is loaded."""
    return dict(_points(tuple((place, _changed(place)) for place in sys.path)))


@lru_cache(maxsize=1)
def _points(_places: tuple[tuple[str, int], ...]) -> dict[str, EntryPoint]:
    # Every installed package is opened for it; a command asks dozens of times.
    return {point.name: point for point in entry_points(group=_ENTRY_POINTS)}


def _changed(place: str) -> int:
    """Return when a package was last put into a folder, or taken out of it."""
    try:
        return Path(place).stat().st_mtime_ns
    except OSError:
        return 0


def parts_of(name: str, bases: Iterable[str]) -> tuple[str, list[Wrapper]] | None:
    """Split a name into its method and what comes on top, with the bits where they are given."""
    known = set(bases)
    if name in known:
        return name, []
    match = _BIT_SUFFIX.fullmatch(name)
    base, *rest = (match[1] if match else name).split("+")
    if base not in known or any(part not in MODIFIERS for part in rest):
        return None
    modifiers = [Wrapper(part) for part in rest]
    if match:
        group = None if match[5] else int(match[4] or 0) or _GROUPS.get(plain_name(base), _GROUP)
        bits = int(match[2]) if match[2] else match[3]
        modifiers.append(Wrapper("per-token", bits, group))
    return base, modifiers


def side_bits(bits: int | str) -> tuple[int, int] | None:
    """Return the bits of keys and of values: 8 and 4 of ``k8v4``, 4 and 4 of 4 or ``4``."""
    if isinstance(bits, int):
        return bits, bits
    match = _SIDES.fullmatch(bits.strip())
    if match:
        return int(match[1]), int(match[2])
    if bits.strip().isdecimal() and bits.isascii() and len(bits) < 4:
        return int(bits), int(bits)
    return None


def check_names(names: Iterable[str], more: Iterable[str] = ()) -> None:
    """Refuse a name that is neither a method nor a combination, at once."""
    for name in names:
        if parts_of(name, (*METHOD_NAMES, *installed_points(), *more)) is None:
            raise unknown_method(name, dict.fromkeys((*more, *method_names())))


def listed(text: str) -> list[str]:
    """Split a list of methods at its commas; ``engine-formats`` becomes `ENGINE_FORMATS`."""
    pieces = [piece for part in text.split(",") if (piece := part.strip())]
    return [name for piece in pieces for name in _SETS.get(piece, (piece,))]


def method_entries(text: str) -> list[tuple[str, str, list[str]]]:
    """Split ``fdc,kq:a=1,b=2`` into labels, methods and their options as written.

    Options of one method follow it after a colon, also with commas between:
    ``fdc:paper,kq:allocation=budget,grid=32,palu`` are three methods. So may be the values of one
    option: ``kq:skip=0,-1``.
    """
    entries: list[tuple[str, list[str]]] = []
    for piece in listed(text):
        method, colon, option = _parted(piece)
        if colon and not (method.strip() and option.strip()):
            raise UsageError(
                f"--methods: {piece[:80]!r} has a colon but not a method and its option; write for "
                "example kq:grid=32, or kq"
            )
        if entries and entries[-1][1] and _NUMBER.fullmatch(piece):
            entries[-1][1][-1] += f",{piece}"  # of a list: skip=0,-1
        elif colon or "=" not in piece:
            entries.append((method.strip(), [option.strip()] if colon else []))
        elif not entries or not entries[-1][1]:
            raise UsageError(
                f"--methods: {piece!r} belongs to no method; write for example kq:{piece}"
            )
        else:
            entries[-1][1].append(piece)
    if not entries:
        raise UsageError(f"--methods: {text!r} names no method; write for example fdc,kq")
    return [
        (f"{method}:{','.join(options)}" if options else method, method, options)
        for method, options in entries
    ]


def options_in(written: Iterable[str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return options as keyword arguments from ``KEY=VALUE`` texts; values stay text."""
    options = dict(given or {})
    for entry in written:
        key, equals, value = entry.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"--option {entry!r}: write KEY=VALUE, for example heads=4")
        if key in options:
            raise UsageError(f"--option {entry!r}: {key} is given twice")
        options[key] = value.strip()
    return options


def _parted(piece: str) -> tuple[str, str, str]:
    """Part a name from what follows it; ``fdc:paper`` is one, its options come after a colon."""
    match = _OWN_OPTIONS.fullmatch(piece)
    if match:
        return match[1], match[2], match[3]
    return (piece, "", "") if papers_named([piece]) else piece.partition(":")


def unknown_method(name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is no method, with the nearest that is one."""
    every = [*known, *_SETS]
    base, _, given = name.partition(":")
    for part in base.lower().replace("_", "-").split("+"):
        if part in _KVPRESS:
            return UsageError(
                f"{part} is not in kvprof: kvpress, which has it, asks for a transformers before "
                "5.3 (kvpress 0.5.5), kvprof for 5.17 or later; snapkv, h2o and keyformer score "
                "tokens too"
            )
    if base in every and "=" in given:
        return UsageError(
            f"method {name[:80]!r}: options of {base} are given apart here: --option {given[:40]}"
        )
    near = get_close_matches(name, every, n=1)
    hint = f"did you mean {near[0]}? There are" if near else "choose from"
    return UsageError(f"method {name[:80]!r} is unknown; {hint} {', '.join(every)}")
