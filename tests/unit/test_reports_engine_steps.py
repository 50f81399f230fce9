"""Decode steps of several engines by part: which engine is ahead, ratios of parts, and parts that cannot be separated."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.measuring.profiling import OTHER
from dcpbench.measuring.ranges import PHASES
from dcpbench.points.layout import Layout
from dcpbench.records.record import EngineSettings, Floor, Phases, Server
from dcpbench.reports import (
    answer,
    dataframes,
    engine_steps,
    engine_steps_figure,
    engines,
    explain,
    figures,
    overview,
    plots,
    render_terminal_table,
    step_parts,
    write_report,
)
from dcpbench.reports.style import Style
from dcpbench.show.terminal import make_console
from dcpbench.syncs.kernel_time import PARTS, UNKNOWN
from tests.unit import record_builder as build
from tests.unit.unsaved_figures import leave_figures_unsaved

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record
    from dcpbench.reports.dataframes import Frames

TP, DCP, DP = Layout(2), Layout(2, 1, 2), Layout(2, 2)
VLLM, SGLANG = "engine vllm 0.26.0", "engine sglang 0.5.17"
OWN_PHASES = {  # phases of a step of dcpbench in µs; 3,350 together, and 50 without a kernel
    "attention": 1000.0,
    "qkv_proj": 300.0,
    "o_proj": 200.0,
    "moe": 1500.0,
    "norm": 100.0,
    "attn_reduce": 250.0,
}
VLLM_PARTS = {  # parts of a step of vLLM in µs; 3,640 together, and 360 without a kernel
    "attention": 800.0,
    "projections": 1000.0,
    "experts": 1400.0,
    "quantisation": 150.0,
    "norm and rope": 50.0,
    "all-reduce": 200.0,
    "unknown": 40.0,
}


def profile(us: dict[str, float], idle_us: float, step_us: float | None = None) -> Phases:
    """Return a profiled step, by default as long as its parts and idle time."""
    step_us = sum(us.values()) + idle_us if step_us is None else step_us
    return Phases(step_us=step_us, phase_us=us, idle_us=idle_us, idle_fraction=0.01, kernels=900, steps=3)


def measure_own(
    layout: Layout = TP,
    ms: float = 3.4,
    us: dict[str, float] | None = None,
    *,
    context: int = 4000,
    concurrency: int = 8,
    **changes: Any,
) -> Record:
    """Return a decode point of dcpbench's engine with steps of exactly `ms`, 50 µs of which have no kernel."""
    point = build.make_point(
        layout,
        model="deepseek-v3",
        concurrency=concurrency,
        context=context,
        dtype="bf16",
        weights_dtype="fp8",
        backend="triton",
    )
    environment = msgspec.structs.replace(build.GPU, device_count=2)
    record = build.make_ok_record(
        point, median_ms=ms, noise=0.0, environment=environment, started_at=f"{layout} {context} {ms}"
    )
    assert record.conditions is not None
    conditions = msgspec.structs.replace(record.conditions, layers_held=61)
    return msgspec.structs.replace(
        record, **({"phases": profile(us or OWN_PHASES, 50), "conditions": conditions} | changes)
    )


def measure_server(
    origin: str = VLLM,
    layout: Layout = TP,
    ms: float = 3.9,
    us: dict[str, float] | None = None,
    *,
    idle_us: float = 360.0,
    **changes: Any,
) -> Record:
    """Return the same point of another engine, with step times of the client and kernels of the profiler."""
    load = {name: changes.pop(name) for name in ("context", "concurrency") if name in changes}
    own = measure_own(layout, ms, **load)
    name = origin.split()[1]
    exchange = "none" if layout.dcp == 1 else "unknown"
    unknown = {"dtype": "unknown", "weights_dtype": "", "ep": "unknown", "weights": "unknown", "page_size": 0}
    fields: dict[str, Any] = {
        "point": msgspec.structs.replace(own.point, backend=name, exchange=exchange, interleave=0, **unknown),
        "origin": origin,
        "phases": profile(us or VLLM_PARTS, idle_us),
        "kv": None,
        "conditions": None,
        "server": Server(
            engine=name,
            kv_capacity_tokens=9_000_000 * layout.dcp,
            settings=EngineSettings(weights_dtype="fp8", kv_dtype="bfloat16"),
        ),
        "started_at": f"{origin} {layout} {ms} {load}",
    }
    return msgspec.structs.replace(own, **(fields | changes))


