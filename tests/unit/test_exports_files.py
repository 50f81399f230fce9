"""Exports: tables of every point, absent numbers, and output files that are complete or absent."""

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
from dcpbench.exports import FORMATS, bmf, csv_table, export_runs, measured_points, parquet_table, vllm
from dcpbench.exports.bench_files import Requests
from dcpbench.exports.measured_points import MeasuredPoint
from dcpbench.points.layout import Layout
from dcpbench.records.metrics import list_exported_metrics
from dcpbench.reports import load_labels
from tests.unit import engine_files_builder as files
from tests.unit import record_builder
from tests.unit import serve_record_builder as build
from tests.unit.test_exports_prometheus import render_text as prometheus_text

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

NOWHERE = files.NOWHERE
TP, DCP = build.TP, build.DCP


@pytest.mark.parametrize("name", ["vllm", "sglang", "inferencex"])
def test_formats_of_one_server_leave_out_disaggregated_points(name: str) -> None:
    """A reader of the degrees of one instance would take the total rate for its rate."""
    m = files.make_served_point()
    several = msgspec.structs.replace(m.record.point, disaggregate="1:2", transfer_gb_s=50.0)
    render = importlib.import_module(f"dcpbench.exports.{name}").render
    rendered = render([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, point=several))])
    assert not rendered.files
    assert list(rendered.left_out) == ["with several instances, of which a file has no number"]


@pytest.mark.parametrize("wall_s", [None, 0.0])
@pytest.mark.parametrize("name", ["vllm", "sglang", "inferencex"])
def test_formats_of_rates_leave_out_points_without_duration(name: str, wall_s: float | None) -> None:
    m = files.make_served_point()
    serve = msgspec.structs.replace(m.record.serve, wall_s=wall_s)
    render = importlib.import_module(f"dcpbench.exports.{name}").render
    rendered = render([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, serve=serve))])
    assert not rendered.files
    assert list(rendered.left_out) == ["without a duration"]


def test_formats_of_requests_leave_out_points_without_sums() -> None:
    """GuideLLM's rates of a measured time have no sums that belong to that time."""
    m = files.make_served_point()
    serve = msgspec.structs.replace(m.record.serve, input_tokens=None, output_tokens=None)
    rendered = vllm.render([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, serve=serve))])
    assert list(rendered.left_out) == ["without the number of tokens in their duration"]


class TestLayersHeld:
    """Points with a part of the layers are marked: a step that reuses some layers does the work of all, and no server
    runs it.
    """

    def with_layers_held(self, m: MeasuredPoint, held: int) -> MeasuredPoint:
        conditions = msgspec.structs.replace(m.record.conditions, layers=61, layers_held=held)
        return MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, conditions=conditions))

    @pytest.mark.parametrize("to", ["vllm", "sglang", "gha", "hud"])
    def test_formats_with_texts_state_the_layers_held(self, to: str) -> None:
        render = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render
        for held, expected in ((14, True), (61, False)):
            for data in render([self.with_layers_held(files.make_served_point(), held)]).files.values():
                assert ("GPU memory holds 14 of 61 layers" in data.decode()) == expected
                assert ("repeatedly" in data.decode()) == expected

    def test_tables_have_both_numbers(self) -> None:
        (row,) = csv_table.build_rows([self.with_layers_held(files.make_decode_point(), 14)])
        assert (row["layers"], row["layers_held"]) == (61, 14)

    def test_formats_of_numbers_have_layers_and_layers_held(self) -> None:
        m = self.with_layers_held(files.make_decode_point(), 14)
        (measures,) = json.loads(bmf.render([m]).files[bmf.FILE]).values()
        assert (measures["layers"]["value"], measures["layers-held"]["value"]) == (61, 14)
        samples = {family.name: family.samples for family in text_string_to_metric_families(prometheus_text(m))}
        (step,), (all_,), (held,) = (samples[f"dcpbench_{n}"] for n in ("step_seconds", "model_layers", "held_layers"))
        assert (all_.value, held.value) == (61, 14)
        assert step.labels == all_.labels == held.labels, "so that one series can be divided by the other"

    def test_fewest_layers_held_of_repeats_are_stated(self) -> None:
        both = [self.with_layers_held(files.make_decode_point(), held).record for held in (14, 12)]
        assert load_labels.describe_layers_held(both) == "GPU memory holds 12 of 61 layers, which run repeatedly"
        assert (
            load_labels.describe_layers_held([record_builder.make_failed_record(record_builder.make_point(TP))]) == ""
        )


