"""Workload `decode` on one CPU rank: the returned record, its warnings, and the restored engine."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from dcpbench.measuring.ranges import PHASES
from dcpbench.measuring.timing import Timer, Timing
from dcpbench.models import load_shape
from dcpbench.points import budget, memory
from dcpbench.points.device_probe import Probe
from dcpbench.points.expert_choices import load_choices
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.points.roofline import ExpertLoad, Sharding, StepRows, compute_step_floors
from dcpbench.points.settings import Settings
from dcpbench.records.record import Emulated, Environment, Gpu, Phases, Rates, Record, SyncSite
from dcpbench.workloads import decode, point_facts
from dcpbench.workloads.attention_error import compute_attention_error, get_limit
from dcpbench.workloads.session import build_session
from tests.unit import engine_builder

CPU = torch.device("cpu")
TINY = engine_builder.TINY
PROBE = Probe(device="cpu", count=0, name="CPU")
SKEWED = "zipf:0.5"
HERE = Environment(device="CPU", device_count=0)
POINT = Point(model="tiny", tp=1, concurrency=3, context=9, backend="reference", dtype="fp32", page_size=4)


def make_session(point=POINT):
    """Return an engine for the point, as worker.py builds it."""
    return build_session(point, TINY, budget.plan_engine([point], Settings(), TINY, PROBE), rank=0, device=CPU, seed=0)


def run_point(built, point=POINT, *, profile=True):
    """Return the point's record and the stages that it reported, each once."""
    stages = []
    with torch.inference_mode():
        record = decode.run(built, point, Settings(profile=profile), HERE, tell=stages.append)
    return record, list(dict.fromkeys(stages))


@pytest.fixture(scope="module")
def measured():
    """Return session, record and stages of one measured point; every chunk of steps takes 2 ms a step, and no clock is
    read.
    """
    patch = pytest.MonkeyPatch()

    def chunk(timer, steps):
        timer.step()
        return [2.0] * steps, 0.1

    patch.setattr(Timer, "measure_chunk", chunk)
    built = make_session()
    yield (built, *run_point(built))
    patch.undo()


DRAFTING = msgspec.structs.replace(POINT, mtp=2, acceptance="0.5/0.5")


class TestDrafts:
    """Steps of 3 requests with 3 tokens each, of which two are drafts, and two passes of the draft layer."""

    def test_step_verifies_and_drafts_and_is_repeatable(self, monkeypatch):
        """Rows are 4 padded requests times 3; 1 + 0.5 + 0.25 tokens a step; frozen tokens give the same logits in each
        run.
        """
        monkeypatch.setattr(Timer, "measure_chunk", lambda timer, steps: (timer.step(), ([2.0] * steps, 0.1))[1])
        built = make_session(DRAFTING)
        passes = []
        drafts = built.engine.model.run_draft_layer
        monkeypatch.setattr(
            built.engine.model, "run_draft_layer", lambda *args: (passes.append(len(args[1])), drafts(*args))[1]
        )
        record, _ = run_point(built, DRAFTING, profile=False)
        (batch,) = built.engine.batches.values()
        assert (batch.num_requests, batch.size, record.conditions.graph_batch) == (4, 12, 12)
        assert set(zip(passes[::2], passes[1::2], strict=True)) == {(12, 4)}
        assert batch.drafts.shape == (4, 2)
        assert record.metrics.output_tok_s.median == pytest.approx(3 * 1.75 / 2e-3)
        assert 0 < record.conditions.attention_error < 1e-5
        before = batch.logits.clone()
        built.engine.run_eager(batch)
        assert torch.equal(batch.logits, before)

    def test_engine_with_drafts_allocates_what_the_plan_states(self):
        """Requests of 9 + 3 tokens take 3 pages of 4, in 4 layers of rows instead of 3."""
        built = make_session(DRAFTING)
        plan, engine = built.plan, built.engine
        assert engine.model.kv.data.shape[0] == TINY.layers + 1
        assert engine.model.kv.data.nbytes == plan.kv_bytes
        assert engine_builder.count_bytes(engine.model.weights) == plan.weight_bytes
        assert engine.max_context == 12
        assert engine.allocator.pages == 3 * 3 + 1

    def test_router_inputs_follow_request_numbers_in_every_layout(self):
        """The first of two replicas has rows of requests 0 and 2, the second those of 1 and of padding; each has 3."""
        two = SimpleNamespace(point=SimpleNamespace(dp=2), shape=TINY, make_router_inputs=lambda numbers, *_: numbers)
        batch = SimpleNamespace(num_requests=2, query_length=3)
        assert decode._make_router_inputs(two, batch, 0) == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]


