"""What a user of the README gets: the time between tokens of `model.generate`, as it is called.

A decoder of a shape, with random weights and heads of unlike rank (the same ranks in every layer),
reads a prompt of random tokens and writes greedily: uncompressed, and inside `kvprof.compressed`
with each method's plan. What is timed is the gap between two tokens as they reach a streamer, with
the device idle at each; the prompt's pass and the first call's compiling stand beside it. The
uncompressed model runs before and after the others, so that drift shows.

    python benchmarks/generate.py --contexts 32k,100k --out docs/benchmarks
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvprof import console
from kvprof.benchmark.jct.request import JctRequest
from kvprof.benchmark.jct.subjects import load_subject, make_plans, prompt
from kvprof.environment import collect_environment
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.files import read_result, write_result
from kvprof.records.result import build_result
from kvprof.runtime.compressed import compressed
from kvprof.sizes import parse_counts

NAME = "generate.json"


class Stamps(BaseStreamer):
    """Notes when each token is there."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self._device = device

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token a call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Take the end of the text."""


def measure(loaded: LoadedModel, plan: Plan | None, ids: Tensor, tokens: int) -> dict[str, Any]:
    """Generate twice, and return the times of both: the first call compiles.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan or None
        None for the uncompressed model.
    ids : Tensor
        ``[B, T]``, the prompt.
    tokens : int
        To write.
    """
    reasons: list[str] = []
    calls = []
    with compressed(loaded, plan) if plan is not None else nullcontext(None) as session:
        for _ in range(2):
            stamps = Stamps(loaded.device)
            start = time.perf_counter()
            loaded.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                streamer=stamps,
            )
            # The first entry is the prompt itself, handed over before any pass.
            gaps = [after - before for before, after in pairwise(stamps.times[1:])]
            calls.append({"ttft_s": stamps.times[1] - start, "tbt_s": gaps})
        if session is not None:
            reasons = list(session.kernel_notes)
    first, second = calls
    return {
        "ttft_s": second["ttft_s"],
        "tbt_s": second["tbt_s"],
        "tbt_median_s": statistics.median(second["tbt_s"]),
        "first_call": {"ttft_s": first["ttft_s"], "seconds": first["ttft_s"] + sum(first["tbt_s"])},
        "kernel_notes": reasons,
    }


def main() -> None:
    """Measure, print, write the record after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--contexts", default="32k")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--methods", default="fdc")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    request = JctRequest(
        model=arguments.model,
        methods=("full", *methods),
        layers=arguments.layers,
        rate=arguments.rate,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    loaded, shape = load_subject(request)
    plans = make_plans(loaded, shape, request, progress=console.track, should_stop=lambda: False)
    rows: list[dict[str, Any]] = []
    for context in parse_counts(arguments.contexts):
        ids = prompt(loaded, arguments.batch, context, request.seed)
        case = {"context": context, "batch": arguments.batch}
        for name in ("uncompressed", *methods, "uncompressed"):
            plan = None if name == "uncompressed" else plans[name]
            found = measure(loaded, plan, ids, arguments.tokens)
            rows.append({"method": name, **case, **found})
            print(
                f"{context:7,} tokens x {arguments.batch}: {name:14} TTFT {found['ttft_s']:.2f} s, "
                f"between tokens {found['tbt_median_s'] * 1e3:.2f} ms; first call "
                f"{found['first_call']['seconds']:.1f} s",
                flush=True,
            )
            _write(arguments, loaded, rows)


def _write(arguments: argparse.Namespace, loaded: LoadedModel, rows: list[dict[str, Any]]) -> None:
    """Write what is measured so far beside what earlier calls measured of other contexts."""
    path = arguments.out / NAME
    new = {(row["context"], row["batch"]) for row in rows}
    inputs = {
        "benchmark": "generate",
        "model": arguments.model,
        "layers": len(loaded.layout.layers),
        "rate": arguments.rate,
        "tokens": arguments.tokens,
        "dtype": str(loaded.dtype),
        "device": str(loaded.device),
    }
    kept = []
    if path.is_file():
        earlier = read_result(path)
        if earlier["inputs"] == inputs:
            kept = [r for r in earlier["data"]["rows"] if (r["context"], r["batch"]) not in new]
    record = build_result(
        "benchmark",
        environment=collect_environment(),
        inputs=inputs,
        data={"rows": [*kept, *rows]},
    )
    write_result(path, record, force=True)


if __name__ == "__main__":
    main()
