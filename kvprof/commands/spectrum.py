"""``kvprof spectrum``: how compact a model's Q, K and V are, head by head."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof import console
from kvprof.commands.options import (
    BatchSizeOption,
    DeviceOption,
    DtypeOption,
    GgufOption,
    ModelArgument,
    RevisionOption,
    SeedOption,
    TrustOption,
    parse_removals,
)
from kvprof.commands.output import (
    CsvOption,
    ForceOption,
    JsonOption,
    OutOption,
    Outputs,
    PngOption,
    SvgOption,
)
from kvprof.errors import KvprofError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.sizes import parse_count
from kvprof.sources.grammar import (
    DEFAULT_SEQ_LEN,
    DEFAULT_TOKENS,
    DEFAULT_TOKENS_REASON,
    Source,
    SourceKind,
    file_source,
    parse_source,
)

if TYPE_CHECKING:
    from kvprof.analysis.moments import Moments

_PAIRS = "qk,vo,k,v"


def spectrum(
    model: ModelArgument = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", help="random:8k, prose, code, tasks, calibration (embedded), or a file."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text or JSON Lines instead of random tokens; repeatable."),
    ] = None,
    token_ids: Annotated[
        Path | None,
        typer.Option("--token-ids", help="Token ids: .npy, or one sequence per line."),
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Work from saved moments, without the model.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="How many; k is 1,024. Default 8k, or all of a text."),
    ] = None,
    seq_len: Annotated[
        str | None,
        typer.Option("--seq-len", help="Tokens per sequence. Default 2k, or the context."),
    ] = None,
    batch_size: BatchSizeOption = None,
    seed: SeedOption = 0,
    skip_first: Annotated[
        int, typer.Option("--skip-first", min=0, help="Leave out the first N positions.")
    ] = 0,
    pairs: Annotated[
        str, typer.Option("--pairs", help="Among qk, vo, q, k, v, q_pre, k_pre, w_v.")
    ] = _PAIRS,
    removal: Annotated[
        str, typer.Option("--removal", help="Removal rates (FDC eq. 1) to turn into ranks.")
    ] = "0.01,0.02,0.05,0.1,0.2",
    grid: Annotated[
        int, typer.Option("--grid", min=1, help="Multiple that ranks are rounded up to.")
    ] = 16,
    vo_weight: Annotated[
        str,
        typer.Option("--vo-weight", help="Tokens that V counts for against W_O, or raw."),
    ] = "8k",
    paired: Annotated[
        bool,
        typer.Option("--paired", help="qk as C_q + G·C_k, the sum of FDC's pairs per query head."),
    ] = False,
    per_query_head: Annotated[
        bool,
        typer.Option("--per-query-head", help="qk with a basis per query head too, and its cost."),
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Keep the moments in this file (safetensors).")
    ] = None,
    json: JsonOption = None,
    csv: CsvOption = None,
    svg: SvgOption = None,
    png: PngOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Show the singular-value spectra of Q, K and V, and the ranks that removal rates give.

    Examples
    --------
    kvprof spectrum
    kvprof spectrum meta-llama/Llama-3.1-8B --tokens 32k --save moments.safetensors
    kvprof spectrum --from moments.safetensors --removal 0.02,0.05 --json spectrum.json
    """
    outputs = Outputs(json=json, csv=csv, out=out, svg=svg, png=png, force=force)
    outputs.check({"--save": save}, read=[model, source, text, token_ids, saved])
    rates = parse_removals(removal, what="--removal")
    weight = None if vo_weight == "raw" else parse_count(vo_weight, what="--vo-weight")
    chosen = _source(source, text, token_ids, saved)
    if chosen.kind is SourceKind.MOMENTS:
        given = {
            "--tokens": tokens,
            "--seq-len": seq_len,
            "--skip-first": skip_first,
            "--save": save,
            "--seed": seed,
            "--batch-size": batch_size,
            "--device": device != "auto" and model is None,
            "--dtype": dtype != "auto" and model is None,
        }
        if meaningless := [option for option, value in given.items() if value]:
            raise UsageError(
                f"{chosen.name}: saved moments are what they are; leave out "
                f"{' and '.join(meaningless)}"
            )
    if tokens and chosen.tokens is not None:
        raise UsageError(f"--tokens {tokens} and --source {source} both give a count; keep one")
    wanted = parse_count(tokens, what="--tokens") if tokens else chosen.tokens
    defaulted = wanted is None and chosen.kind is SourceKind.RANDOM
    if defaulted:
        wanted = DEFAULT_TOKENS
    length = parse_count(seq_len, what="--seq-len") if seq_len else None

    # Everything from here on needs torch.
    with loading():
        from kvprof.analysis.pairs import check_pairs
        from kvprof.analysis.spectrum import query_head_data, spectrum_data
        from kvprof.commands.steps import defined_pairs, load_for_command, spectra_only
        from kvprof.models.load import OpenedModel
        from kvprof.moments.collect import (
            CollectOptions,
            collect_moments,
            count_tokens,
            suitable_batch_size,
        )
        from kvprof.moments.files import load_moments, save_moments

    chosen_pairs = check_pairs([pair.strip() for pair in pairs.split(",") if pair.strip()])
    if per_query_head and "qk" not in chosen_pairs:
        raise UsageError(f"--per-query-head is about qk; add it to --pairs {pairs}")
    warnings: list[str] = []
    loaded = None
    expected = 0

    def options_of(opened: OpenedModel) -> CollectOptions:
        own = length or min(DEFAULT_SEQ_LEN, opened.context_length)
        return CollectOptions(
            tokens=wanted,
            seq_len=own,
            batch_size=batch_size or suitable_batch_size(opened.device, own),
            seed=seed,
            skip_first=skip_first,
            pre_rope="q_pre" in chosen_pairs or "k_pre" in chosen_pairs,
        )

    def before(opened: OpenedModel) -> None:
        nonlocal expected
        if chosen.kind is SourceKind.MOMENTS:
            load_moments(chosen.paths[0], fingerprint=opened.stored)
        else:
            expected = count_tokens(opened, chosen, options_of(opened))

    if chosen.kind is not SourceKind.MOMENTS or model is not None:
        loaded = load_for_command(
            model,
            device=device,
            dtype=dtype,
            revision=revision,
            gguf=gguf,
            trust_remote_code=trust_remote_code,
            before=before,
        )
        chosen_pairs = defined_pairs(loaded, chosen_pairs, asked=pairs != _PAIRS, warnings=warnings)
        warnings += spectra_only(loaded)
    lost: list[str] = []
    with graceful_interrupt() as stop:
        if chosen.kind is SourceKind.MOMENTS:
            moments = load_moments(
                chosen.paths[0], fingerprint=loaded.fingerprint if loaded is not None else None
            )
        else:
            assert loaded is not None
            what = f"{chosen.name} tokens through {loaded.spec}"
            with console.track(what, expected) as progress:
                *_, moments = collect_moments(
                    loaded, chosen, options_of(loaded), advance=progress.advance, should_stop=stop
                )
            if save is not None:
                try:
                    save_moments(moments, save, force=force)
                except KvprofError as problem:
                    lost.append(str(problem))
        if not moments.complete:
            warnings.append(f"interrupted after {moments.tokens:,} tokens")
        width = max(layer.rest["k"].shape[-1] for layer in moments.layers)
        if moments.tokens < 4 * width:
            warnings.append(
                f"{moments.tokens:,} tokens are few for heads of {width}: the spectra are limited "
                "by the sample, not by the model"
            )
        if grid > width:
            warnings.append(f"--grid {grid} is over the width of the heads, {width}")
        with console.status("taking the spectra"):
            data = spectrum_data(
                moments, chosen_pairs, rates, grid=grid, value_weight_tokens=weight, paired=paired
            )
            if per_query_head:
                data["per_query_head"] = query_head_data(moments, rates, grid=grid, paired=paired)
        outputs.end(
            "spectrum",
            inputs=_inputs(
                moments,
                chosen,
                chosen_pairs,
                grid=grid,
                weight=weight,
                paired=paired,
                per_query_head=per_query_head,
                reason=DEFAULT_TOKENS_REASON if defaulted else None,
            ),
            data=data,
            warnings=warnings,
            complete=moments.complete,
            lost=lost,
            interrupted=not moments.complete and chosen.kind is not SourceKind.MOMENTS,
        )


