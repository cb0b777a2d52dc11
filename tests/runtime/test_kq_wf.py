"""``kq-wf`` against its formula: bases, bits, bytes and what attention reads, in plain numpy."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprof.analysis.moments import LossMoments, joint_gram
from kvprof.analysis.uniform import uniform_distortion, uniform_step
from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, dim_rate, paper_rate
from kvprof.methods.family import by_head, plan_at, plan_for_rate
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import describe
from kvprof.methods.quantisers import normal_levels
from kvprof.methods.registry import plan_family
from kvprof.methods.soundness import head_kinds
from kvprof.runtime.backends.support import kernel_reasons
from kvprof.runtime.compressed import compressed
from tests.methods.models import inputs, model, with_weights
from tests.models.tiny import token_ids
from tests.runtime.calibrated import Array, known, one_layer
from tests.runtime.test_formula import attention_outputs, heads_out, relative, taps

OWN = {"allocation": "output"}


def made(arch="Llama", knob=0.8, **options):
    return plan_at(plan_family("kq-wf", known(arch)[0], grid=4, **OWN, **options), knob)


def sides(plan, layer=0):
    return (("keys", plan.layers[layer].keys.groups), ("values", plan.layers[layer].values.groups))


def e4m3(x: float) -> float:
    exponent = max(math.floor(math.log2(x)), -6)
    step = 2.0 ** (exponent - 3)
    return round(x / step) * step


def known_levels(kind: str, bits: int) -> Array:
    """Return Lloyd's and Max's levels, or Max's (1960, table II) at equal distances."""
    if kind == "lloyd-max":
        return normal_levels(bits).double().numpy()
    step = {2: 0.9957, 3: 0.5860, 4: 0.3352, 8: 0.03076}[bits]
    assert uniform_step(bits) == pytest.approx(step, abs=6e-5)
    return uniform_step(bits) * (np.arange(2**bits) - (2**bits - 1) / 2)


def quantised(z: Array, runs: tuple[tuple[int, int], ...], kind: str) -> Array:
    """Quantise one token's latent by hand."""
    out, start = np.zeros_like(z), 0
    stored = sum(width for width, bits in runs if bits)
    scale = e4m3(math.sqrt(float(np.square(z[:stored]).mean())))
    for width, bits in runs:
        if bits:
            levels = known_levels(kind, bits)
            part = z[start : start + width]
            nearest = np.abs(part[:, None] / scale - levels).argmin(1)
            out[start : start + width] = scale * levels[nearest]
        start += width
    return out


