"""imports/: whatever a file holds, the answer is a record or one sentence that names the file; nothing half done."""

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

VLLM, SGLANG = files.vllm(), files.sglang()


def said(tmp_path: Path, content: str | bytes, engine: str = "vllm") -> str:
    """The sentence about a file, which leaves no run behind."""
    path = tmp_path / "bad.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RecordsError) as caught:
        import_files([path], engine, tmp_path / "run", Overrides())
    assert not (tmp_path / "run" / "records.jsonl").exists()
    text = str(caught.value)
    assert text.startswith(str(path)), "it names the file"
    assert len(text) < 1000
    return text


def line(result: dict[str, Any], **changes: Any) -> str:
    """A result as JSON."""
    return json.dumps(result | changes)


class TestNoJson:
    @pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
    def test_an_empty_file(self, content: str, tmp_path: Path) -> None:
        assert "is empty" in said(tmp_path, content)

    def test_one_that_was_cut_short(self, tmp_path: Path) -> None:
        text = line(VLLM)
        assert "is cut short" in said(tmp_path, text[: len(text) // 2])
        pretty = json.dumps(VLLM, indent=1)
        assert "is cut short" in said(tmp_path, pretty[: len(pretty) - 1])

    def test_a_broken_line_among_others_is_named(self, tmp_path: Path) -> None:
        text = said(tmp_path, f"{line(SGLANG)}\n{line(SGLANG)[:-40]}\n{line(SGLANG)}\n", "sglang")
        assert ", line 2 is" in text
        assert "Remove that line" in text

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        assert "is no text" in said(tmp_path, b"\x93NUMPY\xff\xfe")

    def test_numbers_and_nesting_without_end(self, tmp_path: Path) -> None:
        assert "is no JSON" in said(tmp_path, '{"duration": ' + "9" * 5000 + "}")
        assert "nested too deeply" in said(tmp_path, "[" * 100_000)

    @pytest.mark.parametrize("content", ["3", '"a"', "[]", "[1]"], ids=["number", "text", "empty-list", "list"])
    def test_json_that_is_no_object(self, content: str, tmp_path: Path) -> None:
        said(tmp_path, content)

    def test_what_cannot_have_been_counted(self, tmp_path: Path) -> None:
        """More finished than were sent; percentiles that fall."""
        brief = {name: value for name, value in VLLM.items() if not isinstance(value, list)}
        assert "completed is 4, more than the 3 of num_prompts" in said(tmp_path, line(brief | {"completed": 4}))
        others = {name: value for name, value in brief.items() if "ttft" not in name}
        falling = {"median_ttft_ms": 500.0, "p99_ttft_ms": 3.0}
        assert "percentiles of ttft fall (p50 500, p99 3 ms)" in said(tmp_path, line(others | falling))

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="cannot be read"):
            import_files([tmp_path / "none.json"], "vllm", tmp_path / "run", Overrides())
        with pytest.raises(RecordsError, match=r"holds no \*\.json or \*\.jsonl"):
            import_files([tmp_path], "vllm", tmp_path / "run", Overrides())


class TestOtherFiles:
    def test_the_other_engines_file_is_recognised(self, tmp_path: Path) -> None:
        assert "import it with --from sglang" in said(tmp_path, line(SGLANG), "vllm")
        assert "import it with --from vllm" in said(tmp_path, line(VLLM), "sglang")

    def test_our_own_records_need_no_import(self, tmp_path: Path) -> None:
        assert "dcpbench report RUN" in said(tmp_path, '{"schema_version": 1, "point": {}}')

    @pytest.mark.parametrize("label", ["dcpbench", "dcpbench-replay", "dcpbench-functional"])
    def test_what_we_exported_does_not_come_back_as_another_engines(self, label: str, tmp_path: Path) -> None:
        """A replay would pass as measured."""
        assert "exported by dcpbench" in said(tmp_path, line(VLLM, backend=label))

    def test_a_folder_of_something_else_says_of_what(self, tmp_path: Path) -> None:
        """With several the first one tells; nothing is imported of a folder that has none."""
        for content, sentence in (
            (line(SGLANG), "import it with --from sglang"),
            ('{"schema_version": 1, "point": {}}', "dcpbench report RUN"),
            (line(VLLM, backend="dcpbench-replay"), "exported by dcpbench"),
            ('{"name": "x"}', "is no result of vllm bench serve"),
            (line(VLLM, run_number=-1), "Left out, warm-ups"),
        ):
            folder = tmp_path / "results"
            folder.mkdir(exist_ok=True)
            (folder / "a.json").write_text(content)
            with pytest.raises(RecordsError) as caught:
                import_files([folder], "vllm", tmp_path / "run", Overrides())
            assert sentence in str(caught.value)
            assert not (tmp_path / "run").exists()

    def test_json_of_something_else(self, tmp_path: Path) -> None:
        assert "is no result of vllm bench serve" in said(tmp_path, '{"name": "x"}')

    def test_an_embedding_benchmark_lacks_output_tokens(self, tmp_path: Path) -> None:
        result = {n: v for n, v in files.without_details(VLLM).items() if n != "total_output_tokens"}
        assert "total_output_tokens" in said(tmp_path, json.dumps(result))


class TestValues:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0], ids=str)
    @pytest.mark.parametrize("name", ["duration", "mean_ttft_ms", "p99_itl_ms", "burstiness", "request_goodput"])
    def test_numbers_that_cannot_be(self, name: str, value: float, tmp_path: Path) -> None:
        assert name in said(tmp_path, line(files.without_details(VLLM), **{name: value}))

    @pytest.mark.parametrize("name", ["ttfts", "itls", "latencies", "start_times"])
    def test_nan_among_the_requests(self, name: str, tmp_path: Path) -> None:
        values = [float("nan"), 0.5, 0.5] if name != "itls" else [[float("nan")], [], []]
        assert name in said(tmp_path, line(VLLM, **{name: values}))

    def test_a_time_of_inferencex_that_no_float_can_hold(self, tmp_path: Path) -> None:
        row = files.inferencex()
        name = next(key for key in row if key.startswith("median_") and isinstance(row[key], float))
        path = files.file(tmp_path, {**row, name: 10**400})
        with pytest.raises(RecordsError, match=f"{name}_ms is inf, which is no time"):
            import_files([path], "inferencex", tmp_path / "run", Overrides())

    def test_lists_of_different_lengths(self, tmp_path: Path) -> None:
        assert "differ in length" in said(tmp_path, line(VLLM, ttfts=[0.5, 0.5]))

    def test_lists_that_are_not_all_there(self, tmp_path: Path) -> None:
        result = {n: v for n, v in VLLM.items() if n != "itls"}
        assert "no itls" in said(tmp_path, json.dumps(result))

    def test_lists_that_contradict_the_summary(self, tmp_path: Path) -> None:
        assert "says that 2 requests completed, while its lists hold 3" in said(tmp_path, line(VLLM, completed=2))

    def test_a_run_that_took_no_time(self, tmp_path: Path) -> None:
        assert "took no time" in said(tmp_path, line(files.without_details(VLLM), duration=0.0))

    def test_a_text_where_a_number_belongs(self, tmp_path: Path) -> None:
        assert "duration" in said(tmp_path, line(VLLM, duration="long"))
        assert "request_rate" in said(tmp_path, line(VLLM, request_rate="often"))

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    @pytest.mark.parametrize(
        "rate", [0, 0.0, -1, float("nan"), True, "often", "0", [], 10**400], ids=lambda r: str(r)[:8]
    )
    def test_a_rate_at_which_nothing_comes(self, engine: str, rate: Any, tmp_path: Path) -> None:
        """It would be the load of a point, by which other numbers are divided."""
        result = VLLM if engine == "vllm" else SGLANG
        assert "request_rate is" in said(tmp_path, line(result, request_rate=rate), engine)

    @pytest.mark.parametrize("lens", [[10**400, 1, 1], [10**12, 1, 1], [-5, 1, 1]], ids=["huge", "large", "negative"])
    @pytest.mark.parametrize("name", ["input_lens", "output_lens"])
    def test_lengths_that_no_request_has(self, name: str, lens: list[int], tmp_path: Path) -> None:
        assert name in said(tmp_path, line(VLLM, **{name: lens}))

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_numbers_that_json_can_spell_and_no_clock_shows(self, engine: str, tmp_path: Path) -> None:
        """1e400 is read as infinity; 5e-324 s make a rate of infinity."""
        result = files.without_details(VLLM if engine == "vllm" else SGLANG)
        text = line(result, duration="HERE")
        assert "duration is inf" in said(tmp_path, text.replace('"HERE"', "1e400"), engine)
        assert "output_tok_s would be inf" in said(tmp_path, text.replace('"HERE"', "5e-324"), engine)
        assert "duration" in said(tmp_path, text.replace('"HERE"', "1" + "0" * 400), engine)

    def test_a_wall_time_of_which_nothing_is_left(self, tmp_path: Path) -> None:
        """Three requests of two tokens each at once."""
        at_once = {"ttfts": [0.0] * 3, "itls": [[0.0]] * 3, "output_lens": [2] * 3, "latencies": [0.0] * 3}
        text = line(VLLM, start_times=[1.0] * 3, **at_once)
        assert "took no time" in said(tmp_path, text)

    def test_gaps_too_short_for_any_clock(self, tmp_path: Path) -> None:
        result = files.without_details(VLLM)
        assert "tok_s_per_user would be inf" in said(tmp_path, line(result, median_itl_ms=5e-324, mean_itl_ms=5e-324))

    @pytest.mark.parametrize("name", ["label", "mean_ttft_ms", "max_num_seqs"])
    def test_nesting_just_short_of_the_end(self, name: str, tmp_path: Path) -> None:
        """The deepest that Python reads it may not write again: for halves of characters, a setting, or a sentence."""
        path = tmp_path / "deep.json"
        text = line(VLLM, run_number=0, date="\ud83d\ude00", **{name: "HERE"})
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

    def test_a_sweep_of_a_thousand_parameters(self, tmp_path: Path) -> None:
        many = {"run_number": 0} | {f"p{i}": i for i in range(1000)}
        assert "1,000 parameters" in said(tmp_path, line(VLLM, **many))

    def test_names_of_fields_are_said_short_and_printable(self, tmp_path: Path) -> None:
        path = files.file(tmp_path, files.vllm(**{"\x1b[31m" + "x" * 10_000: 1, **{f"f{i}": 1 for i in range(50)}}))
        told = import_files([path], "vllm", tmp_path / "run", Overrides()).notes[-1]
        assert "and 46 more" in told
        assert "\x1b" not in told
        assert len(told) < 1000

    def test_more_than_can_be_measured(self, tmp_path: Path) -> None:
        assert "above 1e+15" in said(tmp_path, line(files.without_details(VLLM), total_output_tokens=10**30))

    def test_a_model_of_ten_million_characters(self, tmp_path: Path) -> None:
        assert "10,000,000 characters" in said(tmp_path, line(files.without_details(VLLM), model_id="x" * 10_000_000))

    def test_hostile_names_stay_words(self, tmp_path: Path) -> None:
        path = files.file(tmp_path, files.vllm(model_id="../../<script>\x1b[31m"))
        import_files([path], "vllm", tmp_path / "run", Overrides())
        (record,) = read_records(tmp_path / "run")
        assert record.point.model == "../../<script>\x1b[31m"
        assert record.serve
        assert (tmp_path / "run" / record.serve.samples_file).resolve().is_relative_to((tmp_path / "run").resolve())

    def test_one_bad_file_keeps_the_good_ones_out_too(self, tmp_path: Path) -> None:
        good = files.file(tmp_path, VLLM, name="good.json")
        bad = tmp_path / "bad.json"
        bad.write_text("{")
        with pytest.raises(RecordsError, match=r"bad\.json"):
            import_files([good, bad], "vllm", tmp_path / "run", Overrides())
        assert not (tmp_path / "run").exists()

    def test_an_unknown_engine_is_answered_with_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="did you mean vllm"):
            import_files([tmp_path], "vlm", tmp_path / "run", Overrides())

    def test_half_a_character_is_no_name(self, tmp_path: Path) -> None:
        """JSON can spell half of a surrogate pair, which UTF-8 cannot hold."""
        assert "half a character" in said(tmp_path, line(VLLM).replace("deepseek-ai/DeepSeek-V3", "\\ud800"))


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
def test_any_value_in_any_field_gives_a_record_or_a_sentence(
    name: str, value: Any, engine: str, tmp_path: Path
) -> None:
    result = (VLLM if engine == "vllm" else SGLANG) | {name: value}
    path = files.file(tmp_path, result)
    try:
        import_files([path], engine, tmp_path / "run", Overrides(model="m"), force=True)
    except DcpbenchError as e:
        told = str(e)
    else:
        told = str(path)
        assert len(read_records(tmp_path / "run")) == 1
    assert str(path) in told


SERVER_FIELDS = ("model_path", "tp_size", "pp_size", "dp_size", "dcp_size", "ep_size", "enable_dp_attention", "version")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(SERVER_FIELDS), value=JSON, kind=st.sampled_from(["prefill", "decode"]))
def test_any_value_of_a_server_behind_a_router_gives_a_record_or_a_sentence(
    name: str, value: Any, kind: str, tmp_path: Path
) -> None:
    server = {"model_path": "m", "tp_size": 4}
    result = SGLANG | {"server_info": {"prefill": [server], "decode": [server]} | {kind: [server | {name: value}]}}
    path = files.file(tmp_path, result)
    try:
        import_files([path], "sglang", tmp_path / "run", Overrides(), force=True)
    except DcpbenchError as e:
        sentence = str(e)
    else:
        sentence = str(path)
        assert len(read_records(tmp_path / "run")) == 1
    assert str(path) in sentence
