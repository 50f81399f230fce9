"""Reports over several engines: which is ahead at equal layout and load, and the gain of DCP inside each."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.errors import UsageError
from dcpbench.models import SHAPES
from dcpbench.points.layout import Layout
from dcpbench.points.memory import compute_weight_bytes, count_all_layers
from dcpbench.points.settings import Settings
from dcpbench.records.model_sizes import ModelSizes, read_model_sizes, shorten_shape
from dcpbench.records.record import EngineSettings, Environment, Gpu, Server, SyncSite
from dcpbench.reports import (
    answer,
    dataframes,
    engines,
    figures,
    overview,
    plots,
    points_export,
    render_terminal_table,
    stalls,
    sync_sites,
    tables,
)
from dcpbench.reports.page.points import build_page_data
from dcpbench.reports.style import Style
from dcpbench.servers import measure
from dcpbench.servers.client import Target
from dcpbench.servers.info import ServerInfo
from dcpbench.servers.prompt_format import PromptFormat
from dcpbench.show.terminal import make_console
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serving

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record
    from dcpbench.reports.dataframes import Frames

TP, DCP = Layout(2), Layout(2, 1, 2)
VLLM, SGLANG = "engine vllm 0.26.0", "engine sglang 0.5.17"
FOLDER = "/models/v3-8"
TYPED = Environment(device="H200", device_count=2, dcpbench="0.1.0")
"""Environment of a server, with the GPU as given by --gpu."""
CAPACITY = {TP: 9_857_792, DCP: 19_683_040}


def measure_own(layout: Layout, rate: float, concurrency: int = 8, **changes: Any) -> Record:
    """Return a point of dcpbench's engine with an output of `rate` tok/s."""
    point = serving.make_point(
        layout, concurrency, model=FOLDER, dtype="bf16", weights_dtype="fp8", ep="1", exchange="none"
    )
    serve = msgspec.structs.replace(serving.compute_metrics(point), output_tok_s=rate)
    v3 = shorten_shape(SHAPES["deepseek-v3"], 8)
    weights = compute_weight_bytes(v3, layout, 2, *count_all_layers(v3), weights=v3.published, ep="1")
    record = serving.make_served_record(point, serve=serve, started_at=f"{layout} {concurrency} {rate}")
    assert record.conditions is not None
    conditions = msgspec.structs.replace(record.conditions, layers=8, layers_held=8, full_weights_bytes_per_gpu=weights)
    return msgspec.structs.replace(record, **({"conditions": conditions, "gpu": None} | changes))


def measure_server(origin: str, layout: Layout, rate: float, concurrency: int = 8, **changes: Any) -> Record:
    """Return the same point on a real server, with few known fields."""
    own = measure_own(layout, rate, concurrency)
    unknown = {
        "backend": origin.split()[1],
        "dtype": "unknown",
        "weights_dtype": "",
        "ep": "unknown",
        "weights": "unknown",
    }
    assert own.point.load is not None
    load = msgspec.structs.replace(own.point.load, chunk=0, policy="unknown", prefix_cache=None, prefill="unknown")
    fields: dict[str, Any] = {
        "point": msgspec.structs.replace(own.point, load=load, **unknown, page_size=0, interleave=0),
        "origin": origin,
        "environment": TYPED,
        "kv": None,
        "conditions": None,
        "server": Server(engine=origin.split()[1], kv_capacity_tokens=CAPACITY[layout]),
        "started_at": f"{origin} {layout} {concurrency} {rate}",
    }
    return msgspec.structs.replace(own, **(fields | changes))


def read(tmp_path: Path, *runs: list[Record], **options: Any) -> Frames:
    return dataframes.load_frames(write(tmp_path, *runs), **options)


def write(tmp_path: Path, *runs: list[Record]) -> list[Path]:
    return [build.write_records(tmp_path / f"run-{n}", records) for n, records in enumerate(runs)]


OURS_RUN = [(TP, 556, 8), (DCP, 550, 8), (TP, 620, 32), (DCP, 613, 32)]


