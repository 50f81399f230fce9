"""Test the formatting of numbers, sizes, words and foreign text, and the console."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dcpbench
from dcpbench.points.sizes import format_size, format_size_up
from dcpbench.show import streams, terminal
from dcpbench.show.numbers import (
    BYTES,
    MICROSECONDS,
    format_duration,
    format_gib,
    format_integer,
    format_number,
    format_percent,
    format_ratio,
    format_short_number,
    format_tok_s,
    format_value_range,
    format_with_interval,
    format_with_range,
    format_with_unit,
)
from dcpbench.show.text import (
    fit_line,
    fit_name,
    fit_text,
    format_capitalized,
    format_count,
    format_list,
    format_markdown_code,
    format_markdown_text,
    format_spreadsheet_cell,
    get_path_end,
    make_natural_key,
    make_printable,
    make_unique_names,
    summarize_long_text,
)

if TYPE_CHECKING:
    from rich.console import Console

GIB = 1 << 30
HOSTILE = "\x1b[31mü·µ\n\u202e\ud800"


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "—"),
            (float("nan"), "—"),
            (0.0, "0"),
            (1234.56, "1,235"),
            (12.3456, "12.35"),
            (0.0024, "0.002400"),
            (2e-7, "2e-07"),
        ],
    )
    def test_format_number_has_four_digits_and_a_dash_for_missing_values(self, value: float | None, text: str) -> None:
        """The value 0 is a measurement, unlike None and NaN."""
        assert format_number(value) == text

    @pytest.mark.parametrize(
        ("value", "text"), [(None, "—"), (0, "0"), (12.5, "12.5"), (12.0, "12"), (99.96, "100"), (1234.5, "1,234")]
    )
    def test_short_number_has_three_digits_without_trailing_zeros(self, value: float | None, text: str) -> None:
        assert format_short_number(value) == text

    def test_percentages_ratios_and_integers_have_their_sign(self) -> None:
        """The share 0.0296 is 3 % with two digits, and None is a dash."""
        assert (format_percent(0.0296), format_percent(None)) == ("3 %", "—")
        assert (format_percent(0), format_percent(1e-4), format_percent(1.8e-7)) == ("0 %", "0.01 %", "< 0.01 %")
        assert (format_percent(0.999), format_percent(1.23), format_percent(12.3)) == ("100 %", "123 %", "1,230 %")
        assert (format_ratio(1.0312), format_ratio(2, 2), format_ratio(None)) == ("1.031×", "2.00×", "—")
        assert (format_integer(128_000.4), format_integer(None)) == ("128,000", "—")

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.0, "0 µs"), (36.24, "36.2 µs"), (999.7, "1000 µs"), (1500.0, "1.5 ms"), (2.5e6, "2.5 s"), (2e9, "2000 s")],
    )
    def test_times_have_a_unit_that_fits_their_size(self, value: float, text: str) -> None:
        assert format_with_unit(value, MICROSECONDS) == text

    @pytest.mark.parametrize(
        ("value", "text"), [(999, "999 B"), (209_300, "209 KB"), (6_710_000, "6.71 MB"), (2e9, "2 GB")]
    )
    def test_bytes_on_an_axis_have_decimal_units(self, value: float, text: str) -> None:
        assert format_with_unit(value, BYTES) == text

    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (1000, "1000 B"),
            (1024, "1.0 KiB"),
            (1535, "1.4 KiB"),
            (3 << 19, "1.5 MiB"),
            (131 * GIB, "131.0 GiB"),
            (5000 << 40, "5000.0 TiB"),
        ],
    )
    def test_format_size_rounds_down(self, size: int, text: str) -> None:
        """The size 1,535 B is 1.499 KiB: 1.5 KiB would be more."""
        assert format_size(size) == text

    @pytest.mark.parametrize(("size", "text"), [(600, "600B"), (1535, "1.5KiB"), (1536, "1.5KiB"), (1537, "1.6KiB")])
    def test_format_size_up_rounds_up(self, size: int, text: str) -> None:
        """The size 1,535 B is 1.499 KiB, so that 1.4 would not be enough; 1,536 B are 1.5 KiB."""
        assert format_size_up(size) == text

    def test_format_gib_has_more_digits_for_small_sizes(self) -> None:
        """The size 3 MiB is 0.0029 GiB."""
        assert (format_gib(131 * GIB), format_gib(3 << 20), format_gib(None)) == ("131.0", "0.0029", "—")

    @pytest.mark.parametrize(
        ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (12_000, "3 h 20 min")]
    )
    def test_format_duration_changes_its_unit_with_the_size(self, seconds: float, text: str) -> None:
        assert format_duration(seconds) == text

    @pytest.mark.parametrize(
        ("values", "text"), [((1.021, 1.058), "1.02–1.06×"), ((1.021, 1.022), "1.02×"), ((2.0,), "2.00×")]
    )
    def test_value_range_is_one_number_if_both_ends_print_the_same(self, values: tuple[float, ...], text: str) -> None:
        assert format_value_range(values) == text

    def test_value_has_a_range_if_an_end_prints_differently(self) -> None:
        assert format_with_range(1.12, 1.101, 1.139) == "1.12× [1.10–1.14]"
        assert format_with_range(1.12, 1.121, 1.119) == "1.12×"
        assert format_with_range(1.12, 1.12, 1.139) == "1.12× [1.12–1.14]"

    @pytest.mark.parametrize(
        ("ends", "text"),
        [
            ((285.4, 286.4), "286 tok/s [285–286]"),
            ((285.6, 287.4), "286 tok/s [286–287]"),
            ((285.6, 286.4), "286 tok/s"),
            ((284.6, 284.7), "286 tok/s [285–285]"),
        ],
    )
    def test_rate_has_a_range_if_an_end_prints_differently(self, ends: tuple[float, float], text: str) -> None:
        assert format_tok_s(286.0, *ends) == text

    @pytest.mark.parametrize(
        ("value", "digits", "text"),
        [
            (-12.3456, 4, "-12.35"),
            (0.001234, 4, "0.001234"),
            (99.96, 2, "100"),
            (float("inf"), 4, "inf"),
            (9.996, 3, "10.00"),
        ],
    )
    def test_digits_count_from_the_first_nonzero_digit(self, value: float, digits: int, text: str) -> None:
        assert format_number(value, digits) == text

    @pytest.mark.parametrize(
        ("value", "digits", "text"), [(99.4, 2, "99"), (100.4, 3, "100"), (-1234.5, 3, "-1,234"), (0.01234, 2, "0.012")]
    )
    def test_short_number_is_an_integer_from_its_number_of_digits_on(
        self, value: float, digits: int, text: str
    ) -> None:
        assert format_short_number(value, digits) == text

    def test_interval_follows_its_median(self) -> None:
        assert format_with_interval(12.5, 12.41, 12.6) == "12.50 [12.41–12.60]"
        assert format_with_interval(12.5, 12.41, 12.6, 3) == "12.5 [12.4–12.6]"
        assert format_with_interval(None, None, None) == "—"


class TestWords:
    def test_format_count_and_format_list_return_phrases(self) -> None:
        assert [format_count(n, "point") for n in (0, 1, 1200)] == ["0 points", "1 point", "1,200 points"]
        assert [format_list(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
        assert format_list(["a", "b"], "or") == "a or b"

    def test_natural_key_sorts_numbers_in_names_by_value(self) -> None:
        assert sorted(["run10", "run9", "a"], key=make_natural_key) == ["a", "run9", "run10"]

    def test_long_path_keeps_its_end(self) -> None:
        assert get_path_end("aaaa/bbbb/cc.py:7", 14) == "…/bbbb/cc.py:7"
        assert get_path_end("aaaa/bbbb/cc.py:7", 13) == "…/cc.py:7"
        assert get_path_end("short.py:7", 14) == "short.py:7"
        assert get_path_end("averylongname.py:7", 8) == "…me.py:7"


class TestForeignText:
    def test_make_printable_escapes_control_characters_only(self) -> None:
        assert make_printable(HOSTILE) == "\\x1b[31mü·µ\\n\\u202e\\ud800"
        assert make_printable(HOSTILE, keep="\n") == "\\x1b[31mü·µ\n\\u202e\\ud800"

    def test_fit_functions_limit_text_to_one_line_and_length(self) -> None:
        """Escapes make a text longer, which is cut afterwards."""
        assert fit_line("a\n\t b\x1b ") == "a b\\x1b"
        assert fit_name(" \x1b ", 20) == " \\x1b "
        assert fit_name("\x1b" * 50, 10) == "\\x1b\\x1b\\…"
        assert fit_text("abcdef", 4) == "abc…"

    def test_long_texts_with_a_common_beginning_stay_different(self) -> None:
        """A text that is cut ends in a hash of the whole."""
        a, b = (summarize_long_text("x" * 3_000 + end) for end in "ab")
        assert a != b
        assert a.startswith("x" * 2_000 + "… (3,001 characters, ")
        assert summarize_long_text("two\nlines") == "two\nlines"

    def test_markdown_text_escapes_markup_links_and_mentions(self) -> None:
        assert format_markdown_text("<b> a|b\n*c* `d` $e$ @f") == "&lt;b&gt; a\\|b \\*c\\* \\`d\\` \\$e\\$ @<!-- -->f"
        assert format_markdown_text("see https://x.org") == "see https&#58;//x.org"
        assert format_markdown_code("a|b`<@") == "<code>a&#124;b&#96;&lt;&#64;</code>"

    def test_spreadsheet_cell_is_never_a_formula(self) -> None:
        assert [format_spreadsheet_cell(text) for text in ("=1+1", "-a", "tp4")] == ["'=1+1", "'-a", "tp4"]


class TestConsole:
    def test_console_without_a_terminal_is_wide_and_prints_markup_literally(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A sentence stays one line, and names in brackets stay names."""
        found = terminal.make_console()
        assert found.width == terminal.PLAIN_WIDTH
        found.print("[red]1[/] :key: " + "x" * 200, soft_wrap=True)
        terminal.make_console(error=True).print("on stderr")
        out = capsys.readouterr()
        assert out.out == "[red]1[/] :key: " + "x" * 200 + "\n"
        assert out.err == "on stderr\n"

    def test_rendered_text_has_colours_only_if_requested(self) -> None:
        def draw(console: Console) -> None:
            console.print("a   ", style="red")

        assert terminal.render_to_text(draw, 20, colour=False) == "a\n"
        assert terminal.render_to_text(draw, 20, colour=True) == "\x1b[31ma   \x1b[0m\n"

    def test_consoles_are_created_in_one_module(self) -> None:
        """Another console could differ in markup and in the width of a pipe."""
        package = Path(dcpbench.__file__).parent
        makers = [p.name for p in package.rglob("*.py") if re.search(r"\bConsole\(", p.read_text(encoding="utf-8"))]
        assert makers == ["terminal.py"]


