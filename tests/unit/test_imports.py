"""Imports of other engines' result files: records have dcpbench's own metrics, and nothing that the file does not
state.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.errors import OutputError, RecordsError, UsageError
from dcpbench.exports import vllm as to_vllm
from dcpbench.imports import Overrides, field_names, import_files, imported_metrics, sglang, vllm
from dcpbench.imports.documents import Document
from dcpbench.imports.result import _Side
from dcpbench.launch.folders import lock_folder
from dcpbench.records.file import read_records
from dcpbench.reports import answer, dataframes, sections
from dcpbench.reports.style import Style
from dcpbench.serving import samples
from tests.unit import engine_files_builder as files
from tests.unit import record_builder
from tests.unit import serve_record_builder as build

if TYPE_CHECKING:
    from dcpbench.records.record import Record, ServeMetrics


def imported(tmp_path: Path, engine: str, *results: dict[str, Any], **options: Any) -> list[Record]:
    """Return the records of a file with these results."""
    path = files.write_file(tmp_path, *results)
    import_files([path], engine, tmp_path / "run", Overrides(**options), force=True)
    return read_records(tmp_path / "run")


def one(tmp_path: Path, engine: str, result: dict[str, Any], **options: Any) -> tuple[Record, ServeMetrics]:
    """Return the record of a result, and its metrics."""
    (record,) = imported(tmp_path, engine, result, **options)
    assert record.serve
    return record, record.serve


class TestWithDetails:
    """Three requests: TTFT 500 ms each; gaps 30, 31, 39 and 50 ms; 7 tokens and 300 of prompts in 0.7 s."""

    def test_latencies_are_computed_from_requests(self, tmp_path: Path) -> None:
        """ITL pools 4 gaps: mean 37.5 ms, median 35 ms. TPOT of two requests: 33.3 and 50 ms; the third has one token."""
        _, found = one(tmp_path, "vllm", files.make_vllm_result())
        assert found.ttft_ms.p50 == pytest.approx(500)
        assert (found.itl_ms.mean, found.itl_ms.p50, found.itl_ms.samples) == (
            pytest.approx(37.5),
            pytest.approx(35),
            4,
        )
        assert (found.tpot_ms.mean, found.tpot_ms.samples) == (pytest.approx((100 / 3 + 50) / 2), 2)
        assert found.e2el_ms.mean == pytest.approx(550)
        assert found.tok_s_per_user == pytest.approx(1000 / ((100 / 3 + 50) / 2))

    def test_wall_time_runs_from_first_submission_to_last_token(self, tmp_path: Path) -> None:
        """Requests with start times give 0.7 s. vLLM's own duration, 0.8 s, includes the set-up of its client."""
        _, found = one(tmp_path, "vllm", files.make_vllm_result())
        assert found.wall_s == pytest.approx(0.7)
        assert found.output_tok_s == pytest.approx(10)
        assert found.total_tok_s == pytest.approx(307 / 0.7)

    def test_wall_time_begins_with_a_request_that_failed(self, tmp_path: Path) -> None:
        """The first request fails at 999.5 s, and the last token comes at 1000.7 s: 7 tokens in 1.2 s."""
        first: dict[str, Any] = {"input_lens": 100, "output_lens": 0, "ttfts": 0.0, "itls": [], "errors": "refused"}
        first |= {"latencies": 0.0, "start_times": 999.5}
        whole = files.make_vllm_result()
        lists = {name: [value, *whole[name]] for name, value in first.items()}
        _, found = one(tmp_path, "vllm", whole | lists | {"num_prompts": 4, "failed": 1})
        assert found.wall_s == pytest.approx(1.2)
        assert found.output_tok_s == pytest.approx(7 / 1.2)

    @pytest.mark.parametrize("detailed", [True, False])
    def test_answers_of_sglang_without_streaming_have_no_ttft_and_no_tpot(
        self, tmp_path: Path, *, detailed: bool
    ) -> None:
        """With --disable-stream TTFT is the whole latency, TPOT the difference of two clocks, and there are no gaps."""
        e2e = {f"{name}_ttft_ms": 550.0 for name in ("mean", "median", "p99")}
        tpot = {f"{name}_tpot_ms": -2e-4 for name in ("mean", "median", "p99")}
        itl = {f"{name}_itl_ms": 0.0 for name in ("mean", "median", "std", "p95", "p99")}
        result = files.make_sglang_result(**e2e, **tpot, **itl, ttfts=[0.6, 0.55, 0.5], itls=[[], [], []])
        record, found = one(tmp_path, "sglang", result if detailed else files.remove_details(result))
        assert (found.ttft_ms.mean, found.tpot_ms.mean, found.itl_ms.mean, found.tok_s_per_user) == (None,) * 4
        assert found.e2el_ms.mean == pytest.approx(550)
        assert "chunk_gaps" not in record.warnings

    def test_sglang_wall_time_is_the_duration_of_the_file(self, tmp_path: Path) -> None:
        """SGLang's file has no start times."""
        _, found = one(tmp_path, "sglang", files.make_sglang_result())
        assert found.wall_s == 0.8
        assert found.output_tok_s == pytest.approx(7 / 0.8)
        assert found.itl_ms.p50 == pytest.approx(35)
        assert found.samples_file == ""

    def test_p99_of_three_requests_is_absent(self, tmp_path: Path) -> None:
        """vLLM's file has a p99 of three requests, which dcpbench does not report."""
        record, found = one(tmp_path, "vllm", files.make_vllm_result())
        assert found.ttft_ms.p99 is None
        assert record.warnings == ["few_samples"]

    def test_samples_are_written_to_a_file_of_the_run(self, tmp_path: Path) -> None:
        _, found = one(tmp_path, "vllm", files.make_vllm_result())
        rows = samples.read_samples(tmp_path / "run" / found.samples_file)
        assert [r.submitted_s for r in rows] == pytest.approx([0, 0.1, 0.2])
        assert rows[0].token_s == pytest.approx([0.5, 0.53, 0.561, 0.6])
        assert rows[0].cached_tokens is None

    def test_failed_requests_are_excluded_and_marked(self, tmp_path: Path) -> None:
        result = files.make_vllm_result(
            num_prompts=4,
            failed=1,
            input_lens=[100] * 4,
            output_lens=[4, 2, 1, 0],
            ttfts=[0.5, 0.5, 0.5, 0.0],
            itls=[[0.03, 0.031, 0.039], [0.05], [], []],
            errors=["", "", "", "HTTP 500"],
            generated_texts=[""] * 4,
            latencies=[0.6, 0.55, 0.5, 0.0],
            start_times=[1000.0, 1000.1, 1000.2, 1000.3],
            queue_times=[0.0] * 4,
        )
        record, found = one(tmp_path, "vllm", result)
        assert record.warnings.count("requests_failed") == 1
        assert (found.submitted, found.finished) == (4, 3)
        assert found.output_tok_s == pytest.approx(10)

    def test_rate_per_user_of_multi_token_chunks_is_computed_from_tpot(self, tmp_path: Path) -> None:
        """Four tokens in two chunks have one gap of 100 ms for 3 tokens. The median of TPOT 33.3 and 50 ms is 41.7 ms."""
        result = files.make_vllm_result(itls=[[0.1], [0.05], []])
        record, found = one(tmp_path, "vllm", result)
        assert "chunk_gaps" in record.warnings
        assert found.itl_ms.samples == 2, "the gaps of chunks"
        assert found.tok_s_per_user == pytest.approx(1000 / ((100 / 3 + 50) / 2))
        assert record.detail["tokens_per_chunk"] == "2"
        assert found.tpot_ms.mean == pytest.approx((100 / 3 + 50) / 2), "TPOT counts tokens, not chunks"
        assert found.samples_file == "", "the times of single tokens are unknown"

    def test_sglang_gaps_divided_within_chunks_are_marked(self, tmp_path: Path) -> None:
        """SGLang writes a chunk of three tokens 100 ms after the first as three gaps of 33.3 ms, none of which was
        measured.
        """
        result = files.make_sglang_result(itls=[[0.1 / 3] * 3, [0.05], []])
        record, found = one(tmp_path, "sglang", result)
        assert "chunk_gaps" in record.warnings
        assert found.tok_s_per_user == pytest.approx(1000 / ((100 / 3 + 50) / 2))
        (plain,) = imported(tmp_path, "sglang", files.make_sglang_result())
        assert "chunk_gaps" not in plain.warnings

    def test_answers_without_streaming_have_no_ttft(self, tmp_path: Path) -> None:
        """vLLM writes 0 for them."""
        result = files.make_vllm_result(ttfts=[0.0, 0.0, 0.0], itls=[[], [], []])
        _, found = one(tmp_path, "vllm", result)
        assert found.ttft_ms.p50 is None
        assert found.tpot_ms.p50 is None
        assert found.e2el_ms.mean == pytest.approx(550)


