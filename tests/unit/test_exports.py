"""Exported files for other tools, field by field; replayed and functional points are never exported as measured."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from dcpbench.errors import RecordsError
from dcpbench.exports import (
    bmf,
    gha,
    hud,
    inferencex,
    sglang,
    vllm,
)
from dcpbench.exports.measured_points import MeasuredPoint, compute_digest
from dcpbench.imports import Overrides, import_files
from dcpbench.points.layout import Layout
from dcpbench.records.file import read_records
from dcpbench.records.record import SpeculationMetrics
from dcpbench.serving import samples
from tests.unit import engine_files_builder as files
from tests.unit import record_builder
from tests.unit import serve_record_builder as build

NOWHERE = Path("nowhere")
TP, DCP = build.TP, build.DCP
VLLM_SUMMARY = {
    "date": str,
    "endpoint_type": str,
    "backend": str,
    "model_id": str,
    "num_prompts": int,
    "burstiness": float,
    "duration": float,
    "completed": int,
    "failed": int,
    "total_input_tokens": int,
    "total_output_tokens": int,
    "request_throughput": float,
    "output_throughput": float,
    "total_token_throughput": float,
    "mean_ttft_ms": float,
    "median_ttft_ms": float,
    "mean_tpot_ms": float,
    "median_tpot_ms": float,
    "mean_itl_ms": float,
    "median_itl_ms": float,
    "mean_e2el_ms": float,
    "median_e2el_ms": float,
}
VLLM_DETAILS = {
    "input_lens": int,
    "output_lens": int,
    "ttfts": float,
    "itls": list,
    "latencies": float,
    "start_times": float,
    "generated_texts": str,
    "errors": str,
}
SGLANG_SUMMARY = {
    "backend": str,
    "dataset_name": str,
    "duration": float,
    "completed": int,
    "total_input_tokens": int,
    "total_output_tokens": int,
    "request_throughput": float,
    "input_throughput": float,
    "output_throughput": float,
    "total_throughput": float,
    "concurrency": float,
    "mean_e2e_latency_ms": float,
    "median_e2e_latency_ms": float,
    "mean_ttft_ms": float,
    "median_ttft_ms": float,
    "mean_tpot_ms": float,
    "median_tpot_ms": float,
    "mean_itl_ms": float,
    "median_itl_ms": float,
}
INFERENCEX = {
    "hw": str,
    "conc": int,
    "model": str,
    "infmax_model_prefix": str,
    "framework": str,
    "precision": str,
    "spec_decoding": str,
    "disagg": bool,
    "isl": int,
    "osl": int,
    "is_multinode": bool,
    "tp": int,
    "pp": int,
    "dcp_size": int,
    "pcp_size": int,
    "ep": int,
    "dp_attention": str,
    "tput_per_gpu": float,
    "output_tput_per_gpu": float,
    "input_tput_per_gpu": float,
    "mean_ttft": float,
    "median_ttft": float,
    "mean_tpot": float,
    "median_tpot": float,
    "mean_itl": float,
    "mean_e2el": float,
    "mean_intvty": float,
    "median_intvty": float,
}

BMF_SCHEMA = {  # schema of the format that Bencher documents
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {n: {"type": "number"} for n in ("value", "lower_value", "upper_value")},
            "required": ["value"],
            "additionalProperties": False,
        },
    },
}


def check_types(found: dict[str, Any], fields: dict[str, type]) -> None:
    """Check that every field exists with its type."""
    for name, kind in fields.items():
        assert isinstance(found[name], kind), f"{name}: {found.get(name)!r}"


def parse_only_file(rendered: Any) -> Any:
    """Return the JSON of the only file."""
    (data,) = rendered.files.values()
    return json.loads(data)


class TestVllm:
    def test_result_has_the_fields_of_a_detailed_result(self, tmp_path: Path) -> None:
        """Three requests have 7 tokens out and 300 in within 0.7 s, at 10 and 438.57 tok/s; gaps are 30, 31, 39, 50 ms."""
        found = parse_only_file(vllm.render([files.make_measured_point(tmp_path)]))
        check_types(found, VLLM_SUMMARY)
        for name, kind in VLLM_DETAILS.items():
            assert len(found[name]) == 3
            assert all(isinstance(v, kind) for v in found[name]), name
        assert found["request_rate"] == "inf", "nothing spaces the requests of a closed loop"
        assert (found["max_concurrency"], found["completed"], found["failed"]) == (3, 3, 0)
        assert found["duration"] == pytest.approx(0.7)
        assert found["output_throughput"] == pytest.approx(10)
        assert found["total_token_throughput"] == pytest.approx(307 / 0.7)
        assert found["ttfts"] == pytest.approx([0.5, 0.5, 0.5]), "seconds"
        assert found["itls"][0] == pytest.approx([0.03, 0.031, 0.039])
        assert found["mean_itl_ms"] == pytest.approx(37.5), "milliseconds"
        assert found["std_itl_ms"] == pytest.approx(math.sqrt((7.5**2 + 6.5**2 + 1.5**2 + 12.5**2) / 4))

    def test_percentile_with_too_few_samples_is_absent(self, tmp_path: Path) -> None:
        found = parse_only_file(vllm.render([files.make_measured_point(tmp_path)]))
        assert not [name for name in found if name.startswith(("p90_", "p95_", "p99_"))]

    def test_known_percentiles_are_those_of_the_record(self) -> None:
        m = files.make_served_point()
        assert m.record.serve
        found = parse_only_file(vllm.render([m]))
        assert found["p90_ttft_ms"] == m.record.serve.ttft_ms.p90
        assert "ttfts" not in found, "there are no samples"
        assert "std_ttft_ms" not in found, "a deviation needs samples"

    def test_open_loop_has_its_rate_and_no_concurrency(self, tmp_path: Path) -> None:
        point = files.make_point(changed={"arrival": "gamma", "request_rate": 2.5, "burstiness": 0.5})
        found = parse_only_file(vllm.render([files.make_measured_point(tmp_path, served_point=point)]))
        assert (found["request_rate"], found["burstiness"], found["max_concurrency"]) == (2.5, 0.5, None)

    def test_import_keeps_its_failed_requests_and_its_limit_of_an_open_loop(self, tmp_path: Path) -> None:
        """Samples of an import lack the request that failed. Its client had at most 2 of 4 requests in flight."""
        point = files.make_point(
            concurrency=2, backend="vllm", changed={"arrival": "gamma", "request_rate": 2.5, "requests": 4}
        )
        m = files.make_measured_point(tmp_path, served_point=point)
        serve = msgspec.structs.replace(m.record.serve, submitted=4, failed=1)
        m = MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, origin="vllm", serve=serve))
        found = parse_only_file(vllm.render([m]))
        assert (found["completed"], found["failed"], found["max_concurrency"]) == (3, 1, 2)

    def test_layout_is_metadata_with_option_names_of_vllm(self) -> None:
        """The layout tp8·dp2·dcp2 is vLLM's tensor parallel 4 in each of 2 replicas. Metadata are strings."""
        m = files.make_served_point()
        point = msgspec.structs.replace(m.record.point, tp=8, dp=2, dcp=2)
        found = parse_only_file(
            vllm.render([MeasuredPoint("run", m.folder, msgspec.structs.replace(m.record, point=point))])
        )
        assert found["tensor_parallel_size"] == "4"
        assert found["data_parallel_size"] == "2"
        assert found["decode_context_parallel_size"] == "2"

    @pytest.mark.parametrize(
        ("ep", "in_vllm", "ranks"), [("1", "False", 1), ("tp", "True", 4), ("unknown", None, None)]
    )
    def test_expert_placement_has_the_field_of_each_tool(self, ep: str, in_vllm: str | None, ranks: int | None) -> None:
        """The layout has 4 ranks; if an import does not state the placement, neither does its export."""
        m = files.make_served_point()
        record = msgspec.structs.replace(m.record, point=msgspec.structs.replace(m.record.point, ep=ep))
        placed = MeasuredPoint("run", m.folder, record)
        assert parse_only_file(vllm.render([placed])).get("enable_expert_parallel") == in_vllm
        assert parse_only_file(sglang.render([placed]))["server_info"].get("ep_size") == ranks
        (row,) = parse_only_file(inferencex.render([placed]))
        assert row["ep"] == ranks

    def test_speculative_decoding_has_the_field_of_each_tool(self) -> None:
        """Drafts are of the point, of a server's counters, or of an import's settings."""
        m = files.make_served_point()
        assert m.record.serve
        drafts = SpeculationMetrics(draft_tokens=3, tokens_per_step=2.2)
        for settings, mtp, found, method in (
            ("", 0, None, "none"),
            ("", 3, drafts, "mtp"),
            ("", 0, drafts, "unknown"),
            ("gpu=x, spec=eagle", 0, None, "eagle"),
        ):
            point = msgspec.structs.replace(m.record.point, settings=settings, mtp=mtp)
            serve = msgspec.structs.replace(m.record.serve, speculation=found)
            one = MeasuredPoint("run", m.folder, msgspec.structs.replace(m.record, point=point, serve=serve))
            (row,) = parse_only_file(inferencex.render([one]))
            assert row["spec_decoding"] == method
            assert parse_only_file(sglang.render([one]))["accept_length"] == (2.2 if found else None)

    def test_goodput_is_exported_only_for_objectives_of_vllm(self, tmp_path: Path) -> None:
        """Goodput of vLLM can bound TTFT, TPOT and E2EL, and not ITL."""
        found = parse_only_file(vllm.render([files.make_measured_point(tmp_path, slo={"ttft": 600.0, "e2el": 560.0})]))
        assert found["request_goodput"] == pytest.approx(2 / 0.7), "two of three end within 560 ms"
        assert found["goodput"] == "ttft:600 e2el:560"
        found = parse_only_file(vllm.render([files.make_measured_point(tmp_path, slo={"itl": 60.0})]))
        assert found["request_goodput"] is None

    def test_cut_off_requests_have_an_error_and_no_output(self, tmp_path: Path) -> None:
        """The tokens of a failed request are in no sum of vLLM, though they are in ours."""
        m = files.make_measured_point(tmp_path)
        assert m.record.serve
        path = tmp_path / m.record.serve.samples_file
        rows = samples.read_samples(path)
        for outcome, reason, error in (
            ("failed", "HTTP 503", "failed: HTTP 503"),
            ("cancelled", None, "cut off when the run ended"),
        ):
            cut = [rows[0], rows[1], dataclasses.replace(rows[2], outcome=outcome, reason=reason, end_s=None)]
            samples.write_samples(tmp_path, m.record.point, cut)
            found = parse_only_file(vllm.render([m]))
            assert found["errors"] == ["", "", error]
        assert found["output_lens"] == [4, 2, 0]
        assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 1, 6)

    def test_point_with_cut_off_requests_and_no_samples_is_left_out(self) -> None:
        cut = files.make_served_point(until_s=2.0)
        rendered = vllm.render([cut])
        assert not rendered.files
        assert list(rendered.left_out) == [
            "with requests cut off, and without samples that say which tokens were theirs"
        ]

    def test_replays_and_cpu_runs_are_marked_in_backend_or_label(self) -> None:
        assert parse_only_file(vllm.render([files.make_replayed_point()]))["backend"] == "dcpbench-replay"
        assert parse_only_file(vllm.render([files.make_cpu_point()]))["label"] == "dcpbench-functional"
        assert parse_only_file(vllm.render([files.make_served_point()]))["backend"] == "dcpbench"

    def test_each_point_has_its_own_file(self) -> None:
        m = files.make_served_point()
        other = MeasuredPoint("run", m.folder, build.make_served_record(build.make_point(TP)))
        assert len(vllm.render([m, other, files.make_replayed_point()]).files) == 3

    def test_samples_outside_the_run_are_not_read(self, tmp_path: Path) -> None:
        m = files.make_measured_point(tmp_path)
        assert m.record.serve
        away = msgspec.structs.replace(m.record.serve, samples_file="../../etc/passwd")
        with pytest.raises(RecordsError, match="outside its folder"):
            vllm.render([MeasuredPoint("run", tmp_path, msgspec.structs.replace(m.record, serve=away))])

    @pytest.mark.parametrize("name", ["\0", "a" * 300], ids=["null", "long"])
    def test_samples_with_an_invalid_file_name_are_ignored(self, tmp_path: Path, name: str) -> None:
        m = files.make_measured_point(tmp_path)
        assert m.record.serve
        odd = msgspec.structs.replace(m.record.serve, samples_file=name)
        (data,) = vllm.render(
            [MeasuredPoint("run", tmp_path, msgspec.structs.replace(m.record, serve=odd))]
        ).files.values()
        assert "itls" not in json.loads(data)


