"""What kvprof needs from a machine: its own metadata against what is installed, per command."""

import json
import os
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement

from kvprof.environment import package_version

__all__ = [
    "COMMAND_NEEDS",
    "DISTRIBUTION",
    "SMOLLM2_VARIABLE",
    "CommandNeeds",
    "PackageState",
    "extra_command",
    "extra_names",
    "install_command",
    "package_states",
    "python_wanted",
]

#: What pip calls kvprof. On package indexes ``kvprof`` is somebody else's package.
DISTRIBUTION = "kvprof-toolkit"

#: Names the file of the model ``smollm2``, or its folder, where its package is not installed.
SMOLLM2_VARIABLE = "KVPROF_SMOLLM2"


@dataclass(frozen=True)
class CommandNeeds:
    """What one command needs."""

    packages: tuple[str, ...] = ()  # without them it does not start
    #: What it can do only with a package: package to what is lacking without it.
    optional: tuple[tuple[str, str], ...] = ()
    uses_gpu: bool = False  # whether it runs on a GPU when there is one


_QUANTISERS = (("hqq", "--method hqq"), ("optimum-quanto", "--method quanto"))
_MODEL_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "accelerate",
    "numpy",
    "jsonschema",
    "platformdirs",
)

#: By command; `kvprof.cli.COMMANDS` has the same names.
COMMAND_NEEDS = {
    "spectrum": CommandNeeds(
        (*_MODEL_PACKAGES, "plotext"), (("matplotlib", "--svg and --png"),), uses_gpu=True
    ),
    "advise": CommandNeeds(),
    "stability": CommandNeeds(
        (*_MODEL_PACKAGES, "plotext"), (("matplotlib", "--svg and --png"),), uses_gpu=True
    ),
    "sensitivity": CommandNeeds(
        _MODEL_PACKAGES, (("optimum-quanto", "--quantiser quanto"),), uses_gpu=True
    ),
    "plan": CommandNeeds(_MODEL_PACKAGES, _QUANTISERS, uses_gpu=True),
    "eval": CommandNeeds(_MODEL_PACKAGES, (("lm-eval", "--harness"), *_QUANTISERS), uses_gpu=True),
    "frontier": CommandNeeds(
        (*_MODEL_PACKAGES, "plotext"),
        (("matplotlib", "--svg and --png"), *_QUANTISERS),
        uses_gpu=True,
    ),
    "generate": CommandNeeds(_MODEL_PACKAGES, _QUANTISERS, uses_gpu=True),
    "serve": CommandNeeds((*_MODEL_PACKAGES, "vllm"), _QUANTISERS, uses_gpu=True),
    "bench": CommandNeeds(
        (*_MODEL_PACKAGES, "plotext", "pyyaml", "psutil", "nvidia-ml-py", "h11"),
        (
            ("matplotlib", "--svg and --png"),
            ("vllm", "--load without --url or --simulate"),
        ),
        uses_gpu=True,
    ),
    "show": CommandNeeds(("jsonschema", "plotext", "numpy")),
    "compare": CommandNeeds(("jsonschema", "psutil", "nvidia-ml-py")),
    "export": CommandNeeds(("jsonschema", "plotext", "numpy"), (("matplotlib", "--to svg, html"),)),
    "recipe": CommandNeeds(
        (*_MODEL_PACKAGES, "pyyaml", "plotext"),
        (("matplotlib", "report"), ("ray", "run --ray")),
        uses_gpu=True,
    ),
    "tui": CommandNeeds(("textual", "rich", "plotext", "jsonschema", "platformdirs")),
    "doctor": CommandNeeds(("jsonschema", "psutil", "nvidia-ml-py", "numpy", "packaging")),
}


