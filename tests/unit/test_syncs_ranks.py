"""Test which rank a trace belongs to, which ranks have no trace, and the trace of vLLM's front end."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from dcpbench.cli import app
from dcpbench.errors import WorkerError
from dcpbench.servers.profile import find_waits
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.trace_ranks import FileRank, Group, find_missing, is_front_end, parse_file_name
from tests.unit import syncs_builder as build
from tests.unit.trace_builder import Trace

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.syncs.sync_report import TraceSummary

FRONT_END = "node7_4242.async_llm.1764354000000000000.pt.trace.json.gz"


def worker_name(rank: int, *, dp: int = 0, tp: int | None = None) -> str:
    """Return the name that vLLM gives to the trace of a worker."""
    tp = rank if tp is None else tp
    return f"dp{dp}_pp0_tp{tp}_dcp{tp}_ep{tp}_rank{rank}.1764354000000000000.pt.trace.json.gz"


def write_worker(path: Path, *, waits: int = 1, steps: int = 3, **info: Any) -> None:
    """Write the trace of a worker, with a kernel and waits in each step."""
    trace = Trace().work()
    trace.op("aten::empty", -500, -490, seen=path.name)  # no two ranks write the same text
    if info:
        trace.top["distributedInfo"] = {"backend": "nccl", **info, "pg_count": 1}
    for step in range(steps):
        trace.range(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
        trace.kernel(1000 * step + 10, 1000 * step + 20, 1000 * step + 30)
        for n in range(waits):
            trace.item(1000 * step + 100 * (n + 1), 1000 * step + 100 * (n + 1) + 50)
    path.write_bytes(gzip.compress(trace.text().encode()))


def write_front_end(path: Path) -> None:
    """Write the trace of a front end, with operators of the CPU and without a GPU."""
    trace = Trace()
    trace.op("aten::empty", 0, 5)
    trace.frame("vllm/v1/engine/async_llm.py(300): output_handler", 0, 50)
    path.write_bytes(gzip.compress(trace.text().encode()))


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["syncs", *args])
    return result.exit_code, "".join(result.output.split())


def without_blanks(text: str) -> str:
    """Return the text without blanks, since lines are wrapped at any position."""
    return "".join(text.split())


class TestParseFileName:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            (worker_name(3, dp=1), FileRank(3, Group(dp=1))),
            ("dp0_pp0_tp0_ep0_rank0.17.pt.trace.json", FileRank(0, Group(dp=0))),
            ("1764354000.1-TP-5.trace.json.gz", FileRank(5)),
            ("1764354000.1-TP-5-DECODE.trace.json.gz", FileRank(5)),
            ("1764354000.1-TP-2-DP-1-PP-3-EP-2-EXTEND.trace.json.gz", FileRank(2, Group(1, 3))),
            ("trace_rank_12.json", FileRank(12)),
            ("llama-tp4.json", FileRank()),  # the size of a layout, not a rank
            ("tp2_ep8.json.gz", FileRank()),
            (FRONT_END, FileRank()),
        ],
    )
    def test_file_names_of_each_engine_are_parsed(self, name: str, expected: FileRank) -> None:
        assert parse_file_name(name) == expected

    @pytest.mark.parametrize(
        ("name", "is_one"), [(FRONT_END, True), (worker_name(0), False), ("async_llms.json", False), ("t.json", False)]
    )
    def test_front_end_is_recognised_by_its_file_name(self, name: str, is_one: bool) -> None:
        assert is_front_end(name) is is_one


def make_summary(
    rank: int | None, dp: int | None = None, size: int | None = None, *, front_end: bool = False
) -> TraceSummary:
    trace = build.make_trace(f"{dp} {rank}.json")
    trace.rank, trace.dp_rank, trace.world_size, trace.front_end = rank, dp, size, front_end
    return trace


class TestFindMissing:
    def test_rank_between_others_is_missing(self) -> None:
        (missing,) = find_missing([make_summary(0), make_summary(2)])
        assert (missing.ranks, missing.group_size) == ((1,), 3)

    def test_number_of_ranks_is_read_from_the_traces(self) -> None:
        (missing,) = find_missing([make_summary(0, size=4), make_summary(1, size=4)])
        assert (missing.ranks, missing.group_size) == ((2, 3), 4)

    def test_single_trace_has_no_missing_ranks(self) -> None:
        assert find_missing([make_summary(3, size=8)]) == []
        assert find_missing([make_summary(3, size=8)] * 2) == []

    def test_single_trace_of_a_server_has_missing_ranks(self) -> None:
        (missing,) = find_missing([make_summary(0, size=2)], all_ranks=True)
        assert missing.ranks == (1,)
        (missing,) = find_missing([make_summary(0, size=2), make_summary(None, front_end=True)])
        assert missing.ranks == (1,)

    def test_traces_without_a_rank_have_no_missing_ranks(self) -> None:
        assert find_missing([make_summary(None), make_summary(None)], all_ranks=True) == []

    def test_missing_ranks_are_found_for_each_replica(self) -> None:
        traces = [make_summary(0, 0), make_summary(1, 0), make_summary(0, 1)]
        (missing,) = find_missing(traces)
        assert (missing.group, missing.ranks) == (Group(dp=1), (1,))

    def test_replica_without_any_trace_is_missing(self) -> None:
        traces = [make_summary(rank, dp) for dp in (0, 2) for rank in (0, 1)]
        (missing,) = find_missing(traces)
        assert (missing.group, missing.ranks) == (Group(dp=1), (0, 1))

    def test_attention_dp_replicas_share_one_count_of_ranks(self) -> None:
        """In SGLang's DP attention, tensor-parallel ranks 0 and 1 serve DP 0, and ranks 2 and 3 serve DP 1."""
        traces = [make_summary(rank, rank // 2) for rank in range(4)]
        assert find_missing(traces) == []
        (missing,) = find_missing(traces[:1] + traces[2:])
        assert missing.ranks == (1,)

    def test_two_profiles_of_the_same_ranks_are_complete(self) -> None:
        assert find_missing([make_summary(0), make_summary(1), make_summary(0), make_summary(1)]) == []


class TestFolderOfVllm:
    def test_front_end_is_named_and_left_out(self, tmp_path: Path) -> None:
        for rank in (0, 1):
            write_worker(tmp_path / worker_name(rank), rank=rank, world_size=2)
        write_front_end(tmp_path / FRONT_END)
        code, output = run("scan", str(tmp_path), "--root", str(tmp_path))
        assert code == 1
        assert without_blanks(f"{FRONT_END}: vLLM's front end uses no GPU") in output
        report = scan_traces(sorted(tmp_path.iterdir()), root=tmp_path)
        assert sorted((t.rank, t.front_end) for t in report.traces if t.rank is not None) == [(0, False), (1, False)]
        assert [site.count for site in report.sites] == [6]

    def test_front_end_needs_no_steps(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), rank=0, world_size=1)
        write_front_end(tmp_path / FRONT_END)
        assert run("scan", str(tmp_path), "--root", str(tmp_path), "--max-per-step", "1")[0] == 0
        written = tmp_path / "out" / "baseline.json"
        written.parent.mkdir()
        code, output = run("baseline", str(tmp_path), "--root", str(tmp_path), "-o", str(written))
        assert code == 0
        assert "marksteps" not in output
        assert run("scan", str(tmp_path), "--root", str(tmp_path), "--baseline", str(written))[0] == 0

    def test_front_end_without_workers_cannot_answer(self, tmp_path: Path) -> None:
        write_front_end(tmp_path / FRONT_END)
        code, output = run("scan", str(tmp_path), "--root", str(tmp_path))
        assert code == 3
        assert without_blanks("give the traces of its ranks too") in output

    def test_rank_without_gpu_events_is_not_a_front_end(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), waits=0, rank=0, world_size=2)
        write_front_end(tmp_path / worker_name(1))
        code, output = run("scan", str(tmp_path), "--root", str(tmp_path))
        assert code == 3
        assert without_blanks("holds no GPU events") in output

    def test_front_end_with_gpu_events_is_scanned(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), waits=0, rank=0, world_size=1)
        write_worker(tmp_path / FRONT_END)
        assert run("scan", str(tmp_path), "--root", str(tmp_path))[0] == 1

    def test_missing_rank_is_named(self, tmp_path: Path) -> None:
        """Clean ranks 0 and 2 do not imply that rank 1 is clean."""
        for rank in (0, 2):
            write_worker(tmp_path / worker_name(rank), waits=0)
        code, output = run("scan", str(tmp_path), "--root", str(tmp_path))
        assert code == 3
        assert without_blanks("No trace of rank 1 of 3 was read") in output

    def test_waits_of_a_server_are_those_of_its_ranks(self, tmp_path: Path) -> None:
        for rank, waits in ((0, 1), (1, 2)):
            write_worker(tmp_path / worker_name(rank), waits=waits, rank=rank, world_size=2)
        write_front_end(tmp_path / FRONT_END)
        assert find_waits(sorted(tmp_path.iterdir()))[0] == 2

    def test_waits_of_a_server_with_a_missing_rank_are_unknown(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), rank=0, world_size=2)
        with pytest.raises(WorkerError, match="No trace of rank 1 of 2 was read"):
            find_waits(sorted(tmp_path.iterdir()))

    def test_profile_of_a_server_requires_all_ranks(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), waits=0, rank=0, world_size=2)
        report = scan_traces(sorted(tmp_path.iterdir()), root=tmp_path)
        assert compute_verdict(report, Gate(root=tmp_path)).exit_code == 0
        assert compute_verdict(report, Gate(root=tmp_path, all_ranks=True)).exit_code == 3
