"""Evaluate a saved model on held-out text and tasks: ``python evaluate.py --model FOLDER``.

Perplexity and next-token accuracy over whole documents, cut into windows of the full context
that each start with ``<s>``. Task accuracy by greedy decoding: every answer token must be the
most likely one given the prompt and the answer so far, which is what greedy decoding yields.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from batches import BOS, CONTEXT, PAD
from encode import encode_texts, read_lines
from splits import DEPTHS, make_maker
from tasks import TASKS, Instance, TaskMaker
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

LENGTHS = (128, 256, 512, 1024, 1536)
TASK_SEED = 424_242


def token_losses(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and correctness of each next token, both of shape (rows, tokens - 1)."""
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    targets = ids[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses, logits.argmax(-1) == targets


def evaluate_text(model: PreTrainedModel, documents: list[np.ndarray], rows: int) -> dict:
    """Perplexity and next-token accuracy over every token of the documents."""
    windows = []
    for ids in documents:
        for at in range(0, len(ids), CONTEXT):
            windows.append([BOS, *ids[at : at + CONTEXT].tolist()])
    windows.sort(key=len)
    loss = hits = count = 0.0
    for at in range(0, len(windows), rows):
        batch = windows[at : at + rows]
        width = max(map(len, batch))
        ids = torch.tensor([w + [PAD] * (width - len(w)) for w in batch], device=model.device)
        losses, correct = token_losses(model, ids)
        real = ids[:, 1:] != PAD
        loss += float(losses[real].double().sum())
        hits += float(correct[real].sum())
        count += float(real.sum())
    return {
        "tokens": int(count),
        "perplexity": round(math.exp(loss / count), 4),
        "next_token_accuracy": round(hits / count, 5),
    }


def answers_right(model: PreTrainedModel, instances: list[Instance], rows: int) -> list[bool]:
    """Whether greedy decoding gives each answer exactly."""
    right: list[bool] = []
    for at in range(0, len(instances), rows):
        batch = instances[at : at + rows]
        width = 1 + max(i.length for i in batch)
        ids = torch.full((len(batch), width), PAD)
        wanted = torch.zeros((len(batch), width - 1), dtype=torch.bool)
        for row, item in enumerate(batch):
            whole = [BOS, *item.prompt, *item.answer]
            ids[row, : len(whole)] = torch.tensor(whole)
            wanted[row, len(item.prompt) : item.length] = True
        _, correct = token_losses(model, ids.to(model.device))
        right += (correct.cpu() | ~wanted).all(dim=1).tolist()
    return right


def evaluate_tasks(
    model: PreTrainedModel, make: TaskMaker, repeats: int, rows: int, lengths: Sequence[int]
) -> dict:
    """Accuracy of each task by length and depth; ``variables`` also by form.

    Parameters
    ----------
    make : TaskMaker
        Draws instances from held-out filler.
    repeats : int
        Instances for each length and depth.
    """
    report: dict[str, dict] = {}
    for task in TASKS:
        depths = (None,) if task == "frequent_words" else DEPTHS
        cells: dict[str, list[bool]] = {}
        forms: dict[str, list[bool]] = defaultdict(list)
        for length in lengths:
            for depth in depths:
                many = repeats if depth is not None else repeats * len(DEPTHS)
                items = [make.draw(task, length - 1, depth) for _ in range(many)]
                right = answers_right(model, items, max(1, rows * 256 // length))
                cells[f"{length}" if depth is None else f"{length}@{depth}"] = right
                for item, good in zip(items, right, strict=True):
                    forms[item.form if task in ("variables", "needle") else task].append(good)
        every = [good for right in cells.values() for good in right]
        report[task] = {
            "instances": len(every),
            "exact_match": round(float(np.mean(every)), 4),
            "by_length_and_depth": {k: round(float(np.mean(v)), 4) for k, v in cells.items()},
        }
        if len(forms) > 1:
            report[task]["by_form"] = {
                k: round(float(np.mean(v)), 4) for k, v in sorted(forms.items())
            }
    return report


def main() -> None:
    """Evaluate one model and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--splits", type=Path, required=True)
    parser.add_argument("--split", default="evaluation")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--text-documents", type=int, help="only the first documents")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    if device == "cpu":
        model = model.float()  # the same bf16 weights, in arithmetic that a CPU does fast
    model = model.to(device).eval()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    report: dict[str, object] = {"split": args.split}
    texts: list[str] = []
    for kind in ("prose", "code"):
        rows = read_lines(args.splits / args.split / f"{kind}.jsonl")[: args.text_documents]
        some = [row["text"] for row in rows]
        texts += some
        report[kind] = evaluate_text(model, encode_texts(tokenizer, some), max(1, args.rows // 8))
    maker = make_maker(tokenizer, texts, args.words.read_text().split(), TASK_SEED)
    report["tasks"] = evaluate_tasks(model, maker, args.repeats, args.rows, args.lengths)
    report["arithmetic"] = "bf16" if device == "cuda" else "fp32 from bf16 weights"
    report["seconds"] = round(time.perf_counter() - began, 1)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
