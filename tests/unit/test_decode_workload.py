"""Workload `decode` on one CPU rank: the record it returns, its marks, and that it leaves the engine as it was."""

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
from dcpbench.points.roofline import Routed, Sharding, StepRows, compute_step_floors
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


def session(point=POINT):
    """An engine for the point, as worker.py builds it."""
    return build_session(point, TINY, budget.plan_engine([point], Settings(), TINY, PROBE), rank=0, device=CPU, seed=0)


def run(built, point=POINT, *, profile=True):
    """The point's record and the stages it told, each once."""
    stages = []
    with torch.inference_mode():
        record = decode.run(built, point, Settings(profile=profile), HERE, tell=stages.append)
    return record, list(dict.fromkeys(stages))


@pytest.fixture(scope="module")
def measured():
    """One measured point: session, record and stages; every chunk of steps takes 2 ms a step, no clock is read."""
    patch = pytest.MonkeyPatch()

    def chunk(timer, steps):
        timer.step()
        return [2.0] * steps, 0.1

    patch.setattr(Timer, "measure_chunk", chunk)
    built = session()
    yield (built, *run(built))
    patch.undo()


DRAFTING = msgspec.structs.replace(POINT, mtp=2, acceptance="0.5/0.5")


class TestDrafts:
    """A step of 3 requests with 3 tokens each, of which two are drafts, and two passes of the layer that drafts."""

    def test_a_step_verifies_and_drafts_and_can_be_repeated(self, monkeypatch):
        """Rows are 4 padded requests times 3. 1 + 0.5 + 0.25 tokens a step; frozen tokens give the same logits in each run."""
        monkeypatch.setattr(Timer, "measure_chunk", lambda timer, steps: (timer.step(), ([2.0] * steps, 0.1))[1])
        built = session(DRAFTING)
        passes = []
        drafts = built.engine.model.run_draft_layer
        monkeypatch.setattr(
            built.engine.model, "run_draft_layer", lambda *args: (passes.append(len(args[1])), drafts(*args))[1]
        )
        record, _ = run(built, DRAFTING, profile=False)
        (batch,) = built.engine.batches.values()
        assert (batch.requests, batch.size, record.conditions.graph_batch) == (4, 12, 12)
        assert set(zip(passes[::2], passes[1::2], strict=True)) == {(12, 4)}
        assert batch.drafts.shape == (4, 2)
        assert record.metrics.output_tok_s.median == pytest.approx(3 * 1.75 / 2e-3)
        assert 0 < record.conditions.attention_error < 1e-5
        before = batch.logits.clone()
        built.engine.run_eager(batch)
        assert torch.equal(batch.logits, before)

    def test_the_plan_is_what_the_engine_allocates(self):
        """Requests of 9 + 3 tokens take 3 pages of 4, in 4 layers of rows instead of 3."""
        built = session(DRAFTING)
        plan, engine = built.plan, built.engine
        assert engine.model.kv.data.shape[0] == TINY.layers + 1
        assert engine.model.kv.data.nbytes == plan.kv_bytes
        assert engine.model.weights.count_bytes() == plan.weight_bytes
        assert engine.max_context == 12
        assert engine.allocator.pages == 3 * 3 + 1

    def test_rows_of_a_request_are_routed_by_its_number_in_every_layout(self):
        """Two replicas: rows of request 0 and 2 on the first, of 1 and a padding one on the second, 3 of each."""
        two = SimpleNamespace(point=SimpleNamespace(dp=2), shape=TINY, make_router_inputs=lambda numbers, *_: numbers)
        batch = SimpleNamespace(requests=2, query_length=3)
        assert decode._make_router_inputs(two, batch, 0) == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]


WAIT = SyncSite(found_in="replay", rule="SYNC003", kind="copy-to-host", call="cudaMemcpy", per_step=1, wait_us=9)


