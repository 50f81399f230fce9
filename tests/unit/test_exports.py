"""exports/: the files that other tools read, field by field, and that nothing computed passes as measured."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dcpbench.errors import OutputError, RecordsError, UsageError
from dcpbench.exports import (
    FORMATS,
    bmf,
    columns,
    csv_table,
    export,
    gha,
    hud,
    inferencex,
    measured,
    parquet_table,
    sglang,
    vllm,
)
from dcpbench.exports.measured import Measured
from dcpbench.exports.metrics import METRICS
from dcpbench.layout import Layout
from dcpbench.serving import samples
from tests.unit import engine_files_builder as files
from tests.unit import record_builder
from tests.unit import serve_record_builder as build

if TYPE_CHECKING:
    from dcpbench.records import Record

NOWHERE = Path("nowhere")
TP, DCP = build.TP, build.DCP
VLLM_SUMMARY = {
    "date": str, "endpoint_type": str, "backend": str, "model_id": str, "num_prompts": int, "burstiness": float,
    "duration": float, "completed": int, "failed": int, "total_input_tokens": int, "total_output_tokens": int,
    "request_throughput": float, "output_throughput": float, "total_token_throughput": float,
    "mean_ttft_ms": float, "median_ttft_ms": float, "mean_tpot_ms": float, "median_tpot_ms": float,
    "mean_itl_ms": float, "median_itl_ms": float, "mean_e2el_ms": float, "median_e2el_ms": float,
}  # fmt: skip
VLLM_DETAILS = {
    "input_lens": int, "output_lens": int, "ttfts": float, "itls": list, "latencies": float, "start_times": float,
    "generated_texts": str, "errors": str,
}  # fmt: skip
SGLANG_SUMMARY = {
    "backend": str, "dataset_name": str, "duration": float, "completed": int, "total_input_tokens": int,
    "total_output_tokens": int, "request_throughput": float, "input_throughput": float, "output_throughput": float,
    "total_throughput": float, "concurrency": float, "mean_e2e_latency_ms": float, "median_e2e_latency_ms": float,
    "mean_ttft_ms": float, "median_ttft_ms": float, "mean_tpot_ms": float, "median_tpot_ms": float,
    "mean_itl_ms": float, "median_itl_ms": float,
}  # fmt: skip
INFERENCEX = {
    "hw": str, "conc": int, "model": str, "infmax_model_prefix": str, "framework": str, "precision": str,
    "spec_decoding": str, "disagg": bool, "isl": int, "osl": int, "is_multinode": bool, "tp": int, "pp": int,
    "dcp_size": int, "pcp_size": int, "ep": int, "dp_attention": str, "tput_per_gpu": float,
    "output_tput_per_gpu": float, "input_tput_per_gpu": float, "mean_ttft": float, "median_ttft": float,
    "mean_tpot": float, "median_tpot": float, "mean_itl": float, "mean_e2el": float, "mean_intvty": float,
    "median_intvty": float,
}  # fmt: skip

BMF_SCHEMA = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {n: {"type": "number"} for n in ("value", "lower_value", "upper_value")},
            "required": ["value"],
            "additionalProperties": False,
        },
    },
}
"""As Bencher documents its format."""


def has_types(found: dict[str, Any], fields: dict[str, type]) -> None:
    """Every field is there, of its type."""
    for name, kind in fields.items():
        assert isinstance(found[name], kind), f"{name}: {found.get(name)!r}"


def only(rendered: Any) -> Any:
    """The JSON of the one file."""
    (data,) = rendered.files.values()
    return json.loads(data)


def served(**changes: Any) -> Measured:
    """A measured point of fixed lengths, 400 in and 40 out, without samples beside it."""
    return Measured("run", NOWHERE, build.served(build.point(DCP), **changes))


def decoded(**changes: Any) -> Measured:
    """A measured point of decode steps."""
    return Measured("run", NOWHERE, record_builder.ok(record_builder.point(DCP), **changes))


def replayed() -> Measured:
    """The served point in virtual time."""
    m = served()
    assert m.record.point.load
    load = msgspec.structs.replace(m.record.point.load, mode="replay")
    return Measured(
        m.run, m.folder, msgspec.structs.replace(m.record, point=msgspec.structs.replace(m.record.point, load=load))
    )


def functional() -> Measured:
    """The served point on a CPU."""
    return served(environment=record_builder.CPU, marks=["cpu"])


class TestVllm:
    def test_it_has_the_fields_of_a_detailed_result(self, tmp_path: Path) -> None:
        """Three requests: 7 tokens out and 300 in within 0.7 s, at 10 and 438.57 tok/s; gaps 30, 30, 40, 50 ms."""
        found = only(vllm.render([files.measured(tmp_path)]))
        has_types(found, VLLM_SUMMARY)
        for name, kind in VLLM_DETAILS.items():
            assert len(found[name]) == 3
            assert all(isinstance(v, kind) for v in found[name]), name
        assert found["request_rate"] == "inf", "nothing spaces the requests of a closed loop"
        assert (found["max_concurrency"], found["completed"], found["failed"]) == (3, 3, 0)
        assert found["duration"] == pytest.approx(0.7)
        assert found["output_throughput"] == pytest.approx(10)
        assert found["total_token_throughput"] == pytest.approx(307 / 0.7)
        assert found["ttfts"] == pytest.approx([0.5, 0.5, 0.5]), "seconds"
        assert found["itls"][0] == pytest.approx([0.03, 0.03, 0.04])
        assert found["mean_itl_ms"] == pytest.approx(37.5), "milliseconds"
        assert found["std_itl_ms"] == pytest.approx(math.sqrt((7.5**2 + 7.5**2 + 2.5**2 + 12.5**2) / 4))

    def test_a_percentile_with_too_few_samples_is_absent(self, tmp_path: Path) -> None:
        found = only(vllm.render([files.measured(tmp_path)]))
        assert not [name for name in found if name.startswith(("p90_", "p95_", "p99_"))]

    def test_known_percentiles_are_the_records(self) -> None:
        m = served()
        assert m.record.serve
        found = only(vllm.render([m]))
        assert found["p90_ttft_ms"] == m.record.serve.ttft_ms.p90
        assert "ttfts" not in found, "there are no samples"
        assert "std_ttft_ms" not in found, "and nothing to compute it from"

    def test_an_open_loop_has_its_rate_and_no_concurrency(self, tmp_path: Path) -> None:
        of = files.point(changed={"arrival": "gamma", "request_rate": 2.5, "burstiness": 0.5})
        found = only(vllm.render([files.measured(tmp_path, of=of)]))
        assert (found["request_rate"], found["burstiness"], found["max_concurrency"]) == (2.5, 0.5, None)

    def test_the_layout_is_metadata_in_vllms_words(self) -> None:
        """Our tp8·dp2·dcp2 is vLLM's tensor parallel 4 in each of 2 replicas. Metadata are strings."""
        m = served()
        point = msgspec.structs.replace(m.record.point, tp=8, dp=2, dcp=2)
        found = only(vllm.render([Measured("run", m.folder, msgspec.structs.replace(m.record, point=point))]))
        assert found["tensor_parallel_size"] == "4"
        assert found["data_parallel_size"] == "2"
        assert found["decode_context_parallel_size"] == "2"

    def test_goodput_is_there_only_for_objectives_that_vllm_has(self, tmp_path: Path) -> None:
        """It can bound TTFT, TPOT and E2EL, and not ITL."""
        found = only(vllm.render([files.measured(tmp_path, slo={"ttft": 600.0, "e2el": 560.0})]))
        assert found["request_goodput"] == pytest.approx(2 / 0.7), "two of three end within 560 ms"
        assert found["goodput"] == "ttft:600 e2el:560"
        found = only(vllm.render([files.measured(tmp_path, slo={"itl": 60.0})]))
        assert found["request_goodput"] is None

    def test_requests_that_were_cut_off_have_an_error_and_no_output(self, tmp_path: Path) -> None:
        """As a failed request of vLLM: its tokens are in no sum, though in ours they are."""
        m = files.measured(tmp_path)
        assert m.record.serve
        path = tmp_path / m.record.serve.samples_file
        rows = samples.read_samples(path)
        cut = [rows[0], rows[1], dataclasses.replace(rows[2], outcome="cancelled", end_s=None)]
        samples.write_samples(tmp_path, m.record.point, cut)
        found = only(vllm.render([m]))
        assert found["errors"] == ["", "", "cut off when the run ended"]
        assert found["output_lens"] == [4, 2, 0]
        assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 1, 6)

    def test_a_point_of_which_that_is_not_known_is_left_out(self) -> None:
        cut = served(until_s=2.0)
        rendered = vllm.render([cut])
        assert not rendered.files
        assert list(rendered.left_out) == ["had requests cut off, and no samples that say which tokens were theirs"]

    def test_replays_and_cpu_runs_say_so_where_a_reader_looks(self) -> None:
        assert only(vllm.render([replayed()]))["backend"] == "dcpbench-replay"
        assert only(vllm.render([functional()]))["label"] == "dcpbench-functional"
        assert only(vllm.render([served()]))["backend"] == "dcpbench"

    def test_each_point_has_a_file_of_its_own(self) -> None:
        m = served()
        other = Measured("run", m.folder, build.served(build.point(TP)))
        assert len(vllm.render([m, other, replayed()]).files) == 3

    def test_samples_outside_the_run_are_not_read(self, tmp_path: Path) -> None:
        m = files.measured(tmp_path)
        assert m.record.serve
        away = msgspec.structs.replace(m.record.serve, samples_file="../../etc/passwd")
        with pytest.raises(RecordsError, match="outside its folder"):
            vllm.render([Measured("run", tmp_path, msgspec.structs.replace(m.record, serve=away))])


