"""The method of docs/writing-a-method.md, installed as a package of its own."""

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/writing-a-method.md"


def example():
    """Return the documented method and its entry point, as the documentation has them."""
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return blocks[0], blocks[1]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages that holds the documented example."""
    source, table = example()
    (tmp_path / "keys_only.py").write_text(source)
    info = tmp_path / "keys_only-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keys-only\nVersion: 1.0\n")
    name, _, target = table.splitlines()[1].partition(" = ")
    (info / "entry_points.txt").write_text(f"[kvprof.methods]\n{name} = {target.strip(chr(34))}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield info
    sys.modules.pop("keys_only", None)
