"""Every written record can be read, for any values from servers and clocks."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench import cli
from dcpbench.errors import UsageError
from dcpbench.launch import launcher
from dcpbench.points.layout import Layout
from dcpbench.records.acceptance import OMITTED_WARNING
from dcpbench.records.checks import MAX_ENTRIES, OUTCOMES
from dcpbench.records.file import RecordFile, check_point, read_records
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.record import ClientLoad, FailedRequests, OmittedValue, Record, Server, TurnMetrics
from dcpbench.records.repair import repair_file
from dcpbench.records.runs import read_run
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve_build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVER = Server(
    engine="vllm",
    version="0.32.0",
    kv_capacity_tokens=1_000_000,
    max_model_len=32_768,
    retries=2,
    failures=[FailedRequests(kind="HTTP 429", requests=3, first="the server answered HTTP 429: busy.")],
    client=ClientLoad(
        processes=1,
        cpu_share=0.2,
        late_p99_ms=0.1,
        lag_p99_ms=0.2,
        starved_share=0.01,
    ),
    facts={"command": "vllm serve m", "block_size": "16"},
)
PLAIN = serve_build.make_served_record(serve_build.make_point())
assert PLAIN.serve is not None
TURNS = [TurnMetrics(turn=1, requests=8, input_tokens=400, cached_tokens=16, ttft_ms=PLAIN.serve.ttft_ms)]
SERVED = msgspec.structs.replace(
    PLAIN, server=SERVER, origin="engine vllm 0.32.0", serve=msgspec.structs.replace(PLAIN.serve, turns=TURNS)
)
DECODED = build.make_ok_record(build.make_point(Layout(4, 1, 4)), steps=9)
LOST = build.make_failed_record(build.make_point(Layout(2)))
HOSTILE = st.one_of(
    st.integers(),
    st.sampled_from([-99, -1, 0, 10**15, 10**16, 10**26, -(10**26), 2**63, 2**64, 10**400, 7 * 10**307]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -0.0, 5e-324, sys.float_info.max]),
)
TEXTS = st.one_of(st.text(), st.sampled_from(["\ud800", "a\udcff", "\0", "\x1b[2J", '"', "\u2028", "x" * 10_000]))


def iter_leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every number and text of a record except those of its point, each with its path."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if (*path, name) not in (("point",), ("outcome",), ("schema_version",)):
                yield from iter_leaves(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from iter_leaves(item, (*path, name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from iter_leaves(item, (*path, place))
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        yield path, value


def replace_leaf(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return the value with another one at this path."""
    if not path:
        return new
    first, *rest = path
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{first: replace_leaf(getattr(value, first), tuple(rest), new)})
    if isinstance(value, dict):
        return {**value, first: replace_leaf(value[first], tuple(rest), new)}
    return [replace_leaf(item, tuple(rest), new) if place == first else item for place, item in enumerate(value)]


PLACES = {
    name: list(iter_leaves(record)) for name, record in (("served", SERVED), ("decoded", DECODED), ("failed", LOST))
}
RECORDS = {"served": SERVED, "decoded": DECODED, "failed": LOST}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_records_with_hostile_values_can_be_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Up to four numbers and texts of a record are hostile; one record of the same point is read, equal to what was
    written.
    """
    name = data.draw(st.sampled_from(sorted(RECORDS)))
    record, replaced = RECORDS[name], {}
    for place in data.draw(st.lists(st.integers(0, len(PLACES[name]) - 1), min_size=1, max_size=4, unique=True)):
        path, old = PLACES[name][place]
        replaced[path] = data.draw(TEXTS if isinstance(old, str) else HOSTILE)
        record = replace_leaf(record, path, replaced[path])
    folder = tmp_path_factory.mktemp("run")
    written = RecordFile(folder).append(record)
    (found,) = read_records(folder)
    assert found == written
    assert found.point == record.point
    assert found.outcome in OUTCOMES
    for part in ("serve", "metrics"):
        if getattr(record, part) is not None and getattr(found, part) is None:
            assert found.outcome == "failed"
            assert "its result cannot be recorded" in (found.reason or "")
    if msgspec.to_builtins(found) != msgspec.to_builtins(record):
        assert OMITTED_WARNING in found.warnings
        assert found.omitted


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_valid_record_is_written_unchanged(name: str, tmp_path: Path) -> None:
    written = RecordFile(tmp_path).append(RECORDS[name])
    assert (written, written.omitted, read_records(tmp_path)) == (RECORDS[name], msgspec.UNSET, [RECORDS[name]])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("server", "max_model_len"), 10**30, "server.max_model_len is above 1e+15"),
        (("server", "kv_capacity_tokens"), 10**26, "server.kv_capacity_tokens is above 1e+15"),
        (("server", "client", "starved_share"), -0.25, "server.client.starved_share is -0.25, below 0"),
        (("serve", "cached_tokens"), -99, "serve.cached_tokens is -99, below 0"),
        (("server", "client", "lag_p99_ms"), math.nan, "server.client.lag_p99_ms is nan, not a finite number"),
    ],
)
def test_impossible_value_becomes_null_and_is_named(
    path: tuple[str, ...], value: float, message: str, tmp_path: Path
) -> None:
    """The rest of the record is unchanged."""
    RecordFile(tmp_path).append(replace_leaf(SERVED, path, value))
    (found,) = read_records(tmp_path)
    assert list(map(str, found.omitted or [])) == [message]
    assert found.outcome == "ok"
    bare = msgspec.structs.replace(found, omitted=msgspec.UNSET, warnings=SERVED.warnings)
    assert bare == replace_leaf(SERVED, path, None)


def test_negative_duration_becomes_0(tmp_path: Path) -> None:
    """`seconds` cannot be null; 0 means an unknown duration."""
    RecordFile(tmp_path).append(msgspec.structs.replace(LOST, seconds=-3600.0))
    (found,) = read_records(tmp_path)
    assert (found.seconds, found.outcome, found.reason) == (0.0, "failed", LOST.reason)


def test_record_without_a_valid_result_becomes_failed_with_a_reason(tmp_path: Path) -> None:
    """Output throughput cannot be null, so all of `serve` is omitted."""
    RecordFile(tmp_path).append(replace_leaf(SERVED, ("serve", "output_tok_s"), math.inf))
    (found,) = read_records(tmp_path)
    assert (found.outcome, found.serve) == ("failed", None)
    assert found.reason == "its result cannot be recorded: serve.output_tok_s is inf, not a finite number."
    assert found.server == SERVER


def test_too_many_entries_are_truncated(tmp_path: Path) -> None:
    many = {f"x{n}": "v" for n in range(MAX_ENTRIES + 5)}
    RecordFile(tmp_path).append(msgspec.structs.replace(SERVED, detail=many))
    (found,) = read_records(tmp_path)
    assert len(found.detail) == MAX_ENTRIES
    assert found.omitted == [OmittedValue(field="detail", what="has 4,101 entries, more than 4,096")]


def test_point_that_cannot_be_recorded_raises_usage_error() -> None:
    check_point(SERVED.point)
    for path, value in ((("load", "seed"), -1), (("context",), 10**16), (("load", "think_time"), math.inf)):
        with pytest.raises(UsageError, match=rf"point\.{'.'.join(path)} is .*, which no record can hold"):
            check_point(replace_leaf(SERVED.point, path, value))


def test_duration_of_a_failed_job_uses_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job ran for 40 s while the date was set back by an hour."""
    monkeypatch.setattr(launcher.time, "monotonic", lambda: 1040.0)
    monkeypatch.setattr(launcher.time, "time", lambda: 1e9 - 3600.0)
    running: Any = SimpleNamespace(
        logs=tmp_path / "logs", started=1e9, begun=1000.0, log_tail=lambda _: "", find_first_seen=lambda: None
    )
    monkeypatch.setattr(launcher.hang_capture, "find_difference", lambda _: None)
    work: Any = SimpleNamespace(hardware="", folder=tmp_path, device="cpu", retries=0, kind="sweep")
    record = launcher._make_record(LOST.point, running, launcher._JobEnd(code=1), work)
    assert record.seconds == 40.0
    assert record.started_at == "2001-09-09T01:46:40Z"


