"""Steps of an engine in the form that a graph holds, through the Triton kernels."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.kernels.dispatch import interpreted
from tests.serving.batches import Batch, FilledModel
from tests.serving.test_fixed import LONGEST, agree, batches

GPU = torch.cuda.is_available()
EXAMPLES = 20 if GPU else 2


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
