"""``kvprof bench --load --simulate`` from the command line."""

import json
import re
from pathlib import Path

import pytest

import kvprof as kvprof_package
from kvprof.errors import ExitCode
from kvprof.records.files import read_result
from kvprof.serving.load.tokenizer import token_counter
from tests.commands.running import kvprof

SHORT = ("--lengths", "in=2000,out=20", "--requests", 60, "--rates", "1,6")


def simulate(*arguments, short=SHORT):
    return kvprof("bench", "--load", "--simulate", *short, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--simulate"], "--simulate means nothing without --load"),
        (["--load", "--step-times", "x", "--against", "y"], "--step-times and --against means"),
        (["--load", "--simulate", "--url", "x"], "--url means nothing with --simulate"),
        (["--load", "--simulate", "--rate", "0.4", "--plan", "p"], "--plan and --rate means"),
        (["--load", "--simulate", "--timeout", "3"], "--timeout means nothing with --simulate"),
        (["--load", "--simulate", "--methods", "tale"], "no steps of it for Llama-3.1-8B: it has"),
        (["--load", "--simulate", "--model", "Other"], "no steps of Other with --tp 1"),
        (["--load", "--simulate", "--tp", "8"], "Llama-3.1-70B with --tp 4"),
        (["--load", "--simulate", "--tp", "1,4"], "--tp 1,4: the steps are of unlike models"),
        (["--load", "--simulate", "--tp", "2,x"], "--tp: 'x' is not a count"),
        (["--jct", "--tp", "2,4"], "--tp 2,4: --jct takes one number of GPUs"),
        (["--load", "--simulate", "--step-times", "none.json"], "there is no such file"),
        (["--load", "--simulate", "--engine", "--pages 3"], "the simulator knows nothing of --pag"),
        (["--load", "--simulate", "--engine", "--block-size x"], "--block-size: 'x' is no"),
        (["--load", "--simulate", "--engine", "--block-size"], "--block-size: '' is no"),
        (["--load", "--simulate", "--engine", "--max-num-seqs=9k"], "a step of 8192 tokens cannot"),
        (["--load", "--simulate", "--memory", "1KB"], "not one page of full fits"),
        (["--load", "--simulate", "--router", "round-robin"], "--replicas 2"),
        (["--load", "--simulate", "--baseline", "tale"], "--baseline tale is not measured"),
        (["--load", "--simulate", "--against", "demo"], "is a result of jct, no load"),
        (
            ["--load", "--simulate", "--lengths", "in=2M,out=9"],
            "Llama-3.1-8B has 131,072 positions",
        ),
        (
            ["--load", "--simulate", "--lengths", "in=64k,out=9", "--memory", "1GiB"],
            "full's cache holds 8,192; name shorter",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments, said):
    done = kvprof("bench", *arguments)
    assert done.code == ExitCode.USAGE, done.stderr
    assert said in done.error


def test_a_load_is_simulated_shown_and_compared(tmp_path):
    run = tmp_path / "run"
    done = simulate("--slo", "ttft=1s", "--out", run)
    assert done.code == 0, done.stderr
    said = "Simulated, with steps of NVIDIA H200 (h200.json): full serves"
    assert said in " ".join(done.stdout.split())
    assert "nothing was served" in done.stdout
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
        ours, theirs = (rows[f"{m} @ {case}"]["tbt_seconds"]["mean"] for m in ("fdc", "full"))
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
    lengths = ("--lengths", chats, "--requests", 20, "--rates", 1, "--methods", "full")
    refused = simulate(*lengths, short=())
    assert refused.code == ExitCode.USAGE
    assert "name a model that has one with --tokenizer" in refused.error
    done = simulate(*lengths, "--tokenizer", "reference", "--json", tmp_path / "a.json", short=())
    assert done.code == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    (row,) = result["data"]["rates"]
    count = token_counter("reference")
    assert (row["mean_prompt"], row["mean_output"]) == (count("a b"), count("c"))
    assert result["inputs"]["tokenizer"] == "reference"
    useless = simulate("--tokenizer", "reference")
    assert useless.code == ExitCode.USAGE
    assert "--tokenizer means nothing here: --lengths in=2000,out=20 has no texts" in useless.error


def two_widths(path: Path) -> Path:
    """Make a record with steps of Llama-3.1-70B on two GPUs, as if each took 1.5 times as long."""
    result = read_result(Path(kvprof_package.__file__).parent / "assets/step_times/h200.json")
    (four,) = (model for model in result["data"]["models"] if model["tp"] == 4)
    two = json.loads(json.dumps(four)) | {
        "tp": 2,
        "full_token_bytes": 2 * four["full_token_bytes"],
        "weights_bytes": int(1.5 * four["weights_bytes"]),
    }
    for method in two["methods"]:
        method["samples"] = [[*s[:4], 1.5 * s[4], s[5]] for s in method["samples"]]
    result["data"]["models"] = [two, four]
    path.write_text(json.dumps(result))
    return path


def test_several_numbers_of_gpus_are_measured_in_turn_each_against_its_own_baseline(tmp_path):
    record, run = two_widths(tmp_path / "two.json"), tmp_path / "run"
    steps = ("--step-times", record, "--methods", "fdc,full")
    done = simulate(*steps, "--tp", "4,2", "--out", run)
    assert done.code == 0, done.stderr
    result = read_result(run / "result.json")
    data = result["data"]
    labels = ["full tp=2", "fdc tp=2", "full tp=4", "fdc tp=4"]
    assert [one["method"] for one in data["methods"]] == labels
    assert (data["baseline"], result["inputs"]["tp"]) == ("full tp=2", [2, 4])
    methods = {one["method"]: one for one in data["methods"]}
    for tp in (2, 4):
        # Each is what it is by itself, its comparison with its own baseline included.
        alone = simulate(*steps, "--tp", tp, "--json", tmp_path / f"{tp}.json")
        assert alone.code == 0, alone.stderr
        own = json.loads((tmp_path / f"{tp}.json").read_text())["data"]
        names = {"method": None, "case": None}
        rows = [row | names for row in data["rates"] if row["method"].endswith(f"tp={tp}")]
        assert rows == [row | names for row in own["rates"]]
        for one in own["methods"]:
            held = methods[f"{one['method']} tp={tp}"]
            for name in ("pays", "ratio", "ratio_interval", "cache_tokens"):
                assert held[name] == one[name]
    text = " ".join(done.stdout.split())
    assert "of what full tp=4 serves" in text
    assert re.search(r"tensor parallelism 2, 4 ", text)
    assert kvprof("show", run).stdout == done.stdout
    assert kvprof("compare", run, run).code == 0
    # A load that was served with both is simulated again with both.
    served(run, {f"{label} @ {rate}/s": 1.02 for label in labels for rate in (1, 6)})
    again = kvprof("bench", "--load", "--simulate", "--step-times", record, "--against", run)
    assert "8 of 8 rates are within 10 %" in " ".join(again.stdout.split()), again.stderr


def test_events_that_were_cut_off_before_the_first_are_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/events.jsonl").touch()
    done = kvprof("bench", "--load", "--simulate", *SHORT, "--out", tmp_path / "run")
    assert done.code == 0, done.error
    assert (tmp_path / "run/result.json").exists()


def served(folder: Path, factors: dict[str, float], mode: str = "served") -> None:
    """Make a load that was served of a simulated one: as if it had taken so many times as long."""
    (folder / "events.jsonl").unlink()
    path = folder / "result.json"
    result = json.loads(path.read_text())
    result["data"]["mode"] = mode
    result["inputs"]["engine"] = "--load-format dummy --max-num-seqs 512"
    for row in result["data"]["rates"]:
        for name in ("normalised_latency_seconds", "ttft_seconds", "tbt_seconds"):
            row[name]["mean"] *= factors[row["case"]]
            row[name]["mean_interval"] = None
    path.write_text(json.dumps(result))


def test_it_is_held_against_a_load_that_was_served(tmp_path):
    run = tmp_path / "run"
    options = ("--lengths", "in=2000,out=20", "--requests", 60, "--seed", 3, "--arrivals")
    first = simulate(
        *options,
        "gamma:cv=2",
        "--rates",
        "1,6",
        "--methods",
        "full",
        "--memory",
        "40GB",
        "--out",
        run,
        short=(),
    )
    assert first.code == 0, first.stderr
    refused = kvprof("bench", "--load", "--simulate", "--against", run)
    assert "is simulated itself" in refused.error
    served(run, {"full @ 1/s": 1.05, "full @ 6/s": 1.25})
    out = tmp_path / "held"
    done = kvprof("bench", "--load", "--simulate", "--against", run, "--out", out)
    assert done.code == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "1 of 2 rates are within 10 % of the measured latency per token, or" in text
    assert "not within: full @ 6/s (−20.0 %)" in text
    result = read_result(out / "result.json")
    assert (result["inputs"]["seed"], result["inputs"]["arrivals"]) == (3, "gamma:cv=2")
    assert result["inputs"]["memory"] == 40 * 2**30
    assert result["inputs"]["engine_settings"]["max_num_seqs"] == 512
    held = {row["case"]: row for row in result["data"]["against"]["rates"]}
    latency = held["full @ 1/s"]["normalised_latency_seconds"]
    assert latency["difference"] == pytest.approx(1 / 1.05 - 1)
    assert latency["within"]
    assert kvprof("show", out).stdout == done.stdout
    for option, value, what in (("--requests", 30, "requests"), ("--seed", 0, "seed")):
        other = kvprof("bench", "--load", "--simulate", "--against", run, option, value)
        assert other.code == ExitCode.USAGE
        assert f"had other {what}:" in other.error
    named = kvprof("bench", "--load", "--simulate", "--step-times", run / "events.jsonl", *SHORT)
    assert named.error == kvprof("bench", "--load", "--simulate", "--step-times", run, *SHORT).error
    bare = read_result(run / "result.json") | {"inputs": {}}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    said = kvprof("bench", "--load", "--simulate", "--against", tmp_path / "bare.json").error
    assert "does not say what was asked for: lengths, arrivals" in said


def test_no_rate_is_judged_before_the_system_has_filled():
    # Twenty long prompts wait minutes each and have all arrived before a first one ends.
    long = ("--lengths", "in=100k,out=16", "--requests", 20, "--rates", 1, "--methods", "full,fdc")
    done = simulate(*long, short=())
    assert done.code == 0, done.stderr
    text = " ".join(done.stdout.split())
    why = "no rate can be judged: so few requests came that the system was still filling"
    assert f"full: {why}" in text
    assert f"- fdc: {why}" in text
    assert "times" not in text.partition("full by rate")[0]


def test_arrivals_that_came_at_another_rate_are_told():
    drawn = ("--lengths", "in=500,out=20", "--requests", 120, "--rates", 2, "--methods", "full")
    done = simulate(*drawn, "--arrivals", "gamma:cv=5", "--json", "-", short=())
    assert done.code == 0, done.stderr
    (row,) = json.loads(done.stdout)["data"]["rates"]
    arrived = row["arrived_per_s"]
    assert abs(arrived / 2 - 1) > 0.1
    text = " ".join(simulate(*drawn, "--arrivals", "gamma:cv=5", short=()).stdout.split())
    assert f"full @ 2/s: by chance {arrived:.3g} requests a second arrived in the window" in text
    even = simulate(*drawn, "--arrivals", "gamma:cv=0", short=())
    assert "by chance" not in even.stdout