class TestFollow:
    def test_points_of_one_engine_share_its_weights_whatever_they_are_computed_with(self):
        """The points go from the reference to Triton with another exchange and back: the weights and the pool stay, and what was planned goes."""
        built = session()
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

    def test_so_do_points_that_reduce_in_another_way(self):
        """A symmetric all-reduce is made once, and the group's comes back."""
        built = session()
        model = built.engine.model
        plain = model.all_reduce
        built.apply_point(msgspec.structs.replace(POINT, all_reduce="symm"))
        symmetric = model.all_reduce
        assert symmetric != plain
        built.apply_point(POINT)
        assert model.all_reduce == plain
        built.apply_point(msgspec.structs.replace(POINT, all_reduce="symm"))
        assert model.all_reduce is symmetric


def test_an_engine_allocates_what_its_plan_says():
    """The engine allocates what --dry-run prints: the pool, the weights of all held layers, and the buffers of requests."""
    built = session()
    plan, engine = built.plan, built.engine
    assert engine.model.kv.data.nbytes == plan.kv_bytes
    assert engine.model.weights.count_bytes() == plan.weight_bytes
    assert (len(engine.model.weights.dense), len(engine.model.weights.moe)) == plan.held
    assert (engine.allocator.pages, engine.requests.size) == (plan.pages, plan.max_requests)
    assert (engine.max_context, plan.max_context) == (POINT.context + memory.HEADROOM_TOKENS,) * 2


