"""A command's request: a class whose fields are its options, and the command made of it.

A field is an ``Annotated`` type: the value's type, Typer's option (name, help, group, bounds) and
marks. A mixin is a `Request` of fields that commands share.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from typer.models import OptionInfo, ParameterInfo

from kvprof.errors import UsageError

__all__ = [
    "Input",
    "Mark",
    "Parsed",
    "Request",
    "Rule",
    "command",
    "excludes",
    "needs",
    "one_of",
    "written",
]

R = TypeVar("R", bound="Request")


class Mark(Enum):
    """What a field's value does; a recipe may ask for what is free or reads, and nothing else."""

    FREE = "measures; names no file"
    READS = "may name a file that is read"
    WRITES = "names a file that is written"


@dataclass(frozen=True)
class Input:
    """Marks a field as an input of the result, under its own name or another."""

    name: str = ""


@dataclass(frozen=True)
class Parsed:
    """Marks a field whose text is read by a function: ``read(text, what="--option")``."""

    read: Callable[..., Any]


def written(default: str) -> Any:
    """Return a default as people write it, for a field that is `Parsed`."""
    return Field(default, validate_default=True)


#: Returns what is wrong with a request; None where nothing is.
Rule = Callable[[Any], str | None]


def needs(field: str, other: str) -> Rule:
    """Refuse `field` without `other`."""

    def check(request: Request) -> str | None:
        wrong = request.has(field) and not request.has(other)
        return f"{request.named(field)} requires {request.named(other)}" if wrong else None

    return check


def excludes(field: str, *others: str, unless: str = "") -> Rule:
    """Refuse any of `others` where `field` is given, unless another one is."""

    def check(request: Request) -> str | None:
        given = request.given(*others) if request.has(field) else ""
        if not given or (unless and request.has(unless)):
            return None
        return f"{request.named(field)} cannot be combined with {given}"

    return check


def one_of(*fields: str) -> Rule:
    """Refuse more than one of `fields`."""

    def check(request: Request) -> str | None:
        given = request.given(*fields)
        return f"{given} cannot be combined; give one" if " and " in given else None

    return check


class Request(BaseModel):
    """Base of every request; `rules` say what its fields need and exclude, a mixin's first."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    rules: ClassVar[tuple[Rule, ...]] = ()

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise UsageError(f"{where}: {first['msg']}, not {first['input']!r}") from None

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: Any) -> Any:
        """Parse text, and hold a number against its option's bounds."""
        field = cls.model_fields[info.field_name]
        for mark in field.metadata:
            if isinstance(mark, Parsed) and isinstance(value, str):
                return mark.read(value, what=_option_name(info.field_name, field))
            if isinstance(mark, ParameterInfo) and isinstance(value, int | float):
                low, high = mark.min, mark.max
                if (low is not None and value < low) or (high is not None and value > high):
                    name = _option_name(info.field_name, field)
                    raise UsageError(f"{name} {value} is not between {low} and {high}")
        return value

    @model_validator(mode="after")
    def _keep_rules(self) -> "Request":
        for owner in reversed(type(self).__mro__):
            for rule in vars(owner).get("rules", ()):
                if (wrong := rule(self)) is not None:
                    raise UsageError(wrong)
        return self

    def has(self, field: str) -> bool:
        """Tell whether a field was given another value than its default."""
        value = getattr(self, field)
        nothing = value is None or value is False or value == []  # 0 is something
        return field in self.model_fields_set and not nothing

    def given(self, *fields: str) -> str:
        """Return which of some options were given, as a sentence names them."""
        return " and ".join(self.named(name) for name in fields if self.has(name))

    @classmethod
    def named(cls, field: str) -> str:
        """Return what a field is called at the command line."""
        return _option_name(field, cls.model_fields[field])

    @classmethod
    def marked(cls, mark: Mark) -> Iterator[str]:
        """Yield the fields that carry a mark."""
        return (name for name, field in cls.model_fields.items() if mark in field.metadata)

    @classmethod
    def recipe_options(cls) -> tuple[frozenset[str], frozenset[str]]:
        """Return the options that a recipe may ask for: the free ones, and those that read."""
        free, reads = (
            frozenset(
                spelling
                for name in cls.marked(mark)
                for spelling in _spellings(_option_info(cls.model_fields[name]))
            )
            for mark in (Mark.FREE, Mark.READS)
        )
        return free, reads

    def inputs(self) -> dict[str, Any]:
        """Return what the result keeps of the request."""
        return {
            mark.name or name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            for mark in field.metadata
            if isinstance(mark, Input)
        }

    def files(self, mark: Mark) -> dict[str, Any]:
        """Return the values of the fields that carry a mark, by option."""
        return {self.named(name): getattr(self, name) for name in self.marked(mark)}


def _option_info(field: FieldInfo) -> Any:
    return next(one for one in field.metadata if isinstance(one, ParameterInfo))


def _spellings(info: Any) -> list[str]:
    return [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]


def _option_name(name: str, field: FieldInfo) -> str:
    info = _option_info(field)
    named = _spellings(info) if isinstance(info, OptionInfo) else []
    return named[0].partition("/")[0] if named else name


def command(request: type[R], run: Callable[[R], None]) -> Callable[..., None]:
    """Return the Typer command of a request: its signature is the fields, its help the text."""
    parameters = []
    for name, field in request.model_fields.items():
        text = any(isinstance(mark, Parsed) for mark in field.metadata)
        parameters.append(
            inspect.Parameter(
                field.alias or name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if field.is_required() else field.default,
                annotation=Annotated[str | None if text else field.annotation, _option_info(field)],
            )
        )
    signature = inspect.Signature(parameters)

    def made(*arguments: Any, **named: Any) -> None:
        given = signature.bind(*arguments, **named).arguments
        defaults = signature.parameters
        run(request(**{k: v for k, v in given.items() if v != defaults[k].default}))

    made.__name__ = run.__name__
    made.__doc__ = request.__doc__
    # Functions take attributes, whose type says nothing of it.
    made.__signature__ = signature  # type: ignore[attr-defined]
    made.__annotations__ = {one.name: one.annotation for one in parameters}
    made.request = request  # type: ignore[attr-defined]
    return made
