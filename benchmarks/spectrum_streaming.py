"""Streaming second moments against stacking every vector and calling ``torch.linalg.svd``.

Both take the same taps of the same forward passes in the same process, and both give the singular
values of the pairs qk, vo, k and v of every KV head. The stacked route keeps the captured vectors
(in the model's dtype) and decomposes them in float64, thin, which is what gives the accuracy that
the streamed route has. Peak memory is the process's resident set, sampled, above what it was
before the route began.

    python benchmarks/spectrum_streaming.py --tokens 8k,16k,64k,256k --out docs/benchmarks
"""

import argparse
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch
from recording import keep
from torch import Tensor

from kvprof.analysis.moments import Moments
from kvprof.analysis.pairs import VALUE_WEIGHT_TOKENS, pair_gram
from kvprof.analysis.spectrum import singular_values
from kvprof.models.capture import Tap, capture, run_batch
from kvprof.models.load import LoadedModel, load_model
from kvprof.models.projections import output_slices
from kvprof.moments.collect import CollectOptions, collect_moments, empty_moments, model_tokens
from kvprof.sizes import format_bytes, format_count, parse_counts
from kvprof.sources.grammar import Source, SourceKind
from kvprof.sources.windows import batches, windows

PAIRS = ("qk", "vo", "k", "v")
SEQ_LEN = 2048
BATCH_TOKENS = 8192


class Clock:
    """Seconds spent in a route apart from the forward pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the body."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


@contextmanager
def peak_memory(result: dict[str, float]) -> Iterator[None]:
    """Sample the resident set every 10 ms and store its rise in ``result['peak_bytes']``."""
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    peak = [before]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        result["peak_bytes"] = float(max(peak[0], process.memory_info().rss) - before)


def forward(loaded: LoadedModel, tokens: int) -> Iterator[None]:
    """Run the model over the same random tokens for both routes."""
    source = Source(SourceKind.RANDOM, "random")
    sequences = windows(source, model_tokens(loaded), tokens=tokens, seq_len=SEQ_LEN, seed=0)
    for ids in batches(sequences, max(1, BATCH_TOKENS // SEQ_LEN)):
        run_batch(loaded, torch.from_numpy(ids))
        yield


def streamed(loaded: LoadedModel, tokens: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return singular values ``{pair: [heads, d]}`` and what the route cost."""
    cost: dict[str, float] = {}
    clock = Clock()
    start = time.perf_counter()
    with peak_memory(cost):
        with clock.running():
            moments: Moments = empty_moments(loaded)

        def receive(tap: Tap) -> None:
            with clock.running():
                moments.add(tap.layer, {"q": tap.q, "k": tap.k, "v": tap.v})

        with capture(loaded, receive), torch.inference_mode():
            for _ in forward(loaded, tokens):
                pass
        moments.tokens = tokens
        with clock.running():
            values = {
                pair: torch.cat(
                    [
                        singular_values(pair_gram(moments, i, pair))
                        for i in range(len(moments.layers))
                    ]
                )
                for pair in PAIRS
            }
    return values, cost | {"total_s": time.perf_counter() - start, "own_s": clock.seconds}


def stacked(loaded: LoadedModel, tokens: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the same by stacking all vectors of a head and taking a thin SVD in float64."""
    cost: dict[str, float] = {}
    clock = Clock()
    start = time.perf_counter()
    with peak_memory(cost):
        kept: list[dict[str, list[Tensor]]] = [
            {"q": [], "k": [], "v": []} for _ in loaded.layout.layers
        ]

        def receive(tap: Tap) -> None:
            with clock.running():
                for key, value in (("q", tap.q), ("k", tap.k), ("v", tap.v)):
                    kept[tap.layer][key].append(value.clone())

        with capture(loaded, receive), torch.inference_mode():
            for _ in forward(loaded, tokens):
                pass
        values: dict[str, list[Tensor]] = {pair: [] for pair in PAIRS}
        with clock.running():
            for index, layer in enumerate(loaded.layout.layers):
                slices = output_slices(loaded.model, loaded.layout, index).double()
                group = layer.num_heads // layer.num_kv_heads
                for head in range(layer.num_kv_heads):
                    members = range(head * group, (head + 1) * group)
                    k = _rows(kept[index]["k"], [head])
                    v = _rows(kept[index]["v"], [head])
                    q = _rows(kept[index]["q"], members)
                    weight = (VALUE_WEIGHT_TOKENS / tokens) ** 0.5
                    w_o = torch.cat([slices[h].T for h in members])
                    for pair, rows in (
                        ("qk", torch.cat([q, k])),
                        ("vo", torch.cat([weight * v, w_o])),
                        ("k", k),
                        ("v", v),
                    ):
                        _, s, _ = torch.linalg.svd(rows, full_matrices=False)
                        values[pair].append(s)
                kept[index].clear()
    stacked_values = {pair: torch.stack(rows) for pair, rows in values.items()}
    return stacked_values, cost | {"total_s": time.perf_counter() - start, "own_s": clock.seconds}


def _rows(parts: list[Tensor], heads: "range | list[int]") -> Tensor:
    """Stack ``[batch, heads, T, d]`` parts of some heads to ``[rows, d]`` float64."""
    return torch.cat([part[:, head].flatten(0, 1).double() for head in heads for part in parts])


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--tokens", default="8k,16k,64k,256k")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.model, device="cpu")
    warm = CollectOptions(tokens=SEQ_LEN, seq_len=SEQ_LEN, batch_size=1)
    list(collect_moments(loaded, Source(SourceKind.RANDOM, "random"), warm))
    rows = []
    for tokens in parse_counts(arguments.tokens, what="--tokens"):
        fast, streaming = streamed(loaded, tokens)
        exact, stacking = stacked(loaded, tokens)
        error = max(
            float(((fast[pair] - exact[pair]).abs() / exact[pair][:, :1]).max()) for pair in PAIRS
        )
        row = {
            "tokens": tokens,
            "streamed": streaming,
            "stacked": stacking,
            "speedup_forward_excluded": stacking["own_s"] / streaming["own_s"],
            "speedup_forward_included": stacking["total_s"] / streaming["total_s"],
            "largest_error_relative_to_largest": error,
        }
        rows.append(row)
        print(
            f"{format_count(tokens):>5}  streamed {streaming['own_s']:7.2f} s  "
            f"stacked {stacking['own_s']:8.2f} s  x{row['speedup_forward_excluded']:.1f} "
            f"(with forward x{row['speedup_forward_included']:.1f})  peak "
            f"{format_bytes(streaming['peak_bytes'])} / {format_bytes(stacking['peak_bytes'])}  "
            f"error {error:.1e}",
            flush=True,
        )
    keep(
        arguments.out / "spectrum-streaming.json",
        inputs={
            "benchmark": "spectrum_streaming",
            "model": arguments.model,
            "fingerprint": loaded.fingerprint,
            "seq_len": SEQ_LEN,
            "threads": torch.get_num_threads(),
            "pairs": list(PAIRS),
            "dtype": str(loaded.dtype).removeprefix("torch."),
        },
        data={"rows": rows},
    )
    assert np.isfinite([row["speedup_forward_excluded"] for row in rows]).all()


if __name__ == "__main__":
    main()