WAIT = SyncSite(found_in="replay", rule="SYNC003", kind="copy-to-host", call="cudaMemcpy", per_step=1, wait_us=9)


class TestApplyPoint:
    def test_changed_backend_and_exchange_keep_weights_and_pool(self):
        """The points go from the reference to Triton with another exchange and back; planned batches are dropped."""
        built = make_session()
        engine = built.engine
        weights, pool, plain = engine.model.weights, engine.model.kv.data, engine.exchange
        engine.get_batch(3)
        other = msgspec.structs.replace(POINT, backend="triton", exchange="a2a")
        built.apply_point(other)
        assert (engine.backend_name, engine.exchange is plain, engine.batches) == ("triton", False, {})
        assert engine.get_batch(3).exchange is engine.exchange
        assert built.point == other
        built.apply_point(POINT)
        assert (engine.backend_name, engine.exchange is plain, engine.batches) == ("reference", True, {})
        assert engine.model.weights is weights
        assert engine.model.kv.data is pool

    def test_symmetric_all_reduce_is_made_once_and_reused(self):
        """The all-reduce of the group is used again for a point without it."""
        built = make_session()
        model = built.engine.model
        plain = model.all_reduce
        built.apply_point(msgspec.structs.replace(POINT, all_reduce="symm"))
        symmetric = model.all_reduce
        assert symmetric != plain
        built.apply_point(POINT)
        assert model.all_reduce == plain
        built.apply_point(msgspec.structs.replace(POINT, all_reduce="symm"))
        assert model.all_reduce is symmetric


def test_engine_allocates_what_its_plan_states():
    """The engine allocates what --dry-run prints: the pool, the weights of all held layers, and the buffers of
    requests.
    """
    built = make_session()
    plan, engine = built.plan, built.engine
    assert engine.model.kv.data.nbytes == plan.kv_bytes
    assert engine_builder.count_bytes(engine.model.weights) == plan.weight_bytes
    assert (len(engine.model.weights.dense), len(engine.model.weights.moe)) == plan.held
    assert (engine.allocator.pages, len(engine.request_pool.slots)) == (plan.pages, plan.max_requests)
    assert (engine.max_context, plan.max_context) == (POINT.context + memory.HEADROOM_TOKENS,) * 2


