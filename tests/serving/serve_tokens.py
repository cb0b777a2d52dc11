"""A program: serve token ids through vLLM in this process, and print what came of it as JSON.

python -m tests.serving.serve_tokens FOLDER JSON   (JSON: prompts, tokens, waves, engine)
"""

import json
import sys


def main() -> None:
    """Run what is asked for."""
    from vllm import LLM, SamplingParams

    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        compilation_config={"mode": 0},
        disable_log_stats=False,
        **wanted["engine"],
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


if __name__ == "__main__":
    main()
