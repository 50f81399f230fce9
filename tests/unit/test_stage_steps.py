"""Test replays with pipeline stages and prefill context parallelism: step times by hand, by simulation, and as a
command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import LayoutError, UsageError
from dcpbench.models import SHAPES
from dcpbench.plan.validate import Machine, check_runnable
from dcpbench.points.budget import plan_engine
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.device_probe import Probe
from dcpbench.points.memory import compute_page_bytes
from dcpbench.points.pipeline import compute_hop_bytes, make_stages
from dcpbench.points.settings import Settings
from dcpbench.serving.replay import _make_deployment, replay_from_file
from dcpbench.serving.requests import ReplicaStep, Step
from dcpbench.serving.stage_steps import StagedTimes, check_stages, make_measured_point
from dcpbench.serving.step_model import ReplicaBatch
from dcpbench.serving.step_times import get_engine_path, write_step_times
from tests.unit import test_replay_point
from tests.unit.step_times_builder import compute_true_ms, make_step_times
from tests.unit.test_pipeline import simulate_round

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

LOAD = msgspec.structs.replace(test_replay_point.LOAD, requests=16)
POINT = msgspec.structs.replace(test_replay_point.POINT, load=LOAD)
PLAIN = msgspec.structs.replace(POINT, dcp=1, exchange="none")


def stage(point: Point = POINT, micro_batches: int = 0, **degrees: int) -> StagedTimes:
    """Return the step times of a point with these degrees, of an engine that was measured without them."""
    staged = msgspec.structs.replace(point, **degrees)
    return StagedTimes(make_step_times(path=get_engine_path(point)), staged, micro_batches)


def decode(requests: int, context: int = 4000) -> ReplicaBatch:
    return ReplicaBatch.from_requests(requests, requests * context, [])


def replay(tmp_path: Path, point: Point, **settings: int) -> Record:
    """Return the record of a point by step times of its layout without stages."""
    times = make_step_times(path=get_engine_path(point))
    write_step_times(tmp_path / "times.json", times)
    chosen = Settings(**settings)
    plan = plan_engine([point], chosen, SHAPES[point.model], times.make_probe())
    return replay_from_file(point, plan, tmp_path / "times.json", chosen, tmp_path)


class TestStages:
    def test_stages_of_a_micro_batch_take_the_measured_time_in_total(self) -> None:
        """A step takes 40 ms + 1.4 ms a row + 0.1 ms per thousand KV tokens; 61 layers are divided into 31 and 30 with
        about as many experts.
        """
        stages_ms = [model.predict_step_ms([decode(4)]) for model in stage(pp=2).models]
        assert sum(stages_ms) == pytest.approx(40 + 1.4 * 4 + 0.1 * 16, rel=0.005)
        moe = [part.layers - part.first_k_dense_replace for part in make_stages(SHAPES["deepseek-v3"], 2)]
        assert stages_ms[0] / stages_ms[1] == pytest.approx(moe[0] / moe[1], rel=0.05)

    def test_equal_stages_share_a_model(self) -> None:
        """Several of 8 stages of V3, in the middle, have 8 layers with experts."""
        models = stage(msgspec.structs.replace(POINT, emulate="H200+rdma-400"), pp=8).models
        assert len(models) == 8
        assert len({id(model) for model in models}) < 8

    def test_stage_hop_carries_the_rows_of_a_micro_batch(self) -> None:
        """The hop carries 4 rows of 7,168 numbers of 2 bytes, twice: a quarter is sent, and the rest is gathered within
        steps.
        """
        sent, gathered = compute_hop_bytes(4, 7168, 2, 4)
        comm_model = load_machine("H200").comm_model.in_step
        seconds = (
            comm_model.predict_hop_seconds(sent, across=False).mean
            + comm_model.predict_seconds("all-gather", 4, gathered).mean
        )
        (hop_us,) = stage(pp=2)._predict_hops_us(4)
        assert hop_us == pytest.approx(1e6 * seconds)

    @pytest.mark.parametrize(("pp", "micro_batches"), [(2, 1), (2, 2), (2, 4)])
    def test_round_time_equals_a_simulation_of_its_stages(self, pp: int, micro_batches: int) -> None:
        of = stage(pp=pp)
        stages_us = [1e3 * model.predict_step_ms([decode(4)]) for model in of.models]
        (hop_us,) = of._predict_hops_us(4)
        simulated = simulate_round(stages_us, hop_us, micro_batches)
        assert of.predict_round([decode(4)], micro_batches).us == pytest.approx(simulated, rel=0.001)

    def test_gaps_between_tokens_are_rounds_of_half_of_the_requests(self, tmp_path: Path) -> None:
        """Steps without prompts decode the 8 rows of 8 clients as two micro-batches of 4."""
        found = replay(tmp_path, msgspec.structs.replace(POINT, pp=2)).serve
        assert found is not None
        assert found.stages is not None
        low, high = (stage(pp=2).predict_round([decode(4, context)], 2) for context in (4000, 4030))
        assert low.us / 1e3 <= found.itl_ms.p50 <= high.us / 1e3
        assert found.stages.micro_batches == 2
        assert 0 < found.stages.bubble_share < 0.1
        assert found.output_tok_s_per_gpu == pytest.approx(found.output_tok_s / 8)

    def test_single_micro_batch_leaves_half_the_time_of_two_stages_unused(self, tmp_path: Path) -> None:
        one = replay(tmp_path, msgspec.structs.replace(POINT, pp=2), micro_batches=1).serve
        plain = replay(tmp_path, POINT).serve
        assert one.stages.bubble_share == pytest.approx(0.5, abs=0.02)
        assert one.itl_ms.p50 == pytest.approx(plain.itl_ms.p50, rel=0.02)
        assert plain.stages is None

    def test_stage_holds_the_kv_of_its_layers(self, tmp_path: Path) -> None:
        """A stage has 31 of 61 layers; the pool has as many tokens, for the requests of the load."""
        staged, plain = (replay(tmp_path, msgspec.structs.replace(POINT, pp=pp)).kv for pp in (2, 1))
        assert staged.bytes_per_token_per_gpu == plain.bytes_per_token_per_gpu * 31 / 61
        assert staged.capacity_tokens == plain.capacity_tokens

    @pytest.mark.parametrize(
        ("changes", "layers"), [({}, 3), ({"pp": 2}, 2), ({"pp": 3}, 1), ({"pp": 3, "mtp": 1, "acceptance": "0.5"}, 2)]
    )
    def test_transfer_is_that_of_the_stage_with_the_most_kv(self, changes: dict[str, object], layers: int) -> None:
        """The last of three stages has the KV of its layer and of the MTP layer, in as many pages as the others."""
        tiny = {"model": "tiny", "dtype": "fp32", "weights_dtype": "", "kv_dtype": "", "backend": "reference"}
        point = msgspec.structs.replace(PLAIN, disaggregate="1:1", transfer_gb_s=50.0, **tiny | changes)
        plan = plan_engine([point], Settings(), SHAPES["tiny"], Probe(device="cpu", count=0, name="CPU"))
        page = compute_page_bytes(SHAPES["tiny"], point.page_size, 4)
        assert _make_deployment(point, plan).link.page_bytes == plan.kv_bytes // plan.pages == layers * page // 3

    def test_last_stage_computes_the_drafts(self) -> None:
        """The draft layer, one of 62, uses the head again, so that the last stage takes longer than its 30 layers."""
        drafted = msgspec.structs.replace(POINT, mtp=1, acceptance="0.9")
        with_drafts, without = (
            [model.predict_step_ms([decode(4)._replace(queries=point.mtp + 1)]) for model in stage(point, pp=2).models]
            for point in (drafted, POINT)
        )
        assert with_drafts[1] / with_drafts[0] > without[1] / without[0]
        assert sum(with_drafts) == pytest.approx(sum(without), rel=0.01), (
            "the measured step of this builder is the same"
        )


class TestPrefillContextParallelism:
    def test_pcp_rank_computes_its_part_of_a_prompt(self) -> None:
        """A prompt of 4,096 tokens counts as 2,048 with 1,024 before them. Experts of 2,048 tokens over 4 ranks have
        the products of 4,096 over 8, but twice the weights to read; calls between the ranks are added.
        """
        (model,), prompt = stage(PLAIN, pcp=2).models, ReplicaBatch.from_requests(0, 0, [(2048, 1024)])
        assert 0.7 * compute_true_ms(prompt) < model.predict_step_ms([prompt]) < compute_true_ms(prompt)

    def test_pcp_decodes_read_half_of_the_experts(self) -> None:
        """Attention and its projections are copies, and experts are divided over 8 ranks instead of 4."""
        (model,) = stage(PLAIN, pcp=2).models
        assert 0.5 < model.predict_step_ms([decode(8)]) / compute_true_ms(decode(8)) < 1

    def test_pcp_reduces_ttft(self, tmp_path: Path) -> None:
        first = [replay(tmp_path, msgspec.structs.replace(PLAIN, pcp=pcp)).serve.ttft_ms.p50 for pcp in (2, 1)]
        assert first[0] < first[1]


class TestDcpOverPcpRanks:
    @pytest.mark.parametrize(("dcp", "inner"), [(2, 1), (8, 4)])
    def test_measured_layout_has_dcp_inside_a_pcp_rank(self, dcp: int, inner: int) -> None:
        """For tp4·pcp2 over the 2 PCP ranks, the measured layout is tp4, and over all 8 ranks tp4·dcp4."""
        measured = make_measured_point(msgspec.structs.replace(POINT, dcp=dcp, pcp=2))
        assert (measured.tp, measured.dcp, measured.pcp) == (4, inner, 1)
        assert measured.exchange == ("none" if inner == 1 else "ag_rs")

    def test_dcp_over_pcp_rank_attends_to_half_of_the_tokens(self) -> None:
        """For 8 requests of 4,000 tokens, the measured steps have 2,000 tokens, with half of the experts and more
        calls.
        """
        shared = StagedTimes(
            make_step_times(path=get_engine_path(PLAIN)), msgspec.structs.replace(POINT, dcp=2, pcp=2, exchange="ag_rs")
        )
        step = Step(0, [ReplicaStep(decodes=[None] * 8, positions=[3999] * 8)])  # type: ignore[list-item]
        assert shared._make_parts(step, 1) == [decode(8, 2000)]
        assert stage(PLAIN, pcp=2)._make_parts(step, 1) == [decode(8)]

    def test_dcp_over_pcp_replay_has_the_kv_of_all_ranks(self, tmp_path: Path) -> None:
        point = msgspec.structs.replace(POINT, dcp=8, pcp=2)
        times = make_step_times(path=get_engine_path(POINT))
        write_step_times(tmp_path / "times.json", times)
        plan = plan_engine([point], Settings(), SHAPES[point.model], times.make_probe())
        found = replay_from_file(point, plan, tmp_path / "times.json", Settings(), tmp_path)
        assert found.kv.capacity_tokens == (plan.pages - 1) * 64 * 8
        assert found.serve.finished == 16
        assert found.serve.stages.micro_batches == 1


class TestRefusals:
    def test_stages_of_another_engine_are_refused(self) -> None:
        times = msgspec.structs.replace(make_step_times(path=get_engine_path(POINT)), engine=object())
        with pytest.raises(
            UsageError, match="of another engine; name a file of dcpbench's engine, or leave --stages out"
        ):
            check_stages(times, msgspec.structs.replace(POINT, pp=2))

    @pytest.mark.parametrize(
        ("degrees", "message"),
        [
            (
                {"dcp": 2, "pcp": 2},
                "--exchange ag_rs instead of none; name a file of tp4, whose steps --mode replay measures with --dcp 1 and without --stages.",
            ),
            ({"dcp": 2, "pcp": 3}, "--dcp 2 with --stages pcp=3: DCP spans the PCP ranks"),
            ({"pp": 4}, "use fewer, or replay steps that were measured with --emulate and a machine with +LINK"),
        ],
    )
    def test_refused_stages_name_what_to_measure(self, degrees: dict[str, int], message: str, tmp_path: Path) -> None:
        """The steps of tp4·dcp4 are given."""
        times, file = make_step_times(path=get_engine_path(POINT)), tmp_path / "times.json"
        write_step_times(file, times)
        with pytest.raises((UsageError, LayoutError)) as caught:
            check_runnable(
                msgspec.structs.replace(POINT, **degrees),
                Settings(step_times=str(file)),
                SHAPES[POINT.model],
                Machine(probe=times.make_probe()),
            )
        assert message in str(caught.value)

    def test_stages_on_several_hosts_need_a_link(self) -> None:
        with pytest.raises(UsageError, match="16 GPUs are more than the 8 of a host, and no link between hosts"):
            stage(pp=4)
        assert stage(msgspec.structs.replace(POINT, emulate="H200+rdma-400"), pp=4).models
