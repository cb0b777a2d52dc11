"""Where recipes lie, which ones a user means, and the one to start from."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from kvprof.errors import FailedError, UsageError

__all__ = ["ALL", "EXAMPLE", "PACKAGE", "find_recipes", "recipe_files", "template"]

#: Where kvprof is installed.
PACKAGE = Path(__file__).resolve().parents[1]

#: Stands for every recipe that ships.
ALL = "all"


def recipe_files() -> list[Path]:
    """Return the recipes that ship, by name: beside the package in a checkout, else inside it."""
    package = PACKAGE
    beside = package.parent / "recipes"
    # A folder of that name beside site-packages would be a stranger's.
    checkout = (package.parent / "pyproject.toml").is_file() and beside.is_dir()
    folder = beside if checkout else package / "assets" / "recipes"
    found = sorted(folder.glob("*.yaml"), key=lambda path: _natural(path.stem))
    if not found:
        raise FailedError(f"no recipes in {folder}; reinstall kvprof")
    return found


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key by which table 10 comes after table 9."""
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in name.split("-"))


def find_recipes(names: list[str]) -> list[Path]:
    """Return the files that names mean, each once and in the order in which they were named."""
    found: dict[Path, None] = {}
    for name in names:
        if name.endswith((".yaml", ".yml")) or "/" in name:
            if not Path(name).is_file():
                raise UsageError(f"{name}: no such file")
            found[Path(name)] = None
            continue
        shipped = recipe_files()
        if name == ALL:
            meant = [path for path in shipped if not path.stem.startswith("example-")]
        else:
            meant = [path for path in shipped if fnmatchcase(path.stem, name)]
        if not meant:
            raise UsageError(
                f"{name}: no such recipe (see kvprof recipe list); give your own file with its "
                ".yaml"
            )
        found |= dict.fromkeys(meant)
    return list(found)


#: The recipe that users start from.
EXAMPLE = "example-sweep"

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def template(name: str) -> str:
    """Return the example's text with a name of the user's own."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a recipe name; use lower-case letters, digits, - and .")
    (example,) = [path for path in recipe_files() if path.stem == EXAMPLE]
    text = example.read_text("utf-8")
    return re.sub(rf"^name: {EXAMPLE}\b", f"name: {name}", text, count=1, flags=re.MULTILINE)
