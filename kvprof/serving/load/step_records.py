"""Where a simulation's step times come from: records of steps that were measured on some device."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import as_file, files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvprof.dtypes import DTYPE_BYTES
from kvprof.errors import FailedError, UsageError
from kvprof.records.events import LoadRateFinished, LoadRateStarted, LoadRequest, LoadServer
from kvprof.records.files import RESULT_NAME, read_result
from kvprof.records.journal import EVENTS_NAME, find_events, read_events
from kvprof.records.load import undisturbed
from kvprof.records.load_names import baseline_of, read_label, tps_of
from kvprof.records.load_statistics import LEAST
from kvprof.serving.load.replica import EngineSettings, engine_defaults
from kvprof.serving.load.step_times import StepSample, StepTimes, fit_step_times, pairs_of
from kvprof.serving.settings import most_tokens

__all__ = [
    "METHOD_COLUMNS",
    "UTILISATION",
    "MethodSteps",
    "ModelSteps",
    "read_model_steps",
    "samples_of",
    "weight_bytes",
]

#: What a sample of a method is, in the order of its list; the last two may be missing.
METHOD_COLUMNS = ("decode", "context", "prefill", "pairs", "seconds", "source", "mean", "weight")
#: Share of a device's memory that an engine takes, as vLLM does. Activations are not counted.
UTILISATION = 0.92
_SHIPPED = "h200.json"
#: Tokens of a prompt whose time to the first token is its steps', but for some percent.
_LONG = 2048
_DISTURBED = (
    "its steps are from rates at which requests were preempted or waited for the engine's front "
    "end, which counts as times between tokens: they are too long"
)
_HOW = "name a result of bench --jct --composed, or the folder of a bench --load that really served"


@dataclass(frozen=True)
class MethodSteps:
    """One method's steps.

    Attributes
    ----------
    method : str
    rate : float
        Of the cache's bytes.
    token_bytes : float
        Bytes of a token in one device's cache.
    samples : tuple of StepSample
    notes : tuple of str
        What a reader must know of them.
    """

    method: str
    rate: float
    token_bytes: float
    samples: tuple[StepSample, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def times(self) -> StepTimes:
        """What a step takes, fitted to the samples.

        Raises
        ------
        FailedError
            When the samples do not tell it.
        """
        try:
            return fit_step_times(self.samples)
        except ValueError as problem:
            raise FailedError(f"step times of {self.method}: {problem}") from None


@dataclass(frozen=True)
class ModelSteps:
    """A model's steps on one device, or on one of several that share it.

    Attributes
    ----------
    model : str
    tp : int
        Devices that share the model; bytes are one device's.
    device : str
        What the steps were measured on.
    source : str
        The record, for the report.
    created : str
        Of the record, UTC.
    cache_bytes : int or None
        That one device's cache may have: what vLLM may take of its memory, less the weights, or
        what an engine had; None where the record does not tell.
    memory_bytes : int or None
        Of the device; None where the record does not tell.
    positions : int or None
        Tokens that a request of the model may have; None where the record does not tell.
    methods : dict of str to MethodSteps
        Full width is ``full``.
    """

    model: str
    tp: int
    device: str
    source: str
    created: str
    cache_bytes: int | None
    memory_bytes: int | None
    methods: dict[str, MethodSteps]
    positions: int | None = None

    def method(self, name: str) -> MethodSteps:
        """Return a method's steps.

        Raises
        ------
        UsageError
            When the record has none, with those that it has.
        """
        if name not in self.methods:
            raise UsageError(
                f"--methods {name}: {self.source} has no steps of it for {self.model}: it has "
                f"{', '.join(self.methods)}"
            )
        return self.methods[name]

    def described(self) -> dict[str, Any]:
        """Return what a result says of it, as JSON values."""
        return {
            "source": self.source,
            "created": self.created,
            "device": self.device,
            "model": self.model,
            "tp": self.tp,
            "methods": [
                {
                    "method": one.method,
                    "rate": one.rate,
                    "token_bytes": one.token_bytes,
                    "samples": one.times.samples,
                    "largest_difference": one.times.residual,
                    "notes": list(one.notes),
                }
                for one in self.methods.values()
            ],
        }


def weight_bytes(shape: Mapping[str, Any], itemsize: int = 2) -> int:
    """Return the bytes of one device's weights, at full width.

    Parameters
    ----------
    shape : mapping
        As a result of ``bench --jct`` describes it.
    itemsize : int
        Bytes of a weight.
    """
    hidden, width = shape["hidden_size"], shape["head_dim"]
    columns = 2 * shape["num_heads"] * width + 2 * shape["num_kv_heads"] * width
    mlp = (3 if shape.get("gated", True) else 2) * shape["intermediate_size"]
    layer = hidden * (columns + mlp * max(1, shape.get("experts", 0)))
    values = shape["layers"] * layer + 2 * shape["vocab_size"] * hidden
    return int(values) * itemsize


def _room(memory: int | None, weights: int) -> int | None:
    room = 0 if memory is None else int(UTILISATION * memory) - weights
    return room if room > 0 else None


def read_model_steps(path: Path | None, model: str | None = None, tp: int = 1) -> ModelSteps:
    """Read the steps of a model.

    Parameters
    ----------
    path : Path or None
        A result of ``bench --jct --composed``, the folder of a ``bench --load`` that served, or a
        record of `tools/step_times.py`; None takes the one that ships.
    model : str, optional
        Its name; not needed where the record has one model alone.
    tp : int

    Raises
    ------
    UsageError
        When it is another kind of result, or has no such model.
    FailedError
        When it cannot be read.
    """
    if path is None:
        with as_file(files("kvprof") / "assets" / "step_times" / _SHIPPED) as shipped:
            return _chosen(_gathered(read_result(shipped), _SHIPPED), _SHIPPED, model, tp)
    if path.name.removesuffix(".gz") == EVENTS_NAME:
        path = path.parent
    result = read_result(path)
    kind = result["kind"]
    if kind == "benchmark" and result["inputs"].get("benchmark") == "step_times":
        found = _gathered(result, path.name)
    elif kind == "jct":
        found = [_composed(result, path.name)]
    elif kind == "load":
        found = _served(result, path)
    else:
        raise UsageError(f"--step-times {path}: a result of {kind} has no times of steps: {_HOW}")
    return _chosen(found, str(path), model, tp)


def _chosen(found: Sequence[ModelSteps], name: str, model: str | None, tp: int) -> ModelSteps:
    for one in found:
        if one.tp == tp and (model is None or _plain(model) == _plain(one.model)):
            return one
    known = ", ".join(f"{one.model} with --tp {one.tp}" for one in found)
    wanted = f"{model} with --tp {tp}" if model is not None else f"--tp {tp}"
    raise UsageError(f"--step-times {name}: no steps of {wanted}: it has {known}; or {_HOW}")


def _plain(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower()


# --- Records gathered by tools/step_times.py.


def _gathered(result: Mapping[str, Any], name: str) -> list[ModelSteps]:
    data = result["data"]
    try:
        return [
            ModelSteps(
                model["name"],
                model["tp"],
                data["gpu"]["name"],
                name,
                result["created"],
                _room(data["gpu"]["memory_bytes"], model["weights_bytes"]),
                data["gpu"]["memory_bytes"],
                {
                    entry["method"]: MethodSteps(
                        entry["method"],
                        entry["rate"],
                        model["full_token_bytes"] * (1 - entry["rate"]),
                        tuple(samples_of(entry)),
                        tuple(entry["notes"]),
                    )
                    for entry in model["methods"]
                },
                model.get("positions"),
            )
            for model in data["models"]
        ]
    except (KeyError, TypeError, ValueError) as problem:
        raise FailedError(f"{name}: no record of step times: {problem!r}") from None


def samples_of(entry: Mapping[str, Any]) -> list[StepSample]:
    """Return the samples of a method in a record of step times."""
    return [StepSample(*sample) for sample in entry["samples"]]


# --- A composed run of one request: its prompts and steps, at one or several batches.


def _composed(result: Mapping[str, Any], name: str) -> ModelSteps:
    data, environment = result["data"], result["environment"]
    if data["mode"] != "composed":
        raise UsageError(
            f"--step-times {name}: a {data['mode']} run has its steps instrumented: {_HOW}"
        )
    cases = {row["case"]: row for row in data["cases"]}
    samples: dict[str, list[StepSample]] = {row["method"]: [] for row in cases.values()}
    for row in cases.values():
        if row["ttft_seconds"] is not None and "predicted" not in row["labels"]:
            tokens = row["batch"] * row["input_len"]
            pairs = row["batch"] * pairs_of(0, row["input_len"])
            samples[row["method"]].append(
                StepSample(0, 0.0, tokens, pairs, row["ttft_seconds"], name)
            )
    for step in data["steps"]:
        if step["phase"] == "decode":
            row = cases[step["case"]]
            context = float(row["batch"] * step["context"])
            samples[row["method"]].append(
                StepSample(row["batch"], context, 0, 0.0, step["seconds"], name)
            )
    per_token: dict[str, float] = {}
    for one in data["memory"]:
        row = cases[one["case"]]
        per_token[row["method"]] = one["logical"] / (row["batch"] * one["context"])
    gpus = environment.get("gpus") or []
    device = gpus[0]["name"] if gpus else str(environment.get("cpu", {}).get("model") or "CPU")
    memory = gpus[0]["memory_bytes"] if gpus else environment.get("memory_bytes")
    rates = {row["method"]: row["rate"] or 0.0 for row in cases.values()}
    methods = {
        method: MethodSteps(method, rates[method], per_token[method], tuple(own))
        for method, own in samples.items()
        if own and method in per_token
    }
    shape = data["shape"]
    return ModelSteps(
        str(shape["name"]),
        int(shape.get("tp", 1)),
        device,
        name,
        result["created"],
        _room(memory, weight_bytes(shape, DTYPE_BYTES.get(str(result["inputs"].get("dtype")), 2))),
        memory if gpus else None,
        methods,
        shape.get("context"),
    )


# --- A load that was served: stretches of decoding, and what the engine said of its cache.


def _served(result: Mapping[str, Any], path: Path) -> list[ModelSteps]:
    data = result["data"]
    if data["mode"] == "simulated":
        raise UsageError(f"--step-times {path}: a simulated load has measured no step: {_HOW}")
    folder = path.parent if path.name == RESULT_NAME else path
    events = find_events(folder) if folder.is_dir() else None
    if events is None:
        raise UsageError(
            f"--step-times {path}: a load's steps lie in its events: name the run's folder"
        )
    method_of: dict[str, str] = {}
    servers: dict[str, LoadServer] = {}
    requests: dict[str, list[LoadRequest]] = {}
    finished: list[LoadRateFinished] = []
    for event in read_events(events).events:
        match event:
            case LoadServer():
                servers[event.method] = event
            case LoadRateStarted():
                method_of[event.case] = event.method
                requests[event.case] = []  # of a rate that is measured again, its last time
            case LoadRequest():
                requests.setdefault(event.case, []).append(event)
            case LoadRateFinished():
                finished.append(event)
    by_method: dict[str, list[LoadRateFinished]] = {}
    for one in finished:
        by_method.setdefault(method_of[one.case], []).append(one)
    samples: dict[str, list[StepSample]] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for label, rates in by_method.items():
        calm = undisturbed(rates)
        if len(calm) == len(rates) or sum(len(one.spans) for one in calm) >= LEAST:
            by_method[label] = calm
        else:
            notes[label] = (_DISTURBED,)
    most = _most_tokens(result, path)
    for one in finished:
        # Of what was broken off others were there that have left no event.
        if one.complete and one.engine.get("prefix_hits") == 0:
            samples.setdefault(method_of[one.case], []).extend(
                _prompts_alone(requests[one.case], most, path.name)
            )
    for one in (one for rates in by_method.values() for one in rates):
        known = [request.prompt for request in requests[one.case]]
        # A prompt's token attends to half of its prompt on average, long prompts have more tokens.
        each = sum(pairs_of(0, p) for p in known) / max(1, sum(known))
        for span in one.spans:
            samples.setdefault(method_of[one.case], []).append(
                StepSample(
                    span["batch"],
                    span["context"],
                    span["prefill"],
                    span["prefill"] * each,
                    span["between"],
                    path.name,
                    mean=True,
                    weight=span["tokens"],
                )
            )
    tps = tps_of(result["inputs"])
    methods: dict[int, dict[str, MethodSteps]] = {}
    first: dict[int, LoadServer] = {}
    for label, own in samples.items():
        per_token = _bytes_per_token(servers.get(label))
        if per_token is not None:
            full = _bytes_per_token(servers.get(baseline_of(label, data["baseline"])))
            rate = 1 - per_token / full if full else 0.0
            asked = read_label(label, tps)
            first.setdefault(asked.tp, servers[label])
            methods.setdefault(asked.tp, {})[asked.name] = MethodSteps(
                asked.name, rate, per_token, tuple(own), notes.get(label, ())
            )
    if not methods:
        raise UsageError(
            f"--step-times {path}: no engine there told its cache's bytes and tokens, or none was "
            "busy for long enough"
        )
    gpus = result["environment"].get("gpus") or []
    return [
        ModelSteps(
            str(data["shape"].get("name", "")),
            tp,
            gpus[0]["name"] if gpus else "CPU",
            path.name,
            result["created"],
            _own_bytes(first[tp], result["inputs"]),
            gpus[0]["memory_bytes"] if gpus else None,
            own,
            first[tp].longest,
        )
        for tp, own in methods.items()
    ]


def _most_tokens(result: Mapping[str, Any], path: Path) -> int:
    """Return the tokens that a step of a load's engine might have."""
    engine = result["inputs"].get("engine")
    try:
        said = most_tokens(shlex.split(str(engine or "")))
    except ValueError as problem:
        raise FailedError(
            f"--step-times {path}: the engine's options {engine!r}: {str(problem).lower()}"
        ) from None
    gpus = result["environment"].get("gpus") or []
    defaults = engine_defaults(gpus[0]["memory_bytes"] if gpus else None)
    own = EngineSettings.max_num_batched_tokens
    return said or defaults.get("max_num_batched_tokens", own)


