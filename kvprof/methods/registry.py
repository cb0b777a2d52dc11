"""Methods by name: those of the papers, quantisers, evictors, combinations, and one's own.

A combination is written ``method+quantiser``, ``method+evictor`` or ``method-4bit`` (per-token
integers; ``-4bit-g64`` shares a scale among 64 columns, ``-4bit-row`` among a token's whole row;
``-k8v4`` gives keys 8 bits and values 4).
Without a group 32 columns share one, and with ``palu`` the row, as in the paper. The published ones
are listed, any other works as well. ``method:paper`` is the paper's own setting
(`kvprof.methods.named`), alone and in combinations: ``palu:paper-3bit``.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from kvprof.analysis.centring import (
    Centre,
    bias_centre,
    centred_moments,
    layer_centre,
    rotated_mean,
)
from kvprof.analysis.linalg import few_threads
from kvprof.analysis.moments import LayerMoments
from kvprof.errors import FailedError, UsageError
from kvprof.methods.accounting import dim_rate, rate
from kvprof.methods.engine_formats import engine_format
from kvprof.methods.evictors import EVICTORS, evicted, evictor_family, snapkv
from kvprof.methods.family import CalibrationNeeds, MethodInputs, PlanFamily, plan_for_rate
from kvprof.methods.fdc import fdc, kq, zack
from kvprof.methods.fp8 import fp8
from kvprof.methods.hadamard import hadamard
from kvprof.methods.installed import InstalledMethod, installed_methods
from kvprof.methods.kq_wf import kq_wf
from kvprof.methods.kvtc import kvtc
from kvprof.methods.low_rank import full, identity_layer
from kvprof.methods.named import (
    COMBINATIONS,
    ENGINE_FORMATS,
    PAPERS,
    Wrapper,
    method_names,
    parts_of,
    plain_name,
    unknown_method,
)
from kvprof.methods.option_types import BitsAmong, Count, option_types, read_option
from kvprof.methods.oscar import oscar
from kvprof.methods.palu import palu
from kvprof.methods.plan import Plan, bears_key_mean, unfolded
from kvprof.methods.quantisers import QUANTISERS, per_token, quantised, quantiser_family
from kvprof.methods.storage import LIBRARIES, Quantiser, load_library
from kvprof.methods.strawman import strawman
from kvprof.methods.svd_alone import svd_k, svd_kv, svd_v
from kvprof.methods.tale import tale, tale_kivi
from kvprof.methods.turboquant import turboquant
from kvprof.methods.xkv import xkv
from kvprof.models.layout import ModelLayout

__all__ = [
    "COMMON_OPTIONS",
    "METHODS",
    "allocation_of",
    "base_method",
    "calibration_needs",
    "centred_by_default",
    "compose",
    "follows_from_rate",
    "has_one_setting",
    "has_removal_rate",
    "option_of",
    "plan_family",
    "skips_layers",
    "typed_options",
    "without_allocation",
]

#: One function per name in `kvprof.methods.named`; its keyword-only arguments are its options.
METHODS: dict[str, Callable[..., PlanFamily]] = {
    "full": full,
    "fp8": fp8,
    "fdc": fdc,
    "zack": zack,
    "palu": palu,
    "tale": tale,
    "kq": kq,
    "kq-wf": kq_wf,
    "svd-kv": svd_kv,
    "svd-k": svd_k,
    "svd-v": svd_v,
    "strawman": strawman,
    # Its levels have bits of their own, which no quantiser on top could give.
    "tale+kivi": tale_kivi,
    **{f"hadamard-int{bits}": partial(hadamard, bits) for bits in (4, 3, 2)},
    "turboquant": turboquant,
    "oscar": oscar,
    "kvtc": kvtc,
    "xkv": xkv,
    **{name: partial(quantiser_family, name) for name in QUANTISERS},
    **{name: partial(evictor_family, name) for name in EVICTORS},
    "snapkv": snapkv,  # which has options of its own
    **{name: partial(engine_format, name) for name in ENGINE_FORMATS},
}
METHODS |= {
    name: partial(METHODS[setting.method], **setting.options) for name, setting in PAPERS.items()
}

# FDC's KF-F and KF-P evict first (FDC §6); ZACK's Keyformer-Z compresses first.
_ORDERS = {"fdc": "evict_first", "palu": "evict_first"}
_TEXT = CalibrationNeeds("calibration")
_NEEDS = {
    "fdc": _TEXT, "zack": _TEXT, "kq": _TEXT, "kq-wf": _TEXT,
    "svd-kv": _TEXT, "svd-k": _TEXT, "svd-v": _TEXT,
    "palu": replace(_TEXT, pre_rope=True), "tale": _TEXT, "tale+kivi": _TEXT,
    # A scale is the power of two above a maximum, twice over: few tokens find nearly the same.
    "fp8": replace(_TEXT, tokens=1024, magnitudes=True, shares=True),
    "oscar": replace(_TEXT, outputs=True),
    "kvtc": replace(_TEXT, pre_rope=True, sized=True),
    "xkv": replace(_TEXT, pre_rope=True, sized=True),
}  # fmt: skip
_NEEDS |= {
    name: replace(
        _NEEDS[setting.method],
        source=setting.source,
        tokens=setting.tokens,
        fisher_tokens=setting.fisher_tokens,
    )
    for name, setting in PAPERS.items()
}
_ALL_HEADS = 2**20
#: What every method that compresses can be told besides its own options: layers to leave out, from
#: the first, or below 0 from the last; and whether keys and values are stored without their means,
#: or of how many rotary pairs of each head.
COMMON_OPTIONS: dict[str, Any] = {"skip": tuple[int, ...], "centre": bool | Count}
# Quantisers of tokens, which torch runs anyway: centred unless they are told otherwise.
_CENTRED = ("per-token", *(f"hadamard-int{bits}" for bits in (4, 3, 2)))
# Says how the calibration weighs heads; no method is given it.
_CALIBRATIONS = "fisher_form"


def plan_family(name: str, inputs: MethodInputs, **options: Any) -> PlanFamily:
    """Return the plans of a method or a combination.

    Parameters
    ----------
    name : str
        A method's name, or names joined by ``+``, with ``-2bit`` … ``-8bit`` or ``-k8v4`` at the
        end.
    inputs : MethodInputs
    **options
        Of the method; ``skip``, the layers that are left out; ``centre``, whether keys and values
        are stored without their means, or of how many rotary pairs of a head; for a combination
        also ``bits`` of its quantiser, and ``keep``, the share of tokens that its evictor keeps (by
        default both halves keep the same share).

    Raises
    ------
    UsageError
        For an unknown name, or an option that the method does not have or cannot take.
    LackingError
        When it quantises with a library that is not installed.
    """
    return _with_key_means(_family(name, inputs, options), inputs)


def _family(name: str, inputs: MethodInputs, given: Mapping[str, Any]) -> PlanFamily:
    options = typed_options(name, given)
    centre = options.pop("centre", None)
    usual = centred_by_default(name, inputs.layout)
    if centre is None:
        centre = usual and _default_centre(name, inputs)
    if centre is not False:
        return _centring(name, inputs, options, centre)
    if usual and name in METHODS and name not in _CENTRED and "centre" not in inputs.made:
        note = "latents hold the biases of projections, which Palu's code adds after the rebuild"
        made = {**inputs.made, "notes": [*inputs.made.get("notes", []), note]}
        inputs = replace(inputs, made=made)
    installed = _installed()
    if (name in installed or name in METHODS) and skips_layers(name) and "skip" in options:
        left = replace(inputs, skip=_skipped(name, options.pop("skip"), inputs))
        return _leaving_out(_family(name, left, {**options, "centre": False}), left)
    if name in installed:
        with few_threads():
            return installed[name].family(inputs, **options)
    if name in METHODS:
        if name in PAPERS:
            paper = {"name": name, "differs": PAPERS[name].differences(options)}
            inputs = replace(inputs, made={**inputs.made, "paper": paper})
        with few_threads():
            return replace(METHODS[name](inputs, **options), method=name)
    base, wrappers = _parts(name)
    return _combined(name, base, wrappers, inputs, options)


def typed_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as what the method declares them to be.

    Parameters
    ----------
    name : str
        Of a method or a combination; for the latter also ``bits`` and ``keep``, as `plan_family`.
    options : mapping
        Texts of a command line, or values. ``fisher_form`` is the calibration's and stays.

    Raises
    ------
    UsageError
        For an unknown name, an option that there is not, or a value that it does not take.
    """
    installed = _installed()  # which refuses one that has the name of another
    if name in installed or name in METHODS:
        own = installed[name].options() if name in installed else option_types(METHODS[name])
        return _read_options(
            name, {**own, **(COMMON_OPTIONS if skips_layers(name) else {})}, options
        )
    base, wrappers = _parts(name)
    types = _wrapper_types(base, wrappers)
    if "bits" in options and "bits" not in types and base not in QUANTISERS:
        raise UsageError(f"{name} has no option bits")
    if "keep" in options and "keep" not in types:
        raise UsageError(f"{name} has no option keep because it does not evict tokens")
    beside = _read_options(name, types, {key: options[key] for key in types if key in options})
    own = {key: value for key, value in options.items() if key not in types}
    return {**typed_options(base, own), **beside}


