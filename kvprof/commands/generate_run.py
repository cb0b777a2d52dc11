"""The run of ``kvprof generate``: text from the compressed model, then from its own."""

from contextlib import nullcontext
from typing import Any

from kvprof import console
from kvprof.commands.output import Outputs
from kvprof.errors import UsageError
from kvprof.evaluation.evaluator import hidden_in_one_pass
from kvprof.interrupt import Stop
from kvprof.methods.accounting import bytes_at, full_bytes, rate
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel, OpenedModel
from kvprof.runtime.cache import CompressedCache
from kvprof.runtime.compressed import compressed
from kvprof.runtime.generation import Generated, GenerationSettings, difference, generate_text
from kvprof.runtime.session import Compression

__all__ = ["check_length", "run_generation", "warnings_of"]

# Measured and counted bytes of a cache agree to this share (issue 4).
_AGREEMENT = 0.01


def check_length(loaded: OpenedModel, prompt: int, new: int) -> None:
    """Refuse to run past the model's context, before anything is calibrated.

    Parameters
    ----------
    loaded : OpenedModel
    prompt, new : int
        Tokens of the prompt, and how many may come.

    Raises
    ------
    UsageError
        Says what would fit.
    """
    longest = loaded.context_length
    if prompt + new <= longest:
        return
    fits = (
        f"at most --max-new-tokens {longest - prompt:,} fits after it"
        if prompt < longest
        else "shorten it"
    )
    raise UsageError(
        f"the prompt has {prompt:,} tokens and --max-new-tokens asks for {new:,} more, over the "
        f"context of {loaded.spec}, {longest:,}; {fits}"
    )


def run_generation(
    loaded: LoadedModel,
    plan: Plan,
    ids: list[int],
    settings: GenerationSettings,
    outputs: Outputs,
    *,
    diff: bool,
    stop: Stop,
) -> dict[str, Any]:
    """Run the compressed model, then with `diff` the uncompressed one; return the result's data."""
    terminal = console.report_console()

    def out(piece: str, end: str = "") -> None:
        # A terminal that is no UTF-8 cannot show everything that a model writes.
        shown = piece.encode(terminal.encoding, "replace").decode(terminal.encoding)
        terminal.out(shown, end=end, highlight=False)
        terminal.file.flush()

    def run(*, streams: bool) -> Generated:
        return generate_text(
            loaded,
            ids,
            settings,
            write=out if streams else None,
            keep_logits=diff,
            should_stop=stop,
        )

    streams = outputs.report_to_stdout
    waiting = console.status("writing with the compressed cache")
    with compressed(loaded, plan) as session, nullcontext() if streams else waiting:
        if session.route.used and len(ids) >= session.route.least_tokens:
            session.compile_ahead(progress=console.track)
        ours = run(streams=streams)
        if streams:
            out("", end="\n")
        cache = None if ours.broken else _cache(loaded, plan, session.cache)
        notes, decoding = session.kernel_notes, _decoding(session)
    tokenizer = loaded.tokenizer()
    data: dict[str, Any] = {
        "text": tokenizer.decode(ours.tokens, skip_special_tokens=True),
        "tokens": ours.tokens,
        "ended": ours.ended,
        "cache": None if cache is None else {**cache, "notes": notes},
        "decoding": decoding,
        "difference": None,
    }
    if diff and ours.ended != "interrupted":
        with console.status("writing with the uncompressed model"):
            theirs = run(streams=False)
        if theirs.ended != "interrupted":
            data["difference"] = difference(ours, theirs, tokenizer.decode)
    return data


def _cache(loaded: LoadedModel, plan: Plan, cache: CompressedCache | None) -> dict[str, Any] | None:
    """Return what the cache holds, measured and counted."""
    if cache is None:
        return None
    tokens, itemsize = cache.get_seq_length(), loaded.dtype.itemsize
    return {
        "tokens": tokens,
        "measured_bytes": cache.nbytes,
        "account_bytes": bytes_at(plan, tokens, itemsize=itemsize).total,
        "full_bytes": full_bytes(plan, tokens, itemsize=itemsize),
        "rate": rate(plan, tokens),
    }


def _decoding(session: Compression) -> dict[str, Any] | None:
    """Return how steps were launched; None where nothing could be captured."""
    if session.graphs is None:
        return None
    return {
        "replayed_steps": session.graphs.replays,
        "graph_bytes": session.graph_bytes,
        "reason": session.graph_reason,
    }


def warnings_of(data: dict[str, Any], plan: Plan) -> list[str]:
    """Return what a reader must know of the text, and of the cache that it was written with."""
    found = []
    if len(data["tokens"]) < 2 and (hidden := hidden_in_one_pass(plan)):
        found.append(
            "the first new token comes from the prompt's own pass, which does not show the cost "
            f"of {hidden}; --max-new-tokens 2 or more does"
        )
    cache = data["cache"]
    if cache is None:
        return found
    measured, account = cache["measured_bytes"], cache["account_bytes"]
    if abs(measured - account) <= _AGREEMENT * account:
        return found
    why = "; ".join(cache["notes"]) or "one of the two is wrong"
    return [
        *found,
        f"the cache holds {measured:,} bytes, but the plan accounts for {account:,}: {why}",
    ]
