"""Records of whole commands: `kvprof bench`, loads, requests in parts, and what methods keep.

Each record is the result of one command line, without what is large and can be had again by running
it: samples become medians, and series of a load and single parts of many requests are left out.
`kvprof show` prints it.

    python benchmarks/commands.py --list
    python benchmarks/commands.py bench-100k load-answers     # a GPU; loads need vLLM
    python benchmarks/commands.py frontier needles-7x --model MODEL

What a command has measured it keeps (`KVPROF_CACHE`), so one that was ended goes on where it was.
"""

import argparse
import shlex
import tempfile
from pathlib import Path
from typing import Any

from recording import add_out, compact, keep_result, speedups

from kvprof.cli import app
from kvprof.records.files import read_result

_ENGINE = (
    "--engine '--load-format dummy --skip-tokenizer-init --no-enable-prefix-caching "
    "--max-num-seqs 256'"
)
_FOUR = "fdc-4bit:rate=0.84"
_EIGHT = "bench --load --model Llama-3.1-8B"
_SWEEP = "bench --jct --composed --methods full,palu,fdc,kq --batch 1 --repeats 7"
_LONG = "128,1k,4k,16k,32k,64k,100k"
# Findings on a model, in the order of what they decide.
_OPEN = "sink=4,window=32"
_WF = "allocation=output,centre=true,sink=4,window=32"
_METHODS = "fdc,zack,palu,tale,kq,per-token,kivi,kvquant,turboquant,kq-4bit,fdc-4bit"
# All that are not centred by default.
_CENTRED = ",".join(f"{x}:centre=true" for x in _METHODS.split(",") if x != "per-token")
_HADAMARD = "hadamard-int3:bits=k3v2"
#: Formats of engines that `kvprof advise` lists.
ADVISED = (
    *("int8_per_token_head", "turboquant_k8v4", "turboquant_4bit_nc", "q8_0", "fp8_e4m3"),
    *("turboquant_k3v4_nc", "turboquant_3bit_nc", "int4_per_token_head", "q4_0"),
)
_BOTH = "--text prose --text code --sequences 64 --seq-len 1k --tasks "
_PROSE_AND_CODE = f"{_BOTH}none"
_ON_CPU = "--text prose --text code --sequences 16 --seq-len 512 --tasks none"
_NEEDLES = (
    "--text prose --sequences 32 --seq-len 2k --tasks niah-single-1,vt --task-items 64 "
    "--task-lengths "
)


def _needles(method: str, lengths: str = "4k,8k,16k") -> tuple[str, str]:
    """Return the commands that make a plan by its bytes at 32K, and ask it for needles."""
    return _of_plan(method, _NEEDLES + lengths)


def _of_formats(lengths: str) -> str:
    """Return the command that holds engines' formats against text and needles."""
    asked = f"niah-single-1 --task-items 24 --task-lengths {lengths}"
    return f"eval MODEL --method {','.join(ADVISED)} {_BOTH}{asked}"


def _of_plan(method: str, sample: str) -> tuple[str, str]:
    return f"plan MODEL {method} --context 32k --save PLAN", f"eval MODEL --plan PLAN {sample}"


def _plain(options: str) -> str:
    return " ".join(f"--option {option}" for option in options.split(","))


_FOUR_TIMES = (
    f"--method kq-wf {_plain(f'allocation=output,kinds=8,{_OPEN}')} --rate 0.75 "
    "--calibrate-seq-len 16k"
)

