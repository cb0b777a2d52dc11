"""The documents point at what exists, and hold no placeholder."""

import re
from pathlib import Path

import pytest

from kvprof.cli import COMMANDS
from kvprof.methods.named import PAPERS
from kvprof.methods.registry import METHODS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    ROOT / "recipes/reference-model/README.md",
    ROOT / "kvprof/assets/reference/README.md",
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    for target in targets:
        if "://" not in target:
            assert (path.parent / target).exists(), target
    assert not re.search(r"^(SAMPLE|TODO|TBD)\b", text, re.MULTILINE)


def test_every_command_and_method_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import pages

    monkeypatch.setattr(pages, "run", lambda line: f"Usage: kvprof {line}")
    texts = [path.read_text(encoding="utf-8") for path in pages.write(tmp_path)]
    titled = {name for text in texts for name in text.partition("\n")[0][2:].split(", ")}
    assert titled == {f"kvprof {one.name}" for one in COMMANDS} | (METHODS.keys() - PAPERS.keys())
    assert all(f"`{name}`" in "".join(texts) for name in PAPERS)
