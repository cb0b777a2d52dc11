"""Keys rebuilt from latents inside the decode kernel, against float64; run by test_cases.py."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.reconstruct.pages import page_rebuild
from kvprof.kernels.reconstruct.rebuild_config import Target, Tuning, tuning_for
from kvprof.kernels.reconstruct.reference import reference_reconstruct
from kvprof.kernels.reconstruct.step import reconstruct_step, stored_step
from kvprof.kernels.tables import Part
from kvprof.runtime.backends.rotary import RotaryForm
from tests.kernels.folded import folded_queries
from tests.kernels.numbers import error

pytestmark = pytest.mark.usefixtures("poisoned")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
LIMITS = {torch.float16: 3e-3, torch.bfloat16: 1.5e-2, torch.float32: 1e-5}
SMALL = Tuning(pieces=3, height=32, columns=32)


@dataclass(frozen=True)
class Layer:
    """A layer's shape, and random states for it."""

    key_widths: tuple[int, ...]
    value_widths: tuple[int, ...]
    heads: int
    group: int
    head_dim: int
    rotary_dim: int
    lengths: tuple[int, ...]
    interleaved: bool = False
    spare: int = 3
    dtype: torch.dtype = torch.float32
    tuning: Tuning | None = SMALL
    per_row: bool = False
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 1.0
    seed: int = 0

    @property
    def layout(self):
        widths = (self.key_widths, self.value_widths)
        capacity = max(self.lengths) + self.spare
        return RaggedLayout(*widths, self.heads * self.group, len(self.lengths), capacity)

    def states(self):
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape, scale=1.0):
            return scale * torch.randn(shape, generator=generator)

        layout, rows = self.layout, self.heads * self.head_dim
        shape = (layout.batch, layout.capacity)
        keys = [random(*shape, width, scale=self.scale) for width in self.key_widths]
        values = [random(*shape, width) for width in self.value_widths]
        buffer = layout.packed(keys, values)
        up = [random(rows, width, scale=width**-0.5) for width in self.key_widths]
        query = random(layout.batch, layout.heads * self.group * rows)
        found = [tensor.to(DEVICE, self.dtype) for tensor in (query, buffer, *up)]
        angles = random(*(shape if self.per_row else shape[1:]), self.rotary_dim // 2, scale=3.0)
        sinks = random(layout.heads, layout.group).to(DEVICE) if self.sinks else None
        cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        return found[0], found[1], found[2:], cos, sin, sinks

    def step(self, up):
        return reconstruct_step(
            self.layout,
            up,
            self.head_dim,
            self.heads,
            DEVICE,
            multiprocessors=2,
            tuning=self.tuning,
            interleaved=self.interleaved,
            rotary_dim=self.rotary_dim,
        )


def run(layer: Layer) -> torch.Tensor:
    query, buffer, up, cos, sin, sinks = layer.states()
    step = layer.step(up)
    return step.run(
        query,
        buffer,
        step.cut(list(layer.lengths)),
        cos,
        sin,
        0.2,
        softcap=layer.softcap,
        sinks=sinks,
    )


def wanted(layer: Layer) -> torch.Tensor:
    query, buffer, up, cos, sin, sinks = layer.states()
    return reference_reconstruct(
        query,
        buffer,
        layer.layout,
        up,
        layer.heads,
        layer.lengths,
        cos,
        sin,
        0.2,
        interleaved=layer.interleaved,
        softcap=layer.softcap,
        sinks=sinks,
    )


widths = st.integers(1, 8).map(lambda n: 16 * n)


@st.composite
def layers(draw):
    groups = draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from([16, 40, 64, 80, 96, 112]))
    heads = draw(st.sampled_from([1, 2, 4]))
    keys, values = (tuple(draw(widths) for _ in range(groups)) for _ in range(2))
    dtype = draw(st.sampled_from(DTYPES))
    # Larger ones are never kept: shared memory may have no room for them beside a tile.
    matrix = heads * head_dim * max(keys) * dtype.itemsize
    small = tuning_for(Target(), matrix, max(keys), 16, dtype.itemsize).kept
    return Layer(
        keys,
        values,
        heads,
        draw(st.integers(1, 8)) if heads < 4 else draw(st.integers(1, 5)),
        head_dim,
        draw(st.sampled_from([head_dim, head_dim // 2, 8])),
        tuple(draw(st.integers(1, 120)) for _ in range(draw(st.integers(1, 2)))),
        interleaved=draw(st.booleans()),
        spare=draw(st.integers(0, 9)),
        dtype=dtype,
        tuning=Tuning(
            pieces=draw(st.integers(1, 4)),
            height=draw(st.sampled_from([32, 64])),
            columns=draw(st.sampled_from([16, 64])),
            kept=small and draw(st.booleans()),
        ),
        per_row=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


@settings(max_examples=7, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers())
def test_any_widths_heads_rotations_and_cuts_give_attention(layer):
    assert error(run(layer), wanted(layer)) < LIMITS[layer.dtype]


@pytest.mark.parametrize(
    "layer",
    [
        # As tuned for a GPU: `up` kept, and taken block by block, with a half of two blocks.
        Layer((64,), (64,), 1, 4, 128, 128, (100,), tuning=None),
        Layer((160, 64), (64, 96), 2, 2, 128, 128, (70, 1), tuning=None, dtype=torch.float16),
        # The widest latents and the most query heads.
        Layer((512,), (480,), 4, 16, 16, 16, (20,)),
        Layer((256,), (16,), 2, 1, 256, 64, (17,)),
    ],
    ids=["kept", "blocks", "largest", "wide heads"],
)
def test_shapes_at_the_ends(layer):
    assert error(run(layer), wanted(layer)) < LIMITS[layer.dtype]


def test_extreme_scores():
    layer = Layer((48, 128), (80, 16), 2, 4, 64, 64, (133,), scale=200.0)
    reference, found = wanted(layer), run(layer)
    assert torch.isfinite(found).all()
    assert float((found.double() - reference).norm() / reference.norm()) < 1e-4


def test_what_lies_behind_the_context_does_not_count():
    layer = Layer((48, 32), (16, 64), 2, 2, 32, 32, (40, 7), spare=60, per_row=True)
    before = run(layer)
    query, buffer, up, cos, sin, _ = layer.states()
    for group in range(2):
        for planes in layer.layout.planes(buffer, group):
            for plane in planes:
                plane[0, 40:] = float("nan")
                plane[1, 7:] = float("nan")
    for table in (cos, sin):
        table[0, 40:] = float("nan")
        table[1, 7:] = float("nan")
    step = layer.step(up)
    found = step.run(query, buffer, step.cut([40, 7]), cos, sin, 0.2)
    assert torch.equal(found, before)


def test_tables_are_read_in_any_strides():
    layer = Layer((64,), (32,), 2, 2, 32, 16, (50,))
    query, buffer, up, cos, sin, _ = layer.states()
    step = layer.step(up)
    schedule = step.cut([50])
    before = step.run(query, buffer, schedule, cos, sin, 0.2)
    # A model repeats each column, behind the others or beside itself.
    doubled = [torch.cat([table, table], -1)[:, :8] for table in (cos, sin)]
    beside = [table.repeat_interleave(2, -1)[:, ::2] for table in (cos, sin)]
    for tables in (doubled, beside):
        assert not tables[0].is_contiguous()
        assert torch.equal(step.run(query, buffer, schedule, *tables, 0.2), before)


def test_without_the_rebuild_queries_meet_the_latents():
    layer = Layer((96, 32), (64, 48), 2, 3, 32, 32, (90, 41))
    query, buffer, up, cos, sin, _ = layer.states()
    still = (torch.ones_like(cos), torch.zeros_like(sin))
    step = layer.step(up)
    schedule = step.cut([90, 41])
    folded = folded_queries(query, up, layer.layout, 2)
    found = stored_step(step).run(folded, buffer, schedule, None, None, 0.2)
    reference = reference_reconstruct(
        query, buffer, layer.layout, up, 2, layer.lengths, *still, 0.2
    )
    assert float((found.double() - reference).norm() / reference.norm()) < 1e-5
    with pytest.raises(UsageError, match="pass None"):
        stored_step(step).run(folded, buffer, schedule, *still, 0.2)


@pytest.mark.parametrize("lengths", [(100, 0, 3), (0, 0, 0), (17, 200, 64)])
def test_the_cut_covers_every_token_once_and_a_row_without_tokens_gets_zeros(lengths):
    layer = Layer((64, 32), (32, 32), 1, 2, 16, 16, lengths, sinks=True)
    query, buffer, up, cos, sin, sinks = layer.states()
    step = layer.step(up)
    # On the device nothing is checked: what is out of range is clamped.
    given_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    given_lengths[given_lengths == 0] = -5
    schedule = step.cut(given_lengths)
    items, parts = (tensor.tolist() for tensor in schedule.scheduled)
    used = 0
    for task, (first, count) in enumerate(parts):
        row, group = divmod(task, 2)
        assert first == used
        at = 0
        for owner, latent, start, stop in items[first : first + count]:
            assert (owner, latent, start) == (row, group, at)
            assert stop > start
            at = stop
        assert at == lengths[row]
        used += count
    assert all(start == stop for _, _, start, stop in items[used:])
    found = step.run(query, buffer, schedule, cos, sin, 0.2, sinks=sinks)
    for row, length in enumerate(lengths):
        assert bool((found[row] == 0).all()) == (length == 0)


def test_pieces_cost_the_same():
    layer = Layer((128, 16), (128, 16), 1, 2, 16, 16, (4000,), tuning=replace(SMALL, pieces=16))
    step = layer.step(layer.states()[2])
    parts = list(map(Part._make, step.cut([4000]).scheduled[1].tolist()))
    wide, narrow = parts
    costs = [step.config.cost(width, width) for width in (128, 16)]
    assert wide.items / narrow.items == pytest.approx(costs[0] / costs[1], rel=0.15)
    assert sum(part.items for part in parts) <= 2 * 16


def test_what_cannot_run_is_refused():
    layer = Layer((32,), (32,), 2, 2, 16, 16, (50,))
    query, buffer, up, cos, sin, _ = layer.states()
    step = layer.step(up)
    schedule = step.cut([50])
    for lengths in ([-1], [54], [1, 2]):
        with pytest.raises(UsageError):
            step.cut(lengths)
    with pytest.raises(UsageError):
        step.run(query[:, :-1], buffer, schedule, cos, sin, 1.0)
    with pytest.raises(UsageError):
        step.run(query, buffer[:-1], schedule, cos, sin, 1.0)
    with pytest.raises(UsageError, match="pass cos and sin"):
        step.run(query, buffer, schedule, None, None, 1.0)
    with pytest.raises(UsageError):
        step.run(query, buffer, schedule, cos[:49], sin[:49], 1.0)
    with pytest.raises(UsageError, match="different"):
        step.run(query, buffer, schedule, cos, sin.half(), 1.0)
    with pytest.raises(UsageError):
        step.run(query, buffer, schedule, cos.double(), sin.double(), 1.0)
    with pytest.raises(UsageError, match="sinks"):
        step.run(query, buffer, schedule, cos, sin, 1.0, sinks=torch.zeros(2, 2, device=DEVICE))
    if DEVICE.type == "cpu":
        half = layer.step([matrix.bfloat16() for matrix in up])
        with pytest.raises(UsageError, match="interpreter"):
            half.run(query.bfloat16(), buffer.bfloat16(), schedule, cos, sin, 1.0)
        assert reconstruct_step(layer.layout, up, 16, 2, DEVICE).multiprocessors == 1


_widths = st.sampled_from([16, 48, 64, 112, 144, 320])


@settings(max_examples=8 if DEVICE.type == "cuda" else 16)
@given(
    st.lists(st.tuples(_widths, _widths), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([(64, 64), (80, 40), (48, 12), (32, 32)]),
    st.booleans(),
    st.sampled_from([16, 48, 64, 128]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_whole_pages_are_those_that_float64_rebuilds(
    widths, heads, head, interleaved, page, count, valued, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    (dim, turned), pages = head, 6
    keys, values = zip(*widths, strict=True)
    layout = RaggedLayout(keys, values, heads * 2, pages, page)
    pool = torch.full((pages, layout.row + 16), float("nan")).to(dtype)
    pool[:, : layout.row] = torch.randn(pages, layout.row, generator=generator).to(dtype)
    up, value_up = (
        [
            (torch.randn(heads * dim, w, generator=generator) * w**-0.5).to(DEVICE, dtype)
            for w in own
        ]
        for own in (keys, values if valued else ())
    )
    positions = 3 * page + 5
    angles = 3 * torch.randn(positions, turned // 2, generator=generator).to(DEVICE)
    step = reconstruct_step(
        layout,
        up,
        dim,
        heads,
        DEVICE,
        interleaved=interleaved,
        rotary_dim=turned,
        page_tokens=page,
        rows=1,
        most_tokens=positions,
    )
    repeated = tuple(dim if valued else width for width in values for _ in range(heads))
    whole = RaggedLayout((dim,) * len(repeated), repeated, 2, 1, page)
    seen = torch.randint(0, pages, (count, 2), generator=generator, dtype=torch.int32)
    seen[:, 1] = page * (seen[:, 1] % 4)
    made = replace(whole, batch=count)
    planes = torch.full((made.elements,), float("nan")).to(DEVICE, dtype)
    pool = pool.to(DEVICE)
    rebuild = page_rebuild(step, whole, value_up)
    rebuild.run(planes, pool, seen.to(DEVICE), angles.cos(), angles.sin())
    chosen = pool[seen[:, 0].long().to(DEVICE)][:, : layout.row]
    at = (seen[:, 1:] + torch.arange(page)).clamp(max=positions - 1).to(DEVICE)
    own = replace(layout, batch=count)
    form = RotaryForm(turned, interleaved, 1)
    for group, matrix in enumerate(up):
        latents, stored = own.head(chosen.flatten(), group)
        states = (latents.double() @ matrix.double().mT).unflatten(-1, (heads, dim))
        turns = [angles.double()[at].cos()[:, :, None], angles.double()[at].sin()[:, :, None]]
        wanted = [form.rotated(states, *turns)]
        if valued:
            wanted.append(
                (stored.double() @ value_up[group].double().mT).unflatten(-1, (heads, dim))
            )
        for number in range(heads):
            found = made.head(planes, group * heads + number)
            assert valued or torch.equal(found[1], stored)
            for mine, other in zip(found, wanted, strict=False):
                close = LIMITS[dtype] * other.abs().amax()
                assert (mine.double() - other[:, :, number]).abs().amax() < close


def test_pages_of_other_heads_are_refused():
    layout = RaggedLayout((32,), (48,), 4, 2, 16)
    up = [torch.zeros(128, 32, device=DEVICE)]
    step = reconstruct_step(layout, up, 64, 2, DEVICE, page_tokens=16, rows=1)
    with pytest.raises(UsageError):
        page_rebuild(step, RaggedLayout((64, 64), (48, 32), 2, 1, 16))
    whole = RaggedLayout((64, 64), (48, 48), 2, 1, 16)
    seen = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    cache, angles = torch.zeros(2, layout.row, device=DEVICE), torch.zeros(32, 32, device=DEVICE)
    with pytest.raises(UsageError):
        page_rebuild(step, RaggedLayout((64, 64), (64, 64), 2, 1, 16), up)
    wrong = [torch.zeros(128, 48, device=DEVICE).half()]
    with pytest.raises(UsageError):
        page_rebuild(step, RaggedLayout((64, 64), (64, 64), 2, 1, 16), wrong)
    planes, rebuild = torch.zeros(whole.row, device=DEVICE), page_rebuild(step, whole)
    with pytest.raises(UsageError):
        rebuild.run(planes, cache, seen, angles, angles)
