"""Find the Python frames of calls in an nsys export: in call chains of calls, and in samples taken while a call waited.

A call chain holds native frames as well; those of Python have a Python file as their module. A sample is an NVTX mark of nsys
with a binary payload: 8 bytes of a version, the state of the thread, the number of frames, and for each frame, innermost first,
the ids of its function and file, and its line.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.syncs.nsys import schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dcpbench.syncs.nsys.schema import Export, Ints

_FILE = re.compile(r"^(?P<file>.+\.py)(?::(?P<line>\d+))?$")
_TEXT = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
_HEAD = struct.Struct("<QII")
_FRAME = struct.Struct("<QQQ")


def read_chains(export: Export, wanted: Ints) -> dict[int, str]:
    """Return the Python frames of call chains, innermost first, as a trace's `Call stack` has them; none without frames."""
    frames: dict[int, list[tuple[int, int, int]]] = {}
    for block in export.read_blocks(schema.CHAINS):
        rows = np.flatnonzero(np.isin(block["id"], wanted))
        columns = (block[name][rows].tolist() for name in schema.COLUMNS[schema.CHAINS])
        for chain, symbol, module, depth in zip(*columns, strict=True):
            frames.setdefault(chain, []).append((depth, symbol, module))
    ids = {number for chain in frames.values() for _, *pair in chain for number in pair}
    strings = export.read_strings(np.array(sorted(ids), np.int64))
    return _join({chain: [pair for _, *pair in sorted(found)] for chain, found in frames.items()}, strings)


def _join(chains: Mapping[int, Iterable[Iterable[int]]], strings: Mapping[int, str]) -> dict[int, str]:
    texts = {
        chain: ";".join(filter(None, (_format_frame(*(strings.get(i, "") for i in pair)) for pair in pairs)))
        for chain, pairs in chains.items()
    }
    return {chain: text for chain, text in texts.items() if text}


def _format_frame(symbol: str, module: str) -> str:
    """Return `file.py(line): function`; empty for a native frame."""
    if _TEXT.match(symbol):
        return symbol
    found = _FILE.match(module)
    return f"{found['file']}({found['line'] or 0}): {symbol}" if found and symbol else ""


def read_sample(payload: object) -> list[tuple[int, int, int]]:
    """Return (id of the function, id of the file, line) of the frames of a sample; empty for another payload."""
    data = payload.encode() if isinstance(payload, str) else payload
    if not isinstance(data, bytes):
        return []
    for blob in (data, _decode_text(data)):
        if len(blob) >= _HEAD.size and len(blob) == _HEAD.size + _HEAD.unpack_from(blob)[2] * _FRAME.size:
            return [(int(f), int(m), int(n)) for f, m, n in _FRAME.iter_unpack(blob[_HEAD.size :])]
    return []


def _decode_text(data: bytes) -> bytes:
    """Return the payload of a text in base64, the form in which exports without blobs have it; empty for another one."""
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return b""


def format_samples(export: Export, samples: Mapping[int, list[tuple[int, int, int]]]) -> dict[int, str]:
    """Return the frames of samples as `Call stack` has them, by the same keys; none without frames."""
    ids = {number for frames in samples.values() for frame in frames for number in frame[:2]}
    small = [i for i in sorted(ids) if i < 1 << 62]
    strings = export.read_strings(np.array(small, np.int64))
    found = {}
    for key, frames in samples.items():
        named = ((strings.get(function, ""), strings.get(file, ""), line) for function, file, line in frames)
        found[key] = ";".join(f"{file}({line}): {function}" for function, file, line in named if function and file)
    return {key: text for key, text in found.items() if text}
