"""Fields of points and loads: every comparison, label, table and command considers each of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.dashboard import series
from dcpbench.exports import csv_table, measured_points
from dcpbench.launch.folders import list_settings
from dcpbench.plan import grid
from dcpbench.points import budget, names
from dcpbench.points.axes import COMPUTES, Axis, Role, format_changed_values
from dcpbench.points.layout import DEGREES, Layout
from dcpbench.points.names import UNKNOWN, format_field
from dcpbench.points.point import AXES, HOW, LOAD_AXES, OPTIONS, Load, Point, TraceFacts, select_point_axes
from dcpbench.points.settings import Settings
from dcpbench.reports import dataframes, exchanges, findings, points_export
from dcpbench.reports.page import points as page_points
from dcpbench.reports.page.points import build_page_data
from dcpbench.reports.reproduce import build_command
from dcpbench.serving.step_times import get_engine_path
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.records.record import Record

DCP = Layout(8, 1, 2)  # each of its degrees can be changed alone
OTHER: dict[str, Any] = {  # another value of each field of a point, except its load
    "model": "deepseek-v3",
    "tp": 4,
    "dp": 2,
    "dcp": 4,
    "ep": "1",
    "workload": "other",
    "concurrency": 9,
    "context": 4001,
    "exchange": "symm",
    "q_replicate": True,
    "project_first": True,
    "all_reduce": "symm",
    "backend": "triton",
    "dtype": "fp16",
    "page_size": 32,
    "interleave": 8,
    "weights": "/models/v3",
    "weights_dtype": "fp8",
    "kv_dtype": "fp8",
    "emulate": "H200",
    "routing": "zipf:1",
    "mtp": 2,
    "acceptance": "0.9/0.5",
    "settings": "max_num_seqs=4",
    "disaggregate": "3",
    "transfer_gb_s": 50.0,
    "transfer_ms": 2.5,
    "pp": 2,
    "pcp": 2,
    "prefill_gpus": 16,
    "repeat": 1,
}
OTHER_LOAD: dict[str, Any] = {  # another value of each field of a load
    "mode": "replay",
    "requests": 97,
    "arrival": "trace",
    "request_rate": 3.0,
    "burstiness": 0.5,
    "paced": True,
    "input_tokens": "401",
    "output_tokens": "41",
    "prefix_share": 0.5,
    "prefix_groups": 3,
    "turns": "4",
    "turn_tokens": "70",
    "think_time": 2.5,
    "system_tokens": 80,
    "branch": 0.25,
    "subagents": 5,
    "trace": "chat.jsonl",
    "trace_sha256": "abc",
    "trace_reading": "format=qwen",
    "trace_facts": TraceFacts(sessions=3),
    "chunk": 1024,
    "policy": "prefill-first",
    "prefix_cache": False,
    "prefill": "flashinfer",
    "seed": 7,
}
RUN_FIELDS = ("workload", "concurrency", "context", "load", "repeat")  # what is run; other fields are of what runs it
DEPLOYED = tuple(axis.name for axis in select_point_axes(Role.DEPLOYED))
ASSUMED = tuple(axis.name for axis in select_point_axes(Role.ASSUMED))  # the instances of an engine
SENDS = {"transfer_gb_s": 25.0, "transfer_ms": 1.0}  # fields of points that transfer KV between instances
HOW_EXCHANGED = tuple(axis.name for axis in select_point_axes(Role.EXCHANGE))
IMPORTED = ("settings", "pp", "pcp", "prefill_gpus")
"""Fields of an imported server: our own points have none of them, and no command sets them."""


def change_field(point: Point, name: str) -> Point:
    """Return the point with another value of a field, of its load if the load has that field."""
    if name in OTHER:
        return msgspec.structs.replace(point, **{name: OTHER[name]})
    assert point.load
    return msgspec.structs.replace(point, load=msgspec.structs.replace(point.load, **{name: OTHER_LOAD[name]}))


def make_repeats(tmp_path: Path, *records: Record) -> dataframes.Frames:
    """Return frames of runs with one record each, read as repeats of one sweep."""
    folders = [build.write_records(tmp_path / f"run-{i}", [record]) for i, record in enumerate(records)]
    return dataframes.load_frames(folders, as_repeats=True)


def make_served_record(point: Point, **settings: Any) -> Record:
    """Return a served record of any point."""
    plain = serve.make_served_record(serve.make_point(serve.TP))
    return msgspec.structs.replace(plain, point=point, measured_with=plain.measured_with | settings)


def list_fields(struct: type[msgspec.Struct], *left_out: str) -> list[str]:
    """Return the names of a struct's fields except these."""
    return [name for name in struct.__struct_fields__ if name not in left_out]


