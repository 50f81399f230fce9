"""Any single bit of a trace flipped, the trace cut, events of it written twice, two traces in one file: never `clean`.

Each trace here waits once, so that exit 0 would be a lie. Exhaustive over what makes up the wait; the rest is sampled.

Where times decide whether a copy was held up, some flips are not noticed: see the second test.
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
from tests.unit.trace_builder import PAGEABLE, TO_GPU, Trace, exit_code, scan_data

if TYPE_CHECKING:
    from pathlib import Path


def text(trace: Trace) -> bytes:
    """As Kineto packs it, without a blank."""
    return json.dumps({**trace.top, "traceEvents": trace.events}, separators=(",", ":")).encode()


def trace_with(kind: str) -> Trace:
    """Two kernels, and between them one wait, seen by another trait in each kind."""
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


def answer(folder: Path, data: bytes) -> int:
    """Exit code; 2 where the file is refused."""
    path = folder / "trace.json"
    with path.open("r+b" if path.exists() else "wb") as file:  # a file that is made anew each time takes much longer
        file.write(data)
        file.truncate()
    try:
        return exit_code(scan_traces([path], root=folder), folder)
    except TraceError:
        return 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for property tests, whose examples share it."""
    return tmp_path_factory.mktemp("traces")


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def wait_in(data: bytes) -> range:
    """Bytes of the events between those of the two kernels."""
    begin = data.index(b"},{", data.index(b"gemm")) + 2
    return range(begin, data.index(b',{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel"', begin))


@pytest.mark.parametrize("kind", [*KINDS[:3], "step"])
@pytest.mark.long
def test_no_single_bit_of_a_wait_makes_a_trace_clean(kind: str, folder: Path) -> None:
    """Every bit of every byte of its events: keys, names, categories, numbers, brackets and quotes."""
    data = text(trace_with(kind))
    assert answer(folder, data) == 1
    clean = [(at, bit) for at in wait_in(data) for bit in range(8) if answer(folder, flipped(data, at, bit)) == 0]
    assert clean == [], [(data[at - 30 : at + 9], bit) for at, bit in clean]


TIMES = re.compile(rb'"(?:pid|tid|ts|dur)":[0-9]+')
"""Keys of a time or a stream, with their digits: another digit is valid, too. A damaged key leaves none, which stands for 0,
or for a stream of its own."""


@pytest.mark.long
def test_where_times_decide_only_times_and_streams_can_change_unnoticed(folder: Path) -> None:
    """A copy from pageable memory is held up if it began after the work before it."""
    data = text(trace_with("copy that is held up"))
    assert answer(folder, data) == 1
    clean = {at for at in wait_in(data) if any(answer(folder, flipped(data, at, bit)) == 0 for bit in range(8))}
    known = {at for found in TIMES.finditer(data) for at in range(*found.span())}
    assert clean, "none is left: say so above, and in docs/syncs.md"
    assert clean <= known, [data[at - 30 : at + 9] for at in sorted(clean - known)]


@settings(max_examples=200)
@given(kind=st.sampled_from(KINDS), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_single_bit_anywhere_does(kind: str, place: float, bit: int, folder: Path) -> None:
    data = text(trace_with(kind))
    assert answer(folder, flipped(data, int(place * len(data)), bit)) != 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_no_cut_does(kind: str, folder: Path) -> None:
    """What ends anywhere before its last bracket is cut; nothing is lost behind it."""
    data = text(trace_with(kind))
    assert [cut for cut in range(len(data)) if answer(folder, data[:cut]) == 0] == []


@settings(max_examples=100)
@given(kind=st.sampled_from(KINDS), which=st.lists(st.integers(0, 5), min_size=1, max_size=6), at=st.integers(0, 5))
def test_events_that_are_written_twice_are_counted_once(kind: str, which: list[int], at: int, folder: Path) -> None:
    trace = trace_with(kind)
    once = scan_data(folder, text(trace), "once.json")
    again = [trace.events[n % len(trace.events)] for n in which]
    trace.events[at:at] = again
    twice = scan_data(folder, text(trace), "once.json")
    assert (twice.totals, twice.sites) == (once.totals, once.sites)
    assert exit_code(twice, folder) == 1


CLEAN = text(Trace().work())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", [b"", b"\n", b",", b"\0"])
def test_a_trace_behind_a_clean_one_does_not_pass_unread(kind: str, between: bytes, folder: Path) -> None:
    assert answer(folder, CLEAN) == 0
    waits = text(trace_with(kind))
    assert answer(folder, CLEAN + between + waits) == 3
    assert answer(folder, gzip.compress(CLEAN) + gzip.compress(waits)) == 3
    bare = json.dumps(Trace().work().events).encode()
    assert answer(folder, bare + between + waits) == 3


@settings(max_examples=200)
@given(kind=st.sampled_from(KINDS), cut=st.floats(0, 1), skip=st.floats(0, 1), packed=st.booleans())
def test_no_beginning_of_one_before_the_end_of_another_is_clean(
    kind: str, cut: float, skip: float, packed: bool, folder: Path
) -> None:
    """A beginning of the trace without the wait, and all of the other from anywhere before its wait."""
    waits = text(trace_with(kind))
    first, second = CLEAN[: int(cut * len(CLEAN))], waits[int(skip * wait_in(waits).start) :]
    data = gzip.compress(first) + gzip.compress(second) if packed else first + second
    assert answer(folder, data) != 0
