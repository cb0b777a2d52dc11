"""Whole runs on a CPU: what lands in the journal, and what ends a run early."""

import pytest

from kvprof.benchmark.jct import layer_bench
from kvprof.benchmark.jct.request import JctRequest
from kvprof.benchmark.jct.run import run_jct
from kvprof.benchmark.shapes import has_weights
from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.records.events import RunFinished, RunStarted, Warned
from kvprof.records.fold import result_of
from kvprof.records.journal import Journal
from kvprof.records.schema import validate_result
from tests.benchmark.jct.shapes import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("kvprof.benchmark.machine.cpu_read_bandwidth", lambda: 0.02)
    monkeypatch.setattr("kvprof.benchmark.machine.usable_threads", lambda: 1)


def ran(tmp_path, folder, *, should_stop=lambda: False, **options):
    given = {
        "model": str(folder),
        "mode": "composed",
        "methods": ("full", "fdc"),
        "device": "cpu",
        "input_lens": (48,),
        "output_lens": (9,),
    }
    if options.get("mode", "composed") == "composed":
        given["repeats"] = 3
    problem = None
    with Journal(tmp_path / "events.jsonl") as journal:
        try:
            run_jct(JctRequest(**{**given, **options}), journal, should_stop=should_stop)
        except (FailedError, LackingError, UsageError) as error:
            problem = error
    events = journal.recording().events
    return events, (result_of(events) if events else None), problem


def test_a_composed_run_is_whole(tmp_path, folder):
    events, result, problem = ran(
        tmp_path, folder, methods=("full", "fdc", "palu"), batches=(1, 2), input_lens=(40, 48)
    )
    assert problem is None
    validate_result(result)
    assert result["complete"]
    assert result["data"]["mode"] == "composed"
    assert isinstance(events[0], RunStarted)
    assert [case["case"] for case in result["data"]["cases"]] == list(events[0].cases)
    assert len(events[0].cases) == 12
    for case in result["data"]["cases"]:
        assert case["complete"]
        parts = [row for row in result["data"]["parts"] if row["case"] == case["case"]]
        assert sum(row["seconds"] for row in parts) == pytest.approx(case["jct_seconds"])
        steps = [row for row in result["data"]["steps"] if row["case"] == case["case"]]
        decode = [row for row in steps if row["phase"] == "decode"]
        assert sum(row["weight"] for row in decode) == pytest.approx(8)
        assert sum(row["seconds"] * row["weight"] for row in decode) == pytest.approx(
            case["decode_seconds"]
        )
    assert result["data"]["baseline"] == "full"
    assert {row["case"] for row in result["data"]["integration"]} == set(events[0].cases)
    assert result["data"]["shape"]["intermediate_size"] == 128


def test_a_trace_gives_percentiles(tmp_path, folder, monkeypatch):
    class AsItsParts:
        """Makes a layer the sum of its parts, which on a busy machine it is not."""

        note = "timed without a CUDA graph"

        def sample(self):
            return 1.0

    monkeypatch.setattr(layer_bench, "layer_sampler", lambda *arguments: AsItsParts())
    _, result, problem = ran(
        tmp_path, folder, trace="fdc/humaneval", requests=8, methods=("full", "fdc")
    )
    assert problem is None
    validate_result(result)
    requests = result["data"]["requests"]
    assert requests["count"] == 8
    assert [row["method"] for row in requests["ttft"]] == ["full", "fdc"]
    assert requests["ttft"][0]["p50_seconds"] > 0
    assert {row["part"] for row in requests["overheads"]} == {"compress", "schedule"}
    case = result["data"]["cases"][0]
    assert (case["input_len"], case["output_len"]) == (204, 139)


def test_several_gpus_are_one_gpus_part_and_the_sum_is_left_out_here(tmp_path, folder):
    _, result, problem = ran(tmp_path, folder, tp=2, methods=("full",))
    assert problem is None
    assert result["data"]["shape"]["num_heads"] == 2
    assert result["data"]["shape"]["tp"] == 2
    assert any("communication" in text for text in result["warnings"])
    assert not any(row["part"] == "communication" for row in result["data"]["parts"])


def test_what_cannot_be_asked_for_leaves_no_event(tmp_path, folder):
    events, _, problem = ran(tmp_path, folder, tp=3)
    assert isinstance(problem, UsageError)
    assert events == []


