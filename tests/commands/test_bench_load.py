"""``kvprof bench --load`` from the command line: what it refuses, measures, and goes on with."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoints
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvprof.benchmark.jct.model_shape import load_model_shape
from kvprof.benchmark.shapes import load_shape
from kvprof.child import module_command
from kvprof.commands import bench, bench_load_servers, vllm_server
from kvprof.commands.bench_load_servers import EngineModel, engine_model, started_servers
from kvprof.commands.vllm_server import calibrated, refuse_weightless
from kvprof.errors import ExitCode, LackingError, UsageError
from kvprof.methods.plan_files import load_plan
from kvprof.records.files import read_result
from kvprof.records.journal import EVENTS_NAME, read_events
from kvprof.records.load_names import load_methods
from kvprof.serving import plugin
from kvprof.serving.load.lengths import load_lengths
from tests.commands.running import kvprof, over, process_of, words_of
from tests.serving.load.fake_server import Behaviour, FakeServer

SHORT = ("--lengths", "in=64,out=8", "--requests", 40, "--request-rate", "80,160")

#: Inputs of a load that starts its servers.
SERVED = {
    "memory": 2**20, "replicas": 1, "router": "shortest-queue", "seed": 0, "rate": 0.5,
    "timeout": 9.0,
}  # fmt: skip

#: What ``kvprof serve`` asks ``kvprof plan`` for, at least.
CHOICE = ("--method", "--rate", "--gguf", "--allocation", "--grid", "--minimum")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(Behaviour(slots=4, token_seconds=0.002, key="s3cret-key")) as running:
        yield running


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_KEY", "s3cret-key")


def load(server: FakeServer, *arguments: Any) -> Any:
    return kvprof(
        "bench", "--load", "--url", server.url, "--key-env", "LOAD_KEY", *over(SHORT, arguments)
    )


def test_a_load_is_measured_shown_compared_and_exported(
    server: FakeServer, key: None, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    done = load(server, "--slo", "ttft=2s,tpot=1s", "--out", run, "--csv", tmp_path / "a.csv")
    assert done.code == 0, done.stderr
    # So few requests do not tell whether the queue grows, and this client may be late.
    assert re.search(r"served(: no rate can be judged| sustained (80|160) )", done.stdout)
    result = read_result(run / "result.json")
    assert (result["kind"], result["complete"]) == ("load", True)
    assert [row["case"] for row in result["data"]["rates"]] == ["served @ 80/s", "served @ 160/s"]
    assert result["data"]["objective"] == {"share": 0.9, "ttft_seconds": 2.0, "tpot_seconds": 1.0}
    lines = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    for line, row in zip(lines, result["data"]["rates"], strict=True):
        assert float(line["outside_seconds"]) == pytest.approx(row["parts"]["outside_seconds"])
        assert float(line["client_busy_share"]) == pytest.approx(row["client_busy_share"])
    assert kvprof("show", run).stdout == done.stdout
    other = tmp_path / "other"
    assert load(server, "--out", other).code == 0
    compared = kvprof("compare", run, other)
    assert compared.code == 0, compared.stderr
    assert "ttft" in compared.stdout
    for form in ("html", "csv", "svg", "md"):
        file = tmp_path / f"page.{form}"
        made = kvprof("export", run, "--to", form, "--output", file)
        assert made.code == 0, made.stderr
        assert file.stat().st_size > 200
    again = load(server, "--out", run)
    assert again.code == ExitCode.USAGE
    assert "--force" in again.error


def test_no_key_address_or_prompt_enters_a_record(
    server: FakeServer, key: None, tmp_path: Path
) -> None:
    done = load(server, "--out", tmp_path / "run")
    assert done.code == 0, done.stderr
    prompt = ",".join(map(str, server.bodies[-1]["prompt"][:4]))
    for path in (tmp_path / "run").iterdir():
        text = path.read_text()
        assert "s3cret" not in text
        assert str(server.port) not in re.sub(r"\d+\.\d+(e-?\d+)?", "", text)
        assert "127.0.0.1" not in text
        assert prompt not in text.replace(" ", "")
    assert "s3cret" not in done.stdout + done.stderr


def test_a_server_that_wants_a_key_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(Behaviour(key="s3cret-key")) as server:
        done = kvprof("bench", "--load", "--url", server.url, *SHORT)
        assert done.code == ExitCode.FAILED
        assert "HTTP 401" in done.error
        assert "--key-env" in done.error
        monkeypatch.setenv("LOAD_KEY", "another")
        done = load(server)
        assert done.code == ExitCode.FAILED
        assert "--key-env" in done.error


def test_why_a_request_alone_is_not_answered_is_told() -> None:
    # The first completion finds out what the server takes.
    with FakeServer(Behaviour(fails={2: "cut"})) as server:
        done = kvprof("bench", "--load", "--url", server.url, "--served-model", "m", *SHORT)
        assert done.code == ExitCode.FAILED
        assert "connection lost" in done.error


def test_a_server_that_answers_nothing_is_a_failure_in_one_line(tmp_path: Path) -> None:
    done = kvprof("bench", "--load", "--url", "http://127.0.0.1:9", *SHORT, "--out", tmp_path / "r")
    assert done.code == ExitCode.FAILED
    assert "no server answers at --url: connection refused" in done.error
    assert not (tmp_path / "r").exists()


def test_types_of_cache_that_the_engine_names_are_methods_of_a_load_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the page on loads names as baselines must pass what every method's name passes."""
    taken = []
    monkeypatch.setattr(bench, "bench_load", lambda *_, **given: taken.append(given["methods"]))
    names = "full,fp8,turboquant_4bit_nc,fp8_ds_mla,fdc"
    assert kvprof("bench", "--load", "--methods", names).code == 0
    assert taken == [tuple(names.split(","))]
    done = kvprof("bench", "--methods", names)
    assert done.code == ExitCode.USAGE
    assert "'fp8_ds_mla' is unknown" in done.error


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_servers_cannot_be_started_without_vllm(tmp_path: Path) -> None:
    done = kvprof("bench", "--load", "--lengths", "in=64,out=8", "--out", tmp_path / "r")
    assert done.code == ExitCode.LACKING
    assert "bench --load requires vLLM" in done.error
    assert "--simulate" in done.error
    assert not (tmp_path / "r").exists()
    # What is wrong with a method is told before what is lacking here.
    done = kvprof("bench", "--load", "--methods", "full,fp8:rate=.2")
    assert done.code == ExitCode.USAGE
    assert ": fp8 is vLLM's own and takes no options" in done.error