def test_every_field_has_another_value() -> None:
    """A new field needs a decision: which comparisons are possible between two points in which it differs?"""
    assert sorted(OTHER) == sorted(list_fields(Point, "load"))
    assert sorted(OTHER_LOAD) == sorted(list_fields(Load))


class TestAxes:
    @pytest.mark.parametrize(
        ("struct", "axes", "left_out"), [(Point, AXES, ["load"]), (Load, LOAD_AXES, ["trace_facts"])]
    )
    def test_every_field_has_an_axis_with_a_unique_order(
        self, struct: type[msgspec.Struct], axes: list[Axis], left_out: list[str]
    ) -> None:
        """The order of lists must not be left to chance."""
        assert {axis.name for axis in axes} == set(list_fields(struct, *left_out))
        assert len({axis.order for axis in (*AXES, *LOAD_AXES)}) == len(AXES) + len(LOAD_AXES)

    def test_roles_separate_what_computes_a_point_from_what_is_run(self) -> None:
        assert {axis.name for axis in select_point_axes(COMPUTES)} == set(list_fields(Point, *RUN_FIELDS))
        assert ("exchange", *OPTIONS, "interleave") == HOW_EXCHANGED
        assert OPTIONS == ("q_replicate", "project_first")

    def test_default_and_unknown_values_are_not_printed(self) -> None:
        axis = Axis(Role.PATH, 1, "page {}", name="page_size", kind=int, default=1)
        assert [format_changed_values([axis], {"page_size": value}) for value in (1, 0, 64)] == [[], [], ["page 64"]]
        assert [axis.format_value(value) for value in (1, 0, 64)] == ["page 1", "", "page 64"]
        switch = Axis(Role.LOAD, 2, "cache {}", name="cache", kind=bool, default=True)
        assert [format_changed_values([switch], {"cache": value}) for value in (True, None, False)] == [
            [],
            [],
            ["cache off"],
        ]

    def test_dtype_accepts_the_values_with_an_item_size(self) -> None:
        """Compute dtypes are those with an item size; fp8 is only a storage format."""
        (dtype,) = (axis for axis in AXES if axis.name == "dtype")
        assert {*dtype.values, names.FP8} == set(names.PRECISIONS) == set(budget.ITEMSIZE)