def make_study(**changes: Any) -> list[list[Record]]:
    """Return dcpbench in one run, vLLM's layouts in a run each, and SGLang's tp2·dcp2 in two launches."""
    return [
        [measure_own(*point, **changes) for point in OURS_RUN],
        [measure_server(VLLM, TP, 400, 8), measure_server(VLLM, TP, 516, 32)],
        [measure_server(VLLM, DCP, 389, 8), measure_server(VLLM, DCP, 507, 32)],
        [measure_server(SGLANG, TP, 459, 8), measure_server(SGLANG, DCP, 444, 8), measure_server(SGLANG, TP, 438, 32)],
        [measure_server(SGLANG, DCP, 447, 8), measure_server(SGLANG, DCP, 425, 32)],
    ]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return read(tmp_path_factory.mktemp("study"), *make_study())


class TestFirstLines:
    def test_answer_names_the_engine_ahead_and_its_lead(self, study: Frames) -> None:
        """556 / 400 = 1.39, 550 / 389 = 1.41, 620 / 516 = 1.20, 613 / 507 = 1.21; SGLang: 556 / 459, … 613 / 425 =
        1.44.
        """
        text = overview.format_answer(study)
        assert text.startswith(
            "On 2 × H200, dcpbench is ahead at equal layout and load, with 1.20–1.41 times the output of vLLM 0.26.0"
        )
        assert "and 1.21–1.44 times that of SGLang 0.5.17, at all 4 points compared" in text
        assert "(tp2 and tp2·dcp2, 8–32 requests of 400 tokens)" in text

    def test_answer_has_cost_and_kv_capacity_of_dcp_in_each_engine(self, study: Frames) -> None:
        """389 / 400 = 0.97 and 507 / 516 = 0.98, from two runs; 445.5 / 459 and 425 / 438 are 0.97."""
        text = overview.format_answer(study)
        assert (
            "Inside each engine, tp2·dcp2 gives 0.99 times (dcpbench, not distinguishable), 0.97–0.98 times (vLLM 0.26.0) and "
            "0.97 times (SGLang 0.5.17) the output of tp2, under the same conditions"
        ) in text
        assert (
            "it holds 2.00 (dcpbench), 2.00 (vLLM 0.26.0) and 2.00 (SGLang 0.5.17) times the KV tokens of tp2" in text
        )

    def test_answer_states_launches_and_claims_nothing_as_clear(self, study: Frames) -> None:
        text = overview.format_answer(study)
        assert ", in one launch each (SGLang 0.5.17: 2 launches at 1 of 4 points)" in text
        assert "clear" not in text
        several = engines.compare_engines(study).rows.assign(launches=3)
        assert engines.format_launches(several) == "in 3 launches each"

    def test_show_and_json_begin_with_the_answer(self, study: Frames, tmp_path: Path) -> None:
        assert answer.format_top_sentences(study)[0] == overview.format_answer(study)
        assert json.loads(points_export.format_json(study))["findings"][0] == overview.format_answer(study)
        console = make_console()
        with console.capture() as shown:
            console.print(render_terminal_table(write(tmp_path, *make_study())), width=2000)
        lines = [line for line in shown.get().splitlines() if line.startswith("•")]
        assert lines[0].startswith("• On 2 × H200, dcpbench is ahead")

    def test_power_limit_and_unknown_clocks_are_in_the_first_sentence(self, tmp_path: Path) -> None:
        gpu = Gpu(sm_clock_mhz_min=1350, sm_clock_mhz_max=1980, throttle_reasons=["sw_power_cap"])
        (first, *_) = overview.format_answer(read(tmp_path, *make_study(gpu=gpu, warnings=["throttled"]))).split(". ")
        assert first.endswith(
            "; the clocks of dcpbench were limited by power, and those of vLLM 0.26.0 and SGLang 0.5.17 were not recorded"
        )

    def test_points_of_each_engine_ahead_are_counted_without_a_winner(self, tmp_path: Path) -> None:
        """vLLM is 10 % ahead at 8 clients, dcpbench by 20 % at 32, and none by more than 2 % at 64."""
        rates = {8: (500, 550), 32: (600, 500), 64: (700, 703)}
        runs = [
            [measure_own(TP, own, n) for n, (own, _) in rates.items()],
            [measure_server(VLLM, TP, other, n) for n, (_, other) in rates.items()],
        ]
        text = overview.format_answer(read(tmp_path, *runs))
        assert "no engine is ahead at every equal layout and load: of 3 points, " in text
        for part in ("vLLM 0.26.0 is ahead at 1", "none is by more than 2 % at 1", "dcpbench is ahead at 1"):
            assert part in text
        assert "output over that of vLLM 0.26.0: 0.91–1.20 times (dcpbench)" in text
        assert text.endswith("so nothing here says what DCP gains or costs.")

    def test_no_verdict_without_a_shared_point(self, tmp_path: Path) -> None:
        text = overview.format_answer(read(tmp_path, [measure_own(TP, 500, 8)], [measure_server(VLLM, TP, 500, 32)]))
        assert text.startswith(
            "No layout was measured under one load on two of dcpbench and vLLM 0.26.0, so nothing here says"
        )
        assert text.count("is ahead") == 1, "only in the open question"


