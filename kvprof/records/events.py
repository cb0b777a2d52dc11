"""What happens in a measurement, one typed event after the other, as lines of ``events.jsonl``.

A measurement writes events as they happen, `kvprof.records.fold` makes the result of them, and the
live view reads the same lines. Nobody but the measurement makes events, so that what was seen is
what is on disk. Times are seconds; `time` counts from the start of the run. A field's type
says what it can be, when it is read; making one checks nothing, which would cost the measurement.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

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
    "Phase",
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

Phase = Literal["prefill", "decode"]
#: Phases of a request.
PHASES = ("prefill", "decode")

# What nothing has would cost hours to draw, or overflow.
_LARGEST = 2.0**63  # of bytes, tokens, seconds, operations per second
Number = Annotated[float, Field(gt=-_LARGEST, lt=_LARGEST, strict=True)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Layer = Annotated[int, Field(ge=0, lt=10_000, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def _of_a_layer(facts: dict[str, Any]) -> dict[str, Any]:
    """Refuse what no layer is or has."""
    numbers = [*facts.values()]
    for value in numbers:
        numbers += value if isinstance(value, list) else ()
    far = any(isinstance(one, int | float) and not 0 <= one < _LARGEST for one in numbers)
    if far or (isinstance(facts.get("layer"), int) and facts["layer"] >= 10_000):
        raise ValueError("of no layer")
    return facts


LayerFacts = Annotated[dict[str, Any], AfterValidator(_of_a_layer)]


@dataclass(frozen=True)
class _Timed:
    """Something that happened `time` seconds after the start of the run."""

    time: Number


@dataclass(frozen=True)
class RunStarted(_Timed):
    """The first event."""

    event: Literal["run_started"] = field(default="run_started", kw_only=True)
    created: str  # UTC, as in a result
    kvprof_version: str
    kind: str  # of the result that the events become: `jct` or `load`
    #: As the user wrote it, no paths of this machine beyond what they wrote.
    command: tuple[str, ...]
    mode: str  # `real` or `composed`; of load `served` (own servers), `url` or `simulated`
    inputs: dict[str, Any]  # as in the result
    environment: dict[str, Any]
    shape: dict[str, Any]
    #: Every case that will be measured, in order; of load every method: how many rates each needs
    #: is found out on the way.
    cases: tuple[str, ...]
    baseline: str  # the method against which differences are shown
    format: str = EVENTS


@dataclass(frozen=True)
class CaseStarted(_Timed):
    """A method at one batch, input length and output length."""

    event: Literal["case_started"] = field(default="case_started", kw_only=True)
    case: str  # its name in this run, for example `fdc b1 in2048 out64`
    method: str
    rate: Number | None  # of the cache's bytes, measured by the plan
    batch: Count
    input_len: Count
    output_len: Count
    #: Per layer `layer`, `key_ranks` and `value_ranks` (per KV head), `nbytes` (of its cache at the
    #: end of the request).
    layers: Annotated[list[LayerFacts], Field(max_length=10_000)] = field(default_factory=list)
    #: What a reader must know: `by_difference` and the like, free text.
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress(_Timed):
    """How far the measurement is; it enters no result."""

    event: Literal["progress"] = field(default="progress", kw_only=True)
    case: str | None  # none counts for the whole run
    #: What is counted: `pass` (a run of the whole request) or `point` (one layer at one length).
    unit: str
    done: Count  # units that have ended; the next one is under way
    least: Count  # how many there will be: where figures settle early, fewer than `most`
    most: Count
    #: Of the unit under way: forward passes done, and all of them; 0 where that is not told.
    step: Count = 0
    steps: Count = 0


@dataclass(frozen=True)
class PartSample(_Timed):
    """A part was timed."""

    event: Literal["part"] = field(default="part", kw_only=True)
    case: str  # the phase is `prefill` or `decode`
    phase: Phase
    part: str  # one of `kvprof.records.parts.PARTS`
    seconds: Number  # of one occurrence
    step: Count  # which forward pass of the case; prefill is 0
    context: Count  # tokens in the cache during it
    layer: Layer | None = None  # none for what belongs to none, or to all together
    #: How many such occurrences this one stands for: layers that were not sampled, steps that were
    #: not run or in which it was not timed. What the part costs the request is `seconds * weight`.
    weight: Number = 1.0


@dataclass(frozen=True)
class StepFinished(_Timed):
    """A forward pass ended."""

    event: Literal["step"] = field(default="step", kw_only=True)
    case: str
    phase: Phase
    step: Count
    context: Count
    seconds: Number  # wall time
    weight: Number = 1.0  # passes that it stands for
    #: Runs of the request of which `seconds` is the median. Passes of several runs are told once
    #: those have ended, from prefill on, in place of those of the first one.
    runs: Count = 1


@dataclass(frozen=True)
class MemorySample(_Timed):
    """Bytes of the cache at a context, and of the process's device at most so far."""

    event: Literal["memory"] = field(default="memory", kw_only=True)
    case: str
    context: Count
    logical: Count  # stored tensors, what is reserved for them, and the uncompressed cache's bytes
    allocated: Count
    full_width: Count
    peak: Count | None = None  # device memory (CPU: resident memory) at most so far
    #: Tokens per level by name, for methods that have levels.
    levels: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class TelemetrySample(_Timed):
    """The machine at one moment."""

    event: Literal["telemetry"] = field(default="telemetry", kw_only=True)
    device: str  # `gpu 0` or `cpu`
    #: `sm_mhz`, `memory_mhz`, `power_w`, `temperature_c`, `memory_bytes`, `utilisation` (0 to 1);
    #: on a CPU `memory_bytes`, of the process, and `utilisation`, of all cores of the machine. What
    #: the machine does not tell is absent. Records before kvprof-events/2 have `load` instead: what
    #: the process kept busy of the threads it may use.
    values: dict[str, Number]
    throttled: tuple[str, ...] = ()  # reasons, empty for none


