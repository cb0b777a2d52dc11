"""``kvprof compare``: what got better, what got worse, and is that sure?"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvprof.commands.output import ForceOption, JsonOption, Outputs
from kvprof.commands.run_source import checked_report, load_run
from kvprof.errors import ClaimNotMetError, UsageError
from kvprof.records.compare import compare as compare_results
from kvprof.records.files import what_was_read
from kvprof.records.result import to_plain
from kvprof.sizes import parse_share
from kvprof.views.compare import report


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Two or more runs of one kind (folders, results, events.jsonl); the first is "
            "the baseline, A.",
        ),
    ],
    fail_over: Annotated[
        str | None,
        typer.Option(
            "--fail-over",
            metavar="SHARE",
            help="Exit 4 when a figure got worse by more than this (5% or 0.05) over its whole "
            "interval, noise included.",
            show_default=False,
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="Also list unchanged figures.")] = False,
    json: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Compare results of one kind, figure by figure, with intervals where known.

    Examples
    --------
    kvprof compare before/ after/
    kvprof compare before.json after.json --fail-over 5%
    """
    outputs = Outputs(json=json, force=force)
    outputs.check(read=runs)
    limit = _share(fail_over)
    if len(runs) < 2:
        raise UsageError(f"compare requires two runs or more; only {runs[0]} was given")
    results = [load_run(run) for run in runs]
    names = _names(runs)
    read = " or ".join(names)
    with what_was_read(read):
        data = to_plain(compare_results(results, names, fail_over=limit))
    worse = None
    if failed := data["failed"]:
        worse = ClaimNotMetError(
            f"--fail-over {fail_over}: {failed} {'figure' if failed == 1 else 'figures'} got worse "
            "by more"
        )

    outputs.end(
        "compare",
        inputs={"runs": names, "fail_over": limit},
        data=data,
        warnings=[
            f"{name} is incomplete: {one['incomplete_reason']}"
            for name, one in zip(names, results, strict=True)
            if not one["complete"]
        ],
        problem=worse,
        report=checked_report(read, partial(report, whole=whole)),
    )


def _share(text: str | None) -> float | None:
    """Read a share as people write it; 5 alone might be five per cent or five times."""
    if text is None:
        return None
    value = parse_share(text, what="--fail-over")
    if value < 0 or (value >= 1 and "%" not in text):
        raise UsageError(f"--fail-over {text}: write a share such as 5% or 0.05")
    return value


def _names(runs: list[str]) -> list[str]:
    """Return short names, without folders of this machine where they are not needed."""
    short = [Path(run).name or run for run in runs]
    return short if len(set(short)) == len(set(runs)) else list(runs)
