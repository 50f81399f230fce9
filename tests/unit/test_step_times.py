"""Test step times: their measured cases, predictions, refusals and file."""

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
from dcpbench.serving.step_model import MixedTimes, PiecewiseLinear, ReplicaBatch
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
from tests.unit.step_times_builder import EXTENT, PATH, compute_true_ms, make_step_times

TIMES = make_step_times()


def make_replica(positions: list[int], chunks: list[tuple[int, int]] = []) -> ReplicaStep:  # noqa: B006 - the default is never changed
    """Return the step of a replica with decodes that write these positions, and chunks of (tokens, prefix)."""
    sequence = Sequence(ServeRequest(number=0, prompt=np.zeros(1, dtype=np.int32), output_tokens=1), 0)
    return ReplicaStep(
        decodes=[sequence] * len(positions),
        slots=list(range(1, len(positions) + 1)),
        positions=positions,
        chunks=[Chunk(sequence, 1, prefix, prefix + tokens, samples=True) for tokens, prefix in chunks],
    )


def predict_ms(*replicas: ReplicaStep) -> float:
    return TIMES.predict_duration_ms(Step(0, list(replicas)))


class TestWork:
    def test_decode_attends_to_its_position_and_all_before_it(self) -> None:
        """Positions 9 and 99 read 10 and 100 KV rows; two rows have their own graph."""
        assert TIMES.model.predict_step_ms([ReplicaBatch(2, 110, 0, 0.0, 0)]) == predict_ms(make_replica([9, 99]))

    def test_decode_rows_are_those_of_the_graph(self) -> None:
        """Five requests run in the graph of eight."""
        assert ReplicaBatch.from_requests(5, 500, []).rows == 8

    def test_chunk_token_attends_to_the_prefix_and_half_the_chunk(self) -> None:
        """The 100 tokens after 200 attend to 200 + 50 each, 25,000 pairs; 10 tokens without a prefix attend to 5 each,
        50 pairs.
        """
        assert ReplicaBatch.from_requests(0, 0, [(100, 200), (10, 0)]) == ReplicaBatch(0, 0, 110, 25_050.0, 200)


class TestGrid:
    def test_extent_supports_every_case(self) -> None:
        assert all(EXTENT.supports_case(case) for case in make_cases(EXTENT))

    def test_measuring_all_cases_takes_less_than_40_seconds(self) -> None:
        """The times are those of DeepSeek-V3 on four GPUs, for cases with one step to settle and two or three to
        measure.
        """
        times = [compute_true_ms(case.compute_work()) for case in make_cases(EXTENT)]
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
    def test_row_sizes_are_dense_near_the_maximum_and_sparse_below(self, requests: int, sizes: list[int]) -> None:
        assert select_row_sizes(requests)[: len(sizes)] == sizes

    def test_target_row_sizes_are_measured(self) -> None:
        """Without a target, 64 between 48 and 80 is skipped."""
        assert 64 not in select_row_sizes(600)
        assert 64 in select_row_sizes(600, targets=(64,))

    def test_row_sizes_of_an_open_loop_cover_all_numbers(self) -> None:
        assert select_row_sizes(256, open_loop=True)[:8] == [1, 2, 4, 8, 12, 16, 24, 32]

    def test_row_sizes_beyond_the_largest_graph_are_measured(self) -> None:
        """From 513 to 600 requests run eagerly in 576 and 640 rows."""
        assert select_row_sizes(600)[-2:] == [512, 576] or select_row_sizes(600)[-1] == 640

    def test_prompt_length_is_a_chunk_size_unless_another_size_is_near(self) -> None:
        """The length 4,000 is within a tenth of 4,096, and 2,500 is near to no other size."""
        assert 4000 not in select_chunk_sizes(EXTENT)
        assert 2500 in select_chunk_sizes(dataclasses.replace(EXTENT, prompts=(2500,)))

    def test_chunk_sizes_do_not_exceed_the_tokens_of_all_requests(self) -> None:
        """One request of at most 5,500 tokens never fills a chunk of 8,192."""
        assert select_chunk_sizes(dataclasses.replace(EXTENT, requests=1))[-1] == 5500

    @pytest.mark.parametrize("requests", [1, 2, 5])
    @pytest.mark.parametrize("pages", [2, 9, 40])
    def test_small_kv_caches_have_cases(self, requests: int, pages: int) -> None:
        extent = Extent(requests=requests, context=60, pages=pages, virtual_page=4, chunk=16)
        cases = make_cases(extent)
        assert cases
        assert all(extent.supports_case(case) for case in cases)
        assert make_step_times(extent).model.predict_step_ms([ReplicaBatch.from_requests(1, 3, [])]) == pytest.approx(
            compute_true_ms(ReplicaBatch.from_requests(1, 3, []))
        )

    def test_long_prompts_are_measured_to_their_end(self) -> None:
        """For 128 K tokens, chunks of 8,192 have prefixes of up to 131,072 - 8,192 tokens."""
        long = dataclasses.replace(EXTENT, context=131_072, pages=4000)
        prefixes = [c.prefix for case in make_cases(long) for c in case.chunks if c.tokens == 8192]
        assert max(prefixes) == 131_072 - 8192

    def test_shared_prompts_attend_to_more_tokens_than_the_cache_holds(self) -> None:
        """The 48 requests have 5,500 tokens, and the pool has 100 pages of 256 tokens."""
        scarce = dataclasses.replace(EXTENT, pages=100)
        assert max(case.compute_work().kv_tokens for case in make_cases(scarce)) <= 25_600
        assert (
            max(case.compute_work().kv_tokens for case in make_cases(dataclasses.replace(scarce, shared=True)))
            == 48 * 5500
        )

    def test_kv_cache_without_pages_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="--kv-memory"):
            make_cases(Extent(requests=1, context=8, pages=0, virtual_page=4, chunk=8))


