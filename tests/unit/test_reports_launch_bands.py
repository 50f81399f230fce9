"""Leads are clear only beyond the difference between launches of the same engine, which a single launch does not show."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.reports import answer, answer_tables, dataframes, findings, launch_bands, overview
from dcpbench.reports.figures import draw_overview
from dcpbench.reports.page import points as page
from dcpbench.reports.style import Style
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serving

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record
    from dcpbench.reports.dataframes import Frames

ENGINE = "engine vllm 0.33"
CLAIMS = re.compile(r"clearly|\bbest\b|\blevel\b", re.IGNORECASE)
TP, DCP = Layout(2), Layout(2, 1, 2)


def make_point(layout: Layout, rate: float, launch: int = 1, origin: str = ENGINE, concurrency: int = 8) -> Record:
    """Return a served point with an output of `rate` tok/s."""
    record = serving.make_served_record(serving.make_point(layout, concurrency, emulate=""))
    faster = rate / record.serve.output_tok_s
    record = serving.make_served_record(serving.make_point(layout, concurrency, emulate=""), faster=faster)
    measured_by = {"origin": origin} if origin else {}
    return msgspec.structs.replace(record, started_at=f"launch {launch} of {layout} {concurrency}", **measured_by)


def read(tmp_path: Path, *launches: list[Record], as_repeats: bool = False) -> Frames:
    """Return the frames of these runs."""
    folders = [build.write_records(tmp_path / f"run-{n}", records) for n, records in enumerate(launches)]
    return dataframes.load_frames(folders, as_repeats=as_repeats, slo={"ttft": 1e6})


def list_sentences(report: Frames) -> list[str]:
    """Return all sentences about which layout is ahead, without those about memory and repeats."""
    texts = [
        overview.format_answer(report),
        *overview.format_bullets(report)[:-1],
        *answer.format_top_sentences(report),
    ]
    return [text for text in texts if not re.match(r"Per GiB|Repeats|Every point|tp\\d|No SLO", text)]


class TestBands:
    def test_only_dcpbench_has_a_default_launch_band(self, tmp_path: Path) -> None:
        report = read(tmp_path, [make_point(TP, 430), make_point(DCP, 450, origin="")])
        bands = dict(zip(report.served["origin"], report.served[launch_bands.COLUMN], strict=True))
        assert bands["dcpbench"] == 0.02
        assert bands[ENGINE] != bands[ENGINE], "the band is NaN"

    @pytest.mark.parametrize("as_repeats", [False, True])
    def test_two_launches_of_a_point_give_its_engine_a_band(self, tmp_path: Path, as_repeats: bool) -> None:
        """430 and 456 tok/s of one point, hours apart, are 6 %, for all points of that engine."""
        launches = [make_point(TP, 430), make_point(DCP, 450)], [make_point(TP, 456, launch=2)]
        report = read(tmp_path, *launches, as_repeats=as_repeats)
        assert report.served[launch_bands.COLUMN].tolist() == pytest.approx(
            [456 / 430 - 1] * len(report.served), rel=1e-3
        )

    def test_band_of_a_single_pair_is_at_least_that_of_dcpbench(self, tmp_path: Path) -> None:
        """430 and 430.4 tok/s are 0.1 %: the next launch may still differ by 2 %."""
        report = read(tmp_path, [make_point(TP, 430), make_point(DCP, 436)], [make_point(TP, 430.4, launch=2)])
        assert set(report.served[launch_bands.COLUMN]) == {0.02}
        assert report.findings.best["clear"].tolist() == [False]

    def test_copies_and_repeats_within_a_run_are_no_launches(self, tmp_path: Path) -> None:
        one = make_point(TP, 430)
        again = msgspec.structs.replace(
            make_point(TP, 456, launch=2), point=msgspec.structs.replace(one.point, repeat=1)
        )
        for report in (read(tmp_path / "copy", [one], [one]), read(tmp_path / "repeat", [one, again])):
            assert launch_bands.has_single_launches(report.served)


class TestSentences:
    def test_single_launches_are_never_called_clear_best_or_level(self, tmp_path: Path) -> None:
        """vLLM has 4 % more output with DCP at two loads, and 1 % less at a third, each measured once."""
        rates = {4: (300, 297), 8: (430, 447), 16: (700, 728)}
        records = [
            make_point(layout, rate, concurrency=n)
            for n, pair in rates.items()
            for layout, rate in zip((TP, DCP), pair, strict=True)
        ]
        report = read(tmp_path, records)
        texts = list_sentences(report)
        assert [text for text in texts if CLAIMS.search(text)] == []
        assert ", in one launch each. " in texts[0]
        about = [text for text in texts if "DCP" in text or "Fastest" in text]
        assert len(about) > 2
        assert all("one launch each" in text for text in about), about
        tables = [*answer_tables.build_grids(report), answer_tables.build_best_table(report.findings.best, "live")]
        assert [t.title for t in tables if CLAIMS.search(t.title)] == []
        assert [row for t in tables for row in t.rows if CLAIMS.search(str(row))] == []
        assert page.build_page_data(report)["single"] is True
        figure = draw_overview(
            report.findings.against_others,
            Style.from_points(report.everything),
            "title",
            overview.select_rejected_for_memory(report),
        )
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert "within 2 %, in one launch each" in labels

    def test_same_lead_of_dcpbench_is_clear(self, tmp_path: Path) -> None:
        report = read(tmp_path, [make_point(layout, rate, origin="") for layout, rate in ((TP, 430), (DCP, 447))])
        (best,) = report.findings.best.to_dict("records")
        assert (best["label"], best["clear"]) == ("tp2·dcp2", True)
        assert "clearly ahead" in overview.format_bullets(report)[0]
        assert not any("one launch" in text for text in list_sentences(report))

    @pytest.mark.parametrize(("second", "clear"), [(456, False), (433, True)])
    def test_difference_of_launches_decides_if_a_lead_is_clear(
        self, tmp_path: Path, second: float, clear: bool
    ) -> None:
        """A lead of 6 % is clear if launches differ by 0.7 %, but not if they differ by 6 %."""
        launches = (
            [make_point(TP, 430), make_point(DCP, 456)],
            [make_point(TP, second, launch=2), make_point(DCP, 456, launch=2)],
        )
        report = read(tmp_path, *launches, as_repeats=True)
        (best,) = report.findings.best.to_dict("records")
        assert best["clear"] is clear
        (against,) = findings.compare_dcp_with_best(report.findings.points).to_dict("records")
        assert (against["verdict"] == "higher") is clear
        assert not any("one launch" in text for text in list_sentences(report))
