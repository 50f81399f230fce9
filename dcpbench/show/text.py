"""Format words in sentences, and make foreign strings printable: a name in a record or a trace may be anything."""

from __future__ import annotations

import collections
import hashlib
import html
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.points.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TEXT_CHARS = 2_000  # of a string of a record; the omitted part is noted with a hash
MAX_NAME_CHARS, MAX_LINE_CHARS = 200, 300  # of a name, and of a sentence, in lists and tables
LINES = "\n\t"  # control characters kept in multi-line strings
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # controls, direction marks, lone surrogates: terminals obey them
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run a cell that starts with one of these


def format_count(n: int, what: str) -> str:
    """Return `1 point`, `2 points`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def format_list(parts: Sequence[str], last: str = "and") -> str:
    """Return `a, b and c`."""
    return f" {last} ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def format_capitalized(text: str) -> str:
    """Return the text with a capital first letter, unless its first word is a name in lower case: vLLM, tp2, dcpbench."""
    word = re.split(r"[\s']", text, maxsplit=1)[0]
    if word == "dcpbench" or any(c.isupper() or c.isdigit() for c in word[1:]):
        return text
    return text[:1].upper() + text[1:]


def make_natural_key(text: object) -> list[tuple[int, str]]:
    """Return a sort key for natural order, in which `2` comes before `10`."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"([0-9]+)", str(text)) if word]


def make_printable(text: str, keep: str = "") -> str:
    r"""Return the text with all control sequences for a terminal, a log or a browser escaped: ESC becomes `\x1b`.

    `keep`: characters that stay, such as LINES.
    """
    if text.isprintable():
        return text
    return "".join(_encode_control(c) if unicodedata.category(c) in HIDDEN and c not in keep else c for c in text)


def fit_text(text: str, most: int) -> str:
    """Return the text without secrets, cut with `…` to at most `most` characters."""
    text = redact(text)  # half of a secret could not be found any more
    return text if len(text) <= most else text[: most - 1] + "…"


def fit_name(text: str, most: int = MAX_NAME_CHARS) -> str:
    """Return a name in printable characters, cut with `…` to at most `most`. Its spaces stay."""
    return fit_text(make_printable(fit_text(text, most)), most)


def fit_line(text: str, most: int = MAX_LINE_CHARS) -> str:
    """Return a sentence in one printable line of at most `most` characters."""
    return fit_name(" ".join(fit_text(text, most).split()), most)


def summarize_long_text(text: str, most: int = MAX_TEXT_CHARS) -> str:
    """Return a string, shortened if it is too long to its beginning, its length and a hash; printable, line breaks stay."""
    text = redact(text)
    if len(text) <= most:
        return make_printable(text, LINES)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{make_printable(text[:most], LINES)}… ({len(text):,} characters, {digest})"


def get_path_end(path: str, limit: int) -> str:
    """Return the end of a path that fits into `limit` columns, whole folders first."""
    path = redact(path)
    if len(path) <= limit:
        return path
    parts: Sequence[str] = path.split("/")
    for n in range(1, len(parts)):
        tail = "…/" + "/".join(parts[n:])
        if len(tail) <= limit:
            return tail
    return "…" + path[-(limit - 1) :]


def format_markdown_text(text: str) -> str:
    """Return text that Markdown and HTML show unchanged, on one line; `@name` notifies no user, no address becomes a link."""
    text = re.sub(r"([\\`*_{}\[\]#|~$])", r"\\\1", html.escape(make_printable(" ".join(text.split())), quote=False))
    return text.replace("@", "@<!-- -->").replace("://", "&#58;//")


def format_markdown_code(text: str) -> str:
    """Return text in an HTML code element for a table cell, because a `|` or a backtick would end a Markdown one."""
    escaped = re.sub(r"([\\`*_{}\[\]#|~$@:])", lambda m: f"&#{ord(m[0])};", html.escape(text, quote=False))
    return f"<code>{escaped}</code>"


def format_spreadsheet_cell(text: str) -> str:
    """Return text that no spreadsheet interprets as a formula."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def _encode_control(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")


def make_unique_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return a name for each file or folder: its own, with as many parent folders as make it unique."""
    names = {path: path.name or str(path) for path in paths}
    parts = 1
    while repeated := {name for name, count in collections.Counter(names.values()).items() if count > 1}:
        parts += 1
        names |= {path: str(Path(*path.parts[-parts:])) for path, name in names.items() if name in repeated}
    return names
