"""exports/prometheus.py: read by Prometheus' own parser; the Grafana dashboard asks for nothing that is not there."""

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
UNITS = (  # words that end a gauge's name, so that nobody has to guess
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


def text(*points: MeasuredPoint) -> str:
    """The file."""
    return prometheus.render(points).files[prometheus.FILE].decode()


def families(*points: MeasuredPoint) -> dict[str, Metric]:
    """What Prometheus' parser makes of it."""
    return {family.name: family for family in text_string_to_metric_families(text(*points))}


def everything() -> list[MeasuredPoint]:
    """Points of both workloads, measured, replayed and functional, with preemptions and goodput."""
    tight = MeasuredPoint("run", files.NOWHERE, build.served(build.point(build.TP, 32), pages=60))
    return [files.decoded(), files.served(), files.replayed(), files.functional(), tight]


class TestText:
    def test_every_family_is_a_gauge_with_help_and_a_unit_in_its_name(self) -> None:
        found = families(*everything())
        assert len(found) > 20
        for name, family in found.items():
            assert family.type == "gauge"
            assert family.documentation
            assert name.startswith("dcpbench_")
            assert name.endswith(UNITS), name
            assert all(sample.timestamp is None for sample in family.samples), "the textfile collector refuses them"

    def test_no_two_series_are_alike(self) -> None:
        series = [
            (s.name, *sorted(s.labels.items())) for family in families(*everything()).values() for s in family.samples
        ]
        assert len(series) == len(set(series))

    def test_times_are_in_seconds_and_values_are_exact(self) -> None:
        m = files.decoded()
        assert m.record.metrics
        (step,) = families(m)["dcpbench_step_seconds"].samples
        assert step.value == m.record.metrics.step_ms.median * 1e-3
        p50 = [s for s in families(m)["dcpbench_itl_seconds"].samples if s.labels["statistic"] == "p50"]
        assert [s.value for s in p50] == [m.record.metrics.itl_ms.p50 * 1e-3]

    def test_a_percentile_that_is_not_known_has_no_series(self) -> None:
        """40 samples are enough for a median alone."""
        m = MeasuredPoint("run", files.NOWHERE, record_builder.ok(record_builder.point(build.DCP), steps=40))
        assert {s.labels["statistic"] for s in families(m)["dcpbench_itl_seconds"].samples} == {"p50"}

    def test_what_is_no_measurement_says_so_in_a_label(self) -> None:
        found = families(*everything())["dcpbench_output_tokens_per_second"].samples
        assert {s.labels["standing"] for s in found} == {"measured", "replay", "functional"}

    def test_marks_are_series_of_their_own_so_that_none_splits_another(self) -> None:
        """A point that throttled keeps its series, and one more says so, with the same labels and its mark."""
        clean, marked = files.decoded(), files.decoded(warnings=["throttled", "noisy"])
        before, after = families(clean), families(marked)
        name = "dcpbench_step_seconds"
        (was,), (now,) = before[name].samples, after[name].samples
        assert was.labels == now.labels
        assert [(s.labels, s.value) for s in after[prometheus.WARNING].samples] == [
            (now.labels | {"warning": name}, 1) for name in ("noisy", "throttled")
        ]
        assert before[prometheus.WARNING].samples == []

    def test_precision_is_of_weights_and_kv_and_is_not_called_dtype(self) -> None:
        """`dtype` of records and tables is what is computed with."""
        m = files.decoded()
        point = msgspec.structs.replace(m.record.point, dtype="bf16", weights_dtype="fp8", kv_dtype="fp8")
        found = families(MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, point=point)))
        labels = found["dcpbench_step_seconds"].samples[0].labels
        assert labels["precision"] == point.precision
        assert "dtype" not in labels

    def test_every_metric_has_a_gauge_of_its_own(self) -> None:
        gauges = [(g.name, g.statistic) for g in prometheus.GAUGES.values()]
        assert len(set(gauges)) == len(list_exported_metrics())

    @given(name=st.text(max_size=300), run=st.text(max_size=300))
    def test_any_name_comes_back_as_one_label(self, name: str, run: str) -> None:
        """Quotes, backslashes, line ends, other scripts. What a terminal would obey is spelled out; long names are cut."""
        m = files.decoded()
        point = msgspec.structs.replace(m.record.point, model=name)
        found = families(MeasuredPoint(run, m.folder, msgspec.structs.replace(m.record, point=point)))
        labels = found["dcpbench_step_seconds"].samples[0].labels
        for label, was in (("model", name), ("run", run)):
            kept = [c.isprintable() or unicodedata.category(c) == "Zs" for c in was]
            spelled = [c if stays else c.encode("unicode_escape").decode() for c, stays in zip(was, kept, strict=True)]
            shown = "".join(spelled)
            assert labels[label] == (shown if len(shown) <= 200 else shown[:199] + "…")


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard, panels' and variables', with where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def lost(was: Any, now: Any, path: str = "") -> list[str]:
    """What of a JSON value is not in another one: Grafana's own types keep what they know, and drop the rest."""
    if isinstance(was, dict):
        if not isinstance(now, dict):
            return [path]
        return [p for k, v in was.items() for p in (lost(v, now[k], f"{path}/{k}") if k in now else [f"{path}/{k}"])]
    if isinstance(was, list):
        if not isinstance(now, list) or len(was) != len(now):
            return [path]
        return [p for i, (a, b) in enumerate(zip(was, now, strict=True)) for p in lost(a, b, f"{path}/{i}")]
    return [] if was == now else [path]


