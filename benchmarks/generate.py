"""What a user of the README gets: the time between tokens of `model.generate`, as it is called.

A decoder of a shape, with random weights and heads of unlike rank, unlike in every layer
(`fdc:kinds=4` has at most four head configs), reads a prompt of random tokens and writes greedily:
as transformers runs it (`uncompressed`), and inside `kvprof.compressed` with the plan of `full`,
which is the baseline (uncompressed, the same kernels and CUDA graphs), and of each method. What
is timed is the gap between two tokens as they reach a streamer, with the device idle at each; what
of it the device spends in the replayed graph, the prompt's pass and the first call's compiling
stand beside it. `full` runs before and after the others, so that drift shows; a method's time is
set against both.

A long or wide context is read once, for one row, in pieces, and its cache repeated for the batch:
rows are then alike, which no kernel takes advantage of. Its prompt is not timed.

    python benchmarks/generate.py --cases 32k,100k,32k*8,100k*8 --methods fdc,fdc-4bit:rate=0.84
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from recording import add_out, earlier_record, keep, times_of_full
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvprof import console
from kvprof.benchmark.jct.model import load_run_model, make_plans, prompt
from kvprof.benchmark.jct.request import JctRequest
from kvprof.benchmark.machine import free_bytes
from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import Plan
from kvprof.methods.soundness import head_kinds
from kvprof.models.interface import text_decoder
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from kvprof.runtime.session import Compression
from kvprof.sizes import format_bytes, parse_counts

# Tokens of one row that a prompt's pass takes at once, and of a piece beyond that.
_AT_ONCE, _PIECE = 40_000, 32_768
# Steps until one is captured.
_SETTLING = 4


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


def measure(
    loaded: LoadedModel, plan: Plan | None, context: int, batch: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Generate twice, and return the times of both: the first call compiles and captures.

    Once where the context is read in pieces: its first steps, which do that, are left out.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan or None
        None for the model as transformers runs it.
    context : int
        Tokens of the prompt.
    batch : int
    tokens : int
        To write.
    seed : int
        Of the prompt.
    """
    calls = []
    found: dict[str, Any] = {}
    replays: list[tuple[Any, Any]] = []
    begun = time.perf_counter()
    with compressed(loaded, plan) if plan is not None else nullcontext(None) as session:
        opened = time.perf_counter() - begun
        for _ in range(1 if _in_pieces(context, batch) else 2):
            replays.clear()
            with marked(replays):
                calls.append(_generated(loaded, session, context, batch, tokens, seed))
        if session is not None:
            graphs = session.graphs
            found = {
                "kernel_reasons": sorted({str(reason) for reason in session.kernel_reasons}),
                "kernel_notes": list(session.kernel_notes),
                "replayed_steps": 0 if graphs is None else graphs.replays,
                "graph_bytes": session.graph_bytes,
                "kinds": len(head_kinds(plan)) if plan is not None else None,
            }
            session.cache = None
    first, second = calls[0], calls[-1]
    return {
        **second,
        "itl_median_s": statistics.median(second["itl_s"][_SETTLING:]),
        "graph_median_s": _median_of(replays),
        "first_call": {"opened_s": opened, "ttft_s": first["ttft_s"], "itl_s": first["itl_s"][:4]},
        **found,
    }


@contextmanager
def marked(replays: list[tuple[Any, Any]]) -> Iterator[None]:
    """Let the device note when it begins and ends each replay of a CUDA graph.

    Parameters
    ----------
    replays : list
        Gets two events for each; what is between two tokens beside them is the host's.
    """
    plain = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        plain(graph)
        ended.record()
        replays.append((begun, ended))

    with patch.object(torch.cuda.CUDAGraph, "replay", replay):
        yield


def _median_of(replays: list[tuple[Any, Any]]) -> float | None:
    seconds = [begun.elapsed_time(ended) / 1e3 for begun, ended in replays[_SETTLING:]]
    return statistics.median(seconds) if seconds else None


def _in_pieces(context: int, batch: int) -> bool:
    return batch > 1 or context > _AT_ONCE


