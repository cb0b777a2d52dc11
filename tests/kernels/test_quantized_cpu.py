"""Attention over segments on a CPU, through the operator that ``torch.compile`` sees."""

import pytest
import torch

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import uses_triton
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.quantized.cpu import segments_cpu
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout
from kvprof.kernels.quantized.reference import reference_segments
from kvprof.kernels.quantized.step import segments_operator, segments_step
from tests.kernels.numbers import error

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(uses_triton(CPU), reason="Triton interprets in this process")

LENGTHS = [[4, 0], [2500, 31], [0, 130]]


def tale(dtype: torch.dtype) -> SegmentsLayout:
    wide, cut = ((64, 48), (96, 64)), ((64, 48), (32, 16))
    return SegmentsLayout(
        tuple(
            Segment(RaggedLayout(*widths, 3, 2, capacity), bits, bits)
            for widths, capacity, bits in ((wide, 4, None), (cut, 2500, 2), (wide, 130, 4))
        ),
        dtype,
    )


def states(layout: SegmentsLayout, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    packed = [
        tuple(
            [
                scale * torch.randn(layout.batch, own.layout.capacity, width, generator=generator)
                for width in widths
            ]
            for widths in (own.layout.key_widths, own.layout.value_widths)
        )
        for own in layout.segments
    ]
    row = layout.widest.query_offsets[-1]
    query = torch.randn(layout.batch, row, generator=generator).to(layout.dtype)
    return query, layout.packed(packed)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-5), (torch.float16, 1e-3), (torch.bfloat16, 5e-3)]
)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "sinks": torch.randn(2, 3)}])
def test_the_step_is_attention(dtype, limit, options):
    layout = tale(dtype)
    query, buffer = states(layout)
    prepared = segments_step(layout, CPU)
    found = prepared.run(query, buffer, prepared.cut(LENGTHS), 0.2, **options)
    assert found.dtype == dtype
    assert error(found, reference_segments(query, buffer, layout, LENGTHS, 0.2, **options)) < limit


def test_extreme_scores_and_garbage_behind_the_context():
    layout = tale(torch.float32)
    query, buffer = states(layout, scale=40.0)
    wanted = reference_segments(query, buffer, layout, LENGTHS, 1.0)
    assert error(segments_cpu(query, buffer, layout, torch.tensor(LENGTHS), 1.0), wanted) < 2e-5
    # The sinks of row 1 and the recent tokens of row 0 are not there: make them no numbers.
    for segment, row in ((0, 1), (2, 0)):
        for head in range(2):
            for blocks in layout.blocks(buffer, segment, head):
                blocks[row] = 255
    assert error(segments_cpu(query, buffer, layout, torch.tensor(LENGTHS), 1.0), wanted) < 2e-5


def test_a_row_without_tokens_gives_zeros_when_lengths_are_a_tensor():
    layout = tale(torch.float32)
    query, buffer = states(layout)
    prepared = segments_step(layout, CPU)
    lengths = torch.tensor([[9, 0], [-1, 0], [0, 0]], dtype=torch.int32)
    found = prepared.run(query, buffer, prepared.cut(lengths), 0.2)
    wanted = reference_segments(query, buffer, layout, [[4, 0], [0, 0], [0, 0]], 0.2)
    assert error(found[0], wanted[0]) < 2e-5
    assert (found[1] == 0).all()


def test_the_operator_is_one_that_torch_can_compile():
    layout = tale(torch.float32)
    query, buffer = states(layout)
    prepared = segments_step(layout, CPU)
    schedule = prepared.cut(LENGTHS)

    def attend(query: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return 2 * prepared.run(query, buffer, schedule, 0.2)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, buffer), attend(query, buffer))


def test_the_operator_is_registered_soundly():
    layout = tale(torch.float32)
    query, buffer = states(layout)
    prepared = segments_step(layout, CPU)
    schedule = prepared.cut(LENGTHS)
    from kvprof.kernels.quantized.step import layout_numbers

    arguments = (
        query,
        buffer,
        schedule.lengths,
        prepared.units,
        prepared.eye,
        schedule.scheduled,
        None,
        None,
        [],
        0.2,
        0.0,
        layout_numbers(layout),
        [width for kind in prepared.configs for pair in kind for width in pair],
        [8, 4096, 3, 1, 32, 0, 0],
        1,
    )
    torch.library.opcheck(segments_operator, arguments)
    heads = layout.heads * layout.group
    beside = [
        torch.randn(len(query), layout.widest.output_offsets[-1]),
        torch.randn(len(query), heads),
    ]
    torch.library.opcheck(segments_operator, (*arguments[:8], beside, *arguments[9:]))


def test_what_makes_no_sense_is_refused():
    layout = tale(torch.float32)
    query, buffer = states(layout)
    prepared = segments_step(layout, CPU)
    with pytest.raises(UsageError, match="row 1 has a context of 0"):
        prepared.cut([[4, 0], [9, 0], [0, 0]])
    with pytest.raises(UsageError, match="segment 1 cannot have 2501"):
        prepared.cut([[4, 4], [2501, 0], [0, 0]])
    with pytest.raises(UsageError, match="3 segments"):
        prepared.cut([[4, 4]])
    with pytest.raises(UsageError, match="int64"):
        prepared.cut(torch.tensor(LENGTHS))
    schedule = prepared.cut(LENGTHS)
    with pytest.raises(UsageError, match="scaling"):
        prepared.run(query, buffer, schedule, 0.0)
    with pytest.raises(UsageError):
        prepared.run(query, buffer, schedule, 1.0, softcap=-1.0)
    with pytest.raises(UsageError):
        prepared.run(query.half(), buffer, schedule, 1.0)
