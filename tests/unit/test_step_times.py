"""Step times: what is measured, what is predicted of it, what is refused, and the file."""

import dataclasses
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dcpbench.errors import RecordsError, UsageError
from dcpbench.points.batches import compute_chunk_rows
from dcpbench.points.comm_model import Prompts
from dcpbench.records.record import Emulated
from dcpbench.serving.requests import Chunk, ReplicaStep, Sequence, ServeRequest, Step
from dcpbench.serving.step_cases import Extent, make_cases, select_chunk_sizes, select_row_sizes
from dcpbench.serving.step_model import Line, MixedTimes, Work
from dcpbench.serving.step_times import (
    CHECK,
    LINE,
    Case,
    Chunks,
    Decodes,
    MeasuredCase,
    StepTimes,
    find_differences,
    read_step_times,
    write_step_times,
)
from tests.unit.step_times_builder import EXTENT, PATH, step_times, true_ms

TIMES = step_times()


def replica(positions: list[int], chunks: list[tuple[int, int]] = []) -> ReplicaStep:  # noqa: B006 - not changed
    """Decodes that write these positions, and chunks of (tokens, prefix)."""
    anyone = Sequence(ServeRequest(number=0, prompt=np.zeros(1, dtype=np.int32), output_tokens=1), 0)
    return ReplicaStep(
        decodes=[anyone] * len(positions),
        slots=list(range(1, len(positions) + 1)),
        positions=positions,
        chunks=[Chunk(anyone, 1, prefix, prefix + tokens, samples=True) for tokens, prefix in chunks],
    )


def ms(*replicas: ReplicaStep) -> float:
    return TIMES.predict_duration_ms(Step(0, list(replicas)))


class TestWork:
    def test_a_decode_attends_to_its_position_and_all_before_it(self) -> None:
        """Positions 9 and 99 read 10 and 100 KV rows; two rows are a graph of their own."""
        assert TIMES.model.predict_step_ms([Work(2, 110, 0, 0.0, 0)]) == ms(replica([9, 99]))

    def test_rows_are_those_that_run(self) -> None:
        """Five requests run in the graph of eight."""
        assert Work.from_requests(5, 500, []).rows == 8

    def test_a_token_of_a_chunk_attends_to_the_prefix_and_half_the_chunk(self) -> None:
        """100 tokens after 200 attend to 200 + 50 each: 25,000 pairs; 10 more tokens alone to 5 each: 50."""
        assert Work.from_requests(0, 0, [(100, 200), (10, 0)]) == Work(0, 0, 110, 25_050.0, 200)


