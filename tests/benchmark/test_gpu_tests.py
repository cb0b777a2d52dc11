"""The run of the GPU's tests starts pytest so that its plugin loads wherever packages lie."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvprof.child import child_python

ROOT = Path(__file__).resolve().parents[2]
STARTED = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from pathlib import Path
import gpu_tests, lying_apart
gpu_tests.marked_files = lambda: [sys.argv[1]]
gpu_tests.KERNELS = "nowhere"
found = gpu_tests.tested("alone", 1, 300.0, Path(sys.argv[2]))
print(gpu_tests.json.dumps(found))
"""


def without_workers() -> dict[str, str]:
    """Return the environment without what tells a pytest that it is another's worker."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}


def test_a_package_in_a_folder_that_only_a_variable_names_is_found(tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "lying_apart.py").write_text("FOUND = 17\n")
    own = tmp_path / "test_own.py"
    own.write_text(
        "import pytest\npytestmark = [pytest.mark.gpu, pytest.mark.alone]\n"
        "def test_it():\n    import lying_apart\n    assert lying_apart.FOUND == 17\n"
        "def test_that():\n    assert False, 'as it should'\n"
        "@pytest.mark.skip(reason='no need')\ndef test_no():\n    pass\n"
    )
    path = os.pathsep.join(filter(None, (str(ROOT), str(apart), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        child_python("-c", STARTED, str(own), str(tmp_path)),
        env=without_workers() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}, done.stdout + done.stderr
    why = {test["outcome"]: test["why"] for test in found["tests"]}
    assert "as it should" in why["failed"]
    assert "no need" in why["skipped"]


def test_every_process_begins_with_its_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_tests
    import recording

    taken = {"a": 1.0, "b": 9.0, "c": 4.0, "d": 6.0, "e": 2.0, "f": 0.5}
    inputs = {"benchmark": "gpu tests"}
    for kind, factor in (("one", 1.0), ("two", 0.5)):  # the slower GPU's are taken
        tests = [{"test": name, "seconds": factor * own} for name, own in taken.items()]
        monkeypatch.setattr(recording, "gpu_word", lambda _, kind=kind: kind)
        gpu_tests.keep(tmp_path, inputs, {"together": {"tests": tests}}, {})
    monkeypatch.setattr(gpu_tests, "RECORDS", tmp_path)
    monkeypatch.setenv(gpu_tests.REPORTS, str(tmp_path / "reports"))
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    items = [SimpleNamespace(nodeid=name) for name in ("a", "b", "new", "c", "d", "e", "f")]
    gpu_tests.pytest_collection_modifyitems(items)
    # The first of two processes gets three of seven tests.
    assert [item.nodeid for item in items] == ["d", "e", "f", "b", "c", "a", "new"]
