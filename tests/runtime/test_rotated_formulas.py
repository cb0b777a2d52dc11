"""What rotated rows put out, on a one-layer model, vector by vector in plain numpy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from kvprof.analysis.bases import bit_reversed
from kvprof.methods.family import plan_at
from kvprof.methods.plan import Plan
from kvprof.methods.quantisers import lloyd_max
from kvprof.methods.registry import plan_family
from kvprof.runtime.compressed import compressed
from tests.methods.models import deep_inputs, deep_model, inputs, model
from tests.models.tiny import ARCHITECTURES, token_ids
from tests.runtime.calibrated import Array, known, one_layer
from tests.runtime.test_exactness import generated
from tests.runtime.test_formula import attention_outputs, heads_out, relative, taps
from tests.runtime.test_quantiser_formulas import integers

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "hadamard": ("hadamard-int3", {"centre": False}),
    "hadamard_blocks": (
        "hadamard-int3",
        {"block": 4, "values": "hadamard", "group": 8, "centre": False},
    ),
    "hadamard_unlike": ("hadamard-int4", {"bits": "k8v3", "centre": False}),
    "turboquant": ("turboquant", {"bits": 3}),
    "turboquant_unlike": ("turboquant", {"bits": "k8v3", "centre": False}),
    "turboquant_unit": ("turboquant", {"bits": 2, "rotation": "hadamard", "unit": True}),
    "oscar": ("oscar", {"bits": 3, "sink": 5, "window": 20}),
    "oscar_layer": ("oscar", {"bits": 3, "sink": 5, "window": 20, "bases": "layer", "group": 4}),
}


def by_norm(x: Array, bits: int, unit: bool) -> Array:
    levels, norm = np.array(lloyd_max(bits, len(x))), np.linalg.norm(x)
    chosen = levels[np.abs(x[:, None] / norm - levels).argmin(1)]
    return np.float64(np.float16(norm / np.linalg.norm(chosen) if unit else norm)) * chosen


def clipped(x: Array, share: float) -> Array:
    most = np.sort(np.abs(x))[int(share * len(x))]
    return np.clip(x, -most, most)


def row_of(name: str, side: str, x: Array) -> Array:
    """Return what one turned row is stored as."""
    if name.startswith("turboquant"):
        own = {"turboquant_unit": 2, "turboquant_unlike": 8 if side == "keys" else 3}
        return by_norm(x, own.get(name, 3), name.endswith("unit"))
    if name.startswith("oscar"):
        x = clipped(x, 0.96 if side == "keys" else 0.92)
    size = {"hadamard_blocks": 8, "oscar_layer": 4}.get(name, len(x))
    parts = [x[start : start + size] for start in range(0, len(x), size)]
    bits = 8 if (name, side) == ("hadamard_unlike", "keys") else 3
    return np.concatenate([integers(part, bits) for part in parts])


def hadamard(*sizes: int) -> Array:
    return scipy.linalg.block_diag(*(scipy.linalg.hadamard(n) / n**0.5 for n in sizes))


def attention(arch: str, q: Array, k: Array, v: Array) -> Array:
    """Return ``S V`` of one query head over sequences of 64."""
    scaling = one_layer(arch).layout.layers[0].scaling
    found = []
    for start in range(0, len(q), 64):
        part = slice(start, start + 64)
        scores = scaling * q[part] @ k[part].T
        scores[np.triu_indices(64, 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        found.append(weights / weights.sum(1, keepdims=True) @ v[part])
    return np.concatenate(found)


def check_rotation(name: str, arch: str, side: str, head: int, rotation: Array) -> None:
    """Hold a row's rotation against what the paper makes it from."""
    width = len(rotation)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(width), atol=1e-6)
    if name in ("turboquant", "turboquant_unlike"):
        return
    whole = hadamard(*{16: (16,), 12: (8, 4)}[width])
    if not name.startswith("oscar"):
        wanted = hadamard(*[4] * (width // 4)) if name == "hadamard_blocks" else whole
        np.testing.assert_allclose(rotation, wanted, atol=1e-7)
        return
    seen = known(arch)[1]
    group = len(seen["q"]) // len(seen["k"])
    covariance = np.zeros((width, width))
    for own in range(len(seen["k"])) if name == "oscar_layer" else [head]:
        for query in range(own * group, (own + 1) * group):
            q = seen["q"][query]
            read = q if side == "keys" else attention(arch, q, seen["k"][own], seen["v"][own])
            covariance += read.T @ read
    directions = np.linalg.eigh(covariance)[1][:, ::-1]
    order = bit_reversed(width).numpy()
    basis = rotation[:, np.argsort(order)] @ whole.T  # R Pᵀ Hᵀ is U, but for signs
    np.testing.assert_allclose(np.abs(directions.T @ basis), np.eye(width), atol=2e-4)


@pytest.mark.parametrize("arch", ["Llama", "GPT2"])
@pytest.mark.parametrize("name", ROWS)
def test_outputs_are_the_formulas(name: str, arch: str) -> None:
    """A pass sees its own tokens exactly and older ones as they were stored."""
    loaded, prefill, length = one_layer(arch), 60, 68
    method, options = ROWS[name]
    family = plan_family(method, known(arch)[0], **options)
    plan = plan_at(family, family.settings[0])
    ids = token_ids(1, length)
    tap = taps(loaded, ids, pre_rope=False)
    first, newest = (5, 20) if name.startswith("oscar") else (0, 0)

    def stored(side: str, head: int, past: Array) -> Array:
        group = getattr(plan.layers[0], side).groups[head]
        turned = np.eye(group.width) if group.down is None else group.down.double().numpy()
        if group.down is not None:
            check_rotation(name, arch, side, head, turned)
        out = past.copy()
        old = slice(first, max(first, len(past) - newest))
        if len(past[old]):
            out[old] = np.stack([row_of(name, side, x) for x in past[old] @ turned]) @ turned.T
        return out

    exact = heads_out(loaded, tap.q, tap.k, tap.v)
    rows = [exact[:, query] for query in range(prefill)]
    for query in range(prefill, length):
        keys, values = tap.k.double().clone(), tap.v.double().clone()
        for side, states in (("keys", keys), ("values", values)):
            for head in range(states.shape[1]):
                past = stored(side, head, states[0, head, :query].numpy())
                states[0, head, :query] = torch.from_numpy(past)
        rows.append(heads_out(loaded, tap.q, keys, values)[:, query])
    wanted = torch.stack(rows, dim=1)
    found = attention_outputs(loaded, plan, ids, prefill=prefill)
    assert relative(found[:, :prefill], exact[:, :prefill]) < 1e-5
    assert relative(found[:, prefill:], wanted[:, prefill:]) < 1e-4
    assert relative(exact[:, prefill:], wanted[:, prefill:]) > 3e-3


def unquantised(name: str, arch: str) -> Plan:
    options = {"window": 0, "sink": 0} if name == "oscar" else {}
    if name.startswith("hadamard"):
        options = {"values": "hadamard", "centre": False}
    family = plan_family(name, inputs(arch), **options)
    return replace(plan_at(family, family.settings[0]), quantiser=None)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_rotation_alone_changes_nothing(arch: str) -> None:
    wanted = generated(model(arch), None)
    logits = torch.stack(wanted.logits)
    for name in ("hadamard-int4", "turboquant", "oscar"):
        found = generated(model(arch), unquantised(name, arch))
        assert torch.equal(found.sequences, wanted.sequences), name
        assert relative(torch.stack(found.logits), logits) < 1e-4, name


def test_on_the_kernels_codes_are_the_same_to_rounding() -> None:
    """The middle that kernels keep is rounded anew, so a code may differ where it is near."""
    pytest.importorskip("triton")
    loaded, ids = deep_model("Llama"), token_ids(1, 40)
    plan = plan_family("hadamard-int4", deep_inputs("Llama"), centre=False).build(4.0)
    plan = replace(plan, prefill_uncompressed=True)
    found = {}
    for kernels in ("on", "off"):
        with compressed(loaded, plan, kernels=kernels) as session, torch.inference_mode():
            cache = session.new_cache()
            loaded.model(ids[:, :39], past_key_values=cache)
            found[kernels] = loaded.model(ids[:, 39:], past_key_values=cache).logits
    assert relative(found["on"], found["off"]) < 5e-3
