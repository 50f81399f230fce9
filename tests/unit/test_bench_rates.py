"""Rates of benches: floors computed by hand, speed-ups, and their tables, sentences and pictures."""

import io

import pytest
from rich.console import Console

from dcpbench.bench.bench_record import BenchRecord, Case, Graph, Limit, Result
from dcpbench.bench.shown import pictures
from dcpbench.bench.shown.bench_findings import (
    compute_share,
    compute_speed_up,
    describe_findings,
    format_amount,
    format_limits,
    list_baselines,
)
from dcpbench.bench.shown.bench_table import format_legend, make_table
from dcpbench.bench.shown.pictures import select_spaced, write_picture
from dcpbench.points.roofline import OperatorCost, compute_floor_us
from dcpbench.records.record import Environment
from tests.unit.bench_builder import make_timing

LIMITS = {"read": 4e12, "copy": 2e12, "matmul": 800e12, "peer": 400e9, "barrier": 3e-6}
UNITS = {"read": "B/s", "copy": "B/s", "matmul": "FLOP/s", "peer": "B/s", "barrier": "s"}


def make_result(variant: str, us: float, work: OperatorCost, **sizes) -> Result:
    """Return a correct result that took `us` in a graph."""
    return Result(
        case=Case(variant=variant, calls=0, sizes=sizes),
        calls=16,
        correct=True,
        error=1e-3,
        work=work,
        graph=Graph(time=make_timing(us), correct=True),
        floor_us=compute_floor_us(work, LIMITS),
        bytes_s=work.memory_bytes / us * 1e6 or None,
        flop_s=work.flops / us * 1e6 or None,
        received_bytes_s=work.received_bytes / us * 1e6 or None,
    )


def record(bench: str, *results: Result, **fields) -> BenchRecord:
    """Return a record with this machine's limits."""
    limits = [
        Limit(name=name, unit=UNITS[name], median=value, low=value, high=value, samples=9)
        for name, value in LIMITS.items()
    ]
    default = {"performance": True, "limits": limits, "environment": Environment(device="NVIDIA H200", device_count=4)}
    return BenchRecord(bench=bench, results=list(results), **(default | fields))


def make_exchange_record(*times: tuple[str, float, int]) -> BenchRecord:
    """Return a record of bench exchange with results of (variant, µs, requests); each request receives 400 KB."""
    return record(
        "exchange",
        *(
            make_result(
                v, us, OperatorCost(received_bytes=400_000 * b, comm_bytes=500_000 * b, barriers=2), requests=b, ranks=4
            )
            for v, us, b in times
        ),
        ranks=4,
    )


class TestFloor:
    @pytest.mark.parametrize(
        ("work", "us"),
        [
            (OperatorCost(memory_bytes=4_000_000, memory_limit="read"), 1),  # 4 MB at 4 TB/s
            (OperatorCost(memory_bytes=4_000_000), 2),  # copied at 2 TB/s
            (
                OperatorCost(memory_bytes=4_000_000, memory_limit="read", flops=2_400_000_000),
                3,
            ),  # 2.4 GFLOP at 800 TFLOP/s
            (OperatorCost(received_bytes=4_000_000, barriers=2), 16),  # 2 · 3 µs + 4 MB at 400 GB/s
            (OperatorCost(barriers=1), 3),
        ],
    )
    def test_floor_is_the_largest_term(self, work, us):
        assert compute_floor_us(work, LIMITS) == pytest.approx(us)

    def test_floor_is_none_if_a_limit_is_unknown(self):
        """A floor without one of its terms would be too low."""
        assert compute_floor_us(OperatorCost(received_bytes=1, barriers=2), {"peer": 1e9}) is None
        assert compute_floor_us(OperatorCost(memory_bytes=1, flops=1), {"copy": 1e12}) is None
        assert compute_floor_us(OperatorCost(), LIMITS) is None


class TestComparisons:
    def test_speed_up_is_baseline_time_over_own_time_at_equal_sizes(self):
        """36 / 12 = 3 at 1 request; there is no time of ag_rs at 8."""
        bench = make_exchange_record(("ag_rs", 36, 1), ("symm", 12, 1), ("symm", 17, 8))
        assert compute_speed_up(bench.results[1], "ag_rs", bench.results) == 3
        assert compute_speed_up(bench.results[2], "ag_rs", bench.results) is None
        assert list_baselines(bench) == ["ag_rs"]

    def test_single_variant_has_no_baseline(self):
        assert list_baselines(make_exchange_record(("ag_rs", 36, 1))) == []

    def test_different_collectives_are_not_compared(self):
        work = OperatorCost(received_bytes=1000, barriers=1)
        names = ("all-reduce", "all-gather", "all-reduce-symm")
        bench = record(
            "collectives", *(make_result(n, us, work, requests=1) for n, us in zip(names, (14, 10, 7), strict=True))
        )
        assert [compute_speed_up(r, "all-reduce", bench.results) for r in bench.results] == [1, None, 2]

    def test_the_share_of_the_limit_is_floor_over_time(self):
        """2 · 3 µs + 400 KB / 400 GB/s = 7 µs, of 14."""
        assert compute_share(make_exchange_record(("symm", 14, 1)).results[0]) == pytest.approx(0.5)


