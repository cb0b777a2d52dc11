"""What all tests of commands share."""

import pytest

from tests.conftest import calibrate_on_few


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate on few tokens where a command says nothing of it."""
    calibrate_on_few(monkeypatch)
