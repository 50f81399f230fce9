"""Imports of GuideLLM, AIPerf, `vllm bench forward` and SGLang's bench_one_batch: units, percentiles, and unknown
values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.errors import RecordsError, UsageError
from dcpbench.imports import Overrides, import_files
from dcpbench.records.file import read_records
from dcpbench.serving.samples import read_samples
from tests.unit.tool_files_builder import (
    PHASES,
    make_aiperf_line,
    make_aiperf_summary,
    make_distribution,
    make_forward_case,
    make_guidellm_result,
    make_one_batch_result,
    make_statistic,
)

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record


def imported(tmp_path: Path, engine: str, path: Path, **options: Any) -> list[Record]:
    """Return the records of a file or a folder, in order."""
    import_files([path], engine, tmp_path / "run", Overrides(**options), force=True)
    return read_records(tmp_path / "run")


def write(path: Path, *values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, values)) + "\n")
    return path


def report(tmp_path: Path, *benchmarks: dict[str, Any]) -> Path:
    head = {"metadata": {"version": 2, "guidellm_version": "0.7.3"}, "config": {}}
    return write(tmp_path / "benchmarks.json", head | {"benchmarks": list(benchmarks)})


class TestGuidellm:
    def test_latencies_are_converted_to_ms_and_itl_has_only_a_mean(self, tmp_path: Path) -> None:
        """The request latency is in s. Percentiles of the inter-token latency are over requests, so ITL has only a
        mean.
        """
        path = report(tmp_path, make_guidellm_result({"type_": "concurrent", "streams": 2}))
        (record,) = imported(tmp_path, "guidellm", path, tp=2)
        found = record.serve
        assert found is not None
        assert (found.ttft_ms.mean, found.ttft_ms.p50, found.ttft_ms.p99) == (200.0, 190.0, pytest.approx(190 * 1.45))
        assert (found.e2el_ms.mean, found.e2el_ms.p50) == (pytest.approx(300.0), pytest.approx(320.0))
        assert (found.itl_ms.mean, found.itl_ms.p50, found.itl_ms.p99) == (46.0, None, None)
        assert (found.tpot_ms.mean, found.tpot_ms.p50) == (pytest.approx(50.0), pytest.approx(50.0))
        assert found.tok_s_per_user == pytest.approx(20.0)
        assert found.output_tok_s == pytest.approx(10 / 2.0)
        assert found.output_tok_s_per_gpu == pytest.approx(2.5)
        assert found.total_tok_s == pytest.approx(310 / 2.0)
        assert (found.submitted, found.finished, found.failed) == (6, 3, 2)
        assert "summary_only" in record.warnings
        assert record.origin == "guidellm"
        point = record.point
        assert (point.model, point.backend, point.concurrency) == ("org/model", "openai", 2)
        assert point.load is not None
        assert (point.load.arrival, point.load.input_tokens, point.load.output_tokens) == ("closed", "100", "mean:3")

    @pytest.mark.parametrize(
        ("strategy", "arrival", "rate", "burstiness", "concurrency"),
        [
            ({"type_": "synchronous"}, "closed", None, 1.0, 1),
            ({"type_": "throughput", "max_concurrency": None}, "closed", None, 1.0, 6),
            ({"type_": "throughput", "max_concurrency": 4}, "closed", None, 1.0, 4),
            ({"type_": "poisson", "rate": 1.5}, "gamma", 1.5, 1.0, 6),
            ({"type_": "constant", "rate": 2.0, "max_concurrency": 5}, "gamma", 2.0, 1e6, 5),
            ({"type_": "trace", "time_scale": 1.0}, "trace", None, 1.0, 6),
        ],
    )
    def test_each_strategy_is_an_arrival(
        self,
        tmp_path: Path,
        strategy: dict[str, Any],
        arrival: str,
        rate: float | None,
        burstiness: float,
        concurrency: int,
    ) -> None:
        (record,) = imported(tmp_path, "guidellm", report(tmp_path, make_guidellm_result(strategy)))
        load = record.point.load
        assert load is not None
        assert (load.arrival, load.request_rate, load.burstiness) == (arrival, rate, burstiness)
        assert record.point.concurrency == concurrency

    def test_tpot_is_unknown_if_not_all_requests_are_listed(self, tmp_path: Path) -> None:
        path = report(tmp_path, make_guidellm_result({"type_": "synchronous"}, listed=2))
        (record,) = imported(tmp_path, "guidellm", path)
        assert record.serve is not None
        assert record.serve.tpot_ms.p50 is None
        assert record.serve.tok_s_per_user is None

    def test_gaps_between_chunks_of_several_tokens_are_unknown(self, tmp_path: Path) -> None:
        chunks = {"iter_tokens_per_iteration": make_distribution(2.5, 2.5)}
        (record,) = imported(
            tmp_path, "guidellm", report(tmp_path, make_guidellm_result({"type_": "synchronous"}, **chunks))
        )
        assert record.serve is not None
        assert record.serve.itl_ms.mean is None
        assert "chunk_gaps" in record.warnings

    def test_each_benchmark_of_a_sweep_is_a_point(self, tmp_path: Path) -> None:
        loads = [make_guidellm_result({"type_": "concurrent", "streams": n}) for n in (1, 2, 4)]
        found = imported(tmp_path, "guidellm", report(tmp_path, *loads))
        assert [record.point.concurrency for record in found] == [1, 2, 4]
        assert len({record.point.get_key() for record in found}) == 3

    def test_unknown_strategy_and_other_versions_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match=r"config.strategy.type_ is 'replay', and known are synchronous"):
            imported(tmp_path, "guidellm", report(tmp_path, make_guidellm_result({"type_": "replay"})))
        with pytest.raises(RecordsError, match=r"is of an earlier GuideLLM, .* with version 0\.5 or newer"):
            imported(tmp_path, "guidellm", report(tmp_path, {"run_stats": {}, "metrics": {}, "duration": 1.0}))
        old = {name: v for name, v in make_guidellm_result({"type_": "synchronous"}).items() if name != "config"}
        with pytest.raises(RecordsError, match="is not what GuideLLM writes: Object missing required field `config`"):
            imported(tmp_path, "guidellm", report(tmp_path, old))

    def test_rates_with_a_warm_up_are_those_of_the_measured_time(self, tmp_path: Path) -> None:
        """Requests that overlap the 2 s have 10 tokens, of which 6 came within them."""
        own = {"output_tokens_per_second": 3.0, "tokens_per_second": 103.0, "requests_per_second": 1.0}
        rates = {name: make_distribution(value, value) for name, value in own.items()}
        benchmark = make_guidellm_result({"type_": "concurrent", "streams": 2}, **rates)
        times = {"request_start_time": 999.0, "measure_start_time": 1000.0}
        times |= {"measure_end_time": 1002.0, "request_end_time": 1002.0}
        for scheduler, wanted in (({}, (5.0, 155.0, 1.5)), (times, (3.0, 103.0, 1.0))):
            path = report(tmp_path, benchmark | {"scheduler_metrics": scheduler})
            (record,) = imported(tmp_path, "guidellm", path, tp=2)
            assert record.serve is not None
            assert (record.serve.output_tok_s, record.serve.total_tok_s, record.serve.request_throughput) == wanted


@pytest.mark.parametrize("number", [10**400, 10**16, -1])
def test_impossible_numbers_inside_a_benchmark_are_refused(tmp_path: Path, number: int) -> None:
    case = make_forward_case("a", [9])
    case["requests"][0]["kv_len"] = number
    totals = {"successful": number, "incomplete": 0, "errored": 0, "total": 3}
    benchmark = make_guidellm_result({"type_": "concurrent", "streams": 2}, request_totals=totals)
    for tool, path in (("vllm-forward", write(tmp_path / "x.json", case)), ("guidellm", report(tmp_path, benchmark))):
        with pytest.raises(RecordsError, match=r"was the file damaged|less than nothing"):
            imported(tmp_path, tool, path, model="m")
    listed = make_guidellm_result({"type_": "concurrent", "streams": 2})
    listed["requests"]["successful"][0]["inter_token_latency_ms"] = number
    with pytest.raises(RecordsError, match="which is no time in ms"):
        imported(tmp_path, "guidellm", report(tmp_path, listed))


BEGIN_NS = 1_759_813_207_532_900_363


class TestAiperf:
    def test_summary_keeps_its_percentiles_under_dcpbench_names(self, tmp_path: Path) -> None:
        """AIPerf's inter-token latency is TPOT, and its inter-chunk latency is ITL. Each value has its own unit."""
        summary = make_aiperf_summary(
            time_to_first_token=make_statistic("sec", 0.2, p50=0.19, p90=0.21, p95=0.22, p99=0.23)
        )
        path = write(tmp_path / "profile_export_aiperf.json", summary)
        (record,) = imported(tmp_path, "aiperf", path, tp=2)
        found = record.serve
        assert found is not None
        assert (found.ttft_ms.mean, found.ttft_ms.p99) == (pytest.approx(200.0), pytest.approx(230.0))
        assert (found.tpot_ms.mean, found.tpot_ms.p50) == (50.0, 48.0)
        assert (found.itl_ms.mean, found.itl_ms.p99) == (49.0, 60.0)
        assert (found.e2el_ms.p50, found.e2el_ms.p99) == (310.0, 340.0)
        assert found.output_tok_s == pytest.approx(5.0)
        assert found.total_tok_s == pytest.approx(310 / 2)
        assert (found.submitted, found.finished, found.failed) == (4, 3, 1)
        assert found.tok_s_per_user == pytest.approx(1000 / 48.0)
        assert (record.point.model, record.point.concurrency, record.point.backend) == ("org/model", 2, "openai")

    def test_metrics_are_computed_if_the_folder_has_the_requests(self, tmp_path: Path) -> None:
        """Three requests, 0.1 s apart, have gaps of 30, 31, 39 and 50 ms, and 7 tokens in 0.7 s. The warm-up is left
        out.
        """
        folder = tmp_path / "artifacts"
        write(folder / "profile_export_aiperf.json", make_aiperf_summary())
        lines = [
            make_aiperf_line(BEGIN_NS, [30.0, 31.0, 39.0]),
            make_aiperf_line(BEGIN_NS + 100_000_000, [50.0]),
            make_aiperf_line(BEGIN_NS + 200_000_000, []),
            make_aiperf_line(BEGIN_NS - 9_000_000_000, [900.0], phase="warmup"),
            make_aiperf_line(
                BEGIN_NS + 200_000_000, [], metrics={}, error={"code": 500, "type": "HTTPError", "message": "no"}
            ),
        ]
        write(folder / "profile_export.jsonl", *lines)
        (record,) = imported(tmp_path, "aiperf", folder, tp=2)
        found = record.serve
        assert found is not None
        assert (found.itl_ms.mean, found.itl_ms.p50, found.itl_ms.samples) == (
            pytest.approx(37.5),
            pytest.approx(35),
            4,
        )
        assert found.tpot_ms.mean == pytest.approx((100 / 3 + 50) / 2)
        assert found.wall_s == pytest.approx(0.7)
        assert found.output_tok_s == pytest.approx(10)
        assert (found.submitted, found.finished, found.failed) == (4, 3, 1)
        assert "summary_only" not in record.warnings
        assert (record.point.model, record.point.concurrency) == ("org/model", 2)
        rows = read_samples(tmp_path / "run" / found.samples_file)
        assert [row.submitted_s for row in rows] == pytest.approx([0, 0.1, 0.2])
        assert rows[0].token_s == pytest.approx([0.5, 0.53, 0.561, 0.6])

    def test_requests_without_a_summary_have_no_model_and_load(self, tmp_path: Path) -> None:
        later = make_aiperf_line(BEGIN_NS + 9_000_000_000, [31.0])
        path = write(
            tmp_path / "profile_export.jsonl",
            make_aiperf_line(BEGIN_NS, [30.0]),
            make_aiperf_line(BEGIN_NS + 1, [31.0]),
            later,
        )
        with pytest.raises(UsageError, match="names no model; add --model NAME"):
            imported(tmp_path, "aiperf", path)
        (record,) = imported(tmp_path, "aiperf", path, model="m")
        assert (record.point.settings, record.point.concurrency) == ("load=unknown", 2), "two of three overlap"

    @pytest.mark.parametrize(
        ("load", "given", "wanted"),
        [
            ({"request_rate": 2.0}, {}, ("gamma", 2.0, 1.0, "")),
            ({"request_rate": 2.0, "request_rate_mode": "constant"}, {}, ("gamma", 2.0, 1e6, "")),
            ({"request_rate": 2.0, "arrival_pattern": "constant"}, {}, ("gamma", 2.0, 1e6, "")),
            (
                {"request_rate": 2.0, "arrival_pattern": "gamma", "arrival_smoothness": 0.5},
                {},
                ("gamma", 2.0, 0.5, ""),
            ),
            ({}, {"fixed_schedule": True, "file": "/data/chat.jsonl"}, ("trace", None, 1.0, "chat.jsonl")),
        ],
    )
    def test_rates_and_traces_are_imported(
        self, tmp_path: Path, load: dict[str, Any], given: dict[str, Any], wanted: tuple[object, ...]
    ) -> None:
        path = write(tmp_path / "profile_export_aiperf.json", make_aiperf_summary(load, given))
        (record,) = imported(tmp_path, "aiperf", path)
        found = record.point.load
        assert found is not None
        assert (found.arrival, found.request_rate, found.burstiness, found.trace) == wanted

    @pytest.mark.parametrize(
        ("phase", "wanted"),
        [
            ({"type": "concurrency", "concurrency": 32}, ("closed", None, 1.0, "", 32)),
            ({"type": "concurrency"}, ("closed", None, 1.0, "", 1)),
            ({"type": "poisson", "rate": 2.0, "concurrency": 3}, ("gamma", 2.0, 1.0, "", 3)),
            ({"type": "gamma", "rate": 2.0, "smoothness": 0.5}, ("gamma", 2.0, 0.5, "", 4)),
            ({"type": "constant", "rate": 2.0}, ("gamma", 2.0, 1e6, "", 4)),
            ({"type": "fixed_schedule"}, ("trace", None, 1.0, "chat.jsonl", 4)),
        ],
    )
    def test_load_and_model_are_read_from_phases(
        self, tmp_path: Path, phase: dict[str, Any], wanted: tuple[object, ...]
    ) -> None:
        """Later versions list phases. The first one warms up. Without a concurrency all 4 requests may be in flight."""
        config = PHASES | {"phases": [PHASES["phases"][0], {"name": "profiling", **phase}]}
        (record,) = imported(tmp_path, "aiperf", write(tmp_path / "a.json", make_aiperf_summary(input_config=config)))
        point, found = record.point, record.point.load
        assert found is not None
        assert (found.arrival, found.request_rate, found.burstiness, found.trace, point.concurrency) == wanted
        assert (point.model, record.detail["url"]) == ("org/model", "http://localhost:8000")

    def test_phases_of_another_form_are_read_or_refused(self, tmp_path: Path) -> None:
        warm, main = {"type": "concurrency", "concurrency": 9}, {"type": "concurrency", "concurrency": 32}
        config = {"models": {"items": [{"name": "org/model"}]}, "phases": {"warmup": warm, "profiling": main}}
        (record,) = imported(tmp_path, "aiperf", write(tmp_path / "a.json", make_aiperf_summary(input_config=config)))
        assert record.point.concurrency == 32
        for odd in (5, "profiling", [1]):
            path = write(tmp_path / "a.json", make_aiperf_summary(input_config=config | {"phases": odd}))
            with pytest.raises(RecordsError, match="states neither a concurrency nor a request rate"):
                imported(tmp_path, "aiperf", path)

    def test_phase_of_several_is_the_one_of_the_folder(self, tmp_path: Path) -> None:
        phases = [
            {"name": name, "kind": "profiling", "type": "concurrency", "concurrency": n}
            for name, n in (("low", 4), ("high", 64))
        ]
        summary = make_aiperf_summary(input_config={"models": {"items": [{"name": "org/model"}]}, "phases": phases})
        with pytest.raises(RecordsError, match="mixes several measured phases; import the results of each phase"):
            imported(tmp_path, "aiperf", write(tmp_path / "a.json", summary))
        (record,) = imported(tmp_path, "aiperf", write(tmp_path / "phases" / "high" / "a.json", summary))
        assert record.point.concurrency == 64

    def test_summary_with_an_unknown_concurrency_is_refused(self, tmp_path: Path) -> None:
        """The number of requests is not the number of clients. Users at a common rate have neither."""
        path = write(tmp_path / "a.json", make_aiperf_summary({}))
        with pytest.raises(RecordsError, match=r"neither a concurrency nor a request rate .*; add the profile_export"):
            imported(tmp_path, "aiperf", path)
        phases = [{"name": "profiling", "type": "user_centric", "rate": 2.0, "users": 3}]
        path = write(tmp_path / "a.json", make_aiperf_summary(input_config={"phases": phases}))
        with pytest.raises(RecordsError, match="phase of type user_centric has neither one concurrency nor one rate"):
            imported(tmp_path, "aiperf", path)

    def test_time_in_an_unknown_unit_is_refused(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "profile_export_aiperf.json", make_aiperf_summary(request_latency=make_statistic("ticks", 300.0))
        )
        with pytest.raises(RecordsError, match="request_latency is in ticks, and a time is in one of ns, us, ms"):
            imported(tmp_path, "aiperf", path)


