"""A case counts what its tensors really hold, and its reference sees a wrong result."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvprof.benchmark import case as case_module
from kvprof.benchmark import cases
from kvprof.benchmark.baselines import baseline_builders, uncompressed_inputs
from kvprof.benchmark.case import Lack, Sample, Workload, attention64, relative_error
from kvprof.benchmark.cases import build_case
from kvprof.benchmark.limits import largest_context, needed_bytes, prefill_length, shortage
from kvprof.benchmark.machine import Machine
from kvprof.benchmark.shapes import Rope, Shape, load_shape
from kvprof.benchmark.timing import sampler
from kvprof.errors import UsageError
from tests.benchmark.on_shapes import method_on

CPU = torch.device("cpu")
SMALL = Shape("small", "here", 2, 512, 8, 4, 64, Rope("default", 1e4), 4096, 0.125)
SINKS = replace(SMALL, sinks=True, softcap=20.0)


def workload(shape=SMALL, phase="decode", batch=2, seq=150, dtype=torch.float32, cache=0):
    return Workload(shape, phase, batch, seq, dtype, CPU, cache, seed=3)


def case(name, where, rate=None):
    return build_case(method_on(name, where.shape, rate), where)


@pytest.mark.parametrize("shape", [SMALL, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", ["fdc", "kq", "uniform", "palu", "palu:heads=1", "palu-folded"])
def test_a_decoding_step_agrees_with_float64(name, shape):
    built = case(name, workload(shape))
    output = sampler(built.runs, CPU).output()
    assert built.error(output) < 1e-5
    assert built.error(output * 1.01) > 5e-3
    broken = output.clone()
    broken[-1, -1] = float("nan")
    assert built.error(broken) == float("inf")


@pytest.mark.parametrize("shape", [SMALL, SINKS], ids=["plain", "sinks"])
def test_a_prefill_agrees_with_float64(shape):
    built = case("fdc", workload(shape, phase="prefill", seq=70))
    output = sampler(built.runs, CPU).output()
    assert tuple(output.shape) == (2, 70, 2 * sum(built.ranks["values"]))
    assert built.error(output) < 1e-5
    # A position that saw one token too many would show.
    assert built.error(output.roll(-1, dims=1)) > 0.1
    kept = sum(built.ranks["keys"] + built.ranks["values"])
    assert built.flops == 2 * 2 * (70 * 71 // 2) * 2 * kept
    states = 2 * 70 * 2 * kept * 4  # queries and outputs are as wide as K and V, G times
    assert built.bytes_moved == built.buffer_bytes + states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_within_its_own(dtype):
    built = case("fdc", workload(dtype=dtype))
    assert built.error(built.runs[0]()) < 1e-2


def test_bytes_are_those_of_the_tensors():
    where = workload()
    built = case("fdc", where)
    kept = sum(built.ranks["keys"] + built.ranks["values"])
    assert built.buffer_bytes == 2 * 150 * kept * 4
    query = 2 * 2 * sum(built.ranks["keys"]) * 4
    output = 2 * 2 * sum(built.ranks["values"]) * 4
    assert built.runs[0]().nbytes == output
    assert built.bytes_moved == built.buffer_bytes + query + output
    assert 1 - built.buffer_bytes / where.full_bytes == 0.5
    # Two flops per multiplication: scores over K's columns, values over V's.
    assert built.flops == 2 * 2 * 150 * 2 * kept


def test_palu_counts_what_rebuilds_the_keys():
    where = workload()
    built = case("palu", where)
    assert built.ranks == {"keys": [128], "values": [128]}
    assert built.buffer_bytes == 2 * 150 * 256 * 4
    up, tables = 256 * 128 * 4, 2 * 150 * 32 * 4
    query, output = 2 * 8 * 64 * 4, 2 * 8 * 128 * 4
    assert built.bytes_moved == built.buffer_bytes + up + tables + query + output
    assert built.flops == 2 * 2 * 150 * 256 * 128 + 2 * 2 * 150 * 8 * (64 + 128)


QUANTISED = [
    "fp8",
    "tale",
    "tale:bits=none",
    "fdc-4bit",
    "kq-2bit",
    "uniform-8bit",
    "palu-folded-4bit",
]


@pytest.mark.parametrize("shape", [SMALL, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_step_over_quantised_storage_agrees_with_what_is_stored(name, shape):
    built = case(name, workload(shape))
    output = sampler(built.runs, CPU).output()
    assert built.error(output) < 1e-5
    assert built.error(output * 1.01) > 5e-3


def test_bytes_of_quantised_storage_count_scales_and_zeros():
    where = workload(seq=256)
    assert case("fp8", where).buffer_bytes == 2 * 256 * 4 * 128
    built = case("uniform-4bit", where)
    # Half a byte a value, and a scale and a zero of two bytes per 32 columns.
    assert built.buffer_bytes == 2 * 256 * 4 * 2 * (32 // 2 + 4)
    query, output = 2 * 8 * 32 * 4, 2 * 8 * 32 * 4
    assert built.bytes_moved == built.buffer_bytes + query + output
    assert built.flops == 2 * 2 * 256 * 8 * (32 + 32)


def test_tale_at_its_published_setting_has_the_rate_that_is_known_in_bytes():
    where = workload(batch=1, seq=20_480, dtype=torch.bfloat16)
    built = case("tale", where)
    # A segment is whole blocks of tokens, which costs two per cent at this length.
    assert where.full_bytes / built.buffer_bytes == pytest.approx(6.34, rel=2.5e-2)
    assert built.ranks == {"keys": [64] * 4, "values": [32] * 4}
    plain = case("tale:bits=none", where)
    assert where.full_bytes / plain.buffer_bytes == pytest.approx(1.29, rel=1e-2)
    # Of K every column, of V half of them in nine tenths of the tokens.
    assert built.flops == pytest.approx(2 * 20_480 * 8 * 64 * 1.55, rel=1e-3)
    with pytest.raises(UsageError, match="more than 8 tokens"):
        case("tale", workload(seq=8))


def test_a_model_without_rope_rebuilds_nothing():
    built = case("palu", workload(replace(SMALL, rope=Rope("none", None))))
    assert built.flops == 2 * 2 * 150 * 8 * (128 + 128)
    assert built.error(built.runs[0]()) < 1e-5


def test_inputs_are_copied_until_no_cache_holds_them():
    one = case("fdc", workload()).buffer_bytes
    built = case("fdc", workload(cache=2 * one))
    assert len(built.runs) == 4
    outputs = [run() for run in built.runs]
    assert not torch.equal(outputs[0], outputs[1])
    assert len(case("fdc", workload(cache=2**40)).runs) == 16


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_torchs_uncompressed_forms_agree_with_float64(phase):
    where = workload(phase=phase, seq=70)
    inputs = uncompressed_inputs(where)
    found = {}
    for name, build in baseline_builders(where, 2**30).items():
        built = build(inputs)
        found[name] = built.error(sampler(built.runs, CPU).output())
        assert built.name == name
        copies = where.shape.group if name.endswith("expanded") else 1
        assert built.buffer_bytes == copies * where.full_bytes
    # A step's math is that of rows: left grouped it would repeat K and V in every call.
    math = "sdpa-math-rows" if phase == "decode" else "sdpa-math"
    assert {"kvprof", "sdpa-flash", math, "sdpa-flash-expanded"} <= set(found)
    assert sum("math" in name for name in found) == 1
    assert max(found.values()) < 1e-5, found


def test_expanded_heads_count_what_they_read_and_are_refused_without_room():
    where = workload()
    build = baseline_builders(where, 2**30)["sdpa-flash-expanded"]
    built = build(uncompressed_inputs(where))
    assert built.bytes_moved == 2 * where.full_bytes + 2 * 2 * 8 * 64 * 4
    build = baseline_builders(where, where.full_bytes)["sdpa-flash-expanded"]
    with pytest.raises(Lack):
        build(uncompressed_inputs(where))


def test_the_reference_is_attention():
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (6, 9, 9)
    )
    wanted = scaled_dot_product_attention(query[None], keys[None], values[None], scale=0.3)[0]
    sample = Sample(query.view(3, 2, 8), keys, values, wanted.view(3, 2, 8))
    assert torch.allclose(attention64(sample, 0.3).reshape(6, 8), wanted)
    assert relative_error([sample], 0.3) < 1e-12
    # A causal position sees only what came before it.
    seen = replace(sample, visible=torch.tensor([1, 4, 9]))
    first = attention64(seen, 0.3)[0]
    assert torch.allclose(first, values[0].expand(2, 8))
    # A sink takes weight and gives nothing.
    sunk = attention64(replace(sample, sinks=torch.tensor([50.0, -50.0])), 0.3)
    assert sunk[:, 0].abs().max() < 1e-9
    assert torch.allclose(sunk[:, 1], attention64(sample, 0.3)[:, 1])


def test_what_does_not_fit_is_refused_with_what_would():
    llama = load_shape("Llama-3.1-8B")
    where = workload(llama, batch=8, seq=10 * 2**20, dtype=torch.bfloat16)
    free = 100 * 2**30
    most = largest_context(where, free)
    assert needed_bytes(replace(where, seq=most)) <= free
    assert needed_bytes(replace(where, seq=most + 2048)) > free
    said = shortage(where, free)
    assert said is not None
    assert f"{most // 1024}k tokens" in said
    assert "100.0 GiB are free" in said
    assert shortage(replace(where, seq=most), free) is None
    assert "try --batch 1" in shortage(where, 1)
    # Uncompressed K and V are the least that must fit.
    assert needed_bytes(where) > 2 * where.full_bytes


def test_a_prefill_is_as_long_as_the_time_allows():
    machine = Machine(CPU, None, "", 0)
    where = workload(load_shape("Llama-3.1-8B"), phase="prefill", batch=1, seq=102_400)
    columns = 32 * 128
    for rate in (1e9, 1e11, 1e13, 1e18):
        length = prefill_length(where, machine, rate)
        assert length in (512, 102_400) or (
            length & (length - 1) == 0
            and replace(where, seq=length).attention_flops(columns, columns) <= 0.2 * rate
            and replace(where, seq=2 * length).attention_flops(columns, columns) > 0.2 * rate
        )
    assert prefill_length(where, machine, 1e9) == 512
    assert prefill_length(where, machine, 1e18) == 102_400
    assert prefill_length(replace(where, seq=100), machine, 1e3) == 100


@pytest.mark.parametrize("name", ["fdc-4bit", "fp8", "tale"])
def test_long_segments_repeat_what_was_drawn(name, monkeypatch):
    monkeypatch.setattr(cases, "_DISTINCT", 256)
    built = case(name, workload(seq=1500))
    assert built.error(sampler(built.runs, CPU).output()) < 1e-4
    sample = next(iter(built.samples(built.runs[0]())))
    tokens = [row for row in sample.keys.round(decimals=6).tolist() if any(row)]
    segments = 3 if name == "tale" else 1
    assert len(tokens) == 1500
    assert 256 <= len({tuple(row) for row in tokens}) <= segments * 256


def test_large_inputs_repeat_on_a_cpu(monkeypatch):
    monkeypatch.setattr(case_module, "_PERIOD", 101)
    where = workload()
    values = where.random(where.generator(), 3, 7, 16).flatten()
    assert torch.equal(values[101:202], values[:101])
    assert torch.equal(values[303:], values[: 336 - 303])
    assert len(values[:101].unique()) > 90
