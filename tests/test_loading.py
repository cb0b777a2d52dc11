"""While modules are loaded nothing is looked for; what a run leaves is found as ever."""

import gc
import sys
import weakref

import pytest

from kvprof.loading import loading


class Circle:
    """Something that only a look for circles removes."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers not be loaded, as where a command begins."""
    monkeypatch.delitem(sys.modules, "transformers", raising=False)


def looks(made: int) -> int:
    """Return how often a look was taken while so many objects were made."""
    before = sum(one["collections"] for one in gc.get_stats())
    kept = [[] for _ in range(made)]
    assert len(kept) == made
    return sum(one["collections"] for one in gc.get_stats()) - before


@pytest.mark.usefixtures("unloaded")
def test_nobody_looks_while_modules_are_made() -> None:
    made = 2 * gc.get_threshold()[0]
    with loading():
        assert looks(made) == 0
        stays = weakref.ref(Circle())
    assert gc.isenabled()
    assert looks(made) > 0
    left = weakref.ref(Circle())
    gc.collect()
    assert left() is None
    assert stays() is not None


@pytest.mark.usefixtures("unloaded")
def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError("vllm")
    assert gc.isenabled()


def test_where_all_is_loaded_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command in the same process keeps nothing that the first one left."""
    monkeypatch.setitem(sys.modules, "transformers", sys)
    kept = gc.get_freeze_count()
    with loading():
        assert looks(2 * gc.get_threshold()[0]) > 0
        left = weakref.ref(Circle())
    assert gc.get_freeze_count() <= kept
    gc.collect()
    assert left() is None
