"""``--context``: the length at which the bytes of a rate are counted."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvprof.commands.options import METHOD
from kvprof.sizes import parse_count
from kvprof.sources.grammar import DEFAULT_SEQ_LEN

if TYPE_CHECKING:
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel

__all__ = ["ContextOption", "evaluation_context", "resolve_context"]

ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        rich_help_panel=METHOD,
        help="Tokens at which bytes are counted; k is 1,024. Default: an evaluation's mean.",
    ),
]


def evaluation_context(context_length: int) -> int:
    """Return the mean context of an evaluation, in tokens.

    Sequences are 2,048 tokens long, or the model's context; their second half is decoded, so that
    three quarters of them are in the cache on average.

    Parameters
    ----------
    context_length : int
        Of the model.
    """
    return max(1, min(DEFAULT_SEQ_LEN, context_length) * 3 // 4)


def resolve_context(
    context: str | None, loaded: "LoadedModel | None", plan: "Plan | None" = None
) -> int:
    """Return the tokens that ``--context`` names, or an evaluation's mean context.

    Parameters
    ----------
    context : str or None
        From the command line.
    loaded : LoadedModel or None
        None where a saved plan is looked at without its model.
    plan : Plan, optional
        The saved plan; the context that its rate was asked for is taken then.

    Raises
    ------
    UsageError
        When it is no count.
    """
    if context is not None:
        return parse_count(context, what="--context")
    if loaded is not None:
        return evaluation_context(loaded.context_length)
    stated = plan.made.get("context") if plan is not None else None
    return stated if isinstance(stated, int) else evaluation_context(DEFAULT_SEQ_LEN)