class TestGrid:
    def test_every_case_can_run(self) -> None:
        assert all(EXTENT.supports_case(case) for case in make_cases(EXTENT))

    def test_it_takes_less_than_40_seconds(self) -> None:
        """The times are those of DeepSeek-V3 on four GPUs, for cases with one step to settle and two or three to measure."""
        times = [true_ms(case.compute_work()) for case in make_cases(EXTENT)]
        assert sum(t * (3 if t > 150 else 4) for t in times) < 40_000

    @pytest.mark.parametrize(
        ("requests", "sizes"),
        [
            (1, [1]),
            (3, [1, 2, 4]),
            (48, [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]),
            (600, [1, 2, 4, 8, 16, 32, 48, 80, 128, 160]),
        ],
        ids=["1", "3", "48", "600"],
    )
    def test_rows_are_dense_near_the_most_and_sparse_below(self, requests: int, sizes: list[int]) -> None:
        assert select_row_sizes(requests)[: len(sizes)] == sizes

    def test_rows_that_loads_aim_at_are_measured(self) -> None:
        """64 is skipped between 80 and 48 else."""
        assert 64 not in select_row_sizes(600)
        assert 64 in select_row_sizes(600, targets=(64,))

    def test_an_open_loop_may_have_any_number_of_rows(self) -> None:
        assert select_row_sizes(256, open_loop=True)[:8] == [1, 2, 4, 8, 12, 16, 24, 32]

    def test_steps_past_the_largest_graph_have_sizes_of_their_own(self) -> None:
        """513 to 600 requests run eagerly in 576 and 640 rows."""
        assert select_row_sizes(600)[-2:] == [512, 576] or select_row_sizes(600)[-1] == 640

    def test_prompts_of_one_length_are_a_size_unless_one_is_near(self) -> None:
        """4,000 is within a tenth of 4,096; 2,500 is not near to anything."""
        assert 4000 not in select_chunk_sizes(EXTENT)
        assert 2500 in select_chunk_sizes(dataclasses.replace(EXTENT, prompts=(2500,)))

    def test_no_step_has_more_chunk_tokens_than_kv_or_requests_allow(self) -> None:
        """One request of 5,500 tokens at most never fills a chunk of 8,192."""
        assert select_chunk_sizes(dataclasses.replace(EXTENT, requests=1))[-1] == 5500

    @pytest.mark.parametrize("requests", [1, 2, 5])
    @pytest.mark.parametrize("pages", [2, 9, 40])
    def test_small_caches_have_a_grid_too(self, requests: int, pages: int) -> None:
        extent = Extent(requests=requests, context=60, pages=pages, virtual_page=4, chunk=16)
        cases = make_cases(extent)
        assert cases
        assert all(extent.supports_case(case) for case in cases)
        assert step_times(extent).model.predict_step_ms([Work.from_requests(1, 3, [])]) == pytest.approx(
            true_ms(Work.from_requests(1, 3, []))
        )

    def test_long_prompts_are_measured_to_their_end(self) -> None:
        """128 K tokens: chunks of 8,192 whose prefix is all the rest, 15 × 8,192 = 122,880 and a little."""
        long = dataclasses.replace(EXTENT, context=131_072, pages=4000)
        prefixes = [c.prefix for case in make_cases(long) for c in case.chunks if c.tokens == 8192]
        assert max(prefixes) == 131_072 - 8192

    def test_prompts_that_share_attend_to_more_than_the_cache_holds(self) -> None:
        """48 requests of 5,500 tokens, where the pool has 100 pages of 256 tokens."""
        scarce = dataclasses.replace(EXTENT, pages=100)
        assert max(case.compute_work().kv_tokens for case in make_cases(scarce)) <= 25_600
        assert (
            max(case.compute_work().kv_tokens for case in make_cases(dataclasses.replace(scarce, shared=True)))
            == 48 * 5500
        )

    def test_a_cache_of_nothing_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="--kv-memory"):
            make_cases(Extent(requests=1, context=8, pages=0, virtual_page=4, chunk=8))