class TestSentences:
    def test_few_ratios_are_all_listed(self):
        bench = make_exchange_record(("ag_rs", 36, 1), ("symm", 12, 1), ("ag_rs", 46, 8), ("symm", 20, 8))
        assert "symm is 3.00× as fast as ag_rs at requests 1, 2.30× at requests 8." in describe_findings(bench)

    def test_many_ratios_are_summarised_by_lowest_and_highest(self):
        pairs = [(v, us * b, b) for b in (1, 2, 3, 4, 5) for v, us in (("ag_rs", 10), ("a2a", 4 + 2 * b))]
        findings = describe_findings(make_exchange_record(*pairs))
        assert "a2a is 0.71× as fast as ag_rs at requests 5 to 1.67× at requests 1; faster in 2 of 5 cases." in findings

    def test_second_baseline_is_compared_with_the_first_only(self):
        findings = describe_findings(make_exchange_record(("ag_rs", 30, 1), ("ag_rs-bf16", 20, 1), ("symm", 10, 1)))
        assert "ag_rs-bf16 is 1.50× as fast as ag_rs." in findings
        assert "symm is 2.00× as fast as ag_rs-bf16." in findings
        assert not any(line.startswith("ag_rs is") for line in findings)

    def test_findings_have_the_share_of_the_floor_of_each_variant(self):
        """Floors of 7 and 14 µs: 7 / 14 and 14 / 20."""
        findings = describe_findings(make_exchange_record(("symm", 14, 1), ("symm", 20, 8)))
        assert "symm reaches 50 % at requests 1 to 70 % at requests 8 of what this machine allows." in findings

    def test_findings_have_the_cost_of_allocating_beyond_the_pool(self):
        """13 ms with the buffer of the pool, 44 ms with one allocated at run time."""
        sizes = {"requests": 16, "tokens": 4194304, "buffer": "outgrown", "pool_bytes": 4 << 30}
        r = make_result("nccl", 13_000, OperatorCost(received_bytes=3 << 30, barriers=1), **sizes)
        findings = describe_findings(record("kv-gather", Result(**(get_fields(r) | {"time": make_timing(44_000)}))))
        assert findings[-1] == (
            "nccl outgrows the pool of 4 GiB at requests 16, tokens 4,194,304: allocating a buffer at run time makes a "
            "call of 13,000 µs take 44,000 µs."
        )

    def test_wrong_result_has_no_speed_up(self):
        fast = make_exchange_record(("ag_rs", 36, 1), ("symm", 1, 1))
        wrong = Result(**(get_fields(fast.results[1]) | {"correct": False, "difference": "q"}))
        findings = describe_findings(record("exchange", fast.results[0], wrong))
        assert not any("as fast as" in line for line in findings)


def get_fields(r: Result) -> dict:
    """Return the fields of a result without conversion."""
    return {name: getattr(r, name) for name in r.__struct_fields__}


def render_table(bench: BenchRecord, width: int = 200) -> str:
    """Return the table as text."""
    text = io.StringIO()
    Console(width=width, no_color=True, file=text).print(make_table(bench, width))
    return text.getvalue()


