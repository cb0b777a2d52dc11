"""The run of ``kvprof plan --fit`` and ``--transfer``: several plans, what fits and what moves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvprof import console
from kvprof.benchmark.shapes import layout_of, load_shape
from kvprof.commands.options import method_options
from kvprof.commands.plan_run import model_inputs, refuse_loading
from kvprof.commands.steps import calibration_options
from kvprof.dtypes import read_dtype
from kvprof.errors import FailedError, Interrupted, KvprofError, LackingError, UsageError
from kvprof.evaluation.requests import MethodRequest, parse_methods
from kvprof.interrupt import Stop
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.fit import Memory, fit_plan
from kvprof.methods.kvtc import AT_REST
from kvprof.methods.links import Link
from kvprof.methods.named import ALWAYS, COMPARED
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan
from kvprof.methods.registry import follows_from_rate
from kvprof.models.layout import ModelLayout
from kvprof.models.load import LoadedModel
from kvprof.moments.calibrator import Calibrator
from kvprof.moments.uncalibrated import uncalibrated_family
from kvprof.sizes import format_bytes

__all__ = [
    "Choices",
    "PlannedModel",
    "choose_plans",
    "fit_data",
    "fit_memory",
    "planned_model",
    "planned_shape",
    "read_requests",
    "transfer_data",
]

_BATCHES = (1, 8, 32)
_CONTEXTS = (4096, 16384, 65536)


@dataclass(frozen=True)
class PlannedModel:
    """What plans are made for: a model, or a shape of which nobody has the weights here.

    Attributes
    ----------
    spec : str
    layout : ModelLayout
    fingerprint : str
        Of its weights; empty without.
    dtype : torch.dtype
        In which the cache is counted.
    context_length : int or None
        Longest sequence that it accepts, in tokens; None where it states none.
    loaded : LoadedModel or None
    """

    spec: str
    layout: ModelLayout
    fingerprint: str
    dtype: torch.dtype
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


def planned_model(loaded: LoadedModel) -> PlannedModel:
    """Return a loaded model as what plans are made for."""
    own = loaded.context_length if loaded.context_length < 2**40 else None
    return PlannedModel(loaded.spec, loaded.layout, loaded.fingerprint, loaded.dtype, own, loaded)


def planned_shape(name: str, how: Mapping[str, Any]) -> PlannedModel:
    """Return a shape without weights as what plans are made for."""
    shape = load_shape(name)
    refuse_loading(how, "with --shape, of which nothing is loaded")
    dtype = read_dtype(how["dtype"], "cuda")  # auto is what is served
    return PlannedModel(shape.name, layout_of(shape), "", getattr(torch, dtype), shape.context)


def fit_memory(planned: PlannedModel, sizes: tuple[int, int]) -> Memory:
    """Return a memory with the model's weights in it."""
    loaded = planned.loaded
    if loaded is None:
        raise UsageError(
            f"--fit counts a model's weights, and --shape {planned.spec} has none; name a MODEL, "
            "or ask for --transfer alone"
        )
    total, reserve = sizes
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    memory = Memory(total, reserve, sum(t.numel() * t.element_size() for t in tensors))
    if memory.lacking:
        raise LackingError(
            f"{loaded.spec}: {format_bytes(memory.weights)} of weights in {planned.dtype_name} and "
            f"{format_bytes(reserve)} in reserve are {format_bytes(memory.lacking)} more than "
            f"{format_bytes(total)}; give more memory, a smaller --reserve, or another --dtype"
        )
    return memory


@dataclass(frozen=True)
class Choices:
    """One plan of each method that has one.

    Attributes
    ----------
    rows : list of Chosen
    missing : list of dict
        ``label`` and ``reason`` of the others.
    complete : bool
        False when the user interrupted; the rows so far are there.
    """

    rows: list["Chosen"]
    missing: list[dict[str, str]]
    complete: bool

    @property
    def warnings(self) -> list[str]:
        """What is to be known of plans wherever their bytes are told."""
        resting = (row.plan for row in self.rows if _rests(row.plan))
        return list(dict.fromkeys(note for plan in resting for note in plan.made.get("notes", ())))