def _prompts_alone(requests: Sequence[LoadRequest], most: int, source: str) -> list[StepSample]:
    """Return the steps, of so many tokens, of long prompts that were read while none was beside.

    Stretches tell little of what prompts cost: which of them a prompt was read in is known to a
    token's time alone, and nobody decodes in many steps that read one.
    """
    known = sorted(requests, key=lambda one: one.arrival)
    found: list[StepSample] = []
    ended = 0.0
    for one, behind in zip_longest(known, known[1:]):
        if one.failure or one.first is None or one.last is None:
            break  # the server may be at work for it as long as the rate lasts
        alone = ended <= one.sent and (behind is None or one.first <= behind.arrival)
        if alone and one.prompt >= _LONG:
            steps = -(-one.prompt // most)
            whole = one.prompt, pairs_of(0, one.prompt), one.first - one.sent
            tokens, pairs, seconds = (value / steps for value in whole)
            found.append(StepSample(0, 0.0, tokens, pairs, seconds, source, True, steps))
        ended = max(ended, one.last)
    return found


def _own_bytes(server: LoadServer, inputs: Mapping[str, Any]) -> int | None:
    """Return the bytes of one engine's cache."""
    if server.cache_bytes is None:
        return None
    # Behind a router of the engine's own one address tells the cache of all of its engines.
    return server.cache_bytes // (
        server.engines or max(server.servers, inputs.get("replicas") or 1)
    )


def _bytes_per_token(server: LoadServer | None) -> float | None:
    if server is None or not server.cache_tokens or not server.cache_bytes:
        return None
    return server.cache_bytes / server.cache_tokens
