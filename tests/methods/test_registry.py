"""Methods by name, combinations, options, and a method that somebody else installs."""

import math
import re
from dataclasses import replace

import pytest

from kvprof.errors import FailedError, UsageError
from kvprof.methods.accounting import bytes_at, dim_rate, rate
from kvprof.methods.evictors import EVICTORS
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.named import (
    COMBINATIONS,
    METHOD_NAMES,
    MODIFIERS,
    PAPERS,
    check_names,
    method_names,
    papers_named,
)
from kvprof.methods.plan_report import compare_plans, describe, ranks_of
from kvprof.methods.quantisers import QUANTISERS
from kvprof.methods.registry import METHODS, calibration_needs, plan_family
from kvprof.methods.soundness import check_fits
from kvprof.methods.storage import LIBRARIES, SideQuantiser
from tests.methods.documented import example
from tests.methods.models import BLOCKS, FINE, inputs, model

CONTEXT = 4096


def family(name, arch="Llama", **options):
    return plan_family(name, inputs(arch), **options)


def at_rate(name, wanted, arch="Llama", **options):
    return plan_for_rate(family(name, arch, **options), wanted, CONTEXT)


def skip_without_library(name):
    if name in LIBRARIES:
        module = LIBRARIES[name].module.partition(".")[0]
        pytest.importorskip(module, reason=f"{LIBRARIES[name].package} is not installed")


def fine(name):
    if name == "kq-wf":  # without a measurement, and of no smallest rank
        return {"grid": 1, "allocation": "output"}
    needs_ranks = name.startswith(("fdc", "zack", "palu", "tale", "kq", "svd", "strawman"))
    return {**(FINE if needs_ranks else {}), **({"heads": 2} if name.startswith("palu") else {})}


# Of types of engines, those that do not take heads of 12 or 16 columns.
UNFIT = (*BLOCKS, "int4_per_token_head")


@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "OPT", "Gemma2", "GptOss"])
@pytest.mark.parametrize("name", [n for n in (*METHODS, *COMBINATIONS) if n not in UNFIT])
def test_every_listed_name_plans_and_fits(name, arch):
    skip_without_library(name)
    options = fine(name)
    plans = family(name, arch, **options)
    least = rate(plans.build((plans.settings or plans.bounds)[0]), CONTEXT)
    wanted = 0.3 if plans.at_rate is not None else max(0.3, least + 0.02)
    plan = plan_for_rate(plans, wanted, CONTEXT, alone=False)
    check_fits(plan, model(arch).layout, model(arch).fingerprint)
    assert plan.method == name
    assert plan.made["model"] == arch
    if len(plans.settings) != 1:
        assert wanted <= rate(plan, CONTEXT) + 1e-9
        assert plan.made["rate_asked"] == wanted


def test_a_quantised_variant_has_the_ranks_that_its_own_rate_leaves():
    for name in ("fdc-4bit", "fdc+kvquant"):
        plan = at_rate(name, 0.75, **FINE)
        assert 0.75 <= rate(plan, CONTEXT) < 0.77
        same = plan_at(family("fdc", **FINE), plan.made["removal_rate"])
        assert ranks_of(plan) == ranks_of(same)
    assert at_rate("fdc-2bit", 0.75, **FINE).quantiser.keys.bits == (2,)
    assert at_rate("fdc+kivi", 0.5, bits=8, **FINE).quantiser.values.bits == (8,)


def test_eviction_and_compression_keep_the_same_share_and_reach_the_bytes():
    plan = at_rate("fdc+sink-recent", 0.51, **FINE)
    assert plan.eviction.keep == pytest.approx(0.7, abs=0.01)
    assert 1 - dim_rate(plan) == pytest.approx(0.7, abs=0.02)
    assert rate(plan, CONTEXT) >= 0.51
    # Scores of Keyformer are bytes too: they are made up for.
    scored = at_rate("fdc+keyformer", 0.51, **FINE)
    assert scored.eviction.keep < plan.eviction.keep
    assert 0.51 <= rate(scored, CONTEXT) < 0.53
    assert bytes_at(scored, CONTEXT, itemsize=2).eviction > 0


def test_the_kept_share_can_be_told():
    plan = at_rate("fdc+sink-recent", 0.5, keep=0.8, **FINE)
    assert plan.eviction.keep == 0.8
    assert dim_rate(plan) == pytest.approx(0.375, abs=0.02)
    with pytest.raises(UsageError, match=r"keep=0.4 .* 0.5"):
        at_rate("fdc+sink-recent", 0.5, keep=0.4, **FINE)
    with pytest.raises(UsageError, match=r"keep: 1.5 "):
        at_rate("fdc+h2o", 0.5, keep=1.5)
    by_knob = plan_at(family("fdc+sink-recent", allocation="uniform", **FINE), 0.25)
    assert by_knob.eviction.keep == 1 - dim_rate(by_knob) == 0.75


