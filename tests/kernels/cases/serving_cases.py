"""Steps of an engine through the Triton kernels, each in two forms; run by test_cases.py."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.kernels.dispatch import interpreted
from kvprof.kernels.project.bases import basis_set
from kvprof.serving import rebuilt
from kvprof.serving.model import ServedModel
from kvprof.serving.pages import Codes
from kvprof.serving.steps import EngineStep, attend
from tests.serving.batches import WIDTHS, Batch, FilledModel
from tests.serving.test_captured_step import LONGEST, agree, batches, quantised
from tests.serving.test_quantised import run_both
from tests.serving.test_steps import DEPTH, GROUP, rebuilt_layer
from tests.serving.test_steps import PAGE as STEP_PAGE
from tests.serving.test_steps import WIDTHS as STEP_WIDTHS

GPU = torch.cuda.is_available()
EXAMPLES = 20 if GPU else 1


@settings(max_examples=EXAMPLES)
@given(batches(), st.sampled_from([16, 64]), st.integers(0, 99))
def test_the_fixed_form_gives_what_the_eager_form_gives(batch, page, seed):
    device = "cuda" if GPU else "cpu"
    made = FilledModel(page, -(-LONGEST // page), len(batch.new), device=device, seed=seed)
    agree(made, batch)


def test_sequences_that_decode_beside_a_prompt_and_one_token_behind_it():
    assert GPU or interpreted()
    made = FilledModel(16, 4, 5, device="cuda" if GPU else "cpu")
    agree(made, Batch((33, 0, 60, 20, 40), (1, 1, 1, 19, 1), 29, 7))


def test_quantised_prompts_together_are_prompts_one_by_one():
    device, codes = "cuda" if GPU else "cpu", Codes(4, 4, 16)
    how = {"dtype": torch.float16, "device": device, "widths": WIDTHS[:1]}
    made = FilledModel(64, 2, 4, codes=codes, most=60, **how)
    run_both(made, Batch((10, 20, 0, 0), (1, 9, 20, 3), 36, 4), 5e-3)


def test_the_fixed_form_over_quantised_pages():
    """Sequences that decode, a chunk with a past, a prompt, one token behind others, padding."""
    batch = Batch((33, 40, 20, 0, 7), (1, 1, 9, 20, 1), 36, 7)
    how = {"dtype": torch.float16, "device": "cuda" if GPU else "cpu", "widths": WIDTHS[:1]}
    agree(quantised(batch, 4, **how), batch, 5e-3)


@settings(max_examples=EXAMPLES)
@given(batches(), st.sampled_from([16, 64]), st.integers(0, 99))
def test_the_fixed_form_over_pages_whose_keys_are_rebuilt(batch, page, seed):
    how = {"device": "cuda" if GPU else "cpu", "widths": WIDTHS[:1], "shared": 2}
    agree(FilledModel(page, -(-LONGEST // page), len(batch.new), seed=seed, **how), batch, 1e-4)


def test_pages_of_keys_that_one_launch_rebuilds_are_those_that_torch_rebuilds(monkeypatch):
    """A token that decodes, a chunk behind a page and a half, and a prompt."""
    device, generator = "cuda" if GPU else "cpu", torch.Generator().manual_seed(3)
    layer = rebuilt_layer(7, STEP_WIDTHS[0], generator)
    model = ServedModel([layer])
    own = layer.rebuilding
    layer.attention.kv_cache = torch.zeros_like(layer.attention.kv_cache).to(device)
    layer.rebuilding = replace(
        own,
        ups=tuple(up.to(device) for up in own.ups),
        cos=own.cos.to(device),
        sin=own.sin.to(device),
    )
    layer.keys = basis_set([layer.keys.head(0).to(device)])
    model.bind(STEP_PAGE, 64, 3 * STEP_PAGE)
    layer.attention.kv_cache.normal_(generator=torch.Generator(device).manual_seed(4))
    table = torch.tensor([[4, 0, 0], [2, 6, 0], [1, 0, 0]], dtype=torch.int32)
    past, new, slots = (9, 40, 0), (1, 5, 20), []
    for row, (before, count) in enumerate(zip(past, new, strict=True)):
        for token in range(before, before + count):
            slots.append(int(table[row, token // STEP_PAGE]) * STEP_PAGE + token % STEP_PAGE)
    starts, lengths = [0, 1, 6, 26], [10, 45, 20]
    states = [
        torch.randn(26, size, DEPTH, generator=generator).to(device)
        for size in (GROUP * GROUP, GROUP, GROUP)
    ]
    found = []
    for triton in (True, False):
        if not triton:
            monkeypatch.setattr(rebuilt, "uses_triton", lambda device: False)
        step = EngineStep(
            model.alike,
            torch.tensor(slots).to(device),
            table.to(device),
            torch.tensor(starts, dtype=torch.int32).to(device),
            torch.tensor(lengths, dtype=torch.int32).to(device),
            1,
            3,
            starts,
            lengths,
        )
        found.append(attend(layer, step, *states, 0.2))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
