"""Reports: what a result says, as blocks that a terminal, a page, Markdown and a figure draw."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvprof.results import class_of

if TYPE_CHECKING:
    from kvprof.report.blocks import Report

__all__ = ["report_of"]


def report_of(result: Mapping[str, Any]) -> "Report":
    """Return the report of a result whose kind is a class."""
    kind = result["kind"]
    made: Report = import_module(f"kvprof.report.{kind}").report(class_of(kind).of(result))
    return made
