"""Report of decode steps that prompt chunks delay: ITL objective and chunk sizes of a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.records.record import Latencies
from dcpbench.reports import answer, dataframes, findings, stalls
from tests.unit import record_builder
from tests.unit import serve_record_builder as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.layout import Layout
    from dcpbench.records.record import Record

SLO = {"itl": 150.0}


def served(
    itl: tuple[float, float],
    tok_s: float = 100,
    *,
    chunk: int = 2048,
    layout: Layout = build.TP,
    chunks: float = 0.1,
    preemptions: int = 0,
    **fields: Any,
) -> Record:
    """Return a replay with this ITL p50 and p99, of 1,000 steps of which the share `chunks` has chunks of prompts."""
    record = build.make_served_record(build.make_point(layout, 40, {"mode": "replay", "chunk": chunk}, **fields))
    assert record.serve
    metrics = msgspec.structs.replace(
        record.serve,
        output_tok_s=tok_s,
        itl_ms=Latencies(p50=itl[0], p90=itl[0], p95=itl[0], p99=itl[1], samples=4000),
        steps=1000,
        decode_steps=round(1000 * (1 - chunks)),
        preemptions=preemptions,
        slo_ms={},
    )
    return msgspec.structs.replace(record, serve=metrics)


def loaded(tmp_path: Path, *records: Record, slo: dict[str, float] | None = None) -> dataframes.Frames:
    """Return frames of one run, judged by the SLO."""
    return dataframes.load_frames(
        [record_builder.write_records(tmp_path / "run", records)], slo=SLO if slo is None else slo
    )


def describe(tmp_path: Path, *records: Record, **options: Any) -> str:
    """Return the sentence about stalls."""
    return stalls.describe_stalls(findings.select_timed(loaded(tmp_path, *records, **options).everything))


class TestSentence:
    def test_sentence_names_the_nearest_layout_if_none_meets_the_objective(self, tmp_path: Path) -> None:
        """The sentence names its chunk; points with different chunks have the same load."""
        found = describe(
            tmp_path,
            served((70, 480), chunk=8192),
            served((70, 230), chunk=2048, layout=build.DCP),
        )
        assert found == (
            "ITL ≤ 150 ms: at closed 40 · 400 in · 40 out no layout keeps it with chunks of 2,048 or 8,192, since chunks of "
            "prompts stall decodes (10 % of steps have some, the median gap is 70.0 ms); nearest is tp4·dcp4 with 2,048 (p99 "
            "230 ms, 100 tok/s)."
        )

    def test_single_chunk_size_is_not_named(self, tmp_path: Path) -> None:
        assert "no layout keeps it, since chunks of prompts" in describe(tmp_path, served((70, 480)))

    def test_smaller_chunk_that_meets_the_objective_is_named(self, tmp_path: Path) -> None:
        found = describe(tmp_path, served((70, 480), 120, chunk=8192), served((80, 130), 100, chunk=1024))
        assert (
            "tp4 with 1,024 keeps it (p99 130 ms, 100 tok/s), and tp4 with 8,192 does not (p99 480 ms, 120 tok/s), since chunks"
        ) in found

    def test_layouts_that_miss_the_objective_with_any_chunk_are_named(self, tmp_path: Path) -> None:
        records = [served((70, 480), 120, chunk=8192), served((80, 130), 100, chunk=1024)]
        found = describe(tmp_path, *records, served((80, 180), 90, chunk=1024, layout=build.DCP))
        assert found.endswith("; tp4·dcp4 with none.")

    def test_no_sentence_if_the_fastest_layout_meets_the_objective(self, tmp_path: Path) -> None:
        """Chunks make no difference there."""
        assert describe(tmp_path / "all", served((70, 90), 120, chunk=8192), served((80, 85), chunk=1024)) == ""
        assert describe(tmp_path / "one", served((70, 90), 120, chunk=8192), served((80, 185), chunk=1024)) == ""

    @pytest.mark.parametrize(
        "other",
        [
            {"chunks": 0.005},
            {"itl": (160, 480)},
            {"preemptions": 3},
            {"disaggregate": "1:1", "transfer_gb_s": 50.0},
        ],
        ids=["few-chunks", "median-misses", "preempted", "disaggregated"],
    )
    def test_chunks_are_named_as_cause_only_if_they_are_the_cause(self, other: dict[str, Any], tmp_path: Path) -> None:
        """Chunks are not the cause if fewer than one in 100 steps has any, if gaps without any are too long, or if
        something else delays requests.
        """
        found = describe(tmp_path, served(**({"itl": (70, 480)} | other)))
        assert "no layout keeps it; nearest is" in found

    def test_chunks_in_most_steps_are_the_cause_of_the_median_gap(self, tmp_path: Path) -> None:
        assert "stall decodes (60 % of steps" in describe(tmp_path, served((170, 190), chunks=0.6))

    def test_layouts_on_other_numbers_of_gpus_are_separate(self, tmp_path: Path) -> None:
        found = describe(tmp_path, served((70, 480), 120), served((70, 90), disaggregate="1:2", transfer_gb_s=50.0))
        assert "400 in · 40 out on 4 GPUs no layout keeps it" in found
        assert "12 GPUs" not in found

    def test_no_sentence_without_an_itl_objective(self, tmp_path: Path) -> None:
        assert describe(tmp_path, served((70, 480)), slo={"ttft": 1.0}) == ""

    def test_opening_has_the_sentence(self, tmp_path: Path) -> None:
        read = loaded(tmp_path, served((70, 480)))
        assert any("kimi-k2, replay: ITL ≤ 150 ms: at closed 40" in text for text in answer.format_top_sentences(read))


class TestTable:
    def test_table_has_a_column_for_each_chunk(self, tmp_path: Path) -> None:
        records = [served((70, 480), 120, chunk=8192), served((80, 130), 100, chunk=1024)]
        found = stalls.build_table(loaded(tmp_path, *records, served((80, 180), 90, chunk=1024, layout=build.DCP)))
        assert found.columns == ["model", "mode", "load", "layout", "1,024", "8,192"]
        assert [row[2:] for row in found.rows] == [
            ["closed 40 · 400 in · 40 out", "tp4", "130 (100)", "480 (120)"],
            ["closed 40 · 400 in · 40 out", "tp4·dcp4", "180 (90.0)", "—"],
        ]

    def test_no_table_with_a_single_chunk(self, tmp_path: Path) -> None:
        assert not stalls.build_table(loaded(tmp_path, served((70, 480)))).rows