#: Names of records to the commands that make them, one after another; the last one's is kept.
COMMANDS: dict[str, str | tuple[str, ...]] = {
    "engine-formats": f"eval MODEL --method engine-formats {_PROSE_AND_CODE}",
    "needles-formats": _of_formats("4k,8k,16k"),
    "needles-5.8x": _needles(f"--method hadamard-int3 {_plain(f'bits=k3v2,{_OPEN}')}"),
    # Uncentred, with as many head groups as a kernel runs, and from sequences as long as it serves.
    "kept-4x": _of_plan(_FOUR_TIMES, _PROSE_AND_CODE),
    "bench-4x": (
        f"plan MODEL {_FOUR_TIMES} --context 32k --save PLAN",
        "bench --model MODEL --plan PLAN --methods full,fp8 --seq 32k,100k --batch 1,8 "
        "--phase decode",
    ),
    "needles-4x": _needles(_FOUR_TIMES),
    "needles-7x": _needles(f"--method kq-wf {_plain(_WF)} --rate 0.8572"),
    "needles-8x": _needles(f"--method kq-wf {_plain(_WF)} --rate 0.8751"),
    "kept-7x-by-loss": _of_plan(
        f"--method kq-wf {_plain(_WF.replace('output', 'loss'))} --rate 0.8572", _PROSE_AND_CODE
    ),
    # For models with a context of 8K, as SmolLM2's is.
    "needles-formats-to-4k": _of_formats("2k,4k"),
    "needles-5x": _needles(
        f"--method kq-wf {_plain('allocation=loss,centre=true,sink=4,window=128')} --rate 0.801 "
        "--calibrate-seq-len 4k --calibrate-tokens 32k",
        "2k,4k",
    ),
    "needles-5x-hadamard": _needles(
        f"--method hadamard-int3 {_plain(f'bits=k3v2,{_OPEN}')}", "2k,4k"
    ),
    # In a quarter of an hour on two cores.
    "kept-7x-on-cpu": _of_plan(f"--method kq-wf {_plain(_WF)} --rate 0.8572", _ON_CPU),
    "frontier": (
        f"frontier MODEL --method {_METHODS},kq-wf:allocation=output,hadamard-int4:{_OPEN} "
        f"--points 4 {_PROSE_AND_CODE}"
    ),
    "frontier-centred": (
        f"frontier MODEL --method {_CENTRED},kq-wf:{_WF} --points 4 {_PROSE_AND_CODE}"
    ),
    "frontier-papers": (
        "frontier MODEL --method fdc:paper,zack:paper,palu:paper,tale:paper --points 4 "
        f"{_PROSE_AND_CODE}"
    ),
    "sinks-and-window": (
        f"frontier MODEL --method {_HADAMARD},sink=4,window=32,{_HADAMARD},sink=0,window=32,"
        f"{_HADAMARD},sink=4,window=0,{_HADAMARD},sink=0,window=0 {_PROSE_AND_CODE}"
    ),
    "spectrum": "spectrum MODEL --tokens 16k --pairs qk,vo",
    "stability": "stability MODEL",
    "bench-100k": f"bench --seq 100k --batch 1,8 --methods full,fp8,fdc,kq,palu,tale,{_FOUR}",
    "load-answers": (
        f"{_EIGHT} --methods full,{_FOUR},kinds=4,fdc:kinds=4 --memory 2GB "
        "--lengths in=256,out=512 --request-rate 8,10,12,16,18,20,24,28,30,34 --seconds 20 "
        f"--slo ttft=2s,tpot=50ms {_ENGINE}"
    ),
    "load-arxiv": (
        f"{_EIGHT} --methods full,fp8,fdc:kinds=4,{_FOUR},kinds=4 --memory 4GB --lengths arxiv "
        f"--request-rate 1.7,2.6,3.2,4.25 --seconds 40 --slo ttft=2s,tpot=50ms {_ENGINE}"
    ),
    "load-imdb": (
        f"bench --load --model Mistral-7B-v0.3 --methods full,zack,{_FOUR},kinds=4 --memory 32GB "
        "--lengths zack/imdb --request-rate 20,40,80 --seconds 10 --slo ttft=2s,tpot=50ms "
        f"{_ENGINE}"
    ),
    "jct-inputs-8b": (
        f"{_SWEEP} --model Llama-3.1-8B --rate 0.5 --input-len {_LONG} --output-len 256"
    ),
    "jct-outputs-8b": (
        f"{_SWEEP} --model Llama-3.1-8B --rate 0.5 --input-len 256 --output-len {_LONG}"
    ),
}


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the index: what the result's kind is asked for."""
    data = result["data"]
    match result["kind"]:
        case "bench":
            return speedups(data)
        case "load":
            return {
                f"{own['method']}: largest requests/s, and over {data['baseline']}'s": [
                    own["largest_rate"],
                    own["ratio"],
                ]
                for own in data["methods"]
            }
        case "frontier":
            searched = [own for own in data["methods"] if own["points"]]
            return {f"{own['label']}: largest sure rate": own["sure_rate"] for own in searched}
        case "spectrum" | "stability":
            return {}
        case "eval":
            return {
                f"{own['method']} at {own['rate']:.3f}: accuracy kept": round(
                    own["relative_accuracy"], 4
                )
                for own in data["evaluations"]
            }
    longest = max(own["input_len"] + own["output_len"] for own in data["cases"])
    return {
        f"{own['case']}: seconds": round(own["jct_seconds"], 3)
        for own in data["cases"]
        if own["input_len"] + own["output_len"] == longest and own["jct_seconds"]
    }


def shortened(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without what is large."""
    data = dict(result["data"])
    if result["kind"] == "load":
        data["series"] = []
    if result["kind"] == "eval":
        data["evaluations"] = [{**own, "worst_tokens": []} for own in data["evaluations"]]
    if result["kind"] == "frontier":
        data["methods"] = [
            {**own, "points": [{**point, "worst_tokens": []} for point in own["points"]]}
            for own in data["methods"]
        ]
    if result["kind"] == "spectrum":
        data["pairs"] = compact(data["pairs"], digits=3)
    if result["kind"] == "stability":  # without the single heads and seeds
        data["curves"] = compact([own for own in data["curves"] if own["layer"] is None], digits=3)
    if result["kind"] == "jct":
        data |= {"parts": [], "steps": [], "layers": [], "memory": [], "telemetry": {}}
    return {**result, "data": data}


def main() -> None:
    """Run the commands asked for, and keep their results."""
    parser = argparse.ArgumentParser(description="Records of whole commands.")
    parser.add_argument("names", nargs="*", choices=[[], *COMMANDS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names and their commands")
    parser.add_argument("--model", help="what MODEL stands for")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.list or not arguments.names:
        for name, line in COMMANDS.items():
            lines = (line,) if isinstance(line, str) else line
            print(f"{name}: {'; '.join(f'kvprof {one}' for one in lines)}")
    of = "" if arguments.model is None else f"-{Path(arguments.model).stem.lower()}"
    for name in arguments.names:
        lines = COMMANDS[name]
        with tempfile.TemporaryDirectory(prefix="kvprof-") as folder:
            path, plan = Path(folder) / "result.json", Path(folder) / "saved.plan"
            for line in (lines,) if isinstance(lines, str) else lines:
                words = {"MODEL": arguments.model, "PLAN": str(plan)}
                given = [words.get(word) or word for word in shlex.split(line)]
                _run([*given, "--json", str(path), "--force"])
            result = read_result(path)
        command = f"python benchmarks/commands.py {name}{of and ' --model MODEL'}"
        kept = shortened(result), command, headline(result)
        print(keep_result(arguments.out, f"{name}{of}", *kept), flush=True)


def _run(arguments: list[str]) -> None:
    try:
        app(arguments, prog_name="kvprof")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()