class TestComparedPoints:
    def test_other_lengths_are_not_compared(self, tmp_path: Path) -> None:
        other = measure_server(VLLM, TP, 400)
        assert other.point.load is not None
        load = msgspec.structs.replace(other.point.load, output_tokens="41")
        other = msgspec.structs.replace(other, point=msgspec.structs.replace(other.point, load=load))
        assert engines.compare_engines(read(tmp_path, [measure_own(TP, 500)], [other])).rows.empty

    def test_other_hardware_is_not_compared(self, tmp_path: Path) -> None:
        h100 = msgspec.structs.replace(TYPED, device="H100")
        report = read(tmp_path, [measure_own(TP, 500)], [measure_server(VLLM, TP, 400, environment=h100)])
        assert engines.compare_engines(report).rows.empty

    @pytest.mark.parametrize(
        ("settings", "compared"),
        [
            ({"weights_dtype": "fp8", "kv_dtype": "bfloat16"}, 2),
            ({"weights_dtype": "fp8"}, 2),
            ({"weights_dtype": "fp8", "kv_dtype": "fp8_e4m3"}, 0),
            ({"dtype": "bfloat16"}, 0),
        ],
    )
    def test_known_precisions_must_be_equal(self, tmp_path: Path, settings: dict[str, Any], compared: int) -> None:
        """dcpbench has fp8 weights and a bf16 KV cache."""
        server = Server(engine="vllm", settings=EngineSettings(**settings))
        other = measure_server(VLLM, TP, 400, server=server)
        assert len(engines.compare_engines(read(tmp_path, [measure_own(TP, 500)], [other])).rows) == compared

    def test_engine_with_other_precisions_is_named(self, tmp_path: Path) -> None:
        """dcpbench has fp8 weights and a bf16 KV cache, vLLM bf16 weights; SGLang's are equal to dcpbench's."""
        other = Server(engine="vllm", settings=EngineSettings(dtype="bfloat16", kv_dtype="bfloat16"))
        same = Server(engine="sglang", settings=EngineSettings(weights_dtype="fp8", kv_dtype="bfloat16"))
        runs = [
            [measure_own(TP, 500)],
            [measure_server(VLLM, TP, 400, server=other)],
            [measure_server(SGLANG, TP, 450, server=same)],
        ]
        text = overview.format_answer(read(tmp_path, *runs))
        assert "with 1.11 times the output of SGLang 0.5.17" in text
        assert (
            "Not compared: vLLM 0.26.0, as it ran with weights in bf16 and a KV cache in bf16, which another engine did not."
        ) in text
        alone = overview.format_answer(read(tmp_path / "alone", *runs[:2]))
        assert alone.startswith("No layout was measured under one load on two of dcpbench and vLLM 0.26.0")
        assert "Not compared: dcpbench, as it ran with weights in fp8 and a KV cache in bf16" in alone

    def test_engine_with_its_own_dummy_weights_is_left_out(self, tmp_path: Path) -> None:
        dummy = [measure_server(VLLM, TP, 900, warnings=["dummy_weights"])]
        report = read(tmp_path, [measure_own(TP, 500)], dummy, [measure_server(SGLANG, TP, 400)])
        assert set(engines.compare_engines(report).rows["run"]) == {"dcpbench", "SGLang 0.5.17"}
        assert "Not compared: vLLM 0.26.0, as it ran with its own dummy weights." in overview.format_answer(report)

    def test_runs_of_an_engine_are_joined_and_launches_counted(self, study: Frames) -> None:
        assert [(e.run.name, e.sources) for e in study.engines] == [
            ("dcpbench", ("run-0",)),
            ("vLLM 0.26.0", ("run-1", "run-2")),
            ("SGLang 0.5.17", ("run-3", "run-4")),
        ]
        twice = study.served[study.served["launches"] == 2]
        assert twice[["run", "layout", "concurrency", "output_tok_s"]].values.tolist() == [
            ["SGLang 0.5.17", "tp2·dcp2", 8, 445.5]
        ]
        rows = tables.build_runs_table(study).rows
        assert [row[0] for row in rows] == [f"run-{n}" for n in range(5)]
        assert rows[1][2].startswith("vLLM 0.26.0, dcpbench 0.1.0")

    def test_run_with_records_of_two_engines_is_split(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_own(TP, 500), measure_server(VLLM, TP, 400)])
        assert overview.format_answer(report).startswith("On 2 × H200, dcpbench is ahead")

    def test_runs_of_different_commits_are_not_joined(self, tmp_path: Path) -> None:
        other = measure_own(TP, 600, environment=msgspec.structs.replace(build.GPU, git_commit="456"))
        runs = [[measure_own(TP, 500)], [other], [measure_server(VLLM, TP, 400)]]
        report = read(tmp_path, *runs)
        assert [e.run.name for e in report.engines] == ["dcpbench (run-0)", "dcpbench (run-1)", "vLLM 0.26.0"]

    def test_as_repeats_requires_one_environment_per_engine(self, tmp_path: Path) -> None:
        other = measure_own(TP, 600, environment=msgspec.structs.replace(build.GPU, torch="2.12"))
        with pytest.raises(UsageError, match=r"torch is 2\.9\.0 in run-0 and 2\.12 in run-1"):
            read(tmp_path, [measure_own(TP, 500)], [other], [measure_server(VLLM, TP, 400)], as_repeats=True)

    def test_servers_with_different_numbers_of_gpus_are_joined(self, tmp_path: Path) -> None:
        """`device_count` is the number of GPUs that a launch used."""
        four = msgspec.structs.replace(TYPED, device_count=4)
        runs = [
            [measure_own(TP, 500)],
            [measure_server(VLLM, TP, 400)],
            [measure_server(VLLM, TP, 401, environment=four)],
        ]
        assert [e.sources for e in read(tmp_path, *runs).engines] == [("run-0",), ("run-1", "run-2")]

    def test_imported_points_keep_their_run_and_are_not_compared(self, tmp_path: Path) -> None:
        imported = msgspec.structs.replace(measure_server(VLLM, TP, 700), origin="vllm", server=msgspec.UNSET)
        report = read(tmp_path, [measure_own(TP, 500)], [measure_server(SGLANG, TP, 400)], [imported])
        assert set(engines.compare_engines(report).rows["run"]) == {"dcpbench", "SGLang 0.5.17"}
        assert dict(zip(report.served["run"], report.served["run_label"], strict=True))["run-2"] == "run run-2"
        assert overview.format_answer(report).startswith("These figures are what the imported files measured")

    def test_one_engine_keeps_its_runs(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_server(VLLM, TP, 400)], [measure_server(VLLM, DCP, 390)])
        assert report.engines == []
        assert set(report.served["run"]) == {"run-0", "run-1"}


