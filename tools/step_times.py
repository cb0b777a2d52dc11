"""Gathers step times for `kvprof bench --load --simulate` from loads that were served on a GPU.

    python tools/step_times.py RUN RUN --prompts RUN --only full fdc

Each RUN is a folder that `kvprof bench --load --out` wrote. The methods that it served replace
those of the same model in the record (`--record`, by default the one that ships; `--out` writes
another file). Kept are means of stretches that are alike, and prompts that were read alone. Of runs
after `--prompts` only such prompts are taken: where prompts are long, too few steps read one.
"""

import argparse
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from kvprof.records.events import LoadRateFinished, LoadRateStarted, LoadRequest, LoadServer
from kvprof.records.files import read_result, write_result
from kvprof.records.journal import find_events, read_events
from kvprof.records.load import LoadFold, undisturbed
from kvprof.records.load_statistics import LEAST
from kvprof.records.result import build_result
from kvprof.serving.load.replica import EngineSettings
from kvprof.serving.load.step_times import StepSample, fit_step_times
from kvprof.serving.settings import most_tokens

RECORD = Path("kvprof/assets/step_times/h200.json")
_COLUMNS = ("decode", "context", "prefill", "pairs", "seconds")
#: Tokens of a prompt whose time to the first token is its steps', but for some percent.
_LONG = 2048
#: Groups of stretches of a load, by the requests that decode, and in each by the prompt tokens.
_BATCHES, _PROMPTS = 32, 3
_DIGITS = 6


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loads", type=Path, nargs="+", help="folders of loads that were served")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="further ones")
    parser.add_argument("--only", nargs="+", help="methods as the runs name them; all by default")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--out", type=Path, help="by default the record itself")
    asked = parser.parse_args()
    record = read_result(asked.record)
    found: dict[str, dict[str, Any]] = {}
    for folder in [*asked.loads, *asked.prompts]:
        run = read_result(folder / "result.json")
        model = _model(record, run, folder)
        for method, own in steps_of(folder).items():
            if asked.only and method not in asked.only:
                continue
            stretches = [one for one in own["samples"] if one.decode and folder in asked.loads]
            alone = [one for one in own["samples"] if not one.decode]
            entry = found.setdefault(
                method, {"method": method, "rate": own["rate"], "notes": [], "samples": []}
            )
            entry["samples"] += [_row(one, folder.name) for one in (*grouped(stretches), *alone)]
        record["data"]["sources"][folder.name] = {
            "created": run["created"],
            "gpu": run["environment"]["gpus"][0]["name"],
            "torch": run["environment"]["packages"]["torch"],
        }
    for method in found.values():
        fit = fit_step_times([StepSample(*one) for one in method["samples"]])
        print(f"{method['method']}: {fit.samples} steps, met to {fit.residual:.1%}")
    methods = {own["method"]: own for own in model["methods"]} | found
    model["methods"] = list(methods.values())
    result = build_result(
        "benchmark",
        environment=run["environment"],
        inputs=record["inputs"],
        data=record["data"],
        created=datetime.fromisoformat(str(run["created"])),
    )
    write_result(asked.out or asked.record, result, force=True)


def _model(record: dict[str, Any], run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the record's model that a run served."""
    gpus = run["environment"].get("gpus") or [{"name": "a CPU"}]
    if gpus[0]["name"] != record["data"]["gpu"]["name"]:
        raise SystemExit(f"{folder}: {gpus[0]['name']}, not {record['data']['gpu']['name']}")
    name, tp = run["data"]["shape"]["name"], run["inputs"]["tp"]
    for model in record["data"]["models"]:
        if (model["name"], model["tp"]) == (name, tp):
            found: dict[str, Any] = model
            return found
    raise SystemExit(f"{folder}: the record has no {name} on {tp} GPUs")


def steps_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the steps of each method that a load served: its rate, and its samples.

    A method without enough stretches from rates at which nobody was preempted, and the engine's
    front end kept up, is left out.
    """
    result, events = read_result(folder / "result.json"), find_events(folder)
    if result["data"]["mode"] != "served" or events is None:
        raise SystemExit(f"{folder}: no load that was served, with its events")
    load = LoadFold()
    for event in read_events(events).events:
        if isinstance(event, LoadServer | LoadRateStarted | LoadRequest | LoadRateFinished):
            load.add(event)
    most = most_tokens((result["inputs"]["engine"] or "").split())
    most = most or EngineSettings(1).max_num_batched_tokens
    full = _bytes_per_token(load.servers[result["data"]["baseline"]])
    found = {}
    for method, server in load.servers.items():
        cases = [one for one in load.cases.values() if one.started.method == method]
        samples: list[StepSample] = []
        for case in (one for one in cases if one.finished and undisturbed([one.finished])):
            known = [one.prompt for one in case.requests]
            # A prompt's token attends to half of it on average; long prompts have more tokens.
            each = sum(pairs_of(one) for one in known) / max(1, sum(known))
            samples += [
                StepSample(
                    *(span["batch"], span["context"], span["prefill"]),
                    *(span["prefill"] * each, span["between"]),
                    mean=True,
                    weight=span["tokens"],
                )
                for span in (case.finished.spans if case.finished else ())
            ]
        if len(samples) < LEAST:
            print(f"{folder}: {method} has too few stretches at rates that tell its steps")
            continue
        for case in cases:
            # Of what was broken off others were there that have left no event.
            ended = case.finished
            if ended is not None and ended.complete and ended.engine.get("prefix_hits") == 0:
                samples += prompts_alone(case.requests, most)
        found[method] = {"rate": 1 - _bytes_per_token(server) / full, "samples": samples}
    return found


def _bytes_per_token(server: LoadServer) -> float:
    if not server.cache_bytes or not server.cache_tokens:
        raise SystemExit(f"{server.method}: its engine did not tell its cache's bytes and tokens")
    return server.cache_bytes / server.cache_tokens


def pairs_of(prompt: int) -> float:
    """Return the pairs of tokens in which a prompt attends to itself and what lies before."""
    return prompt * (prompt + 1) / 2


def prompts_alone(requests: Sequence[LoadRequest], most: int) -> list[StepSample]:
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
            whole = one.prompt, pairs_of(one.prompt), one.first - one.sent
            means = (value / steps for value in whole)
            found.append(StepSample(0, 0.0, *means, mean=True, weight=steps))
        ended = max(ended, one.last)
    return found


def grouped(samples: Sequence[StepSample]) -> list[StepSample]:
    """Return means of stretches with about as many requests and prompt tokens, and their weights.

    A line through all of them is a line through these too.
    """
    found = []
    for group in _split(sorted(samples, key=lambda one: (one.decode, one.context)), _BATCHES):
        for own in _split(sorted(group, key=lambda one: one.prefill), _PROMPTS):
            weight = sum(one.weight for one in own)
            means = (sum(one.weight * getattr(one, name) for one in own) for name in _COLUMNS)
            found.append(StepSample(*(mean / weight for mean in means), mean=True, weight=weight))
    return found


def _split(samples: Sequence[StepSample], groups: int) -> list[Sequence[StepSample]]:
    bounds = [len(samples) * number // groups for number in range(groups + 1)]
    parts = [samples[low:high] for low, high in pairwise(bounds)]
    return [part for part in parts if part]


def _row(one: StepSample, source: str) -> list[Any]:
    """Return a sample as the record has it, with as many digits as count."""
    values = [float(f"{getattr(one, name):.{_DIGITS}g}") for name in _COLUMNS]
    return [*values, source, True, float(f"{one.weight:.{_DIGITS}g}")]


if __name__ == "__main__":
    main()
