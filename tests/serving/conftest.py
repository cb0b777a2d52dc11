"""The tiny model of the tests that serve it through vLLM."""

from pathlib import Path

import pytest

from tests.serving.engine_runs import written_by_runtime
from tests.serving.tiny import save_model, save_tiny_plan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny model."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plan(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of its ragged plan."""
    return save_tiny_plan(model, tmp_path_factory.mktemp("plan") / "tiny.plan")


@pytest.fixture(scope="module")
def wanted(model: Path, plan: Path) -> list[list[int]]:
    """Return what kvprof's own runtime writes; it differs from the uncompressed model's."""
    return written_by_runtime(model, plan)