def test_fdc_evicts_first_and_zack_compresses_first():
    orders = {
        name: plan_at(family(f"{name}+keyformer", **fine(name)), 0.2).eviction.order
        for name in ("fdc", "palu", "zack", "kq")
    }
    assert orders == {
        "fdc": "evict_first",
        "palu": "evict_first",
        "zack": "compress_first",
        "kq": "compress_first",
    }


def test_what_scores_a_prompt_exactly_folds_no_keys():
    plan = plan_at(family("palu+keyformer", heads=2, **FINE), 0.2)
    assert not any(layer.keys.fold_down for layer in plan.layers)
    assert all(layer.values.fold_down for layer in plan.layers)
    recent = plan_at(family("palu+sink-recent", heads=2, **FINE), 0.2)
    assert all(layer.keys.fold_down for layer in recent.layers)


@pytest.mark.parametrize("name", ["hadamard-int4+h2o", "per-token+sink-recent", "kq+kivi"])
@pytest.mark.parametrize("centre", [None, False, True])
def test_a_combination_is_centred_as_it_is_told_and_by_default_not(name, centre):
    own = {**(FINE if name.startswith("kq") else {}), "skip": (1,)}
    options = own if centre is None else {**own, "centre": centre}
    made = plan_family(name, inputs("Llama"), **options)
    plan = made.build((made.settings or (0.3,))[0])
    assert [layer.centre is not None for layer in plan.layers] == [centre is True, False]


def test_three_together():
    plan = at_rate("kq+h2o-4bit", 0.7, **FINE)
    assert 0.7 <= rate(plan, CONTEXT) < 0.71
    assert plan.eviction is not None
    assert plan.quantiser.keys.bits == (4,)
    assert plan.method == "kq+h2o-4bit"


@pytest.mark.parametrize(
    ("name", "group", "bits"),
    [
        ("palu-3bit", None, 3 + 32 / 16),  # the paper's: one scale and zero a row of 16 columns
        ("palu:paper-3bit", None, 3 + 32 / 16),
        ("palu-3bit-g4", 4, 3 + 32 / 4),
        ("palu-3bit-g32", 32, 3 + 32 / 16),
        ("fdc-3bit", 32, None),
        ("fdc-3bit-row", None, None),
        ("fdc:paper-3bit-g8", 8, None),
    ],
)
def test_what_shares_a_scale_is_part_of_the_name_and_palus_is_its_row(name, group, bits):
    options = {"heads": 2} if name.startswith("palu") else {}
    plan = plan_at(family(name, **options, grid=1, minimum=1, allocation="uniform"), 0.5)
    assert plan.method == name
    assert plan.quantiser.keys == plan.quantiser.values == SideQuantiser((3,), "token", group)
    if bits is not None:
        stored = bytes_at(plan, 64, itemsize=2).total * 8
        columns = sum(
            g.rank
            for layer in plan.layers
            for side in (layer.keys, layer.values)
            for g in side.groups
        )
        assert stored == pytest.approx(64 * columns * bits)


def test_a_papers_setting_is_the_method_with_its_options_and_says_what_differs():
    plan = plan_at(family("zack:paper"), 0.3)
    assert (plan.method, plan.made["options"]["values"]) == ("zack:paper", "svd-vo-raw")
    assert plan.made["options"]["grid"] == 1
    plain = plan_at(family("zack", values="svd-vo-raw", **FINE), 0.3)
    assert list(compare_plans(plan, plain)) == ["method"]
    told = " ".join(describe(plan, 64)["sentences"])
    assert "zack:paper differs from the paper: Calibrated on the calibration text" in told
    # What an option changes no longer differs.
    differs = [
        plan_at(family("fdc:paper", **own), 0.3).made["paper"]["differs"]
        for own in ({}, {"values": "weight-v"}, {"values": "weight-v", "keys": "svd-qk-literal"})
    ]
    assert [len(one) for one in differs] == [2, 1, 0]
    combined = plan_at(family("palu:paper+keyformer", heads=2), 0.2)
    assert combined.method == "palu:paper+keyformer"
    assert combined.eviction.order == "evict_first"
    for other in ("fdc:papers", "kq:paper", "fdc:paper:paper"):
        with pytest.raises(UsageError, match="is unknown"):
            family(other)