@pytest.mark.parametrize("kind", ["uniform", "lloyd-max"])
def test_a_step_reads_old_tokens_as_quantised_and_the_others_as_they_were(kind: str) -> None:
    model_, prefill, length, sink, window = one_layer("Llama"), 40, 44, 3, 5
    ids = token_ids(1, length)
    plan = made(sink=sink, window=window, levels=kind)
    tap = taps(model_, ids, pre_rope=False)
    exact = heads_out(model_, tap.q, tap.k, tap.v)
    rows = []
    for query in range(prefill, length):
        keys, values = tap.k.double().clone(), tap.v.double().clone()
        for (_, groups), states in zip(sides(plan), (keys, values), strict=True):
            for head, group in enumerate(groups):
                down, up = (x.double().numpy() for x in (group.down, group.up))
                for token in range(sink, query - window):
                    z = states[0, head, token].numpy() @ down
                    states[0, head, token] = torch.from_numpy(
                        quantised(z, group.column_bits, kind) @ up.T
                    )
        rows.append(heads_out(model_, tap.q, keys, values)[:, query])
    wanted = torch.stack(rows, dim=1)
    found = attention_outputs(model_, plan, ids, prefill=prefill)
    assert relative(found[:, :prefill], exact[:, :prefill]) < 1e-5
    assert relative(found[:, prefill:], wanted) < 1e-4
    assert relative(exact[:, prefill:], wanted) > 3e-2


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_equal_distances_lose_least_at_their_step(bits: int) -> None:
    """Against a sum over a fine grid of a normal variable, and against other steps."""
    x = np.linspace(-9, 9, 400_001)
    density = np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def lost(step: float) -> float:
        codes = np.clip(np.floor(x / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return float((np.square(x - step * (codes + 0.5)) * density).sum())

    own = uniform_step(bits)
    assert uniform_distortion(bits) == pytest.approx(lost(own), rel=1e-4)
    assert lost(own) < min(lost(0.99 * own), lost(1.01 * own))


@pytest.mark.parametrize("hadamard", [True, False])
def test_columns_are_the_optimal_pairs_and_those_of_equal_bits_alike(hadamard: bool) -> None:
    """Zeroed 0-bit columns lose the tail of the product; a run's columns have mean squares of 1."""
    plan, vectors = made(hadamard=hadamard), known("Llama")[1]
    heads = plan.layers[0].kv_heads
    each = len(vectors["q"]) // heads
    for side, groups in sides(plan):
        for head, group in enumerate(groups):
            stored = vectors["k" if side == "keys" else "v"][head]
            others = vectors["q" if side == "keys" else "w_o"][head * each : (head + 1) * each]
            joined = np.concatenate([x if side == "keys" else x.T for x in others])
            product = np.linalg.qr(stored)[1] @ np.linalg.qr(joined)[1].T
            tail = np.square(np.linalg.svd(product, compute_uv=False))
            down, up = (x.double().numpy() for x in (group.down, group.up))
            assert np.allclose(down @ up.T, np.eye(16), atol=1e-4)
            latent = stored @ down
            kept = sum(width for width, bits in group.column_bits if bits)
            error = stored - latent[:, :kept] @ up[:, :kept].T
            assert np.square(error @ joined.T).sum() == pytest.approx(tail[kept:].sum(), rel=1e-3)
            assert np.square(latent[:, :kept]).mean(0) == pytest.approx(1, rel=1e-3)
            if not hadamard:
                continue
            start = 0
            for width, bits in group.column_bits:
                columns = slice(start, start + width)
                start += width
                if bits and width & (width - 1) == 0:
                    # What noise in a column does to the product is the same for all that are mixed.
                    weight = np.square(joined @ up[:, columns]).sum(0)
                    assert weight == pytest.approx(weight.mean(), rel=1e-3)


def test_values_of_several_heads_share_the_best_latent_for_outputs_on_their_own() -> None:
    """Heads' errors taken apart: the least of ``Σ_h ‖E_h W_O^h‖²`` that so many columns leave."""
    plan, vectors = made(heads=2, hadamard=False), known("Llama")[1]
    (group,) = plan.layers[0].values.groups
    assert (group.heads, group.rank) == (2, 32)
    values = np.concatenate(list(vectors["v"]), axis=1)
    outputs = np.zeros((32, 0))
    for head in range(len(vectors["w_o"])):
        first = 16 * (head // (len(vectors["w_o"]) // 2))
        block = np.zeros((32, vectors["w_o"].shape[-1]))
        block[first : first + 16] = vectors["w_o"][head]
        outputs = np.concatenate([outputs, block], axis=1)
    product = np.linalg.qr(values)[1] @ outputs
    tail = np.square(np.linalg.svd(product, compute_uv=False))
    kept = sum(width for width, bits in group.column_bits if bits)
    down, up = (x.double().numpy() for x in (group.down, group.up))
    error = values - values @ down[:, :kept] @ up[:, :kept].T
    assert np.square(error @ outputs).sum() == pytest.approx(tail[kept:32].sum(), rel=1e-3)


def test_bytes_are_counted_by_hand_and_are_those_that_lie_in_the_cache() -> None:
    sink, window, tokens = 3, 5, 40
    plan = made(sink=sink, window=window)
    wanted = 0
    for _, groups in sides(plan):
        for group in groups:
            row = 1 + sum(math.ceil(width * bits / 8) for width, bits in group.column_bits)
            wanted += (tokens - sink - window) * row + (sink + window) * 16 * 8
    assert bytes_at(plan, tokens, itemsize=8).total == wanted
    with compressed(one_layer("Llama"), plan) as session, torch.inference_mode():
        cache = session.new_cache()
        one_layer("Llama").model(token_ids(2, tokens - 2), past_key_values=cache)
        for t in range(2):
            one_layer("Llama").model(token_ids(2, tokens)[:, t : t + 1], past_key_values=cache)
    assert cache.nbytes == 2 * wanted
    runs = [run for _, groups in sides(plan) for group in groups for run in group.column_bits]
    columns = sum(width for width, _ in runs)
    assert paper_rate(plan) == pytest.approx(1 - sum(n * b for n, b in runs) / (16 * columns))
    assert dim_rate(plan) == pytest.approx(1 - sum(n for n, b in runs if b) / columns)


@pytest.mark.parametrize("heads", [1, 0])
def test_a_saved_plan_generates_what_it_did_before_from_the_bytes_it_counts(
    tmp_path: Path, heads: int
) -> None:
    loaded, prompt, new = model("Llama"), token_ids(2, 30), 9
    family = plan_family("kq-wf", inputs("Llama"), grid=4, sink=2, window=4, heads=heads, **OWN)

    def generated() -> tuple[torch.Tensor, torch.Tensor]:
        found = loaded.model.generate(
            prompt,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        return found.sequences, torch.stack(found.scores)

    tokens, scores = generated()
    for knob, error in ((0.0, 1e-2), (0.7, 1.0)):  # 8 bits each; 2.4 on average
        plan, path = plan_at(family, knob), tmp_path / f"{knob}"
        save_plan(plan, path)
        again = load_plan(path, fingerprint=loaded.fingerprint, layout=loaded.layout)
        found = []
        for one in (plan, again):
            with compressed(loaded, one) as session:
                found.append(generated())
                # What was generated last has not been fed back.
                wanted = bytes_at(one, 30 + new - 1, itemsize=loaded.dtype.itemsize, batch=2)
                assert session.cache.nbytes == wanted.total
        assert torch.equal(found[0][1], found[1][1])
        assert knob or torch.equal(found[1][0], tokens)
        assert error / 100 < relative(found[1][1], scores) < error


def test_what_an_exact_window_covers_is_exact() -> None:
    plan = made(window=64, sink=0, knob=1.0)
    ids = token_ids(1, 50)
    tap = taps(one_layer("Llama"), ids, pre_rope=False)
    exact = heads_out(one_layer("Llama"), tap.q, tap.k, tap.v)
    found = attention_outputs(one_layer("Llama"), plan, ids, prefill=30)
    assert relative(found, exact) < 1e-5


@pytest.mark.parametrize("wanted", [0.6, 0.8, 0.9])
def test_a_rate_is_met_from_above_and_hardly_exceeded(wanted: float) -> None:
    plan = plan_for_rate(plan_family("kq-wf", inputs("Llama"), grid=4, **OWN), wanted, 900)
    assert wanted <= describe(plan, 900)["rate"] < wanted + 0.01


def test_measured_weights_move_bits_to_where_they_count() -> None:
    family = plan_family("kq-wf", inputs("Llama"), grid=4, **OWN)
    figures = [1.0] * len(family.targets)
    figures[0] = 1e6
    given = with_weights("Llama", layers=2, sensitivities=by_head(family.targets, figures))
    plan = plan_at(plan_family("kq-wf", given, grid=4, allocation="budget"), 0.85)
    most = plan.layers[0].keys.groups[0].column_bits
    others = [
        group.column_bits
        for index in (0, 1)
        for _, groups in sides(plan, index)
        for group in groups
    ]
    sizes = [sum(width * bits for width, bits in runs) for runs in others]
    assert sum(width * bits for width, bits in most) == max(sizes)
    with pytest.raises(UsageError, match="measured sensitivities"):
        plan_family("kq-wf", inputs("Llama"), allocation="budget").build(0.5)
    with pytest.raises(UsageError, match="moments of the loss"):
        plan_family("kq-wf", inputs("Llama"))


@pytest.mark.parametrize("heads", [1, 2])
def test_pairs_of_the_loss_predict_what_a_dropped_column_costs(heads: int) -> None:
    """Errors at every rank are tr(F E), E the moment of what the best truncation leaves out."""
    given = inputs("Llama")
    assert given.moments is not None
    facts = given.layout.layers[0]
    width, layers = facts.num_kv_heads * facts.v_head_dim, len(given.layout.layers)
    generator = torch.Generator().manual_seed(3)
    roots = torch.randn(layers, 2, width, width, generator=generator, dtype=torch.float64)
    grams = roots @ roots.mT
    size = facts.qk_head_dim
    loss = LossMoments(
        tuple(
            torch.stack([x[0, s : s + size, s : s + size] for s in range(0, width, size)])
            for x in grams
        ),
        tuple(x[1] for x in grams),
    )
    family = plan_family("kq-wf", replace(given, loss=loss), grid=4, heads=heads, sink=0, window=0)
    assert family.at_ranks is not None
    whole = family.at_ranks([target.width for target in family.targets])
    rest = given.moments.layers[0]
    for target in (x for x in family.targets if x.layer == 0):
        group = dict(sides(whole))[target.side][target.group]
        down, up = (x.double() for x in (group.down, group.up))
        own = slice(target.group * target.width, (target.group + 1) * target.width)
        if target.side == "keys":
            stored, cost = rest.gram("k")[target.group], loss.keys[0][target.group]
        else:
            joint = joint_gram(rest, "v", 2)[0]
            stored, cost = joint[own, own], loss.values[0][own, own]
        for rank in (0, target.width // 2, target.width - 1):
            left = torch.eye(target.width).double() - down[:, :rank] @ up[:, :rank].mT
            lost = float((left.mT @ (stored / given.moments.tokens) @ left @ cost).trace())
            assert lost == pytest.approx(float(target.errors[rank]), rel=1e-3)
            # Nothing of that rank does better: the product's singular values say what is left.
            left_of = torch.linalg.eigvals(stored / given.moments.tokens @ cost).real
            best = left_of.sort(descending=True).values[rank:].sum()
            assert lost == pytest.approx(float(best), rel=1e-3)


def test_scores_count_as_they_are_and_outputs_beside_the_layers_own() -> None:
    given = inputs("Llama")
    assert given.moments is not None

    def bits(**times: float) -> list[list[int]]:
        """Return the bits of each side of each layer, where layer 0 has larger moments."""
        first, *others = given.moments.layers
        larger = {key: tensor * times.get(key, 1.0) for key, tensor in first.rest.items()}
        start = {key: tensor * times.get(key, 1.0) for key, tensor in first.first.items()}
        first = replace(first, rest=larger, first=start, c_o=first.c_o * times.get("o_proj", 1.0))
        moments = replace(given.moments, layers=[first, *others])
        plan = plan_at(plan_family("kq-wf", replace(given, moments=moments), grid=4, **OWN), 0.8)
        return [
            [sum(n * b for group in groups for n, b in group.column_bits) for _, groups in both]
            for both in (sides(plan, layer) for layer in range(len(plan.layers)))
        ]

    plain = bits()
    assert bits(o_proj=100.0) == plain
    # Scores ten times as large have errors ten times as large, and each moves a softmax alike.
    keys, values = bits(q=100.0)[0]
    assert keys > plain[0][0]
    assert values <= plain[0][1]


def test_heads_are_of_as_few_kinds_as_asked() -> None:
    plans = {
        kinds: plan_at(plan_family("kq-wf", inputs("Llama"), grid=4, kinds=kinds, **OWN), 0.8)
        for kinds in (0, 1, 2)
    }
    assert len(head_kinds(plans[1])) == 1
    assert len(head_kinds(plans[2])) <= 2 < len(head_kinds(plans[0]))
    sizes = [bytes_at(plan, 500, itemsize=2).total for plan in plans.values()]
    assert max(sizes[1:]) <= sizes[0]


def test_heads_of_a_layer_have_the_same_bits_if_asked() -> None:
    plans = {
        alike: plan_at(plan_family("kq-wf", inputs("Llama"), grid=4, alike=alike, **OWN), 0.8)
        for alike in (False, True)
    }
    kinds = {
        alike: [len(head_kinds(replace(plan, layers=(layer,)))) for layer in plan.layers]
        for alike, plan in plans.items()
    }
    assert max(kinds[False]) > 1
    assert set(kinds[True]) == {1}
    assert len(head_kinds(plans[True])) > 1
    own, shared = (bytes_at(plan, 256, itemsize=2).total for plan in plans.values())
    assert shared == pytest.approx(own, rel=0.1)


def test_layers_with_a_sliding_window_are_left_where_newest_tokens_are_exact() -> None:
    plan = plan_at(plan_family("kq-wf", inputs("Gemma3"), grid=4, window=8, **OWN), 0.8)
    for layer in plan.layers:
        groups = (*layer.keys.groups, *layer.values.groups)
        assert all(bool(g.column_bits) is (layer.sliding_window is None) for g in groups)
    plan = plan_at(plan_family("kq-wf", inputs("Gemma3"), grid=4, window=0, **OWN), 0.8)
    both = [(*layer.keys.groups, *layer.values.groups) for layer in plan.layers]
    assert all(group.column_bits for group in itertools.chain(*both))


def test_kernels_run_uniform_levels_and_say_why_not_the_others() -> None:
    loaded = model("Llama")
    for options, reason in (
        ({"levels": "lloyd-max"}, "latents are quantised by lloyd-max-rms"),
        ({}, None),
    ):
        plan = plan_at(plan_family("kq-wf", inputs("Llama"), grid=16, **OWN, **options), 0.5)
        reasons = kernel_reasons(plan, loaded.layout, loaded.device, loaded.dtype, loaded)
        assert set(reasons) == {reason}
