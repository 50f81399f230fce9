"""What is said of a bench: sentences made from counts, tables and pictures without times where there are none."""

import io

import msgspec
import pytest
from rich.console import Console

from dcpbench.bench.record import BenchRecord, Graph
from dcpbench.bench.shown.findings import describe_findings, format_times, format_warnings
from dcpbench.bench.shown.pictures import write_picture
from dcpbench.bench.shown.table import format_legend, make_table
from tests.unit.bench_builder import REFUSED, record, result, timing


def shown(of: BenchRecord, width: int = 200) -> str:
    """The table as text."""
    text = io.StringIO()
    Console(width=width, no_color=True, file=text).print(make_table(of, width))
    return text.getvalue()


class TestFindings:
    def test_a_fix_that_still_synchronises_is_told_so_with_what_was_counted(self):
        """The sentence holds the count: two syncs are `twice`, five would be `5 times`."""
        fix = "filter is the published fix of check-all, meant to avoid synchronisation: it does not, it still"
        assert f"{fix} synchronises twice a call." in describe_findings(record(result("filter", syncs=2.0)))
        assert f"{fix} synchronises 5 times a call." in describe_findings(record(result("filter", syncs=5.0)))

    def test_a_fix_that_does_not_synchronise_is_told_so_too(self):
        (told,) = describe_findings(record(result("host-slice", syncs=0.0)))
        assert told.startswith("host-slice is the published fix of cuda-slice")
        assert told.endswith("meant to avoid synchronisation, and it does.")

    def test_nothing_is_said_of_what_was_not_counted(self):
        assert describe_findings(record(result("filter", syncs=None))) == []

    def test_counts_that_differ_between_cases_are_all_named(self):
        told = describe_findings(record(result("check-all", syncs=1.0), result("check-all", syncs=3.0, tokens=32)))
        assert told[0] == "check-all synchronises once or 3 times a call, depending on the case."

    def test_the_lines_that_wait_are_named(self):
        told = describe_findings(record(result("filter", syncs=2.0)))
        assert "filter waits for aten::nonzero in filter_always (kv_write.py:47), twice." in told

    def test_host_time_and_replays_are_ranges_over_all_cases(self):
        """Host times are 100 µs above the eager ones: 110 and 140; one replay of 4 µs."""
        graph = Graph(captured=True, time=timing(4), correct=True)
        fast = result("masked-kernel", syncs=0.0, us=10, graph=graph)
        told = describe_findings(record(fast, result("masked-kernel", syncs=0.0, us=40, tokens=32)))
        assert "Host time inside a call while the GPU is 100 µs behind: masked-kernel 110 to 140 µs." in told
        assert "GPU time of a call replayed from a CUDA graph: masked-kernel 4 µs." in told

    def test_a_refused_capture_is_a_fact_with_its_reason(self):
        told = describe_findings(record(result("filter", syncs=2.0, us=90, graph=REFUSED)))
        assert told[-1] == (
            "filter cannot be captured in a CUDA graph: CUDA error: operation not permitted when stream is capturing"
        )

    def test_a_wrong_result_comes_first(self):
        wrong = result("filter", syncs=0.0, correct=False, difference="layer 0: 3 of 80 rows differ")
        assert describe_findings(record(wrong))[0].startswith(
            "WRONG: filter, tokens 16, dcp 8, dtype bf16: layer 0: 3 of 80"
        )

    def test_failed_cases_are_not_counted(self):
        assert describe_findings(record(result("filter", syncs=2.0, outcome="failed"))) == []

    @pytest.mark.parametrize(("count", "word"), [(1, "once"), (2, "twice"), (3, "3 times"), (1.5, "1.5 times")])
    def test_counts_have_words(self, count, word):
        assert format_times(count) == word

    def test_marks_are_explained_once_with_how_many_have_them(self):
        results = [result("filter", syncs=2.0, marks=["noisy"]), result("filter", syncs=2.0)]
        assert format_warnings(results) == [
            "noisy (1 of 2): the time limit came before a median was known within ±1 %; give more --seconds."
        ]


class TestTable:
    def test_a_gpus_table_has_times_with_their_intervals(self):
        """100 µs with 99 to 102; the host's 200 with 198 to 204."""
        text = shown(record(result("filter", syncs=2.0, us=100, graph=REFUSED)))
        assert "100 (99–102)" in text
        assert "200 (198–204)" in text
        assert "refused" in text

    def test_a_narrow_terminal_gets_whole_medians_without_intervals(self):
        """80 columns: nothing is cut off, and what is left out is said."""
        of = record(result("masked-kernel", syncs=0.0, us=1234, tokens=65536))
        assert {"1,234", "1,334", "65,536"} <= set(shown(of, 80).split())
        assert "…" not in shown(of, 80)
        assert "(" not in shown(of, 80)
        assert any("left out" in line for line in format_legend(of, 80))

    def test_a_refusal_holds_for_every_case_of_the_variant(self):
        """The capture is tried with the first case only."""
        text = shown(record(result("filter", syncs=2.0, us=9, graph=REFUSED), result("filter", syncs=2.0, us=9)))
        assert text.count("refused") == 2

    def test_a_cpus_table_has_no_times_at_all(self):
        of = record(result("filter", syncs=2.0), performance=False)
        text = shown(of) + " ".join(format_legend(of))
        assert "µs" not in text
        assert "eager" not in text
        assert "dry-run" in text

    def test_a_failed_case_says_why_and_brackets_in_it_are_text(self):
        text = shown(record(result("filter", syncs=None, outcome="failed", reason="OutOfMemory: [red]x[/nope]")))
        assert "failed: OutOfMemory: [red]x[/nope]" in text

    def test_a_reason_is_told_of_the_first_case_that_has_it(self):
        fails = {"syncs": None, "outcome": "failed"}
        of = record(*(result(name, **fails, reason=why) for name, why in (("a", "no x"), ("b", "no y"), ("c", "no x"))))
        text = shown(of)
        assert [text.count(word) for word in ("failed: no x", "failed: no y", "failed, as above")] == [1, 1, 1]
        assert text.index("failed: no y") < text.index("failed, as above")

    def test_a_wrong_result_stands_out(self):
        assert "WRONG" in shown(record(result("filter", syncs=2.0, correct=False)))


class TestPicture:
    @pytest.mark.parametrize("performance", [True, False])
    def test_it_is_a_png(self, performance, tmp_path):
        us = 50.0 if performance else None
        results = [
            result(v, syncs=s, us=us, tokens=t) for v, s in (("filter", 2.0), ("check-all", 0.0)) for t in (1, 9)
        ]
        write_picture(record(*results, performance=performance), tmp_path / "bench.png")
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    def test_cases_without_counts_or_times_leave_gaps(self, tmp_path):
        results = [result("filter", syncs=None), result("filter", syncs=None, outcome="failed", tokens=32)]
        write_picture(record(*results), tmp_path / "bench.png")
        assert (tmp_path / "bench.png").stat().st_size > 1000


def test_a_record_survives_its_file():
    """What is written can be read again, refusals and samples included."""
    of = record(result("filter", syncs=2.0, us=90, graph=REFUSED))
    assert msgspec.json.decode(msgspec.json.encode(of), type=BenchRecord) == of
