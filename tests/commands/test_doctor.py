import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprof import requirements
from kvprof.commands import doctor as command
from kvprof.environment import Gpu, Gpus, package_version
from kvprof.records.schema import validate_result
from kvprof.requirements import PackageState
from kvprof.triton_probe import TritonState
from tests.commands.running import kvprof

H200 = Gpu("NVIDIA H200", 150 * 10**9, 140 * 10**9, "9.0", 4.917)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the second that compiling takes; the probe has its own test."""
    state = TritonState("3.9.0", True, False, None)
    monkeypatch.setattr(command, "probe_triton", lambda: state)
    monkeypatch.setattr(command, "cpu_read_bandwidth", lambda: 0.04)
    monkeypatch.setenv("COLUMNS", "80")


def with_gpus(monkeypatch: pytest.MonkeyPatch, *devices: Gpu) -> None:
    found = Gpus(list(devices), "575.1", "13.0") if devices else Gpus(problem="no driver")
    monkeypatch.setattr(command, "read_gpus", lambda: found)
    monkeypatch.setattr("kvprof.environment.read_gpus", lambda: found)


def packages(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    def installed(name: str) -> str | None:
        return versions[name] if name in versions else package_version(name)

    monkeypatch.setattr(requirements, "package_version", installed)


def doctor_data(*arguments: Any, code: int = 0) -> dict[str, Any]:
    done = kvprof("doctor", "--json", "-", *arguments)
    assert done.code == code, done.stderr
    result = json.loads(done.stdout)
    validate_result(result)
    assert result["kind"] == "doctor"
    return result["data"]  # type: ignore[no-any-return]


def test_a_machine_without_a_gpu_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    data = doctor_data()
    assert data["usable"]
    assert data["gpus"] == []
    assert data["memory"]["read_tb_per_s"] == 0.04
    by_name = {entry["name"]: entry for entry in data["commands"]}
    assert by_name["spectrum"]["ready"]
    assert by_name["spectrum"]["runs_on"] == "CPU"
    assert any("a GPU" in lacking for lacking in by_name["spectrum"]["lacks"])
    assert by_name["doctor"]["lacks"] == []


def test_a_gpu_is_described_with_its_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, H200)
    data = doctor_data()
    assert data["gpus"][0]["peak_tb_per_s"] == 4.917
    assert data["gpus"][0]["bandwidth_class"].startswith("HBM3")
    assert data["gpus"][0]["measured_tb_per_s"] is None
    assert data["memory"]["read_tb_per_s"] is None
    text = kvprof("doctor").stdout
    assert "NVIDIA H200, compute capability 9.0" in text
    assert "GPU or CPU" in text
    assert "575.1 (CUDA up to 13.0)" in text


@pytest.mark.parametrize(
    ("peak", "name"), [(8.0, "HBM3"), (2.04, "HBM2e"), (0.3, "GDDR"), (None, "unknown")]
)
def test_the_bandwidth_class_follows_the_peak(peak: float | None, name: str) -> None:
    assert command._bandwidth_class(Gpu("x", None, None, None, peak)).startswith(name)


def test_gpus_that_torch_does_not_see_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, H200)
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 0))
    )
    warnings: list[str] = []
    assert command._measured(Gpus([H200]), warnings) == {}
    assert "torch sees 0 of 1 GPUs" in warnings[0]


@pytest.mark.parametrize("version", [None, "2.10.1"])
def test_a_required_package_missing_or_too_old_is_3(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch)
    packages(monkeypatch, torch=version)
    data = doctor_data(code=3)
    assert not data["usable"]
    torch = next(entry for entry in data["packages"] if entry["name"] == "torch")
    assert torch["installed"] == version
    assert not torch["ok"]
    by_name = {entry["name"]: entry for entry in data["commands"]}
    assert not by_name["spectrum"]["ready"]
    assert by_name["spectrum"]["runs_on"] is None
    assert by_name["spectrum"]["lacks"][0] == "torch >=2.11"
    assert by_name["doctor"]["ready"]
    done = kvprof("doctor")
    assert done.code == 3
    assert done.stdout.startswith("kvprof cannot run here: torch missing or out of range.")
    assert "'torch>=2.11'" in done.stdout


def test_what_does_nothing_without_an_engine_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def commands() -> dict[str, Any]:
        return {entry["name"]: entry for entry in doctor_data()["commands"]}

    with_gpus(monkeypatch)
    packages(monkeypatch, vllm=None)
    serve = commands()["serve"]
    assert not serve["ready"]
    assert serve["lacks"][0].startswith("vllm ")
    with_gpus(monkeypatch, H200)
    packages(monkeypatch, vllm="0.26.0")
    serve = commands()["serve"]
    assert (serve["ready"], serve["runs_on"]) == (True, "GPU or CPU")


def test_an_optional_package_missing_is_said_but_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    packages(monkeypatch, matplotlib=None)
    spectrum = doctor_data()["commands"][0]
    assert spectrum["ready"]
    assert spectrum["lacks"][0] == "matplotlib (for --svg and --png)"
    text = " ".join(kvprof("doctor").stdout.split())
    assert "-m pip install -c constraints.txt 'matplotlib>=3.9'" in text


def test_no_advice_would_fetch_a_package_called_kvprof(monkeypatch: pytest.MonkeyPatch) -> None:
    """On package indexes that name is somebody else's."""
    with_gpus(monkeypatch)
    monkeypatch.setattr(requirements, "package_version", lambda _: None)
    commands = [entry["command"] for entry in doctor_data(code=3)["install"]]
    assert len(commands) > 3
    for command_line in commands:
        assert "kvprof" not in command_line.partition(" install ")[2].lower()


def test_advice_names_the_clone_that_pip_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "constraints.txt").write_text("ray==2.60.0\ntorch==2.13.0\n")
    monkeypatch.setattr(requirements, "__file__", str(tmp_path / "site-packages/kvprof/x.py"))
    origin = SimpleNamespace(read_text=lambda _: json.dumps({"url": clone.as_uri()}))
    monkeypatch.setattr(requirements.metadata, "distribution", lambda _: origin)
    line = requirements.install_command("ray[client]>=2")
    assert shlex.split(line)[1:] == [
        "-m",
        "pip",
        "install",
        "-c",
        str(clone / "constraints.txt"),
        "ray[client]>=2",
    ]
    # What is not pinned asks for versions of its own.
    assert shlex.split(requirements.install_command("vllm>=0.26"))[4:] == ["vllm>=0.26"]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_report_fits_and_needs_no_colour(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with_gpus(monkeypatch, H200, H200)
    text = kvprof("doctor").stdout
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= columns
    for word in ("Machine", "Commands", "Packages", "GPU 1", "Triton", "spectrum", "torch"):
        assert word in text


def test_an_existing_file_is_refused_before_anything_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Gpus:
        raise AssertionError

    monkeypatch.setattr(command, "read_gpus", fail)
    path = tmp_path / "r.json"
    path.write_text("mine")
    done = kvprof("doctor", "--json", path)
    assert done.code == 2
    assert "--force" in done.error
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("installed", "wanted", "ok"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.11.0a0+git1234", ">=2.11", False),
        ("2.12.0.dev20260101", ">=2.11", True),
        ("2.9", ">=2.11", False),
        ("1.0", "", True),
        (None, "", False),
    ],
)
def test_versions_are_held_against_ranges(installed: str | None, wanted: str, ok: bool) -> None:
    assert PackageState("torch", installed, wanted, None).ok is ok
