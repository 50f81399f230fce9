"""Texts of a bench: sentences from counts, and tables and pictures of records without times."""

import io

import msgspec
import pytest
from rich.console import Console

from dcpbench.bench.bench_record import BenchRecord, Case
from dcpbench.bench.shown import pictures
from dcpbench.bench.shown.bench_findings import compute_share, compute_speed_up, describe_findings, format_warnings
from dcpbench.bench.shown.bench_table import format_legend, make_table
from dcpbench.bench.shown.pictures import write_picture
from tests.unit.bench_builder import make_record, make_result


def render_table(bench: BenchRecord, width: int = 200) -> str:
    """Return the table as text."""
    text = io.StringIO()
    Console(width=width, no_color=True, file=text).print(make_table(bench, width))
    return text.getvalue()


class TestFindings:
    def test_wrong_result_is_the_first_finding(self):
        wrong = make_result("pack", correct=False, difference="layer 0: 3 of 80 rows differ")
        assert describe_findings(make_record(wrong))[0].startswith(
            "WRONG: pack, heads 128, requests 16, dcp 8: layer 0: 3 of 80"
        )

    def test_failed_cases_give_no_findings(self):
        assert describe_findings(make_record(make_result("pack", outcome="failed"))) == []

    def test_warnings_are_explained_once_with_their_counts(self):
        results = [make_result("pack", warnings=["noisy"]), make_result("pack")]
        assert format_warnings(results) == [
            "noisy (1 of 2): the time limit came before a median was known within ±1 %; give more --seconds."
        ]


class TestTable:
    def test_table_of_a_gpu_has_times_with_intervals(self):
        """The median is 100 µs, and the interval 99 to 102."""
        text = render_table(make_record(make_result("pack", us=100)))
        assert "100 (99–102)" in text

    def test_narrow_terminal_gets_complete_medians_without_intervals(self):
        """At 80 columns no text is cut off, and the legend names the omitted columns."""
        bench = make_record(make_result("combine", us=1234, requests=65536))
        assert {"1,234", "65,536"} <= set(render_table(bench, 80).split())
        assert "…" not in render_table(bench, 80)
        assert "(" not in render_table(bench, 80)
        assert any("left out" in line for line in format_legend(bench, 80))

    def test_table_of_a_cpu_has_no_times(self):
        bench = make_record(make_result("pack"), performance=False)
        text = render_table(bench) + " ".join(format_legend(bench))
        assert "µs" not in text
        assert "eager" not in text

    def test_failed_case_has_its_reason_without_markup(self):
        text = render_table(make_record(make_result("pack", outcome="failed", reason="OutOfMemory: [red]x[/nope]")))
        assert "failed: OutOfMemory: [red]x[/nope]" in text

    def test_repeated_reason_is_shown_once(self):
        fails = {"outcome": "failed"}
        bench = make_record(
            *(make_result(name, **fails, reason=why) for name, why in (("a", "no x"), ("b", "no y"), ("c", "no x")))
        )
        text = render_table(bench)
        assert [text.count(word) for word in ("failed: no x", "failed: no y", "failed, as above")] == [1, 1, 1]
        assert text.index("failed: no y") < text.index("failed, as above")

    def test_wrong_result_is_marked_in_the_table(self):
        assert "WRONG" in render_table(make_record(make_result("pack", correct=False)))

    def test_wrong_result_has_no_share_of_the_limit_and_no_speed_up(self):
        """The call did nothing: 0.5 µs, while the machine needs 50 µs."""
        wrong = make_result("symm", us=0.5, correct=False, floor_us=50.0)
        right = make_result("ag_rs", us=100.0, floor_us=50.0)
        assert compute_share(wrong) is None
        assert compute_share(right) == 0.5
        assert compute_speed_up(wrong, "ag_rs", [wrong, right]) is None


class TestPicture:
    @pytest.fixture
    def saved(self, monkeypatch):
        """Return the list of figures that are saved."""
        figures = []
        monkeypatch.setattr(pictures, "save_figure", lambda figure, *_: figures.append(figure))
        return figures

    def test_wrong_results_are_not_drawn(self, saved, tmp_path):
        results = [make_result("pack", us=50.0, requests=n, correct=n > 1) for n in (1, 9, 20)]
        write_picture(make_record(*results), tmp_path / "bench.png")
        assert len(saved[0].axes[0].get_lines()[0].get_xdata()) == 2

    def test_more_variants_than_colours_look_different(self, saved, tmp_path):
        results = [make_result(f"variant-{i}", us=50.0) for i in range(9)]
        write_picture(make_record(*results), tmp_path / "bench.png")
        handles = saved[0].legends[0].legend_handles
        assert len({(h.get_color(), h.get_marker(), h.get_linestyle()) for h in handles}) == 9

    def test_rows_of_a_linear_layer_are_points_of_one_line(self, saved, tmp_path):
        cases = [Case(variant="triton", sizes={"layer": "o", "rows": n}, calls=61) for n in (1, 9)]
        results = [make_result("triton", us=50.0, case=case) for case in cases]
        write_picture(msgspec.structs.replace(make_record(*results), bench="linear"), tmp_path / "bench.png")
        assert len(saved[0].axes) == 1

    def test_picture_is_a_png(self, tmp_path):
        results = [make_result(name, us=50.0, requests=n) for name in ("pack", "combine") for n in (1, 9)]
        write_picture(make_record(*results), tmp_path / "bench.png")
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    def test_record_without_times_has_no_picture(self, tmp_path):
        write_picture(make_record(make_result("pack"), performance=False), tmp_path / "bench.png")
        assert not (tmp_path / "bench.png").exists()

    def test_picture_is_drawn_with_a_failed_case(self, tmp_path):
        results = [make_result("pack", us=50.0), make_result("pack", outcome="failed", requests=32)]
        write_picture(make_record(*results), tmp_path / "bench.png")
        assert (tmp_path / "bench.png").stat().st_size > 1000


def test_record_is_read_back_from_json_unchanged():
    bench = make_record(make_result("pack", us=90))
    assert msgspec.json.decode(msgspec.json.encode(bench), type=BenchRecord) == bench
