"""The plug-in in vLLM's engine on a GPU: both model runners, and steps that are graphs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.methods.quantisers import quantised
from kvprof.serving.settings import RUNNER_VARIABLE
from tests.serving.engine_runs import CHUNKS, ENGINE, served_by_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,  # an engine takes most of the memory, and measures what is left
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("runner", ["0", "1"])
def test_graphs_of_either_runner_change_no_token(
    model: Path, plan: Path, wanted: list[list[int]], runner: str
) -> None:
    """Prompts come in chunks of 32, and all steps are graphs."""
    graphs = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    found = served_by_engine(
        model, plan, graphs=graphs, variables={RUNNER_VARIABLE: runner}, **CHUNKS
    )
    assert found["waves"] == [wanted]


@pytest.mark.parametrize("runner", ["0", "1"])
def test_a_graph_may_be_longer_than_a_sequence(
    model: Path, plan: Path, wanted: list[list[int]], runner: str
) -> None:
    """Sequences of the step with which it is captured would have more pages than there are."""
    graphs = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 8, 300]}
    how: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 2, "block_size": 16}
    found = served_by_engine(model, plan, graphs=graphs, variables={RUNNER_VARIABLE: runner}, **how)
    assert found["waves"] == [wanted]


def test_no_chunk_or_preemption_changes_what_quantised_pages_serve(
    model: Path, plan: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """In a graph of chunks bfloat16 rounds otherwise, and 4-bit codes tell."""
    own = tmp_path / "tiny-4bit.plan"
    save_plan(quantised(load_plan(plan), "per-token", 4), own)
    how = {**ENGINE, "block_size": 64, "dtype": "bfloat16"}
    (wave,) = served_by_engine(model, own, enable_prefix_caching=False, **how)["waves"]
    assert wave != wanted
    how = {**how, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 8}
    found = served_by_engine(model, own, waves=2, **how)
    assert found["waves"] == [wave, wave]
    assert found["preemptions"] > 0
