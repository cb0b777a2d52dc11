"""Pages without a GPU: the cases of the kernels, computed by torch."""

import pytest
import torch

from kvprof.kernels.dispatch import uses_triton

# The cases themselves are what runs: imported, they are this module's tests.
from tests.kernels.cases.pages_cases import (  # noqa: F401
    test_decoding_from_pages_is_attention,
    test_decoding_from_quantised_pages_is_attention,
    test_keys_rebuilt_from_pages_give_attention,
    test_the_smallest_quantised_pages_and_odd_ones,
    test_tokens_get_into_quantised_pages_and_out,
    test_what_does_not_fit_is_refused,
)
from tests.kernels.cases.rows_cases import (  # noqa: F401
    test_any_widths_pages_and_new_tokens_give_attention,
)

pytestmark = pytest.mark.skipif(
    uses_triton(torch.device("cpu")) or torch.cuda.is_available(),
    reason="Triton computes these cases in this process",
)
