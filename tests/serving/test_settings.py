"""What ``kvprof serve`` sets of vLLM's CUDA graphs."""

import json
from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.serving.settings import engine_options, named


def compilation(*given: str) -> tuple[dict[str, Any], str]:
    """Return what is set of graphs, and why."""
    (found,) = [one for one in engine_options(given=given) if one.name == "--compilation-config"]
    return json.loads(found.value), found.why


def test_steps_are_graphs_up_to_vllms_own_length() -> None:
    own, why = compilation("--max-num-seqs", "64", "--cudagraph-metrics")
    assert own == {"mode": 0, "cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
    assert "a step of 512 tokens or fewer" in why


@pytest.mark.parametrize(
    "given",
    [
        ["--max-cudagraph-capture-size=64"],
        ["--max-cudagraph", "64"],
        ["--cudagraph_capture_sizes", "1", "2"],
        ["--cudagraph-capture", "1", "2"],
    ],
)
def test_sizes_that_somebody_gives_are_not_given_twice(given: list[str]) -> None:
    """VLLM would refuse them; it takes beginnings of names."""
    own, why = compilation(*given)
    assert own == {"mode": 0, "cudagraph_mode": "FULL"}
    assert "as many tokens as asked" in why


def test_graphs_that_are_switched_off_are_told() -> None:
    assert compilation("--enforce-eager")[1] == "no CUDA graphs, as asked"


@pytest.mark.parametrize("given", ["-cc", "--compilation-config", "--compilation_config={}"])
def test_the_whole_of_it_is_known_by_its_short_name_too(given: str) -> None:
    assert "--compilation-config" in named([given, "{}"])


@pytest.mark.parametrize(
    "given", ["-cc.cudagraph_capture_sizes=[1,2]", "--compilation-config.mode", "-cc.mode=0"]
)
def test_parts_of_it_that_would_replace_all_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="would take the place of all") as refused:
        compilation(given)
    assert "\n" not in str(refused.value)
