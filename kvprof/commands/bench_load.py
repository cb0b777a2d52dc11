"""``kvprof bench --load``: what rate of requests does a method serve?"""

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.bench_load_options import LoadOptions
from kvprof.commands.bench_load_servers import (
    SERVED,
    engine_model,
    engine_words,
    running_servers,
    served_method,
    started_servers,
    urls,
)
from kvprof.commands.bench_simulated import scheduler_settings, simulated_targets
from kvprof.commands.options import read_counts
from kvprof.commands.output import Outputs
from kvprof.environment import collect_environment
from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.methods.named import check_names
from kvprof.records.events import Event, LoadRequest, RunFinished, RunStarted
from kvprof.records.files import read_result
from kvprof.records.journal import Journal, find_events, read_events
from kvprof.records.load_names import LoadMethod, load_case, load_methods
from kvprof.records.result import to_plain
from kvprof.serving.load.arrivals import parse_arrivals
from kvprof.serving.load.server import served_by_engine
from kvprof.serving.load.target import ROUTERS
from kvprof.sizes import parse_bytes, parse_count, parse_nonzero
from kvprof.version import __version__

if TYPE_CHECKING:
    from kvprof.serving.load.arrivals import Arrivals
    from kvprof.serving.load.lengths import Lengths
    from kvprof.serving.load.sweep import SweepOptions
    from kvprof.serving.load.target import LoadTarget

__all__ = ["baseline_first", "bench_load", "check_offered", "measure_and_show"]

_METHODS = ("full", "fp8", "fdc")
_LENGTHS = "arxiv"
_RATE = 0.5
_ARRIVALS = "poisson"
_REQUESTS = 200
_SIMULATED_REQUESTS = 20_000
_TIMEOUT = 600.0
_MOST_REQUESTS = 10_000_000
_MOST_SECONDS = 1e9
_MOST_ENGINES = 10_000
_TIME = re.compile(r"([0-9]*\.?[0-9]+)\s*(ms|s)")
_LIMITS = {
    "ttft": "ttft_seconds",
    "tpot": "tpot_seconds",
    "latency": "normalised_latency_seconds",
}


def bench_load(
    asked: LoadOptions,
    outputs: Outputs,
    *,
    model: str | None,
    methods: tuple[str, ...],
    plans: tuple[Path, ...],
    rate: float | None,
    baseline: str | None,
    requests: int | None,
    tp: str | None,
    layers: int | None,
    seed: int | None,
) -> None:
    """Measure, show and keep."""
    if layers is not None and (asked.url is not None or asked.simulate):
        raise UsageError("--layers requires a shape without weights and servers that kvprof starts")
    if asked.url is not None:
        _refuse_beside_url(asked, methods, plans, rate, tp)
    else:
        _refuse_without_url(asked)
    if asked.simulate:
        _simulate(
            asked,
            outputs,
            model=model,
            methods=methods,
            plans=plans,
            rate=rate,
            baseline=baseline,
            requests=requests,
            tp=tp,
            seed=seed,
        )
        return
    lengths = _lengths(asked, model)
    options = _sweep_options(asked, lengths, requests, seed or 0)
    name = model if model is not None or asked.url is not None else "reference"
    names = (SERVED,) if asked.url is not None else (methods or _METHODS)
    if asked.url is None:
        _check_methods(names, plans)
    measured = load_methods(baseline_first(names, baseline), _tps(tp))
    inputs = _inputs(asked, options, name, measured, plans, rate)
    if asked.url is not None:
        targets = running_servers(
            asked.url, inputs, served_model=asked.served_model, key_env=asked.key_env
        )
        measure_and_show(options, targets, inputs, outputs, mode="url")
        return
    words = engine_words(asked.engine)
    with engine_model(model or "reference", layers, words) as served:
        inputs |= {"layers": layers, "weights": served.weights}
        if served.unpacked is not None:
            inputs |= {"gguf": served.unpacked.described}
        targets = started_servers(served, measured, plans, inputs, lengths)
        measure_and_show(options, targets, inputs, outputs, mode="served")