class TestPrediction:
    def test_prediction_is_exact_for_measured_cases_with_random_times(self) -> None:
        """Every case that is used for interpolation is predicted with its own median."""
        rng = np.random.default_rng(0)
        times = make_step_times(truth=lambda batch: compute_true_ms(batch) * rng.uniform(0.9, 1.1))
        for m in times.select_cases(LINE):
            assert times.model.predict_step_ms([m.case.compute_work()]) == pytest.approx(m.median_ms)

    @pytest.mark.parametrize("seed", range(40))
    def test_prediction_is_exact_for_linear_times(self, seed: int) -> None:
        """For any step within the extent, interpolation between linear times loses nothing."""
        rng = np.random.default_rng(seed)
        positions = rng.integers(255, 5000, rng.integers(0, 40)).tolist()
        chunks = [(int(tokens), 256 * int(rng.integers(0, 4))) for tokens in rng.integers(1, 1200, rng.integers(0, 6))]
        if not positions and not chunks:
            positions = [500]
        batch = ReplicaBatch.from_requests(len(positions), sum(positions) + len(positions), chunks)
        assert predict_ms(make_replica(positions, chunks)) == pytest.approx(compute_true_ms(batch))

    def test_check_cases_do_not_change_predictions(self) -> None:
        wrong = [MeasuredCase(case=m.case, samples_ms=[1e6]) if m.case.use == CHECK else m for m in TIMES.cases]
        times = msgspec.structs.replace(TIMES, cases=wrong)
        assert times.predict_duration_ms(Step(0, [make_replica([99])])) == predict_ms(make_replica([99]))
        assert all(error < -0.99 for _, error in times.check_errors())

    def test_exact_predictions_have_no_check_errors(self) -> None:
        assert len(TIMES.check_errors()) == 3
        assert all(abs(error) < 1e-9 for _, error in TIMES.check_errors())

    def test_cost_of_several_prefixes_follows_from_line_cases(self) -> None:
        """A stored token costs 1.5 µs and, for each row that attends to it, 2.5 ns: 1.5025 µs at 1 row and 21.98 µs at
        8,192 rows. Four chunks with 1,024 stored tokens each have 3,000 more than one chunk that attends to as many
        pairs.
        """
        lines = msgspec.structs.replace(TIMES, cases=TIMES.select_cases(LINE))
        step = make_replica([], [(256, 1024)] * 4)
        assert lines.predict_duration_ms(Step(0, [step])) == pytest.approx(
            compute_true_ms(ReplicaBatch.from_requests(0, 0, [(256, 1024)] * 4))
        )

    def test_decode_with_a_chunk_on_another_replica_adds_the_time_of_its_kv_reads(self) -> None:
        """A replica with one slot never has both. The 4,000 KV tokens take 0.1 µs each, in addition to rows that cost
        as much as those of a chunk.
        """
        single = make_step_times(dataclasses.replace(EXTENT, requests=1, targets=(1,)))
        step = Step(0, [make_replica([], [(1, 0)]), make_replica([3999])])
        assert single.predict_duration_ms(step) == pytest.approx(60 + 16 * 0.045 + 0.4, abs=0.01)

    def test_padded_decodes_take_as_long_as_their_graph(self) -> None:
        """Both 5 and 8 requests with equally many KV tokens run in the graph of 8."""
        assert predict_ms(make_replica([999] * 5)) == pytest.approx(predict_ms(make_replica([624] * 8)))

    def test_slowest_replica_determines_the_step_time(self) -> None:
        full, light = make_replica([4999] * 8), make_replica([299] * 8)
        assert predict_ms(full, light) == predict_ms(full) > predict_ms(light)

    def test_all_replicas_run_the_rows_of_the_largest(self) -> None:
        """A replica with one request of 5,000 tokens runs eight rows, if another has eight requests of 300."""
        assert predict_ms(make_replica([4999]), make_replica([299] * 8)) == pytest.approx(
            compute_true_ms(ReplicaBatch(8, 5000, 0, 0.0, 0))
        )

    def test_replica_without_chunks_runs_the_rows_of_the_one_with_chunks(self) -> None:
        """Both run 2,048 rows at 0.045 ms; the attention of the chunk takes longer than that of two decodes."""
        chunk, decodes = make_replica([], [(2048, 0)]), make_replica([400, 400])
        assert predict_ms(chunk, decodes) == predict_ms(chunk)

    def test_measured_case_has_the_median_of_its_samples(self) -> None:
        assert MeasuredCase(case=Case(), samples_ms=[5.0, 1.0, 2.0]).median_ms == 2.0

    def test_line_is_extrapolated_beyond_its_ends(self) -> None:
        line = PiecewiseLinear([(10, 1), (20, 2), (40, 8)])
        assert [line(x) for x in (0, 10, 15, 30, 50)] == [0, 1, 1.5, 5, 11]


