"""What an engine says of itself at ``/metrics``: how many run and wait, and where time went."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Marks", "added", "difference", "engine_name", "parse_marks"]

_LINE = re.compile(rb"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(rb'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
_LONGEST = 2**14  # bytes of a line; the engines' have hundreds
# Sums of what a server says are what an event can hold.
_DIGITS = 18
_MOST = 1e12
_MOST_BYTES = 10**18

# Newer names first: of each row the first that is there counts. vLLM's, then SGLang's.
_GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "cache": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
_COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "requests": ("vllm:e2e_request_latency_seconds_count",),
    "end_to_end": ("vllm:e2e_request_latency_seconds_sum",),
    "waiting": ("vllm:request_queue_time_seconds_sum",),
    "prefill": ("vllm:request_prefill_time_seconds_sum",),
    "decode": ("vllm:request_decode_time_seconds_sum",),
}
_ENGINES = (b"vllm:", b"sglang:")
_CONFIG = b"vllm:cache_config_info"


@dataclass(frozen=True)
class Marks:
    """What engines say at one moment."""

    running: int | None  # requests
    waiting: int | None
    cache: float | None  # share of the pages that is used
    #: Since the engine started, as `kvprof.records.events.LoadRateFinished` names them.
    totals: dict[str, float]
    cache_tokens: int | None = None  # that fit, and what holds them; None where they are not told
    cache_bytes: int | None = None


def parse_marks(text: bytes) -> Marks | None:
    """Read Prometheus's text format (sums over engines, mean cache use); None without metrics."""
    values: dict[bytes, list[float]] = {}
    tokens: list[int] = []
    pages: list[int] = []
    nbytes: list[int] = []
    for line in text.splitlines():
        if not line.startswith(_ENGINES) or len(line) > _LONGEST:
            continue
        if (found := _LINE.fullmatch(line)) is None:
            continue
        name, labels, number = found.groups()
        if name == _CONFIG and labels is not None:
            config = dict(_LABEL.findall(labels))
            tokens += _whole(config.get(b"kv_cache_size_tokens"))
            pages += _page_tokens(config)
            nbytes += _whole(config.get(b"kv_cache_memory_bytes"))
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        if 0 <= value <= _MOST:  # nothing that is looked for lies below 0
            values.setdefault(name, []).append(value)

    def first(names: Sequence[str]) -> list[float] | None:
        return next((own for name in names if (own := values.get(name.encode()))), None)

    gauges = {name: first(names) for name, names in _GAUGES.items()}
    totals = {
        name: sum(own) for name, names in _COUNTERS.items() if (own := first(names)) is not None
    }
    if not totals and all(own is None for own in gauges.values()):
        return None
    running, waiting, cache = (gauges[name] for name in ("running", "waiting", "cache"))
    return Marks(
        None if running is None else round(sum(running)),
        None if waiting is None else round(sum(waiting)),
        None if cache is None else sum(cache) / len(cache),
        totals,
        # Older vLLM counts the pages of all its engines in each one's line.
        _usable(sum(tokens) or max(pages, default=0)),
        _usable(sum(nbytes)),
    )


def _usable(number: int) -> int | None:
    return number if 0 < number <= _MOST_BYTES else None


def _page_tokens(labels: Mapping[bytes, bytes]) -> list[int]:
    pages, size = (_whole(labels.get(name)) for name in (b"num_gpu_blocks", b"block_size"))
    return [pages[0] * size[0]] if pages and size else []


def _whole(text: bytes | None) -> list[int]:
    return [int(text)] if text is not None and text.isdigit() and len(text) <= _DIGITS else []


def engine_name(text: bytes) -> str | None:
    """Return which engine's marks these are."""
    for name, prefix in (("vLLM", b"vllm:"), ("SGLang", b"sglang:")):
        if re.search(rb"^" + prefix, text, re.MULTILINE):
            return name
    return None


def added(several: Sequence[Marks | None]) -> Marks | None:
    """Return what several servers say together; None where one of them says nothing."""
    known = [one for one in several if one is not None]
    if not known or len(known) < len(several):
        return None

    def total(values: Sequence[int | None]) -> int | None:
        counted = [one for one in values if one is not None]
        return sum(counted) if len(counted) == len(values) else None

    caches = [one.cache for one in known if one.cache is not None]
    names = set.intersection(*(set(one.totals) for one in known))
    return Marks(
        total([one.running for one in known]),
        total([one.waiting for one in known]),
        sum(caches) / len(caches) if len(caches) == len(known) else None,
        {name: sum(one.totals[name] for one in known) for name in names},
        total([one.cache_tokens for one in known]),
        total([one.cache_bytes for one in known]),
    )


def difference(before: Marks | None, after: Marks | None) -> dict[str, float]:
    """Return what the totals grew by; empty where one is missing, or an engine restarted."""
    if before is None or after is None:
        return {}
    grown = {
        name: after.totals[name] - before.totals[name]
        for name in sorted(after.totals)
        if name in before.totals
    }
    return grown if all(value >= 0 for value in grown.values()) else {}
