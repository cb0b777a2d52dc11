"""What engines store of a KV cache: bit for bit where they say it in Python, else by hand."""

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import scipy.linalg
import torch
from gguf.quants import IQ4_NL
from numpy.typing import NDArray
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at
from kvprof.methods.family import MethodInputs, plan_at
from kvprof.methods.named import ENGINE_FORMATS, method_entries
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.quantisers import lloyd_max
from kvprof.methods.registry import METHODS
from kvprof.models.layout import ModelLayout
from kvprof.models.load import wrap_model
from kvprof.runtime.codecs import codec_for
from tests.methods.models import BLOCKS
from tests.methods.shapes import layer_layout, layout
from tests.models.tiny import tiny, token_ids
from tests.runtime.test_formula import attention_outputs, heads_out, relative, taps

Array = NDArray[np.float64]


def drawn() -> Tensor:
    """Rows of all sizes, and those in which a format may go wrong."""
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    x *= 10.0 ** torch.linspace(-3, 3, 40)[:, None]
    x[0] = 0
    x[1] = -2.5
    x[2, 7] = 900.0
    x[3] = -x[3].abs()
    x[4, :2] = torch.tensor([8.0, -8.0])  # the first of two that are alike in size
    x[5, 32:] = 0
    return x


def made(name: str, shape: ModelLayout | None = None, model: str = "f" * 32) -> Plan:
    family = METHODS[name](MethodInputs(shape or layout(6, width=64), model))
    return plan_at(family, family.settings[0])