class TestSglang:
    def test_it_has_the_fields_of_a_detailed_line(self, tmp_path: Path) -> None:
        """In flight on average: (0.6 + 0.55 + 0.5) s / 0.7 s = 2.357 requests."""
        rendered = sglang.render([files.measured(tmp_path), served()])
        (data,) = rendered.files.values()
        lines = data.decode().splitlines()
        assert len(lines) == 2, "one line each"
        found = json.loads(lines[0])
        has_types(found, SGLANG_SUMMARY)
        assert found["concurrency"] == pytest.approx(1.65 / 0.7)
        assert found["request_rate"] == math.inf, "Infinity, as SGLang writes it"
        assert found["input_throughput"] == pytest.approx(300 / 0.7)
        assert found["random_input_len"] == 100
        assert found["random_output_len"] is None, "answers were of several lengths"
        assert found["itls"] == [pytest.approx([0.03, 0.03, 0.04]), pytest.approx([0.05]), []]

    def test_fixed_lengths_are_told(self) -> None:
        found = only(sglang.render([served()]))
        assert (found["random_input_len"], found["random_output_len"], found["random_range_ratio"]) == (400, 40, 1.0)


class TestInferencex:
    def test_a_row_counts_input_and_output_and_times_in_seconds(self) -> None:
        m = served()
        s = m.record.serve
        assert s
        (row,) = only(inferencex.render([m]))
        has_types(row, INFERENCEX)
        assert row["tput_per_gpu"] == pytest.approx((s.input_tokens + s.output_tokens) / s.wall_s / 4)
        assert row["output_tput_per_gpu"] == pytest.approx(s.output_tok_s_per_gpu)
        assert row["tput_per_gpu"] == pytest.approx(row["input_tput_per_gpu"] + row["output_tput_per_gpu"])
        assert row["median_ttft"] == pytest.approx(s.ttft_ms.p50 / 1e3)
        assert row["median_intvty"] == pytest.approx(1000 / s.tpot_ms.p50)
        assert (row["hw"], row["isl"], row["osl"], row["dcp_size"], row["ep"]) == ("h200", 400, 40, 4, 4)
        assert not [name for name in row if name.endswith("_ms")]

    @pytest.mark.parametrize("make", [replayed, functional, decoded], ids=["replay", "cpu", "decode"])
    def test_what_was_not_measured_by_serving_on_gpus_stays_out(self, make: Any) -> None:
        rendered = inferencex.render([make(), served()])
        assert len(only(rendered)) == 1
        assert rendered.left_out.total() == 1

    def test_points_that_computed_something_wrong_stay_out(self) -> None:
        assert not inferencex.render([served(marks=["graph_differs"])]).files

    def test_open_loops_and_uneven_lengths_have_no_row(self, tmp_path: Path) -> None:
        of = files.point(changed={"arrival": "gamma", "request_rate": 2.5})
        rendered = inferencex.render([files.measured(tmp_path, of=of), files.measured(tmp_path)])
        assert not rendered.files
        assert rendered.left_out.total() == 2