class TestSglang:
    def test_line_has_the_fields_of_a_detailed_line(self, tmp_path: Path) -> None:
        """On average (0.6 + 0.55 + 0.5) s / 0.7 s = 2.357 requests are in flight."""
        rendered = sglang.render([files.make_measured_point(tmp_path), files.make_served_point()])
        (data,) = rendered.files.values()
        lines = data.decode().splitlines()
        assert len(lines) == 2, "one line each"
        found = json.loads(lines[0])
        check_types(found, SGLANG_SUMMARY)
        assert found["concurrency"] == pytest.approx(1.65 / 0.7)
        assert found["request_rate"] == math.inf, "Infinity, as SGLang writes it"
        assert found["input_throughput"] == pytest.approx(300 / 0.7)
        assert found["random_input_len"] == 100
        assert found["random_output_len"] is None, "answers were of several lengths"
        assert found["itls"] == [pytest.approx([0.03, 0.031, 0.039]), pytest.approx([0.05]), []]

    def test_layout_has_the_argument_names_of_sglang(self) -> None:
        """In SGLang tp counts the GPUs of all replicas if dp is that of attention."""
        m = MeasuredPoint("run", files.NOWHERE, build.make_served_record(build.make_point(Layout(8, 2, 2))))
        (text,) = sglang.render([m]).files.values()
        found = json.loads(text)["server_info"]
        assert [found[f"{name}_size"] for name in ("tp", "dp", "dcp", "pp")] == [8, 2, 2, 1]
        assert found["enable_dp_attention"] is True

    def test_fixed_lengths_are_exported(self) -> None:
        found = parse_only_file(sglang.render([files.make_served_point()]))
        assert (found["random_input_len"], found["random_output_len"], found["random_range_ratio"]) == (400, 40, 1.0)


