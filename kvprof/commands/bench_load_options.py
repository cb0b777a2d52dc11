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
    bool, _option("--load", text="Send requests at increasing rates to a server of each method.")
]
LengthsOption = Annotated[
    str | None,
    _option(
        "--lengths",
        metavar="TRACE|in=8k,out=256|FILE",
        text="Request lengths: a paper's trace (arxiv, zack/cocktail), fixed, or a ShareGPT, "
        "Mooncake or Azure file.  [default: arxiv]",
    ),
]
TokenizerOption = Annotated[
    str | None,
    _option(
        "--tokenizer",
        metavar="MODEL",
        text="Tokenizer that counts the tokens of a file's texts.  [default: --model]",
    ),
]
ArrivalsOption = Annotated[
    str | None,
    _option(
        "--arrivals", text="poisson, gamma:cv=2, or trace (a file's times).  [default: poisson]"
    ),
]
RatesOption = Annotated[
    str | None,
    _option(
        "--request-rate",
        metavar="LIST",
        text="Request rates in req/s, such as 0.5,1,2.  [default: auto, doubled until the queue "
        "grows]",
    ),
]
SecondsOption = Annotated[
    float | None,
    _option("--seconds", text="Seconds to send requests at each rate, instead of --requests."),
]
SloOption = Annotated[
    str | None,
    _option(
        "--slo",
        metavar="LIST",
        text="SLO of a request, such as ttft=2s,tpot=50ms,latency=10s; share=0.9: for 90 % of "
        "requests.",
    ),
]
UrlOption = Annotated[
    str | None,
    _option("--url", metavar="LIST", text="URLs of running OpenAI-compatible servers."),
]
ServedModelOption = Annotated[
    str | None, _option("--served-model", text="Model name at --url.  [default: asks the server]")
]
KeyOption = Annotated[
    str | None,
    _option("--key-env", metavar="NAME", text="Environment variable with the API key of --url."),
]
MemoryOption = Annotated[
    str | None,
    _option("--memory", metavar="SIZE", text="Cache size in bytes, the same for every method."),
]
ReplicasOption = Annotated[
    int | None, _option("--replicas", text="Servers that share the requests.  [default: 1]")
]
RouterOption = Annotated[
    str | None,
    _option("--router", text="shortest-queue or round-robin.  [default: shortest-queue]"),
]
RefineOption = Annotated[
    int | None,
    _option(
        "--refine",
        text="Rates to add by bisection between the highest sustained and the "
        "lowest not sustained.",
    ),
]
TimeoutOption = Annotated[
    float | None, _option("--timeout", text="Request timeout in seconds.  [default: 600]")
]
SimulateOption = Annotated[
    bool,
    _option(
        "--simulate",
        text="Simulate an H200 that serves Llama-3.1-8B, or with --tp 4 Llama-3.1-70B; needs no "
        "GPU.",
    ),
]
EngineOption = Annotated[
    str | None,
    _option(
        "--engine",
        metavar="TEXT",
        text="vLLM options such as '--load-format dummy'; with --simulate, scheduler options only.",
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
            raise UsageError(f"{' and '.join(said)} requires --load")
