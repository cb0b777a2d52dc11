"""Byte accounts worked out by hand."""

import pytest
import torch

from kvprof.methods.accounting import (
    bytes_at,
    compression_ratio,
    dim_rate,
    full_bytes,
    paper_rate,
    rate,
    weight_bytes,
)
from kvprof.methods.plan import HeadGroup, Placement
from kvprof.methods.quantisers import kivi, kvquant, per_token
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from tests.methods.shapes import group, layer, layout, plan, whole

FP8 = Quantiser("fp8", SideQuantiser((8,)), SideQuantiser((8,)))


def test_full_is_the_models_own_cache():
    made = plan(layer(), layer())
    # 2 layers, 2 heads, K and V of 16, 10 tokens, 2 bytes.
    assert bytes_at(made, 10, itemsize=2).total == 2 * 2 * 2 * 16 * 10 * 2
    assert full_bytes(made, 10, itemsize=2) == bytes_at(made, 10, itemsize=2).total
    assert bytes_at(made, 10, itemsize=4, batch=3).total == 6 * full_bytes(made, 10, itemsize=2)
    assert rate(made, 10) == dim_rate(made) == paper_rate(made) == 0


def test_low_rank_counts_latents_and_nothing_else():
    keys = (group(0, 1, 16, (6,)), group(1, 1, 16, (10,)))
    values = (group(0, 2, 16, (8,)),)
    made = plan(layer(keys, values))
    stored = bytes_at(made, 100, itemsize=2)
    assert stored.keys == (6 + 10) * 100 * 2
    assert stored.values == 8 * 100 * 2
    assert stored.total == stored.keys + stored.values
    assert dim_rate(made) == pytest.approx(1 - 24 / 64)
    assert rate(made, 100) == pytest.approx(dim_rate(made))


def test_fp8_is_half_of_bfloat16_and_has_no_scales():
    made = plan(layer(), quantiser=FP8)
    assert rate(made, 77) == 0.5
    assert paper_rate(made) == 0.5


def llama(levels_of_values, **fields):
    """One layer of Llama-3.1-8B's shape: 8 KV heads of 128."""
    values = tuple(group(head, 1, 128, levels_of_values) for head in range(8))
    keys = whole(8, 128, len(levels_of_values))
    return plan(layer(values=values, placement=Placement.NONE, keys=keys), **fields)


def test_tales_published_setting_is_9_14_by_its_count_and_6_34_in_bytes():
    made = llama(
        (64, 128),
        levels=Levels(4, (0.9, 0.1), 32),
        quantiser=kivi((2, 4), group=32, window=0, block=32),
        lazy=True,
    )
    assert compression_ratio(paper_rate(made)) == pytest.approx(9.142857, abs=1e-6)
    # Infinitely many tokens: K 0.9*2 + 0.1*4 + 1 bits, V 0.9*0.5*(2+1) + 0.1*(4+1), of 16.
    assert compression_ratio(rate(made, 10**8)) == pytest.approx(6.336634, abs=1e-3)
    assert compression_ratio(rate(made, 102_400)) == pytest.approx(6.33, abs=0.01)


@pytest.mark.parametrize(("share", "ratio"), [(0.3, 1.46), (0.5, 1.29)])
def test_tales_unquantised_settings(share, ratio):
    width = 1000
    values = tuple(group(head, 1, width, (int(share * width), width)) for head in range(2))
    made = plan(
        layer(keys=whole(2, width, 2), values=values, placement=Placement.NONE),
        levels=Levels(4, (0.9, 0.1)),
    )
    assert compression_ratio(paper_rate(made)) == pytest.approx(ratio, abs=5e-3)
    assert compression_ratio(rate(made, 10**7)) == pytest.approx(ratio, abs=5e-3)


def test_tale_by_hand_at_a_short_context():
    made = llama(
        (64, 128),
        levels=Levels(4, (0.9, 0.1), 32),
        quantiser=kivi((2, 4), group=32, window=0, block=32),
    )
    # 1,000 tokens: 4 sinks, 996 left, at most 99 recent, so 897 would go down: 28 batches = 896.
    # Of 996 tokens 31 blocks of 32 = 992 are quantised: 896 at 2 bits, 96 at 4, 4 not yet.
    stored = bytes_at(made, 1000, itemsize=2)
    heads = 8
    assert stored.sinks == heads * 4 * (128 + 128) * 2
    assert stored.window == heads * 4 * (128 + 128) * 2
    assert stored.keys == heads * (896 * 128 * 2 + 96 * 128 * 4) // 8
    assert stored.values == heads * (896 * 64 * 2 + 96 * 128 * 4) // 8
    key_scales = 992 // 32 * 128
    value_scales = 896 * 64 // 32 + 96 * 128 // 32
    assert stored.scales == stored.zeros == heads * (key_scales + value_scales) * 2


def test_kivi_and_palu_by_the_papers_count():
    assert compression_ratio(paper_rate(plan(layer(), quantiser=kivi((2,))))) == pytest.approx(8)
    sixty = tuple(group(head, 1, 100, (60,)) for head in range(2))
    palu = plan(layer(sixty, sixty), quantiser=per_token((3,), group=None))
    assert compression_ratio(paper_rate(palu)) == pytest.approx(8.89, abs=0.01)


