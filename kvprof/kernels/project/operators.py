"""The custom operators: what ``torch.compile`` and CUDA graphs see of a projection.

They take tensors and numbers only. Each runs Triton on a GPU (and where Triton interprets its
kernels), and the CPU path elsewhere. A shape must have run once before a graph captures it.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kvprof.kernels.project.cpu import project_cpu
from kvprof.kernels.project.work import Destination, Rotary, Stream, Work

__all__ = ["project_keys", "project_queries", "project_step", "project_values"]


@cache
def _interpreted() -> bool:
    """Whether Triton is there and was told to interpret."""
    if find_spec("triton") is None:
        return False
    from kvprof.kernels.dispatch import interpreted  # Triton is for Linux only

    return interpreted()


def _run(work: Work) -> Tensor | None:
    if work.states.is_cuda or _interpreted():
        from kvprof.kernels.project.launch import launch  # Triton is for Linux only

        return launch(work)
    return project_cpu(work)


def _rotary(cos: Tensor | None, sin: Tensor | None, rotation: Sequence[int]) -> Rotary | None:
    """Read ``(dim, offset, interleaved)``."""
    if cos is None or sin is None:
        return None
    return Rotary(cos, sin, rotation[0], rotation[1], bool(rotation[2]))


@torch.library.custom_op("kvprof::project_queries", mutates_args=())
def project_queries(
    query: Tensor,
    bases: Tensor,
    widths: Sequence[int],
    cos: Tensor | None,
    sin: Tensor | None,
    rotation: Sequence[int],
) -> Tensor:
    """Return dense rows of projected queries; see `step.project_queries`."""
    output = _run(
        Work(query=Stream(query, bases, tuple(widths)), rotary=_rotary(cos, sin, rotation))
    )
    assert output is not None
    return output


def _dense(query: Tensor, widths: Sequence[int]) -> Tensor:
    """Return an empty tensor of the queries' shape after projection."""
    group = query.shape[2] // len(widths)
    return query.new_empty(query.shape[0], query.shape[1], group * sum(widths))


@project_queries.register_fake
def _(query: Tensor, bases: Tensor, widths: Sequence[int], *rest: object) -> Tensor:
    return _dense(query, widths)


@torch.library.custom_op("kvprof::project_keys", mutates_args={"buffer"})
def project_keys(
    keys: Tensor,
    bases: Tensor,
    buffer: Tensor,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    pool: int,
    capacity: int,
    start: Tensor | None,
    valid: Tensor | None,
    slots: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotation: Sequence[int],
) -> None:
    """Store projected keys; see `step.project_keys`."""
    widths = (tuple(key_widths), tuple(value_widths))
    destination = Destination(buffer, *widths, pool, capacity, start, valid, slots)
    stream = Stream(keys, bases, widths[0])
    _run(Work(keys=stream, rotary=_rotary(cos, sin, rotation), destination=destination))


@project_keys.register_fake
def _(*given: object) -> None:
    return None


@torch.library.custom_op("kvprof::project_values", mutates_args={"buffer"})
def project_values(
    values: Tensor,
    bases: Tensor | None,
    buffer: Tensor,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    pool: int,
    capacity: int,
    start: Tensor | None,
    valid: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Store values, projected or latents already; see `step.project_values`."""
    widths = (tuple(key_widths), tuple(value_widths))
    destination = Destination(buffer, *widths, pool, capacity, start, valid, slots)
    _run(Work(values=Stream(values, bases, widths[1]), destination=destination))


@project_values.register_fake
def _(*given: object) -> None:
    return None


@torch.library.custom_op("kvprof::project_step", mutates_args={"buffer"})
def project_step(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_bases: Tensor,
    key_bases: Tensor,
    value_bases: Tensor | None,
    buffer: Tensor,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    pool: int,
    capacity: int,
    start: Tensor | None,
    valid: Tensor | None,
    slots: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotation: Sequence[int],
) -> Tensor:
    """Project queries, store keys and values in one launch; see `step.project_step`."""
    widths = (tuple(key_widths), tuple(value_widths))
    output = _run(
        Work(
            query=Stream(query, query_bases, widths[0]),
            keys=Stream(keys, key_bases, widths[0]),
            values=Stream(values, value_bases, widths[1]),
            rotary=_rotary(cos, sin, rotation),
            destination=Destination(buffer, *widths, pool, capacity, start, valid, slots),
        )
    )
    assert output is not None
    return output


@project_step.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_bases: Tensor,
    key_bases: Tensor,
    value_bases: Tensor | None,
    buffer: Tensor,
    key_widths: Sequence[int],
    *rest: object,
) -> Tensor:
    return _dense(query, key_widths)