def write(tmp_path: Path, *runs: list[Record]) -> list[Path]:
    return [build.write_records(tmp_path / f"run-{n}", records) for n, records in enumerate(runs)]


def read(tmp_path: Path, *runs: list[Record]) -> Frames:
    return dataframes.load_frames(write(tmp_path, *runs))


def read_table(report: Frames) -> list[dict[str, str]]:
    table = engine_steps.build_table(report)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


class TestMapping:
    def test_each_phase_and_part_belongs_to_one_common_part(self) -> None:
        own = Counter(name for part in step_parts.STEP_PARTS for name in part.phases)
        other = Counter(name for part in step_parts.STEP_PARTS for name in part.kernels)
        assert own == Counter({*PHASES, OTHER})
        assert other == Counter({*(part for part, _ in PARTS), UNKNOWN})

    def test_name_in_both_engines_has_one_common_part(self) -> None:
        for part in step_parts.STEP_PARTS:
            assert {step_parts.find_step_part(name) for name in (*part.phases, *part.kernels)} == {part.name}

    def test_unlisted_name_is_unknown_and_empty_phase_is_absent(self) -> None:
        row = {
            "phase_attention_us": 3.0,
            "phase_new_us": 2.0,
            "phase_unknown_us": 1.0,
            "phase_moe_us": 0.0,
            "idle_us": 9.0,
        }
        assert step_parts.compute_parts(row) == {"attention": 3.0, "unknown": 3.0}