class TestOneBatch:
    """Four requests of 1,000 tokens: 0.5 s of prefill, then 10 steps that take 0.3 s, with a median of 29 ms."""

    def test_ttft_of_all_requests_is_the_prefill_of_the_batch(self, tmp_path: Path) -> None:
        path = write(tmp_path / "result.jsonl", make_one_batch_result())
        (record,) = imported(tmp_path, "sglang-one-batch", path, model="m", tp=2)
        found = record.serve
        assert found is not None
        assert (found.ttft_ms.mean, found.ttft_ms.p99) == (500.0, 500.0)
        assert (found.itl_ms.mean, found.itl_ms.p50, found.itl_ms.p99) == (pytest.approx(30.0), 29.0, None)
        assert found.tpot_ms.p50 == pytest.approx(30.0)
        assert found.e2el_ms.p50 == pytest.approx(800.0)
        assert found.output_tok_s == pytest.approx(44 / 0.8)
        assert found.output_tok_s_per_gpu == pytest.approx(22 / 0.8)
        assert found.tok_s_per_user == pytest.approx(1000 / 30)
        point = record.point
        assert (point.backend, point.concurrency, point.settings) == ("sglang", 4, "bench=one batch")
        assert point.load is not None
        assert (point.load.input_tokens, point.load.output_tokens, point.load.requests) == ("1000", "11", 4)

    def test_batch_with_one_output_token_has_no_itl(self, tmp_path: Path) -> None:
        alone = make_one_batch_result(output_len=1, total_latency=0.5)
        del alone["median_decode_latency"]
        (record,) = imported(tmp_path, "sglang-one-batch", write(tmp_path / "r.jsonl", alone), model="m")
        assert record.serve is not None
        assert record.serve.itl_ms.mean is None
        assert record.serve.tok_s_per_user is None

    def test_each_line_is_a_point(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "r.jsonl",
            make_one_batch_result(),
            make_one_batch_result(batch_size=8),
            make_one_batch_result(input_len=2000),
        )
        found = imported(tmp_path, "sglang-one-batch", path, model="m")
        assert [(r.point.concurrency, r.point.load.input_tokens) for r in found if r.point.load] == [
            (4, "1000"),
            (8, "1000"),
            (4, "2000"),
        ]

    def test_impossible_batch_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="a batch has at least 1 request"):
            imported(
                tmp_path,
                "sglang-one-batch",
                write(tmp_path / "r.jsonl", make_one_batch_result(batch_size=0)),
                model="m",
            )


