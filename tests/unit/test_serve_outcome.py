"""Test the metrics of a record and the Parquet file of samples that a run of requests yields."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import OutputError, RecordsError, UsageError
from dcpbench.points.point import Load, Point
from dcpbench.records.record import SpeculationMetrics
from dcpbench.serving.outcome import (
    CANCELLED,
    FINISHED,
    REJECTED,
    StepCounts,
    compute_serve_metrics,
    find_warnings,
    format_summary,
    make_rows,
)
from dcpbench.serving.samples import POINT_KEY, make_samples_name, read_samples, write_samples
from tests.unit import virtual_serving as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import ServeMetrics
    from dcpbench.serving.traffic import Traffic

POINT = Point(
    model="kimi-k2",
    tp=4,
    dcp=4,
    workload="serve",
    concurrency=2,
    context=40,
    backend="triton",
    dtype="bfloat16",
    load=Load(requests=4, input_tokens="32", output_tokens="8", chunk=64),
)


def compute_metrics(run: tuple[Traffic, StepCounts], **changes: object) -> ServeMetrics:
    """Return the metrics of a run on tp4 without objectives."""
    traffic, steps = run
    plain = {"gpus": 4, "concurrency": traffic.concurrency, "slo": {}, "steps": steps}
    return compute_serve_metrics(traffic.samples, **(plain | changes))  # type: ignore[arg-type]


class TestMetrics:
    def test_metrics_of_a_closed_loop_of_two_clients(self) -> None:
        """4 requests of 32 + 8 tokens, steps of 1 s. Two prompts fit into the first chunk of 64: tokens at 1, 2, … 8 s.

        Their clients' next requests are submitted at 8 s: tokens at 9 … 16 s. TTFT 1 s, ITL 1 s, E2EL 8 s; 32 tokens in
        16 s = 2 tok/s, 0.5 a GPU; (128 + 32) / 16 = 10 tok/s in all; 2 of 16 steps have prefill.
        """
        got = compute_metrics(build.serve([build.make_request(i) for i in range(4)], concurrency=2))
        assert (got.ttft_ms.mean, got.ttft_ms.p50, got.ttft_ms.samples) == (1000, 1000, 4)
        assert (got.itl_ms.p50, got.itl_ms.samples) == (1000, 28)
        assert (got.tpot_ms.p50, got.e2el_ms.p50) == (1000, 8000)
        assert (got.output_tok_s, got.output_tok_s_per_gpu, got.total_tok_s) == (2, 0.5, 10)
        assert (got.request_throughput, got.tok_s_per_user, got.wall_s) == (0.25, 1, 16)
        assert (got.steady_tok_s, got.steady_s) == (2, 16)
        assert (got.steps, got.decode_steps, got.decode_batch) == (16, 14, 2)
        assert (got.submitted, got.finished, got.rejected, got.cancelled) == (4, 4, 0, 0)
        assert (got.input_tokens, got.output_tokens) == (128, 32)
        assert got.request_goodput is None

    def test_failed_request_is_in_flight_until_it_failed(self) -> None:
        """As above, but a server broke off the last answer after 3 of 8 tokens, at 11 s: both clients are busy until then."""
        traffic, steps = build.serve([build.make_request(i) for i in range(4)], concurrency=2)
        broken = traffic.samples[-1]
        broken.token_s, broken.failed = broken.token_s[:3], "closed"
        got = compute_metrics((traffic, steps))
        assert (got.steady_s, got.wall_s, got.failed, got.cancelled) == (11, 16, 1, 0)

    def test_percentiles_need_their_minimum_of_samples(self) -> None:
        """The 4 TTFTs give only a median; 4 · 24 = 96 gaps give p90 (64), not p95 (130)."""
        got = compute_metrics(build.serve([build.make_request(i, outputs=25) for i in range(4)], concurrency=2))
        assert (got.ttft_ms.p90, got.itl_ms.samples, got.itl_ms.p90, got.itl_ms.p95) == (None, 96, 1000, None)

    def test_open_loop_has_no_steady_throughput(self) -> None:
        """The second request is due at 2.5 s, within a step, and joins the one from 3 s to 4 s: TTFT 1.5 s."""
        got = compute_metrics(build.serve([build.make_request(0, arrival_s=0.0), build.make_request(1, arrival_s=2.5)]))
        assert got.ttft_ms.p50 == (1000 + 1500) / 2
        assert (got.steady_tok_s, got.steady_s) == (None, None)

    def test_goodput_counts_requests_within_the_objectives(self) -> None:
        """One chunk has two of three prompts, so that TTFT is 1, 1 and 2 s. Within 1.5 s there are 2 requests in 9 s."""
        got = compute_metrics(build.serve([build.make_request(i) for i in range(3)], concurrency=3), slo={"ttft": 1500})
        assert got.slo_ms == {"ttft": 1500}
        assert got.request_goodput == pytest.approx(2 / 9)

    def test_preemptions_and_cached_tokens_are_counted(self) -> None:
        """Two requests of 2 + 4 pages each share 10 pages: the second is preempted once both need a fifth page."""
        traffic, steps = build.serve([build.make_request(i, outputs=64) for i in range(2)], concurrency=2, pages=11)
        got = compute_metrics((traffic, steps))
        assert got.preemptions == sum(r.preemptions or 0 for r in make_rows(traffic.samples)) == 1
        same = [dataclasses.replace(build.make_request(0), number=i) for i in range(2)]
        assert compute_metrics(build.serve(same, concurrency=1)).cached_tokens == 16, "one page of the prompt's two"

    def test_cancelled_requests_count_as_output_and_have_no_latency(self) -> None:
        """At the end after 4 s, both have 4 of 8 tokens: 8 tokens in 4 s are 2 tok/s, and no request has a TTFT."""
        got = compute_metrics(
            build.serve([build.make_request(i) for i in range(4)], concurrency=2, until_s=4), slo={"ttft": 1e6}
        )
        assert (got.finished, got.cancelled, got.output_tokens, got.output_tok_s) == (0, 2, 8, 2)
        assert (got.ttft_ms.p50, got.ttft_ms.samples, got.itl_ms.p50, got.tok_s_per_user) == (None, 0, None, None)
        assert (got.request_goodput, got.request_throughput, got.steady_tok_s) == (0, 0, 2)

    def test_request_cancelled_before_its_first_token_counts_as_in_flight(self) -> None:
        """The KV cache has space for two of three clients: the third waits from 0 to 4 s, so that all three are in
        flight for 4 s.
        """
        stopped = build.serve([build.make_request(i) for i in range(3)], concurrency=3, pages=8, until_s=4)
        got = compute_metrics(stopped)
        assert [len(s.token_s) for s in stopped[0].samples] == [4, 4, 0]
        assert (got.cancelled, got.steady_s, got.steady_tok_s) == (3, 4, 2)

    def test_summary_omits_medians_that_are_missing(self) -> None:
        done, cut = (
            compute_metrics(build.serve([build.make_request(i) for i in range(4)], concurrency=2, until_s=until))
            for until in (99, 4)
        )
        assert format_summary(done) == "2 tok/s, TTFT 1,000.0 ms, ITL 1,000.0 ms"
        assert format_summary(cut) == "2 tok/s"
        drafted = msgspec.structs.replace(done, speculation=SpeculationMetrics(draft_tokens=1, tokens_per_step=2))
        assert format_summary(drafted) == "2 tok/s, TTFT 1,000.0 ms, TPOT 1,000.0 ms"

    def test_rejected_request_is_only_counted(self) -> None:
        """The request has 2,000 tokens, and the cache 1,600."""
        got = compute_metrics(build.serve([build.make_request(0, inputs=2000), build.make_request(1)], concurrency=1))
        assert (got.submitted, got.finished, got.rejected, got.input_tokens) == (2, 1, 1, 32)

    def test_run_without_any_token_raises_an_error_with_the_cause(self) -> None:
        with pytest.raises(UsageError, match=r"1 request rejected and 0 cut off.*--kv-memory"):
            compute_metrics(build.serve([build.make_request(0, inputs=2000)], concurrency=1))
        with pytest.raises(UsageError, match=r"1 cut off by --timeout load=1; use a longer one\.$"):
            compute_metrics(build.serve([build.make_request(0, inputs=200)], concurrency=1, until_s=1), limit_s=1.0)
        with pytest.raises(UsageError, match=r"a signal ended the run before the first token.*--resume\.$"):
            compute_metrics(
                build.serve([build.make_request(0, inputs=200)], concurrency=1, until_s=1), interrupted=True
            )

    def test_few_samples_of_ttft_or_itl_have_a_warning(self) -> None:
        """The percentile p99 needs 662 samples. 700 requests of 2 tokens have 700 of both; 350 of 3 tokens have 700
        gaps and 350 TTFTs.
        """
        enough, few_ttft, few_itl = (
            compute_metrics(build.serve([build.make_request(i, 1, outputs) for i in range(n)], concurrency=64))
            for n, outputs in ((700, 2), (350, 3), (700, 1))
        )
        assert (few_ttft.ttft_ms.samples, few_ttft.ttft_ms.p99, few_ttft.itl_ms.samples) == (350, None, 700)
        assert (few_itl.ttft_ms.samples, few_itl.itl_ms.samples) == (700, 0)
        assert find_warnings(enough) == []
        assert find_warnings(few_ttft) == ["few_samples"]
        assert find_warnings(few_itl) == ["few_samples"]

    def test_cancelled_or_rejected_requests_have_a_warning(self) -> None:
        requests = [build.make_request(i, 1, 2) for i in range(700)]
        cut = compute_metrics(build.serve([*requests, build.make_request(700, 1, 50)], concurrency=64, until_s=40))
        refused = compute_metrics(build.serve([*requests, build.make_request(700, inputs=2000)], concurrency=64))
        assert (cut.cancelled, refused.rejected) == (1, 1)
        assert find_warnings(cut) == ["cut_off"]
        assert find_warnings(refused) == ["rejections"]

    @pytest.mark.parametrize("slo", [{"latency": 5.0}, {"itl": 0.0}, {"itl": float("nan")}])
    def test_invalid_objectives_are_refused(self, slo: dict[str, float]) -> None:
        with pytest.raises(UsageError):
            compute_metrics(build.serve([build.make_request(0)], concurrency=1), slo=slo)


class TestSamples:
    def test_samples_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        """The requests are a finished, a rejected and two cancelled ones, one of which never got a token. The third is
        submitted after the second has been rejected, after the first step: tokens at 2 s and 3 s.
        """
        requests = [
            build.make_request(0, outputs=2),
            build.make_request(1, inputs=2000),
            build.make_request(2),
            build.make_request(3, 100),
        ]
        traffic, _ = build.serve(requests, concurrency=2, until_s=3)
        traffic.samples[0].tokens += [5, 7]
        written = make_rows(traffic.samples)
        name = write_samples(tmp_path, POINT, written)
        got = read_samples(tmp_path / name)
        assert got == written
        assert [r.outcome for r in got] == [FINISHED, REJECTED, CANCELLED, CANCELLED]
        assert (got[0].end_s, got[0].tokens, got[0].token_s) == (2, [5, 7], [1, 2])
        assert got[1].reason is not None
        assert got[1].cached_tokens is None
        assert (got[2].output_tokens, got[2].end_s, got[3].first_token_s) == (2, None, None)
        assert [p.name for p in (tmp_path / "samples").iterdir()] == [name.removeprefix("samples/")]

    def test_samples_name_the_replica_of_each_request(self, tmp_path: Path) -> None:
        """Requests go to the replica with the fewest: 0 and 1 alternately. A waiting or rejected request has no
        replica.
        """
        requests = [
            build.make_request(0),
            build.make_request(1),
            build.make_request(2, inputs=2000),
            build.make_request(3, inputs=1590),
        ]
        traffic, _ = build.serve(requests, concurrency=4, replicas=2, until_s=1)
        found = read_samples(tmp_path / write_samples(tmp_path, POINT, make_rows(traffic.samples)))
        assert [(r.outcome, r.replica, r.cached_tokens, r.preemptions) for r in found] == [
            (CANCELLED, 0, 0, 0),
            (CANCELLED, 1, 0, 0),
            (REJECTED, None, None, None),
            (CANCELLED, None, None, 0),
        ]

    def test_samples_file_has_the_key_of_its_point(self, tmp_path: Path) -> None:
        """The file can be identified without its record."""
        import pyarrow.parquet as pq

        metadata = pq.read_schema(tmp_path / write_samples(tmp_path, POINT, [])).metadata
        assert metadata[POINT_KEY].decode() == POINT.get_key()
        assert read_samples(tmp_path / make_samples_name(POINT)) == []

    def test_samples_file_name_is_unique_for_each_point_and_repeat(self) -> None:
        """The same point has the same name, and the name of a model adds no folder."""
        names = {make_samples_name(point) for point in (POINT, change_point(repeat=1), change_point(concurrency=3))}
        assert len(names) == 3
        assert make_samples_name(POINT) == make_samples_name(change_point())
        assert make_samples_name(POINT).startswith("samples/kimi-k2-tp4-dcp4-live-")
        assert make_samples_name(change_point(dp=4, dcp=1, ep="1")).startswith("samples/kimi-k2-tp4-dp4-ep1-live-")
        assert make_samples_name(change_point(model="../../x y")).count("/") == 1

    def test_foreign_and_damaged_samples_files_are_refused(self, tmp_path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
        (tmp_path / "bad.parquet").write_bytes(b"PAR1")
        schema = pa.schema([("a", pa.int32())], metadata={POINT_KEY: b"p", b"dcpbench.samples_version": b"99"})
        pq.write_table(pa.table({"a": [1]}, schema=schema), tmp_path / "new.parquet")
        for name in ("other.parquet", "bad.parquet", "none.parquet", "new.parquet"):
            with pytest.raises(RecordsError):
                read_samples(tmp_path / name)

    def test_changed_byte_never_yields_other_samples(self, tmp_path: Path) -> None:
        """With any changed byte, the file is refused or has the original samples."""
        requests = [build.make_request(0, outputs=2), build.make_request(1, inputs=2000), build.make_request(2)]
        traffic, _ = build.serve(requests, concurrency=2, until_s=9)
        written = make_rows(traffic.samples)
        path = tmp_path / write_samples(tmp_path, POINT, written)
        whole = path.read_bytes()
        refused = 0
        for place in range(0, len(whole), 23):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            try:
                assert read_samples(path) == written
            except RecordsError:
                refused += 1
        assert refused > len(whole) // 50, "the reader checks most bytes"

    def test_samples_changed_after_writing_are_refused(self, tmp_path: Path) -> None:
        """The file is valid, and has 3 s in place of 2 s."""
        import pyarrow.parquet as pq

        traffic, _ = build.serve([build.make_request(0, outputs=2)], concurrency=1)
        path = tmp_path / write_samples(tmp_path, POINT, make_rows(traffic.samples))
        table = pq.read_table(path)
        changed_times = table.set_column(table.schema.get_field_index("end_s"), table.schema.field("end_s"), [[3.0]])
        pq.write_table(changed_times, path)
        with pytest.raises(RecordsError, match=r"its checksum.*repeat the sweep"):
            read_samples(path)

    @pytest.mark.parametrize("left", [1, 100, -1, -8])
    def test_truncated_samples_file_is_refused(self, left: int, tmp_path: Path) -> None:
        path = tmp_path / write_samples(tmp_path, POINT, [])
        path.write_bytes(path.read_bytes()[:left])
        with pytest.raises(RecordsError, match="cannot be read as samples"):
            read_samples(path)

    def test_folder_that_cannot_be_written_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "samples").touch()
        with pytest.raises(OutputError, match="another folder"):
            write_samples(tmp_path, POINT, [])


def change_point(**changes: object) -> Point:
    """Return the point with other values."""
    return msgspec.structs.replace(POINT, **changes)


@pytest.mark.parametrize("heavy", ["pyarrow", "pandas", "torch"])
def test_import_of_outcome_and_samples_loads_nothing_heavy(heavy: str) -> None:
    """The package pyarrow is imported when a file is written or read."""
    code = f"import sys, dcpbench.serving.outcome, dcpbench.serving.samples; print({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