@dataclass(frozen=True)
class Chosen:
    """A plan, and at how many tokens its rate is counted."""

    label: str
    plan: Plan
    context: int


def read_requests(
    methods: str | None,
    rate: float | None,
    plan_files: Sequence[Path],
    calibrate: str | None,
    calibrate_tokens: str | None,
    options: Mapping[str, Any],
) -> list[MethodRequest]:
    """Read what is planned, and refuse what needs no model to be refused."""
    usual = "full" if plan_files or rate is None else COMPARED
    requests = parse_methods(
        methods or usual, dict(options), lambda written: method_options(None, None, None, written)
    )
    _refuse_unheeded(requests, rate, calibrating=bool(calibrate or calibrate_tokens))
    calibration_options(calibrate, calibrate_tokens, seq_len=None)
    return requests


def choose_plans(
    planned: PlannedModel,
    requests: Sequence[MethodRequest],
    *,
    rate: float | None,
    plan_files: Sequence[Path],
    calibrate: str | None,
    calibrate_tokens: str | None,
    context: int,
    moving: bool,
    stop: Stop,
) -> Choices:
    """Plan several methods, each at the rate given or at the only one that it has."""
    if planned.loaded is None and plan_files:
        raise UsageError(
            f"{plan_files[0]} is of a model with weights, and --shape {planned.spec} has none; "
            "name the MODEL"
        )
    plans = [
        Chosen(
            path.name,
            load_plan(path, fingerprint=planned.fingerprint, layout=planned.layout),
            context,
        )
        for path in plan_files
    ]
    calibrators: list[Calibrator] = []

    def calibrator() -> Calibrator:
        if planned.loaded is None:
            raise UsageError("it has to be calibrated, and a shape has no weights; name a MODEL")
        if not calibrators:
            given = calibration_options(calibrate, calibrate_tokens, seq_len=None)
            calibrators.append(
                Calibrator(
                    planned.loaded,
                    given,
                    progress=console.track,
                    should_stop=stop,
                    notice=console.warn,
                )
            )
        return calibrators[0]

    rows: list[Chosen] = []
    missing: list[dict[str, str]] = []
    refused: KvprofError | None = None
    complete = True
    try:
        for request in sorted(requests, key=lambda request: request.method not in ALWAYS):
            if stop():
                complete = False
                break
            if request.method == "kvtc" and not moving:  # before it is calibrated, for minutes
                missing.append({"label": request.label, "reason": _ONLY_MOVED})
                continue
            try:
                plan = _planned(planned, calibrator, request, rate, context)
                rows.append(Chosen(request.label, plan, context))
            except (UsageError, FailedError) as reason:  # the others still have something to say
                refused = refused or reason
                missing.append({"label": request.label, "reason": str(reason)})
    except Interrupted:
        complete = False
    told = {*(row.label for row in rows), *(one["label"] for one in missing)}
    missing += [
        {"label": request.label, "reason": "interrupted before it was planned"}
        for request in requests
        if request.label not in told
    ]
    rows += plans
    if refused is not None and not rows:
        raise refused  # of full width already: no plan fits this model
    return Choices(rows, missing, complete)


def _refuse_unheeded(
    requests: Sequence[MethodRequest], rate: float | None, *, calibrating: bool
) -> None:
    """Refuse options without effect, before anything is read or planned."""
    turned = [request for request in requests if request.method not in ALWAYS]
    if rate is not None and not turned:
        raise UsageError(
            "--rate: of what is asked for, nothing has a rate to turn; name methods with "
            "--methods, or leave it out"
        )
    if calibrating and all(
        follows_from_rate(request.method, **request.options) for request in turned
    ):
        raise UsageError(
            "this calibrates nothing: what a plan stores follows from its rate; leave out "
            "--calibrate and --calibrate-tokens"
        )