def test_papers_settings_are_found_in_commands():
    command = "frontier reference --methods fdc:paper,tale+kivi:paper:grid=64,palu:paper-3bit,kq"
    assert list(papers_named(command.split())) == ["fdc:paper", "palu:paper", "tale+kivi:paper"]
    assert papers_named(["fdc:papers", "xfdc:paper", "fdc-paper"]) == {}


def test_tale_has_kivis_window_or_none():
    for window in (128, 0):
        plan = plan_at(family("tale+kivi", window=window, **FINE), 0.5)
        assert (plan.quantiser.window, plan.made["options"]["window"]) == (window, window)
    assert plan_at(family("tale+kivi:paper"), 0.5).quantiser.window == 128


def test_a_rotation_is_folded_once():
    plain = plan_at(family("palu", heads=2, hadamard=True, **FINE), 0.4)
    for plan in (
        plan_at(family("palu-4bit", heads=2, hadamard=True, **FINE), 0.4),
        plan_for_rate(
            family("palu-4bit", heads=2, hadamard=True, **FINE),
            rate(plan_at(family("palu-4bit", heads=2, hadamard=True, **FINE), 0.4), CONTEXT),
            CONTEXT,
        ),
    ):
        ours, theirs = plan.layers[0].values.groups[0], plain.layers[0].values.groups[0]
        assert ours.rank == theirs.rank
        assert ours.up.equal(theirs.up)


def test_kvquant_leaves_the_first_token_and_tales_levels_move_by_whole_blocks():
    assert at_rate("kvquant", 0.3).levels.sink == 1
    tale = plan_at(family("tale+kvquant", **FINE), 0.5)
    assert (tale.levels.sink, tale.levels.batch) == (4, 64)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "'nope' is unknown; choose from full, fp8, fdc"),
        ("kq:grid=32", "kq.* --option grid=32"),
        ("fdc+nope", "'fdc\\+nope' is unknown"),
        ("nope-4bit", "'nope-4bit' is unknown"),
        ("fdc-5bit", "unknown"),
        ("kivi+h2o", "per token"),
        ("fp8-4bit", "fp8"),
        ("h2o+keyformer", "h2o"),
        ("kivi-3bit", "kivi"),
    ],
)
def test_what_makes_no_sense_is_refused(name, message):
    with pytest.raises(UsageError, match=message):
        family(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fdc", {"heads": 4}, "fdc has no option heads: it has keys, values, allocation, grid"),
        ("full", {"grid": 4}, "full has no option grid: it has none"),
        ("full", {"skip": (0,)}, "full has no option skip"),
        ("fdc-4bit", {"bits": 2}, "fdc-4bit has no option bits"),
        ("fdc-4bit", {"keep": 0.5}, "fdc-4bit has no option keep"),
        ("kq-wf-4bit", {"allocation": "output"}, "kq"),
        ("fdc+kvquant", {"nope": 1}, "fdc has no option nope"),
        ("fdc+kivi", {"bits": 5}, r"option bits is one of 8, 4, 3, 2, or k8v4 .*, not '5'"),
    ],
)
def test_an_option_that_does_nothing_is_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        plan_at(family(name, **options), 0.0)


def test_what_each_method_must_be_calibrated_with():
    assert (
        calibration_needs("full") is calibration_needs("h2o") is calibration_needs("kivi") is None
    )
    assert calibration_needs("strawman") is None
    assert calibration_needs("kq-4bit").source == "calibration"
    assert calibration_needs("fdc:paper-4bit").source == "random:8k"
    palu = calibration_needs("palu+keyformer")
    assert (palu.source, palu.pre_rope, palu.joint_heads) == ("calibration", True, 4)
    assert calibration_needs("palu", heads=1).joint_heads is None
    assert calibration_needs("palu", heads=0).joint_heads >= 1024
    assert calibration_needs("tale+kivi", heads=4).joint_heads == 4
    assert calibration_needs("tale").joint_heads is None
    zack = calibration_needs("zack:paper+keyformer")
    assert (zack.source, zack.tokens) == ("calibration", 57_344)
    assert calibration_needs("zack").source == "calibration"
    assert calibration_needs("palu:paper-3bit", heads=4).fisher_tokens == 2048 * 1024
    with pytest.raises(UsageError, match="unknown"):
        calibration_needs("nope")


