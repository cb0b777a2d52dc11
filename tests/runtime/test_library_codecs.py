"""HQQ and quanto keep rows as their own functions do, in the bytes of the account."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.methods.accounting import bytes_at, full_bytes
from kvprof.methods.family import plan_for_rate
from kvprof.methods.quantisers import from_library
from kvprof.methods.registry import plan_family
from kvprof.methods.storage import LIBRARIES, Levels, Quantiser, load_library, row_layout
from kvprof.runtime.codecs import Codec, codec_for
from kvprof.runtime.compressed import compressed
from kvprof.runtime.rows import joined, picked, plain_part
from tests.methods.models import FINE, inputs
from tests.methods.models import model as tiny_model
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan, ragged

CASES = [(kind, bits) for kind, library in LIBRARIES.items() for bits in library.bits]


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["kind"]
    if find_spec(LIBRARIES[kind].module.partition(".")[0]) is None:
        pytest.skip(f"{LIBRARIES[kind].package} is not installed")
    load_library(kind)


def rows(tokens: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 3, tokens, columns, generator=generator) * 3 + 1).to(dtype)


def codec_of(kind: str, bits: int, group: int = 64) -> Codec:
    quantiser = from_library(kind, (bits,), group=group)
    return codec_for(quantiser, quantiser.keys, 0)


@pytest.mark.parametrize(("kind", "bits"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 5, 16, 48, 80, 128])
def test_stored_bytes_are_those_of_the_layout(
    kind: str, bits: int, dtype: torch.dtype, columns: int
) -> None:
    codec, x = codec_of(kind, bits), rows(7, columns, dtype)
    stored = codec.encode(x)
    layout = row_layout(kind, bits, columns, 64)
    assert stored["codes"].nbytes == 42 * layout.code_bytes
    assert stored["scale"].nbytes == 42 * layout.groups * dtype.itemsize
    assert ("zero" in stored) is layout.zeros
    assert all(tensor.shape[:3] == (2, 3, 7) for tensor in stored.values())
    back = codec.decode(stored, columns, dtype)
    assert back.shape == x.shape
    assert back.dtype == dtype


@pytest.mark.parametrize(("kind", "bits"), CASES)
@pytest.mark.parametrize("columns", [16, 80])
def test_error_is_that_of_as_many_levels(kind: str, bits: int, columns: int) -> None:
    x = rows(40, columns)
    codec = codec_of(kind, bits)
    error = codec.decode(codec.encode(x), columns, torch.float32) - x
    # Evenly spaced levels over a range of about 4.5 deviations; symmetric ones lose up to half.
    step = 3 * 4.5 / (2**bits - 1) * (1.5 if (kind, bits) == ("quanto", 8) else 1)
    assert error.square().mean().sqrt() < 0.5 * step
    assert error.square().mean().sqrt() > 0.15 * step


@pytest.mark.parametrize("kind", ["hqq"])
@pytest.mark.parametrize("bits", LIBRARIES["hqq"].bits)
def test_hqq_is_its_own_quantiser(kind: str, bits: int) -> None:
    quantizer = load_library("hqq").Quantizer
    x = rows(9, 64)
    # The library's own view of the same groups: 64 adjacent values, whatever they belong to.
    codes, meta = quantizer.quantize(
        x, nbits=bits, group_size=64, axis=1, bitpack=False, device=x.device
    )
    wanted = quantizer.dequantize(codes, {**meta, "compute_dtype": torch.float32})
    codec = codec_of(kind, bits)
    assert torch.allclose(codec.decode(codec.encode(x), 64, torch.float32), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["quanto"])
@pytest.mark.parametrize("bits", LIBRARIES["quanto"].bits)
def test_quanto_is_its_own_quantiser(kind: str, bits: int) -> None:
    quanto = load_library("quanto")
    x = rows(9, 64)
    flat, qtype = x.reshape(-1, 64), getattr(quanto, f"qint{bits}")
    if bits == 8:
        made = quanto.quantize_weight(flat, qtype, 0, quanto.AbsmaxOptimizer()(flat, qtype, 0))
        wanted = made.dequantize()
    else:
        # By its operator and formula: its own unpacking would compile a kernel first.
        scale, shift = quanto.MaxOptimizer()(flat, qtype, 0, 64)
        codes = torch.ops.quanto.quantize_affine(flat, bits, 0, 64, scale, shift)
        assert codes.max() == 2**bits - 1
        wanted = scale * codes - shift
    codec = codec_of(kind, bits)
    found = codec.decode(codec.encode(x), 64, torch.float32)
    assert torch.equal(found, wanted.reshape(x.shape))


@pytest.mark.parametrize(("kind", "bits"), CASES)
def test_one_row_alone_and_a_constant_one(kind: str, bits: int) -> None:
    codec = codec_of(kind, bits)
    one = rows(1, 16)[:1, :1]
    assert torch.isfinite(codec.decode(codec.encode(one), 16, torch.float32)).all()
    flat = torch.full((1, 1, 2, 16), 7.25)
    back = codec.decode(codec.encode(flat), 16, torch.float32)
    assert torch.allclose(back, flat, atol=0.02)


@pytest.mark.parametrize(("kind", "bits"), CASES)
def test_tokens_come_and_go_with_their_own_codes(kind: str, bits: int) -> None:
    codec = codec_of(kind, bits)
    old = plain_part(rows(8, 20)).recoded(codec, 20)
    more = joined([(old, 0, 8), (plain_part(rows(3, 20, seed=1)), 0, 3)], codec, 20)
    first = more.cut(0, 8)
    assert first is not None
    assert torch.equal(first.rows(), old.rows())
    index = torch.tensor([[[0, 5, 9], [1, 2, 10], [6, 7, 8]]]).expand(2, 3, 3)
    found = picked([more], index, codec, 20).rows()
    assert torch.equal(found, more.rows().gather(2, index.unsqueeze(-1).expand(2, 3, 3, 20)))


PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "ragged": {"ranks": ragged},
    "grouped": {"ranks": ragged, "heads": 2},
    "levels": {"ranks": lambda *a: (a[3] // 2, a[3]), "levels": Levels(2, (0.7, 0.3), 4)},
}


@pytest.mark.parametrize("arch", ["Llama", "Gemma3"])
@pytest.mark.parametrize(("kind", "bits"), CASES)
@pytest.mark.parametrize("name", PLANS)
def test_the_cache_stores_what_the_account_says(arch: str, kind: str, bits: int, name: str) -> None:
    model = loaded(arch)
    options = PLANS[name]
    levels = len(options.get("levels", Levels()).shares)
    plan = make_plan(model, **options, quantiser=from_library(kind, (bits,) * levels, group=8))
    with compressed(model, plan) as session, torch.inference_mode():
        cache = session.new_cache()
        model.model(token_ids(3, 21), past_key_values=cache)
        for step in range(3):
            model.model(token_ids(3, 1, seed=step), past_key_values=cache)
        assert cache.nbytes == bytes_at(plan, 24, itemsize=4, batch=3).total
        assert cache.allocated_bytes == pytest.approx(cache.nbytes, rel=0.01)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_generates_with_beams_padding_and_a_static_cache(kind: str) -> None:
    model = loaded("Llama")
    plan = make_plan(model, ranks=ragged, quantiser=from_library(kind, (8,)))
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    common = {"attention_mask": mask, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    with compressed(model, plan):
        for options in ({"num_beams": 2}, {"cache_implementation": "static"}):
            found = model.model.generate(token_ids(3, 12), do_sample=False, **common, **options)
            assert found.shape == (3, 16)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_more_bits_are_nearer(kind: str) -> None:
    model, ids = loaded("Llama"), token_ids(2, 30)
    wanted = model.model(ids).logits[:, -1]
    errors = []
    for bits in LIBRARIES[kind].bits:
        quantiser: Quantiser = from_library(kind, (bits,))
        with compressed(model, make_plan(model, quantiser=quantiser)) as session:
            cache = session.new_cache()
            model.model(ids[:, :-1], past_key_values=cache)
            found = model.model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        errors.append(float((found - wanted).detach().norm() / wanted.detach().norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("base", ["", "kq+", "tale+"])
def test_named_methods_run_and_store_what_they_account_for(kind: str, base: str) -> None:
    given = inputs("Llama")
    family = plan_family(base + kind, given, **(FINE if base else {}))
    plan = plan_for_rate(family, 0.3, 60)
    assert plan.quantiser is not None
    assert plan.quantiser.kind == kind
    model = tiny_model("Llama")
    with compressed(model, plan) as session, torch.inference_mode():
        cache = session.new_cache()
        logits = model.model(token_ids(2, 60), past_key_values=cache).logits
        assert logits.isfinite().all()
        assert cache.nbytes == bytes_at(plan, 60, itemsize=4, batch=2).total
        assert 1 - cache.nbytes / full_bytes(plan, 60, itemsize=4, batch=2) >= 0.3


@pytest.mark.parametrize("kind", ["hqq"])
def test_no_memory_is_handed_back_for_every_token(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(1))
    codec_of(kind, 4).encode(rows(3, 64))
    assert not asked
    torch.cuda.empty_cache()
    assert asked
