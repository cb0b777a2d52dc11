"""Every command and every method has a page, made of what it says itself."""

import sys
from pathlib import Path

import pytest

from kvprof.cli import COMMANDS
from kvprof.methods.papers import PAPERS
from kvprof.methods.registry import METHODS

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import pages


def test_every_command_and_method_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "run", lambda line: f"Usage: kvprof {line}")
    texts = [path.read_text(encoding="utf-8") for path in pages.write(tmp_path)]
    titled = {name for text in texts for name in text.partition("\n")[0][2:].split(", ")}
    assert titled == {f"kvprof {one.name}" for one in COMMANDS} | (METHODS.keys() - PAPERS.keys())
    assert all(f"`{name}`" in "".join(texts) for name in PAPERS)
    assert not any("----" in text for text in texts)