class TestGha:
    def test_each_file_has_one_direction(self) -> None:
        rendered = gha.render([decoded(), served()])
        smaller, bigger = (json.loads(rendered.files[gha.FILES[b]]) for b in ("smaller", "bigger"))
        for entries, words in ((smaller, ("_ms", "_us", "syncs")), (bigger, ("tok_s", "tokens", "goodput"))):
            assert any(word in e["name"] for e in entries for word in words)
            for entry in entries:
                assert set(entry) <= {"name", "unit", "value", "range", "extra"}
                has_types(entry, {"name": str, "unit": str, "extra": str})
                assert isinstance(entry["value"], int | float)
        assert not {e["name"] for e in smaller} & {e["name"] for e in bigger}
        assert not [e for e in smaller if "tok_s" in e["name"]]
        assert not [e for e in bigger if e["name"].endswith("_ms")]

    def test_names_are_unique_so_that_histories_stay_apart(self) -> None:
        rendered = gha.render([decoded(), served(), replayed(), functional()])
        names = [e["name"] for data in rendered.files.values() for e in json.loads(data)]
        assert len(names) == len(set(names))
        assert any("[replay]" in name for name in names)
        assert any("[functional]" in name for name in names)

    def test_repeats_are_one_entry_whose_range_is_how_far_they_reach(self) -> None:
        """Medians 10 and 12 ms: 11 ± 1, where single intervals are narrower."""
        point = record_builder.point(DCP)
        again = msgspec.structs.replace(point, repeat=1)
        two = [
            Measured("run", NOWHERE, record_builder.ok(of, median_ms=ms, noise=0.0))
            for of, ms in ((point, 10.0), (again, 12.0))
        ]
        entries = json.loads(gha.render(two).files[gha.FILES["smaller"]])
        (step,) = [e for e in entries if e["name"].endswith(": step_ms")]
        assert step["value"] == pytest.approx(11)
        assert step["range"] == "± 1"


