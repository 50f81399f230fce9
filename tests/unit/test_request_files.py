"""Files of requests: the fields of each format, and errors with their line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import UsageError
from dcpbench.serving.loads import HASH, make_block_ids, make_token_ids
from dcpbench.serving.request_files import Row, Trace, read_requests
from dcpbench.serving.trace_formats import Reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOONCAKE = '{"timestamp": 5, "input_length": 3, "output_length": 4}'
OWN = '{"input_tokens": 3, "output_tokens": 4}'


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str | bytes], Trace]:
    """Return a function that reads a file with this text; its name does not reveal its format."""

    def read(text: str | bytes) -> Trace:
        path = tmp_path / "requests.data"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_requests(path)

    return read


def list_sizes(trace: Trace) -> list[tuple[float | None, int, int]]:
    """Return (arrival, prompt, output) of each request."""
    return [(row.arrival_s, row.input_tokens, row.output_tokens) for row in trace.rows]


class TestFormats:
    def test_qwen_times_are_read_as_seconds(self, read) -> None:
        """Qwen traces have Mooncake's fields, times in seconds, and blocks of 16 tokens."""
        line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 20, "output_length": 5}
        trace = read("\n".join(json.dumps(line | more) for more in ({"hash_ids": [1, 2]}, {"timestamp": 62.5})))
        assert list_sizes(trace) == [(0.0, 20, 5), (61.5, 20, 5)]
        assert str(trace.reading) == "format=qwen,time-unit=s,block-size=16"

    def test_mooncake_times_are_ms_relative_to_the_first(self, read) -> None:
        """The trace begins at 27,482 ms; unknown fields are ignored."""
        trace = read(
            '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
            '{"timestamp": 30982, "input_length": 512, "output_length": 1, "hash_ids": [46], "type": "chat"}\n'
        )
        assert list_sizes(trace) == [(0.0, 600, 52), (3.5, 512, 1)]
        assert [row.hash_ids for row in trace.rows] == [(46, 47), (46,)]
        assert trace.has_times
        assert not trace.supports_prefix_share

    def test_hash_of_the_last_incomplete_block_is_optional(self, read) -> None:
        """Tools differ: 600 tokens are one full block and a rest."""
        assert read(MOONCAKE.replace("3", "600", 1)[:-1] + ', "hash_ids": [46]}').rows[0].hash_ids == (46,)

    def test_own_format_has_optional_times_and_groups(self, read) -> None:
        trace = read(OWN + "\n\n" + '{"input_tokens": 5, "output_tokens": 1, "prefix_group": 2}' + "\n")
        assert list_sizes(trace) == [(None, 3, 4), (None, 5, 1)]
        assert not trace.has_times
        assert trace.has_groups
        assert trace.supports_prefix_share

    def test_own_format_accepts_token_ids(self, read) -> None:
        trace = read('{"prompt": [17, 3, 99], "output_tokens": 2, "arrival_s": 1.5}')
        assert list_sizes(trace) == [(0.0, 3, 2)]
        assert trace.rows[0].prompt.tolist() == [17, 3, 99]
        assert trace.largest_id == 99

    def test_csv_columns_may_have_any_order(self, read) -> None:
        """An empty cell is an absent value."""
        trace = read("output_tokens, input_tokens,arrival_s,prefix_group\r\n4,3,0.5,1\r\n2,8,0.75,\r\n")
        assert list_sizes(trace) == [(0.0, 3, 4), (0.25, 8, 2)]
        assert [row.prefix_group for row in trace.rows] == [1, None]

    def test_byte_order_mark_is_ignored(self, read) -> None:
        assert list_sizes(read(b"\xef\xbb\xbfinput_tokens,output_tokens\n3,4\n")) == [(None, 3, 4)]

    def test_equal_bytes_have_equal_hashes(self, read) -> None:
        assert read(OWN).sha256 == read(OWN).sha256 != read(OWN + "\n").sha256


SESSION_LINES = (("a", ', "timestamp": 5'), ("b", ', "timestamp": 6'), ("a", ""), ("b", ""))


