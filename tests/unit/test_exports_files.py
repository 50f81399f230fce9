"""exports/: tables that hold every point, numbers that are none, and files that are whole or not there."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from typing import TYPE_CHECKING

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcpbench import exports
from dcpbench.errors import OutputError, UsageError
from dcpbench.exports import FORMATS, bmf, csv_table, export_runs, measured_points, parquet_table
from dcpbench.exports.bench_files import Requests
from dcpbench.exports.measured_points import MeasuredPoint
from dcpbench.points.layout import Layout
from dcpbench.records.metrics import list_exported_metrics
from dcpbench.reports import load_labels
from tests.unit import engine_files_builder as files
from tests.unit import record_builder
from tests.unit import serve_record_builder as build
from tests.unit.test_exports_prometheus import text as prometheus_text

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

NOWHERE = files.NOWHERE
TP, DCP = build.TP, build.DCP


@pytest.mark.parametrize("name", ["vllm", "sglang", "inferencex"])
def test_formats_of_one_server_leave_several_instances_out(name: str) -> None:
    """Whoever read their degrees would take the rate of all for that of one."""
    m = files.served()
    several = msgspec.structs.replace(m.record.point, disaggregate="1:2", transfer_gb_s=50.0)
    render = importlib.import_module(f"dcpbench.exports.{name}").render
    rendered = render([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, point=several))])
    assert not rendered.files
    assert list(rendered.left_out) == ["ran on several instances, of which a file has no number"]


@pytest.mark.parametrize("wall_s", [None, 0.0])
@pytest.mark.parametrize("name", ["vllm", "sglang", "inferencex"])
def test_formats_of_rates_leave_out_what_took_no_time(name: str, wall_s: float | None) -> None:
    m = files.served()
    serve = msgspec.structs.replace(m.record.serve, wall_s=wall_s)
    render = importlib.import_module(f"dcpbench.exports.{name}").render
    rendered = render([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, serve=serve))])
    assert not rendered.files
    assert list(rendered.left_out) == ["took no time, or do not say how long"]


class TestLayersHeld:
    """A step that cycles through some of the layers does the work of all, and is no step of a server."""

    def holding(self, m: MeasuredPoint, held: int) -> MeasuredPoint:
        conditions = msgspec.structs.replace(m.record.conditions, layers=61, layers_held=held)
        return MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, conditions=conditions))

    @pytest.mark.parametrize("to", ["vllm", "sglang", "gha", "hud"])
    def test_formats_with_room_for_words_say_it_in_words(self, to: str) -> None:
        render = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render
        for held, said in ((14, True), (61, False)):
            for data in render([self.holding(files.served(), held)]).files.values():
                assert ("14 of 61 layers held and reused" in data.decode()) == said
                assert ("reused" in data.decode()) == said

    def test_tables_have_both_numbers(self) -> None:
        (row,) = csv_table.build_rows([self.holding(files.decoded(), 14)])
        assert (row["layers"], row["layers_held"]) == (61, 14)

    def test_formats_of_numbers_have_them_beside_the_others(self) -> None:
        m = self.holding(files.decoded(), 14)
        (measures,) = json.loads(bmf.render([m]).files[bmf.FILE]).values()
        assert (measures["layers"]["value"], measures["layers-held"]["value"]) == (61, 14)
        told = {family.name: family.samples for family in text_string_to_metric_families(prometheus_text(m))}
        (step,), (all_,), (held,) = (told[f"dcpbench_{n}"] for n in ("step_seconds", "model_layers", "held_layers"))
        assert (all_.value, held.value) == (61, 14)
        assert step.labels == all_.labels == held.labels, "so that one series can be divided by the other"

    def test_of_repeats_the_fewest_are_told(self) -> None:
        both = [self.holding(files.decoded(), held).record for held in (14, 12)]
        assert (
            load_labels.describe_layers_held(both)
            == "whole model and KV cache do not fit: 12 of 61 layers held and reused"
        )
        assert load_labels.describe_layers_held([record_builder.failed(record_builder.point(TP))]) == ""


class TestTables:
    def test_the_precision_of_weights_and_kv_stands_beside_what_is_computed_with(self) -> None:
        """In fp8 the `dtype` of a record is still that of activations."""
        m = files.decoded()
        point = msgspec.structs.replace(m.record.point, dtype="bf16", weights_dtype="fp8", kv_dtype="fp8")
        (row,) = csv_table.build_rows([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, point=point))])
        assert (row["dtype"], row["weights_dtype"], row["kv_dtype"]) == ("bf16", "fp8", "fp8")
        assert row["precision"] == point.precision == "fp8 weights and KV"

    def everything(self) -> list[MeasuredPoint]:
        """Points of both workloads, one that failed, and one whose every word is a formula."""
        failed = MeasuredPoint("run", NOWHERE, record_builder.failed(record_builder.point(TP)))
        hostile = MeasuredPoint(
            "run", NOWHERE, record_builder.rejected(record_builder.point(TP, model="=1+1"), '-2"\n;x')
        )
        return [files.decoded(), files.served(), files.replayed(), files.functional(), failed, hostile]

    def test_csv_holds_every_point_and_is_read_back_as_it_was(self) -> None:
        (data,) = csv_table.render(self.everything()).files.values()
        rows = list(csv.DictReader(io.StringIO(data.decode())))
        assert [r["outcome"] for r in rows] == ["ok"] * 4 + ["failed", "rejected"]
        assert [r["standing"] for r in rows[:4]] == ["measured", "measured", "replay", "functional"]
        for row, was in zip(rows, csv_table.build_rows(self.everything()), strict=True):
            for column in csv_table.COLUMNS:
                if column.kind is float and was[column.name] is not None:
                    assert float(row[column.name]) == was[column.name]
                if was[column.name] is None:
                    assert row[column.name] == "", "an absent value is empty, and no 0"
        assert rows[-1]["model"] == "'=1+1", "a spreadsheet would run it"
        assert rows[-1]["reason"] == "'-2\"\n;x"

    def test_parquet_has_the_same_schema_for_every_run_and_keeps_every_value(self) -> None:
        schemas = []
        for points in (self.everything(), [files.decoded()], [files.served()]):
            (data,) = parquet_table.render(points).files.values()
            table = pq.read_table(io.BytesIO(data))
            schemas.append(table.schema)
            assert table.to_pylist() == csv_table.build_rows(points)
        assert all(schema.equals(parquet_table.make_schema(pa)) for schema in schemas)

    def test_pandas_reads_numbers_as_numbers(self) -> None:
        (data,) = parquet_table.render(self.everything()).files.values()
        frame = pd.read_parquet(io.BytesIO(data))
        assert frame["output_tok_s"].dtype == "float64"
        assert frame["output_tok_s"].isna().sum() == 2, "of the two that did not run"

    def test_every_metric_is_a_column(self) -> None:
        assert {m.name for m in list_exported_metrics()} <= {c.name for c in csv_table.COLUMNS}


class TestNumbersThatAreNone:
    @pytest.mark.parametrize("to", ["gha", "bmf", "hud", "prometheus", "csv", "parquet"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
    def test_they_are_absent_everywhere(self, to: str, value: float, tmp_path: Path) -> None:
        """msgspec would not read such a record, but one can be made."""
        record = record_builder.ok(record_builder.point(DCP), host_plan_us=value)
        rendered = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render(
            [MeasuredPoint("run", tmp_path, record)]
        )
        assert rendered.files
        for name, data in rendered.files.items():
            if name.endswith(".parquet"):
                assert pq.read_table(io.BytesIO(data))["host_plan_us"].to_pylist() == [None]
            else:
                assert b"host_plan" not in data or name.endswith(".csv")
                assert b"nan" not in data.lower().replace(b"tenant", b"")
                assert b"inf" not in data.lower().replace(b"flashinfer", b"").replace(b"info", b"").replace(
                    b"inference", b""
                )


class TestFiles:
    def run(self, tmp_path: Path, *records: Record) -> Path:
        return record_builder.write(tmp_path / "run", records or (record_builder.ok(record_builder.point(DCP)),))

    def test_they_go_below_the_run_unless_told_otherwise(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        assert export_runs([run], "csv", None).paths == [run / "exports" / "points.csv"]
        assert [p.parent for p in export_runs([run], "gha", None).paths] == [run / "exports" / "gha"] * 2

    def test_a_name_that_ends_like_a_file_is_the_file(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        assert export_runs([run], "prometheus", tmp_path / "a.prom").paths == [tmp_path / "a.prom"]
        assert export_runs([run], "prometheus", tmp_path / "new").paths == [tmp_path / "new" / "dcpbench.prom"]

    def test_a_file_that_no_format_is_named_by_is_left_alone_and_a_name_proposed(self, tmp_path: Path) -> None:
        path = tmp_path / "mine"
        path.write_text("mine")
        with pytest.raises(OutputError, match=r"mine is a file without an ending; give .*mine\.csv or a folder"):
            export_runs([self.run(tmp_path)], "csv", path, force=True)
        assert path.read_text() == "mine"

    def test_a_format_in_capitals_is_proposed_as_it_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"did you mean csv\?"):
            export_runs([self.run(tmp_path)], "CSV", None)

    def test_nothing_is_written_over_without_force(self, tmp_path: Path) -> None:
        run, path = self.run(tmp_path), tmp_path / "a.csv"
        path.write_text("mine")
        with pytest.raises(OutputError, match="--force"):
            export_runs([run], "csv", path)
        assert path.read_text() == "mine"
        export_runs([run], "csv", path, force=True)
        assert path.read_text().startswith("run,point,origin")
        assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []

    def test_a_format_that_carries_none_of_the_points_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"1 of 1 point left out: 1 decode steps, .* --to csv"):
            export_runs([self.run(tmp_path)], "vllm", None)

    def test_what_was_left_out_is_told(self, tmp_path: Path) -> None:
        run = self.run(tmp_path, build.served(build.point(DCP)), record_builder.ok(record_builder.point(DCP)))
        assert (
            export_runs([run], "vllm", None).note == "1 of 2 points left out: 1 decode steps, which have no requests."
        )

    def test_an_unknown_format_is_answered_with_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="did you mean prometheus"):
            export_runs([self.run(tmp_path)], "promethues", None)

    @pytest.mark.parametrize("to", list(FORMATS))
    @pytest.mark.long
    def test_a_name_of_ten_million_characters_makes_no_file_of_that_size(self, to: str, tmp_path: Path) -> None:
        """In names and labels it is cut; where a format keeps the model itself, it is there once."""
        m = files.served()
        huge = msgspec.structs.replace(m.record.point, model="\x1b<script>" + "x" * 10_000_000)
        render = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render
        rendered = render([MeasuredPoint("run", tmp_path, msgspec.structs.replace(m.record, point=huge))])
        assert all(len(name) < 200 for name in rendered.files)
        if to in ("gha", "bmf", "prometheus"):
            assert sum(map(len, rendered.files.values())) < 200_000


def test_a_layout_without_dcp_has_no_exchange_in_its_name() -> None:
    plain = MeasuredPoint("run", NOWHERE, record_builder.ok(record_builder.point(Layout(4))))
    assert measured_points.make_names([[plain]]) == ["kimi-k2 tp4 flashinfer bfloat16, decode: 8 × 4,000"]


@pytest.mark.parametrize(("there", "said"), [(1, "a would"), (2, "a and 1 more would"), (4, "a and 3 more would")])
def test_files_that_are_there_are_counted_before_any_is_written(tmp_path: Path, there: int, said: str) -> None:
    files = {tmp_path / name: b"new" for name in "abcde"}
    for path in [*files][:there]:
        path.write_bytes(b"old")
    with pytest.raises(OutputError, match=f"{said} be written over; add --force"):
        exports._write_files(files, force=False)
    assert [p.read_bytes() for p in files if p.exists()] == [b"old"] * there
    assert exports._write_files(files, force=True) == [*files]


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (1, 2)], 1),
        ([(0, 2), (1, 2), (2, 3)], 2),
        ([(0, 9), (1, 8), (2, 3), (5, 7)], 3),
    ],
)
def test_a_request_that_starts_as_another_ends_is_not_beside_it(spans: list[tuple[float, float]], most: int) -> None:
    """(start, end) of each."""
    count = len(spans)
    found = Requests(
        input_lens=[1] * count,
        output_lens=[1] * count,
        ttfts=[0.1] * count,
        itls=[[]] * count,
        latencies=[end - start for start, end in spans],
        start_times=[start for start, _ in spans],
        generated_texts=[""] * count,
        errors=[""] * count,
    )
    assert found.count_max_in_flight() == most


@pytest.mark.parametrize("to", ["csv", "bmf", "hud", "inferencex", "parquet", "prometheus", "sglang"])
def test_a_file_that_is_there_is_refused_before_records_are_read(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named by -o, the file itself, and the place below the run that is the default."""
    from dcpbench.reports import dataframes

    run = record_builder.write(tmp_path / "run", [record_builder.ok(record_builder.point())])
    name = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").FILE
    monkeypatch.setattr(dataframes, "read_runs", lambda _: pytest.fail("records were read"))
    for folder, output in (
        (tmp_path / "out", tmp_path / "out"),
        (tmp_path / "o", tmp_path / "o" / name),
        (run / "exports", None),
    ):
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(OutputError, match="would be written over; add --force"):
            export_runs([run], to, output)
