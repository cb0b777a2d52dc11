"""Errors name what a Python user wrote, and options only where a command is running."""

import pytest
import torch

from kvprof import errors
from kvprof.cli import app
from kvprof.errors import UsageError, as_parameters, options_named
from kvprof.evaluation.data import text_samples
from kvprof.methods.registry import plan_family
from kvprof.models.placement import main_device, parse_dtype
from tests.runtime.plans import loaded, make_plan, ragged


@pytest.fixture
def _python(monkeypatch):
    """Leave the spelling that all other tests have."""
    monkeypatch.setattr(errors, "_at_command_line", False)


@pytest.mark.usefixtures("_python")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parse_dtype("float7", torch.device("cpu")), "dtype 'float7'"),
        (lambda: main_device("tpu"), "'tpu'"),
        (lambda: plan_family("kqq", None), "method 'kqq' is unknown"),
        (lambda: text_samples(loaded("Llama"), [], seq_len=1, sequences=1), "seq_len 1 is"),
    ],
)
def test_python_users_read_their_own_names(call, words):
    with pytest.raises(UsageError) as raised:
        call()
    assert words in str(raised.value)
    assert "--" not in str(raised.value)


@pytest.mark.usefixtures("_python")
def test_a_command_names_options_and_python_after_it_does_not():
    from typer.testing import CliRunner

    problem = UsageError("--seq-len 8: give a longer --text, or see kvprof eval --help")
    python = "seq_len 8: give a longer text, or see kvprof eval --help"
    assert str(problem) == python == as_parameters(python)
    with options_named():
        assert str(problem).startswith("--seq-len 8")
    assert "give --method" in CliRunner().invoke(app, ["eval"]).stderr
    assert str(problem) == python


@pytest.mark.parametrize("options", [{}, {"ranks": ragged}])
def test_a_plan_fits_a_line(options):
    plan = make_plan(loaded("Llama"), **options)
    shown = repr(plan)
    assert len(shown) <= 100
    assert "\n" not in shown
    assert plan.method in shown
    assert f"{len(plan.layers)} layers" in shown
