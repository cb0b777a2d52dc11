"""Levels after any sequence of appends against the papers' process, played from scratch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from kvprof.methods.tokens import (
    eviction_units,
    kept,
    level_ends,
    quantised_tokens,
    segments,
    stored_tokens,
)
from tests.methods.shapes import group, layer, plan, whole


def played(shares, batch, tokens):
    """TALE §2.2.1: append to the top; when a level's surplus fills a batch, its first go down."""
    counts = [0] * len(shares)
    for seen in range(1, tokens + 1):
        counts[-1] += 1
        for level in reversed(range(1, len(shares))):
            allowed = int(sum(shares[level:]) * seen + 1e-9)
            while sum(counts[level:]) - allowed >= batch:
                counts[level] -= batch
                counts[level - 1] += batch
    return counts


@settings(max_examples=60)
@given(
    st.sampled_from([(0.9, 0.1), (0.5, 0.5), (1.0, 0.0), (0.85, 0.15), (0.6, 0.3, 0.1)]),
    st.sampled_from([1, 4, 32]),
    st.integers(0, 300),
)
def test_levels_are_the_process_played_token_by_token(shares, batch, tokens):
    ends = level_ends(Levels(0, shares, batch), tokens)
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert counts == played(shares, batch, tokens)
    assert ends[-1] == tokens


def test_the_recent_share_is_never_exceeded_by_a_batch():
    for tokens in range(500):
        (middle, _) = level_ends(Levels(4, (0.9, 0.1), 1), tokens)
        assert tokens - middle <= 0.1 * tokens + 1e-9
        (middle, _) = level_ends(Levels(4, (0.9, 0.1), 8), tokens)
        assert tokens - middle < 0.1 * tokens + 8


def test_decimal_shares_count_as_written():
    assert level_ends(Levels(0, (0.9, 0.1)), 30) == [27, 30]
    assert level_ends(Levels(0, (0.7, 0.3)), 10) == [7, 10]
    assert kept(Eviction("recent", 0.7), 10) == 7
    assert kept(Eviction("recent", 0.1), 300) == 30


def test_a_token_only_ever_goes_down_and_is_never_dequantised():
    side = SideQuantiser((2, 4), "channel", 8)
    made = plan(
        layer(values=(group(0, 2, 16, (8, 32)),), levels=2),
        levels=Levels(4, (0.8, 0.2), 8),
        quantiser=Quantiser("affine", side, side, window=5, block=8),
    )
    before = {}
    for tokens in range(1, 200):
        now = {
            index: (part.level, part.quantised)
            for part in segments(made, made.layers[0], tokens)
            for index in range(part.start, part.stop)
        }
        assert set(now) == set(range(tokens))
        for index, (level, quantised) in before.items():
            assert now[index][0] <= level
            assert now[index][1] >= quantised
        assert all(now[index] == (1, False) for index in range(min(4, tokens)))
        assert not any(now[index][1] for index in range(max(0, tokens - 5), tokens))
        before = now


def test_quantised_runs_are_whole_groups():
    side = SideQuantiser((2, 4), "channel", 8)
    made = plan(
        layer(values=(group(0, 2, 16, (8, 32)),), levels=2),
        levels=Levels(3, (0.7, 0.3), 16),
        quantiser=Quantiser("affine", side, side, block=8),
    )
    for tokens in range(300):
        for part in segments(made, made.layers[0], tokens):
            assert part.tokens % 8 == 0 or not part.quantised
            assert part.tokens > 0


def test_window_and_block_of_a_quantiser():
    quantiser = Quantiser("affine", SideQuantiser((4,)), None, window=128, block=32)
    assert [quantised_tokens(quantiser, n) for n in (0, 128, 159, 160, 191, 192)] == [
        0,
        0,
        0,
        32,
        32,
        64,
    ]


def test_eviction_keeps_its_share_but_never_fewer_than_the_sinks_and_one():
    eviction = Eviction("h2o", 0.25, sink=4)
    assert [kept(eviction, n) for n in (0, 3, 5, 8, 20, 21, 400)] == [0, 3, 5, 5, 5, 6, 100]
    assert kept(None, 7) == 7


def test_levels_and_quantiser_count_what_eviction_left():
    made = plan(
        layer(values=(group(0, 2, 16, (8, 32)),), levels=2),
        levels=Levels(4, (0.9, 0.1)),
        eviction=Eviction("h2o", 0.5),
    )
    parts = segments(made, made.layers[0], 208)
    assert [(part.start, part.stop, part.level) for part in parts] == [
        (0, 4, 1),
        (4, 94, 0),
        (94, 104, 1),
    ]


@pytest.mark.parametrize(
    ("window", "block", "quantised"), [(0, 1, True), (8, 1, False), (0, 8, False)]
)
def test_a_sliding_window_stores_one_less_and_knows_no_levels(window, block, quantised):
    made = plan(
        layer(window=6, levels=2),
        levels=Levels(2, (0.5, 0.5), 8),
        quantiser=Quantiser("affine", SideQuantiser((4, 4)), None, window=window, block=block),
        eviction=Eviction("recent", 0.5),
    )
    (part,) = segments(made, made.layers[0], 100)
    assert (part.start, part.stop, part.level, part.quantised) == (0, 5, 1, quantised)
    assert stored_tokens(made, made.layers[0], 3) == 3


def test_heads_that_share_a_latent_are_evicted_together():
    assert eviction_units(layer()) == [(0, 1), (1, 1)]
    shared = (group(0, 2, 16, (8,)), group(2, 2, 16, (8,)))
    four = layer(keys=whole(4), values=shared)
    assert eviction_units(four) == [(0, 2), (2, 2)]
    assert eviction_units(layer(keys=(group(0, 4, 16, (8,)),), values=shared)) == [(0, 4)]