class TestInferencex:
    def test_row_has_rates_of_input_and_output_and_times_in_seconds(self) -> None:
        m = files.make_served_point()
        s = m.record.serve
        assert s
        (row,) = parse_only_file(inferencex.render([m]))
        check_types(row, INFERENCEX)
        assert row["tput_per_gpu"] == pytest.approx((s.input_tokens + s.output_tokens) / s.wall_s / 4)
        assert row["output_tput_per_gpu"] == pytest.approx(s.output_tok_s_per_gpu)
        assert row["tput_per_gpu"] == pytest.approx(row["input_tput_per_gpu"] + row["output_tput_per_gpu"])
        assert row["median_ttft"] == pytest.approx(s.ttft_ms.p50 / 1e3)
        assert row["median_intvty"] == pytest.approx(1000 / s.tpot_ms.p50)
        assert (row["hw"], row["isl"], row["osl"], row["dcp_size"], row["ep"]) == ("h200", 400, 40, 4, 4)
        assert not [name for name in row if name.endswith("_ms")]

    @pytest.mark.parametrize(
        "make",
        [files.make_replayed_point, files.make_cpu_point, files.make_decode_point],
        ids=["replay", "cpu", "decode"],
    )
    def test_points_not_measured_by_serving_on_gpus_are_left_out(self, make: Any) -> None:
        rendered = inferencex.render([make(), files.make_served_point()])
        assert len(parse_only_file(rendered)) == 1
        assert rendered.left_out.total() == 1

    def test_points_with_wrong_results_are_left_out(self) -> None:
        assert not inferencex.render([files.make_served_point(warnings=["graph_differs"])]).files

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({}, "without layout and hardware (import again with --tp N --gpu NAME)"),
            ({"tp": 8}, "without hardware (import again with --gpu NAME)"),
            ({"gpu": "h200"}, "without a layout, so that nothing is known per GPU (import again with --tp N)"),
        ],
        ids=["both", "gpu", "tp"],
    )
    def test_import_without_layout_or_hardware_is_left_out_with_missing_options(
        self, options: dict[str, Any], reason: str, tmp_path: Path
    ) -> None:
        assert inferencex.render([self.import_point(tmp_path, **options)]).left_out == {reason: 1}

    def test_rates_of_an_import_are_per_gpu_of_all_stages(self, tmp_path: Path) -> None:
        """375 + 8.75 tokens per second on tp 4 × pp 2 × pcp 2 GPUs."""
        (row,) = parse_only_file(inferencex.render([self.import_point(tmp_path, tp=4, pp=2, pcp=2, gpu="h200")]))
        assert (row["tp"], row["pp"], row["pcp_size"]) == (4, 2, 2)
        assert row["output_tput_per_gpu"] == pytest.approx(8.75 / 16)
        assert row["tput_per_gpu"] == pytest.approx(383.75 / 16)

    def import_point(self, tmp_path: Path, **options: Any) -> MeasuredPoint:
        """Return a result of vLLM with fixed lengths as an imported point."""
        result = files.remove_details(files.make_vllm_result()) | {"isl": "100", "osl": "2"}
        import_files([files.write_file(tmp_path, result)], "vllm", tmp_path / "run", Overrides(**options))
        (record,) = read_records(tmp_path / "run")
        return MeasuredPoint("run", tmp_path / "run", record)

    def test_open_loops_and_uneven_lengths_have_no_row(self, tmp_path: Path) -> None:
        point = files.make_point(changed={"arrival": "gamma", "request_rate": 2.5})
        rendered = inferencex.render(
            [files.make_measured_point(tmp_path, served_point=point), files.make_measured_point(tmp_path)]
        )
        assert not rendered.files
        assert rendered.left_out.total() == 2


