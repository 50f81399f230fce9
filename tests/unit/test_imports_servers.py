"""Imports: servers and GPUs of results, and results that cannot be read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.errors import RecordsError, UsageError
from dcpbench.imports import Overrides, import_files
from dcpbench.records.file import read_records
from dcpbench.reports import dataframes, sections
from tests.unit import engine_files_builder as files

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.imports import Imported
    from dcpbench.records.record import Record, ServeMetrics

POD = {"model_path": "org/model", "tp_size": 4, "pp_size": 1, "dp_size": 1, "ep_size": 1, "enable_dp_attention": False}
"""Information of one server behind SGLang's router."""
PREFILL, DECODE = POD | {"disaggregation_mode": "prefill"}, POD | {"disaggregation_mode": "decode"}


def summary(**changes: Any) -> dict[str, Any]:
    """Return a result of vLLM without the times of its requests."""
    return files.remove_details(files.make_vllm_result()) | changes


def folder(tmp_path: Path, **contents: dict[str, Any] | str) -> Path:
    """Return a folder of JSON files with these contents, by the stem of their names."""
    path = tmp_path / "results"
    path.mkdir(parents=True, exist_ok=True)
    for stem, content in contents.items():
        (path / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def run(tmp_path: Path, path: Path, engine: str, **options: Any) -> tuple[Imported, list[Record]]:
    """Import a path; return the outcome and the records."""
    done = import_files([path], engine, tmp_path / "run", Overrides(**options), force=True)
    return done, read_records(tmp_path / "run")


def one(tmp_path: Path, engine: str, result: dict[str, Any], **options: Any) -> tuple[Record, ServeMetrics]:
    """Return the record of a result, and its metrics."""
    _, (record,) = run(tmp_path, files.write_file(tmp_path, result), engine, **options)
    assert record.serve
    return record, record.serve


def collect_settings(records: list[Record]) -> set[tuple[str, str]]:
    """Return the layout and the settings of each record."""
    return {(record.point.layout_name, record.point.settings) for record in records}


class TestGpus:
    """Every pipeline stage and every prefill-context-parallel rank has GPUs of its own."""

    @pytest.mark.parametrize(("options", "metadata"), [({"gpu": "cpu"}, {}), ({}, {"gpu": "cpu"})])
    def test_server_on_a_cpu_is_a_functional_run(
        self, tmp_path: Path, options: dict[str, str], metadata: dict[str, str]
    ) -> None:
        record, _ = one(tmp_path, "vllm", files.make_vllm_result(**metadata), **options)
        assert record.environment is not None
        assert (record.environment.device, "cpu" in record.warnings) == ("CPU", True)

    @pytest.mark.parametrize(
        ("degrees", "name", "gpus"),
        [
            ({"pipeline_parallel_size": "2"}, "tp4·pp2", 8),
            ({"prefill_context_parallel_size": "2"}, "tp4·pcp2", 8),
            ({"pp": "2", "pcp": "2", "data_parallel_size": "2"}, "tp8·dp2·pp2·pcp2", 32),
        ],
        ids=["pp", "pcp", "all"],
    )
    def test_degrees_are_read_from_vllm_metadata(
        self, degrees: dict[str, str], name: str, gpus: int, tmp_path: Path
    ) -> None:
        """The result has 80 output tokens/s."""
        result = summary(tensor_parallel_size="4", total_output_tokens=64, gpu="h200", **degrees)
        record, found = one(tmp_path, "vllm", result)
        assert (record.point.layout_name, record.point.gpus) == (name, gpus)
        assert found.output_tok_s_per_gpu == pytest.approx(80 / gpus)
        assert record.environment
        assert record.environment.device_count == gpus

    @pytest.mark.parametrize(("spread", "gpus"), [(True, 8), (False, 16)], ids=["dp-inside", "dp-copies"])
    def test_pipeline_stages_are_read_from_sglang_server_info(self, spread: bool, gpus: int, tmp_path: Path) -> None:
        server = {"model_path": "m", "tp_size": 4, "pp_size": 2, "dp_size": 2, "enable_dp_attention": spread}
        record, found = one(tmp_path, "sglang", files.make_sglang_result(server_info=server))
        assert (record.point.pp, record.point.gpus) == (2, gpus)
        assert found.output_tok_s_per_gpu == pytest.approx(7 / 0.8 / gpus)

    def test_inferencex_rates_are_per_gpu(self, tmp_path: Path) -> None:
        """Each of tp 4 × pp 2 × pcp 2 = 16 GPUs has 100 output tokens/s."""
        record, found = one(tmp_path, "inferencex", files.make_inferencex_row(tp=4, pp=2, pcp_size=2))
        assert (record.point.layout_name, record.point.gpus) == ("tp4·pp2·pcp2", 16)
        assert (found.output_tok_s, found.output_tok_s_per_gpu) == (1600.0, 100.0)

    def test_expert_parallelism_includes_prefill_context_parallel_ranks(self, tmp_path: Path) -> None:
        degrees = {"tensor_parallel_size": "4", "prefill_context_parallel_size": "2"}
        record, _ = one(tmp_path, "vllm", summary(enable_expert_parallel="True", **degrees))
        assert record.point.ep == "8"

    def test_degrees_are_read_from_options_and_names(self, tmp_path: Path) -> None:
        record, _ = one(tmp_path, "vllm", summary(), tp=4, pp=2, pcp=2)
        assert record.point.gpus == 16
        done, (named,) = run(tmp_path, folder(tmp_path, glm_tp4_pp2_conc3=summary()), "vllm")
        assert named.point.layout_name == "tp4·pp2"
        assert "Read from names of files and folders: tp4·pp2 (1 of 1)." in done.notes

    def test_option_does_not_remove_a_degree_of_the_file(self, tmp_path: Path) -> None:
        result = summary(tensor_parallel_size="4", pipeline_parallel_size="2")
        record, _ = one(tmp_path, "vllm", result, tp=4)
        assert record.point.gpus == 8
        with pytest.raises(UsageError, match=r"has tp 4, dp 1, dcp 1, pp 2; leave --tp, --pp out"):
            one(tmp_path, "vllm", result, tp=4, pp=4)

    def test_degree_options_are_refused_for_inferencex(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"has tp 8, dp 1, dcp 1; leave --tp, --pp out"):
            one(tmp_path, "inferencex", files.make_inferencex_row(), tp=8, pp=2)

    @pytest.mark.parametrize("options", [{"pp": 2}, {"tp": 4, "pp": 0}, {"tp": 4, "pcp": 1 << 20}], ids=str)
    def test_invalid_degree_options_are_refused(self, options: dict[str, int], tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"^--(pp|pcp) (without --tp|0 is not|1048576 is not)"):
            one(tmp_path, "vllm", summary(), **options)

    def test_degrees_above_the_limit_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="has pp 100,000, more ranks than a layout can have"):
            one(tmp_path, "vllm", summary(tp="4", pp="100000"))


