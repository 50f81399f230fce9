"""One replayed point: its record, what it refuses, and the KV cache that it schedules for."""

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
from tests.unit.step_times_builder import EXTENT, step_times

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
TIMES = step_times(path=get_engine_path(POINT))
PAGE = memory.compute_page_bytes(SHAPES["deepseek-v3"], 64, 2)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "times.json"
    write_step_times(path, TIMES)
    return path


def run(file, tmp_path, point: Point = POINT, settings: Settings = Settings()) -> Record:  # noqa: B008 - frozen
    """The record, with the plan of a live run on the machine of the step times."""
    plan = plan_engine([point], settings, SHAPES[point.model], TIMES.make_probe())
    return replay_from_file(point, plan, file, settings, tmp_path, "dcpbench serve --mode replay")


def changed(**changes: object) -> Point:
    """The point with another load."""
    return msgspec.structs.replace(POINT, load=msgspec.structs.replace(LOAD, **changes))


class TestRecord:
    def test_it_is_that_of_a_served_load(self, file, tmp_path) -> None:
        record = run(file, tmp_path)
        assert (record.outcome, record.point) == ("ok", POINT)
        assert (record.serve.finished, record.serve.output_tokens) == (60, 1800)
        assert record.serve.idle_fraction is None
        assert record.started_at
        assert record.measured_with["kv_memory_bytes"] is None

    def test_it_says_where_its_step_times_come_from_and_how_good_they_are(self, file, tmp_path) -> None:
        """The engine on paper is linear, so that the cases to check with are met exactly."""
        conditions = run(file, tmp_path).conditions
        assert conditions.step_times == str(file)
        assert conditions.step_error == pytest.approx(0, abs=1e-9)

    def test_it_names_the_worst_error_of_a_step(self, file, tmp_path) -> None:
        """The times of cases to check with are half of what is predicted: predicted / measured - 1 = 1."""
        cases = [
            msgspec.structs.replace(m, samples_ms=[m.samples_ms[0] / 2]) if m.case.use == "check" else m
            for m in TIMES.cases
        ]
        write_step_times(file, msgspec.structs.replace(TIMES, cases=cases))
        assert run(file, tmp_path).conditions.step_error == pytest.approx(1.0)

    def test_its_environment_is_that_of_the_step_times_with_the_command_typed(self, file, tmp_path) -> None:
        environment = run(file, tmp_path).environment
        assert environment.device == "NVIDIA H200"
        assert environment.command == "dcpbench serve --mode replay"

    def test_marks_of_the_step_times_stay(self, file, tmp_path) -> None:
        write_step_times(file, msgspec.structs.replace(TIMES, warnings=["throttled"]))
        assert run(file, tmp_path).warnings[0] == "throttled"

    def test_a_forecast_is_between_replays_of_shorter_and_of_longer_steps(self, file, tmp_path) -> None:
        """Each token waits for a step. Ranks 1 % faster, or 2 % slower and 50 % with prompts: clients that never rest get the less."""
        wire = Emulated(
            machine="H200",
            calls=1,
            wire_us=1.0,
            wire_low_us=1.0,
            wire_high_us=1.0,
            ranks_low=0.01,
            ranks_high=0.02,
            chunks_high=0.5,
        )
        write_step_times(file, msgspec.structs.replace(TIMES, emulated=wire))
        record = run(file, tmp_path)
        found, emulated = record.serve, record.emulated
        assert emulated.output_tok_s_low < found.output_tok_s < emulated.output_tok_s_high
        assert emulated.ttft_p50_ms_low < found.ttft_ms.p50 < emulated.ttft_p50_ms_high
        assert emulated.itl_p50_ms_low < found.itl_ms.p50 < emulated.itl_p50_ms_high
        assert emulated.output_tok_s_high == pytest.approx(found.output_tok_s / 0.99, rel=1e-3)
        arrival = record.point.load.arrival
        band = latency_bands.find_band(latency_bands.EMULATED, "itl", arrival, latency_bands.load_published())
        assert band.factor > 1.02, "what published forecasts missed is more than the longer steps"
        assert (emulated.itl_p50_ms_low, emulated.itl_p50_ms_high) == pytest.approx(band.compute_ends(found.itl_ms.p50))
        assert emulated.ttft_p50_ms_high > 1.1 * found.ttft_ms.p50

    def test_ends_that_are_not_in_the_order_of_steps_are_still_least_and_most(self) -> None:
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

    def test_samples_lie_beside_it(self, file, tmp_path) -> None:
        record = run(file, tmp_path)
        rows = read_samples(tmp_path / record.serve.samples_file)
        assert [len(row.token_s) for row in rows] == [30] * 60

    def test_the_same_point_gives_the_same_metrics(self, file, tmp_path) -> None:
        assert run(file, tmp_path).serve == run(file, tmp_path).serve

    def test_an_open_loop_has_no_target(self, file, tmp_path) -> None:
        record = run(file, tmp_path, changed(arrival="gamma", request_rate=0.5))
        assert record.serve.steady_tok_s is None
        assert record.serve.finished == 60

    def test_a_limit_of_time_ends_it(self, file, tmp_path) -> None:
        record = run(file, tmp_path, settings=Settings(limit_seconds=5.0))
        assert record.serve.cancelled == 8
        assert record.serve.wall_s < 6

    def test_points_of_one_path_share_a_file(self) -> None:
        """Whatever their load; the name tells model and layout."""
        name = make_step_times_name(get_engine_path(POINT))
        assert name.startswith("step-times/deepseek-v3-tp4-dp1-dcp4-ag_rs-")
        assert make_step_times_name(get_engine_path(changed(requests=1))) == name
        assert make_step_times_name(get_engine_path(msgspec.structs.replace(POINT, backend="triton"))) != name