class TestNames:
    def test_title_labels_and_legend_name_engines_without_shared_values(self, study: Frames) -> None:
        title = overview.format_title(study)
        assert title.startswith(
            "DeepSeek-V3, 8 of 61 layers · dcpbench, vLLM 0.26.0, SGLang 0.5.17 · tp2, tp2·dcp2 · 2 × NVIDIA H200 · "
            "fp8 weights + bf16 KV (SGLang 0.5.17 and vLLM 0.26.0: not recorded in full)"
        )
        assert set(study.served["label"]) == {"tp2", "tp2·dcp2"}
        closed = study.served[study.served["load_arrival"] == "closed"]
        figure = figures.draw_throughput(closed, Style.from_points(study.everything), "title")
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend == ["tp2", "tp2·dcp2", "SGLang 0.5.17", "dcpbench", "vLLM 0.26.0"]

    def test_labels_keep_values_that_differ_within_an_engine(self, tmp_path: Path) -> None:
        other = measure_own(TP, 480)
        other = msgspec.structs.replace(other, point=msgspec.structs.replace(other.point, backend="triton"))
        report = read(tmp_path, [measure_own(TP, 500), other], [measure_server(VLLM, TP, 400)])
        assert sorted(report.served["label"]) == ["tp2", "tp2 (flashinfer)", "tp2 (triton)"]

    def test_gpu_option_and_detected_name_are_the_same_hardware(self, study: Frames) -> None:
        assert set(study.served["device"]) == {"NVIDIA H200"}
        assert "NVIDIA H200, H200" not in overview.format_title(study)

    def test_tables_and_scopes_name_the_engine(self, study: Frames) -> None:
        table = tables.build_served_table(study.served, "live")
        assert table.columns[0] == "engine"
        assert "origin" not in table.columns
        scope = answer.format_scope(study, "vLLM 0.26.0", "DeepSeek-V3, 8 of 61 layers", "live")
        assert scope == "DeepSeek-V3, 8 of 61 layers, vLLM 0.26.0, live"
        page = build_page_data(study)
        assert page["filters"]["run"] == "engine"
        assert {look["name"] for look in page["series"]} >= {"tp2, vLLM 0.26.0", "tp2·dcp2, SGLang 0.5.17"}
        assert not re.search("run (vLLM|dcpbench)", " ".join(answer.format_top_sentences(study)))

    def test_model_folder_is_shown_by_name_and_kept_in_files(self, study: Frames, tmp_path: Path) -> None:
        assert set(study.served["model"]) == {"DeepSeek-V3, 8 of 61 layers"}
        points_export.write_csv(study, tmp_path / "points.csv")
        rows = list(csv.DictReader(io.StringIO((tmp_path / "points.csv").read_text(encoding="utf-8"))))
        assert {(row["model"], row["model_folder"]) for row in rows} == {("DeepSeek-V3, 8 of 61 layers", FOLDER)}
        commands = [text for text in build_page_data(study)["columns"]["command"] if text]
        assert commands
        assert all(f"--model {FOLDER} " in text for text in commands)

    def test_unknown_chunk_size_is_not_compared(self, study: Frames) -> None:
        """dcpbench records 2,048 tokens, a server 0."""
        assert stalls.build_table(study).rows == []

    def test_sites_of_host_synchronisation_name_the_model(self, tmp_path: Path) -> None:
        site = SyncSite(
            found_in="serve", rule="SYNC007", kind="event-sync", call="cudaEventSynchronize", per_step=1.0, wait_us=5.0
        )
        report = read(tmp_path, [measure_own(TP, 500, sync_sites=[site])])
        assert [row[0] for row in sync_sites.build_table(report).rows] == ["DeepSeek-V3, 8 of 61 layers"]

    def test_failed_point_names_its_engine(self, tmp_path: Path) -> None:
        lost = measure_server(SGLANG, DCP, 400, outcome="failed", reason="the server ended.", serve=None)
        report = read(tmp_path / "report", [measure_own(TP, 500)], [lost])
        assert [row[:3] for row in tables.build_others_table(report.others, engines=True).rows] == [
            ["SGLang 0.5.17", "DeepSeek-V3, 8 of 61 layers", "tp2·dcp2"]
        ]
        console = make_console()
        with console.capture() as shown:
            console.print(render_terminal_table(write(tmp_path, [measure_own(TP, 500)], [lost])), width=200)
        assert "failed: 1 point of DeepSeek-V3, 8 of 61 layers SGLang 0.5.17 tp2·dcp2: the server ended." in shown.get()

    def test_model_sizes_of_a_server_record_name_its_model(self, tmp_path: Path) -> None:
        sizes = ModelSizes.from_shape(shorten_shape(SHAPES["kimi-k2"], 4))
        report = read(tmp_path, [measure_server(VLLM, TP, 400, model_sizes=sizes)])
        assert set(report.served["model"]) == {"Kimi-K2, 4 of 61 layers"}

    @pytest.mark.parametrize("change", [{"layers": 61}, {"hidden": 7169}, {"experts": 128}])
    def test_whole_model_or_unknown_sizes_keep_the_folder(self, tmp_path: Path, change: dict[str, int]) -> None:
        sizes = msgspec.structs.replace(ModelSizes.from_shape(shorten_shape(SHAPES["deepseek-v3"], 8)), **change)
        report = read(tmp_path, [measure_server(VLLM, TP, 400, model_sizes=sizes)])
        assert set(report.served["model"]) == {FOLDER}

    def test_records_with_different_sizes_keep_the_folder(self, tmp_path: Path) -> None:
        sizes = [ModelSizes.from_shape(shorten_shape(SHAPES["deepseek-v3"], n)) for n in (4, 8)]
        runs = [[measure_server(VLLM, TP, 400, n, model_sizes=s)] for n, s in zip((8, 32), sizes, strict=True)]
        assert set(read(tmp_path, *runs).served["model"]) == {FOLDER}

    def test_folders_with_the_same_sizes_have_different_names(self, tmp_path: Path) -> None:
        one = measure_own(TP, 500)
        other = msgspec.structs.replace(one, point=msgspec.structs.replace(one.point, model="/models/tuned"))
        report = read(tmp_path, [one, msgspec.structs.replace(other, started_at="later")])
        assert set(report.served["model"]) == {
            "DeepSeek-V3, 8 of 61 layers (v3-8)",
            "DeepSeek-V3, 8 of 61 layers (tuned)",
        }


CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 8,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}


class TestModelSizes:
    def test_model_sizes_are_read_only_from_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        v3 = dataclasses.replace(SHAPES["deepseek-v3"], layers=8)
        assert read_model_sizes(str(tmp_path)) == ModelSizes.from_shape(v3)
        for name in ("deepseek-v3", "DeepSeek-R1", "/nowhere", str(tmp_path / "config.txt")):
            assert read_model_sizes(name) is msgspec.UNSET

    def test_record_of_a_server_has_model_sizes(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        reference = measure_server(VLLM, TP, 400).point
        server = measure.MeasuredServer(
            config=measure.ClientConfig(target=Target(scheme="http", host="127.0.0.1", port=9)),
            info=ServerInfo(engine="vllm", version="0.26.0"),
            prompt_format=PromptFormat(endpoint="completions", model=str(tmp_path), extras={}, vocab=1000),
            settings=Settings(),
            folder=tmp_path,
        )
        point = msgspec.structs.replace(reference, model=str(tmp_path))
        record = measure._make_record(point, server, measure._LoadState([]), failed="", stopped=False)
        assert record.model_sizes == ModelSizes.from_shape(dataclasses.replace(SHAPES["deepseek-v3"], layers=8))
        assert msgspec.json.decode(msgspec.json.encode(record))["model_sizes"]["layers"] == 8


class TestKvCapacity:
    def test_kv_capacity_is_a_column_of_every_served_table(self, study: Frames, tmp_path: Path) -> None:
        table = tables.build_served_table(study.served, "live")
        at = table.columns.index("KV capacity tokens")
        assert {row[at] for row in table.rows if row[0] == "vLLM 0.26.0"} == {"9,857,792", "19,683,040"}
        assert all(row[at] != "—" for row in table.rows)
        points_export.write_csv(study, tmp_path / "points.csv")
        rows = list(csv.DictReader(io.StringIO((tmp_path / "points.csv").read_text(encoding="utf-8"))))
        assert {row["kv_capacity_tokens"] for row in rows if row["run"] == "SGLang 0.5.17"} == {"9857792", "19683040"}
        page = build_page_data(study)
        assert None not in page["columns"]["kv_capacity_tokens"]
        assert next(field for field in page["fields"] if field["name"] == "kv_capacity_tokens")["table"]

    def test_terminal_has_kv_capacity_in_millions(self, tmp_path: Path) -> None:
        console = make_console()
        with console.capture() as shown:
            console.print(render_terminal_table(write(tmp_path, [measure_server(VLLM, TP, 400)])), width=120)
        assert re.search(r"KV tokens\n.*\n.*9\.86 M\n", shown.get())

    def test_kv_capacity_of_several_instances_is_their_sum(self, tmp_path: Path) -> None:
        """Each of three instances has 1,000 pages of 16 tokens."""
        record = serving.make_served_record(serving.make_point(TP, 8, {"mode": "replay"}, disaggregate="3"))
        folders = write(tmp_path, [record])
        table = tables.build_served_table(dataframes.load_frames(folders).served, "replay")
        assert table.rows[0][table.columns.index("KV capacity tokens")] == "48,000"
        console = make_console()
        with console.capture() as shown:
            console.print(render_terminal_table(folders), width=120)
        assert " 48 k\n" in shown.get()

    def test_dcp_capacity_of_a_server_is_stated_without_unknown_memory(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_server(VLLM, TP, 400), measure_server(VLLM, DCP, 390)])
        assert "tp2·dcp2 holds 2.00× the tokens of tp2." in overview.format_bullets(report)
        assert "In all, tp2·dcp2 holds 2.00 times as many tokens as tp2." in answer.format_top_sentences(report)


