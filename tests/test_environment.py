import getpass
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprof import environment
from kvprof.environment import collect_environment
from kvprof.records.result import build_result
from kvprof.records.schema import validate_result


def test_the_block_fits_the_schema_and_names_what_ran() -> None:
    block = collect_environment()
    inputs = {"benchmark": "some_program"}
    validate_result(build_result("benchmark", environment=block, inputs=inputs, data={}))
    assert block["python"] == platform.python_version()
    assert block["packages"]["numpy"] == sys.modules["numpy"].__version__
    assert block["cpu"]["threads"] >= 1
    assert block["memory_bytes"] > 2**28


def test_it_names_no_host_no_user_and_no_folder() -> None:
    text = json.dumps(collect_environment())
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert str(Path(environment.__file__).parent) not in text
    if (user := getpass.getuser()) != "root":  # a word that may stand in a platform's name
        assert user not in text


def test_it_imports_none_of_the_packages_it_names() -> None:
    code = (
        "import sys\n"
        "from kvprof.environment import collect_environment\n"
        "block = collect_environment()\n"
        "assert block['torch'] is None\n"
        "print(*sys.modules)\n"
    )
    root = Path(environment.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "transformers", "triton", "numpy"} & set(done.stdout.split())


def test_torchs_settings_are_there_once_torch_is() -> None:
    import torch

    assert collect_environment()["torch"]["num_threads"] == torch.get_num_threads()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_checkouts_commit_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As inside a hook, where git is told of another repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))

    def git(*arguments: str) -> str:
        clean = {key: value for key, value in os.environ.items() if key != "GIT_DIR"}
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "kvprof").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "kvprof" / "a.py").write_text("a = 1\n")
    (tmp_path / "recipes" / "b.yaml").write_text("b: 1\n")
    assert environment._git_state(tmp_path) == {"commit": None, "dirty": True}
    git("add", ".")
    git("commit", "-q", "-m", "one")
    state: dict[str, Any] = {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert environment._git_state(tmp_path) == state
    (tmp_path / "notes.md").write_text("what does not run makes nothing dirty")
    assert environment._git_state(tmp_path) == state
    (tmp_path / "kvprof" / "a.py").write_text("a = 2\n")
    assert environment._git_state(tmp_path) == state | {"dirty": True}
    git("checkout", "-q", "kvprof")
    (tmp_path / "kvprof" / "new.py").write_text("")
    assert environment._git_state(tmp_path) == state | {"dirty": True}


def test_somebody_elses_repository_lends_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ".venv" / "lib" / "site-packages" / "kvprof"
    package.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    assert environment._checkout() is None
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "kvprof" / "environment.py"))
    assert environment._checkout() == tmp_path


def test_without_git_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._git_state(tmp_path) is None
    assert environment._git_state(None) is None


class FakeDriver:
    """Stands for NVML on a machine with one GPU whose free memory it does not tell."""

    NVMLError = environment.pynvml.NVMLError
    NVML_CLOCK_MEM = environment.pynvml.NVML_CLOCK_MEM

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlSystemGetCudaDriverVersion": 12080,
            "nvmlSystemGetDriverVersion": "570.1",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMaxClockInfo": 2619,
            "nvmlDeviceGetMemoryBusWidth": 5120,
        }

        def answer(*_arguments: Any) -> Any:
            if name == "nvmlDeviceGetMemoryInfo":
                raise self.NVMLError(3)
            return answers.get(name)

        return answer


def test_a_gpus_peak_bandwidth_is_what_its_datasheet_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "pynvml", FakeDriver())
    found = environment.read_gpus()
    assert (found.driver, found.driver_cuda) == ("570.1", "12.8")
    (gpu,) = found.devices
    assert gpu.peak_tb_per_s == pytest.approx(3.35, abs=0.01)
    assert gpu.compute_capability == "9.0"
    assert gpu.memory_bytes is None
    assert "memory_free_bytes" not in gpu.description()


def test_the_memory_is_the_containers_where_that_is_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=64 * 2**30)
    monkeypatch.setattr(environment.psutil, "virtual_memory", lambda: machine)
    for text, expected in (("max\n", 64), (f"{2**33}\n", 8), (f"{2**62}\n", 64)):
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text: text)
        assert environment.memory_bytes() == expected * 2**30


@pytest.mark.parametrize(
    ("limit", "threads"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 64)]
)
def test_a_containers_share_of_the_processor_counts(
    monkeypatch: pytest.MonkeyPatch, limit: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda _self, _encoding=None: limit)
    assert environment.usable_threads() == threads