def _source(
    source: str | None, text: list[Path] | None, token_ids: Path | None, saved: Path | None
) -> Source:
    """Return the one source that the options name; random tokens when they name none."""
    given = {"--source": source, "--text": text, "--token-ids": token_ids, "--from": saved}
    named = [option for option, value in given.items() if value]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} name two sources of tokens; give one")
    if text:
        return file_source(text, token_ids=False)
    if token_ids:
        return file_source([token_ids], token_ids=True)
    if saved:
        return Source(SourceKind.MOMENTS, saved.name, (saved,))
    return parse_source(source or "random")


def _inputs(
    moments: "Moments",
    source: Source,
    pairs: tuple[str, ...],
    *,
    grid: int,
    weight: int | None,
    paired: bool,
    per_query_head: bool,
    reason: str | None,
) -> dict[str, Any]:
    """Return every resolved input, so that a reader can repeat the run."""
    first = moments.layers[0]
    return {
        **moments.info,
        "fingerprint": moments.fingerprint,
        "tokens": moments.tokens,
        "sequences": moments.sequences,
        "from_file": source.name if source.kind is SourceKind.MOMENTS else None,
        "pairs": list(pairs),
        "grid": grid,
        "value_weight_tokens": weight,
        "paired": paired,
        "per_query_head": per_query_head,
        "layers": len(moments.layers),
        "num_heads": first.rest["q"].shape[0],
        "num_kv_heads": first.rest["k"].shape[0],
        "head_dim": first.rest["k"].shape[-1],
        "v_head_dim": first.rest["v"].shape[-1],
        "default_tokens_source": reason,
    }
