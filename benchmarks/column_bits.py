"""Decoding over columns with bits of their own on a GPU, against no compression and 4 bits.

Plans of Llama-3.1-8B's shape with about 2.3 bits a value, 4 exact sinks and 32 exact newest tokens,
as `kq-wf` makes them: bits that fall slowly or fast, alike in all heads, and heads of two and of
four kinds. Rows come from `kvprof.benchmark.run.run_bench`, so samples of each alternate with
the fastest uncompressed kernel's. Before that, attention over random shapes in
float64, and each way to build the kernel, timed by itself.

    python benchmarks/column_bits.py
    python benchmarks/column_bits.py --only check,decode      # parts, see `PARTS`
    TRITON_INTERPRET=1 python benchmarks/column_bits.py --tiny --out /tmp     # no GPU: that it runs
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from recording import add_only, add_out, keep, measure_parts, speedups

from kvprof.benchmark.plans import Widths, full_widths
from kvprof.benchmark.request import BenchRequest
from kvprof.benchmark.run import run_bench
from kvprof.benchmark.shape_plans import plan_of_widths
from kvprof.benchmark.shapes import load_shape
from kvprof.benchmark.timing import interleaved, sampler
from kvprof.kernels.quantized.codes import COLUMN_BITS
from kvprof.kernels.quantized.launch import tuning_for
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout, segment_of
from kvprof.kernels.quantized.moving import token_move
from kvprof.kernels.quantized.operand_layout import Runs, Tuning
from kvprof.kernels.quantized.reference import reference_segments
from kvprof.kernels.quantized.step import segments_step
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import save_plan
from kvprof.methods.storage import Levels, Quantiser, SideQuantiser

SHAPE = "Llama-3.1-8B"
SEQ, BATCHES = 102_400, (8, 1)
SINK, WINDOW = 4, 32
#: Columns of keys and values of the rows of 4 bits that are timed beside it, by head configs.
ROWS: dict[str, list[tuple[int, int]]] = {
    "rows-4bit": [(112, 112)],
    "rows-4bit-two": [(128, 112), (112, 96)],
    "rows-4bit-four": [(128, 112), (112, 96), (96, 128), (112, 112)],
}
#: How codes of keys and values become numbers.
LEVELS = "uniform-rms", "uniform-rms"
#: Largest relative error (Frobenius) in 16 bits.
LIMIT = 1e-2
#: Bits by column of a head's keys and values.
SLOW = ((64, 3), (48, 2))
MIDDLE = ((16, 4), (32, 3), (64, 2))
FAST = ((32, 4), (32, 3), (32, 2))
STEEP = ((16, 8), (16, 4), (16, 3), (32, 2))
KINDS: dict[str, list[tuple[Runs, Runs]]] = {
    "slow": [(SLOW, SLOW)],
    "middle": [(MIDDLE, MIDDLE)],
    "fast": [(FAST, FAST)],
    "two": [(FAST, MIDDLE), (MIDDLE, SLOW)],
    "four": [(FAST, MIDDLE), (MIDDLE, SLOW), (SLOW, SLOW), (STEEP, FAST)],
    "only-2": [(((112, 2),), ((112, 2),))],
}


class Run:
    """What all parts share.

    Attributes
    ----------
    tiny : bool
        Small sizes, on whatever there is.
    repeats : int
    """

    def __init__(self, tiny: bool, repeats: int) -> None:
        self.tiny, self.repeats = tiny, repeats
        gpu = torch.cuda.is_available()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        )
        self.dtype = torch.bfloat16 if gpu else torch.float32
        self.seq = 300 if tiny else SEQ
        self.folder = Path(tempfile.mkdtemp(prefix="kvprof-"))


def drawn_runs(draw: random.Random) -> Runs:
    """Return bits of up to 128 columns."""
    widths = [16 * draw.choice((0, 1, 2, 3)) for _ in COLUMN_BITS]
    runs = tuple((width, bits) for width, bits in zip(widths, COLUMN_BITS, strict=True) if width)
    total = sum(width for width, _ in runs)
    return runs if 0 < total <= 128 else ((16 * draw.randint(1, 8), draw.choice(COLUMN_BITS)),)


def states(run: Run, segment: Segment, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return random K and V of a segment."""
    draw = torch.Generator(run.device).manual_seed(seed)
    layout = segment.layout

    def side(widths: tuple[int, ...]) -> list[torch.Tensor]:
        shapes = [(layout.batch, layout.capacity, width) for width in widths]
        return [
            torch.randn(*shape, generator=draw, device=run.device).to(run.dtype) for shape in shapes
        ]

    return side(layout.key_widths), side(layout.value_widths)


