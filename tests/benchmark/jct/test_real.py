"""A real run tells every part, what it leaves out, and leaves the model as it was."""

from typing import Any

import pytest
import torch

from kvprof.errors import FailedError, UsageError
from kvprof.methods.accounting import bytes_at, full_bytes
from kvprof.methods.plan import Placement
from kvprof.methods.storage import Levels
from kvprof.records.parts import PARTS
from tests.benchmark.jct.real_runs import NEW, PROMPT, Ticks, measured, of, seconds_by, traces
from tests.runtime.plans import loaded, make_plan, ragged
from tests.runtime.test_clock import SETTINGS
from tests.runtime.test_strawman import strawman

EVERY = {
    "embedding",
    "norm",
    "qkv_proj",
    "rope",
    "attention",
    "o_proj",
    "mlp",
    "head",
    "sampling",
    "host",
}


@pytest.mark.parametrize("name", [*SETTINGS, "strawman"])
def test_every_method_tells_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", Ticks())  # a machine at work takes time anywhere
    model = loaded("Llama")
    own: set[str] = {"decompress", "compress"}
    if name == "strawman":
        plan = strawman(model)
    else:
        options, own = SETTINGS[name]
        plan = make_plan(model, **options)
    done, events = measured(model, plan)
    assert done is not None
    by_phase = seconds_by(events, "phase", "part")
    assert {part for phase, part in by_phase if phase == "decode"} == EVERY | own
    prefill = {part for phase, part in by_phase if phase == "prefill"}
    assert prefill >= EVERY
    assert ("basis" in prefill) == (name == "strawman")
    assert set(PARTS) > prefill


def test_the_events_of_a_case() -> None:
    model = loaded("Llama")
    plan = make_plan(model, ranks=ragged)
    done, events = measured(model, plan, repeats=2)
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert {event.case for event in events} == {"a case"}
    started, finished = events[0], events[-1]
    assert (started.event, finished) == ("case_started", done)
    assert (started.batch, started.input_len, started.output_len) == (2, PROMPT, NEW)
    told = of(events, "step")
    assert [step.runs for step in told] == [1] * NEW + [2] * NEW
    steps = told[NEW:]  # those of both runs, in place of the first one's
    assert [step.step for step in told] == 2 * list(range(NEW))
    assert (steps[0].seconds, sum(step.seconds for step in steps[1:])) == (
        finished.prefill_seconds,
        pytest.approx(finished.decode_seconds),
    )
    assert [step.context for step in steps] == list(range(PROMPT, PROMPT + NEW))
    assert [step.phase for step in steps] == ["prefill"] + ["decode"] * (NEW - 1)
    assert all(step.seconds > 0 for step in steps)

    tokens = PROMPT + NEW - 1
    layers = started.layers
    account = bytes_at(plan, tokens, itemsize=4, batch=2).total
    assert sum(layer["nbytes"] for layer in layers) == account
    group = plan.layers[1].keys.groups[1]
    assert layers[1]["key_ranks"][1] == group.rank
    memory = of(events, "memory")
    assert [sample.context for sample in memory] == list(range(PROMPT, PROMPT + NEW))
    for sample in memory:
        assert sample.logical == bytes_at(plan, sample.context, itemsize=4, batch=2).total
        assert sample.full_width == full_bytes(plan, sample.context, itemsize=4, batch=2)
        assert sample.peak > sample.allocated >= sample.logical


def test_heads_that_share_a_latent_share_its_columns() -> None:
    model = loaded("Llama")
    plan = make_plan(model, ranks=lambda *a: (9,), heads=2, placement=Placement.PRE_ROPE)
    _, events = measured(model, plan)
    assert events[0].layers[0]["key_ranks"] == [4.5, 4.5]


