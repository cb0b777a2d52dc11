"""What the shell offers for an argument or an option; none of it loads torch.

A function here takes what was typed so far and returns what it could become; typer asks it, once
``kvprof --install-completion`` was run. An empty list leaves the shell to complete file names.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["formats", "methods", "models", "profiles", "recipes", "runs", "shapes"]

Complete = Callable[[str], list[str]]


def models(incomplete: str) -> list[str]:
    """Return models by name: the embedded one, those in the hub's cache, folders with a config."""
    folders = [str(path) for path in _folders(incomplete) if (path / "config.json").is_file()]
    return _starting(["reference", *_downloaded(), *folders], incomplete)


def shapes(incomplete: str) -> list[str]:
    """Return the model shapes that ship, for ``kvprof bench --model``."""
    from kvprof.benchmark.shapes import shape_names

    return _starting(shape_names(), incomplete)


def methods(incomplete: str) -> list[str]:
    """Return methods; in a list with commas what its last entry could become."""
    from kvprof.methods.named import method_names

    begun, comma, last = incomplete.rpartition(",")
    return [f"{begun}{comma}{name}" for name in _starting(method_names(), last)]


def formats(incomplete: str) -> list[str]:
    """Return what ``kvprof export --to`` takes."""
    from kvprof.commands.export import FORMATS

    return _starting(FORMATS, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Return the recipes that ship, and ``all``."""
    from kvprof.reproduction.find import ALL, recipe_files

    return _starting([ALL, *(path.stem for path in recipe_files())], incomplete)


def profiles(incomplete: str) -> list[str]:
    """Return the profiles that a recipe can have."""
    from kvprof.reproduction.recipe import PROFILES

    return _starting(PROFILES, incomplete)


def runs(incomplete: str) -> list[str]:
    """Return runs: the recorded demo, those in the data folder, folders here that hold one."""
    from kvprof.commands.run_source import DEMO, holds_run, kept_runs, runs_folder

    kept = [path.name for path in kept_runs(runs_folder())]
    here = [str(path) for path in _folders(incomplete) if holds_run(path)]
    return _starting([DEMO, *here, *kept], incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _folders(incomplete: str) -> list[Path]:
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
