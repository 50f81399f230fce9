"""Pipeline stages and prefill context parallelism: layers, memory, rounds, hops, and parts of prompts."""

import dataclasses
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench import cli
from dcpbench.errors import CapacityError, LayoutError, UsageError
from dcpbench.models import SHAPES
from dcpbench.models.weight_formats import FORMATS, FP8
from dcpbench.plan import validate
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points import budget, memory
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.comm_model import LINK_SHARE
from dcpbench.points.layout import Layout, list_valid_layouts
from dcpbench.points.names import MOE_EP, MOE_TP
from dcpbench.points.pipeline import compute_hop_bytes, compute_round, make_stages, split_chunks, split_layers
from dcpbench.points.point import Point
from dcpbench.points.roofline import Sharding, StepRows, iter_phase_works
from dcpbench.points.settings import Settings
from dcpbench.points.step_calls import _list_exchange_calls, predict_calls
from dcpbench.recommend import estimate
from dcpbench.recommend.forecast import Estimator

V3 = SHAPES["deepseek-v3"]


def make_point(**given) -> Point:
    """Return a point of 8 requests of 4,000 tokens with fp8 weights on tp8."""
    given = {"tp": 8, "concurrency": 8, "context": 4000, "weights_dtype": "fp8", "ep": MOE_TP} | given
    return Point(model="deepseek-v3", backend="triton", dtype="bf16", page_size=64, **given)


