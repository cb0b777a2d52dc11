"""The JSON Schema of results: an envelope, and one file per kind in ``schema/``.

A new kind is a new file there, which describes its ``data`` and, where ``$defs`` has ``inputs``,
its inputs too; nothing else has to name it.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from kvprof.records.plain_schema import Matches, matcher

__all__ = ["kinds", "refuse_first", "result_schema", "validate_part", "validate_result"]

_FOLDER = resources.files("kvprof.records") / "schema"
_ENVELOPE = "envelope.json"
_LONGEST_MESSAGE = 160


@cache
def kinds() -> tuple[str, ...]:
    """Return the kinds of result that this kvprof knows."""
    names = (entry.name for entry in _FOLDER.iterdir())
    found = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return tuple(sorted(kind for kind in found if f"{kind}.json" != _ENVELOPE))


def result_schema() -> dict[str, Any]:
    """Return one JSON Schema document (draft 2020-12) for results of every kind."""
    schema: dict[str, Any] = _read(_ENVELOPE)
    schema["properties"]["kind"] = {"enum": list(kinds())}
    schema["allOf"] = []
    for kind in kinds():
        described = _read(f"{kind}.json")
        schema["$defs"][kind] = described
        parts = {"data": {"$ref": f"#/$defs/{kind}"}}
        if "inputs" in described.get("$defs", {}):
            parts["inputs"] = {"$ref": f"#/$defs/{kind}/$defs/inputs"}
        schema["allOf"].append(
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {"properties": parts},
            }
        )
    return schema


def validate_result(result: Any) -> None:
    """Check a result against the schema.

    Raises
    ------
    ValueError
        In one line: where it differs first, and how.
    """
    if not _matcher("")(result):
        refuse_first(_validator().iter_errors(result), "the result")


def validate_part(value: Any, part: str) -> None:
    """Check what stands in results of a kind by itself, where it is kept elsewhere too.

    Parameters
    ----------
    value : object
        As JSON has it.
    part : str
        Its place in the schema, for example ``eval/$defs/evaluation``.

    Raises
    ------
    ValueError
        As `validate_result`.
    """
    if not _matcher(f"#/$defs/{part}")(value):
        validator = _validator().evolve(
            schema={"$ref": f"#/$defs/{part}", "$defs": result_schema()["$defs"]}
        )
        refuse_first(validator.iter_errors(value), part.rpartition("/")[2])


def refuse_first(errors: Iterable[ValidationError], what: str) -> None:
    """Raise the error that tells most, in one line.

    Parameters
    ----------
    errors : iterable of ValidationError
        From ``iter_errors`` of a validator of jsonschema; none of them is no complaint.
    what : str
        The whole that was looked at, for what has no place in it.

    Raises
    ------
    ValueError
        With the place, and how it differs.
    """
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
def _matcher(part: str) -> Matches:
    schema = result_schema()
    return matcher({"$ref": part} if part else schema, schema)


@cache
def _validator() -> Any:
    return Draft202012Validator(result_schema())
