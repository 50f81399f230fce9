"""The catalogue of metrics has every number of a record with its path, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import pytest

from dcpbench.points.names import OBJECTIVES
from dcpbench.records import formulas, metrics
from dcpbench.records.metrics import LATENCIES, METRIC, METRICS, Error, Metric
from dcpbench.records.record import Interval, Kv, Latencies, Percentiles, Record, ServeMetrics
from dcpbench.records.record import Metrics as DecodeMetrics
from dcpbench.reports import dataframes
from dcpbench.reports.page.points import FIELDS
from tests.unit import record_builder
from tests.unit import serve_record_builder as build

if TYPE_CHECKING:
    import msgspec

DOCS = Path(__file__).parents[2] / "docs"
EXPORTED = [  # columns for other programs, which keep their names and order; new ones may come between
    "output_tok_s",
    "output_tok_s_per_gpu",
    "tok_s_per_user",
    "total_tok_s",
    "steady_tok_s",
    "request_throughput",
    "request_goodput",
    "step_ms",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p95_ms",
    "ttft_p99_ms",
    "itl_mean_ms",
    "itl_p50_ms",
    "itl_p90_ms",
    "itl_p95_ms",
    "itl_p99_ms",
    "tpot_mean_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "tpot_p95_ms",
    "tpot_p99_ms",
    "e2el_mean_ms",
    "e2el_p50_ms",
    "e2el_p90_ms",
    "e2el_p95_ms",
    "e2el_p99_ms",
    "host_syncs_per_step",
    "host_plan_us",
    "idle_fraction",
    "kv_capacity_tokens",
    "kv_capacity_requests",
    "kv_pool_bytes_per_gpu",
    "kv_bytes_per_token_per_gpu",
    "memory_peak_bytes",
    "wall_s",
    "submitted",
    "finished",
    "rejected",
    "cancelled",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "preemptions",
    "steps",
    "decode_steps",
    "decode_batch",
]
OPTIONS = [  # values of --fail-on and --metric used in scripts
    "slower",
    "tok_s",
    "itl_p50",
    "step_time",
    "itl_p90",
    "itl_p99",
    "steady_tok_s",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "e2el_p50",
    "goodput",
    "kv_capacity",
    "memory",
    "syncs",
]


def get_types(struct: type[msgspec.Struct], name: str) -> set[Any]:
    """Return the types that a field can have, without None."""
    hint = get_type_hints(struct)[name]
    found = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return set(found) - {type(None)}


def list_number_fields(struct: type[msgspec.Struct]) -> set[str]:
    """Return the fields of a struct that hold a number or a number with its interval."""
    return {n for n in struct.__struct_fields__ if get_types(struct, n) & {int, float, Interval}}


class TestPaths:
    @pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
    def test_every_path_ends_at_a_number_of_a_record(self, metric: Metric) -> None:
        for path in metric.paths:
            struct: Any = Record
            *parts, last = path
            for part in parts:
                (struct,) = get_types(struct, part)
            assert get_types(struct, last) <= {int, float, Interval}, path

    def test_every_number_of_a_point_is_in_the_catalogue(self) -> None:
        """A new field of a record without an entry would be shown nowhere."""
        assert list_number_fields(ServeMetrics) <= set(METRIC)
        assert list_number_fields(DecodeMetrics) <= set(METRIC)
        assert {f"kv_{name}" for name in list_number_fields(Kv) - {"fragmentation"}} <= set(METRIC)

    def test_every_latency_is_in_the_catalogue_with_all_statistics(self) -> None:
        of_requests = [n for n in ServeMetrics.__struct_fields__ if Latencies in get_types(ServeMetrics, n)]
        assert of_requests == [f"{name}_ms" for name in LATENCIES] == [f"{name}_ms" for name in OBJECTIVES]
        assert set(metrics.STATISTICS) == set(Latencies.__struct_fields__) - {"samples"}
        assert set(metrics.PERCENTILES) == set(Percentiles.__struct_fields__) - {"samples"}
        assert {f"{n}_{s}_ms" for n in LATENCIES for s in metrics.STATISTICS} <= set(METRIC)

    def test_values_are_those_of_the_record(self) -> None:
        decoded, served = (
            record_builder.make_ok_record(record_builder.make_point(build.DCP)),
            build.make_served_record(build.make_point(build.DCP)),
        )
        assert decoded.metrics
        assert served.serve
        assert METRIC["output_tok_s"].get_value(decoded) == decoded.metrics.output_tok_s.median
        assert METRIC["output_tok_s"].get_value(served) == served.serve.output_tok_s
        assert METRIC["ttft_p50_ms"].get_value(served) == served.serve.ttft_ms.p50
        assert METRIC["itl_p90_ms"].get_value(decoded) == decoded.metrics.itl_ms.p90
        assert METRIC["finished"].get_value(decoded) is None, "absent instead of 0"

    def test_derived_intervals_of_decode_follow_from_other_intervals(self) -> None:
        """With 4 GPUs, output per GPU is a quarter of the throughput, and the rate of a user is the inverse of the step
        time.
        """
        record = record_builder.make_ok_record(record_builder.make_point(build.DCP))
        assert record.metrics
        per_gpu, per_user = metrics.merge_values(
            [record], [METRIC["output_tok_s_per_gpu"], METRIC["tok_s_per_user"]], derived=True
        )
        assert (per_gpu.low, per_gpu.high) == (
            record.metrics.output_tok_s.low / 4,
            record.metrics.output_tok_s.high / 4,
        )
        assert (per_user.low, per_user.high) == (1000 / record.metrics.step_ms.high, 1000 / record.metrics.step_ms.low)
        assert [v.low for v in metrics.merge_values([record], [METRIC["tok_s_per_user"]])] == [None]


class TestNames:
    def test_names_are_unique(self) -> None:
        assert len(METRIC) == len(METRICS)

    def test_exported_columns_keep_names_and_order(self) -> None:
        names = [metric.name for metric in metrics.list_exported_metrics()]
        assert [name for name in names if name in EXPORTED] == EXPORTED

    def test_every_exported_metric_has_help_and_unit(self) -> None:
        assert all(metric.help and metric.unit for metric in metrics.list_exported_metrics())

    def test_options_of_scripts_and_metric_names_are_accepted(self) -> None:
        assert set(OPTIONS) <= set(metrics.OPTIONS)
        for name in [*OPTIONS, *(metric.name for found in metrics.COMPARED.values() for metric in found)]:
            assert metrics.is_option(name)
        assert not metrics.is_option("goodness")

    @pytest.mark.parametrize(
        ("option", "decode", "serve"),
        [
            ("slower", "step_ms", "output_tok_s"),
            ("tok_s", "step_ms", "output_tok_s"),
            ("itl_p50", "step_ms", "itl_p50_ms"),
            ("output_tok_s", "step_ms", "output_tok_s"),
            ("memory", "memory_peak_bytes", "memory_peak_bytes"),
            ("ttft_p99_ms", None, "ttft_p99_ms"),
        ],
    )
    def test_option_names_one_metric_of_each_workload(self, option: str, decode: str | None, serve: str) -> None:
        """In `decode` throughput is concurrency / step time, and the median ITL is the step time."""
        assert metrics.find_compared_metric(option, "serve") is METRIC[serve]
        assert metrics.find_compared_metric(option, "decode") is (METRIC[decode] if decode else None)

    def test_no_two_metrics_of_a_workload_share_an_option(self) -> None:
        for found in metrics.COMPARED.values():
            names = [name for metric in found for name in set(metric.options)]
            assert len(names) == len(set(names))


class TestErrors:
    def test_every_kind_of_error_is_known_to_compare(self) -> None:
        assert {kind for metric in METRICS for kind in metric.errors.values()} <= set(get_args(Error))

    def test_compared_metrics_without_an_error_are_counts(self) -> None:
        counted = {m.name for w, found in metrics.COMPARED.items() for m in found if w not in m.errors}
        assert counted == {"kv_capacity_tokens", "memory_peak_bytes", "host_syncs_per_step"}

    def test_each_latency_of_a_request_has_a_formula(self) -> None:
        assert all(hasattr(formulas, f"compute_{name}_ms") for name in LATENCIES)


class TestDocuments:
    def test_documentation_of_comparing_names_every_option(self) -> None:
        quoted = set(re.findall(r"`(\w+)`", (DOCS / "comparing.md").read_text(encoding="utf-8")))
        assert set(metrics.OPTIONS) <= quoted

    def test_documentation_of_metrics_names_every_served_field_and_latency(self) -> None:
        text = (DOCS / "metrics.md").read_text(encoding="utf-8")
        section = text[text.index("## Served requests") : text.index("## Statistics")]
        fields = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        named = {name for row in fields for name in re.findall(r"`(\w+)`", row)}
        assert named <= set(METRIC), "a row of the table is about a field of the catalogue"
        assert {m.name for m in METRICS if m.whole and m.parts == {"serve"}} <= named
        assert all(latency.label in section for latency in LATENCIES.values())


def test_three_metrics_are_shown_with_intervals() -> None:
    """These are the metrics with samples inside a run, and the ratio of two of them."""
    ranged = {metric.name for metric in METRICS if metric.ranged}
    assert ranged == {"output_tok_s", "step_ms", "dcp_ratio"} == {field["name"] for field in FIELDS if field["range"]}


def test_engine_metrics_are_in_tables_of_decode_and_served_points() -> None:
    """Memory and waits are in both tables; step times and latencies are in one of them."""
    assert {"memory_peak_bytes", "kv_capacity_tokens", "host_syncs_per_step"} <= {*dataframes.OF_ENGINE}
    assert not {*dataframes.OF_ENGINE} & {*dataframes.OF_DECODE, *dataframes.SERVED}
    assert "step_ms" in dataframes.OF_DECODE
    assert "ttft_p50_ms" not in dataframes.OF_ENGINE
