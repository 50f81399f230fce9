"""Replacement of a report's folder: a reader, a full disk, Ctrl-C and a crash find the old or the new report, never a
mix.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.commands import options, point_runner
from dcpbench.commands.report import report
from dcpbench.errors import DiskError
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.reports import dataframes, plots, points_export, report_markdown, write_report
from dcpbench.reports.page import render
from dcpbench.show import whole_files
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from collections.abc import Callable

TP, DCP = Layout(4), Layout(4, 1, 4)
SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'
REPORT = {"report.html", "report.md", "points.csv", "figures"}


def draw(_: plots.FigureWriter, path: Path, *__: object) -> None:
    """Write two small files for each figure."""
    for end in (".png", ".svg"):
        path.with_suffix(end).write_text(SVG)


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.FigureWriter, "write_figure", draw)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """Return a run of one layout."""
    return build.write_records(tmp_path / "one", [build.make_ok_record(build.make_point(TP))])


def two_layouts(folder: Path) -> Path:
    """Return a run of tp4 and tp4·dcp4; its report has one figure more, the ratio of DCP."""
    return build.write_records(folder, [build.make_ok_record(build.make_point(layout)) for layout in (TP, DCP)])


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return two_layouts(tmp_path / "two")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of such a run once."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.FigureWriter, "write_figure", draw)
        write_report([two_layouts(folder / "two")], folder / "report")
    return folder / "report"


@pytest.fixture
def out(written: Path, tmp_path: Path) -> Path:
    """Return a copy of that report, to be replaced by another one."""
    return shutil.copytree(written, tmp_path / "report")


def read_files(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def fail_after_writing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make the writing of a report fail after its figures, page and text."""

    def fail(_: dataframes.Frames, path: Path) -> None:
        path.write_text("half of")
        raise error

    monkeypatch.setattr(points_export, "write_csv", fail)