class TestPrediction:
    def test_it_is_exact_on_the_grid_where_times_are_not_linear(self) -> None:
        """Random times: every case that is interpolated between gives back its own."""
        rng = np.random.default_rng(0)
        times = step_times(truth=lambda work: true_ms(work) * rng.uniform(0.9, 1.1))
        for m in times.select_cases(LINE):
            assert times.model.predict_step_ms([m.case.compute_work()]) == pytest.approx(m.median_ms)

    @pytest.mark.parametrize("seed", range(40))
    def test_it_is_exact_on_linear_functions(self, seed: int) -> None:
        """Any step within the extent, whatever its mix: the truth is linear, so nothing is lost between the cases."""
        rng = np.random.default_rng(seed)
        positions = rng.integers(255, 5000, rng.integers(0, 40)).tolist()
        chunks = [(int(tokens), 256 * int(rng.integers(0, 4))) for tokens in rng.integers(1, 1200, rng.integers(0, 6))]
        if not positions and not chunks:
            positions = [500]
        work = Work.from_requests(len(positions), sum(positions) + len(positions), chunks)
        assert ms(replica(positions, chunks)) == pytest.approx(true_ms(work))

    def test_cases_to_check_with_change_nothing(self) -> None:
        wrong = [MeasuredCase(case=m.case, samples_ms=[1e6]) if m.case.use == CHECK else m for m in TIMES.cases]
        times = msgspec.structs.replace(TIMES, cases=wrong)
        assert times.predict_duration_ms(Step(0, [replica([99])])) == ms(replica([99]))
        assert all(error < -0.99 for _, error in times.check_errors())

    def test_a_perfect_prediction_has_no_error(self) -> None:
        assert len(TIMES.check_errors()) == 3
        assert all(abs(error) < 1e-9 for _, error in TIMES.check_errors())

    def test_where_no_case_has_many_prefixes_their_cost_follows_from_the_lines(self) -> None:
        """
        A stored token costs 1.5 µs and, for each row that attends to it, 2.5 ns: at 1 row 1.5025, at 8,192 rows 21.98.
        Four chunks with 1,024 stored tokens each have 3,000 more than one chunk that attends to as many pairs.
        """
        lines = msgspec.structs.replace(TIMES, cases=TIMES.select_cases(LINE))
        step = replica([], [(256, 1024)] * 4)
        assert lines.predict_duration_ms(Step(0, [step])) == pytest.approx(
            true_ms(Work.from_requests(0, 0, [(256, 1024)] * 4))
        )

    def test_beside_a_chunk_on_another_replica_a_lone_decode_adds_the_reading_of_its_kv(self) -> None:
        """A replica with one slot never has both. 4,000 KV tokens at 0.1 µs beside rows that cost as a chunk's do."""
        alone = step_times(dataclasses.replace(EXTENT, requests=1, targets=(1,)))
        step = Step(0, [replica([], [(1, 0)]), replica([3999])])
        assert alone.predict_duration_ms(step) == pytest.approx(60 + 16 * 0.045 + 0.4, abs=0.01)

    def test_decodes_that_are_padded_take_as_long_as_their_graph(self) -> None:
        """5 and 8 requests with equally many KV tokens both run in the graph of 8."""
        assert ms(replica([999] * 5)) == pytest.approx(ms(replica([624] * 8)))

    def test_the_slowest_replica_decides(self) -> None:
        full, light = replica([4999] * 8), replica([299] * 8)
        assert ms(full, light) == ms(full) > ms(light)

    def test_replicas_run_as_many_rows_as_the_fullest(self) -> None:
        """One request with 5,000 tokens beside eight with 300: its replica runs eight rows, too."""
        assert ms(replica([4999]), replica([299] * 8)) == pytest.approx(true_ms(Work(8, 5000, 0, 0.0, 0)))

    def test_a_replica_without_chunks_runs_the_rows_of_the_one_with_them(self) -> None:
        """2,048 rows at 0.045 ms and the attention of either; the chunk's is more than two decodes'."""
        chunk, decodes = replica([], [(2048, 0)]), replica([400, 400])
        assert ms(chunk, decodes) == ms(chunk)

    def test_the_median_of_the_samples_counts(self) -> None:
        assert MeasuredCase(case=Case(), samples_ms=[5.0, 1.0, 2.0]).median_ms == 2.0

    def test_a_line_goes_on_beyond_its_ends(self) -> None:
        line = Line([(10, 1), (20, 2), (40, 8)])
        assert [line(x) for x in (0, 10, 15, 30, 50)] == [0, 1, 1.5, 5, 11]


class TestRefusal:
    @pytest.mark.parametrize(
        ("step", "says"),
        [
            (replica([99] * 49), "56 decode rows|64 decode rows"),
            (replica([99] * 600), "captured graphs"),
            (replica([7000]), "1 decode rows with 7,001 KV tokens"),
            (replica([], [(9000, 0)]), r"9,216 rows.*give a smaller --prefill chunk or load\."),
            (replica([], [(64, 9 * 1024)]), r"64 rows whose chunks' tokens attend to 9,248.*give a smaller load\."),
            (replica([9000], [(64, 0)]), "in a step with chunks"),
        ],
        ids=["rows", "eager", "kv", "chunk", "prefix", "mixed-kv"],
    )
    def test_a_step_outside_of_what_was_measured_is_an_error(self, step: ReplicaStep, says: str) -> None:
        """It names the step, what there is, and what to do; nothing is made up."""
        with pytest.raises(UsageError, match=says) as caught:
            ms(step)
        assert "--step-times" in str(caught.value)

    def test_a_fifth_more_kv_is_predicted(self) -> None:
        """As what grows there is the reading of KV: 48 × 5,500 measured, 48 × 5,800 asked for."""
        assert ms(replica([5799] * 48)) == pytest.approx(40 + 1.4 * 48 + 1e-4 * 48 * 5800)

    def test_times_of_decodes_alone_are_no_step_times(self) -> None:
        only = [m for m in TIMES.cases if not m.case.chunks]
        with pytest.raises(RecordsError, match="measure"):
            _ = msgspec.structs.replace(TIMES, cases=only).model