def drawn_cases(run: Run) -> list[dict[str, Any]]:
    """Return random shapes, every third over pages."""
    draw, found = random.Random(7), []
    for number in range(2 if run.tiny else 10):
        heads, batch, group = draw.randint(1, 3), draw.randint(1, 3), draw.choice((1, 2, 4, 8))
        kinds = [(drawn_runs(draw), drawn_runs(draw)) for _ in range(heads)]
        paged = number % 3 == 2
        tokens = draw.randint(1, 400 if run.tiny else 4000)
        capacity = 128 * draw.randint(1, 2) if paged else tokens + draw.randint(0, 200)
        case = {"number": number, "rows": batch, "group": group, "kinds": kinds}
        found.append({**case, "paged": paged, "tokens": tokens, "capacity": capacity})
    return found


def check(run: Run) -> dict[str, Any]:
    """Hold attention over random shapes and pages against float64; stored tokens to the byte."""
    found = [{**case, **checked(run, **case)} for case in drawn_cases(run)]
    worst = max(case["error"] if case["error"] == case["error"] else 9e9 for case in found)
    passed = worst < LIMIT and all(case.get("stored alike", True) for case in found)
    return {"worst": worst, "limit": LIMIT, "passed": passed, "cases": found}


def checked(
    run: Run,
    *,
    number: int,
    rows: int,
    group: int,
    kinds: list[tuple[Runs, Runs]],
    paged: bool,
    tokens: int,
    capacity: int,
) -> dict[str, Any]:
    """Return how far a case is from float64 and whether a step stores as packing does."""
    batch = 2 * rows * -(-tokens // capacity) if paged else rows
    coded = segment_of(kinds, group, batch, capacity, *LEVELS, None, paged=paged)
    exact = segment_of([(128, 128)] * len(kinds), group, batch, SINK + WINDOW)
    layout = SegmentsLayout((coded,) if paged else (exact, coded), run.dtype)
    buffer = layout.packed([states(run, own, number + n) for n, own in enumerate(layout.segments)])
    lengths = [[max(1, tokens - 37 * row) for row in range(rows)]]
    table = None
    if paged:
        pages = torch.randperm(batch, generator=torch.Generator().manual_seed(number))
        table = pages.view(rows, -1).to(run.device, torch.int32)
    else:
        lengths = [[SINK + WINDOW - row for row in range(rows)], *lengths]
    prepared = segments_step(layout, run.device, rows=rows if paged else None)
    query = torch.randn(rows, layout.widest.query_offsets[-1], device=run.device).to(run.dtype)
    output = prepared.run(query, buffer, prepared.cut(lengths), 0.09, table=table)
    wanted = reference_segments(query, buffer, layout, lengths, 0.09, table=table)
    found: dict[str, Any] = {"error": float((output.double() - wanted).norm() / wanted.norm())}
    if not paged:
        found["stored alike"] = stored_alike(run, layout, buffer)
    return found


def stored_alike(run: Run, layout: SegmentsLayout, buffer: torch.Tensor) -> bool:
    """Whether one launch stores exact tokens as packing them does."""
    slots = torch.zeros(layout.batch, dtype=torch.int32, device=run.device)
    coded = layout.segments[1]
    held = [layout.head(buffer, 0, head) for head in range(layout.heads)]
    widths = coded.layout.key_widths, coded.layout.value_widths
    keys, values = (
        [pair[side][:, :1, : own[head]] for head, pair in enumerate(held)]
        for side, own in enumerate(widths)
    )
    token_move(layout, 1, 0, run.device).run(buffer, None, slots, slots)
    alone = SegmentsLayout(
        (replace(coded, layout=replace(coded.layout, capacity=1)),), layout.dtype
    )
    packed = alone.packed([(keys, values)])
    return all(
        torch.equal(mine[:, :1], theirs[:, :1])
        for head in range(layout.heads)
        for mine, theirs in zip(
            layout.head(buffer, 1, head), alone.head(packed, 0, head), strict=True
        )
    )


def rows_plan(kinds: list[tuple[int, int]]) -> Plan:
    """Return the plan of one layer in 4 bits, groups of 32 columns, as exact at its ends.

    Heads are of kinds in turn, as those of `plan_of`, and have 112 columns on average.
    """
    shape = load_shape(SHAPE)
    heads = [kinds[head % len(kinds)] for head in range(shape.num_kv_heads)]
    keys, values = zip(*heads, strict=True)
    narrow = Widths(keys, values, f"widths {kinds}")
    plan = plan_of_widths("kq", replace(shape, layers=1), [narrow])
    side = SideQuantiser((4,), group=32)
    quantiser = Quantiser("affine", side, side, window=WINDOW)
    return replace(plan, levels=Levels(SINK), quantiser=quantiser)


def plan_of(kinds: list[tuple[Runs, Runs]]) -> Plan:
    """Return the plan of one layer of the shape whose heads are of these kinds, in turn."""
    shape = load_shape(SHAPE)
    plan = plan_of_widths("kq", replace(shape, layers=1), [full_widths(shape)])
    (layer,) = plan.layers

    def groups(side: int, old: Any) -> Any:
        found = []
        for number, group in enumerate(old):
            runs = kinds[number % len(kinds)][side]
            none = group.rank - sum(width for width, _ in runs)
            found.append(replace(group, column_bits=(*runs, (none, 0)) if none else runs))
        return tuple(found)

    side = SideQuantiser(())
    quantiser = Quantiser("uniform-rms", side, side, window=WINDOW, scale_dtype="float8_e4m3fn")
    layer = replace(
        layer,
        keys=replace(layer.keys, groups=groups(0, layer.keys.groups)),
        values=replace(layer.values, groups=groups(1, layer.values.groups)),
    )
    return replace(plan, layers=(layer,), levels=Levels(SINK), quantiser=quantiser)


def decode(run: Run) -> dict[str, Any]:
    """Time plans, 4 bits of 112 columns, the best uncompressed kernel; 4 bits in as many bytes."""
    files = []
    for name, kinds in KINDS.items():
        files.append(run.folder / f"{name}.plan")
        save_plan(plan_of(kinds), files[-1])
    names = [file.name for file in files]
    request = BenchRequest(
        shape=SHAPE,
        seqs=(run.seq,),
        batches=(1,) if run.tiny else BATCHES,
        rate=0.125,
        phases=("decode",),
        methods=("full", *names[: 1 if run.tiny else None], "uniform-4bit"),
        plans=tuple(map(str, files)),
        device=str(run.device),
        repeats=run.repeats,
    )
    data, warnings = run_bench(request)
    rows, more = same_bytes(request, data)
    return {
        **data,
        "same_bytes": rows,
        "warnings": [*warnings, *more],
        "bits": {name: mean_bits(own) for name, own in KINDS.items()},
    }


def same_bytes(
    request: BenchRequest, data: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time 4 bits beside exact tokens over as many bytes as the first plan's cache has.

    With heads of one, two and four kinds, which are what the plans have beside them; of two and
    four over as many tokens as of one, whose bytes are 1.4 % more, by scales.
    """
    taken = {row["method"]: row["buffer_bytes"] for row in data["rows"] if row["batch"] == 1}
    tokens = round(request.seqs[0] * taken[request.methods[1]] / taken["uniform-4bit"])
    request = rows_request(replace(request, seqs=(tokens,)), Path(request.plans[0]).parent, ROWS)
    found, warnings = run_bench(request)
    return found["rows"], warnings


def rows_request(request: BenchRequest, folder: Path, names: Iterable[str]) -> BenchRequest:
    """Return what times rows of 4 bits by their names in `ROWS`; their plans go into a folder."""
    files = [folder / f"{name}.plan" for name in names]
    for file in files:
        save_plan(rows_plan(ROWS[file.stem]), file)
    own = tuple(file.name for file in files)
    return replace(request, methods=own, plans=tuple(map(str, files)))


def mean_bits(kinds: list[tuple[Runs, Runs]]) -> float:
    """Return the bits a value of heads of 128 columns, without scales."""
    sides = [side for kind in kinds for side in kind]
    return sum(width * bits for side in sides for width, bits in side) / (128 * len(sides))


#: Ways to build the kernel that are tried; what is not named is `tuning_for`'s.
TUNINGS: list[dict[str, int]] = [
    {},
    {"pieces": 10},
    {"pieces": 11},
    {"pieces": 24},
    {"near": 0, "dealt": 0},
    {"near": 0, "dealt": 1},
    {"near": 16, "dealt": 0},
    {"near": 1, "dealt": 0},
]


def tuned_cases(run: Run) -> list[tuple[int, str]]:
    """Return batches and plans for which ways to build the kernel are tried."""
    names = ("middle",) if run.tiny else ("middle", "two", "four")
    return [(batch, name) for batch in ((1,) if run.tiny else BATCHES) for name in names]


def layer_of(name: str, batch: int, tokens: int, dtype: torch.dtype) -> SegmentsLayout:
    """Return a plan's layer: exact sinks and window, and so many tokens of codes."""
    kinds = [KINDS[name][head % len(KINDS[name])] for head in range(8)]
    exact = segment_of([(128, 128)] * 8, 4, batch, SINK + WINDOW)
    return SegmentsLayout((exact, segment_of(kinds, 4, batch, tokens, *LEVELS, None)), dtype)


def tunings(run: Run) -> dict[str, Any]:
    """Time each way to build the kernel, for two of the plans."""
    found: list[dict[str, Any]] = []
    for batch, name in tuned_cases(run):
        capacity = run.seq - SINK - WINDOW
        layout = layer_of(name, batch, capacity, run.dtype)
        small = layer_of(name, batch, min(capacity, 31 * 256), run.dtype)
        packed = small.packed([states(run, own, 3) for own in small.segments])
        buffer = layout.empty(run.device)
        for number in (0, 1):
            which = torch.arange(layout.segments[number].blocks, device=run.device)
            for head in range(8):
                pairs = zip(
                    layout.blocks(buffer, number, head),
                    small.blocks(packed, number, head),
                    strict=True,
                )
                for target, given in pairs:
                    target.copy_(given.index_select(1, which % small.segments[number].blocks))
        query = torch.randn(batch, layout.widest.query_offsets[-1], device=run.device)
        query = query.to(run.dtype)
        lengths = [[own.layout.capacity] * batch for own in layout.segments]
        for change in TUNINGS[: 1 if run.tiny else None]:
            row = {
                "plan": name,
                "batch": batch,
                **asdict(replace(tuning_for(layout), **change)),
            }
            try:
                row["median"] = median(run, layout, buffer, query, lengths, change)
                row["tb_per_s"] = buffer.nbytes / row["median"] / 1e12
            except Exception as problem:
                row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
            found.append(row)
            print(f"  {row}", flush=True)
    return {"rows": found}


def median(
    run: Run,
    layout: SegmentsLayout,
    buffer: torch.Tensor,
    query: torch.Tensor,
    lengths: list[list[int]],
    change: dict[str, int],
) -> float:
    """Return the seconds of a step with a tuning."""
    tuning: Tuning = replace(tuning_for(layout), **change)
    prepared = segments_step(layout, run.device, tuning=tuning)
    cut = prepared.cut(lengths)
    copies = [buffer] + [buffer.clone() for _ in range(0 if run.tiny else 2)]
    calls: list[Callable[[], Any]] = [
        lambda own=own: prepared.run(query, own, cut, 128**-0.5) for own in copies
    ]
    (seconds,) = interleaved(
        [sampler(calls, run.device)], run.repeats, seconds=5.0, should_stop=lambda: False
    )
    return statistics.median(seconds)


def compiled_ahead(tiny: bool, part: str, which: Any) -> None:
    """Build a kernel in a process of its own, where the next process finds it."""
    run = Run(tiny, 1)
    if part == "check":
        checked(run, **which)
        return
    if part == "rows":
        request = BenchRequest(
            shape=SHAPE,
            seqs=(300 if tiny else 4096,),
            rate=0.125,
            phases=("decode",),
            device=str(run.device),
            repeats=3,
        )
        run_bench(rows_request(request, run.folder, [which]))
        return
    batch, name, change = which
    layout = layer_of(name, batch, run.seq - SINK - WINDOW, run.dtype)
    prepared = segments_step(layout, run.device, tuning=replace(tuning_for(layout), **change))
    query = torch.zeros(batch, layout.widest.query_offsets[-1], device=run.device)
    lengths = [[own.layout.capacity] * batch for own in layout.segments]
    prepared.run(query.to(run.dtype), layout.empty(run.device), prepared.cut(lengths), 0.09)


def compile_all(run: Run, parts: list[str], processes: int) -> None:
    """Build every kernel of the parts, several at once."""
    tasks: list[tuple[str, Any]] = []
    if "decode" in parts:
        batches = (1,) if run.tiny else BATCHES
        tasks += [("decode", (batch, name, {})) for batch in batches for name in KINDS]
        tasks += [("rows", name) for name in ROWS]
    if "check" in parts:
        tasks += [("check", case) for case in drawn_cases(run)]
    if "tunings" in parts:
        changes = TUNINGS[: 1 if run.tiny else None]
        tasks += [
            ("tunings", (batch, name, change))
            for batch, name in tuned_cases(run)
            for change in changes
        ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [(part, pool.submit(compiled_ahead, run.tiny, part, it)) for part, it in tasks]
        for part, future in waiting:
            if problem := future.exception():
                print(f"  {part}: {type(problem).__name__}: {problem}"[:500], flush=True)


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "check": check, "decode": decode, "tunings": tunings,
}  # fmt: skip


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_only(parser, PARTS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--processes",
        type=int,
        default=min(16, len(os.sched_getaffinity(0))),
        help="that compile side by side before anything is timed; 0 compiles as it goes",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, wherever it runs")
    add_out(parser)
    arguments = parser.parse_args()
    run = Run(arguments.tiny, 3 if arguments.tiny else arguments.repeats)
    if arguments.processes:
        start = time.perf_counter()
        compile_all(run, arguments.only, arguments.processes)
        print(f"compiled: {time.perf_counter() - start:.1f} s", flush=True)
    inputs = {"benchmark": "column bits", "repeats": run.repeats, "tokens": run.seq}
    measure_parts(
        arguments.only,
        lambda name: PARTS[name](run),
        show,
        lambda data: keep(arguments.out, inputs, data, speedups(data.get("decode", {}))),
    )


def show(name: str, part: dict[str, Any]) -> None:
    """Print the rows of a part."""
    if name == "check" and "cases" in part:
        print(f"  worst error {part['worst']:.1e}, limit {part['limit']:g}")
        for case in part["cases"]:
            print(f"  {case}")
    rows = (*part.get("rows", ()), *part.get("same_bytes", ())) if name == "decode" else ()
    for row in rows:
        middle = statistics.median(row["seconds"])
        bits = part["bits"].get(row["method"].removesuffix(".plan"))
        print(
            f"  b{row['batch']} {row['method']} ({bits or '-'} bits), {row['seq']:,} tokens: "
            f"{middle * 1e6:.1f} us, "
            f"{row['speedup'] or 0:.3f}x of {row['baseline']}, {row['tb_per_s']:.3f} TB/s, "
            f"error {row['error']:.1e}, rate {row['rate']}"
        )
    for text in part.get("warnings", ()):
        print(f"  note: {text}"[:300])


if __name__ == "__main__":
    main()
