"""Headers and body fields that the user adds to every request: --header and --extra-body. No torch.

Values of headers are sent, and neither recorded nor shown; records keep the names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.plan.command_line import HEADER
from dcpbench.show.text import fit_name, format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110
_HEADERS = """
    host accept-encoding connection content-length content-type transfer-encoding te trailer upgrade expect
"""
OWN_HEADERS = frozenset(_HEADERS.split())  # dcpbench writes these, or its reader depends on them
_FIELDS = """
    model prompt messages stream stream_options max_tokens max_completion_tokens n best_of echo suffix ignore_eos min_tokens stop
    stop_token_ids return_token_ids
"""
OWN_FIELDS = frozenset(_FIELDS.split())  # dcpbench writes these, or measures something else with them
GREEDY_FIELDS = frozenset(
    ["temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs"]
)  # for comparing answers
SECRET_NAME = re.compile(r"auth|key|token|secret|password|cookie|session|credential|signature", re.IGNORECASE)
EXAMPLE_HEADER = "write for example --header 'X-Route: a'"
EXAMPLE_BODY = """write for example --extra-body '{"top_k": 20}'"""


def parse_headers(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse the values of --header. Raises UsageError, which repeats no value, for one that cannot be sent."""
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or not HEADER_NAME.fullmatch(name):
            raise UsageError(f"{HEADER} takes a name and a value with a colon between them; {EXAMPLE_HEADER}.")
        if name.lower() in OWN_HEADERS:
            raise UsageError(f"{HEADER} {name}: dcpbench sets this header itself; leave it out.")
        if name.lower() in found:
            raise UsageError(f"{HEADER} {name} is given twice; give it once.")
        if not value or any(not " " <= c <= "~" for c in value):
            raise UsageError(
                f"{HEADER} {name}: its value is empty, or has a character that no header can have; {EXAMPLE_HEADER}."
            )
        found[name.lower()] = name, value
    return tuple(found.values())


def parse_extra_body(text: str | None, *, greedy: bool = False) -> dict[str, object]:
    """Parse the value of --extra-body, a JSON object. Raises UsageError for fields that dcpbench sets itself.

    `greedy`: also for those that make answers differ from time to time.
    """
    if text is None:
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as e:
        raise UsageError(f"--extra-body {fit_name(text)} is no JSON ({fit_name(str(e))}); {EXAMPLE_BODY}.") from e
    if not isinstance(found, dict):
        raise UsageError(f"--extra-body {fit_name(text)} is no JSON object; {EXAMPLE_BODY}.")
    reserved = OWN_FIELDS | GREEDY_FIELDS if greedy else OWN_FIELDS
    if own := sorted(set(found) & reserved):
        raise UsageError(
            f"--extra-body: dcpbench sets {format_list(own)} itself; leave {'it' if len(own) == 1 else 'them'} out."
        )
    return found


def find_secrets(headers: Sequence[tuple[str, str]]) -> list[str]:
    """Return the values of headers with names that mark them as secret, and each word of them.

    A server may repeat a token without the scheme before it. Other values, such as a model's name, may appear in a
    record.
    """
    secret = [value for name, value in headers if SECRET_NAME.search(name)]
    return [part for value in secret for part in dict.fromkeys([value, *value.split()])]