class TestRecord:
    def test_metrics_are_computed_from_step_times(self, measured):
        """3 tokens in 2 ms are 1,500 tok/s, and 500 for one user; a chunk has 100 steps."""
        metrics = measured[1].metrics
        assert metrics.step_ms.median == 2
        assert metrics.output_tok_s.median == 1500
        assert metrics.output_tok_s_per_gpu == 1500
        assert metrics.tok_s_per_user == 500
        assert metrics.step_samples_ms == [2.0] * 100
        assert metrics.ttft_ms is None, "nothing was prefilled"

    def test_kv_has_pages_rows_and_fragmentation(self, measured):
        """Pages of 4: a request of 9 + 1 tokens takes 3, so 3 requests take 9, and one is padding.

        A row is 48 fp32 numbers in 3 layers, 576 B. 9 pages are 36 rows, of which 30 hold a token: 1/6 is empty.
        """
        kv = measured[1].kv
        assert kv.bytes_per_token_per_gpu == 576
        assert kv.pool_bytes_per_gpu == 10 * 4 * 576
        assert kv.capacity_tokens == 36
        assert kv.capacity_requests == 3
        assert kv.fragmentation == pytest.approx(1 / 6)
        assert kv.bounded_by == "sweep"

    def test_conditions_state_layers_graph_and_attention_error(self, measured):
        """The record has three layers, all held, 3 requests in a graph of 4 rows run eagerly, and attention in fp32
        against fp64.
        """
        conditions = measured[1].conditions
        assert (conditions.layers, conditions.layers_held, conditions.weights) == (3, 3, "synthetic")
        assert conditions.full_weights_bytes_per_gpu == memory.compute_weight_bytes(TINY, POINT.layout, 4, 1, 2)
        assert (conditions.graph_batch, conditions.cuda_graph) == (4, False)
        assert 0 < conditions.attention_error < 1e-5

    def test_active_experts_are_at_least_top_k(self, measured):
        """One token activates 2 of 8 experts; four rows activate at most all."""
        assert 2 / 8 <= measured[1].conditions.experts_hit <= 1

    def test_record_of_a_cpu_has_no_rates_and_no_floor(self, measured):
        assert (measured[1].rates, measured[1].floor) == (None, None)

    def test_floor_excludes_padding_rows(self):
        """The 30 KV rows of 48 fp32 numbers of 3 requests of 9 + 1 tokens, and 3·8·(48 + 32) numbers of q and o, take
        15,360 B in each of 3 layers: 46,080 µs at a byte a µs. The experts of the fourth, padded row are not read.
        """
        rates = Rates(read_bytes_s=1e6, copy_bytes_s=1e6, matmul_flop_s=1e9)
        ids = [torch.tensor([[0, 1], [0, 1], [1, 2], [6, 7]]), torch.tensor([[3, 4]] * 3 + [[0, 1]])]
        floor = decode.compute_step_floor(make_session(), POINT, 4, ids, rates)
        assert floor.experts == "routed"
        assert floor.phase_floor_us["attention"] == pytest.approx(3 * 4 * (30 * 48 + 3 * 8 * 80))
        assert floor.floor_ms == pytest.approx(sum(floor.phase_floor_us.values()) / 1e3)
        sharding = Sharding.from_point(POINT, TINY)
        known = StepRows(
            decodes=(10,) * 3,
            sampled=3,
            tokens=3,
            routing=((ExpertLoad(active_experts=3, assignments=6),), (ExpertLoad(active_experts=2, assignments=6),)),
        )
        assert floor.phase_floor_us == pytest.approx(compute_step_floors(sharding, known, rates.limits))

    def test_floor_of_experts_counts_tokens_of_all_replicas_without_padding(self):
        """In tp2·dp2, replica 0 has 2 requests, replica 1 has one and a padding row; a rank has 4 experts.

        Rank 0 reads experts 0, 1 and 2 for 4 of the 6 pairs, and rank 1 reads expert 5 for 2.
        """
        point = msgspec.structs.replace(POINT, tp=2, dp=2)
        rates = Rates(read_bytes_s=1e6, copy_bytes_s=1e6, matmul_flop_s=1e9, peer_bytes_s=1e6, barrier_us=1.0)
        ids = [torch.tensor([[0, 5], [1, 5], [0, 2], [6, 7]])] * 2
        floor = decode.compute_step_floor(SimpleNamespace(shape=TINY), point, 2, ids, rates)
        sharding = Sharding.from_point(point, TINY)
        known = ((ExpertLoad(active_experts=3, assignments=4), ExpertLoad(active_experts=1, assignments=2)),) * 2
        step = StepRows(decodes=(10, 10), sampled=2, tokens=3, routing=known)
        assert floor.phase_floor_us == pytest.approx(compute_step_floors(sharding, step, rates.limits))

    def test_step_has_no_floor_if_a_rate_is_missing(self):
        assert (
            decode.compute_step_floor(make_session(), POINT, 4, [], Rates(read_bytes_s=1e6, copy_bytes_s=1e6)) is None
        )

    def test_busiest_share_of_a_single_rank_is_one(self, measured):
        """With one rank, the busiest and the mean have equally many experts and rows."""
        conditions = measured[1].conditions
        assert (conditions.busiest_rank_experts, conditions.busiest_rank_rows) == (1, 1)

    def test_phases_and_idle_time_add_up_to_the_step(self, measured):
        """A single rank exchanges and gathers nothing."""
        phases = measured[1].phases
        assert set(phases.phase_us) == set(PHASES) - {"q_gather", "merge", "dp_gather", "prefill", "prefix_gather"}
        assert sum(phases.phase_us.values()) + phases.idle_us == pytest.approx(phases.step_us)

    def test_gpu_only_fields_are_null_on_a_cpu(self, measured):
        """A 0 would be a measured value."""
        record = measured[1]
        assert record.outcome == "ok"
        assert record.host_syncs_per_step is record.allocations_per_step is record.memory_peak_bytes is None
        assert record.host_plan_us > 0
        assert "cpu" in record.warnings

    def test_record_is_read_back_from_json_unchanged(self, measured):
        assert msgspec.json.decode(msgspec.json.encode(measured[1]), type=Record) == measured[1]

    def test_stages_are_reported_in_order(self, measured):
        """Nothing is captured without CUDA."""
        assert measured[2] == ["check", "measure", "profile"]

    def test_engine_has_all_slots_and_pages_free_after_a_point(self, measured):
        engine = measured[0].engine
        assert (engine.request_pool.available, engine.allocator.free_pages) == (3, 9)

    def test_profiling_can_be_disabled(self, measured):
        """The second point runs in the same session, with fewer requests."""
        record, stages = run_point(measured[0], msgspec.structs.replace(POINT, concurrency=2), profile=False)
        assert record.phases is None
        assert stages == ["check", "measure"]
        assert record.conditions.graph_batch == 2


