"""Steps of an engine through the Triton kernels, each in two forms; run by test_cases.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.kernels.dispatch import interpreted
from kvprof.serving.pages import Codes
from tests.serving.batches import WIDTHS, Batch, FilledModel
from tests.serving.test_fixed import LONGEST, agree, batches, quantised
from tests.serving.test_quantised import run_both

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
