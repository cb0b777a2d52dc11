"""Turn the pages of a package into plain text: HTML, reStructuredText, POD, man pages, code."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

_BLOCKS = """
p div section article li dt dd h1 h2 h3 h4 h5 h6 tr table ul ol dl pre blockquote figure
figcaption br hr main body details summary caption
"""
_SILENT_TAGS = """
script style head nav footer aside button svg form select noscript iframe object title
"""
_SILENT_NAMES = """
sphinxsidebar related navheader navfooter headerlink toc table-of-contents contents mainmenu
submenu menu searchmenu fancy_toc footer navigation nav global-nav nav-header breadcrumbs toplang
qview langs top bottomlang quickview copyright howtoget sidebar menu-bar nav-wrapper nav-chapters
spirit-nav navbar sidebarwrapper out-of-band src-link index indexterm logo search linenos tocdepth
page-header toplink path
"""
_VOID_TAGS = "area base br col embed hr img input link meta param source track wbr"
BLOCKS = frozenset(_BLOCKS.split())
SILENT_TAGS = frozenset(_SILENT_TAGS.split())
SILENT_NAMES = frozenset(_SILENT_NAMES.split())
VOID_TAGS = frozenset(_VOID_TAGS.split())


class _PageReader(HTMLParser):
    """Collect the readable text of one page; blocks end lines, ``pre`` is kept as it is."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.silent_stack: list[str] = []
        self.pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.silent_stack:
            if tag == self.silent_stack[-1] and tag not in VOID_TAGS:
                self.silent_stack.append(tag)
            return
        silent = tag in SILENT_TAGS or self._is_silent(attrs)
        if silent and tag not in VOID_TAGS and tag != "body":
            self.silent_stack.append(tag)
            return
        if tag == "pre":
            self.pre_depth += 1
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4") else "\n")
            if tag == "li":
                self.parts.append("- ")
        elif tag in ("td", "th"):
            self.parts.append("  ")

    def handle_endtag(self, tag: str) -> None:
        if self.silent_stack:
            if tag == self.silent_stack[-1]:
                self.silent_stack.pop()
            return
        if tag == "pre":
            self.pre_depth = max(0, self.pre_depth - 1)
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4") else "\n")

    def handle_data(self, data: str) -> None:
        if not self.silent_stack:
            self.parts.append(data if self.pre_depth else re.sub(r"\s+", " ", data))

    @staticmethod
    def _is_silent(attrs: list[tuple[str, str | None]]) -> bool:
        for name, value in attrs:
            if name in ("class", "id") and value:
                if not SILENT_NAMES.isdisjoint(value.lower().split()):
                    return True
            elif name == "role" and value in ("navigation", "search"):
                return True
        return False


def html_to_text(page: str) -> str:
    """Readable text of an HTML page, without navigation."""
    reader = _PageReader()
    reader.feed(page)
    reader.close()
    text = "".join(reader.parts).replace("¶", "").replace("\xa0", " ")
    text = re.sub(r"\n +(?=[-A-Z])", "\n", text)
    text = re.sub(r"\n- \s*\n+", "\n- ", text)
    return text.replace("\n\n- ", "\n- ")


def rst_to_text(source: str) -> str:
    """Thin the markup of reStructuredText: roles, targets and comments go, prose stays."""
    text = re.sub(r"^\.\. (?:_[^\n]*|SPDX[^\n]*|\|[^\n]*|index::[^\n]*)\n", "", source, flags=re.M)
    text = re.sub(r":[a-z:+-]+:`~?\.?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<\n]+?)\s*<[^`>\n]*>`__?", r"\1", text)
    return re.sub(r"``([^`\n]+)``", r"\1", text)


