"""The process of ``kvprof serve``: vLLM's own ``serve``, with the plug-in in its place."""

import sys

from kvprof.child import die_with_parent
from kvprof.errors import KvprofError, options_named
from kvprof.printable import printable
from kvprof.serving.plugin import register

__all__ = ["main"]


def main(words: list[str]) -> int:
    """Run ``vllm serve`` and return an exit code; what kvprof refuses is one line on stderr."""
    # Not vllm's `main`: it asks for metadata by a name that builds for a CPU do not have.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    register()
    sys.argv = ["vllm", *words]
    parser, command = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    arguments = parser.parse_args(words)
    command.validate(arguments)
    with options_named():
        try:
            command.cmd(arguments)
        except KvprofError as refusal:
            sys.stderr.write(f"kvprof: {printable(str(refusal))}\n")
            return int(refusal.exit_code)
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