def _generated(
    loaded: LoadedModel,
    session: Compression | None,
    context: int,
    batch: int,
    tokens: int,
    seed: int,
) -> dict[str, Any]:
    ids = prompt(loaded, 1, context, seed)
    extra: dict[str, Any] = {}
    model: Any = loaded.model
    if _in_pieces(context, batch):
        with torch.inference_mode():
            cache = DynamicCache() if session is None else session.new_cache()
            if session is not None:
                cache.reach = context + tokens
            for start in range(0, context - 1, _PIECE):
                piece = ids[:, start : min(context - 1, start + _PIECE)]
                text_decoder(model)(input_ids=piece, past_key_values=cache, use_cache=True)
            if batch > 1:
                cache.batch_repeat_interleave(batch)
        extra["past_key_values"] = cache
    ids = ids.expand(batch, -1)
    stamps = Stamps(loaded.device)
    start_s = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=stamps,
        **extra,
    )
    # The first entry is the prompt itself, handed over before any pass.
    return {
        "ttft_s": stamps.times[1] - start_s if not extra else None,
        "itl_s": [after - before for before, after in pairwise(stamps.times[1:])],
    }


def main() -> None:
    """Measure, print, write the record after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--cases", default="32k", help="contexts, with *N for N rows")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--methods", default="fdc")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--transformers", default="32k", help="cases that it runs too")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    add_out(parser)
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
    loaded, shape = load_run_model(request)
    plans = make_plans(loaded, shape, request, progress=console.track, should_stop=lambda: False)
    inputs = {
        "benchmark": "generate",
        "model": arguments.model,
        "layers": len(loaded.layout.layers),
        "rate": arguments.rate,
        "tokens": arguments.tokens,
        "dtype": str(loaded.dtype),
        "device": str(loaded.device),
    }
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    known = arguments.transformers.split(",")
    for case in arguments.cases.split(","):
        written, _, many = case.partition("*")
        ((context,), batch) = parse_counts(written), int(many or 1)
        own = [] if case not in known else ["uncompressed"]
        for name in (*own, "full", *methods, "full"):
            plan = None if name == "uncompressed" else plans[name]
            if loaded.device.type == "cuda":
                torch.cuda.empty_cache()
            why = too_large(loaded, plan or plans["full"], context + arguments.tokens, batch)
            if why is None:
                try:
                    found = measure(loaded, plan, context, batch, arguments.tokens, request.seed)
                except torch.OutOfMemoryError:
                    why = "memory ran out"
            if why is not None:
                left_out.append(f"{name}, {context:,} tokens x {batch}: {why}")
                print(f"{context:7,} tokens x {batch}: {name:14} left out: {why}", flush=True)
                continue
            rows.append({"method": name, "context": context, "batch": batch, **found})
            prompt_s = "" if found["ttft_s"] is None else f"TTFT {found['ttft_s']:.2f} s, "
            print(
                f"{context:7,} tokens x {batch}: {name:14} {prompt_s}between tokens "
                f"{found['itl_median_s'] * 1e3:.2f} ms, of it the graph "
                f"{(found['graph_median_s'] or 0) * 1e3:.2f}; "
                f"replayed {found.get('replayed_steps')}",
                flush=True,
            )
            _write(arguments, inputs, with_ratios(rows), left_out)
    for row in with_ratios(rows):
        if row.get("times_full") is not None:
            print(
                f"{row['context']:7,} tokens x {row['batch']}: {row['method']:14} "
                f"{row['times_full']:.3f} of full"
            )


def too_large(loaded: LoadedModel, plan: Plan, tokens: int, batch: int) -> str | None:
    """Return why a cache does not fit on the device, if it does not.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
        That says how it is stored.
    tokens : int
        Of a row, at most.
    batch : int
    """
    if loaded.device.type != "cuda":
        return None
    needed = bytes_at(plan, tokens, itemsize=loaded.dtype.itemsize, batch=batch).total
    free = free_bytes(loaded.device)
    if needed <= free:
        return None
    return f"its cache takes {format_bytes(needed)}, and {format_bytes(free)} are free"


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with each time over the mean of `full`'s in the same case."""
    found = []
    for row in rows:
        base = [
            other["itl_median_s"]
            for other in rows
            if other["method"] == "full"
            and (other["context"], other["batch"]) == (row["context"], row["batch"])
        ]
        ratio = row["itl_median_s"] / statistics.mean(base) if base else None
        found.append({**row, "times_full": ratio})
    return found


def _write(
    arguments: argparse.Namespace,
    inputs: dict[str, Any],
    rows: list[dict[str, Any]],
    left_out: list[str],
) -> None:
    """Write what is measured so far beside what earlier calls measured of other contexts."""
    new = {(row["context"], row["batch"]) for row in rows}
    kept = []
    earlier = earlier_record(arguments.out, "generate")
    if earlier is not None and earlier["inputs"] == inputs:
        kept = [r for r in earlier["data"]["rows"] if (r["context"], r["batch"]) not in new]
    keep(
        arguments.out,
        inputs,
        {"rows": [*kept, *rows]},
        times_of_full([*kept, *rows]),
        left_out,
    )


if __name__ == "__main__":
    main()
