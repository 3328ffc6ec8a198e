"""The text that a page of HTML, or of an XML kind of documentation, shows.

No parser: pages of documentation are often wrong, and a corpus of gigabytes wants 50 MB/s. What a
reader skips (scripts, navigation, the head) goes; blocks become lines, what is preformatted keeps
its own.
"""

from __future__ import annotations

import html
import re

_UNREAD = re.compile(
    r"<(script|style|head|nav|header|footer|svg|button|select)\b.*?</\1\s*>|<!--.*?-->",
    re.DOTALL | re.IGNORECASE,
)
_PREFORMATTED = re.compile(r"<(pre|screen|programlisting)\b[^>]*>(.*?)</\1\s*>", re.DOTALL | re.I)
_BLOCK = re.compile(
    r"</?(?:p|div|h[1-6]|li|[uod]l|d[td]|t[rh]|table|br|hr|blockquote|section|article|main|body"
    r"|title|para|item|note|steps?|example|listitem|term|media)\b[^>]*>",
    re.IGNORECASE,
)
_CELL = re.compile(r"</?td\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[/!?a-zA-Z][^>]*>")
_SPACE = re.compile(r"[ \t\r\n\f\xa0]+")
_LINES = re.compile(r"\s*\n\s*\n\s*")


def text_of_markup(page: str) -> str:
    """Lines of text: a paragraph each, blank lines where blocks end, preformatted text as it is."""
    page = _UNREAD.sub(" ", page)
    parts = _PREFORMATTED.split(page)
    # Of three: what flows, the name of the tag, what is preformatted.
    flowing = [_flow(part) for part in parts[::3]]
    kept = [html.unescape(_TAG.sub("", part)).strip("\n") for part in parts[2::3]]
    blocks = [flowing[0]]
    for code, text in zip(kept, flowing[1:], strict=True):
        blocks += [code, text]
    return "\n\n".join(block for block in blocks if block.strip()) + "\n"


def _flow(part: str) -> str:
    one_line = _SPACE.sub(" ", part)
    with_lines = _CELL.sub("  ", _BLOCK.sub("\n", one_line))
    lines = html.unescape(_TAG.sub("", with_lines)).split("\n")
    return "\n".join(line for raw in lines if (line := raw.replace("\xa0", " ").strip()))