def test_servers_are_started_on_each_number_of_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_load_servers, "find_spec", lambda name: name)
    methods = load_methods(["full", "kq"], [2, 4])
    model = EngineModel("a/model", ())
    targets = started_servers(model, methods, [], SERVED, load_lengths("in=64,out=8"))
    assert [one.method for one in targets] == ["full tp=2", "kq tp=2", "full tp=4", "kq tp=4"]
    for target, asked in zip(targets, methods, strict=True):
        server = process_of(target)
        words = list(server._commands(81))
        option = "--tensor-parallel-size" if asked.name == "full" else "--tp"
        assert words[words.index(option) + 1] == str(asked.tp)
        assert server._gpus == asked.tp


def test_a_method_may_have_a_rate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_load_servers, "find_spec", lambda name: name)
    model, lengths = EngineModel("a/model", ()), load_lengths("in=64,out=8")
    names = ["kq", "fdc:rate=0.125,allocation=uniform", "fdc:rate=12.5%"]
    found = []
    for target in started_servers(model, load_methods(names, [1]), [], SERVED, lengths):
        words = process_of(target)._commands(81)
        options = [after for word, after in pairwise(words) if word == "--option"]
        found.append((target.method, words[words.index("--rate") + 1], options))
    assert found == [
        ("kq", repr(SERVED["rate"]), []),
        ("fdc:rate=0.125,allocation=uniform", "0.125", ["allocation=uniform"]),
        ("fdc:rate=12.5%", "0.125", []),
    ]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("kq:rate=1.5", "--methods kq:rate=1.5: rate 1.5 is not between 0 and 1"),
        ("kq:rate=half", "--methods kq:rate=half"),
        ("kq:rate=nan", "--methods kq:rate=nan"),
        ("kq:rate=0.1,rate=0.2", "rate is given twice"),
        ("full:rate=0.5", ": full is vLLM's own and takes no options"),
        ("fp8:scale=none", ": fp8 is vLLM's own and takes no options"),
        ("tale", "tale cannot be served"),
        ("palu-4bit", "palu-4bit cannot be served"),
        ("kvtc", "kvtc cannot be served"),
        ("kq:skip=0", None),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_method_s_turn(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, method: str, why: str | None
) -> None:
    monkeypatch.setattr(bench_load_servers, "find_spec", lambda name: name)
    # What a plan cannot do needs the model's config.
    remote = ("a/model",) if why and "served" not in why else ()
    for folder in (*remote, str(tiny_folder)):
        methods = load_methods(["full", method], [1])
        arguments = (EngineModel(folder, ()), methods, [], SERVED, load_lengths("in=64,out=8"))
        if why is None:
            assert len(started_servers(*arguments)) == 2
            continue
        with pytest.raises(UsageError, match=re.escape(why)):
            started_servers(*arguments)