class TestRunsWithABadLine:
    """Older versions wrote lines with a valid checksum and a value that no reader accepts."""

    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        out = RecordFile(folder)
        out.append(SERVED)
        with monkeypatch.context() as patch:
            patch.setattr("dcpbench.records.acceptance._encode_line", lambda record, _: _add_checksum(record))
            out.append(_with_concurrency(8, replace_leaf(SERVED, ("server", "client", "starved_share"), -0.25)))
        out.append(_with_concurrency(16, SERVED))
        return folder

    @pytest.mark.parametrize("command", ["show RUN", "show RUN --json", "report RUN", "export RUN --to csv"])
    def test_other_records_are_shown_and_the_line_is_named(
        self, command: str, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, err = run_dcpbench(capsys, *command.replace("RUN", str(run)).split())
        assert code == 0
        assert (
            f"{run / RECORDS_FILE}, line 2 cannot be read and is left out: server.client.starved_share is -0.25, below 0.\n"
            f"To take what cannot be read out, and keep a copy of the file: dcpbench records repair --strange "
            f"{run / RECORDS_FILE}\n"
        ) in err

    def test_report_names_the_line(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run_dcpbench(capsys, "report", str(run))
        text = (run / "report" / "report.md").read_text()
        assert "line 2 of its record file cannot be read and is left out: server.client.starved" in text.replace(
            "\\", ""
        )

    def test_compare_gives_no_verdict(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run_dcpbench(capsys, "compare", str(run), str(run))
        assert (code, out) == (2, "")
        assert "line 2: server.client.starved_share is -0.25, below 0" in err

    def test_repair_keeps_the_record_without_the_value(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        done = repair_file(run)
        assert ([fault.line for fault in done.left], done.taken_out) == ([2], [])
        code, _, err = run_dcpbench(capsys, "records", "repair", "--strange", str(run))
        assert code == 0
        assert "line 2, strange: taken out" in err
        assert "1 record inside it kept" in err
        found = read_records(run)
        assert [record.point.concurrency for record in found] == [SERVED.point.concurrency, 8, 16][: len(found)]
        assert len(found) == 3
        assert isinstance(found[1].server, Server)
        assert found[1].server.client is not None
        assert found[1].server.client.starved_share is None

    def test_run_with_only_bad_lines_is_refused(self, run: Path) -> None:
        lines = (run / RECORDS_FILE).read_bytes().splitlines()
        (run / RECORDS_FILE).write_bytes(lines[1] + b"\n")
        with pytest.raises(Exception, match=r"line 1: server\.client\.starved_share is -0\.25, below 0"):
            read_run(run, skip_bad_lines=True)


def _add_checksum(record: Record) -> bytes:
    from dcpbench.records.checksums import add_checksum

    return add_checksum(msgspec.json.encode(record))


def _with_concurrency(concurrency: int, record: Record) -> Record:
    return msgspec.structs.replace(record, point=msgspec.structs.replace(record.point, concurrency=concurrency))


def run_dcpbench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    return int(end.value.code or 0), *capsys.readouterr()