def calibration_needs(name: str, **options: Any) -> CalibrationNeeds | None:
    """Return what a method or combination has to be calibrated with; None where nothing.

    An installed method says so by an attribute ``needs`` of its function, a `CalibrationNeeds`;
    without one it is given moments of text.

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
    options = typed_options(name, options)
    centre = options.pop("centre", centred_by_default(name))
    if centre is not False:
        return calibration_needs(name, **options, centre=False) or _TEXT
    installed = _installed()
    if name in installed:
        return installed[name].needs(_TEXT)
    if name not in METHODS:
        base, wrappers = _parts(name)
        return calibration_needs(base, **_base_options(options, base, wrappers))
    if name not in _NEEDS:
        return None
    needs = _NEEDS[name]
    defaults = {key: x.default for key, x in inspect.signature(METHODS[name]).parameters.items()}
    if needs.sized:
        own = {**defaults, **options}
        if own.get("bases") == "prompt":
            return None
        return replace(needs, across=(own["layers"], own["sink"]))
    heads = options.get("heads", defaults.get("heads", 1))
    if heads == 1:
        return needs
    # 0 is all heads of a layer; no layer has more than this.
    return replace(needs, joint_heads=heads or _ALL_HEADS)


def _parts(name: str) -> tuple[str, list[Wrapper]]:
    """Split a name into its method and what comes on top of it.

    Raises
    ------
    UsageError
        For an unknown name.
    """
    found = parts_of(name, (*METHODS, *_installed()))
    if found is None:
        raise unknown_method(name, method_names())
    return found


def _combined(
    name: str,
    base: str,
    wrappers: list[Wrapper],
    inputs: MethodInputs,
    options: dict[str, Any],
) -> PlanFamily:
    # Centred or not is decided for the combination, above.
    own = {"centre": False} if skips_layers(base) else {}
    family = _family(base, inputs, {**_base_options(options, base, wrappers), **own})
    if base == "full" and "skip" in options:
        given = replace(inputs, skip=_skipped(name, options["skip"], inputs))
        family = _leaving_out(family, given)
    return compose(name, base, wrappers, family, options)


def _wrapper_types(base: str, wrappers: Sequence[Wrapper]) -> dict[str, Any]:
    """Return the options of what comes on top, and what each takes.

    ``skip`` is among them where the method itself leaves every layer as it is.
    """
    types: dict[str, Any] = {**COMMON_OPTIONS} if base == "full" else {}
    quantisers = [one.name for one in wrappers if one.name in QUANTISERS and one.bits is None]
    if quantisers:
        types["bits"] = Annotated[int | str, BitsAmong(*QUANTISERS[quantisers[0]][1])]
    if any(one.name in EVICTORS for one in wrappers):
        types["keep"] = float
    return types


def _base_options(
    options: Mapping[str, Any], base: str, wrappers: Sequence[Wrapper]
) -> dict[str, Any]:
    """Return the options of a combination that are its method's."""
    beside = _wrapper_types(base, wrappers)
    return {key: value for key, value in options.items() if key not in beside}


