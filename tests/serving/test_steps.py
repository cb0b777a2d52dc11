"""A step of an engine over pages, against attention in float64 over the same latents."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import basis_set
from kvprof.serving.steps import EngineStep, ServedLayer, ServedModel, attend

DEPTH, GROUP, PAGE = 32, 2, 16
WIDTHS = (((16, 32), (32, 16)), ((32, 16), (16, 16)))


def _layer(pages: int, widths: Any, generator: torch.Generator) -> ServedLayer:
    keys, values = zip(*widths, strict=True)
    row = RaggedLayout(keys, values, GROUP, 1, PAGE).row
    # A page's bytes may be more than a row of this rank.
    cache = torch.full((pages, row + 64), float("nan"))
    bases = [
        basis_set([torch.randn(DEPTH, width, generator=generator) / 4 for width in keys])
        for _ in range(2)
    ]
    attention = SimpleNamespace(kv_cache=cache, layer_name="layer")
    return ServedLayer(attention, bases[0], bases[1], values, GROUP)


def _wanted(
    layer: ServedLayer, query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float
) -> Tensor:
    """Attend from the last tokens of one sequence, in float64."""
    found = []
    for head, width in enumerate(layer.value_widths):
        latent = keys[:, head].double() @ layer.keys.head(head).double()
        for at in range(GROUP):
            own = query[:, head * GROUP + at].double() @ layer.queries.head(head).double()
            scores = scale * own @ latent.T
            seen = torch.arange(len(keys)) <= past + torch.arange(len(query))[:, None]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            found.append(weights @ values[:, head, :width].double())
    return torch.cat(found, dim=-1)


@pytest.mark.parametrize("padding", [0, 3])
def test_chunks_and_decoding_together(padding: int) -> None:
    """Prompts in chunks, decoding beside them, shared pages and padding give exact attention."""
    generator = torch.Generator().manual_seed(1)
    model = ServedModel()
    model.layers += [_layer(24, widths, generator) for widths in WIDTHS]
    model.bind(PAGE)
    heads, scale = len(WIDTHS[0]), DEPTH**-0.5
    table = torch.randperm(24, generator=generator)[:20].view(4, 5).int()
    lengths = [0, 0, 0, 0]
    states: dict[tuple[int, int], list[Tensor]] = {}
    # New tokens of each sequence; those with one come first, as the engine orders them.
    for new in ([5, 20, 1, 0], [1, 33, 0, 17], [1, 1, 40, 2], [1, 1, 1, 1]):
        rows = sorted((row for row in range(4) if new[row]), key=lambda row: new[row] > 1)
        decodes = sum(new[row] == 1 for row in rows)
        slots, starts = [], [0]
        for row in rows:
            for token in range(lengths[row], lengths[row] + new[row]):
                slots.append(int(table[row, token // PAGE]) * PAGE + token % PAGE)
            starts.append(len(slots))
            lengths[row] += new[row]
        count = len(slots) + padding
        step = EngineStep(
            model,
            torch.tensor(slots + [-1] * padding),
            table[rows],
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([lengths[row] for row in rows], dtype=torch.int32),
            decodes,
            len(rows),
        )
        for number, layer in enumerate(model.layers):
            query, key, value = (
                torch.randn(count, size, DEPTH, generator=generator)
                for size in (heads * GROUP, heads, heads)
            )
            output = attend(layer, step, query, key, value, scale)
            assert len(output) == count
            for row, first, stop in zip(rows, starts, starts[1:], strict=False):
                kept = states.setdefault((number, row), [torch.empty(0, heads, DEPTH)] * 2)
                kept[:] = [
                    torch.cat([kept[0], key[first:stop]]),
                    torch.cat([kept[1], value[first:stop]]),
                ]
                past = lengths[row] - (stop - first)
                wanted = _wanted(layer, query[first:stop], *kept, past, scale)
                torch.testing.assert_close(
                    output[first:stop].double(), wanted, atol=1e-4, rtol=1e-4
                )


def test_padded_rows_of_a_decoding_graph() -> None:
    """Rows without tokens give zeros and change nothing, as a captured step has them."""
    generator = torch.Generator().manual_seed(2)
    model = ServedModel([_layer(8, WIDTHS[0], generator)])
    model.bind(PAGE)
    (layer,) = model.layers
    states = [torch.randn(4, size, DEPTH, generator=generator) for size in (4, 2, 2)]
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    before = layer.attention.kv_cache.clone()
    step = EngineStep(
        model,
        torch.tensor([0, 32, -1, -1]),
        table,
        torch.arange(5, dtype=torch.int32),
        torch.tensor([1, 1, 0, 0], dtype=torch.int32),
        4,
        4,
    )
    output = attend(layer, step, *states, 1.0)
    latents = torch.cat(
        [
            states[2][:2, head, :width]
            for head in range(2)
            for width in [WIDTHS[0][head][1]] * GROUP
        ],
        dim=-1,
    )
    torch.testing.assert_close(output[:2], latents, atol=1e-5, rtol=1e-5)
    assert not output[2:].any()
    changed = (layer.attention.kv_cache != before) & ~layer.attention.kv_cache.isnan()
    assert changed.any(dim=1).tolist() == [True, False, True, *[False] * 5]
