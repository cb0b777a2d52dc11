"""vLLM by itself: the time between tokens of a shape, with vLLM's own dummy weights.

Run in a process of its own, in which no plan has a place: `kvprof.benchmark.external` starts one
beside a real run, and ``benchmarks/serving.py`` times its engines with `case_times` too. Prompts
are random token ids. In a batch all rows have the same context; what is timed is the last request's
decoding alone, by the engine's own stamps, when all prompts are done.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprof.leash import follow_parent

__all__ = ["AT_ONCE", "REQUEST", "CaseTimes", "case_times", "main", "spare_tokens"]

#: Tokens of prompts that a step takes.
AT_ONCE = 8192
#: In the folder of an engine's process, beside the shape's configuration: what it is asked.
REQUEST = "request.json"
_IDS = range(10, 1000)
_PLAN = "KVPROF_PLAN"


@dataclass(frozen=True)
class CaseTimes:
    """Times of one context and batch, in seconds.

    Attributes
    ----------
    tbt : list of float
        Of each run the mean over the last request's tokens.
    ttft : list of float
        Of each run the first request's time to its first token.
    """

    tbt: list[float]
    ttft: list[float]


def spare_tokens(batch: int, context: int) -> int:
    """Return how many tokens longer than the last request the others of a batch decode."""
    return 0 if batch == 1 else batch * -(-context // AT_ONCE) + 16


def case_times(
    engine: Any,
    context: int,
    batch: int,
    tokens: int,
    *,
    drawn: random.Random,
    enough: Callable[[int], bool],
    vocabulary: int = _IDS.stop,
) -> CaseTimes:
    """Return what an engine takes; the first run is left out.

    Parameters
    ----------
    engine : vllm.LLM
        With its own stamps (``disable_log_stats=False``) and without a prefix cache.
    context : int
        Tokens of each prompt.
    batch : int
    tokens : int
        To write, 2 or more.
    drawn : random.Random
        Of the prompts.
    enough : callable
        Of the number of runs that count so far, returns whether there are to be no more.
    vocabulary : int
        Ids that there are.
    """
    from vllm import SamplingParams

    ids = range(min(_IDS.start, vocabulary - 1), min(_IDS.stop, vocabulary))
    found = CaseTimes([], [])
    runs = -1
    while runs < 0 or not enough(runs):
        prompts = [{"prompt_token_ids": drawn.choices(ids, k=context)} for _ in range(batch)]
        # The others decode on, a step for each piece of a prompt, until the last one is done.
        counts = [tokens + spare_tokens(batch, context)] * (batch - 1) + [tokens]
        asked = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in counts
        ]
        marks = [one.metrics for one in engine.generate(prompts, asked, use_tqdm=False)]
        runs += 1
        if runs:
            last = marks[-1]
            found.tbt.append((last.last_token_ts - last.first_token_ts) / (tokens - 1))
            found.ttft.append(marks[0].first_token_latency)
    return found


def main(folder: Path) -> int:
    """Start an engine for what a folder describes; print it and its times, a line of JSON each.

    Parameters
    ----------
    folder : Path
        With a ``config.json`` and a `REQUEST`.

    Returns
    -------
    int
        3 where this vLLM runs on another kind of device.
    """
    os.environ.pop(_PLAN, None)
    import vllm
    from vllm.platforms import current_platform

    asked = json.loads((folder / REQUEST).read_text())
    on_cpu = current_platform.is_cpu()
    if on_cpu != (asked["device"] == "cpu"):
        here = "a CPU" if on_cpu else "a GPU"
        sys.stderr.write(f"vLLM {vllm.__version__}, as it is installed, runs on {here}\n")
        return 3
    batches = sorted({batch for batch, _, _ in asked["cases"]})
    begun = time.perf_counter()
    engine = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        seed=asked["seed"],
        max_model_len=asked["longest"],
        max_num_seqs=max(batches),
        max_num_batched_tokens=AT_ONCE,
        gpu_memory_utilization=asked["memory"],
        kv_cache_memory_bytes=asked["cache_bytes"],
        disable_log_stats=False,
        enable_prefix_caching=False,
        # A CPU has no graphs; vLLM would compile for a minute there.
        enforce_eager=on_cpu,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": batches,
        },
    )
    config = engine.llm_engine.vllm_config
    started = {
        "version": vllm.__version__,
        "start_seconds": time.perf_counter() - begun,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "page_tokens": config.cache_config.block_size,
    }
    _tell(started)
    drawn = random.Random(asked["seed"])
    least, most, seconds = int(asked["least"]), int(asked["most"]), float(asked["seconds"])
    for batch, context, tokens in asked["cases"]:
        case_begun = time.perf_counter()

        def enough(runs: int, begun: float = case_begun) -> bool:
            return runs >= most or (runs >= least and time.perf_counter() - begun > seconds)

        times = case_times(
            engine,
            context,
            batch,
            tokens,
            drawn=drawn,
            enough=enough,
            vocabulary=asked["vocabulary"],
        )
        row = {"batch": batch, "input_len": context, "output_len": tokens}
        _tell({**row, "tbt": times.tbt, "ttft": times.ttft})
    return 0


def _tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    follow_parent()
    sys.exit(main(Path(sys.argv[1])))
