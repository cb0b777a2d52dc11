"""What decoding over rows of codes takes, multiplied as bfloat16 and as int8, and built how.

One layer of Llama-3.1-8B's shape in 4 bits, groups of 32 columns, heads of one, two, four and eight
kinds of the same bytes, and other formats that share the kernel. Each way to build it takes its
turn with cuDNN at full width; before that, attention over several formats and pages against
float64. All kernels are compiled side by side before anything is timed.

    python benchmarks/row_codes.py
    python benchmarks/row_codes.py --only check       # parts, see `PARTS`
    TRITON_INTERPRET=1 python benchmarks/row_codes.py --tiny --out /tmp     # no GPU: that it runs
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from column_bits import LIMIT, Run, states
from kernel_speed import RAGGED
from recording import add_only, add_out, keep, measure_parts
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvprof.benchmark.timing import interleaved, sampler
from kvprof.kernels.segments.codes import Bits
from kvprof.kernels.segments.launch import tuning_for
from kvprof.kernels.segments.layout import SegmentsLayout, segment_of
from kvprof.kernels.segments.reference import reference_segments
from kvprof.kernels.segments.step import segments_step

SCALING = 128**-0.5
HEADS = 8
Pairs = list[tuple[int, int]]
#: Heads of K's and V's widths, in turn; all have 64 columns on average but the last.
KINDS: dict[str, Pairs] = {
    "one": [(64, 64)],
    "two": [(80, 48), (48, 80)],
    "four": [(112, 32), (48, 80), (64, 64), (32, 80)],
    "eight": [(keys, values) for keys, values in RAGGED],
    "wide": [(112, 112)],
}
#: Bytes that all copies of a case's inputs should have, so that none is found in a cache.
_BYTES = 200 << 20


@dataclass(frozen=True)
class Spec:
    """A segment of a case.

    Attributes
    ----------
    pairs : list of (int, int)
        Widths of the heads, in turn.
    keys, values : int, str or None
        Formats.
    columns : int or None
        That share a scale.
    share : float
        Of the tokens.
    """

    pairs: Pairs
    keys: Bits = 4
    values: Bits = 4
    columns: int | None = 32
    share: float = 1.0


@dataclass(frozen=True)
class Way:
    """A layer that is decoded.

    Attributes
    ----------
    name : str
    specs : list of Spec
    group : int
        Query heads per KV head.
    heads : int
    page : int
        Tokens of a page; 0 where rows are sequences.
    """

    name: str
    specs: list[Spec]
    group: int = 4
    heads: int = HEADS
    page: int = 0

    def layout(self, rows: int, tokens: int, dtype: torch.dtype) -> SegmentsLayout:
        """Return the layer for so many sequences of so many tokens, or pages for them."""
        segments = []
        for spec in self.specs:
            pairs = [spec.pairs[head % len(spec.pairs)] for head in range(self.heads)]
            capacity = self.page or max(1, round(tokens * spec.share))
            batch = rows * -(-tokens // self.page) if self.page else rows
            formats = spec.keys, spec.values, spec.columns
            segments.append(
                segment_of(pairs, self.group, batch, capacity, *formats, paged=self.page > 0)
            )
        return SegmentsLayout(tuple(segments), dtype)


FOUR = {name: Way(name, [Spec(pairs)]) for name, pairs in KINDS.items()}
FULL = [(128, 128)]
#: Other formats that the same functions read.
OTHERS = {
    "tale": Way("tale", [
        Spec(FULL, None, None, share=0.001), Spec([(128, 64)], 2, 2, share=0.799),
        Spec(FULL, 4, 4, share=0.2),
    ]),
    "exact ends": Way("exact ends", [Spec(FULL, None, None, share=0.001), Spec([(64, 64)])]),
    "exact ends, two kinds": Way("exact ends, two kinds", [
        Spec(KINDS["two"], None, None, share=0.001), Spec(KINDS["two"]),
    ]),
    "8 bits": Way("8 bits", [Spec([(64, 64)], 8, 8)]),
    "2 bits": Way("2 bits", [Spec([(64, 64)], 2, 2)]),
    "3 and 4 bits": Way("3 and 4 bits", [Spec([(64, 64)], 3, 4)]),
    "8 query heads": Way("8 query heads", [Spec([(64, 64)])], group=8),
    "grouped": Way("grouped", [Spec([(128, 512)], columns=None)], group=16, heads=2),
    "pages of 128": Way("pages of 128", [Spec([(64, 64)])], page=128),
}  # fmt: skip
#: Held against float64 alone.
CHECKED = [
    Way("ragged", [Spec([(112, 48), (32, 80)])], heads=2),
    Way("8 and 4 bits, groups of 64", [Spec([(96, 80)], 8, 4, 64)], heads=2, group=2),
    Way("4 and 2 bits, whole rows", [Spec([(80, 112)], 4, 2, None)], heads=2, group=1),
    Way("8 bits, pages of 64", [Spec([(48, 64)], 8, 8)], heads=1, page=64),
    *(replace(way, heads=2) for way in OTHERS.values()),
]
#: Ways to build it; what is not named is `tuning_for`'s. The old one reads codes as numbers of two
#: bytes, the new one as int8.
OLD: dict[str, int] = {"int8": False}
NEW: dict[str, int] = {"int8": True}
_OTHERS = [
    OLD, NEW, NEW | {"near": 1}, NEW | {"registers": 96, "pieces": 20},
    NEW | {"registers": 168, "pieces": 12},
]  # fmt: skip


def tunings(way: Way) -> list[dict[str, int]]:
    """Return the ways to build a layer's kernel that are tried."""
    if way.name in OTHERS:
        return _OTHERS
    # Pieces are named: `tuning_for` has them by form.
    found = [OLD | {"pieces": 16}, *(NEW | {"pieces": pieces} for pieces in (16, 12, 8))]
    found.append(NEW | {"registers": 96, "pieces": 20})
    # Multiprocessors have shares, or neighbours, only of several kinds.
    for near in (0, 1) if len(KINDS[way.name]) > 2 else ():
        found += [NEW | {"pieces": pieces, "near": near} for pieces in (16, 12)]
    for near in (0, 1) if len(KINDS[way.name]) > 1 else ():
        found += [NEW | {"pieces": pieces, "near": near, "dealt": 1} for pieces in (16, 12)]
    return found