class TestOrder:
    def test_unsorted_requests_are_sorted_and_flagged(self, read) -> None:
        trace = read("arrival_s,input_tokens,output_tokens\n2,1,1\n1,2,1\n1,3,1\n")
        assert list_sizes(trace) == [(0.0, 2, 1), (0.0, 3, 1), (1.0, 1, 1)]
        assert trace.sorted

    def test_equal_times_count_as_sorted(self, read) -> None:
        assert not read("arrival_s,input_tokens,output_tokens\n1,2,1\n1,3,1\n").sorted

    def test_turns_of_mixed_sessions_do_not_count_as_unsorted(self, read) -> None:
        """Lines of two sessions alternate, and the first turns are in order."""
        lines = [f'{{"session_id": "{s}", "input_length": 3, "output_length": 4{t}}}' for s, t in SESSION_LINES]
        trace = read("\n".join(lines))
        assert [(row.arrival_s, row.turn) for row in trace.rows] == [(0.0, 0), (None, 1), (0.001, 0), (None, 1)]
        assert not trace.sorted

    def test_negative_times_are_relative_to_the_first(self, read) -> None:
        assert list_sizes(read("arrival_s,input_tokens,output_tokens\n-2,1,1\n0,1,1\n"))[1][0] == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it should hold lines such as"),
        ("\n \n", "is empty"),
        (b"\xff\xfe\x00", "is not text"),
        ("hello\n", "line 1: neither JSON nor the names of CSV columns"),
        ("3,4\n5,6\n", "line 1: neither JSON nor the names of CSV columns"),
        ("input_tokens;output_tokens\n3;4\n", "columns are separated by commas; the file should hold"),
        ("input_tokens,output_token\n3,4\n", "'output_token' is not known; did you mean 'output_tokens'?"),
        ("arrival_s,input_tokens\n3,4\n", "line 1: no column 'output_tokens'"),
        ("{\n", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        (f"[{OWN}]", "line 1: not a JSON object; a file of requests has lines such as"),
        (f"{OWN}\nnull\n", "line 2: not a JSON object"),
        (f"{OWN}\n{OWN[:-1]}\n", "line 2: not JSON"),
        (f"\n{OWN}\n\n{OWN},\n", "line 4: not JSON"),
        ("{}", "line 1: neither 'prompt' nor 'input_tokens'"),
        ('{"input_tokens": 3}', "line 1: no 'output_tokens'"),
        ('{"input_tokens": 3, "output_token": 4}', "'output_token' is not known; did you mean 'output_tokens'?"),
        ('{"arrival": 3, "input_tokens": 3, "output_tokens": 4}', "did you mean 'arrival_s'?"),
        ('{"input_tokens": 3, "output_tokens": 4, "x": 1}', "'x' is not known; known are arrival_s"),
        (f'{{"input_tokens": 1{"0" * 400}, "output_tokens": 4}}', "000, more than any model takes"),
        (f'{OWN[:-1]}, "arrival_s": 1{"0" * 400}}}', "000, not a time"),
        (f'{OWN[:-1]}, "arrival_s": 1e300}}', "'arrival_s' is 1e+300, not a time"),
        ('{"input_tokens": -3, "output_tokens": 4}', "'input_tokens' is -3; a request has at least 1 token in"),
        ('{"input_tokens": 3, "output_tokens": 0}', "'output_tokens' is 0"),
        ('{"input_tokens": 3.5, "output_tokens": 4}', "'input_tokens' is 3.5, not a whole number"),
        ('{"input_tokens": "3", "output_tokens": 4}', "'input_tokens' is '3', not a whole number"),
        ('{"input_tokens": true, "output_tokens": 4}', "'input_tokens' is True, not a whole number"),
        ('{"input_tokens": 3, "output_tokens": 4, "arrival_s": NaN}', "'arrival_s' is nan, not a time"),
        ('{"input_tokens": 3, "output_tokens": 4, "arrival_s": "now"}', "'arrival_s' is 'now', not a time"),
        (f'{OWN}\n{OWN[:-1]}, "arrival_s": 1}}', "line 2: an arrival time, and the first request has none"),
        (f'{OWN[:-1]}, "arrival_s": 1}}\n{OWN}', "line 2: no arrival time, and the first request has one"),
        ('{"prompt": [], "output_tokens": 4}', "'prompt' is not a list of token ids"),
        ('{"prompt": [1, -1], "output_tokens": 4}', "'prompt' is not a list of token ids"),
        ('{"prompt": [1, 99999999999], "output_tokens": 4}', "'prompt' is not a list of token ids"),
        ('{"prompt": "hi", "output_tokens": 4}', "'prompt' is not a list of token ids"),
        ('{"prompt": [1], "input_tokens": 1, "output_tokens": 4}', "both 'prompt' and 'input_tokens'"),
        ('{"prompt": [1], "prefix_group": 1, "output_tokens": 4}', "both 'prompt' and 'prefix_group'"),
        ('{"input_tokens": 3, "output_tokens": 4, "prefix_group": -1}', "'prefix_group' is -1"),
        (MOONCAKE.replace('"timestamp": 5, ', ""), "line 1: no 'timestamp'"),
        (
            MOONCAKE.replace('"output_length": 4', '"x": 4'),
            "line 1: no 'output_length', only timestamp, input_length, x.",
        ),
        (MOONCAKE.replace("3", "-3"), "'input_length' is -3"),
        (MOONCAKE.replace("5", "Infinity"), "'timestamp' is inf, not a time"),
        (MOONCAKE[:-1] + ', "hash_ids": [1, 2]}', "2 'hash_ids' for 3 tokens, which are 1 block of 512"),
        (MOONCAKE[:-1] + ', "hash_ids": [-1]}', "'hash_ids' is not a list of whole numbers"),
        (MOONCAKE[:-1] + ', "hash_ids": 1}', "'hash_ids' is not a list of whole numbers"),
        (f"{MOONCAKE}\n{OWN}", "line 2: no 'input_length'"),
        ("input_tokens,output_tokens\n", "line 1: the names of the columns and no request below them"),
        ("input_tokens,output_tokens\n3\n", "line 2: 1 cells, and 2 columns have names"),
        ("input_tokens,output_tokens\n3,x\n", "line 2: 'output_tokens' is 'x', not a whole number"),
        ("input_tokens,output_tokens\n3,\n", "line 2: no 'output_tokens'"),
        ("input_tokens,output_tokens,arrival_s\n3,4,nan\n", "line 2: 'arrival_s' is nan, not a time"),
        ("input_tokens,output_tokens,arrival\n3,4,1\n", "line 1: 'arrival' is not known; did you mean 'arrival_s'?"),
        ("input_tokens,output_tokens,output_tokens\n3,4,1\n", "line 1: a column is named twice"),
    ],
    ids=lambda x: (x if isinstance(x, str) else "bytes")[:40],
)
def test_invalid_file_raises_usage_error_with_its_line(read, text: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=r"--requests .*requests\.data") as e:
        read(text)
    assert message in str(e.value)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--requests .*none cannot be read"):
        read_requests(tmp_path / "none")
    with pytest.raises(UsageError, match="is not a regular file"):
        read_requests(tmp_path)