def _simulate(
    asked: LoadOptions,
    outputs: Outputs,
    *,
    model: str | None,
    methods: tuple[str, ...],
    plans: tuple[Path, ...],
    rate: float | None,
    baseline: str | None,
    requests: int | None,
    tp: str | None,
    seed: int | None,
) -> None:
    """Simulate in place of measuring; see `bench_load`."""
    from kvprof.serving.load.step_records import read_model_steps

    _refuse_beside_simulate(asked, plans, rate)
    tps = _tps(tp)
    if len(tps) > 1:
        raise UsageError(f"--tp {tp}: --simulate takes one number of GPUs")
    settings = scheduler_settings(engine_words(asked.engine))
    steps = read_model_steps(model, tps[0])
    simulated = baseline_first(methods or tuple(steps.methods), baseline)
    lengths = _lengths(asked, model)
    options = _sweep_options(asked, lengths, requests, seed or 0)
    inputs = _inputs(asked, options, steps.model, load_methods(simulated, tps), (), None)
    targets, told = simulated_targets(steps, simulated, settings, inputs)
    inputs |= {"rate": None, "timeout": None, **told}
    measure_and_show(options, targets, inputs, outputs, mode="simulated")


def baseline_first(labels: Sequence[str], baseline: str | None) -> tuple[str, ...]:
    """Return methods with the baseline first: ``full`` unless another is named."""
    base = baseline or ("full" if "full" in labels else labels[0])
    if base not in labels:
        raise UsageError(f"--baseline {base} is not among --methods {','.join(labels)}")
    return (base, *(label for label in labels if label != base))


# --- What was asked for.


def _refuse_beside_simulate(
    asked: LoadOptions, plans: tuple[Path, ...], rate: float | None
) -> None:
    given = {
        "--url": asked.url is not None,
        "--plan": bool(plans),
        "--rate": rate is not None,
        "--timeout": asked.timeout is not None,
    }
    if said := [option for option, there in given.items() if there]:
        raise UsageError(
            f"{' and '.join(said)} cannot be combined with --simulate, which has recorded step "
            "times only"
        )


def _refuse_beside_url(
    asked: LoadOptions,
    methods: tuple[str, ...],
    plans: tuple[Path, ...],
    rate: float | None,
    tp: str | None,
) -> None:
    given = {
        "--methods": bool(methods),
        "--plan": bool(plans),
        "--rate": rate is not None,
        "--tp": tp is not None,
        "--memory": asked.memory is not None,
        "--replicas": asked.replicas is not None,
        "--engine": asked.engine is not None,
    }
    if said := [option for option, there in given.items() if there]:
        raise UsageError(
            f"{' and '.join(said)} cannot be combined with --url, which uses a running server"
        )
    if asked.router is not None and "," not in (asked.url or ""):
        raise UsageError("--router requires several servers: --url A,B")


def _refuse_without_url(asked: LoadOptions) -> None:
    given = {"--served-model": asked.served_model, "--key-env": asked.key_env}
    if said := [option for option, value in given.items() if value is not None]:
        raise UsageError(f"{' and '.join(said)} requires --url")
    if asked.router is not None and _engines(asked) < 2:
        raise UsageError("--router requires several servers: --replicas 2")


def _check_methods(labels: Sequence[str], plans: Sequence[Path]) -> None:
    """Refuse methods that there are not, and plans that are no file, before a server is started."""
    files = {path.name: path for path in plans}
    for name, path in files.items():
        if not path.exists():
            raise UsageError(f"--plan {name}: no such file")
    own = [label for label in labels if label not in files and served_by_engine(label) is None]
    check_names([served_method(label)[0] for label in own])


def _lengths(asked: LoadOptions, model: str | None) -> "Lengths":
    from kvprof.serving.load.lengths import load_lengths

    named = asked.tokenizer or model
    counter = None if named is None else _Counter(named)
    found = load_lengths(asked.lengths or _LENGTHS, counter)
    if asked.tokenizer is not None and (counter is None or not counter.asked):
        raise UsageError(f"--tokenizer requires --lengths with texts; {found.name} has none")
    return replace(found, default=asked.lengths is None)