class TestBmf:
    def test_it_meets_benchers_schema(self) -> None:
        found = only(bmf.render([decoded(), served(), replayed()]))
        jsonschema.validate(found, BMF_SCHEMA)
        assert len(found) == 3
        for name, measures in found.items():
            assert 0 < len(name) <= 1024
            assert all(len(slug) <= 64 and slug == slug.lower() and "_" not in slug for slug in measures)

    def test_built_in_measures_with_other_units_are_not_used(self) -> None:
        """Bencher's `latency` is in ns and its `throughput` in operations per second."""
        (measures,) = only(bmf.render([decoded()])).values()
        assert not {"latency", "throughput"} & set(measures)
        step = measures["step-ms"]
        assert step["lower_value"] <= step["value"] <= step["upper_value"]


class TestHud:
    def test_a_record_is_one_metric_and_its_extra_info_are_strings(self) -> None:
        found = only(hud.render([decoded()]))
        names = [r["metric"]["name"] for r in found]
        assert len(names) == len(set(names))
        for r in found:
            assert set(r) == {"benchmark", "model", "metric", "runners", "dependencies"}
            has_types(r["benchmark"], {"name": str, "mode": str, "dtype": str})
            has_types(r["model"], {"name": str, "type": str, "backend": str, "origins": list})
            assert all(isinstance(v, float | int) for v in r["metric"]["benchmark_values"])
            for part in ("benchmark", "model", "metric"):
                assert all(isinstance(v, str) for v in r[part]["extra_info"].values())
        assert found[0]["runners"][0]["gpu_info"] == "NVIDIA H200"
        assert found[0]["dependencies"]["torch"]["version"] == "2.9.0"

    def test_repeats_are_the_values_of_one_record(self) -> None:
        point = record_builder.point(DCP)
        two = [Measured("run", NOWHERE, record_builder.ok(msgspec.structs.replace(point, repeat=i))) for i in (0, 1)]
        found = only(hud.render(two))
        (rate,) = [r for r in found if r["metric"]["name"] == "output_tok_s"]
        assert len(rate["metric"]["benchmark_values"]) == 2

    @pytest.mark.parametrize("make", [replayed, functional], ids=["replay", "cpu"])
    def test_nothing_computed_enters_a_public_database(self, make: Any) -> None:
        assert not hud.render([make()]).files


