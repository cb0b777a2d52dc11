"""Which long steps over quantised latents run as CUDA graphs: asked before each, by every rank.

A graph reads what came before a chunk once for each of the chunk's tokens, where a step that is
none writes it out once (`kvprof.serving.quantised`). What a step holds is the scheduler's, which
all ranks are told alike.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from kvprof.serving.settings import SHORT_GRAPH

__all__ = ["graph_pays", "scheduled_rows"]


def graph_pays(rows: Iterable[tuple[int, int]]) -> bool:
    """Tell whether a step should be a graph, if there is one of its length.

    Steps as long as vLLM's own graphs always are: the host takes longer to launch them. A longer
    one is where chunks read no more of what came before them than a prompt as long as the step
    reads of itself, which no form of a step saves. Sequences that decode read theirs in either form
    and do not count.

    Parameters
    ----------
    rows : iterable of (int, int)
        Of each sequence its new tokens, and those that came before them.
    """
    tokens = again = 0
    for new, before in rows:
        tokens += new
        again += new * before if new > 1 else 0
    return tokens <= SHORT_GRAPH or 2 * again <= tokens**2


def scheduled_rows(scheduled: Any) -> Iterator[tuple[int, int]]:
    """Give what `graph_pays` takes of a step that vLLM's scheduler has made up.

    Parameters
    ----------
    scheduled : SchedulerOutput
    """
    new, known = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
    for one in scheduled.scheduled_new_reqs:
        yield new[one.req_id], one.num_computed_tokens
    for name, before in zip(known.req_ids, known.num_computed_tokens, strict=True):
        yield new[name], before
