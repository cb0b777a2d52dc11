"""What ``kvprof serve`` sets for vLLM."""

import json
from itertools import pairwise
from typing import Any

import pytest

from kvprof.benchmark.jct.model_shape import load_model_shape
from kvprof.serving.served import holds_long_steps
from kvprof.serving.settings import engine_options
from kvprof.serving.shapes import drawn_plan


def compilation(**how: Any) -> tuple[dict[str, Any], str]:
    """Return what is set of graphs, and why."""
    (found,) = [one for one in engine_options(**how) if one.name == "--compilation-config"]
    return json.loads(found.value), found.why


@pytest.mark.parametrize(
    ("method", "long"), [("fdc", True), ("zack", True), ("fdc-4bit", False), ("palu", False)]
)
def test_long_steps_are_graphs_where_a_token_costs_the_same_in_them(
    method: str, long: bool
) -> None:
    shape = load_model_shape("Llama-3.1-8B").of_layers(2).attention
    assert holds_long_steps(drawn_plan(method, shape, 0.5).plan) is long


def test_a_long_step_is_filled_up_by_an_eighth_at_most() -> None:
    own, why = compilation(long_graphs=True)
    sizes = own["cudagraph_capture_sizes"]
    assert "max_cudagraph_capture_size" not in own
    assert sizes == sorted(set(sizes))
    # Up to 512 those that vLLM has by itself.
    assert [one for one in sizes if one <= 512] == [
        *(1, 2, 4), *range(8, 256, 8), *range(256, 513, 16)
    ]  # fmt: skip
    assert all(longer <= shorter * 9 / 8 for shorter, longer in pairwise(sizes) if shorter >= 512)
    assert f"a step of {sizes[-1]} tokens or fewer" in why


def test_other_steps_are_graphs_up_to_vllms_own_length() -> None:
    own, why = compilation()
    assert own == {"mode": 0, "cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
    assert "a step of 512 tokens or fewer" in why


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    "given", [["--max-cudagraph-capture-size=64"], ["--cudagraph_capture_sizes", "1", "2"]]
)
def test_sizes_that_somebody_gives_are_not_given_twice(given: list[str], long: bool) -> None:
    """VLLM would refuse them."""
    own, why = compilation(given=given, long_graphs=long)
    assert own == {"mode": 0, "cudagraph_mode": "FULL"}
    assert "as asked" in why
