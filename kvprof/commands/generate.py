"""``kvprof generate``: text with a compressed cache, and where it departs from the model's own."""

import errno
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from kvprof import console
from kvprof.commands.context import ContextOption, resolve_context
from kvprof.commands.options import (
    AllocationOption,
    CalibrateOption,
    CalibrateTokensOption,
    DeviceOption,
    DtypeOption,
    GridOption,
    MethodOption,
    MethodOptionsOption,
    MinimumOption,
    ModelArgument,
    PlanFileOption,
    RateOption,
    RemovalOption,
    RevisionOption,
    TrustOption,
    load_for_command,
    method_options,
    share_option,
)
from kvprof.commands.output import ForceOption, JsonOption, OutOption, Outputs
from kvprof.commands.steps import check_choice, make_plan
from kvprof.environment import collect_environment
from kvprof.errors import FailedError, UsageError
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.records.result import build_result
from kvprof.sizes import parse_count

if TYPE_CHECKING:
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel
    from kvprof.runtime.cache import CompressedCache
    from kvprof.runtime.generation import Generated, GenerationSettings

__all__ = ["check_length", "read_prompt"]

# --- The prompt of ``kvprof generate``: where it is read from, and whether it fits.


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text to continue, from the one place that was named.

    Parameters
    ----------
    prompt : str or None
        The text itself; ``-`` reads stdin.
    file : Path or None

    Raises
    ------
    UsageError
        When none or both are given, or what they name is missing or empty.
    FailedError
        For bytes that are no UTF-8.
    """
    if (prompt is None) == (file is None):
        raise UsageError(
            "give the text to continue, with --prompt TEXT (- for stdin) or "
            "--prompt-file FILE, not both"
        )
    if file is None and prompt != "-":
        assert prompt is not None
        return prompt
    try:
        content = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as problem:
        raise UsageError(f"--prompt-file {file}: {problem.strerror}") from problem
    try:
        # An editor, or echo, ends the text with a newline that is no part of it.
        text = content.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as problem:
        name = file or "stdin"
        raise FailedError(f"{name} is no text (byte {problem.start} is not UTF-8)") from None
    if not text:
        raise UsageError(f"{file or 'stdin'} is empty; give a text to continue")
    return text


def check_length(loaded: "LoadedModel", prompt: int, new: int) -> None:
    """Refuse to run past the model's context, before anything is calibrated.

    Parameters
    ----------
    loaded : LoadedModel
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


# Measured and counted bytes of a cache agree to this share (issue 4).
_AGREEMENT = 0.01