def cases(run: Run, part: str) -> list[tuple[Way, int, int]]:
    """Return layers, sequences and tokens that a part times."""
    ways = list((FOUR if part == "kinds" else OTHERS).values())
    if run.tiny:
        return [(ways[0], 1, 300)]
    if part == "others":
        # Numbers of pages that are multiples of 16 would be another kernel.
        return [(way, 8, 32_000 if way.page else 32_768) for way in ways]
    sizes = [(8, 102_400), (1, 102_400), (8, 32_768), (1, 32_768)]
    return [(way, *size) for way in ways for size in sizes[: 2 if way.name == "wide" else None]]


def filled(run: Run, way: Way, rows: int, tokens: int) -> tuple[SegmentsLayout, torch.Tensor]:
    """Return a layer and its buffer, in which a few thousand tokens are repeated."""
    layout = way.layout(rows, tokens, run.dtype)
    small = way.layout(1 if way.page else rows, min(tokens, 4096), run.dtype)
    packed = small.packed([states(run, own, n) for n, own in enumerate(small.segments)])
    buffer = layout.empty(run.device)
    for number, segment in enumerate(layout.segments):
        which = torch.arange(segment.blocks, device=run.device) % small.segments[number].blocks
        row = torch.arange(layout.batch, device=run.device) % small.batch
        for head in range(layout.heads):
            pairs = zip(
                layout.blocks(buffer, number, head), small.blocks(packed, number, head), strict=True
            )
            for target, given in pairs:
                target.copy_(given[row][:, which])
    return layout, buffer


def lengths_of(way: Way, layout: SegmentsLayout, rows: int, tokens: int) -> list[list[int]]:
    """Return the tokens of each segment and row, unlike by row where pages are."""
    if way.page:
        return [[max(1, tokens - 37 * row) for row in range(rows)]]
    return [[own.layout.capacity] * rows for own in layout.segments]


def table_of(run: Run, way: Way, layout: SegmentsLayout, rows: int) -> torch.Tensor | None:
    """Return pages in any order."""
    if not way.page:
        return None
    order = torch.randperm(layout.batch, generator=torch.Generator().manual_seed(1))
    return order.view(rows, -1).to(run.device, torch.int32)


