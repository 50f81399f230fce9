"""Adapt standard output and errors of a command to characters that their encoding lacks, and to readers that closed them."""

from __future__ import annotations

import codecs
import os
import re
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dcpbench.errors import ExitCode
from dcpbench.points.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CLOSED = ExitCode.OUTPUT_CLOSED  # of a command with a closed reader, as in `… | head -1`: 128 + SIGPIPE
FORMS = {  # ASCII replacements of characters that the encoding of a terminal, a pipe or a log lacks
    "·": ".",
    "×": "x",
    "→": "->",
    "←": "<-",
    "–": "-",
    "—": "-",
    "−": "-",
    "•": "*",
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
    "≈": "~",
    "µ": "u",
    "μ": "u",
    "°": "deg",
    "‖": "|",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "σ": "sigma",
    "√": "sqrt",
    "✓": "ok",
    "✗": "x",
    "●": "*",
    "▲": "^",
    "▼": "v",
}
LINES, BLOCKS = range(0x2500, 0x2580), range(0x2580, 0x25A0)  # code points of box drawing and block elements
PYTHONS_OWN = ("strict", "backslashreplace", "surrogateescape")  # default error handlers of stdout and stderr
HANDLER = "dcpbench.forms"  # name of an error handler of codecs that puts them in


def prepare_streams() -> None:
    """Make stdout and stderr accept any text: with ASCII replacements if their encoding requires it; no-op if they are closed.

    An error handler chosen by the caller, as with PYTHONIOENCODING=ascii:ignore, is kept. Secrets are redacted in all
    later output.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell, as in `>&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 -- until the process ends
        elif getattr(stream, "errors", "") in PYTHONS_OWN and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
        if not isinstance(getattr(sys, name), RedactedStream):
            setattr(sys, name, RedactedStream(getattr(sys, name)))


class RedactedStream:
    """Wrap a text stream and replace secrets before they are written; otherwise it behaves like the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a stream
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def write(self, text: Any) -> int:  # noqa: ANN401 - the stream raises TypeError for other types
        """Write a text without secrets."""
        return self._stream.write(redact(text) if isinstance(text, str) else text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines without secrets."""
        for line in lines:
            self.write(line)


def write_json(text: str) -> None:
    """Write JSON to stdout; characters missing from its encoding are escaped, so that readers get the original text."""
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    sys.stdout.write(text if encoding == "utf-8" else re.sub(r"[^\x00-\x7f]", _encode_json_escape, text))


def drop_output() -> None:
    """Discard further output: data left in buffers would fail again at the end of the process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _handle_encode_error(error: UnicodeError) -> tuple[str, int]:
    """Return the ASCII replacement, as an error handler of codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_find_replacement, error.object[error.start : error.end])), error.end


def _find_replacement(c: str) -> str:
    if c in FORMS:
        return FORMS[c]
    if ord(c) in LINES:
        return "-" if "HORIZONTAL" in unicodedata.name(c) and "VERTICAL" not in unicodedata.name(c) else "|"
    if ord(c) in BLOCKS:
        return "#"
    return unicodedata.normalize("NFKD", c).encode("ascii", "ignore").decode() or "?"


def _encode_json_escape(found: re.Match[str]) -> str:
    data = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[i : i + 2].hex()}" for i in range(0, len(data), 2))


codecs.register_error(HANDLER, _handle_encode_error)