def through_grafana(dashboard: dict[str, Any]) -> Any:
    """The dashboard, read into the types that Grafana publishes and written again."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


class TestDashboard:
    METRIC = re.compile(r"\bdcpbench_\w+")
    LABELS = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
    GROUPED = re.compile(r"\bby \(([^)]*)\)")
    LEGEND = re.compile(r"\{\{(\w+)\}\}")

    @pytest.mark.parametrize(("where", "query"), list(expressions()), ids=[where for where, _ in expressions()])
    def test_every_metric_and_label_it_asks_for_is_exported(self, where: str, query: str) -> None:
        del where
        found = families(*everything())
        metrics = self.METRIC.findall(query)
        assert len(metrics) == 1, "one metric each, so that labels are its own"
        has = set(found[metrics[0]].samples[0].labels)
        asked = set(self.LABELS.findall(query))
        asked |= {label.strip() for group in self.GROUPED.findall(query) for label in group.split(",")}
        if values := re.fullmatch(r"label_values\(\w+, (\w+)\)", query):
            asked.add(values[1])
        assert asked
        assert asked <= has

    def test_brackets_of_every_query_are_closed(self) -> None:
        for _, query in expressions():
            for left, right in ("()", "{}", '""'):
                assert query.count(left) == query.count(right) or (left == right and query.count(left) % 2 == 0)

    def test_every_label_in_a_legend_is_exported(self) -> None:
        has = set(families(files.decoded())["dcpbench_step_seconds"].samples[0].labels)
        legends = [t["legendFormat"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
        assert {name for legend in legends for name in self.LEGEND.findall(legend)} <= has

    def test_statistics_it_asks_for_are_exported(self) -> None:
        asked = {s for _, query in expressions() for s in re.findall(r'statistic="(\w+)"', query)}
        assert asked == {"p50", "p99"}
        assert asked <= {g.statistic for g in prometheus.GAUGES.values()}

    def test_grafanas_own_types_know_every_field_of_it(self) -> None:
        assert lost(DASHBOARD, through_grafana(DASHBOARD)) == []

    def test_that_check_finds_a_field_that_grafana_does_not_know(self) -> None:
        wrong = json.loads(json.dumps(DASHBOARD))
        wrong["panels"][0]["fieldConfig"]["defaults"]["unitt"] = "s"
        wrong["panels"][4]["options"]["seriesMaping"] = "auto"
        assert lost(wrong, through_grafana(wrong)) == [
            "/panels/0/fieldConfig/defaults/unitt",
            "/panels/4/options/seriesMaping",
        ]

    def test_panels_lie_side_by_side_and_cover_what_was_asked_for(self) -> None:
        places = [tuple(panel["gridPos"][k] for k in "xywh") for panel in DASHBOARD["panels"]]
        assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
        for i, (x, y, w, h) in enumerate(places):
            assert x + w <= 24
            for ox, oy, ow, oh in places[:i]:
                assert x >= ox + ow or ox >= x + w or y >= oy + oh or oy >= y + h, "two panels overlap"
        titles = " ".join(panel["title"] for panel in DASHBOARD["panels"])
        for what in ("throughput", "ITL", "TTFT", "Frontier", "KV capacity", "synchronisations"):
            assert what in titles

    def test_only_measured_points_are_shown_unless_somebody_asks(self) -> None:
        (standing,) = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "standing"]
        assert standing["current"]["value"] == ["measured"]
        queries = [query for _, query in expressions() if "label_values" not in query]
        assert queries
        assert all('standing=~"$standing"' in query for query in queries)
