"""Whatever ``plan`` makes is timed by its plan, or refused with why no kernel runs it."""

import shlex
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvprof.benchmark.case import Workload
from kvprof.benchmark.cases import build_case
from kvprof.benchmark.methods import make_methods
from kvprof.benchmark.plans import stored_parts
from kvprof.benchmark.shape_plans import parse_method, shape_plan
from kvprof.benchmark.shapes import Rope, Shape, layout_of, load_shape
from kvprof.benchmark.timing import sampler
from kvprof.errors import Interrupted, UsageError
from kvprof.methods.accounting import bytes_at, compression_ratio, paper_rate
from kvprof.methods.family import MethodInputs, plan_at
from kvprof.methods.named import METHOD_NAMES, method_entries
from kvprof.methods.plan_files import save_plan
from kvprof.methods.registry import plan_family
from kvprof.moments.calibrator import Calibrator
from kvprof.records.files import read_result
from tests.benchmark.folder import save_config
from tests.benchmark.on_shapes import method_on
from tests.commands.running import kvprof, words_of
from tests.conftest import calibrate_on_few
from tests.models.tiny import tiny

CPU = torch.device("cpu")
SMALL = Shape("small", "here", 2, 512, 8, 4, 64, Rope("default", 1e4), 4096, 0.125)


def made(*names, shape=SMALL, plans=None, model="Llama-3.1-8B", rate=0.5):
    return make_methods(
        names,
        shape,
        model=model,
        rate=rate,
        ranks=None,
        plans=plans or {},
        device=CPU,
        dtype=torch.float32,
        tokens=256,
    )


def placed(shape=SMALL, seq=256):
    return Workload(shape, "decode", 2, seq, torch.float32, CPU, seed=3)


def test_a_method_may_have_a_rate_of_its_own() -> None:
    few = made("fdc", "fdc-4bit:rate=0.75", "kq:rate=25%,kinds=2", "fp8:rate=0.5", rate=0.5)
    assert [one.rate(256) for one in few] == pytest.approx([0.5, 0.75, 0.25, 0.5], abs=0.02)
    for beyond in ("fp8:rate=0.7", "fdc-4bit", "kq:rate=1"):
        with pytest.raises(UsageError):
            made("fdc", beyond)


def test_every_method_of_a_benchmark_reaches_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    lines = import_module("commands").COMMANDS.values()
    timed = [shlex.split(line) for line in lines if str(line).startswith("bench ")]
    assert timed
    for words in timed:
        given = dict(pairwise(words))
        shape = load_shape(given.get("--model", "Llama-3.1-8B"))
        names = [label for label, _, _ in method_entries(given["--methods"])]
        rate = float(given.get("--rate", 0.5))
        assert len(made(*names, shape=shape, rate=rate)) == len(names)


@pytest.mark.parametrize(
    "name",
    [
        *("fdc-3bit", "kq-4bit-row", "uniform-8bit-g16", "full-8bit", "per-token", "tale-4bit"),
        *("palu", "kq-k8v4", "fdc-k4v8-row", "per-token:bits=k8v2", "fp8:scale=none"),
        "per-token:bits=8,skip=0",
    ],
)
def test_what_comes_on_top_is_stored_as_the_plan_says(name):
    (method,) = made(
        name, rate=0.8 if name in ("fdc-3bit", "kq-4bit-row", "kq-k8v4", "fdc-k4v8-row") else 0.5
    )
    built = build_case(method, placed())
    output = sampler(built.runs, CPU).output()
    assert built.error(output) < 1e-5
    plan = method.plan
    counted = bytes_at(plan, 256, itemsize=4, batch=2).total
    if left := sum(layer.left_out for layer in plan.layers):  # timed is the other layer
        counted = 2 * (counted - left * 2 * 2 * 4 * 64 * 4 * 256)
    # Blocks are whole, and 3 bits lie in the container of 4; a plan is of both layers.
    assert counted / 2 <= built.buffer_bytes <= 1.35 * counted / 2 + 2 * 4 * 4 * 256 * 64


def test_unlike_bits_are_each_sides_own():
    for name, bits in (("kq-k8v4", (8, 4)), ("per-token:bits=k2v3", (2, 3)), ("full-4bit", (4, 4))):
        (method,) = made(name, rate=0.7)
        (part,) = stored_parts(method.plan, 256)
        assert (part.key_bits, part.value_bits) == bits


