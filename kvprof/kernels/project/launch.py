"""The Triton launch of a pass: which blocks it is cut into, and what the kernel is told."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kvprof.kernels.dispatch import check_interpreter, early_launch, launching
from kvprof.kernels.planes import LARGEST_WIDTH, STEP, row_stride
from kvprof.kernels.project.args import (
    KEYS,
    QUERY,
    VALUES,
    Case,
    Operand,
    ProjectArgs,
    Rotary,
    Unit,
    begins_of,
    planes_of,
)
from kvprof.kernels.project.kernel import project_rows
from kvprof.kernels.tables import joined_rows

__all__ = [
    "Tuning",
    "Units",
    "block_of",
    "constants",
    "cut",
    "launch",
    "tuning_for",
    "units",
]

# --- How a pass is cut into units: blocks of a head's columns, 16 to 128 wide.
#
# Columns and not heads, so that the kernel knows at most four widths however ragged a layer is,
# and so that one token per sequence still makes work for many multiprocessors.


#: Rows of `Unit` on the device, and the rows of `Case` in it.
Units = tuple[Tensor, tuple[int, ...]]


@lru_cache(maxsize=4096)
def units(
    query: tuple[tuple[int, ...], int, int] | None,
    keys: tuple[tuple[int, ...], int] | None,
    values: tuple[tuple[int, ...], int, int] | None,
    planes: tuple[tuple[int, ...], tuple[int, ...], int, int],
    widest: int,
    device: torch.device,
) -> Units:
    """Return a pass's units, made once per shape: a captured graph needs one run before it."""
    key_widths, value_widths, blocks, widest_plane = planes
    begins = begins_of(key_widths, value_widths, blocks)
    rows: list[Unit] = []
    cases: list[Case] = []

    def number_of(operand: int, width: int) -> int:
        case = Case(operand, width)
        if case not in cases:
            cases.append(case)
        return cases.index(case)

    operands = {QUERY: query, KEYS: keys, VALUES: values}
    for operand, part in operands.items():
        if part is not None:
            plane = LARGEST_WIDTH if operand == QUERY else widest_plane
            sizes = {size for width in part[0] for *_, size in _blocks(width, plane, widest)}
            for size in _known_sizes(sizes):
                number_of(operand, size)

    if query is not None:
        widths, depth, group = query
        length, first = group * sum(widths), 0
        for head, (width, basis) in enumerate(zip(widths, _sums(widths), strict=True)):
            for member in range(group):
                for at, _, _, size in _blocks(width, LARGEST_WIDTH, widest):
                    rows.append(
                        Unit(
                            case=number_of(QUERY, size),
                            head=head * group + member,
                            basis=depth * basis + at,
                            length=width,
                            plane=0,
                            stride=length,
                            column=first + at,
                        )
                    )
                first += width
    for operand, given in ((KEYS, keys), (VALUES, values)):
        if given is None:
            continue
        widths, depth, *steps = given
        step = steps[0] if steps else 0
        for head, (width, basis) in enumerate(zip(widths, _sums(widths), strict=True)):
            begin = begins[2 * head + operand - KEYS]
            for at, before, plane, size in _blocks(width, widest_plane, widest):
                rows.append(
                    Unit(
                        case=number_of(operand, size),
                        head=head if depth else (head * step if step else basis) + at,
                        basis=depth * basis + at,
                        length=width,
                        plane=begin + before,
                        stride=plane,
                        column=at - before,
                    )
                )
    return torch.tensor(rows, dtype=torch.int64, device=device), joined_rows(cases)


def _known_sizes(sizes: set[int]) -> list[int]:
    """Return the block sizes a kernel is built for, largest first, so that layers share it."""
    if len(sizes) < 2:
        return sorted(sizes)
    return [size for size in (128, 64, 32, STEP) if size <= max(sizes)]


