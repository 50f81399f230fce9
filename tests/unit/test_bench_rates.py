"""Rates of benches: the floor by hand, speed-ups, and what tables, sentences and pictures say of them."""

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
from dcpbench.points.roofline import Work, compute_floor_us
from dcpbench.records.record import Environment
from tests.unit.bench_builder import timing

LIMITS = {"read": 4e12, "copy": 2e12, "matmul": 800e12, "peer": 400e9, "barrier": 3e-6}
UNITS = {"read": "B/s", "copy": "B/s", "matmul": "FLOP/s", "peer": "B/s", "barrier": "s"}


def result(variant: str, us: float, work: Work, **sizes) -> Result:
    """A correct result of `us` from a graph."""
    return Result(
        case=Case(variant=variant, calls=0, sizes=sizes),
        calls=16,
        correct=True,
        error=1e-3,
        work=work,
        graph=Graph(time=timing(us), correct=True),
        floor_us=compute_floor_us(work, LIMITS),
        bytes_s=work.memory_bytes / us * 1e6 or None,
        flop_s=work.flops / us * 1e6 or None,
        received_bytes_s=work.received_bytes / us * 1e6 or None,
    )


def record(bench: str, *results: Result, **fields) -> BenchRecord:
    """A record with this machine's limits."""
    limits = [
        Limit(name=name, unit=UNITS[name], median=value, low=value, high=value, samples=9)
        for name, value in LIMITS.items()
    ]
    default = {"performance": True, "limits": limits, "environment": Environment(device="NVIDIA H200", device_count=4)}
    return BenchRecord(bench=bench, results=list(results), **(default | fields))


def exchanges(*times: tuple[str, float, int]) -> BenchRecord:
    """bench exchange with (variant, µs, requests): 400 KB a request to receive."""
    return record(
        "exchange",
        *(
            result(v, us, Work(received_bytes=400_000 * b, wire_bytes=500_000 * b, barriers=2), requests=b, ranks=4)
            for v, us, b in times
        ),
        ranks=4,
    )


class TestFloor:
    @pytest.mark.parametrize(
        ("work", "us"),
        [
            (Work(memory_bytes=4_000_000, memory_limit="read"), 1),  # 4 MB at 4 TB/s
            (Work(memory_bytes=4_000_000), 2),  # copied at 2 TB/s
            (Work(memory_bytes=4_000_000, memory_limit="read", flops=2_400_000_000), 3),  # 2.4 GFLOP at 800 TFLOP/s
            (Work(received_bytes=4_000_000, barriers=2), 16),  # 2 · 3 µs + 4 MB at 400 GB/s
            (Work(barriers=1), 3),
        ],
    )
    def test_it_is_the_largest_term(self, work, us):
        assert compute_floor_us(work, LIMITS) == pytest.approx(us)

    def test_it_is_not_known_where_a_limit_is_not(self):
        """A floor without one of its terms would flatter."""
        assert compute_floor_us(Work(received_bytes=1, barriers=2), {"peer": 1e9}) is None
        assert compute_floor_us(Work(memory_bytes=1, flops=1), {"copy": 1e12}) is None
        assert compute_floor_us(Work(), LIMITS) is None


class TestComparisons:
    def test_a_speed_up_is_the_baselines_time_over_ones_own_at_the_same_sizes(self):
        """36 / 12 = 3 at 1 request; nothing is known of ag_rs at 8."""
        of = exchanges(("ag_rs", 36, 1), ("symm", 12, 1), ("symm", 17, 8))
        assert compute_speed_up(of.results[1], "ag_rs", of.results) == 3
        assert compute_speed_up(of.results[2], "ag_rs", of.results) is None
        assert list_baselines(of) == ["ag_rs"]

    def test_a_baseline_alone_is_compared_with_nothing(self):
        assert list_baselines(exchanges(("ag_rs", 36, 1))) == []

    def test_collectives_that_do_something_else_are_not_compared(self):
        work = Work(received_bytes=1000, barriers=1)
        names = ("all-reduce", "all-gather", "all-reduce-symm")
        of = record("collectives", *(result(n, us, work, requests=1) for n, us in zip(names, (14, 10, 7), strict=True)))
        assert [compute_speed_up(r, "all-reduce", of.results) for r in of.results] == [1, None, 2]

    def test_the_share_of_the_limit_is_floor_over_time(self):
        """2 · 3 µs + 400 KB / 400 GB/s = 7 µs, of 14."""
        assert compute_share(exchanges(("symm", 14, 1)).results[0]) == pytest.approx(0.5)


