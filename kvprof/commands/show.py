"""``kvprof show``: a result again, as it was shown when it was measured."""

from kvprof.commands.output import ForceOption, JsonOption, Outputs
from kvprof.commands.run_source import RunArgument, checked_report, load_run


def show(run: RunArgument, json: JsonOption = None, force: ForceOption = False) -> None:
    """Show a result of any kind again.

    A run that was killed, or that still runs, is shown as far as its events go; --json keeps what
    they make.

    Examples
    --------
    kvprof show demo
    kvprof show jct-run
    kvprof show result.json --json -
    """
    outputs = Outputs(json=json, force=force)
    outputs.check(read=[run])
    outputs.finish(load_run(run), checked_report(run))