class _Counter:
    """Counts a text's tokens, and reads the tokenizer when the first text comes."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._held: Any = None

    @property
    def asked(self) -> bool:
        """Whether there was a text."""
        return self._held is not None

    def __call__(self, text: str) -> int:
        if self._held is None:
            from kvprof.models.load import token_counter

            self._held = token_counter(self._model)
        tokens: int = self._held(text)
        return tokens


def _sweep_options(
    asked: LoadOptions, lengths: Any, requests: int | None, seed: int
) -> "SweepOptions":
    from kvprof.serving.load.sweep import SweepOptions

    rates, arrivals, objective = check_offered(
        rates=asked.rates,
        arrivals=asked.arrivals,
        slo=asked.slo,
        requests=requests,
        seconds=asked.seconds,
        refine=asked.refine,
    )
    if arrivals.kind == "trace" and not lengths.timed:
        raise UsageError(
            f"--arrivals trace: {lengths.name} has no times; use poisson or another file"
        )
    return SweepOptions(
        lengths=lengths,
        arrivals=arrivals,
        rates=rates,
        requests=requests or (_SIMULATED_REQUESTS if asked.simulate else _REQUESTS),
        seconds=asked.seconds,
        objective=objective,
        refine=asked.refine or 0,
        seed=seed,
        engines=_engines(asked),
    )


def check_offered(
    *,
    rates: str | None,
    arrivals: str | None,
    slo: str | None,
    requests: int | None,
    seconds: float | None,
    refine: int | None,
) -> tuple[tuple[float, ...], "Arrivals", dict[str, float]]:
    """Return rates, arrivals and the objective of a load as they are written."""
    if requests is not None and seconds is not None:
        raise UsageError("--requests and --seconds cannot be combined; give one")
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--seconds {seconds:g} is not above 0")
    found = _rates(rates)
    if seconds is not None and seconds * max(found, default=1.0) > _MOST_REQUESTS:
        raise UsageError(f"--seconds {seconds:g} would send more than {_MOST_REQUESTS:,} requests")
    if requests is not None and not 1 <= requests <= _MOST_REQUESTS:
        raise UsageError(f"--requests {requests:,} is out of range")
    if refine is not None and not 0 <= refine <= 20:
        raise UsageError(f"--refine {refine} is not between 0 and 20")
    return found, parse_arrivals(arrivals or _ARRIVALS), _objective(slo)


def _rates(text: str | None) -> tuple[float, ...]:
    if text is None or text.strip().lower() == "auto":
        return ()
    found = []
    for piece in text.split(","):
        try:
            value = float(piece)
        except ValueError:
            value = math.nan
        if not 1e-4 <= value <= 1e6:
            raise UsageError(
                f"--request-rate: {piece.strip()[:20]!r} is not between 0.0001 and 1000000 "
                "req/s; write 0.5,1,2"
            )
        found.append(value)
    rates = sorted(set(found))
    for low, high in pairwise(rates):
        if load_case("", low) == load_case("", high):
            raise UsageError(f"--request-rate: {low!r} and {high!r} are too close; leave one out")
    return tuple(rates)


def _objective(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    found: dict[str, float] = {}
    for piece in text.split(","):
        name, _, value = piece.strip().partition("=")
        if _LIMITS.get(name, name) in found:
            raise UsageError(f"--slo gives {name} twice")
        if name == "share":
            found["share"] = parse_nonzero(value, what="--slo share")
            continue
        match = _TIME.fullmatch(value.strip())
        if name not in _LIMITS or match is None or not 0 < float(match[1]) < _MOST_SECONDS:
            raise UsageError(
                f"--slo: cannot read {piece.strip()[:40]!r}; write limits such as "
                "ttft=2s,tpot=50ms,latency=10s,share=0.9"
            )
        found[_LIMITS[name]] = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)
    if not found.keys() & set(_LIMITS.values()):
        raise UsageError("--slo has no limit; write for example ttft=2s,tpot=50ms")
    return {"share": 0.9, **found}


def _inputs(
    asked: LoadOptions,
    options: "SweepOptions",
    model: str | None,
    methods: Sequence[LoadMethod],
    plans: Sequence[Path],
    rate: float | None,
) -> dict[str, Any]:
    """Return every resolved input; no address, no key and no path among them."""
    timeout = _TIMEOUT if asked.timeout is None else asked.timeout
    if not 0 < timeout < math.inf:
        raise UsageError(f"--timeout {timeout:g} is not above 0")
    return {
        "model": None if model is None else Path(model).name,
        "methods": [one.label for one in methods],
        "plans": [path.name for path in plans],
        "baseline": methods[0].label,
        "rate": (_RATE if rate is None else rate) if asked.url is None else None,
        "lengths": options.lengths.described(),
        "tokenizer": None if asked.tokenizer is None else Path(asked.tokenizer).name,
        "arrivals": options.arrivals.name,
        "rates": list(options.rates) or None,
        "requests": options.requests if options.seconds is None else None,
        "seconds": options.seconds,
        "objective": options.objective,
        "refine": options.refine,
        "memory": None if asked.memory is None else parse_bytes(asked.memory, what="--memory"),
        "replicas": _engines(asked),
        "router": _router(asked.router),
        "tp": tps[0] if len(tps := sorted({one.tp for one in methods})) == 1 else tps,
        "timeout": timeout,
        "engine": shlex.join(engine_words(asked.engine)) or None,
        "seed": options.seed,
    }


def _engines(asked: LoadOptions) -> int:
    if asked.url is not None:
        return max(1, len(urls(asked.url)))  # that there is none is said where they are asked
    engines = _positive("--replicas", 1 if asked.replicas is None else asked.replicas)
    if engines > _MOST_ENGINES:
        raise UsageError(f"--replicas {engines} is not between 1 and {_MOST_ENGINES:,}")
    return engines


def _tps(text: str | None) -> list[int]:
    return read_counts("1" if text is None else text, what="--tp")


def _positive(option: str, value: int) -> int:
    return parse_count(str(value), what=option)


def _router(text: str | None) -> str:

    if text is not None and text not in ROUTERS:
        raise UsageError(f"--router {text[:40]}: give {' or '.join(ROUTERS)}")
    return text or ROUTERS[0]


# --- The run: into a journal, shown, kept; one cut off goes on.


def measure_and_show(
    options: "SweepOptions",
    targets: "Sequence[LoadTarget]",
    inputs: dict[str, Any],
    outputs: Outputs,
    *,
    mode: str,
) -> None:
    """Run into a journal, and show and keep what was measured, also where something failed."""
    path = outputs.events
    earlier = _interrupted_events(outputs, inputs)
    if earlier is not None:
        # What is there is an unfinished run's: it is carried over, and then replaced.
        try:
            _without_own_files(outputs, earlier).check()
        except UsageError as wrong:
            raise UsageError(
                f"{wrong} and discards the interrupted run in {outputs.out}; name another file to "
                "resume it"
            ) from None
        outputs = replace(outputs, force=True)
        console.note(f"{outputs.out}: resuming an interrupted run")
    else:
        outputs.check({"--out": path})
    with graceful_interrupt() as stop:
        journal, problems = _measured(
            options, targets, inputs, path, outputs.force, mode, earlier or [], stop
        )
        if not journal.measured:
            _leave_nothing(path, journal)
        outputs.end_recorded(journal, problem=problems[0] if problems else None, interrupted=stop())


def _without_own_files(outputs: Outputs, earlier: Sequence[Event]) -> Outputs:
    """Return the outputs without the folder and the files that an interrupted run wrote itself.

    Those that its command named by the same option, and whose result says that it is that run's.
    """
    started = earlier[0] if earlier else None
    if not isinstance(started, RunStarted):
        return replace(outputs, out=None)
    path = outputs.json
    if path is None or not _named(started.command, "--json", path) or not _of_run(path, started):
        return replace(outputs, out=None)
    # What it wrote beside its result it wrote in the same moment.
    csv, svg, png = (
        None if at is not None and _named(started.command, option, at) else at
        for option, at in (("--csv", outputs.csv), ("--svg", outputs.svg), ("--png", outputs.png))
    )
    return replace(outputs, out=None, json=None, csv=csv, svg=svg, png=png)


def _named(command: Sequence[str], option: str, path: Path) -> bool:
    """Whether a command named a path by an option."""
    given = [after for word, after in pairwise(command) if word == option]
    given += [word.partition("=")[2] for word in command if word.startswith(f"{option}=")]
    return any(Path(one) == path for one in given)


def _of_run(path: Path, started: RunStarted) -> bool:
    """Whether a file holds the unfinished result of a run."""
    try:
        result = read_result(path)
    except KvprofError:
        return False
    return result["created"] == started.created and not result["complete"]


def _leave_nothing(path: Path | None, journal: Journal) -> None:
    """Remove the events of a run in which nothing was measured, so that the next one finds none."""
    if path is None or not path.exists():
        return
    with suppress(OSError, FailedError):
        if read_events(path).events == journal.recording().events:
            path.unlink()
            path.parent.rmdir()


def _interrupted_events(outputs: Outputs, inputs: Mapping[str, Any]) -> list[Event] | None:
    """Return the events of an interrupted run of the same load in the folder; None without one."""
    if outputs.out is None or outputs.force or (found := find_events(outputs.out)) is None:
        return None
    try:
        events = read_events(found).events
    except FailedError:
        return None
    if not events:
        return []  # it was killed before it said what it is
    started, last = events[0], events[-1]
    if not isinstance(started, RunStarted) or started.kind != "load":
        return None
    if isinstance(last, RunFinished) and last.complete:
        return None
    if not any(isinstance(event, LoadRequest) for event in events):
        return []  # it was killed before anything was measured
    own, theirs = to_plain(inputs), started.inputs
    assert isinstance(own, dict)
    # An option that an older version did not have was not given to it.
    names = dict.fromkeys((*own, *theirs))
    if other := [name for name in names if own.get(name) != theirs.get(name)]:
        raise UsageError(
            f"{outputs.out} has an interrupted load with other options ({', '.join(other)}); "
            "--force discards it"
        )
    return events


def _measured(
    options: "SweepOptions",
    targets: "Sequence[LoadTarget]",
    inputs: dict[str, Any],
    path: Path | None,
    force: bool,
    mode: str,
    earlier: Sequence[Event],
    stop: Any,
) -> tuple[Journal, list[KvprofError]]:
    from kvprof.serving.load.sweep import run_sweep

    journal = Journal(path, force=force, warn=console.warn)
    problems: list[KvprofError] = []
    with journal:
        journal.emit(
            RunStarted(
                journal.now(),
                datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                __version__,
                "load",
                ("kvprof", *_command(sys.argv[1:])),
                mode,
                inputs,
                collect_environment(),
                {"name": inputs["model"] or "the served model"},
                tuple(inputs["methods"]),
                inputs["baseline"],
            )
        )
        try:
            complete, problems = run_sweep(
                targets, options, journal, stop=stop, earlier=earlier, progress=console.note
            )
        except KvprofError as problem:
            complete, problems = False, [problem]
        reason = None
        if not complete:
            reason = "interrupted" if stop() or not problems else str(problems[0])
        journal.emit(RunFinished(journal.now(), complete, reason))
    return journal, problems


def _command(arguments: Sequence[str]) -> list[str]:
    """Return the command line without the addresses that it names."""
    found: list[str] = []
    for word in arguments:
        if found and found[-1] == "--url":
            word = "…"
        found.append("--url=…" if word.startswith("--url=") else word)
    return found