def test_busiest_rank_is_determined_in_each_layer():
    """Two ranks have two experts each. In layer 0, 2 and 1 of 3 active experts (2 / 1.5) have 4 and 4 rows; in layer 1
    the second rank has both (2 / 1) and all rows. The means are (4/3 + 2) / 2 and (1 + 2) / 2; with tensor-parallel
    experts all ranks are equal.
    """
    rows = torch.tensor([[3, 1, 0, 4], [0, 0, 5, 3]])
    assert decode.summarize_busiest_rank(rows, 2) == {
        "busiest_rank_experts": pytest.approx(5 / 3),
        "busiest_rank_rows": 1.5,
    }
    assert decode.summarize_busiest_rank(rows, 1) == {"busiest_rank_experts": 1, "busiest_rank_rows": 1}


class TestRouting:
    def test_requests_are_routed_to_the_drawn_experts(self, monkeypatch):
        """The 3 requests and the padding row take the experts drawn for their numbers."""
        point = msgspec.structs.replace(POINT, routing=SKEWED)
        found = collect_chosen(monkeypatch, point)
        drawn = load_choices(SKEWED, TINY).draw(range(4), seed=0)
        assert [ids.sort(-1).values.tolist() for ids in found] == np.sort(drawn, axis=2).tolist()

    def test_draft_layer_is_not_counted(self, monkeypatch):
        """The second pass of the draft layer has one row for each request; the layers of the model have three."""
        built = make_session(DRAFTING)
        found = collect_chosen(monkeypatch, DRAFTING, built)
        shape = built.engine.model.shape
        assert len(found) == shape.layers - shape.first_k_dense_replace
        assert {len(ids) for ids in found} == {4 * 3}
        rates = Rates(read_bytes_s=1e6, copy_bytes_s=1e6, matmul_flop_s=1e9)
        assert decode.compute_step_floor(built, DRAFTING, 4 * 3, found, rates).experts == "routed"

    def test_routing_can_change_between_points_of_one_engine(self, monkeypatch):
        """The weights stay, and the inputs of routers are recomputed."""
        built = make_session()
        even, skewed = (
            collect_chosen(monkeypatch, msgspec.structs.replace(POINT, routing=routing), built)
            for routing in ("", SKEWED)
        )
        assert [ids.tolist() for ids in even] != [ids.tolist() for ids in skewed]

    @pytest.mark.parametrize("layout", [Layout(2), Layout(4, 2), Layout(4, 4)], ids=str)
    def test_requests_are_routed_to_the_same_experts_in_every_layout(self, layout, monkeypatch):
        """Replicas have requests 0, dp, 2·dp, … and 1, dp + 1, …, and their rows are gathered one replica after
        another.
        """
        point = msgspec.structs.replace(POINT, routing=SKEWED, concurrency=8)
        alone = collect_chosen(monkeypatch, point)
        other = msgspec.structs.replace(point, tp=layout.tp, dp=layout.dp, emulate="H200")
        order = [row * layout.dp + replica for replica in range(layout.dp) for row in range(8 // layout.dp)]
        for ids, found in zip(alone, collect_chosen(monkeypatch, other), strict=True):
            assert ids[order].tolist() == found.tolist()

    def test_record_has_active_experts_and_share_of_the_busiest_rank(self):
        """A graph of 8 has 8 rows; experts 0–3 are on the first of two ranks."""
        point = msgspec.structs.replace(POINT, routing=SKEWED, concurrency=8, tp=2, ep="tp", emulate="H200")
        record, _ = run_point(make_session(point), point, profile=False)
        hit = [
            [*map(set, (ids[ids < 4].tolist(), ids[ids >= 4].tolist()))]
            for ids in load_choices(SKEWED, TINY).draw(range(8), 0)
        ]
        assert record.point.routing == SKEWED
        assert record.conditions.experts_hit == pytest.approx(np.mean([len(a) + len(b) for a, b in hit]) / 8)
        ratios = [max(len(a), len(b)) / ((len(a) + len(b)) / 2) for a, b in hit]
        assert record.conditions.busiest_rank_experts == pytest.approx(np.mean(ratios))


def collect_chosen(monkeypatch, point, built=None):
    """Return the experts of each row and layer in a step of the point."""
    kept = []
    real = decode._collect_chosen_experts
    monkeypatch.setattr(decode, "_collect_chosen_experts", lambda *given: kept.append(real(*given)) or kept[-1])
    built = built or make_session(point)
    built.apply_point(point)
    run_point(built, point, profile=False)
    monkeypatch.setattr(decode, "_collect_chosen_experts", real)
    return kept[0]


def test_failed_point_releases_its_slots_and_pages(monkeypatch):
    def broken(*_):
        raise RuntimeError("the step failed")

    built = make_session()
    monkeypatch.setattr(decode, "measure_steps", broken)
    with pytest.raises(RuntimeError, match="the step failed"):
        run_point(built)
    assert (built.engine.request_pool.available, built.engine.allocator.free_pages) == (3, 9)


def test_repeated_steps_give_the_same_logits(monkeypatch):
    """Tokens and lengths are frozen: after five steps the logits are those of the first."""
    built, logits = make_session(), []

    def five_steps(step, _device, _settings, _alive):
        for _ in range(5):
            step()
            logits.append(built.engine.batches[4, 1].logits.clone())
        return Timing(samples_ms=[1.0] * 20, noisy=False, unsettled=False)

    monkeypatch.setattr(decode, "measure_steps", five_steps)
    run_point(built, profile=False)
    assert len(logits) == 5
    assert all(torch.equal(one, logits[0]) for one in logits)


@pytest.mark.parametrize(("concurrency", "dp", "shares"), [(8, 2, [4, 4]), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1, 0, 0])])
def test_requests_are_split_evenly_over_replicas(concurrency, dp, shares):
    """The first replicas take the remainder."""
    point = msgspec.structs.replace(POINT, tp=4, dp=dp, concurrency=concurrency)
    assert [decode._split_requests(point, replica) for replica in range(dp)] == shares


