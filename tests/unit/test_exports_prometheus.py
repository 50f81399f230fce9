"""Export to Prometheus: files are read by Prometheus' own parser, and the Grafana dashboard queries exported series
only.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dcpbench.exports import prometheus
from dcpbench.exports.measured_points import MeasuredPoint
from dcpbench.records.metrics import list_exported_metrics
from tests.unit import engine_files_builder as files
from tests.unit import record_builder
from tests.unit import serve_record_builder as build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana-dashboard.json").read_text())
UNITS = (  # allowed last words of a gauge's name
    "seconds",
    "bytes",
    "tokens",
    "requests",
    "ratio",
    "per_second",
    "per_gpu",
    "per_user",
    "per_step",
    "steps",
    "preemptions",
    "layers",
    "warning",
)


def render_text(*points: MeasuredPoint) -> str:
    """Return the rendered file as text."""
    return prometheus.render(points).files[prometheus.FILE].decode()


def parse_families(*points: MeasuredPoint) -> dict[str, Metric]:
    """Return the metric families of the file as Prometheus' parser reads them."""
    return {family.name: family for family in text_string_to_metric_families(render_text(*points))}


def make_all_kinds() -> list[MeasuredPoint]:
    """Return points of both workloads, measured, replayed and functional, with preemptions and goodput."""
    tight = MeasuredPoint("run", files.NOWHERE, build.make_served_record(build.make_point(build.TP, 32), pages=60))
    return [
        files.make_decode_point(),
        files.make_served_point(),
        files.make_replayed_point(),
        files.make_cpu_point(),
        tight,
    ]


class TestText:
    def test_every_family_is_a_gauge_with_help_and_a_unit_in_its_name(self) -> None:
        found = parse_families(*make_all_kinds())
        assert len(found) > 20
        for name, family in found.items():
            assert family.type == "gauge"
            assert family.documentation
            assert name.startswith("dcpbench_")
            assert name.endswith(UNITS), name
            assert all(sample.timestamp is None for sample in family.samples), "the textfile collector refuses them"

    def test_all_series_are_distinct(self) -> None:
        series = [
            (s.name, *sorted(s.labels.items()))
            for family in parse_families(*make_all_kinds()).values()
            for s in family.samples
        ]
        assert len(series) == len(set(series))

    def test_times_are_in_seconds_and_values_are_exact(self) -> None:
        m = files.make_decode_point()
        assert m.record.metrics
        (step,) = parse_families(m)["dcpbench_step_seconds"].samples
        assert step.value == m.record.metrics.step_ms.median * 1e-3
        p50 = [s for s in parse_families(m)["dcpbench_itl_seconds"].samples if s.labels["statistic"] == "p50"]
        assert [s.value for s in p50] == [m.record.metrics.itl_ms.p50 * 1e-3]

    def test_unknown_percentile_has_no_series(self) -> None:
        """40 samples are enough for a median only."""
        m = MeasuredPoint(
            "run", files.NOWHERE, record_builder.make_ok_record(record_builder.make_point(build.DCP), steps=40)
        )
        assert {s.labels["statistic"] for s in parse_families(m)["dcpbench_itl_seconds"].samples} == {"p50"}

    def test_standing_label_marks_replayed_and_functional_points(self) -> None:
        found = parse_families(*make_all_kinds())["dcpbench_output_tokens_per_second"].samples
        assert {s.labels["standing"] for s in found} == {"measured", "replay", "functional"}

    def test_warnings_are_separate_series_and_split_no_other_series(self) -> None:
        """A throttled point keeps its series, and has one more with the same labels and its warning."""
        clean, marked = files.make_decode_point(), files.make_decode_point(warnings=["throttled", "noisy"])
        before, after = parse_families(clean), parse_families(marked)
        name = "dcpbench_step_seconds"
        (was,), (now,) = before[name].samples, after[name].samples
        assert was.labels == now.labels
        assert [(s.labels, s.value) for s in after[prometheus.WARNING].samples] == [
            (now.labels | {"warning": warning}, 1) for warning in ("noisy", "throttled")
        ]
        assert before[prometheus.WARNING].samples == []

    def test_precision_label_covers_weights_and_kv(self) -> None:
        """The `dtype` of records and tables is the compute type."""
        m = files.make_decode_point()
        point = msgspec.structs.replace(m.record.point, dtype="bf16", weights_dtype="fp8", kv_dtype="fp8")
        found = parse_families(MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, point=point)))
        labels = found["dcpbench_step_seconds"].samples[0].labels
        assert labels["precision"] == point.precision
        assert "dtype" not in labels

    def test_every_metric_has_its_own_gauge(self) -> None:
        gauges = [(g.name, g.statistic) for g in prometheus.GAUGES.values()]
        assert len(set(gauges)) == len(list_exported_metrics())

    @given(name=st.text(max_size=300), run=st.text(max_size=300))
    def test_any_name_is_read_back_as_one_label(self, name: str, run: str) -> None:
        """Names have quotes, backslashes, line ends and other scripts; control characters are escaped, and long names
        are cut.
        """
        m = files.make_decode_point()
        point = msgspec.structs.replace(m.record.point, model=name)
        found = parse_families(MeasuredPoint(run, m.folder, msgspec.structs.replace(m.record, point=point)))
        labels = found["dcpbench_step_seconds"].samples[0].labels
        for label, was in (("model", name), ("run", run)):
            kept = [c.isprintable() or unicodedata.category(c) == "Zs" for c in was]
            spelled = [c if stays else c.encode("unicode_escape").decode() for c, stays in zip(was, kept, strict=True)]
            shown = "".join(spelled)
            assert labels[label] == (shown if len(shown) <= 200 else shown[:199] + "…")