class TestWhole:
    def test_report_replaces_all_files_of_an_older_one(self, one: Path, two: Path, tmp_path: Path) -> None:
        """Figures of only the old report are removed; the folder looks as if there had been no other report."""
        out = tmp_path / "report"
        write_report([two], out)
        paths = write_report([one], out)
        assert {p.name for p in out.iterdir()} == REPORT
        assert set(paths) == {p for p in out.rglob("*") if p.is_file()}
        write_report([one], tmp_path / "alone")
        assert read_files(out) == read_files(tmp_path / "alone")
        assert {p.name for p in tmp_path.iterdir()} == {"one", "two", "report", "alone"}

    def test_old_report_is_complete_until_the_new_one_is_written(
        self, one: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files of the old report are compared before and after each step."""
        old = read_files(out)
        unchanged: list[bool] = []

        def compare_around(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                unchanged.append(read_files(out) == old)
                result = original(*given, **named)
                unchanged.append(read_files(out) == old)
                return result

            return call

        for module, name in (
            (plots, "draw_all"),
            (render, "render_page"),
            (report_markdown, "render"),
            (points_export, "write_csv"),
        ):
            monkeypatch.setattr(module, name, compare_around(getattr(module, name)))
        write_report([one], out)
        assert unchanged == [True] * 8
        assert read_files(out) != old

    @pytest.mark.parametrize("has_report", [True, False], ids=["existing-report", "new-report"])
    def test_full_disk_leaves_the_old_report_and_suggests_a_command(
        self, has_report: bool, one: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "report"
        if has_report:
            shutil.copytree(written, out)
        old = read_files(tmp_path)
        fail_after_writing(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(DiskError) as caught:
            write_report([one], out)
        assert read_files(tmp_path) == old
        assert out.exists() == has_report
        assert str(caught.value) == (
            f"{out}: no space is left on its disk. The records are safe. Make room, or type `dcpbench report {one} -o "
            "ELSEWHERE`."
        )

    def test_ctrl_c_leaves_the_old_report(
        self, one: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = read_files(tmp_path)
        fail_after_writing(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            write_report([one], out)
        assert read_files(tmp_path) == old

    def test_crash_leaves_the_old_report(self, one: Path, out: Path) -> None:
        """SIGKILL, as sent when memory runs out, arrives after page, text and figures are written."""
        old = read_files(out)
        program = f"""
            import os, signal
            from pathlib import Path
            from dcpbench.reports import plots, points_export, write_report
            plots.FigureWriter.write_figure = lambda _, path, *__: [path.with_suffix(e).write_text({SVG!r}) for e in (".png", ".svg")]
            points_export.write_csv = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            write_report([Path({str(one)!r})], Path({str(out)!r}))
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL
        assert read_files(out) == old

    def test_other_files_in_the_folder_are_kept(self, one: Path, out: Path, tmp_path: Path) -> None:
        """The files are then replaced one by one and the page last, so no page is next to figures of another report."""
        (out / "notes.txt").write_text("mine")
        (out / "figures" / "mine.drawio").write_text("mine, too")
        write_report([one], out)
        assert (out / "notes.txt").read_text() == "mine"
        assert (out / "figures" / "mine.drawio").read_text() == "mine, too"
        write_report([one], tmp_path / "alone")
        assert read_files(tmp_path / "alone").items() <= read_files(out).items()
        assert not list(tmp_path.rglob(f"*{whole_files.PART}"))

    def test_failure_between_single_files_leaves_no_old_page(
        self, one: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (out / "notes.txt").write_text("mine")
        monkeypatch.setattr(whole_files, "_move_file", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(DiskError, match="its disk reported an I/O error"):
            write_report([one], out)
        assert not {"report.html", "report.md", "points.csv"} & {p.name for p in out.iterdir()}
        assert (out / "notes.txt").read_text() == "mine"

    def test_working_directory_in_the_report_stays_valid(
        self, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`dcpbench report RUN -o .` must not remove the working directory of a shell."""
        out = tmp_path / "report"
        write_report([one], out)
        monkeypatch.chdir(out / "figures")
        write_report([one], Path(".."))
        assert Path.cwd() == out / "figures"
        assert Path.cwd().samefile(out / "figures")
        assert {p.name for p in out.iterdir()} == REPORT

    def test_symbolic_link_to_a_folder_is_kept(self, one: Path, two: Path, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "link").symlink_to("there")
        write_report([two], tmp_path / "link")
        write_report([one], tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert {p.name for p in (tmp_path / "there").iterdir()} == REPORT

    def test_files_are_replaced_one_by_one_without_folder_exchange(
        self, one: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:

        def refuse(*_: object) -> None:
            raise OSError(errno.EINVAL, "no such thing here")

        monkeypatch.setattr(whole_files, "_exchange", refuse)
        write_report([one], out)
        write_report([one], tmp_path / "alone")
        assert read_files(tmp_path / "alone").items() <= read_files(out).items()
        assert not list(tmp_path.glob(f".*{whole_files.PART}"))


class TestCommand:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_signals_end_the_command_like_ctrl_c(
        self, number: signal.Signals, one: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The exit code is that of the signal, and nothing is left."""
        monkeypatch.setattr(points_export, "write_csv", lambda *_: signal.raise_signal(number))
        old = read_files(one)
        with pytest.raises(SystemExit) as end:
            report([one], answer=options.JoinedReportOptions())
        assert end.value.code == 128 + number
        assert "no report was written" in capsys.readouterr().err
        assert read_files(one) == old
        assert signal.getsignal(number) == signal.SIG_DFL

    def test_ctrl_c_during_the_report_of_a_sweep_suggests_a_command(
        self, one: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fail_after_writing(monkeypatch, KeyboardInterrupt())
        probe = Probe(device="cuda", count=4, name="NVIDIA H200")
        with pytest.raises(SystemExit) as end:
            point_runner.finish_run([], one, probe, options.Run())
        assert end.value.code == 130
        assert capsys.readouterr().err.endswith(
            f"\nInterrupted; no report was written. The records are safe; to write it: dcpbench report {one}\n"
        )

    def test_ctrl_c_of_the_report_command_suggests_a_command(
        self, one: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fail_after_writing(monkeypatch, KeyboardInterrupt())
        with pytest.raises(SystemExit) as end:
            report([one], answer=options.JoinedReportOptions())
        assert end.value.code == 130
        assert capsys.readouterr().err.endswith(
            f"\nInterrupted; no report was written. The records are safe; to write it: dcpbench report {one}\n"
        )
        assert not (one / "report").exists()
