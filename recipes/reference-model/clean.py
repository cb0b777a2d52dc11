"""Make the documents: ``python clean.py --work WORK`` writes train.jsonl and held_out.jsonl."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

from documents import Document, convert_all, deduplicate, find_jobs, strip_frames
from fetch import read_sources

SPLITS = ("calibration", "evaluation")
KINDS = ("prose", "code")
SPLIT_CHARACTERS = 760_000  # of each shipped file
PACKAGE_SHARE = 0.36  # of one package in one file, at most
HELD_OUT_SIZES = (1_500, 45_000)  # characters


def hold_out(documents: list[Document], seed: int) -> dict[tuple[str, str], list[Document]]:
    """Choose whole documents for each split and kind, spread over packages."""
    rng = random.Random(seed)
    order = [
        d for d in documents if d.may_ship and HELD_OUT_SIZES[0] <= len(d.text) <= HELD_OUT_SIZES[1]
    ]
    rng.shuffle(order)
    chosen: dict[tuple[str, str], list[Document]] = {(s, k): [] for s in SPLITS for k in KINDS}
    sizes: Counter = Counter()
    for doc in order:
        names = list(SPLITS)
        rng.shuffle(names)
        for split in names:
            key = (split, doc.kind)
            of_package = sizes[(*key, doc.package)] + len(doc.text)
            if sizes[key] + len(doc.text) > SPLIT_CHARACTERS:
                continue
            if of_package > PACKAGE_SHARE * SPLIT_CHARACTERS:
                continue
            sizes[key] += len(doc.text)
            sizes[(*key, doc.package)] = of_package
            chosen[key].append(doc)
            break
    return chosen


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write JSON Lines."""
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    """Convert, deduplicate, hold out, write, and report what each package gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    versions = json.loads((args.work / "versions.json").read_text())
    jobs = find_jobs(read_sources(), versions, args.work / "unpacked")
    documents = convert_all(jobs, args.processes)
    read = len(documents)
    documents = strip_frames(documents)
    # Text that may ship is preferred, so that a copy under another licence is the one to go.
    documents.sort(key=lambda d: (not d.may_ship, d.kind == "code"))
    documents, dropped = deduplicate(documents)
    chosen = hold_out(documents, args.seed)
    held = {d.sha256 for docs in chosen.values() for d in docs}
    train = [d for d in documents if d.sha256 not in held]
    write_lines(args.work / "train.jsonl", [{**d.row(), "kind": d.kind} for d in train])
    write_lines(
        args.work / "held_out.jsonl",
        [{**d.row(), "kind": k, "split": s} for (s, k), docs in chosen.items() for d in docs],
    )
    per_package: Counter = Counter()
    for doc in train:
        per_package[doc.package] += len(doc.text)
    report = {
        "documents_read": read,
        "dropped": dropped,
        "train_documents": len(train),
        "train_characters": sum(len(d.text) for d in train),
        "held_out": {f"{s}/{k}": len(docs) for (s, k), docs in chosen.items()},
        "characters_per_package": dict(per_package.most_common()),
    }
    (args.work / "clean.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
