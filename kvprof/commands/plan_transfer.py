"""``kvprof plan --transfer``: several plans, and what moving their caches takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvprof import console
from kvprof.benchmark.shapes import layout_of, load_shape
from kvprof.commands.loading import load_for_command, model_inputs
from kvprof.commands.output import Outcome
from kvprof.commands.planning import calibration_options, check_plan_file, evaluation_context
from kvprof.errors import FailedError, Interrupted, KvprofError, UsageError
from kvprof.evaluation.requests import MethodRequest, parse_methods
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.links import Link
from kvprof.methods.named import ALWAYS, COMPARED
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan
from kvprof.methods.registry import follows_from_rate
from kvprof.models.layout import ModelLayout
from kvprof.models.load import LoadedModel, OpenedModel
from kvprof.moments.calibrator import Calibrator
from kvprof.moments.uncalibrated import uncalibrated_family
from kvprof.sizes import parse_count, read_dtype
from kvprof.sources.grammar import DEFAULT_SEQ_LEN

if TYPE_CHECKING:
    from kvprof.commands.plan import PlanRequest

__all__ = ["plan_transfer"]

_CONTEXTS = (4096, 16384, 65536)


@dataclass(frozen=True)
class _Planned:
    """What plans are made for: a model, or a shape of which nobody has the weights here."""

    spec: str
    layout: ModelLayout
    fingerprint: str  # of its weights; empty without
    dtype: torch.dtype  # in which the cache is counted
    context_length: int | None
    loaded: LoadedModel | None = None

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, as results have it."""
        return str(self.dtype).removeprefix("torch.")

    def inputs(self) -> dict[str, Any]:
        """Return what a result says of it."""
        if self.loaded is not None:
            return model_inputs(self.loaded)
        return {"model": self.spec, "fingerprint": None, "dtype": self.dtype_name}


@dataclass(frozen=True)
class _Chosen:
    """A plan, and at how many tokens its rate is counted."""

    label: str
    plan: Plan
    context: int

    def row(self) -> dict[str, Any]:
        """Return what a row says of the plan."""
        return {
            "label": self.label,
            "method": self.plan.method,
            "rate": rate(self.plan, self.context),
            "rate_context": self.context,
        }


def plan_transfer(request: "PlanRequest", methods: str | None, links: Sequence[Link]) -> Outcome:
    """Plan several methods; return what moving their caches takes."""
    options = request.options(request.option)
    usual = "full" if request.plan_files or request.rate is None else COMPARED
    requests = parse_methods(methods or usual, dict(options))
    _refuse_unheeded(request, requests)
    calibration_options(**request.calibration)
    given = None if request.context is None else parse_count(request.context, what="--context")
    planned = _planned_for(request)
    context = given or evaluation_context(planned.context_length or DEFAULT_SEQ_LEN)
    with graceful_interrupt() as stop:
        rows, missing, complete = _choose(planned, request, requests, context, stop)
        # Of a cache at rest: nothing decodes from it.
        resting = (x.plan for x in rows if x.plan.across is not None and x.plan.across.at_rest)
        notes = (note for plan in resting for note in plan.made.get("notes", ()))
        return Outcome(
            inputs={
                **planned.inputs(),
                **request.inputs(),
                "links": [one.name for one in links],
                "context": context,
                "rate": request.rate,
                "calibrate": request.calibrate,
                "options": options,
            },
            data={
                "plan": None,
                "comparison": None,
                "transfer": _transfer(planned, rows, missing, links, request.seq),
            },
            warnings=list(dict.fromkeys(notes)),
            complete=complete,
        )


def _refuse_unheeded(request: "PlanRequest", requests: Sequence[MethodRequest]) -> None:
    """Refuse options without effect, before anything is read or planned."""
    turned = [one for one in requests if one.method not in ALWAYS]
    if request.rate is not None and not turned:
        raise UsageError(
            "--rate has no effect on these methods; give others with --methods or leave it out"
        )
    calibrating = any(request.calibration.values())
    if calibrating and all(follows_from_rate(one.method, **one.options) for one in turned):
        raise UsageError(
            "these methods need no calibration, since their sizes follow from the rate; leave "
            "out --calibrate and --calibrate-tokens"
        )


