"""A report's folder is whole: a reader, a full disk, Ctrl-C and a crash find the old report or the new one, no mix."""

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
    """Each figure is two small files."""
    for end in (".png", ".svg"):
        path.with_suffix(end).write_text(SVG)


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.FigureWriter, "write_figure", draw)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A run of one layout."""
    return build.write(tmp_path / "one", [build.ok(build.point(TP))])


def two_layouts(folder: Path) -> Path:
    """A run of tp4 and tp4·dcp4, whose report has one figure more: DCP over the same layout without it."""
    return build.write(folder, [build.ok(build.point(layout)) for layout in (TP, DCP)])


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return two_layouts(tmp_path / "two")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report about such a run, written once."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.FigureWriter, "write_figure", draw)
        write_report([two_layouts(folder / "two")], folder / "report")
    return folder / "report"


@pytest.fixture
def out(written: Path, tmp_path: Path) -> Path:
    """A copy of that report, in the place of which another one comes."""
    return shutil.copytree(written, tmp_path / "report")


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def ends(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Writing a report ends so after its figures, page and text were written."""

    def fail(_: dataframes.Frames, path: Path) -> None:
        path.write_text("half of")
        raise error

    monkeypatch.setattr(points_export, "write_csv", fail)


class TestWhole:
    def test_a_report_takes_the_place_of_an_older_one_with_all_its_files(
        self, one: Path, two: Path, tmp_path: Path
    ) -> None:
        """A figure that the new one has not is gone; what is left looks as if there had been no other."""
        out = tmp_path / "report"
        write_report([two], out)
        paths = write_report([one], out)
        assert {p.name for p in out.iterdir()} == REPORT
        assert set(paths) == {p for p in out.rglob("*") if p.is_file()}
        write_report([one], tmp_path / "alone")
        assert contents(out) == contents(tmp_path / "alone")
        assert {p.name for p in tmp_path.iterdir()} == {"one", "two", "report", "alone"}

    def test_whoever_looks_meanwhile_sees_the_old_one(
        self, one: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Readers see it at each step, and at the last moment before the new one is there."""
        old = contents(out)
        seen: list[bool] = []

        def looking(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                seen.append(contents(out) == old)
                made = real(*given, **named)
                seen.append(contents(out) == old)
                return made

            return call

        for module, name in (
            (plots, "draw_all"),
            (render, "render_page"),
            (report_markdown, "render"),
            (points_export, "write_csv"),
        ):
            monkeypatch.setattr(module, name, looking(getattr(module, name)))
        write_report([one], out)
        assert seen == [True] * 8
        assert contents(out) != old

    @pytest.mark.parametrize("before", [True, False], ids=["over-another", "the-first"])
    def test_a_full_disk_leaves_what_was_there_and_says_what_to_type(
        self, before: bool, one: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "report"
        if before:
            shutil.copytree(written, out)
        old = contents(tmp_path)
        ends(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(DiskError) as caught:
            write_report([one], out)
        assert contents(tmp_path) == old
        assert out.exists() == before
        assert str(caught.value) == (
            f"{out}: no space is left on its disk. The records are safe. Make room, or type `dcpbench report {one} -o "
            "ELSEWHERE`."
        )

    def test_ctrl_c_leaves_what_was_there(
        self, one: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = contents(tmp_path)
        ends(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            write_report([one], out)
        assert contents(tmp_path) == old

    def test_a_crash_leaves_what_was_there(self, one: Path, out: Path) -> None:
        """SIGKILL, as of a kernel that lacks memory, once page, text and figures are written."""
        old = contents(out)
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
        assert contents(out) == old

    def test_what_else_lies_in_the_folder_stays(self, one: Path, out: Path, tmp_path: Path) -> None:
        """Then files come one after the other, the page last: no page stands beside figures of another report."""
        (out / "notes.txt").write_text("mine")
        (out / "figures" / "mine.drawio").write_text("mine, too")
        write_report([one], out)
        assert (out / "notes.txt").read_text() == "mine"
        assert (out / "figures" / "mine.drawio").read_text() == "mine, too"
        write_report([one], tmp_path / "alone")
        assert contents(tmp_path / "alone").items() <= contents(out).items()
        assert not list(tmp_path.rglob(f"*{whole_files.PART}"))

    def test_a_failure_between_such_files_leaves_no_page_of_another_report(
        self, one: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (out / "notes.txt").write_text("mine")
        monkeypatch.setattr(whole_files, "_move_file", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(DiskError, match="its disk reported an I/O error"):
            write_report([one], out)
        assert not {"report.html", "report.md", "points.csv"} & {p.name for p in out.iterdir()}
        assert (out / "notes.txt").read_text() == "mine"

    def test_who_works_in_the_folder_is_still_there_afterwards(
        self, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`dcpbench report RUN -o .` must not take the ground from under a shell."""
        out = tmp_path / "report"
        write_report([one], out)
        monkeypatch.chdir(out / "figures")
        write_report([one], Path(".."))
        assert Path.cwd() == out / "figures"
        assert Path.cwd().samefile(out / "figures")
        assert {p.name for p in out.iterdir()} == REPORT

    def test_a_link_to_a_folder_stays_a_link(self, one: Path, two: Path, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "link").symlink_to("there")
        write_report([two], tmp_path / "link")
        write_report([one], tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert {p.name for p in (tmp_path / "there").iterdir()} == REPORT

    def test_a_file_system_that_exchanges_no_folders_gets_the_files_one_by_one(
        self, one: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:

        def refused(*_: object) -> None:
            raise OSError(errno.EINVAL, "no such thing here")

        monkeypatch.setattr(whole_files, "_exchange", refused)
        write_report([one], out)
        write_report([one], tmp_path / "alone")
        assert contents(tmp_path / "alone").items() <= contents(out).items()
        assert not list(tmp_path.glob(f".*{whole_files.PART}"))


class TestCommand:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_ends_it_as_ctrl_c_does(
        self, number: signal.Signals, one: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With its own exit code, and without leaving anything."""
        monkeypatch.setattr(points_export, "write_csv", lambda *_: signal.raise_signal(number))
        old = contents(one)
        with pytest.raises(SystemExit) as end:
            report([one], answer=options.OneAnswer())
        assert end.value.code == 128 + number
        assert "no report was written" in capsys.readouterr().err
        assert contents(one) == old
        assert signal.getsignal(number) == signal.SIG_DFL

    def test_ctrl_c_during_the_report_of_a_sweep_says_that_the_records_are_safe(
        self, one: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ends(monkeypatch, KeyboardInterrupt())
        probe = Probe(device="cuda", count=4, name="NVIDIA H200")
        with pytest.raises(SystemExit) as end:
            point_runner.finish_run([], one, probe, options.Run())
        assert end.value.code == 130
        assert capsys.readouterr().err.endswith(
            f"\nInterrupted; no report was written. The records are safe; to write it: dcpbench report {one}\n"
        )

    def test_ctrl_c_says_that_nothing_was_written_and_what_to_type(
        self, one: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ends(monkeypatch, KeyboardInterrupt())
        with pytest.raises(SystemExit) as end:
            report([one], answer=options.OneAnswer())
        assert end.value.code == 130
        assert capsys.readouterr().err.endswith(
            f"\nInterrupted; no report was written. The records are safe; to write it: dcpbench report {one}\n"
        )
        assert not (one / "report").exists()
