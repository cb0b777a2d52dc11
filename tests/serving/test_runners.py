"""A step runs without its graph where that is asked for, in either model runner; without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvprof.serving import served
from kvprof.serving.runners import _choose_graphs, _Eager, _let_run_eagerly
from tests.serving.scheduled_steps import FRESH, LONG_PAST

DECIDES = "_determine_batch_execution_and_padding"


@pytest.fixture(autouse=True)
def _plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a plan with a quantiser and one without."""
    plans = {
        "codes.plan": SimpleNamespace(quantiser="one"),
        "a.plan": SimpleNamespace(quantiser=None),
    }
    monkeypatch.setattr(served, "served_plan", plans.__getitem__)


@pytest.mark.parametrize("path", ["codes.plan", "a.plan"])
def test_the_first_runner_lets_a_step_run_without_its_graph(path: str) -> None:
    class Runner:
        """As vLLM's: it asks itself how a step is run, and runs others for itself."""

        def execute_model(self, scheduled: Any, fails: bool = False) -> bool:
            if fails:
                raise MemoryError
            return self._determine_batch_execution_and_padding(num_tokens=1)

        def _determine_batch_execution_and_padding(
            self, num_tokens: int, force_eager: bool = False
        ) -> bool:
            return force_eager

    eager = _Eager()
    _let_run_eagerly(Runner, DECIDES, "force_eager", eager)
    _choose_graphs(Runner, path, eager)
    runner = Runner()
    own = runner._determine_batch_execution_and_padding
    assert own(8) is False
    assert own(8, force_eager=True) is True
    found = [runner.execute_model(one) for one in (FRESH, LONG_PAST, FRESH)]
    assert found == [False, path == "codes.plan", False]
    # A step that fails says nothing of the next, nor of what the engine runs by itself.
    with pytest.raises(MemoryError):
        runner.execute_model(LONG_PAST, fails=True)
    assert own(8) is False


def test_the_second_runner_does_so_where_it_asks_its_module() -> None:
    def dispatch(manager: Any, num_tokens: int, need_eager: bool = False) -> bool:
        return need_eager

    module = SimpleNamespace(dispatch_cg_and_sync_dp=dispatch)

    class Runner:
        """As vLLM's."""

        def execute_model(self, scheduled: Any) -> bool:
            found: bool = module.dispatch_cg_and_sync_dp("a manager", 1, need_eager=False)
            return found

    eager = _Eager()
    _let_run_eagerly(module, "dispatch_cg_and_sync_dp", "need_eager", eager)
    _choose_graphs(Runner, "codes.plan", eager)
    found = [Runner().execute_model(one) for one in (FRESH, LONG_PAST, FRESH)]
    assert found == [False, True, False]


def test_an_engine_that_lets_no_step_run_so_stays_as_it_is() -> None:
    class Runner:
        """One that decides elsewhere."""

        def execute_model(self, scheduled: Any) -> str:
            return "ran"

    eager = _Eager()
    _let_run_eagerly(Runner, DECIDES, "force_eager", eager)
    _choose_graphs(Runner, "codes.plan", eager)
    assert Runner().execute_model(LONG_PAST) == "ran"


def test_what_asks_within_does_not_take_back_what_was_asked_before() -> None:
    eager = _Eager()
    with eager.where(True):
        with eager.where(False):
            assert eager.asked
        assert eager.asked
    assert not eager.asked
