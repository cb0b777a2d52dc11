"""Rows of full rank in other coordinates: their levels, options, bytes and refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, special

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.named import method_entries
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.plan_report import compare_plans
from kvprof.methods.quantisers import lloyd_max
from kvprof.methods.registry import calibration_needs, plan_family
from kvprof.methods.storage import Quantiser, SideQuantiser
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.runtime.backends.support import LayerSpec, why_not
from kvprof.sources.grammar import parse_source
from tests.methods.models import deep_inputs as inputs
from tests.methods.models import deep_model as model

ROWS = ("hadamard-int4", "hadamard-int3", "hadamard-int2", "turboquant", "oscar")


def made(name: str, arch: str = "Llama", **options) -> Plan:
    family = plan_family(name, inputs(arch), **options)
    return plan_at(family, family.settings[0])


def levels_by_scipy(bits: int, width: int) -> np.ndarray:
    """Lloyd's iteration on the incomplete beta function, in x itself."""

    def below(x: np.ndarray) -> np.ndarray:
        return (1 + np.sign(x) * special.betainc(0.5, (width - 1) / 2, x * x)) / 2

    scale = (width - 1) * special.beta(0.5, (width - 1) / 2)

    def mean_below(x: np.ndarray) -> np.ndarray:
        return -((1 - x * x) ** ((width - 1) / 2)) / scale

    levels = np.linspace(-1, 1, 2**bits) * min(0.9, 2 / math.sqrt(width))
    for _ in range(4000):
        bounds = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        levels = np.diff(mean_below(bounds)) / np.diff(below(bounds))
    return levels


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("width", [3, 16, 64, 80, 128])
def test_levels_are_lloyds_and_maxs_on_the_sphere(bits, width):
    found = np.array(lloyd_max(bits, width))
    np.testing.assert_allclose(found, levels_by_scipy(bits, width), atol=1e-9)


def test_levels_of_a_wide_row_are_those_of_a_normal_distribution():
    """Max 1960, table I."""
    found = [level * 1e3 for level in lloyd_max(2, 10**6)]
    assert found == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)
    assert lloyd_max(3, 10**6)[-1] * 1e3 == pytest.approx(2.152, abs=5e-4)
    assert lloyd_max(4, 10**6)[-1] * 1e3 == pytest.approx(2.733, abs=5e-4)
    assert lloyd_max(2, 1) == (-1, -1, 1, 1)


@pytest.mark.parametrize("width", [2, 3, 64])
def test_256_levels_are_as_good_as_levels_can_be(width):
    """What they lose is what theory has for many levels: they settle slowly, so a start matters."""

    def lost(levels: np.ndarray) -> float:
        x = np.sin(np.linspace(-np.pi / 2, np.pi / 2, 2_000_001))
        mass = np.sqrt(1 - x * x) ** (width - 2)
        off = x - levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
        return float((mass * off * off).sum() / mass.sum())

    found = np.array(lloyd_max(8, width))
    assert (np.diff(found) > 0).all()
    # Panter and Dite: a twelfth of (the integral of the density's cube root)³ over 256².
    norm = integrate.quad(lambda t: np.cos(t) ** (width / 3), -np.pi / 2, np.pi / 2)[0] ** 3
    whole = integrate.quad(lambda t: np.cos(t) ** (width - 2), -np.pi / 2, np.pi / 2)[0]
    least = norm / whole / 12 / 256**2
    assert lost(found) == pytest.approx(least, rel=0.01)


def test_bytes_count_codes_scales_and_norms():
    """Three layers, two KV heads of 16, 100 tokens, 2 bytes a value."""
    rows = 3 * 2 * 100
    for bits in (4, 3, 2):
        stored = bytes_at(made(f"hadamard-int{bits}"), 100, itemsize=2)
        assert stored.keys == stored.values == rows * 2 * bits
        assert stored.scales == stored.zeros == 2 * rows * 2
        unlike = bytes_at(made(f"hadamard-int{bits}", bits="k8v4"), 100, itemsize=2)
        assert (unlike.keys, unlike.values) == (rows * 16, rows * 8)
        stored = bytes_at(made("turboquant", bits=bits), 100, itemsize=2)
        assert stored.keys == stored.values == rows * 2 * bits
        assert (stored.scales, stored.zeros) == (2 * rows * 2, 0)
    stored = bytes_at(made("oscar", sink=10, window=30), 100, itemsize=2)
    assert stored.sinks == 2 * 6 * 10 * 16 * 2
    assert stored.window == 2 * 6 * 30 * 16 * 2
    assert stored.keys == stored.values == 6 * 60 * 4
    assert stored.scales == stored.zeros == 2 * 6 * 60 * 2


def test_a_head_of_128_has_the_papers_bits():
    """SAW-INT4: 4.25 bits; OSCAR: 2.28 at 128K tokens, with its sinks and window."""
    side = SideQuantiser((4,))
    wide = replace(made("hadamard-int4"), quantiser=Quantiser("affine", side, side))
    assert wide.quantiser == made("hadamard-int4").quantiser
    assert 4 + 32 / 128 == 4.25
    tokens, own = 128 * 1024, made("oscar")
    assert (own.levels.sink, own.quantiser.window) == (64, 256)
    old = tokens - 64 - 256
    assert (old * (2 + 32 / 128) + 320 * 16) / tokens == pytest.approx(2.28, abs=0.005)