def test_an_interrupted_run_keeps_its_cases(tmp_path, folder, monkeypatch):
    asked = []

    def stop():
        return len(asked) > 0 and asked[-1].startswith("fdc")

    point = layer_bench.LayerBench.point

    def watched(self, variant, *arguments, **options):
        asked.append(variant.name)
        return point(self, variant, *arguments, **options)

    monkeypatch.setattr(layer_bench.LayerBench, "point", watched)
    events, result, problem = ran(tmp_path, folder, should_stop=stop)
    assert problem is None
    assert isinstance(events[-1], RunFinished)
    assert (result["complete"], result["incomplete_reason"]) == (False, "interrupted")
    assert [case["method"] for case in result["data"]["cases"]] == ["full"]


def test_a_case_that_fails_leaves_the_others(tmp_path, folder, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("the kernel has a hole\nsomewhere")

    monkeypatch.setattr(layer_bench, "ragged_attention", broken)
    events, result, problem = ran(tmp_path, folder)
    assert problem is None
    assert [case["method"] for case in result["data"]["cases"]] == ["full"]
    assert result["complete"] is False
    assert "1 of 2 cases were not measured" in result["incomplete_reason"]
    assert any(
        isinstance(event, Warned) and "the kernel has a hole somewhere" in event.message
        for event in events
    )


def test_where_nothing_can_be_measured_the_run_fails(tmp_path, folder, monkeypatch):
    def broken(*arguments):
        raise MemoryError

    monkeypatch.setattr(layer_bench, "full_attention", broken)
    _, result, problem = ran(tmp_path, folder, methods=("full",))
    assert isinstance(problem, LackingError)
    assert "not enough memory" in str(problem)
    assert "nothing could be measured" in result["incomplete_reason"]


def test_a_lost_gpu_keeps_what_came_before(tmp_path, folder, monkeypatch):
    def lost(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(layer_bench, "ragged_attention", lost)
    _, result, problem = ran(tmp_path, folder, methods=("full", "fdc", "palu"))
    assert isinstance(problem, FailedError)
    assert "the GPU stopped" in str(problem)
    assert [case["method"] for case in result["data"]["cases"]] == ["full"]
    assert "the GPU stopped" in result["incomplete_reason"]


def test_methods_too_long_for_memory_are_told(tmp_path, folder):
    _, result, problem = ran(
        tmp_path, folder, methods=("full",), input_lens=(48, 2**34), output_lens=(2,)
    )
    # One ladder serves both lengths, so neither is measured.
    assert isinstance(problem, LackingError)
    assert "largest context that fits" in str(problem)
    assert result["data"]["cases"] == []


# --- real runs ----------------------------------------------------------------------------------


def test_names_with_weights_are_told_from_shapes(tmp_path, folder):
    assert has_weights("reference")
    assert has_weights("meta-llama/Llama-3.1-8B")
    assert not has_weights("llama-3.1-8b")
    assert not has_weights(str(folder))
    assert not has_weights(str(folder / "config.json"))


def test_a_shape_runs_with_random_weights(tmp_path, folder):
    events, result, problem = ran(
        tmp_path, folder, mode="real", repeats=1, input_lens=(40,), output_lens=(6,)
    )
    assert problem is None
    validate_result(result)
    assert [case["method"] for case in result["data"]["cases"]] == ["full", "fdc"]
    assert list(events[0].cases) == [case["case"] for case in result["data"]["cases"]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "reference", "layers": 2}, "--layers"),
        ({"layers": 3}, "1 to 2 layers"),
        ({"model": "gpt-oss-120b"}, "experts"),
    ],
)
def test_real_runs_refuse_what_they_cannot_tell(tmp_path, folder, options, says):
    events, _, problem = ran(tmp_path, folder, mode="real", **options)
    assert isinstance(problem, UsageError)
    assert says in str(problem)
    assert events == []


@pytest.mark.parametrize(
    ("model", "method", "says"),
    [
        (None, "palu-folded", "add --composed"),
        (None, "nonsense", "unknown"),
        ("reference", "nonsense", "unknown"),
        ("reference", "palu:group=1", "it has heads"),
    ],
)
def test_methods_are_known_before_a_model_is_loaded(tmp_path, folder, model, method, says):
    events, _, problem = ran(
        tmp_path, folder, mode="real", methods=(method,), model=model or str(folder)
    )
    assert isinstance(problem, UsageError)
    assert says in str(problem)
    assert events == []


def test_a_rate_out_of_reach_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    def unreachable(*arguments, **options):
        raise UsageError("fdc reaches rates from 0 to 0.875, not 0.95")

    monkeypatch.setattr("kvprof.benchmark.jct.run.make_plans", unreachable)
    _, result, problem = ran(tmp_path, "reference", mode="real")
    assert isinstance(problem, UsageError)
    assert result["complete"] is False
    assert "0.875" in result["incomplete_reason"]
    assert result["data"]["cases"] == result["data"]["parts"] == []
