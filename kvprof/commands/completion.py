"""What the shell offers for an argument or an option of more than one command.

A function here takes what was typed so far and returns what it could become; typer asks it, once
``kvprof --install-completion`` was run. An empty list leaves the shell to complete file names.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import typer

from kvprof.errors import KvprofError
from kvprof.methods.named import method_names
from kvprof.models.gguf import smollm2_file

__all__ = [
    "folders_here",
    "gguf_files",
    "methods",
    "models",
    "shapes",
    "starting",
]


def models(incomplete: str) -> list[str]:
    """Return models by name: kvprof's own, those in the hub's cache, folders and GGUF files."""
    return starting([*_own(), *_downloaded(), *_models_here(incomplete)], incomplete)


def shapes(incomplete: str) -> list[str]:
    """Return the model shapes that ship, and models here, for ``kvprof bench --model``."""
    from kvprof.benchmark.shapes import shape_names

    return starting([*shape_names(), *_own(), *_models_here(incomplete)], incomplete)


def gguf_files(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the GGUF files in the folder that was named as the model."""
    # A line that ends in an option without its value is not read to its arguments.
    model = ctx.params.get("model") or next(iter(ctx.args), None)
    folder = Path(str(model)).expanduser() if model else None
    if folder is None or not folder.is_dir():
        return []
    return starting((path.name for path in _ggufs(folder)), incomplete)


def methods(incomplete: str) -> list[str]:
    """Return methods; in a list with commas what its last entry could become."""
    begun, comma, last = incomplete.rpartition(",")
    return [f"{begun}{comma}{name}" for name in starting(method_names(), last)]


def starting(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin with what was typed, each once."""
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def folders_here(incomplete: str) -> list[Path]:
    """Return the folders whose names begin with what was typed."""
    return [path for path in _here(incomplete) if path.is_dir()]


def _here(incomplete: str) -> list[Path]:
    """Return what lies under names that begin with what was typed."""
    parent, _, begun = incomplete.rpartition("/")
    where = Path(parent or ("/" if incomplete.startswith("/") else ".")).expanduser()
    try:
        return sorted(path for path in where.iterdir() if path.name.startswith(begun))
    except (OSError, RuntimeError, ValueError):  # no such folder, no such home, no path
        return []


def _models_here(incomplete: str) -> list[str]:
    """Return folders with a config or a GGUF file, and GGUF files, as they were begun."""
    begun = incomplete[: incomplete.rfind("/") + 1]
    return [
        f"{begun}{path.name}"
        for path in _here(incomplete)
        if path.suffix == ".gguf" or (path / "config.json").is_file() or _ggufs(path)
    ]


def _ggufs(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.glob("*.gguf") if path.is_file())
    except OSError:  # not ours to read
        return []


def _own() -> list[str]:
    """Return kvprof's own names of models, of which one may not be on this machine."""
    try:
        smollm2_file()
    except KvprofError:
        return ["reference"]
    return ["reference", "smollm2"]


def _downloaded() -> list[str]:
    """Return the models in the hub's cache, found where huggingface_hub looks for them."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    names = sorted(path.name for path in cache.glob("models--*")) if cache.is_dir() else []
    return [name.removeprefix("models--").replace("--", "/") for name in names]
