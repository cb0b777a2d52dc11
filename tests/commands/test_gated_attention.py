"""Heads whose output is gated or normalised before W_O: what runs, and what a refusal names."""

import json
from pathlib import Path

import pytest

from tests.commands.running import kvprof
from tests.models.folder import save_tiny
from tests.models.tiny import CLAMPED, GATED

FINE = ("--grid", "4", "--minimum", "4")


@pytest.fixture(scope="module", params=GATED)
def gated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param) / "model", arch=request.param)


@pytest.mark.parametrize("method", ["kq", "fdc", "zack"])
def test_what_a_refusal_names_holds(gated: Path, method: str, tmp_path: Path) -> None:
    plan = ("plan", gated, "--rate", "0.2", *FINE, "--out", tmp_path / "a.plan", "--force")
    refused = kvprof(*plan, "--method", method)
    assert refused.code == 2
    assert "svd-kv" in refused.error
    assert "values=svd-v" in refused.error
    for way in (("--method", "svd-kv"), ("--method", method, "--option", "values=svd-v")):
        done = kvprof(*plan, *way)
        assert done.code == 0, done.stderr


def test_at_rate_0_bases_of_values_alone_are_the_model(gated: Path, tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    few = ("--sequences", "1", "--seq-len", "32", "--tasks", "none", "--json", path)
    done = kvprof("eval", gated, "--method", "svd-kv", "--rate", "0", *FINE, *few)
    assert done.code == 0, done.stderr
    last = json.loads(path.read_text())["data"]["evaluations"][-1]
    assert (last["method"], last["perplexity_ratio"]) == ("svd-kv", pytest.approx(1, abs=1e-4))


@pytest.mark.parametrize("method", ["kq", "palu"])
@pytest.mark.parametrize("arch", CLAMPED)
def test_no_basis_is_folded_across_a_clamp(arch: str, method: str, tmp_path: Path) -> None:
    folder, path = save_tiny(tmp_path / "model", arch=arch), tmp_path / "eval.json"
    few = ("--sequences", "1", "--seq-len", "32", "--tasks", "none", "--decode", "--json", path)
    done = kvprof("eval", folder, "--method", method, "--rate", "0", *FINE, *few)
    assert done.code == 0, done.stderr
    assert json.loads(path.read_text())["data"]["evaluations"][-1]["kl"]["mean"] < 1e-9


def test_commands_that_need_no_output_projection_run(gated: Path, tmp_path: Path) -> None:
    for command in (
        ("stability", gated, "--tokens", "64,128", "--seq-len", "32", "--pairs", "v"),
        ("plan", gated, "--method", "kq-wf", "--rate", "0.5", "--out", tmp_path / "b.plan"),
    ):
        done = kvprof(*command)
        assert done.code == 0, done.stderr


def test_spectrum_is_not_recommended_where_it_refuses_too(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", arch="DeepseekV4")
    for command in (
        ("spectrum", folder, "--tokens", "64", "--seq-len", "32"),
        ("eval", folder, "--method", "kq", "--rate", "0.2"),
    ):
        refused = kvprof(*command)
        assert refused.code == 2
        assert "spectrum" not in refused.error


def test_keys_before_rotation_that_cannot_be_had_are_refused_by_all_that_store_them(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", arch="Llama4", layer_types=["full_attention"] * 3)
    for method in (("palu", *FINE), ("kvtc",), ("xkv",)):
        refused = kvprof("plan", folder, "--rate", "0.2", "--method", *method)
        assert refused.code == 2, method
        assert "RoPE" in refused.error
