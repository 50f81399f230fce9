"""Test damaged and hostile traces and other files: the result is a clear error or incomplete, never a wrong `clean`.

The tests also run the command line, where a traceback would be an exception.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcpbench import cli
from dcpbench.errors import TraceError
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.traces import reading
from tests.unit.trace_builder import Trace, compute_exit_code, scan_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.sync_report import Report

H200 = Path(__file__).parents[1] / "data" / "h200_stacks.trace.json.gz"
TEXT = gzip.decompress(H200.read_bytes())
PACKED = gzip.compress(TEXT, mtime=0)
TRUE_TIMES = {
    e["ts"]
    for e in json.loads(TEXT)["traceEvents"]
    if e["name"] in {"cudaStreamSynchronize", "cudaDeviceSynchronize"} or e.get("cat") == "cuda_sync"
}
TRUE_SITES = {s.fingerprint for s in scan_traces([H200], root=H200.parent).sites}


def make_zip(text: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("inner.json", text)
    return target.getvalue()


def make_tar(text: bytes) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        member = tarfile.TarInfo("inner.json")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return target.getvalue()


OTHER_FORMATS: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "zip": (make_zip, "a zip archive", "unzip {file}`"),
    "tar": (make_tar, "a tar archive", "tar -xf {file}`"),
    "tar.gz": (lambda text: gzip.compress(make_tar(text)), "a tar archive", "tar -xf {file}`"),
    "xz": (lzma.compress, "packed with xz", "xz -dc < {file} > unpacked.json`"),
    "bz2": (bz2.compress, "packed with bzip2", "bzip2 -dc < {file} > unpacked.json`"),
    "zstd": (
        lambda text: b"\x28\xb5\x2f\xfd" + text[:99],
        "packed with Zstandard",
        "zstd -dc < {file} > unpacked.json`",
    ),
    "gzip in gzip": (
        lambda text: gzip.compress(gzip.compress(text)),
        "packed with gzip, and what is in it is packed with gzip",
        "gzip -dc < {file} > unpacked`, then `gzip -dc < unpacked > unpacked.json`",
    ),
    "xz in gzip": (
        lambda text: gzip.compress(lzma.compress(text)),
        "packed with gzip, and what is in it is packed with xz",
        "gzip -dc < {file} > unpacked`, then `xz -dc < unpacked > unpacked.json`",
    ),
    "UTF-16": (
        lambda text: text.decode().encode("utf-16"),
        "UTF-16 text",
        "iconv -f UTF-16 -t UTF-8 < {file} > unpacked.json`",
    ),
    "UTF-16 without its mark": (
        lambda text: text.decode().encode("utf-16-le"),
        "UTF-16 text",
        "iconv -f UTF-16LE -t UTF-8 < {file} > unpacked.json`",
    ),
    "UTF-16, big end first": (
        lambda text: text.decode().encode("utf-16-be"),
        "UTF-16 text",
        "iconv -f UTF-16BE -t UTF-8 < {file} > unpacked.json`",
    ),
    "UTF-32": (
        lambda text: text.decode().encode("utf-32"),
        "UTF-32 text",
        "iconv -f UTF-32 -t UTF-8 < {file} > unpacked.json`",
    ),
    "Git LFS": (
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "a pointer of Git LFS and not the trace",
        "git lfs pull` in its repository",
    ),
    "HTML": (
        lambda _: b"\n<!DOCTYPE html>\n<html>",
        "a web page (HTML) and not the trace",
        "curl -L -o trace.json.gz URL`",
    ),
}
"""Kind -> (function that converts a trace, description, command that restores the trace)."""
FORMATS = ("table", "json", "sarif", "junit", "github", "markdown")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that the examples of property tests share."""
    return tmp_path_factory.mktemp("traces")


def has_only_true_waits(report: Report) -> bool:
    """Return True if all waits are true ones, each counted once. Lost copies or frames can change directions and
    functions.
    """
    times = {s.example.ts for s in report.sites if s.example}
    return times <= TRUE_TIMES and sum(s.count for s in report.sites) <= 19