class TestTables:
    def test_tables_have_precisions_of_weights_and_kv(self) -> None:
        """The `dtype` of an fp8 record is still that of activations."""
        m = files.make_decode_point()
        point = msgspec.structs.replace(m.record.point, dtype="bf16", weights_dtype="fp8", kv_dtype="fp8")
        (row,) = csv_table.build_rows([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, point=point))])
        assert (row["dtype"], row["weights_dtype"], row["kv_dtype"]) == ("bf16", "fp8", "fp8")
        assert row["precision"] == point.precision == "fp8 weights and KV"

    def make_all_kinds(self) -> list[MeasuredPoint]:
        """Return points of both workloads, a failed one, and one with spreadsheet formulas as texts."""
        failed = MeasuredPoint("run", NOWHERE, record_builder.make_failed_record(record_builder.make_point(TP)))
        hostile = MeasuredPoint(
            "run", NOWHERE, record_builder.make_rejected_record(record_builder.make_point(TP, model="=1+1"), '-2"\n;x')
        )
        return [
            files.make_decode_point(),
            files.make_served_point(),
            files.make_replayed_point(),
            files.make_cpu_point(),
            failed,
            hostile,
        ]

    def test_csv_has_every_point_and_is_read_back_unchanged(self) -> None:
        (data,) = csv_table.render(self.make_all_kinds()).files.values()
        rows = list(csv.DictReader(io.StringIO(data.decode())))
        assert [r["outcome"] for r in rows] == ["ok"] * 4 + ["failed", "rejected"]
        assert [r["standing"] for r in rows[:4]] == ["measured", "measured", "replay", "functional"]
        for row, was in zip(rows, csv_table.build_rows(self.make_all_kinds()), strict=True):
            for column in csv_table.COLUMNS:
                if column.kind is float and was[column.name] is not None:
                    assert float(row[column.name]) == was[column.name]
                if was[column.name] is None:
                    assert row[column.name] == "", "an absent value is empty and not 0"
        assert rows[-1]["model"] == "'=1+1", "a spreadsheet would run it"
        assert rows[-1]["reason"] == "'-2\"\n;x"

    def test_parquet_has_the_same_schema_for_every_run_and_keeps_every_value(self) -> None:
        schemas = []
        for points in (self.make_all_kinds(), [files.make_decode_point()], [files.make_served_point()]):
            (data,) = parquet_table.render(points).files.values()
            table = pq.read_table(io.BytesIO(data))
            schemas.append(table.schema)
            assert table.to_pylist() == csv_table.build_rows(points)
        assert all(schema.equals(parquet_table.make_schema(pa)) for schema in schemas)

    def test_pandas_reads_numbers_as_numbers(self) -> None:
        (data,) = parquet_table.render(self.make_all_kinds()).files.values()
        frame = pd.read_parquet(io.BytesIO(data))
        assert frame["output_tok_s"].dtype == "float64"
        assert frame["output_tok_s"].isna().sum() == 2, "of the two that did not run"

    def test_every_metric_is_a_column(self) -> None:
        assert {m.name for m in list_exported_metrics()} <= {c.name for c in csv_table.COLUMNS}


