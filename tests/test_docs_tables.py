"""Tables of the documentation are those that the records make."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Pages whose tables all come from records or from the code.
PAGES = ("index", "start", "concepts", "commands", "methods", "kernels", "adding-a-method", "faq")


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_tool("docs_tables")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_pages_are_what_the_records_make(tables: ModuleType) -> None:
    found = tables.pages()
    assert {path.stem for path in found} >= {"commands", "methods", "kernels", "adding-a-method"}
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"{path.name}: run python tools/docs_tables.py"


@pytest.mark.parametrize("name", PAGES)
def test_no_table_is_typed_by_hand(name: str) -> None:
    by_hand = re.sub(r"<!-- table: .*?<!-- end -->", "", page(name), flags=re.DOTALL)
    assert not re.findall(r"^\|.*$", by_hand, re.MULTILINE)


def test_a_figure_that_was_changed_by_hand_is_found(tables: ModuleType) -> None:
    text = page("methods")
    row = re.search(r"^\| `kq` \| (0\.\d{3}) ", text, re.MULTILINE)
    assert row is not None
    changed = text[: row.start(1)] + "0.999" + text[row.end(1) :]
    assert tables.filled(changed) == text


def test_every_method_of_a_frontier_stands_among_the_methods() -> None:
    text = page("methods")
    for name in ("frontier-random", "frontier-text"):
        record = json.loads((DOCS / f"findings/{name}.json").read_text(encoding="utf-8"))
        for row in record["data"]["methods"]:
            assert f"| `{row['label']}` |" in text, row["label"]


def test_findings_agree_with_the_frontiers_they_name() -> None:
    """Rates in findings.md, which is written by hand, are those of its records."""
    text = page("findings")
    for name in ("frontier-random", "frontier-text"):
        record: dict[str, Any] = json.loads((DOCS / f"findings/{name}.json").read_text("utf-8"))
        section = text.split(f"(findings/{name}.json)")[1].split("\n\n")[1]
        written = dict(re.findall(r"^\| `([^`]+)` \| ([0-9.]+) ", section, re.MULTILINE))
        measured = {
            row["label"]: f"{row['max_rate']:.3f}"
            for row in record["data"]["methods"]
            if row["max_rate"] is not None
        }
        assert written
        assert written.items() <= measured.items()


def test_a_spectrum_is_rounded_and_says_so() -> None:
    found = load_tool("trim_record").trimmed(
        {
            "kind": "spectrum",
            "inputs": {},
            "data": {"pairs": {"k": {"mean": [1234.56, 0.00123456], "cv_of_max": None}}},
        }
    )
    assert found["data"]["pairs"]["k"] == {"mean": [1235.0, 0.001235], "cv_of_max": None}
    assert found["inputs"]["numbers"] == "4 significant digits"
    with pytest.raises(SystemExit, match="a result of eval"):
        load_tool("trim_record").trimmed({"kind": "eval"})


def test_a_spectrum_keeps_the_pairs_that_are_asked_for() -> None:
    def spectrum() -> dict[str, Any]:
        pairs = {name: {"mean": [2.0]} for name in ("qk", "vo", "k")}
        data = {"pairs": pairs, "removal": [{"removal_rate": 0.1}]}
        return {"kind": "spectrum", "inputs": {"pairs": ["qk", "vo", "k"]}, "data": data}

    trimmed = load_tool("trim_record").trimmed
    kept = trimmed(spectrum(), ["k"])
    assert list(kept["data"]["pairs"]) == kept["inputs"]["pairs"] == ["k"]
    assert kept["inputs"]["pairs_left_out"] == ["qk", "vo"]
    # What can be dropped at a rate of removal is of both pairs, and stays with both alone.
    assert kept["data"]["removal"] == []
    assert len(trimmed(spectrum(), ["qk", "vo"])["data"]["removal"]) == 1
    with pytest.raises(SystemExit, match="spectrum without q_pre"):
        trimmed(spectrum(), ["k", "q_pre"])


def test_the_index_lists_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)", page("index")))
    assert linked >= {path.name for path in DOCS.glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("name", PAGES)
def test_links_to_a_heading_reach_one(name: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page(name)):
        path = DOCS / (target or f"{name}.md")
        headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        # As GitHub makes an anchor of a heading.
        anchors = [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings]
        assert anchor in anchors, f"{target}#{anchor}"


def test_a_region_that_nothing_fills_is_named(tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="no table 'rate'"):
        tables.filled("<!-- table: rate kq -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="1 regions begin, and 0 of them"):
        tables.filled("<!-- table: rates kq -->\n| a |\n")
    with pytest.raises(KeyError, match="nope"):
        tables.filled("<!-- table: kernels nope -->\n<!-- end -->\n")


def test_the_readme_states_requests_as_the_record_has_them() -> None:
    data = json.loads((DOCS / "benchmarks/jct.json").read_text(encoding="utf-8"))["data"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for key, request in (
        ("outputs-8b", (1, 256, 102_400)),
        ("batch-8", (8, 102_400, 1024)),
        ("inputs-8b", (1, 32_768, 256)),
    ):
        seconds = {
            case["method"]: case["jct_seconds"]
            for case in data[key]["cases"]
            if (case["batch"], case["input_len"], case["output_len"]) == request
        }
        for method in ("fdc", "palu"):
            change = 100 * (seconds[method] / seconds["full"] - 1)
            assert f"{'+' if change > 0 else '−'}{abs(change):.1f} %" in readme