class TestPool:
    def test_kv_memory_is_obeyed(self, file, tmp_path) -> None:
        """141 pages of 64 rows on each of 4 ranks, one of them padding: 140 · 256 = 35,840 tokens, 8 requests."""
        record = run(file, tmp_path, settings=Settings(kv_memory_bytes=141 * PAGE))
        assert (record.kv.capacity_tokens, record.kv.bounded_by) == (35_840, "kv_memory")
        assert record.kv.capacity_requests == 140 // 16

    def test_without_it_the_pool_is_that_of_a_live_run_on_the_machine_of_the_step_times(self, file, tmp_path) -> None:
        """DeepSeek-V3 in bf16 does not fit beside it, so it is sized for the load: 8 requests of 17 pages and one."""
        record = run(file, tmp_path)
        assert record.kv.bounded_by == "sweep"
        assert record.kv.capacity_tokens == 8 * 17 * 256

    def test_less_kv_makes_requests_wait(self, file, tmp_path) -> None:
        scarce = run(file, tmp_path, settings=Settings(kv_memory_bytes=60 * PAGE))
        assert scarce.serve.decode_batch < run(file, tmp_path).serve.decode_batch
        assert scarce.serve.finished == 60


class TestInstances:
    """The same engine as one of several instances."""

    SPLIT = msgspec.structs.replace(POINT, disaggregate="1:2", transfer_gb_s=50.0, transfer_ms=1.5)

    def test_all_gpus_count(self, file, tmp_path) -> None:
        """Three instances of four."""
        record = run(file, tmp_path, self.SPLIT)
        assert record.serve.finished == 60
        assert record.serve.output_tok_s_per_gpu == pytest.approx(record.serve.output_tok_s / 12)

    def test_what_crosses_are_the_pages_of_prompts_as_each_gpu_holds_them(self, file, tmp_path) -> None:
        """
        4,000 tokens are 16 pages of 64 rows on each of 4 ranks, 1.5 ms and their bytes over 50 GB/s; nobody waits for
        long where one prompt after the other is prefilled.
        """
        found = run(file, tmp_path, self.SPLIT).serve.instances
        assert (found.transfers, found.sent_bytes) == (60, 60 * 16 * PAGE)
        each = 1.5 + 1e3 * 16 * PAGE / 50e9
        assert found.transfer_ms.p50 - found.transfer_wait_ms.p50 == pytest.approx(each, rel=0.05)
        rows = read_samples(tmp_path / run(file, tmp_path, self.SPLIT).serve.samples_file)
        busy = sum(row.kv_arrived_s - row.kv_sent_s for row in rows)
        links = found.link_busy_share * max(row.token_s[-1] for row in rows)
        assert busy / links == pytest.approx(round(busy / links), rel=1e-3)

    def test_a_record_says_how_busy_either_side_was(self, file, tmp_path) -> None:
        record = run(file, tmp_path, self.SPLIT)
        assert set(record.serve.instances.busy_share) == {"prefill", "decode"}
        assert all(0 < share < 1 for share in record.serve.instances.busy_share.values())
        alike = run(file, tmp_path, msgspec.structs.replace(POINT, disaggregate="2")).serve.instances
        assert set(alike.busy_share) == {"both"}
        assert (alike.transfers, alike.transfer_ms) == (None, None)
        assert run(file, tmp_path).serve.instances is None

    def test_samples_say_when_kv_crossed(self, file, tmp_path) -> None:
        rows = read_samples(tmp_path / run(file, tmp_path, self.SPLIT).serve.samples_file)
        assert {row.prefilled_by for row in rows} == {0}
        assert {row.instance for row in rows} == {1, 2}
        assert all(row.first_token_s <= row.kv_sent_s < row.kv_arrived_s <= row.token_s[1] for row in rows)
        alone = read_samples(tmp_path / run(file, tmp_path).serve.samples_file)
        assert {(row.instance, row.prefilled_by, row.kv_sent_s) for row in alone} == {(None, None, None)}

    def test_chunks_stall_nobody(self, file, tmp_path) -> None:
        """The longest gap of one engine that does both is a step with chunks; apart it is a step that decodes."""
        longest = []
        for point in (POINT, self.SPLIT):
            rows = read_samples(tmp_path / run(file, tmp_path, point).serve.samples_file)
            longest.append(max(b - a for row in rows for a, b in itertools.pairwise(row.token_s[1:])))
        assert longest[0] > 0.2
        assert longest[1] < 0.06

    def test_kv_waits_where_it_is_scarce(self, file, tmp_path) -> None:
        """20 pages, of which a request takes 16 and one: each instance that decodes has one at a time."""
        scarce = run(file, tmp_path, self.SPLIT, Settings(kv_memory_bytes=21 * PAGE))
        assert scarce.serve.finished == 60
        assert scarce.serve.instances.transfer_wait_ms.mean > 100
        assert scarce.serve.decode_batch == 1