def run_command(*args: str) -> int:
    """Return the exit code of `dcpbench syncs ARGS`; anything except an exit is an exception."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["syncs", *args])
    return int(ended.value.code or 0)


class TestCutShort:
    @settings(max_examples=60)
    @given(cut=st.integers(0, len(TEXT) - 1))
    @example(cut=TEXT.rindex(b"}"))
    @example(cut=TEXT.rindex(b"]"))
    @example(cut=TEXT.rindex(b"]") + 1)
    def test_truncated_file_has_only_waits_of_the_whole_file(self, cut: int, folder: Path) -> None:
        """A file cut before the first event is no trace; after the last event nothing is lost; in between the trace is
        incomplete.
        """
        try:
            report = scan_data(folder, TEXT[:cut])
        except TraceError:
            assert cut <= TEXT.index(b'"traceEvents"') + 20
            return
        assert has_only_true_waits(report)
        if report.traces[0].coverage.complete:
            assert cut > TEXT.rindex(b"]")
            assert {s.fingerprint for s in report.sites} == TRUE_SITES
        else:
            assert compute_exit_code(report, folder) in {1, 3}

    @pytest.mark.parametrize("at", range(4))
    def test_file_cut_between_two_events_keeps_all_events_before(self, at: int, tmp_path: Path) -> None:
        """Every complete event is read, with `…},` and `…}` at the end."""
        trace = Trace().work()
        for n in range(5):
            trace.call("cudaStreamSynchronize", 100 * n, 100 * n + 50)
        parts = trace.text().split(', {"ph"')
        text = ', {"ph"'.join(parts[: 5 + at])
        for end in ("", ",", ", ", ",\n"):
            report = scan_data(tmp_path, text + end)
            assert sum(s.count for s in report.sites) == 1 + at
            assert report.traces[0].coverage.complete is False

    @settings(max_examples=40)
    @given(cut=st.integers(1, len(PACKED) - 1))
    def test_truncated_gzip_is_incomplete_or_refused(self, cut: int, folder: Path) -> None:
        try:
            report = scan_data(folder, PACKED[:cut])
        except TraceError:
            return
        assert not report.traces[0].coverage.complete
        assert has_only_true_waits(report)
        assert compute_exit_code(report, folder) in {1, 3}

    @settings(max_examples=60)
    @given(at=st.integers(10, len(PACKED) - 1), byte=st.integers(1, 255))
    @example(at=len(PACKED) - 6, byte=1)  # the checksum
    def test_gzip_with_a_wrong_byte_is_never_complete(self, at: int, byte: int, folder: Path) -> None:
        """The checksum at the end is checked although the events end before it."""
        data = bytearray(PACKED)
        data[at] ^= byte
        try:
            report = scan_data(folder, bytes(data))
        except TraceError:
            return
        assert not report.traces[0].coverage.complete
        assert compute_exit_code(report, folder) in {1, 3}


class TestNoTrace:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b" \n",
            b"hello",
            b"\x89PNG\r\n\x1a\n" + bytes(100),
            b"{}",
            b'{"a": [1, 2]}',
            b"[1, 2, 3]",
            b'["a"]',
            b"[[]]",
            b"null",
            b'"traceEvents": []',
            b'{"traceEvents": 3}',
            b'{"traceEvents": null}',
            b"\x1f\x8b",
            b"[INFO]",
            b"\x1f\x8b" + bytes(50),
            gzip.compress(b"", mtime=0),
            gzip.compress(b"hello", mtime=0),
            bytes(3 << 20),
            b" " * (3 << 20),
            "trace".encode("utf-16"),
            b"PK\x03\x04" + bytes(50),
        ],
        ids=lambda data: repr(data[:20]),
    )
    def test_file_that_is_no_trace_is_refused(
        self, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "trace.json"
        path.write_bytes(data)
        assert run_command("scan", str(path)) == 2
        assert capsys.readouterr().err.startswith("error:")

    @pytest.mark.parametrize("form", OTHER_FORMATS)
    def test_other_format_is_named_with_a_command(
        self, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The suffix does not help: all files are called trace.json."""
        path = tmp_path / "trace.json"
        pack, what, command_line = OTHER_FORMATS[form]
        path.write_bytes(pack(TEXT))
        assert run_command("scan", str(path)) == 2
        message = capsys.readouterr().err
        assert f"{path} is {what}: type `{command_line.format(file=path)}" in " ".join(message.split())
        assert "traceEvents" not in message

    @pytest.mark.skipif(os.name != "posix", reason="the commands are those of a POSIX shell")
    @pytest.mark.parametrize("form", ["gzip in gzip", "UTF-16", "UTF-16 without its mark", "tar.gz", "xz in gzip"])
    def test_suggested_command_restores_the_trace(
        self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "a trace.json"
        path.write_bytes(OTHER_FORMATS[form][0](TEXT))
        with pytest.raises(TraceError) as error:
            scan_traces([path], root=tmp_path)
        for line in str(error.value).split("`")[1::2]:
            subprocess.run(line, shell=True, check=True)  # noqa: S602 -- as a user would
        (made,) = [p for p in tmp_path.iterdir() if p.name in {"unpacked.json", "inner.json"}]
        assert {s.fingerprint for s in scan_traces([made], root=tmp_path).sites} == TRUE_SITES

    @pytest.mark.parametrize(
        "data", [b"[]", b'{"traceEvents": []}', b"[{}]", b'[{"a": 1}, {"b": [1]}]', b"[", b'{"traceEvents": [']
    )
    def test_trace_without_gpu_events_cannot_answer(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        path.write_bytes(data)
        assert run_command("scan", str(path)) == 3

    @pytest.mark.parametrize("lost", ["kernel", "cuda_runtime"])
    def test_trace_without_kernels_or_calls_cannot_answer(self, lost: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events = [e for e in trace.events if e["cat"] != lost]
        trace.op("aten::add", 0, 10)
        report = trace.scan(tmp_path)
        assert compute_exit_code(report, tmp_path) == 3

    def test_empty_first_event_is_ignored(self, tmp_path: Path) -> None:
        """RPD, a profiler for ROCm, begins its files with one; in another place an event was lost."""
        trace = Trace().work()
        trace.kernel(100, 110, 120)
        whole, empty = trace.events, {}
        for events, complete in (([empty, *whole], True), ([*whole[:1], empty, *whole[1:]], False)):
            trace.events = events
            report = trace.scan(tmp_path)
            assert report.traces[0].coverage.complete is complete
            assert compute_exit_code(report, tmp_path) == (0 if complete else 3)

    def test_folder_as_a_trace_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="is no file"):
            scan_traces([tmp_path], root=tmp_path)
        assert run_command("scan", str(tmp_path)) == 2

    def test_pipe_is_refused_without_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "trace.json")
        assert run_command("scan", str(tmp_path / "trace.json")) == 2

    def test_missing_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="cannot be read: No such file"):
            scan_traces([tmp_path / "gone.json"], root=tmp_path)

    def test_read_error_raises_trace_error(self, tmp_path: Path) -> None:
        """The bytes of the file cannot be read, as on a failing disk."""
        broken = Path("/proc/self/mem")
        if not broken.exists():  # only Linux has such a file
            broken = tmp_path
        with pytest.raises(TraceError):
            scan_traces([broken], root=tmp_path)


