"""Gains of a replayed run by cause, stored next to its records and shown in its report, from made-up step times."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import RecordsError
from dcpbench.models import SHAPES
from dcpbench.points import memory
from dcpbench.points.budget import plan_engine
from dcpbench.points.settings import Settings
from dcpbench.records.file import RecordFile
from dcpbench.records.folder import GAINS_FILE
from dcpbench.records.runs import read_last_records
from dcpbench.reports import dataframes, gains, gains_figure, write_report
from dcpbench.reports.style import Style
from dcpbench.servers.engine_replay import replay_server_point
from dcpbench.serving import gain_split, run_gains
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.replay import make_step_times_name, replay_point
from dcpbench.serving.step_cases import Extent
from dcpbench.serving.step_times import get_engine_path, write_step_times
from tests.unit.step_times_builder import compute_true_ms, make_step_times
from tests.unit.test_engine_replay import ENGINE, make_point, measure_exactly
from tests.unit.test_replay_point import POINT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.serving.gain_split import GainSplit
    from dcpbench.serving.step_model import ReplicaBatch

PAGES = 250  # of 64 tokens on each rank: 15,936 tokens hold three requests of 4,030 without DCP, 15 with it
SETTINGS = Settings(kv_memory_bytes=PAGES * memory.compute_page_bytes(SHAPES["deepseek-v3"], 64, 2))


def compute_quicker_ms(batch: ReplicaBatch) -> float:
    """Return the time of a step with DCP: attention of decodes takes a quarter, and each step 2 ms more."""
    return compute_true_ms(batch) + 2 - 0.75e-4 * batch.kv_tokens


def make_points(base: Point, concurrency: int) -> Iterator[Point]:
    for dcp in (1, 4):
        exchange = "none" if dcp == 1 else "ag_rs"
        yield msgspec.structs.replace(base, concurrency=concurrency, dcp=dcp, exchange=exchange)


def write_run(folder: Path, *concurrencies: int, device: str = "NVIDIA H200", base: Point = POINT) -> Path:
    """Replay tp4 and tp4·dcp4 into a run's folder."""
    for concurrency in concurrencies:
        for point in make_points(base, concurrency):
            plan = plan_engine([point], SETTINGS, SHAPES[point.model], make_step_times(device=device).make_probe())
            extent = Extent.from_points([point], pages=plan.pages, max_context=plan.max_context)
            path = get_engine_path(point) | {"mtp": 0}
            times = make_step_times(
                extent, compute_true_ms if point.dcp == 1 else compute_quicker_ms, path=path, device=device
            )
            name = make_step_times_name(path, str(concurrency))
            write_step_times(folder / name, times)
            requests = make_point_requests(point, SETTINGS, SHAPES[point.model].vocab)
            record = replay_point(point, plan, requests, times, SETTINGS, folder, file=name)
            RecordFile(folder).append(
                msgspec.structs.replace(record, measured_with=msgspec.to_builtins(SETTINGS), seconds=1.0)
            )
    return folder


