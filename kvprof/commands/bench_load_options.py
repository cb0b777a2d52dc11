"""Options of ``kvprof bench --load``: how the command line has them, and as they were given."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from kvprof.commands.options import grouped_option
from kvprof.errors import UsageError

__all__ = [
    "ArrivalsOption",
    "EngineOption",
    "KeyOption",
    "LengthsOption",
    "LoadOption",
    "LoadOptions",
    "MemoryOption",
    "RatesOption",
    "RefineOption",
    "ReplicasOption",
    "RouterOption",
    "SecondsOption",
    "ServedModelOption",
    "SimulateOption",
    "SloOption",
    "TimeoutOption",
    "TokenizerOption",
    "UrlOption",
]

_GROUP = "Requests under load (--load)"

_option = partial(grouped_option, _GROUP)

LoadOption = Annotated[
    bool, _option("--load", text="Send requests at growing rates to a server of each method.")
]
LengthsOption = Annotated[
    str | None,
    _option(
        "--lengths",
        metavar="TRACE|in=8k,out=256|FILE",
        text="How long requests are: a paper's trace (arxiv, zack/cocktail), all alike, or a file: "
        "ShareGPT-like, Mooncake's, Azure's. Default arxiv.",
    ),
]
TokenizerOption = Annotated[
    str | None,
    _option(
        "--tokenizer",
        metavar="MODEL",
        text="Whose tokenizer tells the lengths of a file's texts. Default --model's.",
    ),
]
ArrivalsOption = Annotated[
    str | None,
    _option("--arrivals", text="poisson, gamma:cv=2, or trace (a file's times). Default poisson."),
]
RatesOption = Annotated[
    str | None,
    _option(
        "--rates",
        metavar="LIST",
        text="Requests a second: 0.5,1,2. Default auto: doubled until the queue grows.",
    ),
]
SecondsOption = Annotated[
    float | None,
    _option("--seconds", text="Send requests for so long at each rate, in place of --requests."),
]
SloOption = Annotated[
    str | None,
    _option(
        "--slo",
        metavar="LIST",
        text="Objective of a request: ttft=2s,tbt=50ms,latency=100ms; share=0.9 must keep it.",
    ),
]
UrlOption = Annotated[
    str | None,
    _option("--url", metavar="LIST", text="OpenAI-compatible servers that run already."),
]
ServedModelOption = Annotated[
    str | None, _option("--served-model", text="What such a server calls its model. Default: asks.")
]
KeyOption = Annotated[
    str | None,
    _option("--key-env", metavar="NAME", text="Environment variable that holds its key."),
]
MemoryOption = Annotated[
    str | None,
    _option("--memory", metavar="SIZE", text="Bytes of the cache: the same for every method."),
]
ReplicasOption = Annotated[
    int | None, _option("--replicas", text="Engines that share the requests. Default 1.")
]
RouterOption = Annotated[
    str | None,
    _option("--router", text="shortest-queue or round-robin. Default shortest-queue."),
]
RefineOption = Annotated[
    int | None,
    _option("--refine", text="Further rates, halving what lies between within and beyond."),
]
TimeoutOption = Annotated[
    float | None, _option("--timeout", text="Seconds that a request may take. Default 600.")
]
SimulateOption = Annotated[
    bool,
    _option(
        "--simulate",
        text="Serve nothing: steps take an H200's times, of Llama-3.1-8B, or with --tp 4 of "
        "Llama-3.1-70B. No GPU needed.",
    ),
]
EngineOption = Annotated[
    str | None,
    _option(
        "--engine",
        metavar="TEXT",
        text="Options for vLLM: '--load-format dummy'; with --simulate, its scheduler's.",
    ),
]


@dataclass(frozen=True)
class LoadOptions:
    """Options that mean something with ``--load`` only, as they were given."""

    lengths: str | None = None
    tokenizer: str | None = None
    arrivals: str | None = None
    rates: str | None = None
    seconds: float | None = None
    slo: str | None = None
    url: str | None = None
    served_model: str | None = None
    key_env: str | None = None
    memory: str | None = None
    replicas: int | None = None
    router: str | None = None
    refine: int | None = None
    timeout: float | None = None
    simulate: bool | None = None
    engine: str | None = None

    def refuse_without_load(self) -> None:
        """Refuse them all where ``--load`` is missing."""
        said = [f"--{name.replace('_', '-')}" for name, v in vars(self).items() if v is not None]
        if said:
            raise UsageError(f"{' and '.join(said)} means nothing without --load")
