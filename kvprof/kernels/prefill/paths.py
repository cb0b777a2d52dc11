"""Ways to compute a prompt's attention, per head, and which of them is best by given times."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.launch import prefill_step
from kvprof.kernels.prefill.library import (
    REWARDED,
    library_jobs,
    padded_width,
    width_classes,
)
from kvprof.kernels.prefill.streams import side_by_side
from kvprof.kernels.prefill.tuning import Tuning

__all__ = ["PATHS", "Choice", "best_paths", "from_table", "run_paths"]

#: What a caller may ask for.
PATHS = ("auto", "quick", "triton", "library")

# Both ways at once are taken only when that clearly pays: it did not where few samples said so.
_CLEARLY = 0.95


@dataclass(frozen=True)
class Choice:
    """What was found best.

    Attributes
    ----------
    paths : tuple of str
        ``triton`` or ``library``, per KV head.
    seconds : dict
        Measured times: ``triton`` and ``library`` for all heads that way, ``mixed`` where each
        class of widths took its faster one and they differ.
    """

    paths: tuple[str, ...]
    seconds: Mapping[str, float]


def best_paths(layout: RaggedLayout, seconds: Callable[[tuple[str | None, ...]], float]) -> Choice:
    """Return the fastest of all Triton, all library and each class its own.

    Parameters
    ----------
    layout : RaggedLayout
    seconds : callable
        Measures a path per head; None leaves a head out.
    """
    heads = range(layout.heads)
    if max(layout.key_widths + layout.value_widths) > REWARDED[-1]:
        return Choice(("triton",) * layout.heads, {})
    options: dict[str, tuple[str, ...]] = {
        path: (path,) * layout.heads for path in ("triton", "library")
    }
    found = {name: seconds(paths) for name, paths in options.items()}
    classes = width_classes(layout, heads)
    if len(classes) > 1:
        mixed = ["triton"] * layout.heads
        for own in classes.values():
            alone = {
                path: seconds(tuple(path if head in own else None for head in heads))
                for path in options
            }
            for head in own:
                mixed[head] = min(alone, key=lambda path: alone[path])
        if len(set(mixed)) > 1:
            options["mixed"] = tuple(mixed)
            found["mixed"] = seconds(tuple(mixed))
    best = min(options.keys() - {"mixed"}, key=lambda name: found[name])
    if found.get("mixed", math.inf) < _CLEARLY * found[best]:
        best = "mixed"
    return Choice(options[best], found)


def from_table(
    layout: RaggedLayout, table: Mapping[tuple[int, int], Mapping[str, float]]
) -> Choice:
    """Return each class's faster path by a table of times.

    Parameters
    ----------
    layout : RaggedLayout
    table : mapping
        Seconds by path, ``triton`` and ``library``, of each padded pair of widths.

    Raises
    ------
    UsageError
        When a class is not in the table.
    """
    paths = []
    for pair in zip(layout.key_widths, layout.value_widths, strict=True):
        padded = (padded_width(pair[0]), padded_width(pair[1]))
        times = table.get(padded)
        if times is None or set(times) != {"triton", "library"}:
            raise UsageError(f"the table of times lacks triton or library for {padded}")
        paths.append(min(times, key=lambda path: times[path]))
    return Choice(tuple(paths), {})


def run_paths(
    paths: Sequence[str | None],
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Tensor,
    scaling: float,
    *,
    schedule: str,
    tuning: Tuning,
) -> Tensor:
    """Run heads their ways side by side, without soft-cap, sinks, window or past.

    Parameters
    ----------
    paths : sequence of str or None
        Per KV head; None leaves the head's outputs as they are (undefined).
    query, buffer, layout, lengths, scaling, schedule, tuning
        As for `kvprof.kernels.prefill.step.prefill`, contiguous.
    """
    output = query.new_empty(*query.shape[:2], layout.output_offsets[-1])
    own = {
        path: tuple(head for head, wanted in enumerate(paths) if wanted == path)
        for path in ("triton", "library")
    }
    jobs: list[Callable[[], None]] = []
    if own["library"]:
        jobs += library_jobs(query, buffer, output, layout, scaling, own["library"])
    if own["triton"]:
        step = prefill_step(
            layout, query.shape[1], query.device, schedule=schedule, tuning=tuning,
            element_size=query.element_size(), heads=own["triton"],
        )  # fmt: skip
        jobs += step.jobs(query, buffer, output, lengths, scaling)
    side_by_side(jobs, query.device)
    return output
