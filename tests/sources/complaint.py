"""What a call says when it refuses: only an error that is the user's to see counts."""

from collections.abc import Callable
from typing import Any

from kvprof.errors import KvprofError


def complaint(call: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """Return the message of the error that the call raises, or None; any other error is raised."""
    try:
        call(*args, **options)
    except KvprofError as error:
        return str(error)
    return None
