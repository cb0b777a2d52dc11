"""The projection kernel against float64; run by test_cases.py, and on the CPU path by others."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import BasisSet, basis_set
from kvprof.kernels.project.reference import reference_project, reference_rotate, reference_store
from kvprof.kernels.project.step import (
    project_keys,
    project_queries,
    project_step,
    project_values,
    store_values,
)
from kvprof.kernels.quantized.append import append
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout
from kvprof.kernels.quantized.operand_layout import PLACES, WIDEST_PLANE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * (DEVICE.type == "cuda")
UNTOUCHED = 1234.0
#: Of the largest result: states are rounded after they are turned, results once more.
LIMITS = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Rope:
    """RoPE of a case."""

    dim: int
    offset: int = 0
    interleaved: bool = False
    full: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Case:
    """A pass to check."""

    layout: RaggedLayout
    depth: int
    tokens: int
    start: tuple[int, ...] | None
    value_depth: int = 0
    rope: Rope | None = None
    valid: tuple[int, ...] | None = None
    slots: tuple[tuple[int, ...], ...] | None = None
    spare: int = 0
    gap: int = 16
    heads_first: bool = False

    @property
    def batch(self) -> int:
        return len(self.start if self.slots is None else self.slots)


class Pass:
    """The tensors of a case, and what comes of them in float64."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.generator = torch.Generator().manual_seed(seed)
        layout, rope = case.layout, case.rope
        batch = case.batch
        self.query = self.states(layout.heads * layout.group, case.depth)
        self.keys = self.states(layout.heads, case.depth)
        self.bases = self.basis(case.depth, layout.key_widths)
        self.query_bases = self.basis(case.depth, layout.key_widths)
        self.value_bases = self.basis(case.value_depth, layout.value_widths)
        if case.value_depth:
            self.values = self.states(layout.heads, case.value_depth)
        else:
            self.values = self.random(batch, case.tokens, sum(layout.value_widths)).to(dtype)
        self.values = self.values.to(device)
        self.rotary = {}
        if rope is not None:
            width = rope.dim if rope.full else rope.dim // 2
            shape = (1 if rope.shared else batch, case.tokens, width)
            self.cos, self.sin = self.random(*shape).to(device), self.random(*shape).to(device)
            self.rotary = {
                "cos": self.cos,
                "sin": self.sin,
                "rotary_dim": rope.dim,
                "offset": rope.offset,
                "interleaved": rope.interleaved,
            }
        slots = None if case.slots is None else torch.tensor(case.slots).to(device)
        self.places = {"valid": self.whole(case.valid), "slots": slots}
        self.start = self.whole(case.start)
        # Rows with a gap behind each, or one flat buffer.
        self.whole_buffer = torch.full(
            (layout.batch, layout.row + case.spare), UNTOUCHED, dtype=dtype, device=device
        )
        own = self.whole_buffer[:, : layout.row]
        self.buffer = own if case.spare else own.flatten()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def whole(self, numbers: object) -> Tensor | None:
        made = None if numbers is None else torch.tensor(numbers, dtype=torch.int32)
        return None if made is None else made.to(self.device)

    def basis(self, depth: int, widths: tuple[int, ...]) -> BasisSet | None:
        if not depth:
            return None
        made = [self.random(depth, width) / depth**0.5 for width in widths]
        return basis_set(made, dtype=self.dtype, device=self.device)

    def states(self, heads: int, depth: int) -> Tensor:
        """Cut states out of a wider tensor whose rest is NaN: who reads too far is found out."""
        batch, tokens = self.case.batch, self.case.tokens
        first, second = (heads, tokens) if self.case.heads_first else (tokens, heads)
        wide = torch.full((batch, first, second, depth + self.case.gap), float("nan"))
        wide[..., :depth] = self.random(batch, first, second, depth)
        made = wide.to(self.device, self.dtype)[..., :depth]
        return made.transpose(1, 2) if self.case.heads_first else made

    def turned(self, states: Tensor) -> Tensor:
        rope = self.case.rope
        if rope is None:
            return states.double().cpu()
        return reference_rotate(
            states.cpu(),
            self.cos.cpu(),
            self.sin.cpu(),
            dim=rope.dim,
            offset=rope.offset,
            interleaved=rope.interleaved,
        )

    def latents(self, states: Tensor, bases: BasisSet) -> list[Tensor]:
        heads = self.case.layout.heads
        return reference_project(states, [bases.head(head).cpu() for head in range(heads)])

    def check_queries(self, found: Tensor, bases: BasisSet) -> None:
        wanted = torch.cat(self.latents(self.turned(self.query), bases), dim=-1)
        assert found.dtype == self.dtype
        assert found.shape == wanted.shape
        self.check_close(found.cpu(), wanted)

    def check_buffer(self, *, keys: bool = True, values: bool = True) -> None:
        """Compare what is stored, and that nothing else is."""
        case = self.case
        made = self.latents(self.turned(self.keys), self.bases)
        if case.value_depth:
            value_latents = self.latents(self.values.cpu(), self.value_bases)
        else:
            value_latents = list(
                torch.split(self.values.cpu(), list(case.layout.value_widths), dim=-1)
            )
        wanted = reference_store(
            case.layout,
            torch.full((case.layout.elements,), float("nan")),
            made if keys else None,
            value_latents if values else None,
            case.start,
            valid=case.valid,
            slots=case.slots,
        )
        found, stored = self.buffer.cpu().flatten(), ~torch.isnan(wanted)
        assert bool((self.whole_buffer[:, case.layout.row :] == UNTOUCHED).all())
        assert bool((found[~stored] == UNTOUCHED).all())
        self.check_close(found[stored], wanted[stored])

    def check_close(self, found: Tensor, wanted: Tensor) -> None:
        if wanted.numel():
            error = (found.double() - wanted).abs().max() / wanted.abs().max()
            assert float(error) < LIMITS[self.dtype]


