"""A report as one HTML page that needs nothing else: its plots are drawn inside it."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvprof.printable import printable
from kvprof.report.blocks import Block, Chart
from kvprof.report.figure import drawn
from kvprof.views.figure import figure_bytes

__all__ = ["page"]

_PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)


def page(title: str, headline: str, blocks: Sequence[Block], written: str) -> str:
    """Return blocks as a page: no script, no network, plots as inline SVG."""
    shown = []
    for block in blocks:
        figure = _inline(drawn(block)) if isinstance(block, Chart) else ""
        shown.append((type(block).__name__, block, figure))
    text: str = _template().render(title=title, headline=headline, blocks=shown, written=written)
    return text


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    known = Environment(loader=PackageLoader("kvprof.report", "."), autoescape=True)
    known.filters["printable"] = printable
    return known.get_template("page.html")


def _inline(figure: Any) -> Any:
    """Return a figure's SVG element alone: no XML declaration, no document type."""
    from markupsafe import Markup

    return Markup(_PROLOGUE.sub("", figure_bytes(figure, "svg").decode("utf-8"), count=1).strip())