class TestTable:
    def test_each_part_has_its_time_and_ratio_to_dcpbench(self, tmp_path: Path) -> None:
        """Projections of dcpbench: 300 + 200. vLLM: 1,000 / 500 = 2; 1,400 / 1,500 = 0.93; sums 2,400 / 2,000 = 1.2;
        norms: (150 + 50) / 100 = 2; 360 / 50 = 7.2; unknown 40 of 4,000. The timed step: 3.9 / 3.4 = 1.15; 4.0 / 3.9 = 1.03.
        """
        own, vllm = read_table(read(tmp_path, [measure_own()], [measure_server()]))
        assert (
            own
            | {
                "engine": "dcpbench",
                "step ms": "3.400",
                "× step": "1.00×",
                "profiled step ms (÷ step)": "3.400 (1.00×)",
                "attention": "1.00",
                "projections": "0.500",
                "projections and experts": "2.00",
                "unknown": "—",
            }
            == own
        )
        assert (
            vllm
            | {
                "engine": "vLLM 0.26.0",
                "step ms": "3.900",
                "× step": "1.15×",
                "profiled step ms (÷ step)": "4.000 (1.03×)",
                "attention": "0.800 (0.80×)",
                "all-reduce": "0.200 (0.80×)",
                "projections": "1.00 (2.00×)",
                "experts": "1.40 (0.93×)",
                "projections and experts": "2.40 (1.20×)",
                "norms, rope, KV write": "0.200 (2.00×)",
                "no kernel": "0.360 (7.20×)",
                "unknown": "0.0400 (1 %)",
                "sum / profiled step": "100.0 %",
            }
            == vllm
        )

    def test_part_without_separate_kernels_is_a_dash_and_named(self, tmp_path: Path) -> None:
        """SGLang's exchange may be inside a kernel of another part."""
        own = measure_own(DCP, us=OWN_PHASES | {"q_gather": 60.0, "merge": 40.0})
        vllm = measure_server(VLLM, DCP, ms=4.1, us=VLLM_PARTS | {"exchange": 90.0, "merge": 30.0})
        report = read(tmp_path, [own], [vllm], [measure_server(SGLANG, DCP)])
        assert [row["exchange and merge"] for row in read_table(report)] == ["0.100", "0.120 (1.20×)", "—"]
        (text,) = [text for text in engine_steps.describe_limits(report) if "no kernels of its own" in text]
        assert text == (
            "SGLang 0.5.17 has no kernels of its own for exchange and merge at tp2·dcp2: what it does of that work is in another "
            "part or unknown."
        )

    def test_ratios_without_dcpbench_are_to_the_fastest_engine(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_server(VLLM, ms=4.0)], [measure_server(SGLANG, ms=2.0)])
        assert engine_steps.compare_steps(report).reference == "SGLang 0.5.17"
        assert {row["engine"]: row["× step"] for row in read_table(report)} == {
            "SGLang 0.5.17": "1.00×",
            "vLLM 0.26.0": "2.00×",
        }

    def test_point_not_run_by_dcpbench_has_no_ratio(self, tmp_path: Path) -> None:
        other = [[measure_server(o, context=c) for c in (4000, 8000)] for o in (VLLM, SGLANG)]
        rows = read_table(read(tmp_path, [measure_own()], *other))
        assert [(row["load"], row["× step"]) for row in rows[3:]] == [("concurrency 8 · context 8,000", "—")] * 2

    def test_no_comparison_of_parts_without_a_profile(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_own(phases=None)], [measure_server(phases=None)])
        assert not engine_steps.build_table(report).rows
        assert engine_steps.describe_limits(report) == []

    def test_empty_profile_counts_as_not_profiled(self, tmp_path: Path) -> None:
        empty = measure_server(phases=profile({"attention": 0.0}, 0.0, step_us=0.0))
        report = read(tmp_path, [measure_own()], [empty])
        assert read_table(report)[1]["attention"] == "—"
        assert "Not profiled: vLLM 0.26.0 (1 point)." in engine_steps.describe_limits(report)

    def test_engine_without_a_profile_has_dashes_and_is_named(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_own()], [measure_server(phases=None)])
        assert read_table(report)[1] | {"× step": "1.15×", "attention": "—", "unknown": "—"} == read_table(report)[1]
        assert "Not profiled: vLLM 0.26.0 (1 point)." in engine_steps.describe_limits(report)