class TestWarnings:
    def make_timing(self, samples=(1.0,) * 20, **conditions):
        """Return a timing without faults, except for `conditions`."""
        return Timing(samples_ms=list(samples), **{"noisy": False, "unsettled": False} | conditions)

    def test_point_without_faults_has_no_warnings(self):
        """The GPU reports its clocks and no throttling, and the step has no waits and at most 3 % idle time."""
        phases = Phases(step_us=100, phase_us={"moe": 97}, idle_us=3, idle_fraction=0.03, kernels=1, steps=1)
        assert point_facts.list_device_warnings(msgspec.structs.replace(POINT, tp=8), torch.device("cuda")) == []
        assert decode._list_timing_warnings(self.make_timing(), Gpu(sm_clock_mhz_min=1980)) == []
        assert decode._list_step_warnings(decode.Profile(phases=phases, sync_sites=[]), 0, 1e-3) == []

    def test_each_fault_of_a_timing_has_its_warning(self):
        """In the drift case the second half is 2 % slower than the first."""
        list_warnings = decode._list_timing_warnings
        assert list_warnings(self.make_timing(noisy=True), None) == ["noisy"]
        assert list_warnings(self.make_timing(unsettled=True), None) == ["unsettled"]
        assert list_warnings(self.make_timing([100.0] * 10 + [102.0] * 10), None) == ["drift"]
        assert list_warnings(self.make_timing(), Gpu(throttle_reasons=["sw_power_cap"])) == ["throttled"]
        assert list_warnings(self.make_timing(noisy=True, unsettled=True), None) == ["noisy", "unsettled"]

    def test_each_fault_of_a_step_has_its_warning(self):
        """A graph with NaN logits differs: NaN is not within any limit."""
        idle = Phases(step_us=100, phase_us={"moe": 96}, idle_us=4, idle_fraction=0.04, kernels=1, steps=1)
        list_warnings = decode._list_step_warnings
        assert list_warnings(decode.Profile(sync_sites=[WAIT]), 0, None) == ["host_sync"]
        assert list_warnings(decode.Profile(), 1, None) == ["allocates"]
        assert list_warnings(decode.Profile(phases=idle, sync_sites=[]), 0, None) == ["gpu_idle"]
        assert list_warnings(decode.Profile(phases=idle), 0, None) == [], "idle time of a CPU is not judged"
        assert (
            list_warnings(decode.Profile(), 0, 2e-3)
            == list_warnings(decode.Profile(), 0, float("nan"))
            == ["graph_differs"]
        )

    @pytest.mark.parametrize(
        ("plans_us", "clocks", "rank", "phase", "share"),
        [
            ([300.0, 310.0, 900.0, 290.0], [1980] * 4, 2, "plan", 2.0),
            ([300.0, 380.0], [1980, 1980], None, "", 0.0),
            ([20.0, 60.0], [1980, 1980], None, "", 0.0),
            ([300.0, 300.0, 300.0], [1980, 1320, 1980], 1, "step", 0.5),
            ([300.0, 600.0], [1980, None], 1, "plan", 1.0),
            ([300.0], [1980], None, "", 0.0),
        ],
        ids=["slow plan", "27 % difference", "40 us difference", "low clock", "missing clock", "one rank"],
    )
    def test_straggler_is_found_by_plan_time_or_clock(self, plans_us, clocks, rank, phase, share):
        """900 µs is 3 times the median of 300 µs of the other ranks; 1,980 MHz is 1.5 times 1,320."""
        states = [None if clock is None else Gpu(sm_clock_mhz_min=clock) for clock in clocks]
        found = decode.find_straggler(plans_us, states)
        assert (found and (found.rank, found.phase, found.share)) == (
            (rank is not None and (rank, phase, share)) or None
        )

    def test_weights_that_stay_in_the_cache_give_a_warning(self):
        """The certain bytes of three layers are compared with four times the cache: equality is enough."""
        built, cycled = make_session(), 3 * memory.compute_certain_bytes(TINY, POINT.layout, 4)
        for l2_bytes, warm in ((cycled // 4, False), (cycled // 4 + 1, True)):
            gpu = Probe(device="cuda", count=1, name="GPU", memory_bytes=80 << 30, l2_bytes=l2_bytes)
            built.plan = budget.plan_engine([POINT], Settings(kv_memory_bytes=1 << 20), TINY, gpu)
            built.plan = msgspec.structs.replace(built.plan, pages=built.engine.allocator.pages)
            assert built.plan.layers_held == 3
            assert ("l2_warm" in run_point(built, profile=False)[0].warnings) is warm

    @pytest.mark.parametrize(
        ("error", "computed", "rounds", "wrong"),
        [
            (5e-3, torch.bfloat16, (), False),
            (5e-3, torch.float32, (), True),
            (float("nan"), torch.bfloat16, (), True),
            (3e-2, torch.bfloat16, (), True),
            (0.116, torch.bfloat16, ("queries",), False),
            (0.118, torch.bfloat16, ("queries",), True),
            (0.122, torch.bfloat16, ("queries", "weights"), False),
            (0.124, torch.bfloat16, ("queries", "weights"), True),
        ],
    )
    def test_attention_error_beyond_rounding_is_wrong(self, error, computed, rounds, wrong):
        """The limit of bf16 is 1e-2, and that of fp32 1e-5. The error of e4m3 is 2⁻⁴/√3: queries have it times
        √576 · 192^-½ · (1 + 0.1 ln 40)², the deviation of DeepSeek-V3's scores, and weights once. NaN is always wrong.
        """
        batch = SimpleNamespace(backend=SimpleNamespace(rounds=rounds))
        model = SimpleNamespace(dtype=computed, shape=load_shape("deepseek-v3"))
        engine = SimpleNamespace(model=model, batches={1: batch})
        assert (not error <= get_limit(engine)) == wrong

    def test_more_ranks_than_cores_give_a_warning(self, monkeypatch):
        """Eight ranks on two cores wait for each other."""
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        assert point_facts.list_device_warnings(msgspec.structs.replace(POINT, tp=8), CPU) == ["cpu", "oversubscribed"]
        assert point_facts.list_device_warnings(msgspec.structs.replace(POINT, tp=2), CPU) == ["cpu"]


class TestGraphError:
    """The CPU has no graphs: a function that changes the logits of the eager step replaces the replay."""

    @pytest.fixture
    def batch(self):
        """Return an engine and a planned batch of a model; the last rank has one row past the vocabulary of 511."""
        engine = engine_builder.make_engine(Layout(2), rank=1, shape=engine_builder.make_shape(vocab=511))
        request = engine.add_request(3)
        engine.request_pool.set_tokens(request.slot, 2, [300])  # one of ids 256 to 510, which rank 1 embeds
        batch = engine.plan_step([request])
        engine.run_eager(batch)
        assert batch.logits[0, -1] == float("-inf")
        return engine, batch

    def compute_error(self, batch, replay, monkeypatch):
        """Return the error if a replay changes the eager logits by `replay`."""
        engine, planned = batch

        def step(_batch):
            planned.logits = replay(planned.logits.clone())

        monkeypatch.setattr(engine, "run_step", step)
        return decode._compute_graph_error(engine, planned)

    def test_graph_with_equal_logits_has_error_zero(self, batch, monkeypatch):
        """Both outputs contain -inf, and the difference of two would be NaN."""
        assert self.compute_error(batch, lambda logits: logits, monkeypatch) == 0

    def test_graph_with_other_logits_has_their_relative_difference(self, batch, monkeypatch):
        """All logits are 1 % larger: ‖1.01·x − x‖ / ‖x‖ = 0.01."""
        assert self.compute_error(batch, lambda logits: logits * 1.01, monkeypatch) == pytest.approx(0.01, rel=1e-4)

    def test_graph_with_a_nan_logit_has_infinite_error(self, batch, monkeypatch):
        def poisoned(logits):
            logits[0, 0] = float("nan")
            return logits

        assert self.compute_error(batch, poisoned, monkeypatch) == float("inf")


class TestAttentionError:
    """The attention error in every record must detect wrong outputs."""

    def compute_error(self, break_it):
        """Return the error after `break_it(engine, batch, requests)` between plan and attention; requests have 9, 10
        and 11 tokens.
        """
        engine = engine_builder.make_engine(page_size=4)
        requests = [engine.add_request(n) for n in (9, 10, 11)]
        for number, request in enumerate(requests):
            engine.write_random_kv(request, number, 0)
        batch = engine.plan_step(requests)
        break_it(engine, batch, requests)
        return compute_attention_error(engine, batch, requests, 0, all_requests=True)

    def test_correct_attention_has_a_rounding_error(self):
        """The output is fp32, and the reference fp64."""
        assert 0 < self.compute_error(lambda *_: None) < 1e-5

    def test_missing_row_is_detected(self):
        """The last row of one request is not attended to."""

        def shorten(_engine, batch, _requests):
            pages, length = batch.backend.shards[1]
            batch.backend.shards[1] = (pages, length - 1)

        assert self.compute_error(shorten) > 1e-2

    def test_exchanged_page_tables_are_detected(self):
        """The reference uses locations instead of the page tables."""

        def swap(_engine, batch, _requests):
            shards = batch.backend.shards
            shards[0], shards[1] = (shards[1][0], shards[0][1]), (shards[0][0], shards[1][1])

        assert self.compute_error(swap) > 0.1

    def test_nan_becomes_an_infinite_error(self):
        """A maximum over ranks may drop NaN, but not infinity."""

        def poison(_engine, batch, _requests):
            backend = batch.backend
            run = backend.run

            def poisoned(q_BHQ, kv, o_BHR, lse_BH):
                run(q_BHQ, kv, o_BHR, lse_BH)
                o_BHR.fill_(float("nan"))

            backend.run = poisoned

        assert self.compute_error(poison) == float("inf")


def test_all_ranks_profile_with_stacks_if_one_of_them_waited(monkeypatch):
    """All ranks answer the question of profile_step."""
    options = {}
    monkeypatch.setattr(decode, "profile_step", lambda *_, **how: options.update(how))
    monkeypatch.setattr(decode, "gather_objects", lambda mine: [False, mine, False])
    decode._run_profile(SimpleNamespace(device=torch.device("cuda")), None)
    assert [options["agree"](mine) for mine in (True, False)] == [True, False]


@pytest.mark.parametrize(("device", "uncertainty"), [("cuda", (0.03, 0.06)), ("cpu", (0.0, 0.0))])
def test_uncertainty_of_a_forecast_comes_from_network_and_ranks(device, uncertainty):
    """The uncertainty of 10 ms is 0.2 and 0.4 ms for communication and 1 and 2 % of the step; a CPU waits for no
    communication.
    """
    emulated = Emulated(
        machine="H200", calls=1, comm_us=1000.0, comm_low_us=800.0, comm_high_us=1400.0, ranks_low=0.01, ranks_high=0.02
    )
    assert decode._estimate_uncertainty(emulated, torch.device(device), 10.0) == pytest.approx(uncertainty)
    assert decode._estimate_uncertainty(None, torch.device(device), 10.0) == (0.0, 0.0)
