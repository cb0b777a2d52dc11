"""Where every process of kvprof begins: ``scripts/kvprof`` and ``python -m kvprof``."""

# Built in: `signal` itself takes milliseconds, in which Ctrl-C would be a traceback.
import _signal  # type: ignore[import-not-found]
import os

__all__ = ["main"]

try:
    # Whoever presses Ctrl-C now loses nothing and is told nothing; what ignores it still does.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
except KeyboardInterrupt:  # it came before that
    os._exit(130)


def main() -> None:
    """Run the command line, from its first moment on without a traceback at Ctrl-C."""
    from kvprof import interrupt

    interrupt.at_once()
    from kvprof import cli

    cli.main()


if __name__ == "__main__":
    main()