def compose(
    name: str,
    base: str,
    wrappers: Sequence[Wrapper],
    family: PlanFamily,
    options: Mapping[str, Any],
) -> PlanFamily:
    """Return a family's plans with quantisers and evictors on top.

    Parameters
    ----------
    name, base : str
        Of the combination, and of the method that `family` has the plans of.
    wrappers : sequence of Wrapper
        From `kvprof.methods.named.parts_of`.
    family : PlanFamily
    options : mapping
        ``bits`` and ``keep``, see `plan_family`.

    Raises
    ------
    UsageError
        For what cannot be combined.
    """
    # Evict before quantising: the halves of the rate are shared out on unquantised plans.
    for one in sorted(wrappers, key=lambda one: one.name in QUANTISERS):
        if one.name in EVICTORS:
            order = _ORDERS.get(plain_name(base), "compress_first")
            family = _evicting(family, one.name, order, options.get("keep"))
        elif one.bits is not None:
            family = _quantising(family, one.bits, partial(per_token, group=one.group))
        else:
            bits = options.get("bits", QUANTISERS[one.name][2])
            family = _quantising(family, bits, one.name)
    # What cannot be combined is found out now, not when the first plan is wanted.
    family.build((family.settings or family.bounds)[0])
    return replace(family, method=name)


