"""The dashboard's site: the runs that it shows, the series that it joins, the pages that it rebuilds, and the folders
that it refuses.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.dashboard import change_points, discovery, pages, series, site
from dcpbench.dashboard import data as data_files
from dcpbench.dashboard.change_points import Change
from dcpbench.errors import MissingPackageError, OutputError, RecordsError, UsageError
from dcpbench.points.layout import Layout
from tests.unit import dashboard_builder, record_builder, serve_record_builder

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

HOSTILE = "</script><script>globalThis.pwned = 1</script><img src=x onerror=alert(1)>\u2028\"'&"


@pytest.fixture(autouse=True)
def quick_pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the report pages, which have tests of their own, by files with the name of their run."""
    made: list[str] = []

    def report(folder: Path, run: discovery.RunData) -> str:
        (folder / pages.PAGE).write_text(run.name)
        made.append(run.name)
        return ""

    monkeypatch.setattr(pages, "_write_page", report)
    return made


def read_data(out: Path, name: str) -> Any:
    """Return the content of a data file of the site; histories have numbers."""
    (path,) = (out / "data").glob(f"{name}-*.js")
    text = path.read_text()
    start = f'dcpbenchData("{name}",'
    assert text.startswith(start)
    return json.loads(text[len(start) :].removesuffix(");\n"))


