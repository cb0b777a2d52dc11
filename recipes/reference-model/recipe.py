"""The recipe in three commands: ``recipe.py text``, ``recipe.py train``, ``recipe.py ship``.

Each runs the steps of this folder in order; a step can be run alone too (``python STEP.py -h``).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Minutes and peak learning rate of the shipped weights and of the recorded comparisons.
PLANS = {
    "reference": ("10", "3e-3", "64"),
    "learned-positions": ("1.8", "2e-3", "64"),
    "large": ("3.6", "2e-3", "32"),
}


def step(name: str, *options: str | Path) -> None:
    """Run one script of this folder; stop when it fails."""
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, HERE / f"{name}.py", *map(str, options)], check=True)


def make_text(work: Path) -> None:
    """Make documents, tokenizer, tokens and splits from packages."""
    step("fetch", "--work", work)
    step("clean", "--work", work)
    step("build_tokenizer", "--work", work)
    step("encode", "--work", work)
    step("splits", "--work", work, "--out", work / "splits")
    step("attribute", "--work", work, "--out", work / "splits")


def train(work: Path, model: str, minutes: str | None, resume: bool, smoke: bool) -> None:
    """Train, export and evaluate one model; a smoke run is tiny and proves only the plumbing."""
    run = work / "runs" / model
    plan_minutes, rate, micro = PLANS.get(model, PLANS["reference"])
    limits = ["--minutes", minutes or plan_minutes, "--rate", rate, "--micro-rows", micro]
    few = []
    if smoke:
        limits = [
            "--steps",
            "3",
            "--rows",
            "2",
            "--micro-rows",
            "1",
            "--workers",
            "1",
            "--task-share",
            "0.5",
            "--log-every",
            "1",
            "--no-compile",
        ]
        few = ["--repeats", "1", "--text-documents", "1", "--rows", "8", "--lengths", "128", "256"]
    step(
        "train",
        "--work",
        work,
        "--out",
        run,
        "--model",
        model,
        *limits,
        *(["--resume"] if resume else []),
    )
    tokenizer = work / "tokenizer"
    step("export", "--run", run, "--tokenizer", tokenizer, "--out", run / "export")
    step(
        "evaluate",
        "--model",
        run / "export",
        "--tokenizer",
        tokenizer,
        "--words",
        work / "words.txt",
        "--splits",
        work / "splits",
        "--out",
        run / "evaluation.json",
        *few,
    )


def ship(work: Path, out: Path) -> None:
    """Fit the baseline, write one report and the weights to ``out``."""
    step("ngram", "--work", work, "--splits", work / "splits", "--out", work / "ngram.json")
    out.mkdir(parents=True, exist_ok=True)
    step(
        "export",
        "--run",
        work / "runs" / "reference",
        "--tokenizer",
        work / "tokenizer",
        "--out",
        out,
    )
    step("report", "--runs", work / "runs", "--ngram", work / "ngram.json", "--out", out)


def main() -> None:
    """Read the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("text", "train", "ship"))
    parser.add_argument("--work", type=Path, default=Path("reference-work"))
    parser.add_argument("--model", default="reference", help="reference, large, ...")
    parser.add_argument("--minutes", help="of training, instead of the plan's")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--smoke", action="store_true", help="three steps, on any machine")
    parser.add_argument("--out", type=Path, default=Path("reference"))
    args = parser.parse_args()
    if args.command == "text":
        make_text(args.work)
    elif args.command == "train":
        train(args.work, args.model, args.minutes, args.resume, args.smoke)
    else:
        ship(args.work, args.out)


if __name__ == "__main__":
    main()
