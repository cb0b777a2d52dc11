"""Methods by name: those of the papers, quantisers, evictors, combinations, and one's own.

A combination is written ``method+quantiser``, ``method+evictor`` or ``method-4bit`` (per-token
integers, 32 columns sharing a scale). The published ones are listed, any other works as well.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvprof.analysis.linalg import few_threads
from kvprof.errors import FailedError, UsageError
from kvprof.methods.accounting import dim_rate, rate
from kvprof.methods.evictors import EVICTORS, evicted, evictor_family
from kvprof.methods.family import CalibrationNeeds, MethodInputs, PlanFamily, plan_for_rate
from kvprof.methods.fdc import fdc
from kvprof.methods.fp8 import fp8
from kvprof.methods.full import full
from kvprof.methods.kq import kq
from kvprof.methods.libraries import LIBRARIES, load_library
from kvprof.methods.named import ENTRY_POINTS, method_names
from kvprof.methods.palu import palu
from kvprof.methods.plan import Plan
from kvprof.methods.quantisers import QUANTISERS, quantised, quantiser_family
from kvprof.methods.strawman import strawman
from kvprof.methods.svd_alone import svd_k, svd_kv, svd_v
from kvprof.methods.tale import tale, tale_kivi
from kvprof.methods.zack import zack

__all__ = [
    "METHODS",
    "calibration_needs",
    "plan_family",
]

#: One function per name in `kvprof.methods.named.OWN`; its keyword-only arguments are its options.
METHODS: dict[str, Callable[..., PlanFamily]] = {
    "full": full,
    "fp8": fp8,
    "fdc": fdc,
    "zack": zack,
    "palu": palu,
    "tale": tale,
    "kq": kq,
    "svd-kv": svd_kv,
    "svd-k": svd_k,
    "svd-v": svd_v,
    "strawman": strawman,
    # Its levels have bits of their own, which no quantiser on top could give.
    "tale+kivi": tale_kivi,
    **{name: partial(quantiser_family, name) for name in QUANTISERS},
    **{name: partial(evictor_family, name) for name in EVICTORS},
}

# FDC's KF-F and KF-P evict first (FDC §6); ZACK's Keyformer-Z compresses first.
_ORDERS = {"fdc": "evict_first", "palu": "evict_first"}
_RANDOM = CalibrationNeeds("random:8k")
_TEXT = CalibrationNeeds("calibration")
_NEEDS = {
    "fdc": _RANDOM, "zack": _RANDOM, "kq": _RANDOM,
    "svd-kv": _RANDOM, "svd-k": _RANDOM, "svd-v": _RANDOM,
    "palu": replace(_TEXT, pre_rope=True), "tale": _TEXT, "tale+kivi": _TEXT,
}  # fmt: skip
_ALL_HEADS = 2**20
_BIT_SUFFIX = re.compile(r"(.+)-([2348])bit")


def plan_family(name: str, inputs: MethodInputs, **options: Any) -> PlanFamily:
    """Return the plans of a method or a combination.

    Parameters
    ----------
    name : str
        A method's name, or names joined by ``+``, with ``-2bit`` … ``-8bit`` at the end.
    inputs : MethodInputs
    **options
        Of the method; for a combination also ``bits`` of its quantiser, and ``keep``, the share of
        tokens that its evictor keeps (by default both halves keep the same share).

    Raises
    ------
    UsageError
        For an unknown name, or an option that the method does not have.
    LackingError
        When it quantises with a library that is not installed.
    """
    installed = _installed()
    function = METHODS.get(name)
    if function is None and name in installed:
        function = _load(installed[name])
    if function is not None:
        _refuse_unknown(name, function, options)
        with few_threads():
            return function(inputs, **options)
    base, modifiers = _parts(name)
    if not modifiers:
        raise _unknown(name)
    return _combined(name, base, modifiers, inputs, options)


def calibration_needs(name: str, **options: Any) -> CalibrationNeeds | None:
    """Return what a method or combination has to be calibrated with; None where nothing.

    An installed method says so by an attribute ``needs`` of its function, a `CalibrationNeeds`;
    without one it is given moments of random tokens.

    Parameters
    ----------
    name : str
    **options
        Of the method; ``heads`` decides which heads' moments are joined.

    Raises
    ------
    UsageError
        For an unknown name.
    LackingError
        When it quantises with a library that is not installed: known before anything is run.
    """
    for part in name.split("+"):
        if part in LIBRARIES:
            load_library(part)
    if name in _installed():
        needs: CalibrationNeeds | None = getattr(_load(_installed()[name]), "needs", _RANDOM)
        return needs
    if name not in METHODS:
        base, modifiers = _parts(name)
        if not modifiers:
            raise _unknown(name)
        return calibration_needs(base, **options)
    if name not in _NEEDS:
        return None
    needs = _NEEDS[name]
    heads = options.get("heads", _signature(METHODS[name]).get("heads", 1))
    if heads == 1:
        return needs
    # 0 is all heads of a layer; no layer has more than this.
    return replace(needs, joint_heads=heads or _ALL_HEADS)


def _parts(name: str) -> tuple[str, list[tuple[str, int | None]]]:
    """Split a name into its method and what comes on top, with the bits where they are told."""
    modifiers: list[tuple[str, int | None]] = []
    match = _BIT_SUFFIX.fullmatch(name)
    if match:
        name = match[1]
        modifiers.append(("per-token", int(match[2])))
    base, *rest = name.split("+")
    unknown = [part for part in rest if part not in QUANTISERS and part not in EVICTORS]
    if unknown or base not in {*METHODS, *_installed()}:
        return base, []
    return base, [*((part, None) for part in rest), *modifiers]


def _combined(
    name: str,
    base: str,
    modifiers: list[tuple[str, int | None]],
    inputs: MethodInputs,
    options: dict[str, Any],
) -> PlanFamily:
    own = {key: value for key, value in options.items() if key not in ("bits", "keep")}
    family = plan_family(base, inputs, **own)
    if "keep" in options and not any(part in EVICTORS for part, _ in modifiers):
        raise UsageError(f"{name} has no option keep: it evicts nothing")
    if "bits" in options and not any(p in QUANTISERS and b is None for p, b in modifiers):
        raise UsageError(f"{name} has no option bits")
    # Evict before quantising: the halves of the rate are shared out on unquantised plans.
    for part, bits in sorted(modifiers, key=lambda modifier: modifier[0] in QUANTISERS):
        if part in EVICTORS:
            order = _ORDERS.get(base, "compress_first")
            family = _evicting(family, part, order, options.get("keep"))
        else:
            family = _quantising(family, part, bits or options.get("bits") or QUANTISERS[part][2])
    # What cannot be combined is found out now, not when the first plan is wanted.
    family.build((family.settings or family.bounds)[0])
    return replace(family, method=name)


def _quantising(family: PlanFamily, part: str, bits: int) -> PlanFamily:
    """Quantise the ranks of the rate asked for; the rate reached is its own, higher one."""

    def at_rate(wanted: float, tokens: int, itemsize: int) -> Plan:
        return quantised(plan_for_rate(family, wanted, tokens, itemsize=itemsize), part, bits)

    return PlanFamily(
        family.method,
        family.knob,
        lambda value: quantised(family.build(value), part, bits),
        family.bounds,
        family.settings,
        at_rate,
        family.finish,
    )


def _evicting(family: PlanFamily, part: str, order: str, keep: float | None) -> PlanFamily:
    """Evict too; both halves keep the same share, √(1 - rate) each."""
    if keep is not None and not 0 < keep <= 1:
        raise UsageError(f"keep: {keep:g} is no share of the tokens")

    def build(value: float) -> Plan:
        plan = family.build(value)
        return evicted(plan, part, keep if keep is not None else 1.0 - dim_rate(plan), order)

    def shared(total: float, tokens: int, itemsize: int) -> Plan:
        share = keep if keep is not None else (1.0 - total) ** 0.5
        rest = 1.0 - (1.0 - total) / share
        if rest < -1e-12:
            raise UsageError(
                f"{family.method}+{part}: keeping {share:g} of the tokens alone gives more than "
                f"the rate {total:g}"
            )
        half = plan_for_rate(family, max(0.0, rest), tokens, itemsize=itemsize)
        return evicted(half, part, share, order)

    def at_rate(wanted: float, tokens: int, itemsize: int) -> Plan:
        # Scores are stored too: both halves give a little more until the bytes are what was asked.
        total = wanted
        while True:
            plan = shared(total, tokens, itemsize)
            lacking = wanted - rate(plan, tokens, itemsize=itemsize)
            if lacking <= 1e-9:
                return plan
            total += max(lacking, 1e-4)
            if total >= 1:
                raise UsageError(f"{family.method}+{part} does not reach the rate {wanted:g}")

    return PlanFamily(
        family.method, family.knob, build, family.bounds, family.settings, at_rate, family.finish
    )


def _installed() -> dict[str, EntryPoint]:
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    for name in points:
        if name in METHODS:
            raise FailedError(
                f"the installed method {name} ({points[name].value}) has the name of one of "
                "kvprof's own; rename it, or uninstall its package"
            )
    return points


def _load(point: EntryPoint) -> Callable[..., PlanFamily]:
    try:
        function = point.load()
    except Exception as cause:  # whatever somebody's package does when it is imported
        raise FailedError(
            f"method {point.name} ({point.value}) cannot be loaded: {cause}"
        ) from cause
    if not callable(function):
        raise FailedError(f"method {point.name}: {point.value} is no function")
    loaded: Callable[..., PlanFamily] = function
    return loaded


def _refuse_unknown(
    name: str, function: Callable[..., PlanFamily], options: dict[str, Any]
) -> None:
    known = _signature(function)
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise UsageError(f"{name} has no option {option}: {has}")


def _signature(function: Callable[..., PlanFamily]) -> dict[str, Any]:
    """Return a method's options and their defaults."""
    return {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _unknown(name: str) -> UsageError:
    return UsageError(f"--method: {name!r} is unknown; choose from {', '.join(method_names())}")
