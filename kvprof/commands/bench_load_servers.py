"""The servers of ``kvprof bench --load``: those that run already, and those that it starts."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprof.errors import LackingError, UsageError
from kvprof.methods.named import method_entries, options_in, own_rate
from kvprof.models.gguf import is_gguf
from kvprof.records.files import parse_json
from kvprof.records.load_names import LoadMethod
from kvprof.requirements import extra_command
from kvprof.serving.load.http import parse_address
from kvprof.serving.load.server import (
    EngineSettings,
    Served,
    ServerProcess,
    serve_command,
    served_by_engine,
    server_variables,
    told_variables,
)
from kvprof.serving.plugin import check_found
from kvprof.serving.settings import load_format_of

if TYPE_CHECKING:
    from kvprof.serving.load.target import LoadTarget
    from kvprof.serving.unpacked import UnpackedModel

__all__ = [
    "SERVED",
    "EngineModel",
    "engine_model",
    "engine_words",
    "running_servers",
    "served_method",
    "started_servers",
    "urls",
]

SERVED = "served"  # what an address serves, which has no name of ours
_SECRETS = ("--api-key", "--hf-token", "--ssl")
#: Options of vLLM that a load sets itself, and where what they say is asked for.
_SET = {
    "--model": "--model",
    "--kv-cache-dtype": "--methods",
    "--kv-cache-memory-bytes": "--memory",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--data-parallel-size": "--replicas",
    "-dp": "--replicas",
    "--seed": "--seed",
}
#: Where a load finds the servers that it starts.
_ADDRESSES = ("--host", "--port", "--uds", "--root-path")


def urls(text: str | None) -> list[str]:
    """Return the addresses that ``--url`` names."""
    return [url.strip() for url in (text or "").split(",") if url.strip()]


def running_servers(
    text: str, inputs: Mapping[str, Any], *, served_model: str | None, key_env: str | None
) -> "list[LoadTarget]":
    """Return the servers that run already, as one target."""
    from kvprof.serving.load.target import ServedTarget

    addresses = [parse_address(url) for url in urls(text)]
    if not addresses:
        raise UsageError("--url has no address; write http://127.0.0.1:8000")
    if twice := next((one for one in addresses if addresses.count(one) > 1), None):
        raise UsageError(f"--url has {twice.host}:{twice.port} twice")
    return [
        ServedTarget(
            Served(SERVED, addresses),
            model=served_model,
            key=_key(key_env),
            timeout=inputs["timeout"],
            router=inputs["router"],
        )
    ]


@dataclass(frozen=True)
class EngineModel:
    """What every server of a load serves.

    Attributes
    ----------
    folder : str
        Where vLLM finds it, or a hub id.
    words : tuple of str
        Further options for vLLM.
    unpacked : UnpackedModel or None
        What the folder was written of, if it was a GGUF file.
    """

    folder: str
    words: tuple[str, ...]
    unpacked: "UnpackedModel | None" = None

    @property
    def weights(self) -> str | None:
        """``random`` where they are nobody's; None for the model's own."""
        return "random" if load_format_of(self.words) == "dummy" else None


@contextmanager
def engine_model(model: str, layers: int | None, words: Sequence[str]) -> Iterator[EngineModel]:
    """Give what vLLM finds a model by: it knows folders and hub ids, no shapes and no GGUF."""
    from kvprof.benchmark.shapes import has_weights
    from kvprof.models.locate import locate
    from kvprof.serving.shapes import shape_folder, words_for_shape
    from kvprof.serving.unpacked import unpacked

    if has_weights(model):
        if layers is not None:
            raise UsageError("--layers requires a shape without weights")
        if is_gguf(model):
            _check_vllm()
            with unpacked(model, _dtype(), words) as written:
                assert written is not None  # it is such a file
                yield EngineModel(str(written.folder), tuple(words), written)
            return
        folder = str(locate(model).folder) if model == "reference" else model
        yield EngineModel(folder, tuple(words))
        return
    with shape_folder(model, layers) as folder:
        yield EngineModel(folder, (*words, *words_for_shape(folder, words)))


def started_servers(
    model: EngineModel,
    methods: Sequence[LoadMethod],
    plans: Sequence[Path],
    inputs: Mapping[str, Any],
    lengths: Any,
) -> "list[LoadTarget]":
    """Return a target for each method, whose servers are started when it is their turn."""
    from kvprof.serving.load.target import ServedTarget

    files = {path.name: path for path in plans}
    _refuse_long(model.folder, lengths)
    _check_vllm()
    _refuse_unservable(model.folder, methods, files)
    if files or any(served_by_engine(one.name) is None for one in methods):
        check_found()
    if model.unpacked is not None and model.weights is None:
        files = {name: model.unpacked.plan_of(path) for name, path in files.items()}
    return [
        ServedTarget(
            _process(one, files.get(one.name), model, inputs, lengths.longest),
            timeout=inputs["timeout"],
            router=inputs["router"],
        )
        for one in methods
    ]


def _check_vllm() -> None:
    if find_spec("vllm") is None:
        raise LackingError(
            f"bench --load requires vLLM ({extra_command('serve')}), --url with running servers, "
            "or --simulate"
        )


def _dtype() -> Any:
    """Return what every server of a load computes in, unless it is told another dtype."""
    from kvprof.models.placement import main_device, parse_dtype

    return parse_dtype("auto", main_device("auto"))


def _refuse_long(folder: str, lengths: Any) -> None:
    """Refuse requests longer than the model's positions, where its config lies here."""
    try:
        config = parse_json((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # a hub id: the engine knows
    positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if isinstance(positions, int) and positions > 0:
        lengths.refuse_over(positions, f"the model has {positions:,} positions")


def _refuse_unservable(
    folder: str, methods: Sequence[LoadMethod], files: Mapping[str, Path]
) -> None:
    """Refuse plans, and where the model's config lies here methods, that ``serve`` would refuse."""
    from kvprof.benchmark.shape_plans import Bare
    from kvprof.benchmark.shapes import layout_of, load_shape
    from kvprof.serving.active_plan import served_plan
    from kvprof.serving.refusals import check_method

    for path in files.values():
        served_plan(str(path))
    names = dict.fromkeys(one.name for one in methods if one.name not in files)
    own = [name for name in names if served_by_engine(name) is None]
    if not own or not (Path(folder) / "config.json").exists():
        return  # of a hub id the server tells
    shape = load_shape(folder)
    for name in own:
        method, written, _ = served_method(name)
        check_method(Bare(layout_of(shape), shape.name), method, **options_in(written))


def _process(
    asked: LoadMethod,
    plan: Path | None,
    model: EngineModel,
    inputs: Mapping[str, Any],
    longest: int,
) -> Any:
    """Return a method's server with the engine's own router, or as many servers as replicas."""
    apart = inputs["replicas"] if inputs["router"] == "round-robin" else 1
    settings = EngineSettings(
        memory=inputs["memory"],
        longest=longest,
        tp=asked.tp,
        replicas=inputs["replicas"] // apart,
        seed=inputs["seed"],
        dtype=str(_dtype()).removeprefix("torch."),
        more=model.words,
    )
    method, options, rate = (
        served_method(asked.name) if plan is None else (asked.name, list[str](), None)
    )

    def command(port: int) -> list[str]:
        return serve_command(
            model.folder,
            port,
            settings,
            method=method,
            options=options,
            plan=None if plan is None else str(plan),
            rate=inputs["rate"] if rate is None else rate,
        )

    shown = {"engine options": shlex.join(settings.words())}
    variables = server_variables(method, plan=plan is not None)
    if told := told_variables(variables):
        shown["engine variables"] = told
    return ServerProcess(
        asked.label,
        command,
        count=apart,
        settings=shown,
        gpus=settings.gpus,
        unset=settings.unset,
        variables=variables,
    )


def served_method(label: str) -> tuple[str, list[str], float | None]:
    """Return a method, its options, and the rate that it is given for itself; None without one."""
    ((_, method, written),) = method_entries(label)
    if written and served_by_engine(method) is not None:
        raise UsageError(f"--methods {label}: {method} is vLLM's own and takes no options")
    own = options_in(written)
    rate = own_rate(label, own)
    return method, [f"{key}={value}" for key, value in own.items()], rate


def engine_words(text: str | None) -> list[str]:
    """Return options for vLLM, of ``--engine``.

    Refused is what holds a key, since they enter records, and what would make one method of
    another: the last of two options counts for vLLM, which also takes the beginning of a name.
    """
    try:
        words = shlex.split(text or "")
    except ValueError as wrong:
        raise UsageError(f"--engine: {str(wrong).lower()}") from None
    for word in words:
        name = word.partition("=")[0].replace("_", "-").lower()
        if not name.startswith("-") or name.strip("-") == "":
            continue
        if name.startswith("--ssl") or any(secret.startswith(name) for secret in _SECRETS):
            raise UsageError(
                f"--engine {name} would be recorded with its key; set it in the environment"
            )
        if own := next((said for option, said in _SET.items() if option.startswith(name)), None):
            raise UsageError(f"--engine {name}: use {own}")
        if any(option.startswith(name) for option in _ADDRESSES):
            raise UsageError(f"--engine {name}: bench --load sets the servers' addresses")
    return words


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise UsageError(f"--key-env {variable}: the variable is unset or empty")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"--key-env {variable}: its value is not valid in an HTTP header")
    return key
