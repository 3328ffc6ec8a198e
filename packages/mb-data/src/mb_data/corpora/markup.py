"""The text that a page of HTML, or of an XML kind of documentation, shows.

This is no parser: pages of documentation are often invalid, and a corpus of gigabytes needs
50 MB/s. What a reader skips (scripts, navigation, the head) is removed, blocks become lines, and
preformatted text keeps its lines.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

_UNREAD = re.compile(r"<(script|style|head|nav|header|footer|svg|button|select)\b|<!--", re.I)
_PREFORMATTED = re.compile(r"<(pre|screen|programlisting)\b", re.I)
_BLOCK = re.compile(
    r"</?(?:p|div|h[1-6]|li|[uod]l|d[td]|t[rh]|table|br|hr|blockquote|section|article|main|body"
    r"|title|para|item|note|steps?|example|listitem|term|media)\b[^>]*>",
    re.IGNORECASE,
)
_CELL = re.compile(r"</?td\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[/!?a-zA-Z][^>]*>")
_SPACE = re.compile(r"[ \t\r\n\f\xa0]+")


def text_of_markup(page: str) -> str:
    """Lines of text: a paragraph each, blank lines where blocks end, preformatted text as it is."""
    page = " ".join(part for part, _ in _parts(page, _UNREAD))
    blocks = []
    for flowing, kept in _parts(page, _PREFORMATTED):
        text = kept.partition(">")[2]  # behind the rest of its tag
        blocks += [_flow(flowing), html.unescape(_replaced(_TAG, "", text)).strip("\n")]
    return "\n\n".join(block for block in blocks if block.strip()) + "\n"


def _parts(page: str, opening: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Pairs of the text before each element and its content, after the element's name; at last the
    text after all elements.

    A missing end tag is searched only once. Otherwise the time would grow with the square of a page
    that closes nothing: a quarter of an hour for a MB.
    """
    unclosed: set[str] = set()
    done, head = 0, page[: page.rfind(">") + 1]
    for start in opening.finditer(head):
        name = (start[1] or "").lower()
        if start.start() < done or name in unclosed:
            continue
        stop = re.compile(rf"</{name}\s*>" if name else "-->", re.I).search(head, start.end())
        if stop is None:
            unclosed.add(name)
            continue
        yield page[done : start.start()], page[start.end() : stop.start()]
        done = stop.end()
    yield page[done:], ""


def _replaced(pattern: re.Pattern[str], by: str, text: str) -> str:
    """`pattern.sub`, for patterns that end in ``>``. It stops at the last ``>``: after it, every
    ``<`` would be followed to the end of the text."""
    last = text.rfind(">") + 1
    return pattern.sub(by, text[:last]) + text[last:]


def _flow(part: str) -> str:
    one_line = _SPACE.sub(" ", part)
    with_lines = _replaced(_CELL, "  ", _replaced(_BLOCK, "\n", one_line))
    lines = html.unescape(_replaced(_TAG, "", with_lines)).split("\n")
    return "\n".join(line for raw in lines if (line := raw.replace("\xa0", " ").strip()))
