"""Which steps of an engine are sampled, what is kept of them, and who reads it; without vLLM."""

import json
from types import SimpleNamespace

import pytest

from kvprof.runtime.clock import part
from kvprof.serving.sampled import (
    SampledStep,
    StepReader,
    StepWriter,
    asked_sampling,
    sampling_variable,
)
from kvprof.serving.sampling import StepSampler, contents


def ran(sampler, steps, reads=False):
    """Run steps whose marks nest; return which of them were to be in parts."""
    seen = []

    def run():
        seen.append(sampler.in_parts)
        with part("attention"), part("schedule"):
            pass
        with part("compress"):
            pass
        return len(seen)

    for number in range(1, steps + 1):
        assert sampler.step(run, lambda: (2, 30, 64 * reads), reads=reads) == number
    return seen


def test_every_third_step_is_in_parts_and_the_one_behind_it_whole(tmp_path):
    sampler = StepSampler(3, StepWriter(tmp_path), on_gpu=False)
    assert ran(sampler, 7) == [False, False, True, False, False, True, False]
    found = StepReader(tmp_path).new()
    assert [set(one.parts) for one in found] == [
        set(),
        {"attention", "schedule", "compress"},
        set(),
        {"attention", "schedule", "compress"},
        set(),
    ]
    for one in found:
        assert (one.decodes, one.context, one.prefill, one.waited) == (2, 30, 0, 0)
        assert 0 <= sum(one.parts.values()) <= one.seconds
    assert [one.end for one in found] == sorted(one.end for one in found)


def test_steps_that_read_prompts_are_counted_by_themselves(tmp_path):
    sampler = StepSampler(2, StepWriter(tmp_path), on_gpu=False)
    assert ran(sampler, 1) == ran(sampler, 1, reads=True) == [False]
    assert ran(sampler, 1) == ran(sampler, 1, reads=True) == [True]
    assert ran(StepSampler(1, None, on_gpu=False), 3) == [True] * 3


def test_a_step_that_fails_is_forgotten_and_the_next_is_as_ever(tmp_path):
    sampler = StepSampler(2, StepWriter(tmp_path), on_gpu=False)
    ran(sampler, 1)

    def fails():
        raise MemoryError

    with pytest.raises(MemoryError):
        sampler.step(fails, lambda: (1, 1, 0), reads=False)
    assert not sampler.in_parts
    assert ran(sampler, 2) == [False, True]
    assert len(StepReader(tmp_path).new()) == 3


def test_a_step_is_written_when_the_device_has_passed_it(tmp_path):
    sampler = StepSampler(1, StepWriter(tmp_path), on_gpu=False)
    clock = sampler._clock()
    over = []
    clock.passed = lambda: bool(over)
    sampler._free.append(clock)
    ran(sampler, 2)  # the second has a clock of its own, and waits behind it
    reader = StepReader(tmp_path)
    assert reader.new() == []
    over.append(True)
    ran(sampler, 1)
    assert len(reader.new()) == 3


def test_a_reader_gives_every_whole_line_once_and_no_damaged_one(tmp_path):
    reader = StepReader(tmp_path)
    one = SampledStep(2.0, 0.5, 1, 10, 0, {"attention": 0.1})
    StepWriter(tmp_path).write(one)
    (tmp_path / "steps-1.jsonl").write_text('{"end": 1.0}\nnonsense\n{"end": 1.0, "seconds": 1.0, ')
    assert reader.new() == [one]
    assert reader.new() == []
    with (tmp_path / "steps-1.jsonl").open("a") as file:
        file.write('"decodes": 1, "context": 1, "prefill": 0}\n')
    assert reader.new() == [SampledStep(1.0, 1.0, 1, 1, 0)]


def test_what_is_asked_for_travels_in_a_variable(tmp_path):
    assert asked_sampling(sampling_variable(50, tmp_path)) == (50, tmp_path)
    for text in (None, "", "0:/x", "x:/y", "5", "5:"):
        assert asked_sampling(text) is None


def test_what_a_step_holds_is_what_was_scheduled():
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_computed_tokens_cpu=[100, 7, 512])
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1, "c": 256})
    runner = SimpleNamespace(input_batch=batch)
    assert contents(runner, scheduled) == (2, 101 + 8, 256)
    assert json.dumps(contents(runner, SimpleNamespace(num_scheduled_tokens={}))) == "[0, 0, 0]"


def test_the_second_runner_keeps_a_steps_batch_until_its_tokens_are_sampled():
    batch = SimpleNamespace(req_ids=["c", "a"], num_computed_tokens_np=[512, 100])
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 1, "c": 256})
    runner = SimpleNamespace(execute_model_state=SimpleNamespace(input_batch=batch))
    assert contents(runner, scheduled) == (1, 101, 256)
    runner.execute_model_state = None
    assert contents(runner, SimpleNamespace(num_scheduled_tokens={})) == (0, 0, 0)
