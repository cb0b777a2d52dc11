"""A program: serve token ids through vLLM in this process, and print what came of it as JSON.

python -m tests.serving.serve_tokens FOLDER JSON

The JSON has prompts, tokens, waves, engine, graphs and fixed.
"""

import json
import sys
from typing import Any


def main() -> None:
    """Run what is asked for."""
    from vllm import LLM, SamplingParams

    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    if wanted["fixed"]:
        run_as_in_graphs()
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        compilation_config={"mode": 0, **wanted["graphs"]},
        disable_log_stats=False,
        **{"dtype": "float32", **wanted["engine"]},
    )
    how = SamplingParams(
        temperature=0, max_tokens=wanted["tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in wanted["prompts"]]
    waves = []
    for _ in range(wanted["waves"]):
        found = engine.generate(prompts, how, use_tqdm=False)
        waves.append([list(one.outputs[0].token_ids) for one in found])
    metrics = {one.name: getattr(one, "value", None) for one in engine.get_metrics()}
    sys.stdout.write(
        "RESULT "
        + json.dumps(
            {
                "waves": waves,
                "preemptions": metrics["vllm:num_preemptions"],
                "hits": metrics["vllm:prefix_cache_hits"],
            }
        )
        + "\n"
    )
    sys.stdout.flush()


def run_as_in_graphs() -> None:
    """Let steps that read prompts have the form that a graph holds; a CPU has no graphs."""
    from kvprof.serving import backend
    from kvprof.serving.backend import PlanBuilder
    from kvprof.serving.captured_step import CudaGraphStep

    built, room = PlanBuilder.build, backend._room

    def any_step(config: Any) -> tuple[int, tuple[int, int]]:
        most, captured = room(config)
        assert captured == (0, 0)
        return most, (most, config.scheduler_config.max_num_seqs)

    backend._room = any_step

    def build(
        self: PlanBuilder,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        common = common_attn_metadata
        if common.max_query_len <= 1:
            return built(self, common_prefix_len, common, fast_build)
        found = self.build_for_cudagraph_capture(common)
        assert isinstance(found, CudaGraphStep)
        return found

    PlanBuilder.build = build


if __name__ == "__main__":
    main()
