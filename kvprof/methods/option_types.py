"""What an option of a method may be: said by the annotation of its argument, read in one place.

An argument annotated ``bool`` takes true or false, ``int`` a whole number, ``float`` a number, and
``tuple[int, int]`` two of them with a comma between. ``Annotated[str, Among("a", "b")]`` takes one
of these words, ``Annotated[int, AtLeast(1)]`` nothing below, and ``Annotated[int | str,
BitsAmong(8, 4)]`` one of these numbers of bits or ``k8v4``.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from kvprof.analysis.rank_allocation import ALLOCATIONS
from kvprof.errors import UsageError
from kvprof.methods.named import side_bits
from kvprof.methods.pair_bases import KEY_BASES, VALUE_BASES
from kvprof.sizes import MOST, parse_share

__all__ = [
    "Allocation",
    "Among",
    "AtLeast",
    "BitsAmong",
    "Count",
    "KeyBasis",
    "Positive",
    "ValueBasis",
    "option_types",
    "read_option",
]

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SHOWN = 40  # characters of a wrong value in a message


@dataclass(frozen=True, init=False)
class Among:
    """One of these, and nothing else."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)


@dataclass(frozen=True, init=False)
class BitsAmong:
    """One of these numbers of bits, or ``k8v4`` of two of them: keys' and values'."""

    choices: tuple[int, ...]

    def __init__(self, *choices: int) -> None:
        object.__setattr__(self, "choices", choices)


@dataclass(frozen=True)
class AtLeast:
    """A number from `least` on."""

    least: float


Allocation = Annotated[str, Among(*ALLOCATIONS)]
KeyBasis = Annotated[str, Among(*KEY_BASES, "none")]
ValueBasis = Annotated[str, Among(*VALUE_BASES, "none")]
#: A rank, or what ranks are multiples of.
Positive = Annotated[int, AtLeast(1)]
#: A number of tokens or heads, which may be 0.
Count = Annotated[int, AtLeast(0)]


def option_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a method and what each takes, an annotation.

    Parameters
    ----------
    function : callable
        The method; its keyword-only arguments are its options. One without an annotation that can
        be read takes what its default is.
    """
    try:
        found = inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError, TypeError):  # of somebody's names that are for checkers only
        found = inspect.signature(function)
    return {
        one.name: _of_default(one.default)
        if one.annotation is inspect.Parameter.empty or isinstance(one.annotation, str)
        else one.annotation
        for one in found.parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _of_default(default: Any) -> Any:
    if isinstance(default, tuple | list) and default:
        # The type is known when this runs, not when it is checked.
        return tuple[type(default[0]), ...]  # type: ignore[misc]
    return type(default) if isinstance(default, bool | int | float | str) else Any


def read_option(method: str, name: str, kind: Any, given: Any) -> Any:
    """Return an option's value as what it is declared to be.

    Parameters
    ----------
    method, name : str
        For the message.
    kind : annotation
        From `option_types`.
    given : Any
        Text of a command line, or the value itself.

    Raises
    ------
    UsageError
        Naming what is accepted.
    """
    try:
        return _read(kind, given)
    except _WrongError as wrong:
        text = given if isinstance(given, str) else repr(given)
        shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
        raise UsageError(f"{method}: option {name} is {wrong}, not {shown}") from None


class _WrongError(Exception):
    """Says what would have been right."""


def _read(kind: Any, given: Any) -> Any:
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *limits = get_args(kind)
        return _limited(inner, limits, given)
    if origin in (Union, types.UnionType):
        wrong: dict[str, None] = {}
        for one in get_args(kind):
            if one is type(None):
                if given is None or (isinstance(given, str) and given.lower() == "none"):
                    return None
                wrong["none"] = None
                continue
            try:
                return _read(one, given)
            except _WrongError as problem:
                wrong[str(problem)] = None
        raise _WrongError(" or ".join(wrong))
    if origin in (tuple, list):
        return _several(get_args(kind), given, lambda one, part: _read(one, part))
    if kind is bool:
        if isinstance(given, str) and given.strip().lower() in _WORDS:
            return _WORDS[given.strip().lower()]
        if isinstance(given, bool):
            return given
        raise _WrongError("true or false")
    if kind in (int, float):
        return _number(kind, given)
    if kind is str:
        if isinstance(given, str) and given.strip():
            return given.strip()
        raise _WrongError("a word")
    return given  # a type of somebody's own, who reads it


def _number(kind: type, given: Any) -> Any:
    wrong = _WrongError("a whole number" if kind is int else "a number")
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise wrong
    if kind is int and isinstance(given, float):
        raise wrong
    try:
        value = int(given) if kind is int else parse_share(given, what="")
    except (ValueError, UsageError):
        raise wrong from None
    if kind is int and abs(value) > MOST:
        raise _WrongError(f"a whole number up to {MOST:,}")
    return value


def _several(kinds: tuple[Any, ...], given: Any, read: Callable[[Any, Any], Any]) -> Any:
    parts = given.split(",") if isinstance(given, str) else given
    if not isinstance(parts, list | tuple) or not parts:
        raise _WrongError("a list with commas between")
    if kinds[-1] is Ellipsis:
        return tuple(read(kinds[0], part) for part in parts)
    if len(parts) != len(kinds):
        raise _WrongError(f"{len(kinds)} values separated by commas")
    return tuple(read(kind, part) for kind, part in zip(kinds, parts, strict=True))


def _limited(inner: Any, limits: list[Any], given: Any) -> Any:
    """Read a value within limits; those of a list hold for each of its values."""
    if get_origin(inner) in (tuple, list):
        kinds = get_args(inner)
        try:
            return _several(kinds, given, lambda one, part: _limited(one, limits, part))
        except _WrongError as wrong:
            if "comma" in str(wrong):
                raise
            raise _WrongError(f"a list separated by commas, each {wrong}") from None
    for limit in limits:
        if isinstance(limit, BitsAmong):
            return _bits(limit.choices, given)
        if isinstance(limit, Among):
            words = _WrongError(f"one of {', '.join(map(str, limit.choices))}")
            try:
                value = _read(inner, given)
            except _WrongError:
                raise words from None
            if value not in limit.choices:
                raise words
        elif isinstance(limit, AtLeast) and _read(inner, given) < limit.least:
            what = "a whole number" if inner is int else "a number"
            raise _WrongError(f"{what} from {limit.least:g} on")
    return _read(inner, given)


def _bits(choices: tuple[int, ...], given: Any) -> int | str:
    pair = side_bits(given) if type(given) in (int, str) else None
    if pair is None or any(one not in choices for one in pair):
        named = ", ".join(map(str, choices))
        more, fewer, *_ = sorted(choices, reverse=True)
        raise _WrongError(f"one of {named}, or k{more}v{fewer} where keys and values differ")
    return pair[0] if pair[0] == pair[1] else f"k{pair[0]}v{pair[1]}"