class TestSentences:
    def test_few_ratios_are_all_told(self):
        of = exchanges(("ag_rs", 36, 1), ("symm", 12, 1), ("ag_rs", 46, 8), ("symm", 20, 8))
        assert "symm is 3.00× as fast as ag_rs at requests 1, 2.30× at requests 8." in describe_findings(of)

    def test_many_are_told_by_their_ends(self):
        pairs = [(v, us * b, b) for b in (1, 2, 3, 4, 5) for v, us in (("ag_rs", 10), ("a2a", 4 + 2 * b))]
        told = describe_findings(exchanges(*pairs))
        assert "a2a is 0.71× as fast as ag_rs at requests 5 to 1.67× at requests 1; faster in 2 of 5 cases." in told

    def test_the_second_baseline_is_compared_with_the_first_and_not_the_other_way_round(self):
        told = describe_findings(exchanges(("ag_rs", 30, 1), ("ag_rs-bf16", 20, 1), ("symm", 10, 1)))
        assert "ag_rs-bf16 is 1.50× as fast as ag_rs." in told
        assert "symm is 2.00× as fast as ag_rs-bf16." in told
        assert not any(line.startswith("ag_rs is") for line in told)

    def test_shares_are_told_of_each_variant(self):
        """Floors of 7 and 14 µs: 7 / 14 and 14 / 20."""
        told = describe_findings(exchanges(("symm", 14, 1), ("symm", 20, 8)))
        assert "symm reaches 50 % at requests 1 to 70 % at requests 8 of what this machine allows." in told

    def test_what_an_outgrown_pool_costs_is_told(self):
        """13 ms with its buffer from before, 44 ms with one allocated at run time."""
        sizes = {"requests": 16, "tokens": 4194304, "buffer": "outgrown", "pool_bytes": 4 << 30}
        r = result("nccl", 13_000, Work(received_bytes=3 << 30, barriers=1), **sizes)
        told = describe_findings(record("kv-gather", Result(**(fields_of(r) | {"time": timing(44_000)}))))
        assert told[-1] == (
            "nccl outgrows the pool of 4 GiB at requests 16, tokens 4,194,304: allocating a buffer at run time makes a "
            "call of 13,000 µs take 44,000 µs."
        )

    def test_a_wrong_result_is_no_fast_one(self):
        fast = exchanges(("ag_rs", 36, 1), ("symm", 1, 1))
        wrong = Result(**(fields_of(fast.results[1]) | {"correct": False, "difference": "q"}))
        told = describe_findings(record("exchange", fast.results[0], wrong))
        assert not any("as fast as" in line for line in told)


def fields_of(r: Result) -> dict:
    """Fields of a result, not converted."""
    return {name: getattr(r, name) for name in r.__struct_fields__}


def shown(of: BenchRecord, width: int = 200) -> str:
    """The table as text."""
    text = io.StringIO()
    Console(width=width, no_color=True, file=text).print(make_table(of, width))
    return text.getvalue()