class TestServers:
    """Results of different servers are never merged without a note."""

    def test_degrees_in_names_distinguish_servers_of_an_unknown_layout(self, tmp_path: Path) -> None:
        """`model_dcp1_conc8.json` and `model_dcp8_conc8.json` have 80 and 160 output tokens/s."""
        slow = summary(max_concurrency=8, total_output_tokens=64)
        fast = slow | {"duration": 0.4}
        path = folder(tmp_path, model_dcp1_conc8=slow, model_dcp8_conc8=fast)
        _, records = run(tmp_path, path, "vllm")
        assert collect_settings(records) == {("layout unknown", "dcp=1"), ("layout unknown", "dcp=8")}
        assert [r.serve.output_tok_s for r in records if r.serve] == [pytest.approx(80), pytest.approx(160)]
        _, records = run(tmp_path, path, "vllm", tp=8)
        assert collect_settings(records) == {("tp8", ""), ("tp8·dcp8", "")}

    def test_layout_in_a_name_follows_its_convention(self, tmp_path: Path) -> None:
        """Experts are over 8 GPUs with attention data parallelism (`dep8`), with tensor parallelism (`tep8`), and in
        InferenceX's own names.
        """
        own = "dsr1_1k1k_fp8_sglang_tp8-pp1-dcp1-pcp1-ep8-dpa{}_disagg-false_spec-none_conc64_h200-1"
        for dep, tep in (("m_dep8_c3", "m_tep8_c3"), (own.format("true"), own.format("false"))):
            _, records = run(tmp_path, folder(tmp_path / dep, **{dep: summary(), tep: summary()}), "vllm")
            assert collect_settings(records) == {("tp8·dp8·ep8", ""), ("tp8", "")}
            assert {record.point.ep for record in records} == {"8"}

    def test_name_of_several_instances_gives_no_number_of_gpus(self, tmp_path: Path) -> None:
        for name in ("m_1p2d_tp8_conc3", "m_tp8_disagg-true_conc3"):
            _, (record,) = run(tmp_path, folder(tmp_path / name, **{name: summary()}), "vllm")
            assert record.point.gpus == 0

    def test_different_names_are_points_and_numbered_names_are_repeats(self, tmp_path: Path) -> None:
        path = folder(tmp_path, glm_eager_conc3=summary(), glm_graphs_conc3=summary())
        done, records = run(tmp_path, path, "vllm")
        assert collect_settings(records) == {("layout unknown", "name=eager"), ("layout unknown", "name=graphs")}
        assert not any("repeats" in note for note in done.notes)
        path = folder(tmp_path / "again", glm_run1_conc3=summary(), glm_run2_conc3=summary())
        done, records = run(tmp_path, path, "vllm")
        assert [record.point.repeat for record in records] == [0, 1]
        names = ", ".join(str(path / f"glm_run{n}_conc3.json") for n in (1, 2))
        assert any(f"are repeats of 1 point, as nothing distinguishes their servers: {names}." in n for n in done.notes)

    def test_host_in_names_does_not_split_a_curve(self, tmp_path: Path) -> None:
        contents = {f"m_conc{n}_host-{'ab'[n % 2]}": summary(max_concurrency=n) for n in (1, 2, 3, 4)}
        _, records = run(tmp_path, folder(tmp_path, **contents), "vllm")
        assert collect_settings(records) == {("layout unknown", "")}

    @pytest.mark.parametrize(
        ("metadata", "shown"),
        [
            ({"decode_context_parallel_size": ("1", "8")}, "decode_context_parallel_size"),
            ({"backend": ("vllm", "openai-chat")}, "backend"),
            ({"label": ("a", "b")}, "label"),
        ],
        ids=["degree-without-tp", "api", "label"],
    )
    def test_vllm_metadata_distinguish_servers(
        self, metadata: dict[str, tuple[str, str]], shown: str, tmp_path: Path
    ) -> None:
        ((name, values),) = metadata.items()
        path = files.write_file(tmp_path, *(summary(**{name: value}) for value in values))
        _, records = run(tmp_path, path, "vllm")
        assert {record.point.settings for record in records} == {f"{shown}={value}" for value in values}

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("attention_backend", ("fa3", "flashmla")),
            ("chunked_prefill_size", (4096, 8192)),
            ("version", ("0.5.5", "0.5.6")),
        ],
    )
    def test_sglang_server_arguments_distinguish_servers(
        self, name: str, values: tuple[Any, Any], tmp_path: Path
    ) -> None:
        results = [files.make_sglang_result(server_info=POD | {name: value, "random_seed": value}) for value in values]
        _, records = run(tmp_path, files.write_file(tmp_path, *map(files.remove_details, results)), "sglang")
        assert {record.point.settings for record in records} == {f"{name}={value}" for value in values}

    def test_backends_of_the_sglang_benchmark_are_different_points(self, tmp_path: Path) -> None:
        results = [files.remove_details(files.make_sglang_result(backend=name)) for name in ("sglang", "vllm")]
        _, records = run(tmp_path, files.write_file(tmp_path, *results), "sglang")
        assert {record.point.settings for record in records} == {"backend=sglang", "backend=vllm"}

    def test_inferencex_images_distinguish_servers(self, tmp_path: Path) -> None:
        rows = [files.make_inferencex_row(image=image) for image in ("vllm:v0.11", "vllm:v0.12")]
        _, records = run(tmp_path, files.write_file(tmp_path, *rows), "inferencex")
        assert {record.point.settings for record in records} == {"image=vllm:v0.11", "image=vllm:v0.12"}

    def test_ramp_up_rates_distinguish_loads(self, tmp_path: Path) -> None:
        ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "request_rate": "inf"}
        results = [summary(ramp_up_end_rps=end, **ramp) for end in (4, 8)]
        _, records = run(tmp_path, files.write_file(tmp_path, *results), "vllm")
        assert [r.point.load.trace for r in records if r.point.load] == ["ramp-up linear 1-4", "ramp-up linear 1-8"]


