"""The methods that are measured: each is a plan, and what the kernels store it in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from kvprof.benchmark.plans import (
    Widths,
    check_heads,
    layer_words,
    measured_layer,
    of_shape,
    stored_widths,
)
from kvprof.benchmark.shape_plans import Asked, ShapePlan, parse_method, shape_plan
from kvprof.benchmark.shapes import Shape, has_weights, layout_of
from kvprof.errors import UsageError
from kvprof.methods.accounting import SERVED_BYTES, full_layer_bytes, layer_bytes
from kvprof.methods.family import PlanFamily, plan_for_rate
from kvprof.methods.kvtc import AT_REST
from kvprof.methods.named import ALWAYS
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.plan_files import load_plan
from kvprof.models.load import load_model
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.moments.uncalibrated import uncalibrated_family
from kvprof.progress import Progress, silent
from kvprof.runtime.backends.route import storage_of
from kvprof.runtime.backends.support import LayerSpec, why_not

__all__ = ["FOLDED", "Method", "laid_method", "make_methods", "named_plans", "stored_method"]

#: The benchmark's own: latents that KV heads share and projections make, in spite of RoPE.
FOLDED = "palu-folded"
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Method:
    """One method as it is measured."""

    name: str  # as written, for example `fdc-4bit` or `tale:bits=none`; of a saved plan its file's
    base: str  # the method, without what comes on top; empty for a saved plan
    plan: Plan  # of as many layers as the shape, one of which is measured
    #: What it lies in: `full`, or `kvprof.runtime.backends.layer.KernelLayer.form`; `strawman`
    #: where bases are a request's own.
    form: str
    source: str = ""  # where its widths come from, in words that a reader of the result sees
    warnings: tuple[str, ...] = ()  # what had to be changed to run it
    balanced: bool = True  # whether the work is cut by cost; composed runs may leave that out

    @cached_property
    def layer(self) -> LayerPlan:
        """The layer that is measured."""
        return measured_layer(self.plan)

    @cached_property
    def kept(self) -> Widths:
        """The widths of its stored heads, full ones too."""
        return stored_widths(self.plan, self.source)

    @cached_property
    def widths(self) -> Widths | None:
        """The widths of its stored heads; None where every head is stored as it is."""
        sides = (*self.layer.keys.groups, *self.layer.values.groups)
        return None if all(group.identity for group in sides) else self.kept

    @property
    def low_rank(self) -> bool:
        """Whether every KV head has widths of its own."""
        return not any(group.identity or group.heads > 1 for group in self.layer.keys.groups)

    @property
    def cut(self) -> bool:
        """Whether the ragged kernels run it, for heads of unlike width."""
        return self.form == "ragged" and self.low_rank

    @property
    def folded(self) -> bool:
        """Whether projections make the keys' latents themselves."""
        return self.layer.keys.fold_down

    def nbytes(self, batch: int, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes that the measured layer stores for a whole batch."""
        return batch * layer_bytes(self.plan, self.layer, tokens, itemsize=dtype.itemsize).total

    def rate(self, tokens: int) -> float:
        """Return the measured layer's rate at a context, as it serves."""
        full = full_layer_bytes(self.layer, tokens, itemsize=SERVED_BYTES)
        return 1 - self.nbytes(1, tokens, torch.bfloat16) / full

    def lacks(self, phase: str) -> str | None:
        """Return why a phase has no row of this method; None where it has one."""
        rebuilt = "it is uncompressed prefill plus one matrix product (rebuilt K and V)"
        if phase == "decode":
            return None
        if self.base == FOLDED or self.form == "latents":
            return rebuilt
        if self.form in ("ragged", "full"):
            return None
        if self.plan.lazy:
            return "it is uncompressed prefill (K and V are compressed afterwards)"
        whose = self.base or "low-rank"
        same = whose if self.widths is not None else "uncompressed"
        return f"it attends to dequantised tokens, so it takes as long as {same} prefill"


def laid_method(
    asked: Asked,
    shape: Shape,
    rate: float,
    *,
    tokens: int,
    ranks: str | None = None,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> Method:
    """Return a method on a shape without weights."""
    found = shape_plan(asked, shape, rate, tokens=tokens, ranks=ranks)
    return stored_method(asked.name, asked.base, found, shape, device=device, dtype=dtype)


def make_methods(
    names: Sequence[str],
    shape: Shape,
    *,
    model: str,
    rate: float,
    ranks: str | None,
    plans: Mapping[str, str],
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    rate_given: bool = False,
    seed: int = 0,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Method]:
    """Return every method on a shape, each one that the kernels run."""
    alone = rate_given and sum(name not in ALWAYS for name in names) == 1
    read = {name: _read(plans[name], shape) for name in names if name in plans}
    asked = {name: parse_method(name) for name in names if name not in plans}
    for one in asked.values():
        if one.registered == "kvtc":
            raise UsageError(f"{one.name} cannot be timed: {AT_REST}")

    def planned(one: Asked, family: PlanFamily) -> Plan:
        wanted, sole = (rate, alone) if one.rate is None else (one.rate, True)
        return plan_for_rate(family, wanted, tokens, alone=sole)

    calibrated = [one for one in asked.values() if one.needs_weights] if has_weights(model) else []
    found: dict[str, ShapePlan] = {}
    if calibrated:
        loaded = load_model(model, device=str(device), dtype=str(dtype).removeprefix("torch."))
        for one in calibrated:
            # Before minutes of calibration; of others the plan itself tells, once there is one.
            if early := uncalibrated_family(loaded, one.registered, **dict(one.options)):
                shown = ShapePlan(of_shape(planned(one, early), shape), "")
                stored_method(one.name, one.base, shown, shape, device=device, dtype=dtype)
        calibrator = Calibrator(
            loaded, CalibrationOptions(seed=seed), progress=progress, should_stop=should_stop
        )
        for one in calibrated:
            calibrator.expect(one.registered, **dict(one.options))
        for one in calibrated:
            family = calibrator.family(one.registered, **dict(one.options))
            plan = planned(one, family)
            check_heads(one.name, plan, shape)
            words = layer_words(plan, f"the plan of kvprof plan for {one.name}")
            found[one.name] = ShapePlan(of_shape(plan, shape), words)
    for name, plan in read.items():
        words = layer_words(plan, f"the plan {name} ({plan.method})")
        found[name] = ShapePlan(of_shape(plan, shape), words)
    made = []
    for name in names:
        if name not in found:
            one, own = asked[name], alone and name not in ALWAYS
            found[name] = shape_plan(one, shape, rate, tokens=tokens, ranks=ranks, alone=own)
        base = asked[name].base if name in asked else ""
        made.append(stored_method(name, base, found[name], shape, device=device, dtype=dtype))
    return made


def stored_method(
    name: str,
    base: str,
    found: ShapePlan,
    shape: Shape,
    *,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> Method:
    """Return a plan on a shape with what stores it."""
    plan = found.plan
    if base == FOLDED:
        form = "ragged" if plan.quantiser is None else "segments"
    elif name == "full":
        form = "full"
    else:
        facts = replace(layout_of(shape).layers[0], sliding_window=None)
        spec = LayerSpec(plan, measured_layer(plan), facts, device, dtype)
        if (reason := why_not(spec)) is not None:
            raise UsageError(f"{name}: no kernel can run it: {reason}")
        form = storage_of(spec).form
    return Method(name, base, plan, form, found.source, found.warnings)


def named_plans(files: Sequence[str]) -> dict[str, str]:
    """Return files of saved plans by their names, as which they stand among methods."""
    found: dict[str, str] = {}
    for file in files:
        name = Path(file).name
        if name in found:
            raise UsageError(f"--plan {file}: two plans have the name {name}; rename one")
        found[name] = file
    return found


def _read(path: str, shape: Shape) -> Plan:
    plan = load_plan(Path(path).expanduser())
    check_heads(f"--plan {Path(path).name}", plan, shape)
    return plan
