"""The plan that a method is on a shape, with its widths; what no kernel runs is refused.

Whatever is measured is a plan (`kvprof.methods.plan`): which columns of which tokens are stored
with how many bits is read off it, and its bytes are `kvprof.methods.accounting`'s. A shape without
weights has nothing to calibrate: there ``fdc``, ``kq``, ``uniform``, ``palu``, ``palu-folded`` and
``tale`` are plans of recorded or equal widths (`kvprof.benchmark.ranks`), whose bases are columns
of the identity, and ``kq-wf`` hands out bits to singular values that fall alike in every head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvprof.benchmark.methods import LOW_RANK, PLANNED, Method, parse_method
from kvprof.benchmark.ranks import (
    Widths,
    check_heads,
    measured_layer,
    ranks_from,
    resampled,
    resampled_layers,
    stored_widths,
)
from kvprof.benchmark.shapes import Shape, has_weights, layout_of
from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP, widened
from kvprof.kernels.segments.codes import Bits
from kvprof.kernels.segments.layout import SideKind, width_of
from kvprof.methods.accounting import compression_ratio, layer_bytes, paper_rate
from kvprof.methods.family import MethodInputs, PlanFamily, plan_for_rate
from kvprof.methods.kvtc import AT_REST
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.plan_files import load_plan
from kvprof.methods.quantisers import per_token
from kvprof.methods.registry import calibration_needs, on_top, plan_family
from kvprof.methods.storage import ROW_RMS, Levels
from kvprof.methods.tale import PUBLISHED_BITS, PUBLISHED_SHARE, RECENT, SINK
from kvprof.methods.tokens import segments
from kvprof.models.layout import ModelLayout
from kvprof.models.load import load_model
from kvprof.moments.calibrator import CalibrationOptions, Calibrator, uncalibrated_family
from kvprof.progress import Progress, silent
from kvprof.runtime.backends.layer import LayerSpec
from kvprof.runtime.backends.route import storage_of, why_not
from kvprof.runtime.backends.segment_store import columns_of, shared_columns, stored_as

__all__ = [
    "Part",
    "at_rate",
    "layer_widths",
    "low_rank_plan",
    "make_methods",
    "method_widths",
    "named_plans",
    "stored_bytes",
    "stored_parts",
    "stored_plan",
]

#: Of which a shape without weights is timed too: what a kernel does follows from the bits.
_BITS_ALONE = "kq-wf"
#: Columns of one token that share a scale where a plan does not say how many.
_COLUMNS = 32


def layer_widths(method: Method, shape: Shape, rate: float, layers: int) -> list[Widths]:
    """Return the widths of a low-rank method in every layer of a shape without weights.

    Parameters
    ----------
    method : Method
        ``fdc`` and ``kq``, whose layers are unlike, or ``uniform``.
    shape : Shape
    rate : float
    layers : int

    Raises
    ------
    UsageError
        For a rate out of reach.
    """
    if method.kind == "uniform":
        return [_uniform(shape, rate)] * layers
    return resampled_layers(shape, layers, rate, method.kind, kinds=method.kinds)


def method_widths(
    method: Method, shape: Shape, rate: float, ranks: str | None = None
) -> Widths | None:
    """Return the widths of a method's stored heads; None for FP8 and full width.

    Parameters
    ----------
    method : Method
        With a plan where its kind is ``plan``.
    shape : Shape
    rate : float
    ranks : str, optional
        A file with the widths of every KV head; it holds for all low-rank methods but ``uniform``.

    Raises
    ------
    UsageError
        For a rate out of reach, or ranks of another shape.
    """
    if method.plan is not None:
        words = f"the plan {method.name} ({method.plan.method})"
        if method.registered:
            words = f"as kvprof plan makes {method.name}"
        return stored_widths(method.plan, words)
    if method.kind == "uniform":
        return _uniform(shape, rate)
    if method.kind in LOW_RANK:
        if ranks is not None:
            return ranks_from(ranks, shape)
        return resampled(shape, rate, method.kind, kinds=method.kinds)
    if method.kind in ("palu", "palu-folded"):
        return _latents(method, shape, rate)
    if method.kind == PLANNED:
        raise _needs_weights(method, shape)
    return _tale(method, shape) if method.kind == "tale" else None


def _needs_weights(method: Method, shape: Shape) -> UsageError:
    return UsageError(
        f"{method.name} has to be calibrated, and {shape.name} is a shape without weights; name "
        "a model that has them (--model reference), or a plan of one of this shape (--plan FILE)"
    )


def _tale(method: Method, shape: Shape) -> Widths:
    """Return the widths of TALE's middle level, which holds nine tenths of the tokens."""
    full = (shape.head_dim,) * shape.num_kv_heads
    middle = tuple(widened(round((1 - PUBLISHED_SHARE) * width)) for width in full)
    widths = Widths(full, middle, "")
    ratio = compression_ratio(paper_rate(_tale_plan(method, shape, widths)))
    source = (
        "TALE's published setting whatever the rate asked for (here its middle level); the paper "
        f"counts {ratio:.2f}× for it, without scales, zero points and sinks"
    )
    return Widths(full, middle, source)