def pod_to_text(source: str) -> str:
    """Perl's POD: commands become headings, formatting codes their content."""
    source = re.sub(
        r"^=(?:for|begin|end|encoding|cut|over|back|pod)[^\n]*$", "", source, flags=re.M
    )
    source = re.sub(r"^=(?:head\d|item)[ \t]*", "", source, flags=re.M)
    source = re.sub(r"\b[A-Z]<<+ (.*?) >>+", r"\1", source, flags=re.S)
    source = re.sub(r"\bL<([^|<>]*)\|[^<>]*>", r"\1", source)
    for _ in range(3):
        source = re.sub(r"\b[BCFILSX]<([^<>]*)>", r"\1", source)
    for name, char in (("lt", "<"), ("gt", ">"), ("verbar", "|"), ("sol", "/")):
        source = source.replace(f"E<{name}>", char)
    return source


_MAN_SIMPLE = (("\\-", "-"), ("\\&", ""), ("\\e", "\\"), ("\\ ", " "), ("\\|", ""), ("\\:", ""))
_MAN_CHARS = {
    "aq": "'",
    "dq": '"',
    "lq": '"',
    "rq": '"',
    "oq": "'",
    "cq": "'",
    "bu": "*",
    "em": "-",
    "en": "-",
    "ga": "`",
    "ti": "~",
    "ha": "^",
    "rs": "\\",
    "co": "(c)",
}


def man_to_text(source: str) -> str:
    """Write a man page without macros: headings, paragraphs and listings as plain lines."""
    lines: list[str] = []
    filled: list[str] = []
    verbatim = False

    def flush() -> None:
        if filled:
            lines.append(" ".join(filled))
            filled.clear()

    for raw in source.splitlines():
        if raw.startswith(("'\\\"", '.\\"', "'\"")) or raw.startswith((".TH", ".so", ".if", ".ie")):
            continue
        text = raw
        if raw.startswith((".", "'")):
            macro, _, rest = raw[1:].strip().partition(" ")
            rest = rest.strip()
            if macro in ("nf", "EX", "CS", "Vb"):
                flush()
                verbatim = True
            elif macro in ("fi", "EE", "CE", "Ve"):
                verbatim = False
            if macro in ("SH", "SS", "PP", "P", "LP", "TP", "IP", "HP", "Sp", "sp", "br", "TQ"):
                flush()
                lines.append("")
            if macro in ("SH", "SS"):
                lines += [rest.replace('"', ""), ""]
                continue
            if macro not in ("B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "IP", "SM"):
                continue
            if macro == "IP":
                rest = rest.split('"')[1] if rest.startswith('"') else rest.split(" ")[0]
                rest = "" if rest in ("\\(bu", "*") else rest
            glue = "" if macro in ("BR", "IR", "RB", "RI", "BI", "IB") else " "
            pieces = re.findall(r'"([^"]*)"|(\S+)', re.sub(r"\\ ", "\x00", rest))
            text = glue.join(a or b for a, b in pieces).replace("\x00", " ")
        text = re.sub(r"\\f(?:\[\w*\]|\(..|.)", "", text)
        text = re.sub(r"\\s[-+]?\d|\\m\[\w*\]|\\[%/,c]", "", text)
        text = re.sub(
            r"\\\((..)|\\\[(\w+)\]", lambda m: _MAN_CHARS.get(m.group(1) or m.group(2), ""), text
        )
        text = re.sub(r"\\\*\(?..?", "", text)
        for old, new in _MAN_SIMPLE:
            text = text.replace(old, new)
        if verbatim:
            lines.append("    " + text)
        elif text.strip():
            filled.append(text.strip())
        else:
            flush()
            lines.append("")
    flush()
    return "\n".join(lines)


def code_to_text(source: str) -> str:
    """Source code stays as it is."""
    return source


CONVERTERS: dict[str, Callable[[str], str]] = {
    "html": html_to_text,
    "rst": rst_to_text,
    "text": code_to_text,
    "pod": pod_to_text,
    "man": man_to_text,
    "code": code_to_text,
}


def tidy(text: str) -> str:
    """Drop trailing spaces, form feeds, runs of blank lines and overlong rules."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").expandtabs(8)
    text = re.sub(r"([=\-~^*#_.+])\1{9,}", lambda m: m.group(1) * 8, text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