class TestRefusal:
    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (make_replica([99] * 49), "56 decode rows|64 decode rows"),
            (make_replica([99] * 600), "captured graphs"),
            (make_replica([7000]), "1 decode row with 7,001 KV tokens"),
            (make_replica([], [(9000, 0)]), r"9,216 rows.*give a smaller --prefill chunk or load\."),
            (
                make_replica([], [(64, 9 * 1024)]),
                r"64 rows whose chunks' tokens attend to 9,248.*give a smaller load\.",
            ),
            (make_replica([9000], [(64, 0)]), "in a step with chunks"),
        ],
        ids=["rows", "eager", "kv", "chunk", "prefix", "mixed-kv"],
    )
    def test_step_outside_the_measured_range_is_an_error(self, step: ReplicaStep, message: str) -> None:
        """The message names the step, the measured range, and a remedy."""
        with pytest.raises(UsageError, match=message) as caught:
            predict_ms(step)
        assert "--step-times" in str(caught.value)

    def test_up_to_a_fifth_more_kv_is_extrapolated(self) -> None:
        """The time grows with the KV reads: 48 × 5,500 tokens are measured, and 48 × 5,800 are predicted."""
        assert predict_ms(make_replica([5799] * 48)) == pytest.approx(40 + 1.4 * 48 + 1e-4 * 48 * 5800)

    def test_step_times_without_chunks_are_refused(self) -> None:
        only = [m for m in TIMES.cases if not m.case.chunks]
        with pytest.raises(RecordsError, match="measure"):
            _ = msgspec.structs.replace(TIMES, cases=only).model


