"""Bits of each latent column by reverse water-filling, in blocks of columns."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

from kvprof.analysis.rank_allocation import Choice, RankTarget, cheapest, few_kinds, head_units

__all__ = ["ColumnBits", "bit_loss", "blocks_of", "few_column_bits", "water_filled"]

#: Runs of adjacent columns and the bits of each, from the first column on.
ColumnBits = tuple[tuple[int, int], ...]


def blocks_of(width: int, block: int) -> list[int]:
    """Return the widths of a latent's blocks, `block` columns each, the last one what is left."""
    return [min(block, width - start) for start in range(0, width, block)]


def water_filled(
    targets: Sequence[RankTarget],
    knob: float,
    block: int,
    weights: Sequence[float],
    distortion: Mapping[int, float],
    together: Sequence[Hashable] | None = None,
) -> list[ColumnBits]:
    """Return the bits of every target's columns that lose the least within a budget.

    Minimised is ``Σ w_t Σ_i σ_{t,i}² D(b_{t,i})`` subject to ``Σ b_{t,i}`` bits in all, with D the
    quantiser's squared error of a column of energy 1 and ``D(0) = 1``. With ``D(b) = 4^-b`` and any
    number of bits that is reverse water-filling: ``b_i = max(0, ½ log₂(w σ_i² / θ))``. Here every
    block steps down the lower convex hull of its (bits, loss), which is optimal where the budget is
    met exactly (`cheapest`); otherwise less than a step of it is left. The first block of a target
    keeps some bits: a head without any could not be attended to.

    Parameters
    ----------
    targets : sequence of RankTarget
    knob : float
        Share of the bits that is saved: 0 gives the most bits that `distortion` knows to every
        column, 1 the fewest to the first block alone.
    block : int
        Columns that have bits in common.
    weights : sequence of float
        Of each target, w: what a unit of its predicted squared error costs.
    distortion : mapping of int to float
        D by bits; 0 among them.
    together : sequence, optional
        A name for each target: those of one name (and one width) get the same bits, the ones that
        lose least over all of them.

    Returns
    -------
    list of ColumnBits
        One per target; bits never increase from run to run.
    """
    most = max(distortion)
    names: Sequence[Hashable] = range(len(targets)) if together is None else together
    groups: dict[Hashable, list[int]] = {}
    for index, (name, target) in enumerate(zip(names, targets, strict=True)):
        groups.setdefault((name, target.width), []).append(index)
    parts, places = [], []
    for own in groups.values():
        energies = [(weights[index], targets[index].values.double().square()) for index in own]
        start = targets[own[0]].width
        # The last block first: of equal ones the later loses its bits before the earlier.
        for width in reversed(blocks_of(start, block)):
            start -= width
            energy = sum(w * float(one[start : start + width].sum()) for w, one in energies)
            parts.append(
                [
                    Choice(str(bits), bits * width * len(own), energy * distortion[bits])
                    for bits in sorted(distortion)
                    if bits or start
                ]
            )
            places.append((own, width))
    least = sum(min(choice.size for choice in choices) for choices in parts)
    whole = most * sum(target.width for target in targets)
    chosen = cheapest(parts, max(least, (1.0 - knob) * whole))
    assert chosen is not None  # the smallest choices of all fit
    given: list[list[tuple[int, int]]] = [[] for _ in targets]
    for (own, width), choice in zip(places, chosen, strict=True):
        for index in own:
            given[index].append((width, int(choice.name)))
    return [_runs(blocks[::-1]) for blocks in given]


def bit_loss(target: RankTarget, runs: ColumnBits, distortion: Mapping[int, float]) -> float:
    """Return the predicted squared error of a target whose columns have these bits."""
    energies = target.values.double().square()
    lost, start = 0.0, 0
    for width, bits in runs:
        lost += float(energies[start : start + width].sum()) * distortion[bits]
        start += width
    return lost


def few_column_bits(
    targets: Sequence[RankTarget],
    given: Sequence[ColumnBits],
    kinds: int,
    weights: Sequence[float],
    distortion: Mapping[int, float],
) -> list[ColumnBits]:
    """Return bits of at most so many head configs, a kind being those of its keys and values.

    Chosen among what some target has already, and of no more bits in all; of such choices (nearly)
    the least loss (`kvprof.analysis.rank_allocation.few_kinds`).

    Parameters
    ----------
    targets : sequence of RankTarget
    given : sequence of ColumnBits
        From `water_filled`.
    kinds : int
        1 or more.
    weights, distortion
        As there.
    """
    known = sorted(set(given), key=lambda runs: (_size(runs), runs))
    # A run of columns of equal bits stands where `few_kinds` has a rank: its place by size.
    numbers = {runs: number for number, runs in enumerate(known)}
    losses = [
        {
            numbers[runs]: weight * bit_loss(target, runs, distortion)
            for runs in known
            if sum(width for width, _ in runs) == target.width
        }
        for target, weight in zip(targets, weights, strict=True)
    ]
    limited = few_kinds(
        targets, head_units(targets), losses, kinds, lambda _, number: float(_size(known[number]))
    )
    return [known[number] for number in limited([numbers[runs] for runs in given])]


def _runs(blocks: Sequence[tuple[int, int]]) -> ColumnBits:
    runs = [(bits, [width for width, _ in run]) for bits, run in groupby(blocks, lambda x: x[1])]
    return tuple((sum(widths), bits) for bits, widths in runs)


def _size(runs: ColumnBits) -> int:
    return sum(width * bits for width, bits in runs)