class TestGha:
    def test_each_file_has_metrics_of_one_direction(self) -> None:
        rendered = gha.render([files.make_decode_point(), files.make_served_point()])
        smaller, bigger = (json.loads(rendered.files[gha.FILES[b]]) for b in ("lower", "higher"))
        for entries, words in ((smaller, ("_ms", "_us", "syncs")), (bigger, ("tok_s", "tokens", "goodput"))):
            assert any(word in e["name"] for e in entries for word in words)
            for entry in entries:
                assert set(entry) <= {"name", "unit", "value", "range", "extra"}
                check_types(entry, {"name": str, "unit": str, "extra": str})
                assert isinstance(entry["value"], int | float)
        assert not {e["name"] for e in smaller} & {e["name"] for e in bigger}
        assert not [e for e in smaller if "tok_s" in e["name"]]
        assert not [e for e in bigger if e["name"].endswith("_ms")]

    def test_names_are_unique_and_mark_replayed_and_functional_points(self) -> None:
        rendered = gha.render(
            [files.make_decode_point(), files.make_served_point(), files.make_replayed_point(), files.make_cpu_point()]
        )
        names = [e["name"] for data in rendered.files.values() for e in json.loads(data)]
        assert len(names) == len(set(names))
        assert any("[replay]" in name for name in names)
        assert any("[functional]" in name for name in names)

    def test_repeats_are_one_entry_with_their_range(self) -> None:
        """Medians 10 and 12 ms give 11 ± 1, although single intervals are narrower."""
        point = record_builder.make_point(DCP)
        again = msgspec.structs.replace(point, repeat=1)
        two = [
            MeasuredPoint("run", NOWHERE, record_builder.make_ok_record(repeat, median_ms=ms, noise=0.0))
            for repeat, ms in ((point, 10.0), (again, 12.0))
        ]
        entries = json.loads(gha.render(two).files[gha.FILES["lower"]])
        (step,) = [e for e in entries if e["name"].endswith(": step_ms")]
        assert step["value"] == pytest.approx(11)
        assert step["range"] == "± 1"


