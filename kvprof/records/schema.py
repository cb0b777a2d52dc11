"""The JSON Schema of results: an envelope, and one file per kind in ``schema/``.

A kind of `kvprof.results` is described by its class; one that is no class yet by a file, with its
``data`` and, where ``$defs`` has ``inputs``, its inputs too.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from kvprof.results import KINDS, class_of
from kvprof.results.base import schema_of

__all__ = ["kinds", "refuse_first", "result_schema", "validate_result"]

_FOLDER = resources.files("kvprof.records") / "schema"
_ENVELOPE = "envelope.json"
_LONGEST_MESSAGE = 160


@cache
def kinds() -> tuple[str, ...]:
    """Return the kinds of result that this kvprof knows."""
    names = (entry.name for entry in _FOLDER.iterdir())
    found = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return tuple(sorted({*KINDS, *(kind for kind in found if f"{kind}.json" != _ENVELOPE)}))


def result_schema() -> dict[str, Any]:
    """Return one JSON Schema document (draft 2020-12) for results of every kind."""
    schema: dict[str, Any] = _read(_ENVELOPE)
    schema["properties"]["kind"] = {"enum": list(kinds())}
    schema["allOf"] = []
    for kind in kinds():
        if kind in KINDS:
            described = schema_of(class_of(kind), f"#/$defs/{kind}")
            parts = {part: described["properties"][part] for part in ("inputs", "data")}
        else:
            described = _read(f"{kind}.json")
            parts = {"data": {"$ref": f"#/$defs/{kind}"}}
        schema["$defs"][kind] = described
        if kind not in KINDS and "inputs" in described.get("$defs", {}):
            parts["inputs"] = {"$ref": f"#/$defs/{kind}/$defs/inputs"}
        schema["allOf"].append(
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {"properties": parts},
            }
        )
    return schema


def validate_result(result: Any) -> None:
    """Check a result against the schema."""
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind in KINDS:  # its class looks at the rest, in a hundredth of the time
        refuse_first(_envelope().iter_errors(result), "the result")
        class_of(kind).of(result)
    else:
        refuse_first(_validator().iter_errors(result), "the result")


def refuse_first(errors: Iterable[ValidationError], what: str) -> None:
    """Raise the error that tells most, in one line."""
    error = best_match(errors)
    if error is None:
        return
    where = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path
    ).lstrip(".")
    message = error.message
    if len(message) > _LONGEST_MESSAGE:
        # jsonschema quotes the whole offending value, which may be a thousand numbers.
        message = f"{message[: _LONGEST_MESSAGE // 2]} … {message[-_LONGEST_MESSAGE // 2 :]}"
    raise ValueError(f"{where or what}: {' '.join(message.split())}")


def _read(name: str) -> Any:
    return json.loads((_FOLDER / name).read_text("utf-8"))


@cache
def _envelope() -> Any:
    schema = _read(_ENVELOPE)
    schema["properties"]["kind"] = {"enum": list(kinds())}
    return Draft202012Validator(schema)


@cache
def _validator() -> Any:
    return Draft202012Validator(result_schema())