def test_tales_levels_are_those_of_its_plan():
    (method,) = made("tale")
    plan = method.plan
    assert compression_ratio(paper_rate(plan)) == pytest.approx(9.14, abs=5e-3)
    parts = stored_parts(plan, 1004)
    assert [part.tokens for part in parts] == [4, 900, 100]
    assert [part.key_bits for part in parts] == [None, 2, 4]
    assert [part.values[0] for part in parts] == [64, 32, 64]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fdc+h2o", "tokens are evicted"),
        ("sink-recent", "tokens are evicted"),
        ("fdc+kivi", "32"),
        ("palu-4bit", "keys are rebuilt before RoPE and latents are quantised"),
        ("kivi:bits=k4v2", "32"),
        ("kvquant", "latents are quantised by codebook"),
        ("strawman", "online"),
        ("fp8-4bit", "quantised"),
        ("kvtc", "not for decoding from it"),
        ("xkv", "several layers share a latent"),
        ("xkv:bases=calibration", "--plan FILE"),
        ("tale+kivi", "32"),
    ],
)
def test_what_cannot_be_timed_says_why_in_a_line(name, why):
    with pytest.raises(UsageError, match=why) as refused:
        made(name, rate=0.75 if name in ("palu-4bit", "fdc+kivi") else 0.5)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["zack:grid=32", "svd-kv", "fdc:grid=32", "palu:grid=64", "svd-kv-4bit"]
)
def test_what_is_calibrated_elsewhere_plans_here_on_heads_that_are_alike(name):
    (method,) = made(name, rate=0.75 if "4bit" in name else 0.5)
    assert "singular values" in method.warnings[0]
    assert len(set(method.kept.keys)) == len(set(method.kept.values)) == 1
    built = build_case(method, placed())
    assert built.error(sampler(built.runs, CPU).output()) < 1e-5
    counted = bytes_at(method.plan, 256, itemsize=4, batch=2).total
    assert method.nbytes(2, 256, torch.float32) * SMALL.layers == counted


@pytest.mark.parametrize("rope", ["default", "none"])
def test_zack_has_the_ranks_of_fdc_and_folds_where_there_is_no_rope(rope):
    shape = replace(SMALL, rope=Rope(rope, 1e4 if rope == "default" else None))
    zack, fdc = made("zack:kinds=4", "fdc:kinds=4", shape=shape, rate=0.4)
    assert zack.kept == fdc.kept
    assert len(set(zip(zack.kept.keys, zack.kept.values, strict=True))) > 1
    assert not zack.warnings
    folded = {layer.keys.fold_down for layer in zack.plan.layers}
    assert folded == {rope == "none"}
    assert not any(layer.keys.fold_down for layer in fdc.plan.layers)


def test_an_installed_method_needs_no_weights_to_be_timed(site):
    (method,) = made("keys-only", rate=0.25)
    assert method.form == "ragged"
    assert method.kept.keys == (32,) * 4
    assert method.kept.values == (64,) * 4
    assert "no weights" in method.warnings[0]


def test_what_no_kernel_runs_is_refused_before_a_calibration(tiny_folder, monkeypatch):
    def calibrated(self, method, **options):
        raise AssertionError(method)

    monkeypatch.setattr(Calibrator, "family", calibrated)
    shape = load_shape(tiny_folder)
    for name, why in (("oscar", "clipped"), ("kq:grid=4,minimum=4", "multiples of 16")):
        with pytest.raises(UsageError, match=f"no kernel can run it: .*{why}"):
            made(name, shape=shape, model=str(tiny_folder))


def test_every_method_of_plan_is_known_here_with_its_options():
    for name in METHOD_NAMES:
        assert parse_method(name).name == name
    options = dict(parse_method("kq:grid=32,minimum=8").options)
    assert options == {"grid": 32, "minimum": 8}
    with pytest.raises(UsageError, match="kq has no option nope"):
        parse_method("kq:nope=1")
    with pytest.raises(UsageError, match="did you mean kq"):
        parse_method("kqq")


@pytest.mark.parametrize("name", ["fdc", "palu", "tale", "fdc-4bit", "palu-4bit", "fdc+h2o"])
def test_a_saved_plan_is_timed_by_its_own_widths_or_refused(name, tmp_path):
    asked = parse_method(name)
    rate = 0.75 if "4bit" in name else 0.5
    own = shape_plan(asked, SMALL, rate, tokens=256)
    save_plan(own.plan, tmp_path / "my.plan")
    plans = {"my.plan": str(tmp_path / "my.plan")}
    refused = {"palu-4bit": "latents are quantised", "fdc+h2o": "evicted"}.get(name)
    if refused:
        with pytest.raises(UsageError, match=rf"^my\.plan: no kernel can run it: .*{refused}"):
            made("my.plan", plans=plans)
        return
    (method,) = made("my.plan", plans=plans)
    named = method_on(name, SMALL, rate)
    assert (method.kept.keys, method.kept.values) == (named.kept.keys, named.kept.values)
    built = build_case(method, placed())
    assert built.error(sampler(built.runs, CPU).output()) < 1e-5
    assert built.buffer_bytes == build_case(named, placed()).buffer_bytes
    with pytest.raises(UsageError):
        made("my.plan", plans=plans, shape=replace(SMALL, head_dim=32))


