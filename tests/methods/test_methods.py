"""Each method's plans against its formula, worked out in numpy from the captured vectors."""

import numpy as np
import pytest
import torch

from kvprof.analysis.moments import join_heads
from kvprof.errors import UsageError
from kvprof.methods.accounting import dim_rate
from kvprof.methods.family import MethodInputs, by_head, plan_at
from kvprof.methods.plan import Placement
from kvprof.methods.registry import plan_family
from kvprof.methods.soundness import check_fits
from kvprof.models.projections import output_slices
from kvprof.moments.collect import capture, run_batch
from tests.methods.models import FINE, with_weights
from tests.methods.models import deep_inputs as inputs
from tests.methods.models import deep_model as model
from tests.models.tiny import ARCHITECTURES, MLA

LOW_RANK = {
    "fdc": FINE, "zack": FINE, "kq": FINE, "svd-kv": FINE, "svd-k": FINE, "svd-v": FINE,
    "palu": {**FINE, "heads": 2}, "tale": {**FINE, "heads": 2}, "tale+kivi": FINE,
}  # fmt: skip
LAYER = 1


def groups_of(plan):
    return [
        group
        for layer in plan.layers
        for side in (layer.keys, layer.values)
        for group in side.groups
        if group.down is not None
    ]


@pytest.fixture(scope="module")
def seen():
    """Q, K, V and K before RoPE of one layer of Llama on the calibration's tokens, and W_O."""
    from kvprof.moments.collect import model_tokens
    from kvprof.sources.grammar import parse_source
    from kvprof.sources.windows import batches, windows

    loaded = model("Llama")
    taps = []
    drawn = windows(
        parse_source("random:512"), model_tokens(loaded), tokens=512, seq_len=64, seed=0
    )
    with capture(loaded, lambda t: taps.append(t) if t.layer == LAYER else None, pre_rope=True):
        for ids in batches(drawn, 4):
            run_batch(loaded, torch.from_numpy(ids))
    stacked = {
        key: np.concatenate([row for t in taps for row in getattr(t, key).double().numpy()], axis=1)
        for key in ("q", "k", "v", "k_pre")
    }
    stacked["w_o"] = output_slices(loaded.model, loaded.layout, LAYER).double().numpy()
    return stacked


def group_queries(seen, head):
    return np.concatenate(list(seen["q"][2 * head : 2 * head + 2]))


def group_outputs(seen, head):
    return np.concatenate(list(seen["w_o"][2 * head : 2 * head + 2]), axis=1)


def score_error(seen, head, group):
    queries, keys = group_queries(seen, head), seen["k"][head]
    kept = keys @ group.down.double().numpy() @ group.up.double().numpy().T
    return ((queries @ (keys - kept).T) ** 2).sum()


def output_error(seen, head, group):
    values, outputs = seen["v"][head], group_outputs(seen, head)
    kept = values @ group.down.double().numpy() @ group.up.double().numpy().T
    return (((values - kept) @ outputs) ** 2).sum()


def best(matrix, rank):
    """The least squared error of any rank: the tail of the singular values."""
    return (np.linalg.svd(matrix, compute_uv=False)[rank:] ** 2).sum()


def at_share(name, share, arch="Llama", **options):
    family = plan_family(name, inputs(arch), **FINE, allocation="uniform", **options)
    return plan_at(family, share)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_kq_reaches_the_least_error_and_the_others_do_not_beat_it(seen, share):
    plans = {name: at_share(name, share) for name in ("kq", "fdc", "zack", "svd-kv")}
    for head in range(2):
        queries, keys = group_queries(seen, head), seen["k"][head]
        sides = {
            n: (p.layers[LAYER].keys.groups[head], p.layers[LAYER].values.groups[head])
            for n, p in plans.items()
        }
        scores = {name: score_error(seen, head, key) for name, (key, _) in sides.items()}
        outputs = {name: output_error(seen, head, value) for name, (_, value) in sides.items()}
        rank = sides["kq"][0].rank
        product = np.linalg.qr(queries)[1] @ np.linalg.qr(keys)[1].T
        assert scores["kq"] == pytest.approx(best(product, rank), rel=1e-5)
        product = np.linalg.qr(seen["v"][head])[1] @ group_outputs(seen, head)
        assert outputs["kq"] == pytest.approx(best(product, rank), rel=1e-5)
        for name in ("fdc", "zack", "svd-kv"):
            assert scores[name] > scores["kq"]
            assert outputs[name] > outputs["kq"]


