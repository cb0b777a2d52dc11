"""``kvprof sensitivity``: which parts of the cache bear fewer bits or dimensions, and which not."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvprof.commands.options import (
    DATA,
    BatchSizeOption,
    DeviceOption,
    DtypeOption,
    GgufOption,
    ModelArgument,
    RevisionOption,
    SeqLenOption,
    TextOption,
    TrustOption,
    check_rate,
    read_counts,
    share_option,
)
from kvprof.commands.output import (
    CsvOption,
    ForceOption,
    JsonOption,
    OutOption,
    Outputs,
    end_without_result,
)
from kvprof.errors import UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.named import MEASURED_QUANTISERS
from kvprof.sizes import parse_count

if TYPE_CHECKING:
    from kvprof.evaluation.data import TextSample
    from kvprof.moments.uncalibrated import Laid

_GROUP = "What is measured"
_ADVICE = "What is recommended"


def sensitivity(
    model: ModelArgument = None,
    by: Annotated[
        str,
        typer.Option(
            "--by", rich_help_panel=_GROUP, help="layer (all its heads at once), or head."
        ),
    ] = "layer",
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", rich_help_panel=_GROUP, help="Such as 0,1,-1; -1 is the last. Default all."
        ),
    ] = None,
    bits: Annotated[
        str,
        typer.Option(
            "--bits", rich_help_panel=_GROUP, help="Of the quantiser, and fp8; none for none."
        ),
    ] = "fp8,8,4,2",
    quantiser: Annotated[
        str,
        typer.Option(
            "--quantiser",
            rich_help_panel=_GROUP,
            help=f"{', '.join(MEASURED_QUANTISERS[:-1])} or {MEASURED_QUANTISERS[-1]}.",
        ),
    ] = "per-token",
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            rich_help_panel=_GROUP,
            help="Dimensions kept of a head, in kq's bases; none for none.",
        ),
    ] = "none",
    exact_first: Annotated[
        int,
        typer.Option(
            "--exact-first",
            min=0,
            rich_help_panel=_GROUP,
            help="Bits below 8 again, with so many first tokens exact; 0 for not again.",
        ),
    ] = 1,
    limit: Annotated[
        float,
        typer.Option(
            "--limit",
            metavar="NATS",
            rich_help_panel=_ADVICE,
            help="Divergence that the whole cache may cost, per token.",
        ),
    ] = 0.01,
    rate: Annotated[
        float | None,
        share_option(
            "--rate", "Hand out bits and ranks at this share of bytes saved, as a plan.", _ADVICE
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", rich_help_panel=_ADVICE, help="Keep the plan of --rate in this file."
        ),
    ] = None,
    text: TextOption = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            rich_help_panel=DATA,
            help="Of text in all, half of them decoded; k is 1,024. Default 2k, 32k on a GPU.",
        ),
    ] = None,
    seq_len: SeqLenOption = None,
    batch_size: BatchSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = None,
    csv: CsvOption = None,
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Store one layer's keys or values in fewer bits or dimensions, and see what predictions lose.

    Examples
    --------
    kvprof sensitivity
    kvprof sensitivity --by head --layers 0,-1 --bits 4,2
    kvprof sensitivity --ranks 96,64 --bits fp8,4 --limit 0.05
    kvprof sensitivity --text calibration --by head --rate 0.85 --save mixed.plan
    """
    outputs = Outputs(json=json, csv=csv, out=out, force=force)
    outputs.check({"--save": save}, read=[model, text])
    check_rate(rate)
    if save is not None and rate is None:
        raise UsageError(f"--save {save}: the plan that is handed out at --rate; give one")
    if by not in ("layer", "head"):
        raise UsageError(f"--by {by}: it is layer or head")
    if not 0 < limit < float("inf"):
        raise UsageError(f"--limit {limit:g}: it is a divergence in nats, above 0")
    given_bits = _bits(bits)
    given_ranks = [] if ranks == "none" else read_counts(ranks, what="--ranks")
    if not given_bits and not given_ranks:
        raise UsageError("--bits none and --ranks none leave nothing to measure")
    count = parse_count(tokens, what="--tokens") if tokens else None
    length = parse_count(seq_len, what="--seq-len") if seq_len else None
    _check_quantiser(quantiser, given_bits)

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.loading import load_for_command
        from kvprof.commands.sensitivity_run import (
            Request,
            check_study,
            chosen_layers,
            read_samples,
            study,
        )

    request = Request(
        by_head=by == "head",
        layers=(),
        bits=tuple(given_bits),
        quantiser=quantiser,
        ranks=tuple(given_ranks),
        exact_first=exact_first,
        limit=limit,
        text=tuple(text or ("prose",)),
        tokens=count,
        seq_len=length,
        batch_size=batch_size,
        rate=rate,
        save=save,
        force=force,
    )
    samples: list[TextSample] = []

    def laid(one: "Laid") -> None:
        nonlocal request
        request = replace(request, layers=chosen_layers(layers, len(one.layout.layers)))
        check_study(one, request, samples)

    loaded = load_for_command(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        gguf=gguf,
        trust_remote_code=trust_remote_code,
        compressed=True,
        before=lambda opened: samples.extend(read_samples(opened, request)),
        laid=laid,
    )
    with graceful_interrupt() as stop:
        found = study(loaded, request, samples, stop)
        if not found.data["cells"]:
            end_without_result("interrupted before anything was measured; there is no result")
        outputs.end(
            "sensitivity",
            inputs=found.inputs,
            data=found.data,
            warnings=found.warnings,
            complete=found.complete,
            lost=found.lost,
        )


def _bits(text: str) -> list[str]:
    if text == "none":
        return []
    found = []
    for entry in text.split(","):
        name = entry.strip()
        if name != "fp8" and not (name.isascii() and name.isdigit() and 0 < len(name) < 3):
            raise UsageError(f"--bits: {name[:40]!r} is neither fp8 nor a number of bits")
        name = name if name == "fp8" else str(int(name))
        if name not in found:
            found.append(name)
    return found


def _check_quantiser(name: str, bits: list[str]) -> None:
    """Refuse quantisers that there are not, before torch is loaded."""
    known = MEASURED_QUANTISERS
    if name not in known:
        hint = " (hqq's tokens depend on each other; eval takes it)" if name == "hqq" else ""
        raise UsageError(f"--quantiser {name[:40]}: it is none of {', '.join(known)}{hint}")
    if name != "per-token" and not [one for one in bits if one != "fp8"]:
        raise UsageError(f"--quantiser {name} means nothing without its bits in --bits")
