"""What methods and rates of a load are called in its records, and who is held against whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LoadMethod", "baseline_of", "load_case", "load_methods", "tps_of"]

_TP = " tp="


def load_case(method: str, rate: float) -> str:
    """Return the name of a method at a rate, in requests a second."""
    return f"{method} @ {rate:g}/s"


@dataclass(frozen=True)
class LoadMethod:
    """A method on so many GPUs."""

    name: str  # as the user wrote it
    tp: int  # GPUs of tensor parallelism
    #: What records call it: its name, and `NAME tp=N` in a load with several numbers of GPUs.
    label: str


def load_methods(names: Sequence[str], tps: Sequence[int]) -> list[LoadMethod]:
    """Return the methods of a load, for each number of GPUs those in the order of their names."""
    several = len(tps) > 1
    return [
        LoadMethod(name, tp, f"{name}{_TP}{tp}" if several else name)
        for tp in tps
        for name in names
    ]


def baseline_of(label: str, baseline: str) -> str:
    """Return what a method is held against: of a load with several numbers of GPUs, on as many."""
    name, held, _ = baseline.rpartition(_TP)
    _, own, tp = label.rpartition(_TP)
    return f"{name}{_TP}{tp}" if held and own else baseline


def tps_of(inputs: Mapping[str, Any]) -> list[int]:
    """Return a load's numbers of GPUs, from the ``inputs`` of its result."""
    known = inputs.get("tp") or 1
    return [known] if isinstance(known, int) else list(known)
