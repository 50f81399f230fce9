"""Test steps in which one attention replica has more rows than others: the rows that experts process, and the step's
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from dcpbench.errors import RecordsError
from dcpbench.kernels.moe.routing import NO_EXPERT
from dcpbench.models import SHAPES
from dcpbench.points.batches import compute_batch_rows, compute_chunk_rows
from dcpbench.points.budget import plan_engine
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.point import Load, Point
from dcpbench.points.roofline import Sharding, StepRows, compute_gather_work, iter_expert_works, iter_phase_works
from dcpbench.points.settings import Settings
from dcpbench.recommend import estimate
from dcpbench.recommend.forecast import EstimatedTimes, Estimator
from dcpbench.serving.requests import Chunk, ReplicaStep, Sequence, ServeRequest, Step, TableWrite
from dcpbench.serving.step_cases import BETWEEN_TOKENS, CHUNK_TOKENS, CaseMaker, Extent, is_bare, make_cases
from dcpbench.serving.step_model import ReplicaBatch, StepModel, compute_step_works
from dcpbench.serving.step_times import (
    CHECK,
    LINE,
    UNEVEN,
    Case,
    Chunks,
    Decodes,
    MeasuredCase,
    StepTimes,
    get_engine_path,
    read_step_times,
    write_step_times,
)
from dcpbench.workloads import serve
from dcpbench.workloads.session import build_session
from tests.unit.serving_builder import make_config
from tests.unit.step_times_builder import compute_true_ms, make_step_times

if TYPE_CHECKING:
    from pathlib import Path

CPU, TINY = torch.device("cpu"), SHAPES["tiny"]
DP = 4
EXTENT = Extent(requests=12, context=5500, pages=4800, virtual_page=64, chunk=4096, targets=(12,), replicas=DP)
LOAD = Load(mode="replay", requests=24, input_tokens="4000", output_tokens="30", chunk=16_384)
POINT = Point(
    model="deepseek-v3",
    tp=DP,
    dp=DP,
    workload="serve",
    concurrency=12,
    context=4030,
    load=LOAD,
    backend="flashinfer",
    dtype="bf16",
    page_size=64,
)
A_ROW_MS = 0.03  # time of experts for one row on each replica; a row on a single replica takes a DP-th of it


def compute_step_ms(works: list[ReplicaBatch]) -> float:
    """Return the time of the slowest replica, with experts that process only the rows that exist."""
    rows = [batch.rows_with_chunks for batch in works]
    most = max(works, key=lambda batch: batch.rows_with_chunks)
    full = max(compute_true_ms(pad_to_rows_of(most, batch)) for batch in works)
    return full - A_ROW_MS * sum(max(rows) - each for each in rows) / len(rows)


def pad_to_rows_of(most: ReplicaBatch, batch: ReplicaBatch) -> ReplicaBatch:
    """Give a replica's attention as many rows as the fullest has; compute_true_ms derives them from rows + tokens."""
    return batch._replace(tokens=most.rows + most.tokens - batch.rows)


def make_uneven_times(extent: Extent = EXTENT) -> StepTimes:
    """Return the whole grid of an engine in which experts process only the rows that exist."""
    cases = [
        MeasuredCase(
            case=case, samples_ms=[compute_step_ms(works) if case.chunks else compute_true_ms(case.compute_work())]
        )
        for case in make_cases(extent)
        for works in [case.compute_works(extent.replicas)]
    ]
    return msgspec.structs.replace(make_step_times(path=get_engine_path(POINT)), cases=cases)


TIMES = make_uneven_times()


@pytest.fixture(scope="module")
def serving() -> serve.Serving:
    """Build a rank that stands for two replicas, so that it sees the rows of both."""
    load = Load(mode="replay", requests=3, input_tokens="20", output_tokens="3", chunk=80)
    requests = Point(
        model="tiny",
        workload="serve",
        tp=2,
        dp=2,
        concurrency=8,
        context=60,
        load=load,
        page_size=1,
        backend="reference",
        dtype="fp32",
        emulate="H200",
    )
    plan = plan_engine([requests], Settings(), TINY, Probe(device="cpu", count=0, name="CPU"))
    with torch.inference_mode():
        return serve.get_serving(build_session(requests, TINY, plan, rank=0, device=CPU, seed=0), requests)


