"""Room reserved in advance for what a layer stores: the static cache."""

from dataclasses import replace
from functools import cache

from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.tokens import Segment, segments
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.parts import Part

__all__ = ["Arena"]

_Kind = tuple[bool, int, bool]


class Arena:
    """One layer's buffers, each as large as its segment gets at any length up to the capacity.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
    capacity : int
        Tokens per sequence.
    """

    def __init__(self, plan: Plan, layer: LayerPlan, capacity: int) -> None:
        self.capacity = capacity
        self._plan = plan
        self._layer = layer
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def take(self, cohorts: list[Cohort]) -> None:
        """Move what the cohorts store into the buffers.

        Raises
        ------
        UsageError
            When a sequence has outgrown the capacity.
        """
        for number, cohort in enumerate(cohorts):
            if cohort.seen > self.capacity:
                raise UsageError(
                    f"the static cache has room for {self.capacity} tokens, not for {cohort.seen}"
                )
            kinds = [_kind(self._plan, s) for s in segments(self._plan, self._layer, cohort.seen)]
            for name in ("keys", "values"):
                side: list[list[Part]] = getattr(cohort, name)
                for bundle, parts in enumerate(side):
                    side[bundle] = [
                        self._placed(part, (number, name, bundle, kind))
                        for part, kind in zip(parts, kinds, strict=True)
                    ]

    def _placed(self, part: Part, slot: tuple[int, str, int, _Kind]) -> Part:
        longest = _longest(self._plan, self._layer, self.capacity)[slot[3]]
        stored = {}
        for name, tensor in part.stored.items():
            entries = -(-longest // part.codec.tokens_per_entry(name))
            key = (*slot, name, tensor.shape[0])
            if key not in self._buffers:
                shape = (*tensor.shape[:2], entries, tensor.shape[3])
                self._buffers[key] = tensor.new_zeros(shape)
            view = self._buffers[key][:, :, : tensor.shape[2]]
            view.copy_(tensor)
            stored[name] = view
        return replace(part, stored=stored)


def _kind(plan: Plan, segment: Segment) -> _Kind:
    # Sinks lie first and at the top level; nothing else that begins at 0 is unquantised there
    # unless there are no sinks at all, and then no two segments share a kind.
    return segment.start == 0 and plan.levels.sink > 0, segment.level, segment.quantised


@cache
def _longest(plan: Plan, layer: LayerPlan, capacity: int) -> dict[_Kind, int]:
    longest: dict[_Kind, int] = {}
    for tokens in range(1, capacity + 1):
        for segment in segments(plan, layer, tokens):
            kind = _kind(plan, segment)
            longest[kind] = max(longest.get(kind, 0), segment.tokens)
    return longest
