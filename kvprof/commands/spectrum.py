"""``kvprof spectrum``: how compact a model's Q, K and V are, head by head."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kvprof import console
from kvprof.commands.options import ModelOptions, SeedOption, parse_removals
from kvprof.commands.output import FigureOptions, Outcome, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, excludes, one_of, written
from kvprof.errors import KvprofError
from kvprof.interrupt import Stop, graceful_interrupt
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
    from kvprof.models.load import LoadedModel, OpenedModel
    from kvprof.moments.collect import CollectOptions


def _weight(text: str, *, what: str) -> int | None:
    return None if text == "raw" else parse_count(text, what=what)


def _names(text: str, *, what: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counts_once(request: "SpectrumRequest") -> str | None:
    if request.tokens is None or request.tokens_of().tokens is None:
        return None
    return f"--tokens and --source {request.source} both give a count; give one"


def _has_qk(request: "SpectrumRequest") -> str | None:
    wrong = request.per_query_head and "qk" not in request.pairs
    return "--per-query-head requires qk among --pairs" if wrong else None


class SpectrumRequest(ModelOptions, FigureOptions):
    """Show the singular-value spectra of Q, K and V, and the rank at each removal rate.

    Examples
    --------
    kvprof spectrum
    kvprof spectrum meta-llama/Llama-3.1-8B --tokens 32k --save moments.safetensors
    kvprof spectrum --from moments.safetensors --removal 0.02,0.05 --json spectrum.json
    """

    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            help="Tokens to run: random:8k, prose, code, tasks, calibration (embedded), or a file.",
        ),
        Mark.READS,
    ] = None
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", help="Text or JSON Lines file, instead of random tokens; repeatable."
        ),
        Mark.READS,
    ] = None
    token_ids: Annotated[
        Path | None,
        typer.Option("--token-ids", help="File of token ids: .npy, or one sequence per line."),
        Mark.READS,
    ] = None
    saved: Annotated[
        Path | None,
        typer.Option("--from", help="Read saved moments instead of running the model."),
        Mark.READS,
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", help="Number of tokens; k is 1,024.  [default: 8k, or all of the text]"
        ),
        Parsed(parse_count),
        Mark.FREE,
    ] = None
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            help="Tokens per sequence.  [default: 2k, or the model's context if shorter]",
        ),
        Parsed(parse_count),
        Mark.FREE,
    ] = None
    seed: SeedOption = 0
    skip_first: Annotated[
        int,
        typer.Option("--skip-first", min=0, help="Skip the first N positions of each sequence."),
        Mark.FREE,
    ] = 0
    pairs: Annotated[
        tuple[str, ...],
        typer.Option("--pairs", help="Matrices: qk, vo, q, k, v, q_pre, k_pre (before RoPE), w_v."),
        Parsed(_names),
        Mark.FREE,
        Input(),
    ] = written("qk,vo,k,v")
    removal: Annotated[
        list[float],
        typer.Option("--removal", help="Removal rates (FDC eq. 1) to give ranks for."),
        Parsed(parse_removals),
        Mark.FREE,
    ] = written("0.01,0.02,0.05,0.1,0.2")
    grid: Annotated[
        int,
        typer.Option("--grid", min=1, help="Round ranks up to multiples of this."),
        Mark.FREE,
        Input(),
    ] = 16
    vo_weight: Annotated[
        int | None,
        typer.Option(
            "--vo-weight", help="Tokens that V is scaled to when combined with W_O; raw: unscaled."
        ),
        Parsed(_weight),
        Mark.FREE,
        Input("value_weight_tokens"),
    ] = written("8k")
    paired: Annotated[
        bool,
        typer.Option(
            "--paired", help="Use C_q + G·C_k for qk: the sum over FDC's query-head pairs."
        ),
        Mark.FREE,
        Input(),
    ] = False
    per_query_head: Annotated[
        bool,
        typer.Option(
            "--per-query-head", help="Also compute qk with one basis per query head, and its cost."
        ),
        Mark.FREE,
        Input(),
    ] = False
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Save the moments to this file (safetensors)."),
        Mark.WRITES,
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        one_of("source", "text", "token_ids", "saved"),
        excludes("saved", "tokens", "seq_len", "skip_first", "save", "seed", "batch_size"),
        excludes("saved", "device", "dtype", unless="model"),
        _counts_once,
        _has_qk,
    )

    def tokens_of(self) -> Source:
        """Return where the tokens come from; random ones by default."""
        if self.text:
            return file_source(self.text, token_ids=False)
        if self.token_ids:
            return file_source([self.token_ids], token_ids=True)
        if self.saved:
            return Source(SourceKind.MOMENTS, self.saved.name, (self.saved,))
        return parse_source(self.source or "random")


@measuring(SpectrumRequest)
def spectrum(request: SpectrumRequest) -> Outcome:
    """Measure the spectra that a request asks for."""
    source = request.tokens_of()

    # Everything from here on needs torch.
    with loading():
        from kvprof.analysis.pairs import check_pairs
        from kvprof.analysis.spectrum import query_head_data, spectrum_data
        from kvprof.commands.loading import defined_pairs, load_for_command, spectra_only
        from kvprof.moments.collect import count_tokens
        from kvprof.moments.files import load_moments

    pairs = check_pairs(list(request.pairs))
    warnings: list[str] = []
    loaded, expected = None, 0

    def before(opened: "OpenedModel") -> None:
        nonlocal expected
        if request.saved is not None:
            load_moments(request.saved, fingerprint=opened.stored)
        else:
            expected = count_tokens(opened, source, _collect_options(request, source, opened))

    if request.saved is None or request.model is not None:
        loaded = load_for_command(request.model, **request.how, before=before)
        pairs = defined_pairs(loaded, pairs, asked=request.has("pairs"), warnings=warnings)
        warnings += spectra_only(loaded)
    lost: list[str] = []
    with graceful_interrupt() as stop:
        if request.saved is not None:
            fingerprint = loaded.fingerprint if loaded is not None else None
            moments = load_moments(request.saved, fingerprint=fingerprint)
        else:
            assert loaded is not None
            moments = _collected(request, source, loaded, expected, stop, lost)
        warnings += _doubts(request, moments)
        how: dict[str, Any] = {"grid": request.grid, "paired": request.paired}
        with console.status("computing the spectra"):
            data = spectrum_data(
                moments, pairs, request.removal, value_weight_tokens=request.vo_weight, **how
            )
            if request.per_query_head:
                data["per_query_head"] = query_head_data(moments, request.removal, **how)
        return Outcome(
            inputs={
                **moments.info,
                **request.inputs(),
                **_measured(moments),
                "pairs": list(pairs),
                "from_file": source.name if request.saved is not None else None,
                "default_tokens_source": (
                    DEFAULT_TOKENS_REASON if _is_default(request, source) else None
                ),
            },
            data=data,
            warnings=warnings,
            complete=moments.complete,
            lost=lost,
            interrupted=not moments.complete and request.saved is None,
        )


def _is_default(request: SpectrumRequest, source: Source) -> bool:
    given = request.tokens or source.tokens
    return given is None and source.kind is SourceKind.RANDOM


def _collect_options(
    request: SpectrumRequest, source: Source, opened: "OpenedModel"
) -> "CollectOptions":
    from kvprof.moments.collect import CollectOptions, suitable_batch_size

    own = request.seq_len or min(DEFAULT_SEQ_LEN, opened.context_length)
    tokens = DEFAULT_TOKENS if _is_default(request, source) else request.tokens or source.tokens
    return CollectOptions(
        tokens=tokens,
        seq_len=own,
        batch_size=request.batch_size or suitable_batch_size(opened.device, own),
        seed=request.seed,
        skip_first=request.skip_first,
        pre_rope="q_pre" in request.pairs or "k_pre" in request.pairs,
    )


def _collected(
    request: SpectrumRequest,
    source: Source,
    loaded: "LoadedModel",
    expected: int,
    stop: Stop,
    lost: list[str],
) -> "Moments":
    """Run the model over the tokens, and save the moments where that was asked for."""
    from kvprof.moments.collect import collect_moments
    from kvprof.moments.files import save_moments

    options = _collect_options(request, source, loaded)
    with console.track(f"{source.name} tokens through {loaded.spec}", expected) as progress:
        *_, moments = collect_moments(
            loaded, source, options, advance=progress.advance, should_stop=stop
        )
    if request.save is not None:
        try:
            save_moments(moments, request.save, force=request.force)
        except KvprofError as problem:
            lost.append(str(problem))
    return moments


def _doubts(request: SpectrumRequest, moments: "Moments") -> list[str]:
    """Return what limits the spectra."""
    found = [] if moments.complete else [f"interrupted after {moments.tokens:,} tokens"]
    width = max(layer.rest["k"].shape[-1] for layer in moments.layers)
    if moments.tokens < 4 * width:
        found.append(
            f"{moments.tokens:,} tokens are too few for a head_dim of {width}: the sample limits "
            "the spectra"
        )
    if request.grid > width:
        found.append(f"--grid {request.grid} exceeds head_dim, {width}")
    return found


def _measured(moments: "Moments") -> dict[str, Any]:
    first = moments.layers[0]
    return {
        "fingerprint": moments.fingerprint,
        "tokens": moments.tokens,
        "sequences": moments.sequences,
        "layers": len(moments.layers),
        "num_heads": first.rest["q"].shape[0],
        "num_kv_heads": first.rest["k"].shape[0],
        "head_dim": first.rest["k"].shape[-1],
        "v_head_dim": first.rest["v"].shape[-1],
    }
