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
from kvprof.sizes import check_rate, parse_share

__all__ = [
    "ALWAYS",
    "BENCHED",
    "COMBINATIONS",
    "COMPARED",
    "EDGE",
    "ENGINE_FORMATS",
    "MEASURED_QUANTISERS",
    "METHOD_NAMES",
    "MODIFIERS",
    "PAPERS",
    "SOURCES",
    "TURBOQUANT",
    "PaperSetting",
    "Wrapper",
    "check_names",
    "installed_points",
    "listed",
    "method_entries",
    "method_names",
    "options_in",
    "own_rate",
    "papers_named",
    "parts_of",
    "plain_name",
    "side_bits",
    "unknown_method",
]

# --- Each paper's own setting, under a name: ``fdc:paper``, ``palu:paper``. A plain method takes
# kvprof's defaults; with ``:paper`` it is what the paper ran, as far as kvprof has it.


# SVD-LLM's calibration, whose decomposition Palu (§4.1) and TALE (§3) take: 256 sequences of 2,048.
_SVD_LLM = 256 * 2048
_SVD_LLM_DATA = (
    None,
    "Whitened on the calibration text, or the user's, with as many tokens as SVD-LLM takes (256 "
    "sequences of 2,048), not on WikiText-2.",
)


@dataclass(frozen=True)
class PaperSetting:
    """What a paper's own setting of a method is.

    Attributes
    ----------
    method : str
        The plain name.
    options : mapping
        That differ from the plain method's defaults.
    source : str
        What it is calibrated on unless the user says otherwise.
    tokens : int
        How many of them.
    fisher_tokens : int or None
        For Fisher information, where the paper says so.
    differs : tuple of (str or None, str)
        Where this is still not the paper, a sentence each, behind the option that changes it.
    """

    method: str
    options: Mapping[str, Any]
    source: str
    tokens: int
    fisher_tokens: int | None = None
    differs: tuple[tuple[str | None, str], ...] = ()

    def differences(self, options: Iterable[str] = ()) -> list[str]:
        """Return the sentences that hold where the user gives these options."""
        given = set(options)
        return [sentence for option, sentence in self.differs if option not in given]


# No paper limits the head configs, which are what kernels are compiled for.
_FINE = {"grid": 1, "minimum": 1, "kinds": 0}

PAPERS: dict[str, PaperSetting] = {
    "fdc:paper": PaperSetting(
        "fdc",
        {**_FINE, "values": "weight-v"},
        "random:8k",
        8192,
        differs=(
            (
                "keys",
                "A KV head has one basis, from its query heads each paired with its key; FDC §5.1 "
                "finds one per query head, which with grouped queries stores a key for each "
                "(keys=svd-qk-literal).",
            ),
            (
                "values",
                "V's basis is W_V's own, as FDC §5.2 says; that of V and W_O (values=svd-vo, the "
                "plain method's) keeps more when calibrated on text, and less on random tokens.",
            ),
        ),
    ),
    "zack:paper": PaperSetting(
        "zack",
        {**_FINE, "values": "svd-vo-raw"},
        "calibration",
        56 * 1024,
        differs=(
            ("keys", "A KV head has one basis, from its query heads each paired with its key."),
            (
                None,
                "Calibrated on the calibration text, or the user's, not on 57K tokens of articles "
                "that ChatGPT-4o wrote (§4.3).",
            ),
        ),
    ),
    "palu:paper": PaperSetting(
        "palu",
        {"hadamard": True, "kinds": 0},
        "calibration",
        _SVD_LLM,
        fisher_tokens=2048 * 1024,
        differs=(
            _SVD_LLM_DATA,
            (
                None,
                "Fisher information, where ranks go by it, is taken on the calibration text, or "
                "the user's, at most the paper's 2,048 sequences of 1,024, not on WikiText-2.",
            ),
        ),
    ),
    "tale:paper": PaperSetting("tale", _FINE, "calibration", _SVD_LLM, differs=(_SVD_LLM_DATA,)),
    "tale+kivi:paper": PaperSetting(
        "tale+kivi",
        _FINE,
        "calibration",
        _SVD_LLM,
        differs=(
            _SVD_LLM_DATA,
            (
                "window",
                "KIVI's full-precision window of 128 tokens counts as bytes, which the paper's "
                "9.14× leaves out (window=0 is without it).",
            ),
        ),
    ),
}

