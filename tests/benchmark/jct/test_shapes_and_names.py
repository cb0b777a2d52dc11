"""Names of methods, shapes of models, tensor parallelism, and what a request refuses."""

import pytest
import torch

from kvprof.benchmark.jct.ablations import parse_variant
from kvprof.benchmark.jct.cache_memory import level_tokens
from kvprof.benchmark.jct.model_shape import Dense, load_model_shape
from kvprof.benchmark.jct.request import JctRequest, case_name
from kvprof.benchmark.jct.serving import weight_bytes
from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, full_bytes
from kvprof.models.locate import shipped_shapes
from tests.benchmark.jct.shapes import tiny_folder, tiny_shape
from tests.benchmark.on_shapes import method_on

FP32 = torch.float32


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("full", "full"), ("fp8", "segments"), ("tale", "segments"), ("fdc-4bit", "segments"),
        ("fdc", "ragged"), ("uniform", "ragged"), ("palu-folded", "ragged"), ("palu", "latents"),
        ("palu:heads=1", "latents"), ("strawman", "strawman"), ("fdc:no-post-rope", "latents"),
        ("fdc:no-adaptive-rates", "ragged"),
        ("fdc:no-balancing", "ragged"),
        ("fdc:no-post-rope:no-adaptive-rates", "latents"),
    ],
)  # fmt: skip
def test_names_say_how_a_method_is_stored(text, family):
    method = method_on(text, tiny_shape().attention)
    assert (method.name, method.form) == (text, family)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "strawman"),
        ("fdc:no-sense", "no-balancing"),
        ("palu:no-post-rope", "palu"),
        ("fdc:no-post-rope:no-balancing", "separately"),
        ("fdc:no-balancing:heads=1", "heads=1"),
        ("palu:group=1", "it has heads"),
        ("palu:heads=many", "heads"),
        ("palu-folded:group=1", "palu-folded takes heads=N"),
    ],
)
def test_other_names_are_refused_in_one_line(text, says):
    with pytest.raises(UsageError) as refused:
        parse_variant(text)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_adaptive_rates_all_heads_are_alike_at_the_same_bytes():
    shape = load_model_shape("Llama-3.1-8B").attention
    adaptive, alike = (method_on(name, shape).widths for name in ("fdc", "fdc:no-adaptive-rates"))
    assert len(set(adaptive.keys)) > 1
    assert len({*alike.keys, *alike.values}) == 1
    assert sum(alike.keys + alike.values) == sum(adaptive.keys + adaptive.values)
    # Without post-RoPE compression the widths stay: only where K is compressed differs.
    assert method_on("fdc:no-post-rope", shape).widths == adaptive


def test_what_changes_nothing_on_a_cpu_is_refused_there():
    with pytest.raises(UsageError, match="changes nothing on a CPU"):
        parse_variant("fdc:no-balancing").refuse_on("cpu")
    parse_variant("fdc:no-balancing").refuse_on("cuda")


@pytest.mark.parametrize("name", list(shipped_shapes()))
def test_every_shape_that_ships_can_be_composed(name):
    model = load_model_shape(name)
    assert model.dense.vocab_size > 30_000
    full = model.attention.num_kv_heads * model.attention.head_dim
    columns = model.attention.num_heads * model.attention.head_dim
    weights = model.weight_values(full, full, columns)
    assert weights > 6e9


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-2-7B", 6.74), ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.6), ("Qwen3-32B", 32.8),
        ("Yi-34B", 34.4), ("Phi-3-14B", 14.0), ("gpt-oss-120b", 116.8),
    ],
)  # fmt: skip
def test_weights_are_those_that_the_models_state(name, billions):
    model = load_model_shape(name)
    shape = model.attention
    full = shape.num_kv_heads * shape.head_dim
    weights = model.weight_values(full, full, shape.num_heads * shape.head_dim)
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_config_says_what_lies_around_attention(tmp_path):
    model = load_model_shape(tiny_folder(tmp_path))
    assert model.dense == Dense(128, 96)
    assert model.layers == 2
    assert load_model_shape("reference").dense == Dense(768, 6144)