class TestSlowerParts:
    def test_slower_part_of_dcpbench_is_named_with_its_loss(self, tmp_path: Path) -> None:
        """Ratios are 1,000 / 800 and 1,000 / 500 µs; the second point loses 0.5 ms of a profiled step of 3.4 ms."""
        other = [measure_server(), measure_server(context=8000, us=VLLM_PARTS | {"attention": 500.0})]
        report = read(tmp_path, [measure_own(), measure_own(context=8000)], other)
        texts = engine_steps.describe_slower_parts(report)
        assert texts == [
            (
                "dcpbench's attention takes 1.25–2.00 times as long as vLLM 0.26.0's at 2 of 2 points (most at tp2, 8 requests of 8,000 "
                "tokens: 2.00 times, 0.50 ms of the profiled step of 3.40 ms)."
            ),
            (
                "dcpbench's all-reduce takes 1.25 times as long as vLLM 0.26.0's at 2 of 2 points (most at tp2, 8 requests of 4,000 "
                "tokens: 1.25 times, 0.050 ms of the profiled step of 3.40 ms)."
            ),
        ]

    def test_experts_are_compared_only_with_the_projections(self, tmp_path: Path) -> None:
        """Engines count shared experts in different parts. dcpbench's experts take 1,500 µs, vLLM's 1,400; with the
        projections 2,000 and 2,400.
        """
        found = engine_steps.find_slower_parts(
            engine_steps.compare_steps(read(tmp_path, [measure_own()], [measure_server()]))
        )
        assert {one.part for one in found} == {"attention", "all-reduce"}

    def test_sum_with_a_missing_part_is_not_compared(self, tmp_path: Path) -> None:
        """vLLM's experts have unknown names."""
        vllm = measure_server(us={"attention": 1000.0, "projections": 100.0, "unknown": 900.0})
        report = read(tmp_path, [measure_own()], [vllm])
        assert read_table(report)[1]["projections and experts"] == "—"
        found = engine_steps.find_slower_parts(engine_steps.compare_steps(report))
        assert "projections and experts" not in {one.part for one in found}

    def test_slower_timed_step_is_listed_first(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_own(ms=3.4)], [measure_server(ms=3.2)])
        first, *_ = engine_steps.find_slower_parts(engine_steps.compare_steps(report))
        assert (first.part, first.engine, first.compared) == ("step", "vLLM 0.26.0", 1)
        assert first.worst == pytest.approx(3.4 / 3.2)
        assert first.lost_ms == pytest.approx(0.2)
        text = engine_steps.format_slower_part(first, "dcpbench")
        assert text == (
            "dcpbench's step takes 1.06 times as long as vLLM 0.26.0's at the one point compared (tp2, 8 requests of 4,000 tokens: 1.06 "
            "times, 0.20 ms of the step of 3.40 ms)."
        )

    def test_difference_within_that_of_launches_is_ignored(self, tmp_path: Path) -> None:
        """Attention takes 1.5 % longer."""
        report = read(tmp_path, [measure_own(us={"attention": 1015.0})], [measure_server(us={"attention": 1000.0})])
        assert engine_steps.describe_slower_parts(report) == [
            "No compared part takes longer in dcpbench than in another engine (1 compared point)."
        ]

    def test_longer_idle_time_is_named(self, tmp_path: Path) -> None:
        own = measure_own(ms=4.07, phases=profile(OWN_PHASES, 720.0))
        texts = engine_steps.describe_slower_parts(read(tmp_path, [own], [measure_server(ms=4.0)]))
        assert texts[0].startswith(
            "In dcpbench's profiled step no kernel runs for 2.00 times as long as in vLLM 0.26.0's at the one point compared"
        )

    def test_attention_dp_compares_the_sum_of_exchange_and_all_reduce(self, tmp_path: Path) -> None:
        """dcpbench sums over experts in its all-reduce, vLLM in a reduce-scatter: 90 + 10 and 50 µs."""
        own = measure_own(DP, us={"attention": 100.0, "dp_gather": 10.0, "mlp_reduce": 90.0})
        vllm = measure_server(VLLM, DP, us={"attention": 100.0, "exchange": 50.0})
        report = read(tmp_path, [own], [vllm])
        found = engine_steps.find_slower_parts(engine_steps.compare_steps(report))
        assert {one.part: one.worst for one in found} == {"exchange, merge and all-reduce": 2.0}
        assert step_parts.DP_CONTENTS in engine_steps.describe_limits(report)


class TestSums:
    def test_parts_that_do_not_add_up_are_marked(self, tmp_path: Path) -> None:
        """3,640 + 360 of 4,400 µs are 90.9 %."""
        off = measure_server(phases=profile(VLLM_PARTS, 360.0, step_us=4400.0))
        report = read(tmp_path, [measure_own()], [off])
        assert [row["sum / profiled step"] for row in read_table(report)] == ["100.0 %", "90.9 %*"]
        assert dict(zip(report.points["run"], report.points["warnings"], strict=True)) == {
            "dcpbench": (),
            "vLLM 0.26.0": ("phases_differ",),
        }
        assert (
            "Parts and idle time do not add up to the profiled step within 3 %, so they are not to be compared: vLLM 0.26.0 "
            "(1 point)."
        ) in engine_steps.describe_limits(report)

    def test_error_of_two_percent_is_within_the_limit(self) -> None:
        assert profile(VLLM_PARTS, 360.0, step_us=4080.0).sum_error == pytest.approx(4000 / 4080 - 1)

    def test_ratio_of_the_profiled_to_the_timed_step_is_named(self, tmp_path: Path) -> None:
        """4.0 / 3.9 = 1.03."""
        text = engine_steps.describe_limits(read(tmp_path, [measure_own()], [measure_server()]))[0]
        assert "not scaled" in text
        assert "takes 1.00 times (dcpbench) and 1.03 times (vLLM 0.26.0) as long as the timed one." in text

    def test_large_share_of_unknown_kernels_is_named(self, tmp_path: Path) -> None:
        """440 of 4,400 µs are 10 %."""
        report = read(tmp_path, [measure_own()], [measure_server(us=VLLM_PARTS | {"unknown": 440.0})])
        (text,) = [text for text in engine_steps.describe_limits(report) if "unknown names" in text]
        assert text == (
            "Kernels with unknown names take 10 % (vLLM 0.26.0) of the profiled step; above 3 % the parts of vLLM 0.26.0 are incomplete."
        )