def run(capsys, *words: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    return int(end.value.code or 0), *capsys.readouterr()


def make_rank_rows(estimator, rows):
    """Return the padded step of a rank: of one micro-batch, with the rank's part of the prompts."""
    return estimator._pad_rows(estimator._make_micro_batch(rows))


def simulate_round(stages: Sequence[float], hop: float, micro_batches: int) -> float:
    """Duration of a round: micro-batches circulate, and a stage takes them one at a time, in order, until each round takes as long."""
    free, ready = [0.0] * len(stages), [0.0] * micro_batches
    ends = []
    for _ in range(40 * len(stages) * micro_batches):
        for job in range(micro_batches):
            for index, us in enumerate(stages):
                free[index] = ready[job] = max(ready[job], free[index]) + us
                ready[job] += hop if index + 1 < len(stages) else 0
        ends.append(ready[-1])
    rounds = len(ends) // 2
    return (ends[-1] - ends[-1 - rounds]) / rounds


class TestLayers:
    """Division of layers into stages."""

    @pytest.mark.parametrize(
        ("layers", "stages", "wanted"),
        [(61, 1, [61]), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (62, 4, [15, 16, 16, 15]), (8, 3, [3, 3, 2])],
    )
    def test_last_stage_has_the_fewest_layers(self, layers, stages, wanted):
        """vLLM's examples: 61 layers are 31 + 30, and 15 + 15 + 16 + 15."""
        assert split_layers(layers, stages) == wanted

    def test_first_stage_has_dense_layers_and_embedding_and_last_the_head(self):
        """V3 has 3 dense layers of 61."""
        stages = make_stages(V3, 3)
        assert [(s.layers, s.first_k_dense_replace) for s in stages] == [(20, 3), (21, 0), (20, 0)]
        assert [(s.has_embedding, s.has_head) for s in stages] == [(True, False), (False, False), (False, True)]

    def test_indexers_and_windows_are_divided_over_stages(self):
        """V3.2 has an indexer in each layer; gpt-oss-120b has a window in every second of 36 layers, 18 in all."""
        assert [s.indexer.layers for s in make_stages(SHAPES["deepseek-v3.2"], 2)] == [31, 30]
        assert [s.gqa.window_layers for s in make_stages(SHAPES["gpt-oss-120b"], 4)] == [4, 5, 4, 5]


class TestMemory:
    """Weights and KV of a stage."""

    @pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-235b-a22b", "deepseek-v3.2"])
    def test_weight_bytes_of_stages_add_up_to_the_model(self, model):
        shape, layout = SHAPES[model], Layout(4)
        parts = [
            memory.compute_weight_bytes(stage, layout, 2, *memory.count_all_layers(stage), ep=MOE_TP)
            for stage in make_stages(shape, 2)
        ]
        assert sum(parts) == memory.compute_weight_bytes(shape, layout, 2, *memory.count_all_layers(shape), ep=MOE_TP)

    def test_tied_embedding_is_on_the_first_and_last_stage(self):
        """Both have 16 rows of 8 numbers of 2 bytes, and the last also has the norm of 8 numbers."""
        tied = dataclasses.replace(V3, tie_word_embeddings=True, vocab=16, hidden=8)
        first, middle, last = (memory.compute_outer_bytes(s, Layout(1), 2) for s in make_stages(tied, 3))
        assert (first, middle, last) == (16 * 8 * 2, 0, 17 * 8 * 2)
        assert memory.compute_outer_bytes(tied, Layout(1), 2) == 17 * 8 * 2

    def test_stage_holds_the_kv_of_its_layers(self):
        """31 layers have 576 numbers of 2 bytes per token, on pages of 64."""
        assert budget.compute_page_bytes(make_point(pp=2), V3) == 64 * 31 * 1152

    def test_stage_with_the_fewest_pages_limits_the_pool(self):
        """Stage 0 has one layer more and the embedding, stage 1 the head; of 58 layers with experts they have 28 and
        30.
        """
        probe = make_planned_probe("H200", 8)
        plan = budget.plan_engine([make_point(pp=2)], Settings(), V3, probe)
        alone = [budget._plan_stage([make_point()], Settings(), stage, probe) for stage in make_stages(V3, 2)]
        assert plan.pages == min(one.pages for one in alone)
        assert (plan.layers, plan.layers_held) == (31, 31)
        assert plan.pages > 1.9 * budget.plan_engine([make_point()], Settings(), V3, probe).pages
        whole = budget.measure_whole_model(make_point(pp=2), Settings(), V3, probe)
        assert whole.weight_bytes == max(one.full_weight_bytes for one in alone)

    def test_experts_are_divided_over_pcp_and_attention_is_not(self):
        """tp4 with pcp 2 has half of the experts of tp4, its attention, and copies of the KV cache."""
        probe = make_planned_probe("H200", 8)
        four, eight = make_point(tp=4), make_point(tp=4, pcp=2)
        found = [budget.measure_whole_model(p, Settings(), V3, probe) for p in (four, eight)]
        experts = 58 * 256 * memory._compute_mlp_bytes(V3, V3.moe_intermediate_size, 4, 2, FORMATS[FP8], "experts")
        assert found[0].weight_bytes - found[1].weight_bytes == pytest.approx(experts / 2, rel=0.02)
        assert budget.compute_page_bytes(four, V3) == budget.compute_page_bytes(eight, V3)


class TestLayouts:
    """Degrees of layouts."""

    def test_gpus_are_counted_like_in_vllm(self):
        """The number of GPUs is tensor parallel × pipeline parallel × prefill context parallel."""
        layout = Layout(tp=4, dp=2, pp=3, pcp=1)
        assert (layout.gpus, str(layout)) == (12, "tp4·dp2·pp3")
        assert layout.format_vllm_name() == "dp2·tp2·dcp1·pp3"
        assert make_point(tp=4, pp=2, pcp=2).gpus == Layout(4, pp=2, pcp=2).gpus == 16

    def test_dcp_spans_the_pcp_ranks_or_all_ranks_of_a_stage(self):
        """vLLM 0.29 takes {1, pcp, tp · pcp}, and no data parallelism with PCP."""
        assert [str(x) for x in list_valid_layouts(V3, 4, MOE_TP, pcp=2)] == [
            "tp4·pcp2",
            "tp4·dcp2·pcp2",
            "tp4·dcp8·pcp2",
        ]
        with pytest.raises(LayoutError, match="use --dcp 1, 2 or 8"):
            Layout(4, dcp=4, pcp=2).check_model(V3)
        with pytest.raises(LayoutError, match=r"vLLM 0\.29 does not combine with it; use --dp 1"):
            Layout(4, dp=2, pcp=2).check_model(V3)

    @pytest.mark.parametrize("model", ["qwen3-235b-a22b", "deepseek-v3.2"])
    def test_dcp_over_pcp_ranks_is_planned_for_mla_alone(self, model):
        with pytest.raises(LayoutError, match="is planned for MLA alone"):
            Layout(8, dcp=2, pcp=2).check_model(SHAPES[model])

    def test_dcp_over_pcp_ranks_stores_kv_once_over_them(self):
        """8 requests of 4,000 tokens with one more, in pages of 64 over 1, 2 or 8 ranks, and a page of padding."""
        pages = [budget.count_needed_pages(make_point(tp=4, pcp=2, dcp=dcp)) for dcp in (1, 2, 8)]
        assert pages == [8 * 63 + 1, 8 * 32 + 1, 8 * 8 + 1]
        probe = make_planned_probe("H200", 8)
        held = [
            budget.plan_engine([make_point(tp=4, pcp=2, dcp=dcp, exchange="ag_rs")], Settings(), V3, probe)
            for dcp in (2, 8)
        ]
        assert held[0].pages == held[1].pages, "as many pages, of 128 and of 512 tokens"

    def test_ranks_read_their_share_of_the_rows_for_the_heads_that_they_gather(self):
        """tp4·pcp2 and requests of 4,000 tokens: 32 heads over 4,000 rows, 32 over 2,000, 128 over 500."""

        def read(dcp: int) -> tuple[int, int, int]:
            sharding = Sharding.from_point(make_point(tp=4, pcp=2, dcp=dcp), V3)
            works = {
                phase: work
                for phase, _, work in iter_phase_works(sharding, StepRows(decodes=(4000,) * 8, sampled=8, tokens=8))
                if phase in ("attention", "q_gather")
            }
            return works["attention"].memory_bytes, works["attention"].flops, works["q_gather"].received_bytes

        for dcp, heads, rows, gathered in ((1, 32, 4000, 0), (2, 32, 2000, 0), (8, 128, 500, 3 / 4)):
            each, queries = heads * (576 + 512), 8 * heads * 576 * 2
            assert read(dcp) == (
                8 * rows * 576 * 2 + 8 * each * 2,
                2 * 8 * rows * each,
                gathered * queries,
            )

    def test_outputs_are_summed_over_all_ranks_that_share_the_cache(self):
        """8 rows of 32 or 128 heads: 512 numbers of 2 bytes each, 2 (N - 1) / N of them, and N - 1 log-sum-exps of 4 bytes."""
        comm_model = load_machine("H200").comm_model
        for dcp, heads in ((2, 32), (8, 128)):
            sharding = Sharding.from_point(make_point(tp=4, pcp=2, dcp=dcp, exchange="ag_rs"), V3)
            calls = _list_exchange_calls(sharding, 8, "ag_rs")
            assert calls[1:] == [
                ("all-gather", dcp, (dcp - 1) * 8 * heads * 4, 1),
                ("all-reduce", dcp, 2 * (dcp - 1) / dcp * 8 * heads * 512 * 2, 1),
            ]
            assert "ag_rs" not in predict_calls(sharding, StepRows(decodes=(4000,) * 8, tokens=8), comm_model, "ag_rs")

    def test_more_stages_than_layers_raise_layout_error(self):
        with pytest.raises(LayoutError, match="61 layers, fewer than --stages pp=62"):
            Layout(1, pp=62).check_model(V3)

    @pytest.mark.parametrize("command", ["serve --dry-run --gpu H200", "recommend --machine H200"])
    def test_micro_batches_without_stages_are_refused(self, capsys, command: str):
        code, _, err = run(capsys, *command.split(), "--stages", "micro-batches=3")
        assert (code, "micro-batches=3 has no effect without pipeline stages; add for example pp=2" in err) == (2, True)

    def test_expert_parallelism_includes_the_pcp_ranks(self):
        assert make_point(tp=4, pcp=2, ep=MOE_EP).ep_degree == 8


class TestRounds:
    """Times of micro-batches."""

    def test_round_takes_as_long_as_the_slowest_stage_or_one_micro_batch(self):
        """Stages take 10 and 8 µs, a hop 1 µs: two micro-batches keep the first stage busy for 20 µs; one takes 19."""
        two, one, four = (compute_round([10, 8], [1], count) for count in (2, 1, 4))
        assert (two.us, one.us, four.us) == (20, 19, 40)
        assert two.bubble_share == pytest.approx(1 - 2 * 9 / 20)
        assert one.bubble_share == pytest.approx(1 - 9 / 19)
        assert four.bubble_share == two.bubble_share

    @given(
        stages=st.lists(st.integers(1, 50), min_size=1, max_size=6),
        hop=st.integers(0, 20),
        micro_batches=st.integers(1, 8),
    )
    def test_round_equals_a_simulation_of_stages(self, stages, hop, micro_batches):
        us = simulate_round(stages, hop, micro_batches)
        assert compute_round(stages, [hop] * (len(stages) - 1), micro_batches).us == pytest.approx(us, rel=0.02)

    def test_one_stage_has_no_bubble(self):
        assert compute_round([7.0], [], 1).bubble_share == 0

    def test_hop_has_hidden_state_and_residual(self):
        """32 rows of 7,168 numbers of 2 bytes, twice: an eighth is sent to each of 8 ranks, and the rest is gathered."""
        assert compute_hop_bytes(32, 7168, 2, 8) == (32 * 7168 * 2 * 2 // 8, 32 * 7168 * 2 * 2 * 7 // 8)
        assert compute_hop_bytes(1, 8, 2, 1) == (32, 0)

    def test_part_of_a_chunk_has_its_share_of_tokens_and_pairs(self):
        """8 tokens after 100 have 8·100 + 8·9/2 = 836 pairs; a half, 4 tokens after 102, has 4·102 + 4·5/2 = 418."""
        assert split_chunks([(8, 100)], 2) == ((4, 102),)
        assert split_chunks([(8, 100)], 1) == ((8, 100),)

    def test_stages_add_up_to_the_time_of_the_whole_model(self):
        """With one micro-batch the stages add up to the step without stages, and the hop has 2·7,168·2·8 bytes."""
        machine, fitted = load_machine("H200"), estimate.load_published_steps().terms
        whole, cut = (Estimator(make_point(tp=4, pp=pp), machine, fitted, micro_batches=1) for pp in (1, 2))
        rows = cut.make_decode_rows(8, 4000)
        padded = make_rank_rows(cut, rows)
        (hop,) = cut.estimate_hops_us(padded)
        assert hop > 0
        assert cut.estimate_ms(rows) * 1e3 - hop == pytest.approx(whole.estimate_ms(rows) * 1e3, rel=0.005)

    def test_micro_batch_has_its_part_of_the_requests(self):
        machine, fitted = load_machine("H200"), estimate.load_published_steps().terms
        estimator = Estimator(make_point(tp=4, pp=2), machine, fitted, micro_batches=4)
        rows = make_rank_rows(estimator, StepRows(decodes=(4000,) * 32, chunks=((400, 0),), sampled=33, tokens=432))
        assert (len(rows.decodes), rows.chunks, rows.tokens) == (8, ((100, 150),), 108)

    def test_one_request_is_one_micro_batch(self):
        """The stages compute its step one after the other, in the time of one micro-batch; a chunk is still divided."""
        machine, fitted = load_machine("H200"), estimate.load_published_steps().terms
        one, four = (Estimator(make_point(tp=4, pp=2), machine, fitted, micro_batches=n) for n in (1, 4))
        rows = one.make_decode_rows(1, 4000)
        assert four.estimate_ms(rows) == one.estimate_ms(rows)
        assert make_rank_rows(four, dataclasses.replace(rows, chunks=((400, 0),), tokens=401)).chunks == ((100, 150),)

    def test_hop_to_another_host_uses_its_link(self):
        """10⁸ bytes at LINK_SHARE of the nominal rate, plus the latency of a message."""
        comm_model = load_machine("H200+rdma-400").comm_model
        size = 100_000_000
        far = comm_model.predict_hop_seconds(size, across=True)
        assert far.mean == pytest.approx(
            size / (comm_model.link.bytes_s * LINK_SHARE) + comm_model.link.latency_us / 1e6
        )
        assert far.mean > comm_model.predict_hop_seconds(size, across=False).mean
        with pytest.raises(UsageError, match="LINK"):
            load_machine("H200").comm_model.predict_hop_seconds(size, across=True)

    def test_pcp_rank_computes_its_part_of_prompts_and_all_decodes(self):
        machine, fitted = load_machine("H200"), estimate.load_published_steps().terms
        estimator = Estimator(make_point(tp=4, pcp=2), machine, fitted)
        rows = make_rank_rows(estimator, StepRows(decodes=(4000,) * 8, chunks=((4000, 1000),), sampled=9, tokens=4008))
        assert (len(rows.decodes), rows.chunks, rows.tokens) == (8, ((2000, 2000),), 4008)
        received = sum(
            times * work.received_bytes
            for phase, times, work in iter_phase_works(estimator.sharding, rows)
            if phase == "prefix_gather"
        )
        assert received == 61 * 2000 * 1152, "rows of 2,000 tokens of the other rank"


class TestCommands:
    """Commands with --stages."""

    def test_recommend_lists_layouts_of_all_stages(self, capsys):
        """8 GPUs are tp8 or two stages of tp4, with vLLM commands and the share of a step that a stage waits."""
        words = ["--machine", "H200", "--gpus", "8", "--context", "4000", "--concurrency", "32", "--json"]
        code, out, _ = run(capsys, "recommend", *words, "--stages", "1/2,micro-batches=2")
        assert code == 0
        (choice,) = json.loads(out)["loads"]
        rows = {row["layout"]: row for row in choice["rows"]}
        assert {"tp8", "tp4·pp2"} <= rows.keys()
        assert rows["tp8"]["bubble_share"] is None
        assert 0 < rows["tp4·pp2"]["bubble_share"] < 0.1
        assert (rows["tp8"]["gpus"], rows["tp4·pp2"]["gpus"]) == (8, 8)
        assert "--tensor-parallel-size 4 --pipeline-parallel-size 2" in rows["tp4·pp2"]["commands"]["vllm"]

    def test_impossible_stages_are_named(self, capsys):
        words = ("recommend", "--machine", "H200", "--gpus", "8", "--context", "4000")
        code, _, err = run(capsys, *words, "--stages", "3")
        assert code == 2
        assert "--gpus counts tp · pp · pcp" in err
        code, _, err = run(capsys, *words, "--stages", "pcp=0")
        assert code == 2
        assert "--stages pcp=0 is not positive" in err

    def test_dry_run_plans_stages_and_run_refuses_them(self, capsys):
        words = ["sweep", "--model", "tiny", "--tp", "2", "--dcp", "1", "--stages", "2", "--device", "cpu"]
        code, out, _ = run(capsys, *words, "--dry-run", "--json")
        assert code == 0
        assert {(row["layout"], row["layers"], row["pp"]) for row in json.loads(out)} == {("tp2·pp2", 2, 2)}
        code, _, err = run(capsys, *words)
        assert code == 2
        assert "the engine runs no pipeline stages" in err

    def test_plan_counts_the_gpus_of_all_stages(self):
        machine = validate.Machine(probe=make_planned_probe("H200", 8))
        with pytest.raises(CapacityError, match="needs 32 GPUs, tp · pp · pcp, and there are 8"):
            validate.check_runnable(make_point(pp=2, pcp=2), Settings(), V3, machine)


def test_sharding_of_a_pcp_point_has_its_ranks_as_replicas():
    """Tokens are gathered for the experts of 8 ranks; attention is sharded over 4."""
    sharding = Sharding.from_point(make_point(tp=4, pcp=2), V3)
    assert (sharding.layout.tp, sharding.layout.dp, sharding.layout.attn_tp, sharding.pcp) == (8, 2, 4, 2)
