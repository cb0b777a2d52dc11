from importlib import metadata
from pathlib import Path

import pytest

from kvprof import requirements
from kvprof.requirements import COMMAND_NEEDS, package_states, python_wanted


def test_every_package_that_a_command_needs_is_a_dependency() -> None:
    required = {state.name for state in package_states() if state.extra is None}
    extra = {state.name for state in package_states() if state.extra is not None}
    for name, needs in COMMAND_NEEDS.items():
        # An engine alone is worth an extra without which a command does nothing.
        assert set(needs.packages) - required == ({"vllm"} if name == "serve" else set())
        assert {name for name, _ in needs.optional} <= extra


def test_the_tools_of_developers_are_nobodys_need() -> None:
    assert not {"pytest", "ruff", "mypy"} & {state.name for state in package_states()}


def test_an_installed_kvprof_reads_the_same_from_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        metadata.version(requirements.DISTRIBUTION)
    except metadata.PackageNotFoundError:
        pytest.skip("kvprof runs from a checkout that is not installed")
    from_checkout = {(s.name, s.extra, s.ok) for s in package_states()}
    wanted = python_wanted()
    # A stranger's pyproject.toml beside site-packages must not be taken for kvprof's.
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    monkeypatch.setattr(requirements, "__file__", str(tmp_path / "kvprof" / "requirements.py"))
    requirements._metadata.cache_clear()
    try:
        assert {(s.name, s.extra, s.ok) for s in package_states()} == from_checkout
        assert python_wanted() == wanted
    finally:
        requirements._metadata.cache_clear()
