import pytest

from kvprof.methods.family import plan_at
from kvprof.methods.plan_report import compare_plans, describe
from kvprof.methods.registry import plan_family
from tests.methods.models import FINE
from tests.methods.models import deep_inputs as inputs
from tests.methods.models import deep_model as model


def told(name, knob, arch="Llama", **options):
    plan = plan_at(plan_family(name, inputs(arch), **options), knob)
    return describe(plan, 1000, layout=model(arch).layout)


def test_figures_agree_with_each_other():
    figures = told("fdc", 0.3, **FINE)
    stored = figures["bytes"]
    parts = sum(value for key, value in stored.items() if key not in ("total", "full"))
    assert parts == stored["total"]
    assert figures["rate"] == 1 - stored["total"] / stored["full"]
    assert figures["compression_ratio"] == pytest.approx(1 / (1 - figures["rate"]))
    assert figures["bytes_per_token"] == stored["total"] / 1000
    ranks = figures["ranks"]
    assert figures["dim_rate"] == 1 - sum(sum(map(sum, ranks[side])) for side in ranks) / (
        3 * 2 * 32
    )
    assert figures["weights"]["online"] > 0
    assert figures["made"]["calibration"]["tokens"] == 512


@pytest.mark.parametrize(
    ("name", "knob", "arch", "options", "sentences"),
    [
        (
            "full",
            0,
            "Llama",
            {},
            [
                "Keys of 3 of 3 layers are stored as they are",
                "Values of 3 of 3 layers are stored as they are",
            ],
        ),
        ("fp8", 8, "Llama", {}, ["FP8 (e4m3)"]),
        (
            "fdc",
            0.2,
            "Llama",
            FINE,
            [
                "projected after RoPE; queries meet them in the latent; online",
                "Values of 3 of 3 layers are projected: folded into W_V and W_O",
            ],
        ),
        ("zack", 0.2, "SmolLM3", FINE, ["Keys of 1 of 3 layers", "folded into W_K and W_Q"]),
        (
            "palu",
            0.2,
            "Llama",
            {**FINE, "heads": 2},
            [
                "projected before RoPE and rebuilt at every use; folded into W_K",
                "shared by up to 2 heads",
            ],
        ),
        (
            "tale+kivi",
            0.5,
            "Llama",
            FINE,
            [
                "2 rank levels, oldest first (90%, 10%)", "The first 4 tokens stay",
                "(lazy)", "Keys have 2/4 bits", "32 tokens share", "newest 128 to 159 tokens",
                "folded into W_O; the projection online",
            ],
        ),
        ("strawman", 0.5, "Llama", FINE, ["rebuilt in full at every decode step"]),
        (
            "fdc+keyformer",
            0.2,
            "Llama",
            FINE,
            ["chosen before compression", "30% of them the newest"],
        ),
        ("kvquant", 4, "Llama", {}, ["1.0% of each row are kept apart"]),
        ("per-token", 4, "Llama", {}, ["of 8 of a head's 8 pairs; scores", "(by age)"]),
        ("per-token", 4, "Llama", {"centre": 3}, ["of 3 of a head's 8 pairs"]),
        ("kivi", 4, "Llama", {}, ["(prefill uncompressed)"]),
    ],
)  # fmt: skip
def test_it_says_what_is_stored_folded_and_run(name, knob, arch, options, sentences):
    text = " ".join(told(name, knob, arch, **options)["sentences"])
    for sentence in sentences:
        assert sentence in text


def test_ranks_count_the_columns_that_have_bits():
    plan = plan_at(plan_family("kq-wf", inputs("Llama"), grid=4, allocation="output"), 0.8)
    figures = describe(plan, 1000)
    assert figures["across"] is None
    kept = 0
    for side in ("keys", "values"):
        for layer, ranks in zip(plan.layers, figures["ranks"][side], strict=True):
            for group, rank in zip(getattr(layer, side).groups, ranks, strict=True):
                assert rank == sum(count for count, bits in group.column_bits if bits)
                kept += rank
    assert figures["dim_rate"] == 1 - kept / (3 * 2 * 32)
    assert 0 < kept < 3 * 2 * 32


@pytest.mark.parametrize("name", ["xkv", "kvtc"])
def test_what_layers_keep_together_is_told_latent_by_latent(name):
    plan = plan_at(plan_family(name, inputs("Llama")), 0.9)
    figures = describe(plan, 1000)
    found = figures["across"]
    assert sum(one["layers"] for one in found if one["side"] == "keys") == len(plan.layers)
    assert sum(one["width"] for one in found) == 3 * 2 * 32
    kept = sum(one["kept"] * one["layers"] for one in found)
    assert 0 < kept < 3 * sum(one["width"] for one in found)
    assert figures["dim_rate"] == pytest.approx(
        1 - sum(one["kept"] for one in found) / sum(one["width"] for one in found)
    )


def test_plans_differ_where_they_differ():
    families = {
        name: plan_family(name, inputs("Llama"), allocation="uniform", **FINE)
        for name in ("fdc", "kq")
    }
    one = plan_at(families["fdc"], 0.5)
    assert compare_plans(one, plan_at(families["fdc"], 0.5)) == {}
    other = plan_at(families["fdc"], 0.25)
    differences = compare_plans(one, other)
    assert differences["layers.0.keys.groups.0.ranks.0"] == (8, 12)
    assert all("ranks" in path for path in differences)
    assert compare_plans(one, plan_at(families["kq"], 0.5)) == {"method": ("fdc", "kq")}


def test_plans_of_the_same_shape_differ_in_their_matrices():
    one, other = (
        plan_at(plan_family("fdc", inputs("Llama", tokens=n), allocation="uniform", **FINE), 0.5)
        for n in (512, 7)
    )
    differences = compare_plans(one, other)
    assert {path.split(".")[-1] for path in differences} == {"difference"}
    assert all(before == 0 < after for before, after in differences.values())
