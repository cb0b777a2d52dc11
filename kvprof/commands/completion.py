"""What the shell offers for an argument or an option of more than one command.

A function here takes what was typed so far and returns what it could become; typer asks it, once
``kvprof --install-completion`` was run. An empty list leaves the shell to complete file names.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from kvprof.methods.named import method_names

__all__ = ["folders_here", "methods", "models", "shapes", "starting"]


def models(incomplete: str) -> list[str]:
    """Return models by name: the embedded one, those in the hub's cache, folders with a config."""
    folders = [str(path) for path in folders_here(incomplete) if (path / "config.json").is_file()]
    return starting(["reference", *_downloaded(), *folders], incomplete)


def shapes(incomplete: str) -> list[str]:
    """Return the model shapes that ship, for ``kvprof bench --model``."""
    from kvprof.benchmark.shapes import shape_names

    return starting(shape_names(), incomplete)


def methods(incomplete: str) -> list[str]:
    """Return methods; in a list with commas what its last entry could become."""
    begun, comma, last = incomplete.rpartition(",")
    return [f"{begun}{comma}{name}" for name in starting(method_names(), last)]


def starting(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin with what was typed, each once."""
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def folders_here(incomplete: str) -> list[Path]:
    """Return the folders whose names begin with what was typed."""
    parent, _, begun = incomplete.rpartition("/")
    where = Path(parent or ("/" if incomplete.startswith("/") else "."))
    try:
        return sorted(path for path in where.glob(f"{begun}*") if path.is_dir())
    except (OSError, ValueError):  # no such folder, or what was typed is no pattern
        return []


def _downloaded() -> list[str]:
    """Return the models in the hub's cache, found where huggingface_hub looks for them."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    names = sorted(path.name for path in cache.glob("models--*")) if cache.is_dir() else []
    return [name.removeprefix("models--").replace("--", "/") for name in names]