class TestHost:
    def test_launching_is_interpolated_between_its_own_times(self) -> None:
        """50 ms for a step with chunks, 0.01 more for each row: 704 both for 700 tokens and with two decodes beside them."""

        def host_ms(case: Case) -> list[float]:
            work = case.compute_work()
            return [50 + 0.01 * compute_chunk_rows(work.rows + work.tokens)] if case.chunks else []

        times = msgspec.structs.replace(
            TIMES, cases=[msgspec.structs.replace(m, host_ms=host_ms(m.case)) for m in TIMES.cases]
        )
        assert times.predict_host_ms(Step(0, [replica([], [(700, 256)])])) == pytest.approx(57.04)
        assert times.predict_host_ms(Step(0, [replica([99, 1000], [(700, 256)])])) == pytest.approx(57.04)
        assert times.predict_host_ms(Step(0, [replica([99, 1000])])) == 0.0

    def test_the_host_is_never_busy_for_less_than_no_time(self) -> None:
        """1 ms for each 100 KV tokens of a row past the first 200: lines through cases of 256 tokens and more would
        predict -2 ms for one of a single token.
        """

        def host_ms(case: Case) -> list[float]:
            return [] if case.chunks else [max(case.decodes[0].context - 200, 0) / 100]

        times = msgspec.structs.replace(
            TIMES, cases=[msgspec.structs.replace(m, host_ms=host_ms(m.case)) for m in TIMES.cases]
        )
        single = Step(0, [replica([0])])
        assert times.host_model.predict_step_ms([Work(1, 1, 0, 0.0, 0)]) < 0
        assert times.predict_host_ms(single) == 0.0

    @pytest.mark.parametrize(("tp", "host_ms", "as_running"), [(1, 5.0, False), (8, 5.0, True), (8, 1e4, False)])
    def test_where_one_rank_stands_for_several_launching_chunks_takes_as_long_as_running_them_at_least(
        self, tp: int, host_ms: float, as_running: bool
    ) -> None:
        """Where it took the one less."""
        cases = [msgspec.structs.replace(m, host_ms=[host_ms] if m.case.chunks else []) for m in TIMES.cases]
        emulated = Emulated(machine="H200", calls=1, wire_us=1.0, wire_low_us=1.0, wire_high_us=1.0)
        times = msgspec.structs.replace(TIMES, cases=cases, emulated=emulated, path=PATH | {"tp": tp})
        chunk, decodes = (Step(0, [one]) for one in (replica([], [(700, 256)]), replica([99, 1000])))
        assert times.predict_host_ms(chunk) == pytest.approx(
            times.predict_duration_ms(chunk) if as_running else host_ms
        )
        assert times.predict_host_ms(decodes) == 0.0

    def test_steps_with_prompts_can_be_made_longer_by_another_factor(self) -> None:
        longer = TIMES.apply_factors(1.5, 2.0)
        chunk, decodes = (Step(0, [one]) for one in (replica([], [(700, 256)]), replica([99, 1000])))
        assert longer.predict_duration_ms(decodes) == pytest.approx(1.5 * TIMES.predict_duration_ms(decodes))
        assert longer.predict_duration_ms(chunk) == pytest.approx(2 * TIMES.predict_duration_ms(chunk))


class TestPath:
    def test_what_either_side_lacks_is_named_as_lacking(self) -> None:
        """A precision of its own, or a machine that is emulated, is the empty string where there is none."""
        assert find_differences(PATH, PATH | {"kv_dtype": "fp8"}) == ["no --kv-dtype instead of fp8"]
        assert find_differences(PATH | {"kv_dtype": "fp8"}, dict(PATH)) == ["--kv-dtype fp8 instead of none"]

    def test_differences_are_named_as_options(self) -> None:
        other = PATH | {"backend": "triton", "page_size": 1}
        assert find_differences(other, PATH) == [
            "--backend triton instead of flashinfer",
            "--page-size 1 instead of 64",
        ]

    def test_auto_takes_what_was_measured(self) -> None:
        assert find_differences(PATH, PATH | {"backend": "auto", "exchange": "auto"}) == []

    def test_equal_paths_have_none(self) -> None:
        assert find_differences(PATH, dict(PATH)) == []


