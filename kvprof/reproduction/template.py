"""A recipe to start from: the worked example under another name."""

import re

from kvprof.errors import UsageError
from kvprof.reproduction.find import recipe_files

__all__ = ["EXAMPLE", "template"]

#: The recipe that users start from.
EXAMPLE = "example-sweep"

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def template(name: str) -> str:
    """Return the example's text with a name of the user's own.

    Parameters
    ----------
    name : str

    Raises
    ------
    UsageError
        When no recipe can have that name.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no recipe's name: lower-case letters, digits, - and .")
    (example,) = [path for path in recipe_files() if path.stem == EXAMPLE]
    text = example.read_text("utf-8")
    return re.sub(rf"^name: {EXAMPLE}\b", f"name: {name}", text, count=1, flags=re.MULTILINE)