def test_tokens_of_a_request_are_prompt_and_output() -> None:
    assert Row(arrival_s=None, input_tokens=3, output_tokens=4).tokens == 7


class TestReadings:
    """Format, units and columns of a file, detected or given by options."""

    def read_error(self, tmp_path: Path, text: str, **options: Any) -> str:
        path = tmp_path / "x.data"
        path.write_text(text)
        with pytest.raises(UsageError) as error:
            read_requests(path, Reading(**options))
        return str(error.value)

    @pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
    def test_named_columns_require_a_time_unit(self, tmp_path: Path, unit: str) -> None:
        text = '{"when": 5, "in": 3, "out": 4}\n{"when": 7, "in": 3, "out": 4}\n'
        names = "arrival:when/input_tokens:in/output_tokens:out"
        assert "the unit of 'when' is not known; add time-unit=s, time-unit=ms" in self.read_error(
            tmp_path, text, columns=names
        )
        trace = read_requests(tmp_path / "x.data", Reading(columns=names, unit=unit))
        assert trace.rows[1].arrival_s == {"s": 2.0, "ms": 2e-3, "us": 2e-6, "ns": 2e-9}[unit]

    @pytest.mark.parametrize("ours", ["arrival", "hash_ids", "session", "delay"])
    def test_named_column_that_no_request_has_is_refused(self, tmp_path: Path, ours: str) -> None:
        """Without its times the file would be served in a closed loop, without a session each request on its own."""
        path = tmp_path / "r.csv"
        path.write_text("when,in,out,empty\n0,5,2,\n1,6,3,\n")
        for theirs in ("nowhere", "empty"):
            columns = f"input_tokens:in/output_tokens:out/{ours}:{theirs}"
            with pytest.raises(
                UsageError, match=f"no request has '{theirs}', .* names for {ours}; its columns are when"
            ):
                read_requests(path, Reading(columns=columns, unit="s"))

    def test_dates_need_no_time_unit(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv"
        path.write_text("when,in,out\n2024-05-10T00:00:00Z,3,4\n2024-05-10T02:00:01+02:00,3,4\n")
        trace = read_requests(path, Reading(columns="arrival:when/input_tokens:in/output_tokens:out"))
        assert (trace.reading.unit, trace.rows[1].arrival_s) == ("date", 1.0)

    def test_unknown_columns_have_to_be_named(self, tmp_path: Path) -> None:
        found = self.read_error(tmp_path, '{"ts": 1, "prompt_len": 3, "gen": 4}\n')
        assert "its columns (ts, prompt_len, gen) are of no known format" in found
        assert "--requests file=" in found
        assert "columns=arrival:NAME/input_tokens:NAME/output_tokens:NAME,time-unit=s" in found
        assert "its columns (ts, in) are of no known format" in self.read_error(tmp_path, "ts,in\n1,2\n")

    def test_mooncake_times_with_fractions_require_a_unit(self, tmp_path: Path) -> None:
        text = MOONCAKE.replace("5", "61.5") + "\n" + MOONCAKE.replace("5", "62.75") + "\n"
        assert "'timestamp' is 61.5, and times of mooncake are whole ms; add time-unit=s" in self.read_error(
            tmp_path, text
        )
        for unit, seconds in (("s", 1.25), ("ms", 0.00125)):
            assert read_requests(tmp_path / "x.data", Reading(unit=unit)).rows[1].arrival_s == pytest.approx(seconds)

    def test_wrong_block_size_is_refused_with_the_matching_one(self, tmp_path: Path) -> None:
        text = '{"timestamp": 0, "input_length": 60, "output_length": 4, "hash_ids": [1, 2, 3, 4]}\n'
        assert "blocks of 16 would fit: add block-size=16" in self.read_error(tmp_path, text)
        assert read_requests(tmp_path / "x.data", Reading(block_size=16)).reading.block_size == 16

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ({"session_id": "a", "text_input": "hi", "output_length": 3}, "'text_input' holds text"),
            ({"session_id": "a", "turns": [{"text": "hi"}]}, "'turns' holds text"),
            ({"session_id": "a", "input_length": 3, "output_length": 3, "delay": -1}, "'delay' is -1, not a time from"),
            (
                {"session_id": "a", "input_length": 3, "output_length": 3, "context_mode": "x"},
                "'context_mode' is a way",
            ),
        ],
    )
    def test_unsupported_session_fields_are_refused(self, tmp_path: Path, line: dict[str, Any], message: str) -> None:
        assert message in self.read_error(tmp_path, json.dumps(line) + "\n")

    def test_column_of_another_format_in_a_later_line_is_refused(self, tmp_path: Path) -> None:
        later = MOONCAKE[:-1] + ', "session_id": "a"}'
        assert "line 2: 'session_id' is a column of AIPerf, with sessions; add format=aiperf" in self.read_error(
            tmp_path, f"{MOONCAKE}\n{later}\n"
        )
        trace = read_requests(tmp_path / "x.data", Reading(format="aiperf"))
        assert [row.turn for row in trace.rows] == [0, 0]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"format": "mooncacke"}, "--requests format=mooncacke: not one of own, mooncake"),
            ({"unit": "min"}, "--requests time-unit=min: not one of s, ms, us, ns, date"),
            ({"block_size": -1}, "--requests block-size=-1: not 1 to"),
            ({"columns": "arrival"}, "columns=arrival: not OURS:THEIRS"),
            ({"columns": "arival:x"}, "'arival' is not known; did you mean arrival?"),
            ({"columns": "arrival:x/arrival:y"}, "names arrival twice"),
            ({"format": "columns"}, "format=columns needs the names of the columns"),
        ],
    )
    def test_invalid_reading_options_are_refused(self, tmp_path: Path, options: dict[str, Any], message: str) -> None:
        assert message in self.read_error(tmp_path, MOONCAKE, **options)

    def test_description_has_format_duration_and_shared_tokens(self, tmp_path: Path) -> None:
        """Two of three blocks were in the prompt before: 1,024 of 2,700 tokens."""
        path = tmp_path / "x.jsonl"
        rows = [(100, 1200, [1, 2, 3]), (3600, 1500, [1, 2, 4])]
        names = ("timestamp", "input_length", "hash_ids")
        path.write_text(
            "".join(json.dumps(dict(zip(names, row, strict=True)) | {"output_length": 3}) + "\n" for row in rows)
        )
        assert read_requests(path).describe(2) == (
            f"{path}: read as mooncake (times in ms and 512 tokens a hash id): 2 requests over 3.500 s; 37.9% of the prompt tokens "
            "were in earlier prompts."
        )

    def test_failed_rows_are_left_out_and_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv"
        path.write_text("Timestamp,Request tokens,Response tokens\n5,3,0\n6,3,1\n8,4,2\n")
        trace = read_requests(path)
        assert (list_sizes(trace), trace.failures) == ([(0.0, 3, 1), (2.0, 4, 2)], 1)
        assert trace.describe(2).endswith("2 requests over 2.000 s; 1 request without output left out.")
        path.write_text("Timestamp,Request tokens,Response tokens\n5,3,0\n")
        assert "holds no request that succeeded" in self.read_error_of(path)

    def read_error_of(self, path: Path) -> str:
        with pytest.raises(UsageError) as error:
            read_requests(path)
        return str(error.value)

    @given(st.integers(0, 10**6), st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.integers(1, 70))
    def test_blocks_are_the_beginnings_of_their_token_streams(self, seed: int, hashes: list[int], size: int) -> None:
        """The fast computation of many blocks equals that of single streams."""
        slow = np.concatenate([make_token_ids(seed, HASH, one, size, 1000) for one in hashes])
        assert make_block_ids(seed, HASH, hashes, size, 1000).tolist() == slow.tolist()