class TestRecord:
    def test_metrics_follow_from_the_steps(self, measured):
        """3 tokens in 2 ms are 1,500 tok/s, of one user 500; 100 steps a chunk."""
        metrics = measured[1].metrics
        assert metrics.step_ms.median == 2
        assert metrics.output_tok_s.median == 1500
        assert metrics.output_tok_s_per_gpu == 1500
        assert metrics.tok_s_per_user == 500
        assert metrics.step_samples_ms == [2.0] * 100
        assert metrics.ttft_ms is None, "nothing was prefilled"

    def test_kv_counts_pages_rows_and_what_rounding_leaves_empty(self, measured):
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

    def test_it_says_what_was_measured(self, measured):
        """Three layers, all held; 3 requests in a graph of 4 rows, eager; attention in fp32 against fp64."""
        conditions = measured[1].conditions
        assert (conditions.layers, conditions.layers_held, conditions.weights) == (3, 3, "synthetic")
        assert conditions.full_weights_bytes_per_gpu == memory.compute_weight_bytes(TINY, POINT.layout, 4, 1, 2)
        assert (conditions.graph_batch, conditions.cuda_graph) == (4, False)
        assert 0 < conditions.attention_error < 1e-5

    def test_a_token_reaches_top_k_experts_at_least(self, measured):
        """2 of 8 for one token; four rows reach at most all."""
        assert 2 / 8 <= measured[1].conditions.experts_hit <= 1

    def test_without_rates_no_step_has_a_floor(self, measured):
        """No rates are measured on the CPU."""
        assert (measured[1].rates, measured[1].floor) == (None, None)

    def test_a_floor_is_that_of_the_requests_and_not_of_padding(self):
        """3 requests of 9 + 1 tokens in a graph of 4 rows: 30 KV rows of 48 fp32 numbers and 3·8·(48 + 32) of q and o
        take 15,360 B in each of 3 layers; at a byte a µs 46,080 µs. The fourth row's experts are not read.
        """
        rates = Rates(read_bytes_s=1e6, copy_bytes_s=1e6, matmul_flop_s=1e9)
        ids = [torch.tensor([[0, 1], [0, 1], [1, 2], [6, 7]]), torch.tensor([[3, 4]] * 3 + [[0, 1]])]
        floor = decode.compute_step_floor(session(), POINT, 4, ids, rates)
        assert floor.experts == "routed"
        assert floor.phase_floor_us["attention"] == pytest.approx(3 * 4 * (30 * 48 + 3 * 8 * 80))
        assert floor.floor_ms == pytest.approx(sum(floor.phase_floor_us.values()) / 1e3)
        sharding = Sharding.from_point(POINT, TINY)
        known = StepRows(
            decodes=(10,) * 3, sampled=3, tokens=3, routing=((Routed(hit=3, rows=6),), (Routed(hit=2, rows=6),))
        )
        assert floor.phase_floor_us == pytest.approx(compute_step_floors(sharding, known, rates.limits))

    def test_tokens_of_all_replicas_meet_in_the_experts_and_their_padding_does_not(self):
        """tp2·dp2, 3 requests: 2 on replica 0, 1 and a padding row on replica 1, in graphs of 2 rows; 4 experts a rank.

        Rank 0 has experts 0, 1 and 2 to read, for 4 of the 6 pairs; rank 1 expert 5, for 2.
        """
        point = msgspec.structs.replace(POINT, tp=2, dp=2)
        rates = Rates(read_bytes_s=1e6, copy_bytes_s=1e6, matmul_flop_s=1e9, peer_bytes_s=1e6, barrier_us=1.0)
        ids = [torch.tensor([[0, 5], [1, 5], [0, 2], [6, 7]])] * 2
        floor = decode.compute_step_floor(SimpleNamespace(shape=TINY), point, 2, ids, rates)
        sharding = Sharding.from_point(point, TINY)
        known = ((Routed(hit=3, rows=4), Routed(hit=1, rows=2)),) * 2
        step = StepRows(decodes=(10, 10), sampled=2, tokens=3, routing=known)
        assert floor.phase_floor_us == pytest.approx(compute_step_floors(sharding, step, rates.limits))

    def test_rates_that_are_missing_leave_a_step_without_a_floor(self):
        assert decode.compute_step_floor(session(), POINT, 4, [], Rates(read_bytes_s=1e6, copy_bytes_s=1e6)) is None

    def test_one_rank_is_the_busiest_and_the_mean(self, measured):
        """With one rank, the busiest and the mean have equally many experts and rows."""
        conditions = measured[1].conditions
        assert (conditions.busiest_rank_experts, conditions.busiest_rank_rows) == (1, 1)

    def test_phases_are_named_and_add_up(self, measured):
        """One rank exchanges and gathers nothing."""
        phases = measured[1].phases
        assert set(phases.phase_us) == set(PHASES) - {"q_gather", "merge", "dp_gather", "prefill", "prefix_gather"}
        assert sum(phases.phase_us.values()) + phases.idle_us == pytest.approx(phases.step_us)

    def test_what_only_a_gpu_can_say_is_null(self, measured):
        """Never 0, which would be a claim."""
        record = measured[1]
        assert record.outcome == "ok"
        assert record.host_syncs_per_step is record.allocations_per_step is record.memory_peak_bytes is None
        assert record.host_plan_us > 0
        assert "cpu" in record.warnings

    def test_it_survives_being_written_and_read(self, measured):
        """One JSON line."""
        assert msgspec.json.decode(msgspec.json.encode(measured[1]), type=Record) == measured[1]

    def test_stages_are_told_in_order(self, measured):
        """Nothing is captured without CUDA."""
        assert measured[2] == ["check", "measure", "profile"]

    def test_the_engine_is_free_for_the_next_point(self, measured):
        """All slots and all nine pages; also when a point fails in between, see below."""
        engine = measured[0].engine
        assert (engine.requests.available, engine.allocator.free_pages) == (3, 9)

    def test_profiling_can_be_left_out(self, measured):
        """The second point runs in the same session, with fewer requests."""
        record, stages = run(measured[0], msgspec.structs.replace(POINT, concurrency=2), profile=False)
        assert record.phases is None
        assert stages == ["check", "measure"]
        assert record.conditions.graph_batch == 2


