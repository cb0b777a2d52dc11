"""``kvprof sensitivity``: which parts of the cache tolerate lower precision or fewer dimensions."""

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from kvprof.commands.options import (
    DATA,
    ModelOptions,
    SeqLenOption,
    TextOption,
    read_counts,
    share_option,
)
from kvprof.commands.output import Outcome, TableOptions, measuring
from kvprof.commands.request import Input, Mark, Parsed, Rule, needs, written
from kvprof.errors import UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.named import MEASURED_QUANTISERS
from kvprof.sizes import check_rate, parse_count

if TYPE_CHECKING:
    from kvprof.evaluation.data import TextSample
    from kvprof.moments.uncalibrated import Laid

_GROUP = "What is measured"
_ADVICE = "What is recommended"


def _bits(text: str, *, what: str) -> tuple[str, ...]:
    found = []
    for entry in text.split(",") if text != "none" else ():
        name = entry.strip()
        if name != "fp8" and not (name.isascii() and name.isdigit() and 0 < len(name) < 3):
            raise UsageError(f"{what}: {name[:40]!r} is neither fp8 nor a bit width")
        found.append(name if name == "fp8" else str(int(name)))
    return tuple(dict.fromkeys(found))


def _ranks(text: str, *, what: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(read_counts(text, what=what))


def _measures(request: "SensitivityRequest") -> str | None:
    if request.by not in ("layer", "head"):
        return f"--by {request.by}: give layer or head"
    if (name := request.quantiser) not in MEASURED_QUANTISERS:
        hint = " (kvprof eval takes hqq)" if name == "hqq" else ""
        return f"--quantiser {name[:40]}: give {' or '.join(MEASURED_QUANTISERS)}{hint}"
    if name != "per-token" and not set(request.bits) - {"fp8"}:
        return f"--quantiser {name} requires a bit width in --bits"
    if not request.bits and not request.ranks:
        return "--bits none and --ranks none measure nothing; give one of them"
    if not 0 < request.limit < inf:
        return f"--limit {request.limit:g}: give a divergence in nats, above 0"
    check_rate(request.rate)
    return None


class SensitivityRequest(ModelOptions, TableOptions):
    """Test which layers and heads tolerate fewer bits or dimensions.

    Examples
    --------
    kvprof sensitivity
    kvprof sensitivity --by head --layers 0,-1 --bits 4,2
    kvprof sensitivity --ranks 96,64 --bits fp8,4 --limit 0.05
    kvprof sensitivity --text calibration --by head --rate 0.85 --save mixed.plan
    """

    by: Annotated[
        str,
        typer.Option(
            "--by",
            rich_help_panel=_GROUP,
            help="Compress one layer (all its heads) or one head at a time.",
        ),
        Mark.FREE,
        Input(),
    ] = "layer"
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            rich_help_panel=_GROUP,
            help="Layers to test, such as 0,1,-1 (-1: the last).  [default: all]",
        ),
        Mark.FREE,
    ] = None
    bits: Annotated[
        tuple[str, ...],
        typer.Option(
            "--bits", rich_help_panel=_GROUP, help="Bit widths to test, plus fp8; none to skip."
        ),
        Parsed(_bits),
        Mark.FREE,
        Input(),
    ] = written("fp8,8,4,2")
    quantiser: Annotated[
        str,
        typer.Option(
            "--quantiser",
            rich_help_panel=_GROUP,
            help=f"{', '.join(MEASURED_QUANTISERS[:-1])} or {MEASURED_QUANTISERS[-1]}.",
        ),
        Mark.FREE,
        Input(),
    ] = "per-token"
    ranks: Annotated[
        tuple[int, ...],
        typer.Option(
            "--ranks",
            rich_help_panel=_GROUP,
            help="Ranks to test in kq's bases; none to skip.",
        ),
        Parsed(_ranks),
        Mark.FREE,
        Input(),
    ] = written("none")
    exact_first: Annotated[
        int,
        typer.Option(
            "--exact-first",
            min=0,
            rich_help_panel=_GROUP,
            help="Repeat bit widths < 8 with the first N tokens unquantised; 0 to skip.",
        ),
        Mark.FREE,
        Input(),
    ] = 1
    limit: Annotated[
        float,
        typer.Option(
            "--limit",
            metavar="NATS",
            rich_help_panel=_ADVICE,
            help="Maximum KL divergence per token of the recommended cache.",
        ),
        Mark.FREE,
        Input(),
    ] = 0.01
    rate: Annotated[
        float | None,
        share_option(
            "--rate",
            "Compression rate (share of bytes saved) of a plan with mixed bits and ranks.",
            _ADVICE,
        ),
        Mark.FREE,
        Input(),
    ] = None
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", rich_help_panel=_ADVICE, help="Save the plan of --rate to this file."
        ),
        Mark.WRITES,
        Input("saved"),
    ] = None
    text: TextOption = None
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            rich_help_panel=DATA,
            help="Tokens of text, half of them scored; k is 1,024.  [default: 2k; 32k on a GPU]",
        ),
        Parsed(parse_count),
        Mark.FREE,
    ] = None
    seq_len: SeqLenOption = None

    rules: ClassVar[tuple[Rule, ...]] = (needs("save", "rate"), _measures)


@measuring(SensitivityRequest)
def sensitivity(request: SensitivityRequest) -> Outcome:
    """Measure the parts that a request asks for."""
    length = parse_count(request.seq_len, what="--seq-len") if request.seq_len else None

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.loading import load_for_command
        from kvprof.commands.sensitivity_study import (
            check_study,
            chosen_layers,
            read_samples,
            study,
        )

    samples: list[TextSample] = []
    layers: list[int] = []

    def laid(one: "Laid") -> None:
        layers.extend(chosen_layers(request.layers, len(one.layout.layers)))
        check_study(one, request, layers, samples)

    loaded = load_for_command(
        request.model,
        **request.how,
        compressed=True,
        before=lambda opened: samples.extend(read_samples(opened, request, length)),
        laid=laid,
    )
    with graceful_interrupt() as stop:
        return study(loaded, request, layers, samples, stop)
