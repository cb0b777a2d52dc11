"""Made-up results from their classes: a test names what it is about, the rest is made up by type.

A field that a class gains needs no change here; a name that no class has is refused.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from inspect import isclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from kvprof.records.result import build_result
from kvprof.results import class_of
from kvprof.results.base import Part
from tests.records.sample import ENVIRONMENT

_NAMED = {"model": "reference", "fingerprint": "ab12cd34ef56", "dtype": "float32", "device": "cpu"}
_CREATED = datetime(2026, 1, 1, tzinfo=UTC)


def made(
    kind: str, data: Mapping[str, Any] | None = None, /, inputs: Any = None, **envelope: Any
) -> dict[str, Any]:
    """Return a result of the reference model, as JSON has it."""
    fields = class_of(kind).model_fields
    asked = fields["inputs"].annotation
    known = {name: value for name, value in _NAMED.items() if name in _fields(asked)}
    return build_result(
        kind,
        inputs=part(asked, **known | (inputs or {})),
        data=part(fields["data"].annotation, **data or {}),
        **{"environment": ENVIRONMENT, "created": _CREATED} | envelope,
    )


def part(kind: Any, /, **named: Any) -> dict[str, Any]:
    """Return a part of a result; what has a default in its class is left to it."""
    fields = _fields(kind)
    if (unknown := named.keys() - fields) and kind.model_config.get("extra") != "allow":
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    found = {name: _whole(fields[name].annotation, named[name]) for name in fields.keys() & named}
    missing = {name: one for name, one in fields.items() if one.is_required() and name not in named}
    made_up = {name: _any(one.annotation, name, one.metadata) for name, one in missing.items()}
    return {**made_up, **named, **found}


@cache
def _fields(kind: type[Part]) -> dict[str, Any]:
    return {one.alias or name: one for name, one in kind.model_fields.items()}


def _is_part(kind: Any) -> bool:
    return isclass(kind) and issubclass(kind, Part)


def _whole(kind: Any, given: Any) -> Any:
    """Return what a test named, with the parts in it made whole."""
    if _is_part(kind):
        return part(kind, **given) if isinstance(given, Mapping) else given
    inner = get_args(kind)
    if get_origin(kind) in (Annotated, UnionType, Union):
        return _whole(inner[0], given)
    if isinstance(given, Mapping) and inner:
        return {name: _whole(inner[1], one) for name, one in given.items()}
    if isinstance(given, list | tuple) and inner:
        return [_whole(inner[0], one) for one in given]
    return given


def _any(kind: Any, name: str, marks: Any = ()) -> Any:
    """Return a value of a type; null, and nothing in lists and mappings, where that is allowed."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own = [one for field in inner[1:] for one in getattr(field, "metadata", [field])]
        return _any(inner[0], name, [*marks, *own])
    if origin in (UnionType, Union):
        return None if NoneType in inner else _any(inner[0], name, marks)
    if origin is Literal:
        return inner[0]
    if _is_part(kind):
        return part(kind)
    if origin is dict:
        return {f"{name} {at}": _any(inner[1], name) for at in range(_least("min_length", marks))}
    if origin is not None:  # a list or another sequence
        return [_any(inner[0], name) for _ in range(_least("min_length", marks))]
    if kind in (int, float):
        plain, more = (0, 1) if kind is int else (0.5, 0.5)
        return kind(max(plain, _least("ge", marks), _least("gt", marks, -1) + more))
    return {str: name, bool: False, Any: None}[kind]


def _least(bound: str, marks: Any, without: int = 0) -> Any:
    return max((getattr(one, bound, without) for one in marks), default=without)
