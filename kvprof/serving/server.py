"""The process of ``kvprof serve``: vLLM's own command line, with the plug-in in its place."""

import sys

from kvprof.errors import KvprofError
from kvprof.leash import follow_parent
from kvprof.serving.plugin import register

__all__ = ["main"]


def main(words: list[str]) -> int:
    """Run ``vllm`` and return an exit code; what kvprof refuses is one line on stderr.

    Parameters
    ----------
    words : list of str
        What ``vllm`` is given.
    """
    from vllm.entrypoints.cli.main import main as vllm_main

    register()
    sys.argv = ["vllm", *words]
    try:
        vllm_main()
    except KvprofError as refusal:
        sys.stderr.write(f"kvprof: {refusal}\n")
        return int(refusal.exit_code)
    return 0


if __name__ == "__main__":
    follow_parent()
    sys.exit(main(sys.argv[1:]))