class TestRefusal:
    def test_times_of_another_engine_are_refused_by_what_differs(self, file, tmp_path) -> None:
        with pytest.raises(UsageError, match="--exchange ag_rs instead of symm") as caught:
            run(file, tmp_path, msgspec.structs.replace(POINT, exchange="symm"))
        assert str(file) in str(caught.value)

    def test_a_load_beyond_the_times_is_refused_by_what_is_missing(self, file, tmp_path) -> None:
        """They go up to requests of 5,500 tokens."""
        with pytest.raises(UsageError, match="no step time is known"):
            run(file, tmp_path, msgspec.structs.replace(changed(input_tokens="9000"), context=9030))

    def test_a_missing_file_is_named(self, tmp_path) -> None:
        with pytest.raises(RecordsError, match=r"none\.json"):
            run(tmp_path / "none.json", tmp_path)


def test_the_machine_of_the_step_times_can_be_asked_for() -> None:
    probe = TIMES.make_probe()
    assert (probe.device, probe.count, probe.memory_bytes) == ("cuda", 4, 141 << 30)
    cpu: StepTimes = step_times(EXTENT, device="CPU")
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
def test_the_error_of_a_forecast_is_that_of_the_step_with_most_requests(
    blocking: bool, chunks: tuple[float, float], factors: list[tuple[float, float]]
) -> None:
    """10 µs of a step of 100, and 4 to 25 at the ends: 15 more, or 6 less; ranks are 2 % slower at most, and 1 % faster.

    Steps with prompts are shorter and longer by what is known of them, where that is more. Where hosts block, nothing waits for the wire.
    """
    cases = [
        MeasuredCase(case=Case(decodes=(Decodes(n, 100),)), samples_ms=[ms])
        for n, ms in ((2, 0.05), (8, 0.1), (4, 0.2))
    ]
    cases.append(MeasuredCase(case=Case(chunks=(Chunks(16, 8, 0),)), samples_ms=[7.0]))
    wire = SimpleNamespace(
        wire_us=10.0,
        wire_low_us=4.0,
        wire_high_us=25.0,
        ranks_low=0.01,
        ranks_high=0.02,
        chunks_low=chunks[0],
        chunks_high=chunks[1],
    )
    times = SimpleNamespace(emulated=wire, is_blocking=blocking, cases=cases)
    for found, wanted in zip(replay._compute_forecast_factors(times), factors, strict=True):  # type: ignore[arg-type]
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
def test_steps_of_the_own_engine_are_replayed_with_the_policy_of_another(policy: str, file, tmp_path) -> None:
    """SGLang's stalls decodes for whole prefill batches, so that its longest gaps differ from those of mixed steps."""
    own, other = run(file, tmp_path), run(file, tmp_path, changed(policy=policy))
    assert other.serve.finished == 60
    assert other.conditions.policy == ""  # the point names it
    assert other.serve.output_tok_s != own.serve.output_tok_s