class TestProlongedSteps:
    def test_waits_of_a_prolonged_step_are_not_compared(self, tmp_path: Path) -> None:
        """The profiler prolongs the step by 4.0 / 3.5 = 1.14: attention, 1,000 / 800, is compared, and all-reduce, 250
        / 200, is not.
        """
        report = read(tmp_path, [measure_own()], [measure_server(ms=3.5)])
        found = engine_steps.find_slower_parts(engine_steps.compare_steps(report))
        assert {one.part for one in found} == {"attention"}
        row = read_table(report)[1]
        assert (row["profiled step ms (÷ step)"], row["all-reduce"], row["no kernel"]) == (
            "4.000 (1.14×*)",
            "0.200",
            "0.360",
        )
        assert (
            "Where the profiled step is more than 3 % longer than the timed one (*), it contains waits for the host or for another rank that "
            "the profiler causes: vLLM 0.26.0 (1 point). There exchange and merge, all-reduce and no kernel are not compared."
        ) in engine_steps.describe_limits(report)

    def test_waits_left_out_of_a_profiled_step_are_named(self, tmp_path: Path) -> None:
        phases = msgspec.structs.replace(profile(VLLM_PARTS, 160.0), host_wait_us=1260.0, disturbed=12)
        report = read(tmp_path, [measure_own()], [measure_server(ms=3.8, phases=phases)])
        assert (
            "Waits of the GPU for the host that the profiler causes are left out of the profiled step: 1.3 ms a step at points of "
            "vLLM 0.26.0 (1 point)."
        ) in engine_steps.describe_limits(report)
        assert not [text for text in engine_steps.describe_limits(report) if "(*)" in text]

    def test_terminal_marks_prolonged_steps_and_names_engines_of_floors(self, tmp_path: Path) -> None:
        floor = Floor(floor_ms=2.0, phase_floor_us={"attention": 500.0}, experts="expected")
        own, other = measure_own(floor=floor), measure_server(ms=3.5, floor=floor)
        console = make_console()
        with console.capture() as shown:
            console.print(render_terminal_table(write(tmp_path, [own], [other])), width=2000)
        text = shown.get()
        assert "4.00*" in text
        assert "3.40*" not in text
        for engine in ("dcpbench", "vLLM 0.26.0"):
            assert f", {engine}: a step takes " in text


