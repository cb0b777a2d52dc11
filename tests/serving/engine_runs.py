"""What tests of the plug-in ask vLLM's engine for, in a process of its own, and the runtime."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kvprof.methods.plan_files import load_plan
from kvprof.models.load import load_model
from kvprof.runtime.compressed import compressed
from tests.serving.tiny import VOCABULARY

TOKENS = 24
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
#: Of an engine that holds all prompts at once.
ENGINE: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 6}
#: Prompts come in chunks of 32, and pages run out on the way.
CHUNKS: dict[str, Any] = {
    **ENGINE,
    "block_size": 16,
    "num_gpu_blocks_override": 17,
    "max_num_batched_tokens": 32,
}


def drawn_prompts() -> list[list[int]]:
    """Return prompts of which two begin alike."""
    drawn = random.Random(5)
    long = [drawn.randrange(3, VOCABULARY) for _ in range(150)]
    others = [[drawn.randrange(3, VOCABULARY) for _ in range(n)] for n in (1, 17, 40, 33)]
    return [long, long[:100] + others[1], *others]


def written_by_runtime(model: Path, plan: Path) -> list[list[int]]:
    """Return what kvprof's own runtime writes; it differs from the uncompressed model's."""
    loaded = load_model(str(model), device="cpu", dtype="float32")

    def written() -> list[list[int]]:
        found = []
        for prompt in drawn_prompts():
            ids = torch.tensor([prompt])
            made = loaded.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
            found.append(made[0, len(prompt) :].tolist())
        return found

    plain = written()
    with compressed(loaded, load_plan(plan)):
        own = written()
    assert sum(a != b for a, b in zip(plain, own, strict=True)) >= 4
    return own


def served_by_engine(
    model: Path,
    plan: Path,
    waves: int = 1,
    *,
    fixed: bool = False,
    graphs: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """Return tokens, preemptions and prefix hits, as `tests.serving.serve_tokens` prints them.

    Parameters
    ----------
    model, plan : Path
    waves : int
        How often the prompts are asked for.
    fixed : bool
        Whether steps that read prompts have the form that a graph holds.
    graphs : dict, optional
        Of the engine's compilation.
    variables : dict, optional
        Of the environment.
    **engine
        Its settings.
    """
    asked = {
        "prompts": drawn_prompts(),
        "tokens": TOKENS,
        "waves": waves,
        "engine": engine,
        "graphs": graphs or {},
        "fixed": fixed,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.serve_tokens", str(model), json.dumps(asked)],
        env={
            **os.environ,
            **ENVIRONMENT,
            **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if fixed else {}),
            "KVPROF_PLAN": str(plan),
            **(variables or {}),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert said, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(said[0].removeprefix("RESULT "))
    return found