def test_one_gpus_part_of_a_model():
    model = load_model_shape("Llama-3.1-70B")
    part = model.per_gpu(4)
    assert (part.attention.num_heads, part.attention.num_kv_heads) == (16, 2)
    assert part.dense == Dense(28672 // 4, 128256 // 4)
    assert part.attention.group == model.attention.group
    assert part.described()["tp"] == 4
    full, half = (
        one.weight_values(*(one.attention.num_kv_heads * 128,) * 2, one.attention.num_heads * 128)
        for one in (model, part)
    )
    assert half * 4 == full
    assert model.per_gpu(1) is model


@pytest.mark.parametrize(("tp", "says"), [(3, "8 KV heads"), (16, "8 KV heads")])
def test_what_does_not_divide_is_refused_with_what_does(tp, says):
    with pytest.raises(UsageError) as refused:
        load_model_shape("Llama-3.1-8B").per_gpu(tp)
    assert says in str(refused.value)
    assert "2, 4, 8" in str(refused.value)


def test_bytes_of_a_cache_are_counted_without_making_it():
    model = tiny_shape()
    shape = model.attention
    whole = method_on("full", shape).plan
    full = full_bytes(whole, 1000, itemsize=4, batch=3)
    assert full == 2 * 3 * 1000 * 2 * 2 * 32 * 4
    for name, share in (("full", 1.0), ("fdc", 0.5), ("palu", 0.5), ("fp8", 0.25)):
        plan = method_on(name, shape).plan
        assert bytes_at(plan, 1000, itemsize=4, batch=3).total == share * full
        assert full_bytes(plan, 1000, itemsize=4, batch=3) == full
    strawman = method_on("strawman", shape)
    bases = 2 * 3 * 2 * 32 * 16 * 4 * shape.layers
    plan = strawman.plan
    assert bytes_at(plan, 1000, itemsize=4, batch=3).total == full // 2 + bases
    windowed = tiny_shape(sliding_window=100, window_pattern="WF").attention
    # A window of 100 tokens keeps 99 between passes.
    plan = method_on("full", windowed).plan
    assert full_bytes(plan, 1000, itemsize=4, batch=3) == full // 2 + 99 * full // 2000


def test_levels_hold_all_tokens():
    shape = tiny_shape().attention
    held = level_tokens(method_on("tale", shape).plan, 1004)
    assert held == {"sinks": 4, "level 0": 900, "level 1": 100}
    assert level_tokens(method_on("fdc", shape).plan, 1004) == {}


def test_folded_bases_change_the_weights():
    model = tiny_shape()
    sizes = {}
    for name in ("full", "fdc", "palu"):
        sizes[name] = weight_bytes(method_on(name, model.attention), model, FP32)
    assert sizes["fdc"] < sizes["full"]
    # A latent that two heads share makes W_O as wide as before, and prefill keeps the model's own.
    assert sizes["palu"] > sizes["fdc"]


# --- requests ---------------------------------------------------------------------------------


def composed(**options):
    return JctRequest(model="Llama-3.1-8B", mode="composed", **options)


def test_every_combination_is_a_case_and_methods_stand_side_by_side():
    request = composed(
        methods=("full", "fdc", "full"), batches=(1, 2), input_lens=(128, 1024), output_lens=(256,)
    )
    names = [case_name(*case) for case in request.cases()]
    assert names[:4] == [
        "full b1 in128 out256",
        "fdc b1 in128 out256",
        "full b1 in1024 out256",
        "fdc b1 in1024 out256",
    ]
    assert len(names) == 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "dreamt"}, "real or composed"),
        ({"mode": "composed", "batches": (0,)}, "--batch 0"),
        ({"mode": "composed", "methods": ()}, "no method"),
        ({"mode": "composed", "methods": ("nonsense",)}, "'nonsense' is unknown"),
        ({"mode": "composed", "repeats": 2}, "--repeats 2"),
        ({"tp": 2}, "--tp"),
        ({"trace": "fdc/arxiv", "ranks": "r.json"}, "--trace and --ranks"),
        ({"methods": ("fdc:no-balancing",)}, "fdc:no-balancing"),
        ({"kernels": "perhaps"}, "auto, on, off"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(UsageError) as refused:
        JctRequest(**options)
    assert says in str(refused.value)


def test_a_request_is_described_without_paths(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    request = JctRequest(model=str(folder), mode="composed", ranks=str(tmp_path / "r.json"))
    described = request.described()
    assert (described["model"], described["ranks"]) == ("model", "r.json")
    assert str(tmp_path) not in str(described)
