from pathlib import Path
from typing import Any

import pytest
import typer

from kvprof.commands.options import MethodOptions
from kvprof.commands.planning import calibration_options, check_plannable, make_plan
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
        "calibrate_seq_len": None,
        "options": {},
        "context": 96,
        "stop": Stop(),
    }
    arguments |= given
    check_plannable(loaded, **{k: v for k, v in arguments.items() if k != "stop"})
    return make_plan(loaded, **arguments)


def test_a_rate_is_reached_with_no_more_compression_than_asked(loaded: LoadedModel) -> None:
    plan = planned(
        loaded, method="kq", rate=0.4, calibrate="random:512", calibrate_seq_len="64", options=FINE
    )
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


def test_a_saved_plan_is_read_and_nothing_may_be_said_beside_it(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "p.safetensors"
    saved = planned(loaded, method="kq", rate=0.3, calibrate="random:512", options=FINE)
    save_plan(saved, path)
    assert planned(loaded, plan_file=path).made == saved.made
    for beside in ({"method": ["kq"]}, {"rate": 0.0}, {"grid": 2}, {"option": ["values=x"]}):
        with pytest.raises(UsageError, match=f"--{next(iter(beside))}"):
            MethodOptions(plan_file=path, **beside)
    with pytest.raises(UsageError, match="not for the model given"):
        planned(wrap_model(tiny("Llama", seed=9)), plan_file=path)


def test_an_interrupted_calibration_ends_with_130(
    loaded: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = Stop()
    stop.requested = True
    with pytest.raises(typer.Exit) as ended:
        planned(loaded, method="kq", rate=0.3, calibrate_tokens="16k", options=FINE, stop=stop)
    assert ended.value.exit_code == 130
    assert "no plan exists" in capsys.readouterr().err


def test_options_are_given_to_the_method_as_they_are_written() -> None:
    extra = ["heads=4", "recent=0.2", "lazy=false", "hadamard=True", "values=svd-v", "bits=2, 4"]
    given = MethodOptions(allocation="budget", minimum=8)
    assert given.options(extra) == {
        "allocation": "budget",
        "minimum": 8,
        "heads": "4",
        "recent": "0.2",
        "lazy": "false",
        "hadamard": "True",
        "values": "svd-v",
        "bits": "2, 4",
    }
    assert MethodOptions().options(None) == {}
    for wrong in ("heads", "=4", "a b=4", "minimum=8"):
        with pytest.raises(UsageError, match=wrong):
            given.options([wrong])


@pytest.mark.parametrize(
    "words",
    [("sensitivity",), ("plan", "--method", "kq", "--rate", 0.3), ("spectrum", "--text", "a")],
)
def test_a_damaged_tokenizer_is_found_out_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[Any, ...]
) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "a").write_text("abc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "read_weights", lambda *_, **__: pytest.fail("weights were read"))
    done = kvprof(words[0], folder, *words[1:])
    assert (done.code, "tokenizer" in done.error) == (1, True)


def test_calibration_options_default_to_the_method(tmp_path: Path) -> None:
    options = calibration_options()
    assert (options.source, options.tokens, options.seq_len) == (None, None, 2048)
    assert calibration_options(512, "prose", "4k").tokens == 4096
    assert calibration_options(512, "prose", calibrate_seq_len="2k").seq_len == 2048
    saved = tmp_path / "moments.safetensors"
    saved.touch()
    with pytest.raises(UsageError, match="leave out --calibrate-seq-len"):
        calibration_options(512, str(saved), calibrate_seq_len="2k")
