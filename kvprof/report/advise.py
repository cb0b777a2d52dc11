"""The report of ``kvprof advise``: which cache, for how many users, at what cost."""

from kvprof.report.blocks import Column, Heading, Paragraph, Report, Table, framed
from kvprof.results.advise import AdvisedPlan, AdviseResult
from kvprof.sizes import format_bytes, format_count
from kvprof.views.numbers import MISSING, duration, kept, number

__all__ = ["report"]

_NOTES = (
    "At least: the interval's lowest end of all models, or here. --keep holds for needles, too.",
    "Torch only: 36 tokens stay at 16 bits, so short texts keep more than long contexts do.",
    "Attention, step: limits by bytes read, not measured; unpacking can take longer.",
    "Users: sequences that fit at the context at a time; for vLLM, in blocks as 0.32 counts them.",
)


def report(result: AdviseResult) -> Report:
    """Return the report."""
    inputs, data = result.inputs, result.data
    context = f"{format_count(inputs.context)} tokens"
    best = next((one for one in data.plans if one.plan == data.best), data.plans[0])
    cautions = []
    if (best.users or 0) >= 1:  # the command is copied whole, whatever the width
        cautions.append("Run: " + best.command.replace(" --", " \\\n    --"))
    if inputs.saved is not None:
        cautions.append(f"Saved: kvprof generate {inputs.model} --plan {inputs.saved}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in data.layer_kinds.items())
    memory = format_bytes(inputs.gpu_memory_bytes)
    elsewhere = {one.measured_on for one in data.plans if one.measured_on and one.record}
    whose = f", measured on {', '.join(sorted(elsewhere))}" if elsewhere else " of this model"
    lengths, texts = inputs.task_lengths, f"{inputs.sequences} sequences of {inputs.seq_len} tokens"
    return framed(
        result,
        [
            Heading(f"Plans at {context}, batch {inputs.users:,}"),
            Table(_COLUMNS, [one for one in data.plans if one.refused is None]),
            *(Paragraph(one.refused, "aside") for one in data.plans if one.refused),
        ],
        verdict=_verdict(result, best, context),
        subject=f"{inputs.model}, {inputs.gpu}, {context}",
        cautions=cautions,
        notes=(f"Keeps: accuracy kept [95 % interval]{whose}.", *_NOTES),
        measured_with={
            "model": f"{inputs.model} ({inputs.model_type})",
            "layers": f"{sum(data.layer_kinds.values())} with a cache of their own ({kinds})",
            "gpu": f"{inputs.gpu}, {memory}, {number(inputs.gpu_bytes_per_second / 1e12)} TB/s",
            "bytes of weights": f"{format_bytes(data.weights_bytes)}, by {inputs.weights_from}",
            "for the cache": format_bytes(max(data.available_bytes, 0)),
            "text": inputs.text and f"{texts} of {' and '.join(inputs.text)}",
            "needles": f"{inputs.task_items} of up to {max(lengths):,} tokens" if lengths else None,
        },
    )


def _verdict(result: AdviseResult, best: AdvisedPlan, context: str) -> str:
    """Return the plan to take and what it keeps, or why there is none, in a sentence."""
    first, inputs = result.data.plans[0], result.inputs
    users, uncompressed = best.users or 0, number(first.users)
    if result.data.available_bytes <= 0:
        return f"The weights of {inputs.model} leave no memory for a cache on {inputs.gpu}."
    if users < 1:  # without room for one an engine does not start
        room = format_count(int(users * inputs.context) // 1024 * 1024)
        return f"No request of {context} fits {inputs.gpu}: {best.plan} has room for {room}."
    if best is first:
        known = f"no vLLM format that is known to keep {inputs.keep:g} fits more"
        return f"Stay uncompressed: {known}; {uncompressed} users fit uncompressed."
    keeps = f"at least {best.keeps_at_least:.3f} on every model measured; this model was not"
    if best.measured_here:
        keeps = f"{_kept(best)} on this model"
    fits = f"{number(users)} users of {context}, {uncompressed} uncompressed"
    return f"{best.plan} in {best.engine}: {fits}; it keeps {keeps}."


def _kept(plan: AdvisedPlan) -> str:
    """Return what a plan keeps, with its interval."""
    return kept(plan.keeps, plan.keeps_interval)


def _measured_on(plan: AdvisedPlan) -> str:
    """Return a measured model's family, of which a note has whole names; of 16 bits none."""
    here = plan.measured_on and plan.record is None
    return "here" if here else (plan.measured_on or MISSING).partition("-")[0]


_COLUMNS = (
    Column("plan", "plan", words=True),
    Column("engine", "get it", words=True),
    Column("bits", "bits", number, goes=3),
    Column("bytes_per_token", "bytes a token", number, goes=4),
    Column(_kept, "keeps"),
    Column("keeps_at_least", "at least", kept),
    Column(_measured_on, "measured on"),
    Column(lambda one: "/".join(map(str, one.needles or [MISSING])), "needles", goes=2),
    Column(lambda one: f"≤ {number(one.attention_speedup, 2)}×", "attention", goes=6),
    Column(lambda one: f"≥ {duration(one.step_seconds)}", "step", goes=5),
    Column("users", "users", number),
)
