"""What the kernels have stored, as the layers that run on torch keep it."""

from collections.abc import Sequence

import torch

from kvprof.runtime.cohort import Cohort
from kvprof.runtime.heads import Bundle
from kvprof.runtime.kernels.planes import PlaneStore
from kvprof.runtime.parts import plain_part

__all__ = ["plane_cohorts", "rows_alike"]


def rows_alike(seen: Sequence[int]) -> dict[int, list[int]]:
    """Return the rows that have had as many tokens, by that number; rows without any are left out.

    Parameters
    ----------
    seen : sequence of int
        Tokens of each row.
    """
    together: dict[int, list[int]] = {}
    for row, tokens in enumerate(seen):
        if tokens:
            together.setdefault(tokens, []).append(row)
    return together


def plane_cohorts(
    store: PlaneStore, seen: Sequence[int], bundles: tuple[list[Bundle], list[Bundle]], heads: int
) -> list[Cohort]:
    """Return planes as cohorts of rows.

    Parameters
    ----------
    store : PlaneStore
    seen : sequence of int
        Tokens of each row.
    bundles : pair of list of Bundle
        Of the keys and of the values.
    heads : int
        KV heads that share a latent, which is one of the store's heads.
    """
    found = []
    for tokens, rows in rows_alike(seen).items():
        cohort = Cohort(rows, tokens)
        latents = [
            [store.head_rows(number, row, tokens) for row in rows] for number in range(store.heads)
        ]
        for place, kept in enumerate((cohort.keys, cohort.values)):
            for bundle in bundles[place]:
                numbers = [head // heads for head in bundle.kv_heads[::heads]]
                own = [torch.stack([pair[place] for pair in latents[n]]) for n in numbers]
                kept.append([plain_part(torch.stack(own, dim=1))])
        found.append(cohort)
    return found
