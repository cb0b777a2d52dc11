"""``kvprof generate``: text with a compressed cache, and where it departs from the model's own."""

import sys
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kvprof import console
from kvprof.commands.options import (
    ContextOption,
    LoadOptions,
    MethodOptions,
    one_method,
    share_option,
)
from kvprof.commands.output import Outcome, OutputOptions, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, needs, written
from kvprof.errors import FailedError, UsageError
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.loading import loading
from kvprof.report.generate import cache_line, compared, decoding_line
from kvprof.report.terminal import renderable
from kvprof.results.generate import GenerateResult
from kvprof.sizes import parse_count, parse_nonzero

if TYPE_CHECKING:
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel, OpenedModel
    from kvprof.runtime.generation import Generated

# Measured and counted bytes of a cache agree to this share.
_AGREEMENT = 0.01


def _names_a_prompt(request: "GenerateRequest") -> str | None:
    if request.has("prompt") != request.has("prompt_file"):
        return None
    return "give either --prompt TEXT (- for stdin) or --prompt-file FILE"


def _draws(request: "GenerateRequest") -> str | None:
    if not (request.temperature > 0 and isfinite(request.temperature)):
        return (
            f"--temperature {request.temperature:g} is not above 0; leave out --sample for "
            "greedy decoding"
        )
    return None


class GenerateRequest(MethodOptions, LoadOptions, OutputOptions):
    """Generate text with a compressed cache; prints the cache's size to stderr.

    Examples
    --------
    kvprof generate --method full --prompt "The function returns"
    kvprof generate --method kq --rate 0.3 --prompt "The function returns" --diff
    kvprof generate --plan kq.plan --prompt-file question.txt --chat
    """

    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue; - reads stdin."), Mark.FREE
    ] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help="File with the text to continue."),
        Mark.READS,
    ] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Apply the model's chat template to the prompt."),
        Mark.FREE,
        Input(),
    ] = False
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", help="Maximum tokens to generate."),
        Parsed(parse_count),
        Mark.FREE,
        Input(),
    ] = written("128")
    sample: Annotated[
        bool,
        typer.Option("--sample", help="Sample tokens instead of greedy decoding."),
        Mark.FREE,
        Input(),
    ] = False
    temperature: Annotated[
        float, typer.Option("--temperature", help="Sampling temperature."), Mark.FREE, Input()
    ] = 1.0
    top_p: Annotated[
        float, share_option("--top-p", "Nucleus sampling.", None, parse_nonzero), Mark.FREE, Input()
    ] = 1.0
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Sampling seed."), Mark.FREE, Input()
    ] = 0
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Show where the uncompressed model differs."),
        Mark.FREE,
        Input(),
    ] = False
    context: ContextOption = None

    rules: ClassVar[tuple[Rule, ...]] = (
        _names_a_prompt,
        needs("temperature", "sample"),
        needs("top_p", "sample"),
        needs("seed", "sample"),
        _draws,
    )

    def text(self) -> str:
        """Return the text to continue."""
        if self.prompt is not None and self.prompt != "-":
            if any("\ud800" <= letter <= "\udfff" for letter in self.prompt):
                raise UsageError(f"--prompt {self.prompt[:40]!r} is not valid UTF-8")
            return self.prompt
        name = self.prompt_file or "stdin"
        try:
            file = self.prompt_file
            content = sys.stdin.buffer.read() if file is None else file.read_bytes()
        except OSError as problem:
            raise UsageError(f"--prompt-file {name}: {problem.strerror}") from problem
        try:
            # An editor, or echo, ends the text with a newline that is no part of it.
            text = content.decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as problem:
            raise FailedError(f"{name} is not UTF-8 text (byte {problem.start})") from None
        if not text:
            raise UsageError(f"{name} is empty")
        return text


@measuring(GenerateRequest)
def generate(request: GenerateRequest) -> Outcome:
    """Generate the text that a request asks for, and show it while it comes."""
    text = request.text()
    choice = request.choice(one_method(request.method))

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.planning import load_to_compress, make_plan
        from kvprof.runtime.generation import prompt_ids

    read: list[tuple[str, list[int]]] = []

    def before(opened: "OpenedModel") -> None:
        read.append(prompt_ids(opened, text, chat=request.chat))
        _check_length(opened, len(read[0][1]), request.max_new_tokens)

    loaded, context = load_to_compress(
        request.model, choice, request.context, compressed=True, before=before, **request.how
    )
    prompt, ids = read[0]
    with graceful_interrupt() as stop:
        plan = make_plan(loaded, **choice, context=context, stop=stop)
        own = _run(request, loaded, plan, ids, stop)
    data = {"prompt": prompt, "prompt_tokens": len(ids), **own}
    inputs = {
        "model": loaded.spec,
        **loaded.origin,
        "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "method": plan.method,
        "plan": plan.made,
        "plan_file": request.plan_file,
        "context": context,
        **request.inputs(),
    }
    if not request.sample:
        inputs |= dict.fromkeys(("temperature", "top_p", "seed"))
    warnings = _doubts(data, plan)
    console.note(cache_line(data["cache"], inputs["dtype"]))
    if (line := decoding_line(data["decoding"])) is not None:
        console.note(line)
    for warning in warnings:  # calibration has said its own
        console.warn(warning)
    return Outcome(
        inputs=inputs,
        data=data,
        warnings=[*plan.made.get("notes", ()), *warnings],
        complete=data["ended"] != "interrupted"
        and (data["difference"] is not None or not request.diff),
        report=_report,
    )


