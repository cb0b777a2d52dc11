"""Training batches: task rows from worker processes, which need no model and load no torch."""

from __future__ import annotations

import multiprocessing
import queue
from pathlib import Path

import numpy as np
from encode import load_tokens
from tasks import SHARES, TASKS, TaskMaker
from tokenizers import Tokenizer

CONTEXT = 2048
BOS, EOS, PAD = 0, 1, 2
SHORTEST = 128
ROWS_PER_CHUNK = 64
SHORT_ANSWER_WEIGHT = 10
LONG_ANSWER_WEIGHT = 4


def task_rows(maker: TaskMaker, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Make rows of task instances packed to the full context.

    Returns
    -------
    ids : numpy.ndarray, shape (rows, CONTEXT + 1), uint16
    weights : numpy.ndarray, shape (rows, CONTEXT + 1), uint8
        Weight of each token as a prediction target.
    """
    ids = np.full((rows, CONTEXT + 1), PAD, dtype=np.uint16)
    weights = np.zeros((rows, CONTEXT + 1), dtype=np.uint8)
    shares = [SHARES[task] for task in TASKS]
    for row in range(rows):
        at = 0
        while CONTEXT - at >= SHORTEST:
            room = CONTEXT - at - 2
            wanted = int(np.exp(maker.rng.uniform(np.log(SHORTEST), np.log(CONTEXT))))
            instance = maker.draw(str(maker.rng.choice(TASKS, p=shares)), min(room, wanted))
            prompt, answer = instance.prompt, instance.answer
            whole = [BOS, *prompt, *answer, EOS]
            ids[row, at : at + len(whole)] = whole
            weights[row, at + 1 : at + len(whole)] = 1
            heavy = SHORT_ANSWER_WEIGHT if len(answer) < 9 else LONG_ANSWER_WEIGHT
            start = at + 1 + len(prompt)
            weights[row, start : start + len(answer)] = heavy
            if at:
                weights[row, at] = 0  # nothing says that another instance begins
            at += len(whole)
    return ids, weights


def _work(out: multiprocessing.Queue, work: str, seed: int, rows: int) -> None:
    folder = Path(work)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    words = (folder / "words.txt").read_text().split()
    tokens = find_tokens(folder)
    maker = TaskMaker(tokenizer, tokens, words, seed)
    while True:
        out.put(task_rows(maker, rows))


def find_tokens(folder: Path) -> np.ndarray:
    """Read the training tokens of a work folder, compressed or not."""
    for name in ("train.bin", "train.bin.xz"):
        if (folder / name).exists():
            return load_tokens(folder / name)
    raise FileNotFoundError(f"no train.bin in {folder}")


class TaskStream:
    """Task rows made ahead by worker processes, each with its own seed; `rows` are a batch's."""

    def __init__(self, work: Path, seed: int, workers: int, rows: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.queue: multiprocessing.Queue = context.Queue(maxsize=8 * workers)
        self.workers = [
            context.Process(
                target=_work,
                args=(self.queue, str(work), seed + 7919 * i, min(rows, ROWS_PER_CHUNK)),
                daemon=True,
            )
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.start()
        self.ids = np.zeros((0, CONTEXT + 1), dtype=np.uint16)
        self.weights = np.zeros((0, CONTEXT + 1), dtype=np.uint8)

    def take(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next ``rows`` rows."""
        while len(self.ids) < rows:
            try:
                ids, weights = self.queue.get(timeout=120)
            except queue.Empty as error:
                raise RuntimeError("the workers that make task rows stopped") from error
            self.ids = np.concatenate([self.ids, ids])
            self.weights = np.concatenate([self.weights, weights])
        head = self.ids[:rows], self.weights[:rows]
        self.ids, self.weights = self.ids[rows:], self.weights[rows:]
        return head

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.terminate()
