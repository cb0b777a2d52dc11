"""Where every process of kvprof begins: the ``kvprof`` script and ``python -m kvprof``."""

import os

__all__ = ["main"]


def main() -> None:
    """Run the command line, from its first moment on without a traceback at Ctrl-C."""
    try:
        from kvprof import interrupt

        interrupt.at_once()
        from kvprof import cli
    except KeyboardInterrupt:  # before it had a handler of its own
        os._exit(130)
    cli.main()


if __name__ == "__main__":
    main()