def check_step(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    given = Pass(case, dtype, device, seed)
    found = project_step(
        given.query,
        given.keys,
        given.values,
        given.bases,
        case.layout,
        given.buffer,
        given.start,
        query_bases=given.query_bases,
        value_bases=given.value_bases,
        **given.rotary,
        **given.places,
    )
    given.check_queries(found, given.query_bases)
    given.check_buffer()


def check_one_by_one(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    # Only the launch of all three turns.
    given = Pass(replace(case, rope=None), dtype, device, seed)
    layout, place = case.layout, (case.layout, given.buffer, given.start)
    found = project_queries(given.query, given.bases, layout)
    given.check_queries(found, given.bases)
    project_keys(given.keys, given.bases, *place, **given.places)
    given.check_buffer(values=False)
    if case.value_depth:
        project_values(given.values, given.value_bases, *place, **given.places)
    else:
        store_values(given.values, *place, **given.places)
    given.check_buffer()
    if not case.value_depth:
        # The same latents where a projection leaves them: at the beginning of heads.
        given.buffer.fill_(UNTOUCHED)
        project_keys(given.keys, given.bases, *place, **given.places)
        heads = given.states(layout.heads, max(layout.value_widths) + 16)
        for head, latent in enumerate(given.values.split(list(layout.value_widths), dim=-1)):
            heads[:, :, head, : latent.shape[-1]] = latent
        store_values(heads, *place, **given.places)
        given.check_buffer()


@st.composite
def ropes(draw, depth: int):
    dim = 2 * draw(st.integers(1, depth // 2))
    offset = draw(st.sampled_from(sorted({0, depth - dim, (depth - dim) // 2})))
    return Rope(dim, offset, *(draw(st.booleans()) for _ in range(3)))


@st.composite
def passes(draw):
    widths = st.integers(1, 17).map(lambda n: 16 * n if n < 17 else 480)
    heads, batch, tokens = (draw(st.integers(1, most)) for most in (3, 3, 20))
    depth = draw(st.sampled_from([16, 20, 64, 80, 96, 112, 128]))
    valid = None
    if draw(st.booleans()):
        valid = tuple(draw(st.integers(0, tokens)) for _ in range(batch))
    start = tuple(draw(st.integers(-1, 30)) for _ in range(batch))
    pages, page, slots = batch, 51, None
    if draw(st.booleans()):
        start, valid = None, None
        page, pages = draw(st.sampled_from([16, 48])), draw(st.integers(1, 9))
        # No two tokens in one slot, and some in none.
        every = draw(st.permutations(range(-batch * tokens, pages * page)))
        slots = tuple(tuple(every[row * tokens : (row + 1) * tokens]) for row in range(batch))
    layout = RaggedLayout(
        tuple(draw(widths) for _ in range(heads)),
        tuple(draw(widths) for _ in range(heads)),
        draw(st.integers(1, 3)),
        pages,
        page,
    )
    return Case(
        layout,
        depth,
        tokens,
        start,
        value_depth=draw(st.sampled_from([0, 48, 112])),
        rope=draw(st.none() | ropes(depth)),
        valid=valid,
        slots=slots,
        spare=draw(st.sampled_from([0, 0, 48])),
        gap=draw(st.sampled_from([16, 3])),
        heads_first=draw(st.booleans()),
    )


# On a GPU every example compiles a kernel of its own.
few = settings(max_examples=4 if DEVICE.type == "cuda" else 5)


@few
@given(passes(), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_any_pass_in_one_launch(case, dtype, seed):
    check_step(case, dtype, DEVICE, seed)


@few
@given(passes(), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_any_pass_in_launches_of_its_own(case, dtype, seed):
    check_one_by_one(case, dtype, DEVICE, seed)


PROMPT = Case(
    RaggedLayout((16, 256), (112, 48), 2, 2, 100),
    96,
    65,
    (5, 0),
    rope=Rope(96, full=True),
    valid=(0, 13),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_in_tall_tiles(dtype):
    check_step(PROMPT, dtype, DEVICE)
    rope = Rope(64, 16, interleaved=True)
    check_step(replace(PROMPT, rope=rope, value_depth=80), dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_per_sequence(dtype):
    layout = RaggedLayout((112, 32, 64), (48, 128, 16), 4, 3, 33)
    case = Case(layout, 128, 1, (32, -1, 0), rope=Rope(128, full=True, shared=True))
    check_step(case, dtype, DEVICE)


def test_a_token_without_room_is_not_stored():
    layout = RaggedLayout((32,), (16,), 1, 2, 10)
    given = Pass(Case(layout, 32, 6, (6, 2)), torch.float32, DEVICE, 0)
    project_keys(given.keys, given.bases, layout, given.buffer, given.start)
    fits = Pass(replace(given.case, start=(6, 2), tokens=4), torch.float32, DEVICE, 0)
    fits.keys, fits.bases = given.keys[:, :4], given.bases
    project_keys(fits.keys, fits.bases, layout, fits.buffer, fits.start)
    keys, wanted = layout.head(given.buffer, 0)[0], layout.head(fits.buffer, 0)[0]
    assert torch.equal(keys[0], wanted[0])  # places 10 and 11 would be sequence 1's 0 and 1
    assert bool((keys[1, :2] == UNTOUCHED).all())
    # Products of other rows beside them may be summed in another order.
    torch.testing.assert_close(keys[1, 2:6], wanted[1, 2:6])
    pool = RaggedLayout((32,), (16,), 1, 3, 16)
    slots = torch.tensor([48, 2**40, -1, -17, 33, 47])
    paged = Pass(Case(pool, 32, 6, None, slots=(tuple(slots.tolist()),)), torch.float32, DEVICE, 1)
    project_keys(paged.keys, paged.bases, pool, paged.buffer, None, slots=slots.to(DEVICE))
    written = (pool.head(paged.buffer, 0)[0] != UNTOUCHED).all(-1)
    assert written.nonzero().tolist() == [[2, 1], [2, 15]]


def test_a_pass_of_no_tokens_stores_nothing():
    layout = RaggedLayout((32,), (16,), 2, 1, 10)
    check_step(Case(layout, 32, 0, (6,)), torch.float32, DEVICE)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="only the interpreter computes bf16 wrongly")
def test_bf16_is_refused_where_it_would_be_wrong():
    from kvprof.kernels.dispatch import interpreted

    layout = RaggedLayout((32,), (32,), 2, 1, 64)
    if interpreted():
        with pytest.raises(UsageError, match="interpreter"):
            check_step(Case(layout, 32, 2, (0,)), torch.bfloat16, DEVICE)
    else:
        check_step(Case(layout, 32, 2, (0,)), torch.bfloat16, DEVICE)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs are CUDA's")
def test_a_captured_step_follows_its_starts():
    layout = RaggedLayout((112, 32), (48, 128), 4, 2, 33)
    case = Case(layout, 128, 1, (7, 20), rope=Rope(128, full=True))
    given = Pass(case, torch.bfloat16, DEVICE, 0)

    def step() -> Tensor:
        return project_step(
            given.query,
            given.keys,
            given.values,
            given.bases,
            layout,
            given.buffer,
            given.start,
            **given.rotary,
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    given.buffer.fill_(UNTOUCHED)
    given.case = replace(case, start=(8, -1))
    given.start.copy_(torch.tensor(given.case.start))
    graph.replay()
    torch.cuda.synchronize()
    given.check_queries(found, given.bases)
    given.check_buffer()


def check_first_block(
    widths: list[tuple[int, int]], batch: int, room: int, folded: bool, dtype, device, seed: int
) -> None:
    """A segment's first block gets what `append` stores of the same projection."""
    generator = torch.Generator().manual_seed(seed)
    sides = [tuple(own[side] for own in widths) for side in (0, 1)]
    heads, depth, group = len(widths), 32, 2
    layout = SegmentsLayout(
        (
            Segment(RaggedLayout(*sides, group, batch, room)),
            Segment(RaggedLayout(*sides, group, batch, 70), 4, 4),
        ),
        dtype,
    )
    # Another row's bytes, and other tokens', stay what they are.
    numbers = torch.randn(layout.nbytes // dtype.itemsize, generator=generator).to(dtype)
    buffer = numbers.view(torch.uint8).clone().to(device)
    start = torch.randint(-1, room, (batch,), generator=generator, dtype=torch.int32).to(device)

    def states(*shape: int) -> Tensor:
        return torch.randn(batch, 1, *shape, generator=generator).to(device, dtype)

    def bases(side: int) -> BasisSet:
        own = [torch.randn(depth, width, generator=generator) for width in sides[side]]
        return basis_set(own, dtype=dtype, device=device)

    keys, value_bases = bases(0), None if folded else bases(1)
    value = states(sum(sides[1])) if folded else states(heads, depth)
    given = states(heads * group, depth), states(heads, depth), value, keys
    planes = RaggedLayout(*sides, group, batch, 1)
    apart = torch.zeros(planes.elements, dtype=dtype, device=device)
    wanted = buffer.clone()
    queries = project_step(
        *given, planes, apart, torch.zeros_like(start).int(), value_bases=value_bases
    )
    pairs = [planes.head(apart, head) for head in range(heads)]
    append(wanted, layout, 0, *zip(*pairs, strict=True), start)
    exact = layout.segments[0]
    found = project_step(
        *given,
        RaggedLayout(*sides, group, batch, PLACES * exact.slots),
        buffer.view(batch, -1).view(dtype),
        start,
        value_bases=value_bases,
        blocks=exact.blocks,
        widest=WIDEST_PLANE,
    )
    assert torch.equal(found, queries)
    assert torch.equal(buffer, wanted)


@few
@given(
    st.lists(st.tuples(*[st.integers(1, 9).map(lambda n: 16 * n)] * 2), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, PLACES),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 10**6),
)
def test_the_first_block_of_a_segment(widths, batch, room, folded, dtype, seed):
    check_first_block(widths, batch, room, folded, dtype, DEVICE, seed)
