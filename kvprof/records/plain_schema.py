"""Whether JSON values match a schema, without saying where they do not.

A spectrum holds a hundred thousand numbers and a stability study ten thousand rows of twenty
entries. jsonschema, which says what is wrong, takes seconds for them; that is asked only of what
is not found right here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

__all__ = ["Matches", "matcher"]

Matches = Callable[[Any], bool]


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) or (isinstance(x, Number) and not isinstance(x, bool))


def _is_integer(x: Any) -> bool:
    if isinstance(x, float):
        return x.is_integer()
    return isinstance(x, int) and not isinstance(x, bool)


# As jsonschema has them.
_TYPES: Mapping[str, Matches] = {
    "number": _is_number,
    "integer": _is_integer,
    "string": lambda x: isinstance(x, str),
    "boolean": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
    "array": lambda x: isinstance(x, list),
    "object": lambda x: isinstance(x, dict),
}
# They say nothing about a value.
_WORDS = frozenset({"$defs", "$schema", "description", "title", "else", "then"})


def matcher(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Matches:
    """Return a function that says whether a JSON value matches a schema (draft 2020-12).

    Parameters
    ----------
    schema : mapping
    root : mapping
        The document that its references are into.

    Returns
    -------
    callable

    Raises
    ------
    KeyError
        For a keyword that no schema of kvprof's uses so far.
    """
    return _Document(root).compiled(schema)


class _Document:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: dict[str, Matches] = {}

    def compiled(self, schema: Mapping[str, Any] | bool) -> Matches:
        if isinstance(schema, bool):
            return lambda _: schema
        checks = [
            self._check(keyword, value, schema)
            for keyword, value in schema.items()
            if keyword not in _WORDS
        ]
        if len(checks) == 1:
            return checks[0]
        return lambda x: all(check(x) for check in checks)

    def _check(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> Matches:
        if keyword in _BOUNDS:
            within, of = _BOUNDS[keyword], _SIZED[keyword]
            return lambda x: not of(x) or within(x, value)
        match keyword:
            case "type":
                return _typed(value)
            case "enum":
                return _one_of(value)
            case "const":
                return _one_of([value])
            case "pattern":
                found = re.compile(value).search
                return lambda x: not isinstance(x, str) or found(x) is not None
            case "$ref":
                return self._reference(value)
            case "required":
                return lambda x: not isinstance(x, dict) or all(name in x for name in value)
            case "properties":
                return self._properties(value)
            case "additionalProperties":
                return self._additional(value, frozenset(schema.get("properties", ())))
            case "items":
                return self._items(value)
            case "if":
                condition, then, other = (
                    self.compiled(part)
                    for part in (value, schema.get("then", True), schema.get("else", True))
                )
                return lambda x: then(x) if condition(x) else other(x)
            case "allOf" | "anyOf" | "oneOf":
                parts = [self.compiled(part) for part in value]
                enough = _ENOUGH[keyword]
                return lambda x: enough([part(x) for part in parts])
        raise KeyError(keyword)

    def _reference(self, name: str) -> Matches:
        if name not in self._referred:
            # What refers to itself finds this while it is made.
            self._referred[name] = lambda x: self._referred[name](x)
            schema: Any = self._root
            for step in name.removeprefix("#").split("/")[1:]:
                schema = schema[step]
            self._referred[name] = self.compiled(schema)
        return self._referred[name]

    def _properties(self, schemas: Mapping[str, Any]) -> Matches:
        parts = [(name, self.compiled(schema)) for name, schema in schemas.items()]
        return lambda x: (
            not isinstance(x, dict) or all(part(x[name]) for name, part in parts if name in x)
        )

    def _additional(self, schema: Mapping[str, Any] | bool, named: frozenset[str]) -> Matches:
        part = self.compiled(schema)
        return lambda x: (
            not isinstance(x, dict)
            or all(part(one) for name, one in x.items() if name not in named)
        )

    def _items(self, schema: Mapping[str, Any]) -> Matches:
        part = self.compiled(schema)
        return lambda x: not isinstance(x, list) or all(map(part, x))


def _typed(asked: str | Sequence[str]) -> Matches:
    tests = [_TYPES[name] for name in ([asked] if isinstance(asked, str) else asked)]
    return tests[0] if len(tests) == 1 else lambda x: any(test(x) for test in tests)


def _one_of(values: Sequence[Any]) -> Matches:
    """Return whether a value is one of these: words, true, false or null."""
    words = frozenset(value for value in values if isinstance(value, str))
    others = [value for value in values if value is None or isinstance(value, bool)]
    if len(words) + len(others) < len(values):
        raise KeyError(f"what is no word among {values}")
    return lambda x: x in words if isinstance(x, str) else any(x is value for value in others)


_ENOUGH: Mapping[str, Callable[[list[bool]], bool]] = {
    "allOf": all,
    "anyOf": any,
    "oneOf": lambda held: sum(held) == 1,
}
_BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda x, bound: not x < bound,
    "maximum": lambda x, bound: not x > bound,
    "exclusiveMinimum": lambda x, bound: not x <= bound,
    "exclusiveMaximum": lambda x, bound: not x >= bound,
    "minItems": lambda x, bound: len(x) >= bound,
    "maxItems": lambda x, bound: len(x) <= bound,
    "minProperties": lambda x, bound: len(x) >= bound,
}
_SIZED: Mapping[str, Matches] = {
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _TYPES["number"]
    ),
    **dict.fromkeys(("minItems", "maxItems"), _TYPES["array"]),
    "minProperties": _TYPES["object"],
}
