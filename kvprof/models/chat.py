"""Render a model's chat template in a process that can be stopped, as it may loop forever."""

import resource
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvprof.errors import FailedError

__all__ = ["ChatWriter"]

SECONDS = 10.0
_ROOM = 1 << 30  # bytes that a template may take beside what is there already
_MOST = 1 << 26  # characters


class ChatWriter:
    """Render chats with a tokenizer's template; `name` is the model's, for messages."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, messages: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
        """Return a chat as text."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        what = f"{self._name}: its chat template"
        try:
            self._pipe.send((list(messages), add_generation_prompt))
            if not self._pipe.poll(SECONDS):
                raise FailedError(f"{what} did not finish within {SECONDS:g} s; it may loop")
            text, problem = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise FailedError(f"{what} crashed; it probably exceeded its memory limit") from None
        except BaseException:
            self.close()
            raise
        if problem is not None:
            raise FailedError(f"{what} refuses: {problem}")
        return str(text)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> None:
        # A copy of this process has the tokenizer already, and takes no code from anywhere.
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._tokenizer, theirs, self._pipe), daemon=True
        )
        self._process.start()
        theirs.close()


def _serve(tokenizer: Any, pipe: Connection, other: Connection) -> None:
    other.close()  # or the parent's end would go unnoticed
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + _ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):
        pass  # a system that has no such limit
    while True:
        try:
            messages, add_generation_prompt = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            text.encode()  # a template may hold half a character
            answer = (
                (text, None)
                if len(text) <= _MOST
                else (None, f"it wrote over {_MOST:,} characters")
            )
        except MemoryError:
            answer = (None, "it exceeds the memory limit for templates")
        except Exception as cause:  # a template raises whatever it likes
            answer = (None, " ".join(str(cause).split())[:200] or type(cause).__name__)
        pipe.send(answer)