def calls_of(
    run: Run,
    way: Way,
    rows: int,
    tokens: int,
    changes: list[dict[str, int]],
    copies: int | None = None,
) -> tuple[list[Any], torch.Tensor, int]:
    """Return a call on each copy for every tuning, or why there is none; the result; the bytes."""
    layout, buffer = filled(run, way, rows, tokens)
    query = torch.randn(rows, layout.widest.query_offsets[-1], device=run.device).to(run.dtype)
    lengths, table = lengths_of(way, layout, rows, tokens), table_of(run, way, layout, rows)
    wanted = reference_segments(query, buffer, layout, lengths, SCALING, table=table)
    count = copies or max(1, -(-_BYTES // buffer.nbytes))
    buffers = [buffer] + [buffer.clone() for _ in range(count - 1)]
    found: list[Any] = []
    for change in changes:
        try:
            tuning = replace(tuning_for(layout), **change)
            prepared = segments_step(
                layout, run.device, tuning=tuning, rows=rows if way.page else None
            )
            cut = prepared.cut(lengths)
            found.append(
                [
                    lambda prepared=prepared, cut=cut, own=own: prepared.run(
                        query, own, cut, SCALING, table=table
                    )
                    for own in buffers
                ]
            )
            found[-1][0]()
        except Exception as problem:
            found.append(f"{type(problem).__name__}: {problem}"[:300])
    return found, wanted, buffer.nbytes


def error(output: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error (Frobenius); far too large where something is no number."""
    found = float((output.double() - wanted).norm() / wanted.norm())
    return found if found == found else 9e9


def check(run: Run) -> dict[str, Any]:
    """Hold both forms against float64 over several formats, lengths and pages."""
    rows = []
    for way in CHECKED[: 2 if run.tiny else None]:
        for tokens in (200,) if run.tiny else (130 if way.page else 1, 200, 5000):
            calls, wanted, _ = calls_of(run, way, 2, tokens, [OLD, NEW], 1)
            errors = [own if isinstance(own, str) else error(own[0](), wanted) for own in calls]
            rows.append({"what": way.name, "tokens": tokens, "old": errors[0], "new": errors[1]})
    worst = [max((row[k] for row in rows), key=lambda e: 9e9 if isinstance(e, str) else e)
             for k in ("old", "new")]  # fmt: skip
    passed = all(isinstance(row["new"], float) and row["new"] < LIMIT for row in rows)
    return {"rows": rows, "worst": dict(zip(("old", "new"), worst, strict=True)), "passed": passed}


def full_width(run: Run, rows: int, tokens: int) -> list[Callable[[], torch.Tensor]]:
    """Return cuDNN's attention at full width over enough copies."""
    shape = rows, HEADS, tokens, 128
    query = torch.randn(rows, 4 * HEADS, 1, 128, device=run.device).to(run.dtype)
    copies = max(1, -(-_BYTES // (4 * rows * HEADS * tokens * 128)))
    pairs = [
        tuple(torch.randn(shape, device=run.device, dtype=run.dtype) for _ in range(2))
        for _ in range(copies)
    ]
    backend = SDPBackend.CUDNN_ATTENTION if run.device.type == "cuda" else SDPBackend.MATH

    def call(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(query, keys, values, scale=SCALING, enable_gqa=True)

    return [lambda pair=pair: call(*pair) for pair in pairs]


def timed(run: Run, part: str) -> dict[str, Any]:
    """Time every way to build the layers of a part, in turn with cuDNN at full width."""
    found: list[dict[str, Any]] = []
    for way, batch, tokens in cases(run, part):
        changes = tunings(way)[: 2 if run.tiny else None]
        calls, wanted, nbytes = calls_of(run, way, batch, tokens, changes)
        good = [own for own in calls if not isinstance(own, str)]
        samplers = [sampler(own, run.device) for own in [full_width(run, batch, tokens), *good]]
        samples = interleaved(samplers, run.repeats, seconds=2.5, should_stop=lambda: False)
        medians = iter([statistics.median(own) for own in samples[1:]])
        full = statistics.median(samples[0])
        for change, own in zip(changes, calls, strict=True):
            layout = way.layout(batch, tokens, run.dtype)
            row = {
                "what": way.name, "batch": batch, "tokens": tokens, "change": change,
                "tuning": asdict(replace(tuning_for(layout), **change)), "full": full,
            }  # fmt: skip
            if isinstance(own, str):
                row["failed"] = own
            else:
                row["median"] = next(medians)
                row["tb_per_s"] = nbytes / row["median"] / 1e12
                row["error"] = error(own[0](), wanted)
            found.append(row)
        brief(found[-len(changes) :])
        del calls, good, samplers
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": found}


def brief(rows: list[dict[str, Any]]) -> None:
    """Print a case's ways, fastest first."""
    first = rows[0]
    print(
        f"{first['what']} b{first['batch']} {first['tokens']}: cuDNN {first['full'] * 1e6:.1f} us"
    )
    for row in sorted(rows, key=lambda own: own.get("median", 9.0)):
        words = " ".join(f"{name}={value}" for name, value in row["change"].items())
        if "failed" in row:
            print(f"  {words}: {row['failed']}")
        else:
            print(
                f"  {row['median'] * 1e6:6.1f} us {row['full'] / row['median']:5.2f}x "
                f"{row['tb_per_s']:5.2f} TB/s {row['error']:.1e}  {words}"
            )


#: What another kernel is needed for.
_BUILT = ("tile", "stages", "warps", "registers")


def compiled_ahead(tiny: bool, way: Way, change: dict[str, int], rows: int) -> None:
    """Build a kernel in a process of its own, where the next process finds it."""
    run = Run(tiny, 1)
    layout = way.layout(rows, 300, run.dtype)
    tuning = replace(tuning_for(layout), **change)
    own = segments_step(layout, run.device, tuning=tuning, rows=rows if way.page else None)
    query = torch.zeros(rows, layout.widest.query_offsets[-1], device=run.device).to(run.dtype)
    cut = own.cut(lengths_of(way, layout, rows, 300))
    own.run(query, layout.empty(run.device), cut, 0.09, table=table_of(run, way, layout, rows))


def compile_all(run: Run, parts: list[str], processes: int) -> None:
    """Build every kernel of the parts, several at once; those of most kinds first."""
    wanted: dict[str, tuple[Way, dict[str, int], int]] = {}
    for part in parts:
        if part == "check":
            tasks = [(way, change, 2) for way in CHECKED for change in (OLD, NEW)]
        else:
            tasks = [(way, own, 1) for way, _, _ in cases(run, part) for own in tunings(way)]
        for way, change, rows in tasks:
            tuning = replace(tuning_for(way.layout(1, 300, run.dtype)), **change)
            built = {name: change[name] for name in _BUILT if name in change}
            key = way.name, way.heads, bool(change["int8"]), bool(tuning.near), tuning.dealt, built
            wanted.setdefault(str(key), (way, change, rows))
    order = sorted(wanted.values(), key=lambda task: -len(set(task[0].specs[-1].pairs)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [(task, pool.submit(compiled_ahead, run.tiny, *task)) for task in order]
        for (way, change, _), future in waiting:
            if problem := future.exception():
                print(f"  {way.name} {change}: {type(problem).__name__}: {problem}"[:300])


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "check": check,
    "kinds": lambda run: timed(run, "kinds"),
    "others": lambda run: timed(run, "others"),
}


def fastest(part: dict[str, Any]) -> dict[tuple[str, int, int], dict[bool, dict[str, Any]]]:
    """Return the fastest row of each case, multiplied as bfloat16 (False) and as int8 (True)."""
    best: dict[tuple[str, int, int], dict[bool, dict[str, Any]]] = {}
    for row in part.get("rows", ()):
        own = best.setdefault((row["what"], row["batch"], row["tokens"]), {})
        int8 = bool(row["change"]["int8"])
        if "median" in row and (int8 not in own or row["median"] < own[int8]["median"]):
            own[int8] = row
    return best


def headline(data: dict[str, Any]) -> dict[str, float]:
    """Return the time of int8 over bfloat16's in each case of the part `kinds`."""
    return {
        f"{what} b{batch} {tokens}: int8 over bfloat16": round(
            own[True]["median"] / own[False]["median"], 3
        )
        for (what, batch, tokens), own in fastest(data.get("kinds", {})).items()
        if len(own) == 2
    }


def show(name: str, part: dict[str, Any]) -> None:
    """Print the errors, and of each case the old form's time and the fastest new one's."""
    for row in part.get("rows", ()) if name == "check" else ():
        print(f"  {row}")
    if name == "check" and "worst" in part:
        print(f"  worst {part['worst']}, limit {LIMIT:g}, passed: {part['passed']}")
        return
    for (what, batch, tokens), own in fastest(part).items():
        words = [f"{what} b{batch} {tokens}:"]
        for int8 in (False, True):
            if int8 in own:
                words.append(f"{'new' if int8 else 'old'} {own[int8]['median'] * 1e6:.1f} us")
        print("  " + " ".join(words) + (f"  {own[True]['change']}" if True in own else ""))


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_only(parser, PARTS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--processes",
        type=int,
        default=min(16, len(os.sched_getaffinity(0))),
        help="that compile side by side before anything is timed; 0 compiles as it goes",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, wherever it runs")
    add_out(parser)
    arguments = parser.parse_args()
    run = Run(arguments.tiny, 1 if arguments.tiny else arguments.repeats)
    if arguments.processes and not arguments.tiny:
        start = time.perf_counter()
        compile_all(run, arguments.only, arguments.processes)
        print(f"compiled: {time.perf_counter() - start:.1f} s", flush=True)
    inputs = {"benchmark": "row codes", "repeats": run.repeats, "kinds": KINDS}
    measure_parts(
        arguments.only,
        lambda name: PARTS[name](run),
        show,
        lambda data: keep(arguments.out, inputs, data, headline(data)),
    )


if __name__ == "__main__":
    main()
