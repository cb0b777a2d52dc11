"""Methods of somebody's packages: found by entry point, and held to their contract.

What such a function raises or returns is told with the method's name, and never taken for a plan
that it is not: everything that it hands back passes through here.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import torch

from kvprof.analysis.rank_allocation import RankTarget
from kvprof.errors import FailedError, KvprofError
from kvprof.methods.family import CalibrationNeeds, MethodInputs, PlanFamily
from kvprof.methods.named import installed_points
from kvprof.methods.option_types import option_types
from kvprof.methods.plan import Plan
from kvprof.methods.soundness import check_fits

__all__ = ["InstalledMethod", "installed_methods"]


def installed_methods() -> dict[str, "InstalledMethod"]:
    """Return the methods that packages bring, by name; none is loaded for it."""
    return {name: InstalledMethod(point) for name, point in installed_points().items()}


class InstalledMethod:
    """A method behind an entry point.

    Parameters
    ----------
    point : EntryPoint
    """

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        self._words = f"method {point.name} ({point.value})"
        self._function: Callable[..., PlanFamily] | None = None

    @property
    def origin(self) -> str:
        """Where it is loaded from."""
        return self._point.value

    def options(self) -> dict[str, Any]:
        """Return its options and what each takes (`kvprof.methods.option_types`).

        Raises
        ------
        FailedError
            When it cannot be loaded, or takes other arguments than a method's.
        """
        function = self._load()
        with self._named_errors("has arguments that cannot be read"):
            return option_types(function)

    def needs(self, otherwise: CalibrationNeeds) -> CalibrationNeeds | None:
        """Return what it says that it has to be calibrated with.

        Parameters
        ----------
        otherwise : CalibrationNeeds
            Where it says nothing.

        Raises
        ------
        FailedError
            When it cannot be loaded, or says something else.
        """
        needs = getattr(self._load(), "needs", otherwise)
        if needs is None:
            return None
        counts = ("joint_heads", "tokens", "fisher_tokens")
        if not isinstance(needs, CalibrationNeeds) or not (
            isinstance(needs.source, str)
            and isinstance(needs.pre_rope, bool)
            and isinstance(needs.outputs, bool)
            and all(_is_count(getattr(needs, name)) for name in counts)
        ):
            raise FailedError(
                f"{self._words}: needs is {repr(needs)[:120]}; required is a CalibrationNeeds "
                "with a source and counts of 1 or more"
            )
        return needs

    def family(self, inputs: MethodInputs, **options: Any) -> PlanFamily:
        """Return its plans, each of which is looked at as it is made.

        Raises
        ------
        FailedError
            For whatever it raises that is no error of kvprof's, or returns that is no family.
        KvprofError
            What it refuses itself.
        """
        function = self._load()
        with self._named_errors("failed"):
            family = function(inputs, **options)
        self._check_family(family)

        def sound(make: Callable[..., Plan]) -> Callable[..., Plan]:
            def made(*given: Any) -> Plan:
                with self._named_errors("failed"):
                    plan = make(*given)
                self._check_plan(plan, inputs)
                return plan

            return made

        return replace(
            family,
            method=self._point.name,
            build=sound(family.build),
            at_rate=sound(family.at_rate) if family.at_rate else None,
            at_ranks=sound(family.at_ranks) if family.at_ranks else None,
            finish=sound(family.finish) if family.finish else None,
        )

    def _load(self) -> Callable[..., PlanFamily]:
        if self._function is None:
            with self._named_errors("cannot be loaded"):
                self._function = self._point.load()
        if not callable(self._function):
            raise FailedError(f"{self._words} is not a function")
        return self._function

    @contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        """Turn what somebody's code raises into a line that names whose it is."""
        try:
            yield
        except (KvprofError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as cause:  # SystemExit too, which would end kvprof without a word
            said = " ".join(str(cause).split())[:200]
            raise FailedError(
                f"{self._words} {what}: {type(cause).__name__}{f': {said}' if said else ''}"
            ) from cause

    def _check_family(self, family: Any) -> None:
        if not isinstance(family, PlanFamily):
            raise FailedError(f"{self._words} returned {_type_text(family)}, not a PlanFamily")
        functions = (family.build, family.at_rate, family.at_ranks, family.finish)
        complaints = {
            "knob is not a string": isinstance(family.knob, str),
            "build is not a function": callable(family.build),
            "at_rate, at_ranks or finish is not a function": all(
                one is None or callable(one) for one in functions
            ),
            "bounds are not two numbers in ascending order": _are_numbers(family.bounds, 2)
            and family.bounds[0] <= family.bounds[1],
            "settings are not numbers": _are_numbers(family.settings),
            "targets are not RankTargets": isinstance(family.targets, tuple)
            and all(isinstance(one, RankTarget) for one in family.targets),
        }
        for complaint, right in complaints.items():
            if not right:
                raise FailedError(f"{self._words}: its family's {complaint}")

    def _check_plan(self, plan: Any, inputs: MethodInputs) -> None:
        if not isinstance(plan, Plan):
            raise FailedError(f"{self._words} returned {_type_text(plan)}, not a Plan")
        from kvprof.methods.plan_files import check_made

        try:
            check_fits(plan, inputs.layout, inputs.fingerprint)
            check_made(plan.made)
        except (KvprofError, ValueError, TypeError) as cause:
            raise FailedError(f"{self._words} returned an invalid plan: {cause}") from cause
        for index, layer in enumerate(plan.layers):
            for group in (*layer.keys.groups, *layer.values.groups):
                for matrix in (group.down, group.up):
                    if matrix is None:
                        continue
                    if matrix.dtype is not torch.float32 or not bool(matrix.isfinite().all()):
                        raise FailedError(
                            f"{self._words} returned an invalid plan: a basis of layer {index} "
                            "is not finite float32"
                        )


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value >= 1)


def _are_numbers(values: Any, count: int | None = None) -> bool:
    return (
        isinstance(values, tuple)
        and (count is None or len(values) == count)
        and all(isinstance(one, int | float) and math.isfinite(one) for one in values)
    )


def _type_text(value: Any) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"
