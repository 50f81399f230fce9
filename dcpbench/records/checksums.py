"""Seal lines of JSON with their CRC-32, and check whether a line is still as written. No torch.

    {"checked":"crc32",…,"crc32":"1c291ca3"}

The checksum covers all bytes before `,"crc32"`. Both ends of a line state that it has a checksum, so that damage to
either end does not make it look like a line without one: such lines were written by hand or before checksums were
added, and are read unchecked. CRC-32 detects every single flipped bit, and every burst of up to 32 damaged bits.
"""

from __future__ import annotations

import itertools
import re
import zlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = b'{"checked":"crc32",'
TAIL = b',"crc32":"%08x"}'
_TAIL_BYTES = len(TAIL % 0)
_TAIL = re.compile(rb',"crc32":"[0-9a-f]{8}"\}')
_NAME = b'"crc32"'
_KEY = re.compile(_NAME + rb"\s*:")
_BLANKS = b" \t\r\n"


class DamageError(msgspec.ValidationError):
    """Report a line that does not match its checksum."""


class RewrittenError(DamageError):
    """Report a line with a checksum and bytes that this package did not write."""


class UnfinishedError(msgspec.DecodeError):
    """Report a line that announces a checksum and does not have it: its end is missing or damaged."""


def add_checksum(text: bytes) -> bytes:
    """Return a JSON object with at least one field as a line with its checksum, without a newline."""
    body = HEAD + text[1:-1]
    return body + TAIL % zlib.crc32(body)


def find_sealed_parts(line: bytes) -> Iterator[bytes]:
    """Yield the parts of a damaged line that match a checksum, as where two lines became one; no part is decoded."""
    begins = [found.start() for found in re.finditer(re.escape(HEAD), line)]
    for begin, end in itertools.pairwise([*begins, len(line)]):  # a string inside a record escapes its quotes
        for tail in _TAIL.finditer(line, begin, end):
            if tail.group() == TAIL % zlib.crc32(line[begin : tail.start()]):
                yield line[begin : tail.end()]


def check(line: bytes) -> bool:
    """Return True if a line has a valid checksum, without decoding the line.

    Raise one of the errors above for a line that was sealed and has changed since.
    """
    if line.startswith(HEAD) and _has_valid_checksum(line):
        return True
    text = line.strip(_BLANKS)
    begun, ended = text.startswith(HEAD), _TAIL.fullmatch(text[-_TAIL_BYTES:])
    if begun and _has_valid_checksum(text):
        return True
    if ended or (begun and _TAIL.search(text)):
        raise DamageError("its checksum (crc32) does not match: the line was damaged after it was written")
    if begun:
        raise UnfinishedError("its checksum (crc32) is missing or damaged, and so what else is may be")
    if _NAME in text and _KEY.search(text):
        raise RewrittenError("another program rewrote it, and its checksum (crc32) is that of the bytes before")
    return False


def _has_valid_checksum(line: bytes) -> bool:
    """Return True if a line, with or without its newline, ends with the checksum of the bytes before it."""
    end = len(line) - line.endswith(b"\n")
    body = memoryview(line)[: max(end - _TAIL_BYTES, 0)]  # a copy would take longer than the sum
    return line[len(body) : end] == TAIL % zlib.crc32(body)