def stored(name: str, side: str, x: Tensor) -> Tensor:
    quantiser = made(name).quantiser
    codec = codec_for(quantiser, getattr(quantiser, side), 0)
    return codec.decode(codec.encode(x), x.shape[-1], torch.float32)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "iq4_nl"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_blocks_are_ggmls_own_bit_for_bit(name: str, side: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    wanted = gguf.dequantize(gguf.quantize(drawn().numpy(), kind), kind)
    assert torch.equal(stored(name, side, drawn()), torch.from_numpy(wanted))


def half(x: float) -> float:
    return float(np.float16(x))


def away(x: Array) -> Array:
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def signed(x: Array, bits: int) -> Array:
    scale = x[np.abs(x).argmax()] / -(2 ** (bits - 1))
    if not scale:
        return x
    codes = np.clip(np.floor(x / scale + 2 ** (bits - 1) + 0.5), 0, 2**bits - 1)
    return half(scale) * (codes - 2 ** (bits - 1))


def from_minimum(x: Array, bits: int) -> Array:
    scale = (x.max() - x.min()) / (2**bits - 1)
    return half(x.min()) + half(scale) * np.floor((x - x.min()) / (scale or 1) + 0.5)


def from_hidden_zero(x: Array) -> Array:
    """`x ≈ scale * (code - zero)`, the zero in the lowest bits of the scale."""
    scale = max((x.max() - x.min()) / 15, 1e-6)
    zero = np.clip(away(np.array(-x.min() / scale)), 0, 15)
    codes = np.clip(away(x / scale + zero), 0, 15)
    kept = np.float32(scale).view(np.int32) & ~np.int32(15)
    return float(kept.view(np.float32)) * (codes - zero)


def nonlinear(x: Array) -> Array:
    levels = np.array(IQ4_NL.kvalues, dtype=float)
    scale = x[np.abs(x).argmax()] / levels[0]
    if not scale:
        return x
    found = levels[np.abs(x[:, None] / scale - levels).argmin(1)]
    return half((x**2 * found * x).sum() / (x**2 * found**2).sum()) * found


def by_norm(x: Array, bits: int) -> Array:
    norm = np.linalg.norm(x)
    if not norm:
        return x
    levels = np.array(lloyd_max(bits, len(x)))
    found = levels[np.abs(x[:, None] / norm - levels).argmin(1)]
    return half(norm / np.linalg.norm(found)) * found


def largest(x: Array, scale_of: Any) -> Array:
    scale = np.abs(x).max() / 127
    return scale_of(scale) * away(x / scale) if scale else x


def cast(x: Array, kind: torch.dtype) -> Array:
    most = torch.finfo(kind).max
    return torch.from_numpy(x).clamp(-most, most).to(kind).double().numpy()


#: Of a row of 64 or a block of 32: keys, and values where they are another.
BY_HAND: dict[str, Any] = {
    "fp8_e4m3": (64, lambda x: cast(x, torch.float8_e4m3fn)),
    "fp8_e5m2": (64, lambda x: cast(x, torch.float8_e5m2)),
    "int8_per_token_head": (64, lambda x: largest(x, float)),
    "int4_per_token_head": (64, from_hidden_zero),
    "turboquant_k8v4": (64, lambda x: cast(x, torch.float8_e4m3fn), lambda x: from_minimum(x, 4)),
    "turboquant_4bit_nc": (64, lambda x: by_norm(x, 4), lambda x: from_minimum(x, 4)),
    "turboquant_k3v4_nc": (64, lambda x: by_norm(x, 3), lambda x: from_minimum(x, 4)),
    "turboquant_3bit_nc": (64, lambda x: by_norm(x, 3), lambda x: from_minimum(x, 3)),
    "q8_0": (32, lambda x: largest(x, half)),
    "q5_1": (32, lambda x: from_minimum(x, 5)),
    "q5_0": (32, lambda x: signed(x, 5)),
    "q4_1": (32, lambda x: from_minimum(x, 4)),
    "q4_0": (32, lambda x: signed(x, 4)),
    "iq4_nl": (32, nonlinear),
}


@pytest.mark.parametrize("name", ENGINE_FORMATS)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_rows_are_what_the_format_says(name: str, side: str) -> None:
    size, *how = BY_HAND[name]
    rows = drawn().double().numpy()
    wanted = np.concatenate(
        [how[0 if side == "keys" else -1](block) for block in rows.reshape(-1, size)]
    ).reshape(rows.shape)
    off = np.abs(stored(name, side, drawn()).double().numpy() - wanted)
    # What lies midway between two codes in float32 need not in float64.
    assert (off > 1e-3 * np.abs(rows).max(1, keepdims=True)).mean() < 0.002


@pytest.mark.parametrize("name", ENGINE_FORMATS)
def test_outputs_are_of_older_tokens_as_stored(name: str) -> None:
    """A query's own token is as the model gives it."""
    model = wrap_model(tiny("Llama", head_dim=64, num_hidden_layers=1).double())
    ids, (size, *how) = token_ids(1, 12), BY_HAND[name]
    plan, tap = made(name, model.layout, model.fingerprint), taps(model, ids, pre_rope=False)
    past = []
    for states, rotation, row in zip(
        (tap.k, tap.v), turned(plan, 0), (how[0], how[-1]), strict=True
    ):
        there = np.eye(64) if rotation is None else rotation
        blocks = (states.double().numpy() @ there).reshape(-1, size)
        found = np.stack([row(block) for block in blocks]).reshape(states.shape) @ there.T
        past.append(torch.from_numpy(found))
    wanted = []
    for query in range(12):
        keys, values = (
            torch.cat([old[:, :, :query], own[:, :, query:].double()], dim=2)
            for old, own in zip(past, (tap.k, tap.v), strict=True)
        )
        wanted.append(heads_out(model, tap.q, keys, values)[:, query])
    found = attention_outputs(model, plan, ids, prefill=1)
    off = relative(heads_out(model, tap.q, tap.k, tap.v), torch.stack(wanted, dim=1))
    assert relative(found, torch.stack(wanted, dim=1)) < off / 100


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *(("fp8_e4m3", 8), ("fp8_e5m2", 8), ("q8_0", 8.5), ("q5_1", 6), ("q5_0", 5.5)),
        *(("q4_1", 5), ("q4_0", 4.5), ("iq4_nl", 4.5)),
        *(("int8_per_token_head", 8 + 32 / 64), ("int4_per_token_head", 4 + 32 / 64)),
        # The norm, or nothing, beside keys; a scale and a minimum beside values.
        *(("turboquant_k8v4", 6 + 16 / 64), ("turboquant_4bit_nc", 4 + 24 / 64)),
        *(("turboquant_k3v4_nc", 3.5 + 24 / 64), ("turboquant_3bit_nc", 3 + 24 / 64)),
    ],
)
def test_bytes_are_those_of_the_engines_tensors(name: str, bits: float) -> None:
    plan = made(name)
    inner = [layer for layer in plan.layers if not layer.left_out]
    assert [layer.left_out for layer in plan.layers] == (
        [True, True, False, False, True, True] if "turbo" in name else [False] * 6
    )
    found = bytes_at(replace(plan, layers=tuple(inner)), 100, itemsize=2).total
    assert found == len(inner) * 100 * 2 * 2 * 64 * bits / 8