def test_the_busiest_rank_is_that_of_each_layer():
    """Two ranks with two experts each. Layer 0: 2 and 1 are hit of 3 (2 / 1.5), with 4 and 4 rows. Layer 1: the second
    rank has both of 2 hit (2 / 1) and all rows. On average (4/3 + 2) / 2 and (1 + 2) / 2; cut, all ranks have the same.
    """
    rows = torch.tensor([[3, 1, 0, 4], [0, 0, 5, 3]])
    assert decode.summarize_busiest_rank(rows, 2) == {
        "busiest_rank_experts": pytest.approx(5 / 3),
        "busiest_rank_rows": 1.5,
    }
    assert decode.summarize_busiest_rank(rows, 1) == {"busiest_rank_experts": 1, "busiest_rank_rows": 1}


class TestRouting:
    def test_the_engine_routes_as_stated(self, monkeypatch):
        """Each of 3 requests and of the padding row takes the experts drawn for its number."""
        point = msgspec.structs.replace(POINT, routing=SKEWED)
        found = collect_chosen(monkeypatch, point)
        drawn = load_choices(SKEWED, TINY).draw(range(4), seed=0)
        assert [ids.sort(-1).values.tolist() for ids in found] == np.sort(drawn, axis=2).tolist()

    def test_the_layer_that_drafts_tokens_is_left_out(self, monkeypatch):
        """Its second pass has one row of a request; the layers of the model have three."""
        built = session(DRAFTING)
        found = collect_chosen(monkeypatch, DRAFTING, built)
        shape = built.engine.model.shape
        assert len(found) == shape.layers - shape.first_dense
        assert {len(ids) for ids in found} == {4 * 3}
        rates = Rates(read_bytes_s=1e6, copy_bytes_s=1e6, matmul_flop_s=1e9)
        assert decode.compute_step_floor(built, DRAFTING, 4 * 3, found, rates).experts == "routed"

    def test_points_of_one_engine_may_differ_in_it(self, monkeypatch):
        """The weights stay, and the inputs of routers are made anew."""
        built = session()
        even, skewed = (
            collect_chosen(monkeypatch, msgspec.structs.replace(POINT, routing=routing), built)
            for routing in ("", SKEWED)
        )
        assert [ids.tolist() for ids in even] != [ids.tolist() for ids in skewed]

    @pytest.mark.parametrize("layout", [Layout(2), Layout(4, 2), Layout(4, 4)], ids=str)
    def test_requests_are_routed_alike_in_every_layout(self, layout, monkeypatch):
        """Replicas have requests 0, dp, 2·dp, … and 1, dp + 1, …, whose rows are gathered one replica after another."""
        point = msgspec.structs.replace(POINT, routing=SKEWED, concurrency=8)
        alone = collect_chosen(monkeypatch, point)
        other = msgspec.structs.replace(point, tp=layout.tp, dp=layout.dp, emulate="H200")
        order = [row * layout.dp + replica for replica in range(layout.dp) for row in range(8 // layout.dp)]
        for ids, found in zip(alone, collect_chosen(monkeypatch, other), strict=True):
            assert ids[order].tolist() == found.tolist()

    def test_the_record_has_the_distinct_experts_and_the_busiest_ranks_share(self):
        """8 rows, a graph of 8; experts 0–3 on the first of two ranks."""
        point = msgspec.structs.replace(POINT, routing=SKEWED, concurrency=8, tp=2, ep="tp", emulate="H200")
        record, _ = run(session(point), point, profile=False)
        hit = [
            [*map(set, (ids[ids < 4].tolist(), ids[ids >= 4].tolist()))]
            for ids in load_choices(SKEWED, TINY).draw(range(8), 0)
        ]
        assert record.point.routing == SKEWED
        assert record.conditions.experts_hit == pytest.approx(np.mean([len(a) + len(b) for a, b in hit]) / 8)
        ratios = [max(len(a), len(b)) / ((len(a) + len(b)) / 2) for a, b in hit]
        assert record.conditions.busiest_rank_experts == pytest.approx(np.mean(ratios))


def collect_chosen(monkeypatch, point, built=None):
    """Experts of each row and layer in a step of the point."""
    kept = []
    real = decode._collect_chosen_experts
    monkeypatch.setattr(decode, "_collect_chosen_experts", lambda *given: kept.append(real(*given)) or kept[-1])
    built = built or session(point)
    built.apply_point(point)
    run(built, point, profile=False)
    monkeypatch.setattr(decode, "_collect_chosen_experts", real)
    return kept[0]


def test_a_point_that_fails_while_it_is_measured_gives_everything_back(monkeypatch):
    """The next point of the same job finds an empty engine."""

    def broken(*_):
        raise RuntimeError("the step failed")

    built = session()
    monkeypatch.setattr(decode, "measure_steps", broken)
    with pytest.raises(RuntimeError, match="the step failed"):
        run(built)
    assert (built.engine.requests.available, built.engine.allocator.free_pages) == (3, 9)


def test_steps_do_not_change_what_the_next_sample_measures(monkeypatch):
    """Tokens and lengths are frozen: after five steps the logits are those of the first."""
    built, logits = session(), []

    def five_steps(step, _device, _settings, _alive):
        for _ in range(5):
            step()
            logits.append(built.engine.batches[4, 1].logits.clone())
        return Timing(samples_ms=[1.0] * 20, noisy=False, unsettled=False)

    monkeypatch.setattr(decode, "measure_steps", five_steps)
    run(built, profile=False)
    assert len(logits) == 5
    assert all(torch.equal(one, logits[0]) for one in logits)


@pytest.mark.parametrize(("concurrency", "dp", "shares"), [(8, 2, [4, 4]), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1, 0, 0])])
def test_requests_are_dealt_out_evenly_over_replicas(concurrency, dp, shares):
    """The first replicas take what does not divide."""
    point = msgspec.structs.replace(POINT, tp=4, dp=dp, concurrency=concurrency)
    assert [decode._split_requests(point, replica) for replica in range(dp)] == shares