class TestTags:
    """Tags that contain the load do not distinguish servers."""

    @pytest.mark.parametrize("form", ["tp8_c{}", "{}clients", "conc={}", "concurrency-{}-run{}"])
    def test_loads_measured_twice_are_one_curve(self, form: str, tmp_path: Path) -> None:
        results = [
            files.remove_details(files.make_sglang_result(max_concurrency=n, tag=form.format(n, i)))
            for i in (1, 2)
            for n in (4, 16)
        ]
        _, records = run(tmp_path, files.write_file(tmp_path, *results), "sglang")
        assert collect_settings(records) == {("tp8", "")}
        assert [(r.point.concurrency, r.point.repeat) for r in records] == [(4, 0), (16, 0), (4, 1), (16, 1)]

    def test_servers_in_tags_are_curves_without_the_load(self, tmp_path: Path) -> None:
        results = [
            files.remove_details(files.make_sglang_result(max_concurrency=n, tag=f"{server}-c{n}"))
            for server in ("eager", "graphs")
            for n in (4, 16)
        ]
        _, records = run(tmp_path, files.write_file(tmp_path, *results), "sglang")
        assert collect_settings(records) == {("tp8", "tag=eager"), ("tp8", "tag=graphs")}

    def test_number_that_is_not_the_load_is_kept(self, tmp_path: Path) -> None:
        """With 4 clients, `c8` is not the load."""
        results = [files.remove_details(files.make_sglang_result(max_concurrency=4, tag=tag)) for tag in ("c8", "c16")]
        _, records = run(tmp_path, files.write_file(tmp_path, *results), "sglang")
        assert collect_settings(records) == {("tp8", "tag=c8"), ("tp8", "tag=c16")}


