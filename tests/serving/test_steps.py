"""A step of an engine over pages, against attention in float64 over the same latents."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import basis_set
from kvprof.runtime.backends.rotary import RotaryForm
from kvprof.serving.captured_step import CudaGraphStep
from kvprof.serving.model import ServedModel
from kvprof.serving.pages import Codes, quantised_layout
from kvprof.serving.steps import EngineStep, Rebuilding, ServedLayer, attend, value_lifts

DEPTH, GROUP, PAGE, QUANTISED_PAGE = 32, 2, 16, 64
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
    if layer.rebuilding is not None:
        return _wanted_rebuilt(layer, query, keys, values, past, scale)
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


def rebuilt_layer(
    pages: int, widths: Any, generator: torch.Generator, *, valued: bool = False
) -> ServedLayer:
    """Return a layer like `_layer`'s, whose heads share one latent of the first widths.

    Its values are rebuilt too, or are the latent.
    """
    (key, value), shared, turned = widths[0], GROUP, DEPTH // 2
    row = RaggedLayout((key,), (value,), shared * GROUP, 1, PAGE).row
    attention = SimpleNamespace(
        kv_cache=torch.full((pages, row + 64), float("nan")), layer_name="layer"
    )
    down, up = (torch.randn(shared * DEPTH, key, generator=generator) / 6 for _ in range(2))
    angles = torch.arange(5 * PAGE)[:, None] / 20 ** torch.linspace(0, 1, turned // 2)
    form = RotaryForm(turned, True, 1)
    ups = (torch.randn(shared * DEPTH, value, generator=generator) / 6,) if valued else ()
    lifts = value_lifts(ups, shared, GROUP)
    rebuilding = Rebuilding((up,), shared, form, angles.cos(), angles.sin(), ups, lifts)
    own = basis_set([down])
    return ServedLayer(attention, None, own, (value,), shared * GROUP, None, rebuilding)


def _wanted_rebuilt(
    layer: ServedLayer, query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float
) -> Tensor:
    assert layer.rebuilding is not None
    how, count = layer.rebuilding, len(keys)
    latents = keys.double().flatten(1) @ layer.keys.head(0).double()
    whole = (latents @ how.ups[0].double().T).view(count, how.heads, DEPTH)
    turns = torch.polar(torch.ones_like(how.cos), torch.atan2(how.sin, how.cos))[:count, None]
    pairs = torch.view_as_complex(whole[..., : how.form.width].unflatten(-1, (-1, 2)).contiguous())
    whole[..., : how.form.width] = torch.view_as_real(pairs * turns).flatten(-2)
    stored = values.double().flatten(1)[:, : layer.value_widths[0]]
    found = []
    for head in range(how.heads * GROUP):
        scores = scale * query[:, head].double() @ whole[:, head // GROUP].T
        seen = torch.arange(count) <= past + torch.arange(len(query))[:, None]
        states = stored
        if how.value_ups:
            own = how.value_ups[0].double().unflatten(0, (how.heads, DEPTH))[head // GROUP]
            states = stored @ own.T
        found.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ states)
    return torch.cat(found, dim=-1)


def _quantised_layer(pages: int, bits: int, generator: torch.Generator) -> ServedLayer:
    layer = _layer(pages, WIDTHS[0], generator)
    layer.codes = Codes(bits, bits, 16)
    layout = quantised_layout(layer.layout(pages, QUANTISED_PAGE), layer.codes, torch.float32)
    layer.attention.kv_cache = torch.full((pages, layout.row + 64), 77, dtype=torch.uint8)
    return layer


def _rounded(states: Tensor, bits: int) -> Tensor:
    """Round as `per_token` does, in groups of 16 columns of one token."""
    groups = states.unflatten(-1, (-1, 16))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().float()
    codes = ((groups - low) / scale.clamp(min=1e-12)).round().clamp(0, 2**bits - 1)
    return (low + codes * scale).flatten(-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_pages_of_quantised_latents(bits: int) -> None:
    """Chunks and decoding see all tokens rounded, their own too."""
    generator = torch.Generator().manual_seed(4)
    model = ServedModel([_quantised_layer(6, bits, generator)])
    model.bind(QUANTISED_PAGE, 100, 128)
    (layer,), scale, heads = model.layers, DEPTH**-0.5, 2
    table = torch.tensor([[4, 1], [2, 5]], dtype=torch.int32)
    states = [[torch.empty(0, heads, DEPTH)] * 2 for _ in range(2)]
    lengths = [0, 0]
    for new in ([39, 2], [44, 1], [1, 1], [1, 27]):
        rows = sorted(range(2), key=lambda row: new[row] > 1)
        slots, starts = [], [0]
        for row in rows:
            for token in range(lengths[row], lengths[row] + new[row]):
                page = int(table[row, token // QUANTISED_PAGE])
                slots.append(page * QUANTISED_PAGE + token % QUANTISED_PAGE)
            starts.append(len(slots))
            lengths[row] += new[row]
        decodes = sum(count == 1 for count in new)
        own = [lengths[row] for row in rows]
        step = EngineStep(
            model.alike,
            torch.tensor(slots),
            table[rows],
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(own, dtype=torch.int32),
            decodes,
            2,
            starts,
            own,
        )
        query, key, value = (
            torch.randn(len(slots), size, DEPTH, generator=generator)
            for size in (heads * GROUP, heads, heads)
        )
        output = attend(layer, step, query, key, value, scale)
        for row, first, stop in zip(rows, starts, starts[1:], strict=False):
            kept = states[row]
            past = len(kept[0])
            kept[:] = [
                torch.cat([kept[0], key[first:stop]]),
                torch.cat([kept[1], value[first:stop]]),
            ]
            found = []
            for head, width in enumerate(layer.value_widths):
                basis = layer.keys.head(head)
                latents = [kept[0][:, head] @ basis, kept[1][:, head, :width]]
                seen = [_rounded(one, bits).double() for one in latents]
                for at in range(GROUP):
                    asked = query[first:stop, head * GROUP + at] @ layer.queries.head(head)
                    scores = scale * asked.double() @ seen[0].T
                    order = torch.arange(past + stop - first)
                    hidden = order > past + torch.arange(stop - first)[:, None]
                    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                    found.append(weights @ seen[1])
            # Scales and middles are float16.
            close = {8: 3e-2, 4: 6e-2}[bits]
            torch.testing.assert_close(
                output[first:stop].double(), torch.cat(found, dim=-1), atol=close, rtol=close
            )


def test_a_page_is_shared_in_the_step_that_fills_it() -> None:
    """A prompt with another one's beginning comes in the same step: it sees that one's page."""
    outputs = []
    for together in (True, False):
        generator = torch.Generator().manual_seed(6)
        model = ServedModel([_quantised_layer(4, 8, generator)])
        model.bind(QUANTISED_PAGE, 100, 128)
        page, more = QUANTISED_PAGE, 5
        states = [torch.randn(page + more, size, DEPTH, generator=generator) for size in (4, 2, 2)]
        slots = torch.tensor([*range(page, 2 * page), *range(3 * page, 3 * page + more)])
        table = torch.tensor([[1, 0], [1, 3]], dtype=torch.int32)
        rows = [(0, 0, page, page), (1, page, page + more, page + more)]
        found = []
        for own in [rows] if together else [[one] for one in rows]:
            first, last = own[0][1], own[-1][2]
            starts = [0, *(stop - first for _, _, stop, _ in own)]
            lengths = [length for *_, length in own]
            step = EngineStep(
                model.alike,
                slots[first:last],
                table[[row for row, *_ in own]],
                torch.tensor(starts, dtype=torch.int32),
                torch.tensor(lengths, dtype=torch.int32),
                0,
                len(own),
                starts,
                lengths,
            )
            found.append(attend(model.layers[0], step, *(one[first:last] for one in states), 0.2))
        outputs.append(torch.cat(found))
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("make", "padding"),
    [
        (_layer, 0),
        (_layer, 3),
        (rebuilt_layer, 0),
        (rebuilt_layer, 3),
        (partial(rebuilt_layer, valued=True), 3),
    ],
)
def test_chunks_and_decoding_together(make: Callable[..., ServedLayer], padding: int) -> None:
    """Prompts in chunks, decoding beside them, shared pages and padding give exact attention."""
    generator = torch.Generator().manual_seed(1)
    model = ServedModel()
    model.layers += [make(24, widths, generator) for widths in WIDTHS]
    # Two of the second step's prompts are longer together than one may be.
    model.bind(PAGE, 64, 60)
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
            model.alike,
            torch.tensor(slots + [-1] * padding),
            table[rows],
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([lengths[row] for row in rows], dtype=torch.int32),
            decodes,
            len(rows),
            starts,
            [lengths[row] for row in rows],
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
    model.bind(PAGE, 64, 5 * PAGE)
    (layer,) = model.layers
    states = [torch.randn(4, size, DEPTH, generator=generator) for size in (4, 2, 2)]
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    before = layer.attention.kv_cache.clone()
    step = EngineStep(
        model.alike,
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


def test_what_layers_work_in_is_held_until_they_hold_it_themselves() -> None:
    model = ServedModel([rebuilt_layer(6, WIDTHS[0], torch.Generator().manual_seed(4))])
    for values in (20, 10, 30):
        model.reserve(torch.zeros(1), values)
    assert model._reserved is not None
    assert len(model._reserved) == 30
    model.bind(PAGE, 64, 60)
    model.reserve(torch.zeros(1), 40)
    assert model._reserved is None


@pytest.mark.parametrize("kind", ["plain", "4 bits", "rebuilt"])
def test_a_rehearsal_leaves_the_pages_as_they_are(kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    made = {
        "plain": lambda: _layer(6, WIDTHS[0], generator),
        "4 bits": lambda: _quantised_layer(6, 4, generator),
        "rebuilt": lambda: rebuilt_layer(6, WIDTHS[0], generator),
    }
    layer, page = made[kind](), QUANTISED_PAGE if kind == "4 bits" else PAGE
    model = ServedModel([layer])
    model.bind(page, 300, 5 * PAGE, captured=(32, 2))
    layer.attention.kv_cache.fill_(7)
    seen: list[Tensor] = []
    wanted = layer.steps.attend

    class Watched:
        pages, decode = layer.steps.pages, layer.steps.decode

        def attend(self, *given: Any) -> Tensor:
            # A sequence that is shorter than its new tokens would be stored before its beginning.
            numbers = given[0].lengths, given[0].starts
            host = given[0].host_lengths, given[0].host_starts
            if not isinstance(given[0], CudaGraphStep):
                assert [own.tolist() for own in numbers] == list(map(list, host))
            seen.append(wanted(*given))
            return seen[-1]

    layer.steps = Watched()
    model._rehearse(-(-5 * PAGE // page), 300, 5 * PAGE, (32, 2))
    # Of more rows than are launched early too, in no graph here.
    assert [len(own) for own in seen] == [2, 2, 32, 32, 5 * PAGE, 32, 32, 4 * PAGE, 129]
    assert all(own.isfinite().all() for own in seen)
    assert (layer.attention.kv_cache == 7).all()
