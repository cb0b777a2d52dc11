"""Rich renderables that consist of lines of text, as those lines."""

from rich.console import Console, Group, RenderableType
from rich.text import Text

__all__ = ["text_lines"]


def text_lines(content: RenderableType, console: Console, width: int) -> list[Text]:
    """Return what `content` draws as lines, which Textual paints faster than any other renderable.

    Parameters
    ----------
    content : RenderableType
        Text, a group, or what yields such; nothing else is drawn by the views.
    console : Console
    width : int
        Columns.

    Raises
    ------
    TypeError
        When it draws something else.
    """
    if isinstance(content, str):
        content = Text(content)
    if isinstance(content, Text):
        return list(content.split("\n", allow_blank=True))
    if isinstance(content, Group):
        return [line for one in content.renderables for line in text_lines(one, console, width)]
    draw = getattr(content, "__rich_console__", None)
    if draw is None:
        raise TypeError(f"a {type(content).__name__} is no text")
    options = console.options.update(width=width)
    return [line for one in draw(console, options) for line in text_lines(one, console, width)]
