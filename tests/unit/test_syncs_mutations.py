"""Test that a trace with one flipped bit, a cut, duplicated events or a second trace in its file is never `clean`.

Each trace waits once, so that exit 0 would be wrong. All bits of the wait are tested, and a sample of the others.

If times determine if a copy was held up, some flips have no effect: see the second test.
"""

from __future__ import annotations

import gzip
import json
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.errors import TraceError
from dcpbench.syncs.scan import scan_traces
from tests.unit.trace_builder import PAGEABLE, TO_GPU, Trace, compute_exit_code, scan_data

if TYPE_CHECKING:
    from pathlib import Path


def encode(trace: Trace) -> bytes:
    """Return the trace as compact JSON, as Kineto writes it."""
    return json.dumps({**trace.top, "traceEvents": trace.events}, separators=(",", ":")).encode()


def make_trace(kind: str) -> Trace:
    """Return a trace of two kernels with one wait in between, detected by another property in each kind."""
    trace = Trace()
    if kind == "step":
        for n in range(3):
            trace.range(f"ProfilerStep#{n}", 1000 * n - 3000, 1000 * n - 2100)
    trace.kernel(0, 10, 90)
    if kind == "call":
        trace.call("cudaStreamSynchronize", 100, 150)
    elif kind == "hip copy":
        trace.call("hipMemcpyWithStream", 100, 150)
    elif kind == "free":
        trace.call("cuMemFree_v2", 100, 150, cat="cuda_driver")
    elif kind == "copy to pageable memory":
        trace.copy(PAGEABLE, (100, 150), (120, 121))
    elif kind == "copy that is held up":
        trace.copy(TO_GPU, (50, 150), (95, 140), size=4 << 20)
    elif kind == "step":
        trace.range("ProfilerStep#3", 95, 180)
        trace.call("cudaStreamSynchronize", 100, 150)
    elif kind == "cuda_sync event":
        trace.add("cuda_sync", "Stream Sync", 100, 190, pid=0, tid=7, correlation=99)
    trace.kernel(200, 210, 220)
    return trace


KINDS = ("call", "copy to pageable memory", "cuda_sync event", "hip copy", "free")


def scan(folder: Path, data: bytes) -> int:
    """Return the exit code, which is 2 if the file is refused."""
    path = folder / "trace.json"
    with path.open("r+b" if path.exists() else "wb") as file:  # creating the file each time takes much longer
        file.write(data)
        file.truncate()
    try:
        return compute_exit_code(scan_traces([path], root=folder), folder)
    except TraceError:
        return 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that the examples of property tests share."""
    return tmp_path_factory.mktemp("traces")


def flip_bit(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def find_wait_bytes(data: bytes) -> range:
    """Return the range of bytes of the events between those of the two kernels."""
    begin = data.index(b"},{", data.index(b"gemm")) + 2
    return range(begin, data.index(b',{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel"', begin))


@pytest.mark.parametrize("kind", [*KINDS[:3], "step"])
@pytest.mark.long
def test_flipped_bit_of_a_wait_never_makes_a_trace_clean(kind: str, folder: Path) -> None:
    """The bits are those of keys, names, categories, numbers, brackets and quotes of all its events."""
    data = encode(make_trace(kind))
    assert scan(folder, data) == 1
    clean = [
        (at, bit) for at in find_wait_bytes(data) for bit in range(8) if scan(folder, flip_bit(data, at, bit)) == 0
    ]
    assert clean == [], [(data[at - 30 : at + 9], bit) for at, bit in clean]


TIMES = re.compile(rb'"(?:pid|tid|ts|dur)":[0-9]+')
"""Keys of a time or a stream, with their digits: another digit is valid, too. A damaged key counts as a missing one,
which means 0 or a separate stream."""


@pytest.mark.long
def test_flipped_bits_without_effect_are_those_of_times_and_streams(folder: Path) -> None:
    """A copy from pageable memory is held up if it began after the previous work."""
    data = encode(make_trace("copy that is held up"))
    assert scan(folder, data) == 1
    clean = {at for at in find_wait_bytes(data) if any(scan(folder, flip_bit(data, at, bit)) == 0 for bit in range(8))}
    known = {at for found in TIMES.finditer(data) for at in range(*found.span())}
    assert clean, "no such bit is left: change the docstrings and docs/syncs.md"
    assert clean <= known, [data[at - 30 : at + 9] for at in sorted(clean - known)]


@settings(max_examples=200)
@given(kind=st.sampled_from(KINDS), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_anywhere_never_makes_a_trace_clean(kind: str, place: float, bit: int, folder: Path) -> None:
    data = encode(make_trace(kind))
    assert scan(folder, flip_bit(data, int(place * len(data)), bit)) != 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_cut_never_makes_a_trace_clean(kind: str, folder: Path) -> None:
    """A trace that ends before its last bracket is incomplete."""
    data = encode(make_trace(kind))
    assert [cut for cut in range(len(data)) if scan(folder, data[:cut]) == 0] == []


@settings(max_examples=100)
@given(kind=st.sampled_from(KINDS), which=st.lists(st.integers(0, 5), min_size=1, max_size=6), at=st.integers(0, 5))
def test_events_that_are_written_twice_are_counted_once(kind: str, which: list[int], at: int, folder: Path) -> None:
    trace = make_trace(kind)
    once = scan_data(folder, encode(trace), "once.json")
    again = [trace.events[n % len(trace.events)] for n in which]
    trace.events[at:at] = again
    twice = scan_data(folder, encode(trace), "once.json")
    assert (twice.totals, twice.sites) == (once.totals, once.sites)
    assert compute_exit_code(twice, folder) == 1


CLEAN = encode(Trace().work())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", [b"", b"\n", b",", b"\0"])
def test_second_trace_after_a_clean_one_is_not_clean(kind: str, between: bytes, folder: Path) -> None:
    assert scan(folder, CLEAN) == 0
    waits = encode(make_trace(kind))
    assert scan(folder, CLEAN + between + waits) == 3
    assert scan(folder, gzip.compress(CLEAN) + gzip.compress(waits)) == 3
    bare = json.dumps(Trace().work().events).encode()
    assert scan(folder, bare + between + waits) == 3


@settings(max_examples=200)
@given(kind=st.sampled_from(KINDS), cut=st.floats(0, 1), skip=st.floats(0, 1), compressed=st.booleans())
def test_beginning_of_a_clean_trace_before_the_end_of_another_is_not_clean(
    kind: str, cut: float, skip: float, compressed: bool, folder: Path
) -> None:
    """The data are a beginning of the trace without the wait, and the rest of the other trace from before its wait."""
    waits = encode(make_trace(kind))
    first, second = CLEAN[: int(cut * len(CLEAN))], waits[int(skip * find_wait_bytes(waits).start) :]
    data = gzip.compress(first) + gzip.compress(second) if compressed else first + second
    assert scan(folder, data) != 0
