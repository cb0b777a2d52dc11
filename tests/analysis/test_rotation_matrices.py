"""Rotations that spread what is large: orthogonal, in blocks, drawn evenly."""

import numpy as np
import pytest
import scipy.linalg
import torch

from kvprof.analysis.bases import bit_reversed, block_hadamard, random_rotation


@pytest.mark.parametrize(
    ("width", "block", "parts"),
    [
        (16, 0, (16,)),
        (80, 0, (64, 16)),
        (96, 0, (64, 32)),
        (64, 16, (16, 16, 16, 16)),
        (80, 32, (32, 32, 16)),
        (36, 24, (16, 8, 8, 4)),
        (8, 64, (8,)),
        (1, 0, (1,)),
    ],
)
def test_a_hadamard_matrix_is_cut_into_blocks_that_have_one(width, block, parts):
    wanted = scipy.linalg.block_diag(*(scipy.linalg.hadamard(n) / n**0.5 for n in parts))
    found = block_hadamard(width, block)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-15)


@pytest.mark.parametrize("width", [1, 2, 8, 12, 80, 128])
def test_numbers_are_sorted_by_their_reversed_bits(width):
    digits = max(1, (width - 1).bit_length())
    every = [int(f"{n:0{digits}b}"[::-1], 2) for n in range(2**digits)]
    assert bit_reversed(width).tolist() == [n for n in every if n < width]


def test_bit_reversal_deals_neighbours_out_to_every_run():
    order = bit_reversed(64).tolist()
    for first in range(0, 64, 16):  # of the 16 largest each quarter gets a quarter
        assert sum(n < 16 for n in order[first : first + 16]) == 4


def test_a_random_rotation_is_orthogonal_and_its_seeds():
    found = random_rotation(48, 7)
    assert torch.allclose(found @ found.T, torch.eye(48, dtype=torch.float64), atol=1e-12)
    assert torch.equal(found, random_rotation(48, 7))
    assert not torch.allclose(found, random_rotation(48, 8))


def test_random_rotations_are_drawn_evenly():
    """Every element has mean 0 and variance 1/d; QR's own signs would make the diagonal one-sided.

    Without a seed's luck: 400 draws of 8 columns, four standard errors.
    """
    drawn = torch.stack([random_rotation(8, seed) for seed in range(400)])
    assert drawn.mean(0).abs().max() < 4 * (8 * 400) ** -0.5
    assert (drawn.square().mean(0) * 8 - 1).abs().max() < 4 * 2**0.5 / 400**0.5