class TestTable:
    def test_table_has_rates_shares_and_ratios_and_no_empty_column(self):
        """400 KB in 14 µs = 28.6 GB/s; 500 KB on the network; 7 of 14 µs; 28 / 14."""
        text = render_table(make_exchange_record(("ag_rs", 28, 1), ("symm", 14, 1)))
        for words in ("28.6", "500", "50 %", "2.00", "1.0e-03", "14 (13.9–14.3)", "× ag_rs"):
            assert words in text
        for words in ("TFLOP/s", "syncs", "host", "TB/s"):
            assert words not in text

    def test_common_sizes_are_in_the_title_of_the_table(self):
        text = render_table(make_exchange_record(("ag_rs", 28, 1), ("ag_rs", 28, 8)))
        assert "bench exchange, ranks 4" in text
        assert "requests" in text

    def test_the_legend_has_the_limits_of_this_machine(self):
        bench = make_exchange_record(("symm", 14, 1))
        legend = " ".join(format_legend(bench))
        assert (
            "the slowest of 4 ranks: read 4 TB/s, copy 2 TB/s, matmul 800 TFLOP/s, peer 400 GB/s, barrier 3 µs."
            in legend
        )
        assert "L2" in legend

    def test_limit_that_could_not_be_measured_is_listed_with_reason(self):
        bench = record(
            "exchange", limits=[], unmeasured=["peer: the GPUs of this machine cannot read each other's memory."]
        )
        assert format_limits(bench) == ["Not measured: peer: the GPUs of this machine cannot read each other's memory."]

    @pytest.mark.parametrize(("width", "shown_text", "left_out"), [(139, "28.6", "(13.9"), (99, "50 %", "28.6")])
    def test_narrow_terminal_gets_fewer_columns_and_no_cut_text(self, width, shown_text, left_out):
        """There are no intervals below 140 columns, and no rates below 100."""
        bench = make_exchange_record(("ag_rs", 28, 1), ("ag_rs-bf16", 20, 1), ("symm", 14, 1))
        text = render_table(bench, width)
        assert shown_text in text
        assert left_out not in text
        assert "…" not in text
        assert "left out" in format_legend(bench, width)[-1]

    def test_table_of_a_cpu_run_has_errors_and_no_times(self):
        r = Result(case=Case(variant="symm", sizes={"requests": 1}, calls=0), correct=True, error=2e-4)
        text = render_table(record("exchange", r, performance=False, limits=[]))
        assert "2.0e-04" in text
        assert "µs" not in text


class TestPictures:
    def test_picture_of_attention_is_written(self, tmp_path):
        work = OperatorCost(memory_bytes=4_000_000, memory_limit="read", flops=400_000_000)
        results = [
            make_result(v, 5 + b, work, heads=h, requests=b)
            for v in ("triton", "flashinfer")
            for h in (16, 64)
            for b in (1, 8)
        ]
        write_picture(record("attention", *results), tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(("limit", "expected"), [("matmul", "800"), ("matmul_fp8", "1500")])
    def test_roofline_uses_the_product_limit_of_the_operands_type(self, limit, expected, tmp_path, monkeypatch):
        """The limit for fp8 rows differs from that for bf16."""
        work = OperatorCost(memory_bytes=4_000_000, memory_limit="read", flops=400_000_000, flops_limit=limit)
        bench = record(
            "attention", *(make_result("triton", 5 + b, work, heads=h, requests=b) for h in (16, 64) for b in (1, 8))
        )
        bench.limits = [
            *bench.limits,
            Limit(name="matmul_fp8", unit="FLOP/s", median=1.5e15, low=1.5e15, high=1.5e15, samples=9),
        ]
        seen = []
        monkeypatch.setattr(pictures, "save_figure", lambda figure, *_: seen.append(figure))
        write_picture(bench, tmp_path / "x.png")
        (ax,) = seen[0].axes
        assert (ax.get_xlabel(), ax.get_ylabel()) == (
            "operations per byte of memory traffic (log scale)",
            "TFLOP/s (log scale)",
        )
        words = [text.get_text() for text in ax.texts]
        assert "read 4 TB/s" in words
        assert f"product {expected} TFLOP/s" in words

    @pytest.mark.parametrize("limits", [True, False])
    def test_picture_of_exchanges_is_written_with_and_without_limits(self, limits, tmp_path):
        bench = make_exchange_record(("ag_rs", 36, 1), ("symm", 12, 1), ("ag_rs", 46, 8))
        bench.limits = bench.limits if limits else []
        write_picture(bench, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

    def test_picture_of_gathers_is_written_from_eager_times(self, tmp_path):
        results = [
            Result(
                **(
                    get_fields(
                        make_result(
                            "nccl", 10, OperatorCost(received_bytes=t, barriers=1), requests=1, tokens=t, buffer=buffer
                        )
                    )
                    | {"time": make_timing(20)}
                )
            )
            for t, buffer in ((1000, "pool"), (1000, "plain"), (9000, "outgrown"))
        ]
        write_picture(record("kv-gather", *results), tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

    def test_record_without_times_has_no_picture(self, tmp_path):
        r = Result(case=Case(variant="symm", sizes={"requests": 1}, calls=0), correct=True, error=2e-4)
        write_picture(record("exchange", r, performance=False), tmp_path / "x.png")
        assert not (tmp_path / "x.png").exists()


def test_amount_is_formatted_with_a_fitting_unit():
    limit = Limit(name="peer", unit="B/s", median=372e9, low=0, high=0, samples=1)
    assert format_amount(limit) == "372 GB/s"


def test_tick_labels_are_at_least_an_eighth_of_the_axis_apart():
    """An eighth of an axis from 1 to 256 is a factor of 2; an axis with a single size has a label for it."""
    assert select_spaced([1, 2, 3, 4, 8, 16, 32, 64, 127, 128, 200, 256, 256]) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert select_spaced([5, 5]) == [5]
