"""Hostile files for imports: each becomes a record or an error of one sentence that names the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dcpbench.errors import DcpbenchError, RecordsError, UsageError
from dcpbench.imports import Overrides, import_files
from dcpbench.records.file import read_records
from tests.unit import engine_files_builder as files

if TYPE_CHECKING:
    from pathlib import Path

VLLM, SGLANG = files.make_vllm_result(), files.make_sglang_result()


def import_error(tmp_path: Path, content: str | bytes, engine: str = "vllm") -> str:
    """Return the error for a file with this content, after which no run exists."""
    path = tmp_path / "bad.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RecordsError) as caught:
        import_files([path], engine, tmp_path / "run", Overrides())
    assert not (tmp_path / "run" / "records.jsonl").exists()
    text = str(caught.value)
    assert text.startswith(str(path)), "the error names the file"
    assert len(text) < 1000
    return text


def make_line(result: dict[str, Any], **changes: Any) -> str:
    """Return a result as JSON."""
    return json.dumps(result | changes)


class TestNoJson:
    @pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
    def test_empty_file_is_refused(self, content: str, tmp_path: Path) -> None:
        assert "is empty" in import_error(tmp_path, content)

    def test_truncated_file_is_refused(self, tmp_path: Path) -> None:
        text = make_line(VLLM)
        assert "is cut short" in import_error(tmp_path, text[: len(text) // 2])
        pretty = json.dumps(VLLM, indent=1)
        assert "is cut short" in import_error(tmp_path, pretty[: len(pretty) - 1])

    def test_invalid_line_is_named_by_its_number(self, tmp_path: Path) -> None:
        text = import_error(
            tmp_path, f"{make_line(SGLANG)}\n{make_line(SGLANG)[:-40]}\n{make_line(SGLANG)}\n", "sglang"
        )
        assert ", line 2 is" in text
        assert "Remove that line" in text

    def test_binary_file_is_refused(self, tmp_path: Path) -> None:
        assert "is no text" in import_error(tmp_path, b"\x93NUMPY\xff\xfe")

    def test_endless_numbers_and_nesting_are_refused(self, tmp_path: Path) -> None:
        assert "is no JSON" in import_error(tmp_path, '{"duration": ' + "9" * 5000 + "}")
        assert "nested too deeply" in import_error(tmp_path, "[" * 100_000)

    @pytest.mark.parametrize("content", ["3", '"a"', "[]", "[1]"], ids=["number", "text", "empty-list", "list"])
    def test_json_without_an_object_is_refused(self, content: str, tmp_path: Path) -> None:
        import_error(tmp_path, content)

    def test_contradictory_counts_and_percentiles_are_refused(self, tmp_path: Path) -> None:
        """More requests finished than were sent; a percentile is below the median."""
        brief = {name: value for name, value in VLLM.items() if not isinstance(value, list)}
        assert "completed is 4, more than the 3 of num_prompts" in import_error(
            tmp_path, make_line(brief | {"completed": 4})
        )
        others = {name: value for name, value in brief.items() if "ttft" not in name}
        falling = {"median_ttft_ms": 500.0, "p99_ttft_ms": 3.0}
        assert "percentiles of ttft fall (p50 500, p99 3 ms)" in import_error(tmp_path, make_line(others | falling))

    def test_missing_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="cannot be read"):
            import_files([tmp_path / "none.json"], "vllm", tmp_path / "run", Overrides())
        with pytest.raises(RecordsError, match=r"holds no \*\.json or \*\.jsonl"):
            import_files([tmp_path], "vllm", tmp_path / "run", Overrides())


class TestOtherFiles:
    def test_file_of_the_other_engine_is_recognised(self, tmp_path: Path) -> None:
        assert "import it with --from sglang" in import_error(tmp_path, make_line(SGLANG), "vllm")
        assert "import it with --from vllm" in import_error(tmp_path, make_line(VLLM), "sglang")

    def test_own_records_refer_to_the_report_command(self, tmp_path: Path) -> None:
        assert "dcpbench report RUN" in import_error(tmp_path, '{"schema_version": 1, "point": {}}')

    @pytest.mark.parametrize("label", ["dcpbench", "dcpbench-replay", "dcpbench-functional"])
    def test_files_exported_by_dcpbench_are_refused(self, label: str, tmp_path: Path) -> None:
        """Otherwise a replay would count as measured."""
        assert "exported by dcpbench" in import_error(tmp_path, make_line(VLLM, backend=label))

    def test_folder_without_results_raises_an_error_about_its_first_file(self, tmp_path: Path) -> None:
        """Nothing of such a folder is imported."""
        for content, sentence in (
            (make_line(SGLANG), "import it with --from sglang"),
            ('{"schema_version": 1, "point": {}}', "dcpbench report RUN"),
            (make_line(VLLM, backend="dcpbench-replay"), "exported by dcpbench"),
            ('{"name": "x"}', "is no result of vllm bench serve"),
            (make_line(VLLM, run_number=-1), "Left out, warm-ups"),
        ):
            folder = tmp_path / "results"
            folder.mkdir(exist_ok=True)
            (folder / "a.json").write_text(content)
            with pytest.raises(RecordsError) as caught:
                import_files([folder], "vllm", tmp_path / "run", Overrides())
            assert sentence in str(caught.value)
            assert not (tmp_path / "run").exists()

    def test_json_without_result_fields_is_refused(self, tmp_path: Path) -> None:
        assert "is no result of vllm bench serve" in import_error(tmp_path, '{"name": "x"}')

    def test_result_without_output_tokens_is_refused(self, tmp_path: Path) -> None:
        """Benchmarks of embeddings have no such field."""
        result = {n: v for n, v in files.remove_details(VLLM).items() if n != "total_output_tokens"}
        assert "total_output_tokens" in import_error(tmp_path, json.dumps(result))


class TestValues:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0], ids=str)
    @pytest.mark.parametrize("name", ["duration", "mean_ttft_ms", "p99_itl_ms", "burstiness", "request_goodput"])
    def test_nan_infinite_and_negative_numbers_are_refused(self, name: str, value: float, tmp_path: Path) -> None:
        assert name in import_error(tmp_path, make_line(files.remove_details(VLLM), **{name: value}))

    @pytest.mark.parametrize("name", ["ttfts", "itls", "latencies", "start_times"])
    def test_nan_in_lists_of_requests_is_refused(self, name: str, tmp_path: Path) -> None:
        values = [float("nan"), 0.5, 0.5] if name != "itls" else [[float("nan")], [], []]
        assert name in import_error(tmp_path, make_line(VLLM, **{name: values}))

    def test_inferencex_time_above_the_largest_float_is_refused(self, tmp_path: Path) -> None:
        row = files.make_inferencex_row()
        name = next(key for key in row if key.startswith("median_") and isinstance(row[key], float))
        path = files.write_file(tmp_path, {**row, name: 10**400})
        with pytest.raises(RecordsError, match=f"{name}_ms is inf, which is no time"):
            import_files([path], "inferencex", tmp_path / "run", Overrides())

    def test_lists_of_different_lengths_are_refused(self, tmp_path: Path) -> None:
        assert "differ in length" in import_error(tmp_path, make_line(VLLM, ttfts=[0.5, 0.5]))

    def test_missing_list_of_requests_is_refused(self, tmp_path: Path) -> None:
        result = {n: v for n, v in VLLM.items() if n != "itls"}
        assert "no itls" in import_error(tmp_path, json.dumps(result))

    def test_lists_that_contradict_the_summary_are_refused(self, tmp_path: Path) -> None:
        assert "states that 2 requests completed, while its lists hold 3" in import_error(
            tmp_path, make_line(VLLM, completed=2)
        )

    def test_run_without_duration_is_refused(self, tmp_path: Path) -> None:
        assert "took no time" in import_error(tmp_path, make_line(files.remove_details(VLLM), duration=0.0))

    def test_text_in_place_of_a_number_is_refused(self, tmp_path: Path) -> None:
        assert "duration" in import_error(tmp_path, make_line(VLLM, duration="long"))
        assert "request_rate" in import_error(tmp_path, make_line(VLLM, request_rate="often"))

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    @pytest.mark.parametrize(
        "rate", [0, 0.0, -1, float("nan"), True, "often", "0", [], 10**400], ids=lambda r: str(r)[:8]
    )
    def test_request_rate_that_is_not_positive_is_refused(self, engine: str, rate: Any, tmp_path: Path) -> None:
        """The rate becomes the load of a point, by which other numbers are divided."""
        result = VLLM if engine == "vllm" else SGLANG
        assert "request_rate is" in import_error(tmp_path, make_line(result, request_rate=rate), engine)

    @pytest.mark.parametrize("lens", [[10**400, 1, 1], [10**12, 1, 1], [-5, 1, 1]], ids=["huge", "large", "negative"])
    @pytest.mark.parametrize("name", ["input_lens", "output_lens"])
    def test_impossible_request_lengths_are_refused(self, name: str, lens: list[int], tmp_path: Path) -> None:
        assert name in import_error(tmp_path, make_line(VLLM, **{name: lens}))

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_durations_that_overflow_are_refused(self, engine: str, tmp_path: Path) -> None:
        """JSON's 1e400 is read as infinity; a duration of 5e-324 s gives an infinite rate."""
        result = files.remove_details(VLLM if engine == "vllm" else SGLANG)
        text = make_line(result, duration="HERE")
        assert "duration is inf" in import_error(tmp_path, text.replace('"HERE"', "1e400"), engine)
        assert "output_tok_s would be inf" in import_error(tmp_path, text.replace('"HERE"', "5e-324"), engine)
        assert "duration" in import_error(tmp_path, text.replace('"HERE"', "1" + "0" * 400), engine)

    def test_requests_without_wall_time_are_refused(self, tmp_path: Path) -> None:
        """Three requests of two tokens each start and end at the same time."""
        at_once = {"ttfts": [0.0] * 3, "itls": [[0.0]] * 3, "output_lens": [2] * 3, "latencies": [0.0] * 3}
        text = make_line(VLLM, start_times=[1.0] * 3, **at_once)
        assert "took no time" in import_error(tmp_path, text)

    def test_tpot_that_gives_an_infinite_rate_are_refused(self, tmp_path: Path) -> None:
        result = files.remove_details(VLLM)
        assert "tok_s_per_user would be inf" in import_error(
            tmp_path, make_line(result, median_tpot_ms=5e-324, mean_tpot_ms=5e-324)
        )

    @pytest.mark.parametrize("name", ["label", "mean_ttft_ms", "max_num_seqs"])
    def test_deepest_readable_nesting_gives_a_record_or_an_error(self, name: str, tmp_path: Path) -> None:
        """Python may fail to write the deepest nesting that it can read: for a surrogate, a setting, or a message."""
        path = tmp_path / "deep.json"
        text = make_line(VLLM, run_number=0, date="\ud83d\ude00", **{name: "HERE"})
        read = 0
        for depth in range(1000, 500, -1):
            path.write_text(text.replace('"HERE"', "[" * depth + "]" * depth))
            try:
                import_files([path], "vllm", tmp_path / "run", Overrides(), force=True)
            except RecordsError as e:
                read += "nested too deeply" not in str(e)
            else:
                read += 1
            if read > 3:
                return
        pytest.fail("nothing was read at any depth")

    def test_sweep_with_a_thousand_parameters_is_refused(self, tmp_path: Path) -> None:
        many = {"run_number": 0} | {f"p{i}": i for i in range(1000)}
        assert "1,000 parameters" in import_error(tmp_path, make_line(VLLM, **many))

    def test_unread_fields_are_listed_short_and_printable(self, tmp_path: Path) -> None:
        path = files.write_file(
            tmp_path, files.make_vllm_result(**{"\x1b[31m" + "x" * 10_000: 1, **{f"f{i}": 1 for i in range(50)}})
        )
        note = import_files([path], "vllm", tmp_path / "run", Overrides()).notes[-1]
        assert "and 46 more" in note
        assert "\x1b" not in note
        assert len(note) < 1000

    def test_counts_above_the_limit_are_refused(self, tmp_path: Path) -> None:
        assert "above 1e+15" in import_error(
            tmp_path, make_line(files.remove_details(VLLM), total_output_tokens=10**30)
        )

    def test_model_name_of_ten_million_characters_is_refused(self, tmp_path: Path) -> None:
        assert "10,000,000 characters" in import_error(
            tmp_path, make_line(files.remove_details(VLLM), model_id="x" * 10_000_000)
        )

    def test_hostile_model_name_does_not_escape_the_folder(self, tmp_path: Path) -> None:
        path = files.write_file(tmp_path, files.make_vllm_result(model_id="../../<script>\x1b[31m"))
        import_files([path], "vllm", tmp_path / "run", Overrides())
        (record,) = read_records(tmp_path / "run")
        assert record.point.model == "../../<script>\x1b[31m"
        assert record.serve
        assert (tmp_path / "run" / record.serve.samples_file).resolve().is_relative_to((tmp_path / "run").resolve())

    def test_bad_file_prevents_the_import_of_good_files(self, tmp_path: Path) -> None:
        good = files.write_file(tmp_path, VLLM, name="good.json")
        bad = tmp_path / "bad.json"
        bad.write_text("{")
        with pytest.raises(RecordsError, match=r"bad\.json"):
            import_files([good, bad], "vllm", tmp_path / "run", Overrides())
        assert not (tmp_path / "run").exists()

    def test_unknown_engine_suggests_the_nearest_name(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="did you mean vllm"):
            import_files([tmp_path], "vlm", tmp_path / "run", Overrides())

    def test_unpaired_surrogate_is_refused(self, tmp_path: Path) -> None:
        """JSON can contain half of a surrogate pair, which UTF-8 cannot."""
        assert "half a character" in import_error(
            tmp_path, make_line(VLLM).replace("deepseek-ai/DeepSeek-V3", "\\ud800")
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(sorted(VLLM.keys() | SGLANG.keys())), value=JSON, engine=st.sampled_from(["vllm", "sglang"])
)
@example(name="random_input_len", value=1_000_000_001, engine="sglang")
def test_any_value_in_any_field_gives_a_record_or_an_error(name: str, value: Any, engine: str, tmp_path: Path) -> None:
    result = (VLLM if engine == "vllm" else SGLANG) | {name: value}
    path = files.write_file(tmp_path, result)
    try:
        import_files([path], engine, tmp_path / "run", Overrides(model="m"), force=True)
    except DcpbenchError as e:
        message = str(e)
    else:
        message = str(path)
        assert len(read_records(tmp_path / "run")) == 1
    assert str(path) in message


SERVER_FIELDS = ("model_path", "tp_size", "pp_size", "dp_size", "dcp_size", "ep_size", "enable_dp_attention", "version")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(SERVER_FIELDS), value=JSON, kind=st.sampled_from(["prefill", "decode"]))
def test_any_value_of_a_routed_server_gives_a_record_or_an_error(
    name: str, value: Any, kind: str, tmp_path: Path
) -> None:
    server = {"model_path": "m", "tp_size": 4}
    result = SGLANG | {"server_info": {"prefill": [server], "decode": [server]} | {kind: [server | {name: value}]}}
    path = files.write_file(tmp_path, result)
    try:
        import_files([path], "sglang", tmp_path / "run", Overrides(), force=True)
    except DcpbenchError as e:
        message = str(e)
    else:
        message = str(path)
        assert len(read_records(tmp_path / "run")) == 1
    assert str(path) in message


@pytest.mark.parametrize("name", ["model", "gpu", "dtype"])
def test_empty_option_is_refused(tmp_path: Path, name: str) -> None:
    """The name in the file would silently be kept."""
    with pytest.raises(UsageError, match=f"--{name} is empty"):
        import_files([tmp_path / "none.json"], "vllm", tmp_path / "run", Overrides(**{name: ""}))