def turned(plan: Plan, index: int = 3) -> list[Array | None]:
    layer = plan.layers[index]
    return [
        None if side.groups[0].down is None else side.groups[0].down.double().numpy()
        for side in (layer.keys, layer.values)
    ]


@pytest.mark.parametrize(
    ("width", "keys", "values"),
    [(64, 64, 64), (128, 128, 64), (192, 64, 64), (256, 256, 64), (96, None, None)],
)
def test_llama_cpp_turns_heads_in_blocks(width: int, keys: int | None, values: int | None) -> None:
    for found, size in zip(
        turned(made("q4_0", layout(6, width=width))), (keys, values), strict=True
    ):
        if size is None:
            assert found is None
            continue
        wanted = np.kron(np.eye(width // size), scipy.linalg.hadamard(size)) / size**0.5
        assert np.allclose(found, wanted, atol=1e-6)


def test_llama_cpp_turns_no_heads_of_unlike_widths() -> None:
    """Each of the two caches, of windows and of all tokens, for itself."""
    windows = (None, 9, None, 9)
    widths = (64, 128, 64, 64)
    mixed = ModelLayout(
        tuple(
            layer_layout(index, width=width, sliding_window=window)
            for index, (width, window) in enumerate(zip(widths, windows, strict=True))
        ),
        128,
        "Made",
    )
    plan = made("q8_0", mixed)
    assert [turned(plan, index)[0] is None for index in range(4)] == [False, True, False, True]


def test_vllm_turns_by_signs_and_a_hadamard_matrix() -> None:
    signs = torch.bernoulli(
        torch.full((64,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9)
    )
    x = np.random.default_rng(0).normal(size=64)
    wanted = scipy.linalg.hadamard(64) @ (x * (2 * signs.numpy() - 1)) / 8
    for found in turned(made("int4_per_token_head")):
        assert np.allclose(x @ found, wanted, atol=1e-6)
    keys, values = turned(made("turboquant_3bit_nc"))
    assert np.allclose(keys, scipy.linalg.hadamard(64) / 8, atol=1e-6)
    assert values is None
    assert turned(made("turboquant_k8v4")) == turned(made("fp8_e5m2")) == [None, None]


@pytest.mark.parametrize(
    ("name", "width"), [("q8_0", 80), ("int4_per_token_head", 96), ("turboquant_4bit_nc", 80)]
)
def test_widths_that_the_engine_does_not_take_are_refused(name: str, width: int) -> None:
    with pytest.raises(UsageError) as refused:
        made(name, layout(6, width=width))
    assert str(width) in str(refused.value)


@pytest.mark.parametrize("name", ENGINE_FORMATS)
def test_a_saved_plan_is_the_same(name: str, tmp_path: Any) -> None:
    plan = made(name)
    save_plan(plan, tmp_path / "a.plan")
    found = load_plan(tmp_path / "a.plan", fingerprint="f" * 32, layout=layout(6, width=64))
    assert (found.quantiser, found.made) == (plan.quantiser, plan.made)
    assert found.by_age
    assert found.made["flag"] == ENGINE_FORMATS[name][1]


def test_a_set_stands_for_its_methods_wherever_several_are_listed() -> None:
    entries = method_entries("kq:grid=4,minimum=4, engine-formats,fdc")
    assert [method for _, method, _ in entries] == ["kq", *ENGINE_FORMATS, "fdc"]
    assert entries[0][2] == ["grid=4", "minimum=4"]