class TestWithoutDetails:
    def test_summary_of_the_tool_is_imported_and_marked(self, tmp_path: Path) -> None:
        record, found = one(tmp_path, "vllm", files.remove_details(files.make_vllm_result()))
        assert record.warnings == ["summary_only"]
        assert (found.ttft_ms.p50, found.ttft_ms.p99, found.ttft_ms.p90) == (500.0, 500.0, None)
        assert found.e2el_ms.p50 is None, "vLLM writes E2EL only on request"
        assert found.wall_s == 0.8

    def test_summary_fields_of_sglang_are_imported(self, tmp_path: Path) -> None:
        _, found = one(tmp_path, "sglang", files.remove_details(files.make_sglang_result()))
        assert (found.e2el_ms.mean, found.e2el_ms.p90, found.e2el_ms.p99) == (550.0, 590.0, 599.0)
        assert (found.itl_ms.p50, found.itl_ms.p95) == (35.0, 48.5)
        assert found.submitted is None, "the summary has no number of sent requests"

    def test_latency_without_samples_is_absent_and_not_zero(self, tmp_path: Path) -> None:
        """Answers of one token have no gap; the tools write 0 for it."""
        zeros = {
            f"{statistic}_{name}_ms": 0.0 for statistic in ("mean", "median", "std", "p99") for name in ("itl", "tpot")
        }
        _, found = one(tmp_path, "vllm", files.remove_details(files.make_vllm_result(**zeros)))
        assert (found.itl_ms.p50, found.itl_ms.p99, found.tok_s_per_user) == (None, None, None)

    def test_summary_has_one_ttft_and_one_e2el_sample_per_request(self, tmp_path: Path) -> None:
        """No file states how many gaps the tool pooled or how many requests had a TPOT."""
        times = {"mean_e2el_ms": 550.0, "median_e2el_ms": 550.0}
        _, found = one(tmp_path, "vllm", files.remove_details(files.make_vllm_result(**times)))
        counts = [t.samples for t in (found.ttft_ms, found.e2el_ms, found.tpot_ms, found.itl_ms)]
        assert counts == [3, 3, 0, 0]
        _, found = one(tmp_path, "sglang", files.remove_details(files.make_sglang_result()))
        counts = [t.samples for t in (found.ttft_ms, found.e2el_ms, found.tpot_ms, found.itl_ms)]
        assert counts == [3, 3, 0, 0]

    def test_percentile_without_median_is_imported(self, tmp_path: Path) -> None:
        result = {
            n: v
            for n, v in files.remove_details(files.make_vllm_result()).items()
            if n not in {"mean_ttft_ms", "median_ttft_ms"}
        }
        _, found = one(tmp_path, "vllm", result)
        assert (found.ttft_ms.p50, found.ttft_ms.p99, found.ttft_ms.samples) == (None, 500.0, 3)

    def test_speculative_decoding_is_detected_by_its_fields(self, tmp_path: Path) -> None:
        spec = files.remove_details(files.make_vllm_result(spec_decode_acceptance_length=2.4))
        record, found = one(tmp_path, "vllm", spec)
        assert record.warnings == ["summary_only", "chunk_gaps"]
        assert found.tok_s_per_user == pytest.approx(1000 / 41.7)
        (again,) = imported(tmp_path, "sglang", files.remove_details(files.make_sglang_result(accept_length=2.4)))
        assert "chunk_gaps" in again.warnings


