"""What quantisers' outputs are, on a one-layer model, vector by vector in plain numpy."""

import math

import numpy as np
import pytest
import torch

from kvprof.methods.family import plan_at
from kvprof.methods.quantisers import codebook
from kvprof.methods.registry import plan_family
from tests.models.tiny import token_ids
from tests.runtime.calibrated import HALF, Array, known, one_layer
from tests.runtime.test_formula import attention_outputs, heads_out, relative, taps


def integers(x: Array, bits: int) -> Array:
    """Affine codes of one vector, scale and zero in half precision."""
    zero = np.float64(np.float16(x.min()))
    scale = np.float64(np.float16((x.max() - x.min()) / (2**bits - 1)))
    if scale == 0:
        return np.full_like(x, zero)
    return zero + scale * np.clip(np.rint((x - zero) / scale), 0, 2**bits - 1)


def levelled(x: Array, bits: int) -> Array:
    """Non-uniform codes of one vector."""
    zero, scale = np.float64(np.float16(x.min())), np.float64(np.float16(x.max() - x.min()))
    levels = zero + scale * codebook(bits).double().numpy()
    return levels[np.abs(x[:, None] - levels).argmin(1)]


def by_token(x: Array, bits: int) -> Array:
    """Rows of no more than 32 columns: one scale each."""
    return np.stack([integers(row, bits) for row in x])


def full_precision(x: Array, bits: int) -> Array:
    """Affine codes of one vector, scale and shift in the model's own precision (quanto's)."""
    scale = (x.max() - x.min()) / (2**bits - 1)
    return scale * np.rint((x - x.min()) / scale) + x.min()


def by_channel(x: Array, bits: int, group: int) -> Array:
    out = x.copy()
    for start in range(0, len(x), group):
        for column in range(x.shape[1]):
            block = slice(start, start + group)
            out[block, column] = integers(x[block, column], bits)
    return out


def without_outliers(x: Array, bits: int, group: int | None) -> Array:
    """KVQuant-like: the largest 1 % of each row exact, the rest non-uniform."""
    rest, out = x.copy(), x.copy()
    largest = np.abs(x).argmax(1)[:, None]  # one of 16 columns
    np.put_along_axis(rest, largest, 0.0, axis=1)
    if group is None:
        out = np.stack([levelled(row, bits) for row in rest])
    else:
        for start in range(0, len(x), group):
            for column in range(x.shape[1]):
                block = slice(start, start + group)
                out[block, column] = levelled(rest[block, column], bits)
    np.put_along_axis(out, largest, np.take_along_axis(x, largest, axis=1), axis=1)
    return out


def e4m3(x: Array) -> Array:
    """Round to three bits of mantissa, down to steps of 2^-9."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.rint(x / step) * step, -448, 448)


def known_largest(side: str, head: int) -> float:
    """Return the largest value of the calibration data's keys, or values, of a head."""
    return float(np.abs(known("Llama")[1][side[0]][head]).max())


def stored(name: str, bits: int, side: str, head: int, x: Array) -> Array:
    """Return K or V of one head after all of `x` was seen and stored."""
    first, count = 0, len(x)
    if name == "kivi":
        count = max(0, len(x) - 128) // 32 * 32
    elif name == "kvquant":
        first, count = 1, (len(x) - 1) // 64 * 64
    out, part = x.copy(), slice(first, first + count)
    if not count:
        return out
    if name == "fp8":  # twice the largest value fits, over a power of two
        scale = 2.0 ** np.ceil(np.log2(2 * known_largest(side, head) / 448))
        out[part] = scale * e4m3(x[part] / scale)
    elif name == "quanto":
        out[part] = np.stack([full_precision(row, bits) for row in x[part]])
    elif name == "kvquant":
        out[part] = without_outliers(x[part], bits, 64 if side == "keys" else None)
    elif name == "kivi" and side == "keys":
        out[part] = by_channel(x[part], bits, 32)
    else:
        out[part] = by_token(x[part], bits)
    return out


