"""The report of ``kvprof advise``: which cache, for how many users, at what cost."""

from collections.abc import Callable
from typing import Any

from kvprof.report.blocks import (
    Block,
    Column,
    Curves,
    Heading,
    Paragraph,
    Report,
    Series,
    Table,
    framed,
)
from kvprof.results.advise import CONFIG, WEIGHTS, AdvisedPlan, AdviseInputs, AdviseResult
from kvprof.sizes import format_bytes, format_count
from kvprof.views.numbers import MISSING, duration, number

__all__ = ["report"]

_NOTES = (
    "Keeps: accuracy kept [95 % interval], of the model most like this one that was measured.",
    "At least: the interval's lowest end of all measured models, or of this one if measured.",
    "Needles: found of asked, RULER's niah_single_1; --csv names the records.",
    "Attention, step: limits by bytes over the GPU's bandwidth, not measured times.",
    "Users: sequences that fit at the context at a time; for vLLM, in blocks as it counts them.",
)

_LINE = 74  # characters of a command on one line

#: Plans whose users are drawn, beside the best.
_DRAWN = ("16 bits", "fp8_e4m3", "kq-wf 7x")


def report(result: AdviseResult) -> Report:
    """Return the report."""
    inputs, data = result.inputs, result.data
    context = f"{format_count(inputs.context)} tokens"
    best = next((one for one in data.plans if one.plan == data.best), None)
    shown = [one for one in data.plans if one.refused is None]
    drawn = [one for one in shown if one.plan in _DRAWN or one is best]
    cautions = [f"Run: {_on_short_lines((best or data.plans[0]).command)}"]
    if inputs.saved is not None:
        cautions.append(f"Saved {data.saved}: kvprof generate {inputs.model} --plan {inputs.saved}")
    body: list[Block] = [
        Heading(f"Plans at {context}"),
        _table(shown, inputs),
        *(Paragraph(one.refused, "aside") for one in data.plans if one.refused),
        Heading("Users by context"),
        _curves(drawn),
    ]
    return framed(
        result,
        body,
        verdict=_verdict(result, best, context),
        subject=f"{inputs.model}, {inputs.gpu}, {context}",
        cautions=cautions,
        notes=_NOTES,
        measured_with=_facts(result),
    )


def _on_short_lines(command: str) -> str:
    """Break a command before its last option as a shell reads it, so that it is copied whole."""
    head, option, last = command.rpartition(" --")
    return command if len(command) <= _LINE or not option else f"{head} \\\n    --{last}"


def _users(users: float | None) -> str:
    return MISSING if users is None else f"{users:,.0f}" if users >= 100 else f"{users:.1f}"


def _verdict(result: AdviseResult, best: AdvisedPlan | None, context: str) -> str:
    first, inputs = result.data.plans[0], result.inputs
    if result.data.available_bytes <= 0:
        return f"The weights of {inputs.model} leave no memory for a cache on {inputs.gpu}."
    uncompressed = _users(first.users)
    if best is None or best is first:
        known = f"no served plan that is known to keep {inputs.keep:g} fits more"
        return f"Stay uncompressed: {known}; {uncompressed} users fit uncompressed."
    keeps = f"at least {best.keeps_at_least:.3f} on every model measured; this model was not"
    if best.measured_here:
        needles = f" and finds {_needles(best)} needles" if best.needles else ""
        keeps = f"{_keeps(best)} on this model{needles}"
    return (
        f"{best.plan} in {best.engine}: {_users(best.users)} users of {context}, "
        f"{uncompressed} uncompressed; it keeps {keeps}."
    )


def _known(write: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: MISSING if value is None else write(value)


def _keeps(plan: AdvisedPlan) -> str:
    if plan.keeps is None:
        return MISSING
    ends = "" if plan.keeps_interval is None else " [{:.3f}, {:.3f}]"
    return f"{plan.keeps:.3f}" + ends.format(*plan.keeps_interval or ())


def _needles(plan: AdvisedPlan) -> str:
    return "{}/{}".format(*plan.needles) if plan.needles else MISSING


def _table(plans: list[AdvisedPlan], inputs: AdviseInputs) -> Table:
    many = "1 user" if inputs.users == 1 else f"{inputs.users:,} users"
    kib = _known(lambda size: f"{size / 1024:.1f}")
    depth = [Column("depth", "depth", lambda depth: depth.removesuffix(" only"), goes=1)]
    columns = [
        Column("plan", "plan", words=True),
        Column("engine", "get it", words=True),
        *(depth if inputs.minutes is not None else ()),
        Column("bits", "bits", _known("{:.2f}".format), goes=2),
        Column("bytes_per_token", "KiB a token", kib, goes=3),
        Column(_keeps, "keeps"),
        Column("keeps_at_least", "at least", _known("{:.3f}".format)),
        Column(_source, "measured on", goes=1),
        Column(_needles, "needles", goes=5),
        Column("attention_speedup", "attention", _known("≤ {:.1f}×".format), goes=6),
        Column("step_seconds", f"step ({many})", _known(lambda s: f"≥ {duration(s)}"), goes=4),
        Column("users", "users", _users),
    ]
    return Table(columns, plans)


def _source(plan: AdvisedPlan) -> str:
    return "this model" if plan.depth == WEIGHTS else plan.measured_on or MISSING


def _curves(plans: list[AdvisedPlan]) -> Curves:
    series = [
        Series(
            one.plan,
            [context for context, _ in one.users_at],
            [users or None for _, users in one.users_at],
            method=one.plan,
        )
        for one in plans
    ]
    title = "Users that fit, by context"
    return Curves(series, title, "tokens of context", "users", log_x=True, log_y=True)


def _facts(result: AdviseResult) -> dict[str, Any]:
    inputs, data = result.inputs, result.data
    kinds = ", ".join(f"{count} {kind}" for kind, count in data.layer_kinds.items())
    speed = f"{number(inputs.gpu_bytes_per_second / 1e12)} TB/s"
    facts = {
        "model": f"{inputs.model} ({inputs.model_type})",
        "layers": f"{data.cached_layers} with a cache of their own ({kinds})",
        "gpu": f"{inputs.gpu}, {format_bytes(inputs.gpu_memory_bytes)}, {speed}",
        "bytes of weights": f"{format_bytes(data.weights_bytes)}, by {inputs.weights_from}",
        "for the cache": format_bytes(max(data.available_bytes, 0)),
        "depth": next((x.depth for x in data.plans if x.depth == WEIGHTS), CONFIG),
    }
    if inputs.text is not None:
        facts["text"] = (
            f"{inputs.sequences} sequences of {inputs.seq_len:,} tokens of "
            f"{' and '.join(inputs.text)}"
        )
    return facts
