"""What matches at once is what jsonschema finds nothing wrong with, keyword by keyword."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from kvprof.records.plain_schema import matcher
from kvprof.records.schema import kinds, result_schema
from tests.records.sample import benchmark_result, spectrum_result, stability_result

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 1.5, 10**30, math.nan, math.inf, np.float64(2),
    np.int64(1), "", "a", "abc", [], [1], ["a"], [1, "a"], [[1], [True]], (1,), {}, {"a": 1},
    {"a": "b"}, {"a": None, "b": 2}, {"b": {"a": 1}}, {"kind": "x", "size": 1},
    {"kind": "y", "size": 1}, {"kind": "x"}, OrderedDict(a="b"),
]  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [
    *({"type": name} for name in ("array", "boolean", "integer", "null", "number", "object")),
    {"type": "string", "description": "Words about it.", "title": "It"},
    {"type": ["string", "null"]},
    {"type": ["integer", "array"], "minimum": 1},
    {"minimum": 1},
    {"maximum": 1},
    {"exclusiveMinimum": 1},
    {"exclusiveMaximum": 1},
    {"minItems": 1},
    {"maxItems": 1},
    {"minProperties": 2},
    {"enum": ["a", None]},
    {"enum": [True, "abc"]},
    {"const": False},
    {"pattern": "^ab"},
    {"required": ["a", "b"]},
    {"properties": {"a": {"type": "string"}, "b": {"minimum": 3}}},
    {"properties": {"a": {}}, "additionalProperties": False},
    {"properties": {"a": False}, "additionalProperties": {"type": "integer"}},
    {"items": {"type": "integer"}},
    {"items": {"items": {"type": "integer"}}},
    {"allOf": [{"type": "number"}, {"minimum": 1}]},
    {"anyOf": [{"type": "string"}, {"minimum": 1}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 1}]},
    {"$ref": "#/$defs/named/$defs/text", "$defs": {"named": {"$defs": {"text": {"const": "a"}}}}},
    {"$ref": "#/$defs/nest", "$defs": {"nest": {"properties": {"b": {"$ref": "#/$defs/nest"}},
                                                "additionalProperties": {"const": "b"}}}},
    {"if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
     "then": {"required": ["size"]}},
    {"if": {"type": "number"}, "then": {"minimum": 1}, "else": {"type": "string"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_every_keyword_means_what_it_means_to_jsonschema(schema: dict[str, Any]) -> None:
    matches, validator = matcher(schema, schema), Draft202012Validator(schema)
    for value in VALUES:
        assert matches(value) == validator.is_valid(value), value


def test_a_keyword_that_is_not_known_is_not_passed_over() -> None:
    for schema in ({"uniqueItems": True}, {"items": {"multipleOf": 2}}, {"enum": [1, 2]}):
        with pytest.raises(KeyError):
            matcher(schema, schema)
    schema = result_schema()
    assert len(schema["allOf"]) == len(kinds())
    matcher(schema, schema)  # results hold none


@pytest.mark.parametrize("result", [spectrum_result(), stability_result(), benchmark_result()])
def test_a_result_with_anything_else_in_any_place_is_refused_where_jsonschema_does(
    result: dict[str, Any],
) -> None:
    schema = result_schema()
    matches, validator = matcher(schema, schema), Draft202012Validator(schema)
    assert matches(result)
    seen = set()

    def change(place: Any, names: tuple[str, ...]) -> None:
        for key in range(min(len(place), 1)) if isinstance(place, list) else list(place):
            kept = place[key]
            own = (*names, "" if isinstance(place, list) else key)
            if isinstance(kept, dict | list):
                change(kept, own)
            for value in (None, True, -1, 0.5, "x", [], {}):
                place[key] = value
                seen.add(found := matches(result))
                assert found == validator.is_valid(result), (own, value)
            place[key] = kept

    change(result, ())
    assert seen == {True, False}