class TestComparisons:
    """Runs read as repeats may differ in any field; points that differ in more than the compared field are not
    compared.
    """

    def test_points_without_further_differences_are_compared(self, tmp_path: Path) -> None:
        """Each of these pairs is compared, and is not compared in the tests below after one more field differs."""
        assert (
            len(exchanges.compare_exchanges(make_repeats(tmp_path / "exchanges", *self.make_exchange_pair()).points))
            == 1
        )
        assert self.get_verdict(make_repeats(tmp_path / "decode", *self.make_decode_pair())) != "no baseline"
        assert self.get_verdict(make_repeats(tmp_path / "serve", *self.make_served_pair())) != "no baseline"
        assert (
            len(findings.compare_replay_with_live(make_repeats(tmp_path / "replay", *self.make_replay_pair()).served))
            == 1
        )

    def make_exchange_pair(self) -> tuple[Record, Record]:
        return build.make_ok_record(build.make_point(DCP)), build.make_ok_record(build.make_point(DCP, exchange="symm"))

    def make_decode_pair(self) -> tuple[Record, Record]:
        return build.make_ok_record(build.make_point(Layout(8))), build.make_ok_record(build.make_point(DCP))

    def make_served_pair(self) -> tuple[Record, Record]:
        return make_served_record(serve.make_point(Layout(8))), make_served_record(serve.make_point(DCP))

    def make_replay_pair(self) -> tuple[Record, Record]:
        live = make_served_record(serve.make_point(DCP))
        return live, make_served_record(change_field(live.point, "mode"))

    @pytest.mark.parametrize("name", list_fields(Point, "load", "repeat", *HOW_EXCHANGED))
    def test_exchanges_are_not_compared_if_another_field_differs(self, name: str, tmp_path: Path) -> None:
        plain, symm = self.make_exchange_pair()
        other = msgspec.structs.replace(symm, point=change_field(symm.point, name))
        assert exchanges.compare_exchanges(make_repeats(tmp_path, plain, other).points).empty

    @pytest.mark.parametrize("name", list_fields(Point, "load", "repeat", "dcp", "workload", *HOW_EXCHANGED))
    def test_dcp_has_no_baseline_if_another_field_differs(self, name: str, tmp_path: Path) -> None:
        alone, split = self.make_decode_pair()
        other = msgspec.structs.replace(alone, point=change_field(alone.point, name))
        assert self.get_verdict(make_repeats(tmp_path, other, split)) == "no baseline"

    @pytest.mark.parametrize("name", list_fields(Load, "trace_facts"))
    def test_served_dcp_has_no_baseline_under_another_load(self, name: str, tmp_path: Path) -> None:
        alone, split = self.make_served_pair()
        other = msgspec.structs.replace(alone, point=change_field(alone.point, name))
        assert self.get_verdict(make_repeats(tmp_path, other, split)) == "no baseline"

    @pytest.mark.parametrize("name", list_fields(Point, "load", "repeat", "workload", "context"))
    def test_replay_is_not_compared_with_a_live_run_of_another_point(self, name: str, tmp_path: Path) -> None:
        live, replay = self.make_replay_pair()
        other = msgspec.structs.replace(replay, point=change_field(replay.point, name))
        assert findings.compare_replay_with_live(make_repeats(tmp_path, live, other).served).empty

    @pytest.mark.parametrize("setting", [{"kv_memory_bytes": 8 << 30}, {"limit_seconds": 60.0}])
    def test_points_with_other_kv_memory_or_limit_are_not_compared(
        self, setting: dict[str, Any], tmp_path: Path
    ) -> None:
        """Such points are not repeats, baselines or rivals, and are not compared as replay and live run."""
        alone, split = (
            make_served_record(serve.make_point(Layout(8)), **setting),
            make_served_record(serve.make_point(DCP)),
        )
        assert self.get_verdict(make_repeats(tmp_path / "baseline", alone, split)) == "no baseline"
        read = make_repeats(tmp_path / "rivals", alone, split)
        assert findings.find_best_per_load(findings.select_timed(read.everything)).empty
        replay = make_served_record(change_field(split.point, "mode"), **setting)
        assert findings.compare_replay_with_live(make_repeats(tmp_path / "replay", split, replay).served).empty
        again = msgspec.structs.replace(split, measured_with=split.measured_with | setting, started_at="later")
        assert make_repeats(tmp_path / "repeat", split, again).served["repeats"].tolist() == [1, 1]

    def get_verdict(self, read: dataframes.Frames) -> str:
        """Return the verdict on the one point with DCP."""
        (found,) = findings.compare_dcp_with_baseline(read.everything)["verdict"]
        return str(found)


