"""The process of a baseline: vLLM's own server, without a plan; it ends with its parent."""

import os
import runpy
import sys

from kvprof.child import die_with_parent

__all__ = ["main"]

_PLAN = "KVPROF_PLAN"
_SERVER = "vllm.entrypoints.openai.api_server"


def main(words: list[str]) -> None:
    """Run vLLM's OpenAI-compatible server."""
    os.environ.pop(_PLAN, None)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    sys.argv = [_SERVER, *words]
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])