def test_a_shape_is_laid_out_as_a_model():
    windowed = replace(SMALL, layers=3, sliding_window=64, window_pattern="WF")
    facts = layout_of(windowed).layers
    assert [one.sliding_window for one in facts] == [64, None, 64]
    assert {one.position for one in facts} == {"rope"}
    assert layout_of(replace(SMALL, rope=Rope("none", None))).layers[0].rotary_dim == 0


def test_an_installed_method_is_timed_by_both(site, tmp_path, monkeypatch):
    monkeypatch.setattr("kvprof.benchmark.machine.cpu_read_bandwidth", lambda: 0.02)
    calibrate_on_few(monkeypatch)
    folder = tmp_path / "model"
    tiny("Llama", head_dim=32).save_pretrained(folder)
    common = ("--model", folder, "--rate", "0.25", "--device", "cpu", "--repeats", "3")
    names = ("--methods", "full,keys-only")
    done = kvprof(
        "bench", *common, *names, "--seq", "64", "--phase", "decode", "--json", tmp_path / "b.json"
    )
    assert done.code == 0, done.stderr
    full, keys_only = read_result(tmp_path / "b.json")["data"]["rows"]
    assert keys_only["cache_bytes"] == 0.75 * full["cache_bytes"]
    assert keys_only["error"] < 1e-4
    done = kvprof(
        *words_of("bench --jct --composed"),
        *common,
        *names,
        *words_of(f"--input-len 32 --output-len 2 --json {tmp_path}/j.json"),
    )
    assert done.code == 0, done.stderr
    cases = read_result(tmp_path / "j.json")["data"]["cases"]
    assert [case["rate"] for case in cases] == [0, pytest.approx(0.25)]


def test_a_plan_file_is_timed_beside_uncompressed_by_both(tmp_path, monkeypatch):
    monkeypatch.setattr("kvprof.benchmark.machine.cpu_read_bandwidth", lambda: 0.02)
    folder = save_config(tmp_path / "model")
    shape = load_shape(folder)
    given = MethodInputs(layout_of(shape), "of another model")
    fp8 = plan_family("fp8", given, scale="none")
    save_plan(plan_at(fp8, 8.0), tmp_path / "eight.plan")
    common = ("--model", folder, "--plan", tmp_path / "eight.plan", "--device", "cpu")
    done = kvprof("bench", *common, "--seq", "64", "--repeats", "3", "--json", tmp_path / "b.json")
    assert done.code == 0, done.stderr
    result = read_result(tmp_path / "b.json")
    assert result["inputs"]["methods"] == ["full", "eight.plan"]
    rows = {(row["method"], row["phase"]): row for row in result["data"]["rows"]}
    assert rows["eight.plan", "decode"]["rate"] == 0.5
    assert any("eight.plan has no prefill row" in text for text in result["warnings"])
    asked = ("--jct", "--input-len", "64", "--output-len", "2", "--repeats", "3")
    done = kvprof("bench", *asked, *common, "--json", tmp_path / "j.json")
    assert done.code == 0, done.stderr
    cases = read_result(tmp_path / "j.json")["data"]["cases"]
    assert [(case["method"], case["rate"]) for case in cases] == [("full", 0), ("eight.plan", 0.5)]
    done = kvprof("bench", *common, "--plan", tmp_path / "other" / "eight.plan")
    assert done.code == 2
    assert "rename the file" in done.error
    done = kvprof("bench", "--plan", tmp_path / "nothing", "--device", "cpu")
    assert done.code == 2
    assert "nothing" in done.error


def test_a_calibration_that_is_interrupted_ends_as_every_interrupted_run(monkeypatch):
    def stopped(*_arguments, **_options):
        raise Interrupted("interrupted after 0 of 8,192")

    monkeypatch.setattr(Calibrator, "family", stopped)
    monkeypatch.setattr("kvprof.benchmark.machine.cpu_read_bandwidth", lambda: 0.02)
    asked = ("--model", "reference", "--device", "cpu", "--seq", "64", "--methods", "fdc:grid=16")
    done = kvprof("bench", *asked)
    assert done.code == 130
    assert "calibration interrupted after 0 of 8,192" in done.error


def test_kq_wf_is_timed_on_a_shape_and_its_bytes_are_the_account():
    (method,) = made("kq-wf:window=8")
    assert "singular values" in method.warnings[0]
    plan = method.plan
    parts = stored_parts(plan, 1004)
    assert [part.tokens for part in parts] == [4, 992, 8]
    assert [part.key_bits for part in parts] == [None, "uniform-rms", None]
    built = build_case(method, placed())
    assert built.error(sampler(built.runs, CPU).output()) < 1e-5
