from pathlib import Path
from typing import Any

import pytest
import typer

from kvprof.commands.options import method_options
from kvprof.commands.steps import calibration_options, check_plannable, make_plan
from kvprof.errors import UsageError
from kvprof.interrupt import Stop
from kvprof.methods.accounting import rate
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import save_plan
from kvprof.models import load
from kvprof.models.load import LoadedModel, load_model, wrap_model
from tests.commands.running import kvprof
from tests.models.folder import save_tiny
from tests.models.tiny import tiny

FINE = {"grid": 2, "minimum": 2}


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu")


def planned(loaded: LoadedModel, **given: Any) -> Plan:
    arguments: dict[str, Any] = {
        "method": None,
        "rate": None,
        "removal": None,
        "plan_file": None,
        "calibrate": None,
        "calibrate_tokens": None,
        "options": {},
        "context": 96,
        "seq_len": 64,
        "stop": Stop(),
    }
    arguments |= given
    check_plannable(loaded, **{k: v for k, v in arguments.items() if k not in ("seq_len", "stop")})
    return make_plan(loaded, **arguments)


def test_a_rate_is_reached_with_no_more_compression_than_asked(loaded: LoadedModel) -> None:
    plan = planned(loaded, method="kq", rate=0.4, calibrate="random:512", options=FINE)
    assert 0.4 <= rate(plan, 96) < 0.45
    assert plan.made["calibration"]["seq_len"] == 64
    full = planned(loaded, method="kq", rate=0.0, calibrate="random:512", options=FINE)
    assert rate(full, 96) == 0.0
    one = planned(loaded, method="fdc", removal=0.2, calibrate_tokens="512", options=FINE)
    assert one.made["removal_rate"] == 0.2
    assert one.made["calibration"]["tokens"] == 512


def test_a_method_of_one_setting_needs_no_rate(loaded: LoadedModel) -> None:
    assert planned(loaded, method="fp8").method == "fp8"
    assert planned(loaded, method="full").method == "full"
    for method in ("kq", "kivi", "h2o"):
        with pytest.raises(UsageError, match=f"--method {method} needs --rate"):
            planned(loaded, method=method)


