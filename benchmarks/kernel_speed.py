"""What kvprof's kernels reach on a GPU: decode, prefill and what a step adds.

Rows come from `kvprof.benchmark.run.run_bench`, which is what ``kvprof bench`` runs: the best
uncompressed kernel found is sampled in turn with each method. What that command does not time (the
projection of a step, cutting its work, torch's product with full keys) is timed here in the same
way. Each part is written as soon as it is measured; one that fails says why and the rest goes on.

    python benchmarks/kernel_speed.py
    python benchmarks/kernel_speed.py --only decode,prefill --warm     # compiles, measures nothing
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recording import add_only, add_out, keep, measure_parts, speedups

from kvprof.analysis.stats import median_ends
from kvprof.benchmark.request import BenchRequest
from kvprof.benchmark.run import run_bench
from kvprof.benchmark.timing import interleaved, sampler
from kvprof.kernels.decode.step import decode_step
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import basis_set
from kvprof.kernels.project.step import project_step

SEQ = 102_400
PREFILL = 32_768
LONG = 524_288
#: Mean kept width 64 of 128, from 32 to 112: narrow keys beside wide values, and the reverse.
RAGGED = [[112, 32], [96, 48], [80, 64], [64, 64], [48, 112], [48, 80], [32, 64], [32, 48]]
#: The same bytes on the grid that prefill rewards: V first, and nothing between 64 and 128.
PREFILL_GRID = [[64, 64]] * 8


def never() -> bool:
    """Go on to the end."""
    return False


class Run:
    """What all parts share.

    Attributes
    ----------
    warm : bool
        Compile at small sizes, and keep nothing.
    repeats : int
    """

    def __init__(self, warm: bool, repeats: int) -> None:
        self.warm, self.repeats = warm, repeats
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.folder = Path(tempfile.mkdtemp(prefix="kvprof-"))

    def tokens(self, count: int) -> int:
        """Return the context to measure at."""
        return 2048 if self.warm else count

    def ranks(self, name: str, pairs: list[list[int]]) -> Path:
        """Write widths to a file as ``--ranks`` reads them."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(pairs))
        return path

    def bench(self, methods: str, **options: Any) -> dict[str, Any]:
        """Run the benchmark; returns its rows, baselines and warnings."""
        options["seqs"] = tuple(self.tokens(seq) for seq in options.pop("seqs"))
        request = BenchRequest(
            methods=tuple(methods.split(",")),
            device="cuda",
            repeats=3 if self.warm else self.repeats,
            **options,
        )
        data, warnings = run_bench(request)
        return {**data, "warnings": warnings}

    def timed(self, *calls: Callable[[], Any]) -> list[dict[str, Any]]:
        """Time calls in turn."""
        samplers = [sampler([call], self.device) for call in calls]
        repeats = 3 if self.warm else self.repeats
        found = interleaved(samplers, repeats, seconds=10.0, should_stop=never)
        return [
            {
                "seconds": each,
                "median": statistics.median(each),
                "seconds_interval": median_ends(each),
            }
            for each in found
        ]


def decode(run: Run) -> dict[str, Any]:
    """Time full, FP8, uniform, ragged and quantised decode at 100K, batch 8 and 1."""
    methods = "full,fp8,uniform,fdc,fdc-4bit"
    return run.bench(
        methods, seqs=(SEQ,), batches=(8, 1), phases=("decode",), ranks=run.ranks("ragged", RAGGED)
    )


def defaults(run: Run) -> dict[str, Any]:
    """Time what ``kvprof bench`` times by default, decode only: recorded profiles of ranks."""
    return run.bench("fdc,kq,palu,tale", seqs=(SEQ,), batches=(8,), phases=("decode",))


def prefill(run: Run) -> dict[str, Any]:
    """Time prefill of 32K tokens: uniform 64, ragged, and the grid that prefill rewards."""
    common = {"seqs": (PREFILL,), "batches": (1,), "phases": ("prefill",)}
    return {
        "ragged": run.bench("full,uniform,fdc", ranks=run.ranks("ragged", RAGGED), **common),
        "grid": run.bench("fdc", ranks=run.ranks("grid", PREFILL_GRID), **common),
    }


def long_segments(run: Run) -> dict[str, Any]:
    """Time TALE at 512K, unquantised and as published."""
    return run.bench("tale:bits=none,tale", seqs=(LONG,), batches=(1,), phases=("decode",))