@dataclass(frozen=True)
class PackageState:
    """One of kvprof's dependencies on this machine."""

    name: str  # as in kvprof's metadata
    installed: str | None  # version; None when it is missing
    wanted: str  # range, for example `">=2.11"`; empty for any version
    extra: str | None  # the extra that brings it; None when kvprof requires it

    @property
    def ok(self) -> bool:
        """Whether it is there, in a version that kvprof wants."""
        if self.installed is None:
            return False
        # Nightly builds of a later version count; pip would want to be asked for them.
        return Requirement(f"{self.name}{self.wanted}").specifier.contains(
            self.installed, prereleases=True
        )


def python_wanted() -> str:
    """Return the range of Python versions that kvprof runs on."""
    return _metadata()[0]


def package_states() -> list[PackageState]:
    """Return every dependency that applies here: required ones first, then those of extras.

    The extra ``dev`` is left out: nobody needs it to run a command.
    """
    states = []
    for extra, lines in _metadata()[1].items():
        for line in lines:
            wanted = Requirement(line)
            if wanted.name == DISTRIBUTION or (
                wanted.marker is not None and not wanted.marker.evaluate({"extra": extra})
            ):
                continue
            states.append(
                PackageState(
                    wanted.name,
                    package_version(wanted.name),
                    str(wanted.specifier),
                    extra or None,
                )
            )
    return states


def extra_names() -> list[str]:
    """Return the extras that kvprof has."""
    return [name for name in _metadata()[1] if name]


def extra_command(extra: str) -> str:
    """Return the command line that installs an extra of kvprof; see `install_command`."""
    lines = (Requirement(line) for line in _metadata()[1][extra])
    return install_command(*(f"{line.name}{line.specifier}" for line in lines))


def install_command(*requirements: str) -> str:
    """Return a command line that installs packages into the environment that kvprof runs in.

    The packages are named themselves, never as an extra of kvprof: that works however kvprof was
    installed, and cannot fetch another package of kvprof's name from an index. Where kvprof was
    installed from a clone, the clone's constraints go with it, but for what they do not pin: that
    may ask for other versions, as vLLM does of torch.
    """
    words = [_nearest(sys.executable), "-m", "pip", "install"]
    clone = _clone()
    pins = None if clone is None else clone / "constraints.txt"
    if pins is not None and pins.is_file():
        pinned = {line.partition("==")[0] for line in pins.read_text("utf-8").splitlines()} | {"."}
        if not pinned.isdisjoint(re.split(r"[^\w.-]", one)[0] for one in requirements):
            words += ["-c", _nearest(str(pins))]
    return shlex.join([*words, *requirements])


def _nearest(path: str) -> str:
    """Return a path as one would type it: relative where it lies below the working folder."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working folder is gone, or on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def _clone() -> Path | None:
    """Return the checkout that kvprof runs from or was installed from (PEP 610)."""
    here = Path(__file__).resolve().parent.parent
    if (here / "pyproject.toml").is_file():
        return here
    try:
        origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlsplit(json.loads(origin or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return Path(url2pathname(url.path)) if url.scheme == "file" else None


@cache
def _metadata() -> tuple[str, dict[str, list[str]]]:
    """Return the Python range, and the requirements by extra ("" for none).

    They come from the installed package, or from ``pyproject.toml`` where kvprof runs from a
    checkout that is not installed.
    """
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text("utf-8")).get("project", {})
        if project.get("name") == DISTRIBUTION:
            extras = project["optional-dependencies"]
            return project["requires-python"], {
                "": project["dependencies"],
                **{extra: lines for extra, lines in extras.items() if extra != "dev"},
            }
    own = metadata.metadata(DISTRIBUTION)
    grouped: dict[str, list[str]] = {"": []}
    for line in metadata.requires(DISTRIBUTION) or []:
        marker = Requirement(line).marker
        extra = next(
            (
                name
                for name in own.get_all("Provides-Extra") or []
                if marker is not None
                and marker.evaluate({"extra": name})
                and not marker.evaluate({"extra": ""})
            ),
            "",
        )
        if extra != "dev":
            grouped.setdefault(extra, []).append(line)
    return own["Requires-Python"], grouped
