"""Silence for libraries that write to stderr on their own: kvprof says one clear line instead."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet", "unheard"]

_CHATTY = ("accelerate", "huggingface_hub")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and progress bars of transformers and accelerate during the body."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def unheard(name: str) -> Iterator[None]:
    """Silence one logger during the body; faster than `quiet`, which resets every logger."""
    logger = logging.getLogger(name)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False
