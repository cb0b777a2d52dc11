"""Plans that contradict themselves or a model are refused, each in one clear line."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.methods.plan import HeadGroup, Placement
from kvprof.methods.soundness import check_fits, check_kinds, head_kinds
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from tests.methods.shapes import group, layer, layout, plan, whole

FOUR = SideQuantiser((4,))
CHANNEL = SideQuantiser((4,), "channel", 8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: plan(layer(), levels=Levels(shares=(0.5, 0.4))), "0.5, 0.4"),
        (lambda: plan(layer(), levels=Levels(sink=-1)), "sink -1"),
        (lambda: plan(layer(), levels=Levels(shares=(0.5, 0.5))), "1 ranks for 2 token levels"),
        (lambda: plan(layer(), quantiser=Quantiser("odd", FOUR, FOUR)), "'odd'"),
        (lambda: plan(layer(), quantiser=Quantiser("affine", None, None)), "leave it out"),
        (lambda: plan(layer(), quantiser=Quantiser("fp8", FOUR, FOUR)), "fp8 .* 4 bits"),
        (
            lambda: plan(layer(), quantiser=Quantiser("affine", SideQuantiser((5,)), None)),
            "affine .* 5 bits; .* 2, 3, 4, 8",
        ),
        (
            lambda: plan(layer(), quantiser=Quantiser("affine", SideQuantiser((4, 4)), None)),
            "2 bit widths for 1 token levels",
        ),
        (
            lambda: plan(layer(), quantiser=Quantiser("affine", FOUR, None, outliers=0.1)),
            "affine .* outliers",
        ),
        (
            lambda: plan(layer(), quantiser=Quantiser("affine", CHANNEL, None, block=4)),
            "group 8, not 4",
        ),
        (
            lambda: plan(
                layer(levels=2),
                levels=Levels(shares=(0.5, 0.5), batch=4),
                quantiser=Quantiser("affine", SideQuantiser((4, 4), "channel", 8), None, block=8),
            ),
            "batch 4 .* group 8",
        ),
        (
            lambda: plan(
                layer(),
                quantiser=Quantiser("affine", CHANNEL, None, block=8),
                eviction=Eviction("h2o", 0.5),
            ),
            "per token",
        ),
        (lambda: plan(layer(), eviction=Eviction("odd", 0.5)), "'odd'"),
        (lambda: plan(layer(), eviction=Eviction("h2o", 0.0)), "keep 0"),
        (lambda: plan(layer(), eviction=Eviction("h2o", 0.5, window=8)), "h2o .* window"),
        (lambda: plan(layer(), eviction=Eviction("snapkv", 0.5, pool=3)), "not 0 and 3"),
        (lambda: plan(layer(), eviction=Eviction("snapkv", 0.5, window=8, pool=4)), "not 8 and 4"),
        (
            lambda: plan(layer(), eviction=Eviction("recent", 0.5, recent_share=0.5)),
            "not 0.5",
        ),
        (lambda: plan(layer(), eviction=Eviction("h2o", 0.5, order="both")), "'both'"),
        (
            lambda: plan(layer(keys=(group(1, 1, 16, (4,)), group(0, 1, 16, (4,))))),
            "in order",
        ),
        (lambda: plan(layer(keys=whole(1))), "different numbers of KV heads"),
        (lambda: plan(layer(keys=(HeadGroup(0, 2, 16, (8,)),))), "rank 8 of 32"),
        (
            lambda: plan(layer(keys=(HeadGroup(0, 2, 16, (8,), torch.zeros(32, 8)),))),
            "both down and up",
        ),
        (
            lambda: plan(
                layer(keys=(HeadGroup(0, 2, 16, (8,), torch.zeros(8, 32), torch.zeros(32, 8)),))
            ),
            r"\(8, 32\).* \(32, 8\)",
        ),
        (lambda: plan(layer(keys=(group(0, 2, 16, (40,)),))), "rank 40 .* 32"),
        (
            lambda: plan(
                layer(values=(group(0, 2, 16, (16, 8)),), levels=2),
                levels=Levels(shares=(0.5, 0.5)),
            ),
            "not decrease",
        ),
        (
            lambda: plan(layer(keys=(group(0, 2, 16, (8,)),), placement=Placement.NONE)),
            "no placement",
        ),
        (lambda: plan(layer(fold_keys=(True, False))), "folded"),
        (
            lambda: plan(
                layer(
                    keys=(group(0, 2, 16, (8,)),),
                    placement=Placement.PRE_ROPE,
                    fold_keys=(True, True),
                )
            ),
            "cannot be folded into W_Q",
        ),
        (
            lambda: plan(
                layer(values=(group(0, 2, 16, (8,)),), fold_values=(True, True)), lazy=True
            ),
            "lazy",
        ),
        (lambda: plan(layer(window=1)), "sliding window 1 "),
    ],
)
def test_a_plan_says_one_thing(build, message):
    with pytest.raises(UsageError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


LOW = (group(0, 2, 16, (8,)),)


@pytest.mark.parametrize(
    ("made", "facts", "message"),
    [
        (layer(), {"mla": True}, "multi-head latent attention"),
        (layer(keys=whole(3), values=whole(3)), {}, "keys"),
        (layer(values=whole(2, 8)), {}, "values"),
        (layer(), {"sliding_window": 9}, "sliding window"),
        (layer(LOW, fold_keys=(True, True)), {}, "after RoPE"),
        (
            layer(LOW, fold_keys=(True, True)),
            {"position": "none", "qk_norm": True},
            "cannot be folded across QK-norm",
        ),
        (
            layer(LOW, placement=Placement.PRE_ROPE, fold_keys=(True, False)),
            {"qk_norm": True},
            "cannot be folded across QK-norm",
        ),
        (layer(LOW, placement=Placement.PRE_ROPE), {"rotary_offset": None}, "K before RoPE"),
        (
            layer(values=LOW, fold_values=(True, True)),
            {"value_projection": None},
            "value projection",
        ),
        (
            layer(values=LOW, fold_values=(False, True)),
            {"output_projection": None},
            "output projection",
        ),
    ],
)
def test_a_plan_must_fit_the_model(made, facts, message):
    with pytest.raises(UsageError, match=message):
        check_fits(plan(made), layout(**facts), "f" * 32)


def test_another_models_plan_and_another_depth_are_refused():
    made = plan(layer(), made={"model": "tiny"})
    check_fits(made, layout(), "f" * 32)
    with pytest.raises(UsageError, match=r"for tiny \(ffffffffffff\), not for the model given"):
        check_fits(made, layout(), "0" * 32)
    with pytest.raises(UsageError, match="the plan has 1 layers, the model 2"):
        check_fits(made, layout(2), "f" * 32)


def test_what_is_sound_passes():
    folded = layer(LOW, LOW, fold_keys=(True, True), fold_values=(True, True))
    check_fits(plan(folded), layout(position="learned"), "f" * 32)
    rebuilt = layer(LOW, LOW, placement=Placement.PRE_ROPE, fold_keys=(True, False))
    check_fits(plan(rebuilt), layout(), "f" * 32)
    online = replace(rebuilt, keys=replace(rebuilt.keys, fold_down=False))
    check_fits(plan(online), layout(qk_norm=True), "f" * 32)


def test_more_kinds_of_head_than_a_plan_says_are_refused():
    def heads(*ranks):
        return tuple(group(head, 1, 16, (rank,)) for head, rank in enumerate(ranks))

    layers = (
        layer(heads(4, 8), heads(8, 8)),
        layer(heads(8, 4), heads(8, 12)),
        layer(),  # whole, and of no kind
        layer((group(0, 2, 16, (8,)),), heads(8, 8)),
    )
    made = plan(*layers)
    assert head_kinds(made) == {((4,), (8,)), ((8,), (8,)), ((4,), (12,))}
    check_kinds(made)
    for options in ({"kinds": 3}, {"kinds": 0}, {}, {"kinds": "two"}, None):
        check_kinds(replace(made, made={"options": options}))
    with pytest.raises(UsageError, match="kinds=2"):
        check_kinds(replace(made, made={"options": {"kinds": 2}}))


@given(data=st.data())
def test_kinds_of_head_are_those_of_every_single_head(data):
    """However heads share latents: counted group by group, and here head by head."""
    heads, copies = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 1, 3]))

    def groups(count, single):
        made, first = [], 0
        while first < count:
            share = 1 if single else data.draw(st.integers(1, count - first))
            made.append(group(first, share, 4, (data.draw(st.integers(1, 3)),)))
            first += share
        return tuple(made)

    keys, values = groups(heads * copies, copies > 1), groups(heads, False)
    made = layer(keys, values)
    if copies > 1:
        made = replace(made, keys=replace(made.keys, per_query_head=True))
    expected = {
        tuple(
            one.ranks
            for side, times in ((keys, copies), (values, 1))
            for one in side
            if set(range(one.first, one.first + one.heads))
            & set(range(head * times, (head + 1) * times))
        )
        for head in range(heads)
    }
    assert head_kinds(plan(made)) == expected