def _quantising(
    family: PlanFamily, bits: int | str, how: str | Callable[[tuple[int, ...]], Quantiser]
) -> PlanFamily:
    """Quantise every plan of a family: its ranks follow from the rate of both together."""
    shared = family.at_rate

    def at_rate(wanted: float, tokens: int) -> Plan:
        assert shared is not None
        unquantised = 0.0
        while True:
            plan = quantised(shared(unquantised, tokens), how, bits)
            reached = rate(plan, tokens)
            if unquantised == 0.0 and reached > wanted + 5e-4:
                raise UsageError(
                    f"{family.method} quantised reaches rates of {reached:.3f} or more at "
                    f"{tokens:,} tokens, not {wanted:g}"
                )
            if reached >= wanted - 1e-9:
                return plan
            # Bytes shrink about as those of the unquantised plan do.
            left = (1.0 - unquantised) * (1.0 - wanted) / (1.0 - reached)
            unquantised = 1.0 - min(left, 1.0 - unquantised - 1e-4)

    return PlanFamily(
        family.method,
        family.knob,
        lambda value: quantised(family.build(value), how, bits),
        family.bounds,
        family.settings,
        None if shared is None else at_rate,
        family.finish,
    )


def _evicting(family: PlanFamily, part: str, order: str, keep: float | None) -> PlanFamily:
    """Evict too; both halves keep the same share, √(1 - rate) each."""
    if keep is not None and not 0 < keep <= 1:
        raise UsageError(f"keep: {keep:g} is not in (0, 1]")

    def build(value: float) -> Plan:
        plan = family.build(value)
        return evicted(plan, part, keep if keep is not None else 1.0 - dim_rate(plan), order)

    def shared(total: float, tokens: int) -> Plan:
        share = keep if keep is not None else (1.0 - total) ** 0.5
        rest = 1.0 - (1.0 - total) / share
        if rest < -1e-12:
            raise UsageError(
                f"{family.method}+{part}: keep={share:g} alone gives more than --rate {total:g}"
            )
        try:
            half = plan_for_rate(family, max(0.0, rest), tokens)
        except UsageError as problem:
            raise UsageError(
                f"{family.method}+{part} at rate {total:g} retains {share:.3g} of the tokens, "
                f"but {problem}"
            ) from None
        return evicted(half, part, share, order)

    # Scores are stored too: both halves give a little more.
    at_rate = _reaching(shared, f"{family.method}+{part}")
    return PlanFamily(
        family.method, family.knob, build, family.bounds, family.settings, at_rate, family.finish
    )


def _reaching(attempt: Callable[[float, int], Plan], name: str) -> Callable[[float, int], Plan]:
    """Ask for a little more until the bytes are what was asked."""

    def at_rate(wanted: float, tokens: int) -> Plan:
        total = wanted
        while True:
            plan = attempt(total, tokens)
            lacking = wanted - rate(plan, tokens)
            if lacking <= 1e-9:
                return plan
            total += max(lacking, 1e-4)
            if total >= 1:
                raise UsageError(f"{name} does not reach the rate {wanted:g}")

    return at_rate


def centred_by_default(name: str, layout: ModelLayout | None = None) -> bool:
    """Whether a method stores no means, or no biases, unless it is told otherwise."""
    biased = layout is not None and any(layer.biased for layer in layout.layers)
    return name in _CENTRED or (biased and plain_name(base_method(name, {})[0]) == "palu")


def _default_centre(name: str, inputs: MethodInputs) -> bool | str:
    """Stand-ins for a model without weights have no means, nor do old moments."""
    if inputs.moments is None:
        return False
    layers = inputs.moments.layers
    if name not in _CENTRED:
        return "bias" if any(layer.biases for layer in layers) else False
    pairs = [facts.rotary_pairs is not None for facts in inputs.layout.layers]
    return any(layer.cross is not None for layer in layers) or (
        "source" in inputs.moments.info and not any(pairs)
    )