def _planned(
    planned: PlannedModel,
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
        raise UsageError("it stores what its rate says; give --rate")
    family = family or calibrator().family(request.method, **request.options)
    return plan_for_rate(family, rate, context)


def _row(planned: PlannedModel, chosen: Chosen) -> dict[str, Any]:
    """Return what a row says of its plan."""
    return {
        "label": chosen.label,
        "method": chosen.plan.method,
        "rate": rate(chosen.plan, chosen.context),
        "rate_context": chosen.context,
    }


# --- What fits into a memory.


def _usual_contexts(own: int | None) -> list[int]:
    return sorted({*_CONTEXTS, *([own] if own is not None else [])})


def fit_data(planned: PlannedModel, memory: Memory, choices: Choices) -> dict[str, Any]:
    """Return what fits, method by method: ``fit`` of kind ``plan``."""
    own = planned.context_length
    contexts = _usual_contexts(own)
    return {
        "memory_bytes": memory.total,
        "reserve_bytes": memory.reserve,
        "weights_bytes": memory.weights,
        "dtype": planned.dtype_name,
        "model_context": own,
        "batches": list(_BATCHES),
        "contexts": contexts,
        "rows": [
            _fit_row(planned, chosen, memory, contexts)
            for chosen in choices.rows
            if not _rests(chosen.plan)
        ],
        "missing": [
            *choices.missing,
            *(
                {"label": chosen.label, "reason": _ONLY_MOVED}
                for chosen in choices.rows
                if _rests(chosen.plan)
            ),
        ],
    }


#: Why a method that codes a cache at rest has no row of what fits.
_ONLY_MOVED = f"{AT_REST}: what fits is what fits full"


def _rests(plan: Plan) -> bool:
    return plan.across is not None and plan.across.at_rest


def _fit_row(
    planned: PlannedModel, chosen: Chosen, memory: Memory, contexts: Sequence[int]
) -> dict[str, Any]:
    own = planned.context_length
    fit = fit_plan(
        chosen.plan,
        memory,
        planned.layout,
        itemsize=planned.dtype.itemsize,
        batches=_BATCHES,
        contexts=contexts,
    )

    def over(tokens: int | None) -> bool:
        return own is not None and (tokens is None or tokens > own)

    return {
        **_row(planned, chosen),
        "added_weights_bytes": fit.weights.added,
        "kept_beside_bytes": fit.weights.beside,
        "room_bytes": fit.room,
        "longest_context": [
            {"batch": batch, "tokens": tokens, "over_model_context": over(tokens)}
            for batch, tokens in fit.contexts.items()
        ],
        "largest_batch": [
            {"context": length, "batch": batch, "over_model_context": over(length)}
            for length, batch in fit.batches.items()
        ],
    }


# --- What it takes to move a context's cache.


def transfer_data(
    planned: PlannedModel,
    choices: Choices,
    links: Sequence[Link],
    contexts: Sequence[int] | None,
) -> dict[str, Any]:
    """Return bytes and seconds by method, context and link: ``transfer`` of kind ``plan``."""
    own = planned.context_length
    if contexts is None:
        contexts = _usual_contexts(own)
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
            {
                **_row(planned, chosen),
                "at": [_moved(planned, chosen.plan, tokens, links) for tokens in contexts],
            }
            for chosen in choices.rows
        ],
        "missing": choices.missing,
    }


def _moved(planned: PlannedModel, plan: Plan, tokens: int, links: Sequence[Link]) -> dict[str, Any]:
    itemsize = planned.dtype.itemsize
    size = bytes_at(plan, tokens, itemsize=itemsize).total
    return {
        "context": tokens,
        "bytes": size,
        "rate": rate(plan, tokens),
        "seconds": [link.seconds(size) for link in links],
    }