class TestFile:
    def test_it_comes_back_as_it_was(self, tmp_path) -> None:
        path = tmp_path / "step-times" / "one.json"
        write_step_times(path, TIMES)
        assert read_step_times(path) == TIMES
        assert not list(path.parent.glob("*.part"))

    def test_it_predicts_the_same(self, tmp_path) -> None:
        path = tmp_path / "one.json"
        write_step_times(path, TIMES)
        step = Step(0, [replica([99, 1000], [(700, 256)])])
        assert read_step_times(path).predict_duration_ms(step) == TIMES.predict_duration_ms(step)

    @pytest.mark.parametrize("change", [{"tp": "4"}, {"model": None}, {"q_replicate": 1}, {"halves": False}], ids=str)
    def test_a_path_that_no_point_has_says_so(self, tmp_path, change: dict[str, object]) -> None:
        write_step_times(tmp_path / "x.json", TIMES)
        bad = msgspec.json.decode((tmp_path / "x.json").read_bytes())
        bad["path"] |= change
        (tmp_path / "x.json").write_bytes(msgspec.json.encode(bad))
        with pytest.raises(RecordsError, match=f"path.*{'' if None in change.values() else next(iter(change))}"):
            read_step_times(tmp_path / "x.json")

    def test_a_field_that_is_newer_than_the_file_has_its_default(self, tmp_path: Path) -> None:
        """Files stay readable if an axis is added. A field without a default cannot be left out."""
        path = tmp_path / "one.json"
        write_step_times(path, TIMES)
        older = msgspec.json.decode(path.read_bytes())
        del older["path"]["all_reduce"]
        path.write_bytes(msgspec.json.encode(older))
        assert read_step_times(path).path["all_reduce"] == "nccl"
        del older["path"]["model"]
        path.write_bytes(msgspec.json.encode(older))
        with pytest.raises(RecordsError, match=r"path\.model is missing"):
            read_step_times(path)

    def test_one_without_the_host_s_time_has_none(self, tmp_path) -> None:
        """As files have that are older than it."""
        path = tmp_path / "one.json"
        write_step_times(path, TIMES)
        older = msgspec.json.decode(path.read_bytes())
        for measured in older["cases"]:
            del measured["host_ms"]
        path.write_bytes(msgspec.json.encode(older))
        assert read_step_times(path).predict_host_ms(Step(0, [replica([99, 1000], [(700, 256)])])) == 0.0

    def test_units_stand_in_its_names(self) -> None:
        text = msgspec.json.encode(TIMES).decode()
        assert {"samples_ms", "launch_ms", "measuring_s"} <= set(re.findall(r'"(\w+)":', text))

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "step times"),
            ("{}", "schema_version"),
            ('{"schema_version": 99}', "schema_version 99"),
            ('{"schema_version": 1}', "missing required field"),
        ],
        ids=["empty", "no-version", "version", "fields"],
    )
    def test_a_damaged_file_says_so(self, tmp_path, text: str, says: str) -> None:
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(RecordsError, match=says):
            read_step_times(path)

    def test_a_missing_file_says_so(self, tmp_path) -> None:
        with pytest.raises(RecordsError, match=r"nothing\.json"):
            read_step_times(tmp_path / "nothing.json")

    @pytest.mark.parametrize(
        ("case", "changes", "words"),
        [
            (Case(decodes=(Decodes(0, 1),)), {}, r"case\.decodes counts from 1 to 1,000,000,000, and not 0, 1"),
            (Case(decodes=(Decodes(1, 10**30),)), {}, r"case\.decodes counts from 1 to 1,000,000,000"),
            (Case(chunks=(Chunks(1, 0, 0),)), {}, r"case\.chunks counts from 1 to 1,000,000,000, and not 1, 0"),
            (Case(chunks=(Chunks(10**9, 1, 0),)), {}, "its step has more than 1,048,576 requests"),
            (Case(chunks=(Chunks(1, 1, -1),)), {}, "prefixes of 0 to 1,000,000,000 tokens"),
            (Case(), {}, "its step does nothing"),
            (
                Case(decodes=(Decodes(1, 1),), use="lines"),
                {},
                "case.use is 'lines', none of line, gather, uneven, unaligned, check",
            ),
            (Case(decodes=(Decodes(1, 1),)), {"samples_ms": [1e300]}, "no samples_ms, or times that are not positive"),
            (Case(decodes=(Decodes(1, 1),)), {"host_ms": [-1.0]}, "its host_ms are no times"),
            (Case(decodes=(Decodes(1, 1),)), {"floor_ms": -1.0}, "its floor_ms are no times"),
        ],
        ids=["no-rows", "huge", "no-tokens", "a-billion", "prefix", "nothing", "use", "time", "host", "floor"],
    )
    def test_cases_that_no_step_can_be_are_refused_by_their_number(
        self, tmp_path, case: Case, changes: dict[str, object], words: str
    ) -> None:
        """Predictions divide by rows and by tokens."""
        measured = MeasuredCase(**{"case": case, "samples_ms": [1.0], **changes})  # type: ignore[arg-type]
        write_step_times(tmp_path / "x.json", msgspec.structs.replace(TIMES, cases=[measured]))
        with pytest.raises(RecordsError, match=rf"x\.json, cases\[0\]: .*{words}.*measure again"):
            read_step_times(tmp_path / "x.json")

    def test_nesting_and_numbers_that_python_does_not_read_are_damage(self, tmp_path) -> None:
        for text in ("[" * 100_000, '{"schema_version": 1e400}', '{"schema_version": ' + "9" * 10_000 + "}"):
            (tmp_path / "x.json").write_text(text)
            with pytest.raises(RecordsError, match=r"x\.json cannot be read as step times"):
                read_step_times(tmp_path / "x.json")

    def test_two_cases_of_the_same_work_stand_for_their_mean(self) -> None:
        """A line through two times at one place has no slope; past its last place that is where one is asked for."""
        line = Line([(1.0, 10.0), (2.0, 20.0), (2.0, 24.0)])
        assert [line(x) for x in (1.0, 2.0, 3.0)] == [10.0, 22.0, 34.0]
        assert Line([(2.0, 20.0), (2.0, 24.0)])(5.0) == 22.0

    @pytest.mark.parametrize("samples", [[], [0.0], [-1.0, 2.0]], ids=["none", "zero", "negative"])
    def test_times_that_cannot_be_are_refused(self, tmp_path, samples: list[float]) -> None:
        path = tmp_path / "x.json"
        case = Case(decodes=(Decodes(1, 1),), chunks=(Chunks(1, 1, 0),))
        bad = msgspec.structs.replace(TIMES, cases=[MeasuredCase(case=case, samples_ms=samples)])
        write_step_times(path, bad)
        with pytest.raises(RecordsError, match="measure again"):
            read_step_times(path)