class TestDifferences:
    def test_difference_names_its_largest_parts(self, tmp_path: Path) -> None:
        """Profiled: 4.0 - 3.4 = 0.6 ms; products 2,400 - 2,000, idle 360 - 50, norms 200 - 100, unknown 40, and
        shorter parts 250 less, among them attention: 400 + 310 + 100 + 40 - 250 = 600 µs.
        """
        report = read(tmp_path, [measure_own()], [measure_server()])
        assert engine_steps.describe_differences(report) == [
            (
                "vLLM 0.26.0's step takes 1.15 times as long as dcpbench's (1 point, 0.50 ms more). Shares of the difference between the "
                "profiled steps: projections and experts 67 % (0.40 ms), no kernel 52 % (0.31 ms) and norms, rope, KV write 17 % (0.10 ms). "
                "Parts that take less time in vLLM 0.26.0 subtract 42 %, so that all shares add up to 100 %."
            )
        ]

    def test_prolonged_steps_count_only_as_timed(self, tmp_path: Path) -> None:
        own = [measure_own(), measure_own(context=8000)]
        report = read(tmp_path, own, [measure_server(), measure_server(ms=3.5, context=8000)])
        (found,) = engine_steps.find_differences(engine_steps.compare_steps(report))
        assert found.times == pytest.approx((3.9 / 3.4, 3.5 / 3.4))
        assert found.profiled == 1
        (text,) = engine_steps.describe_differences(report)
        assert "at the 1 point that the profiler does not prolong" in text

    def test_differences_replace_the_latency_bullet(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_own()], [measure_server()])
        bullets = overview.format_bullets(report)
        assert engine_steps.describe_differences(report)[0] in bullets
        assert not [text for text in bullets if text.startswith("Latency")]


class TestKvLimits:
    @pytest.mark.parametrize("flag", ["--num-gpu-blocks-override 75000", "--max-total-tokens=1200000"])
    def test_kv_cache_limited_by_a_flag_is_not_compared(self, tmp_path: Path, flag: str) -> None:
        """The flag gives both layouts 9 M tokens, so dcp 2 would gain nothing."""

        def limit(record: Record) -> Record:
            assert isinstance(record.server, Server)
            server = msgspec.structs.replace(
                record.server, kv_capacity_tokens=9_000_000, facts={"command": f"vllm serve m {flag}"}
            )
            return msgspec.structs.replace(record, server=server)

        other = [limit(measure_server(layout=layout)) for layout in (TP, DCP)]
        report = read(tmp_path, [measure_own(TP), measure_own(DCP)], other)
        text = overview.format_answer(report)
        assert "1.00 (vLLM" not in text
        assert text.endswith("; a flag limits the KV cache of vLLM 0.26.0.")
        cells = [row[-1] for row in engines.build_table(report).rows if "vLLM 0.26.0" in row]
        assert cells == ["9,000,000 (limited by a flag)"] * 2
        rows = engines.compare_engines(report).rows
        figure = figures.draw_engines(rows, Style.from_points(report.everything), "title")
        assert "KV capacity (tokens)" not in [ax.get_title() for ax in figure.axes]
        assert any(
            "so that its capacity without it is unknown" in text for text in explain.explain_bounds(report.points)
        )


def make_study() -> list[list[Record]]:
    """Return runs in which dcpbench is ahead at short contexts and vLLM at long ones; DCP pays at long contexts in
    both.
    """
    steps = {(TP, 4000): (3.0, 3.6), (DCP, 4000): (3.3, 3.9), (TP, 128000): (6.0, 5.4), (DCP, 128000): (4.0, 4.5)}
    return [
        [measure_own(layout, own, context=context) for (layout, context), (own, _) in steps.items()],
        [measure_server(VLLM, layout, other, context=context) for (layout, context), (_, other) in steps.items()],
    ]