class TestTable:
    def test_it_has_rates_shares_and_ratios_and_no_column_that_is_empty(self):
        """400 KB in 14 µs = 28.6 GB/s; 500 KB on the wire; 7 of 14 µs; 28 / 14."""
        text = shown(exchanges(("ag_rs", 28, 1), ("symm", 14, 1)))
        for words in ("28.6", "500", "50 %", "2.00", "1.0e-03", "14 (13.9–14.3)", "× ag_rs"):
            assert words in text
        for words in ("TFLOP/s", "syncs", "host", "TB/s"):
            assert words not in text

    def test_sizes_that_are_the_same_for_all_are_said_once(self):
        text = shown(exchanges(("ag_rs", 28, 1), ("ag_rs", 28, 8)))
        assert "bench exchange, ranks 4" in text
        assert "requests" in text

    def test_the_legend_has_the_limits_of_this_machine(self):
        of = exchanges(("symm", 14, 1))
        told = " ".join(format_legend(of))
        assert (
            "the slowest of 4 ranks: read 4 TB/s, copy 2 TB/s, matmul 800 TFLOP/s, peer 400 GB/s, barrier 3 µs." in told
        )
        assert "L2" in told

    def test_a_limit_that_could_not_be_measured_says_why(self):
        of = record("exchange", limits=[], without=["peer: the GPUs of this machine cannot read each other's memory."])
        assert format_limits(of) == ["Not measured: peer: the GPUs of this machine cannot read each other's memory."]

    @pytest.mark.parametrize(("width", "there", "left_out"), [(139, "28.6", "(13.9"), (99, "50 %", "28.6")])
    def test_a_narrow_terminal_gets_less_and_nothing_is_cut_off(self, width, there, left_out):
        """Without intervals below 140 columns, without rates below 100."""
        of = exchanges(("ag_rs", 28, 1), ("ag_rs-bf16", 20, 1), ("symm", 14, 1))
        text = shown(of, width)
        assert there in text
        assert left_out not in text
        assert "…" not in text
        assert "left out" in format_legend(of, width)[-1]

    def test_a_cpus_table_has_errors_and_no_times(self):
        r = Result(case=Case(variant="symm", sizes={"requests": 1}, calls=0), correct=True, error=2e-4)
        text = shown(record("exchange", r, performance=False, limits=[]))
        assert "2.0e-04" in text
        assert "µs" not in text


class TestPictures:
    def test_attention_is_a_roofline(self, tmp_path):
        work = Work(memory_bytes=4_000_000, memory_limit="read", flops=400_000_000)
        results = [
            result(v, 5 + b, work, heads=h, requests=b)
            for v in ("triton", "flashinfer")
            for h in (16, 64)
            for b in (1, 8)
        ]
        write_picture(record("attention", *results), tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(("limit", "said"), [("matmul", "800"), ("matmul_fp8", "1500")])
    def test_the_roof_of_products_is_that_of_what_is_multiplied(self, limit, said, tmp_path, monkeypatch):
        """Over rows in fp8 it is another one than over bf16."""
        work = Work(memory_bytes=4_000_000, memory_limit="read", flops=400_000_000, flops_limit=limit)
        of = record(
            "attention", *(result("triton", 5 + b, work, heads=h, requests=b) for h in (16, 64) for b in (1, 8))
        )
        of.limits = [
            *of.limits,
            Limit(name="matmul_fp8", unit="FLOP/s", median=1.5e15, low=1.5e15, high=1.5e15, samples=9),
        ]
        seen = []
        monkeypatch.setattr(pictures, "save_figure", lambda figure, *_: seen.append(figure))
        write_picture(of, tmp_path / "x.png")
        words = [text.get_text() for ax in seen[0].axes for text in ax.texts]
        assert "read 4 TB/s" in words
        assert f"product {said} TFLOP/s" in words

    @pytest.mark.parametrize("limits", [True, False])
    def test_exchanges_are_curves_above_the_limit(self, limits, tmp_path):
        of = exchanges(("ag_rs", 36, 1), ("symm", 12, 1), ("ag_rs", 46, 8))
        of.limits = of.limits if limits else []
        write_picture(of, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

    def test_gathers_are_drawn_by_buffer_from_eager_times(self, tmp_path):
        results = [
            Result(
                **(
                    fields_of(
                        result("nccl", 10, Work(received_bytes=t, barriers=1), requests=1, tokens=t, buffer=buffer)
                    )
                    | {"time": timing(20)}
                )
            )
            for t, buffer in ((1000, "pool"), (1000, "plain"), (9000, "outgrown"))
        ]
        write_picture(record("kv-gather", *results), tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

    def test_what_is_not_timed_has_no_picture(self, tmp_path):
        r = Result(case=Case(variant="symm", sizes={"requests": 1}, calls=0), correct=True, error=2e-4)
        write_picture(record("exchange", r, performance=False), tmp_path / "x.png")
        assert not (tmp_path / "x.png").exists()


def test_an_amount_has_the_unit_that_fits():
    limit = Limit(name="peer", unit="B/s", median=372e9, low=0, high=0, samples=1)
    assert format_amount(limit) == "372 GB/s"


def test_labels_of_bytes_are_an_eighth_of_the_axis_apart_at_least():
    """An eighth of an axis from 1 to 256 is a factor of 2; where all are one size it has its label."""
    assert select_spaced([1, 2, 3, 4, 8, 16, 32, 64, 127, 128, 200, 256, 256]) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert select_spaced([5, 5]) == [5]