def _centring(
    name: str, inputs: MethodInputs, options: dict[str, Any], centre: bool | int | str
) -> PlanFamily:
    """Return a method's plans of keys and values without their means (`kvprof.methods.plan`).

    With ``bias`` without what their projections add, as Palu's code stores them.
    """
    base = base_method(name, options)[0]
    needs = calibration_needs(name, **options, centre=False)
    if needs is not None and needs.across is not None:
        raise UsageError(
            f"{name}: latents of several layers have their own means; leave out centre"
        )
    moments = inputs.calibrated(name)
    # Bases of low rank lose what queries see; codes lose by a key's length.
    by_query = base in METHODS and "grid" in option_types(METHODS[base])
    # A first token that all attend to has a value near 0, which a plan without the mean has to
    # store: on Qwen2.5-Coder-1.5B kq's values at a rate of 0.25 keep 0.953 for 0.976. Where first
    # tokens stay uncompressed it costs nothing.
    values = bool(option_of(name, options, "sink"))
    crossed = [layer.cross is not None for layer in moments.layers]

    def centre_of(layer: LayerMoments) -> Centre:
        if isinstance(centre, str):
            return bias_centre(layer)
        count = None if centre is True else centre
        return layer_centre(layer, moments.tokens, count, by_query, values)

    centres = {
        index: centre_of(moments.layers[index])
        for index, facts in enumerate(inputs.layout.layers)
        if not facts.shared and (crossed[index] or facts.rotary_pairs is not None)
    }
    made = {**inputs.made, "centre": centre}
    if off := [str(index) for index, known in enumerate(crossed) if not known]:
        note = f"{name} is not centred in layers {', '.join(off)}: they rotate keys in another way"
        made["notes"] = [*made.get("notes", []), note]
    given = replace(inputs, moments=centred_moments(moments, centres), made=made)
    family = _family(name, given, {**options, "centre": False})

    def centred(plan: Plan) -> Plan:
        whole = unfolded(plan)
        layers = tuple(
            layer if layer.left_out else replace(layer, centre=centres.get(index))
            for index, layer in enumerate(whole.layers)
        )
        return replace(whole, layers=layers)

    at_rate, at_ranks = family.at_rate, family.at_ranks
    return replace(
        family,
        build=lambda value: centred(family.build(value)),
        # Kept tokens of a centred plan know their positions.
        at_rate=None
        if at_rate is None
        else _reaching(lambda *asked: centred(at_rate(*asked)), name),
        at_ranks=None if at_ranks is None else lambda ranks: centred(at_ranks(ranks)),
    )


def _with_key_means(family: PlanFamily, inputs: MethodInputs) -> PlanFamily:
    """Take the mean of rotated keys from where it leaves the softmax (`kvprof.methods.plan`)."""
    if inputs.moments is None:
        return family
    means = [rotated_mean(layer) for layer in inputs.moments.layers]

    def without(plan: Plan) -> Plan:
        layers = tuple(
            replace(layer, key_mean=mean)
            if bears_key_mean(plan, layer) and not facts.sinks and facts.softcap is None
            else layer
            for layer, mean, facts in zip(plan.layers, means, inputs.layout.layers, strict=True)
        )
        return replace(plan, layers=layers)

    at_rate, at_ranks, finish = family.at_rate, family.at_ranks, family.finish
    return replace(
        family,
        finish=without if finish is None else lambda plan: without(finish(plan)),
        at_rate=None if at_rate is None else lambda *asked: without(at_rate(*asked)),
        at_ranks=None if at_ranks is None else lambda ranks: without(at_ranks(ranks)),
    )


def skips_layers(name: str) -> bool:
    """Whether a method takes ``skip``: all that compress, but for one with its own of that name.

    Parameters
    ----------
    name : str
        Of a method or a combination.
    """
    installed = _installed()
    if name in installed:
        return "skip" not in installed[name].options()
    return name != "full"


def _skipped(name: str, given: Sequence[int], inputs: MethodInputs) -> frozenset[int]:
    """Return the layers that are left out, counted from the first."""
    count = len(inputs.layout.layers)
    for layer in given:
        if not -count <= layer < count:
            raise UsageError(
                f"{name}: skip={layer}: {inputs.layout.architecture} has {count} layers, 0 to "
                f"{count - 1}, or -1 to -{count} from the last"
            )
    found = frozenset(layer % count for layer in given)
    if len(found) == count:
        raise UsageError(f"{name}: skip leaves out every layer; use the method full")
    return found


