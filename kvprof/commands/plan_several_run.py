"""The run of ``kvprof plan --fit`` and ``--transfer``: several plans, what fits and what moves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from kvprof import console
from kvprof.benchmark.shapes import layout_of, load_shape
from kvprof.commands.options import method_options
from kvprof.commands.plan_run import model_inputs, refuse_loading
from kvprof.commands.steps import calibration_options
from kvprof.dtypes import read_dtype
from kvprof.errors import FailedError, KvprofError, LackingError, UsageError
from kvprof.evaluation.recorded_prefill import RecordedPrefill
from kvprof.evaluation.recorded_rates import (
    RecordedRate,
    ShippedRates,
    canonical_label,
    load_recorded_rates,
    shipped_names,
    shipped_rates,
)
from kvprof.evaluation.requests import MethodRequest, parse_methods
from kvprof.evaluation.targets import Target
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
from kvprof.moments.calibrator import CalibrationInterrupted, CalibrationOptions, Calibrator
from kvprof.moments.uncalibrated import uncalibrated_family
from kvprof.sizes import format_bytes
from kvprof.sources.grammar import EMBEDDED, RANDOM, parse_source

__all__ = [
    "Choices",
    "PlannedModel",
    "choose_plans",
    "fit_data",
    "fit_memory",
    "planned_model",
    "planned_shape",
    "transfer_data",
    "warnings_of",
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
    """Return a shape without weights as what plans are made for.

    Parameters
    ----------
    name : str
        As `kvprof.benchmark.shapes.load_shape` takes it.
    how : mapping
        How a model would be loaded: of a shape, nothing is.

    Raises
    ------
    UsageError
        For an unknown name or dtype, and options that mean nothing without weights.
    """
    shape = load_shape(name)
    refuse_loading(how, "with --shape, of which nothing is loaded")
    dtype = read_dtype(how["dtype"], "cuda")  # auto is what is served
    return PlannedModel(shape.name, layout_of(shape), "", getattr(torch, dtype), shape.context)


def fit_memory(planned: PlannedModel, sizes: tuple[int, int]) -> Memory:
    """Return a memory with the model's weights in it.

    Parameters
    ----------
    planned : PlannedModel
    sizes : tuple of int
        Memory and reserve, of ``--fit`` and ``--reserve``, in bytes.

    Raises
    ------
    LackingError
        When the model alone does not fit.
    UsageError
        For a shape, which has no weights to count.
    """
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
    rows : list
        The plans, each with why it is this one.
    missing : list of dict
        ``label`` and ``reason`` of the others.
    complete : bool
        False when the user interrupted; the rows so far are there.
    targets : sequence of Target
        That recorded rates met.
    shipped : ShippedRates or None
        Which record that ships was looked into; None where a rate was given.
    """

    rows: list["_Chosen"]
    missing: list[dict[str, str]]
    complete: bool
    targets: Sequence[Target]
    shipped: ShippedRates | None


