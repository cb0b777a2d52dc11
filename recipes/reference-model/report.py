"""Put the figures of all models into one file: ``python report.py --runs RUNS --out ASSETS``."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path


def read_json(path: Path) -> dict:
    """Parse one file."""
    return json.loads(path.read_text(encoding="utf-8"))


def collect(runs: Path, ngram: Path) -> dict:
    """Join the training and evaluation of every run, beside the 5-gram baseline."""
    models = {}
    for folder in sorted(p.parent for p in runs.glob("*/evaluation.json")):
        models[folder.name] = {
            "training": read_json(folder / "training.json"),
            "evaluation": read_json(folder / "evaluation.json"),
        }
    return {
        "format": "kvprof-reference-evaluation/1",
        "protocol": {
            "weights": "exported bf16",
            "text": "whole documents of the evaluation split, windows of 2048 tokens after <s>, "
            "every token scored",
            "tasks": "instances from a seed of their own, filler from the evaluation split; "
            "right when greedy decoding gives every answer token",
        },
        "models": models,
        "baseline": read_json(ngram),
    }


def main() -> None:
    """Write ``evaluation.json`` and the reference model's training log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--ngram", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report = collect(args.runs, args.ngram)
    (args.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    shutil.copy(args.runs / "reference" / "training-log.csv", args.out / "training-log.csv")


if __name__ == "__main__":
    main()
