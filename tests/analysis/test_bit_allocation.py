"""Bits by column against every choice there is, and against the formula that they are a grid of."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.bit_allocation import bit_loss, blocks_of, few_column_bits, water_filled
from kvprof.analysis.rank_allocation import RankTarget
from kvprof.analysis.uniform import uniform_distortion
from kvprof.methods.quantisers import normal_distortion

DISTORTION = {bits: normal_distortion(bits) for bits in (0, 2, 3, 4, 8)}
UNIFORM = {bits: uniform_distortion(bits) for bits in DISTORTION}


def target(values, layer=0, side="keys", group=0):
    values = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    tail = values.square().flip(-1).cumsum(-1).flip(-1)
    errors = torch.cat([tail, torch.zeros(1, dtype=torch.float64)])
    return RankTarget(layer, side, group, values, errors, values)


def drawn(seed, heads, width):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for head in range(heads):
        values = torch.exp(2 * torch.randn(width, generator=generator, dtype=torch.float64))
        made.append(target(values.tolist(), head // 2, ("keys", "values")[head % 2]))
    weights = torch.exp(torch.randn(heads, generator=generator)).tolist()
    return made, weights


def size(runs):
    return sum(width * bits for width, bits in runs)


def lost(targets, given, weights):
    return sum(
        weight * bit_loss(one, runs, DISTORTION)
        for one, runs, weight in zip(targets, given, weights, strict=True)
    )


@settings(max_examples=25)
@given(st.integers(0, 9999), st.integers(1, 2), st.integers(2, 6), st.floats(0, 1))
def test_no_choice_of_as_many_bits_loses_less(seed, heads, width, knob):
    """All of 5^columns choices, in any order of bits; what a step leaves over is not spent."""
    width = width if heads == 1 else min(width, 3)
    targets, weights = drawn(seed, heads, width)
    given = water_filled(targets, knob, 1, weights, DISTORTION)
    own, spent = lost(targets, given, weights), sum(map(size, given))
    allowed = max((1 - knob) * 8 * heads * width, 2 * heads)
    assert spent <= allowed + 1e-9
    ways = [
        {
            choice: weight * bit_loss(one, tuple((1, bits) for bits in choice), DISTORTION)
            for choice in itertools.product(DISTORTION, repeat=width)
        }
        for one, weight in zip(targets, weights, strict=True)
    ]
    for choice in itertools.product(DISTORTION, repeat=heads * width):
        heads_of = [choice[head * width : (head + 1) * width] for head in range(heads)]
        if sum(choice) > spent or any(not bits[0] for bits in heads_of):
            continue
        found = sum(known[one] for known, one in zip(ways, heads_of, strict=True))
        assert own <= found * (1 + 1e-9)


@settings(max_examples=25)
@given(
    st.integers(0, 9999),
    st.integers(2, 16),
    st.lists(st.integers(1, 40), max_size=3),
    st.floats(0, 1),
)
def test_nor_does_any_choice_of_whole_blocks(seed, block, widths, knob):
    """Latents of unlike widths, whose last block may be narrower than the others."""
    generator = torch.Generator().manual_seed(seed)
    widths = [min(width, 6 // len(widths) * block) for width in widths] or [block]
    targets = [
        target(torch.exp(2 * torch.randn(width, generator=generator)).tolist(), index)
        for index, width in enumerate(widths)
    ]
    weights = torch.exp(2 * torch.randn(len(widths), generator=generator)).tolist()
    found = water_filled(targets, knob, block, weights, UNIFORM)
    spent = sum(map(size, found))
    blocks = [
        (width, weight * float(part.square().sum()), not place)
        for one, weight in zip(targets, weights, strict=True)
        for place, (width, part) in enumerate(
            zip(
                blocks_of(one.width, block),
                one.values.split(blocks_of(one.width, block)),
                strict=True,
            )
        )
    ]
    least = min(
        sum(energy * UNIFORM[bits] for bits, (_, energy, _) in zip(choice, blocks, strict=True))
        for choice in itertools.product(UNIFORM, repeat=len(blocks))
        if sum(bits * width for bits, (width, *_) in zip(choice, blocks, strict=True)) <= spent
        and all(bits or not first for bits, (*_, first) in zip(choice, blocks, strict=True))
    )
    own = sum(
        weight * bit_loss(one, runs, UNIFORM)
        for one, runs, weight in zip(targets, found, weights, strict=True)
    )
    assert own <= least * (1 + 1e-9)


@settings(max_examples=25)
@given(st.integers(0, 9999), st.integers(1, 4), st.floats(0, 1))
def test_nor_does_any_choice_that_heads_share(seed, width, knob):
    """Four heads, two names: 5^columns choices for each name, of as many bits."""
    targets, weights = drawn(seed, 4, width)
    names = ["keys", "values", "keys", "values"]
    given = water_filled(targets, knob, 1, weights, DISTORTION, names)
    assert given[0] == given[2]
    assert given[1] == given[3]
    own, spent = lost(targets, given, weights), sum(map(size, given))

    def choices(first):
        """Return the least loss by bits spent, over all choices of two heads."""
        found = {}
        for bits in itertools.product(DISTORTION, repeat=width):
            if bits[0]:
                runs = [tuple((1, own) for own in bits)] * 2
                loss = lost(targets[first::2], runs, weights[first::2])
                found[2 * sum(bits)] = min(loss, found.get(2 * sum(bits), math.inf))
        return found

    keys, values = choices(0), choices(1)
    least = min(
        one + other
        for paid, one in keys.items()
        for more, other in values.items()
        if paid + more <= spent
    )
    assert own <= least * (1 + 1e-9)


@settings(max_examples=60)
@given(st.integers(0, 9999), st.integers(1, 5), st.floats(0, 1))
def test_bits_never_grow_along_a_latent_and_its_runs_are_whole_blocks(seed, block, knob):
    targets, weights = drawn(seed, 4, 11)
    ends = set(itertools.accumulate(blocks_of(11, block)))
    for runs in water_filled(targets, knob, block, weights, DISTORTION):
        bits = [own for _, own in runs]
        assert bits == sorted(set(bits), reverse=True)
        assert set(itertools.accumulate(width for width, _ in runs)) <= ends
        assert sum(width for width, _ in runs) == 11
        assert bits[0]


def test_ends_of_the_knob_and_the_fewer_bits_the_further_it_turns():
    targets, weights = drawn(3, 6, 32)
    assert water_filled(targets, 0.0, 8, weights, DISTORTION) == [((32, 8),)] * 6
    assert water_filled(targets, 1.0, 8, weights, DISTORTION) == [((8, 2), (24, 0))] * 6
    sizes = [
        sum(map(size, water_filled(targets, knob / 50, 8, weights, DISTORTION)))
        for knob in range(51)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_equal_columns_lose_their_bits_from_the_end():
    made = water_filled([target([1.0] * 8)], 0.9, 2, [1.0], DISTORTION)
    assert made == [((2, 2), (6, 0))]


def test_with_any_number_of_bits_it_is_reverse_water_filling():
    """``b_i = max(0, ½ log₂(w σ_i² / θ))``, with ``D(b) = 4^-b`` and bits as fine as one likes."""
    fine = 32
    distortion = {step: 4.0 ** (-step / fine) for step in range(10 * fine)}
    targets, weights = drawn(5, 3, 12)
    given = water_filled(targets, 0.8, 1, weights, distortion)
    found = [bits / fine for runs in given for width, bits in runs for _ in range(width)]
    energies = [
        weight * float(value) ** 2
        for one, weight in zip(targets, weights, strict=True)
        for value in one.values
    ]
    low, high = 0.0, max(energies)
    for _ in range(100):
        theta = (low + high) / 2
        wanted = [max(0.0, math.log2(energy / theta) / 2) for energy in energies]
        low, high = (theta, high) if sum(wanted) > sum(found) else (low, theta)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1.01 / fine + 0.02
    assert min(found) == 0 < max(found)


def test_few_kinds_cost_no_more_bits_and_lose_little():
    targets, weights = drawn(9, 12, 32)
    given = water_filled(targets, 0.8, 4, weights, DISTORTION)
    pairs = set(zip(given[::2], given[1::2], strict=True))
    assert len(pairs) == 6
    for kinds in (1, 2, 4):
        fewer = few_column_bits(targets, given, kinds, weights, DISTORTION)
        assert len(set(zip(fewer[::2], fewer[1::2], strict=True))) <= kinds
        assert sum(map(size, fewer)) <= sum(map(size, given))
        assert set(fewer) <= set(given)
    assert few_column_bits(targets, given, 6, weights, DISTORTION) == given
    losses = [
        lost(targets, few_column_bits(targets, given, kinds, weights, DISTORTION), weights)
        for kinds in (1, 2, 4, 6)
    ]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("width", "block", "wanted"), [(80, 32, [32, 32, 16]), (16, 32, [16])])
def test_blocks_cover_a_latent(width, block, wanted):
    assert blocks_of(width, block) == wanted