class TestChunks:
    """Stream chunks with several tokens, of which ITL is the gap between chunks."""

    def test_inferencex_row_with_stream_interval_10_uses_tpot(self, tmp_path: Path) -> None:
        """The row's own median_intvty is 1000 / 13.1 ms = 76.3; gaps of chunks would give 7.9."""
        times = {"mean_tpot": 0.0131, "median_tpot": 0.0131, "p99_tpot": 0.01965}
        times |= {"mean_itl": 0.126, "median_itl": 0.126, "p99_itl": 0.189}
        record, found = one(tmp_path, "inferencex", files.make_inferencex_row(**times))
        assert record.warnings == ["summary_only", "chunk_gaps"]
        assert found.tok_s_per_user == pytest.approx(76.33587786)
        assert record.detail["tokens_per_chunk"] == "9.62"

    def test_vllm_summary_without_speculative_fields_uses_tpot(self, tmp_path: Path) -> None:
        """ITL 25 ms and TPOT 10 ms are 2.5 tokens per chunk, and 100 tok/s instead of 40."""
        times = {"mean_itl_ms": 25.0, "median_itl_ms": 25.0, "p99_itl_ms": 30.0}
        times |= {"mean_tpot_ms": 10.0, "median_tpot_ms": 10.0, "p99_tpot_ms": 12.0}
        record, found = one(tmp_path, "vllm", summary(**times))
        assert "chunk_gaps" in record.warnings
        assert found.tok_s_per_user == pytest.approx(100)
        assert record.detail["tokens_per_chunk"] == "2.5"

    def test_token_sums_reveal_chunks_if_lengths_differ(self, tmp_path: Path) -> None:
        """30 tokens after the first of 3 requests in 100 ms each take 10 ms per token, so gaps of 20 ms have 2 tokens.
        The mean TPOT is 20 ms as well, as a short answer was slow.
        """
        times = {"mean_e2e_latency_ms": 600.0, "median_e2e_latency_ms": 600.0}
        times |= {"mean_itl_ms": 20.0, "median_itl_ms": 20.0, "mean_tpot_ms": 20.0, "median_tpot_ms": 11.0}
        plain = files.remove_details(
            files.make_sglang_result(
                total_output_tokens=33, p90_e2e_latency_ms=600.0, p99_e2e_latency_ms=600.0, **times
            )
        )
        record, found = one(tmp_path, "sglang", plain)
        assert "chunk_gaps" in record.warnings
        assert record.detail["tokens_per_chunk"] == "2"
        assert found.tok_s_per_user == pytest.approx(1000 / 11)

    @pytest.mark.parametrize("engine", ["vllm", "sglang", "inferencex"])
    def test_one_token_per_chunk_is_not_marked(self, engine: str, tmp_path: Path) -> None:
        result = files.MAKERS[engine]()
        record, found = one(tmp_path, engine, files.remove_details(result))
        assert "chunk_gaps" not in record.warnings
        assert found.tpot_ms.p50 is not None
        assert found.tok_s_per_user == pytest.approx(1000 / found.tpot_ms.p50)

    def test_report_defines_the_speed_of_a_user_by_tpot(self, tmp_path: Path) -> None:
        one(tmp_path, "inferencex", files.make_inferencex_row())
        text = str(sections.build_sections(dataframes.load_frames([tmp_path / "run"]), []))
        assert "1000 / median TPOT in ms" in text

    @pytest.mark.parametrize(("pp", "named"), [(1, False), (2, True)])
    def test_report_defines_the_gpus_of_imports(self, pp: int, named: bool, tmp_path: Path) -> None:
        one(tmp_path, "vllm", summary(), tp=4, pp=pp)
        text = str(sections.build_sections(dataframes.load_frames([tmp_path / "run"]), []))
        assert ("of an import / all GPUs: tp × pp × pcp" in text) is named