def choose_plans(
    planned: PlannedModel,
    *,
    methods: str | None,
    rate: float | None,
    plan_files: Sequence[Path],
    record_files: Sequence[Path],
    targets: Sequence[Target],
    calibrate: str | None,
    calibrate_tokens: str | None,
    options: Mapping[str, Any],
    context: int,
    moving: bool,
    stop: Stop,
) -> Choices:
    """Plan several methods, each at the rate given or at the one recorded for it.

    Parameters
    ----------
    planned : PlannedModel
    methods : str or None
        As for ``kvprof frontier --methods``; None takes `COMPARED`, or with plan files none.
    rate : float or None
        Of every method that has one to turn; None takes each method's recorded rate.
    plan_files, record_files : sequence of Path
        Saved plans that are rows too; frontiers whose rates are taken first, one of which may be
        the name of a record that ships.
    targets : sequence of Target
        That recorded rates have to meet together.
    calibrate, calibrate_tokens : str or None
        From the command line; of installed methods, whose bytes may hang on it. Those of kvprof's
        own methods follow from the rate.
    options : mapping
        Of every method that has them.
    context : int
        Tokens at which `rate` is counted.
    moving : bool
        Whether rows tell of moving a cache too: a method that only codes one at rest has no other.
    stop : Stop
        Asked after each batch of a calibration.

    Raises
    ------
    UsageError
        For unknown methods, plans or frontiers of another model, and options that nothing here
        would heed.
    """
    asked = ("full" if plan_files else COMPARED) if methods is None else methods
    requests = parse_methods(
        asked, dict(options), lambda written: method_options(None, None, None, written)
    )
    calibrating = calibrate is not None or calibrate_tokens is not None
    _refuse_unheeded(requests, rate, record_files, calibrating=calibrating)
    loaded = planned.loaded
    names = shipped_names()
    named = [str(path) for path in record_files if str(path) in names]
    record_files = [path for path in record_files if str(path) not in names]
    if loaded is None and (given := [*plan_files, *record_files]):
        raise UsageError(
            f"{given[0]} is of a model with weights, and --shape {planned.spec} has none; name the "
            "MODEL"
        )
    plans = [
        (path, load_plan(path, fingerprint=planned.fingerprint, layout=planned.layout))
        for path in plan_files
    ]
    recorded, shipped = {}, None
    if rate is None:
        shipped = shipped_rates(planned.fingerprint, planned.layout, named)
        recorded = load_recorded_rates(
            planned.fingerprint,
            record_files,
            shipped=shipped,
            targets=targets,
            warn=console.warn,
        )
    calibrators: dict[str, Calibrator] = {}

    def calibrator_for(known: RecordedRate | None) -> Calibrator:
        """Return what calibrates as a record was, or as the user says; one for each."""
        if loaded is None:
            raise UsageError("it has to be calibrated, and a shape has no weights; name a MODEL")
        if known is None or known.calibration is None:
            given = calibration_options(calibrate, calibrate_tokens, seq_len=None)
        else:
            given = _recorded_calibration(known)
        return calibrators.setdefault(
            repr(given),
            Calibrator(
                loaded, given, progress=console.track, should_stop=stop, notice=console.warn
            ),
        )

    # A record is of a method with these options and its own calibration, and of nothing else.
    records = {
        request.label: recorded.get(canonical_label(request.method, request.options))
        for request in requests
        if not calibrating or request.method in ALWAYS
    }
    rows: list[_Chosen] = []
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
            known = records.get(request.label)
            try:
                rows.append(
                    _chosen(planned, calibrator_for, request, known, rate, context, targets)
                )
            except (UsageError, FailedError) as reason:  # the others still have something to say
                refused = refused or reason
                missing.append({"label": request.label, "reason": str(reason)})
    except CalibrationInterrupted:
        complete = False
    told = {*(row.label for row in rows), *(one["label"] for one in missing)}
    missing += [
        {"label": request.label, "reason": "interrupted before it was planned"}
        for request in requests
        if request.label not in told
    ]
    rows += [_Chosen(path.name, plan, "plan", context) for path, plan in plans]
    if refused is not None and not rows:
        raise refused  # of full width already: no plan fits this model
    return Choices(rows, missing, complete, targets, shipped)


def warnings_of(choices: Choices, context: int | None) -> list[str]:
    """Return what is to be known of plans wherever their bytes are told.

    Parameters
    ----------
    choices : Choices
    context : int or None
        Tokens at which the user asked for rates to be counted, if so.
    """
    found = [
        note
        for row in choices.rows
        if row.plan.across is not None and row.plan.across.at_rest
        for note in row.plan.made.get("notes", ())
    ]
    recorded = [row for row in choices.rows if row.record is not None]
    if context is not None and (other := [x for x in recorded if x.context != context]):
        named = ", ".join(row.label for row in other)
        tokens = " and ".join(f"{x:,}" for x in sorted({row.context for row in other}))
        found.append(
            f"--context {context:,}: recorded rates ({named}) are counted at the {tokens} tokens "
            "of their records; give --rate for a rate at another"
        )
    return list(dict.fromkeys(found))