@pytest.mark.parametrize("name", ["fp8", "per-token", "kivi", "kvquant", "quanto"])
def test_quantisers_alone(name: str) -> None:
    """A pass sees its own tokens exactly and older ones as they were stored."""
    if name == "quanto":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model, prefill, length = one_layer("Llama"), 158, 168
    ids = token_ids(1, length)
    bits = {"fp8": 8, "quanto": 4}.get(name, 3)
    plan = plan_family(name, known("Llama")[0], centre=False).build(float(bits))
    tap = taps(model, ids, pre_rope=False)
    exact = heads_out(model, tap.q, tap.k, tap.v)
    rows = [exact[:, query] for query in range(prefill)]
    for query in range(prefill, length):
        keys, values = tap.k.double().clone(), tap.v.double().clone()
        for side, states in (("keys", keys), ("values", values)):
            for head in range(states.shape[1]):
                past = states[0, head, :query].numpy()
                states[0, head, :query] = torch.from_numpy(stored(name, bits, side, head, past))
        rows.append(heads_out(model, tap.q, keys, values)[:, query])
    wanted = torch.stack(rows, dim=1)
    found = attention_outputs(model, plan, ids, prefill=prefill)
    assert relative(found[:, :prefill], exact[:, :prefill]) < 1e-6
    assert relative(found[:, prefill:], wanted[:, prefill:]) < 1e-4
    assert relative(exact[:, prefill:], wanted[:, prefill:]) > 3e-3


@pytest.mark.parametrize("name", ["per-token", "kivi", "kvquant", "kq+per-token"])
def test_keys_and_values_have_bits_of_their_own(name: str) -> None:
    """``k4v2``, and the other way round: each side by its own bits, in plain numpy."""
    model, prefill, length = one_layer("Llama"), 158, 162
    ids = token_ids(1, length)
    tap = taps(model, ids, pre_rope=False)
    exact = heads_out(model, tap.q, tap.k, tap.v)
    lost = []
    for text, pair in (("k4v2", (4, 2)), ("k2v4", (2, 4))):
        base = {**HALF, "minimum": 16} if name.startswith("kq") else {}  # bases, and all of them
        family = plan_family(name, known("Llama")[0], **base, bits=text, centre=False)
        plan = plan_at(family, (family.settings or (0.0,))[0])
        rows = []
        for query in range(prefill, length):
            keys, values = tap.k.double().clone(), tap.v.double().clone()
            for side, states, bits in zip(("keys", "values"), (keys, values), pair, strict=True):
                for head, group in enumerate(getattr(plan.layers[0], side).groups):
                    past = states[0, head, :query].numpy()
                    if group.down is None:
                        past = stored(name, bits, side, head, past)
                    else:
                        down, up = (x.double().numpy() for x in (group.down, group.up))
                        past = stored(name, bits, side, head, past @ down) @ up.T
                    states[0, head, :query] = torch.from_numpy(past)
            rows.append(heads_out(model, tap.q, keys, values)[:, query])
        wanted = torch.stack(rows, dim=1)
        found = attention_outputs(model, plan, ids, prefill=prefill)[:, prefill:]
        # A plan's bases are float32, which may turn a code or two.
        assert relative(found, wanted) < (1e-3 if name.startswith("kq") else 1e-4)
        lost.append(wanted)
    assert relative(lost[0], lost[1]) > 1e-2
    assert relative(exact[:, prefill:], lost[0]) > 1e-2


def test_tale_as_published_quantises_level_by_level() -> None:
    """K and V of the middle at 2 bits, of the recent share at 4 (TALE §3), after one prefill."""
    model, prefill = one_layer("Llama"), 4 + 32 * 5 + 7
    ids = token_ids(1, prefill + 1)
    plan = plan_at(plan_family("tale+kivi", known("Llama")[0], window=0, **HALF), 0.5)
    tap = taps(model, ids, pre_rope=False)
    rest = prefill - 4
    middle = 4 + (rest - math.floor(0.1 * rest)) // 32 * 32
    recent = 4 + rest // 32 * 32
    assert 4 < middle < recent < prefill
    keys, values = tap.k.double().clone(), tap.v.double().clone()
    for head, group in enumerate(plan.layers[0].values.groups):
        down, up = (x.double().numpy() for x in (group.down, group.up))
        assert group.ranks == (8, 16)
        k = tap.k[0, head].double().numpy().copy()
        z = tap.v[0, head].double().numpy() @ down
        k[4:middle] = by_channel(k[4:middle], 2, 32)
        k[middle:recent] = by_channel(k[middle:recent], 4, 32)
        v = z @ up.T
        v[4:middle] = by_token(z[4:middle, :8], 2) @ up[:, :8].T
        v[middle:recent] = by_token(z[middle:recent], 4) @ up.T
        keys[0, head, :prefill] = torch.from_numpy(k)[:prefill]
        values[0, head, :prefill] = torch.from_numpy(v)[:prefill]
    exact = heads_out(model, tap.q, tap.k, tap.v)
    wanted = heads_out(model, tap.q, keys, values)[:, prefill:]
    found = attention_outputs(model, plan, ids, prefill=prefill)
    assert relative(found[:, :prefill], exact[:, :prefill]) < 1e-6  # lazy
    assert relative(found[:, prefill:], wanted) < 1e-4
    assert relative(exact[:, prefill:], wanted) > 1e-2
