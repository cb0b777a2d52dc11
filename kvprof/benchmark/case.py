"""What is timed: a call with its inputs, what it moves and computes, its float64 reference."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvprof.benchmark.shapes import Shape, layout_of
from kvprof.methods.accounting import full_layer_bytes
from kvprof.methods.low_rank import identity_layer

__all__ = [
    "Case",
    "Lack",
    "Sample",
    "Workload",
    "attention64",
    "relative_error",
    "sampled_heads",
    "sampled_positions",
]

_MOST_COPIES = 16
_SAMPLED_QUERIES = 16  # of a prefill's positions, per head that is checked


# A prime number of values.
_PERIOD = 16_777_259


class Lack(Exception):
    """A call that cannot be made here; its message says why, for the reader of the result."""


@dataclass(frozen=True)
class Workload:
    """What an attention call works on: a shape, a phase, how many tokens, of which type and where.

    Attributes
    ----------
    shape : Shape
    phase : str
        ``decode`` (one new token per sequence) or ``prefill`` (all tokens attend to those before).
    batch, seq : int
        Sequences, and tokens of each.
    dtype : torch.dtype
        Of queries, outputs and the uncompressed cache.
    device : torch.device
    device_cache_bytes : int
        Of the device's own largest cache, out of which no input may be read.
    seed : int
        Of the inputs.
    """

    shape: Shape
    #: `decode` (one new token per sequence) or `prefill` (all tokens attend to those before).
    phase: str
    batch: int  # sequences, and tokens of each
    seq: int
    dtype: torch.dtype  # of queries, outputs and the uncompressed cache
    device: torch.device
    #: Of the device's own largest cache, out of which no input may be read.
    device_cache_bytes: int = 0
    seed: int = 0  # of the inputs

    @property
    def name(self) -> str:
        """Such as ``decode, batch 8, 102,400 tokens``."""
        return f"{self.phase}, batch {self.batch}, {self.seq:,} tokens"

    @property
    def queries(self) -> int:
        """Tokens per sequence that attend."""
        return 1 if self.phase == "decode" else self.seq

    @property
    def full_bytes(self) -> int:
        """Bytes of uncompressed K and V in `dtype`, of the layer that is measured."""
        layer = identity_layer(replace(layout_of(self.shape).layers[0], sliding_window=None))
        return self.batch * full_layer_bytes(layer, self.seq, itemsize=self.dtype.itemsize)

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, per head, over all sequences."""
        return self.batch * (self.seq if self.phase == "decode" else self.seq * (self.seq + 1) // 2)

    def attention_flops(self, key_columns: int, value_columns: int) -> int:
        """Return the flops of ``QKᵀ`` and ``PV``, two per multiplication and addition."""
        return 2 * self.visible * (key_columns + value_columns)

    def copies(self, nbytes: int) -> int:
        """Return how many copies of the inputs exceed the device's cache, at most 16."""
        return min(_MOST_COPIES, max(1, -(-2 * self.device_cache_bytes // max(1, nbytes))))

    def random(self, generator: torch.Generator, *sizes: int) -> Tensor:
        """Return non-zero normal values; on a CPU long tensors repeat, to save time."""
        count = math.prod(sizes)
        if self.device.type != "cpu" or count <= _PERIOD:
            return torch.randn(sizes, generator=generator, dtype=self.dtype, device=self.device)
        drawn = torch.randn(_PERIOD, generator=generator, dtype=self.dtype)
        values = torch.empty(count, dtype=self.dtype)
        for start in range(0, count, _PERIOD):
            own = values[start : start + _PERIOD]
            own.copy_(drawn[: len(own)])
        return values.view(sizes)

    def generator(self, salt: int = 0) -> torch.Generator:
        """Return a source of random values of this workload's seed."""
        return torch.Generator(device=self.device).manual_seed(1000 * self.seed + salt)


@dataclass(frozen=True, eq=False)
class Sample:
    """What one head of one sequence should give, and what it gave."""

    queries: Tensor  # `[positions, G, d_k]`
    #: `[tokens, d_k]`, `[tokens, d_v]`: what is stored, dequantised where it is quantised.
    keys: Tensor
    values: Tensor
    found: Tensor  # `[positions, G, d_v]`
    #: `[positions]` int64: tokens that each position sees; None for all.
    visible: Tensor | None = None
    sinks: Tensor | None = None  # `[G]`, logits of the learned sinks


@dataclass(eq=False)
class Case:
    """One call that is timed."""

    name: str  # of the method, or of the uncompressed kernel
    workload: Workload
    #: The call on each copy of its inputs; each returns its output.
    runs: Sequence[Callable[[], Tensor]]
    #: Of one call: every input read once and the output written once; partial results not.
    bytes_moved: int
    #: Of the tensor that holds all sequences' K and V as the kernel reads them: whole blocks and
    #: pages. What the plan stores is `Timed.stored_bytes` (`kvprof.benchmark.rows`).
    buffer_bytes: int
    flops: int  # of one call
    #: From the output of the first run to what is checked against float64.
    samples: Callable[[Tensor], Iterable[Sample]]
    scaling: float  # of the reference
    softcap: float = 0.0
    schedule: str | None = None  # how the work was cut
    #: The busiest multiprocessor's work over the mean of all, by the cost model.
    makespan_over_mean: float | None = None
    #: `keys` and `values`: widths per stored head; None for the uncompressed.
    ranks: dict[str, list[int]] | None = None
    note: str | None = None  # what the reader should know about the figure

    def error(self, output: Tensor) -> float:
        """Return the relative Frobenius error of the sampled heads; infinite where NaN is left."""
        return relative_error(self.samples(output), self.scaling, self.softcap)


def sampled_heads(batch: int, heads: int) -> list[tuple[int, int]]:
    """Return the (sequence, head) pairs that are checked: the first, the last, one in between."""
    return list(dict.fromkeys([(0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2)]))


def sampled_positions(workload: Workload) -> Tensor:
    """Return positions of a prefill that are checked: the first, the last and some in between."""
    if workload.queries == 1:
        return torch.zeros(1, dtype=torch.int64)
    count = min(_SAMPLED_QUERIES, workload.queries)
    return torch.linspace(0, workload.queries - 1, count, dtype=torch.float64).long()


def attention64(sample: Sample, scaling: float, softcap: float = 0.0) -> Tensor:
    """Return a sample's attention in float64, ``[positions, G, d_v]``."""
    queries, keys, values = (
        tensor.double() for tensor in (sample.queries, sample.keys, sample.values)
    )
    scores = torch.einsum("pgd,td->pgt", queries, keys) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if sample.visible is not None:
        there = torch.arange(keys.shape[0], device=keys.device) < sample.visible[:, None].to(
            keys.device
        )
        scores = scores.masked_fill(~there[:, None, :], -torch.inf)
    if sample.sinks is not None:
        logits = sample.sinks.double()[None, :, None].expand(scores.shape[0], -1, 1)
        weights = torch.softmax(torch.cat([scores, logits], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("pgt,td->pgd", weights, values)


def relative_error(samples: Iterable[Sample], scaling: float, softcap: float = 0.0) -> float:
    """Return the relative Frobenius error over all samples together."""
    wrong = right = 0.0
    for sample in samples:
        wanted = attention64(sample, scaling, softcap)
        wrong += float((sample.found.double() - wanted).square().sum())
        right += float(wanted.square().sum())
    error = (wrong / right) ** 0.5 if right > 0 else float("inf")
    return error if error == error else float("inf")  # NaN: something was never written
