"""Which way a prompt's attention takes: found by measuring, remembered in the process."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from kvprof.errors import FailedError, LackingError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.library import REWARDED
from kvprof.kernels.prefill.paths import Choice, best_paths, run_paths
from kvprof.kernels.prefill.tuning import Tuning

__all__ = ["measured_path", "pair_seconds", "quick_path"]

#: Tokens of a prompt below which it is not worth to try, and the most on which `quick_path` tries:
#: on few tokens launches hide what the kernels of a long prompt gain.
_WORTH, _TRIED = 512, 16384

_REPEATS = 3
# Few samples decide, and a run's figures should not hang on which of two like ways won.
_CLEARLY = 0.95


def _event() -> torch.cuda.Event:
    # torch leaves it without types.
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


_REMEMBERED: dict[tuple[object, ...], Choice] = {}


def measured_path(
    layout: RaggedLayout,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    schedule: str = "equal",
    tuning: Tuning | None = None,
) -> Choice:
    """Time both ways on random data and remember the faster for about as many tokens.

    Layers with the same widths, group and batch share what was found, up to twice the tokens.

    Parameters
    ----------
    layout : RaggedLayout
    tokens : int
        New tokens of every sequence, with none before.
    dtype : torch.dtype
    device : torch.device
        A GPU, with its index.
    schedule : str
        Of the Triton kernel.
    tuning : Tuning, optional

    Raises
    ------
    LackingError
        Without a GPU.
    FailedError
        While a CUDA graph is captured: measure before.
    """
    if device.type != "cuda":
        raise LackingError("the paths of prefill are measured on a GPU only")
    tuning = tuning or Tuning()
    key = (
        layout.key_widths, layout.value_widths, layout.group, layout.batch, tokens.bit_length(),
        dtype, device, schedule, tuning,
    )  # fmt: skip
    if key in _REMEMBERED:
        return _REMEMBERED[key]
    if torch.cuda.is_current_stream_capturing():
        raise FailedError(
            "run this prefill once before a CUDA graph captures it, or name its path: auto measures"
        )
    own = replace(layout, capacity=tokens)
    timed = _timed(own, dtype, device, schedule, tuning)
    _REMEMBERED[key] = best_paths(own, timed)
    return _REMEMBERED[key]


def quick_path(
    layout: RaggedLayout,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    schedule: str = "equal",
    tuning: Tuning | None = None,
) -> str:
    """Return the faster path for a runtime, which meets a layout for a prompt or two.

    Torch's kernels are tried for heads that they take as they are: all of one pair of widths,
    neither of them padded. That is measured once for about as many tokens, on one sequence of at
    most 16,384 of them, and holds for all layers of these widths; they are taken where they are
    clearly faster. All else goes to Triton: every layer of a ragged plan has a layout of its own,
    and trying takes as long as eight prompts.

    Parameters
    ----------
    layout, tokens, dtype, device, schedule, tuning
        As for `measured_path`.

    Returns
    -------
    str
        ``triton`` or ``library``.
    """
    pairs = set(zip(layout.key_widths, layout.value_widths, strict=True))
    if len(pairs) > 1 or tokens < _WORTH or not set(*pairs) <= set(REWARDED):
        return "triton"
    one = replace(layout, batch=1)
    try:
        choice = measured_path(
            one, min(tokens, _TRIED), dtype, device, schedule=schedule, tuning=tuning
        )
    except FailedError:  # a CUDA graph captures this, and it was not measured before
        return "triton"
    except torch.OutOfMemoryError:  # trying takes memory of its own
        torch.cuda.empty_cache()
        return "triton"
    times = choice.seconds
    return "library" if times["library"] < _CLEARLY * times["triton"] else "triton"


def pair_seconds(
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads: int = 8,
    group: int = 4,
    schedule: str = "equal",
    tuning: Tuning | None = None,
) -> Callable[[int, int], float]:
    """Return a measure for `kvprof.kernels.prefill.grid.class_costs`: the faster path's time.

    Parameters
    ----------
    tokens : int
        Of one sequence.
    dtype : torch.dtype
    device : torch.device
        A GPU, with its index.
    heads, group : int
        KV heads, all of the pair's widths, and query heads of each; a head is told its share.
    schedule : str
    tuning : Tuning, optional

    Raises
    ------
    LackingError
        Without a GPU.
    """
    if device.type != "cuda":
        raise LackingError("the paths of prefill are measured on a GPU only")

    def seconds(key_width: int, value_width: int) -> float:
        layout = RaggedLayout((key_width,) * heads, (value_width,) * heads, group, 1, tokens)
        timed = _timed(layout, dtype, device, schedule, tuning or Tuning())
        paths = ["triton"]
        if max(key_width, value_width) <= REWARDED[-1]:
            paths.append("library")
        return min(timed((path,) * heads) for path in paths) / heads

    return seconds


def _timed(
    layout: RaggedLayout, dtype: torch.dtype, device: torch.device, schedule: str, tuning: Tuning
) -> Callable[[tuple[str | None, ...]], float]:
    """Return what times paths, each sequence as long as the capacity, on random data."""
    tokens = layout.capacity
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=device)

    query = random(layout.batch, tokens, layout.query_offsets[-1])
    buffer = random(layout.elements)
    lengths = torch.full((layout.batch,), tokens, dtype=torch.int32, device=device)

    def seconds(paths: tuple[str | None, ...]) -> float:
        times = []
        try:
            with torch.cuda.device(device):
                for _ in range(_REPEATS + 1):
                    begin, end = _event(), _event()
                    begin.record()
                    run_paths(
                        paths, query, buffer, layout, lengths, 0.1, schedule=schedule, tuning=tuning
                    )
                    end.record()
                    end.synchronize()
                    times.append(float(begin.elapsed_time(end)) / 1e3)
        except LackingError:  # torch has no kernel for these widths in this dtype
            return math.inf
        return median(times[1:])

    return seconds
