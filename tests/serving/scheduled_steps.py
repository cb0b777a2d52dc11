"""Steps as vLLM's scheduler makes them up, without vLLM."""

from types import SimpleNamespace
from typing import Any

__all__ = ["FRESH", "LONG_PAST"]


def scheduled(new: dict[str, tuple[int, int]], known: dict[str, tuple[int, int]]) -> Any:
    """Return what vLLM's scheduler makes up: of requests, their new tokens and those before."""
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (count, _) in (new | known).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before)
            for name, (_, before) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(known), num_computed_tokens=[before for _, before in known.values()]
        ),
    )


LONG_PAST = scheduled({"a": (20, 0)}, {"b": (1, 900), "c": (600, 8192)})
FRESH = scheduled({"a": (600, 0)}, {"b": (1, 900)})