class TestRunsOfOneEngine:
    def test_panel_without_points_names_its_run(self, tmp_path: Path) -> None:
        """Each run has another length, so each has panels of its own."""
        runs = [
            [
                serving.make_served_record(serving.make_point(layout, 8, {"input_tokens": tokens}))
                for layout in (TP, DCP)
            ]
            for tokens in ("400", "800")
        ]
        report = read(tmp_path, *runs)
        rows = report.findings.against_others
        figure = figures.draw_overview(rows, Style.from_points(report.everything), "title", report.others)
        assert ["run run-0" in ax.get_title() for ax in figure.axes] == [True, True, False, False]
        assert ["run run-1" in ax.get_title() for ax in figure.axes] == [False, False, True, True]


class TestTableAndFigure:
    def test_table_has_engine_layout_load_and_ratios(self, study: Frames) -> None:
        """400 / 556 = 0.72."""
        table = engines.build_table(study)
        assert len(table.rows) == 12
        first = [dict(zip(table.columns, row, strict=True)) for row in table.rows[:2]]
        assert [(r["engine"], r["layout"], r["launches"], r["output tok/s"], r["× output"]) for r in first] == [
            ("dcpbench", "tp2", "1", "556.0", "1.00×"),
            ("vLLM 0.26.0", "tp2", "1", "400.0", "0.72×"),
        ]

    def test_figure_has_a_bar_per_engine_layout_and_load(self, study: Frames, tmp_path: Path) -> None:
        pictures = [p for p in plots.draw_all(study, tmp_path, drawn=False) if p.subject == "engines"]
        assert [p.title for p in pictures] == ["Engines at equal layout and load, DeepSeek-V3, 8 of 61 layers, live"]
        rows = engines.compare_engines(study).rows
        figure = figures.draw_engines(rows, Style.from_points(study.everything), "title")
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [
            "dcpbench",
            "vLLM 0.26.0",
            "SGLang 0.5.17",
        ]
        output = figure.axes[0]
        assert [round(patch.get_width()) for patch in output.patches[:4]] == [556, 550, 620, 613]
        assert [tick.get_text() for tick in output.get_yticklabels()] == [
            "tp2, 8 clients",
            "tp2·dcp2, 8 clients",
            "tp2, 32 clients",
            "tp2·dcp2, 32 clients",
        ]
