"""On a GPU one graph of a step holds any batch of no more tokens; prompts begin together."""

import pytest
import torch

from kvprof.serving.captured_step import CudaGraphStep
from kvprof.serving.pages import Codes
from tests.serving.batches import Batch, FilledModel, Numbers
from tests.serving.test_quantised import run_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOKENS, ROWS, COLUMNS = 96, 12, 5
#: Of K and of V, by layer and head: several kinds, which run side by side.
WIDTHS = (
    ((16, 64), (64, 48), (32, 32), (48, 16)),
    ((64, 16), (16, 16), (48, 64), (32, 32)),
    ((32, 32), (32, 32), (32, 32), (32, 32)),
)
BATCHES = (
    # Some that decode and a prompt, with padding of both kinds.
    Batch((70, 3, 250), (1, 1, 40), TOKENS, ROWS),
    # All decode, as many as there are.
    Batch(tuple(range(5, 5 + 20 * ROWS, 20)), (1,) * ROWS, TOKENS, ROWS),
    # One prompt fills the step.
    Batch((0,), (TOKENS,), TOKENS, ROWS),
    # Chunks with a past and without one, and one token behind others.
    Batch((200, 100, 0, 17, 60), (1, 30, 33, 9, 1), TOKENS, ROWS),
    # One decodes.
    Batch((300,), (1,), TOKENS, ROWS),
    # As in the beginning.
    Batch((70, 3, 250), (1, 1, 40), TOKENS, ROWS),
)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _copied(buffers: Numbers, numbers: Numbers) -> None:
    for name in ("slots", "table", "starts", "lengths"):
        getattr(buffers, name).copy_(getattr(numbers, name))


@pytest.mark.parametrize(
    ("page", "dtype", "bits", "shared", "valued"),
    [
        (16, torch.bfloat16, None, 0, False),
        (64, torch.bfloat16, None, 0, False),
        (64, torch.float32, None, 0, False),
        (64, torch.bfloat16, 8, 0, False),
        (64, torch.bfloat16, 4, 0, False),
        (64, torch.bfloat16, None, 2, False),
        (64, torch.bfloat16, None, 2, True),
        (16, torch.float32, None, 1, True),
    ],
)
@torch.inference_mode()
def test_a_graph_is_replayed_for_other_batches(
    page: int, dtype: torch.dtype, bits: int | None, shared: int, valued: bool
) -> None:
    columns = COLUMNS * 64 // page
    made = FilledModel(
        page,
        columns,
        ROWS,
        dtype=dtype,
        device="cuda",
        widths=WIDTHS,
        codes=None if bits is None else Codes(bits, bits, 16),
        shared=shared,
        valued=valued,
        most=300,
        captured=(TOKENS, ROWS),
    )
    states = made.states(TOKENS)
    # What an engine captures with: every token is padding, and lengths are anything.
    padding = made.numbers(Batch((0,), (TOKENS,), TOKENS, ROWS))
    padding.slots.fill_(-1)
    buffers = Numbers(*(one.clone() for one in vars(padding).values()))
    given = vars(buffers).values()
    step = made.model.captured_step(*given)
    assert isinstance(step, CudaGraphStep)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = made.run(step, states)
    # What only the capture needed may go; what the graph reads may not.
    del step
    for batch in BATCHES:
        if bits is not None:
            made.store_past(batch)
        made.refill()
        fresh = made.states(TOKENS)
        for own, new in zip(states, fresh, strict=True):
            for here, there in zip(own, new, strict=True):
                here.copy_(there)
        wanted = [one.clone() for one in made.run(made.step(batch), states)]
        stored = made.stored()
        made.refill()
        _copied(buffers, made.numbers(batch))
        graph.replay()
        torch.cuda.synchronize()
        count = sum(batch.new)
        for mine, other in zip(outputs, wanted, strict=True):
            assert _error(mine[:count], other[:count]) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
            assert not mine[count:].any()
        for mine, other in zip(made.stored(), stored, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("sizes", "columns", "room", "bits"),
    # Longer than vLLM's own, with as many places for sequences as it has on such GPUs.
    [
        ((TOKENS, 24, 8), COLUMNS, ROWS, None),
        ((3072, 1024, 576), 50, 1024, None),
        ((3072, 1024, 24), 50, 1024, 4),
    ],
)
@torch.inference_mode()
def test_graphs_of_several_sizes_share_their_memory(
    sizes: tuple[int, ...], columns: int, room: int, bits: int | None
) -> None:
    """As an engine captures them, the largest first, and replays them in any order."""
    made = FilledModel(
        64,
        columns,
        ROWS,
        dtype=torch.bfloat16,
        device="cuda",
        widths=WIDTHS,
        codes=None if bits is None else Codes(bits, bits, 16),
        captured=(sizes[0], room),
    )
    states, pool, kept = made.states(sizes[0]), None, []
    for tokens in sizes:
        rows = min(tokens, room)
        batch = Batch((0,), (tokens,), tokens, rows)
        buffers = made.numbers(batch)
        own = [[one[:tokens] for one in layer] for layer in states]
        buffers.slots.fill_(-1)
        step = made.model.captured_step(*vars(buffers).values())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = made.run(step, own)
        pool = graph.pool()
        kept.append((tokens, rows, buffers, own, graph, outputs))
    for at in (1, 0, 2, 1, 0):
        tokens, rows, buffers, own, graph, outputs = kept[at]
        batch = Batch((90, 31, 120), (1, 1, tokens - 4), tokens, rows)
        if bits is not None:
            made.store_past(batch)
        made.refill()
        wanted = [one.clone() for one in made.run(made.step(batch), own)]
        made.refill()
        _copied(buffers, made.numbers(batch))
        graph.replay()
        for mine, other in zip(outputs, wanted, strict=True):
            assert _error(mine[: tokens - 2], other[: tokens - 2]) < 1e-2


@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_quantised_prompts_together_are_prompts_one_by_one(bits: int) -> None:
    codes = Codes(bits, bits, 16)
    how = {"dtype": torch.bfloat16, "device": "cuda", "widths": WIDTHS}
    made = FilledModel(64, COLUMNS, 6, codes=codes, most=300, **how)
    run_both(made, Batch((70, 3, 64, 0, 0, 0), (1, 1, 20, 150, 33, 2), 210, 6), 2e-2)
    run_both(made, Batch((0,), (300,), 300, 1), 2e-2)
    # Rows of which some find no page of their own.
    run_both(made, Batch((0,) * 6, (2, 3, 4, 5, 6, 7), 27, 6), 2e-2)