class TestOnlyLengths:
    """InferenceX's benchmark saves lists of lengths without the times of requests."""

    def test_lists_of_lengths_are_imported_as_a_summary(self, tmp_path: Path) -> None:
        result = summary(input_lens=[100, 100, 100], output_lens=[4, 4, 4], total_output_tokens=12)
        result |= {"benchmark_start_time_unix": 1.0, "benchmark_end_time_unix": 2.0}
        done, (record,) = run(tmp_path, files.write_file(tmp_path, result), "vllm")
        assert record.warnings == ["summary_only"]
        assert record.point.load
        assert (record.point.load.input_tokens, record.point.load.output_tokens) == ("100", "4")
        assert not any("Not read" in note for note in done.notes)

    def test_lengths_of_failed_requests_do_not_count(self, tmp_path: Path) -> None:
        result = summary(input_lens=[100, 7, 100], output_lens=[4, 0, 4], completed=2, failed=1, total_output_tokens=8)
        _, (record,) = run(tmp_path, files.write_file(tmp_path, result), "vllm")
        assert record.point.load
        assert (record.point.load.input_tokens, record.point.load.output_tokens) == ("100", "4")

    def test_lists_that_are_not_lengths_are_refused(self, tmp_path: Path) -> None:
        for lens in ([100], ["a", "b", "c"], [-1, 1, 1]):
            with pytest.raises(RecordsError, match="input_lens"):
                one(tmp_path, "vllm", summary(input_lens=lens, output_lens=[4, 4, 4]))

    def test_result_with_only_lengths_is_imported_with_others(self, tmp_path: Path) -> None:
        lens = summary(input_lens=[100] * 3, output_lens=[4] * 3)
        _, records = run(
            tmp_path, folder(tmp_path, a_conc3=files.make_vllm_result(), b_conc4=lens | {"max_concurrency": 4}), "vllm"
        )
        assert len(records) == 2


