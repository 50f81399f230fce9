"""Replay of one point: its record, refusals, and the KV cache used for scheduling."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dcpbench.errors import RecordsError, UsageError
from dcpbench.models import SHAPES
from dcpbench.points import latency_bands, memory
from dcpbench.points.budget import plan_engine
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings
from dcpbench.records.record import Emulated, Record
from dcpbench.serving import replay
from dcpbench.serving.replay import make_step_times_name, replay_from_file
from dcpbench.serving.samples import read_samples
from dcpbench.serving.step_times import (
    Case,
    Chunks,
    Decodes,
    MeasuredCase,
    StepTimes,
    get_engine_path,
    write_step_times,
)
from tests.unit.step_times_builder import EXTENT, make_step_times

MEASURED = (
    Path(__file__).parents[2] / "results/serving_4xH200/serving-deepseek-v3-kimi-k2_4xH200_2026-11-21/k2/step-times"
)

LOAD = Load(mode="replay", requests=60, input_tokens="4000", output_tokens="30", chunk=8192)
POINT = Point(
    model="deepseek-v3",
    tp=4,
    dcp=4,
    workload="serve",
    concurrency=8,
    context=4030,
    load=LOAD,
    exchange="ag_rs",
    backend="flashinfer",
    dtype="bf16",
    page_size=64,
)
TIMES = make_step_times(path=get_engine_path(POINT))
PAGE = memory.compute_page_bytes(SHAPES["deepseek-v3"], 64, 2)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "times.json"
    write_step_times(path, TIMES)
    return path


def run(file, tmp_path, point: Point = POINT, settings: Settings = Settings()) -> Record:  # noqa: B008 - frozen
    """Return the record, with the plan of a live run on the machine of the step times."""
    plan = plan_engine([point], settings, SHAPES[point.model], TIMES.make_probe())
    return replay_from_file(point, plan, file, settings, tmp_path, "dcpbench serve --mode replay")


def change_load(**changes: object) -> Point:
    """Return the point with another load."""
    return msgspec.structs.replace(POINT, load=msgspec.structs.replace(LOAD, **changes))


class TestRecord:
    def test_record_is_that_of_a_served_load(self, file, tmp_path) -> None:
        record = run(file, tmp_path)
        assert (record.outcome, record.point) == ("ok", POINT)
        assert (record.serve.finished, record.serve.output_tokens) == (60, 1800)
        assert record.serve.idle_fraction is None
        assert record.started_at
        assert record.measured_with["kv_memory_bytes"] is None

    def test_record_names_its_step_times_and_their_error(self, file, tmp_path) -> None:
        """Step times of the test engine are linear, so the check cases are predicted exactly."""
        conditions = run(file, tmp_path).conditions
        assert conditions.step_times == str(file)
        assert conditions.step_error == pytest.approx(0, abs=1e-9)

    def test_record_has_the_largest_error_of_a_step(self, file, tmp_path) -> None:
        """Times of the check cases are half of the prediction: predicted / measured - 1 = 1."""
        cases = [
            msgspec.structs.replace(m, samples_ms=[m.samples_ms[0] / 2]) if m.case.use == "check" else m
            for m in TIMES.cases
        ]
        write_step_times(file, msgspec.structs.replace(TIMES, cases=cases))
        assert run(file, tmp_path).conditions.step_error == pytest.approx(1.0)

    def test_environment_is_that_of_the_step_times_with_the_given_command(self, file, tmp_path) -> None:
        environment = run(file, tmp_path).environment
        assert environment.device == "NVIDIA H200"
        assert environment.command == "dcpbench serve --mode replay"

    def test_marks_of_the_step_times_are_kept(self, file, tmp_path) -> None:
        write_step_times(file, msgspec.structs.replace(TIMES, warnings=["throttled"]))
        assert run(file, tmp_path).warnings[0] == "throttled"

    def test_forecast_is_between_replays_of_shorter_and_longer_steps(self, file, tmp_path) -> None:
        """Each token waits for a step. Ranks may be 1 % faster, or 2 % slower and 50 % slower with prompts; the output
        rate of closed-loop clients changes as much.
        """
        emulated = Emulated(
            machine="H200",
            calls=1,
            comm_us=1.0,
            comm_low_us=1.0,
            comm_high_us=1.0,
            ranks_low=0.01,
            ranks_high=0.02,
            chunks_high=0.5,
        )
        write_step_times(file, msgspec.structs.replace(TIMES, emulated=emulated))
        record = run(file, tmp_path)
        found, emulated = record.serve, record.emulated
        assert emulated.output_tok_s_low < found.output_tok_s < emulated.output_tok_s_high
        assert emulated.ttft_p50_ms_low < found.ttft_ms.p50 < emulated.ttft_p50_ms_high
        assert emulated.itl_p50_ms_low < found.itl_ms.p50 < emulated.itl_p50_ms_high
        assert emulated.output_tok_s_high == pytest.approx(found.output_tok_s / 0.99, rel=1e-3)
        arrival = record.point.load.arrival
        band = latency_bands.find_band(latency_bands.EMULATED, "itl", arrival, latency_bands.load_published())
        assert band.factor > 1.02, "errors of published forecasts are larger than the longer steps"
        assert (emulated.itl_p50_ms_low, emulated.itl_p50_ms_high) == pytest.approx(band.compute_ends(found.itl_ms.p50))
        assert emulated.ttft_p50_ms_high > 1.1 * found.ttft_ms.p50

    def test_spans_are_minimum_and_maximum_in_any_order(self) -> None:
        def metrics(output_tok_s: float, ttft_ms: float | None) -> SimpleNamespace:
            return SimpleNamespace(
                output_tok_s=output_tok_s, ttft_ms=SimpleNamespace(p50=ttft_ms), itl_ms=SimpleNamespace(p50=None)
            )

        assert replay._compute_spans([metrics(2.0, 9.0), metrics(1.0, 11.0), metrics(3.0, 10.0)]) == {
            "output_tok_s_low": 1.0,
            "output_tok_s_high": 3.0,
            "ttft_p50_ms_low": 9.0,
            "ttft_p50_ms_high": 11.0,
        }
        assert replay._compute_spans([metrics(2.0, None)]) == {"output_tok_s_low": 2.0, "output_tok_s_high": 2.0}

    def test_samples_are_written_to_a_file(self, file, tmp_path) -> None:
        record = run(file, tmp_path)
        rows = read_samples(tmp_path / record.serve.samples_file)
        assert [len(row.token_s) for row in rows] == [30] * 60

    def test_same_point_gives_the_same_metrics(self, file, tmp_path) -> None:
        assert run(file, tmp_path).serve == run(file, tmp_path).serve

    def test_open_loop_has_no_steady_throughput(self, file, tmp_path) -> None:
        record = run(file, tmp_path, change_load(arrival="gamma", request_rate=0.5))
        assert record.serve.steady_tok_s is None
        assert record.serve.finished == 60

    def test_time_limit_cancels_requests(self, file, tmp_path) -> None:
        record = run(file, tmp_path, settings=Settings(limit_seconds=5.0))
        assert record.serve.cancelled == 8
        assert record.serve.wall_s < 6

    def test_requests_that_were_never_sent_cut_a_load_off(self, file, tmp_path) -> None:
        """One request comes in 100 s, and the load ends after 150 s: the first is answered, and no request is in flight."""
        record = run(
            file, tmp_path, change_load(arrival="gamma", request_rate=0.01), settings=Settings(limit_seconds=150.0)
        )
        assert record.serve.submitted < 60
        assert record.serve.cancelled == 0
        assert "cut_off" in record.warnings

    def test_points_of_one_engine_path_share_a_file(self) -> None:
        """The load does not matter; the name contains model and layout."""
        name = make_step_times_name(get_engine_path(POINT))
        assert name.startswith("step-times/deepseek-v3-tp4-dp1-dcp4-ag_rs-")
        assert make_step_times_name(get_engine_path(change_load(requests=1))) == name
        assert make_step_times_name(get_engine_path(msgspec.structs.replace(POINT, backend="triton"))) != name


class TestPool:
    def test_kv_memory_limits_the_capacity(self, file, tmp_path) -> None:
        """141 pages of 64 rows on each of 4 ranks, one of them padding: 140 · 256 = 35,840 tokens, 8 requests."""
        record = run(file, tmp_path, settings=Settings(kv_memory_bytes=141 * PAGE))
        assert (record.kv.capacity_tokens, record.kv.bounded_by) == (35_840, "kv_memory")
        assert record.kv.capacity_requests == 140 // 16

    def test_default_pool_is_that_of_a_live_run_on_the_same_machine(self, file, tmp_path) -> None:
        """DeepSeek-V3 in bf16 leaves no memory, so the pool is sized for the load: 8 requests of 17 pages, and the
        padding page.
        """
        record = run(file, tmp_path)
        assert record.kv.bounded_by == "sweep"
        assert record.kv.capacity_tokens == 8 * 17 * 256

    def test_less_kv_memory_lowers_the_decode_batch(self, file, tmp_path) -> None:
        scarce = run(file, tmp_path, settings=Settings(kv_memory_bytes=60 * PAGE))
        assert scarce.serve.decode_batch < run(file, tmp_path).serve.decode_batch
        assert scarce.serve.finished == 60


class TestInstances:
    """One engine runs as one of several instances."""

    SPLIT = msgspec.structs.replace(POINT, disaggregate="1:2", transfer_gb_s=50.0, transfer_ms=1.5)

    def test_rate_per_gpu_counts_all_instances(self, file, tmp_path) -> None:
        """Three instances have four GPUs each."""
        record = run(file, tmp_path, self.SPLIT)
        assert record.serve.finished == 60
        assert record.serve.output_tok_s_per_gpu == pytest.approx(record.serve.output_tok_s / 12)

    def test_transfers_have_the_prompt_pages_of_each_gpu(self, file, tmp_path) -> None:
        """4,000 tokens are 16 pages of 64 rows on each of 4 ranks; a transfer takes 1.5 ms and their bytes over 50
        GB/s. Prompts are prefilled one after the other, so transfers hardly wait.
        """
        found = run(file, tmp_path, self.SPLIT).serve.instances
        assert (found.transfers, found.sent_bytes) == (60, 60 * 16 * PAGE)
        transfer_ms = 1.5 + 1e3 * 16 * PAGE / 50e9
        assert found.transfer_ms.p50 - found.transfer_wait_ms.p50 == pytest.approx(transfer_ms, rel=0.05)
        rows = read_samples(tmp_path / run(file, tmp_path, self.SPLIT).serve.samples_file)
        busy = sum(row.kv_arrived_s - row.kv_sent_s for row in rows)
        links = found.link_busy_share * max(row.token_s[-1] for row in rows)
        assert busy / links == pytest.approx(round(busy / links), rel=1e-3)

    def test_record_has_busy_shares_of_both_sides(self, file, tmp_path) -> None:
        record = run(file, tmp_path, self.SPLIT)
        assert set(record.serve.instances.busy_share) == {"prefill", "decode"}
        assert all(0 < share < 1 for share in record.serve.instances.busy_share.values())
        aggregated = run(file, tmp_path, msgspec.structs.replace(POINT, disaggregate="2")).serve.instances
        assert set(aggregated.busy_share) == {"both"}
        assert (aggregated.transfers, aggregated.transfer_ms) == (None, None)
        assert run(file, tmp_path).serve.instances is None

    def test_samples_have_the_times_of_transfers(self, file, tmp_path) -> None:
        rows = read_samples(tmp_path / run(file, tmp_path, self.SPLIT).serve.samples_file)
        assert {row.prefilled_by for row in rows} == {0}
        assert {row.instance for row in rows} == {1, 2}
        assert all(row.first_token_s <= row.kv_sent_s < row.kv_arrived_s <= row.token_s[1] for row in rows)
        alone = read_samples(tmp_path / run(file, tmp_path).serve.samples_file)
        assert {(row.instance, row.prefilled_by, row.kv_sent_s) for row in alone} == {(None, None, None)}

    def test_chunks_do_not_delay_decodes_of_other_instances(self, file, tmp_path) -> None:
        """The longest gap of an engine that does both is a step with chunks; with separate instances it is a decode
        step.
        """
        longest = []
        for point in (POINT, self.SPLIT):
            rows = read_samples(tmp_path / run(file, tmp_path, point).serve.samples_file)
            longest.append(max(b - a for row in rows for a, b in itertools.pairwise(row.token_s[1:])))
        assert longest[0] > 0.2
        assert longest[1] < 0.06

    def test_transfers_wait_for_scarce_kv_memory(self, file, tmp_path) -> None:
        """A request takes 16 and one of 20 pages, so each decode instance has one request at a time."""
        scarce = run(file, tmp_path, self.SPLIT, Settings(kv_memory_bytes=21 * PAGE))
        assert scarce.serve.finished == 60
        assert scarce.serve.instances.transfer_wait_ms.mean > 100
        assert scarce.serve.decode_batch == 1


class TestRefusal:
    def test_step_times_of_another_engine_are_refused_with_the_difference(self, file, tmp_path) -> None:
        with pytest.raises(UsageError, match="--exchange ag_rs instead of symm") as caught:
            run(file, tmp_path, msgspec.structs.replace(POINT, exchange="symm"))
        assert str(file) in str(caught.value)

    def test_load_beyond_the_step_times_is_refused(self, file, tmp_path) -> None:
        """Step times reach requests of 5,500 tokens."""
        with pytest.raises(UsageError, match="no step time is known"):
            run(file, tmp_path, msgspec.structs.replace(change_load(input_tokens="9000"), context=9030))

    def test_missing_file_is_named(self, tmp_path) -> None:
        with pytest.raises(RecordsError, match=r"none\.json"):
            run(tmp_path / "none.json", tmp_path)


def test_probe_describes_the_machine_of_the_step_times() -> None:
    probe = TIMES.make_probe()
    assert (probe.device, probe.count, probe.memory_bytes) == ("cuda", 4, 141 << 30)
    cpu: StepTimes = make_step_times(EXTENT, device="CPU")
    assert (cpu.make_probe().device, cpu.is_blocking) == ("cpu", True)


@pytest.mark.parametrize(
    ("blocking", "chunks", "factors"),
    [
        (False, (0.0, 0.08), [(1.17, 1.17), (0.93, 0.93)]),
        (False, (0.0, 0.2), [(1.17, 1.2), (0.93, 0.93)]),
        (False, (0.1, 0.1), [(1.17, 1.17), (0.93, 0.9)]),
        (True, (0.2, 0.2), [(1.0, 1.0), (1.0, 1.0)]),
    ],
)
def test_forecast_error_is_that_of_the_step_with_most_requests(
    blocking: bool, chunks: tuple[float, float], factors: list[tuple[float, float]]
) -> None:
    """10 µs of a step of 100 µs, with bounds of 4 and 25 µs: 15 more, or 6 less; ranks are at most 2 % slower and 1 %
    faster. Steps with prompts have their own bounds if these are larger. If hosts block, the step does not wait for
    communication.
    """
    cases = [
        MeasuredCase(case=Case(decodes=(Decodes(n, 100),)), samples_ms=[ms])
        for n, ms in ((2, 0.05), (8, 0.1), (4, 0.2))
    ]
    cases.append(MeasuredCase(case=Case(chunks=(Chunks(16, 8, 0),)), samples_ms=[7.0]))
    emulated = SimpleNamespace(
        comm_us=10.0,
        comm_low_us=4.0,
        comm_high_us=25.0,
        ranks_low=0.01,
        ranks_high=0.02,
        chunks_low=chunks[0],
        chunks_high=chunks[1],
    )
    times = SimpleNamespace(emulated=emulated, is_blocking=blocking, cases=cases)
    for found, wanted in zip(replay._compute_forecast_factors(times), factors, strict=True):  # type: ignore[arg-type]
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
def test_own_step_times_are_replayed_with_the_policy_of_another_engine(policy: str, file, tmp_path) -> None:
    """SGLang delays decodes for whole prefill batches, so its output differs from that of mixed steps."""
    own, other = run(file, tmp_path), run(file, tmp_path, change_load(policy=policy))
    assert other.serve.finished == 60
    assert other.conditions.policy == ""  # the point names it
    assert other.serve.output_tok_s != own.serve.output_tok_s
