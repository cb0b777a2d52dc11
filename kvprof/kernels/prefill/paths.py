"""Ways to compute a prompt's attention, per head, and which of them is best by given times."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.kernels.planes import RaggedLayout, chunks, in_rows
from kvprof.kernels.prefill.launch import prefill_step, side_by_side
from kvprof.kernels.prefill.tuning import Tuning

__all__ = [
    "PATHS",
    "REWARDED",
    "Choice",
    "best_paths",
    "library_jobs",
    "library_refuses",
    "measured_path",
    "padded_width",
    "quick_path",
    "run_paths",
    "width_classes",
]

# --- A prompt's attention through torch's own kernels, heads grouped by what those reward.
#
# Libraries want dense heads of one width, keys and values apart. On an H200 cuDNN's time falls
# at 64 and 128 and hardly between, so widths are padded to those and heads of the same padded
# pair share a call. What a library knows no option for (soft-cap, sinks, windows, tokens before
# the prompt's) it does not run.


#: Widths at which a library's time falls.
REWARDED = (64, 128, 256)

_ON_GPU = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
_ON_CPU = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


def padded_width(width: int) -> int:
    """Return the rewarded width that holds `width` columns."""
    found = next((rewarded for rewarded in REWARDED if rewarded >= width), None)
    if found is None:
        raise UsageError(
            f"heads of width {width} exceed the library path's {REWARDED[-1]}; use path triton"
        )
    return found


def width_classes(
    layout: RaggedLayout, heads: Sequence[int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return heads by padded key and value width."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for head in heads:
        widths = padded_width(layout.key_widths[head]), padded_width(layout.value_widths[head])
        found[widths] = (*found.get(widths, ()), head)
    return found


def library_refuses(
    layout: RaggedLayout,
    tokens: int,
    lengths: Sequence[int] | None,
    *,
    softcap: float = 0.0,
    sinks: bool = False,
    window: int = 0,
) -> str | None:
    """Tell why the library path cannot run this, or None when it can."""
    if softcap or sinks or window:
        return "torch's kernels do not support soft-cap, sinks or windows"
    if lengths is None:
        return "host_lengths must show that every sequence is new"
    if any(length != tokens for length in lengths):
        return f"torch's causal kernels require {tokens} tokens in every sequence and none before"
    widest = max(layout.key_widths + layout.value_widths)
    if widest > REWARDED[-1]:
        return f"heads of width {widest} exceed the library path's {REWARDED[-1]}"
    return None


def library_jobs(
    query: Tensor,
    buffer: Tensor,
    output: Tensor,
    layout: RaggedLayout,
    scaling: float,
    heads: Sequence[int],
) -> list[Callable[[], None]]:
    """Return one call per class of widths, for streams of their own."""
    grouped = width_classes(layout, heads).items()

    def job(widths: tuple[int, int], own: tuple[int, ...]) -> Callable[[], None]:
        return lambda: _attend(query, buffer, output, layout, scaling, own, widths)

    # What takes longest starts first.
    ordered = sorted(grouped, key=lambda item: -len(item[1]) * sum(item[0]))
    return [job(widths, own) for widths, own in ordered]


def _attend(
    query: Tensor,
    buffer: Tensor,
    output: Tensor,
    layout: RaggedLayout,
    scaling: float,
    heads: tuple[int, ...],
    widths: tuple[int, int],
) -> None:
    """Attend for the heads of one class."""
    tokens = query.shape[1]
    queries = _queries(query, layout, heads, widths[0])
    keys = _dense(buffer, layout, heads, 0, widths[0], tokens)
    values = _dense(buffer, layout, heads, 1, widths[1], tokens)
    try:
        with sdpa_kernel(list(_ON_GPU if query.is_cuda else _ON_CPU), set_priority=True):
            found = scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
            )
    except RuntimeError as error:
        # The second is what cuDNN says of widths that it was asked for and has no plan for.
        if not any(words in str(error) for words in ("No available kernel", "cuDNN")):
            raise
        raise LackingError(
            f"torch has no attention kernel for keys {widths[0]} and values {widths[1]} wide in "
            f"{query.dtype}; use path triton"
        ) from error
    side_by_side = heads == tuple(range(heads[0], heads[-1] + 1))
    if side_by_side and {layout.value_widths[head] for head in heads} == {widths[1]}:
        columns = slice(layout.output_offsets[heads[0]], layout.output_offsets[heads[-1] + 1])
        target = _in_heads(output[..., columns], len(heads) * layout.group)
        target.copy_(found.transpose(1, 2))  # one launch: many small ones outlast a short prompt
        return
    found = found.view(query.shape[0], len(heads), layout.group, tokens, widths[1])
    for number, head in enumerate(heads):
        columns = slice(*layout.output_offsets[head : head + 2])
        target = _in_heads(output[..., columns], layout.group)
        target.copy_(found[:, number, ..., : layout.value_widths[head]].transpose(1, 2))


def _in_heads(columns: Tensor, heads: int) -> Tensor:
    """Return ``[batch, tokens, heads · width]`` as ``[batch, tokens, heads, width]``, a view."""
    return columns.view(*columns.shape[:2], heads, -1)


def _queries(query: Tensor, layout: RaggedLayout, heads: tuple[int, ...], width: int) -> Tensor:
    """Return ``[batch, heads·G, tokens, width]``: a view where the heads lie side by side."""
    own = {layout.key_widths[head] for head in heads}
    if own == {width} and heads == tuple(range(heads[0], heads[-1] + 1)):
        columns = slice(layout.query_offsets[heads[0]], layout.query_offsets[heads[-1] + 1])
        return _in_heads(query[..., columns], len(heads) * layout.group).transpose(1, 2)
    parts = []
    for head in heads:
        columns = slice(*layout.query_offsets[head : head + 2])
        part = _in_heads(query[..., columns], layout.group).transpose(1, 2)
        parts.append(pad(part, (0, width - part.shape[-1])))
    return torch.cat(parts, dim=1)


def _dense(
    buffer: Tensor, layout: RaggedLayout, heads: tuple[int, ...], side: int, width: int, tokens: int
) -> Tensor:
    """Return K (side 0) or V of heads as ``[batch, heads, tokens, width]``: a view if possible."""
    widths = (layout.key_widths, layout.value_widths)[side]
    starts = [layout.offsets[head][side] for head in heads]
    steps = {later - start for start, later in pairwise(starts)}
    if {widths[head] for head in heads} == {width} and chunks(width) == (width,) and len(steps) < 2:
        return buffer.as_strided(
            (layout.batch, len(heads), tokens, width),
            (in_rows(buffer, layout.batch).stride(0), min(steps, default=0), width, 1),
            buffer.storage_offset() + starts[0],
        )
    dense = buffer.new_zeros(layout.batch, len(heads), tokens, width)
    for number, head in enumerate(heads):
        column = 0
        for plane in layout.planes(buffer, head)[side]:
            chunk = plane.shape[-1]
            dense[:, number, :, column : column + chunk] = plane[:, :tokens]
            column += chunk
    return dense


#: What a caller may ask for.
PATHS = ("auto", "quick", "triton", "library")

# Both ways at once are taken only when that clearly pays: it did not where few samples said so.
_CLEARLY = 0.95


@dataclass(frozen=True)
class Choice:
    """What was found best."""

    paths: tuple[str, ...]  # `triton` or `library`, per KV head
    #: Measured times: `triton` and `library` for all heads that way, `mixed` where each class of
    #: widths took its faster one and they differ.
    seconds: Mapping[str, float]


def best_paths(layout: RaggedLayout, seconds: Callable[[tuple[str | None, ...]], float]) -> Choice:
    """Return the fastest of all Triton, all library and each class its own."""
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
    """Run heads their ways side by side, without soft-cap, sinks, window or past."""
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
            layout,
            query.shape[1],
            query.device,
            schedule=schedule,
            tuning=tuning,
            element_size=query.element_size(),
            heads=own["triton"],
        )
        jobs += step.jobs(query, buffer, output, lengths, scaling)
    side_by_side(jobs, query.device)
    return output


# --- Which way a prompt's attention takes: found by measuring, remembered in the process.


#: Tokens of a prompt below which it is not worth to try, and the most on which `quick_path` tries:
#: on few tokens launches hide what the kernels of a long prompt gain.
_WORTH, _TRIED = 512, 16384

_REPEATS = 3
# Few samples decide, and a run's figures should not hang on which of two like ways won.


def _event() -> torch.cuda.Event:
    # torch leaves it without types.
    return torch.cuda.Event(enable_timing=True)


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
    """Time both ways on random data and remember the faster, up to twice the tokens."""
    if device.type != "cuda":
        raise LackingError("prefill paths are measured on a GPU only")
    tuning = tuning or Tuning()
    key = (
        layout.key_widths,
        layout.value_widths,
        layout.group,
        layout.batch,
        tokens.bit_length(),
        dtype,
        device,
        schedule,
        tuning,
    )
    if key in _REMEMBERED:
        return _REMEMBERED[key]
    if torch.cuda.is_current_stream_capturing():
        raise FailedError(
            "path auto measures: run this prefill once before capturing a CUDA graph, or name "
            "its path"
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
    """Return the faster path for a runtime, which sees a layout for a prompt or two.

    Torch is measured once, for equal unpadded widths; ragged layouts use Triton untested.
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
