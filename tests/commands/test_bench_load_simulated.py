"""``kvprof bench --load --simulate`` from the command line."""

import json
import re
from pathlib import Path

import pytest

from kvprof.errors import ExitCode
from kvprof.models.load import token_counter
from kvprof.records.files import read_result
from tests.commands.running import kvprof, words_of

SHORT = ("--lengths", "in=2000,out=20", "--requests", 60, "--request-rate", "1,6")


def simulate(*arguments, short=SHORT):
    return kvprof("bench", "--load", "--simulate", *short, *arguments)


def test_a_load_is_simulated_shown_and_compared(tmp_path):
    run = tmp_path / "run"
    done = simulate("--slo", "ttft=1s", "--out", run)
    assert done.code == 0, done.stderr
    said = "Simulated, with steps of NVIDIA H200 (h200.json): full sustained"
    assert said in " ".join(done.stdout.split())
    assert re.search(r"prefix caching\s+on", done.stdout)
    result = read_result(run / "result.json")
    data, inputs = result["data"], result["inputs"]
    assert (data["mode"], data["baseline"]) == ("simulated", "full")
    methods = {one["method"]: one for one in data["methods"]}
    assert list(methods) == ["full", "fp8", "fdc", "kq", "fdc-4bit"]
    assert methods["fdc"]["cache_tokens"] == pytest.approx(
        2 * methods["full"]["cache_tokens"], 1e-4
    )
    assert inputs["engine_settings"]["max_num_batched_tokens"] == 8192
    assert [one["method"] for one in inputs["step_times"]["methods"]] == list(methods)
    rows = {row["case"]: row for row in data["rates"]}
    # One request alone: a prompt of 2,000 tokens in 55 ms, and 19 steps of 6 ms.
    alone = rows["full @ 1/s"]["normalised_latency_seconds"]["p50"]
    assert 0.006 < alone < 0.012
    assert all(row["lateness_seconds"]["most"] == 0 for row in rows.values())
    assert all(row["parts"]["elsewhere_seconds"] == 0 for row in rows.values())
    for case in ("1/s", "6/s"):
        ours, theirs = (rows[f"{m} @ {case}"]["tpot_seconds"]["mean"] for m in ("fdc", "full"))
        assert ours < theirs
    assert kvprof("show", run).stdout == done.stdout
    again = tmp_path / "again"
    assert simulate("--slo", "ttft=1s", "--out", again).code == 0
    same = read_result(again / "result.json")["data"]
    assert same["rates"] == data["rates"]  # nothing of it is chance
    assert kvprof("compare", run, again).code == 0
    options = "--max-num-seqs 1 --max_num_batched_tokens=1k --no-enable-prefix-caching"
    tuned = simulate("--methods", "full", "--engine", options)
    said = "max num seqs 1, max num batched tokens 1024, block size 16, prefix caching off"
    assert said in " ".join(tuned.stdout.split())


def test_a_simulated_rate_has_enough_requests_to_be_sure():
    few = ("--lengths", "in=64,out=2", "--request-rate", "4", "--methods", "full", "--json", "-")
    done = simulate(*few, short=())
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["inputs"]["requests"] == result["data"]["rates"][0]["answered"] == 20_000
    assert result["data"]["methods"][0]["largest_rate_interval"] == [4.0, None]


def test_replicas_share_the_requests(tmp_path):
    arguments = ("--methods", "fdc", "--replicas", 3, "--router", "round-robin")
    done = simulate(*arguments, "--tp", 4, "--json", tmp_path / "a.json")
    assert done.code == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["inputs"]["model"] == "Llama-3.1-70B"
    assert [row["servers"] for row in result["data"]["rates"]] == [[20, 20, 20]] * 2


def test_texts_are_as_long_as_a_named_tokenizer_says(tmp_path):
    chats = tmp_path / "chats.jsonl"
    line = {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]}
    chats.write_text(json.dumps(line) + "\n")
    lengths = ("--lengths", chats, "--requests", 20, "--request-rate", 1, "--methods", "full")
    refused = simulate(*lengths, short=())
    assert refused.code == ExitCode.USAGE
    assert "--tokenizer" in refused.error
    done = simulate(*lengths, "--tokenizer", "reference", "--json", tmp_path / "a.json", short=())
    assert done.code == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    (row,) = result["data"]["rates"]
    count = token_counter("reference")
    assert (row["mean_prompt"], row["mean_output"]) == (count("a b"), count("c"))
    assert result["inputs"]["tokenizer"] == "reference"
    useless = simulate("--tokenizer", "reference")
    assert useless.code == ExitCode.USAGE
    assert "--tokenizer requires --lengths with texts; in=2000,out=20 has none" in useless.error


def test_events_that_were_cut_off_before_the_first_are_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/events.jsonl").touch()
    done = kvprof("bench", "--load", "--simulate", *SHORT, "--out", tmp_path / "run")
    assert done.code == 0, done.error
    assert (tmp_path / "run/result.json").exists()


def test_no_rate_is_judged_before_the_system_has_filled():
    # Twenty long prompts wait minutes each and have all arrived before a first one ends.
    long = words_of("--lengths in=100k,out=16 --requests 20 --request-rate 1 --methods full,fdc")
    done = simulate(*long, short=())
    assert done.code == 0, done.stderr
    text = " ".join(done.stdout.split())
    why = "no rate can be judged; too few requests"
    assert f"full: {why}" in text
    assert f"- fdc: {why}" in text
    assert "times" not in text.partition("full by rate")[0]


def test_arrivals_that_came_at_another_rate_are_told():
    drawn = words_of("--lengths in=500,out=20 --requests 120 --request-rate 2 --methods full")
    done = simulate(*drawn, "--arrivals", "gamma:cv=5", "--json", "-", short=())
    assert done.code == 0, done.stderr
    (row,) = json.loads(done.stdout)["data"]["rates"]
    arrived = row["arrived_per_s"]
    assert abs(arrived / 2 - 1) > 0.1
    text = " ".join(simulate(*drawn, "--arrivals", "gamma:cv=5", short=()).stdout.split())
    assert f"full @ 2/s: {arrived:.3g} req/s arrived by chance" in text
    even = simulate(*drawn, "--arrivals", "gamma:cv=0", short=())
    assert "by chance" not in even.stdout