def _leaving_out(family: PlanFamily, inputs: MethodInputs) -> PlanFamily:
    """Leave layers as they are in every plan, whatever the method would do there."""

    def left(plan: Plan) -> Plan:
        levels = len(plan.levels.shares)
        layers = tuple(
            replace(identity_layer(facts, levels), left_out=True) if index in inputs.skip else layer
            for index, (layer, facts) in enumerate(
                zip(plan.layers, inputs.layout.layers, strict=True)
            )
        )
        options = {**plan.made.get("options", {}), "skip": sorted(inputs.skip)}
        return replace(plan, layers=layers, made={**plan.made, "options": options})

    at_ranks = family.at_ranks
    return replace(
        family,
        build=lambda value: left(family.build(value)),
        # A rule of its own would count the layers that are left out as compressed.
        at_rate=None,
        at_ranks=None if at_ranks is None else lambda ranks: left(at_ranks(ranks)),
    )


def _installed() -> dict[str, InstalledMethod]:
    found = installed_methods()
    for name, method in found.items():
        if name in METHODS:
            raise FailedError(
                f"the installed method {name} ({method.origin}) has the name of a built-in "
                "method; rename it or uninstall its package"
            )
    return found


def _read_options(
    name: str, types: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    found = {}
    for option, value in options.items():
        if option == _CALIBRATIONS:
            found[option] = value
            continue
        if option not in types:
            has = f"it has {', '.join(types)}" if types else "it has none"
            raise UsageError(f"{name} has no option {option[:40]}: {has}")
        found[option] = read_option(name, option, types[option], value)
    return found


# --- What a method's name and options say of it before there is a model.

# What a combination's name is joined by, and its options that are not its method's.
_JOINTS = ("+", "-")
_MODIFIER_OPTIONS = ("bits", "keep")


def base_method(method: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the method that a combination is built on, and the options that are its own.

    Raises
    ------
    UsageError
        For an unknown name.
    """
    known = [name for name in method_names() if name not in COMBINATIONS]
    if method in known:
        return method, dict(options)
    fitting = [name for name in known if any(method.startswith(name + joint) for joint in _JOINTS)]
    if not fitting:
        raise unknown_method(method, method_names())
    own = {key: value for key, value in options.items() if key not in _MODIFIER_OPTIONS}
    return max(fitting, key=len), own


def allocation_of(method: str, options: Mapping[str, Any]) -> Any:
    """Return how a method hands out its ranks or bits: as the options say, else as it does."""
    return option_of(method, options, "allocation")


def without_allocation(base: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's options with an allocation that asks for no measurement."""
    plain = {key: value for key, value in own.items() if key != "allocation"}
    if allocation_of(base, {}) == "loss":
        plain["allocation"] = "output"  # its own has other pairs, from what is not here
    return plain


def has_removal_rate(method: str, **options: Any) -> bool:
    """Whether a method's knob is FDC's removal rate; True where only its plans tell.

    Parameters
    ----------
    method : str
        A method's or a combination's name.
    **options
        The method's own.

    Raises
    ------
    UsageError
        For an unknown name.
    """
    base, _ = base_method(method, options)
    return base not in METHODS or allocation_of(method, options) == "removal"


def has_one_setting(method: str) -> bool:
    """Whether a method has one rate and nothing to turn, also where it is calibrated."""
    single = ("full", "fp8", "oscar", *ENGINE_FORMATS)
    return method in single or method.startswith("hadamard-int")


def option_of(method: str, options: Mapping[str, Any], name: str) -> Any:
    """Return an option as given, else as the method has it by default; None where it has none."""
    if name in options:
        return options[name]
    base, _ = base_method(method, options)
    known = inspect.signature(METHODS[base]).parameters if base in METHODS else {}
    return known[name].default if name in known else None


def follows_from_rate(method: str, **options: Any) -> bool:
    """Whether what a method stores follows from its rate alone, as for most of kvprof's own.

    Raises
    ------
    UsageError
        For an unknown name.
    """
    needs = calibration_needs(method, **options)
    return needs is None or (base_method(method, options)[0] in METHODS and not needs.sized)
