"""Widths keep the rate that was asked for, run on the kernels, and say where they come from."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.benchmark.plans import full_widths
from kvprof.benchmark.ranks import ranks_from, resampled_layers
from kvprof.benchmark.shape_plans import parse_method
from kvprof.benchmark.shapes import Rope, Shape, load_shape
from kvprof.errors import FailedError, UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.methods.family import plan_at
from kvprof.methods.plan_files import save_plan
from kvprof.methods.registry import plan_family
from kvprof.models.locate import shipped_shapes
from tests.benchmark.on_shapes import method_on
from tests.methods.models import FINE, inputs

LLAMA = load_shape("Llama-3.1-8B")


def resampled(shape, rate, method="fdc", **options):
    return resampled_layers(shape, 1, rate, method, **options)[0]


def rate_of(widths, shape):
    return 1 - sum(widths.keys + widths.values) / (2 * shape.num_kv_heads * shape.head_dim)


@settings(max_examples=60)
@given(
    st.sampled_from(list(shipped_shapes())),
    st.floats(0, 0.75),
    st.sampled_from(["fdc", "kq"]),
    st.integers(0, 9),
)
def test_resampled_widths_keep_the_rate_and_run(name, rate, method, seed):
    shape = load_shape(name)
    widths = resampled(shape, rate, method, seed=seed)
    step = 16 / (2 * shape.num_kv_heads * shape.head_dim)
    assert abs(rate_of(widths, shape) - rate) <= step / 2 + 1e-9
    assert len(widths.keys) == len(widths.values) == shape.num_kv_heads
    for width in widths.keys + widths.values:
        assert width % 16 == 0
        assert 16 <= width <= shape.head_dim
    RaggedLayout(widths.keys, widths.values, shape.group, 1, 16)


def test_the_profile_is_ragged_as_the_reference_model_is():
    widths = resampled(load_shape("Llama-2-7B"), 0.5)
    assert len(set(widths.keys)) > 1
    assert len(set(widths.values)) > 1
    # FDC's removal rate leaves K wider than V on the reference model.
    assert sum(widths.keys) > sum(widths.values)
    assert "reference model's profile" in widths.source
    assert "resampled" in widths.source
    assert resampled(LLAMA, 0.5, "kq") != resampled(LLAMA, 0.5, "fdc")


def test_a_rate_out_of_reach_is_refused_with_what_can_be_had():
    with pytest.raises(UsageError):
        resampled(LLAMA, 0.9)
    odd = Shape("odd", "here", 1, 40, 2, 2, 20, Rope("default", 1e4), 128, 20**-0.5)
    with pytest.raises(UsageError, match="20 dimensions"):
        resampled(odd, 0.5)


def test_ranks_from_a_file(tmp_path):
    pairs = [[112, 32], [96, 48], [80, 64], [64, 64], [48, 112], [48, 80], [32, 64], [32, 48]]
    (tmp_path / "r.json").write_text(json.dumps(pairs))
    widths = ranks_from(tmp_path / "r.json", LLAMA)
    assert list(zip(widths.keys, widths.values, strict=True)) == [tuple(p) for p in pairs]
    assert widths.warnings == ()
    assert rate_of(widths, LLAMA) == 0.5


def test_widths_off_the_grid_are_rounded_up_and_said(tmp_path):
    pairs = [[100, 33]] + [[64, 64]] * 7
    (tmp_path / "r.json").write_text(json.dumps(pairs))
    widths = ranks_from(tmp_path / "r.json", LLAMA)
    assert (widths.keys[0], widths.values[0]) == (112, 48)
    assert "100 to 112 and 1 more" in widths.warnings[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[64, 64]]", r"1 pairs, .* has 8"),
        (json.dumps([[256, 64]] * 8), "rank 256"),
        (json.dumps([[0, 64]] * 8), "rank 0"),
        ("[64, 64]", r"\[K, V\] pairs"),
        ('{"keys": 3}', r"\[K, V\] pairs"),
        ("[[true, 64]]", r"\[K, V\] pairs"),
        ("{", "JSON"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_in_one_line(tmp_path, text, said):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        ranks_from(tmp_path / "r.json", LLAMA)
    assert "\n" not in str(caught.value)


def test_the_widths_of_a_saved_plan(tmp_path):
    given = inputs("Llama")
    first = given.layout.layers[0]
    shape = Shape(
        "tiny",
        "here",
        len(given.layout.layers),
        given.layout.hidden_size,
        first.num_heads,
        first.num_kv_heads,
        first.qk_head_dim,
        Rope("default", 1e4),
        128,
        first.scaling,
    )
    plan = plan_at(plan_family("fdc", given, **FINE), 0.3)
    save_plan(plan, tmp_path / "plan")
    widths = ranks_from(tmp_path / "plan", shape)
    layers = [
        [
            (-(-k.rank // 16) * 16, -(-v.rank // 16) * 16)
            for k, v in zip(layer.keys.groups, layer.values.groups, strict=True)
        ]
        for layer in plan.layers
    ]
    assert list(zip(widths.keys, widths.values, strict=True)) in layers
    with pytest.raises(UsageError, match=r"Llama-3\.1-8B has 8 of 128"):
        ranks_from(tmp_path / "plan", LLAMA)
    save_plan(plan_at(plan_family("tale", given, **FINE), 0.3), tmp_path / "tale")
    with pytest.raises(UsageError, match="token levels"):
        ranks_from(tmp_path / "tale", shape)
    save_plan(plan_at(plan_family("palu", given, heads=2, **FINE), 0.3), tmp_path / "palu")
    with pytest.raises(UsageError, match="share latents"):
        ranks_from(tmp_path / "palu", shape)
    with pytest.raises(UsageError, match="no such file"):
        ranks_from(tmp_path / "none", shape)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises((UsageError, FailedError), match="junk"):
        ranks_from(tmp_path / "junk", shape)


def test_latents_of_groups_and_uniform_widths_keep_the_rate():
    palu = method_on("palu", LLAMA, 0.5).widths
    assert palu.keys == palu.values == (256, 256)
    assert method_on("palu:heads=1", LLAMA, 0.5).widths.keys == (64,) * 8
    every = method_on("palu:heads=0", LLAMA)
    assert every.widths.keys == (256, 256)
    assert "4 instead of 8" in every.warnings[0]  # a latent of all would be 1,024 wide
    # Ten KV heads cannot be shared by four.
    phi = method_on("palu", load_shape("Phi-3-14B"))
    assert phi.widths.keys == (128,) * 5
    assert "2 instead of 4" in phi.warnings[0]
    assert method_on("uniform", LLAMA, 0.5).widths.keys == (64,) * 8
    assert method_on("fp8", LLAMA, 0.5).widths is None
    tale = method_on("tale", LLAMA, 0.9).widths
    assert (tale.keys, tale.values) == ((128,) * 8, (64,) * 8)
    assert "9.14×" in tale.source
    assert "1.29×" in method_on("tale:bits=none", LLAMA, 0.5).widths.source


def test_full_rank_is_rate_zero():
    assert rate_of(full_widths(LLAMA), LLAMA) == 0
    assert rate_of(resampled(LLAMA, 0.0), LLAMA) == 0


@pytest.mark.parametrize(
    "name",
    [
        "fd", "fdc-5bit", "palu:group=1", "palu:heads=-1", "fdc:group=4", "uniform:grid=8",
        "tale:bits=2", "FDC", "",
    ],
)  # fmt: skip
def test_unknown_methods_are_refused(name):
    with pytest.raises(UsageError):
        parse_method(name)


# --- Few head configs, and layers that are unlike.


@settings(max_examples=25)
@given(
    st.sampled_from(list(shipped_shapes())),
    st.floats(0, 0.7),
    st.sampled_from(["fdc", "kq"]),
    st.integers(1, 6),
    st.integers(0, 8),
)
def test_resampled_layers_keep_the_rate_and_the_kinds(name, rate, method, layers, kinds):
    shape = load_shape(name)
    found = resampled_layers(shape, layers, rate, method, kinds=kinds)
    pairs = [pair for one in found for pair in zip(one.keys, one.values, strict=True)]
    assert len(found) == layers
    assert len(pairs) == layers * shape.num_kv_heads
    columns = sum(key + value for key, value in pairs)
    wanted = (1 - rate) * 2 * len(pairs) * shape.head_dim
    assert columns <= wanted + 8 + 1e-6
    if kinds:
        assert len(set(pairs)) <= kinds
    if kinds == 0 or kinds >= 6:
        assert columns >= wanted - 16


def test_layers_are_unlike_as_a_calibrated_models_are():
    found = resampled_layers(LLAMA, 32, 0.5, "kq", kinds=4)
    assert len({(one.keys, one.values) for one in found}) > 20
    assert len({p for one in found for p in zip(one.keys, one.values, strict=True)}) == 4
    assert "at most 4" in found[0].source
    # What was drawn before there was a limit is drawn still.
    assert resampled_layers(LLAMA, 1, 0.5, "kq") == [resampled(LLAMA, 0.5, "kq")]


def test_kinds_of_a_method_are_those_of_its_drawn_widths():
    shape = load_shape("Llama-2-7B")
    few = method_on("kq-4bit:kinds=3", shape, 0.8125).widths
    assert len(set(zip(few.keys, few.values, strict=True))) == 3
    assert rate_of(few, shape) == pytest.approx(0.4, abs=0.05)
    with pytest.raises(UsageError, match="option kinds is a whole number, not 'few'"):
        parse_method("fdc:kinds=few")
    with pytest.raises(UsageError, match="uniform has no options"):
        parse_method("uniform:kinds=3")
