"""The figures of a result that can be held against another result's, each with its key."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from kvprof.records.parts import SHARED_PARTS
from kvprof.results import KINDS, class_of
from kvprof.results.base import Figure, Key

__all__ = ["Figure", "figures_of", "judging_tasks"]

Row = Mapping[str, Any]

_LEAST_SAMPLES = 5
_LARGE = 0.02  # of a request's time: a part below it is mostly noise


def judging_tasks(evaluation: Row) -> dict[str, Row]:
    """Return the tasks of an evaluation at which the uncompressed model does better than chance."""
    return {name: task for name, task in evaluation["tasks"].items() if task.get("judges", True)}


def figures_of(result: Row) -> list[Figure]:
    """Return what can be compared of a result; empty for a kind that measures nothing."""
    if result["kind"] in KINDS:
        return list(class_of(result["kind"]).of(result).figures())
    return list(_KINDS.get(result["kind"], _any_figures)(result["data"]))


def _key(row: Row, names: Sequence[str]) -> Key:
    return tuple((name, row[name]) for name in names)


def _present(
    row: Row,
    name: str,
    key: Key,
    better: str | None = None,
    *,
    interval: str | None = None,
    **more: Any,
) -> Iterator[Figure]:
    """Yield a row's figure, unless it was not measured."""
    if row.get(name) is None:
        return
    ends = row.get(interval) if interval is not None else None
    known = tuple(ends) if ends is not None and None not in ends else None
    yield Figure(key, name, row[name], better, interval=known, **more)


def _sampled(key: Key, row: Row, **more: Any) -> Iterator[Figure]:
    """Yield a row's median time, unless it was not measured."""
    samples = row.get("seconds")
    if samples:
        ends = row.get("seconds_interval")
        interval = tuple(ends) if ends is not None and None not in ends else None
        several = samples if len(samples) >= _LEAST_SAMPLES else None
        yield Figure(key, "seconds", median(samples), "lower", several, interval, **more)


def _bench(data: Row) -> Iterator[Figure]:
    names = ("method", "phase", "batch", "seq", "dtype", "schedule")
    for row in data["rows"]:
        key = _key(row, names)
        beside = row.get("baseline_seconds")
        paired = beside if beside and len(beside) == len(row["seconds"] or ()) else None
        yield from _sampled(key, row, headline=True, beside=paired)
        yield from _present(row, "speedup", key, "higher", interval="speedup_interval")
        yield from _present(row, "error", key, "lower")
        yield from _present(row, "cache_bytes", key, "lower", headline=True, exact=True)
    for row in data["baselines"]:
        fixed = {"method": row["name"], "dtype": None, "schedule": None}
        enough = len(row["seconds"] or ()) >= _LEAST_SAMPLES
        yield from _sampled(_key({**row, **fixed}, names), row, control=enough)
    yield from _present(
        data.get("bandwidth", {}), "tb_per_s", (("of", "bandwidth"),), "higher", control=True
    )


def _jct(data: Row) -> Iterator[Figure]:
    shared: dict[tuple[str, str], float] = {}
    for row in data["parts"]:
        if row["part"] in SHARED_PARTS:
            of = row["case"], row["phase"]
            shared[of] = shared.get(of, 0.0) + row["seconds"]
    for case in data["cases"]:
        key: Key = (("case", case["case"]),)

        def beside(*phases: str, of: str = case["case"]) -> list[float] | None:
            seconds = sum(shared.get((of, phase), 0.0) for phase in phases)
            return [seconds] if seconds > 0 else None

        for name, phases in (
            ("jct_seconds", ("prefill", "decode")),
            ("ttft_seconds", ("prefill",)),
            ("decode_seconds", ("decode",)),
        ):
            yield from _present(
                case,
                name,
                key,
                "lower",
                interval=f"{name}_interval",
                headline=True,
                beside=beside(*phases),
            )
        steps = [
            row for row in data["steps"] if row["case"] == case["case"] and row["phase"] == "decode"
        ]
        if case["itl_seconds"] is not None:
            # Neighbouring steps share what slows them: no limit judges it, but all steps' time.
            # Steps that stand for unlike numbers of passes are no sample of their median.
            alike = len({row["weight"] for row in steps}) == 1 and len(steps) >= _LEAST_SAMPLES
            samples = [row["seconds"] for row in steps] if alike else None
            yield Figure(
                key,
                "itl_seconds",
                case["itl_seconds"],
                "lower",
                samples,
                beside=beside("decode"),
            )
        yield from _present(case, "itl_p99_seconds", key, "lower")
        yield from _present(case, "energy_per_token_joules", key, "lower")
    whole: dict[str, float] = {}
    for row in data["parts"]:
        whole[row["case"]] = whole.get(row["case"], 0.0) + max(0.0, row["seconds"])
    for row in data["parts"]:
        key = _key(row, ("case", "phase", "part"))
        large = row["seconds"] > _LARGE * whole[row["case"]]
        control = large and row["part"] in SHARED_PARTS
        yield from _present(row, "seconds", key, "lower", control=control)


def _load(data: Row) -> Iterator[Figure]:
    for row in data["rates"]:
        if not row["complete"]:
            continue
        key = _key(row, ("method", "rate"))
        for name in ("normalised_latency_seconds", "ttft_seconds", "tpot_seconds"):
            for statistic in ("mean", "p50", "p99"):
                yield from _present(
                    {name: row[name][statistic], "ends": row[name][f"{statistic}_interval"]},
                    name,
                    (*key, ("statistic", statistic)),
                    "lower",
                    interval="ends",
                    headline=statistic == "mean",
                )
        yield from _present(row, "tokens_per_s", key, "higher")
        yield from _present(
            row, "attained_share", key, "higher", interval="attained_share_interval", headline=True
        )
        yield from _present(row, "preemptions", key, "lower")
    for method in data["methods"]:
        key = (("method", method["method"]),)
        yield from _present(
            method, "largest_rate", key, "higher", interval="largest_rate_interval", headline=True
        )
        yield from _present(method, "cache_tokens", key, "higher", exact=True)


def _nothing(data: Row) -> Iterator[Figure]:
    return iter(())


def _any_figures(data: Row, path: str = "", known: Key = ()) -> Iterator[Figure]:
    """Yield every figure of data without a fixed form; a row is known by its words and counts."""
    key = (("of", path), *known) if path else known
    for name, value in data.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from _any_figures(value, inner, known)
        elif _is_numbers(value):
            if len(value) >= _LEAST_SAMPLES and _is_time(name):
                yield Figure(key, name, median(value), "lower", value, headline=True)
        elif isinstance(value, list):
            for row in value:
                if isinstance(row, Mapping):
                    own = dict(known) | dict(_identity(row))
                    yield from _any_figures(row, inner, tuple(own.items()))
        elif isinstance(value, float) or (isinstance(value, int) and "bytes" in name):
            better = "lower" if _is_time(name) or "bytes" in name else None
            yield Figure(
                key, name, value, better, headline=better is not None, exact="bytes" in name
            )


def _identity(row: Row) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, str) or (type(value) is int and "bytes" not in name):
            yield name, value


def _is_time(name: str) -> bool:
    return name.endswith(("_s", "seconds")) and not name.endswith("per_s")


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) in (int, float) for entry in value)


_KINDS: dict[str, Callable[[Row], Iterator[Figure]]] = {
    "bench": _bench,
    "compare": _nothing,
    "doctor": _nothing,
    "jct": _jct,
    "load": _load,
}
