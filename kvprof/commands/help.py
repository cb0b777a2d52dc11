"""What ``--help`` says of a command: its options in groups, and examples to copy."""

import re
from inspect import cleandoc
from typing import Any

from typer.core import TyperCommand

__all__ = ["DATA", "METHOD", "MODEL", "OUTPUT", "Command"]

# Titles of groups that commands share, for `rich_help_panel` of an option; a command names its own.
MODEL = "Model and device"
METHOD = "Method"
DATA = "Text and tasks"
OUTPUT = "Output"

# The head of a NumPy docstring's section; help ends before the first.
_SECTION = re.compile(r"^([A-Z][A-Za-z ]*)\n-{3,}\n", re.MULTILINE)


class Command(TyperCommand):
    """A command that shows its options in groups and ends with its docstring's examples.

    An option's group is its ``rich_help_panel``; those without one come first, as *Options*.

    Attributes
    ----------
    examples : list of str
        Command lines of the section *Examples* of the function's docstring.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        text, *sections = _SECTION.split(cleandoc(getattr(self.callback, "__doc__", None) or ""))
        self.help = text.strip().replace("``", "") or self.help
        named = dict(zip(sections[::2], sections[1::2], strict=True))
        self.examples = named.get("Examples", "").strip().splitlines()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, a section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                own = getattr(parameter, "rich_help_panel", None)
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(own or kind, []).append(record)
        # What all commands share comes after what is this one's own.
        shared = {title: groups.pop(title, []) for title in (METHOD, DATA, MODEL, OUTPUT)}
        for title, records in (groups | shared).items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they stand, and what else comes last."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
        super().format_epilog(ctx, formatter)
