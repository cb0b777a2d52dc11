"""How fast methods decode over a long context, as ``kvprof bench`` measured it: given, or shipped.

A speed is of the attention of one layer of some shape, with widths that save some rate. It stands
beside a row of a frontier only where the row saves that rate too: at another one a kernel reads
other bytes, and what it would take then nobody has measured.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.named import method_entries
from kvprof.records.files import read_result, what_was_read

__all__ = ["LONG_CONTEXT", "Speed", "attach_speeds", "load_speeds", "speeds_of"]

#: Tokens at which bytes and speeds are told beside a frontier, the default of ``kvprof bench``.
LONG_CONTEXT = 102_400
# Of the cache's bytes: as far as ranks rounded to a grid may be from the rate asked for.
_NEAR = 0.01
_BITS = re.compile("bits=[0-9]+")
_SCHEDULES = (None, "equal")  # the others are there to be compared with these


@dataclass(frozen=True)
class Speed:
    """One method's decoding attention over `LONG_CONTEXT` tokens.

    Attributes
    ----------
    method : str
        As it was named.
    batch : int
        Sequences.
    rate : float
        Of the bytes, at that context.
    dtype : str
    seconds : float
        Median of one layer.
    speedup : float
        The best full-width kernel's time over it.
    speedup_interval : list of float or None
        95 %.
    baseline : str
        That kernel.
    shape : str
        Whose attention was timed.
    device : str
    source : str
        The file.
    origin : str
        ``given``, or ``shipped`` with kvprof.
    created : str
        UTC.
    warnings : list of str
        What its own run warned of.
    """

    method: str
    batch: int
    rate: float
    dtype: str
    seconds: float
    speedup: float
    speedup_interval: list[float] | None
    baseline: str
    shape: str
    device: str
    source: str
    origin: str
    created: str
    warnings: list[str]

    def described(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**vars(self), "context": LONG_CONTEXT}


def load_speeds(paths: Sequence[Path] = ()) -> list[Speed]:
    """Return the speeds that ship, then those of results of ``kvprof bench``.

    Parameters
    ----------
    paths : sequence of Path
        Results, or folders of such runs.

    Raises
    ------
    UsageError
        For another kind of result, and one that decoded nothing over `LONG_CONTEXT` tokens.
    FailedError
        When one is damaged.
    """
    folder = files("kvprof") / "assets" / "bench"
    found: list[Speed] = []
    with as_file(folder) as unpacked:
        for path in sorted(unpacked.glob("*.json")):
            found += _speeds(read_result(path), path.name, "shipped")
    for path in paths:
        result = read_result(path)
        if result["kind"] != "bench":
            raise UsageError(
                f"--speeds {path}: a result of kind {result['kind']} has no speeds of attention; "
                "kvprof bench measures them"
            )
        with what_was_read(path):
            own = _speeds(result, path.name, "given")
        if not own:
            raise UsageError(
                f"--speeds {path} has no decoding over {LONG_CONTEXT:,} tokens beside full width; "
                "measure it with kvprof bench --seq 100k"
            )
        found += own
    return found


def _speeds(result: Mapping[str, Any], source: str, origin: str) -> list[Speed]:
    environment = result["environment"]
    gpus = environment["gpus"]
    on_cpu = str(result["inputs"]["device"]).startswith("cpu") or not gpus
    device = environment["cpu"]["model"] if on_cpu else gpus[0]["name"]
    return [
        Speed(
            row["method"],
            int(row["batch"]),
            float(row["rate"]),
            row["dtype"],
            median(row["seconds"]),
            float(row["speedup"]),
            row.get("speedup_interval"),
            str(row["baseline"]),
            result["data"]["shape"]["name"],
            str(device),
            source,
            origin,
            result["created"],
            list(result["warnings"]),
        )
        for row in result["data"]["rows"]
        if row["phase"] == "decode"
        and row["seq"] == LONG_CONTEXT
        and row["schedule"] in _SCHEDULES
        and row["rate"] is not None
        and row["speedup"] is not None  # wrong results have none
    ]


def speeds_of(
    label: str, rate: float, dtype: str, speeds: Sequence[Speed]
) -> tuple[list[Speed], str | None]:
    """Return what was measured of a method at a rate, by batch, or why nothing was.

    Parameters
    ----------
    label : str
        The method, with its own options as they were written.
    rate : float
        Of the bytes, at `LONG_CONTEXT` tokens.
    dtype : str
        Of the run.
    speeds : sequence of Speed
        A later one of the same batch overrules.

    Returns
    -------
    speeds : list of Speed
    reason : str or None
        None where there are some.
    """
    own = [speed for speed in speeds if _same(speed.method, label)]
    alike = [speed for speed in own if speed.dtype == dtype]
    near = {speed.batch: speed for speed in alike if abs(speed.rate - rate) <= _NEAR}
    if near:
        return [near[batch] for batch in sorted(near)], None
    if alike:
        rates = " and ".join(sorted({f"{speed.rate:.3f}" for speed in alike}))
        return [], f"measured at a rate of {rates} alone, and this row saves {rate:.3f}"
    if own:
        dtypes = " and ".join(sorted({speed.dtype for speed in own}))
        return [], f"measured in {dtypes} alone, and this run's dtype is {dtype}"
    return [], "no record has a speed of it"


def _same(timed: str, label: str) -> bool:
    """Whether a method that was timed is a row's: where the search chose bits, the rate says which.

    ``per-token:bits=4`` is a point of the row ``per-token``.
    """
    if timed == label:
        return True
    parts, row = _parts(timed), _parts(label)
    if parts is None or row is None or parts[0] != row[0]:
        return False
    beside = [option for option in parts[1] if not _BITS.fullmatch(option)]
    chosen_here = not any(option.startswith("bits=") for option in row[1])
    return chosen_here and len(beside) < len(parts[1]) and sorted(beside) == sorted(row[1])


def _parts(label: str) -> tuple[str, list[str]] | None:
    """Return method and options; None for a name that is no method's, such as a plan file's."""
    try:
        entries = method_entries(label)
    except UsageError:
        return None
    return entries[0][1:] if len(entries) == 1 else None


def attach_speeds(data: dict[str, Any], speeds: Sequence[Speed]) -> None:
    """Put measured speeds beside each method of a frontier, at its largest rate.

    Parameters
    ----------
    data : dict
        Of a frontier's result; its methods get ``speeds`` and ``speed_reason``.
    speeds : sequence of Speed
        From `load_speeds`.
    """
    for method in data["methods"]:
        found: list[Speed] = []
        best = [one for one in method["points"] if one["rate"] == method["max_rate"]]
        if not best:
            reason: str | None = "no rate of it meets the target"
        elif (kernel := best[0].get("kernel")) is None:
            reason = "its bytes at this context are not in the record"
        elif kernel["reason"] is not None:
            reason = f"no kernel runs it here: {kernel['reason']}"
        else:
            at = best[0]["long_context"]["rate"]
            found, reason = speeds_of(method["label"], at, data["dtype"], speeds)
        method["speeds"] = [speed.described() for speed in found]
        method["speed_reason"] = reason
