"""Short contexts and few heads: how work is cut, tiled and merged, each way tried in one call.

Ragged decode where a step is too short to hide what does not shrink with it: 8,192 tokens of one
sequence, 2 KV heads of a 70B shape under tensor parallelism, 8 queries a group with 4 beside, and
longer contexts, which no choice for short ones may slow down. Beside kvprof's choice (`*`) stand
pieces per multiprocessor, tiles, stages, warps and merges of other sizes, how the work was cut
before short steps had a rule of their own (`before`), and the pieces without their merge (`alone`,
no attention). All of a case are held against float64 and replayed as CUDA graphs in turn with
cuDNN at full width, in both forms that one query of grouped heads can have there.

Everything is compiled first, on all cores. A case begins only while there is time left
(`--seconds`); what was left out is named.

    python benchmarks/short_contexts.py                                      # a GPU, 180 s
    TRITON_INTERPRET=1 python benchmarks/short_contexts.py --tiny --out /tmp # no GPU: that it runs
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from recording import add_out, keep
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvprof.analysis.stats import median_ratio_ends
from kvprof.benchmark.timing import interleaved, sampler
from kvprof.kernels import parts
from kvprof.kernels.decode import launch
from kvprof.kernels.decode.cuts import Item, Tuning, at_once, equal_shares, tuning_for
from kvprof.kernels.decode.kernel import decode_pieces
from kvprof.kernels.decode.reference import reference_decode
from kvprof.kernels.decode.step import DecodeStep, decode_step
from kvprof.kernels.dispatch import compiling_ahead
from kvprof.kernels.parts import Schedule
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.tables import Kind, columns

#: Mean kept width 64 of 128, from 32 to 112, as `benchmarks/kernel_speed.py` has it.
RAGGED = ((112, 32), (96, 48), (80, 64), (64, 64), (48, 112), (48, 80), (32, 64), (32, 48))
#: Of those, two with the same mean.
TWO = ((48, 112), (32, 64))
HEAD_DIM = 128
#: Largest relative error (Frobenius) in 16 bits.
LIMIT = 1e-2
#: Rows that are held against float64: all of a large batch would take longer than all else.
CHECKED = 4

#: KV heads, queries a group, context, batch; the most wanted first, a control after its like.
CASES = (
    (RAGGED, 4, 8192, 1), (TWO, 8, 32_768, 1), (TWO, 8, 102_400, 1), (RAGGED, 4, 32_768, 1),
    (RAGGED, 8, 102_400, 8), (RAGGED, 4, 102_400, 8), (RAGGED, 4, 102_400, 1),
    (RAGGED, 8, 32_768, 32), (RAGGED, 4, 32_768, 32), (RAGGED, 8, 8192, 8), (RAGGED, 4, 8192, 8),
    (RAGGED, 8, 8192, 32), (RAGGED, 4, 8192, 32), (RAGGED, 8, 8192, 1), (RAGGED, 4, 2048, 1),
)  # fmt: skip
#: Pieces per multiprocessor with the kernel as it is chosen.
PIECES = (1, 2, 3, 4, 6, 8, 12, 16)
#: Other kernels; each with one and two rounds of pieces.
BUILDS: tuple[dict[str, int], ...] = (
    {"tile": 4096, "stages": 6}, {"tile": 4096, "stages": 4}, {"stages": 5}, {"warps": 2},
)  # fmt: skip
#: Columns that a merging program takes, and its warps.
MERGES = ((16, 4), (32, 4), (64, 4), (128, 4), (16, 1), (32, 1))

MergeSizes = Callable[..., tuple[int, int, int]]


@dataclass
class Candidate:
    """A way to run a case.

    Attributes
    ----------
    name : str
    step : DecodeStep
    pieces : int or None
        Of the whole GPU, cut on the host; None as the step cuts by itself.
    idle : int
        Programs that are launched beside, without work.
    sizes : callable
        In place of `kvprof.kernels.parts.merge_sizes`.
    merged : bool
        False leaves the merge out: the result is none.
    """

    name: str
    step: DecodeStep
    pieces: int | None = None
    idle: int = 0
    sizes: MergeSizes = parts.merge_sizes
    merged: bool = True


def sizes_before(widest: int, items: int, tasks: int, *_: int) -> tuple[int, int, int]:
    """Return what a merge had before it looked at how many programs there are."""
    most = triton.next_power_of_2(max(1, 2 * items // tasks))
    return min(32, triton.next_power_of_2(widest)), min(256, max(16, most)), 4


def sizes_of(width: int, warps: int) -> MergeSizes:
    """Return merge sizes with so many columns."""

    def sizes(widest: int, items: int, tasks: int, *_: int) -> tuple[int, int, int]:
        most = triton.next_power_of_2(max(1, 3 * items // (2 * tasks)))
        columns = min(width, triton.next_power_of_2(widest))
        return columns, min(8192 // columns, max(16, most)), warps

    return sizes


class Bench:
    """Where a run computes, and on what sizes."""

    def __init__(self, tiny: bool, few: bool) -> None:
        self.tiny = tiny
        self.few = few or tiny
        gpu = torch.cuda.is_available() and not tiny
        self.device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if gpu else torch.float16
        self.multiprocessors, self.cache = 3, 1
        if gpu:
            properties = torch.cuda.get_device_properties(self.device)
            self.multiprocessors = properties.multi_processor_count
            self.cache = properties.L2_cache_size
        self.generator = torch.Generator(self.device).manual_seed(1)

    def random(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def copies(self, made: Callable[[], Tensor], size: int) -> list[Tensor]:
        """Return as many inputs as it takes for none to stay in the cache."""
        return [made() for _ in range(max(1, math.ceil(3 * self.cache / size)))]


class Case:
    """A shape, and the ways to run it.

    Parameters
    ----------
    bench : Bench
    pairs : sequence of (key width, value width)
        A KV head each.
    group, context, batch : int
    """

    def __init__(
        self, bench: Bench, pairs: tuple[tuple[int, int], ...], group: int, context: int, batch: int
    ) -> None:
        self.bench, self.group, self.context, self.batch = bench, group, context, batch
        keys, values = zip(*pairs, strict=True)
        self.layout = RaggedLayout(keys, values, group, batch, context)
        self.name = f"{len(pairs)} KV heads, {group} a group, {context:,} x {batch}"
        self.lengths = [context] * batch
        self.default = tuning_for(self.layout)

    def _step(self, **changes: int) -> DecodeStep:
        tuning: Tuning = replace(self.default, **changes)
        return decode_step(
            self.layout,
            self.bench.device,
            tuning=tuning,
            multiprocessors=self.bench.multiprocessors,
        )

    def candidates(self) -> Iterator[Candidate]:
        """Yield the ways to run it, kvprof's choice first."""
        count = self.bench.multiprocessors
        tasks = self.batch * self.layout.heads
        step = self._step()
        yield Candidate("*", step)
        yield Candidate("before", step, 8 * count, tasks, sizes_before)
        yield Candidate("alone", step, merged=False)
        for each in PIECES[-3:-1] if self.bench.few else PIECES:
            yield Candidate(f"{each} pieces", step, self._room(each))
        for changes in BUILDS[:1] if self.bench.few else BUILDS:
            other = self._step(**changes)
            words = " ".join(f"{key} {value}" for key, value in changes.items())
            for rounds in (1, 2):
                each = rounds * at_once(other.tuning)
                yield Candidate(f"{words}, {each} pieces", other, self._room(each))
        for width, warps in MERGES[:1] if self.bench.few else MERGES:
            name = f"merge {width} columns, {warps} warps"
            yield Candidate(name, step, sizes=sizes_of(width, warps))

    def _room(self, each: int) -> int:
        count, tasks = self.bench.multiprocessors, self.batch * self.layout.heads
        return max(1, each * count - min(tasks, count) // 2)

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return a candidate's work."""
        if candidate.pieces is None:
            return candidate.step.cut(self.lengths)
        cut = equal_shares(self.layout, self.lengths, candidate.pieces, candidate.step.tuning.tile)
        none = [Item(0, 0, 0, 0, -1)] * candidate.idle

        def whole(rows: Any) -> Tensor:
            return torch.tensor(rows, dtype=torch.int32, device=self.bench.device)

        scheduled = [whole([*cut.items, *none]), whole(cut.parts)]
        return Schedule(whole(self.lengths), None, scheduled)

    def run(
        self, candidate: Candidate, query: Tensor, buffers: list[Tensor]
    ) -> list[Callable[[], Tensor]]:
        """Return a candidate's call on each copy of the cache."""
        schedule = self.schedule(candidate)

        def call(buffer: Tensor) -> Tensor:
            with merging(candidate):
                return candidate.step.run(query, buffer, schedule, HEAD_DIM**-0.5)

        return [partial(call, buffer) for buffer in buffers]

    def full_width(self) -> dict[str, list[Callable[[], Tensor]]]:
        """Return cuDNN's calls at full width, in both forms of grouped queries."""
        bench, heads = self.bench, self.layout.heads
        size = (self.batch, heads, self.context, HEAD_DIM)
        both = bench.copies(lambda: bench.random(2, *size), 4 * math.prod(size))
        query = bench.random(self.batch, heads, self.group, HEAD_DIM)

        def call(query: Tensor, pair: Tensor, grouped: bool) -> Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return sdpa(query, pair[0], pair[1], enable_gqa=grouped)

        single = query.view(self.batch, heads * self.group, 1, HEAD_DIM)
        return {
            "cudnn": [partial(call, single, pair, True) for pair in both],
            "cudnn-rows": [partial(call, query, pair, False) for pair in both],
        }


@contextmanager
def merging(candidate: Candidate) -> Iterator[None]:
    """Let launches within merge as a candidate does."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(parts, "merge_sizes", candidate.sizes))
        if not candidate.merged:
            stack.enter_context(patch.object(launch, "launch_merge"))
        yield


def compiled(cases: list[Case]) -> float:
    """Compile all kernels at once, and return the seconds."""
    begun = time.perf_counter()
    if cases[0].bench.device.type == "cuda":
        with compiling_ahead():
            for case in cases:
                # Nothing is launched: what they hold does not matter.
                buffer = torch.empty(
                    case.layout.elements, dtype=case.bench.dtype, device=case.bench.device
                )
                query = buffer.new_empty(case.batch, case.layout.query_offsets[-1])
                for candidate in case.candidates():
                    case.run(candidate, query, [buffer])[0]()
                del buffer
        torch.cuda.empty_cache()
    return time.perf_counter() - begun


def checked(case: Case, query: Tensor, buffer: Tensor) -> Callable[[Tensor], float]:
    """Return what tells the error of a result, relative, over some of the rows."""
    rows = torch.arange(case.batch)[:: max(1, case.batch // CHECKED)][:CHECKED].tolist()
    layout = replace(case.layout, batch=len(rows))
    own = buffer.view(case.batch, -1)[rows].flatten()
    lengths = [case.context] * len(rows)
    wanted = reference_decode(query[rows], own, layout, lengths, HEAD_DIM**-0.5)
    return lambda found: float((found[rows].double() - wanted).norm() / wanted.norm())


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Check a case's candidates and time them; returns the case with a row for each."""
    bench = case.bench
    query = bench.random(case.batch, case.layout.query_offsets[-1])
    size = case.layout.elements * query.element_size()
    buffers = bench.copies(lambda: bench.random(case.layout.elements), size)
    error = checked(case, query, buffers[0])
    rows: list[dict[str, Any]] = []
    samplers = []
    for candidate in case.candidates():
        one = sampler(case.run(candidate, query, buffers), bench.device)
        samplers.append(one)
        rows.append(
            {
                "name": candidate.name,
                "tuning": asdict(candidate.step.tuning),
                "items": _items(case, candidate),
                "error": error(one.output()) if candidate.merged else None,
                "note": one.note,
            }
        )
    if bench.device.type == "cuda":
        for name, runs in case.full_width().items():
            samplers.append(sampler(runs, bench.device))
            rows.append({"name": name, "error": None, "note": samplers[-1].note})
    times = interleaved(samplers, repeats, seconds=8.0, should_stop=lambda: False)
    for row, seconds in zip(rows, times, strict=True):
        row["seconds"] = seconds
        row["median_s"] = statistics.median(seconds)
    full = [row for row in rows if row["name"].startswith("cudnn")]
    best = min(full, key=lambda row: row["median_s"], default=None)
    for row in rows:
        row["speedup"] = best and best["median_s"] / row["median_s"]
        row["speedup_interval"] = best and median_ratio_ends(
            best["seconds"], row["seconds"], paired=True
        )
    return {
        "name": case.name,
        "widths": [
            list(each)
            for each in zip(case.layout.key_widths, case.layout.value_widths, strict=True)
        ],
        "group": case.group,
        "context": case.context,
        "batch": case.batch,
        "bytes": size,
        "best_full_width": best and best["name"],
        "rows": rows,
    }


def _items(case: Case, candidate: Candidate) -> int:
    """Return how many pieces have work."""
    kinds = case.schedule(candidate).scheduled
    return int((kinds[0][:, Item._fields.index("kind")] >= 0).sum()) if kinds else 0


def built(device: torch.device) -> list[dict[str, Any]]:
    """Return what the assembler made of each decode kernel that ran: registers decide much."""
    found = []
    for kernel in decode_pieces.device_caches[device.index][0].values():
        names = decode_pieces.arg_names
        constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
        found.append(
            {
                **{key: constants[key.upper()] for key in ("count", "group", "stages")},
                "tallest": max(constants["KINDS"][len(columns(Kind)) - 1 :: len(columns(Kind))]),
                "warps": kernel.metadata.num_warps,
                "registers": kernel.n_regs,
                "spilled": kernel.n_spills,
                "shared": kernel.metadata.shared,
            }
        )
    return found


def show_all(done: list[dict[str, Any]], best: int = 8) -> None:
    """Print how the ways compare with kvprof's choice over all cases, the best first."""
    ratios: dict[str, list[float]] = {}
    for found in done:
        times = {row["name"]: row["median_s"] for row in found["rows"]}
        for name, seconds in times.items():
            ratios.setdefault(name, []).append(seconds / times["*"])
    means = {name: statistics.geometric_mean(own) for name, own in ratios.items()}
    print("time over that of *, geometric mean over the cases, least and most")
    for name in sorted(means, key=means.__getitem__)[:best]:
        own = ratios[name]
        print(f"  {name}: {means[name]:.3f} ({min(own):.3f} to {max(own):.3f}), {len(own)} cases")


def show(found: dict[str, Any], best: int = 5) -> None:
    """Print a case: full width, what stands for itself, and the best of the rest."""

    def line(row: dict[str, Any]) -> str:
        ratio = "" if row["speedup"] is None else f" {row['speedup']:.3f}x"
        wrong = "" if row["error"] is None or row["error"] < LIMIT else f" WRONG {row['error']:.1e}"
        return f"{row['name']}: {row['median_s'] * 1e6:.1f} us{ratio}{wrong}"

    rows = found["rows"]
    always = ("*", "before", "alone")
    print(found["name"])
    full = [line(r) for r in rows if r["name"].startswith("cudnn")]
    print("  " + ("; ".join(full) or "no cuDNN here"))
    print("  " + "; ".join(line(r) for r in rows if r["name"] in always))
    rest = [r for r in rows if r["name"] not in always and not r["name"].startswith("cudnn")]
    rest.sort(key=lambda row: row["median_s"])
    print("  " + "; ".join(line(r) for r in rest[:best]), flush=True)


def shortened(found: dict[str, Any]) -> dict[str, Any]:
    """Return a case with full width, kvprof's choice, what it was before, and what is faster."""
    best = next((row["median_s"] for row in found["rows"] if row["name"] == "*"), 0.0)
    kept = [
        row
        for row in found["rows"]
        if row["name"] in ("*", "before", found["best_full_width"]) or row["median_s"] < best
    ]
    return {**found, "rows": kept}


def main() -> None:
    """Compile, check, measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=165.0, help="no case begins later")
    parser.add_argument("--few", action="store_true", help="kvprof's choice and few others")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, interpreted: that it runs")
    add_out(parser)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    bench = Bench(arguments.tiny, arguments.few)
    shapes = ((TWO, 8, 96, 1),) if arguments.tiny else CASES
    cases = [Case(bench, *shape) for shape in shapes]
    compile_s = compiled(cases)
    print(f"compiled in {compile_s:.1f} s", flush=True)
    done: list[dict[str, Any]] = []
    problems: list[str] = []
    for case in cases:
        if time.perf_counter() - begun > arguments.seconds:
            problems.append(f"{case.name}: left out for lack of time")
            continue
        try:
            done.append(measured(case, arguments.repeats))
        except Exception as problem:  # the other cases are measured all the same
            problems.append(f"{case.name}: {type(problem).__name__}: {problem}"[:500])
            print(problems[-1], flush=True)
            continue
        finally:
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
        show(done[-1])
    kernels: list[dict[str, Any]] = []
    if bench.device.type == "cuda":
        try:
            kernels = built(bench.device)
        except (AttributeError, KeyError, TypeError) as problem:  # Triton's own, without promise
            problems.append(f"registers could not be read: {problem!r}")
    for each in kernels:
        print("  ".join(f"{key} {value}" for key, value in each.items()))
    if done:
        show_all(done)
    wrong = [
        f"{found['name']}, {row['name']}: error {row['error']}"
        for found in done
        for row in found["rows"]
        if row["error"] is not None and not row["error"] < LIMIT
    ]
    seconds = time.perf_counter() - begun
    keep(
        arguments.out,
        {"benchmark": "short contexts", "repeats": arguments.repeats, "tiny": arguments.tiny},
        {
            "cases": [*map(shortened, done)],
            "kernels": kernels,
            "compile_s": compile_s,
            "seconds": seconds,
        },
        {
            f"{found['name']}: speed-up": round(row["speedup"], 3)
            for found in done
            for row in found["rows"]
            if row["name"] == "*" and row["speedup"]
        },
        [*problems, *wrong],
    )
    print(f"{seconds:.1f} s; {len(done)} cases; {'; '.join(problems) or 'none left out'}")
    if wrong:
        raise SystemExit(f"further than {LIMIT} from float64: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
