"""The dashboard's server: accepted and refused requests, and updates for runs in progress."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest

from dcpbench.commands import dashboard
from dcpbench.dashboard import pages, running, site, watching, web_server
from dcpbench.errors import MissingPackageError, OutputError, UsageError
from dcpbench.launch.folders import lock_folder
from dcpbench.launch.jobs import Job, write_progress
from dcpbench.plan.grid import format_point_name
from dcpbench.points.layout import Layout
from dcpbench.points.settings import Settings
from dcpbench.records.file import RecordFile
from tests.unit import dashboard_builder, record_builder
from tests.unit.asgi import Client

ROOT = Path(__file__).parents[2]


@pytest.fixture
def watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> watching.Watcher:
    """Return two runs and their site; a page is a file with the name of its run."""
    monkeypatch.setattr(pages, "_write_page", lambda folder, run: (folder / pages.PAGE).write_text(run.name) and "")
    runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
    made = watching.Watcher(runs, tmp_path / "site", print)
    made.refresh()
    (tmp_path / "secret.txt").write_text("secret")
    return made


@pytest.fixture
def client(watcher: watching.Watcher) -> Client:
    """Return a browser on this machine."""
    return Client(web_server.make_app(watcher), "127.0.0.1:8321")


class TestAcceptedRequests:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8321", "localhost", "localhost:9", "LOCALHOST"])
    def test_names_of_this_machine_are_accepted(self, client: Client, host: str) -> None:
        assert client.get("/", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host",
        [
            "evil.example",
            "127.0.0.1.evil.example",
            "evil.example:8321",
            "localhost.evil.example",
            "10.0.0.7",
            "[::1]",
            "",
        ],
    )
    @pytest.mark.parametrize("path", ["/", "/live.json", "/runs/run-000/records.jsonl", "/assets/theme.css"])
    def test_other_host_names_are_refused(self, client: Client, host: str, path: str) -> None:
        """DNS rebinding lets a page of another site resolve its own name to 127.0.0.1."""
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 400
        assert "dcpbench" not in answer.text

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    @pytest.mark.parametrize("path", ["/", "/live.json", "/assets/theme.css", "/runs/run-000/report.html"])
    def test_methods_other_than_get_and_head_are_refused(self, client: Client, method: str, path: str) -> None:
        assert client.request(method, path).status_code == 405

    def test_head_requests_are_answered(self, client: Client) -> None:
        assert client.request("HEAD", "/assets/theme.css").status_code == 200
        assert client.request("HEAD", "/live.json").status_code == 200


class TestServedFiles:
    @pytest.mark.parametrize(
        "path",
        [
            "/../secret.txt",
            "/%2e%2e/secret.txt",
            "/..%2fsecret.txt",
            "/%2e%2e%2fsecret.txt",
            "/assets/../../secret.txt",
            "/runs/../../secret.txt",
            "/runs/..%5c..%5csecret.txt",
            "//etc/passwd",
            "/%2fetc%2fpasswd",
            "/etc/passwd",
            "/runs/run-000/../../../secret.txt",
            "/secret.txt%00.html",
            "/assets/theme.css%00",
            "/runs/",
            "/data/",
            "/" + "a" * 5000,
        ],
        ids=lambda path: path[:30],
    )
    def test_paths_outside_the_site_are_not_found(self, client: Client, path: str) -> None:
        answer = client.get(path)
        assert answer.status_code == 404
        assert "secret" not in answer.text
        assert "root:" not in answer.text

    def test_link_out_of_the_site_is_not_followed(self, client: Client, watcher: watching.Watcher) -> None:
        (watcher.site / "assets" / "link.txt").symlink_to(watcher.site.parent / "secret.txt")
        (watcher.site / "assets" / "folder").symlink_to(watcher.site.parent)
        assert client.get("/assets/link.txt").status_code == 404
        assert client.get("/assets/folder/secret.txt").status_code == 404

    def test_served_page_is_marked_as_live(self, client: Client, watcher: watching.Watcher) -> None:
        assert 'data-live="yes"' in client.get("/").text
        assert client.get("/index.html").text == client.get("/").text
        assert 'data-live="no"' in (watcher.site / "index.html").read_text()

    @pytest.mark.parametrize("path", ["/", "/live.json", "/assets/theme.css", "/nothing", "/runs/run-000/report.html"])
    def test_every_answer_has_security_headers(self, client: Client, path: str) -> None:
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers

    def test_refused_requests_have_security_headers(self, client: Client) -> None:
        headers = client.get("/", headers={"host": "evil.example"}).headers
        assert headers["cross-origin-resource-policy"] == "same-origin"

    def test_data_files_named_by_digest_are_cacheable(self, client: Client, watcher: watching.Watcher) -> None:
        answer = client.get("/" + site.read_index_path(watcher.site))
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]

    def test_page_is_made_on_request(self, client: Client, watcher: watching.Watcher) -> None:
        assert not (watcher.site / "runs" / "run-001").exists()
        assert client.get("/runs/run-001/report.html").text == "run-001"
        assert (
            client.get("/runs/run-001/records.jsonl").content == (watcher.root / "run-001/records.jsonl").read_bytes()
        )
        assert not (watcher.site / "runs" / "run-000").exists()

    def test_page_that_cannot_be_made_is_answered_with_the_reason(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pages, "_write_page", lambda _, run: f"{run.name}: no page, because of <b>")
        answer = client.get("/runs/run-001/report.html")
        assert (answer.status_code, answer.text) == (404, "run-001: no page, because of <b>")
        assert answer.headers["content-type"].startswith("text/plain")


class TestFollowing:
    def test_a_new_record_changes_the_index_and_the_page(self, client: Client, watcher: watching.Watcher) -> None:
        before = client.get("/live.json").json()["index"]
        client.get("/runs/run-001/report.html")
        assert not watcher.refresh()
        more = dashboard_builder.make_record(record_builder.make_point(Layout(4, 4)), 1)
        with (watcher.root / "run-001" / "records.jsonl").open("ab") as f:
            f.write(msgspec.json.encode(more) + b"\n")
        assert watcher.refresh()
        assert client.get("/live.json").json()["index"] != before
        assert client.get("/runs/run-001/records.jsonl").content.count(b"\n") == 2

    def test_incomplete_last_line_is_ignored(self, watcher: watching.Watcher, client: Client) -> None:
        with (watcher.root / "run-001" / "records.jsonl").open("ab") as f:
            f.write(b'{"schema_version":1,"point":{"mod')
        watcher.refresh()
        assert "run-001" in client.get("/" + site.read_index_path(watcher.site)).text

    def test_failed_build_is_reported_and_the_last_site_is_served(
        self, client: Client, watcher: watching.Watcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> bool:
            watcher.stop()
            raise UsageError("too many points")

        monkeypatch.setattr(watching, "POLL_INTERVAL_S", 0.01)
        monkeypatch.setattr(watcher, "refresh", fail)
        watcher.follow()
        assert "too many points" in client.get("/live.json").json()["note"]
        assert client.get("/").status_code == 200

    def test_running_runs_have_the_progress_of_top(self, client: Client, watcher: watching.Watcher) -> None:
        """Three of 5 points have a record, and the fourth is measured; the last line of events is incomplete."""
        folder = watcher.root / "running"
        points = [record_builder.make_point(concurrency=n) for n in (1, 2, 3, 4, 5)]
        job = Job(kind="sweep", tag="tp1", folder=str(folder), device="cpu", points=points, settings=Settings())
        runs = running.RunningRuns(watcher.root)
        with lock_folder(folder):
            assert runs.read_states() == []
            job.get_path().write_bytes(msgspec.json.encode(job))
            write_progress(job, "start")
            (one,) = runs.read_states()
            assert one.now is not None
            assert (one.ok + one.failed, one.total, one.eta, one.now.stage) == (0, 5, None, "start")
            RecordFile(folder).append(record_builder.make_ok_record(points[0]))
            for point in points[1:3]:
                RecordFile(folder).append(record_builder.make_failed_record(point))
            write_progress(job, "done", points[0], index=0)
            write_progress(job, "measure", points[3], index=3, note="9.1 ms")
            with job.get_progress_path().open("ab") as f:
                f.write(b'{"stage": "do')
            (one,) = runs.read_states()
            assert one.now is not None
            assert (one.ok, one.failed, one.total, one.now.stage, one.now.note) == (1, 2, 5, "measure", "9.1 ms")
            assert one.eta is not None
            (shown,) = client.get("/live.json").json()["jobs"]
            assert (shown["done"], shown["total"]) == (3, 5)
            assert shown["title"].startswith("running: 3 of 5 points · 2 failed · 2 left · ")
            assert shown["note"].startswith(f"{format_point_name(points[3])} · measure for ")
            for point in points[3:]:
                RecordFile(folder).append(record_builder.make_ok_record(point))
            assert runs.read_states() == []

    def test_points_of_several_jobs_are_summed_and_missing_files_ignored(self, tmp_path: Path) -> None:
        """A run has a job for each number of GPUs; the file of one may be deleted while they are listed."""
        for age, gpus in enumerate((8, 1, 4)):
            points = [record_builder.make_point(concurrency=n) for n in range(1, gpus + 1)]
            job = Job(
                kind="sweep", tag=f"tp{gpus}", folder=str(tmp_path), device="cpu", points=points, settings=Settings()
            )
            job.get_path().write_bytes(msgspec.json.encode(job))
            write_progress(job, "start")
            os.utime(job.get_path(), (1e9 - age, 1e9 - age))
        (tmp_path / "job-tp2.json").symlink_to(tmp_path / "nothing")
        with lock_folder(tmp_path):
            (one,) = running.RunningRuns(tmp_path).read_states()
        assert (one.total, one.folder) == (8, tmp_path.name)

    def test_job_of_a_dead_command_is_not_running(self, tmp_path: Path) -> None:
        """A killed run leaves its lock file with a process id that no longer lives."""
        points = [record_builder.make_point()]
        job = Job(kind="sweep", tag="tp1", folder=str(tmp_path), device="cpu", points=points, settings=Settings())
        job.get_path().write_bytes(msgspec.json.encode(job))
        write_progress(job, "start")
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        for pid, working in ((os.getpid(), 1), (dead.pid, 0)):
            (tmp_path / ".lock").write_text(f"{pid}\n")
            assert len(running.RunningRuns(tmp_path).read_states()) == working


def start_server(runs: Path, *args: str) -> tuple[subprocess.Popen[str], str]:
    """Start the real command, and return it with the address that it prints."""
    command = [sys.executable, "-m", "dcpbench.cli", "dashboard", "serve", str(runs), *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://127.0.0.1:" in line, process.communicate()
    return process, line.split("http://")[1].split("/")[0]


class TestCommand:
    def test_serve_binds_loopback_follows_runs_and_ends_with_ctrl_c(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
        process, address = start_server(runs, "--port", "0")
        try:
            with urllib.request.urlopen(f"http://{address}/live.json") as answer:
                before = json.load(answer)["index"]
            host, port = address.split(":")
            assert host == "127.0.0.1"
            with pytest.raises(ConnectionRefusedError):  # another loopback address than the bound one
                socket.create_connection(("127.0.0.2", int(port)))
            dashboard_builder.write_history(runs / "new", runs=1, count=2)
            now = before
            while now == before:
                time.sleep(0.2)
                with urllib.request.urlopen(f"http://{address}/live.json") as answer:
                    now = json.load(answer)["index"]
        finally:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        assert process.returncode == 0
        assert "Traceback" not in out + err
        assert err.rstrip().endswith("Ended.")

    def test_error_for_an_occupied_port_names_a_free_one(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=rf"port {port} is taken; (\d+) is free: --port \1") as error:
                dashboard.serve(runs, port=port)
        assert f"--port {port}" not in str(error.value)

    def test_temporary_site_is_removed_at_exit(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(tmp_path / "tmp")
        (tmp_path / "tmp").mkdir()
        try:
            process, _ = start_server(runs, "--port", "0")
        finally:
            os.environ.pop("TMPDIR") if before is None else os.environ.__setitem__("TMPDIR", before)
        assert list((tmp_path / "tmp").glob("dcpbench-dashboard-*"))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        assert not list((tmp_path / "tmp").iterdir())
        assert "Traceback" not in err

    def test_missing_uvicorn_raises_error_with_install_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "uvicorn", None)
        with pytest.raises(MissingPackageError, match=r"pip install '\.\[dashboard\]'"):
            dashboard.serve(tmp_path, port=0)

    def test_site_inside_or_above_the_runs_is_refused(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        for out in (runs, tmp_path):
            with pytest.raises(OutputError, match="give another folder with -o"):
                dashboard.build(runs, out)

    def test_build_prints_a_summary(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The summary uses the singular for one run and the plural for two."""
        for count, expected in (
            (1, "1 run, 1 point with 1 outcome, 0 changes; "),
            (2, "2 runs, 1 point with 2 outcomes, 0 "),
        ):
            runs = dashboard_builder.write_history(tmp_path / f"runs-{count}", runs=count, count=1)
            assert dashboard.build(runs, tmp_path / f"site-{count}") == 0
            assert capsys.readouterr().out.startswith(expected)

    def test_build_prints_a_json_summary(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], watcher: watching.Watcher
    ) -> None:
        assert dashboard.build(watcher.root, tmp_path / "other", as_json=True) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["runs"], summary["points"], summary["pages_made"], summary["skipped"]) == (2, 1, 2, [])