def test_rows_are_packed_into_whole_bytes_and_narrow_groups_have_scales_of_their_own():
    narrow = (group(0, 1, 16, (5,)), group(1, 1, 16, (9,)))
    made = plan(layer(narrow, narrow), quantiser=per_token((3,), group=8))
    stored = bytes_at(made, 10, itemsize=2)
    assert stored.keys == 10 * (2 + 4)  # 15 and 27 bits
    assert stored.scales == 2 * 10 * (1 + 2) * 2


def test_outliers_count_their_value_and_index():
    made = plan(layer(), quantiser=kvquant((4,), outliers=0.1, block=8), levels=Levels(1))
    stored = bytes_at(made, 1 + 16, itemsize=4)
    assert stored.sinks == 2 * 2 * 16 * 4
    assert stored.outliers == 2 * 2 * 16 * 2 * (4 + 2)  # ceil(1.6) of 16 columns
    # Keys: 2 blocks of 8 tokens, a scale per column; values: one per token.
    assert stored.scales == 2 * (2 * 16 + 16) * 2


def test_a_side_that_is_not_quantised_is_no_window():
    made = plan(layer(), quantiser=Quantiser("affine", SideQuantiser((4,)), None, window=64))
    stored = bytes_at(made, 32, itemsize=2)
    assert stored.window == 2 * 16 * 32 * 2
    assert stored.values == 2 * 16 * 32 * 2
    assert stored.keys == stored.scales == 0


@pytest.mark.parametrize(
    ("kind", "each"), [("recent", 0), ("h2o", 4), ("keyformer", 8), ("snapkv", 4)]
)
def test_eviction_counts_what_it_keeps_beside_the_tokens(kind, each):
    share = 1.0 if kind == "recent" else 0.5
    own = {"window": 8, "pool": 3} if kind == "snapkv" else {}
    made = plan(layer(), eviction=Eviction(kind, 0.5, recent_share=share, **own))
    stored = bytes_at(made, 100, itemsize=2)
    assert stored.keys == 50 * 2 * 16 * 2
    assert stored.eviction == 50 * 2 * each
    assert paper_rate(made) == 0.5
    assert dim_rate(made) == 0


def test_rebuilt_keys_need_their_positions_once_tokens_are_dropped():
    keys = (group(0, 2, 16, (8,)),)
    made = plan(
        layer(keys, placement=Placement.PRE_ROPE), eviction=Eviction("h2o", 0.5, recent_share=0.5)
    )
    assert bytes_at(made, 100, itemsize=2).eviction == 50 * (4 + 4)


def test_sliding_windows_store_one_token_less_on_both_sides_of_the_rate():
    keys = tuple(group(head, 1, 16, (8,)) for head in range(2))
    made = plan(layer(keys, window=9), layer(keys))
    assert full_bytes(made, 100, itemsize=2) == (8 + 100) * 64 * 2
    assert bytes_at(made, 100, itemsize=2).total == (8 + 100) * 48 * 2
    # Once more under eviction: the window's layer is left alone.
    evicting = plan(layer(keys, window=9), layer(keys), eviction=Eviction("recent", 0.5))
    assert bytes_at(evicting, 100, itemsize=2).total == (8 + 50) * 48 * 2


def test_the_strawman_stores_its_bases():
    online = tuple(HeadGroup(head, 1, 16, (4,)) for head in range(2))
    made = plan(layer(online, online, placement=Placement.POST_ROPE), online_bases=True)
    stored = bytes_at(made, 10, itemsize=2, batch=3)
    assert stored.bases == 3 * 4 * 16 * 4 * 2
    assert stored.keys == 3 * 10 * 2 * 4 * 2


def test_weights_that_grow_are_counted_apart():
    facts = layout()  # 8 query heads, 2 KV heads of 16, hidden 128
    shared = (group(0, 2, 16, (24,)),)
    folded = plan(layer(values=shared, fold_values=(True, True)))
    weights = weight_bytes(folded, facts, itemsize=2)
    assert weights.online == 0
    assert weights.folded == 2 * 128 * ((24 - 32) + 8 * (24 - 16))
    online = weight_bytes(plan(layer(keys=shared)), facts, itemsize=2)
    assert (online.online, online.folded) == (2 * 2 * 32 * 24, 0)
    lazy = weight_bytes(
        plan(layer(values=shared, fold_values=(False, True)), lazy=True), facts, itemsize=2
    )
    assert lazy.kept_twice == 2 * 128 * 8 * 16
    assert lazy.total == lazy.online + lazy.folded + lazy.kept_twice


def test_the_account_is_what_tensors_of_those_shapes_take():
    """The same latents, scales and zeros as real tensors."""
    made = plan(layer(), quantiser=per_token((4,), group=8))
    tensors = []
    for _ in range(4):  # K and V of two heads
        tensors.append(torch.zeros(20, 8, dtype=torch.uint8))
        tensors += [torch.zeros(20, 2, dtype=torch.float16) for _ in range(2)]
    taken = sum(tensor.nbytes for tensor in tensors)
    assert bytes_at(made, 20, itemsize=2).total == taken
