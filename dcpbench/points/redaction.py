"""Keep API keys and passwords out of everything that is stored, cut or printed. No torch.

Secrets are registered once, when a command line, an environment or a file that holds them is read. Every text from a server, a
log or a command line is redacted before it is cut to a length, because half of a key matches no search; written and
printed text is redacted once more. Processes that a command starts get the secrets through a pipe, never as an argument.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import os
import re
import shlex
import urllib.parse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PLACEHOLDER = "(API key)"
MIN_LENGTH = 8  # shorter values, such as EMPTY, are words that may stand anywhere
MIN_DISTINCT = 4  # characters; `--------` is no secret
MAX_NESTING = 3  # command lines inside an argument of a command line
NAME = r"(?:api_?key|access_?key|secret_?key|private_?key|secret|password|passwd|credentials?|(?:[a-z]+_)*(?:auth|access|api|hf|hub|session|bearer|admin|refresh)_token|token)"
OPTION = re.compile(rf"(?:^|[_.]){NAME}$", re.IGNORECASE)  # `--api-key`, `--hf-token`; never `--max-tokens`
VARIABLE = re.compile(r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|SECRET_?KEY|PRIVATE_?KEY|TOKEN|SECRET|PASSWORD|PASSWD)$")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
HEADER = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)\s*:\s*(.+)", re.DOTALL)
SECRET_HEADER = re.compile(r"authorization|cookie|key|token|secret|password", re.IGNORECASE)

_forms: list[str] = []  # every way in which a secret may be written, longest first
_secrets: dict[str, None] = {}


def register_secrets(*values: str) -> None:
    """Add secrets; values that are too short or too common to be distinguished from other text are skipped."""
    new = [value for value in values if _is_secret(value) and value not in _secrets]
    if new:
        _secrets.update(dict.fromkeys(new))
        _forms[:] = sorted({form for secret in _secrets for form in _iter_forms(secret)}, key=len, reverse=True)


def reset_secrets() -> None:
    """Forget all secrets, as at the beginning of a command."""
    _secrets.clear()
    _forms.clear()


def list_secrets() -> tuple[str, ...]:
    """Return the secrets, for a process that this one starts."""
    return tuple(_secrets)


def list_forms() -> tuple[str, ...]:
    """Return every way in which the secrets may be written, longest first."""
    return tuple(_forms)


def redact(text: str) -> str:
    """Return the text with every secret replaced."""
    for form in _forms:
        if form in text:
            text = text.replace(form, PLACEHOLDER)
    return text


def redact_part(text: str) -> str:
    """Return the same of a text that others cut: also the beginning of a secret at its end, and the end of one at its start."""
    return _remove_cut_secrets(redact(text)) if _forms else text


def redact_values(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return dicts and lists with every text inside redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_values(name): redact_values(item) for name, item in value.items()}
    return [redact_values(item) for item in value] if isinstance(value, list) else value


def format_command_line(argv: Iterable[str]) -> str:
    """Return a command line as it may be recorded and printed: redacted before it is quoted."""
    return shlex.join(map(redact, argv))


def register_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Add the values of environment variables that are named as keys, tokens, secrets and passwords are."""
    register_secrets(*(value for name, value in environment.items() if VARIABLE.search(name)))


def register_command_line(argv: Sequence[str]) -> None:
    """Add the secrets in a command line: values of options, assignments, headers, URLs, JSON, and command lines inside."""
    register_secrets(*_scan_words(argv, MAX_NESTING))


def register_url(url: str) -> None:
    """Add the secrets in an address: its user and password, and the values of its query."""
    register_secrets(*_scan_url(url))


def _scan_words(argv: Sequence[str], nesting: int) -> Iterator[str]:
    option = ""
    for word in argv:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            option = name.lstrip("-").replace("-", "_")
            option = option if OPTION.search(option) else ""
            if option and value:
                yield value
        elif option:  # vLLM's --api-key takes several
            yield word
        yield from _scan_word(word)
        if nesting and any(c.isspace() for c in word):
            with contextlib.suppress(ValueError):
                yield from _scan_words(shlex.split(word), nesting - 1)


def _scan_word(word: str) -> Iterator[str]:
    value = word.partition("=")[2] if word.startswith("-") else word
    if (assigned := ASSIGNMENT.fullmatch(word)) and VARIABLE.search(assigned[1].upper()):
        yield assigned[2]
    if (header := HEADER.fullmatch(value)) and SECRET_HEADER.search(header[1]):
        yield from _scan_header(header[2].strip())
    if "://" in value:
        yield from _scan_url(value)
    if value.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            yield from _scan_json(json.loads(value))


def _scan_header(value: str) -> Iterator[str]:
    """Yield the secrets in the value of a header: `Bearer KEY`, and of `Basic` the password that it encodes."""
    scheme, _, rest = value.partition(" ")
    yield rest.strip() or value
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            yield base64.b64decode(rest.strip()).decode().partition(":")[2]


def _scan_url(url: str) -> Iterator[str]:
    address = re.search(r"[A-Za-z][A-Za-z0-9+.-]*://\S+", url)
    try:
        parts = urllib.parse.urlsplit(address[0] if address else url)
    except ValueError:
        return
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    if user:
        secret = urllib.parse.unquote(password or user)
        yield from (secret, password or user)
        yield base64.b64encode(f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}".encode()).decode()
    for text in (parts.query, parts.fragment):
        for name, value in urllib.parse.parse_qsl(text, keep_blank_values=True):
            yield value or name


def _scan_json(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _scan_json(item, str(key).replace("-", "_"))
    elif isinstance(value, list):
        for item in value:
            yield from _scan_json(item, name)
    elif isinstance(value, str) and (OPTION.search(name) or name.lower() == "authorization"):
        yield from _scan_header(value)


def _is_secret(value: str) -> bool:
    plain = value.isdigit() and len(value) < 2 * MIN_LENGTH
    return len(value) >= MIN_LENGTH and len(set(value)) >= MIN_DISTINCT and not plain


def _iter_forms(secret: str) -> Iterator[str]:
    in_json = json.dumps(secret)[1:-1]
    yield secret
    yield in_json
    yield in_json.replace("/", "\\/")
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield urllib.parse.quote(secret, safe="")
    yield urllib.parse.quote(secret)
    yield urllib.parse.quote_plus(secret)
    yield html.escape(secret)
    yield repr(secret)[1:-1]


def _remove_cut_secrets(text: str) -> str:
    for form in _forms:
        for length in range(min(len(form) - 1, len(text)), MIN_LENGTH - 1, -1):
            if text.endswith(form[:length]):
                text = text[:-length] + PLACEHOLDER
                break
        for length in range(min(len(form) - 1, len(text)), MIN_LENGTH - 1, -1):
            if text.startswith(form[-length:]):
                text = PLACEHOLDER + text[length:]
                break
    return text
