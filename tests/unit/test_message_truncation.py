"""Text from files and servers is cut to a maximum length in each message.

`LONG` has no character twice, so that the position of the cut is visible; other texts have the same length.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.compare import environments, judging
from dcpbench.dashboard import pages
from dcpbench.doctor import health_report
from dcpbench.errors import RecordsError, UsageError
from dcpbench.hangs import evidence
from dcpbench.hangs import format as hang_format
from dcpbench.imports import result, vllm
from dcpbench.imports.documents import Document
from dcpbench.launch import jobs
from dcpbench.plan.grid import format_point_name
from dcpbench.points import instances
from dcpbench.records import checks
from dcpbench.servers import answers, client, events
from dcpbench.servers.answers import StreamReply
from dcpbench.serving import samples, step_times
from tests.unit import record_builder, serve_record_builder

if TYPE_CHECKING:
    from collections.abc import Callable


LONG = "".join(chr(0x4E00 + n) for n in range(700))


def get_error_message(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def make_server_error(error: str | None, body: bytes = b"", **headers: str) -> str:
    found = {name.encode().replace(b"_", b"-"): value.encode("latin-1") for name, value in headers.items()}
    data = body if error is None else json.dumps({"error": {"message": error}}).encode()
    return client.make_status_error(307 if headers else 500, found, data).sentence


LATIN = "".join(chr(0x21 + n % 90) for n in range(700))
POINT = record_builder.make_point()
SERVED = serve_record_builder.make_point()


def make_non_stream_error(kind: str) -> Any:
    reply = StreamReply(1)
    reply.receive_head(200, {b"content-type": kind.encode("latin-1")})
    reply.receive_body(b'{"error": "no."}', 1.0)
    return answers.StreamReply._make_error(reply)


def with_mode(mode: str) -> Any:
    assert SERVED.load is not None
    return msgspec.structs.replace(SERVED, load=msgspec.structs.replace(SERVED.load, mode=mode))


def describe_broken(record: Any) -> tuple[str, str]:
    found = judging._make_broken(record, "a")
    return found.outcome, found.reason


CUTS: dict[str, tuple[str, Callable[[], str]]] = {
    "invalid line of a record file": (
        f"{LONG[:300]}. Not written by this version of dcpbench; remove the line, and measure its point again.",
        lambda: checks.explain_bad_line(b"{}", msgspec.ValidationError(LONG)),
    ),
    "unknown outcome": (
        f"outcome is {LONG[:40]!r}, none of {', '.join(checks.OUTCOMES)}",
        lambda: str(checks._check_outcome(msgspec.structs.replace(record_builder.make_ok_record(POINT), outcome=LONG))),  # type: ignore[arg-type]
    ),
    "--disaggregate of a record": (
        f"point.disaggregate is {LONG[:40]!r}, which no instances that ran are",
        lambda: str(
            checks._check_layout(record_builder.make_ok_record(msgspec.structs.replace(POINT, disaggregate=LONG)))
        ),
    ),
    "--disaggregate of a command line": (
        f"--disaggregate {LONG[:80]}: not a ratio of instances; {instances.HOW_TO_WRITE}.",
        lambda: get_error_message(UsageError, lambda: instances.parse_instances(LONG)),
    ),
    "error of a doctor check": (LONG[:200], lambda: health_report.format_error(ValueError(f" {LONG}"))),
    "error message of a server": (f"the server answered HTTP 500: {LONG[:299]}….", lambda: make_server_error(LONG)),
    "other error body of a server": (
        f"the server answered HTTP 500: {LATIN[:200]}….",
        lambda: make_server_error(None, LATIN.encode()),
    ),
    "error body with whitespace": (
        f"a {LATIN[:198]}…",
        lambda: events._format_quote(b"a " + b" " * 597 + LATIN.encode()),
    ),
    "short error body": (LATIN[:200], lambda: events._format_quote(LATIN[:200].encode())),
    "target of a redirect": (
        f"the server redirects (HTTP 307) to {LATIN[:199]}…. Use that in --url.",
        lambda: make_server_error(None, location=LATIN),
    ),
    "content type": (
        f"the server sent {LATIN[:99]}… instead of a stream: no.",
        lambda: make_non_stream_error(LATIN).sentence,
    ),
    "time in a file of vLLM": (
        f"file: mean_ttft_ms is {LONG[:40]}, which is no time in ms. Run it again.",
        lambda: get_error_message(
            RecordsError, lambda: vllm.read_time(Document("file", {"mean_ttft_ms": LONG}), "mean_ttft_ms")
        ),
    ),
    "request rate in a file of a tool": (
        f"file: request_rate is {LONG[:40]}; vllm bench serve writes a number above 0, or inf.",
        lambda: get_error_message(
            RecordsError,
            lambda: result.read_rate(Document("file", {"request_rate": LONG}), "vllm bench serve", ["inf"]),
        ),
    ),
    "mode of a compared point": (
        f"{format_point_name(with_mode(LONG))}, {LONG[:18]}",
        lambda: judging.format_point(with_mode(LONG)),
    ),
    "name of a point": (LONG[:300], lambda: judging.format_point(msgspec.structs.replace(POINT, model=LONG))[:400]),
    "failure of a compared point": (
        str((LONG[:20], LONG[:500])),
        lambda: str(
            describe_broken(msgspec.structs.replace(record_builder.make_failed_record(POINT, LONG), outcome=LONG))
        ),  # type: ignore[arg-type]
    ),
    "warnings of runs": (
        str([f"m{n:02}" for n in range(20)]),
        lambda: str(
            environments.collect_warnings(
                [
                    msgspec.structs.replace(
                        record_builder.make_ok_record(POINT), warnings=[f"m{n:02}" for n in reversed(range(25))]
                    )
                ]
            )
        ),
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_message_is_cut_at_its_maximum_length(name: str) -> None:
    expected, make_text = CUTS[name]
    assert make_text() == expected


def test_errors_of_file_readers_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"{}")

    def refuse(*_: object, **__: object) -> None:
        raise msgspec.DecodeError(LONG)

    monkeypatch.setattr(msgspec.json, "decode", refuse)

    def fail(*_: object, **__: object) -> None:
        raise ValueError(LONG)

    assert (
        get_error_message(RecordsError, lambda: evidence._decode_json(path, dict))
        == f"{path} cannot be read: {LONG[:200]}."
    )
    assert (
        get_error_message(RecordsError, lambda: step_times.read_step_times(path))
        == f"{path} cannot be read as step times: {LONG[:300]}; name a file below step-times/ of a run."
    )
    monkeypatch.setattr("pyarrow.parquet.read_table", fail)
    assert (
        get_error_message(RecordsError, lambda: samples.read_samples(path))
        == f"{path} cannot be read as samples of requests: {LONG[:300]}; {samples.AGAIN}."
    )
    checked = tmp_path / jobs.CHECKS_FILE
    checked.write_bytes(b"\n{}\n")
    monkeypatch.setattr(jobs, "decode_check", refuse)
    assert (
        get_error_message(RecordsError, lambda: jobs.read_checks(tmp_path))
        == f"{checked}, line 2: {LONG[:300]}. Repeat the verification with --force."
    )


def test_reason_for_a_missing_page_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(LONG)

    monkeypatch.setattr("dcpbench.reports.write_report", fail)
    for count, expected in (
        (pages.MAX_POINTS, f"run: no page, because the report failed (ValueError: {LONG[:200]})"),
        (pages.MAX_POINTS + 1, "run: no page for 3,001 points, only for up to 3,000"),
    ):
        run: Any = SimpleNamespace(name="run", entries=[None] * count)
        assert pages._write_page(tmp_path, run) == expected


def test_samples_file_name_has_60_characters_and_a_hash() -> None:
    point = msgspec.structs.replace(SERVED, model="m-" * 40)
    digest = hashlib.sha256(point.get_key().encode()).hexdigest()[:12]
    assert samples.make_samples_name(point) == f"samples/{'m-' * 30}-{digest}.parquet"


@pytest.mark.parametrize(("count", "expected"), [(1, "f0"), (3, "f0, f1, f2"), (4, "f0, f1, f2 …")])
def test_name_of_a_hang_lists_its_first_three_files(
    count: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hang_format, "_read_hang", lambda paths, name: (len(paths), name))

    assert hang_format.read_hangs([Path(f"f{n}") for n in range(count)]) == [(count, expected)]
