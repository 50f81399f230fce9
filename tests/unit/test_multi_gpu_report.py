"""Report of tools/multi_gpu, from made-up records."""

from pathlib import Path

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.records.record import Floor, Record
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serving
from tools.multi_gpu import report

TP2, DCP2 = Layout(2), Layout(2, 1, 2)
V3_STEP = {"model": "deepseek-v3", "concurrency": 32, "context": 32000, "dtype": "fp8", "kv_dtype": "fp8"}


def step(layout: Layout, ms: float, **changes: object) -> Record:
    """Return the record of a step with this time, within 0.001 %."""
    floor = Floor(floor_ms=60.0, phase_floor_us={}, experts="routed")
    return build.make_ok_record(build.make_point(layout, **changes), median_ms=ms, noise=1e-5, floor=floor)


@pytest.mark.parametrize(
    ("ms", "device", "requests", "verdict"),
    [
        (75.0, "NVIDIA H200", 32, "held"),
        (79.9, "NVIDIA H200", 32, "held"),
        (81.0, "NVIDIA H200", 32, "NOT held"),
        (75.0, "NVIDIA H100 80GB HBM3", 32, "not judged"),
        (75.0, "NVIDIA H200", 24, "not judged"),
    ],
)
def test_limit_is_judged_only_on_its_gpu_and_load(
    tmp_path: Path, ms: float, device: str, requests: int, verdict: str
) -> None:
    """Steps in fp8 must take at most 80 ms and reach 0.75 of their floor of 60 ms, which also is 80 ms."""
    record = step(TP2, ms, **(V3_STEP | {"concurrency": requests}))
    record = msgspec.structs.replace(record, environment=msgspec.structs.replace(build.GPU, device=device))
    build.write_records(tmp_path / "steps" / "fp8", [record])
    (line,) = report.format_step_limits(tmp_path)
    assert f": {verdict}" in line


def test_gain_of_dcp_compares_the_best_with_and_without(tmp_path: Path) -> None:
    """The faster of two exchanges takes 40 ms, tp 50 ms: 1.25. At the other context only DCP fits."""
    build.write_records(
        tmp_path / "grid" / "one",
        [
            step(TP2, 50.0),
            step(DCP2, 45.0),
            step(DCP2, 40.0, exchange="symm"),
            step(DCP2, 60.0, context=128000),
        ],
    )
    rows = report.format_dcp_gains(tmp_path)[2:]
    assert len(rows) == 2
    assert "tp2·dcp2 symm | tp2 | 1.250 |" in rows[0]
    assert "| does not fit |  |" in rows[1]


def test_emulated_steps_are_compared_with_those_of_the_grid(tmp_path: Path) -> None:
    """41 ms is 2.5 % longer than 40 ms; a folder without a record, of a failed command, is no run."""
    build.write_records(tmp_path / "grid" / "v3", [step(DCP2, 40.0), step(TP2, 50.0)])
    build.write_records(tmp_path / "emulated" / "v3", [step(DCP2, 41.0, emulate="H200")])
    (tmp_path / "emulated" / "k2").mkdir()
    (tmp_path / "emulated" / "v3.log").write_text("$ dcpbench sweep\n")
    text = report.format_emulated(tmp_path)
    assert "| 40.00 | 41.00 | +2.5% |" in text[2]
    assert text[-1] == "1 of 1 within 5%, off by +2.5% to +2.5%."


def make_served_record(rate: float, mode: str, faster: float) -> Record:
    """Return a served record with an output rate scaled by `faster`."""
    record = serving.make_served_record(
        serving.make_point(DCP2, changed={"mode": mode, "arrival": "gamma", "request_rate": rate})
    )
    assert record.serve is not None
    changed = msgspec.structs.replace(record.serve, output_tok_s=100.0 * faster)
    return msgspec.structs.replace(record, serve=changed)