def make_replica(decodes: int, tokens: int) -> ReplicaStep:
    """Return a step with decodes at position 5, each with one page per token, and a chunk of `tokens` tokens behind
    them.
    """
    found = ReplicaStep()
    for slot in range(1, decodes + 1 + bool(tokens)):
        sequence = Sequence(ServeRequest(number=slot, prompt=np.arange(50, dtype=np.int32), output_tokens=2), slot)
        sequence.slot = slot
        first = 1 + 6 * (slot - 1)
        if slot <= decodes:
            found.decodes.append(sequence)
            found.slots.append(slot)
            found.positions.append(5)
            count = 6
        else:
            found.chunks.append(Chunk(sequence, slot, 0, tokens, samples=True))
            count = tokens
        found.table.append(TableWrite(slot, 0, np.arange(first, first + count, dtype=np.int32)))
    return found


class TestEngine:
    @pytest.mark.parametrize(
        "each",
        [((0, 40), (0, 0)), ((3, 20), (2, 0)), ((0, 40), (3, 33)), ((0, 16), (0, 16))],
        ids=["nothing", "decodes", "chunks", "equal"],
    )
    @pytest.mark.parametrize("first", [0, 1])
    def test_padding_rows_for_another_replica_go_to_no_expert(
        self, each: tuple[tuple[int, int], ...], first: int, serving: serve.Serving
    ) -> None:
        """Expect as many routed rows per replica as it would run alone, first in its part, and one token per requested
        sample.
        """
        each = each[first:] + each[:first]
        model = serving.engine.model
        model.chosen_experts = chosen = []
        step = Step(1, [make_replica(decodes, tokens) for decodes, tokens in each])
        with torch.inference_mode():
            tokens = serving.engine.launch_step(step).wait_tokens()
        assert len(tokens) == len(step.replicas[0].sampled_sequences)
        own = [compute_chunk_rows((compute_batch_rows(decodes) if decodes else 0) + tokens) for decodes, tokens in each]
        live = torch.stack([torch.arange(max(own)) < count for count in own]).flatten()
        assert len(chosen) == TINY.layers - TINY.first_k_dense_replace
        for _, ids_Tk in chosen:
            assert torch.equal((ids_Tk != NO_EXPERT).all(-1), live)
            assert torch.equal((ids_Tk == NO_EXPERT).all(-1), ~live)

    def test_all_rows_of_decode_steps_go_to_experts(self, serving: serve.Serving) -> None:
        """Decode steps run as captured graphs, which do not depend on the rows of replicas."""
        serving.engine.model.chosen_experts = chosen = []
        with torch.inference_mode():
            serving.engine.launch_step(Step(1, [make_replica(4, 0), make_replica(1, 0)])).wait_tokens()
        assert chosen
        assert all((ids_Tk != NO_EXPERT).all() for _, ids_Tk in chosen)


class TestGrid:
    def test_grid_has_each_chunk_size_also_on_one_replica_alone(self) -> None:
        """Measure equal cases, so that their difference is the time of experts; these cases have no prefix, and exist
        only with replicas.
        """
        cases = make_cases(EXTENT)
        alone = [case for case in cases if case.use == UNEVEN]
        assert [case.compute_work().tokens for case in alone] == [n for n in CHUNK_TOKENS if n <= EXTENT.chunk]
        assert {msgspec.structs.replace(case, use=LINE, replicas=0) for case in alone} <= set(filter(is_bare, cases))
        assert not any(is_bare(case) for case in alone)
        assert not any(case.replicas for case in make_cases(make_extent(replicas=1)))

    @pytest.mark.parametrize("tokens", BETWEEN_TOKENS)
    def test_one_replica_cases_include_the_largest_chunk_and_whole_prompts(self, tokens: int) -> None:
        """Include these sizes even if they lie between those of the usual grid."""
        for changed in ({"chunk": tokens}, {"chunk": 2 * tokens, "prompts": (tokens,)}):
            sizes = [case.compute_work().tokens for case in make_cases(make_extent(**changed)) if case.use == UNEVEN]
            assert tokens in sizes
            assert max(sizes) == changed["chunk"]
            assert set(BETWEEN_TOKENS) & set(sizes) <= {tokens, max(sizes)}

    def test_check_cases_include_half_of_the_replicas(self) -> None:
        """Use two of four replicas, and no such case with one or two."""
        some = {n: [c.replicas for c in make_cases(make_extent(replicas=n)) if c.use == CHECK] for n in (1, 2, 4)}
        assert some == {1: [0] * len(some[1]), 2: [0] * len(some[1]), 4: [2] + [0] * len(some[1])}

    def test_step_of_a_case_gives_work_only_to_its_replicas(self) -> None:
        setup = make_config(replicas=3, pages=33, page_size=2, dcp=2, max_requests=6, chunk=16, max_context=40)
        case = Case(chunks=(Chunks(2, 5, 8),), use=CHECK, replicas=2)
        made = CaseMaker(setup, 50).make_steps(case)
        assert compute_step_works(made.first) == compute_step_works(made.again) == case.compute_works(3)
        assert case.compute_works(3) == [case.compute_work()] * 2 + [ReplicaBatch.from_requests(0, 0, [])]
        assert [bool(replica.table) for replica in made.first.replicas] == [True, True, False]

    def test_rows_and_text_of_a_case_count_only_busy_replicas(self) -> None:
        case = Case(chunks=(Chunks(1, 2048, 0),), use=UNEVEN, replicas=1)
        assert case.compute_rows(4) == StepRows(chunks=((2048, 0),), sampled=1, tokens=2048)
        assert str(case) == "1 × 2,048 tokens at 0, on 1 replica alone"