def read_tree(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def test_progress_counts_new_pages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are made from the newest run on; a page that the site holds is not counted."""
    monkeypatch.setattr(site, "make_rate_limited", lambda on_progress: on_progress)
    for run in range(3):
        found = [dashboard_builder.make_record(record_builder.make_point(), run)]
        record_builder.write_records(tmp_path / "runs" / f"run-{run}", found)
    messages: list[str] = []
    site.build(tmp_path / "runs", tmp_path / "site", on_progress=messages.append, newest=1)
    site.build(tmp_path / "runs", tmp_path / "site", on_progress=messages.append)
    page_messages = [text for text in messages if text.startswith("page ")]
    assert page_messages == ["page 1 of 1: run-2", "page 1 of 2: run-1", "page 2 of 2: run-0"]


class TestRunDiscovery:
    def test_runs_are_found_at_any_depth_oldest_first(self, tmp_path: Path) -> None:
        point = record_builder.make_point()
        record_builder.write_records(tmp_path / "runs" / "b" / "deep", [dashboard_builder.make_record(point, 1)])
        record_builder.write_records(tmp_path / "runs" / "z", [dashboard_builder.make_record(point, 0)])
        found = discovery.load_runs(tmp_path / "runs", {}, print)
        assert [(run.name, run.slug) for run in found.runs] == [("z", "z"), ("b/deep", "b~deep")]
        assert [run.date for run in found.runs] == ["2026-01-05T06:00:00Z", "2026-01-06T06:00:00Z"]

    def test_broken_run_is_skipped_with_a_reason(self, tmp_path: Path) -> None:
        root = tmp_path / "its builder's"
        good = dashboard_builder.make_record(record_builder.make_point(), 0)
        line = msgspec.json.encode(good)
        broken = {
            "empty": b"",
            "binary": b"\x00\xff\xfe\n",
            "damaged": b"{\n" + line + b"\n",
            "version": line.replace(b'"schema_version":1', b'"schema_version":99') + b"\n",
            "number": line.replace(b'"tp":1', b'"tp":NaN') + b"\n",
            "missing": b'{"schema_version":1}\n',
            "nested": b'{"schema_version":1,"point":' + b"[" * 100_000 + b"\n\n",
            "huge": line.replace(b'"tp":1', b'"tp":' + b"9" * 400) + b"\n\n",
            "million": b"\n" * 1_000_000,
        }
        for name, content in broken.items():
            (root / name).mkdir(parents=True)
            (root / name / "records.jsonl").write_bytes(content)
        record_builder.write_records(root / "good", [good])
        found = discovery.load_runs(root, {}, print)
        assert [run.name for run in found.runs] == ["damaged", "good"], "one line of the former can be read"
        assert {sentence.partition(":")[0] for sentence in found.skipped} == set(broken)
        assert all(len(sentence) < 400 for sentence in found.skipped)
        assert str(tmp_path) not in " ".join(found.skipped), "a site has no paths of the machine that built it"

    def test_a_copy_of_a_run_is_counted_once(self, tmp_path: Path) -> None:
        record_builder.write_records(tmp_path / "a", [dashboard_builder.make_record(record_builder.make_point(), 0)])
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        found = discovery.load_runs(tmp_path, {}, print)
        assert [run.name for run in found.runs] == ["a"]
        assert found.skipped == ["b: the same records as a"]

    def test_copies_of_records_in_a_site_are_not_runs(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
        site.build(runs, runs / "site")
        assert [run.name for run in discovery.load_runs(runs, {}, print).runs] == ["run-000", "run-001"]

    def test_a_folder_without_runs_does_not_empty_a_site_that_has_pages(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        site.build(runs, tmp_path / "site")
        before = read_tree(tmp_path / "site")
        (tmp_path / "other").mkdir()
        with pytest.raises(RecordsError, match=r"other holds no run .* is left as it is"):
            site.build(tmp_path / "other", tmp_path / "site", force=True, emptied=False)
        assert read_tree(tmp_path / "site") == before

    def test_a_path_that_is_no_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is no folder"):
            site.build(tmp_path / "nothing", tmp_path / "site")

    @pytest.mark.parametrize("name", ["a b", "ä", "x" * 200, "..a", "a;rm -rf", "<b>"])
    def test_a_name_becomes_a_safe_folder_of_its_own(self, name: str) -> None:
        slug = discovery._make_slug(name)
        assert slug != discovery._make_slug(name + "2")
        assert len(slug) <= discovery.MAX_SLUG_CHARS + 9
        assert not set(slug) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._~-")
        assert slug[0] != "."


def _objectives() -> str:
    return "ITL ≤ 30 ms in 99 of 100 gaps, TTFT ≤ 2,000 ms"


def count_lines(*records: Record) -> int:
    """Return how many lines these records make."""
    return len(series.collect_lines(records))


class TestLines:
    def test_records_of_other_hardware_or_drivers_are_separate_lines(self) -> None:
        point = record_builder.make_point()
        one = dashboard_builder.make_record(point, 0)
        others = [
            dashboard_builder.make_record(point, 0, environment=dashboard_builder.make_environment(0, **changed))
            for changed in ({"device": "NVIDIA B200"}, {"driver": "999.1"}, {"device_count": 8})
        ]
        assert count_lines(one, *others) == 4

    def test_live_and_replayed_records_are_separate_lines(self) -> None:
        live = serve_record_builder.make_served_record(serve_record_builder.make_point())
        replay = serve_record_builder.make_served_record(serve_record_builder.make_point(changed={"mode": "replay"}))
        assert count_lines(live, replay) == 2

    def test_settings_that_change_figures_make_separate_lines(self) -> None:
        point = record_builder.make_point()
        plain = dashboard_builder.make_record(point, 0)
        pool = msgspec.structs.replace(plain, measured_with={"kv_memory_bytes": 8 << 30})
        nccl = dashboard_builder.make_environment(0, settings={"NCCL_GRAPH_MIXING_SUPPORT": "0"})
        imported = msgspec.structs.replace(plain, origin="vllm")
        assert count_lines(plain, pool, msgspec.structs.replace(plain, environment=nccl), imported) == 4

    def test_unknown_fields_of_an_import_are_left_out_of_the_description(self) -> None:
        point = serve_record_builder.make_point(
            backend="vllm",
            ep="unknown",
            dtype="unknown",
            all_reduce="unknown",
            weights="unknown",
            page_size=0,
            interleave=0,
            changed={"chunk": 0, "policy": "unknown", "prefill": "unknown"},
        )
        served = serve_record_builder.make_served_record(serve_record_builder.make_point())
        (line,) = series.collect_lines([msgspec.structs.replace(served, point=point, origin="vllm", environment=None)])
        description = series.describe_line(line)
        assert (description["how"], description["conditions"]) == ("vllm · 96 requests", f"{_objectives()}, from vllm")
        assert description["hardware"] == "not recorded"

    @pytest.mark.parametrize(
        ("precision", "expected"),
        [
            ({}, "bf16"),
            ({"weights_dtype": "fp8"}, "fp8 weights, bf16 KV"),
            ({"weights_dtype": "fp8", "kv_dtype": "fp8"}, "fp8 weights and KV"),
        ],
    )
    def test_line_description_ends_with_the_precision(self, precision: dict[str, str], expected: str) -> None:
        """The compute type alone would be `bf16` also for a line with fp8 weights."""
        point = record_builder.make_point(**({"dtype": "bf16"} | precision))
        (line,) = series.collect_lines([dashboard_builder.make_record(point, 0)])
        assert str(series.describe_line(line)["how"]).split(" · ")[-1] == expected

    def test_environment_variables_of_all_lines_are_left_out_of_conditions(self) -> None:
        (line,) = series.collect_lines([dashboard_builder.make_record(record_builder.make_point(), 0)])
        both = ("KV memory 8 GiB", "from vllm", "NCCL_NVLS_ENABLE=0")
        lines = [dataclasses.replace(line, conditions=(*both, *own)) for own in (["NCCL_GRAPH_MIXING_SUPPORT=0"], [])]
        shared = series.find_shared_settings(lines)
        assert shared == ["NCCL_NVLS_ENABLE=0"]
        conditions = [series.describe_line(one, shared=shared)["conditions"] for one in lines]
        assert conditions == ["KV memory 8 GiB, from vllm, NCCL_GRAPH_MIXING_SUPPORT=0", "KV memory 8 GiB, from vllm"]
        assert series.find_shared_settings([]) == []

    def test_commits_versions_and_repeats_make_no_separate_lines(self) -> None:
        """Commits and versions are the axis of a history; repeats are summarised in one entry."""
        first = dashboard_builder.make_record(record_builder.make_point(), 0)
        again = dashboard_builder.make_record(record_builder.make_point(repeat=1), 1)
        newer = dashboard_builder.make_environment(2, torch="2.12")
        found = series.collect_lines([first, again, msgspec.structs.replace(first, environment=newer)])
        assert [entry.repeats for entry in found.values()] == [3]

    def test_a_rejected_point_takes_the_hardware_of_its_run(self) -> None:
        ok = dashboard_builder.make_record(record_builder.make_point(), 0)
        rejected = record_builder.make_rejected_record(record_builder.make_point(Layout(4)))
        assert {line.hardware for line in series.collect_lines([ok, rejected])} == {"4 × NVIDIA H200"}

    def test_repeats_are_the_median_with_the_envelope_of_their_intervals(self) -> None:
        """Steps of 10, 12 and 11 ms: the median is 11, the interval reaches from the lowest to the highest."""
        found = [
            record_builder.make_ok_record(record_builder.make_point(repeat=i), median_ms=ms, steps=30)
            for i, ms in enumerate((10.0, 12.0, 11.0))
        ]
        (entry,) = series.collect_lines(found).values()
        steps = [r.metrics.step_ms for r in found if r.metrics]
        assert entry.values["step_ms"].median == pytest.approx(sorted(s.median for s in steps)[1])
        assert entry.values["step_ms"].low == min(s.low for s in steps)
        assert entry.values["step_ms"].high == max(s.high for s in steps)

    def test_failed_repeat_is_counted_in_the_reason_of_an_ok_entry(self) -> None:
        point = record_builder.make_point()
        records = [
            dashboard_builder.make_record(point, 0),
            record_builder.make_failed_record(record_builder.make_point(repeat=1)),
        ]
        (entry,) = series.collect_lines(records).values()
        assert entry.outcome == "ok"
        assert entry.reason.startswith("1 of 2 repeats did not finish")


class TestData:
    def test_a_step_of_5_percent_is_marked_with_its_runs(self, tmp_path: Path) -> None:
        built = site.build(dashboard_builder.write_history(tmp_path / "runs", count=2, step_at=25), tmp_path / "site")
        assert (built.runs, built.points, built.entries) == (40, 2, 80)
        found = read_data(tmp_path / "site", "measure-output_tok_s_per_gpu")
        (change,) = found["changes"]
        line, before, after, ratio, low, high, *_ = change
        assert (before, after) == (24, 25)
        assert low < 0.95 < high
        assert ratio == pytest.approx(0.95, abs=0.015)
        history = read_data(tmp_path / "site", "history-0")[line]
        assert history["changes"]["step_ms"][0][:2] == [24, 25]
        assert sum(history["run"]) == 39, "runs are kept as distances: 0, 1, 1, … to the 39th"

    def test_values_are_those_of_the_records(self, tmp_path: Path) -> None:
        record = dashboard_builder.make_record(record_builder.make_point(Layout(4, 1, 4)), 0)
        record_builder.write_records(tmp_path / "runs" / "a", [record])
        site.build(tmp_path / "runs", tmp_path / "site")
        assert record.metrics is not None
        found = read_data(tmp_path / "site", "measure-step_ms")
        interval = record.metrics.step_ms
        for name, value in (("value", interval.median), ("low", interval.low), ("high", interval.high)):
            assert found[name] == [pytest.approx(value, rel=1e-4)]
        per_gpu = read_data(tmp_path / "site", "measure-output_tok_s_per_gpu")["value"]
        assert per_gpu == [pytest.approx(record.metrics.output_tok_s_per_gpu, rel=1e-4)]
        index = read_data(tmp_path / "site", "index")
        assert index["words"]["layout"] == ["tp4·dcp4"]
        assert index["lines"]["context"] == [4000]

    def test_functional_runs_are_marked_and_have_no_changes(self, tmp_path: Path) -> None:
        for run in range(12):
            slow = 40.0 if run < 6 else 60.0
            point = record_builder.make_point(Layout(8), model="tiny", backend="reference", dtype="float32")
            record_builder.write_records(
                tmp_path / "runs" / f"{run}", [record_builder.make_cpu_record(point, median_ms=slow + run / 100)]
            )
        built = site.build(tmp_path / "runs", tmp_path / "site")
        index = read_data(tmp_path / "site", "index")
        assert built.changes == 0
        assert index["lines"]["cpu"] == [1]
        assert set(index["runs"]["cpu"]) == {1}
        assert "nothing about performance" in index["runs"]["headline"][0]

    def test_hostile_strings_stay_data(self, tmp_path: Path) -> None:
        point = record_builder.make_point(model=HOSTILE, backend=HOSTILE)
        where = dashboard_builder.make_environment(0, device=HOSTILE, driver=HOSTILE, git_commit=HOSTILE)
        record = dashboard_builder.make_record(point, 0, environment=where, warnings=[HOSTILE])
        failed = record_builder.make_failed_record(record_builder.make_point(model="x" * 10_000_000), reason=HOSTILE)
        record_builder.write_records(tmp_path / "runs" / "a<b>", [record, failed])
        site.build(tmp_path / "runs", tmp_path / "site")
        for name, content in read_tree(tmp_path / "site").items():
            if name.startswith(("data/", "index", "site")):
                assert b"<script>globalThis" not in content
                assert b"onerror" not in content or b"\\u003cimg" in content
                assert len(content) < 100_000, "long strings are cut"
        assert HOSTILE in read_data(tmp_path / "site", "index")["words"]["model"]

    def test_nan_and_infinity_become_null(self) -> None:
        from dcpbench.dashboard.data import _to_json_number

        assert [_to_json_number(x) for x in (float("nan"), float("inf"), None, 0.0, 12345.678)] == [
            None,
            None,
            None,
            0,
            12346,
        ]

    def test_no_runs_make_an_empty_site(self, tmp_path: Path) -> None:
        (tmp_path / "runs").mkdir()
        built = site.build(tmp_path / "runs", tmp_path / "site")
        assert (built.runs, built.points) == (0, 0)
        assert (tmp_path / "site" / "index.html").is_file()


class TestBuildingAgain:
    def test_unchanged_runs_keep_their_pages(self, tmp_path: Path, quick_pages: list[str]) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=3, count=1)
        assert site.build(runs, tmp_path / "site").pages_made == 3
        dashboard_builder.write_history(runs / "new", runs=1, count=2)
        again = site.build(runs, tmp_path / "site")
        assert (again.pages_made, again.pages_kept) == (1, 3)
        assert quick_pages[3:] == ["new/run-000"]
        assert site.build(runs, tmp_path / "site", force=True).pages_made == 4

    def test_only_the_newest_runs_get_pages_and_older_pages_stay(self, tmp_path: Path, quick_pages: list[str]) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=5, count=1)
        first = site.build(runs, tmp_path / "site", newest=2)
        assert (first.runs, first.pages_made, first.pages_left) == (5, 2, 3)
        assert quick_pages == ["run-004", "run-003"]
        second = site.build(runs, tmp_path / "site", newest=4)
        assert (second.pages_made, second.pages_kept, second.pages_left) == (2, 2, 1)
        assert quick_pages[2:] == ["run-002", "run-001"]
        third = site.build(runs, tmp_path / "site")
        assert (third.pages_made, third.pages_kept, third.pages_left) == (1, 4, 0)

    def test_a_run_that_grew_gets_a_new_page_and_records(self, tmp_path: Path, quick_pages: list[str]) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
        site.build(runs, tmp_path / "site")
        more = dashboard_builder.make_record(record_builder.make_point(Layout(4, 4)), 1)
        with (runs / "run-001" / "records.jsonl").open("ab") as f:
            f.write(msgspec.json.encode(more) + b"\n")
        site.build(runs, tmp_path / "site")
        assert quick_pages == ["run-001", "run-000", "run-001"]
        copy = tmp_path / "site" / "runs" / "run-001" / "records.jsonl"
        assert copy.read_bytes() == (runs / "run-001" / "records.jsonl").read_bytes()

    def test_the_same_runs_make_the_same_files(self, tmp_path: Path) -> None:
        """The second site is made from another folder, with other file times, and over an older site."""
        one = dashboard_builder.write_history(tmp_path / "one" / "runs", runs=4, count=3)
        site.build(one, tmp_path / "a")
        shutil.copytree(one, tmp_path / "two" / "runs", copy_function=shutil.copyfile)
        dashboard_builder.write_history(tmp_path / "two" / "runs" / "more", runs=1, count=1)
        site.build(tmp_path / "two" / "runs", tmp_path / "b")
        assert read_tree(tmp_path / "a") != read_tree(tmp_path / "b")
        shutil.rmtree(tmp_path / "two" / "runs" / "more")
        site.build(tmp_path / "two" / "runs", tmp_path / "b")
        assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b")

    def test_unchanged_files_keep_their_modification_times(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
        site.build(runs, tmp_path / "site")
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "site").rglob("*") if p.is_file()}
        site.build(runs, tmp_path / "site")
        assert {p: p.stat().st_mtime_ns for p in (tmp_path / "site").rglob("*") if p.is_file()} == before

    def test_a_removed_run_leaves_nothing_behind(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
        site.build(runs, tmp_path / "site")
        shutil.rmtree(runs / "run-000")
        site.build(runs, tmp_path / "site")
        assert [p.name for p in (tmp_path / "site" / "runs").iterdir()] == ["run-001"]
        assert len(list((tmp_path / "site" / "data").glob("index-*.js"))) == 1

    def test_missing_ruptures_raises_error_before_any_page_is_made(
        self, tmp_path: Path, quick_pages: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No incomplete site is left behind."""
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=8, count=1)
        monkeypatch.setitem(sys.modules, "ruptures", None)
        with pytest.raises(MissingPackageError, match=r"pip install '\.\[dashboard\]'"):
            site.build(runs, tmp_path / "site")
        assert quick_pages == []
        assert not (tmp_path / "site").exists()

    @pytest.mark.parametrize("ends", [KeyboardInterrupt, OSError, RuntimeError])
    def test_finished_pages_are_kept_if_the_build_ends_early(
        self, tmp_path: Path, quick_pages: list[str], monkeypatch: pytest.MonkeyPatch, ends: type[BaseException]
    ) -> None:
        """The build ends at the third of three pages, or at its last step: two and three pages need not be made again."""
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=3, count=1)

        def end(*_: object) -> None:
            raise ends

        report = pages._write_page
        chosen = {"run-000": end}
        monkeypatch.setattr(pages, "_write_page", lambda folder, run: chosen.get(run.name, report)(folder, run))
        with pytest.raises((ends, OutputError)):
            site.build(runs, tmp_path / "site")
        monkeypatch.setattr(pages, "_write_page", report)
        with monkeypatch.context() as patch:
            patch.setattr(site, "_remove_unreferenced", end)
            with pytest.raises((ends, OutputError)):
                site.build(runs, tmp_path / "site")
        built = site.build(runs, tmp_path / "site")
        assert quick_pages == ["run-002", "run-001", "run-000"]
        assert (built.pages_made, built.pages_kept) == (0, 3)

    def test_page_of_a_run_that_grew_is_rebuilt_after_an_interrupted_build(
        self, tmp_path: Path, quick_pages: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page is kept only for the records that it shows."""
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        with monkeypatch.context() as patch:
            patch.setattr(site, "_remove_unreferenced", lambda *_: (tmp_path / "no" / "such").read_bytes())
            with pytest.raises(OutputError):
                site.build(runs, tmp_path / "site")
        with (runs / "run-000" / "records.jsonl").open("ab") as f:
            f.write(
                msgspec.json.encode(dashboard_builder.make_record(record_builder.make_point(Layout(4, 4)), 0)) + b"\n"
            )
        assert site.build(runs, tmp_path / "site").pages_made == 1
        assert quick_pages == ["run-000", "run-000"]

    def test_failed_build_leaves_the_existing_site_unchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
        site.build(runs, tmp_path / "site")
        before = read_tree(tmp_path / "site")
        dashboard_builder.write_history(runs / "new", runs=1, count=2)
        with monkeypatch.context() as patch:
            patch.setattr(data_files, "build_content", lambda *_: (tmp_path / "no" / "such").read_bytes())
            with pytest.raises(OutputError):
                site.build(runs, tmp_path / "site")
        after = read_tree(tmp_path / "site")
        assert {name: after[name] for name in before if name != discovery.STATE_FILE} == {
            name: content for name, content in before.items() if name != discovery.STATE_FILE
        }
        assert site.read_index_path(tmp_path / "site").encode() in before["index.html"]

    def test_index_is_written_before_the_first_page_and_during_the_build(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page takes 9 s and an index is written every 10 s, so that the third page begins with the first two in the
        index.
        """
        seen: list[list[int]] = []
        now = [0.0]

        def report(*_: object) -> str:
            index = site.read_index_path(tmp_path / "site")
            assert index.encode() in (tmp_path / "site" / "index.html").read_bytes()
            text = (tmp_path / "site" / index).read_text()
            seen.append(json.loads(text[text.index("{") : text.rindex("}") + 1])["runs"]["page"])
            now[0] += 9
            return ""

        monkeypatch.setattr(pages, "_write_page", report)
        monkeypatch.setattr(site.time, "monotonic", lambda: now[0])
        built = site.build(dashboard_builder.write_history(tmp_path / "runs", runs=4, count=1), tmp_path / "site")
        assert seen == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
        assert built.pages_made == 4
        assert read_data(tmp_path / "site", "index")["runs"]["page"] == [1, 1, 1, 1]

    def test_a_folder_without_runs_writes_nothing(self, tmp_path: Path) -> None:
        """The error names the reason for each file that was left out."""
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "records.jsonl").write_text("{}\n")
        with pytest.raises(RecordsError, match="so no site is written into") as e:
            site.build(tmp_path / "runs", tmp_path / "site", emptied=False)
        assert not (tmp_path / "site").exists()
        assert [text.split(":")[0] for text in str(e.value).splitlines()[1:]] == ["left out"]

    def test_error_counts_the_files_that_it_does_not_name(self, tmp_path: Path) -> None:
        """Make 12 files unreadable: 10 are named, and 2 counted."""
        for n in range(12):
            (tmp_path / "runs" / f"{n}").mkdir(parents=True)
            (tmp_path / "runs" / f"{n}" / "records.jsonl").write_text("{}\n")
        with pytest.raises(RecordsError) as e:
            site.build(tmp_path / "runs", tmp_path / "site", emptied=False)
        assert len(str(e.value).splitlines()) == 12
        assert str(e.value).endswith("left out: 2 more")

    def test_page_states_the_runs_that_a_change_needs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(change_points, "MIN_RUNS", 77)
        monkeypatch.setattr(change_points, "MIN_SIDE", 33)
        site.build(dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1), tmp_path / "site")
        page = (tmp_path / "site" / "index.html").read_text()
        assert "at least 77 runs, 33 on each side of a split" in page
        assert "changes below 0.5 % are not marked" in page

    def test_run_deleted_during_the_build_loses_only_its_page(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The folder is deleted while the page of the newer run is made."""
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)

        def report(*_: object) -> str:
            shutil.rmtree(runs / "run-000")
            return ""

        monkeypatch.setattr(pages, "_write_page", report)
        built = site.build(runs, tmp_path / "site")
        assert built.skipped == ["run-000: no page, because its records are gone since they were read"]
        assert [p.name for p in (tmp_path / "site" / "runs").iterdir()] == ["run-001"]

    def test_failing_report_loses_only_its_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pages, "_write_page", lambda _, run: f"{run.name}: no page, because of a bug")
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        built = site.build(runs, tmp_path / "site")
        assert built.skipped == ["run-000: no page, because of a bug"]
        index = read_data(tmp_path / "site", "index")
        assert (index["runs"]["page"], index["runs"]["records"]) == ([0], [1])


def make_change(ratio: float | None) -> Change:
    """Make a change from 100, or from 0 if there is no ratio."""
    if ratio is None:
        return Change(0, 0.0, 5.0, None, None, None)
    return Change(0, 100.0, 100.0 * ratio, ratio, ratio - 0.01, ratio + 0.01)


class TestLatestChanges:
    def test_index_lists_latest_changes_with_intervals_and_runs(self, tmp_path: Path) -> None:
        """One of two points is 5 % slower from the 26th run on: between run-024 and run-025, in several metrics."""
        site.build(dashboard_builder.write_history(tmp_path / "runs", count=2, cv=0.001), tmp_path / "site")
        index = read_data(tmp_path / "site", "index")
        (step,) = index["latest"]["steps"]
        assert [index["runs"]["name"][step[k]] for k in ("before", "after")] == ["run-024", "run-025"]
        assert (step["points"], index["latest"]["more"]) == (1, 0)
        assert step["same_code"] == 0
        assert (step["worse"], step["better"], step["omitted"]) == (1, 0, 0)
        (group,) = step["groups"]
        ratios = {index["measures"][row[0]]["id"]: row[4:7] for row in group["changes"]}
        assert len(ratios) == len(group["changes"]) > 1
        ratio, low, high = ratios["step_ms"]
        assert low < ratio < high
        assert ratio == pytest.approx(1 / 0.95, rel=0.005)

    def test_change_between_runs_of_one_commit_is_marked_as_same_code(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", count=1, cv=0.001)
        for path in runs.glob("*/records.jsonl"):
            path.write_text(re.sub(r'"git_commit":"\d{7}abcdef"', '"git_commit":"0000001abcdef"', path.read_text()))
        site.build(runs, tmp_path / "site")
        (step,) = read_data(tmp_path / "site", "index")["latest"]["steps"]
        assert step["same_code"] == 1

    def test_points_of_a_layout_with_similar_changes_are_one_group(self, tmp_path: Path) -> None:
        """One of 16 points in four layouts halves its speed and the others lose 10 %: five groups, the largest change
        first.
        """
        for run in range(12):
            found = [
                dashboard_builder.make_record(point, run, faster=0.5 if i == 3 and run >= 6 else 0.9 if run >= 6 else 1)
                for i, point in enumerate(dashboard_builder.list_points(16))
            ]
            record_builder.write_records(tmp_path / "runs" / f"run-{run:03d}", found)
        site.build(tmp_path / "runs", tmp_path / "site")
        index = read_data(tmp_path / "site", "index")
        (step,) = index["latest"]["steps"]
        assert (step["points"], step["worse"], step["better"], step["omitted"]) == (16, 16, 0, 0)
        assert [group["points"] for group in step["groups"]] == [1, 4, 4, 4, 3]
        assert {group["verdict"] for group in step["groups"]} == {"worse"}
        shown = sum(row[1] for group in step["groups"] for row in group["changes"])
        assert shown == sum(measure["changes"] for measure in index["measures"]) > 16, "no metric is lost"
        assert [group["model"] for group in step["groups"]] == [1, 0, 0, 0, 0]
        assert step["groups"][0]["changes"][0][4] in (0.5, 2)
        for group in step["groups"]:
            sizes = [abs(math.log(row[4])) for row in group["changes"]]
            assert sizes == pytest.approx(sorted(sizes, reverse=True), abs=1e-3)

    def test_groups_with_equal_changes_are_sorted_by_their_number_of_points(self) -> None:
        """Sizes within a thousandth are equal: 0.1004 and 0.1001 are, and 0.102 is larger."""
        sizes = [("a", 0.1004), ("b", 0.1001), ("b", 0.1), ("c", 0.102), ("d", 0.05)]
        histories = [
            SimpleNamespace(line=SimpleNamespace(example=SimpleNamespace(layout_name=layout))) for layout, _ in sizes
        ]
        moved = [SimpleNamespace(line=i, verdict="worse", size=size) for i, (_, size) in enumerate(sizes)]
        groups = data_files._group_similar(moved, histories)  # type: ignore[arg-type]
        assert [[one.line for one in group] for group in groups] == [[3], [1, 2], [0], [4]]

    def test_improvements_and_regressions_are_separate_groups(self, tmp_path: Path) -> None:
        """Points of one layout are 10 % faster and 10 % slower, and there are more groups than are shown."""
        for run in range(12):
            found = [
                dashboard_builder.make_record(
                    point, run, faster=(0.9, 1.1)[i // 4 % 2] ** (1 + i // 8 * 5) if run >= 6 else 1
                )
                for i, point in enumerate(dashboard_builder.list_points(16))
            ]
            record_builder.write_records(tmp_path / "runs" / f"run-{run:03d}", found)
        site.build(tmp_path / "runs", tmp_path / "site")
        (step,) = read_data(tmp_path / "site", "index")["latest"]["steps"]
        assert (step["worse"], step["better"]) == (8, 8)
        assert [group["points"] for group in step["groups"]] == [1] * data_files.MAX_GROUPS
        assert step["omitted"] == 16 - data_files.MAX_GROUPS

    def test_group_has_range_and_number_of_points_of_each_metric(self) -> None:
        """Three points are worse by 10 to 20 %; one of them has one more metric, and two have a value that is not
        positive.
        """
        speed, step = (list(data_files.MEASURES).index(name) for name in ("output_tok_s_per_gpu", "step_ms"))
        steps = [
            {speed: make_change(0.8), step: make_change(1.25)},
            {speed: make_change(0.9)},
            {speed: make_change(0.85), step: make_change(None)},
        ]
        point = record_builder.make_point()
        (line,) = series.collect_lines([dashboard_builder.make_record(point, 0)])
        histories = [data_files.History(line, []) for _ in steps]
        moved = [data_files.ChangedPoint(i, one, "worse") for i, one in enumerate(steps)]
        summary = data_files._summarize_group(moved, histories)
        assert (summary["line"], summary["points"], summary["verdict"]) == (0, 3, "worse")
        rows = {row[0]: row[1:4] for row in summary["changes"]}  # type: ignore[attr-defined]
        assert rows == {speed: [3, 0.8, 0.9], step: [2, None, None]}, "there is no range without a ratio"

    def test_changes_beyond_the_newest_three_are_counted(self, tmp_path: Path) -> None:
        """A point is 10 % slower after every sixth run: four changes, of which the newest three are shown."""
        point = record_builder.make_point()
        for run in range(30):
            found = [dashboard_builder.make_record(point, run, faster=0.9 ** (run // 6))]
            record_builder.write_records(tmp_path / "runs" / f"run-{run:03d}", found)
        site.build(tmp_path / "runs", tmp_path / "site")
        latest = read_data(tmp_path / "site", "index")["latest"]
        assert ([step["after"] for step in latest["steps"]], latest["more"]) == ([24, 18, 12], 1)


def test_truncated_last_line_is_reported_and_other_records_are_read(tmp_path: Path) -> None:
    runs = dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1)
    (path,) = (runs / "run-001").glob("records.jsonl")
    path.write_bytes(path.read_bytes() + b'{"checked":"crc32","sch')
    built = site.build(runs, tmp_path / "site")
    assert built.runs == 2
    assert built.skipped == ["run-001: the last line of its record file was cut short; the others are read"]


class TestOutputFolder:
    def test_folder_without_a_dashboard_is_refused_and_unchanged(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "index.html").write_text("mine")
        for force in (False, True):
            with pytest.raises(OutputError, match="holds no dashboard; give a new folder with -o"):
                site.build(runs, tmp_path / "mine", force=force)
        assert read_tree(tmp_path / "mine") == {"index.html": b"mine"}

    def test_unfinished_site_can_be_built_again(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        site._prepare_folder(tmp_path / "site")
        site.build(runs, tmp_path / "site")
        assert (tmp_path / "site" / "index.html").is_file()

    def test_unwritable_folder_raises_output_error(self, tmp_path: Path) -> None:
        runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=1)
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match="Give another folder with -o"):
            site.build(runs, tmp_path / "file" / "site")


def test_run_of_the_maximum_size_is_read_and_a_larger_one_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = dashboard_builder.write_history(tmp_path / "runs", runs=1).iterdir()
    size = (run / "records.jsonl").stat().st_size
    monkeypatch.setattr(discovery, "MAX_BYTES", size)
    assert len(discovery.load_runs(tmp_path / "runs", {}, lambda _: None).runs) == 1
    monkeypatch.setattr(discovery, "MAX_BYTES", size - 1)
    skipped = discovery.load_runs(tmp_path / "runs", {}, lambda _: None).skipped
    assert f"records.jsonl has {size:,} bytes; a site takes runs of up to {size - 1:,}." in str(skipped)


def test_page_made_later_is_added_to_the_state_of_the_site(tmp_path: Path) -> None:
    """Without a site, the state holds this page alone."""
    (run,) = discovery.load_runs(dashboard_builder.write_history(tmp_path / "runs", runs=1), {}, lambda _: None).runs
    site._write_state(tmp_path, {site.OURS: site.FORMAT, "index": "data/index.json", "pages": {"other": "key"}})
    site.record_page(tmp_path, run)
    assert site.read_index_path(tmp_path) == "data/index.json"
    assert site.read_page_keys(tmp_path) == {"other": "key", run.slug: pages.compute_page_key(run)}
    (tmp_path / "new").mkdir()
    site.record_page(tmp_path / "new", run)
    assert (site.read_index_path(tmp_path / "new"), [*site.read_page_keys(tmp_path / "new")]) == ("", [run.slug])


def test_index_states_how_many_layers_were_held_and_reused(tmp_path: Path) -> None:
    """The text is in a point's row, from its newest run, and in a run's headline; a history continues over another
    number of layers.
    """
    point = record_builder.make_point()
    for run, held in enumerate((19, 14)):
        one = dashboard_builder.make_record(point, run)
        conditions = msgspec.structs.replace(one.conditions, layers=61, layers_held=held)
        record_builder.write_records(
            tmp_path / "runs" / f"{run}", [msgspec.structs.replace(one, conditions=conditions)]
        )
    site.build(tmp_path / "runs", tmp_path / "site", on_progress=lambda _: None)
    index = read_data(tmp_path / "site", "index")
    (how,) = index["words"]["how"]
    assert how.split(" · ")[-1] == "GPU memory holds 14 of 61 layers, which run repeatedly"
    assert index["lines"]["runs"] == [2]
    for held, headline in zip((19, 14), index["runs"]["headline"], strict=True):
        assert headline.endswith(f", GPU memory holds {held} of 61 layers, which run repeatedly")


def test_wrong_results_are_marked_and_never_in_a_headline(tmp_path: Path) -> None:
    """The wrong point has the highest output of its run."""
    slow, fast = (record_builder.make_point(layout) for layout in (Layout(4), Layout(4, 1, 4)))
    right = record_builder.make_ok_record(slow, median_ms=40.0)
    wrong = record_builder.make_ok_record(fast, median_ms=20.0, warnings=["graph_differs"])
    for name, records in (("both", [right, wrong]), ("wrong", [wrong])):
        record_builder.write_records(tmp_path / "runs" / name, records)
    runs = {run.name: run for run in discovery.load_runs(tmp_path / "runs", {}, lambda _: None).runs}
    assert "kimi-k2 tp4," in runs["both"].headline
    assert runs["wrong"].headline == "all results are wrong"
    assert [entry.wrong for entry in runs["wrong"].entries.values()] == ["graph_differs"]


def test_headline_states_that_a_point_is_emulated(tmp_path: Path) -> None:
    record_builder.write_records(
        tmp_path / "run", [record_builder.make_ok_record(record_builder.make_point(Layout(4), emulate="H200"))]
    )
    (run,) = discovery.load_runs(tmp_path, {}, lambda _: None).runs
    assert "emulated on H200" in run.headline


def test_folders_that_cannot_be_read_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("closed", "open"):
        record_builder.write_records(
            tmp_path / name, [record_builder.make_ok_record(record_builder.make_point(Layout(4)))]
        )
    scan = os.scandir

    def refuse(folder: str) -> Any:
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    found = discovery.load_runs(tmp_path, {}, lambda _: None)
    assert [run.name for run in found.runs] == ["open"]
    assert found.skipped == [f"{tmp_path / 'closed'}: its runs are left out (Permission denied)"]