def _report(result: dict[str, Any], width: int, colour: bool) -> Any:
    """Return what is shown below the text."""
    if result["data"]["difference"] is None:
        return None
    return renderable(compared(GenerateResult.of(result)), width, colour)


def _check_length(loaded: "OpenedModel", prompt: int, new: int) -> None:
    """Refuse to run past the model's context, before anything is calibrated."""
    longest = loaded.context_length
    if prompt + new <= longest:
        return
    fits = "shorten the prompt"
    if prompt < longest:
        fits = f"lower --max-new-tokens to {longest - prompt:,}"
    raise UsageError(
        f"{prompt:,} prompt tokens and --max-new-tokens {new:,} exceed the context of "
        f"{loaded.spec}, {longest:,}; {fits}"
    )


def _run(
    request: GenerateRequest, loaded: "LoadedModel", plan: "Plan", ids: list[int], stop: Stop
) -> dict[str, Any]:
    """Run the compressed model, and with --diff the uncompressed one; return the result's data."""
    from kvprof.methods.accounting import bytes_at, full_bytes, rate
    from kvprof.runtime.compressed import compressed
    from kvprof.runtime.generation import GenerationSettings, difference, generate_text

    terminal = console.report_console()
    names = ("max_new_tokens", "sample", "temperature", "top_p", "seed")
    settings = GenerationSettings(**{name: getattr(request, name) for name in names})

    def out(piece: str, end: str = "") -> None:
        # A terminal that is no UTF-8 cannot show everything that a model writes.
        shown = piece.encode(terminal.encoding, "replace").decode(terminal.encoding)
        terminal.out(shown, end=end, highlight=False)
        terminal.file.flush()

    def run(*, streams: bool) -> "Generated":
        write = out if streams else None
        return generate_text(
            loaded, ids, settings, write=write, keep_logits=request.diff, should_stop=stop
        )

    streams = request.outputs().report_to_stdout
    waiting = console.status("generating with the compressed cache")
    with compressed(loaded, plan) as session, nullcontext() if streams else waiting:
        if session.route.used and len(ids) >= session.route.least_tokens:
            session.compile_ahead(progress=console.track)
        ours = run(streams=streams)
        if streams:
            out("", end="\n")
        cache = decoding = None
        if session.cache is not None and not ours.broken:
            tokens, itemsize = session.cache.get_seq_length(), loaded.dtype.itemsize
            cache = {
                "tokens": tokens,
                "measured_bytes": session.cache.nbytes,
                "account_bytes": bytes_at(plan, tokens, itemsize=itemsize).total,
                "full_bytes": full_bytes(plan, tokens, itemsize=itemsize),
                "rate": rate(plan, tokens),
                "notes": session.kernel_notes,
            }
        if session.graphs is not None:
            decoding = {
                "replayed_steps": session.graphs.replays,
                "graph_bytes": session.graph_bytes,
                "reason": session.graph_reason,
            }
    tokenizer = loaded.tokenizer()
    data: dict[str, Any] = {
        "text": tokenizer.decode(ours.tokens, skip_special_tokens=True),
        "tokens": ours.tokens,
        "ended": ours.ended,
        "cache": cache,
        "decoding": decoding,
        "difference": None,
    }
    if request.diff and ours.ended != "interrupted":
        with console.status("generating with the uncompressed model"):
            theirs = run(streams=False)
        if theirs.ended != "interrupted":
            data["difference"] = difference(ours, theirs, tokenizer.decode)
    return data


def _doubts(data: dict[str, Any], plan: "Plan") -> list[str]:
    """Return what a reader must know of the text, and of the cache that it was written with."""
    from kvprof.evaluation.evaluator import hidden_in_one_pass

    found = []
    if len(data["tokens"]) < 2 and (hidden := hidden_in_one_pass(plan)):
        found.append(
            f"the only new token comes from prefill, which hides the cost of {hidden}; use "
            "--max-new-tokens 2 or more"
        )
    if (cache := data["cache"]) is None:
        return found
    measured, account = cache["measured_bytes"], cache["account_bytes"]
    if abs(measured - account) > _AGREEMENT * account:
        why = "; ".join(cache["notes"]) or "one of the two is wrong"
        found.append(
            f"the cache takes {measured:,} bytes, but the plan accounts for {account:,}: {why}"
        )
    return found