class TestPoint:
    def test_unknown_layout_has_no_rate_per_gpu(self, tmp_path: Path) -> None:
        record, found = one(tmp_path, "vllm", files.make_vllm_result())
        assert record.point.layout_name == "layout unknown"
        assert found.output_tok_s_per_gpu is None
        assert record.environment is None

    def test_values_missing_from_the_file_are_unknown_and_never_zero(self, tmp_path: Path) -> None:
        record, found = one(
            tmp_path, "sglang", files.make_sglang_result(server_info={"model_path": "deepseek-ai/DeepSeek-V3"})
        )
        point = record.point
        assert (point.dtype, point.weights, point.all_reduce, point.page_size) == ("unknown", "unknown", "unknown", 0)
        assert point.load
        assert (point.load.prefix_cache, point.load.seed, point.load.prefix_share) == (None, None, None)
        assert point.exchange == "unknown", "the file does not state an exchange"
        for name in ("rejected", "cancelled", "cached_tokens", "preemptions", "steps", "decode_steps", "decode_batch"):
            assert getattr(found, name) is None
        assert record.kv is None
        assert record.started_at == "", "the file's date has no time zone"

    def test_layout_can_be_given_by_options(self, tmp_path: Path) -> None:
        """10 tok/s over 8 GPUs are 1.25 tok/s per GPU."""
        record, found = one(tmp_path, "vllm", files.make_vllm_result(), tp=8, dcp=8, gpu="NVIDIA H200", dtype="fp8")
        assert record.point.layout_name == "tp8·dcp8"
        assert found.output_tok_s_per_gpu == pytest.approx(10 / 8)
        assert record.environment
        assert (record.environment.device, record.environment.device_count) == ("NVIDIA H200", 8)
        assert record.point.precision == "fp8 weights"

    def test_layout_is_read_from_vllm_metadata(self, tmp_path: Path) -> None:
        """vLLM's tp counts inside a replica: tensor parallel size 4 in each of 2 replicas is tp8·dp2·dcp2."""
        degrees = {"tensor_parallel_size": "4", "data_parallel_size": "2", "decode_context_parallel_size": "2"}
        record, _ = one(tmp_path, "vllm", files.make_vllm_result(**degrees))
        assert record.point.layout_name == "tp8·dp2·dcp2"
        with pytest.raises(UsageError, match="has tp 8, dp 2, dcp 2; leave --tp"):
            imported(tmp_path, "vllm", files.make_vllm_result(**degrees), tp=4)

    def test_impossible_layout_raises_records_error(self, tmp_path: Path) -> None:
        """dcp 3 does not divide 4 ranks; a record with it could not be read."""
        degrees = {"tensor_parallel_size": "4", "decode_context_parallel_size": "3"}
        with pytest.raises(RecordsError, match=r"has an impossible layout.*--dcp 3 does not divide --tp 4"):
            imported(tmp_path, "vllm", files.make_vllm_result(**degrees))

    @pytest.mark.parametrize(
        ("changes", "arrival", "rate", "concurrency"),
        [
            ({}, "closed", None, 3),
            ({"max_concurrency": None}, "closed", None, 3),
            ({"request_rate": 2.5, "burstiness": 0.5, "max_concurrency": None}, "gamma", 2.5, 3),
        ],
        ids=["closed", "all-at-once", "open"],
    )
    def test_vllm_arrival_and_rate_are_imported(
        self, changes: Any, arrival: str, rate: float | None, concurrency: int, tmp_path: Path
    ) -> None:
        record, _ = one(tmp_path, "vllm", files.make_vllm_result(**changes))
        load = record.point.load
        assert load
        assert (load.arrival, load.request_rate, record.point.concurrency) == (arrival, rate, concurrency)

    def test_sglang_trace_is_imported_as_a_trace(self, tmp_path: Path) -> None:
        record, _ = one(tmp_path, "sglang", files.make_sglang_result(request_rate="trace", dataset_name="mooncake"))
        assert record.point.load
        assert (record.point.load.arrival, record.point.load.trace) == ("trace", "mooncake")

    def test_repeated_result_is_a_repeat_of_the_point(self, tmp_path: Path) -> None:
        records = imported(tmp_path, "vllm", files.make_vllm_result(), files.make_vllm_result())
        assert [r.point.repeat for r in records] == [0, 1]

    def test_sglang_result_without_model_requires_the_model_option(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="names no model; add --model NAME"):
            imported(tmp_path, "sglang", files.make_sglang_result(server_info=None))
        record, _ = one(tmp_path, "sglang", files.make_sglang_result(server_info=None), model="deepseek-v3")
        assert record.point.model == "deepseek-v3"

    @pytest.mark.parametrize("completed", [0, 3])
    def test_run_without_output_tokens_is_imported_as_failed(self, completed: int, tmp_path: Path) -> None:
        """Such a run has no rate and no latency of tokens."""
        result = files.remove_details(
            files.make_vllm_result(completed=completed, failed=3 - completed, total_output_tokens=0)
        )
        (record,) = imported(tmp_path, "vllm", result)
        assert record.outcome == "failed"
        assert record.serve is None

    @pytest.mark.parametrize(
        "options",
        [{"dcp": 8}, {"dp": 2}, {"tp": 0}, {"tp": 8, "dcp": 3}, {"input_len": 0}, {"output_len": 5000}],
        ids=str,
    )
    def test_impossible_options_raise_usage_error(self, options: Any, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            imported(tmp_path, "vllm", files.make_vllm_result(), **options)

    def test_sglang_details_give_the_number_of_sent_requests(self, tmp_path: Path) -> None:
        """One of four requests failed."""
        result = files.make_sglang_result(
            input_lens=[100] * 4,
            output_lens=[4, 2, 1, 0],
            ttfts=[0.5, 0.5, 0.5, 0.0],
            itls=[[0.03, 0.031, 0.039], [0.05], [], []],
            errors=["", "", "", "HTTP 500"],
            generated_texts=[""] * 4,
        )
        record, found = one(tmp_path, "sglang", result)
        assert (found.submitted, found.finished) == (4, 3)
        assert record.point.load
        assert record.point.load.requests == 4
        assert record.warnings.count("requests_failed") == 1

    @pytest.mark.parametrize("rate", ["2.5", 2.5], ids=["text", "number"])
    def test_request_rate_may_be_text(self, rate: Any, tmp_path: Path) -> None:
        """Parameters of a sweep are text."""
        record, _ = one(tmp_path, "vllm", files.make_vllm_result(request_rate=rate))
        assert record.point.load
        assert (record.point.load.arrival, record.point.load.request_rate) == ("gamma", 2.5)

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    @pytest.mark.parametrize("rate", ["inf", float("inf"), None], ids=str)
    def test_infinite_request_rate_is_a_closed_loop(self, engine: str, rate: Any, tmp_path: Path) -> None:
        record, _ = one(tmp_path, engine, files.MAKERS[engine](request_rate=rate))
        assert record.point.load
        assert (record.point.load.arrival, record.point.load.request_rate) == ("closed", None)

    @pytest.mark.parametrize("name", ["", "  "], ids=repr)
    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_blank_model_name_requires_the_model_option(self, engine: str, name: str, tmp_path: Path) -> None:
        result = (
            files.make_vllm_result(model_id=name)
            if engine == "vllm"
            else files.make_sglang_result(server_info={"model_path": name})
        )
        with pytest.raises(UsageError, match="names no model; add --model NAME"):
            imported(tmp_path, engine, result)

    @pytest.mark.parametrize(
        ("goodput", "slo"),
        [
            ("ttft:500 e2el:9000", {"ttft": 500.0, "e2el": 9000.0}),
            ("ttft:inf", {}),
            ("ttft:0", {}),
            ("ttft:-1", {}),
            ("ttft:nan", {}),
            ("ttft", {}),
            ("itl:50", {}),
        ],
        ids=str,
    )
    def test_goodput_objectives_that_are_always_met_or_missed_are_ignored(
        self, goodput: str, slo: dict[str, float], tmp_path: Path
    ) -> None:
        """A goodput without objectives means nothing, so it is left out."""
        _, found = one(tmp_path, "vllm", files.make_vllm_result(goodput=goodput, request_goodput=1.25))
        assert found.slo_ms == slo
        assert found.request_goodput == (1.25 if slo else None)


@pytest.mark.parametrize(("option", "device"), [("h200", "NVIDIA H200"), ("Gaudi 3", "Gaudi 3"), ("CPU", "CPU")])
def test_gpu_option_gets_the_name_used_in_files(option: str, device: str, tmp_path: Path) -> None:
    """The point is then listed next to points of dcpbench."""
    record, _ = one(tmp_path, "vllm", files.make_vllm_result(), gpu=option)
    assert record.environment
    assert record.environment.device == device


class TestLengths:
    """All points of a curve have one load, with the requested lengths."""

    @pytest.mark.parametrize(
        ("changes", "prompts", "answers", "context"),
        [
            ({"random_range_ratio": 1.0}, "100", "4", 104),
            ({"random_range_ratio": 0.25}, "uniform:25-100", "uniform:1-4", 104),
            ({"random_range_ratio": 0.0}, "uniform:1-100", "uniform:1-4", 104),
            ({"dataset_name": "random-ids", "random_range_ratio": 0.5}, "uniform:50-100", "uniform:2-4", 104),
            ({"dataset_name": "sharegpt", "random_range_ratio": 1.0}, "mean:100", "mean:2", 0),
            ({"random_range_ratio": None}, "mean:100", "mean:2", 0),
            ({"random_input_len": None, "random_range_ratio": 1.0}, "mean:100", "4", 0),
        ],
        ids=["fixed", "quarter", "default", "ids", "sharegpt", "no-ratio", "no-input"],
    )
    def test_sglang_random_lengths_range_from_a_share_of_the_maximum(
        self, changes: Any, prompts: str, answers: str, context: int, tmp_path: Path
    ) -> None:
        """Three requests have 300 and 7 tokens. A file of ShareGPT also contains the options of `random`, which have no
        effect there.
        """
        record, _ = one(tmp_path, "sglang", files.remove_details(files.make_sglang_result(**changes)))
        load = record.point.load
        assert load
        assert (load.input_tokens, load.output_tokens, record.point.context) == (prompts, answers, context)

    @pytest.mark.parametrize(("tokens", "prompts"), [(300, "100"), (301, "102"), (306, "102")])
    def test_lengths_proved_by_sums_override_the_input_len_option(
        self, tokens: int, prompts: str, tmp_path: Path
    ) -> None:
        """Three prompts of 100 tokens, as requested, sum to 300; --input-len 102 then names a length only for sums near
        306.
        """
        requested = {"random_input_len": 100, "random_output_len": 4}
        result = files.make_vllm_result(**requested, total_input_tokens=tokens, total_output_tokens=12)
        record, _ = one(tmp_path, "vllm", files.remove_details(result), input_len=102)
        load = record.point.load
        assert load
        assert (load.input_tokens, load.output_tokens) == (prompts, "4")

    @pytest.mark.parametrize(
        ("sums", "nominal"),
        [((300, 12), False), ((303, 12), False), ((400, 12), True), ((300, 9), True), ((100, 4), True)],
    )
    def test_requested_lengths_are_marked_if_actual_sums_differ(
        self, sums: tuple[int, int], nominal: bool, tmp_path: Path
    ) -> None:
        """Three requests of 100 and 4 tokens sum to 300 and 12; a difference of 1 % is accepted."""
        requested = {"random_input_len": 100, "random_output_len": 4}
        result = files.make_vllm_result(**requested, total_input_tokens=sums[0], total_output_tokens=sums[1])
        record, _ = one(tmp_path, "vllm", files.remove_details(result))
        assert ("nominal_lengths" in record.warnings) == nominal

    def test_similar_mean_lengths_are_joined_into_one_load(self, tmp_path: Path) -> None:
        """10 requests of 1,022 and 30 of 1,030 tokens: (10,220 + 30,900) / 40 = 1,028. A mean of 1,100 is another load."""
        results = [
            files.remove_details(files.make_vllm_result(num_prompts=n, completed=n, total_input_tokens=n * length))
            for n, length in ((10, 1022), (30, 1030), (10, 1100))
        ]
        points = [record.point.load for record in imported(tmp_path, "vllm", *results)]
        assert [load.input_tokens for load in points if load] == ["mean:1028", "mean:1028", "mean:1100"]

    def test_requested_lengths_of_a_sweep_join_answers_that_ended_early(self, tmp_path: Path) -> None:
        """Mean answers of 80 and 60 of 100 requested tokens are one marked load; 61 of 200 requested tokens are
        another.
        """
        for clients, mean, most in ((1, 80, 100), (2, 60, 100), (3, 61, 200)):
            sums = {"total_input_tokens": 3000, "total_output_tokens": 3 * mean}
            requested = {"max_concurrency": clients, "random_input_len": 1000, "random_output_len": most}
            files.write_sweep(tmp_path / "sweep", {}, requested, runs=1, **sums)
        import_files([tmp_path / "sweep"], "vllm", tmp_path / "run", Overrides())
        points = [record.point for record in read_records(tmp_path / "run")]
        lengths = {p.concurrency: (p.load.input_tokens, p.load.output_tokens) for p in points if p.load}
        assert lengths == {1: ("1000", "100"), 2: ("1000", "100"), 3: ("1000", "200")}
        assert {p.settings for p in points} == {""}
        assert all("nominal_lengths" in record.warnings for record in read_records(tmp_path / "run"))

    def test_curve_joins_points_with_different_numbers_of_requests(self, tmp_path: Path) -> None:
        """A sweep usually has ten requests for each client."""
        results = [
            files.remove_details(
                files.make_vllm_result(
                    num_prompts=10 * n,
                    completed=10 * n,
                    max_concurrency=n,
                    total_input_tokens=10 * n * 1022 + n,
                    total_output_tokens=10 * n * 128,
                )
            )
            for n in (1, 8, 64)
        ]
        imported(tmp_path, "vllm", *results)
        served = dataframes.load_frames([tmp_path / "run"]).served
        assert served["rest"].unique().tolist() == ["1,022 on average in · 128 on average out"]
        assert served["concurrency"].tolist() == [1, 8, 64]

    def test_points_that_differ_only_in_requests_are_labelled_with_them(self, tmp_path: Path) -> None:
        results = [
            files.remove_details(
                files.make_vllm_result(
                    num_prompts=n, completed=n, total_input_tokens=100 * n, total_output_tokens=4 * n
                )
            )
            for n in (3, 30)
        ]
        imported(tmp_path, "vllm", *results)
        served = dataframes.load_frames([tmp_path / "run"]).served
        assert [rest.rpartition(" · ")[2] for rest in served["rest"]] == ["3 requests", "30 requests"]


class TestSweeps:
    """Trees of `vllm bench sweep serve` have a folder for each set of parameters, with its runs and their summary."""

    def import_notes(self, tmp_path: Path, *paths: Path) -> list[str]:
        """Import the tree `sweep`, or these paths; return the notes for the user."""
        return import_files(paths or [tmp_path / "sweep"], "vllm", tmp_path / "run", Overrides(), force=True).notes

    def test_server_settings_are_variants_and_runs_are_repeats(self, tmp_path: Path) -> None:
        """Two runs each of four settings are points in the order of the numbers."""
        for seqs in (8, 32, 4, 128):
            files.write_sweep(tmp_path / "sweep", {"max_num_seqs": seqs}, {"max_concurrency": 3})
        self.import_notes(tmp_path)
        records = read_records(tmp_path / "run")
        assert [(r.point.settings, r.point.repeat) for r in records] == [
            (f"max_num_seqs={seqs}", run) for seqs in (4, 8, 32, 128) for run in (0, 1)
        ]
        served = dataframes.load_frames([tmp_path / "run"]).served
        assert served["variant"].tolist() == [f"max_num_seqs={seqs}" for seqs in (4, 8, 32, 128)]
        assert served["repeats"].tolist() == [2] * 4

    def test_vllm_0_20_sweep_is_a_curve_for_each_server_setting(self, tmp_path: Path) -> None:
        """Folders are written as in a public repository of May 2026: settings are numbers, requested lengths are
        options of the benchmark, and each has three runs. Lengths and rate belong to the load; settings that all
        servers share are in no label.
        """
        requested = {
            "num_prompts": 100,
            "request_rate": 16,
            "dataset_name": "random",
            "input_len": 1000,
            "output_len": 100,
        }
        sums = {"completed": 100, "total_input_tokens": 100_000, "total_output_tokens": 10_000, "rtfx": 0.0}
        later = {"max_output_tokens_per_s": 3088.0, "max_concurrent_requests": 80, "max_concurrency": None}
        for share, seqs in ((0.9, 128), (0.95, 128), (0.95, 256)):
            server = {"gpu_memory_utilization": share, "max_num_seqs": seqs, "max_model_len": 4096}
            files.write_sweep(tmp_path / "sweep", server, requested, runs=3, **sums, **later)
        notes = self.import_notes(tmp_path)
        assert notes[0] == "9 results of vllm bench serve."
        assert not any("Not read" in text for text in notes)
        served = dataframes.load_frames([tmp_path / "run"]).served
        assert served["rest"].unique().tolist() == ["1,000 in · 100 out"]
        assert served["load_request_rate"].unique().tolist() == [16]
        assert served["repeats"].tolist() == [3, 3, 3]
        assert served["variant"].tolist() == [
            "gpu_memory_utilization=0.9, max_num_seqs=128",
            "gpu_memory_utilization=0.95, max_num_seqs=128",
            "gpu_memory_utilization=0.95, max_num_seqs=256",
        ]

    def test_setting_shared_by_all_points_is_not_in_labels(self, tmp_path: Path) -> None:
        for seqs in (4, 8):
            files.write_sweep(tmp_path / "sweep", {"block_size": 64, "max_num_seqs": seqs}, {})
        self.import_notes(tmp_path)
        assert {r.point.settings for r in read_records(tmp_path / "run")} == {
            "block_size=64, max_num_seqs=4",
            "block_size=64, max_num_seqs=8",
        }
        served = dataframes.load_frames([tmp_path / "run"]).served
        assert served["variant"].tolist() == ["max_num_seqs=4", "max_num_seqs=8"]

    def test_summary_of_existing_result_files_is_left_out(self, tmp_path: Path) -> None:
        inside = files.write_sweep(tmp_path / "sweep", {"max_num_seqs": 4}, {})
        assert self.import_notes(tmp_path)[-1] == (
            f"Left out, summaries of results that have files of their own: {inside / 'summary.json'}."
        )
        assert len(read_records(tmp_path / "run")) == 2
        self.import_notes(tmp_path, *sorted(inside.iterdir(), reverse=True))
        assert len(read_records(tmp_path / "run")) == 2, "the order of arguments does not matter"

    def test_summary_without_result_files_is_imported_as_its_runs(self, tmp_path: Path) -> None:
        inside = files.write_sweep(tmp_path / "sweep", {"max_num_seqs": 4}, {})
        self.import_notes(tmp_path, inside / "summary.json")
        assert [r.point.repeat for r in read_records(tmp_path / "run")] == [0, 1]

    def test_files_of_a_tree_give_the_same_records_as_its_folder(self, tmp_path: Path) -> None:
        for seqs in (4, 8):
            files.write_sweep(tmp_path / "sweep", {"max_num_seqs": seqs}, {"max_concurrency": 3})
        self.import_notes(tmp_path)
        whole = read_records(tmp_path / "run")
        self.import_notes(tmp_path, *sorted((tmp_path / "sweep").glob("*/*.json")))
        assert read_records(tmp_path / "run") == whole

    def test_warm_ups_failures_and_other_files_are_listed_as_left_out(self, tmp_path: Path) -> None:
        inside = files.write_sweep(tmp_path / "sweep", {"max_num_seqs": 4}, {}, runs=1)
        warm = json.loads((inside / "run=0.json").read_text()) | {"run_number": -1}
        failed = {
            "run_number": 1,
            "error_type": "ServerDied",
            "error": "…",
            "serve_overrides": {},
            "bench_overrides": {},
        }
        for name, content in (("warmup", warm), ("run=1.failure", failed), ("params", [{"max_num_seqs": 4}])):
            (inside / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / "sweep" / "summary.csv").write_text("no JSON")
        notes = " ".join(self.import_notes(tmp_path))
        assert f"Left out, warm-ups: {inside / 'warmup.json'}." in notes
        assert f"Left out, runs of the sweep that failed: {inside / 'run=1.failure.json'}." in notes
        assert f"Left out, no result of vllm bench serve: {inside / 'params.json'}." in notes
        assert len(read_records(tmp_path / "run")) == 1

    def test_sweep_without_results_lists_what_was_left_out(self, tmp_path: Path) -> None:
        inside = files.write_sweep(tmp_path / "sweep", {"max_num_seqs": 4}, {}, runs=1)
        measured = json.loads((inside / "run=0.json").read_text())
        (inside / "run=0.json").write_text(json.dumps(measured | {"run_number": -1}))
        (inside / "run=1.json").write_text(json.dumps({"run_number": 1, "error_type": "ServerDied"}))
        (inside / "summary.json").unlink()
        with pytest.raises(RecordsError) as caught:
            self.import_notes(tmp_path)
        first, second = (f"{inside / name}.json" for name in ("run=0", "run=1"))
        assert str(caught.value) == (
            f"{first}: no result of vllm bench serve was found. Left out, warm-ups: {first}. "
            f"Left out, runs of the sweep that failed: {second}."
        )

    def test_degrees_of_a_sweep_are_its_layout_and_no_setting(self, tmp_path: Path) -> None:
        for tp in (4, 8):
            files.write_sweep(tmp_path / "sweep", {"tensor-parallel-size": tp, "max-num-seqs": 4}, {})
        self.import_notes(tmp_path)
        points = {r.point.layout_name: r.point.settings for r in read_records(tmp_path / "run")}
        assert points == {"tp4": "max_num_seqs=4", "tp8": "max_num_seqs=4"}

    def test_settings_are_read_from_folder_names(self, tmp_path: Path) -> None:
        """The folder belongs to a tree of another tool or of an older version."""
        for seqs in (4, 8):
            folder = tmp_path / "sweep" / f"max_num_seqs={seqs}"
            folder.mkdir(parents=True)
            files.write_file(folder, files.make_vllm_result())
        self.import_notes(tmp_path)
        assert [r.point.settings for r in read_records(tmp_path / "run")] == ["max_num_seqs=4", "max_num_seqs=8"]


class TestUnread:
    def test_unread_fields_are_listed(self, tmp_path: Path) -> None:
        """A median in seconds has a separate name, and no record has a 75th percentile."""
        results = [
            files.remove_details(files.make_vllm_result(median_ttft=0.5)),
            files.remove_details(files.make_vllm_result(p75_itl_ms=40.0)),
        ]
        path = files.write_file(tmp_path, *results)
        notes = import_files([path], "vllm", tmp_path / "run", Overrides()).notes
        assert "Not read, as no field of ours means the same: median_ttft (in 1 of 2), p75_itl_ms (in 1 of 2)." in notes

    def test_goodput_without_objectives_is_listed_as_unread(self, tmp_path: Path) -> None:
        path = files.write_file(tmp_path, files.make_vllm_result(request_goodput=1.25))
        notes = " ".join(import_files([path], "vllm", tmp_path / "run", Overrides()).notes)
        assert "request_goodput (its objectives are not there) (in 1 of 1)" in notes

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_all_fields_of_the_tools_are_known(self, engine: str, tmp_path: Path) -> None:
        result = files.MAKERS[engine]()
        path = files.write_file(tmp_path, result, files.remove_details(result))
        notes = " ".join(import_files([path], engine, tmp_path / "run", Overrides()).notes)
        assert "Not read" not in notes


class TestReport:
    def test_report_joins_own_vllm_and_sglang_points_by_origin(self, tmp_path: Path) -> None:
        runs = [
            record_builder.write_records(tmp_path / "ours", [build.make_served_record(build.make_point(build.DCP))])
        ]
        for engine, result in (
            ("vllm", files.make_vllm_result()),
            ("sglang", files.remove_details(files.make_sglang_result())),
        ):
            folder = tmp_path / f"of-{engine}"
            path = files.write_file(tmp_path, result, name=f"{engine}.json")
            import_files([path], engine, folder, Overrides(tp=8, dcp=8), force=False)
            runs.append(folder)
        read = dataframes.load_frames(runs)
        assert set(read.served["origin"]) == {"dcpbench", "vllm", "sglang"}
        labels = dict(zip(read.served["origin"], read.served["label"], strict=True))
        assert "vllm" in labels["vllm"]
        assert "unknown" not in " ".join(labels.values())
        sentences = " ".join(answer.format_top_sentences(read))
        assert "1 point of vllm bench serve" in sentences
        assert "1 point of SGLang" in sentences

    def test_report_can_be_written_from_imports_alone(self, tmp_path: Path) -> None:
        """Unknown values of an import must not break any section."""
        from dcpbench.reports import write_report

        path = files.write_file(
            tmp_path, files.make_vllm_result(), files.remove_details(files.make_vllm_result(max_concurrency=2))
        )
        import_files([path], "vllm", tmp_path / "run", Overrides())
        paths = write_report([tmp_path / "run"], tmp_path / "report")
        text = (tmp_path / "report" / "report.md").read_text()
        assert "layout unknown" in text
        assert "nan" not in text.lower().replace("finance", "")
        assert paths

    def test_report_of_imports_has_no_empty_column(self, tmp_path: Path) -> None:
        """A value that no import has is in no table; next to points of dcpbench, which have it, the cell is a dash."""
        row = {name: value for name, value in files.make_inferencex_row().items() if name != "p99_itl"}
        import_files([files.write_file(tmp_path, row)], "inferencex", tmp_path / "run", Overrides(), force=False)
        tables = [
            table
            for section in sections.build_sections(dataframes.load_frames([tmp_path / "run"]), [])
            for table in section.tables
        ]
        empty = [(t.title, name) for t in tables for i, name in enumerate(t.columns) if {r[i] for r in t.rows} == {"—"}]
        assert [pair for pair in empty if pair[0] != "Runs"] == []
        assert [row for t in tables if t.title == "Environment" for row in t.rows] == [
            ["device", "NVIDIA H200"],
            ["device count", "8"],
        ]
        assert "Measurement conditions" not in {table.title for table in tables}
        own = record_builder.write_records(tmp_path / "ours", [build.make_served_record(build.make_point(build.DCP))])
        both = [
            t for s in sections.build_sections(dataframes.load_frames([tmp_path / "run", own]), []) for t in s.tables
        ]
        (served,) = [table for table in both if table.title == "Served live"]
        assert "p99" in served.columns
        assert any("—" in row for row in served.rows)


REAL = Path(__file__).parents[1] / "data" / "imports"


def curves(folder: Path) -> dict[str, list[int]]:
    """Return the label of each line of a report's panels and the concurrencies along it."""
    served = dataframes.load_frames([folder]).served
    return {
        " | ".join(map(str, names)): line["concurrency"].tolist()
        for names, line in served.groupby(["model", "rest", "label"], sort=False)
    }


class TestCurves:
    """Each configuration of a server is one curve, independent of file names and drawn lengths."""

    def import_notes(self, tmp_path: Path, path: Path, engine: str, **options: Any) -> str:
        """Import these files as the run `run`; return the notes for the user as one text."""
        return " ".join(import_files([path], engine, tmp_path / "run", Overrides(**options), force=True).notes)

    def test_answers_that_ended_early_get_the_lengths_of_the_folder_name(self, tmp_path: Path) -> None:
        """Real files of GLM-4.7 on 8 Gaudi 3 have 1,024 input tokens and answers of 674, 786, 731 and 718 tokens on
        average.
        """
        notes = self.import_notes(tmp_path, REAL / "glm-4.7_1k1k", "vllm", tp=8, gpu="Gaudi 3", dtype="bf16")
        assert curves(tmp_path / "run") == {"zai-org/GLM-4.7 | 1,024 in · 1,024 out | tp8": [1, 4, 16, 64]}
        assert "Read from names of files and folders: 1024 in, 1024 out (4 of 4)." in notes
        record = read_records(tmp_path / "run")[0]
        assert record.warnings == ["summary_only", "nominal_lengths"]
        assert record.environment
        assert (record.environment.device, record.point.precision) == ("Gaudi 3", "bf16 weights")

    def test_answers_that_ended_early_without_a_name_are_one_curve(self, tmp_path: Path) -> None:
        """(6,739 + 31,445 + 117,008 + 459,366) / 850 = 723; each number of clients is measured once."""
        for path in (REAL / "glm-4.7_1k1k").iterdir():
            (tmp_path / "results").mkdir(exist_ok=True)
            (tmp_path / "results" / path.name).write_text(path.read_text())
        self.import_notes(tmp_path, tmp_path / "results", "vllm")
        (rest,) = curves(tmp_path / "run")
        assert rest == "zai-org/GLM-4.7 | 1,024 on average in · 723 on average out | layout unknown"

    def test_length_options_override_lengths_of_names(self, tmp_path: Path) -> None:
        self.import_notes(tmp_path, REAL / "glm-4.7_1k1k", "vllm", input_len=1000, output_len=1000)
        assert list(curves(tmp_path / "run")) == ["zai-org/GLM-4.7 | 1,000 in · 1,000 out | layout unknown"]
        with pytest.raises(UsageError, match=r"requests had 1,024 tokens in and .* leave out --input-len"):
            self.import_notes(tmp_path, REAL / "glm-4.7_1k1k", "vllm", input_len=100_000)

    def test_lengths_of_a_name_that_contradict_token_sums_are_ignored(self, tmp_path: Path) -> None:
        """300 tokens of three prompts cannot be 8,192 each."""
        path = files.write_file(tmp_path, files.remove_details(files.make_vllm_result()), name="8k1k.json")
        assert "Read from names" not in self.import_notes(tmp_path, path, "vllm")
        assert list(curves(tmp_path / "run")) == [
            "deepseek-ai/DeepSeek-V3 | 100 on average in · 2 on average out | layout unknown"
        ]

    @pytest.mark.parametrize(
        ("name", "degrees", "lengths"),
        [
            ("dsr1_1k1k_fp8_sglang_tp8-ep1-dpafalse_conc64.json", {"tp": 8, "ep": 1}, (1024, 1024)),
            ("8k-1k/tp_4_dp2.json", {"tp": 4, "dp": 2}, (8192, 1024)),
            ("isl1000_osl100/TP=8.json", {"tp": 8}, (1000, 100)),
            ("in1024_out128.json", {}, (1024, 128)),
            ("openai-infqps-concurrency64-DeepSeek-V3-20261121-101112.json", {}, (None, None)),
            ("http8.json", {}, (None, None)),
        ],
    )
    def test_degrees_and_lengths_are_parsed_from_names(
        self, name: str, degrees: dict[str, int], lengths: tuple[int | None, int | None]
    ) -> None:
        found = field_names.parse_name(name)
        assert (found.degrees, found.lengths) == (degrees, lengths)

    def test_hardware_and_precision_are_read_from_metadata(self, tmp_path: Path) -> None:
        metadata = {"gpu": "h200", "precision": "FP8", "tp": "8", "isl": "100", "osl": "4"}
        record, found = one(tmp_path, "vllm", files.remove_details(files.make_vllm_result(**metadata)))
        assert record.environment
        assert (record.environment.device, record.point.precision) == ("NVIDIA H200", "fp8 weights")
        assert record.point.load
        assert (record.point.load.input_tokens, record.point.load.output_tokens) == ("100", "4")
        assert found.output_tok_s_per_gpu == pytest.approx(8.75 / 8)

    def test_layout_and_precision_are_read_from_sglang_server_info(self, tmp_path: Path) -> None:
        """Without attention data parallelism, dp counts copies of the server: 2 with 4 GPUs each are tp8·dp2."""
        server = {"model_path": "m", "tp_size": 4, "dp_size": 2, "quantization": None, "dtype": "bfloat16"}
        record, _ = one(tmp_path, "sglang", files.make_sglang_result(server_info=server))
        assert (record.point.layout_name, record.point.precision) == ("tp8·dp2", "computed in bf16")
        server |= {
            "tp_size": 8,
            "dp_size": 8,
            "enable_dp_attention": True,
            "quantization": "fp8",
            "kv_cache_dtype": "auto",
        }
        record, _ = one(tmp_path, "sglang", files.make_sglang_result(server_info=server))
        assert (record.point.layout_name, record.point.precision) == ("tp8·dp8", "fp8 weights")
        record, _ = one(
            tmp_path, "sglang", files.make_sglang_result(server_info=server | {"kv_cache_dtype": "fp8_e4m3"})
        )
        assert (record.point.precision, record.point.dtype) == ("fp8 weights and KV", "bf16")

    @pytest.mark.parametrize(
        ("engine", "stated", "ep"),
        [
            ("vllm", {"enable_expert_parallel": "True"}, "8"),
            ("vllm", {"enable_expert_parallel": "false"}, "1"),
            ("vllm", {"ep": "8"}, "8"),
            ("vllm", {}, "unknown"),
            ("sglang", {"ep_size": 4}, "4"),
            ("sglang", {"ep_size": 1}, "1"),
            ("sglang", {}, "unknown"),
        ],
        ids=str,
    )
    def test_expert_parallelism_is_read_and_never_guessed(
        self, engine: str, stated: dict[str, Any], ep: str, tmp_path: Path
    ) -> None:
        """vLLM states if experts are parallel over all ranks, SGLang the degree; both are no settings."""
        server = {"model_path": "m", "tp_size": 8, "dp_size": 1}
        degrees = {"tensor_parallel_size": "4", "data_parallel_size": "2"}
        result = (
            files.make_vllm_result(**degrees, **stated)
            if engine == "vllm"
            else files.make_sglang_result(server_info=server | stated)
        )
        record, _ = one(tmp_path, engine, result)
        assert (record.point.tp, record.point.ep, record.point.settings) == (8, ep, "")

    def test_expert_parallel_degree_is_read_from_file_names(self, tmp_path: Path) -> None:
        path = files.write_file(tmp_path, files.make_vllm_result(), name="dsr1_tp8-ep8.json")
        notes = import_files([path], "vllm", tmp_path / "run", Overrides()).notes
        (record,) = read_records(tmp_path / "run")
        assert (record.point.tp, record.point.ep) == (8, "8")
        assert any("ep8 (1 of 1)" in note for note in notes)

    @pytest.mark.parametrize("name", ["label", "version"])
    def test_label_shared_by_several_loads_is_a_curve(self, name: str, tmp_path: Path) -> None:
        results = [
            files.remove_details(files.make_vllm_result(max_concurrency=n, **{name: label}))
            for label in ("0.11", "0.12")
            for n in (1, 2, 4)
        ]
        imported(tmp_path, "vllm", *results)
        assert {line.rpartition(" | ")[2]: loads for line, loads in curves(tmp_path / "run").items()} == {
            f"layout unknown ({name}=0.11)": [1, 2, 4],
            f"layout unknown ({name}=0.12)": [1, 2, 4],
        }

    def test_label_that_differs_in_each_file_is_ignored(self, tmp_path: Path) -> None:
        """Such a label names the load."""
        results = [files.remove_details(files.make_vllm_result(max_concurrency=n, label=f"c{n}")) for n in (1, 2, 4)]
        imported(tmp_path, "vllm", *results)
        assert list(curves(tmp_path / "run").values()) == [[1, 2, 4]]

    def test_folders_are_curves_except_folders_of_repeats(self, tmp_path: Path) -> None:
        for folder in ("eager", "graphs"):
            for n in (1, 2):
                (tmp_path / "all" / folder).mkdir(parents=True, exist_ok=True)
                files.write_file(
                    tmp_path / "all" / folder,
                    files.remove_details(files.make_vllm_result(max_concurrency=n)),
                    name=f"{n}.json",
                )
        self.import_notes(tmp_path, tmp_path / "all", "vllm")
        assert [line.rpartition(" | ")[2] for line in curves(tmp_path / "run")] == [
            "layout unknown (folder=eager)",
            "layout unknown (folder=graphs)",
        ]
        (tmp_path / "all" / "eager").rename(tmp_path / "all" / "run-1")
        (tmp_path / "all" / "graphs").rename(tmp_path / "all" / "20261121_101112")
        self.import_notes(tmp_path, tmp_path / "all", "vllm")
        assert dataframes.load_frames([tmp_path / "run"]).served["repeats"].tolist() == [2, 2]


class TestOlderFiles:
    """Lines as SGLang appended them to one file in 2024, from a public repository."""

    def test_rates_of_each_data_set_are_a_curve(self, tmp_path: Path) -> None:
        rates = [files.make_sglang_2024_result(rate) for rate in (1.0, 2.0, 4.0)]
        chat = {"dataset_name": "sharegpt", "total_input_tokens": 67_500, "total_output_tokens": 57_300}
        records = imported(tmp_path, "sglang", *rates, files.make_sglang_2024_result(4.0, **chat), model="llama", tp=2)
        served = dataframes.load_frames([tmp_path / "run"]).served
        along = served.groupby("rest")["load_request_rate"].apply(list).to_dict()
        assert along == {"1–1,024 in · 1–1,024 out": [1, 2, 4], "225 on average in · 191 on average out": [4]}
        serve = records[0].serve
        assert serve
        assert (serve.ttft_ms.p50, serve.ttft_ms.p99, serve.itl_ms.p50) == (85.0, None, 14.0)
        assert serve.output_tok_s == pytest.approx(160_000 / 300)

    def test_result_without_model_requires_the_model_option(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="names no model; add --model NAME"):
            imported(tmp_path, "sglang", files.make_sglang_2024_result())


class TestInferenceX:
    def test_published_sweep_is_a_curve_for_each_layout(self, tmp_path: Path) -> None:
        """One of six rows of a TPU has tp 1; 8 chips generate 411.13 output tokens/s each with 64 clients."""
        import_files([REAL / "inferencex-tpu-sweep.json"], "inferencex", tmp_path / "run", Overrides())
        assert curves(tmp_path / "run") == {
            "Qwen/Qwen3.5-397B-A17B-FP8 | 8,192 in · 1,024 out | tp8": [4, 8, 16, 32, 64],
            "Qwen/Qwen3.5-397B-A17B-FP8 | 8,192 in · 1,024 out | tp1": [64],
        }
        found = {(r.point.tp, r.point.concurrency): r for r in read_records(tmp_path / "run")}
        record = found[8, 64]
        serve = record.serve
        assert serve
        assert serve.output_tok_s == pytest.approx(8 * 411.1276267468178)
        assert serve.output_tok_s_per_gpu == pytest.approx(411.1276267468178)
        assert serve.total_tok_s == pytest.approx(8 * 3705.8131472623354)
        assert (serve.itl_ms.p50, serve.ttft_ms.p99) == (pytest.approx(20.895760972), pytest.approx(14481.789677))
        assert serve.tok_s_per_user == pytest.approx(1 / 0.038006504256691664), "the field `intvty` of InferenceX"
        assert (serve.wall_s, serve.finished, serve.request_throughput, serve.input_tokens) == (None, None, None, None)
        assert (record.origin, record.point.backend, record.point.precision) == ("inferencex", "vllm", "fp8 weights")
        assert record.environment
        assert record.environment.device == "tpuv7"

    def test_hardware_speculation_and_attention_dp_separate_curves(self, tmp_path: Path) -> None:
        """The rows are in random order."""
        rows = [
            files.make_inferencex_row(conc=n, **server)
            for n in (4, 8)
            for server in ({}, {"hw": "mi355x"}, {"spec_decoding": "mtp"}, {"dp_attention": "true", "ep": 8}, {"ep": 8})
        ]
        random.Random(0).shuffle(rows)
        records = imported(tmp_path, "inferencex", *rows)
        assert {line.rpartition(" | ")[2]: loads for line, loads in curves(tmp_path / "run").items()} == {
            "tp8 (ep1, AMD MI355X)": [4, 8],
            "tp8 (ep1, NVIDIA H200)": [4, 8],
            "tp8 (ep1, spec=mtp, NVIDIA H200)": [4, 8],
            "tp8 (ep8, NVIDIA H200)": [4, 8],
            "tp8·dp8·ep8 (NVIDIA H200)": [4, 8],
        }
        assert {(r.point.dp, r.point.ep) for r in records} == {(1, "1"), (1, "8"), (8, "8")}
        rates = [r.serve.tok_s_per_user for r in records if r.serve and "spec" in r.point.settings]
        assert rates == [50.0, 50.0], "1000 / median TPOT, as a chunk holds several tokens"

    def test_rows_of_the_site_are_read_from_their_metrics_object(self, tmp_path: Path) -> None:
        row = files.make_inferencex_row()
        inner = {name: row.pop(name) for name in list(row) if "put" in name or "_t" in name or "itl" in name}
        renamed = {"hardware": row.pop("hw"), "decode_tp": row.pop("tp"), "spec_method": row.pop("spec_decoding")}
        (record,) = imported(tmp_path, "inferencex", {**row, **renamed, "metrics": inner})
        (plain,) = imported(tmp_path, "inferencex", files.make_inferencex_row())
        assert (record.point, record.serve, record.environment) == (plain.point, plain.serve, plain.environment)

    def test_disaggregated_and_agentic_rows_are_listed_as_left_out(self, tmp_path: Path) -> None:
        agents = files.make_inferencex_row(scenario_type="agentic-coding")
        path = files.write_file(tmp_path, files.make_inferencex_row(), files.make_inferencex_row(disagg=True), agents)
        notes = " ".join(import_files([path], "inferencex", tmp_path / "run", Overrides()).notes)
        assert "Left out, prefill and decode on GPUs of their own" in notes
        assert f"Left out, replays of agents, which have no lengths: {path}, line 3." in notes
        assert len(read_records(tmp_path / "run")) == 1

    @pytest.mark.parametrize(
        "changes", [{"conc": 0}, {"tput_per_gpu": -1.0}, {"output_tput_per_gpu": math.inf}, {"isl": "long"}], ids=str
    )
    def test_impossible_values_raise_records_error(self, changes: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(RecordsError):
            imported(tmp_path, "inferencex", files.make_inferencex_row(**changes))

    def test_inferencex_file_is_recognised_by_other_importers(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="import it with --from inferencex"):
            imported(tmp_path, "vllm", files.make_inferencex_row())

    def test_own_points_share_a_panel_with_inferencex(self, tmp_path: Path) -> None:
        """Points of the same model and lengths differ in hardware and engine."""
        point = build.make_point(build.DCP)
        assert point.load
        other = build.make_point(build.DCP, 8, {"input_tokens": "77", "requests": 7})
        own = record_builder.write_records(
            tmp_path / "ours", [build.make_served_record(point), build.make_served_record(other)]
        )
        lengths = {"isl": int(point.load.input_tokens), "osl": int(point.load.output_tokens)}
        path = files.write_file(tmp_path, files.make_inferencex_row(model=point.model, **lengths))
        import_files([path], "inferencex", tmp_path / "run", Overrides())
        served = dataframes.load_frames([own, tmp_path / "run"]).served
        panels = served.groupby("rest")["origin"].agg(set)
        assert {"dcpbench", "inferencex"} in panels.tolist(), "the number of requests does not separate panels"
        assert served["label"].nunique() == 2
        style = Style.from_points(served)
        first, *_, last = served[["layout", "variant", "run"]].itertuples(index=False)
        assert style.get_look(*first)["color"] != style.get_look(*last)["color"]


class TestFolder:
    def test_existing_records_are_not_overwritten_without_force(self, tmp_path: Path) -> None:
        path = files.write_file(tmp_path, files.make_vllm_result())
        import_files([path], "vllm", tmp_path / "run", Overrides())
        with pytest.raises(OutputError, match="--force"):
            import_files([path], "vllm", tmp_path / "run", Overrides())
        assert len(read_records(tmp_path / "run")) == 1

    def test_folder_of_an_active_run_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dcpbench.launch.folders.END_TIMEOUT_S", 0.0)
        with lock_folder(tmp_path / "run"), pytest.raises(OutputError, match="a run is still writing here"):
            imported(tmp_path, "vllm", files.make_vllm_result())

    def test_import_leaves_no_temporary_files(self, tmp_path: Path) -> None:
        imported(tmp_path, "vllm", files.make_vllm_result())
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "records.jsonl", "samples"]


@st.composite
def times(draw: st.DrawFn) -> list[tuple[float, list[float]]]:
    """Draw 1 to 12 requests, each with 1 to 20 tokens after its submission."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        submitted = draw(st.floats(0, 100))
        gaps = draw(st.lists(st.floats(1e-4, 2), min_size=1, max_size=20))
        at, token_s = submitted, []
        for gap in gaps:
            at += gap
            token_s.append(at)
        found.append((submitted, token_s))
    first = min(submitted for submitted, _ in found)
    return sorted((submitted - first, [t - first for t in token_s]) for submitted, token_s in found)


def close(value: Any, share: float) -> Any:
    """Return an approximation for a number, which allows rounding; return None and text unchanged."""
    return pytest.approx(value, rel=share, abs=share) if isinstance(value, float | int) else value


@settings(deadline=None, max_examples=60)
@given(times=times(), closed=st.booleans())
def test_metrics_survive_export_to_vllm_and_import(
    times: list[tuple[float, list[float]]], closed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every latency, rate, count and the steady window agree to 1 part in a billion, as sums have another order."""
    load = {} if closed else {"arrival": "gamma", "request_rate": 2.5}
    m = files.make_measured_point(
        tmp_path_factory.mktemp("run"), times, files.make_point(changed={"requests": len(times), **load})
    )
    (data,) = to_vllm.render([m]).files.values()
    back, _ = imported_metrics.compute_metrics(vllm.read(Document("file", json.loads(data))), m.record.point.tp)
    was = m.record.serve
    assert was
    own = msgspec.to_builtins(was)
    imported_values = msgspec.to_builtins(back)
    unknown = {
        "rejected",
        "cancelled",
        "failed",  # vLLM's file counts every unfinished request as failed
        "cached_tokens",
        "preemptions",
        "steps",
        "decode_steps",
        "eager_decode_steps",
        "decode_batch",
        "samples_file",
        "idle_fraction",
    }
    for name in set(own) - unknown - {"ttft_ms", "itl_ms", "tpot_ms", "e2el_ms"}:
        assert imported_values[name] == close(own[name], 1e-9), name
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms"):
        assert imported_values[name] == {statistic: close(value, 1e-6) for statistic, value in own[name].items()}, name


def test_reader_of_each_engine_finds_the_model() -> None:
    assert vllm.read(Document("a", files.make_vllm_result())).model == "deepseek-ai/DeepSeek-V3"
    assert sglang.read(Document("a", files.make_sglang_result())).model == "deepseek-ai/DeepSeek-V3"


@pytest.mark.parametrize(
    ("tokens", "nominal", "requests", "off"),
    [
        (1049, 100, 10, False),
        (1060, 100, 10, True),
        (940, 100, 10, True),
        (960, 100, 10, False),
        (1060, None, 10, False),
        (0, 100, 0, False),
    ],
)
def test_lengths_are_off_if_they_differ_by_more_than_a_twentieth(
    tokens: int, nominal: int | None, requests: int, off: bool
) -> None:
    assert _Side(fixed=None, nominal=nominal, tokens=tokens, requests=requests).is_off() is off