def test_levels_are_told_with_their_tokens() -> None:
    model = loaded("Llama")
    plan = make_plan(
        model,
        placement=Placement.NONE,
        ranks=lambda *a: (a[3] // 2, a[3]),
        heads=2,
        lazy=True,
        fold_values=(False, True),
        levels=Levels(sink=4, shares=(0.8, 0.2), batch=4),
    )
    _, events = measured(model, plan)
    for sample in of(events, "memory"):
        assert sum(sample.levels.values()) == sample.context
        assert sample.levels["sinks"] == 4


@pytest.mark.parametrize("arch", ["Gemma2", "GptOss", "GPT2", "OPT", "Qwen3", "GPTNeoX", "Phi3"])
def test_other_architectures_have_the_same_parts(arch: str) -> None:
    model = loaded(arch)
    plan = make_plan(model, placement=Placement.NONE, project_values=False)
    _, events = measured(model, plan)
    wanted = EVERY if model.layout.layers[0].rotary_dim else EVERY - {"rope"}
    assert {part for (part,) in seconds_by(events, "part")} == wanted
    per_layer = {(e.part, e.layer) for e in of(events, "part")}
    for part in ("norm", "qkv_proj", "attention", "o_proj", "mlp"):
        assert {(part, index) for index in range(2)} <= per_layer


def test_nothing_is_left_behind() -> None:
    model = loaded("Llama")
    before = traces(model)
    measured(model, make_plan(model, ranks=ragged))
    after = traces(model)
    assert after[:2] == before[:2]
    assert torch.equal(after[2], before[2])


def test_a_model_that_fails_half_way_leaves_its_events_and_no_trace() -> None:
    model = loaded("Llama")
    before, events = traces(model), []

    def emit(event: Any) -> None:
        events.append(event)
        if event.event == "part" and event.step == 3:
            raise FailedError("the disk is full")

    with pytest.raises(FailedError, match="disk is full"):
        measured(model, make_plan(model, ranks=ragged), emit=emit)
    assert of(events, "step")
    assert traces(model)[:2] == before[:2]


@pytest.mark.parametrize("stop_after", [1, 5, NEW, 2 * NEW - 1])
def test_an_interruption_keeps_what_was_measured(stop_after: int) -> None:
    model = loaded("Llama")
    before = traces(model)
    done, events = measured(model, make_plan(model), stop_after=stop_after, repeats=3)
    assert done is None
    assert len(of(events, "step")) == min(NEW, stop_after)
    assert max([e.step for e in of(events, "part")], default=-1) == max(-1, stop_after - NEW - 1)
    assert not of(events, "case_finished")
    assert traces(model)[:2] == before[:2]


def test_an_interruption_after_both_ways_ends_the_case() -> None:
    done, events = measured(
        loaded("Llama"), make_plan(loaded("Llama")), stop_after=2 * NEW + 3, repeats=3
    )
    assert done is not None
    assert any("1 of 3" in warning.message for warning in of(events, "warning"))


def test_energy_is_that_of_the_runs_without_marks() -> None:
    windows = []

    def energy(start: float, stop: float) -> float | None:
        windows.append((start, stop))
        return (None, 5.0, 7.0)[len(windows) - 1]

    done, events = measured(loaded("Llama"), make_plan(loaded("Llama")), repeats=3, energy=energy)
    assert done is not None
    assert done.energy_joules == 6.0
    assert len(windows) == 3
    parts = [e.time for e in of(events, "part")]
    first = [step for step in of(events, "step") if step.runs == 1]
    assert windows[0][0] < first[0].time < first[-1].time < windows[0][1] < min(parts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"output_len": 0}, "output_len"),
        ({"output_len": 10_000}, "10,000"),
        ({"repeats": 0}, "repeats"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\(3,\)"),
        ({"graph": True}, "the model is on cpu"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    model = loaded("Llama")
    with pytest.raises(UsageError, match=said):
        measured(model, make_plan(model), **options)


def test_one_token_out_has_no_decoding() -> None:
    done, events = measured(loaded("Llama"), make_plan(loaded("Llama")), output_len=1)
    assert done is not None
    assert done.decode_seconds == 0.0
    assert {event.phase for event in of(events, "part")} == {"prefill"}


def test_layers_on_the_kernels_say_where_the_merge_is() -> None:
    model = loaded("Llama", head_dim=32)
    plan = make_plan(model, ranks=lambda *a: (16,))
    done, events = measured(model, plan, kernels="on")
    assert done is not None
    assert events[0].labels["merge"].startswith("in attention")
    found = {part for phase, part in seconds_by(events, "phase", "part") if phase == "decode"}
    assert found == {*EVERY, "compress", "schedule"}
