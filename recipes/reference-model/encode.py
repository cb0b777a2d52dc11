"""Encode the text: ``python encode.py --work WORK`` writes token arrays and drops overlaps.

A training document that shares more than a little with a split is dropped, so that the splits
stay unseen; what is left of the overlap is measured in token 13-grams and goes into the
manifest.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

GRAM = 13
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
MOST_SHARED = 0.02  # of a training document's 13-grams
MOST_SHARED_COUNT = 40


def read_lines(path: Path) -> list[dict]:
    """Read JSON Lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Token ids of every text, without special tokens."""
    arrays: list[np.ndarray] = []
    for at in range(0, len(texts), 512):
        encoded = tokenizer.encode_batch_fast(texts[at : at + 512], add_special_tokens=False)
        arrays += [np.array(e.ids, dtype=np.uint16) for e in encoded]
    return arrays


def gram_hashes(ids: np.ndarray, size: int = GRAM) -> np.ndarray:
    """Hash every run of ``size`` tokens to 64 bits; shape (len(ids) - size + 1,)."""
    count = len(ids) - size + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for i in range(size):
        total = (total ^ (ids[i : i + count].astype(np.uint64) + np.uint64(1))) * MULTIPLIER
        total ^= total >> np.uint64(32)
    return total


class GramSet:
    """A set of hashes with a bitmap in front, for asking about many at once."""

    def __init__(self, hashes: np.ndarray, bits: int = 25) -> None:
        self.hashes = np.unique(hashes)
        self.mask = np.uint64((1 << bits) - 1)
        self.bitmap = np.zeros(1 << bits, dtype=bool)
        self.bitmap[(self.hashes & self.mask).astype(np.int64)] = True

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """Boolean array: which of ``hashes`` are members."""
        found = self.bitmap[(hashes & self.mask).astype(np.int64)]
        where = np.flatnonzero(found)
        at = np.searchsorted(self.hashes, hashes[where])
        at = np.minimum(at, len(self.hashes) - 1)
        found[where] = self.hashes[at] == hashes[where]
        return found


def overlapping(train: list[np.ndarray], held: list[np.ndarray]) -> np.ndarray:
    """Which training documents share too much with the held-out documents."""
    grams = GramSet(np.concatenate([gram_hashes(ids) for ids in held]))
    drop = np.zeros(len(train), dtype=bool)
    for i, ids in enumerate(train):
        hashes = gram_hashes(ids)
        if len(hashes):
            shared = int(grams.contains(hashes).sum())
            drop[i] = shared > min(MOST_SHARED_COUNT, max(2, MOST_SHARED * len(hashes)))
    return drop


def join(arrays: list[np.ndarray], separator: int) -> np.ndarray:
    """All documents in one array, each followed by the separator."""
    end = np.array([separator], dtype=np.uint16)
    return np.concatenate([part for ids in arrays for part in (ids, end)])


def save_tokens(path: Path, ids: np.ndarray) -> None:
    """Write little-endian uint16 tokens, compressed by xz when the name says so."""
    raw = ids.astype("<u2").tobytes()
    if path.suffix == ".xz":
        filters = [
            {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 28, "lc": 0, "lp": 1, "pb": 1}
        ]
        raw = lzma.compress(raw, format=lzma.FORMAT_XZ, filters=filters)
    path.write_bytes(raw)


def load_tokens(path: Path) -> np.ndarray:
    """Read what :func:`save_tokens` wrote."""
    raw = path.read_bytes()
    return np.frombuffer(lzma.decompress(raw) if path.suffix == ".xz" else raw, dtype="<u2")


def main() -> None:
    """Encode, drop training documents that overlap a split, shuffle, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    eos = tokenizer.token_to_id("</s>")
    rows = read_lines(args.work / "train.jsonl")
    random.Random(args.seed).shuffle(rows)
    held_rows = read_lines(args.work / "held_out.jsonl")
    train = encode_texts(tokenizer, [row.pop("text") for row in rows])
    held = encode_texts(tokenizer, [row["text"] for row in held_rows])
    drop = overlapping(train, held)
    kept = [i for i in range(len(train)) if not drop[i]]
    tokens = join([train[i] for i in kept], eos)
    save_tokens(args.work / "train.bin", tokens)
    prefixes = np.array([int(rows[i]["sha256"][:16], 16) for i in kept], dtype=np.uint64)
    np.save(args.work / "train-documents.npy", np.sort(prefixes))
    packages: dict[str, dict] = {}
    for i in kept:
        entry = packages.setdefault(
            rows[i]["package"],
            {
                "version": rows[i]["version"],
                "licence": rows[i]["licence"],
                "kind": rows[i]["kind"],
                "documents": 0,
                "tokens": 0,
            },
        )
        entry["documents"] += 1
        entry["tokens"] += len(train[i])
    report = {
        "documents": len(kept),
        "tokens": len(tokens),
        "dropped_for_overlap": int(drop.sum()),
        "dropped_for_overlap_tokens": int(sum(len(train[i]) for i in np.flatnonzero(drop))),
        "packages": dict(sorted(packages.items())),
    }
    (args.work / "encode.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({k: v for k, v in report.items() if k != "packages"}, indent=1))


if __name__ == "__main__":
    main()