def test_fdc_is_the_svd_of_queries_and_keys_and_of_values_and_outputs(seen):
    plan = at_share("fdc", 0.5)
    for head in range(2):
        stacks = (
            (
                plan.layers[LAYER].keys,
                np.concatenate([group_queries(seen, head), *[seen["k"][head]] * 2]),
            ),
            (
                plan.layers[LAYER].values,
                np.concatenate(
                    [np.sqrt(8192 / 512) * seen["v"][head], group_outputs(seen, head).T]
                ),
            ),
        )
        for side, stack in stacks:
            right = np.linalg.svd(stack, full_matrices=False)[2][:8].T
            ours = side.groups[head].down.double().numpy()
            np.testing.assert_allclose(ours @ ours.T, right @ right.T, atol=1e-5)
            assert torch.equal(side.groups[head].down, side.groups[head].up)


def test_palu_loses_the_tail_of_the_joint_spectrum(seen):
    plan = at_share("palu", 0.5, heads=2)
    for side, key in ((plan.layers[LAYER].keys, "k_pre"), (plan.layers[LAYER].values, "v")):
        (group,) = side.groups
        joined = join_heads(torch.from_numpy(seen[key])[None], 2)[0, 0].numpy()
        kept = joined @ group.down.double().numpy() @ group.up.double().numpy().T
        assert group.rank == 16
        assert ((joined - kept) ** 2).sum() == pytest.approx(best(joined, 16), rel=1e-5)


@pytest.mark.parametrize("name", ["palu", "palu:paper", "palu-3bit", "palu:paper+keyformer"])
def test_palu_in_every_form_keeps_biases_out_of_latents(name):
    family = plan_family(name, inputs("Qwen2"), **FINE)
    plan = plan_at(family, 0.3) if family.at_rate is None else family.at_rate(0.3, 64)
    for layer, own in zip(plan.layers, model("Qwen2").model.model.layers, strict=True):
        assert torch.equal(layer.centre.keys.flatten(), own.self_attn.k_proj.bias)
        assert torch.equal(layer.centre.values.flatten(), own.self_attn.v_proj.bias)


