"""What a report says of decodes that chunks of prompts stall: held against the ITL objective, with all chunks of a load together."""

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
    **of: Any,
) -> Record:
    """A replay with ITL p50 and p99, of 1,000 steps of which the share `chunks` has chunks of prompts."""
    made = build.served(build.point(layout, 40, {"mode": "replay", "chunk": chunk}, **of))
    assert made.serve
    metrics = msgspec.structs.replace(
        made.serve,
        output_tok_s=tok_s,
        itl_ms=Latencies(p50=itl[0], p90=itl[0], p95=itl[0], p99=itl[1], samples=4000),
        steps=1000,
        decode_steps=round(1000 * (1 - chunks)),
        preemptions=preemptions,
        slo_ms={},
    )
    return msgspec.structs.replace(made, serve=metrics)


def loaded(tmp_path: Path, *records: Record, slo: dict[str, float] | None = None) -> dataframes.Frames:
    """One run, held against SLO."""
    return dataframes.load_frames([record_builder.write(tmp_path / "run", records)], slo=SLO if slo is None else slo)


def said(tmp_path: Path, *records: Record, **how: Any) -> str:
    """The sentence."""
    return stalls.describe_stalls(findings.select_rivals(loaded(tmp_path, *records, **how)))


class TestWords:
    def test_no_layout_keeps_the_objective_since_chunks_stall_decodes(self, tmp_path: Path) -> None:
        """The nearest is named, with the chunk; chunks make no other load."""
        found = said(
            tmp_path,
            served((70, 480), chunk=8192),
            served((70, 230), chunk=2048, layout=build.DCP),
        )
        assert found == (
            "ITL ≤ 150 ms: at closed 40 · 400 in · 40 out no layout keeps it with chunks of 2,048 or 8,192, since chunks of "
            "prompts stall decodes (10 % of steps have some, the median gap is 70.0 ms); nearest is tp4·dcp4 with 2,048 (p99 "
            "230 ms, 100 tok/s)."
        )

    def test_with_one_chunk_none_is_named(self, tmp_path: Path) -> None:
        assert "no layout keeps it, since chunks of prompts" in said(tmp_path, served((70, 480)))

    def test_a_smaller_chunk_keeps_it_for_less_output(self, tmp_path: Path) -> None:
        found = said(tmp_path, served((70, 480), 120, chunk=8192), served((80, 130), 100, chunk=1024))
        assert (
            "tp4 with 1,024 keeps it (p99 130 ms, 100 tok/s), and tp4 with 8,192 does not (p99 480 ms, 120 tok/s), since chunks"
        ) in found

    def test_layouts_that_keep_it_with_no_chunk_are_named(self, tmp_path: Path) -> None:
        records = [served((70, 480), 120, chunk=8192), served((80, 130), 100, chunk=1024)]
        found = said(tmp_path, *records, served((80, 180), 90, chunk=1024, layout=build.DCP))
        assert found.endswith("; tp4·dcp4 with none.")

    def test_where_the_fastest_keeps_it_nothing_is_said(self, tmp_path: Path) -> None:
        """Chunks decide nothing there."""
        assert said(tmp_path / "all", served((70, 90), 120, chunk=8192), served((80, 85), chunk=1024)) == ""
        assert said(tmp_path / "one", served((70, 90), 120, chunk=8192), served((80, 185), chunk=1024)) == ""

    @pytest.mark.parametrize(
        "other",
        [
            {"chunks": 0.005},
            {"itl": (160, 480)},
            {"preemptions": 3},
            {"disaggregate": "1:1", "transfer_gb_s": 50.0},
        ],
        ids=["few-chunks", "median-misses", "preempted", "apart"],
    )
    def test_chunks_are_blamed_only_where_it_is_they(self, other: dict[str, Any], tmp_path: Path) -> None:
        """Chunks are not blamed if fewer steps than one in 100 have any, if gaps without any are too long, or if something else makes them wait."""
        found = said(tmp_path, served(**({"itl": (70, 480)} | other)))
        assert "no layout keeps it; nearest is" in found

    def test_where_most_steps_have_chunks_the_median_gap_is_theirs(self, tmp_path: Path) -> None:
        assert "stall decodes (60 % of steps" in said(tmp_path, served((170, 190), chunks=0.6))

    def test_layouts_on_other_numbers_of_gpus_are_another_choice(self, tmp_path: Path) -> None:
        found = said(tmp_path, served((70, 480), 120), served((70, 90), disaggregate="1:2", transfer_gb_s=50.0))
        assert "400 in · 40 out on 4 GPUs no layout keeps it" in found
        assert "12 GPUs" not in found

    def test_without_an_objective_for_gaps_nothing_is_said(self, tmp_path: Path) -> None:
        assert said(tmp_path, served((70, 480)), slo={"ttft": 1.0}) == ""

    def test_the_answer_has_it(self, tmp_path: Path) -> None:
        read = loaded(tmp_path, served((70, 480)))
        assert any("kimi-k2, replay: ITL ≤ 150 ms: at closed 40" in text for text in answer.format_top_sentences(read))


class TestTable:
    def test_a_column_for_each_chunk(self, tmp_path: Path) -> None:
        records = [served((70, 480), 120, chunk=8192), served((80, 130), 100, chunk=1024)]
        found = stalls.build_table(loaded(tmp_path, *records, served((80, 180), 90, chunk=1024, layout=build.DCP)))
        assert found.columns == ["model", "mode", "load", "layout", "1,024", "8,192"]
        assert [row[2:] for row in found.rows] == [
            ["closed 40 · 400 in · 40 out", "tp4", "130 (100)", "480 (120)"],
            ["closed 40 · 400 in · 40 out", "tp4·dcp4", "180 (90.0)", "—"],
        ]

    def test_one_chunk_needs_none(self, tmp_path: Path) -> None:
        assert not stalls.build_table(loaded(tmp_path, served((70, 480)))).rows