class TestHost:
    def test_host_time_is_interpolated_between_measured_host_times(self) -> None:
        """A step with chunks takes 50 ms, and 0.01 ms for each row; 700 tokens make 704 rows, with and without two
        decodes.
        """

        def host_ms(case: Case) -> list[float]:
            batch = case.compute_work()
            return [50 + 0.01 * compute_chunk_rows(batch.rows + batch.tokens)] if case.chunks else []

        times = msgspec.structs.replace(
            TIMES, cases=[msgspec.structs.replace(m, host_ms=host_ms(m.case)) for m in TIMES.cases]
        )
        assert times.predict_host_ms(Step(0, [make_replica([], [(700, 256)])])) == pytest.approx(57.04)
        assert times.predict_host_ms(Step(0, [make_replica([99, 1000], [(700, 256)])])) == pytest.approx(57.04)
        assert times.predict_host_ms(Step(0, [make_replica([99, 1000])])) == 0.0

    def test_predicted_host_time_is_never_negative(self) -> None:
        """The host takes 1 ms for each 100 KV tokens of a row after the first 200: lines through cases of 256 tokens
        and more would predict -2 ms for a single token.
        """

        def host_ms(case: Case) -> list[float]:
            return [] if case.chunks else [max(case.decodes[0].context - 200, 0) / 100]

        times = msgspec.structs.replace(
            TIMES, cases=[msgspec.structs.replace(m, host_ms=host_ms(m.case)) for m in TIMES.cases]
        )
        single = Step(0, [make_replica([0])])
        assert times.host_model.predict_step_ms([ReplicaBatch(1, 1, 0, 0.0, 0)]) < 0
        assert times.predict_host_ms(single) == 0.0

    @pytest.mark.parametrize(("tp", "host_ms", "as_device"), [(1, 5.0, False), (8, 5.0, True), (8, 1e4, False)])
    def test_host_time_of_emulated_chunks_is_at_least_the_device_time_if_it_was_with_several_ranks_less(
        self, tp: int, host_ms: float, as_device: bool
    ) -> None:
        """If the single emulated rank took less host time than the device time, chunks of several ranks take the
        latter.
        """
        cases = [msgspec.structs.replace(m, host_ms=[host_ms] if m.case.chunks else []) for m in TIMES.cases]
        emulated = Emulated(machine="H200", calls=1, comm_us=1.0, comm_low_us=1.0, comm_high_us=1.0)
        times = msgspec.structs.replace(TIMES, cases=cases, emulated=emulated, path=PATH | {"tp": tp})
        chunk, decodes = (Step(0, [one]) for one in (make_replica([], [(700, 256)]), make_replica([99, 1000])))
        assert times.predict_host_ms(chunk) == pytest.approx(times.predict_duration_ms(chunk) if as_device else host_ms)
        assert times.predict_host_ms(decodes) == 0.0

    def test_steps_with_prompts_have_a_separate_factor(self) -> None:
        longer = TIMES.apply_factors(1.5, 2.0)
        chunk, decodes = (Step(0, [one]) for one in (make_replica([], [(700, 256)]), make_replica([99, 1000])))
        assert longer.predict_duration_ms(decodes) == pytest.approx(1.5 * TIMES.predict_duration_ms(decodes))
        assert longer.predict_duration_ms(chunk) == pytest.approx(2 * TIMES.predict_duration_ms(chunk))


class TestPath:
    def test_option_that_one_path_lacks_is_reported_as_none(self) -> None:
        """The empty string stands for the default precision and for a real machine."""
        assert find_differences(PATH, PATH | {"kv_dtype": "fp8"}) == ["no --kv-dtype instead of fp8"]
        assert find_differences(PATH | {"kv_dtype": "fp8"}, dict(PATH)) == ["--kv-dtype fp8 instead of none"]

    def test_path_differences_are_named_as_options(self) -> None:
        other = PATH | {"backend": "triton", "page_size": 1}
        assert find_differences(other, PATH) == [
            "--backend triton instead of flashinfer",
            "--page-size 1 instead of 64",
        ]

    def test_auto_options_match_any_measured_path(self) -> None:
        assert find_differences(PATH, PATH | {"backend": "auto", "exchange": "auto"}) == []

    def test_equal_paths_have_no_differences(self) -> None:
        assert find_differences(PATH, dict(PATH)) == []


