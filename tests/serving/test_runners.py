"""Which long steps are graphs, and that either model runner heeds it; without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvprof.serving import active_plan
from kvprof.serving.runners import (
    _choose_graphs,
    _Eager,
    _let_run_eagerly,
    graph_pays,
    scheduled_rows,
)

DECIDES = "_determine_batch_execution_and_padding"


def scheduled(new: dict[str, tuple[int, int]], known: dict[str, tuple[int, int]]) -> Any:
    """Return what vLLM's scheduler makes up: of requests, their new tokens and those before."""
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (count, _) in (new | known).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before)
            for name, (_, before) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(known), num_computed_tokens=[before for _, before in known.values()]
        ),
    )


LONG_PAST = scheduled({"a": (20, 0)}, {"b": (1, 900), "c": (600, 8192)})
FRESH = scheduled({"a": (600, 0)}, {"b": (1, 900)})


@pytest.fixture(autouse=True)
def _plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a plan with a quantiser and one without."""
    plans = {
        "codes.plan": SimpleNamespace(quantiser="one"),
        "a.plan": SimpleNamespace(quantiser=None),
    }
    monkeypatch.setattr(active_plan, "served_plan", plans.__getitem__)


@pytest.mark.parametrize(
    ("rows", "pays"),
    [
        # As short as vLLM's own graphs, whatever came before.
        ([(512, 100_000)], True),
        ([(500, 100_000)] + [(1, 9_000)] * 12, True),
        # Prompts of which nothing came before, and any that decode beside them.
        ([(315, 0)] * 3, True),
        ([(315, 0)] * 3 + [(1, 100_000)] * 64, True),
        # All decode.
        ([(1, 8_000)] * 700, True),
        # A few tokens go on after a beginning that is found again.
        ([(100, 256)] * 8, True),
        ([(600, 0), (10, 8_192)], True),
        # The rest of a long prompt.
        ([(800, 400)], True),
        ([(800, 401)], False),
        ([(600, 8_192)] + [(1, 300)] * 20, False),
        ([], True),
    ],
)
def test_a_long_step_is_a_graph_where_little_came_before_its_chunks(
    rows: list[tuple[int, int]], pays: bool
) -> None:
    assert graph_pays(rows) is pays


def test_what_a_step_holds_is_what_was_scheduled() -> None:
    assert list(scheduled_rows(LONG_PAST)) == [(20, 0), (1, 900), (600, 8192)]


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