def _planned_for(request: "PlanRequest") -> _Planned:
    if request.shape is not None:
        shape = load_shape(request.shape)
        dtype = getattr(torch, read_dtype(request.dtype, "cuda"))  # auto is what is served
        return _Planned(shape.name, layout_of(shape), "", dtype, shape.context)

    def before(opened: OpenedModel) -> None:
        for file in request.plan_files or ():
            check_plan_file(opened, file)

    loaded = load_for_command(request.model, **request.how, before=before)
    own = loaded.context_length if loaded.context_length < 2**40 else None
    return _Planned(loaded.spec, loaded.layout, loaded.fingerprint, loaded.dtype, own, loaded)


def _choose(
    planned: _Planned,
    request: "PlanRequest",
    requests: Sequence[MethodRequest],
    context: int,
    stop: Stop,
) -> tuple[list[_Chosen], list[dict[str, str]], bool]:
    """Plan several methods, each at the rate given or at the only one that it has.

    Return the plans, the label and reason of methods without one, and whether all were tried.
    """
    of_model: dict[str, Any] = {"fingerprint": planned.fingerprint, "layout": planned.layout}
    files = request.plan_files or ()
    saved = [_Chosen(path.name, load_plan(path, **of_model), context) for path in files]
    calibrators: list[Calibrator] = []

    def calibrator() -> Calibrator:
        if planned.loaded is None:
            raise UsageError("it requires calibration, but a shape has no weights; give a MODEL")
        if not calibrators:
            given = calibration_options(**request.calibration)
            how: dict[str, Any] = {"progress": console.track, "notice": console.warn}
            calibrators.append(Calibrator(planned.loaded, given, should_stop=stop, **how))
        return calibrators[0]

    rows: list[_Chosen] = []
    missing: list[dict[str, str]] = []
    refused: KvprofError | None = None
    complete = True
    try:
        for one in sorted(requests, key=lambda one: one.method not in ALWAYS):
            if stop():
                complete = False
                break
            try:
                plan = _planned(planned, calibrator, one, request.rate, context)
                rows.append(_Chosen(one.label, plan, context))
            except (UsageError, FailedError) as reason:  # the others still have something to say
                refused = refused or reason
                missing.append({"label": one.label, "reason": str(reason)})
    except Interrupted:
        complete = False
    done = {*(row.label for row in rows), *(one["label"] for one in missing)}
    missing += [
        {"label": one.label, "reason": "interrupted before it was planned"}
        for one in requests
        if one.label not in done
    ]
    rows += saved
    if refused is not None and not rows:
        raise refused  # of the uncompressed plan already: no plan fits this model
    return rows, missing, complete


def _planned(
    planned: _Planned,
    calibrator: Callable[[], Calibrator],
    request: MethodRequest,
    rate: float | None,
    context: int,
) -> Plan:
    """Plan a method of one setting as it is, another at the rate given.

    Nothing is calibrated where bytes follow from the rate (`uncalibrated_family`).
    """
    family = uncalibrated_family(planned, request.method, **request.options)
    if family is not None and len(family.settings) == 1:
        return plan_at(family, family.settings[0])
    if rate is None:
        raise UsageError("its size follows from its rate; give --rate")
    family = family or calibrator().family(request.method, **request.options)
    return plan_for_rate(family, rate, context)


def _transfer(
    planned: _Planned,
    chosen: Sequence[_Chosen],
    missing: Sequence[dict[str, str]],
    links: Sequence[Link],
    contexts: Sequence[int] | None,
) -> dict[str, Any]:
    """Return bytes and seconds by method, context and link: ``transfer`` of kind ``plan``."""
    own, itemsize = planned.context_length, planned.dtype.itemsize
    if contexts is None:
        contexts = sorted({*_CONTEXTS, *([own] if own is not None else [])})

    def moved(plan: Plan, tokens: int) -> dict[str, Any]:
        size = bytes_at(plan, tokens, itemsize=itemsize).total
        seconds = [link.seconds(size) for link in links]
        return {"context": tokens, "bytes": size, "rate": rate(plan, tokens), "seconds": seconds}

    return {
        "dtype": planned.dtype_name,
        "model_context": own,
        "links": [
            {"link": link.name, "bytes_per_s": link.bytes_per_s, "nominal": link.nominal}
            for link in links
        ],
        "contexts": [
            {"context": tokens, "over_model_context": own is not None and tokens > own}
            for tokens in contexts
        ],
        "rows": [
            {**one.row(), "at": [moved(one.plan, tokens) for tokens in contexts]} for one in chosen
        ],
        "missing": missing,
    }