class TestFirstLines:
    def test_answer_names_the_engine_ahead_and_the_gain_of_dcp(self, tmp_path: Path) -> None:
        """3.0 / 3.6 = 0.83 … 6.0 / 5.4 = 1.11; 3.0 / 3.3 = 0.91, 6 / 4 = 1.50, 3.6 / 3.9 = 0.92, 5.4 / 4.5 = 1.20."""
        text = overview.format_answer(read(tmp_path, *make_study()))
        assert text.startswith(
            "On 2 × H200, no engine is ahead at every equal layout and load: of 4 points, dcpbench is ahead at 3 and vLLM 0.26.0 "
            "is ahead at 1; output over that of dcpbench: 0.83–1.11 times (vLLM 0.26.0) (tp2 and tp2·dcp2, decode steps of 8 requests "
            "of 4,000–128,000 tokens)"
        )
        assert (
            "Inside each engine, tp2·dcp2 gives 0.91–1.50 times (dcpbench) and 0.92–1.20 times (vLLM 0.26.0) the output of tp2"
        ) in text

    def test_bullet_names_the_context_from_which_dcp_is_ahead(self, tmp_path: Path) -> None:
        assert engines.format_bullets(read(tmp_path, *make_study()))[-1] == (
            "tp2·dcp2 is ahead of tp2 by more than 2 % at 1 of 2 points, from 128,000 tokens on (dcpbench) and at 1 of 2 points, from "
            "128,000 tokens on (vLLM 0.26.0)."
        )

    def test_bullet_counts_points_if_dcp_is_never_ahead(self, tmp_path: Path) -> None:
        runs = [[record for record in run if record.point.context == 4000] for run in make_study()]
        assert engines.format_bullets(read(tmp_path, *runs))[-1] == (
            "tp2·dcp2 is ahead of tp2 by more than 2 % at 0 of 1 point (dcpbench) and at 0 of 1 point (vLLM 0.26.0)."
        )

    def test_terminal_page_and_markdown_have_answer_and_parts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave_figures_unsaved(monkeypatch)
        folders = write(tmp_path, *make_study())
        write_report(folders, tmp_path / "out")
        console = make_console()
        with console.capture() as shown:
            console.print(render_terminal_table(folders), width=2000)
        texts = [
            shown.get(),
            (tmp_path / "out" / "report.md").read_text(),
            (tmp_path / "out" / "report.html").read_text(),
        ]
        plain = [text.replace("\N{NO-BREAK SPACE}", " ").replace("&#39;", "'") for text in texts]
        for text in plain:
            assert "no engine is ahead at every equal layout and load: of 4 points, dcpbench is ahead at 3" in text
            assert "Decode steps of engines by part" in text
            assert "dcpbench's attention takes 1.25 times as long as vLLM 0.26.0's at 4 of 4 points" in text
            assert "are not scaled to the step that was timed without the profiler" in text
        assert plain[1].index("1.00 (") < plain[1].index("are not scaled"), "limits are below the table"

    def test_answer_and_slower_step_are_top_sentences(self, tmp_path: Path) -> None:
        report = read(tmp_path, *make_study())
        top = answer.format_top_sentences(report)
        assert top[0] == overview.format_answer(report)
        assert [
            text
            for text in top
            if text.startswith("dcpbench's step takes 1.11 times as long as vLLM 0.26.0's at 1 of 4 points")
        ]


