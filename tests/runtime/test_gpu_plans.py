"""Tests that need a GPU get as far as their first session on a CPU: so their plans can be built."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from kvprof.methods.plan import Plan
from tests.runtime import test_kernel_gpu as gpu
from tests.runtime import test_kernel_rebuilt_gpu as rebuilt

MODULES = (gpu, rebuilt)
#: Their models, which stay here: each is examined once. On a GPU their own tests make others.
_MODELS = {module: cache(module.model_of) for module in MODULES}


class _Begun(Exception):
    """A session was asked for."""


def calls(module: Any) -> Iterator[Any]:
    """Yield every test of a module as often as its marks call it."""
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for values in product(*(mark.args[1] for mark in marks)):
            given, said = {}, []
            for mark, value in zip(marks, values, strict=True):
                whole = isinstance(value, type(pytest.param()))
                given[mark.args[0]] = value.values[0] if whole else value
                plain = isinstance(given[mark.args[0]], str | bool | torch.dtype)
                said += [value.id] if whole else [str(value)] if plain else []
            yield pytest.param(test, given, id="-".join([name, *said]))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Let what goes to a GPU stay here, and a session end its test; return their plans."""
    found: list[Plan] = []
    to = torch.nn.Module.to

    def moved(module: torch.nn.Module, *where: Any) -> torch.nn.Module:
        return to(module, *(each for each in where if each != "cuda"))

    def compressed(model: Any, plan: Plan, *_: Any, **__: Any) -> None:
        found.append(plan)
        raise _Begun

    monkeypatch.setattr(torch.nn.Module, "to", moved)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(gpu, "compressed", compressed)
    for module, model_of in _MODELS.items():
        monkeypatch.setattr(module, "model_of", model_of)
    return found


@pytest.mark.parametrize(("test", "given"), [each for own in MODULES for each in calls(own)])
def test_a_gpus_test_builds_its_plan(
    test: Callable[..., None], given: dict[str, Any], begun: list[Plan]
) -> None:
    with pytest.raises(_Begun):
        test(**given)
    assert isinstance(begun[0], Plan)