class TestTables:
    def everything(self) -> list[Measured]:
        """Points of both workloads, one that failed, and one whose every word is a formula."""
        failed = Measured("run", NOWHERE, record_builder.failed(record_builder.point(TP)))
        hostile = Measured("run", NOWHERE, record_builder.rejected(record_builder.point(TP, model="=1+1"), '-2"\n;x'))
        return [decoded(), served(), replayed(), functional(), failed, hostile]

    def test_csv_holds_every_point_and_is_read_back_as_it_was(self) -> None:
        (data,) = csv_table.render(self.everything()).files.values()
        rows = list(csv.DictReader(io.StringIO(data.decode())))
        assert [r["outcome"] for r in rows] == ["ok"] * 4 + ["failed", "rejected"]
        assert [r["standing"] for r in rows[:4]] == ["measured", "measured", "replay", "functional"]
        for row, was in zip(rows, columns.rows(self.everything()), strict=True):
            for column in columns.COLUMNS:
                if column.kind == "number" and was[column.name] is not None:
                    assert float(row[column.name]) == was[column.name]
                if was[column.name] is None:
                    assert row[column.name] == "", "an absent value is empty, and no 0"
        assert rows[-1]["model"] == "'=1+1", "a spreadsheet would run it"
        assert rows[-1]["reason"] == "'-2\"\n;x"

    def test_parquet_has_the_same_schema_for_every_run_and_keeps_every_value(self) -> None:
        schemas = []
        for points in (self.everything(), [decoded()], [served()]):
            (data,) = parquet_table.render(points).files.values()
            table = pq.read_table(io.BytesIO(data))
            schemas.append(table.schema)
            assert table.to_pylist() == columns.rows(points)
        assert all(schema.equals(parquet_table.schema(pa)) for schema in schemas)

    def test_pandas_reads_numbers_as_numbers(self) -> None:
        (data,) = parquet_table.render(self.everything()).files.values()
        frame = pd.read_parquet(io.BytesIO(data))
        assert frame["output_tok_s"].dtype == "float64"
        assert frame["output_tok_s"].isna().sum() == 2, "of the two that did not run"

    def test_every_metric_is_a_column(self) -> None:
        assert {m.name for m in METRICS} <= {c.name for c in columns.COLUMNS}


class TestNumbersThatAreNone:
    @pytest.mark.parametrize("to", ["gha", "bmf", "hud", "prometheus", "csv", "parquet"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
    def test_they_are_absent_everywhere(self, to: str, value: float, tmp_path: Path) -> None:
        """msgspec would not read such a record, but one can be made."""
        record = record_builder.ok(record_builder.point(DCP), host_plan_us=value)
        rendered = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render(
            [Measured("run", tmp_path, record)]
        )
        for name, data in rendered.files.items():
            if not name.endswith(".parquet"):
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
        assert export([run], "csv", None).paths == [run / "exports" / "points.csv"]
        assert [p.parent for p in export([run], "gha", None).paths] == [run / "exports" / "gha"] * 2

    def test_a_name_that_ends_like_a_file_is_the_file(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        assert export([run], "prometheus", tmp_path / "a.prom").paths == [tmp_path / "a.prom"]
        assert export([run], "prometheus", tmp_path / "new").paths == [tmp_path / "new" / "dcpbench.prom"]

    def test_nothing_is_written_over_without_force(self, tmp_path: Path) -> None:
        run, path = self.run(tmp_path), tmp_path / "a.csv"
        path.write_text("mine")
        with pytest.raises(OutputError, match="--force"):
            export([run], "csv", path)
        assert path.read_text() == "mine"
        export([run], "csv", path, force=True)
        assert path.read_text().startswith("run,point,origin")
        assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []

    def test_a_format_that_carries_none_of_the_points_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"1 of 1 points left out: 1 decode steps, .* --to csv"):
            export([self.run(tmp_path)], "vllm", None)

    def test_what_was_left_out_is_told(self, tmp_path: Path) -> None:
        run = self.run(tmp_path, build.served(build.point(DCP)), record_builder.ok(record_builder.point(DCP)))
        assert export([run], "vllm", None).told == "1 of 2 points left out: 1 decode steps, which have no requests."

    def test_an_unknown_format_is_answered_with_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="did you mean prometheus"):
            export([self.run(tmp_path)], "promethues", None)

    @pytest.mark.parametrize("to", list(FORMATS))
    def test_a_name_of_ten_million_characters_makes_no_file_of_that_size(self, to: str, tmp_path: Path) -> None:
        """In names and labels it is cut; where a format keeps the model itself, it is there once."""
        m = served()
        huge = msgspec.structs.replace(m.record.point, model="\x1b<script>" + "x" * 10_000_000)
        render = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render
        rendered = render([Measured("run", tmp_path, msgspec.structs.replace(m.record, point=huge))])
        assert all(len(name) < 200 for name in rendered.files)
        if to in ("gha", "bmf", "prometheus"):
            assert sum(map(len, rendered.files.values())) < 200_000


def test_a_layout_without_dcp_has_no_exchange_in_its_name() -> None:
    plain = Measured("run", NOWHERE, record_builder.ok(record_builder.point(Layout(4))))
    assert measured.names([[plain]]) == ["kimi-k2 tp4 flashinfer bfloat16, decode: 8 × 4,000"]