class TestFigure:
    def test_figure_has_a_bar_per_engine_and_point_with_the_timed_step(self, tmp_path: Path) -> None:
        report = read(tmp_path, *make_study())
        rows = engine_steps.compare_steps(report).rows
        figure = engine_steps_figure.draw_engine_steps(rows, Style.from_points(report.everything), "title")
        assert [ax.get_title() for ax in figure.axes] == ["context 4,000 tokens", "context 128,000 tokens"]
        names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        assert names == [
            "tp2, 8 requests",
            "dcpbench",
            "vLLM 0.26.0",
            "tp2·dcp2, 8 requests",
            "dcpbench",
            "vLLM 0.26.0",
        ]
        widths = [
            round(patch.get_width(), 3)
            for patch in figure.axes[0].patches
            if round(patch.get_y() + patch.get_height() / 2) == 2
        ]
        assert widths == [0.8, 0.2, 1.0, 1.4, 0.2, 0.04, 0.36], "vLLM's parts, unknown kernels and idle time"
        assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [3.0, 3.6, 3.3, 3.9]
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend[-4:] == [
            "unknown",
            "no kernel",
            "timed step, without profiler",
            "* bar over 3 % longer: waits of the profiler",
        ]
        ratios = [text.get_text().strip() for text in figure.axes[0].texts]
        assert ratios == ["1.00×*", "1.20×*", "1.00×*", "1.18×"], (
            "3.4 / 3.0, 4.0 / 3.6, 3.4 / 3.3 and 4.0 / 3.9 of the timed steps"
        )

    def test_point_of_a_single_engine_is_not_labelled_as_missing(self, tmp_path: Path) -> None:
        """Only dcpbench ran tp2 at 8,000 tokens; vLLM did not run tp2·dcp2 at 4,000 tokens, but SGLang did."""
        own = [measure_own(layout, context=context) for layout in (TP, DCP) for context in (4000, 8000)]
        vllm = [measure_server(context=4000), measure_server(layout=DCP, context=8000)]
        report = read(tmp_path, own, vllm, [measure_server(SGLANG, DCP, context=4000)])
        rows = engine_steps.compare_steps(report).rows
        figure = engine_steps_figure.draw_engine_steps(rows, Style.from_points(report.everything), "title")
        texts = [[text.get_text().strip() for text in ax.texts] for ax in figure.axes]
        assert [sum("not measured" in text for text in of_axes) for of_axes in texts] == [2, 1]
        assert ["measured on fewer than two engines" in of_axes for of_axes in texts] == [False, True]

    def test_very_short_part_has_no_entry_in_the_legend(self, tmp_path: Path) -> None:
        report = read(tmp_path, [measure_own()], [measure_server(us=VLLM_PARTS | {"unknown": 1.0})])
        rows = engine_steps.compare_steps(report).rows
        figure = engine_steps_figure.draw_engine_steps(rows, Style.from_points(report.everything), "title")
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert "unknown" not in legend
        assert "all-reduce" in legend
        assert "projections and experts" not in legend
        assert figure.axes[0].get_xlabel() == "step (ms); ×: timed step over dcpbench"

    def test_engines_with_different_layout_names_share_a_group(self, tmp_path: Path) -> None:
        """vLLM's degree of expert parallelism is unknown."""
        report = read(tmp_path, [measure_own(DP)], [measure_server(VLLM, DP)])
        rows = engine_steps.compare_steps(report).rows
        figure = engine_steps_figure.draw_engine_steps(rows, Style.from_points(report.everything), "title")
        names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        assert names == ["tp2·dp2·ep2, 8 requests", "dcpbench", "vLLM 0.26.0"]
        assert "did not run" not in " ".join(text.get_text() for text in figure.axes[0].texts)

    def test_figure_of_a_model_has_its_name_and_an_alternative_text(self, tmp_path: Path) -> None:
        (picture,) = [
            p for p in plots.draw_all(read(tmp_path, *make_study()), tmp_path, drawn=False) if p.subject == plots.STEPS
        ]
        assert picture.title == "Decode steps of engines by part, deepseek-v3"
        assert (
            picture.alt == f"{picture.title}. At tp2, 8 requests, context 4,000: dcpbench 3.00 ms, vLLM 0.26.0 3.60 ms."
        )

    def test_figure_of_a_single_engine_has_parts_and_unknown_kernels(self, tmp_path: Path) -> None:
        """Quantisation and norms, 150 + 50 µs, are the rest."""
        points = read(tmp_path, [measure_server()]).points
        shown = figures.compute_phases_ms(points).iloc[0].round(3).to_dict()
        assert shown == {
            "attention": 0.8,
            "all-reduce": 0.2,
            "projections": 1.0,
            "experts": 1.4,
            "unknown": 0.04,
            "rest": 0.2,
        }

    def test_title_of_the_figure_counts_omitted_contexts(self, tmp_path: Path) -> None:
        contexts = range(1000, 9000, 1000)
        report = read(
            tmp_path, [measure_own(context=c) for c in contexts], [measure_server(context=c) for c in contexts]
        )
        rows = engine_steps.compare_steps(report).rows
        assert engine_steps_figure.format_left_out(rows) == " (the first 6 of 8 contexts)"
        assert len(engine_steps_figure.draw_engine_steps(rows, Style.from_points(report.everything), "t").axes) == 6