class TestLabels:
    """Two points of a report that differ are never printed the same."""

    @pytest.mark.parametrize("name", list_fields(Point, "load", "repeat", *HOW_EXCHANGED))
    def test_points_that_differ_have_different_labels(self, name: str, tmp_path: Path) -> None:
        self.check_labels_differ(build.make_ok_record(build.make_point(DCP, **SENDS)), name, tmp_path)

    @pytest.mark.parametrize("name", HOW_EXCHANGED)
    def test_exchanges_that_differ_have_different_labels(self, name: str, tmp_path: Path) -> None:
        self.check_labels_differ(build.make_ok_record(build.make_point(DCP)), name, tmp_path)

    @pytest.mark.parametrize("name", list_fields(Load, "trace_facts"))
    def test_loads_that_differ_have_different_labels(self, name: str, tmp_path: Path) -> None:
        """The load is an open loop with a rate and a burstiness, and prompts with shared prefixes."""
        loop = {"arrival": "gamma", "request_rate": 2.0, "prefix_share": 0.25, "prefix_groups": 2, "turns": "3"}
        if name.startswith("trace"):
            loop |= {"trace": "a.jsonl", "trace_sha256": "def", "trace_reading": "format=mooncake"}
        self.check_labels_differ(make_served_record(serve.make_point(DCP, changed=loop)), name, tmp_path)

    @pytest.mark.parametrize("name", list_fields(Point, "load"))
    def test_points_of_a_sweep_that_differ_have_different_names(self, name: str) -> None:
        """The progress bar, comparisons and --dry-run use these names; fields with one value for a whole run are not in
        them.
        """
        point = build.make_point(DCP)
        same = grid.format_point_name(point) == grid.format_point_name(change_field(point, name))
        assert same == (name in ("workload", *(axis.name for axis in HOW if axis.one)))

    @pytest.mark.parametrize("name", [*list_fields(Point, "load", "repeat"), *(a.name for a in LOAD_AXES if a.label)])
    def test_lines_of_a_dashboard_that_differ_have_different_names(self, name: str) -> None:
        point = serve.make_point(DCP)
        names = [
            series.describe_line(line)
            for line in series.collect_lines([make_served_record(point), make_served_record(change_field(point, name))])
        ]
        assert len(names) == 2
        assert names[0] != names[1]

    @pytest.mark.parametrize(
        ("placed", "labels"),
        [
            ([(8, 1, "tp"), (4, 1, "tp"), (8, 8, "tp")], ["tp4", "tp8", "tp8·dp8·ep8"]),
            ([(8, 1, "1"), (1, 1, "tp"), (8, 8, "tp")], ["tp1", "tp8", "tp8·dp8·ep8"]),
            ([(8, 1, "1"), (8, 1, "tp"), (1, 1, "tp")], ["tp1", "tp8 (ep1)", "tp8 (ep8)"]),
            ([(8, 1, "1"), (4, 1, "tp"), (4, 4, "tp")], ["tp4 (ep4)", "tp4·dp4·ep4", "tp8 (ep1)"]),
            ([(8, 8, "1"), (8, 8, "tp"), (8, 1, UNKNOWN)], ["tp8", "tp8·dp8·ep1", "tp8·dp8·ep8"]),
        ],
        ids=["same-placement", "default", "both", "of-two-layouts", "with-dp"],
    )
    def test_expert_placement_is_labelled_if_it_differs_within_a_layout(
        self, placed: list[tuple[int, int, str]], labels: list[str], tmp_path: Path
    ) -> None:
        """With attention data parallelism the name always has the degree; without it only if two points differ in it."""
        records = [build.make_ok_record(build.make_point(Layout(tp, dp), ep=ep)) for tp, dp, ep in placed]
        assert sorted(make_repeats(tmp_path, *records).points["label"]) == labels

    def test_name_of_a_point_has_its_expert_parallel_degree(self) -> None:
        """The degree is a separate part without attention data parallelism, and belongs to the layout with it; an
        unknown degree is left out.
        """
        points = [build.make_point(Layout(8, dp), ep=ep) for dp in (1, 8) for ep in ("1", "tp", UNKNOWN)]
        found = [
            point.format_changed_fields(COMPUTES, but=Role.EXCHANGE)[0].removesuffix("flashinfer") for point in points
        ]
        assert found == ["", "ep8", "", "", "", ""]
        names = [point.layout_name for point in points]
        assert names == ["tp8", "tp8", "tp8", "tp8·dp8·ep1", "tp8·dp8·ep8", "tp8·dp8"]
        assert [point.ep_degree for point in points] == [1, 8, None] * 2

    def check_labels_differ(self, record: Record, name: str, tmp_path: Path) -> None:
        other = msgspec.structs.replace(record, point=change_field(record.point, name))
        read = make_repeats(tmp_path, record, other).everything
        assert len(read) == 2
        labels = read[["model", "mode", "load", "label"]].astype(str).agg(" | ".join, axis=1)
        assert labels.nunique() == 2, labels.tolist()


class TestSharing:
    """Engines and measurements of one point are used for another only if both are computed the same way."""

    @pytest.mark.parametrize("name", list_fields(Point, *RUN_FIELDS, *DEPLOYED, *ASSUMED, *IMPORTED))
    def test_engine_or_path_differs_with_every_field_that_computes(self, name: str) -> None:
        point = build.make_point(DCP)
        other = change_field(point, name)
        assert not (budget.is_same_engine(point, other) and budget.is_same_path(point, other))

    @pytest.mark.parametrize("name", [*list_fields(Point, *RUN_FIELDS, *DEPLOYED, *ASSUMED, *IMPORTED), "prefill"])
    def test_engine_path_of_step_times_differs_with_every_field(self, name: str) -> None:
        point = serve.make_point(DCP)
        assert get_engine_path(point) != get_engine_path(change_field(point, name))

    @pytest.mark.parametrize("name", DEPLOYED)
    def test_all_instances_have_the_same_engine(self, name: str) -> None:
        """Step times of one instance therefore apply to any number."""
        point = serve.make_point(DCP)
        other = change_field(point, name)
        assert budget.is_same_engine(point, other)
        assert get_engine_path(point) == get_engine_path(other)


