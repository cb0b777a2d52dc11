"""Fetch and unpack the packages of sources.toml: ``python fetch.py --work WORK``.

Needs ``apt-get`` and ``dpkg`` (Debian 12 names; nothing is installed) and ``pip``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHEEL_TEXT = (".py", "METADATA", "LICENSE", "LICENSE.txt", "LICENSE.rst", "LICENCE")


def read_sources(path: Path = HERE / "sources.toml") -> dict:
    """Parse the list of packages."""
    return tomllib.loads(path.read_text())


def fetch_debian(names: list[str], archive: Path, unpacked: Path) -> dict[str, str]:
    """Download and unpack Debian packages; return name -> version."""
    archive.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not list(archive.glob(f"{name}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "download", "-q", *missing], cwd=archive, check=True)
    versions = {}
    for name in names:
        package = sorted(archive.glob(f"{name}_*.deb"))[-1]
        versions[name] = package.name.split("_")[1].replace("%3a", ":")
        target = unpacked / name
        if not target.exists():
            subprocess.run(["dpkg", "-x", str(package), str(target)], check=True)
    return versions


def fetch_pypi(names: list[str], archive: Path, unpacked: Path) -> dict[str, str]:
    """Download wheels without their dependencies, unpack sources; return name -> version."""
    archive.mkdir(parents=True, exist_ok=True)

    def wheels() -> dict[str, Path]:
        found = {}
        for path in sorted(archive.glob("*.whl")):
            found[path.name.split("-")[0].lower().replace("_", "-")] = path
        return found

    missing = [name for name in names if name.lower().replace("_", "-") not in wheels()]
    if missing:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--only-binary=:all:",
                "--python-version",
                "3.11",
                "-d",
                str(archive),
                *missing,
            ],
            check=True,
        )
    versions = {}
    for name in names:
        wheel = wheels()[name.lower().replace("_", "-")]
        versions[name] = wheel.name.split("-")[1]
        target = unpacked / name
        if target.exists():
            continue
        with zipfile.ZipFile(wheel) as packed:
            members = [m for m in packed.namelist() if m.endswith(WHEEL_TEXT)]
            packed.extractall(target, members=members)
    return versions


def main() -> None:
    """Fetch everything and record the versions in ``WORK/versions.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for archives and text")
    work = parser.parse_args().work
    sources = read_sources()
    debian = [entry["package"] for entry in sources["debian"]]
    pypi = [name for names in sources["pypi"].values() for name in names]
    versions = {
        "debian": fetch_debian(debian, work / "deb", work / "unpacked" / "debian"),
        "pypi": fetch_pypi(pypi, work / "whl", work / "unpacked" / "pypi"),
    }
    (work / "versions.json").write_text(json.dumps(versions, indent=1, sort_keys=True))
    print(f"{len(debian)} Debian and {len(pypi)} PyPI packages under {work}")


if __name__ == "__main__":
    main()
