"""What ``kvprof serve`` sets for vLLM, and why; imports the standard library only."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvprof.errors import UsageError

__all__ = [
    "LONG_GRAPH",
    "LOOPBACK",
    "RUNNER_VARIABLE",
    "SERVED",
    "SHORT_GRAPH",
    "Setting",
    "engine_options",
    "engine_variables",
    "load_format_of",
    "model_runner",
    "most_tokens",
    "named",
    "option_value",
]

#: Where the server listens unless told otherwise.
LOOPBACK = "127.0.0.1"

#: Says which of vLLM's model runners is taken: 0 the first, 1 the second.
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
#: Tokens of the longest step that is a graph of vLLM's own, which has as many of 256 sequences on.
SHORT_GRAPH = 512
#: The same where a step costs as a graph what it costs outside: up to here the host may take longer
#: to launch the pieces of a model of some billion parameters than the GPU to run them. Over
#: quantised latents that is where little came before its chunks (`kvprof.serving.runners`).
LONG_GRAPH = 3072
#: Steps that are graphs. Up to 512 these are vLLM's own; from there on they lie farther apart, for
#: each takes time at the start, and a step is filled up by an eighth of its own tokens at most.
_GRAPHS = (
    1, 2, 4, *range(8, 256, 8), *range(256, 513, 16),
    *range(576, 1025, 64), *range(1152, 2049, 128), *range(2304, 3073, 256),
)  # fmt: skip
#: vLLM's way to write a number of tokens.
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
#: vLLM's way to give one entry of its compilation's settings.
_PARTS = re.compile(r"(-cc|--compilation[-_]config)\.")

#: Methods that are served, as the help and the shell offer them; of others `refusals` says why not.
SERVED = (
    "fdc", "zack", "kq", "svd-kv", "fdc-8bit", "zack-8bit", "kq-8bit", "fdc-4bit", "zack-4bit",
    "kq-4bit", "palu",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One thing that is set."""

    name: str  # an option of `vllm serve`, or a variable of the environment
    value: str
    why: str  # in a few words


def engine_options(
    *,
    host: str = LOOPBACK,
    port: int = 8000,
    dtype: str = "auto",
    ranks: int = 1,
    longest_graph: int = SHORT_GRAPH,
    chosen: bool = False,
    given: Sequence[str] = (),
) -> list[Setting]:
    """Return the options of ``vllm serve``."""
    parts = [word for word in given if _PARTS.match(word)]
    if parts:
        raise UsageError(
            f"{parts[0]} would replace the whole --compilation-config; give all of it: "
            '--compilation-config \'{"mode":0,"cudagraph_mode":"FULL",…}\''
        )
    listens = "reachable from this machine only" if host == LOOPBACK else "as requested"
    compilation: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL"}
    sized = [
        option_value(given, option, least=least) is not None
        for option, least in (
            ("--max-cudagraph-capture-size", "--max-cu"),
            ("--cudagraph-capture-sizes", "--cudagraph-c"),
        )
    ]
    fewer = "as many tokens as requested"
    if not any(sized):
        if longest_graph <= SHORT_GRAPH:  # the engine's own sizes do
            compilation["max_cudagraph_capture_size"] = longest_graph
        else:
            sizes = _graphs(longest_graph, most_tokens(given))
            compilation["cudagraph_capture_sizes"], longest_graph = sizes, sizes[-1]
        fewer = f"{longest_graph:,} tokens or fewer"
    graphs = f"on a GPU each step of {fewer} is one CUDA graph, prefill or decode"
    if chosen and (any(sized) or longest_graph > SHORT_GRAPH):
        graphs += f"; above {SHORT_GRAPH} tokens only if chunks have little context before them"
    if "--enforce-eager" in named(list(given)):
        graphs = "no CUDA graphs, as requested"
    return [
        Setting("--host", host, listens),
        Setting("--port", str(port), "as requested" if port != 8000 else "vLLM's default"),
        Setting("--dtype", dtype, "weights and latents"),
        Setting("--tensor-parallel-size", str(ranks), "heads are distributed by width"),
        Setting(
            "--compilation-config",
            json.dumps(compilation, separators=(",", ":")),
            graphs,
        ),
    ]


def _graphs(longest: int, most: int | None) -> list[int]:
    """Return the sizes of CUDA graphs, including the engine's longest step if it is shorter."""
    sizes = [one for one in _GRAPHS if one <= longest]
    if most is not None and most < longest:
        sizes = sorted({*(one for one in sizes if one < most), most})
    return sizes


def most_tokens(given: Sequence[str]) -> int | None:
    """Return the tokens that somebody lets a step have; None where vLLM decides, or refuses."""
    said = option_value(given, "--max-num-batched-tokens", least="--max-num-b") or ""
    found = _COUNT.fullmatch(said.strip())
    if found is None:
        return None
    number, unit = found.groups()
    # 1k is 1,000 and 1K 1,024.
    base, power = 1000 if unit.islower() else 1024, " kmgt".index(unit.lower() or " ")
    return int(float(number) * base**power) or None


def model_runner() -> str:
    """Return which of vLLM's model runners serves a plan: the first, or somebody's own choice."""
    return os.environ.get(RUNNER_VARIABLE, "0")


def engine_variables(plan: str) -> list[Setting]:
    """Return what the server's environment gets."""
    return [
        Setting("KVPROF_PLAN", plan, "the plan to serve"),
        Setting(RUNNER_VARIABLE, model_runner(), "0 is the model runner that was measured"),
        Setting("VLLM_NO_USAGE_STATS", "1", "no usage statistics are sent"),
    ]


def named(given: list[str]) -> set[str]:
    """Return the options that somebody gave to vLLM, which then are not set a second time."""
    whole = [word.partition("=")[0] for word in given]
    return {
        "--compilation-config" if word == "-cc" else word.replace("_", "-")
        for word in whole
        if word.startswith("--") or word == "-cc"
    }


def option_value(given: Sequence[str], option: str, *, least: str, short: str = "") -> str | None:
    """Return what somebody gave to vLLM by an option, the last time; None where they did not."""
    found = None
    for word, behind in pairwise((*given, "")):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if (name.startswith(least) and option.startswith(name)) or (short and name == short):
            found = value if equals else behind
    return found


def load_format_of(given: Sequence[str]) -> str | None:
    """Return the load format that somebody gave to vLLM; None where they did not."""
    return option_value(given, "--load-format", least="--load-f")
