"""What all tests of the live view share: the style sheets that Textual has parsed."""

from collections.abc import Iterator
from typing import Any

import pytest
from textual.css.stylesheet import Stylesheet


@pytest.fixture(scope="package", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Let views share what a sheet says under the same variables.

    Each view parses all of Textual's sheets three times until its first screen stands, and again
    with every further one: a twelfth of what these tests take.
    """
    parse = Stylesheet._parse_rules
    known: dict[Any, Any] = {}

    def once(self: Stylesheet, css: str, read_from: Any, *more: Any, **named: Any) -> Any:
        variables = tuple(sorted(self._variables.items()))
        asked = (css, read_from, more, tuple(sorted(named.items())), variables)
        if asked not in known:
            known[asked] = parse(self, css, read_from, *more, **named)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", once)
        yield