def _uniform(shape: Shape, rate: float) -> Widths:
    width = min(shape.head_dim, max(STEP, round((1 - rate) * shape.head_dim / STEP) * STEP))
    whole = (width,) * shape.num_kv_heads
    return Widths(whole, whole, f"uniform width {width}")


def _latents(method: Method, shape: Shape, rate: float) -> Widths:
    """Return the latent widths of Palu's groups: the same for all, multiples of 32."""
    asked = method.heads or shape.num_kv_heads
    most = min(asked, 512 // shape.head_dim)
    group = max(size for size in range(1, most + 1) if shape.num_kv_heads % size == 0)
    step = 2 * STEP
    full = group * shape.head_dim
    width = min(full, max(step, round((1 - rate) * full / step) * step))
    count = shape.num_kv_heads // group
    words = f"uniform latents of {width}, one per {group} KV heads"
    warnings: tuple[str, ...] = ()
    if group != asked:
        warnings = (
            f"{method.name}: {group} instead of {asked} KV heads share a latent (of "
            f"{shape.num_kv_heads}, and a latent is at most 512 wide)",
        )
    return Widths((width,) * count, (width,) * count, words, warnings)


# --- The plan that a method is on a shape.


def stored_plan(method: Method, shape: Shape, widths: Widths | None) -> Plan:
    """Return the plan that a method is on a shape: what is stored, and whose bytes are counted.

    Parameters
    ----------
    method : Method
    shape : Shape
    widths : Widths or None
        From `method_widths`.

    Raises
    ------
    UsageError
        For quantisers and evictors that cannot come on top of it.
    """
    if method.plan is not None:
        plan = method.plan
        if len(plan.layers) == shape.layers:
            return plan
        # Of more or fewer layers than the plan's (--layers) all are taken to be the measured one.
        layer = measured_layer(plan)
        windows = [facts.sliding_window for facts in layout_of(shape).layers]
        return replace(plan, layers=tuple(replace(layer, sliding_window=own) for own in windows))
    if method.kind in ("full", "fp8"):
        inputs = MethodInputs(layout_of(shape), shape.name)
        # A scale is in the products that there are: it changes no byte and no launch's size.
        plain = {"scale": "none"} if method.kind == "fp8" else {}
        family = plan_family(method.kind, inputs, **plain)
        plan = family.build(family.settings[0])
    elif widths is None:
        raise _needs_weights(method, shape)
    elif method.kind == "tale":
        plan = _tale_plan(method, shape, widths)
    else:
        plan = low_rank_plan(
            method.kind,
            shape,
            widths,
            pre_rope=method.kind == "palu",
            fold_keys=method.kind.startswith("palu"),
        )
    if not method.modifiers:
        return plan
    family = PlanFamily(method.kind, "rate", lambda _: plan)
    return on_top(method.name, method.kind, method.modifiers, family, {}).build(0.0)


def stored_bytes(
    method: Method,
    shape: Shape,
    widths: Widths | None,
    *,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes that a method's plan stores of the measured layer, for the whole batch.

    Parameters
    ----------
    method : Method
    shape : Shape
    widths : Widths or None
        From `method_widths`.
    batch, tokens : int
    dtype : torch.dtype
        Of what is not quantised.
    """
    plan = stored_plan(method, shape, widths)
    stored = layer_bytes(plan, measured_layer(plan), tokens, itemsize=dtype.itemsize)
    return batch * stored.total


def _tale_plan(method: Method, shape: Shape, widths: Widths) -> Plan:
    """Return TALE's plan: ranks of V by level, keys whole."""
    plan = low_rank_plan("tale", shape, widths, fold_values=False)
    layers = []
    for layer in plan.layers:
        keys = tuple(
            HeadGroup(g.first, 1, g.head_dim, (g.head_dim,) * 2) for g in layer.keys.groups
        )
        values = tuple(
            replace(
                group,
                ranks=(group.rank, group.head_dim),
                down=_basis(group.head_dim, group.head_dim),
                up=_basis(group.head_dim, group.head_dim),
            )
            for group in layer.values.groups
        )
        layers.append(
            replace(
                layer,
                keys=KeyPlan(Placement.NONE, keys),
                values=ValuePlan(values, fold_up=True),
            )
        )
    return replace(
        plan,
        layers=tuple(layers),
        levels=Levels(SINK, (1 - RECENT, RECENT)),
        quantiser=per_token(PUBLISHED_BITS) if method.quantised_levels else None,
        lazy=True,
    )


def low_rank_plan(
    name: str,
    shape: Shape,
    widths: Widths,
    *,
    pre_rope: bool = False,
    fold_keys: bool = False,
    fold_values: bool = True,
    online: bool = False,
) -> Plan:
    """Return a plan of the same widths in every layer of a shape.

    Parameters
    ----------
    name : str
        Of the method.
    shape : Shape
    widths : Widths
        Per KV head, or per group of as many as share a latent.
    pre_rope : bool
        Keys are compressed before RoPE, where the shape has it.
    fold_keys, fold_values : bool
        Whether projections make the latents.
    online : bool
        Bases are a request's own (the strawman).
    """
    heads = shape.num_kv_heads // len(widths.keys)

    def groups(kept: Sequence[int]) -> tuple[HeadGroup, ...]:
        return tuple(
            HeadGroup(
                number * heads,
                heads,
                shape.head_dim,
                (rank,),
                *((None,) * 2 if online else (_basis(heads * shape.head_dim, rank),) * 2),
            )
            for number, rank in enumerate(kept)
        )

    before = pre_rope and shape.rope.kind != "none"
    keys = KeyPlan(
        Placement.PRE_ROPE if before else Placement.POST_ROPE,
        groups(widths.keys),
        fold_down=fold_keys and not online,
    )
    folded = fold_values and not online
    values = ValuePlan(groups(widths.values), fold_down=folded, fold_up=folded)
    layers = tuple(
        LayerPlan(keys, values, facts.sliding_window) for facts in layout_of(shape).layers
    )
    return Plan(name, shape.name, layers, online_bases=online)


@cache
def _basis(width: int, rank: int) -> Tensor:
    return torch.eye(width, rank)


@dataclass(frozen=True)
class Part:
    """Tokens of a sequence that are stored alike, as a kernel over segments takes them.

    Attributes
    ----------
    tokens : int
    keys, values : tuple of int
        Widths per stored head.
    key_bits, value_bits : int, "fp8", "uniform-rms" or None
        None for values of the run's dtype.
    columns : int or None
        That share a scale; None for a token's whole row.
    kinds : tuple of (SideKind, SideKind)
        Per stored head what its keys and values are like: widths, or bits by column.
    """

    tokens: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    key_bits: Bits = None
    value_bits: Bits = None
    columns: int | None = _COLUMNS
    kinds: tuple[tuple[SideKind, SideKind], ...] = ()


def stored_parts(plan: Plan, tokens: int) -> list[Part]:
    """Return how the measured layer of a plan stores a sequence, oldest tokens first.

    Parameters
    ----------
    plan : Plan
    tokens : int

    Raises
    ------
    UsageError
        When the sequence is too short for the plan's levels.
    """
    layer, quantiser = measured_layer(plan), plan.quantiser
    found = []
    levels = set()
    for segment in segments(plan, layer, tokens):
        if segment.stop > plan.levels.sink:
            levels.add(segment.level)
        applied = quantiser if segment.quantised else None
        key_bits = stored_as(applied, applied.keys if applied else None, segment.level)
        value_bits = stored_as(applied, applied.values if applied else None, segment.level)
        columns = _COLUMNS if applied is None else shared_columns(applied)
        sides: list[tuple[SideKind, ...]] = []
        for bits, side, own in (
            (key_bits, applied.keys if applied else None, layer.keys.groups),
            (value_bits, applied.values if applied else None, layer.values.groups),
        ):
            by_column = bits in ROW_RMS
            sides.append(
                tuple(
                    columns_of(group, side, segment.level)
                    if by_column
                    else group.ranks[segment.level]
                    for group in own
                )
            )
        keys, values = (tuple(map(width_of, side)) for side in sides)
        kinds = tuple(zip(*sides, strict=True))
        found.append(Part(segment.tokens, keys, values, key_bits, value_bits, columns, kinds))
    shares = plan.levels.shares
    if len(shares) > 1 and len(levels) < sum(share > 0 for share in shares):
        raise UsageError(
            f"{plan.method}: its levels need more than {tokens:,} tokens: {plan.levels.sink} "
            f"sinks, and of the others {' and '.join(f'{share:.0%}' for share in shares)}"
        )
    return found


# --- Making what was asked for.


def at_rate(family: PlanFamily, rate: float, tokens: int, itemsize: int) -> Plan:
    """Return a family's plan at a rate; a method with one setting has its own rate."""
    wanted = 0.0 if len(family.settings) == 1 else rate
    return plan_for_rate(family, wanted, tokens, itemsize=itemsize)


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
    seed: int = 0,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[tuple[Method, Widths | None]]:
    """Return every method with its widths on a shape, each one that the kernels run.

    Parameters
    ----------
    names : sequence of str
        See `parse_method`, or of `plans`.
    shape : Shape
    model : str
        Whose shape it is; where it has weights, methods that need them are calibrated on it as
        ``kvprof plan`` does.
    rate : float
    ranks : str or None
        See `method_widths`.
    plans : mapping
        Files of saved plans by name.
    device, dtype
        What the kernels shall run on, and in.
    tokens : int
        Context at which the rate is counted.
    seed : int
        Of the calibration's random tokens.
    progress : Progress
    should_stop : callable

    Raises
    ------
    UsageError
        For what cannot be made here, or what no kernel runs, with why.
    CalibrationInterrupted
        When `should_stop` said so.
    """
    asked = [
        Method(name, PLANNED, plan=_read(plans[name], shape))
        if name in plans
        else parse_method(name)
        for name in names
    ]
    needs = {
        method.name: calibration_needs(method.registered, **dict(method.options))
        for method in asked
        if method.registered
    }
    for method in asked:
        if method.registered == "kvtc":
            raise UsageError(f"{method.name} cannot be timed: {AT_REST}")
    calibrated = [method for method in asked if needs.get(method.name) is not None]
    calibrator: Calibrator | None = None
    weights = has_weights(model)
    for method in calibrated if not weights else ():
        if method.registered != _BITS_ALONE:
            raise _needs_weights(method, shape)
    if calibrated and weights:
        loaded = load_model(model, device=str(device), dtype=str(dtype).removeprefix("torch."))
        calibrator = Calibrator(
            loaded, CalibrationOptions(seed=seed), progress=progress, should_stop=should_stop
        )
        for method in calibrated:
            calibrator.expect(method.registered, **dict(method.options))
    made: list[tuple[Method, Widths | None]] = []
    for method in asked:
        if method.registered:
            if needs[method.name] is not None and calibrator is None:
                family = _without_weights(method, shape)
            elif needs[method.name] is None or calibrator is None:
                inputs = MethodInputs(layout_of(shape), shape.name)
                family = plan_family(method.registered, inputs, **dict(method.options))
            else:
                family = calibrator.family(method.registered, **dict(method.options))
            plan = at_rate(family, rate, tokens, dtype.itemsize)
            check_heads(method.name, plan, shape)
            method = replace(method, plan=plan)
        if method.plan is not None:
            spec = _spec(stored_plan(method, shape, None), shape, device, dtype)
            method = replace(method, storage=storage_of(spec))
        widths = method_widths(method, shape, rate, ranks)
        if widths is not None and method.registered == _BITS_ALONE and not weights:
            said = (
                f"{method.name}: {shape.name} is a shape without weights, so its bits by column "
                "are those of singular values that fall alike in every head"
            )
            widths = replace(widths, warnings=(*widths.warnings, said))
        if method.kind == PLANNED or method.modifiers:
            _refuse(method, _spec(stored_plan(method, shape, widths), shape, device, dtype))
        made.append((method, widths))
    return made


@dataclass(frozen=True)
class _Laid:
    """A layout without weights."""

    layout: ModelLayout
    fingerprint: str


def _without_weights(method: Method, shape: Shape) -> PlanFamily:
    """Return plans of one layer, which stands for all, on bases that mean nothing."""
    one = replace(shape, layers=1, sliding_window=None, window_pattern="F")
    laid = _Laid(layout_of(one), shape.name)
    family = uncalibrated_family(laid, method.registered, **dict(method.options))
    assert family is not None  # kvprof's own, of which the rate tells the bytes
    return family


def named_plans(files: Sequence[str]) -> dict[str, str]:
    """Return files of saved plans by their names, as which they stand among methods.

    Raises
    ------
    UsageError
        When two files have one name.
    """
    found: dict[str, str] = {}
    for file in files:
        name = Path(file).name
        if name in found:
            raise UsageError(f"--plan {file}: two plans are called {name}; rename one")
        found[name] = file
    return found


def _read(path: str, shape: Shape) -> Plan:
    plan = load_plan(Path(path).expanduser())
    check_heads(f"--plan {Path(path).name}", plan, shape)
    return plan


def _spec(plan: Plan, shape: Shape, device: torch.device, dtype: torch.dtype) -> LayerSpec:
    """Return the layer that is measured as the kernels are asked about it."""
    facts = replace(layout_of(shape).layers[0], sliding_window=None)
    return LayerSpec(plan, measured_layer(plan), facts, device, dtype)


def _refuse(method: Method, spec: LayerSpec) -> None:
    """Refuse a plan that the kernels do not run, in the runtime's own words."""
    if method.kind == "palu-folded":
        return  # the benchmark's own: latents that no model with RoPE could fold
    reason = why_not(spec)
    if reason is not None:
        raise UsageError(f"{method.name}: no kernel can run it: {reason}")
