"""A request under load, and what became of it, whoever served it: an engine or the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Outcome", "Request"]


@dataclass(frozen=True)
class Request:
    """What arrives."""

    number: int  # from 0, in the order of arrival
    arrival: float  # seconds after the load began
    prompt: int  # tokens
    #: Tokens to be written; the end of text is ignored, so that all methods do the same work.
    output: int
    #: How many tokens at the prompt's beginning it shares with others of the same `session`.
    prefix: int = 0
    session: int | None = None  # requests of one session begin alike
    #: Where it is known in more detail what begins alike: a number for each `block` tokens of the
    #: prompt, which stands for these and all before them. Two prompts are equal as far as their
    #: blocks are; `prefix` is then what at least one other has as well.
    blocks: tuple[int, ...] = ()
    block: int = 512


@dataclass(frozen=True)
class Outcome:
    """What became of a request; times are seconds after the load began."""

    request: Request
    #: When it was really sent, which is later than its arrival where the client was late.
    sent: float
    tokens: Sequence[float] = ()  # when each token came, one time per token
    #: Why it did not end, in a few words without its text: `timeout`, `connection lost`, `no event
    #: stream`, `HTTP 503`; None where all of its tokens came.
    failure: str | None = None
    #: Whether the server counted other tokens than pieces came: their times are spread over these.
    uneven: bool = False