def test_beside_few_chunks_rows_add_what_they_did_beside_the_fewest_measured() -> None:
    """Measured beside 100 and 200 tokens: 10 and 20 ms more. Below and above it stays; between it is linear."""
    samples = [
        (Work(rows, round(rows * each), tokens, 0.0, 0), more)
        for tokens, more in ((100, 10.0), (200, 20.0))
        for rows, each in ((1, 50.0), (1, 100.0), (4, 50.0), (4, 100.0))
    ]
    of = MixedTimes(samples, lambda *_: 0.0)  # type: ignore[arg-type]
    for tokens, more in ((50, 10.0), (100, 10.0), (150, 15.0), (200, 20.0), (400, 20.0)):
        assert of(Work(2, 160, tokens, 0.0, 0)) == pytest.approx(more)


def stands(prompts: tuple[Prompts, ...]) -> StepTimes:
    """Make the step times of an emulated rank, with a machine's file that states how much longer steps with prompts take."""
    told = Emulated(machine="H200", calls=3, wire_us=1.0, wire_low_us=1.0, wire_high_us=1.0, prompts=prompts)
    return msgspec.structs.replace(step_times(EXTENT), emulated=told)


def test_steps_with_prompts_are_as_long_as_the_gpus_of_the_machine_take_together() -> None:
    """1.02 times at 2,048 tokens, 1.04 at 4,096, and so 1.03 in the middle; what decodes alone stays, and so do the samples."""
    plain, longer = step_times(EXTENT), stands((Prompts(2048, 1.02), Prompts(4096, 1.04)))
    for tokens, times in ((1024, 1.02), (3072, 1.03), (4096, 1.04), (8192, 1.04)):
        work = Work.from_requests(0, 0, [(tokens, 0)])
        assert longer.model.predict_step_ms([work]) == pytest.approx(
            times * plain.model.predict_step_ms([work]), rel=2e-3
        )
    decodes = Work.from_requests(8, 8 * 4000, [])
    assert longer.model.predict_step_ms([decodes]) == plain.model.predict_step_ms([decodes])
    assert longer.cases == plain.cases


def test_a_file_whose_prompts_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-times" / "x.json"
    write_step_times(path, stands((Prompts(2048, 0.0),)))
    with pytest.raises(RecordsError, match=re.escape(f"{path}, emulated: prompts[0] = [2048, 0] cannot be")):
        read_step_times(path)