@pytest.mark.parametrize("heads", [1, 2, 0])
def test_palus_group_sizes(heads):
    plan = at_share("palu", 0.5, heads=heads)
    size = heads or 2
    assert [group.heads for group in plan.layers[0].keys.groups] == [size] * (2 // size)
    assert dim_rate(plan) == 0.5


def test_tales_lower_level_is_the_best_of_its_rank_by_truncation(seen):
    plan = at_share("tale", 0.5, heads=2)
    (group,) = plan.layers[LAYER].values.groups
    assert group.ranks == (16, 32)
    joined = join_heads(torch.from_numpy(seen["v"])[None], 2)[0, 0].numpy()
    down, up = group.down.double().numpy(), group.up.double().numpy()
    error = ((joined - joined @ down[:, :16] @ up[:, :16].T) ** 2).sum()
    assert error == pytest.approx(best(joined, 16), rel=1e-5)
    assert all(part.identity for part in plan.layers[LAYER].keys.groups)
    assert plan.lazy
    assert not plan.layers[LAYER].values.fold_down
    assert plan.layers[LAYER].values.fold_up


def test_tales_ablations_are_options():
    plan = at_share("tale", 0.5, sink=0, recent=0.0, lazy=False)
    assert (plan.levels.sink, plan.levels.shares, plan.lazy) == (0, (1.0, 0.0), False)
    assert plan.layers[0].values.fold_down
    with pytest.raises(UsageError, match="recent share"):
        at_share("tale", 0.5, recent=1.0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", LOW_RANK)
def test_full_rank_is_exact_on_every_architecture_and_fits_it(arch, name):
    if arch == "Mistral" and name.startswith("tale"):
        pytest.skip("every layer has a sliding window; refused, tested below")
    loaded = model(arch)
    plan = plan_at(plan_family(name, inputs(arch), **LOW_RANK[name]), 0.0)
    check_fits(plan, loaded.layout, loaded.fingerprint)
    assert dim_rate(plan) == 0
    for group in groups_of(plan):
        assert torch.allclose(group.down @ group.up.T, torch.eye(group.width), atol=2e-5)


def test_calibration_on_fewer_tokens_than_dimensions_is_exact_at_full_rank():
    few = inputs("Llama", tokens=7)
    for name, options in LOW_RANK.items():
        for group in groups_of(plan_at(plan_family(name, few, **options), 0.0)):
            assert torch.allclose(group.down @ group.up.T, torch.eye(group.width), atol=2e-5), name


def test_where_methods_project_and_what_they_fold():
    rope, none = "Llama", "GPT2"
    for name, arch, placement, fold_keys in (
        ("fdc", rope, Placement.POST_ROPE, (False, False)),
        ("fdc", none, Placement.POST_ROPE, (False, False)),
        ("zack", rope, Placement.POST_ROPE, (False, False)),
        ("zack", none, Placement.POST_ROPE, (True, True)),
        ("kq", none, Placement.POST_ROPE, (True, True)),
        ("palu", rope, Placement.PRE_ROPE, (True, False)),
        ("palu", "Qwen3", Placement.PRE_ROPE, (False, False)),
    ):
        layer = plan_at(plan_family(name, inputs(arch), **LOW_RANK[name]), 0.5).layers[0]
        assert layer.keys.placement is placement, (name, arch)
        assert (layer.keys.fold_down, layer.keys.fold_up) == fold_keys, (name, arch)
        assert (layer.values.fold_down, layer.values.fold_up) == (True, True), (name, arch)


def test_palu_folds_queries_too_where_heads_have_their_own_latents():
    family = plan_family("palu", inputs("GPT2"), heads=1, centre=False, **FINE)
    alone = plan_at(family, 0.5).layers[0].keys
    assert (alone.placement, alone.fold_down, alone.fold_up) == (Placement.POST_ROPE, True, True)


def test_layers_without_rope_are_folded_one_by_one():
    layers = plan_at(plan_family("zack", inputs("SmolLM3"), **FINE), 0.5).layers
    rotates = [facts.position == "rope" for facts in model("SmolLM3").layout.layers]
    assert [not layer.keys.fold_down for layer in layers] == rotates == [True, False, True]


def test_tale_leaves_sliding_windows_alone():
    plan = plan_at(plan_family("tale", inputs("Gemma3"), **FINE), 0.5)
    windows = [facts.sliding_window for facts in model("Gemma3").layout.layers]
    assert [layer.values.projected for layer in plan.layers] == [not window for window in windows]
    with pytest.raises(UsageError, match="every layer has a sliding window"):
        plan_family("tale", inputs("Mistral"))


def test_a_hadamard_rotation_spreads_latents_and_changes_nothing_else():
    plain = at_share("palu", 0.25, heads=2)
    turned = at_share("palu", 0.25, heads=2, hadamard=True)
    for before, after in zip(groups_of(plain), groups_of(turned), strict=True):
        assert torch.allclose(after.down @ after.up.T, before.down @ before.up.T, atol=1e-5)
        energies = after.up.square().sum(0)
        assert (
            energies.max() / energies.min()
            < before.up.square().sum(0).max() / before.up.square().sum(0).min()
        )


def test_fisher_and_budget_need_their_measurements_and_use_them():
    for name in ("fisher", "budget"):
        with pytest.raises(UsageError, match=f"--allocation {name} "):
            plan_family("kq", inputs("Llama"), allocation=name)
    loud = {"keys": [[1.0, 1.0], [9.0, 1.0], [1.0, 1.0]], "values": [[1.0, 1.0]] * 3}
    fisher = plan_at(
        plan_family(
            "palu", with_weights("Llama", fisher=loud), heads=1, allocation="fisher", **FINE
        ),
        0.5,
    )
    ranks = [[group.rank for group in layer.keys.groups] for layer in fisher.layers]
    assert ranks[1][0] == 16 == max(map(max, ranks))
    assert ranks[1][1] < 16
    assert dim_rate(fisher) == 0.5
    budget = plan_family(
        "kq", with_weights("Llama", sensitivities=loud), allocation="budget", **FINE
    )
    quiet = plan_family(
        "kq",
        with_weights("Llama", sensitivities={"keys": [[1.0] * 2] * 3, "values": [[1.0] * 2] * 3}),
        allocation="budget",
        **FINE,
    )
    loud_rank = plan_at(budget, 0.5).layers[1].keys.groups[0].rank
    assert loud_rank > plan_at(quiet, 0.5).layers[1].keys.groups[0].rank


def test_measurements_of_another_shape_are_refused():
    short = {"keys": [[1.0] * 3] * 3, "values": [[1.0] * 2] * 3}
    with pytest.raises(UsageError, match="3 values for keys of layer 0"):
        plan_family("kq", with_weights("Llama", fisher=short), allocation="fisher")
    with pytest.raises(UsageError, match="keys of layer 2"):
        plan_family(
            "kq",
            with_weights("Llama", fisher={"keys": [[1, 1]] * 2, "values": []}),
            allocation="fisher",
        )


@pytest.mark.parametrize("arch", MLA)
@pytest.mark.parametrize("name", ["full", "fp8", "fdc", "palu", "tale", "strawman", "kivi", "h2o"])
def test_latent_attention_is_refused(arch, name):
    loaded = model(arch)
    with pytest.raises(UsageError, match="multi-head latent attention"):
        plan_family(name, MethodInputs(loaded.layout, loaded.fingerprint))


def test_what_is_missing_is_said():
    bare = MethodInputs(model("Llama").layout, model("Llama").fingerprint)
    with pytest.raises(UsageError, match="fdc needs calibration data"):
        plan_family("fdc", bare)
    other = MethodInputs(model("Llama").layout, "0" * 32, inputs("Llama").moments)
    with pytest.raises(UsageError, match="another model"):
        plan_family("fdc", other)
    with pytest.raises(UsageError, match=r"option values is one of svd-vo.*not 'nope'"):
        plan_family("fdc", inputs("Llama"), values="nope")
    with pytest.raises(
        UsageError, match=r"option allocation is one of removal, uniform.*not 'nope'"
    ):
        plan_family("fdc", inputs("Llama"), allocation="nope")


def test_removal_rate_is_fdcs_equation_one(seen):
    plan = plan_at(plan_family("fdc", inputs("Llama"), **FINE), 0.2)
    for head in range(2):
        stack = np.concatenate([group_queries(seen, head), seen["k"][head]])
        sizes = np.linalg.svd(stack, compute_uv=False)
        rank = plan.layers[LAYER].keys.groups[head].rank
        assert sizes[rank:].sum() <= 0.2 * sizes.sum() < sizes[rank - 1 :].sum()


def test_a_sensitivity_is_measured_with_one_target_cut_and_comes_back_as_a_weight(seen):
    family = plan_family("kq", inputs("Llama"), **FINE)
    assert len(family.targets) == 3 * 2 * 2
    chosen = next(
        i for i, t in enumerate(family.targets) if (t.layer, t.side, t.group) == (LAYER, "keys", 1)
    )
    ranks = [target.width for target in family.targets]
    ranks[chosen] = 5
    plan = family.at_ranks(ranks)
    assert dim_rate(plan) == pytest.approx(11 / (3 * 2 * 32))
    cut = plan.layers[LAYER].keys.groups[1]
    # The predicted error is the scaled scores' own, per query position and key position.
    scaling = model("Llama").layout.layers[LAYER].scaling
    predicted = float(family.targets[chosen].errors[5])
    assert predicted == pytest.approx(score_error(seen, 1, cut) * scaling**2 / 512**2, rel=1e-5)
    measured = [float(i == chosen) for i in range(len(family.targets))]
    weights = by_head(family.targets, measured)
    assert weights["keys"][LAYER] == [0.0, 1.0]
    assert (
        plan_family("kq", with_weights("Llama", sensitivities=weights), allocation="budget", **FINE)
        .build(0.8)
        .layers[LAYER]
        .keys.groups[1]
        .rank
        == 16
    )


def test_budget_pays_what_widths_cost():
    even = {"keys": [[1.0] * 2] * 3, "values": [[1.0] * 2] * 3}
    # Two width classes: 9 … 16 cost the same, so no rank between is worth its loss.
    classes = {rank: 1.0 if rank <= 8 else 2.0 for rank in range(1, 17)}
    costs = {"keys": classes, "values": classes}
    family = plan_family(
        "kq",
        with_weights("Llama", sensitivities=even, width_costs=costs),
        allocation="budget",
        **FINE,
    )
    plan = plan_at(family, 0.25)
    ranks = [g.rank for x in plan.layers for side in (x.keys, x.values) for g in side.groups]
    assert set(ranks) == {8, 16}
    assert ranks.count(16) == 6
    with pytest.raises(UsageError, match="values of width 1"):
        plan_family(
            "kq",
            with_weights("Llama", sensitivities=even, width_costs={"keys": classes}),
            allocation="budget",
            **FINE,
        )


def test_tale_is_measured_at_its_lower_level():
    family = plan_family("tale", inputs("Llama"), **FINE)
    assert {target.side for target in family.targets} == {"values"}
    plan = family.at_ranks([3] * 6)
    assert plan.layers[2].values.groups[1].ranks == (3, 16)


def test_the_raw_form_weighs_the_tokens_that_were_seen(seen):
    plan = at_share("fdc", 0.5, values="svd-vo-raw")
    stack = np.concatenate([seen["v"][0], group_outputs(seen, 0).T])
    right = np.linalg.svd(stack, full_matrices=False)[2][:8].T
    ours = plan.layers[LAYER].values.groups[0].down.double().numpy()
    np.testing.assert_allclose(ours @ ours.T, right @ right.T, atol=1e-5)


def test_keys_counted_once_per_kv_head_are_an_option(seen):
    plan = plan_at(plan_family("fdc", inputs("Llama"), keys="svd-qk-stacked", **FINE), 0.3)
    for head, group in enumerate(plan.layers[LAYER].keys.groups):
        stacked = np.concatenate([group_queries(seen, head), seen["k"][head]])
        _, _, turned = np.linalg.svd(stacked, full_matrices=False)
        kept = turned[: group.rank].T
        ours = group.down.double().numpy()
        np.testing.assert_allclose(ours @ ours.T, kept @ kept.T, atol=2e-5)


@pytest.mark.parametrize("name", ["fdc", "zack", "kq"])
def test_one_side_can_stay_at_full_rank(name):
    keys_only = plan_at(plan_family(name, inputs("Llama"), values="none", **FINE), 0.3)
    values_only = plan_at(plan_family(name, inputs("Llama"), keys="none", **FINE), 0.3)
    for one, other in zip(keys_only.layers, values_only.layers, strict=True):
        assert not one.values.projected
        assert one.keys.placement is Placement.POST_ROPE
        assert other.values.projected
        assert other.keys.placement is Placement.NONE
        assert all(group.identity for group in other.keys.groups)
    assert 0 < dim_rate(keys_only) < 0.5
    with pytest.raises(UsageError, match="keys=none"):
        plan_family(name, inputs("Llama"), keys="none", values="none")
