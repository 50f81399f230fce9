"""Test the reading of unusual events, invalid JSON text, and large files."""

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
from tests.unit.trace_builder import (
    PAGEABLE,
    Trace,
    compute_exit_code,
    get_only_site,
    make_sync,
    scan_data,
    select_counted,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that the examples of property tests share."""
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
    def test_event_with_an_unusual_field_is_kept(
        self, changes: dict[str, Any], wait: float | None, tmp_path: Path
    ) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(**changes))
        report = trace.scan(tmp_path)
        assert get_only_site(report).wait_us == pytest.approx(wait)
        assert compute_exit_code(report, tmp_path) == 1

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
    def test_unreadable_event_is_counted_and_the_trace_is_not_clean(
        self, changes: dict[str, Any], tmp_path: Path
    ) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(**changes))
        report = trace.scan(tmp_path)
        assert report.sites == []
        assert report.traces[0].coverage.unreadable_events == 1
        assert compute_exit_code(report, tmp_path) == 3

    @pytest.mark.parametrize("event", ["null", "3", '"x"', "[]", '[{"ph": "X"}]', "{}"])
    def test_element_that_is_no_event_loses_no_other_event(self, event: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events += [make_sync(), {"HERE": 1}, make_sync(ts=300)]
        report = scan_data(tmp_path, trace.text().replace('{"HERE": 1}', event))
        assert get_only_site(report).count == 2

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "nan", "-inf"])
    @pytest.mark.parametrize("field", ['"dur": 50', '"External id": 77'])
    def test_numbers_outside_json_count_as_missing(self, number: str, field: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(args={"correlation": 9, "External id": 77}))
        text = trace.text().replace(field, f"{field.partition(':')[0]}: {number}", 2)
        report = scan_data(tmp_path, text)
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete is ("dur" not in field)

    @pytest.mark.parametrize("dur", [None, "missing", -5, "nan", 1e308])
    def test_call_with_an_invalid_duration_makes_the_trace_incomplete(self, dur: Any, tmp_path: Path) -> None:
        """A bubble of 0 would pass every limit: the bubble, the wait, and the number of waits are unknown."""
        trace = Trace().work()
        trace.events.append(make_sync(dur=dur))
        report = trace.scan(tmp_path)
        site = get_only_site(report)
        assert (site.wait_us, site.bubble_us, site.waited) == (None, None, None)
        assert not report.traces[0].coverage.complete
        assert any(
            "1 event of calls or GPU work without a duration" in damage for damage in report.traces[0].coverage.damage
        )

    def test_infinite_times_make_no_infinite_wait(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(make_sync(dur="inf"))
        trace.events.append(make_sync(dur=1e308, ts=1e308))
        report = trace.scan(tmp_path)
        assert compute_exit_code(report, tmp_path) in {1, 3}
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
    """Test names that a profiler did not escape."""

    @pytest.mark.parametrize(
        "name",
        [b"\xff\xfe", b"caf\xe9", b"C:\\dir", b"a\\", b"\\x41", b"\x01\x02", b"\\ud800", b"\\u12", b"\xc3", b"\x00"],
    )
    def test_invalid_name_is_repaired_and_the_trace_is_incomplete(self, name: bytes, tmp_path: Path) -> None:
        """The other events are read; the original name stays unknown."""
        trace = Trace().work()
        trace.frame("NAME", 90, 200)
        trace.events.append(make_sync())
        report = scan_data(tmp_path, trace.text().encode().replace(b"NAME", name + b"(1): f"))
        assert get_only_site(report).count == 1
        coverage = report.traces[0].coverage
        assert not coverage.complete
        assert any("repaired" in note for note in coverage.notes)
        assert coverage.unreadable_events == 0

    def test_repaired_name_is_shown_in_the_reason(self, tmp_path: Path) -> None:
        """Bit 7 is set in the S of cudaStreamSynchronize."""
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        report = scan_data(tmp_path, trace.text().encode().replace(b"aStream", b"a\xd3tream"))
        (reason,) = compute_verdict(report, Gate(root=tmp_path)).reasons
        assert r"repaired ('cuda\xd3treamSynchronize')" in reason

    @pytest.mark.parametrize("at", range(len("cudaStreamSynchronize")))
    @pytest.mark.parametrize("all_of_them", [True, False])
    def test_waiting_call_with_bit_7_set_in_its_name_is_not_clean(
        self, at: int, all_of_them: bool, tmp_path: Path
    ) -> None:
        trace = Trace().work()
        for n in range(3):
            trace.item(100 * n, 100 * n + 50)
        good = b"cudaStreamSynchronize"
        bad = good[:at] + bytes([good[at] | 0x80]) + good[at + 1 :]
        report = scan_data(tmp_path, trace.text().encode().replace(good, bad, -1 if all_of_them else 1))
        assert report.totals.syncs == (0 if all_of_them else 2)
        assert compute_exit_code(report, tmp_path) == (3 if all_of_them else 1)

    @pytest.mark.parametrize("half", [r"\ud853", r"\udc53", r"\udc00\ud800", r"\ud800\u0041"])
    def test_call_name_with_a_lone_surrogate_is_not_clean(self, half: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        report = scan_data(tmp_path, trace.text().replace("aStream", f"a{half}tream"))
        assert compute_exit_code(report, tmp_path) == 3

    def test_surrogate_pair_is_read_as_one_character(self, tmp_path: Path) -> None:
        """The text is written by json.dumps, with a number that makes a repair necessary."""
        trace = Trace().work()
        trace.frame("a.py(1): \U0001f600", 90, 200)
        trace.events.append(make_sync(args={"correlation": 9, "x": float("nan")}))
        report = trace.scan(tmp_path)
        assert get_only_site(report).function == "\U0001f600"
        assert report.traces[0].coverage.complete

    @pytest.mark.parametrize("key", [b"n\xe1me", b"c\xe1t", b"p\xe8", b"\xe1rgs"])
    def test_invalid_utf_8_in_a_key_is_not_clean(self, key: bytes, tmp_path: Path) -> None:
        """The decoder skips unknown keys without checking them."""
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        good = bytes(c & 0x7F for c in key)
        head, _, tail = trace.text().encode().rpartition(b'"' + good + b'"')
        assert compute_exit_code(scan_data(tmp_path, head + b'"' + key + b'"' + tail), tmp_path) in {1, 3}

    def test_repair_keeps_valid_escapes(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.frame('C:\\new\\"x".py(7): caf\u00e9', 90, 200)
        trace.frame("BAD", 95, 190)
        trace.events.append(make_sync())
        report = scan_data(tmp_path, trace.text().encode().replace(b"BAD", b"\\q\xff"))
        assert get_only_site(report).function == "caf\u00e9"

    def test_unescaped_quote_loses_one_event(self, tmp_path: Path) -> None:
        """The other events are read; the missing one is counted, so that the trace is not clean."""
        trace = Trace().work()
        trace.events.append(make_sync())
        trace.frame("NAME", 200, 300)
        trace.events += [make_sync(ts=400 + n) for n in range(3)]
        report = scan_data(tmp_path, trace.text().replace("NAME", 'lib "quoted" name'))
        assert get_only_site(report).count == 4
        assert report.traces[0].coverage.unreadable_events == 1
        assert not report.traces[0].coverage.complete

    def test_names_that_look_like_the_end_of_an_event_are_read_as_names(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for n, name in enumerate(["},{", "}, {", "}]", '"},{"', "]}", "[]", "}\n,\n{"] * 3):
            trace.frame(name, 90 - n, 400 - n)
        trace.events.append(make_sync())
        report = trace.scan(tmp_path)
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete

    @pytest.mark.parametrize("filler", [1, 7, 11])
    def test_events_across_block_boundaries_are_read(
        self, filler: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With blocks of a few hundred bytes, every event is split at some position, including nested ones and strings."""
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
    def test_all_events_after_a_repaired_block_are_read(
        self, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The result does not depend on the size of a block; only the name is lost."""
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
    def test_junk_between_events_never_makes_the_trace_clean(self, junk: bytes, at: int, folder: Path) -> None:
        trace = Trace().work()
        trace.events += [make_sync(ts=100 * n, dur=50) for n in range(6)]
        text = trace.text().encode()
        at += text.index(b"cudaStreamSynchronize")
        try:
            report = scan_data(folder, text[:at] + junk + text[at:])
        except TraceError:
            return
        assert compute_exit_code(report, folder) in {1, 3}


class TestBehindTheEnd:
    """Test text after the root object, and the end of a trace."""

    @staticmethod
    def make_traces() -> tuple[bytes, bytes]:
        """Return the text of a clean trace, and of one that waits."""
        other = Trace().work()
        other.call("cudaStreamSynchronize", 10, 90)
        return Trace().work().text().encode(), other.text().encode()

    @pytest.mark.parametrize("compressed", [False, True])
    @pytest.mark.parametrize("between", [b"", b"\n", b"\0\0"])
    def test_second_trace_in_a_file_is_reported_with_a_remedy(
        self, compressed: bool, between: bytes, tmp_path: Path
    ) -> None:
        """With `cat a.json b.json` or `cat a.json.gz b.json.gz`, only the first trace is read, and is not clean."""
        first, second = self.make_traces()
        data = gzip.compress(first) + gzip.compress(between + second) if compressed else first + between + second
        report = scan_data(tmp_path, data)
        assert report.sites == []
        assert compute_exit_code(report, tmp_path) == 3
        (reason,) = compute_verdict(report, Gate(root=tmp_path)).reasons
        assert 'more text behind its end, beginning \'{"schemaVersion"' in reason
        assert reason.endswith("scan each trace from a separate file.")

    def test_second_trace_is_found_after_more_blocks_and_keys_of_the_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reading, "BLOCK_BYTES", 300)
        first, second = self.make_traces()
        first = first[:-1] + b', "extra": [' + b'{"a": "}]}"}, ' * 500 + b'{}], "traceName": "a"}'
        assert scan_data(tmp_path, first).traces[0].coverage.complete
        assert compute_exit_code(scan_data(tmp_path, first + second), tmp_path) == 3

    def test_second_list_of_events_is_reported(self, tmp_path: Path) -> None:
        first, second = self.make_traces()
        report = scan_data(tmp_path, first[:-1] + b", " + second.lstrip(b"{"))
        assert compute_exit_code(report, tmp_path) == 3
        assert "a second list of events" in report.traces[0].coverage.damage[0]

    def test_text_after_the_events_beyond_the_limit_is_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second trace could follow it. The limit is 1 MiB here, and the text is 2 MiB long."""
        monkeypatch.setattr(reading, "MAX_EVENT_BYTES", 1 << 20)
        text = self.make_traces()[0][:-1] + b', "extra": "' + b"x" * (2 << 20) + b'"}'
        assert compute_exit_code(scan_data(tmp_path, text), tmp_path) == 3

    @pytest.mark.parametrize("end", [b"", b"\n", b"\0" * 600, b" \r\n\0"])
    def test_blanks_and_padding_after_a_trace_are_ignored(self, end: bytes, tmp_path: Path) -> None:
        """A file of a fixed size is padded with zeros."""
        assert scan_data(tmp_path, self.make_traces()[1] + end).traces[0].coverage.complete

    def test_bytes_after_gzip_data_are_counted_and_reported(self, tmp_path: Path) -> None:
        """The gzip member is complete, with all events."""
        report = scan_data(tmp_path, gzip.compress(self.make_traces()[1]) + b"more" * 5)
        assert get_only_site(report).count == 1
        (damage,) = report.traces[0].coverage.damage
        assert damage.startswith("goes on with 20 bytes that are no gzip, behind its gzip data, which was not read")

    @pytest.mark.parametrize("comma", [",", ", ", ",\n  "])
    @pytest.mark.parametrize("bare", [False, True])
    def test_trailing_comma_after_the_last_event_is_ignored(self, comma: str, bare: bool, tmp_path: Path) -> None:
        """Some writers add a comma after each event. No event is lost, so that no damage is reported."""
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        text = json.dumps(trace.events) if bare else trace.text()
        report = scan_data(tmp_path, f"{comma}]".join(text.rsplit("]", 1)))
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete

    def test_trailing_comma_before_other_keys_is_ignored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reading, "BLOCK_BYTES", 300)
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        text = trace.text().removesuffix("]}") + ',\n], "extra": [' + '{"a": 1}, ' * 500 + "{}]}"
        report = scan_data(tmp_path, text)
        assert get_only_site(report).count == 1
        assert report.traces[0].coverage.complete

    def test_array_end_is_found_in_the_message_of_msgspec(self) -> None:
        """Another wording of msgspec would make good traces incomplete, but never damaged ones clean."""
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


class TestDamagedEvents:
    """Test events with one damaged field, which are counted, since they may have been waits."""

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
    def test_wait_with_one_wrong_bit_is_not_clean(self, key: str, instead: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.call("cudaStreamSynchronize", 10, 90)
        head, _, tail = trace.text().rpartition(key)
        report = scan_data(tmp_path, head + instead + tail)
        assert report.sites == []
        assert compute_exit_code(report, tmp_path) == 3

    def test_unknown_names_are_no_damage(self, tmp_path: Path) -> None:
        """The names are those of newer calls, calls unknown to the profiler, and categories of other tools."""
        trace = Trace().work()
        for name in ("cudaNewCall_v13000", "INVALID", "cudaMemcpyBatchAsync", "cuMemFreeAsync"):
            trace.call(name, 10, 20)
        trace.add("my_tool", "span", 0, 5)
        trace.events.append({"ph": "X", "name": "no category", "pid": 1, "tid": 1, "ts": 1, "dur": 1})
        report = trace.scan(tmp_path)
        assert report.traces[0].coverage.complete
        assert compute_exit_code(report, tmp_path) == 0


class TestLinks:
    """Test the ids that link GPU work to the call that caused it."""

    @pytest.mark.parametrize(("unlinked", "code"), [(0, 0), (2, 0), (3, 3), (8, 3)])
    def test_more_than_a_quarter_of_work_without_a_call_cannot_answer(
        self, unlinked: int, code: int, tmp_path: Path
    ) -> None:
        """Two of eight kernels are a quarter, and three are more."""
        trace = Trace()
        for n in range(8):
            trace.kernel(100 * n, 100 * n + 10, 100 * n + 20)
        for event in [e for e in trace.events if e["cat"] == "kernel"][:unlinked]:
            event["args"]["correlation"] += 1000
        report = trace.scan(tmp_path)
        assert compute_exit_code(report, tmp_path) == code
        if code:
            assert f"{unlinked} of its 8 GPU events" in compute_verdict(report, Gate(root=tmp_path)).reasons[0]

    def test_pageable_copy_without_its_call_cannot_answer(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for n in range(20):
            trace.kernel(100 * n, 100 * n + 10, 100 * n + 20)
        trace.copy(PAGEABLE, (5000, 5090), (5080, 5085))
        trace.events[-1]["args"]["correlation"] = 999
        report = trace.scan(tmp_path)
        assert select_counted(report) == []
        assert compute_exit_code(report, tmp_path) == 3

    def test_copies_that_share_ids_with_kernels_are_found(self, tmp_path: Path) -> None:
        """Two processes in one trace both count from 1: eight copies wait, and eight kernels come first."""
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

    def test_ids_shared_by_several_calls_link_nothing(self, tmp_path: Path) -> None:
        """All copies have the id of the first, which goes from GPU to GPU."""
        trace = Trace().work()
        for n in range(8):
            trace.copy("Memcpy DtoD (Device -> Device)", (100 * n, 100 * n + 50), (100 * n + 20, 100 * n + 21))
            trace.events[-1]["args"]["correlation"] = trace.events[-2]["args"]["correlation"] = 77
        assert compute_exit_code(trace.scan(tmp_path), tmp_path) == 3

    def test_driver_call_within_a_runtime_call_can_share_its_id(self, tmp_path: Path) -> None:
        trace = Trace()
        for n in range(8):
            launch = trace.call("cudaLaunchKernel", 100 * n, 100 * n + 9)
            trace.call("cuLaunchKernel", 100 * n + 1, 100 * n + 8, cat="cuda_driver", correlation=launch)
            trace.gpu("gemm", 100 * n + 10, 100 * n + 20, launch)
        assert compute_exit_code(trace.scan(tmp_path), tmp_path) == 0


class TestWrittenTwice:
    def test_duplicated_events_are_counted_once(self, tmp_path: Path) -> None:
        """Counts and chains of operators are those of the original trace, and a note counts the duplicates."""
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

    def test_duplicated_driver_calls_do_not_hide_the_runtime(self, tmp_path: Path) -> None:
        """Two launches through the runtime and two through the driver, each twice in the file."""
        trace = Trace().work()
        for n in range(2):
            trace.gpu(
                "gemm", 100 * n, 100 * n + 9, trace.call("cuLaunchKernel", 100 * n, 100 * n + 1, cat="cuda_driver")
            )
        trace.events *= 2
        report = trace.scan(tmp_path)
        coverage = report.traces[0].coverage
        assert (coverage.runtime_events, coverage.driver_events) == (2, 2)
        assert compute_exit_code(report, tmp_path) == 0

    def test_waits_that_differ_in_one_field_are_separate(self, tmp_path: Path) -> None:
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
    def test_skipped_events_take_no_memory(self, tmp_path: Path) -> None:
        """The trace has 200 MB of flows and other skipped events, and 500 waits, in 100 MB more than Python starts
        with.
        """
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

    def test_frames_take_only_the_memory_of_their_columns(self, tmp_path: Path) -> None:
        """The 640,000 frames of 100 MB take 24 bytes each, twice while blocks are concatenated."""
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


def test_call_with_an_unreadable_copy_is_not_clean(tmp_path: Path) -> None:
    """Only the copy to pageable memory would show that the call blocks."""
    trace = Trace().work()
    trace.copy(PAGEABLE, (10, 90), (80, 85))
    assert len(select_counted(trace.scan(tmp_path))) == 1
    trace.events[-1]["args"] = [1]
    report = trace.scan(tmp_path)
    assert select_counted(report) == []
    assert compute_exit_code(report, tmp_path) == 3