class TestNonFiniteNumbers:
    @pytest.mark.parametrize("to", ["gha", "bmf", "hud", "prometheus", "csv", "parquet"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
    def test_nan_and_infinity_are_absent_in_every_format(self, to: str, value: float, tmp_path: Path) -> None:
        """A record file with such a value is refused, but such a record can be made in memory."""
        record = record_builder.make_ok_record(record_builder.make_point(DCP), host_plan_us=value)
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
        return record_builder.write_records(
            tmp_path / "run", records or (record_builder.make_ok_record(record_builder.make_point(DCP)),)
        )

    def test_default_output_is_the_exports_folder_of_the_run(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        assert export_runs([run], "csv", None).paths == [run / "exports" / "points.csv"]
        assert [p.parent for p in export_runs([run], "gha", None).paths] == [run / "exports" / "gha"] * 2

    def test_output_with_a_suffix_is_a_file_and_without_is_a_folder(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        assert export_runs([run], "prometheus", tmp_path / "a.prom").paths == [tmp_path / "a.prom"]
        assert export_runs([run], "prometheus", tmp_path / "new").paths == [tmp_path / "new" / "dcpbench.prom"]

    def test_existing_file_without_suffix_is_refused_with_a_proposed_name(self, tmp_path: Path) -> None:
        path = tmp_path / "mine"
        path.write_text("mine")
        with pytest.raises(OutputError, match=r"mine is a file without an ending; give .*mine\.csv or a folder"):
            export_runs([self.run(tmp_path)], "csv", path, force=True)
        assert path.read_text() == "mine"

    def test_format_in_capitals_is_answered_with_the_correct_name(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"did you mean csv\?"):
            export_runs([self.run(tmp_path)], "CSV", None)

    def test_existing_file_is_overwritten_only_with_force(self, tmp_path: Path) -> None:
        run, path = self.run(tmp_path), tmp_path / "a.csv"
        path.write_text("mine")
        with pytest.raises(OutputError, match="--force"):
            export_runs([run], "csv", path)
        assert path.read_text() == "mine"
        export_runs([run], "csv", path, force=True)
        assert path.read_text().startswith("run,point,origin")
        assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []

    def test_format_that_fits_no_point_raises_error_with_reasons(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"1 of 1 point left out: 1 of decode steps, .* --to csv"):
            export_runs([self.run(tmp_path)], "vllm", None)

    def test_left_out_points_are_counted_in_the_note(self, tmp_path: Path) -> None:
        run = self.run(
            tmp_path,
            build.make_served_record(build.make_point(DCP)),
            record_builder.make_ok_record(record_builder.make_point(DCP)),
        )
        assert (
            export_runs([run], "vllm", None).note
            == "1 of 2 points left out: 1 of decode steps, which have no requests."
        )

    def test_unknown_format_raises_error_with_nearest_name(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="did you mean prometheus"):
            export_runs([self.run(tmp_path)], "promethues", None)

    @pytest.mark.parametrize("to", list(FORMATS))
    @pytest.mark.long
    def test_very_long_model_name_is_cut_in_exports(self, to: str, tmp_path: Path) -> None:
        """Names and labels are cut; a format with a field for the model has the full name once."""
        m = files.make_served_point()
        huge = msgspec.structs.replace(m.record.point, model="\x1b<script>" + "x" * 10_000_000)
        render = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render
        rendered = render([MeasuredPoint("run", tmp_path, msgspec.structs.replace(m.record, point=huge))])
        assert all(len(name) < 200 for name in rendered.files)
        if to in ("gha", "bmf", "prometheus"):
            assert sum(map(len, rendered.files.values())) < 200_000


def test_point_without_dcp_has_no_exchange_in_its_name() -> None:
    plain = MeasuredPoint("run", NOWHERE, record_builder.make_ok_record(record_builder.make_point(Layout(4))))
    assert measured_points.make_names([[plain]]) == ["kimi-k2 tp4 flashinfer bfloat16, decode: 8 × 4,000"]


@pytest.mark.parametrize(
    ("existing", "expected"), [(1, "a would"), (2, "a and 1 more would"), (4, "a and 3 more would")]
)
def test_existing_files_are_counted_before_any_file_is_written(tmp_path: Path, existing: int, expected: str) -> None:
    files = {tmp_path / name: b"new" for name in "abcde"}
    for path in [*files][:existing]:
        path.write_bytes(b"old")
    with pytest.raises(OutputError, match=f"{expected} be written over; add --force"):
        exports._write_files(files, force=False)
    assert [p.read_bytes() for p in files if p.exists()] == [b"old"] * existing
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
def test_request_that_starts_as_another_ends_does_not_overlap(spans: list[tuple[float, float]], most: int) -> None:
    """A span is the start and end of a request."""
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
def test_existing_output_is_refused_before_records_are_read(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is a folder given by -o, the file itself, or the default below the run."""
    from dcpbench.reports import dataframes

    run = record_builder.write_records(tmp_path / "run", [record_builder.make_ok_record(record_builder.make_point())])
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
