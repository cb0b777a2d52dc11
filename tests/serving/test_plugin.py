"""A server never starts where the engine's processes would go without the plug-in."""

import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kvprof.errors import LackingError, UsageError
from kvprof.serving import plugin

GROUP = "vllm.general_plugins"
OWN = EntryPoint("kvprof", "kvprof.serving.plugin:register", GROUP)
OTHER = EntryPoint("lora", "vllm.plugins.lora:register", GROUP)


def installed(monkeypatch, *points):
    monkeypatch.setattr(
        plugin, "entry_points", lambda **wanted: EntryPoints(points).select(**wanted)
    )


@pytest.mark.parametrize("points", [(), (OTHER,)])
def test_an_installation_without_the_plug_in_is_refused(monkeypatch, points):
    installed(monkeypatch, *points)
    with pytest.raises(LackingError):
        plugin.check_found()


@pytest.mark.parametrize(
    ("allowed", "found"), [("lora", False), ("lora,kvprof", True), ("", False)]
)
def test_plug_ins_that_are_left_out_are_told(monkeypatch, allowed, found):
    installed(monkeypatch, OTHER, OWN)
    plugin.check_found()
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    if found:
        plugin.check_found()
    else:
        with pytest.raises(UsageError):
            plugin.check_found()


def test_a_kvprof_that_only_this_process_finds_is_refused(monkeypatch, tmp_path):
    """As where it runs from a checkout that is not installed."""
    installed(monkeypatch, OWN)
    empty = tmp_path / "kvprof"
    empty.mkdir()
    (empty / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LackingError, match="none"):
        plugin.check_found()
    (empty / "serving").mkdir()
    for name in ("__init__", "plugin"):
        (empty / "serving" / f"{name}.py").touch()
    with pytest.raises(LackingError, match=f"the one in {tmp_path};"):
        plugin.check_found()


def test_the_project_names_its_plug_in():
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"][GROUP] == {OWN.name: OWN.value}
    assert callable(OWN.load())
