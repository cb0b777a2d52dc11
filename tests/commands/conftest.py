"""What all tests of commands share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import calibrate_on_few, share_models, share_moments


@pytest.fixture(scope="package", autouse=True)
def _few_documents(short_splits: Path) -> Iterator[None]:
    """Evaluate on the first documents of the splits, in what modules make once too."""
    with pytest.MonkeyPatch.context() as patch:
        share_models(patch)
        share_moments(patch)
        patch.setattr("kvprof.evaluation.data._SPLITS", short_splits)
        yield


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate on few tokens where a command says nothing of it."""
    calibrate_on_few(monkeypatch)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rates recorded on this machine are nobody's business here."""
    monkeypatch.setenv("KVPROF_CACHE", str(tmp_path / "cache"))
