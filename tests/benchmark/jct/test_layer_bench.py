"""One layer and its parts on a CPU: every method runs, is right, and holds together."""

import pytest
import torch

from kvprof.analysis.bases import eigenbasis
from kvprof.benchmark.jct import layer, layer_bench, stored
from kvprof.benchmark.jct.model_shape import Dense
from kvprof.benchmark.jct.stored import strawman_attention
from kvprof.benchmark.shapes import Rope
from kvprof.errors import Interrupted, UsageError
from kvprof.records.parts import PARTS
from tests.benchmark.jct.shapes import tiny_bench, tiny_shape
from tests.benchmark.on_shapes import method_on

METHODS = {
    "full": (set(), set()),
    "fp8": ({"quantise"}, {"quantise", "schedule"}),
    "fdc": ({"compress"}, {"compress", "schedule"}),
    "kq": ({"compress"}, {"compress", "schedule"}),
    "palu": ({"compress", "decompress"}, {"compress", "decompress", "schedule"}),
    "palu:heads=1": ({"compress", "decompress"}, {"compress", "decompress", "schedule"}),
    "palu-folded": ({"compress"}, {"compress", "schedule"}),
    "tale": ({"compress", "quantise"}, {"compress", "quantise", "schedule"}),
    "fdc-4bit": ({"compress", "quantise"}, {"compress", "quantise", "schedule"}),
    "strawman": ({"basis", "compress"}, {"compress", "decompress"}),
    "fdc:no-post-rope": ({"compress", "decompress"}, {"compress", "decompress", "schedule"}),
    "fdc:no-adaptive-rates": ({"compress"}, {"compress", "schedule"}),
}
COMMON = {"norm", "qkv_proj", "rope", "attention", "o_proj", "mlp"}
ONCE = {"embedding", "rope", "norm", "head", "sampling"}


@pytest.fixture(scope="module")
def bench():
    return tiny_bench()


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_method_has_its_parts(bench, name, phase):
    method = method_on(name, bench.model.attention)
    tokens = 96 if phase == "decode" else 80
    point = bench.point(method, bench.workload(phase, 2, tokens))
    extra = METHODS[name][phase == "decode"]
    common = COMMON - ({"rope"} if name == "palu-folded" else set())
    assert set(point.parts) == common | extra - {"schedule"}
    assert set(point.passes) == ONCE | extra & {"schedule"}
    assert {*point.parts, *point.passes} <= set(PARTS)
    assert point.layer > 0
    assert point.tokens == tokens


def test_what_two_methods_share_is_measured_once(bench):
    workloads = [bench.workload("decode", 1, 64)] * 2
    full, uniform = (
        bench.point(method, workload)
        for method, workload in zip(
            (method_on(name, bench.model.attention) for name in ("full", "uniform")),
            workloads,
            strict=True,
        )
    )
    assert full.parts["mlp"] == uniform.parts["mlp"]
    assert full.passes["head"] == uniform.passes["head"]
    # A folded basis makes projections narrower: that is other work.
    assert full.parts["qkv_proj"] != uniform.parts["qkv_proj"]
    again = bench.point(method_on("full", bench.model.attention), workloads[0])
    assert again is full


def test_rebuilding_is_a_difference_of_two_times(bench):
    method = method_on("palu", bench.model.attention)
    workload = bench.workload("decode", 1, 128)
    point = bench.point(method, workload)
    assert point.labels["by_difference"] == "decompress"
    assert point.parts["attention"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": Rope("none", None)},
        {"qk_norm": True},
        {"sinks": True},
        {"softcap": 20.0},
        {"dense": Dense(64, 96, experts=4, experts_per_token=2)},
        {"dense": Dense(128, 96, gated=False)},
    ],
)
def test_other_kinds_of_models_are_composed_too(changes):
    bench = tiny_bench(tiny_shape(**changes))
    for name in ("full", "fdc", "palu", "fp8"):
        if name == "full" and {"sinks", "softcap"} & set(changes):
            continue  # torch's own kernels know neither, which is their label's to say
        method = method_on(name, bench.model.attention)
        point = bench.point(method, bench.workload("decode", 1, 40))
        assert ("rope" in point.parts) == (bench.model.attention.rope.kind != "none")


