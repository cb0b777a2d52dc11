"""What pages cost: each kernel over pages of a pool against the same tokens in one stretch per row.

Pages hold the tokens of the contiguous cache in a random order, with a stride between them that is
more than a page. Decoding of ragged latents (`fdc`) and of 4-bit ones (`fdc-4bit`), of latents
whose keys are rebuilt (`palu`), prefill of prompts, of chunks behind long contexts and of unlike
rows, and the projection that stores a step's tokens. Everything is held against float64 first, then
timed: CUDA graphs, the forms of a case in turn, and the ratio is that of pairs of neighbouring
samples.

A case begins only while there is time left (`--seconds`); what was left out is named.

    python benchmarks/pages.py                                          # a GPU, 90 s
    TRITON_INTERPRET=1 python benchmarks/pages.py --tiny --out /tmp     # no GPU: that it runs
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from recording import add_out, keep
from torch import Tensor

from kvprof.analysis.stats import median_ratio_ends
from kvprof.benchmark.timing import interleaved, sampler
from kvprof.kernels.decode.reference import reference_decode
from kvprof.kernels.decode.step import decode_step
from kvprof.kernels.dispatch import compiling_ahead
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.reference import reference_rows
from kvprof.kernels.prefill.rows import rows_step
from kvprof.kernels.prefill.step import prefill
from kvprof.kernels.project.bases import basis_set
from kvprof.kernels.project.reference import reference_project, reference_rotate
from kvprof.kernels.project.step import project_step
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout
from kvprof.kernels.quantized.reference import reference_segments
from kvprof.kernels.quantized.step import segments_step
from kvprof.kernels.reconstruct.reference import reference_reconstruct
from kvprof.kernels.reconstruct.step import reconstruct_step

#: Mean kept width 64 of 128, from 32 to 112, as `benchmarks/kernel_speed.py` has it.
RAGGED = ((112, 32), (96, 48), (80, 64), (64, 64), (48, 112), (48, 80), (32, 64), (32, 48))
GROUP, HEAD_DIM = 4, 128
#: Largest relative error (Frobenius) in 16 bits.
LIMIT = 1e-2
#: Values behind each page.
GAP = 512
ONE_STRETCH = "contiguous"


@dataclass
class Case:
    """One comparison.

    Attributes
    ----------
    name, context, batch
        What it is.
    runs : dict
        A call per form: `ONE_STRETCH` first, then pages by their tokens.
    wanted : callable
        Returns what all of them are to give, in float64.
    left : dict
        What a form has left in its cache when it has run, beside what it returns.
    """

    name: str
    context: int
    batch: int
    runs: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    wanted: Callable[[], Tensor] = torch.Tensor
    left: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


class Bench:
    """Where a run computes, and on what sizes."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        gpu = torch.cuda.is_available() and not tiny
        self.device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if gpu else torch.float16
        self.pages = (64,) if tiny else (16, 64, 256)
        self.heads = RAGGED[-2:] if tiny else RAGGED
        self.generator = torch.Generator(self.device).manual_seed(1)

    def random(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def whole(self, numbers: object) -> Tensor:
        """Return whole numbers."""
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def layout(self, batch: int, capacity: int) -> RaggedLayout:
        """Return the ragged layer's layout."""
        keys, values = zip(*self.heads, strict=True)
        return RaggedLayout(keys, values, GROUP, batch, capacity)

    def table(self, rows: int, context: int, page: int) -> Tensor:
        """Return pages of sequences in a random order."""
        most = -(-context // page)
        order = torch.randperm(rows * most, generator=self.generator, device=self.device)
        return order.view(rows, most).int()

    def paged(self, layout: Any, buffer: Tensor, page: int, table: Tensor) -> tuple[Any, Tensor]:
        """Return a pool and its layout with the tokens of a contiguous cache in its pages."""
        pool = RaggedLayout(
            layout.key_widths, layout.value_widths, layout.group, table.numel(), page
        )
        found = buffer.new_empty(table.numel(), pool.row + GAP)[:, : pool.row]
        for head in range(layout.heads):
            for target, given in zip(
                (plane for side in pool.planes(found, head) for plane in side),
                (plane for side in layout.planes(buffer, head) for plane in side),
                strict=True,
            ):
                tokens = given[:, : table.shape[1] * page]
                target[table.long()] = tokens.unflatten(1, (-1, page))
        return pool, found


def decode(bench: Bench, context: int, batch: int) -> Case:
    """Decode ragged latents."""
    layout = bench.layout(batch, context)
    buffer = bench.random(layout.elements)
    query = bench.random(batch, layout.query_offsets[-1])
    lengths, scale = bench.whole([context] * batch), HEAD_DIM**-0.5
    case = Case("fdc", context, batch)
    case.wanted = lambda: reference_decode(query, buffer, layout, [context] * batch, scale)
    step = decode_step(layout, bench.device)
    cut = step.cut(lengths)
    case.runs[ONE_STRETCH] = lambda: step.run(query, buffer, cut, scale)
    for page in bench.pages:
        table = bench.table(batch, context, page)
        case.runs[str(page)] = _decode_paged(bench, layout, buffer, query, lengths, page, table)
    return case


def _decode_paged(
    bench: Bench,
    layout: RaggedLayout,
    buffer: Tensor,
    query: Tensor,
    lengths: Tensor,
    page: int,
    table: Tensor,
) -> Callable[[], Tensor]:
    pool, cache = bench.paged(layout, buffer, page, table)
    step = decode_step(pool, bench.device, page_tokens=page, rows=len(query))
    cut = step.cut(lengths)
    return lambda: step.run(query, cache, cut, HEAD_DIM**-0.5, table=table)


def segments(bench: Bench, context: int, batch: int) -> Case:
    """Decode ragged latents of 4 bits; a page holds blocks of 64 tokens."""
    own = bench.layout(batch, context)
    layout = SegmentsLayout((Segment(own, 4, 4, 32),), bench.dtype)
    buffer = layout.empty(bench.device)
    # Some blocks, repeated: to quantise all would take longer than all else.
    few = SegmentsLayout((Segment(bench.layout(1, min(context, 2048)), 4, 4, 32),), bench.dtype)
    states = [
        [bench.random(1, few.segments[0].layout.capacity, w) for w in side]
        for side in (own.key_widths, own.value_widths)
    ]
    some = few.packed([(states[0], states[1])])
    drawn = few.segments[0].blocks
    which = torch.arange(batch * layout.segments[0].blocks, device=bench.device) * 7 % drawn
    for head in range(own.heads):
        for target, given in zip(
            layout.blocks(buffer, 0, head), few.blocks(some, 0, head), strict=True
        ):
            target.copy_(given[0, which].view(target.shape))
    query = bench.random(batch, own.query_offsets[-1])
    lengths, scale = bench.whole([[context] * batch]), HEAD_DIM**-0.5
    case = Case("fdc-4bit", context, batch)
    case.wanted = lambda: reference_segments(query, buffer, layout, [[context] * batch], scale)
    step = segments_step(layout, bench.device)
    cut = step.cut(lengths)
    case.runs[ONE_STRETCH] = lambda: step.run(query, buffer, cut, scale)
    for page in bench.pages:
        if page % 64 == 0:
            table = bench.table(batch, context, page)
            case.runs[str(page)] = _segments_paged(
                bench, layout, buffer, query, lengths, page, table
            )
    return case


def _segments_paged(
    bench: Bench,
    layout: SegmentsLayout,
    buffer: Tensor,
    query: Tensor,
    lengths: Tensor,
    page: int,
    table: Tensor,
) -> Callable[[], Tensor]:
    own = bench.layout(table.numel(), page)
    pool = SegmentsLayout((Segment(own, 4, 4, 32, paged=True),), bench.dtype)
    cache = buffer.new_empty(table.numel(), pool.row + GAP)[:, : pool.row]
    each = pool.segments[0].blocks
    for head in range(own.heads):
        for target, given in zip(
            pool.blocks(cache, 0, head), layout.blocks(buffer, 0, head), strict=True
        ):
            target[table.long()] = given[:, : table.shape[1] * each].unflatten(1, (-1, each))
    step = segments_step(pool, bench.device, rows=len(query))
    cut = step.cut(lengths)
    return lambda: step.run(query, cache, cut, HEAD_DIM**-0.5, table=table)


def palu(bench: Bench, context: int, batch: int) -> Case:
    """Decode latents of four KV heads each, keys rebuilt."""
    groups, heads, width = (1, 2, 64) if bench.tiny else (2, 4, 256)
    layout = RaggedLayout((width,) * groups, (width,) * groups, heads * GROUP, batch, context)
    buffer = bench.random(layout.elements)
    up = [bench.random(heads * HEAD_DIM, width) * width**-0.5 for _ in range(groups)]
    query = bench.random(batch, groups * heads * GROUP * HEAD_DIM)
    angles = torch.arange(context, device=bench.device)[:, None] / 10 ** torch.linspace(
        0, 4, HEAD_DIM // 2, device=bench.device
    )
    cos, sin = angles.cos().to(bench.dtype), angles.sin().to(bench.dtype)
    lengths, scale = bench.whole([context] * batch), HEAD_DIM**-0.5
    case = Case("palu", context, batch)
    case.wanted = lambda: reference_reconstruct(
        query, buffer, layout, up, heads, [context] * batch, cos, sin, scale
    )
    plain = reconstruct_step(layout, up, HEAD_DIM, heads, bench.device)
    cut = plain.cut(lengths)
    case.runs[ONE_STRETCH] = lambda: plain.run(query, buffer, cut, cos, sin, scale)

    def paged(page: int) -> Callable[[], Tensor]:
        table = bench.table(batch, context, page)
        pool, cache = bench.paged(layout, buffer, page, table)
        step = reconstruct_step(
            pool,
            up,
            HEAD_DIM,
            heads,
            bench.device,
            page_tokens=page,
            rows=batch,
            most_tokens=context,
        )
        own = step.cut(lengths)
        return lambda: step.run(query, cache, own, cos, sin, scale, table=table)

    for page in bench.pages[-2:]:
        case.runs[str(page)] = paged(page)
    return case


def chunks(
    bench: Bench, name: str, new: Sequence[int], past: Sequence[int], *, alike: bool = False
) -> Case:
    """Attend from new tokens: `alike` against the prefill of whole rows, else against no pages."""
    lengths = [own + before for own, before in zip(new, past, strict=True)]
    batch, context = len(new), -(-max(lengths) // 256) * 256
    layout = bench.layout(batch, context)
    buffer = bench.random(layout.elements)
    starts = [0, *accumulate(new)]
    query = bench.random(starts[-1], layout.query_offsets[-1])
    scale = HEAD_DIM**-0.5
    own, begins = bench.whole(lengths), bench.whole(starts)
    case = Case(name, max(lengths), batch)
    case.wanted = lambda: reference_rows(query, buffer, layout, starts, lengths, scale)
    plain = rows_step(layout, bench.device, bench.dtype)
    cut = plain.cut(begins, own, len(query))

    def rows() -> Tensor:
        return plain.run(query, buffer, cut, scale)

    if alike:
        wide = query.view(batch, new[0], -1)
        case.runs[ONE_STRETCH] = lambda: prefill(
            wide, buffer, layout, own, scale, path="triton", host_lengths=lengths
        ).flatten(0, 1)
        case.runs["unlike rows"] = rows
    else:
        case.runs[ONE_STRETCH] = rows

    def paged(page: int) -> Callable[[], Tensor]:
        table = bench.table(batch, context, page)
        pool, cache = bench.paged(layout, buffer, page, table)
        step = rows_step(pool, bench.device, bench.dtype, page_tokens=page, rows=batch)
        divided = step.cut(begins, own, len(query))
        return lambda: step.run(query, cache, divided, scale, table=table)

    for page in bench.pages:
        case.runs[str(page)] = paged(page)
    return case


def store(bench: Bench, batch: int) -> Case:
    """Project a decoding step's tokens and store them."""
    context = 256
    layout = bench.layout(batch, context)
    bases = basis_set([bench.random(HEAD_DIM, width) / 16 for width in layout.key_widths])
    heads = layout.heads
    query = bench.random(batch, 1, heads * GROUP, HEAD_DIM)
    keys = bench.random(batch, 1, heads, HEAD_DIM)
    values = bench.random(batch, 1, sum(layout.value_widths))
    angles = torch.arange(batch, device=bench.device)[:, None, None] / 10 ** torch.linspace(
        0, 4, HEAD_DIM // 2, device=bench.device
    )
    cos, sin = (table.to(bench.dtype).repeat(1, 1, 2) for table in (angles.cos(), angles.sin()))
    start = bench.whole([77] * batch)
    case = Case("project", context, batch)

    def wanted() -> Tensor:
        made = []
        for states in (query, keys):
            turned = reference_rotate(states, cos, sin, dim=HEAD_DIM)
            made += reference_project(turned, [bases.head(head) for head in range(heads)])
        return torch.cat([*made, values.double()], dim=-1)

    case.wanted = wanted

    def add(form: str, own: RaggedLayout, cache: Tensor, slots: Tensor | None) -> None:
        places: dict[str, Any] = {} if slots is None else {"slots": slots}
        first = start if slots is None else None
        case.runs[form] = lambda: project_step(
            query, keys, values, bases, own, cache, first, cos=cos, sin=sin, **places
        )
        rows = torch.arange(batch, device=bench.device) if slots is None else slots // own.capacity

        def left() -> Tensor:
            both = zip(*(own.head(cache, head) for head in range(heads)), strict=True)
            return torch.cat([x[rows, 77 % own.capacity] for side in both for x in side], -1)

        case.left[form] = left

    plain = torch.zeros(layout.elements, dtype=bench.dtype, device=bench.device)
    add(ONE_STRETCH, layout, plain, None)
    for page in bench.pages:
        table = bench.table(batch, context, page)
        pool, cache = bench.paged(layout, plain, page, table)
        add(str(page), pool, cache, table[:, 77 // page].long() * page + 77 % page)
    return case


def cases(bench: Bench, small: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Give each case's name, and what builds it; `small` ones launch the same kernels on little."""
    if bench.tiny:
        yield "fdc", lambda: decode(bench, 192, 2)
        yield "fdc-4bit", lambda: segments(bench, 192, 2)
        yield "palu", lambda: palu(bench, 128, 1)
        yield "prompt", lambda: chunks(bench, "prompt", [48], [0], alike=True)
        yield "unlike rows", lambda: chunks(bench, "unlike rows", [40, 1, 17], [3, 70, 0])
        yield "project", lambda: store(bench, 2)
        return
    for context in (4096,) if small else (102_400, 32_768, 8192):
        for batch in (8, 1):
            yield "fdc", lambda c=context, b=batch: decode(bench, c, b)
            yield "fdc-4bit", lambda c=context, b=batch: segments(bench, c, b)
    prompt, long = (512, 3584) if small else (8192, 28_672)
    yield "prompt", lambda: chunks(bench, "prompt", [prompt], [0], alike=True)
    yield "chunk", lambda: chunks(bench, "chunk", [prompt // 2], [long], alike=True)
    # A step of an engine: a chunk of a long prompt, shorter prompts, and sequences that decode.
    new = (prompt // 2, 1, prompt // 4, 700 % prompt, 1, 1, 90, 1)
    past = (long, long, 0, long // 3, 1000, long // 2, 0, 77)
    yield "unlike rows", lambda: chunks(bench, "unlike rows", new, past)
    for batch in (8, 1):
        yield "palu", lambda b=batch: palu(bench, 4096 if small else 32_768, b)
        yield "project", lambda b=batch: store(bench, b)


def compiled(bench: Bench, wanted: set[str]) -> float:
    """Compile all kernels of some cases at once, and return the seconds."""
    begun = time.perf_counter()
    if bench.device.type == "cuda":
        with compiling_ahead():
            for name, build in cases(bench, small=True):
                for run in build().runs.values() if name in wanted or not wanted else ():
                    run()
    return time.perf_counter() - begun


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error, Frobenius."""
    return float((found.double() - wanted).norm() / wanted.norm())


def measured(bench: Bench, case: Case, repeats: int) -> list[dict[str, Any]]:
    """Check a case and time it; a row for each form."""
    samplers = {form: sampler([run], bench.device) for form, run in case.runs.items()}
    wanted = case.wanted()
    errors = {}
    for form, own in samplers.items():
        output = own.output()
        if form in case.left:
            output = torch.cat([output, case.left[form]().view(*output.shape[:-1], -1)], dim=-1)
        errors[form] = error_of(output, wanted)
    del wanted
    times = dict(
        zip(
            samplers,
            interleaved(list(samplers.values()), repeats, seconds=3.0, should_stop=lambda: False),
            strict=True,
        )
    )
    found = []
    for form, seconds in times.items():
        ratios = [own / base for own, base in zip(seconds, times[ONE_STRETCH], strict=True)]
        found.append(
            {
                "what": case.name,
                "context": case.context,
                "batch": case.batch,
                "form": form,
                "seconds": seconds,
                "error": errors[form],
                "ratio": statistics.median(ratios),
                "ratio_interval": median_ratio_ends(seconds, times[ONE_STRETCH], paired=True),
            }
        )
    return found


def main() -> None:
    """Compile, check, measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=80.0, help="no case begins later")
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, interpreted: that it runs")
    add_out(parser)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    bench = Bench(arguments.tiny)
    wanted = set(filter(None, arguments.only.split(",")))
    compile_s = compiled(bench, wanted)
    print(f"compiled in {compile_s:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    left_out = 0
    wrong = []
    failed: list[str] = []
    for name, build in cases(bench, small=False):
        if wanted and name not in wanted:
            continue
        if time.perf_counter() - begun > arguments.seconds:
            left_out += 1
            continue
        try:
            new = measured(bench, build(), arguments.repeats)
        except Exception as problem:  # the other cases are measured all the same
            failed.append(f"{name}: {type(problem).__name__}: {problem}"[:500])
            print(failed[-1], flush=True)
            continue
        for row in new:
            interval = row["ratio_interval"] or (row["ratio"],) * 2
            print(
                f"{row['what']:12} {row['context']:7,} x {row['batch']}  {row['form']:11} "
                f"{statistics.median(row['seconds']) * 1e6:10.1f} us  {row['ratio']:.3f} "
                f"({interval[0]:.3f} to {interval[1]:.3f})  error {row['error']:.1e}",
                flush=True,
            )
            if not row["error"] < LIMIT:
                wrong.append(row)
        rows += new
    seconds = time.perf_counter() - begun
    print(f"{seconds:.1f} s; cases left out for lack of time: {left_out}")
    keep(
        arguments.out,
        data={"rows": rows, "compile_s": compile_s, "seconds": seconds, "left_out": left_out},
        inputs={
            "benchmark": "pages",
            "repeats": arguments.repeats,
            "ragged": [list(pair) for pair in bench.heads],
            "pages": list(bench.pages),
            "gap": GAP,
            "tiny": arguments.tiny,
        },
        headline={
            f"{row['what']} {row['context']} x {row['batch']}: pages of 64 over one stretch": round(
                row["ratio"], 3
            )
            for row in rows
            if row["form"] == "64"
        },
        warnings=[
            *failed,
            *(
                f"{row['what']} {row['context']} x {row['batch']}, {row['form']}: error "
                f"{row['error']}"
                for row in wrong
            ),
        ],
    )
    if wrong or failed:
        raise SystemExit(
            f"{len(failed)} cases failed; {len(wrong)} forms are further than {LIMIT} from float64"
        )


if __name__ == "__main__":
    main()