def iter_queries() -> Iterator[tuple[str, str]]:
    """Iterate over the queries of the dashboard's panels and variables, with their places."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def find_lost(was: Any, now: Any, path: str = "") -> list[str]:
    """Return the paths of values of `was` that are missing in `now`: Grafana's types drop unknown fields."""
    if isinstance(was, dict):
        if not isinstance(now, dict):
            return [path]
        return [
            p for k, v in was.items() for p in (find_lost(v, now[k], f"{path}/{k}") if k in now else [f"{path}/{k}"])
        ]
    if isinstance(was, list):
        if not isinstance(now, list) or len(was) != len(now):
            return [path]
        return [p for i, (a, b) in enumerate(zip(was, now, strict=True)) for p in find_lost(a, b, f"{path}/{i}")]
    return [] if was == now else [path]


def round_trip_grafana(dashboard: dict[str, Any]) -> Any:
    """Return the dashboard, read into the types that Grafana publishes and written again."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


class TestDashboard:
    METRIC = re.compile(r"\bdcpbench_\w+")
    LABELS = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
    GROUPED = re.compile(r"\bby \(([^)]*)\)")
    LEGEND = re.compile(r"\{\{(\w+)\}\}")

    @pytest.mark.parametrize(("where", "query"), list(iter_queries()), ids=[where for where, _ in iter_queries()])
    def test_every_queried_metric_and_label_is_exported(self, where: str, query: str) -> None:
        del where
        found = parse_families(*make_all_kinds())
        metrics = self.METRIC.findall(query)
        assert len(metrics) == 1, "a query has one metric, so that all labels belong to it"
        has = set(found[metrics[0]].samples[0].labels)
        queried = set(self.LABELS.findall(query))
        queried |= {label.strip() for group in self.GROUPED.findall(query) for label in group.split(",")}
        if values := re.fullmatch(r"label_values\(\w+, (\w+)\)", query):
            queried.add(values[1])
        assert queried
        assert queried <= has

    def test_brackets_of_every_query_are_closed(self) -> None:
        for _, query in iter_queries():
            for left, right in ("()", "{}", '""'):
                assert query.count(left) == query.count(right) or (left == right and query.count(left) % 2 == 0)

    def test_every_label_in_a_legend_is_exported(self) -> None:
        has = set(parse_families(files.make_decode_point())["dcpbench_step_seconds"].samples[0].labels)
        legends = [t["legendFormat"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
        assert {name for legend in legends for name in self.LEGEND.findall(legend)} <= has

    def test_queried_statistics_are_exported(self) -> None:
        queried = {s for _, query in iter_queries() for s in re.findall(r'statistic="(\w+)"', query)}
        assert queried == {"p50", "p99"}
        assert queried <= {g.statistic for g in prometheus.GAUGES.values()}

    def test_grafana_types_keep_every_field_of_the_dashboard(self) -> None:
        assert find_lost(DASHBOARD, round_trip_grafana(DASHBOARD)) == []

    def test_unknown_dashboard_fields_are_found_as_lost(self) -> None:
        wrong = json.loads(json.dumps(DASHBOARD))
        wrong["panels"][0]["fieldConfig"]["defaults"]["unitt"] = "s"
        wrong["panels"][4]["options"]["seriesMaping"] = "auto"
        assert find_lost(wrong, round_trip_grafana(wrong)) == [
            "/panels/0/fieldConfig/defaults/unitt",
            "/panels/4/options/seriesMaping",
        ]

    def test_panels_do_not_overlap_and_cover_the_main_metrics(self) -> None:
        places = [tuple(panel["gridPos"][k] for k in "xywh") for panel in DASHBOARD["panels"]]
        assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
        for i, (x, y, w, h) in enumerate(places):
            assert x + w <= 24
            for ox, oy, ow, oh in places[:i]:
                assert x >= ox + ow or ox >= x + w or y >= oy + oh or oy >= y + h, "two panels overlap"
        titles = " ".join(panel["title"] for panel in DASHBOARD["panels"])
        for what in ("throughput", "ITL", "TTFT", "Frontier", "KV capacity", "synchronisations"):
            assert what in titles

    def test_dashboard_shows_measured_points_by_default(self) -> None:
        (standing,) = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "standing"]
        assert standing["current"]["value"] == ["measured"]
        queries = [query for _, query in iter_queries() if "label_values" not in query]
        assert queries
        assert all('standing=~"$standing"' in query for query in queries)