def test_replay_is_compared_with_the_live_run_of_its_rate(tmp_path: Path) -> None:
    """Replay has 4 % more output than live at 2 requests/s, and 8 % at 4, above the limit of 5 %."""
    build.write_records(
        tmp_path / "served" / "live-open", [make_served_record(2.0, "live", 1.0), make_served_record(4.0, "live", 2.0)]
    )
    build.write_records(
        tmp_path / "replays" / "replay-open",
        [make_served_record(2.0, "replay", 1.04), make_served_record(4.0, "replay", 2.16)],
    )
    rows = [row for row in report.format_served(tmp_path) if "| replay |" in row]
    assert [row.split("|")[1].rpartition(", ")[2].strip() for row in rows] == ["2 requests/s", "4 requests/s"]
    assert "(+4.0%)" in rows[0]
    assert rows[0].endswith("| within 5% |")
    assert rows[1].endswith("| NOT within: output tok/s |")


def test_load_is_compared_only_with_its_own_replay(tmp_path: Path) -> None:
    """Two loads with as many clients differ in size."""
    small, large = (
        [
            serving.make_served_record(serving.make_point(DCP2, changed={"mode": mode, "requests": requests}))
            for mode in ("live", "replay")
        ]
        for requests in (96, 480)
    )
    build.write_records(tmp_path / "live" / "dcp", small)
    build.write_records(tmp_path / "seed" / "deepseek-v3", large)
    rows = report.format_served(tmp_path)[2:]
    assert [row.split(" × ")[0].removeprefix("| ") for row in rows] == ["96", "96", "480", "480"]


def test_point_of_two_grids_is_one_forecast(tmp_path: Path) -> None:
    """Both `grid` and `experts` contain the point."""
    for part in ("grid", "experts"):
        build.write_records(tmp_path / part / "v3", [step(DCP2, 40.0)])
    build.write_records(tmp_path / "emulated" / "v3", [step(DCP2, 41.0, emulate="H200")])
    assert report.format_emulated(tmp_path)[-1] == "1 of 1 within 5%, off by +2.5% to +2.5%."


def test_passes_over_the_same_load_are_in_one_line(tmp_path: Path) -> None:
    """40 and 41 ms differ by 2.5 %."""
    build.write_records(tmp_path / "again" / "v3", [step(TP2, 40.0), step(TP2, 41.0, repeat=1)])
    (line,) = report.format_passes(tmp_path)
    assert line.endswith("40.00, 41.00 ms, differ by 2.5%")


def test_report_of_a_rehearsal_has_no_times(tmp_path: Path) -> None:
    """Only points are counted."""
    build.write_records(tmp_path / "grid" / "one", [build.make_cpu_record(build.make_point(TP2))])
    text = report.format_report(tmp_path, [], {}, "a rehearsal")
    assert "- grid: ok, 1 points" in text
    assert "## Decode" not in text


def test_failures_are_listed_except_impossible_degrees(tmp_path: Path) -> None:
    """Lists of --dp and --dcp also request dp 2 with dcp 2 on two GPUs."""
    point = build.make_point(DCP2)
    build.write_records(
        tmp_path / "grid" / "one",
        [
            Record(point=point, outcome="rejected", reason="no room"),
            Record(point=msgspec.structs.replace(point, dp=2), outcome="rejected", reason="does not divide"),
        ],
    )
    (line,) = report.format_failures(tmp_path)
    assert line.endswith("rejected: no room")


def test_labels_contain_expert_placement_and_all_reduce(tmp_path: Path) -> None:
    """Default values are left out."""
    build.write_records(
        tmp_path / "experts" / "v3",
        [step(TP2, 50.0, ep="1"), step(TP2, 51.0, ep="tp"), step(TP2, 49.0, ep="1", all_reduce="symm")],
    )
    labels = [row.split(" | ")[0] for row in report.format_decode(tmp_path)[2:]]
    assert [label.removeprefix("| kimi-k2 ").removesuffix(", bfloat16/bfloat16") for label in labels] == [
        "tp2",
        "tp2 ep2",
        "tp2 all-reduce symm",
    ]