class TestBmf:
    def test_file_matches_the_schema_of_bencher(self) -> None:
        found = parse_only_file(
            bmf.render([files.make_decode_point(), files.make_served_point(), files.make_replayed_point()])
        )
        jsonschema.validate(found, BMF_SCHEMA)
        assert len(found) == 3
        for name, measures in found.items():
            assert 0 < len(name) <= 1024
            assert all(len(slug) <= 64 and slug == slug.lower() and "_" not in slug for slug in measures)

    def test_built_in_measures_with_other_units_are_not_used(self) -> None:
        """The built-in `latency` of Bencher is in ns, and its `throughput` in operations per second."""
        (measures,) = parse_only_file(bmf.render([files.make_decode_point()])).values()
        assert not {"latency", "throughput"} & set(measures)
        step = measures["step-ms"]
        assert step["lower_value"] <= step["value"] <= step["upper_value"]


class TestHud:
    def test_record_has_one_metric_and_extra_info_of_strings(self) -> None:
        found = parse_only_file(hud.render([files.make_decode_point()]))
        names = [r["metric"]["name"] for r in found]
        assert len(names) == len(set(names))
        for r in found:
            assert set(r) == {"benchmark", "model", "metric", "runners", "dependencies"}
            check_types(r["benchmark"], {"name": str, "mode": str, "dtype": str})
            check_types(r["model"], {"name": str, "type": str, "backend": str, "origins": list})
            assert all(isinstance(v, float | int) for v in r["metric"]["benchmark_values"])
            for part in ("benchmark", "model", "metric"):
                assert all(isinstance(v, str) for v in r[part]["extra_info"].values())
        assert found[0]["runners"][0]["gpu_info"] == "NVIDIA H200"
        assert found[0]["dependencies"]["torch"]["version"] == "2.9.0"

    @pytest.mark.parametrize(
        ("model", "architecture"),
        [
            ("kimi-k2", "mla-moe-decoder"),
            ("deepseek-ai/DeepSeek-V3", "mla-moe-decoder"),
            ("llama-3.1-8b", "gqa-dense-decoder"),
            ("qwen3-30b-a3b", "gqa-moe-decoder"),
            ("org/model", "decoder"),
        ],
    )
    def test_type_of_a_model_is_its_architecture(self, model: str, architecture: str) -> None:
        m = files.make_decode_point()
        point = msgspec.structs.replace(m.record.point, model=model)
        (first, *_) = parse_only_file(
            hud.render([MeasuredPoint(m.run, m.folder, msgspec.structs.replace(m.record, point=point))])
        )
        assert first["model"]["type"] == architecture

    def test_repeats_are_values_of_one_record(self) -> None:
        point = record_builder.make_point(DCP)
        two = [
            MeasuredPoint("run", NOWHERE, record_builder.make_ok_record(msgspec.structs.replace(point, repeat=i)))
            for i in (0, 1)
        ]
        found = parse_only_file(hud.render(two))
        (rate,) = [r for r in found if r["metric"]["name"] == "output_tok_s"]
        assert len(rate["metric"]["benchmark_values"]) == 2

    @pytest.mark.parametrize("make", [files.make_replayed_point, files.make_cpu_point], ids=["replay", "cpu"])
    def test_replays_and_functional_runs_are_not_exported_to_hud(self, make: Any) -> None:
        assert not hud.render([make()]).files


def test_digest_has_twelve_hexadecimal_digits() -> None:
    """The digits are the first of SHA-256, also for text that is invalid in UTF-8."""
    assert compute_digest("a") == "ca978112ca1b"
    assert len(compute_digest("\ud800")) == 12