class TestFile:
    def test_step_times_file_round_trips(self, tmp_path) -> None:
        path = tmp_path / "step-times" / "one.json"
        write_step_times(path, TIMES)
        assert read_step_times(path) == TIMES
        assert not list(path.parent.glob("*.part"))

    def test_step_times_from_a_file_predict_the_same(self, tmp_path) -> None:
        path = tmp_path / "one.json"
        write_step_times(path, TIMES)
        step = Step(0, [make_replica([99, 1000], [(700, 256)])])
        assert read_step_times(path).predict_duration_ms(step) == TIMES.predict_duration_ms(step)

    @pytest.mark.parametrize("change", [{"tp": "4"}, {"model": None}, {"q_replicate": 1}, {"halves": False}], ids=str)
    def test_file_with_an_invalid_path_is_refused(self, tmp_path, change: dict[str, object]) -> None:
        write_step_times(tmp_path / "x.json", TIMES)
        bad = msgspec.json.decode((tmp_path / "x.json").read_bytes())
        bad["path"] |= change
        (tmp_path / "x.json").write_bytes(msgspec.json.encode(bad))
        with pytest.raises(RecordsError, match=f"path.*{'' if None in change.values() else next(iter(change))}"):
            read_step_times(tmp_path / "x.json")

    def test_path_field_missing_in_an_older_file_has_its_default(self, tmp_path: Path) -> None:
        """Files stay readable after an axis is added. A field without a default cannot be left out."""
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

    def test_file_without_host_times_predicts_zero_host_time(self, tmp_path) -> None:
        """Older files have no host times."""
        path = tmp_path / "one.json"
        write_step_times(path, TIMES)
        older = msgspec.json.decode(path.read_bytes())
        for measured in older["cases"]:
            del measured["host_ms"]
        path.write_bytes(msgspec.json.encode(older))
        assert read_step_times(path).predict_host_ms(Step(0, [make_replica([99, 1000], [(700, 256)])])) == 0.0

    def test_file_field_names_contain_their_units(self) -> None:
        text = msgspec.json.encode(TIMES).decode()
        assert {"samples_ms", "launch_ms", "measuring_s"} <= set(re.findall(r'"(\w+)":', text))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "step times"),
            ("{}", "schema_version"),
            ('{"schema_version": 99}', "schema_version 99"),
            ('{"schema_version": 1}', "missing required field"),
        ],
        ids=["empty", "no-version", "version", "fields"],
    )
    def test_damaged_step_times_file_is_refused(self, tmp_path, text: str, message: str) -> None:
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(RecordsError, match=message):
            read_step_times(path)

    def test_missing_step_times_file_is_reported(self, tmp_path) -> None:
        with pytest.raises(RecordsError, match=r"nothing\.json"):
            read_step_times(tmp_path / "nothing.json")

    @pytest.mark.parametrize(
        ("case", "changes", "expected"),
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
    def test_file_with_an_invalid_case_is_refused_with_its_index(
        self, tmp_path, case: Case, changes: dict[str, object], expected: str
    ) -> None:
        """Predictions divide by rows and by tokens."""
        measured = MeasuredCase(**{"case": case, "samples_ms": [1.0], **changes})  # type: ignore[arg-type]
        write_step_times(tmp_path / "x.json", msgspec.structs.replace(TIMES, cases=[measured]))
        with pytest.raises(RecordsError, match=rf"x\.json, cases\[0\]: .*{expected}.*measure again"):
            read_step_times(tmp_path / "x.json")

    def test_file_with_too_deep_nesting_or_too_large_numbers_is_refused(self, tmp_path) -> None:
        for text in ("[" * 100_000, '{"schema_version": 1e400}', '{"schema_version": ' + "9" * 10_000 + "}"):
            (tmp_path / "x.json").write_text(text)
            with pytest.raises(RecordsError, match=r"x\.json cannot be read as step times"):
                read_step_times(tmp_path / "x.json")

    def test_line_takes_the_mean_of_two_times_at_one_place(self) -> None:
        """Two times at one place define no slope, which extrapolation beyond the last place must handle."""
        line = PiecewiseLinear([(1.0, 10.0), (2.0, 20.0), (2.0, 24.0)])
        assert [line(x) for x in (1.0, 2.0, 3.0)] == [10.0, 22.0, 34.0]
        assert PiecewiseLinear([(2.0, 20.0), (2.0, 24.0)])(5.0) == 22.0

    @pytest.mark.parametrize("samples", [[], [0.0], [-1.0, 2.0]], ids=["none", "zero", "negative"])
    def test_file_with_impossible_times_is_refused(self, tmp_path, samples: list[float]) -> None:
        path = tmp_path / "x.json"
        case = Case(decodes=(Decodes(1, 1),), chunks=(Chunks(1, 1, 0),))
        bad = msgspec.structs.replace(TIMES, cases=[MeasuredCase(case=case, samples_ms=samples)])
        write_step_times(path, bad)
        with pytest.raises(RecordsError, match="measure again"):
            read_step_times(path)


def test_decode_rows_add_a_constant_time_outside_measured_chunk_sizes() -> None:
    """With 100 and 200 chunk tokens, decode rows add 10 and 20 ms. Outside these sizes the time is constant, and
    between them it is linear.
    """
    samples = [
        (ReplicaBatch(rows, round(rows * each), tokens, 0.0, 0), more)
        for tokens, more in ((100, 10.0), (200, 20.0))
        for rows, each in ((1, 50.0), (1, 100.0), (4, 50.0), (4, 100.0))
    ]
    mixed_times = MixedTimes(samples, lambda *_: 0.0)  # type: ignore[arg-type]
    for tokens, more in ((50, 10.0), (100, 10.0), (150, 15.0), (200, 20.0), (400, 20.0)):
        assert mixed_times(ReplicaBatch(2, 160, tokens, 0.0, 0)) == pytest.approx(more)


def make_emulated_times(prompts: tuple[Prompts, ...]) -> StepTimes:
    """Return the step times of an emulated rank, with factors of a machine's file for steps with prompts."""
    emulated = Emulated(machine="H200", calls=3, comm_us=1.0, comm_low_us=1.0, comm_high_us=1.0, prompts=prompts)
    return msgspec.structs.replace(make_step_times(EXTENT), emulated=emulated)


def test_steps_with_prompts_are_scaled_by_the_factors_of_the_machine() -> None:
    """The factor is 1.02 at 2,048 tokens and 1.04 at 4,096, so that it is 1.03 in the middle; decode-only steps and
    samples are unchanged.
    """
    plain, longer = make_step_times(EXTENT), make_emulated_times((Prompts(2048, 1.02), Prompts(4096, 1.04)))
    for tokens, times in ((1024, 1.02), (3072, 1.03), (4096, 1.04), (8192, 1.04)):
        batch = ReplicaBatch.from_requests(0, 0, [(tokens, 0)])
        assert longer.model.predict_step_ms([batch]) == pytest.approx(
            times * plain.model.predict_step_ms([batch]), rel=2e-3
        )
    decodes = ReplicaBatch.from_requests(8, 8 * 4000, [])
    assert longer.model.predict_step_ms([decodes]) == plain.model.predict_step_ms([decodes])
    assert longer.cases == plain.cases


def test_file_with_an_invalid_prompt_factor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-times" / "x.json"
    write_step_times(path, make_emulated_times((Prompts(2048, 0.0),)))
    with pytest.raises(RecordsError, match=re.escape(f"{path}, emulated: prompts[0] = [2048, 0] cannot be")):
        read_step_times(path)