def test_a_saved_plan_is_read_and_nothing_may_be_said_beside_it(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    saved = planned(loaded, method="kq", rate=0.3, calibrate="random:512", options=FINE)
    save_plan(saved, path)
    assert planned(loaded, plan_file=path).made == saved.made
    with pytest.raises(UsageError, match=r"leave out --method and --rate and --grid and --option"):
        planned(loaded, plan_file=path, method="kq", rate=0.0, options={"grid": 2, "values": "x"})
    with pytest.raises(UsageError, match="not for the model given"):
        planned(wrap_model(tiny("Llama", seed=9)), plan_file=path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give --method with --rate"),
        ({"method": "kq", "rate": 0.1, "removal": 0.1}, "--rate and --removal"),
        ({"method": "mine", "rate": 0.1}, "'mine' is unknown"),
        ({"method": "full", "calibrate": "random:8k"}, "full needs no calibration"),
        ({"method": "kq", "rate": 0.1, "calibrate": "nowhere.txt"}, "'nowhere.txt' is no file"),
        (
            {"method": "kq", "rate": 0.1, "calibrate": "random:8k", "calibrate_tokens": "1k"},
            "two counts",
        ),
        ({"method": "kq", "rate": 0.1, "calibrate_tokens": "lots"}, "--calibrate-tokens: 'lots'"),
        ({"method": "kq", "rate": 0.99, "calibrate_tokens": "512"}, "reaches rates from 0.000 to"),
        ({"method": "kq", "rate": 1.5, "calibrate_tokens": "512"}, "not between 0 and 1"),
        (
            {"method": "palu", "removal": 0.1, "calibrate_tokens": "512", "options": {"heads": 2}},
            "--removal is FDC's",
        ),
        (
            {"method": "kq", "rate": 0.1, "calibrate_tokens": "512", "options": {"heads": 2}},
            "kq has no option heads",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    loaded: LoadedModel, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        planned(loaded, **given)


def test_an_interrupted_calibration_ends_with_130(
    loaded: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = Stop()
    stop.requested = True
    with pytest.raises(typer.Exit) as ended:
        planned(loaded, method="kq", rate=0.3, calibrate_tokens="16k", options=FINE, stop=stop)
    assert ended.value.exit_code == 130
    assert "there is no plan yet" in capsys.readouterr().err


def test_options_are_given_to_the_method_as_they_are_written() -> None:
    extra = ["heads=4", "recent=0.2", "lazy=false", "hadamard=True", "values=svd-v", "bits=2, 4"]
    assert method_options("budget", None, 8, extra) == {
        "allocation": "budget",
        "minimum": 8,
        "heads": "4",
        "recent": "0.2",
        "lazy": "false",
        "hadamard": "True",
        "values": "svd-v",
        "bits": "2, 4",
    }
    assert method_options(None, None, None, None) == {}
    for wrong in ("heads", "=4", "a b=4"):
        with pytest.raises(UsageError, match="write KEY=VALUE"):
            method_options(None, None, None, [wrong])
    with pytest.raises(UsageError, match="given twice"):
        method_options(None, 16, None, ["grid=8"])


def test_calibration_options_default_to_the_method(tmp_path: Path) -> None:
    options = calibration_options(None, None, seq_len=None)
    assert (options.source, options.tokens, options.seq_len) == (None, None, 2048)
    assert calibration_options("prose", "4k", seq_len=512).tokens == 4096
    assert calibration_options("prose", None, seq_len=512, own_seq_len="2k").seq_len == 2048
    saved = tmp_path / "moments.safetensors"
    saved.touch()
    with pytest.raises(UsageError, match="leave out --calibrate-seq-len"):
        calibration_options(str(saved), None, seq_len=512, own_seq_len="2k")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("eval", "--method", "qk", "--rate", 0.3), "qk"),
        (("eval", "--method", "kq", "--rate", 0.3, "--option", "width=3"), "width"),
        (("eval", "--method", "fp8", "--rate", 0.3), "--rate"),
        (("eval", "--method", "fp8", "--tasks", "needles"), "needles"),
        (("eval", "--method", "fp8", "--seq-len", "1k"), "--seq-len 1,024"),
        (("eval", "--method", "fp8", "--seq-len", 32, "--text", "short.txt"), "short.txt"),
        (("eval", "--method", "fp8", "--tasks", "vt", "--task-lengths", "1k"), "--task-lengths"),
        (("eval", "--method", "fp8", "--json", "short.txt"), "short.txt"),
        (("eval", "--plan", "other.plan", "--seq-len", 32, "--tasks", "none"), "other.plan"),
        (("eval", "--method", "fp8", "--rate", 0.3, "--seq-len", 32), "has one rate"),
        (("eval", "--method", "kq", "--rate", 0.99, "--seq-len", 32), "reaches rates from"),
        (("frontier", "--methods", "fp8", "--text", "random:8k"), "--text random"),
        (("frontier", "--seq-len", 32, "--sequences", 1), "gives one sequence"),
        (("frontier", "--seq-len", 32, "--tasks", "none", "--target", "vt=0.9"), "'vt'"),
        (("sensitivity", "--text", "short.txt"), "short.txt"),
        (("sensitivity",), "tokenizer cannot be read"),
        (("plan", "--method", "kq", "--rate", 0.3), "tokenizer cannot be read"),
        (("sensitivity", "--layers", "7"), "no layer 7"),
        (("sensitivity", "--ranks", "16"), "keeps all of heads of 16"),
        (("sensitivity", "--bits", "7"), "7"),
        (("sensitivity", "--rate", 0.99), "reaches rates from"),
        (("plan", "--method", "kq", "--rate", 0.99), "reaches rates from"),
        (("plan", "--method", "fp8", "--rate", 0.3), "has one rate"),
        (("plan", "--method", "fp8", "--context", "long"), "--context"),
        (("plan", "--method", "h2o", "--rate", 0.3, "--servable"), "cannot be served"),
        (("plan", "--method", "full", "--calibrate", "short.txt"), "needs no calibration"),
        (("plan", "--method", "fp8", "--compare", "other.plan"), "other.plan"),
        (("plan", "--fit", "1GB", "--rate", 0.3, "--methods", "fp8"), "--rate"),
        (("plan", "--fit", "1GB", "--plan", "other.plan"), "other.plan"),
        (
            ("generate", "--method", "fp8", "--rate", 0.3, "--prompt", "x", "--max-new-tokens", 4),
            "one rate",
        ),
        (("generate", "--plan", "other.plan", "--prompt", "x"), "other.plan"),
        (("generate", "--method", "fp8", "--prompt", "x", "--max-new-tokens", "1k"), "context"),
        (("spectrum", "--seq-len", "1k"), "--seq-len 1,024"),
        (("stability", "--source", "short.txt", "--tokens", "256,512"), "short.txt"),
        (("spectrum", "--text", "short.txt", "--tokens", 512), "short.txt"),
    ],
)
def test_what_needs_no_weights_is_refused_before_they_are_read(
    tmp_path: Path,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[Any, ...],
    named: str,
) -> None:
    folder = save_tiny(tmp_path / "model", seed=7)
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("abc")
    save_plan(planned(loaded, method="full"), Path("other.plan"))
    monkeypatch.setattr(load, "read_weights", lambda *_, **__: pytest.fail("weights were read"))
    damaged = "tokenizer" in named
    if damaged:
        (folder / "tokenizer.json").write_text("{}")
    done = kvprof(words[0], folder, *words[1:])
    assert done.code == (1 if damaged else 2)
    assert named in done.error
