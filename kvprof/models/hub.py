"""Whether the hub can be asked for a model: known within two seconds, and without torch."""

import re
import socket
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants  # which it has only once it is imported

from kvprof.errors import LackingError

__all__ = ["HUB_ID", "check_reachable", "hub_answers", "unreachable"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PATIENCE = 1.5  # seconds for the hub to answer


def check_reachable(spec: str, revision: str | None, file: str | None = None) -> None:
    """Refuse a hub id that is neither in the cache nor to be had, before torch is loaded."""
    path = Path(spec).expanduser()
    if spec in ("reference", "smollm2") or path.exists() or path.suffix == ".gguf":
        return
    if not HUB_ID.fullmatch(spec):
        return
    try:
        cached = huggingface_hub.try_to_load_from_cache(
            spec, file or "config.json", revision=revision
        )
    except huggingface_hub.errors.HFValidationError:
        return
    if not isinstance(cached, str) and not hub_answers():
        raise LackingError(unreachable(spec))


def unreachable(spec: str) -> str:
    """Return why a hub id cannot be had."""
    return (
        f"no model {spec!r}: no such folder, not in the local hub cache, and the hub is "
        "unreachable; go online or name a local folder"
    )


def hub_answers() -> bool:
    """Return whether the hub can be connected to; its own client would try for half a minute."""
    constants = huggingface_hub.constants
    if constants.HF_HUB_OFFLINE:
        return False
    proxy = urllib.request.getproxies().get(urlsplit(constants.ENDPOINT).scheme)
    server = urlsplit(proxy or constants.ENDPOINT)
    port = server.port or (443 if server.scheme == "https" else 80)
    found: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((server.hostname or "", port), _PATIENCE).close()
        except OSError:
            found.append(False)
        else:
            found.append(True)

    # Looking up a name has no time limit of its own.
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return found == [True]
