"""What is read of damaged traces, in blocks of several sizes, as tests/data/said/damaged-traces.txt has it.

`SAID=write` writes it anew, as for test_whole_outputs.py.
"""

from __future__ import annotations

import gzip
import hashlib
import random
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import TraceError
from dcpbench.syncs.traces import reading
from dcpbench.syncs.traces.reading import TraceReader
from tests.unit.hostile_files import spoiled
from tests.unit.test_whole_outputs import hold
from tests.unit.test_whole_traces import made

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

VALUES = (
    b"nan",
    b"-Infinity",
    b"1e400",
    b'"\\ud800"',
    b'"a\\qb"',
    b'"tab\there"',
    b'"\x01"',
    b"[]",
    b"{}",
    b"}",
    b"null,",
)
ENDS = (
    *(
        b"",
        b"]",
        b"]}",
        b",",
        b", ",
        b"}",
        b"]}]",
        b', "traceEvents": []}',
        b'], "x": {"y": [1]}}',
        b'], "traceEvents": [{}]}',
    ),
    *(b']}\n{"traceEvents": []}', b"]}\0\0", b"]} more", b",]}", b'], "a": "\xff"}', b'], "a": \x01}'),
)


def wrong(text: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """The text with one thing wrong, and what that is."""
    events = text[: text.rindex(b"]")]
    for end in ENDS:
        yield f"ends with {end!r}", events + end
    for value in VALUES:
        at = rng.randrange(len(text) // 3, len(text))
        yield f"{value!r} for a value", spoiled(text, at, value)
    for _ in range(8):
        cut = rng.randrange(len(text))
        yield "cut off", text[:cut]
        size = rng.choice((1, 7, 90))
        yield f"{size} bytes out", text[:cut] + text[cut + size :]
        yield "a bit flipped", text[:cut] + bytes([text[cut] ^ 1 << rng.randrange(8)]) + text[cut + 1 :]
        yield "a comma too many", text.replace(b"}, {", b"},, {" if rng.random() < 0.5 else b"}, , {", 1)
    for begin in (
        b"\xef\xbb\xbf",
        b"  \n",
        b"x",
        b"[",
        b"\x1f\x8b",
        b"PK\x03\x04",
        b"\xff\xfe",
        b"<html>",
        b"version https://git-lfs",
    ):
        yield f"begins with {begin!r}", begin + text
    for name, packed in (
        ("packed", gzip.compress(text)),
        ("two members", gzip.compress(events) + gzip.compress(b"]}")),
    ):
        yield name, packed
        yield f"{name}, cut off", packed[: len(packed) // 2]
        yield f"{name}, with more behind", packed + b"more"
        yield f"{name}, with zeros behind", packed + bytes(9)


def test_what_is_read_of_damaged_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and troubles, or why it is none; in blocks of 300 bytes mostly the same."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for seed in (3, 12):
        trace = made(seed)
        trace.top["distributedInfo"] = {"backend": "nccl", "rank": 5 + seed}
        path = tmp_path / "rank2_x.json"
        for what, text in wrong(trace.text().encode(), random.Random(seed)):
            path.write_bytes(text)
            told = []
            for block in (1 << 22, 300):
                monkeypatch.setattr(reading, "BLOCK_BYTES", block)
                reader = TraceReader(path)
                try:
                    events = [event for some in reader.read_blocks() for event in some]
                    digest = hashlib.sha256(msgspec.json.encode(events)).hexdigest()[:6]
                    trouble = {k: v for k, v in msgspec.structs.asdict(reader.trouble).items() if v}
                    told.append(f"rank {reader.rank}, {len(events)} events {digest} {trouble or ''}")
                except TraceError as e:
                    told.append(str(e).replace(f"{tmp_path}/", ""))
            told.append(f"something else: {reading.is_other_json(path)}")
            lines.append(f"{what}: {' | '.join(dict.fromkeys(told))}")
    hold("damaged-traces.txt", "\n".join(lines), tmp_path)