def test_the_knob_of_turboquant_is_its_bits():
    family = plan_family("turboquant", inputs("Llama"))
    assert family.settings == (4, 3, 2)
    rates = [rate(family.build(value), 100) for value in family.settings]
    assert rates == sorted(rates)
    assert plan_for_rate(family, rates[1], 100).quantiser.keys.bits == (3,)
    assert plan_family("turboquant", inputs("Llama"), bits=3).settings == (3,)


@pytest.mark.parametrize("name", ["turboquant", "oscar"])
def test_keys_and_values_may_have_unlike_bits_and_layers_be_left_out(name):
    family = plan_family(name, inputs("Llama"), bits="k3v2", skip="0,-1")
    assert family.settings == (2.5,)
    plan = plan_at(family, 2.5)
    assert (plan.quantiser.keys.bits, plan.quantiser.values.bits) == ((3,), (2,))
    assert [layer.values.projected for layer in plan.layers] == [False, True, False]
    assert plan.made["options"] | {"bits": "k3v2", "skip": [0, 2]} == plan.made["options"]


def test_options_that_are_lists_stand_in_a_list_of_methods():
    found = method_entries("oscar:clip=0.9,1,sink=4,kq,turboquant:skip=0,-1")
    assert [(method, options) for _, method, options in found] == [
        ("oscar", ["clip=0.9,1", "sink=4"]),
        ("kq", []),
        ("turboquant", ["skip=0,-1"]),
    ]


@pytest.mark.parametrize("name", ROWS)
def test_plans_are_read_again_as_they_were_written(name, tmp_path):
    before = made(name)
    save_plan(before, tmp_path / "p")
    after = load_plan(tmp_path / "p", layout=model("Llama").layout)
    assert compare_plans(before, after) == {}
    assert after.quantiser == before.quantiser


def test_where_rotations_go():
    for arch, folds in (("Llama", False), ("GPT2", True), ("Qwen3", False)):
        for name in ("turboquant", "oscar"):
            layer = made(name, arch).layers[0]
            assert layer.keys.placement is Placement.POST_ROPE
            assert (layer.keys.fold_down, layer.keys.fold_up) == (folds, folds)
            assert (layer.values.fold_down, layer.values.fold_up) == (True, True)
    assert not made("hadamard-int4").layers[0].values.projected
    assert made("hadamard-int4", values="hadamard").layers[0].values.projected


def test_oscar_leaves_windowed_layers_alone_unless_its_own_window_is_none():
    whole, turned = made("oscar", "Mistral"), made("oscar", "Mistral", window=0, sink=0)
    assert not any(layer.values.projected for layer in whole.layers)
    assert all(layer.values.projected for layer in turned.layers)


def test_oscar_has_a_rotation_per_head_or_one_per_layer():
    for bases, count in (("head", 2), ("layer", 1)):
        groups = made("oscar", bases=bases).layers[0].keys.groups
        assert len({group.down.numpy().tobytes() for group in groups}) == count


def test_oscar_needs_what_heads_put_out():
    needs = calibration_needs("oscar")
    assert (needs.source, needs.outputs) == ("calibration", True)
    assert calibration_needs("turboquant") is None
    assert calibration_needs("hadamard-int4", centre=False) is None
    collected = CollectOptions(256, 64)
    *_, moments = collect_moments(model("Llama"), parse_source("random:256"), collected)
    with pytest.raises(UsageError, match="calibrate again"):
        plan_family("oscar", replace(inputs("Llama"), moments=moments))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("oscar", {"clip": "0.9,1.5"}, r"oscar: clip 1.5 "),
        ("oscar", {"clip": "0.9"}, "2 values"),
        ("oscar", {"bits": "5"}, "option bits is"),
        ("turboquant", {"bits": "k8v5"}, "option bits is one of 8, 4, 3, 2, or k8v4"),
        ("turboquant", {"rotation": "none"}, "one of random, hadamard"),
        ("hadamard-int4", {"bits": "3"}, "hadamard-int4 .* not 3"),
        ("hadamard-int4", {"block": "-1"}, "from 0 on"),
    ],
)
def test_options_are_refused_in_one_line(name, options, message):
    with pytest.raises(UsageError, match=message):
        plan_family(name, inputs("Llama"), **options)


@pytest.mark.parametrize(
    ("quantiser", "message"),
    [
        (Quantiser("codebook", SideQuantiser((4,), clip=0.9), None), "codebook with 0.9"),
        (Quantiser("affine", SideQuantiser((4,), clip=1.0), None), "not affine with 1"),
        (Quantiser("lloyd-max", SideQuantiser((4,), group=8), None), "lloyd-max .* norm"),
        (Quantiser("lloyd-max", SideQuantiser((5,)), None), "lloyd-max .* 5 bits"),
    ],
)
def test_quantisers_that_make_no_sense_are_refused(quantiser, message):
    with pytest.raises(UsageError, match=message):
        replace(made("hadamard-int4"), quantiser=quantiser)


def test_kernels_say_why_they_do_not_run_a_row():
    facts = model("Llama").layout.layers[0]

    def reason(plan: Plan) -> str | None:
        return why_not(LayerSpec(plan, plan.layers[0], facts, torch.device("cpu"), torch.float32))

    pytest.importorskip("triton")
    assert reason(made("hadamard-int4", centre=False)) is None
    assert reason(made("oscar", clip="1,1", group=0)) is None
    assert reason(made("oscar")) == "rows are clipped before quantisation"
    assert reason(made("turboquant")) == "latents are quantised by lloyd-max"