class TestForward:
    def test_decode_step_is_imported_as_a_decode_point(self, tmp_path: Path) -> None:
        """A step of 5 ms for eight requests reads 4,096 rows of each, including the new one: 1,600 tok/s, 800 per GPU."""
        path = write(tmp_path / "f.json", [make_forward_case("a", [4096] * 8, ranks=2)])
        (record,) = imported(tmp_path, "vllm-forward", path, model="m", tp=2, dcp=2)
        found, point = record.metrics, record.point
        assert found is not None
        assert found.step_ms.median == 5.0
        assert found.step_samples_ms == [4.9, 5.0, 5.1, 5.0, 5.0]
        assert found.output_tok_s.median == pytest.approx(1600)
        assert found.output_tok_s_per_gpu == pytest.approx(800)
        assert (point.workload, point.concurrency, point.context, point.load) == ("decode", 8, 4095, None)
        assert (point.layout_name, point.backend, point.settings) == ("tp2·dcp2", "vllm", "bench=forward")

    def test_varying_lengths_are_settings_and_replicas_have_a_batch_each(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f.json", [make_forward_case("a", [3000, 5001], ranks=2)])
        (record,) = imported(tmp_path, "vllm-forward", path, model="m", tp=2, dp=2)
        assert (record.point.concurrency, record.point.context) == (4, 3999)
        assert record.point.settings == "bench=forward, kv_lens=3000-5001"

    def test_prompt_and_draft_steps_are_listed_as_left_out(self, tmp_path: Path) -> None:
        cases = [
            make_forward_case("a", [9]),
            make_forward_case("p", [9], query=9),
            make_forward_case("v", [9], query=3, drafts=2),
        ]
        done = import_files(
            [write(tmp_path / "f.json", cases)], "vllm-forward", tmp_path / "run", Overrides(model="m"), force=True
        )
        assert len(read_records(tmp_path / "run")) == 1
        assert any("Left out, steps with tokens of prompts: " in note for note in done.notes)
        assert any("Left out, steps that verify draft tokens: " in note for note in done.notes)

    def test_layout_of_several_ranks_has_to_be_given(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f.json", [make_forward_case("a", [9], ranks=4)])
        with pytest.raises(UsageError, match=r"has 4 ranks, and no layout; add --tp 4, with --dp and --dcp"):
            imported(tmp_path, "vllm-forward", path, model="m")
        with pytest.raises(UsageError, match="has 4 ranks, and the options state 2"):
            imported(tmp_path, "vllm-forward", path, model="m", tp=2)


@pytest.mark.parametrize(
    ("engine", "value"),
    [
        ("guidellm", make_guidellm_result({"type_": "synchronous"})),
        ("aiperf", make_aiperf_summary()),
        ("sglang-one-batch", make_one_batch_result()),
        ("vllm-forward", make_forward_case("a", [9])),
    ],
)
def test_result_of_another_tool_is_refused_with_its_name(engine: str, value: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", value)
    for other in ("vllm", "sglang", "inferencex", "guidellm", "aiperf", "sglang-one-batch", "vllm-forward"):
        if other != engine:
            with pytest.raises(RecordsError, match=f"looks like a result of {engine}; import it with --from {engine}"):
                imported(tmp_path, other, path, model="m")