def fit_data(planned: PlannedModel, memory: Memory, choices: Choices) -> dict[str, Any]:
    """Return what fits, method by method: ``fit`` of kind ``plan``.

    Parameters
    ----------
    planned : PlannedModel
    memory : Memory
        From `fit_memory`.
    choices : Choices
    """
    own = planned.context_length
    contexts = sorted({*_CONTEXTS, *([own] if own is not None else [])})
    return {
        "memory_bytes": memory.total,
        "reserve_bytes": memory.reserve,
        "weights_bytes": memory.weights,
        "dtype": planned.dtype_name,
        "targets": [target.described() for target in choices.targets],
        "shipped": None if choices.shipped is None else choices.shipped.described(),
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


# --- What it takes to move a context's cache, against computing the context again.


_LEAST_MOVED = 4096
#: Tokens that a request writes whose prefill is measured.
_WRITTEN = 2


def transfer_data(
    planned: PlannedModel,
    choices: Choices,
    links: Sequence[Link],
    contexts: Sequence[int] | None,
    prefill: RecordedPrefill | None,
) -> dict[str, Any]:
    """Return bytes and seconds by method, context and link: ``transfer`` of kind ``plan``.

    Parameters
    ----------
    planned : PlannedModel
    choices : Choices
    links : sequence of Link
    contexts : sequence of int or None
        In tokens; None takes those of which a prefill was measured, else a few.
    prefill : RecordedPrefill or None
        What computing a context again takes.
    """
    own = planned.context_length
    measured = {} if prefill is None else prefill.seconds
    if contexts is None:
        usual = sorted({*_CONTEXTS, *([own] if own is not None else [])})
        known = sorted(measured)
        contexts = [tokens for tokens in known if tokens >= _LEAST_MOVED] or known or usual
    unknown = [tokens for tokens in contexts if tokens not in measured]
    return {
        "dtype": planned.dtype_name,
        "targets": [target.described() for target in choices.targets],
        "shipped": None if choices.shipped is None else choices.shipped.described(),
        "model_context": own,
        "links": [
            {"link": link.name, "bytes_per_s": link.bytes_per_s, "nominal": link.nominal}
            for link in links
        ],
        "prefill": None if prefill is None else prefill.described(),
        "contexts": [
            {
                "context": tokens,
                "over_model_context": own is not None and tokens > own,
                "recompute_seconds": measured.get(tokens),
            }
            for tokens in contexts
        ],
        "measure": _how_to_measure(planned, unknown) if unknown else None,
        "rows": [
            {
                **_chosen_row(planned, chosen),
                "at": [
                    _moved(planned, chosen.plan, tokens, links, measured.get(tokens))
                    for tokens in contexts
                ],
            }
            for chosen in choices.rows
        ],
        "missing": choices.missing,
    }


def _moved(
    planned: PlannedModel, plan: Plan, tokens: int, links: Sequence[Link], again: float | None
) -> dict[str, Any]:
    itemsize = planned.dtype.itemsize
    size = bytes_at(plan, tokens, itemsize=itemsize).total
    return {
        "context": tokens,
        "bytes": size,
        "rate": rate(plan, tokens),
        "seconds": [link.seconds(size) for link in links],
        "least_bytes_per_s": size / again if again else None,
    }


def _how_to_measure(planned: PlannedModel, contexts: Sequence[int]) -> str:
    """Return the command that measures the prefills that nobody has.

    A model computes within its own positions: of longer contexts as many tokens as it has.
    """
    if (own := planned.context_length) is not None:
        most = max(1, own - _WRITTEN)
        contexts = [tokens for tokens in contexts if tokens <= most] or [most]
    lengths = ",".join(map(str, contexts))
    return (
        f"kvprof bench --jct --real --model {quote(planned.spec)} --methods full --input-len "
        f"{lengths} --output-len {_WRITTEN} --dtype {planned.dtype_name} --json prefill.json"
    )


# --- A method at its rate.


@dataclass(frozen=True)
class _Chosen:
    """A plan, and why it is this one."""

    label: str
    plan: Plan
    rate_from: str
    context: int
    record: str | None = None
    sure: bool | None = None


def _chosen(
    planned: PlannedModel,
    calibrator_for: Callable[[RecordedRate | None], Calibrator],
    request: MethodRequest,
    known: RecordedRate | None,
    rate: float | None,
    context: int,
    targets: Sequence[Target],
) -> _Chosen:
    """Plan a method of one setting as it is, another at the rate given, else as recorded for it.

    Nothing is calibrated where bytes follow from the rate (`uncalibrated_family`).

    Raises
    ------
    UsageError
        When there is neither, the rate is out of reach, or the method does not fit the model.
    """
    family = uncalibrated_family(planned, request.method, **request.options)
    itself = known is None or request.method in ALWAYS
    if itself and family is not None and len(family.settings) == 1:
        return _Chosen(request.label, plan_at(family, family.settings[0]), "itself", context)
    if known is not None and known.max_rate is None:
        raise UsageError(f"no tested rate kept {_goal(targets)} ({known.origin})")
    if known is None and rate is None:
        raise UsageError(
            f"no rate that keeps {_goal(targets)} is recorded for this model with these options "
            "and this calibration; measure it with kvprof frontier, or give --rate"
        )
    family = family or calibrator_for(known).family(request.method, **request.options)
    if known is not None and known.max_rate is not None:
        # Counted as the frontier did, so that the bytes are its own.
        plan = plan_for_rate(family, known.max_rate, known.context)
        sure = known.sure is not None and known.sure >= known.max_rate
        whose = "borrowed" if known.borrowed else "recorded"
        return _Chosen(request.label, plan, whose, known.context, known.origin, sure)
    assert rate is not None
    plan = plan_for_rate(family, rate, context)
    return _Chosen(request.label, plan, "given", context)


def _goal(targets: Sequence[Target]) -> str:
    return " and ".join(f"{100 * one.share:g} % of the {one.metric}" for one in targets)


def _refuse_unheeded(
    requests: Sequence[MethodRequest],
    rate: float | None,
    record_files: Sequence[Path],
    *,
    calibrating: bool,
) -> None:
    """Refuse options without effect, before anything is read or planned."""
    turned = [request for request in requests if request.method not in ALWAYS]
    if rate is not None and record_files:
        raise UsageError(
            "--rate gives every method one rate, --rates the recorded ones; keep one of the two"
        )
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


def _recorded_calibration(known: RecordedRate) -> CalibrationOptions:
    """Return the calibration of a record.

    Raises
    ------
    UsageError
        When it was a file: its name alone does not bring it back.
    """
    assert known.calibration is not None  # the caller has looked
    source = known.calibration["source"]
    if source not in (*RANDOM, *EMBEDDED):
        raise UsageError(
            f"its recorded rate was calibrated on {source}; give --calibrate with that file, and "
            "--rate"
        )
    return CalibrationOptions(
        parse_source(source), known.calibration["tokens"], known.calibration["seq_len"]
    )


def _chosen_row(planned: PlannedModel, chosen: _Chosen) -> dict[str, Any]:
    """Return what a row says of its plan."""
    return {
        "label": chosen.label,
        "method": chosen.plan.method,
        "rate": rate(chosen.plan, chosen.context),
        "rate_context": chosen.context,
        "rate_from": chosen.rate_from,
        "rate_record": chosen.record,
        "rate_sure": chosen.sure,
    }


def _fit_row(
    planned: PlannedModel, chosen: _Chosen, memory: Memory, contexts: Sequence[int]
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
        **_chosen_row(planned, chosen),
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