def test_write_json_escapes_non_ascii_characters_for_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters beyond 16 bits are two escapes, as JSON requires."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    streams.write_json('{"name": "tp4·dcp4 \U0001f680é"}')
    out.flush()
    assert out.buffer.getvalue() == b'{"name": "tp4\\u00b7dcp4 \\ud83d\\ude80\\u00e9"}'


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("messages", "written"), [([], ""), (["a", "b"], "\r\x1b[Ka\r\x1b[Kb\r\x1b[K")])
def test_progress_line_is_cleared_from_a_terminal(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], written: str
) -> None:
    monkeypatch.setattr("sys.stderr", err := Tty())
    with terminal.ProgressLine() as line:
        for message in messages:
            line(message)
    assert err.getvalue() == written


def test_progress_line_is_cut_to_the_terminal_of_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line takes 8 of 9 columns, whatever stdout is: a line that wraps cannot be overwritten."""
    monkeypatch.setattr("sys.stderr", err := Tty())
    monkeypatch.setattr(err, "fileno", lambda: 2)
    monkeypatch.setattr(
        terminal.os, "get_terminal_size", lambda number: os.terminal_size((9 if number == 2 else 200, 24))
    )
    with terminal.ProgressLine() as line:
        line("load 1 of 5")
    assert err.getvalue() == "\r\x1b[Kload 1 o\r\x1b[K"


def test_progress_lines_of_a_log_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come after 2 s, then 4, 8, 16 and 32 s later, then each minute: 8 lines in 5 minutes."""
    now, shown = [0.0], []
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    write = terminal.make_rate_limited(shown.append, 2.0, slower=2.0)
    for second in range(301):
        now[0] = float(second)
        write(second)
    assert shown == [2, 6, 14, 30, 62, 122, 182, 242]