def store(folder: Path) -> list[run_gains.RunGain]:
    run_gains.store_run_gains(folder, read_last_records(folder).values())
    return run_gains.read_run_gains(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"), 2, 8)
    store(folder)
    return folder


def get_split(run: Path, concurrency: int) -> GainSplit:
    records = read_last_records(run)
    splits = {records[gain.key].point.concurrency: gain.split for gain in run_gains.read_run_gains(run)}
    found = splits[concurrency]
    assert found is not None
    return found


@pytest.mark.parametrize("concurrency", [2, 8])
def test_parts_sum_to_the_difference_of_the_records(run: Path, concurrency: int) -> None:
    """The replays of a split repeat those of the records within 2 %."""
    outputs = {
        r.point.dcp: r.serve.output_tok_s
        for r in read_last_records(run).values()
        if r.serve is not None and r.point.concurrency == concurrency
    }
    total = sum(part.difference for part in get_split(run, concurrency).parts)
    assert total == pytest.approx(outputs[4] - outputs[1], rel=0.02)


def test_capacity_counts_only_if_it_is_short(run: Path) -> None:
    """Two requests fit without DCP; of eight, only three do."""
    parts = {n: {part.causes: part.difference for part in get_split(run, n).parts} for n in (2, 8)}
    assert parts[2][gain_split.CAPACITY,] == pytest.approx(0, abs=1e-9)
    assert parts[8][gain_split.CAPACITY,] > 0.5 * get_split(run, 8).difference > 0


def test_prefixes_kept_only_by_a_larger_pool_are_hits(tmp_path: Path) -> None:
    """Three clients have sessions of 5 turns; without DCP the pool of 15,936 tokens loses some of their earlier turns."""
    load = msgspec.structs.replace(POINT.load, requests=60, turns="5", turn_tokens="900")
    base = msgspec.structs.replace(POINT, load=load, context=8000)
    (found,) = store(write_run(tmp_path, 3, base=base))
    assert found.split is not None, found.reason
    parts = {part.causes: part.difference for part in found.split.parts}
    assert found.split.layout.hit_share > found.split.baseline.hit_share + 0.1
    assert parts[gain_split.HITS,] > 0
    assert sum(parts.values()) == pytest.approx(found.split.difference)


def test_steps_with_drafts_are_estimated_like_for_the_record(tmp_path: Path) -> None:
    """Both estimates use measured steps of one token; otherwise the replays would not have the output of the records."""
    base = msgspec.structs.replace(POINT, mtp=1, acceptance="0.5")
    (found,) = store(write_run(tmp_path, 8, base=base))
    assert found.split is not None, found.reason
    assert found.split.difference > 0


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
def test_gains_of_other_engines_are_split_with_their_policy(policy: str, tmp_path: Path) -> None:
    """Equal steps and twice the KV: the gain is capacity."""
    for dcp in (1, 2):
        engine = msgspec.structs.replace(ENGINE, engine=policy, policy=policy, kv_tokens=28_800 * dcp)
        exchange = "none" if dcp == 1 else "ag_rs"
        point = msgspec.structs.replace(
            make_point(8, inputs="4000", outputs="200"), dcp=dcp, exchange=exchange, backend=policy
        )
        name = make_step_times_name(get_engine_path(point))
        times = measure_exactly([point], engine)
        write_step_times(tmp_path / name, times)
        record = replay_server_point(point, times, name, Settings(), tmp_path)
        assert record.outcome == "ok", record.reason
        RecordFile(tmp_path).append(record)
    (found,) = store(tmp_path)
    assert found.split is not None, found.reason
    parts = {part.causes: part.difference for part in found.split.parts}
    assert parts[gain_split.CAPACITY,] == pytest.approx(found.split.difference, rel=0.1)
    assert found.split.difference > 0.02 * found.split.baseline.value


def test_report_has_the_table_and_the_figure(run: Path, tmp_path: Path) -> None:
    write_report([run], tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert f"## {gains.TITLE}" in text
    assert list((tmp_path / "report" / "figures").glob("serve-gains-replay-*.png"))
    frames = dataframes.load_frames([run])
    table = gains.build_table(frames)
    assert len(table.rows) == 2
    assert {"tp4", "tp4·dcp4"} <= set(table.rows[0])


def test_bars_of_parts_lead_from_the_baseline_to_the_layout(run: Path) -> None:
    """Each bar begins at the end of the one above, and the last one ends where the bar of the layout does."""
    rows = gains.build_rows(dataframes.load_frames([run]))
    figure = gains_figure.draw_gains(rows, Style.from_points(dataframes.load_frames([run]).served), "title")
    for ax, row in zip(figure.axes, rows.to_dict("records"), strict=True):
        bars = {round(bar.get_y() + bar.get_height() / 2): bar for bar in ax.patches}  # type: ignore[attr-defined]
        ends = [bars[y].get_x() + bars[y].get_width() for y in sorted(bars)]
        assert [bars[y].get_x() for y in sorted(bars)[1:-1]] == pytest.approx(ends[:-2])
        assert (ends[0], ends[-1]) == pytest.approx((row["split"].baseline.value, row["split"].layout.value))
        assert ends[-2] == pytest.approx(ends[-1])


def test_missing_step_times_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 2)
    for file in folder.glob("step-times/*dcp1*"):
        file.unlink()
    (found,) = store(folder)
    assert found.split is None
    assert "step-times" in found.reason
    assert gains.describe_gains(dataframes.load_frames([folder]))[0].endswith(found.reason)


def test_step_times_that_do_not_reproduce_the_record_are_refused(tmp_path: Path) -> None:
    """The steps are twice as long as in the record, which gives half of the output."""
    folder = write_run(tmp_path, 2)
    for file in folder.glob("step-times/*dcp1*"):
        stored = json.loads(file.read_text(encoding="utf-8"))
        for case in stored["cases"]:
            case["samples_ms"] = [2 * ms for ms in case["samples_ms"]]
        file.write_text(json.dumps(stored), encoding="utf-8")
    (found,) = store(folder)
    assert found.reason.startswith("a replay of tp4 has ")


def test_gains_on_a_cpu_are_not_split(run: Path, tmp_path: Path) -> None:
    records = read_last_records(run).values()
    on_cpu = [
        msgspec.structs.replace(r, environment=msgspec.structs.replace(r.environment, device="CPU"))
        for r in records
        if r.environment is not None
    ]
    run_gains.store_run_gains(tmp_path, on_cpu)
    assert run_gains.read_run_gains(tmp_path) == []


def test_long_runs_are_not_split(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a million requests would take hours."""
    monkeypatch.setattr(run_gains, "MAX_STEPS", 10)
    run_gains.store_run_gains(tmp_path, read_last_records(run).values())
    assert ["steps" in found.reason for found in run_gains.read_run_gains(tmp_path)] == [True, True]


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / GAINS_FILE).write_text("[{", encoding="utf-8")
    with pytest.raises(RecordsError, match=GAINS_FILE):
        run_gains.read_run_gains(tmp_path)
