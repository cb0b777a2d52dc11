"""Moments of several heads together, against every vector stacked."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvprof.analysis.moments import group_size, joint_gram
from kvprof.errors import UsageError
from kvprof.models.load import wrap_model
from kvprof.moments.collect import capture, model_tokens, run_batch
from kvprof.moments.files import load_moments, save_moments
from kvprof.sources.windows import batches, windows
from tests.analysis.passes import RANDOM, SEQ_LEN, last, options
from tests.models.tiny import tiny

TOKENS = 3 * SEQ_LEN


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(tiny("Llama", num_key_value_heads=4))


@pytest.fixture(scope="module")
def moments(loaded):
    settings = replace(options(TOKENS, pre_rope=True), joint_heads=4)
    return last(loaded, RANDOM, settings)


@pytest.fixture(scope="module")
def seen(loaded):
    """``{"v": …, "k_pre": …}`` of layer 1, ``[heads, tokens, d]``."""
    taps = []
    drawn = windows(RANDOM, model_tokens(loaded), tokens=TOKENS, seq_len=SEQ_LEN, seed=0)
    with capture(loaded, lambda tap: taps.append(tap) if tap.layer == 1 else None, pre_rope=True):
        for ids in batches(drawn, 2):
            run_batch(loaded, torch.from_numpy(ids))
    return {
        key: np.concatenate(
            [row for tap in taps for row in getattr(tap, key).double().numpy()], axis=1
        )
        for key in ("v", "k_pre")
    }


@pytest.mark.parametrize("vector", ["v", "k_pre"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_groups_are_heads_side_by_side(moments, seen, vector, heads):
    grams = joint_gram(moments.layers[1], vector, heads)
    assert len(grams) == 4 // heads
    for group, gram in enumerate(grams):
        rows = np.concatenate(list(seen[vector][group * heads : (group + 1) * heads]), axis=1)
        np.testing.assert_allclose(gram.numpy(), rows.T @ rows, rtol=1e-9, atol=1e-9)


def test_joint_moments_are_saved_with_the_rest(moments, tmp_path):
    save_moments(moments, tmp_path / "m")
    back = load_moments(tmp_path / "m")
    assert torch.equal(back.layers[0].gram("v_joint"), moments.layers[0].gram("v_joint"))


def test_smaller_moments_cannot_give_larger_groups(loaded):
    pairs = last(loaded, RANDOM, replace(options(TOKENS), joint_heads=2))
    assert joint_gram(pairs.layers[0], "v", 1).shape == (4, 16, 16)
    with pytest.raises(UsageError, match="the moments have no v for groups of 4 heads"):
        joint_gram(pairs.layers[0], "v", 4)
    with pytest.raises(UsageError, match="the moments have no k_pre for groups of 2 heads"):
        joint_gram(pairs.layers[0], "k_pre", 2)


def test_heads_that_do_not_divide_are_refused(loaded):
    with pytest.raises(UsageError):
        last(loaded, RANDOM, replace(options(TOKENS), joint_heads=3))
    assert group_size(32, 4) == 4