@pytest.mark.parametrize(
    ("limit", "end"),
    [(12, "/data/runs/a"), (11, "…/runs/a"), (8, "…/runs/a"), (7, "…/a"), (3, "…/a"), (2, "…a")],
)
def test_too_long_path_loses_whole_folders(limit: int, end: str) -> None:
    assert get_path_end("/data/runs/a", limit) == end


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/run", "/b/run", "/b/other"], ["a/run", "b/run", "other"]),
        (["/x/c/run", "/y/c/run", "/y/d/run"], ["x/c/run", "y/c/run", "d/run"]),
        (["/data/run", "/b/data/run"], ["/data/run", "b/data/run"]),
        (["run", "a/run", "/"], ["run", "a/run", "/"]),
    ],
)
def test_paths_with_the_same_name_get_parent_folders_until_unique(paths: list[str], names: list[str]) -> None:
    """The root folder can be one of them."""
    assert list(make_unique_names([Path(path) for path in paths]).values()) == names


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("two points failed", "Two points failed"),
        ("vLLM 0.26.0 measured at a server", "vLLM 0.26.0 measured at a server"),
        ("dcpbench's engine", "dcpbench's engine"),
        ("tp2·dcp2 is ahead", "tp2·dcp2 is ahead"),
        ("a", "A"),
        ("", ""),
    ],
)
def test_sentences_keep_names_in_lower_case(text, sentence):
    assert format_capitalized(text) == sentence