def make_extent(**changes: int | tuple[int, ...]) -> Extent:
    """Return EXTENT with some fields changed."""
    return Extent(**{name: getattr(EXTENT, name) for name in Extent.__dataclass_fields__} | changes)


class TestPrediction:
    def test_model_reproduces_cases_of_one_and_of_some_replicas(self) -> None:
        assert {case.replicas for case, _ in TIMES.check_errors()} == {0, 2}
        assert all(abs(error) < 1e-9 for _, error in TIMES.check_errors())
        for m in TIMES.select_cases(UNEVEN):
            assert TIMES.model.predict_step_ms(m.case.compute_works(DP)) == pytest.approx(m.median_ms)

    @pytest.mark.parametrize("seed", range(20))
    def test_prediction_is_exact_if_rows_cost_the_same_on_every_replica(self, seed: int) -> None:
        """Let replicas decode, run a chunk, do both or do nothing."""
        rng = np.random.default_rng(seed)
        works = [
            ReplicaBatch.from_requests(
                n, n * int(rng.integers(64, 4000)), [(int(rng.integers(16, 3000)), 0)] if rng.random() < 0.5 else []
            )
            for n in rng.integers(0, 11, DP).tolist()
        ]
        works[int(rng.integers(DP))] = ReplicaBatch.from_requests(0, 0, [(3500, 0)])
        assert TIMES.model.predict_step_ms(works) == pytest.approx(compute_step_ms(works))

    def test_predicted_time_grows_with_the_rows_of_other_replicas(self) -> None:
        """Give the other replicas from no rows to as many as the fullest has."""
        chunk, empty = ReplicaBatch.from_requests(0, 0, [(4096, 0)]), ReplicaBatch.from_requests(0, 0, [])
        others = [
            empty,
            ReplicaBatch.from_requests(12, 12 * 4000, []),
            ReplicaBatch.from_requests(0, 0, [(2048, 0)]),
            chunk,
        ]
        times = [TIMES.model.predict_step_ms([chunk, other, empty, empty]) for other in others]
        assert times == sorted(times)
        assert times[-1] - times[0] == pytest.approx(A_ROW_MS * 4096 / DP)
        assert TIMES.model.predict_step_ms([chunk] * DP) - times[0] == pytest.approx(A_ROW_MS * 4096 * (DP - 1) / DP)

    def test_predicted_host_time_grows_with_the_rows_of_other_replicas(self) -> None:
        """Let launching take half as long as the step."""
        halves = [
            msgspec.structs.replace(m, host_ms=[m.median_ms / 2]) if m.case.chunks else m
            for m in TIMES.cases
            if not m.case.decodes or not m.case.chunks
        ]
        times = msgspec.structs.replace(TIMES, cases=halves)
        for m in times.select_cases(UNEVEN):
            assert times.host_model.predict_step_ms(m.case.compute_works(DP)) == pytest.approx(m.median_ms / 2)

    def test_noise_never_makes_a_step_longer_than_with_full_replicas(self) -> None:
        """Measure a case of one replica that took longer than the case of all replicas."""
        line = [(m.case.compute_work(), m.median_ms) for m in TIMES.select_cases(LINE)]
        model = StepModel(line, (), [(m.case.compute_work(), 1e6) for m in TIMES.select_cases(UNEVEN)])
        chunk, empty = ReplicaBatch.from_requests(0, 0, [(4096, 0)]), ReplicaBatch.from_requests(0, 0, [])
        assert model.predict_step_ms([chunk, empty, empty, empty]) == model.predict_step_ms([chunk] * DP)


