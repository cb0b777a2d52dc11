"""What ``kvprof serve`` starts; that it serves is asked in vLLM (`tests/serving/test_vllm.py`)."""

import json
from pathlib import Path

import pytest

from kvprof.commands import serve as serve_command
from kvprof.commands import vllm_server
from tests.benchmark.folder import save_config
from tests.commands.running import Finished, kvprof


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of servers that would be started, none of which is."""
    found: list[list[str]] = []
    monkeypatch.setattr(serve_command, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_server, "check_found", lambda: None)

    def start(command: list[str], environment: dict[str, str]) -> int:
        assert Path(environment["KVPROF_PLAN"]).is_file()
        found.append(command)
        return 0

    monkeypatch.setattr(vllm_server, "_until_it_ends", start)
    return found


def serve(folder: Path, *engine: str, method: str = "fdc", rate: str = "0.5") -> Finished:
    own = ("--method", method, "--rate", rate, "--load-format", "dummy")
    return kvprof("serve", save_config(folder), *own, "--", *engine)


def test_a_server_gets_what_is_set_and_says_so(started: list[list[str]], tmp_path: Path) -> None:
    done = serve(tmp_path / "shape", "--max-num-seqs", "64", method="palu")
    assert done.code == 0, done.stderr
    (command,) = started
    assert command[command.index("--max-num-seqs") + 1] == "64"
    set_for_graphs = command[command.index("--compilation-config") + 1]
    assert json.loads(set_for_graphs)["max_cudagraph_capture_size"] == 512
    assert f"--compilation-config {set_for_graphs} (on a GPU each step of 512" in done.stderr


def test_latents_as_they_are_have_longer_graphs(started: list[list[str]], tmp_path: Path) -> None:
    done = serve(tmp_path / "shape", "--max-num-batched-tokens", "1000")
    assert done.code == 0, done.stderr
    (command,) = started
    own = json.loads(command[command.index("--compilation-config") + 1])
    assert own["cudagraph_capture_sizes"][-2:] == [960, 1000]
    assert "step of 1,000 tokens" in done.stderr


def test_quantised_latents_have_some(started: list[list[str]], tmp_path: Path) -> None:
    done = serve(tmp_path / "shape", method="fdc-4bit", rate="0.84")
    assert done.code == 0, done.stderr
    (command,) = started
    own = json.loads(command[command.index("--compilation-config") + 1])
    assert own["cudagraph_capture_sizes"][-1] == 3072
    assert "above 512" in done.stderr


def test_what_somebody_gives_is_not_set_a_second_time(
    started: list[list[str]], tmp_path: Path
) -> None:
    assert serve(tmp_path / "one", "--max-cudagraph-capture-size", "512").code == 0
    assert serve(tmp_path / "two", "-cc", "{}").code == 0
    sized, whole = started
    assert sized[sized.index("--max-cudagraph-capture-size") + 1] == "512"
    own = json.loads(sized[sized.index("--compilation-config") + 1])
    assert own == {"mode": 0, "cudagraph_mode": "FULL"}
    assert "--compilation-config" not in whole


def test_what_would_replace_all_that_is_set_starts_no_server(
    started: list[list[str]], tmp_path: Path
) -> None:
    done = serve(tmp_path / "shape", "-cc.cudagraph_mode=NONE")
    assert done.code == 2
    assert "-cc.cudagraph_mode=NONE" in done.error
    assert not started
