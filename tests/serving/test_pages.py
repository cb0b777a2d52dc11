"""Pages, ranks' heads, folded weights and refusals; nothing of it needs vLLM."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import HeadGroup, Placement, Plan
from kvprof.methods.quantisers import kivi, quantised
from kvprof.methods.registry import plan_family
from kvprof.serving.pages import assign, imbalance, layer_pages, token_bytes
from kvprof.serving.refusals import (
    check_load_format,
    check_positions,
    check_servable,
    check_shape,
    check_shared,
    refusal,
)
from kvprof.serving.settings import SERVED
from kvprof.serving.weights import folded_output, folded_value, narrowed
from tests.methods.models import FINE, inputs
from tests.serving.tiny import DEPTH, HEADS, KV_HEADS, RANKS, ragged_plan, rebuilt_plan


@given(
    st.sampled_from([(4, 2), (8, 2), (8, 4), (8, 8), (6, 3), (32, 4)]).flatmap(
        lambda size: st.tuples(
            st.lists(st.integers(2, 32), min_size=size[0], max_size=size[0]), st.just(size[1])
        )
    )
)
def test_heads_are_dealt_out_once_and_no_wider_than_in_order(case: tuple[list[int], int]) -> None:
    """Every head has a rank, ranks have as many, and nobody is worse off than in order."""
    widths, ranks = case
    found, each = assign(widths, ranks), len(widths) // ranks
    assert sorted(found.order) == list(range(len(widths)))
    assert {len(own) for own in found.heads} == {each}
    assert found.columns == tuple(sum(widths[head] for head in own) for own in found.heads)
    plain = max(sum(widths[first : first + each]) for first in range(0, len(widths), each))
    assert found.widest <= plain
    if ranks == 2 and len(widths) <= 8:
        best = min(
            max(sum(widths[h] for h in own), sum(widths) - sum(widths[h] for h in own))
            for own in combinations(range(len(widths)), each)
        )
        assert found.widest == best


def test_more_ranks_than_heads_are_refused() -> None:
    """A KV head is never cut in two."""
    with pytest.raises(UsageError):
        assign([1, 2, 3, 4], 8)


def test_pages_hold_what_the_account_counts() -> None:
    """Where ranks are multiples of 16 a page's bytes are the byte account's."""
    plan = ragged_plan()
    pages = layer_pages(plan)
    counted = bytes_at(plan, 64, itemsize=2).total
    widened = 2 * (8 + 8)  # of one head: 24 and 40 columns become 32 and 48
    assert 64 * token_bytes(pages, 2) == counted + 64 * widened
    keys, values = pages[1].of_rank(0)
    assert (keys, values) == ((16, 64, 32, 32), (16, 48, 16, 48))
    assert RaggedLayout(keys, values, 2, 7, 16).row == 16 * pages[1].columns


def test_quantised_pages_hold_what_the_account_counts() -> None:
    """Codes, scales and middles of 4 bits, as the byte account has them."""
    plan = quantised(ragged_plan(), "per-token", 4)
    # A head of 24 and 40 columns takes 32 and 48: 8 columns more on each side.
    counted = bytes_at(plan, 64, itemsize=2).total + 64 * (4 + 4)
    assert 64 * token_bytes(layer_pages(plan), 2) == counted


def test_ranks_share_a_page_size() -> None:
    """Each rank's pages have room for the widest rank; what stays empty is told."""
    plan = ragged_plan()
    pages = layer_pages(plan, 2)
    for layer in pages:
        for rank in range(2):
            assert sum(map(sum, layer.of_rank(rank))) <= layer.columns
    stored = sum(key + value for layer in RANKS for key, value in layer) + 16
    room = 2 * sum(layer.columns for layer in pages)
    assert imbalance(pages) == pytest.approx(1 - stored / room)


def test_a_scale_goes_into_the_weights_and_out_again() -> None:
    down, up = narrowed(HeadGroup(0, 1, DEPTH, (DEPTH,), scale=0.25), DEPTH)
    assert torch.equal(down, 4 * torch.eye(DEPTH))
    assert torch.equal(up, torch.eye(DEPTH) / 4)