def test_an_interrupt_leaves_no_half_measured_point():
    bench = tiny_bench(should_stop=lambda: True)
    with pytest.raises(Interrupted):
        bench.point(method_on("full", bench.model.attention), bench.workload("decode", 1, 40))


def test_levels_need_some_tokens():
    bench = tiny_bench()
    method = method_on("tale", bench.model.attention)
    with pytest.raises(UsageError, match="levels"):
        bench.point(method, bench.workload("decode", 1, 6))


def test_a_times_own_way_of_being_timed_is_taken():
    class Own:
        note = None

    own = Own()
    unit = layer.PartCall("host", [lambda: torch.ones(1)], ("own",), sampler=own)
    assert layer.call_sampler(unit, torch.device("cpu")) is own


def test_a_layers_interval_lies_around_its_median():
    bench = tiny_bench()
    method = method_on("full", bench.model.attention)
    point = bench.point(method, bench.workload("prefill", 1, 40))
    low, high = point.ends
    assert 0 < low <= 1 <= high


@pytest.mark.parametrize("parts_too", [False, True])
def test_a_layer_that_no_graph_holds_is_the_sum_of_parts_that_graphs_hold(monkeypatch, parts_too):
    class Slow:
        note = "timed without a CUDA graph"

        def sample(self):
            return 9.0

    told = []
    timed = layer_bench.call_sampler
    monkeypatch.setattr(layer_bench, "layer_sampler", lambda units, device, pool: Slow())
    if parts_too:
        monkeypatch.setattr(
            layer_bench,
            "call_sampler",
            lambda unit, device, pool: Slow() if unit.part == "mlp" else timed(unit, device),
        )
    bench = tiny_bench(warn=told.append)
    point = bench.point(method_on("full", bench.model.attention), bench.workload("prefill", 1, 40))
    assert any("without a CUDA graph" in text for text in told)
    assert any("sum of its parts" in text for text in told) != parts_too
    assert point.layer == (9.0 if parts_too else pytest.approx(sum(point.parts.values())))
    assert (point.ends is None) != parts_too


def test_what_waits_for_the_host_is_never_captured(monkeypatch):
    """cuSOLVER and copies to the host break a capture, and stay broken after it."""
    captured, synchronised = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronised.append(1))

    class Fake:
        note = None

        def sample(self):
            return 2.0

    def sampler(runs, device, *, settle, pool):
        assert not settle
        captured.append([run() for run in runs])
        return Fake()

    asked = []
    monkeypatch.setattr(stored, "eigenbasis", lambda gram: asked.append(1) or eigenbasis(gram))
    monkeypatch.setattr(layer, "sampler", sampler)
    bench, device = tiny_bench(), torch.device("cuda")
    method = method_on("strawman", bench.model.attention)
    units = strawman_attention(
        bench.workload("prefill", 1, 40), method.kept, bench._full, None
    ).calls
    (basis,) = [unit for unit in units if unit.part == "basis"]
    whole = layer.layer_sampler([unit for unit in units if unit is not basis], device)
    assert len(captured) == 1
    assert not asked
    whole, alone = layer.layer_sampler(units, device), layer.call_sampler(basis, device)
    assert len(captured) == 2
    assert len(asked) == 2  # to warm up, outside of any graph
    asked.clear()
    assert whole.sample() > 2.0
    assert alone.sample() not in (0.0, 2.0)  # a clock's own reading
    assert len(synchronised) == 4
    found = basis.runs[0]()
    assert torch.allclose(found.mT @ found, torch.eye(32, dtype=found.dtype), atol=1e-6)