class TestTables:
    """Tables, pages and folders have a place for each field of points."""

    @pytest.mark.parametrize("name", [axis.name for axis in AXES])
    def test_exported_table_has_a_column_for_each_field(self, name: str) -> None:
        point = build.make_point(DCP)
        rows = csv_table.build_rows(
            [
                measured_points.MeasuredPoint("run", Path(), build.make_ok_record(p))
                for p in (point, change_field(point, name))
            ],
        )
        assert rows[0][name] != rows[1][name]

    def test_dry_run_table_has_degrees_and_fields_of_the_path(self) -> None:
        (row,) = grid.make_table([grid.Candidate(point=build.make_point(DCP))])
        assert {*DEGREES, *(axis.name for axis in select_point_axes(Role.PATH))} <= set(row)

    def test_page_has_a_filter_for_each_titled_field(self, tmp_path: Path) -> None:
        """The data of the page has a column for each filter."""
        read = make_repeats(tmp_path, make_served_record(change_field(serve.make_point(DCP), "settings")))
        titled = {axis.name for axis in (*AXES, *LOAD_AXES) if axis.title}
        assert titled <= set(build_page_data(read)["columns"])
        assert titled <= set(build_page_data(read)["filters"])
        assert titled <= set(build_page_data(read)["colours"])

    @pytest.mark.parametrize("name", [axis.name for axis in HOW if axis.one])
    def test_settings_of_a_run_contain_fields_with_one_value_for_all(self, name: str) -> None:
        """A run with another value cannot be resumed."""
        point = build.make_point(DCP)
        now = [list_settings([p], Settings(), "cuda") for p in (point, change_field(point, name))]
        assert {option for option in now[0] if now[0][option] != now[1][option]} == {format_field(name)}


class TestCommands:
    @pytest.mark.parametrize("name", list_fields(Point, "workload", "load", "repeat", *IMPORTED))
    def test_command_of_a_point_contains_every_field(self, name: str) -> None:
        point = build.make_point(DCP)
        assert self.build_command_of(point) != self.build_command_of(change_field(point, name))

    @pytest.mark.parametrize("name", list_fields(Load, "trace_sha256", "trace_facts", "paced"))
    def test_command_of_a_load_contains_every_field(self, name: str) -> None:
        """A trace file is given by name; its hash only detects changes. Arrivals of commands are always paced."""
        loop: Mapping[str, Any] = {
            "arrival": "gamma",
            "request_rate": 2.0,
            "prefix_share": 0.25,
            "prefix_groups": 2,
            "turns": "3",
            **({"trace": "a.jsonl"} if name == "trace_reading" else {}),
        }
        point = serve.make_point(DCP, changed=dict(loop))
        assert self.build_command_of(point) != self.build_command_of(change_field(point, name))

    def build_command_of(self, point: Point) -> str:
        return build_command(point, {})


def test_report_keeps_loads_of_files_and_agents(tmp_path: Path) -> None:
    """Points of the report equal those of the records, with the facts of the file and gaps given as text; the tables
    contain no such object.
    """
    facts = TraceFacts(sessions=3, span_s=2.5, prefix_share=0.9)
    agents = {"turns": "4", "think_time": "lognormal:1.2:0.8", "system_tokens": 80, "branch": 0.25}
    points = [
        serve.make_point(DCP, changed={"trace": "a.jsonl", "arrival": "trace", "trace_facts": facts}),
        serve.make_point(DCP, changed=agents),
    ]
    frames = make_repeats(tmp_path, *(make_served_record(point) for point in points))
    assert {point.load for point in page_points.build_points(frames.served)} == {point.load for point in points}
    points_export.write_csv(frames, tmp_path / "points.csv")
    header, *rows = (tmp_path / "points.csv").read_text().splitlines()
    assert "load_trace_facts" not in header.split(",")
    assert any("lognormal:1.2:0.8" in row for row in rows)
    assert "TraceFacts" not in points_export.format_json(frames)
    shapes = set(frames.served["shape"])
    assert any("requests of a.jsonl · 3 sessions" in shape for shape in shapes)
    assert any(
        "lognormal:1.2:0.8 s between turns, 80 shared system tokens, 25% of turns from an earlier" in s for s in shapes
    )