@pytest.mark.parametrize("bias", [False, True])
def test_folded_weights_give_what_the_plan_says(bias: bool) -> None:
    """V's latents and what W_O makes of them, against the model's own in float64."""
    generator = torch.Generator().manual_seed(3)
    layer, group, hidden = ragged_plan().layers[1], HEADS // KV_HEADS, 24
    states = torch.randn(5, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(KV_HEADS * DEPTH, hidden, generator=generator, dtype=torch.float64)
    shift = torch.randn(KV_HEADS * DEPTH, generator=generator, dtype=torch.float64) * bias
    output = torch.randn(hidden, HEADS * DEPTH, generator=generator, dtype=torch.float64)
    widths = layer_pages(ragged_plan())[1].value_widths
    pairs = [narrowed(one, width) for one, width in zip(layer.values.groups, widths, strict=True)]
    downs, ups = zip(*pairs, strict=True)
    latents = states @ folded_value(weight, downs).T + folded_value(shift, downs)
    latents = latents.unflatten(1, (KV_HEADS, DEPTH))
    given_out, wanted = [], torch.zeros(5, hidden, dtype=torch.float64)
    values = (states @ weight.T + shift).unflatten(1, (KV_HEADS, DEPTH))
    for head in range(HEADS):
        own = layer.values.groups[head // group]
        assert own.down is not None
        assert own.up is not None
        given_out.append(latents[:, head // group, : widths[head // group]])
        restored = values[:, head // group] @ own.down.double() @ own.up.T.double()
        wanted += restored @ output[:, head * DEPTH : (head + 1) * DEPTH].T
    folded = folded_output(output, ups, group)
    assert folded.shape == (hidden, group * sum(widths))
    torch.testing.assert_close(torch.cat(given_out, dim=1) @ folded.T, wanted)


def _with_keys(plan: Plan, **changes: Any) -> Plan:
    layers = [replace(one, keys=replace(one.keys, **changes)) for one in plan.layers]
    return replace(plan, layers=tuple(layers))


def test_what_cannot_be_served_is_said() -> None:
    """Each refusal is one line with its reason; a ragged plan has none."""
    plan = ragged_plan()
    assert refusal(plan) is None
    assert refusal(quantised(plan, "per-token", 4)) is None
    assert refusal(rebuilt_plan()) is None
    windowed = replace(plan.layers[0], sliding_window=128)
    cases = {
        "sliding window": replace(plan, layers=(windowed, plan.layers[1])),
        "blocks of 32": quantised(plan, lambda bits: replace(kivi(bits), window=0), 4),
        "uncompressed": quantised(plan, "kivi", 4),
        "uncompressed tokens": replace(quantised(plan, "per-token", 4), prefill_uncompressed=True),
        "before RoPE from pages": quantised(rebuilt_plan(), "per-token", 8),
        "share a latent": _with_keys(rebuilt_plan(), placement=Placement.POST_ROPE),
        "by 1 and by 2": replace(
            rebuilt_plan(),
            layers=tuple(
                replace(layer, values=own.values)
                for layer, own in zip(rebuilt_plan().layers, plan.layers, strict=True)
            ),
        ),
        "uncompressed K and V": replace(
            plan,
            layers=tuple(
                replace(one, values=replace(one.values, fold_down=False)) for one in plan.layers
            ),
            lazy=True,
        ),
    }
    for words, one in cases.items():
        with pytest.raises(UsageError, match=words) as caught:
            check_servable(one)
        assert "\n" not in str(caught.value)


def test_latents_of_more_query_heads_than_a_kernel_takes_are_refused() -> None:
    """Two KV heads of 32 query heads each are the most."""
    check_shared(rebuilt_plan(), 32)
    with pytest.raises(UsageError):
        check_shared(rebuilt_plan(), 33)


def test_keys_of_several_positions_are_not_rebuilt() -> None:
    """A page's place tells one number."""
    check_positions(ragged_plan())
    with pytest.raises(UsageError, match="several positions"):
        check_positions(rebuilt_plan())


def test_heads_that_share_a_latent_stay_together() -> None:
    """Ranks deal out whole latents, with the columns that these have."""
    pages = layer_pages(rebuilt_plan(), 2)
    assert sorted(pages[0].order) == list(range(KV_HEADS))
    assert all(pages[1].order[at] // 2 == pages[1].order[at + 1] // 2 for at in (0, 2))
    assert pages[0].columns == max(48 + 64, 96 + 32)
    with pytest.raises(UsageError, match=r"2 latents .* 4 tensor"):
        layer_pages(rebuilt_plan(), 4)


def test_a_plan_of_another_shape_is_refused() -> None:
    """The shape is all that a model of random weights has."""
    plan = ragged_plan()
    check_shape(plan, 2, KV_HEADS, DEPTH)
    with pytest.raises(UsageError):
        check_shape(plan, 32, 8, 128)


@pytest.mark.parametrize("name", ["sharded_state", "runai_streamer_sharded", "tensorizer"])
def test_weights_that_pass_their_loaders_by_are_refused(name):
    with pytest.raises(UsageError, match=f"--load-format {name}"):
        check_load_format(name)
    check_load_format("auto")
    check_load_format("dummy")


@pytest.mark.parametrize("name", SERVED)
def test_methods_that_the_help_offers_are_not_refused(name: str) -> None:
    base, bits = name.removesuffix("-4bit").removesuffix("-8bit"), name[-4:]
    plan = plan_family(base, inputs("Llama"), **FINE).build(0.0)
    if bits in ("4bit", "8bit"):
        plan = quantised(plan, "per-token", int(bits[0]))
    assert refusal(plan) is None
