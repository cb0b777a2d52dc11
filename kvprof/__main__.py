"""``python -m kvprof``."""

from kvprof.cli import main

if __name__ == "__main__":
    main()