def palu(run: Run) -> dict[str, Any]:
    """Time Palu's reconstruction at 16K and the folded form at 64K, on Llama-2-7B's shape."""
    common: dict[str, Any] = {"shape": "Llama-2-7B", "batches": (1,), "phases": ("decode",)}
    found: dict[str, Any] = {
        "rope": run.bench("uniform,palu,palu:heads=1", seqs=(16_384,), **common),
        "folded": run.bench("palu-folded,palu-folded-4bit:rate=0.84", seqs=(65_536,), **common),
    }
    for name, seq in (("rope", 16_384), ("folded", 65_536)):
        found[f"{name}_gemv"] = product(run, run.tokens(seq))
    return found


def product(run: Run, seq: int) -> dict[str, Any]:
    """Time torch's product of one query with full keys, the baseline of Palu's figures."""
    keys = torch.randn(32, seq, 128, device=run.device, dtype=torch.bfloat16)
    query = torch.randn(32, 1, 128, device=run.device, dtype=torch.bfloat16)
    return {"seq": seq, **run.timed(lambda: query @ keys.mT)[0]}


def online(run: Run) -> dict[str, Any]:
    """Time a step's projection of Q, K and V, and cutting its work, beside its attention."""
    tokens = run.tokens(SEQ)
    found = {}
    for batch in (8, 1):
        layout = RaggedLayout(*zip(*RAGGED, strict=True), 4, batch, tokens)
        draw = torch.Generator(run.device).manual_seed(1)

        def random(*shape: int, draw: torch.Generator = draw) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=run.device, dtype=torch.bfloat16)

        buffer = random(layout.elements)
        keys, query = random(batch, 1, 8, 128), random(batch, 1, 32, 128)
        values = random(batch, 1, sum(layout.value_widths))
        bases = basis_set([random(128, width) for width in layout.key_widths])
        cos, sin = random(batch, 1, 128), random(batch, 1, 128)
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=run.device)
        start = lengths - 1
        step = decode_step(layout, run.device)
        cut = step.cut(lengths)
        dense = random(batch, layout.query_offsets[-1])

        def project(
            keys=keys,
            query=query,
            values=values,
            bases=bases,
            layout=layout,
            buffer=buffer,
            start=start,
            cos=cos,
            sin=sin,
        ) -> torch.Tensor:
            return project_step(query, keys, values, bases, layout, buffer, start, cos=cos, sin=sin)

        def schedule(step=step, lengths=lengths) -> torch.Tensor:
            return step.cut(lengths).scheduled[0]

        def attention(step=step, dense=dense, buffer=buffer, cut=cut) -> torch.Tensor:
            return step.run(dense, buffer, cut, 128**-0.5)

        one, two, three = run.timed(project, schedule, attention)
        found[f"batch {batch}"] = {
            "project": one,
            "schedule": two,
            "attention": three,
            "project_share": one["median"] / three["median"],
            "schedule_share": two["median"] / three["median"],
        }
    return found


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "decode": decode, "online": online, "prefill": prefill, "long_levels": long_segments,
    "palu": palu, "defaults": defaults,
}  # fmt: skip


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_only(parser, PARTS)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warm", action="store_true", help="compile at small sizes, keep nothing")
    add_out(parser)
    arguments = parser.parse_args()
    run = Run(arguments.warm, arguments.repeats)
    inputs = {
        "benchmark": "kernels",
        "repeats": arguments.repeats,
        "ragged": RAGGED,
        "prefill_grid": PREFILL_GRID,
    }

    def measure(name: str) -> dict[str, Any]:
        torch.cuda.empty_cache()
        return PARTS[name](run)

    def keep_all(data: dict[str, Any]) -> None:
        if not arguments.warm:
            keep(arguments.out, inputs, data, speedups(data.get("decode", {})))

    measure_parts(arguments.only, measure, show, keep_all)


def show(name: str, part: dict[str, Any]) -> None:
    """Print the rows of a part, or what it holds instead."""
    for row in part.get("rows", ()):
        middle = statistics.median(row["seconds"])
        print(
            f"  {row['phase']} b{row['batch']} {row['seq']} {row['method']}: "
            f"{middle * 1e6:.1f} us, {row['speedup'] or 0:.3f}x of {row['baseline']}, "
            f"{row['tb_per_s']:.3f} TB/s, error {row['error']:.1e}, rate {row['rate']}"
        )
    for text in part.get("warnings", ()):
        print(f"  note: {text}"[:300])
    for key, inner in part.items():
        if isinstance(inner, dict) and ("rows" in inner or "project" in inner or "median" in inner):
            if "rows" in inner:
                show(key, inner)
            else:
                short = {k: v for k, v in inner.items() if isinstance(v, float)}
                print(f"  {name} {key}: {short}")


if __name__ == "__main__":
    main()
