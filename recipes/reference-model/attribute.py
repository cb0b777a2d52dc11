"""Gather the licences of the text that ships: ``python attribute.py --work WORK --out SPLITS``."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path

from clean import KINDS, SPLITS
from encode import read_lines

TITLE = """# Whose text this is

The rows of `prose.jsonl` and `code.jsonl` are whole documents of the packages below, converted
to plain text; `tasks.jsonl` uses pieces of the same documents as filler between generated
statements. Each row names its document, package, version and licence. The licence texts, as the
packages carry them, are in `licences/`.

| package | version | licence | documents | text |
| --- | --- | --- | --- | --- |
"""


def licence_file(work: Path, package: str) -> Path:
    """Find the file in which a package states its licence."""
    for root in (work / "unpacked" / "pypi" / package, work / "unpacked" / "debian" / package):
        for pattern in ("*.dist-info/licenses/LICENSE*", "*.dist-info/LICENSE*", "**/copyright"):
            found = sorted(root.glob(pattern))
            if found:
                return found[0]
    if package == "libpython3.11-stdlib":  # its documentation folder is a link to this one
        return licence_file(work, "libpython3.11-minimal")
    raise FileNotFoundError(f"{package} states no licence")


def main() -> None:
    """Write ``ATTRIBUTION.md`` and ``licences/``; packages with one text share one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    counts: Counter = Counter()
    facts: dict[str, tuple[str, str]] = {}
    for split in SPLITS:
        for kind in KINDS:
            for row in read_lines(args.out / split / f"{kind}.jsonl"):
                counts[row["package"]] += 1
                facts[row["package"]] = (row["version"], row["licence"])
    by_text: dict[str, list[str]] = defaultdict(list)
    for package in sorted(facts):
        by_text[licence_file(args.work, package).read_text(encoding="utf-8")].append(package)
    folder = args.out / "licences"
    folder.mkdir(exist_ok=True)
    names = {}
    for text, packages in by_text.items():
        for package in packages:
            names[package] = f"licences/{packages[0]}.txt"
        (folder / f"{packages[0]}.txt").write_text(text, encoding="utf-8")
    table = "".join(
        f"| {p} | {v} | {licence} | {counts[p]} | `{names[p]}` |\n"
        for p, (v, licence) in sorted(facts.items())
    )
    (args.out / "ATTRIBUTION.md").write_text(TITLE + table, encoding="utf-8")


if __name__ == "__main__":
    main()
