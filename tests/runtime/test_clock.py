"""Marks cost nothing when no clock runs, change nothing when one does, and times are exclusive."""

from typing import Any

import pytest
import torch

from kvprof.methods.plan import Placement
from kvprof.methods.quantisers import per_token
from kvprof.methods.storage import Eviction
from kvprof.runtime import clock as clocks
from kvprof.runtime.clock import REST, EventClock, WallClock, part, timing
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan, ragged
from tests.runtime.test_strawman import strawman


class Hand:
    """A clock's hand that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds


def totals(clock: clocks.Clock) -> dict[tuple[str, int | None], float]:
    found: dict[tuple[str, int | None], float] = {}
    for stretch in clock.read():
        key = stretch.part, stretch.layer
        found[key] = found.get(key, 0.0) + stretch.seconds
    return {key: seconds for key, seconds in found.items() if seconds}


def test_inner_times_are_not_the_outers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, clock = Hand(monkeypatch), WallClock()
    with timing(clock):
        hand.work(1)
        with part("attention", 3):
            hand.work(2)
            with part("compress"):
                hand.work(4)
                with part("quantise"):
                    hand.work(8)
                hand.work(16)
            hand.work(32)
        hand.work(64)
        with part("sampling"):
            hand.work(128)
    assert totals(clock) == {
        (REST, None): 65,
        ("attention", 3): 34,
        ("compress", 3): 20,
        ("quantise", 3): 8,
        ("sampling", None): 128,
    }


def test_a_second_step_knows_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, clock = Hand(monkeypatch), WallClock()
    for seconds in (5, 7):
        with timing(clock), part("mlp", 0):
            hand.work(seconds)
    assert totals(clock) == {("mlp", 0): 7}


def test_nothing_is_timed_without_a_clock_or_when_muted(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, clock = Hand(monkeypatch), WallClock()
    with part("attention"):
        hand.work(1)
    with timing(clock):
        clock.muted = True
        with part("attention"):
            hand.work(2)
        clock.muted = False
    with part("attention"):
        hand.work(4)
    assert totals(clock) == {(REST, None): 2}


def test_an_exception_turns_the_clock_off(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, clock = Hand(monkeypatch), WallClock()

    def fail() -> None:
        clock.muted = True
        raise RuntimeError

    with pytest.raises(RuntimeError), timing(clock), part("mlp"):
        fail()
    assert clocks._running is None
    with timing(clock), part("head"):
        hand.work(3)
    assert totals(clock) == {("head", None): 3}


def test_an_inner_clock_has_its_body_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, outer, inner = Hand(monkeypatch), WallClock(), WallClock()
    with timing(outer):
        with timing(inner), part("head"):
            hand.work(3)
        with part("mlp"):
            hand.work(4)
    assert totals(inner) == {("head", None): 3}
    assert totals(outer) == {(REST, None): 3, ("mlp", None): 4}


class Gpu:
    """A GPU that takes up work when it was queued or when it is done with the work before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        self.made = 0
        gpu = self

        class Event:
            def __init__(self, **options: Any) -> None:
                gpu.made += 1
                self.options = options

            def record(self, stream: Any) -> None:
                assert stream == "stream"
                self.at = max(gpu.host, gpu.device)

            def query(self) -> bool:
                return self.at <= gpu.host

            def elapsed_time(self, other: "Event") -> float:
                return (other.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")

    def kernel(self, queueing: float, seconds: float) -> None:
        self.host += queueing
        self.device = max(self.host, self.device) + seconds


def test_events_are_read_as_the_gpu_saw_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = Gpu(monkeypatch), EventClock()
    for _ in range(2):
        gpu.device = gpu.host = 0.0
        gpu.device = 10.0  # held back
        with timing(clock):
            with part("qkv_proj", 1):
                gpu.kernel(0.5, 2)
            with part("mlp", 1):
                gpu.kernel(0.5, 3)
        assert totals(clock) == {("qkv_proj", 1): 2, ("mlp", 1): 3}
    assert gpu.made == 6  # once for both steps


def test_a_watched_clock_knows_where_the_gpu_may_have_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, clock = Gpu(monkeypatch), EventClock(watched=True)
    gpu.device = 1.2
    with timing(clock):
        with part("qkv_proj"):
            gpu.kernel(0.5, 0.1)
        with part("mlp"):
            gpu.kernel(1.5, 0.2)  # the host falls behind within it
    found = {stretch.part: stretch for stretch in clock.read() if stretch.part != REST}
    assert found["qkv_proj"].exact
    assert found["qkv_proj"].seconds == pytest.approx(0.1)
    assert not found["mlp"].exact
    assert found["mlp"].seconds == pytest.approx(0.9)  # 0.7 of it waiting


def test_compiled_code_leaves_marks_out() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with part("attention", 1):
            y = x * 2
            with part("compress"):
                y = y + 1
        return y

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    x, clock = torch.arange(4.0), WallClock()
    assert torch.equal(compiled(x), 2 * x + 1)
    with timing(clock):
        assert torch.equal(compiled(x), 2 * x + 1)
    assert {stretch.part for stretch in clock.read()} == {REST}


SETTINGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "full": ({"placement": Placement.NONE, "project_values": False}, set()),
    "fdc": ({"ranks": ragged}, {"compress"}),
    "svd": ({"ranks": ragged, "fold_values": (False, False)}, {"compress", "decompress"}),
    "palu": ({"ranks": ragged, "placement": Placement.PRE_ROPE, "fold_keys": True},
             {"decompress"}),
    "bits": ({"quantiser": per_token((4,), group=None)}, {"compress", "quantise"}),
    "h2o": ({"placement": Placement.NONE, "project_values": False,
             "eviction": Eviction("h2o", 0.5, recent_share=0.5)}, {"evict"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "off") for name in (*SETTINGS, "strawman")),
        *((name, "on") for name in ("full", "fdc", "svd")),
    ],
)
def test_the_runtime_marks_what_a_method_does_and_computes_the_same(
    name: str, kernels: str
) -> None:
    model = loaded("Llama", head_dim=32)
    if name == "strawman":
        plan, wanted = strawman(model), {"decompress", "compress"}
    else:
        options, wanted = SETTINGS[name]
        grid = {"ranks": lambda *a: (16,)} if kernels == "on" and "ranks" in options else {}
        plan = make_plan(model, **{**options, **grid})
    if kernels == "on":
        wanted = {*wanted, "schedule"}
    ids = token_ids(2, 21)

    def run(timed: bool) -> tuple[list[torch.Tensor], list[set[str]]]:
        logits, found = [], []
        with compressed(model, plan, kernels) as session, torch.no_grad():
            cache = session.new_cache()
            for start, stop in ((0, 20), (20, 21)):
                clock = WallClock()
                given = {"past_key_values": cache}
                if timed:
                    with timing(clock):
                        logits.append(model.model(ids[:, start:stop], **given).logits)
                    found.append({s.part for s in clock.read()} - {REST})
                else:
                    logits.append(model.model(ids[:, start:stop], **given).logits)
        return logits, found

    (plain, _), (timed, (prefill, decode)) = run(False), run(True)
    for one, other in zip(plain, timed, strict=True):
        assert torch.equal(one, other)
    assert decode == {"attention", *wanted}
    assert ("basis" in prefill) == (name == "strawman")