class TestBombs:
    def test_compressed_zeros_are_refused(self, tmp_path: Path) -> None:
        """The file has 100 MiB of zeros in 100 KB, after a valid beginning of a trace."""
        data = gzip.compress(b'{"traceEvents": [' + bytes(100 << 20))
        with pytest.raises(TraceError, match="no end of an event within 64 MiB"):
            scan_data(tmp_path, data)

    @pytest.mark.parametrize("inside", [b" ", b"[", b"{", b'"', b"{},{", b"\\", b"},{"])
    def test_text_without_an_event_is_refused_or_incomplete(self, inside: bytes, tmp_path: Path) -> None:
        """The text has four blocks."""
        text = b'{"traceEvents": [' + inside * (4 * reading.BLOCK_BYTES // len(inside))
        try:
            report = scan_data(tmp_path, text)
        except TraceError:
            return
        assert compute_exit_code(report, tmp_path) == 3

    def test_events_that_expand_too_much_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The limit is 16 MiB here, as 256 MiB take a while."""
        monkeypatch.setattr(reading, "MIN_RATIO_BYTES", 16 << 20)
        one = b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"pid":0,"tid":7,"args":{"correlation":1}},'
        data = gzip.compress(b'{"traceEvents": [' + one * ((40 << 20) // len(one)))
        with pytest.raises(TraceError, match="expands more than 200-fold"):
            scan_data(tmp_path, data)

    @pytest.mark.parametrize(("fold", "refused"), [(100, False), (190, False), (210, True)])
    def test_compression_ratio_up_to_200_is_accepted(
        self, fold: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trace has at least 64 KiB: random blanks, which gzip compresses to an eighth, and then spaces, which it
        compresses to almost nothing.
        """
        monkeypatch.setattr(reading, "MIN_RATIO_BYTES", 64 << 10)
        head = Trace().work().text().encode() + bytes(random.Random(0).choices(b" \t", k=16 << 10))
        data = head
        while len(data) < fold * len(gzip.compress(data)):
            data += b" " * len(head)
        assert 64 << 10 < len(data) < (fold + 10) * len(gzip.compress(data))
        if refused:
            with pytest.raises(TraceError, match="expands more than 200-fold, to over 0 MiB"):
                scan_data(tmp_path, gzip.compress(data))
        else:
            assert scan_data(tmp_path, gzip.compress(data)).traces[0].coverage.complete

    def test_event_without_an_end_is_refused(self, tmp_path: Path) -> None:
        """The name has more than 64 MiB."""
        with pytest.raises(TraceError, match="64 MiB"):
            scan_data(tmp_path, '{"traceEvents": [{"ph": "X", "name": "' + "a" * (67 << 20))

    def test_too_deep_nesting_makes_the_trace_incomplete(self, tmp_path: Path) -> None:
        deep = "[" * 100_000 + "]" * 100_000
        text = Trace().work().text().replace('"device": 0', f'"device": 0, "x": {deep}', 1)
        report = scan_data(tmp_path, text)
        assert not report.traces[0].coverage.complete


HOSTILE_NAMES = (
    "\x1b[31mred\x1b]8;;http://x\x07link",
    "<script>alert(1)</script>",
    "[bold red]x[/]",
    "[/]",
    "::error::pwned\n::warning::",
    "a\r\nb",
    "\u202egnp",
    "]]></failure>",
    "`|*_#",
    "%0A::error::",
    "\x9b2J",
    "{0}%s{",
    "a" * 5000,
    "\ufffe\uffff",
)


class TestHostileNames:
    @pytest.mark.parametrize("form", FORMATS)
    def test_every_format_escapes_hostile_names(
        self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Names go from the trace to the terminal, the page and the log; escapes of each format are tested with that
        format.
        """
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
        trace = Trace().work()
        for n, name in enumerate(HOSTILE_NAMES):
            t = 1000 * n
            trace.frame(f"{name}.py(3): {name}", t, t + 900)
            trace.op(name, t + 1, t + 899)
            trace.range(name, t + 2, t + 890)
            trace.gpu(name, t + 10, t + 190, trace.call("cudaLaunchKernel", t + 3, t + 4))
            trace.call("cudaStreamSynchronize", t + 100, t + 200)
        (tmp_path / "t.json").write_text(trace.text())
        assert run_command("scan", "t.json", "--format", form) == 1
        out = capsys.readouterr()
        assert not set("\x1b\x07\x9b\r\u202e") & set(out.out + out.err)
        assert "\n::error::pwned" not in out.out
        if form in {"json", "sarif"}:
            assert json.loads(out.out)
        if form in {"markdown", "junit"}:
            assert "<script>" not in out.out


def test_damaged_trace_among_good_ones_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.json").write_text(Trace().work().text())
    (tmp_path / "bad.json").write_text(Trace().work().text()[:-5])
    assert run_command("scan", str(tmp_path)) == 3
    assert "bad.json ends early" in capsys.readouterr().out
