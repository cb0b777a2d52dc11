"""Which lengths one layer is measured at, so that every request of a run can be composed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvprof.analysis.jct import ladder
from kvprof.benchmark.jct.model_shape import ModelShape

__all__ = ["Request", "around", "below", "decode_rungs", "layer_flops", "prefill_rungs"]

_LEAST = 512  # tokens of a prompt below which nothing is learned about a longer one
_SHARE = 0.4  # of the free memory that a prompt's hidden states may take
#: Seconds that one layer's prefill may take.
_SECONDS = {"cuda": 1.0, "cpu": 1.5}
_REACHED = 0.5  # share of a plain product's rate that a layer reaches


@dataclass(frozen=True)
class Request:
    """A prompt and how much is written after it.

    Attributes
    ----------
    input_len, output_len : int
        Tokens; prefill gives the first that is written, decode the others.
    """

    input_len: int
    output_len: int

    @property
    def first(self) -> int:
        """Tokens in the cache during the first decoding step."""
        return self.input_len + 1

    @property
    def last(self) -> int:
        """Tokens in the cache during the last decoding step; below `first` where there is none."""
        return self.input_len + self.output_len - 1

    @property
    def stored(self) -> int:
        """Tokens in the cache at the end: the last one that is written goes into none."""
        return self.input_len + self.output_len - 1


def decode_rungs(
    requests: Iterable[Request], sampled: Iterable[Request] = (), window: int | None = None
) -> list[int]:
    """Return contexts at which a decoding step is measured; none where nothing is decoded.

    Parameters
    ----------
    requests : iterable of Request
        Whose first and last steps are measured.
    sampled : iterable of Request
        Whose steps have to lie between measured ones.
    window : int or None
        Of layers with a sliding window: no step of theirs reads more.
    """
    ends = [end for one in requests if one.last >= one.first for end in (one.first, one.last)]
    between = [end for one in sampled if one.last >= one.first for end in (one.first, one.last)]
    ends += [min(between), max(between)] if between else []
    if window is not None:
        ends = [min(end, window) for end in ends]
    return ladder(ends) if ends else []


def below(rungs: Sequence[int], tokens: int) -> int:
    """Return the longest rung of at most so many tokens, or the first of them."""
    return max((rung for rung in rungs if rung <= tokens), default=rungs[0])


def around(rungs: Sequence[int], tokens: int) -> list[int]:
    """Return the rungs between which a length lies: one where it is a rung or lies outside."""
    above = min((rung for rung in rungs if rung >= tokens), default=rungs[-1])
    return sorted({below(rungs, tokens), above})


def layer_flops(model: ModelShape, batch: int, tokens: int) -> float:
    """Return about how many flops one layer's prefill takes at full width."""
    shape, dense = model.attention, model.dense
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mlp = (3 if dense.gated else 2) * dense.intermediate_size * max(1, dense.experts_per_token)
    per_token = 2 * shape.hidden_size * (2 * queries + 2 * keys + mlp)
    # Two products, each token with all before it.
    return batch * tokens * (per_token + 2 * queries * tokens)


def prefill_rungs(
    model: ModelShape,
    batch: int,
    lengths: Sequence[int],
    *,
    rate: float,
    free: int,
    itemsize: int,
    kind: str,
    sampled: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Return prompts to measure, and the longest that can be measured here.

    A prompt that takes too long, or whose hidden states do not fit, is predicted from shorter ones.

    Parameters
    ----------
    model : ModelShape
    batch : int
    lengths : sequence of int
        Of the requests' prompts.
    rate : float
        Of a matrix product, in flop/s.
    free, itemsize : int
        Bytes that may be allocated, and of a value.
    kind : str
        ``cuda`` or ``cpu``.
    sampled : sequence of int
        Prompts that have to lie between measured ones.
    """
    longest = max((*lengths, *sampled))

    def fits(tokens: int) -> bool:
        width = 3 * model.dense.intermediate_size * max(1, model.dense.experts_per_token)
        width += 12 * model.attention.num_heads * model.attention.head_dim
        seconds = layer_flops(model, batch, tokens) / (rate * _REACHED)
        return seconds <= _SECONDS[kind] and batch * tokens * width * itemsize <= _SHARE * free

    most = longest
    while most > _LEAST and not fits(most):
        most = max(_LEAST, 1 << (most - 1).bit_length() - 1)
    rungs = {length for length in lengths if length <= most}
    if between := [length for length in sampled if length <= most]:
        rungs |= set(ladder({min(between), max(between)}))
    if most < longest:
        rungs |= {most, max(1, most // 2), max(1, most // 4)}
    return sorted(rungs), most
