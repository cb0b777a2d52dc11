import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvprof
from kvprof.errors import UsageError
from kvprof.methods.accounting import rate
from kvprof.models.load import load_model
from tests.models.tiny import VOCABULARY, tiny, token_ids

FINE = {"grid": 2, "minimum": 2}


def test_importing_kvprof_imports_no_torch() -> None:
    program = (
        "import sys, kvprof\n"
        "assert 'torch' not in sys.modules and 'plan' in dir(kvprof)\n"
        "assert not hasattr(kvprof, 'nothing')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    # Another process would load torch for this.
    assert callable(kvprof.plan)
    assert callable(kvprof.compressed)


def test_a_model_in_memory_is_planned_and_generates() -> None:
    model = tiny("Llama")
    plan = kvprof.plan(model, method="kq", rate=0.4, calibrate="random:8k", **FINE)
    assert plan.method == "kq"
    assert plan.made["context"] == 96  # three quarters of the model's 128
    assert 0.4 <= rate(plan, 96) < 0.45
    with kvprof.compressed(model, plan):
        assert model.generate(token_ids(1, 8), max_new_tokens=4).shape == (1, 12)


def test_a_folder_and_a_loaded_model_give_the_same_plan(tiny_folder: Path) -> None:
    by_name = kvprof.plan(tiny_folder, "fdc", removal=0.1, calibrate="random:512", seq_len=64)
    loaded = load_model(str(tiny_folder), device="cpu")
    by_model = kvprof.plan(loaded, "fdc", removal=0.1, calibrate="random:512", seq_len=64)
    assert by_name.made["removal_rate"] == 0.1
    assert by_name.made["calibration"] == by_model.made["calibration"]
    first, second = (p.layers[0].keys.groups[0] for p in (by_name, by_model))
    assert first.ranks == second.ranks


def test_a_model_without_a_tokenizer_is_calibrated_on_ids(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(3, VOCABULARY, (4, 128)))
    plan = kvprof.plan(tiny("Llama"), "kq", 0.3, calibrate=path, allocation="budget", **FINE)
    assert plan.made["sensitivity"]["source"] == "ids.npy"
    with pytest.raises(UsageError, match="tokenizer"):
        kvprof.plan(tiny("Llama"), "kq", 0.3, calibrate="prose")


def test_a_rate_is_a_share_as_people_write_it() -> None:
    by_share = kvprof.plan(tiny("Llama"), "kq", "40%", calibrate="random:8k", **FINE)
    assert 0.4 <= rate(by_share, 96) < 0.45
    for wrong in ({"rate": "a third"}, {"removal": "a third"}):
        with pytest.raises(UsageError):
            kvprof.plan("no model is looked for", "fdc", **wrong)
