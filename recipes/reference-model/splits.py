"""Write the shipped splits: ``python splits.py --work WORK --out kvprof/assets/splits``."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from batches import find_tokens
from clean import KINDS, SPLITS, write_lines
from encode import GRAM, GramSet, encode_texts, gram_hashes, join, read_lines
from tasks import TaskMaker
from tokenizers import Tokenizer

LENGTHS = (256, 512, 1024, 1536)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
REPEATS = {"needle": 5, "variables": 5, "copy": 2, "frequent_words": 6}
SEEDS = {"calibration": 31_337, "evaluation": 271_828}


def task_row(maker: TaskMaker, task: str, length: int, depth: float | None) -> dict:
    """One row whose prompt and answer tokenize apart exactly as they do together."""
    tokenizer = maker.tokenizer
    for _ in range(50):
        instance = maker.draw(task, length - 1, depth)
        prompt, answer = tokenizer.decode(instance.prompt), tokenizer.decode(instance.answer)
        joint = tokenizer.encode(prompt + answer, add_special_tokens=False).ids
        apart = tokenizer.encode(prompt, add_special_tokens=False).ids
        if apart == instance.prompt and joint == instance.prompt + instance.answer:
            return {
                "task": task,
                "form": instance.form,
                "length": length,
                "depth": depth,
                "tokens": instance.length + 1,
                "prompt": prompt,
                "answer": answer,
            }
    raise RuntimeError(f"no stable {task} instance of {length} tokens")


def task_rows(maker: TaskMaker) -> list[dict]:
    """Every task at every length and depth, a fixed number of times."""
    rows = []
    for task, repeats in REPEATS.items():
        depths = (None,) if task == "frequent_words" else DEPTHS
        for length in LENGTHS:
            for depth in depths:
                rows += [task_row(maker, task, length, depth) for _ in range(repeats)]
    return rows


def make_maker(tokenizer: Tokenizer, texts: list[str], words: list[str], seed: int) -> TaskMaker:
    """Make a task maker whose filler is the given held-out text."""
    filler = join(encode_texts(tokenizer, texts), tokenizer.token_to_id("</s>"))
    return TaskMaker(tokenizer, filler, words, seed)


def overlap(train: np.ndarray, grams: np.ndarray) -> float:
    """Share of the distinct 13-grams of a split that stand in the training tokens."""
    wanted = GramSet(grams)
    found = np.zeros(len(wanted.hashes), dtype=bool)
    step = 8_000_000
    for at in range(0, len(train), step):
        hashes = gram_hashes(train[at : at + step + GRAM - 1])
        hit = hashes[wanted.contains(hashes)]
        found[np.searchsorted(wanted.hashes, hit)] = True
    return float(found.mean())


def main() -> None:
    """Write the six files and ``manifest.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    words = (args.work / "words.txt").read_text().split()
    held = read_lines(args.work / "held_out.jsonl")
    train = find_tokens(args.work)
    files: dict[str, dict] = {}
    for split in SPLITS:
        (args.out / split).mkdir(parents=True, exist_ok=True)
        by_kind: dict[str, list[dict]] = {}
        for kind in KINDS:
            chosen = [r for r in held if r["split"] == split and r["kind"] == kind]
            keep = ("text", "document", "package", "version", "licence", "sha256")
            by_kind[kind] = [{k: r[k] for k in keep} for r in chosen]
        texts = [r["text"] for kind in KINDS for r in by_kind[kind]]
        by_kind["tasks"] = task_rows(make_maker(tokenizer, texts, words, SEEDS[split]))
        for kind, rows in by_kind.items():
            path = args.out / split / f"{kind}.jsonl"
            write_lines(path, rows)
            whole = [r["text"] if kind != "tasks" else r["prompt"] + r["answer"] for r in rows]
            ids = encode_texts(tokenizer, whole)
            hashes = np.concatenate([gram_hashes(part) for part in ids])
            entry = {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "rows": len(rows),
                "tokens": int(sum(map(len, ids))),
                "overlap_13gram": round(overlap(train, hashes), 6),
            }
            if kind != "tasks":
                entry["documents"] = [r["sha256"] for r in rows]
                entry["packages"] = sorted({r["package"] for r in rows})
            files[f"{split}/{kind}"] = entry
            print(split, kind, {k: v for k, v in entry.items() if k not in ("documents",)})
    encoded = json.loads((args.work / "encode.json").read_text())
    cleaned = json.loads((args.work / "clean.json").read_text())
    manifest = {
        "format": "kvprof-splits/1",
        "seeds": {"documents": 2026, "tasks": SEEDS},
        "files": files,
        "training": {
            "documents": encoded["documents"],
            "tokens": encoded["tokens"],
            "document_hashes": {
                "file": "recipes/reference-model/train-documents.npy",
                "what": "the first 8 bytes of each document's SHA-256, sorted, as uint64",
            },
            "dropped_as_copies": cleaned["dropped"],
            "dropped_for_overlap_with_a_split": {
                "documents": encoded["dropped_for_overlap"],
                "tokens": encoded["dropped_for_overlap_tokens"],
            },
            "packages": encoded["packages"],
        },
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