class TestRouter:
    """SGLang behind a router for disaggregated prefill and decode has information of each server, by kind."""

    def make_result(self, prefill: list[Any], decode: list[Any]) -> dict[str, Any]:
        return files.make_sglang_result(server_info={"internal_states": [{}], "prefill": prefill, "decode": decode})

    def test_gpus_of_prefill_and_decode_servers_are_added(self, tmp_path: Path) -> None:
        """One prefill and two decode servers have 4 GPUs each."""
        record, found = one(tmp_path, "sglang", self.make_result([PREFILL], [DECODE, DECODE]), gpu="h200")
        point = record.point
        assert (point.model, point.layout_name, point.gpus) == ("org/model", "tp4 1P2D", 12)
        assert found.output_tok_s_per_gpu == pytest.approx(7 / 0.8 / 12)
        assert record.environment
        assert record.environment.device_count == 12

    def test_prefill_servers_may_have_another_layout(self, tmp_path: Path) -> None:
        """Two prefill servers have 8 GPUs with attention data parallelism, a decode server 4."""
        spread = PREFILL | {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
        record, _ = one(tmp_path, "sglang", self.make_result([spread, spread], [DECODE]))
        point = record.point
        assert (point.layout_name, point.settings, point.gpus) == ("tp4 2P1D", "prefill=tp8·dp8", 20)

    def test_different_layouts_of_one_kind_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="the decode servers have different layouts"):
            one(tmp_path, "sglang", self.make_result([PREFILL], [DECODE, DECODE | {"tp_size": 8}]))

    def test_more_servers_than_a_point_can_hold_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="257 servers; a point has at most 256"):
            one(tmp_path, "sglang", self.make_result([PREFILL], [DECODE] * 256))

    @pytest.mark.parametrize("server", [DECODE, {"decode": [DECODE]}, {"prefill": [], "decode": [DECODE]}], ids=str)
    def test_info_of_one_disaggregated_server_gives_no_number_of_gpus(
        self, server: dict[str, Any], tmp_path: Path
    ) -> None:
        record, found = one(tmp_path, "sglang", files.make_sglang_result(server_info=server))
        assert (record.point.model, record.point.gpus) == ("org/model", 0)
        assert record.point.settings == "disaggregation=decode"
        assert found.output_tok_s_per_gpu is None

    def test_servers_without_degrees_have_an_unknown_layout(self, tmp_path: Path) -> None:
        server = {"model_path": "org/model"}
        record, found = one(tmp_path, "sglang", self.make_result([server], [server]))
        assert (record.point.layout_name, record.point.gpus) == ("layout unknown 1P1D", 0)
        assert found.output_tok_s_per_gpu is None


