"""A run end to end on a CPU: rows hold together, and what fails leaves the others standing."""

from statistics import median

import pytest
import torch

from kvprof.benchmark import run as point_module
from kvprof.benchmark import run as run_module
from kvprof.benchmark.request import BenchRequest
from kvprof.benchmark.run import run_bench
from kvprof.errors import LackingError, UsageError
from kvprof.records.result import build_result
from kvprof.records.schema import validate_result
from tests.benchmark.folder import save_config
from tests.records.sample import ENVIRONMENT
from tests.views.synthetic_bench import bench_result

KEYS = {
    "method", "phase", "batch", "seq", "dtype", "schedule", "ranks", "rate", "seconds",
    "seconds_interval", "bytes_moved", "cache_bytes", "buffer_bytes", "tb_per_s", "bandwidth_share",
    "flop_per_s", "baseline", "baseline_seconds", "speedup", "speedup_interval", "error",
    "makespan_over_mean",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("small"))


def quickly(patch):
    """Measure no bandwidth, and let no thread wait for another on a machine that is shared."""
    patch.setattr("kvprof.benchmark.machine.cpu_read_bandwidth", lambda: 0.02)
    patch.setattr("kvprof.benchmark.machine.usable_threads", lambda: 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quickly(monkeypatch)


def request_for(folder, **changes):
    given = {
        "shape": folder,
        "seqs": (300,),
        "phases": ("decode",),
        "methods": ("full", "fdc", "kq"),
        "repeats": 3,
        "device": "cpu",
    }
    return BenchRequest(**{**given, **changes})


@pytest.fixture(scope="module")
def small_run(folder):
    with pytest.MonkeyPatch.context() as patch:
        quickly(patch)
        methods = ("full", "fp8", "fdc", "kq", "palu", "tale")
        return run_bench(request_for(folder, methods=methods, batches=(1, 2)))


def test_every_row_has_the_agreed_keys_and_fits_together(small_run):
    data, _ = small_run
    assert len(data["rows"]) == 12
    ran = {
        (entry["batch"], entry["name"]): median(entry["seconds"])
        for entry in data["baselines"]
        if entry["seconds"]
    }
    for row in data["rows"]:
        assert set(row) == KEYS
        middle = median(row["seconds"])
        assert len(row["seconds"]) == 3 == len(row["baseline_seconds"])
        if row["speedup"] is not None:
            assert row["speedup"] == pytest.approx(median(row["baseline_seconds"]) / middle)
            assert row["speedup_interval"][0] <= row["speedup"] <= row["speedup_interval"][1]
        assert row["seconds_interval"][0] <= middle <= row["seconds_interval"][1]
        assert row["tb_per_s"] == pytest.approx(row["bytes_moved"] / middle / 1e12)
        assert row["bandwidth_share"] == pytest.approx(row["tb_per_s"] / 0.02)
        assert row["error"] < 1e-5
        assert row["dtype"] == "float32"
        # Of one batch the baseline is the fastest of those that ran.
        own = {name: seconds for (batch, name), seconds in ran.items() if batch == row["batch"]}
        assert row["baseline"] == min(own, key=own.get)
        assert row["speedup"] > 0
    full = [row for row in data["rows"] if row["method"] == "full"]
    assert [(row["rate"], row["speedup"]) for row in full] == [(0, 1), (0, 1)]
    assert full[0]["ranks"] == {"keys": [64] * 4, "values": [64] * 4}


def test_rates_are_of_what_is_stored(small_run):
    rows = {(row["method"], row["batch"]): row for row in small_run[0]["rows"]}
    for batch in (1, 2):
        whole = 2 * batch * 300 * 4 * 64 * 4
        assert rows["full", batch]["cache_bytes"] == whole
        for method in ("fdc", "kq", "palu"):
            assert rows[method, batch]["rate"] == 0.5
            assert rows[method, batch]["cache_bytes"] == whole // 2
            assert rows[method, batch]["buffer_bytes"] == whole // 2
        # A byte a value, of 16 bits; the kernel's buffer has whole blocks of tokens.
        assert rows["fp8", batch]["rate"] == 0.5
        assert rows["fp8", batch]["buffer_bytes"] > rows["fp8", batch]["cache_bytes"]


def test_ranks_and_shape_are_told(small_run):
    data, _ = small_run
    assert "resampled" in data["ranks"]["source"]
    assert data["ranks"]["keys"] == data["ranks"]["methods"]["fdc"]["keys"]
    assert data["shape"]["num_kv_heads"] == 4
    assert data["bandwidth"]["tb_per_s"] == 0.02


def test_the_result_is_valid_and_says_what_does_not_run(small_run):
    data, warnings = small_run
    result = build_result(
        "bench",
        environment=ENVIRONMENT,
        data=data,
        warnings=warnings,
        inputs=bench_result()["inputs"],
    )
    validate_result(result)
    for entry in data["baselines"]:
        assert (entry["seconds"] is None) == (entry["reason"] is not None)


def test_a_method_without_memory_leaves_the_others(folder, monkeypatch):
    build = point_module.build_case

    def short(method, *arguments, **options):
        if method.name == "fdc":
            raise torch.OutOfMemoryError("no room")
        return build(method, *arguments, **options)

    monkeypatch.setattr(point_module, "build_case", short)
    data, warnings = run_bench(request_for(folder))
    assert [row["method"] for row in data["rows"]] == ["full", "kq"]
    assert any("fdc, decode" in text and "would fit" in text for text in warnings)


@pytest.mark.parametrize(
    ("problem", "told", "stops"),
    [
        (RuntimeError("a bug\nand much more about it"), "a bug", False),
        (UsageError("no such width"), "no such width", False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None, True),
    ],
)
def test_what_cannot_be_made_is_told_and_leaves_the_rows_that_are(
    folder, monkeypatch, problem, told, stops
):
    def broken(*_, **__):
        raise problem

    monkeypatch.setattr(point_module, "build_case", broken)
    data, warnings = run_bench(request_for(folder))
    assert [row["method"] for row in data["rows"]] == ["full"]
    assert told is None or any(text.endswith(f": {told}") for text in warnings)
    assert ("illegal memory access" in (data["stopped"] or "")) is stops


def test_an_interrupted_run_keeps_its_complete_rows(folder, monkeypatch):
    added = []
    add = point_module.add_row

    def counting(*arguments):
        added.append(arguments[0].name)
        add(*arguments)

    monkeypatch.setattr(point_module, "add_row", counting)
    data, _ = run_bench(request_for(folder), should_stop=lambda: "fdc" in added)
    assert [row["method"] for row in data["rows"]] == ["full", "fdc"]
    assert data["baselines"]


def test_a_wrong_result_has_no_speedup(folder, monkeypatch):
    build = point_module.build_case

    def wrong(method, *arguments, **options):
        case = build(method, *arguments, **options)
        runs = case.runs
        case.runs = [lambda: runs[0]() * 1.1]
        return case

    monkeypatch.setattr(point_module, "build_case", wrong)
    data, warnings = run_bench(request_for(folder, methods=("full", "fdc")))
    row = data["rows"][1]
    assert row["error"] == pytest.approx(0.1, rel=1e-3)
    assert row["speedup"] is None
    assert any("wrong" in text for text in warnings)


def test_what_cannot_fit_is_refused_before_it_is_made(folder, monkeypatch):
    monkeypatch.setattr(run_module, "free_bytes", lambda _: 40 * 2**20)
    monkeypatch.setattr(run_module, "measure", lambda *_: None)
    with pytest.raises(LackingError, match="the largest context that fits is about"):
        run_bench(request_for(folder, seqs=(2**20,)))
    _, warnings = run_bench(request_for(folder, seqs=(300, 2**20)))
    assert any(text.startswith("left out: decode at batch 1 and 1,048,576") for text in warnings)


def test_a_prefill_is_shortened_and_methods_without_one_are_told(folder, monkeypatch):
    measured = []
    monkeypatch.setattr(run_module, "measure", lambda point, *_: measured.append(point.workload))
    monkeypatch.setattr(run_module, "flop_rate", lambda *_: 1e9)
    methods = ("full", "fdc", "fp8", "tale", "palu")
    _, warnings = run_bench(
        request_for(folder, phases=("prefill",), seqs=(4096, 8192), methods=methods)
    )
    assert [workload.seq for workload in measured] == [512]
    assert any("measured at 512 tokens" in text for text in warnings)
    for name in ("fp8", "tale", "palu"):
        assert any(text.startswith(f"{name} has no prefill row") for text in warnings)


def test_a_model_of_windows_is_measured_at_its_window(tmp_path, monkeypatch):
    from transformers import MistralConfig

    MistralConfig(num_hidden_layers=2, sliding_window=256).save_pretrained(tmp_path)
    measured = []
    monkeypatch.setattr(run_module, "measure", lambda point, *_: measured.append(point.workload))
    _, warnings = run_bench(request_for(tmp_path, seqs=(1024,)))
    assert measured[0].seq == 256
    assert any("sliding window of 256" in text for text in warnings)


def test_widths_off_the_grid_warn(folder, tmp_path, monkeypatch):
    (tmp_path / "r.json").write_text("[[33, 20], [64, 64], [64, 64], [64, 64]]")
    monkeypatch.setattr(run_module, "measure", lambda *_: None)
    data, warnings = run_bench(request_for(folder, ranks=tmp_path / "r.json"))
    assert data["ranks"]["keys"][0] == 48
    assert sum("rounded up" in text for text in warnings) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seqs": (0,)}, "--seq 0"),
        ({"seqs": ()}, "--seq 0"),
        ({"batches": (0,)}, "--batch 0"),
        ({"repeats": 2}, "--repeats 2"),
        ({"phases": ("train",)}, "no phase 'train'"),
        ({"methods": ("zip",)}, "'zip' is unknown"),
        ({"methods": ()}, "no method"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        BenchRequest(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_lacking(folder):
    with pytest.raises(LackingError):
        run_bench(request_for(folder, device="cuda"))
