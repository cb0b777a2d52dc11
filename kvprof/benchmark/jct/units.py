"""A part of a layer as it is timed: a call on inputs of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvprof.benchmark.timing import Sampler

__all__ = ["Attended", "Runs", "Unit"]

Runs = Sequence[Callable[[], Tensor]]


@dataclass(frozen=True, eq=False)
class Unit:
    """One call, on as many copies of its inputs as keep them out of the cache.

    Attributes
    ----------
    part : str
        Of `kvprof.records.events.PARTS`.
    runs : sequence of callable
    key : tuple
        Two units with one key are the same work, which a run measures once.
    per_pass : bool
        Once per forward pass; otherwise once per layer.
    aside : tuple of (str, Runs), optional
        A part that is inside this call, and the call that it is without this unit's own: its time
        is that part's, and this unit's part is the difference.
    on_host : bool
        Work of the host, which no graph can hold: a clock is read around it.
    waits : bool
        The host looks at results within the call, which no graph can hold either: a clock is read
        around it and all that it left running. It must not be tried: a capture that fails may
        leave libraries' handles and their workspaces behind in no state to be used.
    timed : Sampler, optional
        What times it where no clock around its call or graph does.
    """

    part: str
    runs: Runs
    key: tuple[object, ...]
    per_pass: bool = False
    aside: tuple[str, Runs] | None = None
    on_host: bool = False
    waits: bool = False
    timed: Sampler | None = None


@dataclass(frozen=True, eq=False)
class Attended:
    """A method's attention in one layer and what belongs to it.

    Attributes
    ----------
    units : list of Unit
        In the order of a layer: between its projections and its output projection.
    projections : tuple of int
        Columns that Q, K and V have when they leave their projections.
    output : int
        Columns that the output projection takes.
    turned : str
        What RoPE turns outside these units: ``both``, ``query`` or ``none``.
    error : callable
        Relative error of the attention against float64, after a run.
    labels : dict of str
        What a reader must know.
    """

    units: list[Unit]
    projections: tuple[int, int, int]
    output: int
    turned: str
    error: Callable[[], float]
    labels: dict[str, str] = field(default_factory=dict)
