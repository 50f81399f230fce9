"""Report of disaggregated prefill and decode: output per GPU, compared with as many instances that do both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.errors import RecordsError
from dcpbench.records.record import InstanceMetrics, Latencies
from dcpbench.reports import answer, dataframes, findings, instance_ratios, overview, style, write_report
from tests.unit import record_builder
from tests.unit import serve_record_builder as build
from tests.unit.unsaved_figures import leave_figures_unsaved

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

RATE = {"transfer_gb_s": 50.0}


def served(
    disaggregate: str, per_gpu: float, clients: int = 8, *, itl: float = 20, busy: Any = None, **fields: Any
) -> Record:
    """Return a replay on instances of tp4 with this output per GPU, ITL p99 and busy shares of both sides."""
    point = build.make_point(build.TP, clients, {"mode": "replay"}, disaggregate=disaggregate, **fields)
    split = point.instances.disaggregated
    made = build.make_served_record(point)
    assert made.serve
    found = InstanceMetrics(
        busy_share=busy or ({"prefill": 0.4, "decode": 0.5} if split else {"both": 0.9}),
        link_busy_share=0.1 if split else None,
        transfer_ms=Latencies(p50=3.0, samples=96) if split else None,
    )
    metrics = msgspec.structs.replace(
        made.serve,
        output_tok_s=per_gpu * point.gpus,
        output_tok_s_per_gpu=per_gpu,
        itl_ms=Latencies(p50=itl, p99=itl, samples=4000),
        instances=found if disaggregate else None,
        slo_ms={},
        preemptions=0,
    )
    return msgspec.structs.replace(made, serve=metrics)


def loaded(tmp_path: Path, *records: Record, **options: Any) -> dataframes.Frames:
    """Return frames of one run with these records."""
    return dataframes.load_frames([record_builder.write_records(tmp_path / "run", records)], **options)


class TestComparisons:
    def test_ratio_is_compared_with_as_many_aggregated_instances(self, tmp_path: Path) -> None:
        """30 tok/s per GPU with 12 GPUs over 20, and with 8 GPUs over 60; other numbers of instances are not compared."""
        read = loaded(
            tmp_path,
            served("1:2", 30, **RATE),
            served("1:1", 30, **RATE),
            served("3", 20),
            served("2", 60),
            served("", 90),
        )
        rows = {row["label"]: row for row in instance_ratios.compare_ratios(read.served).to_dict("records")}
        assert {name: rows[name]["ratio"] for name in ("tp4 1P2D", "tp4 1P1D")} == {"tp4 1P2D": 1.5, "tp4 1P1D": 0.5}
        assert rows["tp4 1P2D"]["over_label"] == "tp4 ×3"

    def test_loads_without_disaggregation_are_left_out(self, tmp_path: Path) -> None:
        read = loaded(tmp_path, served("1:1", 30, **RATE), served("2", 60), served("2", 60, 32))
        assert set(instance_ratios.compare_ratios(read.served)["concurrency"]) == {8}
        assert instance_ratios.compare_ratios(loaded(tmp_path / "aggregated", served("2", 60)).served).empty

    def test_layouts_are_chosen_among_those_with_as_many_gpus(self, tmp_path: Path) -> None:
        """1P1D and two aggregated instances have 8 GPUs; the single aggregated instance has four."""
        read = loaded(tmp_path, served("1:1", 30, **RATE), served("2", 20), served("", 90))
        rows = read.findings.against_others
        assert dict(zip(rows["who"], rows["ratio"], strict=True)) == {"tp4 1P1D": 1.5, "tp4 ×2": pytest.approx(2 / 3)}
        assert overview.format_answer(read).startswith("On 8 × H200")
        assert "take tp4 1P1D" in overview.format_answer(read)

    def test_dcp_is_compared_on_the_same_instances(self, tmp_path: Path) -> None:
        plain, other = served("1:1", 30, **RATE), served("1:2", 30, **RATE)
        with_dcp = msgspec.structs.replace(plain.point, dcp=4, exchange="ag_rs")
        read = loaded(tmp_path, plain, other, msgspec.structs.replace(plain, point=with_dcp))
        (row,) = findings.compare_dcp_with_baseline(read.served).to_dict("records")
        assert (row["label"], row["baseline"]) == ("tp4·dcp4 1P1D", "tp4 1P1D")


class TestSentences:
    def test_sentence_names_the_best_ratio_for_each_load(self, tmp_path: Path) -> None:
        """The sentence names the side that limits the ratio, which is busy for 20 points more of the run."""
        read = loaded(
            tmp_path,
            served("1:1", 30, busy={"prefill": 0.2, "decode": 0.95}, **RATE),
            served("1:2", 28, **RATE),
            served("2", 25, itl=80),
            served("1:1", 30, 32, **RATE),
            served("1:2", 40, 32, busy={"prefill": 0.97, "decode": 0.5}, **RATE),
        )
        (sentence,) = instance_ratios.describe_best_ratios(read.served)
        assert sentence == (
            "Prefill apart from decode, Kimi-K2, most output for each GPU: at closed 8 · 400 in · 40 out tp4 1P1D, 30.0 "
            "tok/s (prefill 20 % busy, decode 95 %: decode bounds it), 1.20× tp4 ×2 with ITL p99 20.0 instead of 80.0 ms; "
            "at closed 32 · 400 in · 40 out tp4 1P2D, 40.0 tok/s (prefill 97 % busy, decode 50 %: prefill bounds it)."
        )
        assert any(sentence in text for part in answer.split_sentences(read) for text in part)

    def test_best_ratio_is_named_if_aggregated_instances_are_ahead(self, tmp_path: Path) -> None:
        read = loaded(tmp_path, served("1:1", 30, **RATE), served("2", 60))
        (sentence,) = instance_ratios.describe_best_ratios(read.served)
        assert (
            "tp4 ×2, 60.0 tok/s; of ratios tp4 1P1D, 30.0 (prefill 40 % busy, decode 50 %), 0.50× tp4 ×2." in sentence
        )

    def test_level_ratios_are_named_together(self, tmp_path: Path) -> None:
        """Ratios within 2 % are level, as repeats may differ by as much."""
        read = loaded(tmp_path, served("1:1", 30, **RATE), served("1:2", 29.9, **RATE), served("2:1", 20, **RATE))
        assert "tp4 1P1D or tp4 1P2D, 30.0 tok/s" in instance_ratios.describe_best_ratios(read.served)[0]

    def test_only_ratios_within_the_slo_are_taken(self, tmp_path: Path) -> None:
        records = [served("1:1", 30, itl=20, **RATE), served("2", 60, itl=80)]
        assert (
            "tp4 1P1D, 30.0 tok/s"
            in instance_ratios.describe_best_ratios(loaded(tmp_path / "a", *records, slo={"itl": 50}).served)[0]
        )
        tight = instance_ratios.describe_best_ratios(loaded(tmp_path / "b", *records, slo={"itl": 10}).served)[0]
        assert "none is within the SLO, nearest tp4 1P1D" in tight

    def test_no_sentence_without_disaggregation(self, tmp_path: Path) -> None:
        read = loaded(tmp_path, served("2", 60), served("", 60))
        assert instance_ratios.describe_best_ratios(read.served) == instance_ratios.build_grids(read) == []


class TestTables:
    def test_grid_shows_each_ratio_under_each_load(self, tmp_path: Path) -> None:
        """Aggregated instances come first; a value that misses the SLO is in brackets, and the best has a mark."""
        read = loaded(
            tmp_path,
            served("1:2", 40, **RATE),
            served("3", 60, itl=80),
            served("1:2", 50, 32, **RATE),
            slo={"itl": 50},
        )
        (grid,) = instance_ratios.build_grids(read)
        assert grid.columns == ["load", "tp4 ×3", "tp4 1P2D"]
        assert grid.rows == [
            ["closed 8 · 400 in · 40 out", "(60.0)", "▲ 40.0"],
            ["closed 32 · 400 in · 40 out", "—", "▲ 50.0"],
        ]

    def test_table_has_busy_shares_of_both_sides_and_links(self, tmp_path: Path) -> None:
        table = instance_ratios.build_table(loaded(tmp_path, served("1:1", 30, **RATE), served("2", 60)), "replay")
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        cells = [
            [row[name] for name in ("layout", "GPUs", "prefill busy", "decode busy", "links busy")] for row in rows
        ]
        assert cells == [["tp4 ×2", "8", "90 %", "90 %", "—"], ["tp4 1P1D", "8", "40 %", "50 %", "10 %"]]

    def test_links_of_different_rates_are_different_lines(self, tmp_path: Path) -> None:
        read = loaded(tmp_path, *(served("1:1", 30, transfer_gb_s=rate) for rate in (25.0, 50.0)))
        assert set(read.served["label"]) == {"tp4 1P1D (25 GB/s links)", "tp4 1P1D (50 GB/s links)"}

    def test_report_has_a_section_of_disaggregation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        leave_figures_unsaved(monkeypatch)
        records = [served("1:1", 30, **RATE), served("2", 60), served("1:2", 30, 32, **RATE)]
        write_report([record_builder.write_records(tmp_path / "run", records)], tmp_path / "report")
        text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
        assert "\n## Prefill and decode on separate GPUs\n" in text

    def test_lines_of_one_layout_look_different(self, tmp_path: Path) -> None:
        read = loaded(
            tmp_path,
            *(
                served(disaggregate, 30, **(RATE if ":" in disaggregate else {}))
                for disaggregate in ("", "2", "1:1", "1:2")
            ),
        )
        look = style.Style.from_points(read.everything)
        dashes = [look.find_places(layout, "", look.runs[0]) for layout in set(read.served["layout"])]
        assert len(set(dashes)) == 4


class TestKvCapacity:
    def test_kv_pressure_counts_all_decode_instances(self, tmp_path: Path) -> None:
        """1,000 pages of 16 hold 36 requests of 440 tokens: 48 do not fit in one decode instance, and they do in two."""
        read = loaded(tmp_path, served("1:1", 30, 48, **RATE), served("1:2", 30, 48, **RATE))
        assert list(findings.find_kv_pressure(read.served)["layout"]) == ["tp4 1P1D"]

    def test_kv_cache_of_a_layout_is_listed_once(self, tmp_path: Path) -> None:
        """All instances of a layout have the same."""
        read = loaded(tmp_path, served("1:1", 30, **RATE), served("1:2", 30, **RATE))
        assert list(findings.compute_kv_by_layout(read.everything)["layout"]) == ["tp4"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"disaggregate": "1:1"}, "point.transfer_gb_s is 0"),
        ({"disaggregate": "1:0", **RATE}, "point.disaggregate is '1:0'"),
        ({"disaggregate": "many"}, "point.disaggregate is 'many'"),
    ],
    ids=["no-rate", "no-decode", "no-number"],
)
def test_impossible_instances_of_a_record_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = served("1:1", 30, **RATE)
    bad = msgspec.structs.replace(good, point=msgspec.structs.replace(good.point, **({"transfer_gb_s": 0.0} | fields)))
    with pytest.raises(RecordsError, match=message):
        loaded(tmp_path, bad)
