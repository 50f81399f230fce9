"""Events that are not as they should be, text that is not JSON, and files that are large: what can be read is."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.errors import TraceError
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.traces import reading
from tests.unit.trace_builder import PAGEABLE, Trace, exit_code, get_only_site, make_sync, scan_data, select_counted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for property tests, whose examples share it."""
    return tmp_path_factory.mktemp("traces")


class TestOddEvents:
    @pytest.mark.parametrize(
        ("changes", "wait"),
        [
            ({"args": None}, 50),
            ({"args": "missing"}, 50),
            ({"args": {}}, 50),
            ({"dur": "missing"}, None),
            ({"dur": None}, None),
            ({"dur": -5}, None),
            ({"dur": "50"}, 50),
            ({"dur": "long"}, None),
            ({"tid": "missing"}, 50),
            ({"tid": None}, 50),
            ({"pid": "p", "tid": 1.5}, 50),
            ({"tid": 1 << 70}, 50),
            ({"ts": -1e15}, 50),
            ({"args": {"correlation": None}}, 50),
            ({"args": {"correlation": "x"}}, 50),
            ({"args": {"correlation": 1 << 200}}, 50),
            ({"args": {"correlation": -(1 << 70)}}, 50),
            ({"args": {"correlation": 1.5e300}}, 50),
            ({"args": {"External id": ""}}, 50),
            ({"args": {"unknown": {"deep": [{"a": [{}]}]}}}, 50),
        ],
        ids=lambda v: repr(v)[:60],
    )
    def test_what_can_be_read_is_kept(self, changes: dict[str, Any], wait: float | None, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(**changes))
        report = trace.scan(tmp_path)
        assert get_only_site(report).wait_us == pytest.approx(wait)
        assert exit_code(report, tmp_path) == 1

    @pytest.mark.parametrize(
        "changes",
        [
            {"args": []},
            {"args": [1]},
            {"args": "text"},
            {"args": 3},
            {"name": None},
            {"name": 7},
            {"ts": "missing"},
            {"ts": None},
            {"ts": "soon"},
            {"ts": "nan"},
            {"ts": "inf"},
            {"ts": []},
            {"ph": None},
            {"cat": ["a"]},
            {"args": {"correlation": []}},
            {"args": {"correlation": True}},
        ],
        ids=lambda v: repr(v)[:60],
    )
    def test_what_cannot_is_counted_and_makes_no_clean(self, changes: dict[str, Any], tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(**changes))
        report = trace.scan(tmp_path)
        assert report.sites == []
        assert report.traces[0].coverage.unreadable_events == 1
        assert exit_code(report, tmp_path) == 3

    @pytest.mark.parametrize("event", ["null", "3", '"x"', "[]", '[{"ph": "X"}]', "{}"])
    def test_an_element_that_is_no_event_takes_no_event_along(self, event: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events += [make_sync(), {"HERE": 1}, make_sync(ts=300)]
        report = scan_data(tmp_path, trace.text().replace('{"HERE": 1}', event))
        assert get_only_site(report).count == 2

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "nan", "-inf"])
    @pytest.mark.parametrize("field", ['"dur": 50', '"External id": 77'])
    def test_numbers_that_json_does_not_have_are_none(self, number: str, field: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(args={"correlation": 9, "External id": 77}))
        text = trace.text().replace(field, f"{field.partition(':')[0]}: {number}", 2)
        report = scan_data(tmp_path, text)
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete is ("dur" not in field)

    @pytest.mark.parametrize("dur", [None, "missing", -5, "nan", 1e308])
    def test_a_call_without_a_duration_that_can_be_passes_no_limit_on_bubbles(self, dur: Any, tmp_path: Path) -> None:
        """Its price would be 0, which no limit minds: neither it nor the wait is known, nor whether it waited."""
        trace = Trace().work()
        trace.events.append(make_sync(dur=dur))
        report = trace.scan(tmp_path)
        site = get_only_site(report)
        assert (site.wait_us, site.bubble_us, site.waited) == (None, None, None)
        assert not report.traces[0].coverage.complete
        assert any(
            "1 event of calls or GPU work without a duration" in told for told in report.traces[0].coverage.damage
        )

    def test_infinite_times_end_in_no_infinite_wait(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(dur="inf"))
        trace.events.append(make_sync(dur=1e308, ts=1e308))
        report = trace.scan(tmp_path)
        assert exit_code(report, tmp_path) in {1, 3}
        assert all(s.wait_us is None or s.wait_us < 1e300 for s in report.sites)

    @settings(max_examples=40)
    @given(
        times=st.lists(st.tuples(st.integers(-50, 300), st.integers(-20, 200)), min_size=1, max_size=12),
        order=st.randoms(use_true_random=False),
    )
    def test_overlapping_events_in_any_order_are_all_counted(
        self, times: list[tuple[int, int]], order: Any, folder: Path
    ) -> None:
        trace = Trace().work()
        for start, length in times:
            trace.op("aten::x", start - 5, start + length - 3)
            trace.frame("a.py(1): f", start - 9, start + length - 7)
            trace.call("cudaStreamSynchronize", start, start + length)
        order.shuffle(trace.events)
        assert trace.scan(folder).totals.syncs == len(times)


