"""Results as classes: one module a kind, which JSON, its schema, CSV and comparison follow."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvprof.results.base import Result

__all__ = ["KINDS", "class_of"]

#: Kinds whose results are classes: the modules of this folder.
KINDS = tuple(sorted({one.stem for one in Path(__file__).parent.glob("[!_]*.py")} - {"base"}))


@cache
def class_of(kind: str) -> "type[Result]":
    """Return the class of a kind: ``SpectrumResult`` of ``kvprof.results.spectrum``."""
    found: type[Result] = getattr(
        import_module(f"kvprof.results.{kind}"), f"{kind.capitalize()}Result"
    )
    return found
