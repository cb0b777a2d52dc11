"""The method of docs/adding-a-method.md, installed as a package of its own."""

import inspect
import re
import sys
import textwrap

import pytest

import kvprof.methods


def example():
    """Return the documented method and its entry point, as the documentation has them."""
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", inspect.getdoc(kvprof.methods) + "\n")
    return textwrap.dedent(blocks[0]), textwrap.dedent(blocks[1])


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
