"""What is said of a bench: sentences made from counts, tables and pictures without times where there are none."""

import io

import msgspec
from rich.console import Console

from dcpbench.bench.bench_record import BenchRecord
from dcpbench.bench.shown.bench_findings import describe_findings, format_warnings
from dcpbench.bench.shown.bench_table import format_legend, make_table
from dcpbench.bench.shown.pictures import write_picture
from tests.unit.bench_builder import record, result


def shown(of: BenchRecord, width: int = 200) -> str:
    """The table as text."""
    text = io.StringIO()
    Console(width=width, no_color=True, file=text).print(make_table(of, width))
    return text.getvalue()


class TestFindings:
    def test_a_wrong_result_comes_first(self):
        wrong = result("pack", correct=False, difference="layer 0: 3 of 80 rows differ")
        assert describe_findings(record(wrong))[0].startswith(
            "WRONG: pack, heads 128, requests 16, dcp 8: layer 0: 3 of 80"
        )

    def test_failed_cases_are_not_counted(self):
        assert describe_findings(record(result("pack", outcome="failed"))) == []

    def test_marks_are_explained_once_with_how_many_have_them(self):
        results = [result("pack", warnings=["noisy"]), result("pack")]
        assert format_warnings(results) == [
            "noisy (1 of 2): the time limit came before a median was known within ±1 %; give more --seconds."
        ]


class TestTable:
    def test_a_gpus_table_has_times_with_their_intervals(self):
        """100 µs with 99 to 102."""
        text = shown(record(result("pack", us=100)))
        assert "100 (99–102)" in text

    def test_a_narrow_terminal_gets_whole_medians_without_intervals(self):
        """80 columns: nothing is cut off, and what is left out is said."""
        of = record(result("combine", us=1234, requests=65536))
        assert {"1,234", "65,536"} <= set(shown(of, 80).split())
        assert "…" not in shown(of, 80)
        assert "(" not in shown(of, 80)
        assert any("left out" in line for line in format_legend(of, 80))

    def test_a_cpus_table_has_no_times_at_all(self):
        of = record(result("pack"), performance=False)
        text = shown(of) + " ".join(format_legend(of))
        assert "µs" not in text
        assert "eager" not in text

    def test_a_failed_case_says_why_and_brackets_in_it_are_text(self):
        text = shown(record(result("pack", outcome="failed", reason="OutOfMemory: [red]x[/nope]")))
        assert "failed: OutOfMemory: [red]x[/nope]" in text

    def test_a_reason_is_told_of_the_first_case_that_has_it(self):
        fails = {"outcome": "failed"}
        of = record(*(result(name, **fails, reason=why) for name, why in (("a", "no x"), ("b", "no y"), ("c", "no x"))))
        text = shown(of)
        assert [text.count(word) for word in ("failed: no x", "failed: no y", "failed, as above")] == [1, 1, 1]
        assert text.index("failed: no y") < text.index("failed, as above")

    def test_a_wrong_result_stands_out(self):
        assert "WRONG" in shown(record(result("pack", correct=False)))


class TestPicture:
    def test_it_is_a_png(self, tmp_path):
        results = [result(name, us=50.0, requests=n) for name in ("pack", "combine") for n in (1, 9)]
        write_picture(record(*results), tmp_path / "bench.png")
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    def test_without_times_there_is_none(self, tmp_path):
        write_picture(record(result("pack"), performance=False), tmp_path / "bench.png")
        assert not (tmp_path / "bench.png").exists()

    def test_cases_without_times_leave_gaps(self, tmp_path):
        results = [result("pack", us=50.0), result("pack", outcome="failed", requests=32)]
        write_picture(record(*results), tmp_path / "bench.png")
        assert (tmp_path / "bench.png").stat().st_size > 1000


def test_a_record_survives_its_file():
    """What is written can be read again, samples included."""
    of = record(result("pack", us=90))
    assert msgspec.json.decode(msgspec.json.encode(of), type=BenchRecord) == of