def test_a_plug_in_that_is_not_found_is_told_before_any_method_s_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is vLLM's own goes without it."""
    monkeypatch.setattr(bench_load_servers, "find_spec", lambda name: name)
    monkeypatch.setattr(plugin, "entry_points", lambda **wanted: EntryPoints())
    model, lengths = EngineModel("a/model", ()), load_lengths("in=64,out=8")
    assert started_servers(model, load_methods(["full", "fp8"], [1]), [], SERVED, lengths)
    with pytest.raises(LackingError):
        started_servers(model, load_methods(["full", "kq"], [1]), [], SERVED, lengths)


def test_a_shapes_servers_have_random_weights_and_no_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its name is no folder that vLLM knows: one lies there as long as the servers may start."""
    monkeypatch.setattr(bench_load_servers, "find_spec", lambda name: name)
    methods = load_methods(["full", "fdc:kinds=2"], [1])
    with engine_model("Llama-3.1-8B", 2, ["--enforce-eager"]) as model:
        assert model.weights == "random"
        assert load_model_shape(model.folder).layers == 2
        asked = SERVED | {"memory": 2**20}
        for target in started_servers(model, methods, [], asked, load_lengths("in=64,out=8")):
            server = process_of(target)
            words = list(server._commands(81))
            assert model.folder in words
            assert words[-4:] == [
                "--enforce-eager", "--load-format", "dummy", "--skip-tokenizer-init",
            ]  # fmt: skip
            # What vLLM's CPU build would believe more than --memory.
            monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
            assert "VLLM_CPU_KVCACHE_SPACE" not in server._environment(0)
    assert not Path(model.folder).exists()


@pytest.mark.parametrize("key", ["a\r\nX: b", "caf\xe9", "a\x7fb"])
def test_a_key_that_fits_no_header_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("LOAD_KEY", key)
    done = kvprof("bench", "--load", "--url", "http://127.0.0.1:9", "--key-env", "LOAD_KEY")
    assert done.code == ExitCode.USAGE
    assert "LOAD_KEY" in done.error


def test_a_port_in_use_is_refused_before_anything_is_read() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = kvprof("serve", "reference", "--plan", "nowhere.plan", "--port", port)
    assert done.code == ExitCode.USAGE
    assert f"--port {port} is in use" in done.error


def test_failures_are_counted_and_said(key: None) -> None:
    faults = {5: "503", 9: "cut", 14: "error"}
    with FakeServer(Behaviour(fails=faults, key="s3cret-key")) as server:
        done = load(server, "--json", "-")
    assert done.code == 0
    first = json.loads(done.stdout)["data"]["rates"][0]
    assert first["failures"] == {"connection lost": 1, "server error": 1}
    assert first["shed"] == 1  # HTTP 503


def started(server: FakeServer, *arguments: Any) -> "subprocess.Popen[str]":
    words = ["bench", "--load", "--url", server.url, "--key-env", "LOAD_KEY", *arguments]
    return subprocess.Popen(
        module_command("kvprof", *map(str, words)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(
    server: FakeServer, key: None, tmp_path: Path, number: int
) -> None:
    run = tmp_path / "run"
    arguments = (
        "--lengths", "in=64,out=8", "--requests", 40, "--request-rate", "5,20", "--out", run,
    )  # fmt: skip
    # The slow rate comes first: it is under way when the signal comes, and nothing is complete.
    child = started(server, *arguments)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        events = run / EVENTS_NAME
        if events.exists() and '"load_request"' in events.read_text():
            break
        time.sleep(0.02)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == ExitCode.INTERRUPTED, err
    assert "is not complete: interrupted" in " ".join(out.split())
    result = read_result(run / "result.json")
    assert not result["complete"]
    other = load(server, "--out", run)
    assert other.code == ExitCode.USAGE
    assert "other options (rates)" in other.error
    other = load(server, "--out", run, "--request-rate", "5,20", "--slo", "ttft=2s")
    assert "other options (objective)" in other.error


def cut_off(run: Path, rate: str) -> None:
    """Make a run look as if it had been killed in one of its rates."""
    lines = (run / EVENTS_NAME).read_text().splitlines(keepends=True)
    begun = next(n for n, line in enumerate(lines) if f'"served @ {rate}/s"' in line)
    (run / EVENTS_NAME).write_text("".join(lines[: begun + 9]))
    (run / "result.json").unlink()


def test_a_run_goes_on_beside_the_files_that_it_wrote(
    server: FakeServer, key: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tmp_path / "run", tmp_path / "other.csv"
    own = words_of(f"bench --load --url {server.url} --key-env LOAD_KEY --out {run} --json")

    def ended(*arguments: Any) -> tuple[int, str]:
        words = [str(one) for one in (*own, tmp_path / "a.json", *SHORT, *arguments)]
        monkeypatch.setattr("sys.argv", ["kvprof", *words])  # as a run keeps it
        done = kvprof(*words)
        return done.code, done.stderr

    assert ended()[0] == 0
    cut_off(run, "160")
    # What it left when it was cut off.
    written = json.loads((tmp_path / "a.json").read_text())
    unfinished = json.dumps(written | {"complete": False, "incomplete_reason": "interrupted"})
    other.write_text("mine")
    for text, arguments in (("mine", ()), (unfinished, ("--csv", other))):
        (tmp_path / "a.json").write_text(text)
        code, said = ended(*arguments)
        assert code == ExitCode.USAGE
        assert f"{other if arguments else tmp_path / 'a.json'} exists" in said
        assert "and discards the interrupted run in" in said
        assert (tmp_path / "a.json").read_text() == text
    assert other.read_text() == "mine"
    sent = len(server.bodies)
    code, said = ended()
    assert code == 0, said
    assert len(server.bodies) - sent == 42  # one rate, the probe and one request alone
    assert read_result(tmp_path / "a.json")["complete"]


def test_a_run_does_not_go_on_with_another_file_of_the_same_name(
    server: FakeServer, key: None, tmp_path: Path
) -> None:
    def trace(prompt: int) -> Path:
        entry = {"timestamp": 0, "input_length": prompt, "output_length": 8, "hash_ids": []}
        rows = [json.dumps(entry | {"timestamp": 9 * number}) for number in range(50)]
        (tmp_path / "trace.jsonl").write_text("\n".join(rows))
        return tmp_path / "trace.jsonl"

    run = tmp_path / "run"
    assert load(server, "--out", run, "--lengths", trace(64)).code == 0
    cut_off(run, "160")
    other = load(server, "--out", run, "--lengths", trace(96))
    assert other.code == ExitCode.USAGE
    assert "other options (lengths)" in other.error
    assert load(server, "--out", run, "--lengths", trace(64)).code == 0


def test_rates_that_are_there_are_not_measured_again(
    server: FakeServer, key: None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert load(server, "--out", run).code == 0
    cut_off(run, "160")
    # By a version that knew no --tokenizer, which is none of them.
    first, *others = (run / EVENTS_NAME).read_text().splitlines(keepends=True)
    started = json.loads(first)
    assert started["inputs"].pop("tokenizer", 0) is None
    (run / EVENTS_NAME).write_text("".join([json.dumps(started) + "\n", *others]))
    shown = kvprof("show", run)
    assert "is not complete: it had not ended" in " ".join(shown.stdout.split())
    sent = len(server.bodies)
    done = load(server, "--out", run)
    assert done.code == 0, done.stderr
    assert "resuming" in done.stderr
    assert len(server.bodies) - sent == 42  # one rate, the probe and one request alone
    result = read_result(run / "result.json")
    assert [row["complete"] for row in result["data"]["rates"]] == [True, True]
    assert read_events(run / EVENTS_NAME).finished


def test_a_shape_is_served_with_random_weights_alone() -> None:
    with pytest.raises(UsageError, match="is a shape without weights"):
        refuse_weightless("Llama-3.1-8B", None, ["--max-num-seqs", "4"])
    refuse_weightless("Llama-3.1-8B", "dummy", [])
    refuse_weightless("Llama-3.1-8B", None, ["--load-format=dummy"])
    refuse_weightless("reference", None, [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"--method": "xkv"}, "xkv cannot be served: several layers share a latent"),
        ({"--method": "fdc", "--calibrate": "random"}, "--calibrate cannot be"),
    ],
)
def test_what_a_shape_s_plan_cannot_be_drawn_for_is_refused(
    given: dict[str, Any], said: str
) -> None:
    all_given = dict.fromkeys((*CHOICE, "--calibrate")) | given
    with (
        pytest.raises(UsageError, match=said),
        calibrated("Llama-3.1-8B", None, all_given, None, False),
    ):
        raise AssertionError("a plan was drawn")


def test_a_shape_s_plan_is_drawn_with_the_options_of_its_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = replace(load_shape("Llama-3.1-8B"), layers=4)
    monkeypatch.setattr(vllm_server, "load_shape", lambda _name: few)
    given = dict.fromkeys(CHOICE)
    with calibrated("Llama-3.1-8B", None, given | {"--method": "kq"}, ["kinds=2"], False) as path:
        plan = load_plan(path)
    kinds = {
        (keys.rank, values.rank)
        for layer in plan.layers
        for keys, values in zip(layer.keys.groups, layer.values.groups, strict=True)
    }
    assert plan.method == "kq"
    assert len(plan.layers) == 4
    assert len(kinds) <= 2