class TestUnreadable:
    """A result in a folder that cannot be read is named and left out; the others are imported."""

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("", "is empty"),
            ('{"model_id": ', "is cut short"),
            (json.dumps(summary(duration=0.0)), "took no time"),
            (json.dumps(summary(duration=-1.0)), "duration is -1.0"),
            (json.dumps(summary(tp="4", dcp="3")), "has an impossible layout"),
            (json.dumps(files.make_vllm_result(ttfts=[0.5])), "differ in length"),
        ],
        ids=["empty", "cut", "no-time", "negative", "layout", "lists"],
    )
    def test_unreadable_file_is_named_and_others_are_imported(self, content: str, reason: str, tmp_path: Path) -> None:
        path = folder(tmp_path, a=summary(), bad=content, c=summary(max_concurrency=4))
        done, records = run(tmp_path, path, "vllm")
        assert [record.point.concurrency for record in records] == [3, 4]
        (error,) = done.errors
        assert reason in str(error)
        assert any(note.startswith(f"Left out: {path / 'bad.json'}") and reason in note for note in done.notes)

    def test_invalid_line_is_named_and_other_lines_are_imported(self, tmp_path: Path) -> None:
        path = folder(
            tmp_path, a=f"{json.dumps(files.make_sglang_result())}\n{json.dumps(files.make_sglang_result())[:-40]}\n"
        )
        done, records = run(tmp_path, path, "sglang")
        assert len(records) == 1
        assert [str(error).partition(" is")[0] for error in done.errors] == [f"{path / 'a.json'}, line 2"]

    def test_unreadable_file_given_by_name_raises_an_error(self, tmp_path: Path) -> None:
        path = folder(tmp_path, a=summary(), bad="")
        with pytest.raises(RecordsError, match=r"bad\.json is empty"):
            import_files([path / "a.json", path / "bad.json"], "vllm", tmp_path / "run", Overrides())

    @pytest.mark.parametrize(
        "contents", [{"a": ""}, {"a": json.dumps(summary(duration=0.0))}], ids=["empty", "no-time"]
    )
    def test_folder_with_only_an_unreadable_file_raises_an_error(
        self, contents: dict[str, str], tmp_path: Path
    ) -> None:
        with pytest.raises(RecordsError, match=r"a\.json"):
            run(tmp_path, folder(tmp_path, **contents), "vllm")
        assert not (tmp_path / "run").exists()

    def test_many_unreadable_files_are_counted(self, tmp_path: Path) -> None:
        done, _ = run(tmp_path, folder(tmp_path, a=summary(), **{f"bad{n}": "" for n in range(8)}), "vllm")
        assert len(done.errors) == 8
        assert done.notes[-1] == "Left out for similar reasons: 3 more."

    def test_multi_node_row_without_decode_gpus_is_left_out(self, tmp_path: Path) -> None:
        """process_result.py writes decode_tp and num_decode_gpu as 0 if there are only prefill GPUs."""
        row = {
            name: value
            for name, value in files.make_inferencex_row().items()
            if name not in ("tp", "pp", "ep", "dp_attention")
        }
        row |= {"is_multinode": True, "prefill_tp": 16, "decode_tp": 0, "num_prefill_gpu": 16, "num_decode_gpu": 0}
        path = tmp_path / "agg.json"
        path.write_text(json.dumps([files.make_inferencex_row(), row]))
        done, records = run(tmp_path, path, "inferencex")
        assert len(records) == 1
        assert any(note.startswith("Left out, no number of GPUs") and f"{path}, entry 2" in note for note in done.notes)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "inferencex"])
def test_percentile_of_50_is_the_median(engine: str, tmp_path: Path) -> None:
    """The result has --metric-percentiles 50,90,99 without the median, which newer versions always write."""
    name, unit = ("median_ttft", "") if engine == "inferencex" else ("median_ttft_ms", "_ms")
    result = files.remove_details(files.MAKERS[engine]())
    value = result.pop(name)
    done, (record,) = run(tmp_path, files.write_file(tmp_path, result | {f"p50_ttft{unit}": value}), engine)
    assert record.serve
    assert record.serve.ttft_ms.p50 == pytest.approx(500)
    assert not any("Not read" in note for note in done.notes)
