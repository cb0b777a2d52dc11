"""Text that was read, without what a terminal or a page would obey instead of show.

Names, plans, records, recipes and what a model writes are other people's text. What passes here
loses the characters that move a cursor, set a title, hide what stands beside them or turn it round;
line breaks and tabs stay. None of them takes a column, so that nothing shifts in a table.
"""

import re

__all__ = ["UNPRINTABLE", "printable"]

#: Control characters but newline and tab, marks that turn the direction of text round, separators
#: of lines that are no newline, tags and blanks that nobody sees, and halves of characters.
#: The joiners of Indic scripts and of emoji (U+200C, U+200D) are not among them.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff0-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
_HALF = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` as it can be shown; half of a character, which is none, becomes ``?``."""
    # Python's own answer takes a third of the search and refuses all of these; most text ends here.
    if text.isprintable() or UNPRINTABLE.search(text) is None:
        return text
    return UNPRINTABLE.sub("", _HALF.sub("?", text))
