"""Norms, rotations and gates of single tokens against torch's own chains; run by test_cases.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from kvprof.kernels.pointwise.launch import gated, normalised, rotated

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])

some = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 10**6)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@some
@given(st.integers(1, 3), st.integers(1, 300), st.sampled_from(DTYPES), seeds)
def test_norms_round_before_they_weigh(batch: int, width: int, dtype: torch.dtype, seed: int):
    states = random(seed, batch, 1, width, dtype=dtype)
    weight = random(seed + 1, width, dtype=dtype)
    wide = states.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    wanted = exact.to(dtype).double() * weight.double()
    found = normalised(states, weight, 1e-5)
    assert found.dtype == dtype
    apart = (found.double() - wanted).abs()
    assert bool((apart <= 2 * torch.finfo(dtype).eps * wanted.abs() + 1e-7).all())


@some
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
    seeds,
)
def test_rotations_are_those_of_the_chain_to_the_bit(
    batch: int,
    heads: int,
    kv: int,
    half: int,
    shared: bool,
    fused: bool,
    dtype: torch.dtype,
    seed: int,
):
    width = 2 * half
    if fused:  # one product makes queries, keys and values, and these are views of it
        made = random(seed, batch, 1, heads + 2 * kv, width, dtype=dtype)
        query, keys = (x.transpose(1, 2) for x in made.split([heads, 2 * kv], dim=2))
        keys = keys[:, :kv]
    else:
        query, keys = (
            random(seed + n, batch, 1, count, width, dtype=dtype).transpose(1, 2)
            for n, count in enumerate((heads, kv))
        )
    angle = random(seed + 2, 1 if shared else batch, 1, half, dtype=torch.float32)
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1).to(dtype) for f in (torch.cos, torch.sin))

    def turned(states: torch.Tensor) -> torch.Tensor:
        low, high = states[..., :half], states[..., half:]
        return states * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]

    found = rotated(query, keys, cos, sin)
    for own, states in zip(found, (query, keys), strict=True):
        assert fused or own.stride() == states.stride()
        assert torch.equal(own, turned(states))


@some
@given(st.integers(1, 3), st.integers(1, 3000), st.sampled_from(DTYPES), seeds)
def test_gates_are_silu_rounded_times_the_other(
    batch: int, width: int, dtype: torch.dtype, seed: int
):
    gate, up = (random(seed + n, batch, 1, width, dtype=dtype) for n in range(2))
    wanted = silu(gate).double() * up.double()
    apart = (gated(gate, up).double() - wanted).abs()
    assert bool((apart <= 3 * torch.finfo(dtype).eps * wanted.abs() + 1e-7).all())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a model's modules are replaced on a GPU alone")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_models_modules_are_taken_as_they_are_and_given_back(dtype: torch.dtype):
    from kvprof.runtime.pointwise import few_launches
    from tests.models.tiny import tiny

    model = tiny("Llama", head_dim=32).to(DEVICE, dtype).eval()
    ids = torch.arange(6, device=DEVICE).view(6, 1)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with torch.inference_mode():
        wanted = model(ids).logits
        with few_launches(model, rotations=True):
            assert sum("forward" in module.__dict__ for module in model.modules()) >= 3
            found = model(ids).logits
        again = model(ids).logits
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert torch.equal(again, wanted)
    assert (found - wanted).norm() / wanted.norm() < 4 * torch.finfo(dtype).eps
