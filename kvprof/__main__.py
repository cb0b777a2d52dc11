"""``python -m kvprof``: the command line where its script is not on the path."""

from kvprof.cli import main

if __name__ == "__main__":
    main()