@dataclass(frozen=True)
class Warned(_Timed):
    """A reader must know this before believing the figures; `case` None is the whole run."""

    event: Literal["warning"] = field(default="warning", kw_only=True)
    message: str
    case: str | None = None


@dataclass(frozen=True)
class CaseFinished(_Timed):
    """The case's wall times, without instrumentation."""

    event: Literal["case_finished"] = field(default="case_finished", kw_only=True)
    case: str
    #: An uninstrumented run of the same request; of a composed run, the whole layers' times
    #: integrated.
    prefill_seconds: Number
    decode_seconds: Number
    energy_joules: Number | None = None  # of the uninstrumented run, from telemetry
    #: Two ends each: 95 % intervals of the first two, over the samples or runs that they are of.
    prefill_interval: list[Number] | None = None
    decode_interval: list[Number] | None = None


# --- Load: requests arrive at a rate while others are served. A case is a method at a rate.


@dataclass(frozen=True)
class LoadServer(_Timed):
    """A method's server is ready, and what is known of it."""

    event: Literal["load_server"] = field(default="load_server", kw_only=True)
    method: str
    seconds: Number  # until it was ready; 0 where it ran already
    servers: Count  # how many, each of them asked by its own address
    engine: str | None = None  # name and version, as far as the server tells them
    cache_tokens: Count | None = None  # of all of them together; None where they do not tell it
    cache_bytes: Count | None = None
    #: What it was started with, and what it does not take; no address and no key.
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadRateStarted(_Timed):
    """Requests begin to arrive: from here on times of the case are seconds `at` after this."""

    event: Literal["load_rate_started"] = field(default="load_rate_started", kw_only=True)
    case: str  # `fdc @ 2/s`
    method: str
    rate: Number  # requests a second that are offered
    requests: Count  # that will arrive
    seconds: Number  # until the last arrives


@dataclass(frozen=True)
class LoadRequest(_Timed):
    """A request has ended, or failed; nothing of its text."""

    event: Literal["load_request"] = field(default="load_request", kw_only=True)
    case: str
    number: Count  # in the order of arrival
    arrival: Number  # when it should be sent, and when it was
    sent: Number
    prompt: Count  # tokens that were asked for
    output: Count
    first: Number | None  # when its first and last token came; None for none
    last: Number | None
    tokens: Count  # that came
    longest: Number | None = None  # the longest time between two of them
    failure: str | None = None  # as `kvprof.serving.load.requests.Outcome` has it
    server: Annotated[int, Field(ge=0, lt=100_000, strict=True)] = 0  # which one answered


@dataclass(frozen=True)
class LoadSample(_Timed):
    """The state of the servers at one moment, all together."""

    event: Literal["load_sample"] = field(default="load_sample", kw_only=True)
    case: str
    at: Number
    sent: Count  # requests that were sent and have not ended, as the client sees it
    running: Count | None = None  # as the engines say; None where they do not tell
    waiting: Count | None = None
    cache: Number | None = None  # share of the cache's pages that is used, the mean over servers
    preemptions: Count | None = None  # since the case began


@dataclass(frozen=True)
class LoadRateFinished(_Timed):
    """All requests of a case have ended or failed, or the case was given up."""

    event: Literal["load_rate_finished"] = field(default="load_rate_finished", kw_only=True)
    case: str
    complete: Flag
    reason: str | None = None  # why it is not complete
    #: From the engines' own marks, of all requests that ended meanwhile: `requests`, and the
    #: seconds of all of them together, `waiting`, `prefill`, `decode`, `end_to_end`; `preemptions`,
    #: `prefix_queries`, `prefix_hits` (tokens). What they do not tell is absent.
    engine: dict[str, Number] = field(default_factory=dict)
    #: Decoding in short stretches of time: `at` (the middle), `tokens`, `between` (mean seconds
    #: between tokens), and of one engine, the mean where several share the requests: `batch`
    #: (requests that decode), `context` (tokens that they hold together) and `prefill` (prompt
    #: tokens that were read meanwhile, for each step).
    spans: list[dict[str, Number]] = field(default_factory=list)
    #: Processor time of the thread that sent requests and read tokens, over the time from the
    #: load's beginning until the last was sent; None where that is too short to tell.
    client_busy_share: Number | None = None


@dataclass(frozen=True)
class RunFinished(_Timed):
    """The last event. Without it the run was killed."""

    event: Literal["run_finished"] = field(default="run_finished", kw_only=True)
    complete: Flag
    reason: str | None = None  # why it is not complete
    #: Keys of the result's `data` that no other event carries, as `requests`.
    extra: dict[str, Any] = field(default_factory=dict)


#: What a line of a journal holds.
Event = Annotated[
    RunStarted
    | CaseStarted
    | Progress
    | PartSample
    | StepFinished
    | MemorySample
    | TelemetrySample
    | Warned
    | CaseFinished
    | LoadServer
    | LoadRateStarted
    | LoadRequest
    | LoadSample
    | LoadRateFinished
    | RunFinished,
    Field(discriminator="event"),
]


def event_line(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON types, its type under ``event``."""
    # Not `asdict`, which copies every value deeply before it is made plain.
    named = {entry.name: getattr(event, entry.name) for entry in fields(event)}
    plain = to_plain({"event": event.event, **named})
    assert isinstance(plain, dict)
    return plain
