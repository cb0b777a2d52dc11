"""What happens in a measurement, one typed event after the other, as lines of ``events.jsonl``.

A measurement writes events as they happen, `kvprof.records.fold` makes the result of them, and the
live view reads the same lines. Nobody but the measurement makes events, so that what was seen is
what is on disk. Times are seconds; `time` counts from the start of the run.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from kvprof.records.result import to_plain

__all__ = [
    "EVENTS",
    "PHASES",
    "CaseFinished",
    "CaseStarted",
    "Event",
    "LoadRateFinished",
    "LoadRateStarted",
    "LoadRequest",
    "LoadSample",
    "LoadServer",
    "MemorySample",
    "PartSample",
    "Progress",
    "RunFinished",
    "RunStarted",
    "StepFinished",
    "TelemetrySample",
    "Warned",
    "event_line",
]

#: Written into every run's first event; grows when events change, and others are refused.
EVENTS = "kvprof-events/5"

#: Phases of a request.
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Event:
    """Something that happened `time` seconds after the start of the run."""

    type: ClassVar[str]
    time: float


@dataclass(frozen=True)
class RunStarted(Event):
    """The first event.

    Attributes
    ----------
    created : str
        UTC, as in a result.
    kvprof_version : str
    kind : str
        Of the result that the events become: ``jct`` or ``load``.
    command : tuple of str
        As the user wrote it, no paths of this machine beyond what they wrote.
    mode : str
        ``real`` or ``composed``; of load ``served`` (own servers), ``url`` or ``simulated``.
    inputs, environment, shape : dict
        As in the result.
    cases : tuple of str
        Every case that will be measured, in order; of load every method: how many rates each
        needs is found out on the way.
    baseline : str
        The method against which differences are shown.
    """

    type: ClassVar[str] = "run_started"
    created: str
    kvprof_version: str
    kind: str
    command: tuple[str, ...]
    mode: str
    inputs: dict[str, Any]
    environment: dict[str, Any]
    shape: dict[str, Any]
    cases: tuple[str, ...]
    baseline: str
    format: str = EVENTS


@dataclass(frozen=True)
class CaseStarted(Event):
    """A method at one batch, input length and output length.

    Attributes
    ----------
    case : str
        Its name in this run, for example ``fdc b1 in2048 out64``.
    method : str
    rate : float or None
        Of the cache's bytes, measured by the plan.
    batch, input_len, output_len : int
    layers : list of dict
        Per layer ``layer``, ``key_ranks`` and ``value_ranks`` (per KV head), ``nbytes`` (of its
        cache at the end of the request).
    labels : dict of str
        What a reader must know: ``by_difference`` and the like, free text.
    """

    type: ClassVar[str] = "case_started"
    case: str
    method: str
    rate: float | None
    batch: int
    input_len: int
    output_len: int
    layers: list[dict[str, Any]] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress(Event):
    """How far the measurement is; it enters no result.

    Attributes
    ----------
    case : str or None
        None counts for the whole run.
    unit : str
        What is counted: ``pass`` (a run of the whole request) or ``point`` (one layer at one
        length).
    done : int
        Units that have ended; the next one is under way.
    least, most : int
        How many there will be: where figures settle early, fewer than `most`.
    step, steps : int
        Of the unit under way: forward passes done, and all of them; 0 where that is not told.
    """

    type: ClassVar[str] = "progress"
    case: str | None
    unit: str
    done: int
    least: int
    most: int
    step: int = 0
    steps: int = 0


@dataclass(frozen=True)
class PartSample(Event):
    """A part was timed.

    Attributes
    ----------
    case, phase : str
        The phase is ``prefill`` or ``decode``.
    part : str
        One of `kvprof.records.parts.PARTS`.
    seconds : float
        Of one occurrence.
    step : int
        Which forward pass of the case; prefill is 0.
    context : int
        Tokens in the cache during it.
    layer : int or None
        None for what belongs to none, or to all together.
    weight : float
        How many such occurrences this one stands for: layers that were not sampled, steps that were
        not run or in which it was not timed. What the part costs the request is
        ``seconds * weight``.
    """

    type: ClassVar[str] = "part"
    case: str
    phase: str
    part: str
    seconds: float
    step: int
    context: int
    layer: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class StepFinished(Event):
    """A forward pass ended.

    Attributes
    ----------
    seconds : float
        Wall time.
    weight : float
        Passes that it stands for.
    runs : int
        Runs of the request of which `seconds` is the median. Passes of several runs are told once
        those have ended, from prefill on, in place of those of the first one.
    """

    type: ClassVar[str] = "step"
    case: str
    phase: str
    step: int
    context: int
    seconds: float
    weight: float = 1.0
    runs: int = 1


@dataclass(frozen=True)
class MemorySample(Event):
    """Bytes of the cache at a context, and of the process's device at most so far.

    Attributes
    ----------
    logical, allocated, full_width : int
        Stored tensors, what is reserved for them, and full width at the same context.
    peak : int or None
        Device memory (CPU: resident memory) at most so far.
    levels : dict of int
        Tokens per level by name, for methods that have levels.
    """

    type: ClassVar[str] = "memory"
    case: str
    context: int
    logical: int
    allocated: int
    full_width: int
    peak: int | None = None
    levels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TelemetrySample(Event):
    """The machine at one moment.

    Attributes
    ----------
    device : str
        ``gpu 0`` or ``cpu``.
    values : dict of float
        ``sm_mhz``, ``memory_mhz``, ``power_w``, ``temperature_c``, ``memory_bytes``,
        ``utilisation`` (0 to 1); on a CPU ``memory_bytes``, of the process, and ``utilisation``,
        of all cores of the machine. What the machine does not tell is absent. Records before
        kvprof-events/2 have ``load`` instead: what the process kept busy of the threads it may use.
    throttled : tuple of str
        Reasons, empty for none.
    """

    type: ClassVar[str] = "telemetry"
    device: str
    values: dict[str, float]
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Warned(Event):
    """A reader must know this before believing the figures; `case` None is the whole run."""

    type: ClassVar[str] = "warning"
    message: str
    case: str | None = None


@dataclass(frozen=True)
class CaseFinished(Event):
    """The case's wall times, without instrumentation.

    Attributes
    ----------
    prefill_seconds, decode_seconds : float
        An uninstrumented run of the same request; of a composed run, the whole layers' times
        integrated.
    energy_joules : float or None
        Of the uninstrumented run, from telemetry.
    prefill_interval, decode_interval : list of float or None
        Two ends each: 95 % intervals of the first two, over the samples or runs that they are of.
    """

    type: ClassVar[str] = "case_finished"
    case: str
    prefill_seconds: float
    decode_seconds: float
    energy_joules: float | None = None
    prefill_interval: list[float] | None = None
    decode_interval: list[float] | None = None


# --- Load: requests arrive at a rate while others are served. A case is a method at a rate.


@dataclass(frozen=True)
class LoadServer(Event):
    """A method's server is ready, and what is known of it.

    Attributes
    ----------
    method : str
    seconds : float
        Until it was ready; 0 where it ran already.
    servers : int
        How many, each of them asked by its own address.
    engine : str or None
        Name and version, as far as the server tells them.
    cache_tokens, cache_bytes : int or None
        Of all of them together; None where they do not tell it.
    settings : dict of str
        What it was started with, and what it does not take; no address and no key.
    """

    type: ClassVar[str] = "load_server"
    method: str
    seconds: float
    servers: int
    engine: str | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadRateStarted(Event):
    """Requests begin to arrive: from here on times of the case are seconds `at` after this.

    Attributes
    ----------
    case : str
        ``fdc @ 2/s``.
    method : str
    rate : float
        Requests a second that are offered.
    requests : int
        That will arrive.
    seconds : float
        Until the last arrives.
    """

    type: ClassVar[str] = "load_rate_started"
    case: str
    method: str
    rate: float
    requests: int
    seconds: float


@dataclass(frozen=True)
class LoadRequest(Event):
    """A request has ended, or failed; nothing of its text.

    Attributes
    ----------
    case : str
    number : int
        In the order of arrival.
    arrival, sent : float
        When it should be sent, and when it was.
    prompt, output : int
        Tokens that were asked for.
    first, last : float or None
        When its first and last token came; None for none.
    tokens : int
        That came.
    longest : float or None
        The longest time between two of them.
    failure : str or None
        As `kvprof.serving.load.requests.Outcome` has it.
    server : int
        Which one answered.
    """

    type: ClassVar[str] = "load_request"
    case: str
    number: int
    arrival: float
    sent: float
    prompt: int
    output: int
    first: float | None
    last: float | None
    tokens: int
    longest: float | None = None
    failure: str | None = None
    server: int = 0


@dataclass(frozen=True)
class LoadSample(Event):
    """The state of the servers at one moment, all together.

    Attributes
    ----------
    case : str
    at : float
    sent : int
        Requests that were sent and have not ended, as the client sees it.
    running, waiting : int or None
        As the engines say; None where they do not tell.
    cache : float or None
        Share of the cache's pages that is used, the mean over servers.
    preemptions : int or None
        Since the case began.
    """

    type: ClassVar[str] = "load_sample"
    case: str
    at: float
    sent: int
    running: int | None = None
    waiting: int | None = None
    cache: float | None = None
    preemptions: int | None = None


@dataclass(frozen=True)
class LoadRateFinished(Event):
    """All requests of a case have ended or failed, or the case was given up.

    Attributes
    ----------
    case : str
    complete : bool
    reason : str or None
        Why it is not complete.
    engine : dict of float
        From the engines' own marks, of all requests that ended meanwhile: ``requests``, and the
        seconds of all of them together, ``waiting``, ``prefill``, ``decode``, ``end_to_end``;
        ``preemptions``, ``prefix_queries``, ``prefix_hits`` (tokens). What they do not tell is
        absent.
    spans : list of dict
        Decoding in short stretches of time: ``at`` (the middle), ``tokens``, ``between`` (mean
        seconds between tokens), and of one engine, the mean where several share the requests:
        ``batch`` (requests that decode), ``context`` (tokens that they hold together) and
        ``prefill`` (prompt tokens that were read meanwhile, for each step).
    client_busy_share : float or None
        Processor time of the thread that sent requests and read tokens, over the time from the
        load's beginning until the last was sent; None where that is too short to tell.
    """

    type: ClassVar[str] = "load_rate_finished"
    case: str
    complete: bool
    reason: str | None = None
    engine: dict[str, float] = field(default_factory=dict)
    spans: list[dict[str, float]] = field(default_factory=list)
    client_busy_share: float | None = None


@dataclass(frozen=True)
class RunFinished(Event):
    """The last event. Without it the run was killed.

    Attributes
    ----------
    complete : bool
    reason : str or None
        Why it is not complete.
    extra : dict
        Keys of the result's `data` that no other event carries, as ``requests``.
    """

    type: ClassVar[str] = "run_finished"
    complete: bool
    reason: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def event_line(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON types, its type under ``event``."""
    # Not `asdict`, which copies every value deeply before it is made plain.
    named = {entry.name: getattr(event, entry.name) for entry in fields(event)}
    plain = to_plain({"event": event.type, **named})
    assert isinstance(plain, dict)
    return plain
