"""What the hub has of a model, without torch; within two seconds, whether it can be asked."""

import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants  # which it has only once it is imported
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvprof.errors import LackingError, UsageError

__all__ = [
    "HUB_ID",
    "INDEX",
    "SINGLE",
    "check_reachable",
    "fetching",
    "hub_answers",
    "hub_file",
]

#: Files of a model's weights: the only one, or what lists the others.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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
    except HFValidationError:
        return
    if not isinstance(cached, str) and not hub_answers():
        raise LackingError(_unreachable(spec))


def _unreachable(spec: str) -> str:
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


def hub_file(spec: str, name: str, revision: str | None) -> Path:
    """Return a file of a model on the hub, downloaded unless it is in the cache."""
    local = not hub_answers()
    with fetching(spec, revision, name if name.endswith(".gguf") else None):
        return Path(
            huggingface_hub.hf_hub_download(spec, name, revision=revision, local_files_only=local)
        )


@contextmanager
def fetching(spec: str, revision: str | None, gguf: str | None = None) -> Iterator[None]:
    """Say in one clear line what the hub's client stumbles over during the body."""
    try:
        yield
    except GatedRepoError as error:
        raise LackingError(
            f"{spec} is gated: accept its terms on the hub and log in (hf auth login)"
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{spec} has no revision {revision!r}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UsageError(
            f"no model {spec!r}: no such folder, and not on the hub (or private: hf auth login)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise LackingError(_unreachable(spec)) from error
    except EntryNotFoundError as error:
        if gguf is not None:
            raise UsageError(f"--gguf: {spec} has no file {gguf!r}") from error
        raise UsageError(
            f"{spec} lacks config.json or safetensors weights ({SINGLE}); for GGUF weights use "
            "--gguf FILE"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise LackingError(f"{spec} cannot be downloaded from the hub: {said}") from error
