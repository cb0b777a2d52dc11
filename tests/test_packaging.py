import re
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvprof
from kvprof.requirements import DISTRIBUTION

ROOT = Path(kvprof.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = PROJECT["optional-dependencies"]
# What '.[dev]' installs, and so what constraints.txt pins; the other extras are for users to add.
INSTALLED_EXTRAS = ("gguf", "plot", "recipe", "ray", "dev")
OPTIONAL = [
    Requirement(line)
    for extra in INSTALLED_EXTRAS
    for line in EXTRAS[extra]
    if not line.startswith(f"{DISTRIBUTION}[")
]
PINS = {
    canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}


@pytest.mark.parametrize("requirement", REQUIRED + OPTIONAL, ids=str)
def test_every_dependency_is_pinned_inside_its_range(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)


def test_dev_installs_the_extras_that_are_pinned() -> None:
    (own,) = (line for line in EXTRAS["dev"] if line.startswith(f"{DISTRIBUTION}["))
    assert Requirement(own).extras | {"dev"} == set(INSTALLED_EXTRAS)


def test_pins_are_exact_and_of_no_particular_build() -> None:
    for name, pin in PINS.items():
        # torch 2.13.0+cpu is not on every index; 2.13.0 is.
        assert Version(pin).local is None, name


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.13.0", "transformers": "5.23.0", "triton": "3.9.0", "typer": "0.29.2"},
        {"torch": "2.11.0+cu130", "transformers": "5.17.0", "triton": "3.6.0"},
    ],
)
def test_the_ranges_admit_both_sets_of_versions(versions: dict[str, str]) -> None:
    ranges = {requirement.name: requirement.specifier for requirement in REQUIRED}
    for name, version in versions.items():
        assert ranges[name].contains(version), name


def test_whatever_is_pinned_is_needed_and_whatever_is_needed_is_pinned() -> None:
    todo = [canonicalize_name(requirement.name) for requirement in REQUIRED + OPTIONAL]
    needed: set[str] = set()
    while todo:
        name = todo.pop()
        if name in needed:
            continue
        needed.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed: not the environment that constraints.txt pins")
        for line in lines:
            requirement = Requirement(line)
            # Extras of dependencies that kvprof or another dependency asks for by name.
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(requirement.name))
    # Extras such as markdown-it-py[linkify] bring more than the plain closure.
    extras = {"linkify-it-py", "mdit-py-plugins"}
    assert needed <= PINS.keys()
    assert PINS.keys() - needed <= extras


def test_the_readmes_commands_are_the_two_that_are_promised() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    first = (
        "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt '.[plot]' "
        "&& .venv/bin/kvprof spectrum\n"
    )
    second = (
        "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[dev]' "
        "&& .venv/bin/pytest\n"
    )
    assert [block for block in blocks if "-m venv" in block] == [first, second]
    marked = text.partition("<!-- command: test -->")[2]
    assert marked.split("```")[1].partition("\n")[2] == second


def test_data_files_are_found_inside_the_package() -> None:
    package = resources.files("kvprof")
    assert (package / "py.typed").is_file()
    assert (package / "records" / "schema" / "envelope.json").is_file()
