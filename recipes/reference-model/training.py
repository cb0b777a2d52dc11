"""The training loop of ``train.py``, and the windows of text that it reads."""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from batches import BOS, CONTEXT, TaskStream, find_tokens
from shapes import make_config, make_model
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention that never builds a mask (training rows hold no padding to hide).

    Shapes: query (batch, heads, tokens, head_dim), key and value (batch, kv_heads, tokens,
    head_dim); returns (batch, tokens, heads, head_dim).
    """
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal_training", causal_attention)


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Linear warm-up, then cosine to a hundredth of the peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    along = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, along))))


class TextStream:
    """Windows of the training text, each led by ``<s>``; every epoch has a new offset and order.

    The tokens stay on the device; a batch is one gather.
    """

    def __init__(self, tokens: np.ndarray, device: torch.device, seed: int) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        self.device = device
        self.seed = seed
        self.windows = (len(tokens) - CONTEXT - 1) // CONTEXT - 1
        self.epoch = -1

    def _begin(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        offset = int(torch.randint(0, CONTEXT, (1,), generator=generator))
        order = torch.randperm(self.windows, generator=generator)
        self.starts = (order * CONTEXT + offset).to(self.device)
        self.epoch = epoch

    def take(self, first: int, rows: int) -> torch.Tensor:
        """Rows ``first`` to ``first + rows`` of the endless sequence, shape (rows, CONTEXT + 1)."""
        parts = []
        while rows:
            epoch, at = divmod(first, self.windows)
            if epoch != self.epoch:
                self._begin(epoch)
            count = min(rows, self.windows - at)
            starts = self.starts[at : at + count]
            index = starts[:, None] + torch.arange(CONTEXT, device=self.device)
            parts.append(self.tokens[index].long())
            first, rows = first + count, rows - count
        body = torch.cat(parts)
        return torch.cat([torch.full_like(body[:, :1], BOS), body], dim=1)


class WeightedLoss(nn.Module):
    """The model with its loss: cross-entropy weighted per target token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the loss and each token's loss, shape (rows, CONTEXT)."""
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(
            logits.float().view(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="none"
        ).view(weights.shape[0], -1)
        return (losses * weights[:, 1:]).sum(), losses.detach()


def make_optimizer(model: nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW; norms, biases and embeddings are not decayed."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and ".wte" not in name
        (decayed if is_matrix and ".wpe" not in name else free).append(parameter)
    groups = [{"params": decayed, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    steps: int,
    seconds: float,
) -> None:
    """Write everything that ``--resume`` needs, in one move."""
    partial = path.with_suffix(".partial")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "steps": steps,
            "seconds": seconds,
        },
        partial,
    )
    partial.replace(path)


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description="Train one model; README.md says on what.")
    parser.add_argument("--work", type=Path, required=True, help="folder with train.bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--minutes", type=float, help="plan the steps to fill this time")
    parser.add_argument("--steps", type=int, help="or take exactly this many steps")
    parser.add_argument("--rows", type=int, default=128, help="sequences in a batch")
    parser.add_argument("--task-share", type=float, default=1 / 3)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--micro-rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if (args.minutes is None) == (args.steps is None):
        parser.error("give either --minutes or --steps")
    return args


def main() -> None:
    """Train, log to ``OUT/training-log.csv``, leave a checkpoint and the final weights."""
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    vocabulary = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    config = make_config(args.model, vocabulary.get_vocab_size())
    config._attn_implementation = "causal_training"
    model = make_model(config).to(device)
    optimizer = make_optimizer(model, args.rate, args.decay)
    start, steps, spent = 0, args.steps or 0, 0.0
    checkpoint = args.out / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, spent = state["step"], state["seconds"]
        steps = args.steps or state["steps"]
    loss_module: nn.Module = WeightedLoss(model)
    if not args.no_compile:
        loss_module = torch.compile(loss_module, dynamic=False)  # type: ignore[assignment]  # a callable to mypy
    task_rows = round(args.rows * args.task_share)
    tasks = TaskStream(args.work, args.seed * 104_729 + start, args.workers, task_rows)
    text = TextStream(find_tokens(args.work), device, args.seed)
    text_rows = args.rows - task_rows
    log = (args.out / "training-log.csv").open("a" if start else "w", newline="")
    writer = csv.writer(log, lineterminator="\n")
    if not start:
        writer.writerow(
            [
                "step",
                "seconds",
                "tokens",
                "learning_rate",
                "text_loss",
                "task_loss",
                "answer_loss",
                "gradient_norm",
                "tokens_per_second",
            ]
        )
    began = time.perf_counter() - spent
    mark = (time.perf_counter(), start)
    step, warm, timed_from = start, 5, 0.0
    while not steps or step < steps:
        task_ids, task_weights = tasks.take(task_rows)
        ids = torch.cat(
            [
                text.take(step * text_rows, text_rows),
                torch.from_numpy(task_ids.astype("int64")).to(device),
            ]
        )
        weights = torch.ones(ids.shape, device=device)
        weights[text_rows:] = torch.from_numpy(task_weights).to(device).float()
        rate = learning_rate(step, steps or 10**9, args.rate, warm_up=200)
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = weights[:, 1:].sum()
        parts = []
        for at in range(0, args.rows, args.micro_rows):
            part = slice(at, at + args.micro_rows)
            # Few CPUs multiply in bf16; on others one step backward takes seconds.
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss, losses = loss_module(ids[part], weights[part])
            (loss / total).backward()
            parts.append(losses)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == start + warm:
            if device.type == "cuda":
                torch.cuda.synchronize()
            timed_from = time.perf_counter()
            mark = (timed_from, step)
        if not steps and step == start + warm + 25:
            # The first steps compiled; the next ones say how many fit into the time.
            if device.type == "cuda":
                torch.cuda.synchronize()
            each = (time.perf_counter() - timed_from) / 25
            left = args.minutes * 60 - (time.perf_counter() - began)
            steps = step + max(1, int(left / (1.01 * each)))
            print(f"{each:.4f} s a step, {steps} steps planned", flush=True)
        if step % args.log_every == 0 or step == steps:
            losses = torch.cat(parts)
            task_losses, marks = losses[text_rows:], weights[text_rows:, 1:]
            answers = task_losses[marks > 1].mean()
            values = [losses[:text_rows].mean(), task_losses[marks > 0].mean(), answers, norm]
            numbers = [f"{float(v):.4f}" for v in values]
            now = time.perf_counter()
            speed = (step - mark[1]) * args.rows * CONTEXT / max(1e-9, now - mark[0])
            mark = (now, step)
            writer.writerow(
                [
                    step,
                    f"{now - began:.1f}",
                    step * args.rows * CONTEXT,
                    f"{rate:.3e}",
                    *numbers,
                    f"{max(0, speed):.0f}",
                ]
            )
            log.flush()
            if step % (5 * args.log_every) == 0 or step == steps:
                print(step, f"{now - began:.0f}s", *numbers, f"{speed / 1e6:.2f}M/s", flush=True)
        if step % args.save_every == 0 and step != steps:
            save_checkpoint(checkpoint, model, optimizer, step, steps, now_since(began))
    tasks.close()
    save_checkpoint(checkpoint, model, optimizer, step, steps, now_since(began))
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(args.out / "fp32")
    summary = {
        "model": args.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "tokens": step * args.rows * CONTEXT,
        "seconds": round(now_since(began), 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary), flush=True)


def now_since(began: float) -> float:
    """Seconds since ``began``."""
    return time.perf_counter() - began
