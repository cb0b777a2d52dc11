"""What ``kvprof serve`` sets of vLLM's CUDA graphs."""

import json
from itertools import pairwise
from typing import Any

import pytest

from kvprof.benchmark.jct.model_shape import load_model_shape
from kvprof.errors import UsageError
from kvprof.serving.active_plan import longest_graph
from kvprof.serving.settings import LONG_GRAPH, SHORT_GRAPH, engine_options, engine_variables, named
from kvprof.serving.shapes import drawn_plan


def compilation(*given: str, longest: int = SHORT_GRAPH) -> tuple[dict[str, Any], str]:
    """Return what is set of graphs, and why."""
    options = engine_options(longest_graph=longest, given=given)
    (found,) = [one for one in options if one.name == "--compilation-config"]
    return json.loads(found.value), found.why


@pytest.mark.parametrize(
    ("method", "longest"),
    [
        ("fdc", LONG_GRAPH),
        ("zack", LONG_GRAPH),
        ("kq", LONG_GRAPH),
        ("fdc-4bit", LONG_GRAPH),
        ("palu", SHORT_GRAPH),
    ],
)
def test_graphs_are_as_long_as_a_token_costs_the_same_in_them(method: str, longest: int) -> None:
    shape = load_model_shape("Llama-3.1-8B").of_layers(2).attention
    plan = drawn_plan(method, shape, 0.84 if "4bit" in method else 0.5).plan
    assert longest_graph(plan) == longest


def test_a_long_step_is_filled_up_by_an_eighth_at_most() -> None:
    own, why = compilation(longest=LONG_GRAPH)
    sizes = own["cudagraph_capture_sizes"]
    assert "max_cudagraph_capture_size" not in own
    assert sizes == sorted(set(sizes))
    # Up to 512 those that vLLM has by itself.
    assert [one for one in sizes if one <= 512] == [
        *(1, 2, 4), *range(8, 256, 8), *range(256, 513, 16)
    ]  # fmt: skip
    assert all(longer <= shorter * 9 / 8 for shorter, longer in pairwise(sizes) if shorter >= 512)
    assert sizes[-1] == LONG_GRAPH
    assert f"{LONG_GRAPH:,} tokens" in why


@pytest.mark.parametrize(
    ("said", "most", "count", "before"),
    [
        ("2000", 2000, 67, 1920), ("2048", 2048, 67, 1920), ("1k", 1000, 59, 960),
        ("1K", 1024, 59, 960), ("0.3k", 300, 38, 288), ("7", 7, 4, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--max-num-batched-tokens=", "--max_num_batched="])
def test_the_engines_longest_step_is_a_graph_too(
    option: str, said: str, most: int, count: int, before: int
) -> None:
    """VLLM drops what is longer, and adds its own longest to no sizes that it is given."""
    own, why = compilation(option + said, longest=LONG_GRAPH)
    sizes = own["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes))
    assert (len(sizes), *sizes[-2:]) == (count, before, most)
    assert f"{most:,} tokens" in why


@pytest.mark.parametrize("said", ["3072", "8192", "8k", "0", "many", "-1"])
def test_an_engine_that_takes_longer_steps_has_the_same_graphs(said: str) -> None:
    """So has one that will refuse what it is told."""
    own, _ = compilation("--max-num-batched-tokens", said, longest=LONG_GRAPH)
    assert own == compilation(longest=LONG_GRAPH)[0]


def test_steps_are_graphs_up_to_vllms_own_length() -> None:
    own, why = compilation("--max-num-seqs", "64", "--cudagraph-metrics")
    assert own == {"mode": 0, "cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
    assert "512 tokens" in why


@pytest.mark.parametrize("longest", [SHORT_GRAPH, LONG_GRAPH])
@pytest.mark.parametrize(
    "given",
    [
        ["--max-cudagraph-capture-size=64"],
        ["--max-cudagraph", "64"],
        ["--cudagraph_capture_sizes", "1", "2"],
        ["--cudagraph-capture", "1", "2"],
    ],
)
def test_sizes_that_somebody_gives_are_not_given_twice(given: list[str], longest: int) -> None:
    """VLLM would refuse them; it takes beginnings of names."""
    own, why = compilation(*given, longest=longest)
    assert own == {"mode": 0, "cudagraph_mode": "FULL"}
    assert "requested" in why


def test_graphs_that_are_switched_off_are_told() -> None:
    for longest in (SHORT_GRAPH, LONG_GRAPH):
        assert compilation("--enforce-eager", longest=longest)[1] == "no CUDA graphs, as requested"


@pytest.mark.parametrize("given", ["-cc", "--compilation-config", "--compilation_config={}"])
def test_the_whole_of_it_is_known_by_its_short_name_too(given: str) -> None:
    assert "--compilation-config" in named([given, "{}"])


@pytest.mark.parametrize(
    "given", ["-cc.cudagraph_capture_sizes=[1,2]", "--compilation-config.mode", "-cc.mode=0"]
)
def test_parts_of_it_that_would_replace_all_are_refused(given: str) -> None:
    with pytest.raises(UsageError) as refused:
        compilation(given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("chosen", [None, "1"])
def test_somebodys_own_model_runner_stands(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(name, chosen)
    (found,) = (one.value for one in engine_variables("a.plan") if one.name == name)
    assert found == (chosen or "0")