def test_the_documented_method_installs_and_runs(site):
    assert len(example()[0].splitlines()) <= 30
    assert "keys-only" in method_names()
    assert calibration_needs("keys-only").source == "calibration"
    plan = at_rate("keys-only", 0.25)
    assert dim_rate(plan) == 0.25
    assert at_rate("keys-only-4bit", 0.7).quantiser is not None
    assert at_rate("keys-only+h2o", 0.25).method == "keys-only+h2o"
    with pytest.raises(UsageError, match="keys-only has no option nope: it has smallest"):
        family("keys-only", nope=1)


def test_a_method_that_cannot_be_loaded_is_named(site):
    (site / "entry_points.txt").write_text("[kvprof.methods]\nbroken = keys_only:missing\n")
    with pytest.raises(FailedError, match=r"method broken \(keys_only:missing\) cannot be loaded"):
        family("broken")


def test_an_installed_method_cannot_take_the_name_of_another(site):
    (site / "entry_points.txt").write_text("[kvprof.methods]\nfdc = keys_only:keys_only\n")
    with pytest.raises(FailedError, match=r"the installed method fdc \(keys_only:keys_only\)"):
        family("fdc")


def test_the_names_that_commands_know_without_torch_are_those_that_there_are() -> None:
    assert tuple(METHODS) == METHOD_NAMES
    assert (*QUANTISERS, *EVICTORS) == MODIFIERS
    check_names([*method_names(), "palu-3bit", "svd-kv+kivi", "fdc+h2o+kvquant"])


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("kqq", "kq"), ("kq-4bits", "kq-4bit"), ("pallu", "palu"), ("fdc+keyfromer", "fdc+keyformer")],
)
def test_an_unknown_name_is_told_the_nearest(wrong: str, near: str) -> None:
    for refuse in (lambda: check_names([wrong]), lambda: calibration_needs(wrong)):
        with pytest.raises(UsageError, match=re.escape(f"did you mean {near}?")):
            refuse()


@pytest.mark.parametrize("name", ["kvzap", "Expected_Attention", "fdc+expected-attention"])
def test_what_only_kvpress_has_is_told_with_why_it_is_not_here(name: str) -> None:
    with pytest.raises(UsageError, match=r"kvpress.* 5\.3"):
        check_names([name])


def test_no_papers_own_setting_limits_the_kinds_of_head() -> None:
    assert {setting.method for setting in PAPERS.values()} > {"fdc", "zack", "palu", "tale"}
    for name, setting in PAPERS.items():
        made = family(setting.method, **setting.options).build(0.0).made
        assert made["options"].get("kinds", 0) == 0, name


@pytest.mark.parametrize(
    ("name", "wanted", "per_row"),
    [
        ("fdc", 0.4, lambda rank: 2 * rank),
        ("kq-4bit", 0.75, lambda rank: math.ceil(rank / 2) + 4 * math.ceil(rank / 32)),
        ("palu-3bit", 0.85, lambda rank: math.ceil(3 * rank / 8) + 4),
        ("fp8", 0.5, lambda rank: rank),
        ("hadamard-int4", 0.625, lambda rank: math.ceil(rank / 2) + 4),
        ("per-token", 0.6, lambda rank: math.ceil(rank / 2) + 4),
    ],
)
def test_the_rate_is_the_bytes_of_16_bits_counted_by_hand(name, wanted, per_row):
    """The plan is the least compression that has the rate, and the rate is its own."""
    plan = at_rate(name, wanted, **fine(name))
    groups = [g for layer in plan.layers for s in (layer.keys, layer.values) for g in s.groups]
    stored, full = sum(per_row(g.rank) for g in groups), sum(2 * g.width for g in groups)
    assert rate(plan, CONTEXT) == pytest.approx(1 - stored / full, abs=1e-12)
    assert wanted <= 1 - stored / full < wanted + 0.03


@pytest.mark.parametrize(("name", "options"), [("hadamard-int4", {}), ("kq", {"centre": True})])
def test_where_no_rotation_is_known_nothing_is_centred_and_a_note_says_so(name, options):
    own = inputs("Llama")
    alike = [replace(x, rotary_pairs=None) for x in own.layout.layers]
    layers = [replace(x, pairs=None, cross=None, table=None) for x in own.moments.layers]
    given = replace(
        own,
        layout=replace(own.layout, layers=tuple(alike)),
        moments=replace(own.moments, layers=layers),
    )
    family = plan_family(name, given, **options)
    plan = family.build((family.settings or family.bounds)[0])
    assert [layer.centre for layer in plan.layers] == [None, None]
    assert len(plan.made["notes"]) == 1
