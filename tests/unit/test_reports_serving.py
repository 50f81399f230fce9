"""Report sections of served requests: arithmetic, and the separation of live and replayed points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd
import pytest
from rich.console import Console

from dcpbench.points.layout import Layout
from dcpbench.reports import (
    answer,
    dataframes,
    explain,
    findings,
    load_labels,
    overview,
    plots,
    render_terminal_table,
    tables,
    write_report,
)
from tests.unit import record_builder
from tests.unit import serve_record_builder as build
from tests.unit.test_reports import NAMESPACE
from tests.unit.unsaved_figures import leave_figures_unsaved

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

TP, DCP = build.TP, build.DCP
HOSTILE = "<script>alert(1)</script> $\\frac{1}{ | `a` \x1b[31m [red]r[/red]"


def exact(point: Point, tok_s: float, environment: Any = record_builder.GPU, **changes: Any) -> Record:
    """Return a served record with these metrics."""
    record = build.make_served_record(point)
    assert record.serve
    changes = {"output_tok_s": tok_s, "slo_ms": {}, **changes}
    return msgspec.structs.replace(
        record, serve=msgspec.structs.replace(record.serve, **changes), environment=environment
    )


def times(p50: float, **changes: Any) -> Any:
    """Return latencies with this median."""
    from dcpbench.records.record import Latencies

    return Latencies(p50=p50, samples=99, **changes)


def loaded(tmp_path: Path, *records: Record) -> dataframes.Frames:
    """Return frames of one run with these records."""
    return dataframes.load_frames([record_builder.write_records(tmp_path / "run", records)])


def terminal(folder: Path) -> str:
    """Return the terminal table as a pipe with 80 columns gets it."""
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(render_terminal_table([folder]))
    return captured.get()


def replayed(point: Point) -> Point:
    """Return the point of the same load in virtual time."""
    assert point.load
    return msgspec.structs.replace(point, load=msgspec.structs.replace(point.load, mode="replay"))


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures without rendering them."""
    leave_figures_unsaved(monkeypatch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of tp4 and tp4·dcp4 at two concurrencies, live and replayed 3 % faster, and its
    report.
    """
    folder = tmp_path_factory.mktemp("served")
    points = [build.make_point(layout, c) for c in (8, 48) for layout in (TP, DCP)]
    records = [
        *map(build.make_served_record, points),
        *(build.make_served_record(replayed(p), faster=1.03) for p in points),
    ]
    with pytest.MonkeyPatch.context() as patch:
        leave_figures_unsaved(patch)
        write_report([record_builder.write_records(folder / "run", records)], folder / "report")
    return folder


def section(written: Path, title: str) -> str:
    """Return a section of the Markdown report."""
    return (written / "report" / "report.md").read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


class TestReport:
    def test_live_and_replay_never_share_a_table_or_figure(self, written: Path) -> None:
        """Each section has four points; tp4 at 8 clients has 545 tok/s live and 562 in replay."""
        live, replay = section(written, "Serving, live"), section(written, "Serving, replayed in virtual time")
        assert live.count("| closed 8 ·") == replay.count("| closed 8 ·") == 2 * 2
        assert "545.4" in live
        assert "545.4" not in replay
        assert "561.8" in replay
        assert "561.8" not in live
        assert "replay" not in live.lower()
        figures = {p.stem for p in (written / "report" / "figures").iterdir()}
        kinds = ("throughput", "ttft", "itl", "frontier")
        drawn = {f"serve-{kind}-{mode}-closed-kimi-k2" for kind in kinds for mode in ("live", "replay")}
        assert figures == drawn | {
            "serve-overview-live-all",
            "serve-overview-replay-all",
            "serve-break-even-live-all",
            "serve-break-even-replay-all",
            "kv-kimi-k2",
        }

    def test_differences_of_replay_and_live_are_a_table(self, written: Path) -> None:
        """Every step is 3 % faster: 1.03 times the rate, and 1 / 1.03 - 1 = -2.9 % of each latency."""
        text = section(written, "Replay against live")
        assert text.count("| kimi-k2 |") == 4
        assert text.count("+3.0 %") == 4
        assert text.count("-2.9 %") == 4 * 3
        assert "replay / live - 1" in text

    def test_note_of_missing_percentiles_has_the_needed_samples(self, written: Path) -> None:
        """96 requests are enough for p90 of TTFT (64), but not for p95 and p99; 3,744 gaps are enough for all."""
        text = section(written, "Serving, live")
        assert "TTFT p95 needs 130 finished requests in one run (where it is missing: at most 96)" in text
        assert "TTFT p99 needs 662" in text
        assert "ITL p" not in text.split("**Served live**")[0].split("A dash")[1].split("![")[0]

    def test_objectives_of_goodput_are_printed(self, written: Path) -> None:
        """Goodput has no meaning without them."""
        objectives = "TTFT ≤ 2,000 ms, ITL ≤ 30 ms in 99 of 100 gaps"
        assert f"Objectives behind goodput: {objectives}." in section(written, "Serving, live")
        assert objectives in terminal(written / "run").replace("\n", " ")

    def test_report_of_served_points_has_no_decode_sections(self, written: Path) -> None:
        """There are no empty tables and no sentences about decode steps; sections of KV, conditions and method remain."""
        text = (written / "report" / "report.md").read_text(encoding="utf-8")
        for title in ("Every point", "Where a step's time goes"):
            assert f"## {title}" not in text
        for title in ("KV capacity and its limit", "Before you use a number", "How it was measured"):
            assert f"## {title}" in text
        assert "CUDA graph, timed by CUDA events" not in text
        assert "A replay runs the same scheduler" in text

    def test_page_has_a_description_of_each_picture(self, written: Path) -> None:
        page = (written / "report" / "report.html").read_text(encoding="utf-8")
        assert page.count("<img ") == page.count(' alt="') == 13
        assert 'id="serving-live"' in page
        assert "http" not in NAMESPACE.sub("", page).replace("http-equiv", "")

    def test_csv_has_a_row_per_point_with_columns_of_its_load(self, written: Path) -> None:
        table = pd.read_csv(written / "report" / "points.csv")
        assert sorted(table["mode"]) == ["live"] * 4 + ["replay"] * 4
        assert set(table["load_input_tokens"]) == {400}
        assert set(table["load"]) == {"closed 8 · 400 in · 40 out", "closed 48 · 400 in · 40 out"}
        assert table["ttft_p50_ms"].notna().all()
        assert table["ttft_p99_ms"].isna().all()

    def test_terminal_table_fits_eighty_columns(self, written: Path) -> None:
        text = terminal(written / "run")
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        assert text.count("kimi-k2, live: closed loop · 400 in · 40 out") == 1
        assert text.count("kimi-k2, replay: closed loop · 400 in · 40 out") == 1
        assert "preemptions: 4 with tp4 at closed 48" in text

    @pytest.mark.usefixtures("unsaved")
    def test_decode_and_serve_records_share_a_report(self, tmp_path: Path) -> None:
        """Each kind has its sections, and the CSV has a row of each."""
        records = [
            record_builder.make_ok_record(record_builder.make_point(TP), steps=30, phases=None),
            build.make_served_record(build.make_point(TP)),
        ]
        folder = record_builder.write_records(tmp_path / "run", records)
        write_report([folder], tmp_path / "report")
        text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
        for title in ("Output throughput against load", "Every point", "Serving, live"):
            assert f"## {title}\n" in text
        assert list(pd.read_csv(tmp_path / "report" / "points.csv")["workload"]) == ["decode", "serve"]
        assert max(map(len, terminal(folder).splitlines())) <= 80

    def test_rejected_points_are_listed_with_their_load(self, tmp_path: Path) -> None:
        folder = record_builder.write_records(
            tmp_path / "run", [record_builder.make_rejected_record(build.make_point(TP, 48))]
        )
        write_report([folder], tmp_path / "report")
        text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
        assert "live: closed 48 · 400 in · 40 out" in text
        assert "No point finished" in terminal(folder)

    def test_finished_point_without_metrics_has_dashes(self, tmp_path: Path) -> None:
        """No figure is drawn."""
        bare = msgspec.structs.replace(
            build.make_served_record(build.make_point(TP)), serve=None, kv=None, conditions=None
        )
        folder = record_builder.write_records(tmp_path / "run", [bare])
        write_report([folder], tmp_path / "report")
        assert "| — | — |" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
        assert not list((tmp_path / "report" / "figures").iterdir())
        assert "tp4" in terminal(folder)

    def test_hostile_names_are_escaped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The name of a trace comes from a user's file system. Figures are drawn as in the page."""
        save = plots.save_figure
        monkeypatch.setattr(plots, "save_figure", lambda figure, path, *_: save(figure, path, "svg"))
        hostile = build.make_point(TP, 8, {"arrival": "trace", "trace": HOSTILE}, model=HOSTILE)
        other = build.make_point(TP, 8, model=HOSTILE)
        records = [
            msgspec.structs.replace(build.make_served_record(other), point=hostile),
            build.make_served_record(other),
        ]
        folder = record_builder.write_records(tmp_path / "run", records)
        write_report([folder], tmp_path / "report")
        assert "<script>alert" not in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
        assert "\x1b" not in terminal(folder)

    @pytest.mark.usefixtures("unsaved")
    def test_cpu_report_has_no_statement_about_speed(self, tmp_path: Path) -> None:
        """Tables and figures are marked, and no finding compares points."""
        cpu = [
            exact(each, 100.0 * (1 + i), record_builder.CPU)
            for i, each in enumerate((build.make_point(TP), build.make_point(DCP), replayed(build.make_point(TP))))
        ]
        read = loaded(tmp_path, *cpu)
        assert findings.select_timed(read.served).empty
        sentences = " ".join(answer.format_top_sentences(read))
        assert "CPU: functional run." in sentences
        assert "throughput" not in sentences
        assert "Replay against live" not in sentences
        folder = tmp_path / "run"
        write_report([folder], tmp_path / "report")
        text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
        assert "Highest output throughput" not in text
        assert "Replay against live (CPU: functional run)" in text
        assert not list((tmp_path / "report" / "figures").glob("*break-even*"))
        assert "(CPU: functional run)" in " ".join(terminal(folder).split())

    @pytest.mark.usefixtures("unsaved")
    def test_open_loop_is_drawn_against_its_rate_and_trace_is_not_drawn(self, tmp_path: Path) -> None:
        """A trace is a single load, so there is no line to draw."""
        rates = [
            build.make_served_record(
                build.make_point(TP, 64, {"arrival": "gamma", "request_rate": rate, "paced": True})
            )
            for rate in (0.5, 4.0, 8.0)
        ]
        trace_point = build.make_point(TP, 64, {"arrival": "trace", "trace": "chat.jsonl", "input_tokens": "trace"})
        trace = msgspec.structs.replace(build.make_served_record(build.make_point(TP, 8)), point=trace_point)
        folder = record_builder.write_records(tmp_path / "run", [*rates, trace])
        write_report([folder], tmp_path / "report")
        names = {p.name for p in (tmp_path / "report" / "figures").glob("serve*.png")}
        kinds = ("throughput", "ttft", "itl", "frontier")
        assert names == {f"serve-{kind}-live-gamma-kimi-k2.png" for kind in kinds}
        text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
        assert "4 req/s Poisson · 400 in · 40 out" in text
        assert "trace times · requests of chat.jsonl" in text
        assert "No steady throughput: an open loop has no target" in text


class TestFindings:
    def test_dcp_is_compared_only_under_the_same_load_and_mode(self, tmp_path: Path) -> None:
        """150 / 100 tok/s live = 1.5; the replay of the baseline, another chunk and another layout are no baselines."""
        other = build.make_point(TP, 8, {"chunk": 4096})
        read = loaded(
            tmp_path,
            exact(build.make_point(TP), 100, ttft_ms=times(80), itl_ms=times(20)),
            exact(replayed(build.make_point(TP)), 500),
            exact(other, 600),
            exact(build.make_point(build.DP), 700),
            exact(build.make_point(DCP), 150, ttft_ms=times(40), itl_ms=times(25)),
        )
        (row,) = findings.compare_dcp_with_baseline(read.served).to_dict("records")
        assert (row["ratio"], row["verdict"], row["baseline"]) == (1.5, "higher", "tp4")
        assert (row["ttft_ratio"], row["itl_ratio"]) == (0.5, 1.25)

    @pytest.mark.parametrize(
        ("rates", "found", "least", "sentence"),
        [
            (
                (90, 101, 110),
                48,
                False,
                "over tp4, at these concurrencies. 400 in · 40 out: from concurrency 48 on (tp4·dcp4 1.10× there).",
            ),
            (
                (110, 120, 130),
                8,
                True,
                "400 in · 40 out: from concurrency 8, the lowest tried, on (tp4·dcp4 1.10× there).",
            ),
            ((110, 90, 130), 48, False, "400 in · 40 out: from concurrency 48 on (tp4·dcp4 1.30× there)."),
            ((90, 120, 101), None, False, "tp4·dcp4 no longer at 48 (1.01× there; at most 1.20×, at 32)."),
            ((90, 99, 96), None, False, "400 in · 40 out: tp4·dcp4 never up to 48 (at most 0.99×, at 32)."),
            ((90, 101, 96), None, False, "tp4·dcp4 never clearly up to 48 (at most 1.01×, at 32)."),
        ],
        ids=["from-the-last", "from-the-first", "not-twice", "not-at-the-last", "never", "never-clearly"],
    )
    def test_break_even_is_the_concurrency_from_which_dcp_is_always_ahead(
        self, tmp_path: Path, rates: tuple[float, ...], found: int | None, least: bool, sentence: str
    ) -> None:
        """The baseline has 100 tok/s at 8, 32 and 48 clients; a lead of 1 % is less than the difference of repeats."""
        records = [
            exact(build.make_point(layout, c), rate)
            for c, dcp_rate in zip((8, 32, 48), rates, strict=True)
            for layout, rate in ((TP, 100), (DCP, dcp_rate))
        ]
        read = loaded(tmp_path, *records)
        (row,) = findings.find_break_even(findings.compare_dcp_with_baseline(read.served)).to_dict("records")
        assert (row["from"] if found else None) == found
        assert row["least"] is least
        assert sentence in " ".join(answer.format_top_sentences(read))

    def test_dcp_point_without_baseline_is_named_and_not_compared(self, tmp_path: Path) -> None:
        read = loaded(
            tmp_path, exact(build.make_point(DCP), 150), record_builder.make_rejected_record(build.make_point(TP))
        )
        (row,) = findings.compare_dcp_with_baseline(read.served).to_dict("records")
        assert row["verdict"] == "no baseline"
        sentence = "1 point with DCP ran under loads at which tp4 was rejected (closed 8 · 400 in · 40 out)."
        assert f"kimi-k2, live: {sentence}" in answer.format_top_sentences(read)
        assert findings.find_break_even(findings.compare_dcp_with_baseline(read.served)).empty

    def test_kv_pressure_names_all_layouts_under_the_load(self, tmp_path: Path) -> None:
        """1,000 pages of 16 hold 36 requests of 440 tokens on tp4, and 145 with dcp 4; 48 requests run."""
        read = loaded(
            tmp_path, *(build.make_served_record(build.make_point(layout, c)) for layout in (TP, DCP) for c in (8, 48))
        )
        assert list(findings.find_kv_pressure(read.served)["layout"]) == ["tp4"]
        (sentence,) = [s for s in answer.format_top_sentences(read) if "KV pressure" in s]
        assert (
            "under closed 48 · 400 in · 40 out: tp4 has KV for 36 requests, 4 preemptions, TTFT p50 261 ms" in sentence
        )
        assert "tp4·dcp4 has KV for 145 requests, 0 preemptions" in sentence

    def test_best_layout_is_clear_only_beyond_the_difference_of_repeats(self, tmp_path: Path) -> None:
        """A lead of 10 % is clear; 1 % is within the 2 % of repeats."""
        read = loaded(
            tmp_path,
            exact(build.make_point(TP, 8), 100),
            exact(build.make_point(DCP, 8), 110),
            exact(build.make_point(TP, 32), 100),
            exact(build.make_point(DCP, 32), 101),
        )
        assert list(findings.find_best_per_load(read.served)["clear"]) == [True, False]

    def test_replay_is_compared_with_the_live_run_of_its_load(self, tmp_path: Path) -> None:
        """102 / 100 tok/s = +2 %; TTFT 45 over 50 ms = -10 %; p99 of TTFT has too few samples. 32 clients ran only
        live.
        """
        read = loaded(
            tmp_path,
            exact(build.make_point(TP), 100, ttft_ms=times(50), itl_ms=times(20, p99=40.0)),
            exact(replayed(build.make_point(TP)), 102, ttft_ms=times(45), itl_ms=times(20, p99=44.0)),
            exact(build.make_point(TP, 32), 300),
        )
        (row,) = findings.compare_replay_with_live(read.served).to_dict("records")
        assert row["output_tok_s_error"] == pytest.approx(0.02)
        assert row["ttft_p50_ms_error"] == pytest.approx(-0.1)
        assert row["itl_p99_ms_error"] == pytest.approx(0.1)
        assert pd.isna(row["ttft_p99_ms_error"])
        (sentence,) = [s for s in answer.format_top_sentences(read) if s.startswith("Replay")]
        assert sentence == (
            "Replay against live, largest errors over 1 point that was run both ways: "
            "output tok/s 2 %, TTFT p50 10 %, ITL p50 0 %, ITL p99 10 %."
        )
        assert sentence in overview.format_bullets(read)

    def test_highest_output_is_that_of_a_live_point(self, tmp_path: Path) -> None:
        """The replay has more output. It counts where nothing ran live."""
        live, replay = exact(build.make_point(TP), 100), exact(replayed(build.make_point(TP)), 102)
        assert "at most 100 output tok/s" in overview.format_answer(loaded(tmp_path / "both", live, replay))
        assert "at most 102 output tok/s" in overview.format_answer(loaded(tmp_path / "replay", replay))

    def test_live_points_without_a_named_device_are_reported_without_a_replay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server measured without --gpu has no device, so that column has only missing values. pandas before 3.1
        raises IndexError when such a table is joined on several columns; here any version does.
        """
        join = pd.DataFrame.join

        def join_on_one_column(self: pd.DataFrame, *args: Any, on: Any = None, **more: Any) -> pd.DataFrame:
            if isinstance(on, list):
                raise IndexError("cannot do a non-empty take from an empty axes.")
            return join(self, *args, on=on, **more)

        monkeypatch.setattr(pd.DataFrame, "join", join_on_one_column)
        nowhere = msgspec.structs.replace(record_builder.GPU, device="")
        read = loaded(tmp_path, exact(build.make_point(TP), 100, nowhere), exact(build.make_point(DCP), 120, nowhere))
        assert read.served["device"].isna().all()
        assert findings.compare_replay_with_live(read.served).empty
        assert list(read.findings.ratios["ratio"]) == [pytest.approx(1.2)]
        write_report([tmp_path / "run"], tmp_path / "report", page_only=True)

    @pytest.mark.parametrize("kind", ["live", "replay", "nothing"])
    def test_no_comparison_without_devices_and_pairs(self, kind: str, tmp_path: Path) -> None:
        """A served engine of another machine has no device, so the column has no value at all."""
        wanted = build.make_point(TP)
        read = loaded(tmp_path, exact(replayed(wanted) if kind == "replay" else wanted, 100, environment=None))
        served = read.served.assign(output_tok_s=float("nan")) if kind == "nothing" else read.served
        assert served["device"].isna().all()
        assert findings.compare_replay_with_live(served).empty

    def test_live_run_without_device_is_not_compared_with_replay_of_a_gpu(self, tmp_path: Path) -> None:
        """Only a replay without a device belongs to it; the replay of an H200 has no live run here."""
        live, other = exact(build.make_point(TP), 100, environment=None), exact(build.make_point(DCP), 100)
        on_h200 = exact(replayed(build.make_point(TP)), 150)
        assert findings.compare_replay_with_live(loaded(tmp_path / "one", live, other, on_h200).served).empty
        read = loaded(tmp_path / "two", live, exact(replayed(build.make_point(TP)), 102, environment=None))
        (row,) = findings.compare_replay_with_live(read.served).to_dict("records")
        assert row["output_tok_s_error"] == pytest.approx(0.02)

    def test_runs_with_different_limits_are_not_compared(self, tmp_path: Path) -> None:
        """A replay of all requests differs from a live run that ended at 60 s or had less KV memory."""
        live, replay = exact(build.make_point(TP), 100), exact(replayed(build.make_point(TP)), 102)
        for settings in ({"limit_seconds": 60.0}, {"kv_memory_bytes": 8 << 30}):
            other = msgspec.structs.replace(live, measured_with=settings)
            assert findings.compare_replay_with_live(loaded(tmp_path / str(settings), other, replay).served).empty

    def test_repeats_of_a_live_point_are_merged_and_compared(self, tmp_path: Path) -> None:
        """100 and 110 tok/s: the median is 105, and they differ by 10 / 105 = 9.5 %."""
        read = loaded(tmp_path, *(exact(build.make_point(TP, repeat=i), rate) for i, rate in enumerate((100, 110))))
        (row,) = read.served.to_dict("records")
        assert (row["output_tok_s"], row["output_tok_s_low"], row["output_tok_s_high"]) == (105, 100, 110)
        assert answer.collect_repeat_differences(read) == [pytest.approx(10 / 105)]
        assert len(tables.build_repeats_table(findings.select_served_repeats(read.served), served=True).rows) == 1

    def test_repeated_replays_are_not_compared(self, tmp_path: Path) -> None:
        """The same input gives the same output."""
        read = loaded(tmp_path, *(exact(replayed(build.make_point(TP, repeat=i)), 100) for i in range(2)))
        assert answer.collect_repeat_differences(read) == []

    def test_repeats_with_different_objectives_have_no_goodput(self, tmp_path: Path) -> None:
        read = loaded(tmp_path, *(exact(build.make_point(TP, repeat=i), 9, slo_ms={"itl": 10.0 + i}) for i in range(2)))
        assert read.served["request_goodput"].isna().all()

    def test_point_stopped_early_is_marked_and_explained(self, tmp_path: Path) -> None:
        """After a stop at one second, the requests that waited longest are missing."""
        read = loaded(tmp_path, build.make_served_record(build.make_point(TP, 32), until_s=1.0))
        assert "cut_off" in read.served["warnings"][0]
        assert "latencies look better than they were" in " ".join(explain.explain_absent_served(read.served))


class TestLabels:
    @pytest.mark.parametrize(
        ("spec", "text", "middle"),
        [
            ("4000", "4,000", 4000),
            ("uniform:1000-7000", "1,000–7,000", 4000),
            ("lognormal:4000:0.5", "≈4,000 (σ 0.5)", 4000),
            ("trace", "trace", None),
            ("uniform:x", "uniform:x", None),
        ],
    )
    def test_lengths_are_formatted_and_have_a_typical_value(self, spec: str, text: str, middle: float | None) -> None:
        assert load_labels.format_lengths(spec) == text
        assert load_labels.get_typical_length(spec) == middle

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({}, "closed 48"),
            ({"arrival": "gamma", "request_rate": 2.5, "paced": True}, "2.5 req/s Poisson"),
            ({"arrival": "gamma", "request_rate": 2.5}, "2.5 req/s Poisson, as drawn"),
            ({"arrival": "gamma", "request_rate": 2.5, "paced": None}, "2.5 req/s Poisson"),
            ({"arrival": "gamma", "request_rate": 2.0, "burstiness": 0.5, "paced": True}, "2 req/s gamma 0.5"),
            ({"arrival": "trace", "trace": "chat.jsonl"}, "trace times"),
        ],
    )
    def test_arrivals_are_formatted(self, changes: dict[str, Any], text: str) -> None:
        assert load_labels.format_arrival(build.make_point(Layout(4), 48, changes)) == text

    def test_shape_names_shared_prefixes(self) -> None:
        assert (
            load_labels.format_shape(build.make_load(prefix_share=0.5, prefix_groups=4))
            == "400 in · 40 out · 50 % shared by 4 groups"
        )

    def test_sessions_are_named_and_single_requests_are_not(self, tmp_path: Path) -> None:
        """Sessions have 4 turns with 5 s between them; single requests have neither `1 turns` nor `think 0 s`."""
        changes: list[dict[str, Any]] = [{}, {"turns": "4", "think_time": 5.0, "turn_tokens": "200"}]
        found = loaded(
            tmp_path, *(build.make_served_record(build.make_point(TP, changed=load)) for load in changes)
        ).served
        alone, session = sorted(found["rest"], key=len)
        assert session == f"{alone} · sessions of 4 turns, 200 new tokens each later turn, 5 s between turns"
        assert "turn" not in alone

    def test_labels_contain_what_differs_between_loads(self, tmp_path: Path) -> None:
        """Chunks and settings of the prefix cache differ; shared settings are left out."""
        points = [
            build.make_point(TP, 8, {"chunk": c, "prefix_cache": on}) for c in (1024, 2048) for on in (True, False)
        ]
        read = loaded(tmp_path, *(exact(each, 100) for each in points))
        assert "closed 8 · 400 in · 40 out · chunk 1,024 · prefix cache off" in set(read.served["load"])

    @pytest.mark.parametrize(("many", "labels"), [(96, {""}), (64, {" · 16 requests", " · 64 requests"})])
    def test_closed_loops_with_as_many_requests_per_client_are_one_curve(
        self, tmp_path: Path, many: int, labels: set[str]
    ) -> None:
        """8 clients send 16 requests, 2 each; 48 clients send 96, also 2 each, or 64."""
        points = [build.make_point(TP, n, {"requests": requests}) for n, requests in ((8, 16), (48, many))]
        read = loaded(tmp_path, *(exact(each, 100) for each in points))
        assert set(read.served["rest"]) == {f"400 in · 40 out{label}" for label in labels}

    def test_labels_of_open_loops_contain_differing_concurrency(self, tmp_path: Path) -> None:
        """The same rate runs with 4 and with 8 requests at once; the label of a closed loop is unchanged."""
        rate = {"arrival": "gamma", "request_rate": 2.0, "paced": True}
        points = [build.make_point(TP, 4, rate), build.make_point(TP, 8, rate), build.make_point(TP, 8)]
        found = loaded(tmp_path, *(exact(each, 100) for each in points)).served["load"]
        assert sorted(found) == [
            "2 req/s Poisson · 400 in · 40 out · 4 at once",
            "2 req/s Poisson · 400 in · 40 out · 8 at once",
            "closed 8 · 400 in · 40 out",
        ]

    def test_labels_contain_differing_kv_memory(self, tmp_path: Path) -> None:
        """Two runs of one grid have different --kv-memory."""
        runs = [
            record_builder.write_records(
                tmp_path / str(gib),
                [msgspec.structs.replace(exact(build.make_point(TP), 9), measured_with={"kv_memory_bytes": gib << 30})],
            )
            for gib in (8, 16)
        ]
        assert [text.rpartition(" · ")[2] for text in dataframes.load_frames(runs).served["load"]] == [
            "8 GiB of KV",
            "16 GiB of KV",
        ]