class TestMarks:
    def timing(self, samples=(1.0,) * 20, **conditions):
        """A timing without faults, but for `conditions`."""
        return Timing(samples_ms=list(samples), **{"noisy": False, "unsettled": False} | conditions)

    def test_a_clean_point_has_none(self):
        """A GPU that reported its clocks and no throttling, a step without waits and with 3 % idle at most."""
        phases = Phases(step_us=100, phase_us={"moe": 97}, idle_us=3, idle_fraction=0.03, kernels=1, steps=1)
        assert point_facts.list_device_warnings(msgspec.structs.replace(POINT, tp=8), torch.device("cuda")) == []
        assert decode._list_timing_warnings(self.timing(), Gpu(sm_clock_mhz_min=1980)) == []
        assert decode._list_step_warnings(decode.Profile(phases=phases, sync_sites=[]), 0, 1e-3) == []

    def test_each_fault_of_the_timing_has_its_own(self):
        """Drift: the second half is 2 % slower than the first."""
        marks = decode._list_timing_warnings
        assert marks(self.timing(noisy=True), None) == ["noisy"]
        assert marks(self.timing(unsettled=True), None) == ["unsettled"]
        assert marks(self.timing([100.0] * 10 + [102.0] * 10), None) == ["drift"]
        assert marks(self.timing(), Gpu(throttle_reasons=["sw_power_cap"])) == ["throttled"]
        assert marks(self.timing(noisy=True, unsettled=True), None) == ["noisy", "unsettled"]

    def test_each_fault_of_the_step_has_its_own(self):
        """A graph whose logits are NaN differs: NaN is not within any limit."""
        idle = Phases(step_us=100, phase_us={"moe": 96}, idle_us=4, idle_fraction=0.04, kernels=1, steps=1)
        marks = decode._list_step_warnings
        assert marks(decode.Profile(sync_sites=[WAIT]), 0, None) == ["host_sync"]
        assert marks(decode.Profile(), 1, None) == ["allocates"]
        assert marks(decode.Profile(phases=idle, sync_sites=[]), 0, None) == ["gpu_idle"]
        assert marks(decode.Profile(phases=idle), 0, None) == [], "a CPU's idle time says nothing"
        assert marks(decode.Profile(), 0, 2e-3) == marks(decode.Profile(), 0, float("nan")) == ["graph_differs"]

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
        ids=["plan", "27 % is chance", "40 us is little", "clock", "no clocks", "alone"],
    )
    def test_the_rank_that_the_others_wait_for_is_named(self, plans_us, clocks, rank, phase, share):
        """900 µs is 3 times the 300 µs that the others have in the median; 1,980 MHz is 1.5 times 1,320."""
        states = [None if clock is None else Gpu(sm_clock_mhz_min=clock) for clock in clocks]
        found = decode.find_straggler(plans_us, states)
        assert (found and (found.rank, found.phase, found.share)) == (
            (rank is not None and (rank, phase, share)) or None
        )

    def test_weights_that_stay_in_the_cache_between_two_uses_are_marked(self):
        """Three layers' sure bytes against four times the cache: equal is enough."""
        built, cycled = session(), 3 * memory.compute_certain_bytes(TINY, POINT.layout, 4)
        for l2_bytes, warm in ((cycled // 4, False), (cycled // 4 + 1, True)):
            gpu = Probe(device="cuda", count=1, name="GPU", memory_bytes=80 << 30, l2_bytes=l2_bytes)
            built.plan = budget.plan_engine([POINT], Settings(kv_memory_bytes=1 << 20), TINY, gpu)
            built.plan = msgspec.structs.replace(built.plan, pages=built.engine.allocator.pages)
            assert built.plan.layers_held == 3
            assert ("l2_warm" in run(built, profile=False)[0].warnings) is warm

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
    def test_an_attention_output_that_rounding_does_not_explain_is_marked(self, error, computed, rounds, wrong):
        """bf16 is allowed 1e-2, fp32 1e-5. e4m3 is off by 2⁻⁴/√3: queries by that times √576 · 192^-½ · (1 + 0.1 ln 40)²,
        the deviation of DeepSeek-V3's scores, weights by it once. NaN is never fine.
        """
        batch = SimpleNamespace(backend=SimpleNamespace(rounds=rounds))
        model = SimpleNamespace(dtype=computed, shape=load_shape("deepseek-v3"))
        engine = SimpleNamespace(model=model, batches={1: batch})
        assert (not error <= get_limit(engine)) == wrong

    def test_more_ranks_than_cores_are_marked(self, monkeypatch):
        """Eight ranks on two cores wait for each other's turn."""
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        assert point_facts.list_device_warnings(msgspec.structs.replace(POINT, tp=8), CPU) == ["cpu", "oversubscribed"]
        assert point_facts.list_device_warnings(msgspec.structs.replace(POINT, tp=2), CPU) == ["cpu"]


class TestGraphError:
    """There is no graph on the CPU: a function that changes what the eager step left stands in for the replay."""

    @pytest.fixture
    def batch(self):
        """A planned batch of a model whose last rank has one row past the vocabulary of 511."""
        engine = engine_builder.engine(Layout(2), rank=1, shape=engine_builder.shape_like_tiny(vocab=511))
        request = engine.add_request(3)
        engine.requests.set_tokens(request.slot, 2, [300])  # of the 256 to 510 that rank 1 embeds
        batch = engine.plan_step([request])
        engine.run_eager(batch)
        assert batch.logits[0, -1] == float("-inf")
        return engine, batch

    def error(self, batch, replay, monkeypatch):
        """The error where a replay does to the eager logits what `replay` does."""
        engine, planned = batch

        def step(_batch):
            planned.logits = replay(planned.logits.clone())

        monkeypatch.setattr(engine, "run_step", step)
        return decode._compute_graph_error(engine, planned)

    def test_a_graph_that_does_the_same_has_none(self, batch, monkeypatch):
        """Both outputs contain -inf, of which the difference would be NaN."""
        assert self.error(batch, lambda logits: logits, monkeypatch) == 0

    def test_a_graph_that_computes_something_else_is_seen(self, batch, monkeypatch):
        """Everything 1 % larger: ‖1.01·x − x‖ / ‖x‖ = 0.01."""
        assert self.error(batch, lambda logits: logits * 1.01, monkeypatch) == pytest.approx(0.01, rel=1e-4)

    def test_nan_is_the_largest_error_of_all(self, batch, monkeypatch):
        """In one logit."""

        def poisoned(logits):
            logits[0, 0] = float("nan")
            return logits

        assert self.error(batch, poisoned, monkeypatch) == float("inf")


class TestAttentionError:
    """The number that every record states must be able to say that something is wrong."""

    def error(self, break_it):
        """The error after `break_it(engine, requests)` between plan and attention; three requests of 9, 10 and 11."""
        engine = engine_builder.engine(page_size=4)
        requests = [engine.add_request(n) for n in (9, 10, 11)]
        for number, request in enumerate(requests):
            engine.write_random_kv(request, number, 0)
        batch = engine.plan_step(requests)
        break_it(engine, batch, requests)
        return compute_attention_error(engine, batch, requests, 0, all_requests=True)

    def test_it_is_rounding_where_all_is_well(self):
        """fp32 against fp64."""
        assert 0 < self.error(lambda *_: None) < 1e-5

    def test_a_row_too_few_is_seen(self):
        """One request's last row is not attended to."""

        def shorten(_engine, batch, _requests):
            pages, length = batch.backend.shards[1]
            batch.backend.shards[1] = (pages, length - 1)

        assert self.error(shorten) > 1e-2

    def test_the_wrong_pages_are_seen(self):
        """Two requests' page tables are exchanged: the truth goes by locations, not by those tables."""

        def swap(_engine, batch, _requests):
            shards = batch.backend.shards
            shards[0], shards[1] = (shards[1][0], shards[0][1]), (shards[0][0], shards[1][1])

        assert self.error(swap) > 0.1

    def test_nan_is_not_lost_on_the_way(self):
        """A maximum over ranks may drop NaN; infinity it cannot."""

        def poison(_engine, batch, _requests):
            backend = batch.backend
            run = backend.run

            def poisoned(q_BHQ, kv, o_BHR, lse_BH):
                run(q_BHQ, kv, o_BHR, lse_BH)
                o_BHR.fill_(float("nan"))

            backend.run = poisoned

        assert self.error(poison) == float("inf")


def test_all_ranks_profile_with_stacks_where_one_of_them_waited(monkeypatch):
    """What profile_step asks is answered by all of them."""
    asked = {}
    monkeypatch.setattr(decode, "profile_step", lambda *_, **how: asked.update(how))
    monkeypatch.setattr(decode, "gather_objects", lambda mine: [False, mine, False])
    decode._run_profile(SimpleNamespace(device=torch.device("cuda")), None)
    assert [asked["agree"](mine) for mine in (True, False)] == [True, False]


@pytest.mark.parametrize(("device", "unsure"), [("cuda", (0.03, 0.06)), ("cpu", (0.0, 0.0))])
def test_a_forecast_is_as_unsure_as_its_wire_and_its_ranks(device, unsure):
    """The band of 10 ms is 0.2 and 0.4 ms for communication and 1 and 2 % of the step; a CPU waits for no communication."""
    emulated = Emulated(
        machine="H200", calls=1, wire_us=1000.0, wire_low_us=800.0, wire_high_us=1400.0, ranks_low=0.01, ranks_high=0.02
    )
    assert decode._estimate_uncertainty(emulated, torch.device(device), 10.0) == pytest.approx(unsure)
    assert decode._estimate_uncertainty(None, torch.device(device), 10.0) == (0.0, 0.0)
