"""Streaming gives the singular values of the stacked vectors, whatever way they came in."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.moments import LayerMoments, Moments, resolution
from kvprof.analysis.pairs import PAIRS, check_pairs, pair_gram
from kvprof.analysis.spectrum import singular_values
from kvprof.errors import UsageError
from tests.analysis import stacked

WIDTHS = {"q": 6, "k": 6, "v": 4, "q_pre": 6, "k_pre": 6}


def empty(kv_heads: int, group: int, widths=WIDTHS, *, c_o=None, c_wv=None) -> Moments:
    shapes = {
        key: (kv_heads * (group if key.startswith("q") else 1), width)
        for key, width in widths.items()
    }
    if c_o is None:
        c_o = torch.zeros(kv_heads, widths["v"], widths["v"], dtype=torch.float64)
    return Moments([LayerMoments.empty(shapes, c_o.device, c_o=c_o, c_wv=c_wv)], "model")


def draw(generator, moments: Moments, batch: int, length: int, dtype=torch.float32):
    """Random vectors of very different scales per head and dimension."""
    vectors = {}
    for key, gram in moments.layers[0].rest.items():
        heads, width, _ = gram.shape
        scale = torch.logspace(0, -2, width) * torch.logspace(0, 1, heads)[:, None]
        values = torch.randn(batch, heads, length, width, generator=generator)
        vectors[key] = (values * scale[:, None] + 0.3).to(dtype)
    return vectors


batches = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 17])), min_size=1, max_size=5
)


@settings(max_examples=40)
@given(
    shapes=batches,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    skip_first=st.sampled_from([0, 0, 1, 2, 5]),
    weight=st.sampled_from([None, 8192, 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 99),
)
def test_every_pair_equals_the_svd_of_what_it_stacks(
    shapes, kv_heads, group, skip_first, weight, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    w_o = torch.randn(kv_heads * group, 4, 9, generator=generator, dtype=torch.float64)
    w_v = torch.randn(kv_heads, 11, 4, generator=generator, dtype=torch.float64)
    c_o = (w_o @ w_o.mT).view(kv_heads, group, 4, 4).sum(1)
    moments = empty(kv_heads, group, c_o=c_o, c_wv=w_v.mT @ w_v)
    chunks = []
    for batch, length in shapes:
        chunks.append(draw(generator, moments, batch, length, dtype))
        moments.add(0, chunks[-1], skip_first=skip_first)
        moments.count(batch, length, skip_first=skip_first)

    vectors = {
        key: stacked.rows([chunk[key] for chunk in chunks], skip_first=skip_first)
        for key in stacked.KEYS
    }
    assert moments.tokens == vectors["k"].shape[1]
    assert moments.sequences == (0 if skip_first else sum(batch for batch, _ in shapes))
    for pair in PAIRS:
        if moments.tokens == 0 and pair == "vo":
            continue  # nothing to weigh V by; a pass that counted nothing is refused earlier
        ours = singular_values(pair_gram(moments, 0, pair, value_weight_tokens=weight))
        for head in range(kv_heads):
            exact = (
                w_v[head].numpy()
                if pair == "w_v"
                else stacked.pair_rows(vectors, w_o.numpy(), pair, head, weight_tokens=weight)
            )
            stacked.close_to_largest(ours[head], stacked.singular_values(exact))


@pytest.mark.parametrize("skip_first", [0, 2])
def test_how_sequences_share_batches_does_not_change_a_bit(skip_first):
    whole = draw(torch.Generator().manual_seed(0), empty(2, 2), 7, 12)
    grams = []
    for split in ([7], [1] * 7, [3, 4]):
        moments, start = empty(2, 2), 0
        for batch in split:
            part = {key: value[start : start + batch] for key, value in whole.items()}
            moments.add(0, part, skip_first=skip_first)
            start += batch
        grams.append(moments.layers[0])
    for other in grams[1:]:
        for key in WIDTHS:
            assert torch.equal(grams[0].rest[key], other.rest[key])
            assert torch.equal(grams[0].first[key], other.first[key])


def test_the_first_position_is_kept_apart():
    moments = empty(1, 2)
    vectors = draw(torch.Generator().manual_seed(1), moments, 3, 5)
    moments.add(0, vectors)
    first = vectors["k"][:, 0, 0].double()
    torch.testing.assert_close(moments.layers[0].first["k"][0], first.T @ first)
    rest = vectors["k"][:, 0, 1:].double().flatten(0, 1)
    torch.testing.assert_close(moments.layers[0].rest["k"][0], rest.T @ rest)


def test_memory_does_not_depend_on_the_number_of_tokens():
    moments = empty(2, 2)
    before = stacked.held_bytes(moments)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        moments.add(0, draw(generator, moments, 2, 50))
    assert stacked.held_bytes(moments) == before
    assert before == 8 * (2 * 2 * (4 * 36 + 2 * 36 + 2 * 16 + 4 * 36 + 2 * 36) // 2 + 2 * 16)


def test_a_snapshot_does_not_follow_what_comes_later():
    moments = empty(1, 1)
    generator = torch.Generator().manual_seed(3)
    moments.add(0, draw(generator, moments, 1, 4))
    moments.count(1, 4)
    moments.info["positions"] = "0-3"
    copy = moments.snapshot()
    kept = copy.layers[0].gram("k").clone()
    moments.add(0, draw(generator, moments, 1, 9))
    moments.count(1, 9)
    moments.info["positions"] = "0-8"
    assert torch.equal(copy.layers[0].gram("k"), kept)
    assert (copy.tokens, copy.sequences, copy.info["positions"]) == (4, 1, "0-3")


def test_fewer_tokens_than_dimensions_leave_exact_zeros():
    moments = empty(1, 1, {"q": 32, "k": 32, "v": 32})
    vectors = draw(torch.Generator().manual_seed(4), moments, 1, 7)
    moments.add(0, vectors)
    values = singular_values(moments.layers[0].gram("k"))[0]
    stacked.close_to_largest(values, stacked.singular_values(vectors["k"][0, 0].double().numpy()))
    assert torch.all(values[:7] > 0)
    assert torch.all(values[7:] == 0)


@pytest.mark.parametrize(
    ("width", "rank", "length", "sequences"), [(64, 3, 64, 1500), (128, 5, 1024, 40)]
)
def test_rounding_of_a_long_run_is_never_shown_as_signal(width, rank, length, sequences):
    generator = torch.Generator().manual_seed(5)
    mix = torch.randn(rank, width, generator=generator, dtype=torch.float64)
    moments = empty(1, 1, {"q": 1, "k": width, "v": 1})
    for _ in range(sequences):
        latent = torch.randn(1, 1, length, rank, generator=generator, dtype=torch.float64)
        moments.add(0, {"q": latent[..., :1], "k": latent @ mix, "v": latent[..., :1]})
    values = singular_values(moments.layers[0].gram("k"))[0]
    assert int((values > 0).sum()) == rank


@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_the_resolution_stays_inside_the_accuracy_that_is_promised(width):
    assert 5e-8 < resolution(width) < 5e-7
    # A direction well above it survives with its value, one well below it is cut.
    for relative, kept in ((1e-6, True), (1e-8, False)):
        scale = np.ones(width)
        scale[-1] = relative
        basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(width, width)))
        gram = torch.from_numpy((basis * scale**2) @ basis.T)
        smallest = float(singular_values(gram)[-1])
        assert smallest == (pytest.approx(relative, rel=1e-2) if kept else 0.0)


def test_the_value_weight_is_independent_of_how_many_tokens_were_seen():
    c_o = torch.eye(4, dtype=torch.float64)[None]
    vectors = draw(torch.Generator().manual_seed(6), empty(1, 1), 1, 40)
    grams = {}
    for repeats in (1, 3):
        moments = empty(1, 1, c_o=c_o)
        for _ in range(repeats):
            moments.add(0, vectors)
            moments.count(1, 40)
        grams[repeats] = (
            pair_gram(moments, 0, "vo"),
            pair_gram(moments, 0, "vo", value_weight_tokens=None),
        )
    torch.testing.assert_close(grams[1][0], grams[3][0], rtol=1e-13, atol=0)
    assert not torch.allclose(grams[1][1], grams[3][1], rtol=0.1)


def test_pairs_that_the_moments_do_not_hold_are_refused_in_one_line():
    widths = {key: WIDTHS[key] for key in ("q", "k", "v")}
    with pytest.raises(UsageError, match=r"^q_pre: .*--pairs q_pre$"):
        pair_gram(empty(1, 1, widths), 0, "q_pre")
    with pytest.raises(UsageError, match=r"w_v: .*MLA"):
        pair_gram(empty(1, 1, widths), 0, "w_v")


def test_pairs_are_checked_and_put_in_order():
    assert check_pairs(["v", "qk", "v"]) == ("qk", "v")
    with pytest.raises(UsageError):
        check_pairs(["qk", "kq"])
    with pytest.raises(UsageError, match="an empty list"):
        check_pairs([])