def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue; - reads stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="File with the text to continue.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[
        str, typer.Option("--max-new-tokens", help="Tokens to write at most.")
    ] = "128",
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw tokens; greedy without it.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Of --sample. Default 1.")
    ] = None,
    top_p: Annotated[
        float | None,
        share_option("--top-p", "Draw among the most probable tokens of this share. All."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of --sample. 0.")] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show where the uncompressed model would differ.")
    ] = False,
    method: MethodOption = None,
    rate: RateOption = None,
    removal: RemovalOption = None,
    plan_file: PlanFileOption = None,
    calibrate: CalibrateOption = None,
    calibrate_tokens: CalibrateTokensOption = None,
    allocation: AllocationOption = None,
    grid: GridOption = None,
    minimum: MinimumOption = None,
    option: MethodOptionsOption = None,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Write text with a compressed cache; its bytes are told on stderr.

    Examples
    --------
    kvprof generate --prompt "The function returns"
    kvprof generate --method kq --rate 0.3 --prompt "The function returns" --diff
    kvprof generate --plan kq.plan --prompt-file question.txt --chat
    """
    outputs = Outputs(json=json, out=out, force=force)
    outputs.check()
    wanted = parse_count(max_new_tokens, what="--max-new-tokens")
    _check_sampling(sample, temperature, top_p, seed)
    text = read_prompt(prompt, prompt_file)
    options = method_options(allocation, grid, minimum, option)
    wish: dict[str, Any] = {
        "method": method,
        "rate": rate,
        "removal": removal,
        "plan_file": plan_file,
        "calibrate": calibrate,
        "calibrate_tokens": calibrate_tokens,
        "options": options,
    }
    check_choice(**wish)
    loaded = load_for_command(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        compressed=True,
    )

    from kvprof.runtime.generation import GenerationSettings, prompt_ids

    text, ids = prompt_ids(loaded, text, chat=chat)
    check_length(loaded, len(ids), wanted)
    context_tokens = resolve_context(context, loaded)
    settings = GenerationSettings(
        wanted,
        sample,
        1.0 if temperature is None else temperature,
        1.0 if top_p is None else top_p,
        seed or 0,
    )
    with graceful_interrupt() as stop:
        plan = make_plan(loaded, **wish, context=context_tokens, seq_len=None, stop=stop)
        data, unheard = _generated(loaded, plan, ids, settings, outputs, diff=diff, stop=stop)
        data = {"prompt": text, "prompt_tokens": len(ids), **data}
        cut = data["ended"] == "interrupted" or (diff and data["difference"] is None)
        result = build_result(
            "generate",
            environment=collect_environment(),
            inputs={
                "model": loaded.spec,
                "revision": loaded.revision,
                "fingerprint": loaded.fingerprint,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "device": str(loaded.device),
                "method": plan.method,
                "plan": plan.made,
                "plan_file": plan_file,
                "context": context_tokens,
                "max_new_tokens": wanted,
                "chat": chat,
                "sample": sample,
                "temperature": settings.temperature if sample else None,
                "top_p": settings.top_p if sample else None,
                "seed": settings.seed if sample else None,
                "diff": diff,
            },
            data=data,
            warnings=[*plan.made.get("notes", ()), *_warnings(data, plan)],
            complete=not cut,
        )
        _finish(result, outputs, _warnings(data, plan), unheard=unheard, interrupted=cut)


def _check_sampling(
    sample: bool, temperature: float | None, top_p: float | None, seed: int | None
) -> None:
    given = {"--temperature": temperature, "--top-p": top_p, "--seed": seed}
    if not sample and (said := [name for name, value in given.items() if value is not None]):
        raise UsageError(f"{' and '.join(said)} means nothing without --sample")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise UsageError(f"--temperature {temperature:g} is not above 0; greedy is the default")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p {top_p:g} is no share; give more than 0 and at most 1")


def _generated(
    loaded: "LoadedModel",
    plan: "Plan",
    ids: list[int],
    settings: "GenerationSettings",
    outputs: Outputs,
    *,
    diff: bool,
    stop: Stop,
) -> tuple[dict[str, Any], OSError | None]:
    """Run the compressed model, then with `diff` the uncompressed one.

    Returns
    -------
    dict
        Of the result.
    OSError or None
        Why stdout did not take the text.
    """
    from kvprof.runtime.compressed import compressed
    from kvprof.runtime.generation import difference, generate_text

    unheard: OSError | None = None

    def out(piece: str, end: str = "") -> None:
        nonlocal unheard
        if unheard is not None:
            return

        def put(terminal: Console) -> None:
            # A terminal that is no UTF-8 cannot show everything that a model writes.
            shown = piece.encode(terminal.encoding, "replace").decode(terminal.encoding)
            terminal.out(shown, end=end, highlight=False)

        unheard = console.deliver(put)
        if unheard is not None and unheard.errno == errno.EPIPE and not outputs.to_files:
            raise unheard  # nobody reads on, and nothing is kept

    def run(*, streams: bool) -> "Generated":
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
        ours = run(streams=streams)
        if streams:
            out("", end="\n")
        cache = _cache(loaded, plan, session.cache)
        notes = session.kernel_notes
    tokenizer = loaded.tokenizer()
    data: dict[str, Any] = {
        "text": tokenizer.decode(ours.tokens, skip_special_tokens=True),
        "tokens": ours.tokens,
        "ended": ours.ended,
        "cache": None if cache is None else {**cache, "notes": notes},
        "difference": None,
    }
    if diff and ours.ended != "interrupted":
        with console.status("writing with the uncompressed model"):
            theirs = run(streams=False)
        if theirs.ended != "interrupted":
            data["difference"] = difference(ours, theirs, tokenizer.decode)
    return data, unheard


def _cache(
    loaded: "LoadedModel", plan: "Plan", cache: "CompressedCache | None"
) -> dict[str, Any] | None:
    """Return what the cache holds, measured and counted."""
    from kvprof.methods.accounting import bytes_at, full_bytes

    if cache is None:
        return None
    tokens, itemsize = cache.get_seq_length(), loaded.dtype.itemsize
    full = full_bytes(plan, tokens, itemsize=itemsize)
    return {
        "tokens": tokens,
        "measured_bytes": cache.nbytes,
        "account_bytes": bytes_at(plan, tokens, itemsize=itemsize).total,
        "full_bytes": full,
        "rate": 1.0 - cache.nbytes / full,
    }


def _warnings(data: dict[str, Any], plan: "Plan") -> list[str]:
    from kvprof.evaluation.evaluator import hidden_in_one_pass

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


def _finish(
    result: dict[str, Any],
    outputs: Outputs,
    warnings: Sequence[str],
    *,
    unheard: OSError | None,
    interrupted: bool,
) -> None:
    from kvprof.views import generation as view

    def report(width: int, colour: bool) -> Any:
        differs = result["data"]["difference"] is not None
        shown = [view.report(result, width, colour=colour)] if differs else []
        if unheard is not None:  # the text was not read as it was written
            shown.insert(0, Text(result["data"]["text"]))
        return Group(*shown) if shown else None

    try:
        outputs.finish(result, report, unheard=unheard, interrupted=interrupted)
    finally:
        console.note(view.cache_line(result))
        for warning in warnings:  # calibration has said its own
            console.warn(warning)
