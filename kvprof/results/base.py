"""What every kind's result derives from, and the marks on fields that comparison follows."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from kvprof.printable import printable

__all__ = [
    "Compared",
    "Count",
    "Figure",
    "Interval",
    "Key",
    "Keyed",
    "Part",
    "Result",
    "Size",
    "ends",
    "schema_of",
    "tidy_csv",
    "validated",
]

Count = Annotated[int, Field(ge=0)]
Size = Annotated[float, Field(ge=0)]  # bytes, seconds, nats, shares
Key = tuple[tuple[str, Any], ...]
#: Lower and upper end; None where there is none.
Interval = Annotated[list[float | None], Field(min_length=2, max_length=2)] | None


@dataclass(frozen=True)
class Figure:
    """One number of a result that can be held against another result's."""

    key: Key  # what it is of: names and values, the same in every result of the kind
    name: str
    value: float
    better: str | None = None  # lower or higher
    samples: Sequence[float] | None = None  # whose median `value` is
    interval: tuple[float, float] | None = None
    # Whether a limit on what may get worse counts it: it is what was asked for, no part of it.
    headline: bool = False
    exact: bool = False  # counted or computed, so that it repeats without an interval
    # Times of what no method changes, taken beside it, one for each of `samples` or one for all.
    beside: Sequence[float] | None = None
    control: bool = False  # of what no method changes: a difference between two runs is noise


@dataclass(frozen=True)
class Keyed:
    """Marks what tells rows apart in a comparison: a field, or (by a name) a mapping's keys."""

    name: str = ""


@dataclass(frozen=True)
class Compared:
    """Marks a field that `compare` reads; `interval` names a field, `of` makes the figure."""

    better: str | None = None
    headline: bool = False
    exact: bool = False
    interval: str = ""
    name: str = ""
    of: Callable[[Any], float | None] | None = None


class Part(BaseModel):
    """Base of what a result holds: rows, and the whole. Types are exact, other keys are dropped."""

    model_config = ConfigDict(strict=True, frozen=True)

    def figures(self, key: Key = ()) -> Iterator[Figure]:
        """Yield what can be compared, of this and its parts; overridden where marks fall short."""
        fields = type(self).model_fields
        marks = [(name, mark) for name, field in fields.items() for mark in field.metadata]
        for name, mark in marks:
            if isinstance(mark, Keyed) and not mark.name:
                key = (*key, (name, getattr(self, name)))
        for name, mark in marks:
            value = getattr(self, name)
            if not isinstance(mark, Compared) or value is None:
                continue
            figure = value if mark.of is None else mark.of(value)
            if not isinstance(figure, int | float):
                continue
            ends = getattr(self, mark.interval) if mark.interval else None
            known = tuple(ends) if ends is not None and None not in ends else None
            yield Figure(
                key,
                mark.name or name,
                figure,
                mark.better,
                interval=known,
                headline=mark.headline,
                exact=mark.exact,
            )
        for name, field in fields.items():
            yield from _held(getattr(self, name), field.metadata, key)


def _held(value: Any, marks: Sequence[Any], key: Key) -> Iterator[Figure]:
    """Yield the figures of parts that a field holds: one, a list, or a mapping marked `Keyed`."""
    if isinstance(value, Part):
        yield from value.figures(key)
    elif isinstance(value, list) and value and isinstance(value[0], Part):
        for one in value:
            yield from one.figures(key)
    elif isinstance(value, dict):
        named = next((mark.name for mark in marks if isinstance(mark, Keyed)), "")
        for entry, one in value.items():
            if named and isinstance(one, Part):
                yield from one.figures((*key, (named, entry)))


P = TypeVar("P", bound=Part)


def validated(part: type[P], found: Mapping[str, Any]) -> P:
    """Return a part as JSON has it; a ValueError names where it differs first, and how."""
    try:
        return part.model_validate(dict(found))
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in first["loc"])
        raise ValueError(f"{where.lstrip('.')}: {first['msg']}") from None


class Result(Part):
    """Base of a kind's result: the envelope around ``inputs`` and ``data`` of its own types."""

    columns: ClassVar[tuple[str, ...]] = ()  # of the CSV; empty where the kind has none

    kind: str
    complete: bool = True
    incomplete_reason: str | None = None
    warnings: list[str] = []
    created: str = ""
    kvprof_version: str = ""
    environment: dict[str, Any] = {}
    inputs: Any
    data: Any

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Self:
        """Return a result as JSON has it."""
        return validated(cls, result)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the CSV, by its columns."""
        return iter(())

    def to_csv(self) -> str:
        """Return every figure in one table that pandas reads as it is."""
        return tidy_csv(self.columns, self.rows())


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave out titles that only repeat a field's name."""
        return False


def schema_of(result: type[Result], root: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind, whose own definitions stand below `root`."""
    return result.model_json_schema(
        ref_template=f"{root}/$defs/{{model}}", schema_generator=_Untitled
    )


# --- Tidy tables as CSV: one row per observation, empty where a column does not apply.

# Some programs take the wide signs of East Asian keyboards, and look past blanks in front.
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]|[\t\n]")


def tidy_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header, which pandas reads without an option."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writerow({name: _cell(name) for name in columns})
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def ends(name: str, bounds: Sequence[Any] | None) -> dict[str, Any]:
    """Return an interval as the columns ``<name>_low`` and ``<name>_high``; empty without one."""
    before = f"{name}_" if name else ""
    low, high = bounds or (None, None)
    return {f"{before}low": low, f"{before}high": high}


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    clean = printable(value)
    return f"'{clean}" if _FORMULA.match(clean) and not _is_number(clean) else clean


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