#: The papers whose tables and figures recipes repeat: authors, title, link.
SOURCES: dict[str, str] = {
    "FDC": (
        "Zeyu Zhang, Haiying Shen. FDC: Fast KV Dimensionality Compression for Efficient LLM "
        "Inference. Version 3 of https://arxiv.org/abs/2408.04107, whose version 2 is ZACK."
    ),
    "ZACK": (
        "Zeyu Zhang, Haiying Shen. ZACK: Zero-Overhead LLM Inference Acceleration via "
        "Dimensionality Compression of the Key-Value Cache. Version 2 of "
        "https://arxiv.org/abs/2408.04107, whose version 3 is FDC."
    ),
    "Palu": (
        "Chi-Chih Chang, Wei-Cheng Lin, Chien-Yu Lin, Chong-Yan Chen, Yu-Fang Hu, Pei-Shuo Wang, "
        "Ning-Chi Huang, Luis Ceze, Mohamed S. Abdelfattah, Kai-Chiang Wu. Palu: KV-Cache "
        "Compression with Low-Rank Projection. https://arxiv.org/abs/2407.21118"
    ),
    "TALE": (
        "Jaeseong Lee, Seung-won Hwang, Aurick Qiao, Daniel Campos, Zhewei Yao, Yuxiong He. TALE: "
        "Token-Adaptive Low-Rank KVCache Approximation with Reconstruction Elimination. https://aclanthology.org/2025.tacl-1.59/"
    ),
}

_NAMED = re.compile("|".join(f"(?<![\\w+:-]){re.escape(name)}(?!\\w)" for name in PAPERS))


def papers_named(words: Iterable[str]) -> dict[str, list[str]]:
    """Return the papers' settings that a command names, each with what differs from the paper.

    Parameters
    ----------
    words : iterable of str
        Of a command line; combinations (``fdc:paper+keyformer``) name theirs too.
    """
    found = [match[0] for word in words for match in _NAMED.finditer(word)]
    return {name: PAPERS[name].differences() for name in PAPERS if name in found}


#: First layers, and last ones, that vLLM leaves at 16 bits in turboquant_*.
EDGE = 2
#: Bits of its keys (8 is FP8) and values.
TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}

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
    wrappers = [Wrapper(part) for part in rest]
    if match:
        group = None if match[5] else int(match[4] or 0) or _GROUPS.get(plain_name(base), _GROUP)
        bits = int(match[2]) if match[2] else match[3]
        wrappers.append(Wrapper("per-token", bits, group))
    return base, wrappers


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
                f"--methods: {piece[:80]!r} is not METHOD:OPTION; write for example kq:grid=32 "
                "or kq"
            )
        if entries and entries[-1][1] and _NUMBER.fullmatch(piece):
            entries[-1][1][-1] += f",{piece}"  # of a list: skip=0,-1
        elif colon or "=" not in piece:
            entries.append((method.strip(), [option.strip()] if colon else []))
        elif not entries or not entries[-1][1]:
            raise UsageError(
                f"--methods: option {piece!r} follows no method; write for example kq:{piece}"
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


def own_rate(label: str, options: dict[str, Any]) -> float | None:
    """Take from options the rate that one of several methods has for itself; None without one."""
    text = options.pop("rate", None)
    if text is None:
        return None
    rate = parse_share(text, what=(what := f"--methods {label}: rate"))
    check_rate(rate, what)
    return rate


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
                f"{part} is not in kvprof: kvpress 0.5.5 requires transformers < 5.3, kvprof "
                "5.17 or later; use snapkv, h2o or keyformer"
            )
    if base in every and "=" in given:
        way = f"--rate {given[5:40]}" if given.startswith("rate=") else f"--option {given[:40]}"
        return UsageError(f"method {name[:80]!r}: give options of {base} with {way}")
    near = get_close_matches(name, every, n=1)
    hint = f"did you mean {near[0]}? Choose from" if near else "choose from"
    return UsageError(f"method {name[:80]!r} is unknown; {hint} {', '.join(every)}")
