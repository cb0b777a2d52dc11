"""``kvprof.plan``: a plan for a model in one call."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvprof.errors import UsageError
from kvprof.methods.family import plan_at, plan_for_rate
from kvprof.methods.low_rank import KNOBS
from kvprof.methods.plan import Plan
from kvprof.methods.registry import has_removal_rate
from kvprof.models.load import LoadedModel, load_model, wrap_model
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.runtime.compressed import check_runs
from kvprof.sizes import parse_share
from kvprof.sources.grammar import DEFAULT_SEQ_LEN, parse_source

__all__ = ["plan"]


def plan(
    model: PreTrainedModel | LoadedModel | str | Path,
    method: str = "kq",
    rate: float | str = 0.5,
    *,
    removal: float | str | None = None,
    calibrate: str | Path | None = None,
    context: int | None = None,
    seq_len: int | None = None,
    **options: Any,
) -> Plan:
    """Calibrate a method on a model and return its plan, for ``kvprof.compressed``.

    Parameters
    ----------
    model : PreTrainedModel, LoadedModel, str or Path
        A model in memory, or a name or folder to load one from.
    method : str
        ``kq``, ``fdc``, ``palu``, ``kq-4bit`` … (`kvprof.methods.named.method_names`).
    rate : float or str
        Share of the cache's bytes saved, everything counted: ``0.3`` or ``"30%"``.
    removal : float or str, optional
        FDC's removal rate (eq. 1); takes the place of `rate`.
    calibrate : str or Path, optional
        ``calibration`` (embedded text, the default; random tokens in ``fdc:paper`` and
        ``zack:paper``), ``random:8k``, a file. A model in memory brings no tokenizer: it can be
        calibrated on random tokens and on files of token ids.
    context : int, optional
        Tokens at which bytes are counted; by default three quarters of `seq_len`, the mean context
        of an evaluation that decodes the second half of its sequences.
    seq_len : int, optional
        Tokens per calibration sequence: 2,048 or the model's context.
    **options
        Of the method: ``allocation``, ``grid``, ….

    Raises
    ------
    UsageError
        For an unknown method or option, a rate out of reach, a number of tokens below 1, a model
        that the method does not fit.
    FailedError, LackingError
        As `load_model`.

    Examples
    --------
    >>> import kvprof
    >>> plan = kvprof.plan("reference", method="kq", rate=0.5)
    >>> plan.method
    'kq'
    """
    share = parse_share(rate, what="--rate")
    removed = None if removal is None else parse_share(removal, what="--removal")
    for what, count in (("context", context), ("seq_len", seq_len)):
        if count is not None and count < 1:
            raise UsageError(f"{what} {count} is below 1")
    loaded = _loaded(model)
    check_runs(loaded)
    length = min(seq_len or DEFAULT_SEQ_LEN, loaded.context_length)
    source = parse_source(str(calibrate), what="calibrate") if calibrate is not None else None
    calibrator = Calibrator(loaded, CalibrationOptions(source, seq_len=length))
    if removed is not None and not has_removal_rate(method, **options):
        raise UsageError(f"{method} has no removal rate; use rate")
    family = calibrator.family(method, **options)
    if removed is None:
        tokens = context or max(1, length * 3 // 4)
        return plan_for_rate(family, share, tokens)
    if family.knob != KNOBS["removal"]:
        raise UsageError(f"{method} has no removal rate; use rate")
    return plan_at(family, removed)


def _loaded(model: PreTrainedModel | LoadedModel | str | Path) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, PreTrainedModel):
        return wrap_model(model)
    return load_model(str(model))