class TestBrokenText:
    """Names that a profiler did not escape."""

    @pytest.mark.parametrize(
        "name",
        [b"\xff\xfe", b"caf\xe9", b"C:\\dir", b"a\\", b"\\x41", b"\x01\x02", b"\\ud800", b"\\u12", b"\xc3", b"\x00"],
    )
    def test_what_can_be_repaired_is_and_the_trace_is_not_complete(self, name: bytes, tmp_path: Path) -> None:
        """The events around it are read; what the name was nobody knows."""
        trace = Trace().work()
        trace.frame("NAME", 90, 200)
        trace.events.append(make_sync())
        report = scan_data(tmp_path, trace.text().encode().replace(b"NAME", name + b"(1): f"))
        assert get_only_site(report).count == 1
        coverage = report.traces[0].coverage
        assert not coverage.complete
        assert any("repaired" in note for note in coverage.notes)
        assert coverage.unreadable_events == 0

    def test_a_name_that_was_repaired_is_shown(self, tmp_path: Path) -> None:
        """Bit 7 of the S of cudaStreamSynchronize."""
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        report = scan_data(tmp_path, trace.text().encode().replace(b"aStream", b"a\xd3tream"))
        (reason,) = compute_verdict(report, Gate(root=tmp_path)).reasons
        assert r"repaired ('cuda\xd3treamSynchronize')" in reason

    @pytest.mark.parametrize("at", range(len("cudaStreamSynchronize")))
    @pytest.mark.parametrize("all_of_them", [True, False])
    def test_bit_7_in_the_name_of_the_calls_that_wait_is_not_clean(
        self, at: int, all_of_them: bool, tmp_path: Path
    ) -> None:
        trace = Trace().work()
        for n in range(3):
            trace.item(100 * n, 100 * n + 50)
        good = b"cudaStreamSynchronize"
        bad = good[:at] + bytes([good[at] | 0x80]) + good[at + 1 :]
        report = scan_data(tmp_path, trace.text().encode().replace(good, bad, -1 if all_of_them else 1))
        assert report.totals.syncs == (0 if all_of_them else 2)
        assert exit_code(report, tmp_path) == (3 if all_of_them else 1)

    @pytest.mark.parametrize("half", [r"\ud853", r"\udc53", r"\udc00\ud800", r"\ud800\u0041"])
    def test_half_a_character_in_the_name_of_a_call_is_not_clean(self, half: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        report = scan_data(tmp_path, trace.text().replace("aStream", f"a{half}tream"))
        assert exit_code(report, tmp_path) == 3

    def test_both_halves_of_a_character_are_one(self, tmp_path: Path) -> None:
        """As json.dumps writes them, beside a number that makes the text be repaired."""
        trace = Trace().work()
        trace.frame("a.py(1): \U0001f600", 90, 200)
        trace.events.append(make_sync(args={"correlation": 9, "x": float("nan")}))
        report = trace.scan(tmp_path)
        assert get_only_site(report).function == "\U0001f600"
        assert report.traces[0].coverage.complete

    @pytest.mark.parametrize("key", [b"n\xe1me", b"c\xe1t", b"p\xe8", b"\xe1rgs"])
    def test_a_key_that_is_not_utf_8_is_not_clean(self, key: bytes, tmp_path: Path) -> None:
        """The decoder skips keys that it does not know without a look at them."""
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        good = bytes(c & 0x7F for c in key)
        head, _, tail = trace.text().encode().rpartition(b'"' + good + b'"')
        assert exit_code(scan_data(tmp_path, head + b'"' + key + b'"' + tail), tmp_path) in {1, 3}

    def test_escapes_that_are_right_survive_a_repair(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.frame('C:\\new\\"x".py(7): caf\u00e9', 90, 200)
        trace.frame("BAD", 95, 190)
        trace.events.append(make_sync())
        report = scan_data(tmp_path, trace.text().encode().replace(b"BAD", b"\\q\xff"))
        assert get_only_site(report).function == "caf\u00e9"

    def test_an_unescaped_quote_costs_one_event(self, tmp_path: Path) -> None:
        """The events around it are read; that one is missing is said, so that the trace is not clean."""
        trace = Trace().work()
        trace.events.append(make_sync())
        trace.frame("NAME", 200, 300)
        trace.events += [make_sync(ts=400 + n) for n in range(3)]
        report = scan_data(tmp_path, trace.text().replace("NAME", 'lib "quoted" name'))
        assert get_only_site(report).count == 4
        assert report.traces[0].coverage.unreadable_events == 1
        assert not report.traces[0].coverage.complete

    def test_names_that_look_like_the_end_of_an_event_are_names(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for n, name in enumerate(["},{", "}, {", "}]", '"},{"', "]}", "[]", "}\n,\n{"] * 3):
            trace.frame(name, 90 - n, 400 - n)
        trace.events.append(make_sync())
        report = trace.scan(tmp_path)
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete

    @pytest.mark.parametrize("filler", [1, 7, 11])
    def test_blocks_end_anywhere(self, filler: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With blocks of a few hundred bytes every event is cut at some place, nested ones and strings too."""
        monkeypatch.setattr(reading, "BLOCK_BYTES", 200 + filler)
        trace = Trace().work()
        for n in range(60):
            trace.add("cpu_op", "}, {" * (n % 3), 10 * n, 10 * n + 5, x=[{"a": [[], [{}]]}, {"b": "},{"}], y=[])
            trace.events.append(make_sync(ts=100 * n, dur=50))
        report = trace.scan(tmp_path)
        assert report.totals.syncs == 60
        assert report.traces[0].coverage.ops == 60
        assert report.traces[0].coverage.complete

    @pytest.mark.parametrize("block", [300, 700, 2000])
    def test_what_follows_a_repaired_block_is_read_whole(
        self, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However little of the text a block has; only the name is not known any more."""
        monkeypatch.setattr(reading, "BLOCK_BYTES", block)
        trace = Trace().work()
        trace.frame("NAME", 90, 100)
        for n in range(60):
            trace.call("cudaStreamSynchronize", 200 + 100 * n, 250 + 100 * n)
        report = scan_data(tmp_path, trace.text().encode().replace(b"NAME", b"C:\\dir(1): f"))
        coverage = report.traces[0].coverage
        assert (report.totals.syncs, coverage.unreadable_events, len(coverage.damage)) == (60, 0, 1)

    @settings(max_examples=40)
    @given(junk=st.binary(min_size=1, max_size=12), at=st.integers(0, 400))
    def test_junk_between_the_events_never_makes_them_clean(self, junk: bytes, at: int, folder: Path) -> None:
        trace = Trace().work()
        trace.events += [make_sync(ts=100 * n, dur=50) for n in range(6)]
        text = trace.text().encode()
        at += text.index(b"cudaStreamSynchronize")
        try:
            report = scan_data(folder, text[:at] + junk + text[at:])
        except TraceError:
            return
        assert exit_code(report, folder) in {1, 3}


class TestBehindTheEnd:
    """What stands behind the root, and how a trace may end."""

    @staticmethod
    def two() -> tuple[bytes, bytes]:
        """A clean trace, and one that waits."""
        other = Trace().work()
        other.call("cudaStreamSynchronize", 10, 90)
        return Trace().work().text().encode(), other.text().encode()

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("between", [b"", b"\n", b"\0\0"])
    def test_a_second_trace_is_told_of_and_what_to_do(self, packed: bool, between: bytes, tmp_path: Path) -> None:
        """`cat a.json b.json`, `cat a.json.gz b.json.gz`: the first alone is read, and is not clean."""
        first, second = self.two()
        data = gzip.compress(first) + gzip.compress(between + second) if packed else first + between + second
        report = scan_data(tmp_path, data)
        assert report.sites == []
        assert exit_code(report, tmp_path) == 3
        (reason,) = compute_verdict(report, Gate(root=tmp_path)).reasons
        assert 'more text behind its end, beginning \'{"schemaVersion"' in reason
        assert reason.endswith("scan each trace from a file of its own.")

    def test_a_second_trace_is_seen_behind_blocks_and_keys_of_the_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reading, "BLOCK_BYTES", 300)
        first, second = self.two()
        first = first[:-1] + b', "extra": [' + b'{"a": "}]}"}, ' * 500 + b'{}], "traceName": "a"}'
        assert scan_data(tmp_path, first).traces[0].coverage.complete
        assert exit_code(scan_data(tmp_path, first + second), tmp_path) == 3

    def test_a_second_list_of_events_is_told_of(self, tmp_path: Path) -> None:
        first, second = self.two()
        report = scan_data(tmp_path, first[:-1] + b", " + second.lstrip(b"{"))
        assert exit_code(report, tmp_path) == 3
        assert "a second list of events" in report.traces[0].coverage.damage[0]

    def test_more_behind_the_events_than_is_looked_at_is_told_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second trace may stand behind it. The limit is 1 MiB here, and so is the padding."""
        monkeypatch.setattr(reading, "MAX_EVENT_BYTES", 1 << 20)
        text = self.two()[0][:-1] + b', "extra": "' + b"x" * (2 << 20) + b'"}'
        assert exit_code(scan_data(tmp_path, text), tmp_path) == 3

    @pytest.mark.parametrize("end", [b"", b"\n", b"\0" * 600, b" \r\n\0"])
    def test_blanks_and_padding_are_nothing(self, end: bytes, tmp_path: Path) -> None:
        """A file of a fixed size is filled up with zeros."""
        assert scan_data(tmp_path, self.two()[1] + end).traces[0].coverage.complete

    def test_bytes_behind_gzip_data_are_counted_and_are_no_early_end(self, tmp_path: Path) -> None:
        """The member is whole, and its events are all there."""
        report = scan_data(tmp_path, gzip.compress(self.two()[1]) + b"more" * 5)
        assert get_only_site(report).count == 1
        (damage,) = report.traces[0].coverage.damage
        assert damage.startswith("goes on with 20 bytes that are no gzip, behind its gzip data, which was not read")

    @pytest.mark.parametrize("comma", [",", ", ", ",\n  "])
    @pytest.mark.parametrize("bare", [False, True])
    def test_a_comma_behind_the_last_event_drops_none(self, comma: str, bare: bool, tmp_path: Path) -> None:
        """As writers leave it that add one behind each event. Nothing is lost, so that nothing is said."""
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        text = json.dumps(trace.events) if bare else trace.text()
        report = scan_data(tmp_path, f"{comma}]".join(text.rsplit("]", 1)))
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete

    def test_such_a_comma_is_seen_before_other_keys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reading, "BLOCK_BYTES", 300)
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        text = trace.text().removesuffix("]}") + ',\n], "extra": [' + '{"a": 1}, ' * 500 + "{}]}"
        report = scan_data(tmp_path, text)
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete

    def test_msgspec_says_where_an_array_ends_in_the_words_that_are_looked_for(self) -> None:
        """Another wording would make good traces incomplete, never bad ones clean."""
        for array, rest in (
            (b'[{"a": 1}]', b'  , "b"'),
            (b'[{"a": 1}   ]', b" x"),
            (b"[[1], [2]]", b"]"),
            (b"[]", b""),
        ):
            assert reading._find_array_end(bytearray(array + rest)) == len(array)
        with_comma = bytearray(b'[{"a": [1]},\n] x')
        assert reading._find_array_end(with_comma) == len(b'[{"a": [1]},\n]')
        assert with_comma == b'[{"a": [1]} \n] x'


class TestEventsThatAreNone:
    """A part of an event is damaged so that it says nothing: it is counted, as it may have been a wait."""

    @pytest.mark.parametrize(
        ("key", "instead"),
        [
            ('"ph"', '"qh"'),
            ('"X"', '"Y"'),
            ('"cat"', '"cau"'),
            ('"cuda_runtime"', '"cuda_runtimd"'),
            ('"name"', '"naoe"'),
            ('"cudaStreamSynchronize"', '"cudaStreamSynchronizd"'),
        ],
    )
    def test_a_wait_that_is_one_bit_off_makes_no_clean(self, key: str, instead: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        head, _, tail = trace.text().rpartition(key)
        report = scan_data(tmp_path, head + instead + tail)
        assert report.sites == []
        assert exit_code(report, tmp_path) == 3

    def test_names_that_nobody_knows_are_no_damage(self, tmp_path: Path) -> None:
        """Newer calls, calls that the profiler has no name for, and other tools' categories."""
        trace = Trace().work()
        for name in ("cudaNewCall_v13000", "INVALID", "cudaMemcpyBatchAsync", "cuMemFreeAsync"):
            trace.call(name, 10, 20)
        trace.add("my_tool", "span", 0, 5)
        trace.events.append({"ph": "X", "name": "no category", "pid": 1, "tid": 1, "ts": 1, "dur": 1})
        report = trace.scan(tmp_path)
        assert report.traces[0].coverage.complete
        assert exit_code(report, tmp_path) == 0


class TestLinks:
    """GPU work says by an id which call caused it."""

    @pytest.mark.parametrize(("alone", "code"), [(0, 0), (2, 0), (3, 3), (8, 3)])
    def test_work_without_its_call_is_a_reason_where_it_is_more_than_a_quarter(
        self, alone: int, code: int, tmp_path: Path
    ) -> None:
        """Two of eight kernels are a quarter, three are more."""
        trace = Trace()
        for n in range(8):
            trace.kernel(100 * n, 100 * n + 10, 100 * n + 20)
        for event in [e for e in trace.events if e["cat"] == "kernel"][:alone]:
            event["args"]["correlation"] += 1000
        report = trace.scan(tmp_path)
        assert exit_code(report, tmp_path) == code
        if code:
            assert f"{alone} of its 8 GPU events" in compute_verdict(report, Gate(root=tmp_path)).reasons[0]

    def test_a_copy_to_pageable_memory_without_its_call_is_one_by_itself(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for n in range(20):
            trace.kernel(100 * n, 100 * n + 10, 100 * n + 20)
        trace.copy(PAGEABLE, (5000, 5090), (5080, 5085))
        trace.events[-1]["args"]["correlation"] = 999
        report = trace.scan(tmp_path)
        assert select_counted(report) == []
        assert exit_code(report, tmp_path) == 3

    def test_copies_whose_ids_are_also_those_of_kernels_are_found(self, tmp_path: Path) -> None:
        """Two processes in one trace, each of which counts from 1: eight copies wait, eight kernels come first."""
        trace = Trace()
        for n in range(8):
            launch = trace.call("cudaLaunchKernel", 100 * n, 100 * n + 1, tid=1, correlation=n + 1)
            trace.gpu("gemm", 100 * n + 10, 100 * n + 20, launch, stream=8)
        for n in range(8):
            copy = trace.call("cudaMemcpyAsync", 100 * n + 30, 100 * n + 90, tid=2, correlation=n + 1)
            trace.gpu(PAGEABLE, 100 * n + 80, 100 * n + 85, copy, cat="gpu_memcpy", bytes=8)
        report = trace.scan(tmp_path)
        assert report.totals.syncs == 8
        assert not report.traces[0].coverage.complete

    def test_ids_that_several_calls_share_link_nothing(self, tmp_path: Path) -> None:
        """All copies have the id of the first, which goes from GPU to GPU."""
        trace = Trace().work()
        for n in range(8):
            trace.copy("Memcpy DtoD (Device -> Device)", (100 * n, 100 * n + 50), (100 * n + 20, 100 * n + 21))
            trace.events[-1]["args"]["correlation"] = trace.events[-2]["args"]["correlation"] = 77
        assert exit_code(trace.scan(tmp_path), tmp_path) == 3

    def test_a_driver_call_within_a_runtime_call_may_share_its_id(self, tmp_path: Path) -> None:
        trace = Trace()
        for n in range(8):
            launch = trace.call("cudaLaunchKernel", 100 * n, 100 * n + 9)
            trace.call("cuLaunchKernel", 100 * n + 1, 100 * n + 8, cat="cuda_driver", correlation=launch)
            trace.gpu("gemm", 100 * n + 10, 100 * n + 20, launch)
        assert exit_code(trace.scan(tmp_path), tmp_path) == 0


class TestWrittenTwice:
    def test_events_that_are_the_same_in_everything_are_one(self, tmp_path: Path) -> None:
        """Counts and chains of operators are those of the trace itself, and a note says how many there were more."""
        trace = Trace().work()
        trace.range("ProfilerStep#1", 0, 400)
        trace.item(0, 50)
        trace.item(100, 150)
        once = trace.scan(tmp_path)
        trace.events = [*trace.events, *trace.events]
        twice = trace.scan(tmp_path)
        assert twice.sites == once.sites
        assert twice.totals.syncs == 2
        assert any(
            note.startswith("Of 15 events that stand in the file once more") for note in twice.traces[0].coverage.notes
        )

    def test_waits_that_differ_in_one_thing_are_two(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for changes in ({}, {"tid": 5}, {"dur": 49}, {"args": {"correlation": 10}}, {"name": "cudaEventSynchronize"}):
            trace.events.append(make_sync(**changes))
        assert trace.scan(tmp_path).totals.syncs == 5


LIMITED = """
import resource, sys
from pathlib import Path
from dcpbench.syncs.scan import scan_traces
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
report = scan_traces([Path(sys.argv[1])], root=Path("."))
print(report.totals.syncs, report.traces[0].coverage.complete)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited by RLIMIT_AS")
class TestMemory:
    def test_what_is_of_no_use_takes_no_memory(self, tmp_path: Path) -> None:
        """200 MB of flows and other events that are skipped, and 500 waits, in 100 MB more than Python begins with."""
        flow = json.dumps(
            {
                "ph": "s",
                "id": 1,
                "pid": 0,
                "tid": 7,
                "ts": 1.5,
                "cat": "ac2g",
                "name": "ac2g",
                "bp": "e",
                "pad": "x" * 60,
            }
        )
        self.run(tmp_path, [flow], 1_200_000, 100 << 20)

    def test_frames_take_their_columns_and_no_more(self, tmp_path: Path) -> None:
        """100 MB of 640,000 frames: 24 bytes each, twice while blocks are put together."""
        frames = [
            json.dumps(
                {
                    "cat": "python_function",
                    "ph": "X",
                    "name": f"a.py({n}): f",
                    "pid": 1,
                    "tid": 1,
                    "ts": 7.25 + n,
                    "dur": 0.5,
                    "args": {"Python id": n, "Python parent id": n, "Python thread": 0},
                }
            )
            for n in range(64)
        ]
        self.run(tmp_path, frames, 10_000, 130 << 20)

    @staticmethod
    def run(folder: Path, events: list[str], times: int, limit: int) -> None:
        path = folder / "large.json"
        trace = Trace().work()
        for n in range(500):
            trace.events.append(make_sync(ts=100 * n, dur=50))
        block = ",\n".join(events)
        with path.open("w") as f:
            f.write(trace.text()[:-2] + ",\n")
            for _ in range(times // 100):
                f.write(",\n".join(itertools.repeat(block, 100)) + ",\n")
            f.write(block + "]}")
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(path), str(limit)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        )
        assert done.stdout.split() == ["500", "True"], done.stderr[-2000:]


def test_a_call_whose_copy_cannot_be_read_makes_no_clean(tmp_path: Path) -> None:
    """The copy to pageable memory is what would have said that the call blocks."""
    trace = Trace().work()
    trace.copy(PAGEABLE, (10, 90), (80, 85))
    assert len(select_counted(trace.scan(tmp_path))) == 1
    trace.events[-1]["args"] = [1]
    report = trace.scan(tmp_path)
    assert select_counted(report) == []
    assert exit_code(report, tmp_path) == 3
