"""The picture of the live view in the README is what the recorded run looks like."""

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/tui.svg"


def test_the_readme_shows_what_its_program_draws(tmp_path, monkeypatch):
    pinned = json.loads((Path(__file__).parent / "snapshots/versions.json").read_text())
    if pinned != {name: version(name) for name in pinned}:
        pytest.skip(f"the picture was drawn with {pinned}")
    monkeypatch.delenv("NO_COLOR", raising=False)
    spec = importlib.util.spec_from_file_location("readme_svg", ROOT / "tools/readme_svg.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    run = str(ROOT / "kvprof/assets/demo")
    monkeypatch.setattr(sys, "argv", ["readme_svg.py", run, "--to", str(tmp_path / "now.svg")])
    program.main()
    command = "python tools/readme_svg.py kvprof/assets/demo --to docs/images/tui.svg"
    assert (tmp_path / "now.svg").read_text() == PICTURE.read_text(), f"run {command}"
    readme = (ROOT / "README.md").read_text()
    assert command in readme
    assert "(docs/images/tui.svg)" in readme
