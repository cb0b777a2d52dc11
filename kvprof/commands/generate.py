"""``kvprof generate``: text with a compressed cache, and where it departs from the model's own."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from kvprof import console
from kvprof.commands.options import (
    AllocationOption,
    CalibrateOption,
    CalibrateTokensOption,
    ContextOption,
    DeviceOption,
    DtypeOption,
    GgufOption,
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
    checked_choice,
    one_method,
    share_option,
)
from kvprof.commands.output import ForceOption, JsonOption, OutOption, Outputs
from kvprof.errors import FailedError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.sizes import parse_count
from kvprof.views import generation as view

__all__ = ["read_prompt"]


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
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise UsageError(f"--prompt {prompt[:40]!r} holds bytes that are not UTF-8")
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
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Write text with a compressed cache; its bytes are told on stderr.

    Examples
    --------
    kvprof generate --method full --prompt "The function returns"
    kvprof generate --method kq --rate 0.3 --prompt "The function returns" --diff
    kvprof generate --plan kq.plan --prompt-file question.txt --chat
    """
    outputs = Outputs(json=json, out=out, force=force)
    outputs.check(read=[model, plan_file, calibrate, prompt_file])
    wanted = parse_count(max_new_tokens, what="--max-new-tokens")
    _check_sampling(sample, temperature, top_p, seed)
    text = read_prompt(prompt, prompt_file)
    choice = checked_choice(
        method=one_method(method),
        plan_file=plan_file,
        rate=rate,
        removal=removal,
        calibrate=calibrate,
        calibrate_tokens=calibrate_tokens,
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        option=option,
    )

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.generate_run import check_length, run_generation, warnings_of
        from kvprof.commands.steps import (
            load_to_compress,
            make_plan,
        )
        from kvprof.models.load import OpenedModel
        from kvprof.runtime.generation import GenerationSettings, prompt_ids

    read: list[tuple[str, list[int]]] = []

    def before(opened: OpenedModel) -> None:
        read.append(prompt_ids(opened, text, chat=chat))
        check_length(opened, len(read[0][1]), wanted)

    loaded, context_tokens = load_to_compress(
        model,
        choice,
        context,
        compressed=True,
        before=before,
        device=device,
        dtype=dtype,
        revision=revision,
        gguf=gguf,
        trust_remote_code=trust_remote_code,
    )

    text, ids = read[0]
    settings = GenerationSettings(
        wanted,
        sample,
        1.0 if temperature is None else temperature,
        1.0 if top_p is None else top_p,
        seed or 0,
    )
    with graceful_interrupt() as stop:
        plan = make_plan(loaded, **choice, context=context_tokens, seq_len=None, stop=stop)
        data = run_generation(loaded, plan, ids, settings, outputs, diff=diff, stop=stop)
        data = {"prompt": text, "prompt_tokens": len(ids), **data}
        cut = data["ended"] == "interrupted" or (diff and data["difference"] is None)
        inputs = {
            "model": loaded.spec,
            **loaded.origin,
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
        }
        own_warnings = warnings_of(data, plan)

        def report(result: dict[str, Any], width: int, colour: bool) -> Any:
            differs = result["data"]["difference"] is not None
            shown = [view.comparison(result, width, colour=colour)] if differs else []
            return Group(*shown) if shown else None

        try:
            outputs.end(
                "generate",
                inputs=inputs,
                data=data,
                warnings=[*plan.made.get("notes", ()), *own_warnings],
                complete=not cut,
                report=report,
            )
        finally:
            console.note(view.cache_line({"data": data, "inputs": inputs}))
            if (line := view.decoding_line({"data": data})) is not None:
                console.note(line)
            for warning in own_warnings:  # calibration has said its own
                console.warn(warning)


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