def _sums(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each head's columns begin."""
    return (0, *accumulate(widths))[:-1]


def _blocks(width: int, widest_plane: int, widest: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a head's columns: first column, columns before its plane, the plane, the block's size."""
    before = 0
    for plane in planes_of(width, widest_plane):
        size = min(plane, widest)
        for at in range(0, plane, size):
            yield before + at, before, plane, size
        before += plane


@dataclass(frozen=True)
class Tuning:
    """What is chosen for a GPU and not for a model."""

    rows: int  # tokens of a program, a power of two from 16 on
    widest: int  # columns of a program at most
    warps: int  # of a program; steps of its products on their way at once
    stages: int


def tuning_for(rows: int, dtype: torch.dtype) -> Tuning:
    """Return what suits a pass of `rows` tokens over all sequences.

    A decoding step waits for latency: few rows, many programs, everything loaded at once. A prompt
    waits for memory and wants its states read once. Not 64 rows: products would then take their
    operands from constant places in shared memory, which the assembler of CUDA 12.8 gets wrong
    (`kvprof.kernels.prefill.kernel`). fp32 has no tensor cores here, and its products live in
    registers.
    """
    if rows <= 128:
        return Tuning(16, 64, 4, 3)
    return Tuning(32, 64 if dtype == torch.float32 else 128, 4, 2)


def block_of(size: int, tuning: Tuning) -> int:
    """Return how many of `size` dimensions a step of a product takes; 16 or 32 for a prompt."""
    if tuning.rows == 16:
        return next(block for block in (16, 32, 64) if block >= min(size, 64))
    return 32 if -(-size // 32) * 32 == -(-size // 16) * 16 else 16


def cut(args: ProjectArgs, widest: int) -> Units:
    """Return the units of a pass."""

    def given(operand: Operand) -> tuple[tuple[int, ...], int]:
        return operand.widths, 0 if operand.bases is None else operand.states.shape[-1]

    query = None
    if args.query is not None:
        query = (*given(args.query), args.query.states.shape[2] // len(args.query.widths))
    destination = args.destination
    return units(
        query,
        None if args.keys is None else given(args.keys),
        None if args.values is None else (*given(args.values), _latent_step(args.values)),
        ((), (), 1, LARGEST_WIDTH)
        if destination is None
        else (
            destination.key_widths,
            destination.value_widths,
            destination.blocks,
            destination.widest,
        ),
        widest,
        args.states.device,
    )


def launch(args: ProjectArgs) -> Tensor | None:
    """Run a pass; return the queries ``[batch, tokens, Σ_g G·dk_g]`` where there are any."""
    first = args.states
    batch, tokens = first.shape[:2]
    check_interpreter(first.dtype)
    output = None
    if args.query is not None:
        group = args.query.states.shape[2] // len(args.query.widths)
        output = first.new_empty(batch, tokens, group * sum(args.query.widths))
    if batch * tokens == 0:
        return output
    tuning = tuning_for(batch * tokens, first.dtype)
    table, cases = cut(args, tuning.widest)
    destination = args.destination
    turned = next((s.states.shape[-1] for s in (args.query, args.keys) if s is not None), 0)
    depth = 0 if args.values is None or args.values.bases is None else args.values.states.shape[-1]
    rotary = args.rotary
    count = table.shape[0]
    grid = (count * -(-(batch * tokens) // tuning.rows),)
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        launching(project_rows, grid)(
            *(None if s is None else s.states for s in (args.query, args.keys, args.values)),
            *(None if s is None else s.bases for s in (args.query, args.keys, args.values)),
            *((None, None) if rotary is None else (rotary.cos, rotary.sin)),
            output,
            *((None,) if destination is None else (destination.buffer,)),
            table,
            *(
                (None,) * 3
                if destination is None
                else (destination.start, destination.valid, destination.slots)
            ),
            count,
            batch * tokens,
            tokens,
            *(
                (0, 0, 0)
                if destination is None
                else (
                    destination.pool,
                    destination.capacity,
                    row_stride(destination.buffer, destination.pool),
                )
            ),
            *_strides(args.query),
            *_strides(args.keys),
            *_strides(args.values),
            *_table_strides(rotary),
            CASES=cases,
            COUNT=len(cases) // len(Case._fields),
            ALIGNED=_aligned(args, output),
            **constants(turned, depth, rotary, tuning),
            num_warps=tuning.warps,
            **early_launch(first.device, batch * tokens),
        )
    return output


def constants(
    depth: int, value_depth: int, rotary: Rotary | None, tuning: Tuning
) -> dict[str, int | bool]:
    """Return the kernel's compile-time numbers but for its cases."""
    dim = 0 if rotary is None else rotary.dim
    return {
        "DEPTH": depth,
        "VALUE_DEPTH": value_depth,
        "DIM": dim,
        "OFFSET": 0 if rotary is None else rotary.offset,
        "INTERLEAVED": rotary is not None and rotary.interleaved,
        "FULL": rotary is not None and rotary.cos.shape[-1] == dim,
        "ROWS": tuning.rows,
        "PAIRS": block_of(dim // 2, tuning),
        "BLOCK": block_of(depth - dim, tuning),
        "VALUE_BLOCK": block_of(value_depth, tuning),
        "STAGES": tuning.stages,
    }


def _aligned(args: ProjectArgs, output: Tensor | None) -> bool:
    """Whether all that is loaded or stored in rows lies at multiples of 16 bytes."""
    tensors = [output]
    for operand in (args.query, args.keys, args.values):
        tensors += [] if operand is None else [operand.states, operand.bases]
    tensors += [] if args.rotary is None else [args.rotary.cos, args.rotary.sin]
    tensors += [] if args.destination is None else [args.destination.buffer]
    for tensor in tensors:
        if tensor is None:
            continue
        size = tensor.element_size()
        # A loop and no generators: every layer of an engine's step asks.
        for distance in (tensor.data_ptr(), *(size * stride for stride in tensor.stride()[:-1])):
            if distance % 16:
                return False
    return True


def _latent_step(values: Operand) -> int:
    """Return the columns from one head's latent to the next where they do not lie side by side."""
    return values.states.stride(2) if values.bases is None and values.states.dim() == 4 else 0


def _strides(operand: Operand | None) -> tuple[int, int, int]:
    """Return the strides of the batch, of tokens and of heads (of columns, for latents)."""
    if operand is None:
        return 0, 0, 0
    strides = operand.states.stride()
    return strides[0], strides[1], strides[2] if operand.bases is not None else strides[-1]


def _table_strides(rotary: Rotary | None) -> tuple[int, int, int, int]:
    if rotary is None:
        return 0, 0, 0, 0
    (cos_row, cos_token), (sin_row, sin_token) = (
        (0 if len(table) == 1 else table.stride(0), table.stride(1))
        for table in (rotary.cos, rotary.sin)
    )
    return cos_row, cos_token, sin_row, sin_token