class TestFile:
    def test_file_without_cases_of_one_busy_replica_is_rejected(self, tmp_path: Path) -> None:
        """Reject the file, because its forecast would charge attention DP for rows that the engine leaves out."""
        cases = [m for m in TIMES.cases if m.case.use != UNEVEN]
        write_step_times(tmp_path / "x.json", msgspec.structs.replace(TIMES, cases=cases))
        with pytest.raises(RecordsError, match=r"x\.json: no case has prompts on one replica of 4 only.*measure again"):
            read_step_times(tmp_path / "x.json")

    def test_step_times_file_round_trips(self, tmp_path: Path) -> None:
        write_step_times(tmp_path / "x.json", TIMES)
        assert read_step_times(tmp_path / "x.json") == TIMES

    @pytest.mark.parametrize(
        ("case", "message"),
        [
            (Case(chunks=(Chunks(1, 1, 0),), replicas=5), "case.replicas is 5, of a path with dp 4"),
            (
                Case(chunks=(Chunks(1, 1, 0),), replicas=2),
                "case.replicas is 2 where case.use is 'line', but this use is the same on all replicas",
            ),
            (Case(chunks=(Chunks(1, 1, 0),), replicas=-1), "case.replicas is -1, of a path with dp 4"),
            (Case(chunks=(Chunks(1, 1, 0),), use=UNEVEN), "case.use is 'uneven', which is of chunks that one"),
            (
                Case(decodes=(Decodes(1, 1),), use=UNEVEN, replicas=1),
                "case.use is 'uneven', which is of chunks that one",
            ),
            (
                Case(chunks=(Chunks(1, 7, 64),), use=UNEVEN, replicas=1),
                "its step, 1 × 7 tokens at 64, on 1 replica alone, was not measured on all replicas",
            ),
        ],
        ids=["many", "line", "negative", "all", "decodes", "unlike"],
    )
    def test_invalid_replicas_of_a_case_are_rejected(self, case: Case, message: str, tmp_path: Path) -> None:
        found = msgspec.structs.replace(TIMES, cases=[MeasuredCase(case=case, samples_ms=[1.0])])
        write_step_times(tmp_path / "x.json", found)
        with pytest.raises(RecordsError, match=rf"x\.json, cases\[0\]: {message}.*measure again"):
            read_step_times(tmp_path / "x.json")


class TestEstimate:
    def test_padding_rows_cost_everything_except_experts(self) -> None:
        """Use 2,048 rows on one of four replicas: 8,192 are sent, and 2,048 go to experts. A decode step has no such
        rows.
        """
        alone = Case(chunks=(Chunks(1, 2048, 0),), replicas=1).compute_rows(4)
        found = estimate.pad_step(alone, 4)
        assert (found.tokens, found.live) == (4 * 2048, 2048)
        equal = estimate.pad_step(Case(chunks=(Chunks(1, 2048, 0),)).compute_rows(4), 4)
        assert (equal.tokens, equal.live) == (4 * 2048, 4 * 2048)
        decodes = estimate.pad_step(StepRows(decodes=(9, 9, 9), tokens=10), 4)
        assert (decodes.tokens, decodes.live) == (16, 16)

    @pytest.mark.parametrize("ep", [1, 4], ids=["cut", "whole"])
    def test_experts_process_no_padding_rows(self, ep: int) -> None:
        """Expect the experts' work of a step with only the existing rows, and other layers' work of the padded step."""
        sharding = Sharding(shape=SHAPES["deepseek-v3"], layout=Layout(4, 4), itemsize=2, ep=ep)
        padded = estimate.pad_step(Case(chunks=(Chunks(1, 2048, 0),), replicas=1).compute_rows(4), 4)
        load = sharding.estimate_expert_load(padded.live)
        expected = iter_expert_works(sharding, StepRows(tokens=2048), load)
        assert list(iter_expert_works(sharding, padded, load)) == list(expected)
        works = [(phase, work) for phase, _, work in iter_phase_works(sharding, padded)]
        assert [work for phase, work in works if phase == "moe"][-2:] == list(iter_expert_works(sharding, padded, load))
        assert compute_gather_work(4 * 2048 * SHAPES["deepseek-v3"].hidden * 2, 4) in [
            w for p, w in works if p == "dp_gather"
        ]

    def test_step_with_rows_on_one_replica_is_estimated_shorter(self) -> None:
        """Check the estimate of a single step, and that of a load that is served by estimates."""
        estimator = Estimator(POINT, load_machine("H200"), estimate.load_published_steps().terms)
        chunks = (Chunks(1, 2048, 0),)
        alone, equal = (estimator.estimate_ms(Case(chunks=chunks, replicas=n).compute_rows(DP)) for n in (1, 0))
        assert alone < equal
        plan = plan_engine([POINT], Settings(), SHAPES[POINT.model], TIMES.make_probe())
        model = EstimatedTimes(estimator, POINT, plan).model
        works = [Case(chunks=chunks, replicas=n).compute_works(DP) for n in (1, 0)]
        assert [model.predict_step_ms(each) for each in works] == [pytest.approx(alone), pytest.approx(equal)]
