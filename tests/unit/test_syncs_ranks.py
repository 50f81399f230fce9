"""Ranks: which one a trace belongs to, which one has no trace, and the trace of vLLM's front end."""

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
    """Name that vLLM gives a worker's trace."""
    tp = rank if tp is None else tp
    return f"dp{dp}_pp0_tp{tp}_dcp{tp}_ep{tp}_rank{rank}.1764354000000000000.pt.trace.json.gz"


def write_worker(path: Path, *, waits: int = 1, steps: int = 3, **info: Any) -> None:
    """A worker's trace: steps with a kernel and waits each."""
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
    """A front end's trace: operators of the CPU, no GPU."""
    trace = Trace()
    trace.op("aten::empty", 0, 5)
    trace.frame("vllm/v1/engine/async_llm.py(300): output_handler", 0, 50)
    path.write_bytes(gzip.compress(trace.text().encode()))


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["syncs", *args])
    return result.exit_code, "".join(result.output.split())


def without_blanks(text: str) -> str:
    """The text as `run` returns it: lines are wrapped at any place."""
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
    def test_engines_have_their_own_ways(self, name: str, expected: FileRank) -> None:
        assert parse_file_name(name) == expected

    @pytest.mark.parametrize(
        ("name", "is_one"), [(FRONT_END, True), (worker_name(0), False), ("async_llms.json", False), ("t.json", False)]
    )
    def test_a_front_end_is_known_by_its_name(self, name: str, is_one: bool) -> None:
        assert is_front_end(name) is is_one


def summary(
    rank: int | None, dp: int | None = None, size: int | None = None, *, front_end: bool = False
) -> TraceSummary:
    trace = build.trace(f"{dp} {rank}.json")
    trace.rank, trace.dp_rank, trace.world_size, trace.front_end = rank, dp, size, front_end
    return trace


class TestFindMissing:
    def test_a_gap_is_missing(self) -> None:
        (missing,) = find_missing([summary(0), summary(2)])
        assert (missing.ranks, missing.group_size) == ((1,), 3)

    def test_the_number_of_ranks_is_in_the_traces(self) -> None:
        (missing,) = find_missing([summary(0, size=4), summary(1, size=4)])
        assert (missing.ranks, missing.group_size) == ((2, 3), 4)

    def test_one_rank_may_be_looked_at_alone(self) -> None:
        assert find_missing([summary(3, size=8)]) == []
        assert find_missing([summary(3, size=8)] * 2) == []

    def test_unless_a_server_wrote_everything_that_is_there(self) -> None:
        (missing,) = find_missing([summary(0, size=2)], all_ranks=True)
        assert missing.ranks == (1,)
        (missing,) = find_missing([summary(0, size=2), summary(None, front_end=True)])
        assert missing.ranks == (1,)

    def test_traces_that_name_no_rank_are_not_compared(self) -> None:
        assert find_missing([summary(None), summary(None)], all_ranks=True) == []

    def test_replicas_count_their_own_ranks(self) -> None:
        traces = [summary(0, 0), summary(1, 0), summary(0, 1)]
        (missing,) = find_missing(traces)
        assert (missing.group, missing.ranks) == (Group(dp=1), (1,))

    def test_a_replica_without_any_trace_is_missing(self) -> None:
        traces = [summary(rank, dp) for dp in (0, 2) for rank in (0, 1)]
        (missing,) = find_missing(traces)
        assert (missing.group, missing.ranks) == (Group(dp=1), (0, 1))

    def test_replicas_of_attention_share_one_count(self) -> None:
        """SGLang's DP attention: tensor-parallel ranks 0 and 1 serve DP 0, ranks 2 and 3 serve DP 1."""
        traces = [summary(rank, rank // 2) for rank in range(4)]
        assert find_missing(traces) == []
        (missing,) = find_missing(traces[:1] + traces[2:])
        assert missing.ranks == (1,)

    def test_two_profiles_of_the_same_ranks_are_whole(self) -> None:
        assert find_missing([summary(0), summary(1), summary(0), summary(1)]) == []


class TestFolderOfVllm:
    def test_the_front_end_is_named_and_left_out(self, tmp_path: Path) -> None:
        for rank in (0, 1):
            write_worker(tmp_path / worker_name(rank), rank=rank, world_size=2)
        write_front_end(tmp_path / FRONT_END)
        code, output = run("scan", str(tmp_path), "--root", str(tmp_path))
        assert code == 1
        assert without_blanks(f"{FRONT_END}: the trace of vLLM's front end") in output
        report = scan_traces(sorted(tmp_path.iterdir()), root=tmp_path)
        assert sorted((t.rank, t.front_end) for t in report.traces if t.rank is not None) == [(0, False), (1, False)]
        assert [site.count for site in report.sites] == [6]

    def test_no_steps_are_asked_of_it(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), rank=0, world_size=1)
        write_front_end(tmp_path / FRONT_END)
        assert run("scan", str(tmp_path), "--root", str(tmp_path), "--max-per-step", "1")[0] == 0
        written = tmp_path / "out" / "baseline.json"
        written.parent.mkdir()
        code, output = run("baseline", str(tmp_path), "--root", str(tmp_path), "-o", str(written))
        assert code == 0
        assert "marksteps" not in output
        assert run("scan", str(tmp_path), "--root", str(tmp_path), "--baseline", str(written))[0] == 0

    def test_alone_it_answers_nothing(self, tmp_path: Path) -> None:
        write_front_end(tmp_path / FRONT_END)
        code, output = run("scan", str(tmp_path), "--root", str(tmp_path))
        assert code == 3
        assert without_blanks("give the traces of its ranks too") in output

    def test_a_rank_without_gpu_events_is_not_taken_for_it(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), waits=0, rank=0, world_size=2)
        write_front_end(tmp_path / worker_name(1))
        code, output = run("scan", str(tmp_path), "--root", str(tmp_path))
        assert code == 3
        assert without_blanks("holds no GPU events") in output

    def test_a_front_end_that_used_the_gpu_is_read(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), waits=0, rank=0, world_size=1)
        write_worker(tmp_path / FRONT_END)
        assert run("scan", str(tmp_path), "--root", str(tmp_path))[0] == 1

    def test_a_missing_rank_is_named(self, tmp_path: Path) -> None:
        """Clean ranks 0 and 2 say nothing about rank 1."""
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

    def test_waits_of_a_server_without_one_of_its_ranks_are_not_known(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), rank=0, world_size=2)
        with pytest.raises(WorkerError, match="No trace of rank 1 of 2 was read"):
            find_waits(sorted(tmp_path.iterdir()))

    def test_all_ranks_are_asked_for_where_a_server_was_profiled(self, tmp_path: Path) -> None:
        write_worker(tmp_path / worker_name(0), waits=0, rank=0, world_size=2)
        report = scan_traces(sorted(tmp_path.iterdir()), root=tmp_path)
        assert compute_verdict(report, Gate(root=tmp_path)).exit_code == 0
        assert compute_verdict(report, Gate(root=tmp_path, all_ranks=True)).exit_code == 3
