"""What formulas give for many arguments, number by number to six digits, as tests/data/said/ has it.

Other tests hold formulas against other sources and worked examples; these hold that no term, end or sign changes unnoticed.
`SAID=write` in the environment writes the files anew, as for test_whole_outputs.py.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dcpbench.compare import effects, resampling
from dcpbench.dashboard import changes
from dcpbench.errors import UsageError
from dcpbench.points import memory
from dcpbench.points.batches import compute_batch_rows, compute_chunk_rows, list_chunk_rows, pad_batch
from dcpbench.points.instances import parse_instances
from dcpbench.points.layout import (
    GroupWide,
    Layout,
    Prefix,
    compute_local_length,
    get_owner,
    get_row,
    list_local_tokens,
    list_valid_layouts,
    place_experts,
)
from dcpbench.points.names import CUT
from dcpbench.points.shapes import SHAPES
from dcpbench.points.sizes import format_size
from dcpbench.records import formulas, stats, student
from dcpbench.records.record import Interval
from tests.unit.test_whole_outputs import hold, rounded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def said(of: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What comes of it, or the sentence with which it is refused."""
    try:
        found = of(*arguments, **named)
    except (UsageError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    if isinstance(found, np.ndarray):
        found = found.tolist()
    return json.dumps(rounded(msgspec.to_builtins(found)), ensure_ascii=False)


def test_students_t(tmp_path: Path) -> None:
    """Tails and quantiles for few degrees of freedom and for many."""
    lines = []
    for df in (0.5, 1.0, 2.0, 3.7, 30.0, 1e5, 1e7, 1.1e7, math.inf):
        tails = [student.sf(t, df) for t in (-math.inf, -2.0, 0.0, 1e-9, 0.3, 1.0, 1.7, 4.0, 40.0, 1e9, math.inf)]
        ends = [student.compute_quantile(tail, df) for tail in (0.5, 0.25, 0.05, 1e-4, 1e-12)]
        lines.append(f"{df:g}: {' '.join(f'{x:.6g}' for x in (*tails, *ends))}")
    hold("student.txt", "\n".join(lines), tmp_path)


def walks(seed: int) -> dict[str, np.ndarray]:
    """Series of samples: few and many, independent and alike, with a hole, of zeros, and more than are drawn."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(10, 1, 500)
    return {
        "seven": noise[:7],
        "eight": noise[:8],
        "nine with a hole": np.array([*noise[:8], math.nan]),
        "eight with a hole": np.array([*noise[:7], math.inf]),
        "plain": noise,
        "alike": 20 + np.cumsum(rng.normal(0, 0.3, 500)),
        "level": np.full(100, 5.0),
        "zeros": np.zeros(40),
        "now and then 0": np.where(np.arange(100) % 2, 0.0, 1.0),
        "many": rng.normal(10, 1, 20_000),
        "more": rng.normal(10, 1, 20_001 + 63),
    }


def test_errors_of_one_launch(tmp_path: Path) -> None:
    """By blocks and by batches, of a median, of a mean and of a tail, for samples and for requests."""
    lines = []
    for name, series in walks(1).items():
        if np.isfinite(series).all():
            lines.append(
                f"{name}: blocks of {resampling.compute_block_length(series)}, of requests {resampling.compute_request_block_length(len(series))}"
            )
        for what, statistic in (
            ("median", resampling.make_quantile(0.5)),
            ("p99", resampling.make_quantile(0.99)),
            ("mean", resampling.compute_mean),
        ):
            for requests in (False, True):
                error = resampling.estimate_error(series, statistic, 3, requests=requests)
                told = "not known"
                if error is not None:
                    drawn = None if error.draws is None else [len(error.draws), *error.draws[:3]]
                    told = f"{error.variance:.6g} by {error.df:.6g}, {error.samples} {json.dumps(rounded(drawn))} {error.of_requests}"
                lines.append(f"  {what} {'of requests' if requests else ''}: {told}")
    lines += [
        str(resampling.draw_indices(n, length, 2, np.random.default_rng(4)).tolist())
        for n, length in ((7, 1), (7, 3), (8, 4), (5, 5))
    ]
    rng = np.random.default_rng(5)
    for count in (7, 8, 30):
        groups = [rng.normal(20, 2, int(size)) for size in rng.integers(1, 9, count)]
        groups[0][0] = math.nan
        groups.append(np.array([]))
        for q in (0.0, 0.5, 0.99, 1.0):
            error = resampling.estimate_pooled_error(groups, q, 6)
            lines.append(
                f"{count} groups, {q}: {f'{error.variance:.6g} {error.df:.6g} {error.samples}' if error else 'not known'}"
            )
    hold("resampling.txt", "\n".join(lines), tmp_path)


def launch(
    log: float, variance: float | None = None, df: float = 20.0, requests: int = 0, seed: int = 0
) -> effects.Estimate:
    """What one launch says; with `requests`, of draws of so many."""
    draws = np.random.default_rng(seed).normal(log, 0.01, 50) if requests else None
    within = None if variance is None else resampling.Error(variance, df, draws, requests)
    return effects.Estimate(log, within)


def test_effects_of_launches(tmp_path: Path) -> None:
    """One against one, several against one, several against several, and pairs; with all that is asked of an effect."""
    few = [launch(0.0, 1e-4), launch(0.02, 1e-4), launch(0.01, 1e-4)]
    others = [launch(0.05, 4e-4), launch(0.06, 4e-4), launch(0.055, 1e-6)]
    level = [launch(0.0, 0.0), launch(0.0, 0.0)]
    served = [
        launch(0.0, 1e-4, requests=30),
        launch(0.03, 2e-4, requests=30, seed=1),
        launch(0.03, 2e-4, df=9, requests=31),
    ]
    sides = {
        "one each": (few[:1], others[:1]),
        "without samples": ([launch(0.0)], others[:1]),
        "of the same requests": (served[:1], served[1:2]),
        "of other requests": (served[:1], served[2:]),
        "one against three": (few[:1], others),
        "three against one": (few, others[:1]),
        "two against three": (few[:2], others),
        "four against five": ([*few, launch(0.015, 1e-4)], [*others, launch(0.052, 1e-6), launch(0.058, 1e-6)]),
        "four against four": ([*few, launch(0.015, 1e-4)], [*others, launch(0.052, 1e-6)]),
        "served": (served[:2], served[1:]),
        "exactly level": (level, level),
        "exactly apart": (level, [launch(0.01, 0.0), launch(0.01, 0.0)]),
    }
    lines = []
    for name, (a, b) in sides.items():
        found = {"": effects.compare_sides(a, b, 0.02), "one noisy": effects.compare_sides(a, b, 0.0)}
        if len(a) == len(b):
            found["paired"] = effects.compare_paired(a, b, 0.02)
        for how, effect in found.items():
            about = [
                effect.log,
                effect.error,
                effect.df,
                effect.spread,
                *effect.compute_interval(0.025),
                effect.compute_p_differs(),
            ]
            about += [effect.compute_p_same(0.01), effect.compute_p_same(abs(effect.log))]
            more = [
                effects.estimate_more_launches(effect, margin, tail)
                for margin in (0.01, 0.1, abs(effect.log))
                for tail in (0.025, 1e-4)
            ]
            flags = f"{effect.launches} {'paired' if effect.paired else ''} {'assumed' if effect.assumed else ''}"
            lines.append(f"{name} {how}: {' '.join(f'{x:.6g}' for x in about)} | {flags} {more}")
    for values, errors in (
        ([2.0], [None]),
        ([2.0], [resampling.Error(0.5, 3.0)]),
        ([2.0, 2.1], [None, None]),
        ([2.0, 2.1], [resampling.Error(0.5, 3.0), None]),
        ([2.0, 2.1, 1.9], [resampling.Error(0.5, 3.0, np.ones(3), 9)] * 2 + [resampling.Error(0.02, 3.0)]),
    ):
        one = effects.estimate_launch(values, errors)
        lines.append(
            f"{values}: {one.log:.6g} {one.repeats} {f'{one.within.variance:.6g} {one.within.df:g}' if one.within else None}"
        )
    many: tuple[list[float], ...] = (
        [],
        [0.03],
        [0.031],
        [0.01, 0.02, 0.03],
        [0.5, 0.021, 0.01, 0.9],
        [0.015, 0.03, 0.9, 0.9],
    )
    lines += [f"{ps}: {effects.count_rejected(ps, 0.03)} {effects.compute_level(ps, 0.03):.6g}" for ps in many]
    lines += [
        said(effects.compute_satterthwaite_df, parts)
        for parts in ([(1.0, 2.0), (2.0, 5.0)], [(0.0, 1.0)], [(1.0, math.inf)], [(1.0, math.inf), (1.0, 4.0)])
    ]
    hold("effects.txt", "\n".join(lines), tmp_path)


def test_changes_of_histories(tmp_path: Path) -> None:
    """Short and long, level, with one step or two, with odd runs and outliers, of values around 0 and of none above it."""
    rng = np.random.default_rng(8)
    lines = []
    for runs, step, cv in itertools.product((5, 6, 7, 12, 30), (0.0, 0.004, 0.006, 0.05), (0.0, 0.002, 0.01)):
        history = 50 * np.exp(cv * rng.normal(size=runs))
        history[runs // 2 :] *= 1 + step
        if runs == 30:
            history[20:] *= 1 - step
            history[4] *= 1.5
        for name, values in (
            ("", history),
            ("around 0", history - 50),
            ("mirrored", -history),
            ("one 0", np.where(np.arange(runs) == 0, 0.0, history)),
        ):
            found = [
                " ".join("-" if v is None else f"{v:.6g}" for v in (c.before, c.old, c.new, c.ratio, c.low, c.high))
                for c in changes.find_changes(values)
            ]
            lines.append(f"{runs} runs, {step} of {cv} {name}: {' | '.join(found)}")
    for seed in range(4):
        x = np.random.default_rng(seed).normal(size=9).round(1)
        step = changes.measure_step(x[:4], x[4:])
        about = [*changes._replace_odd_runs(x), step.difference, step.error, step.score, step.certainty]
        lines.append(" ".join(f"{v:.6g}" for v in about))
    hold("changes.txt", "\n".join(lines), tmp_path)


def test_statistics_of_samples(tmp_path: Path) -> None:
    """Medians, percentiles and when to stop, for few samples and for many; what is refused is said."""
    lines = []
    for n in (0, 1, 2, 5, 6, 8, 9, 19, 20, 63, 64, 129, 130, 661, 662, 5000):
        samples = [float((7 * i) % n) + 1 for i in range(n)]
        lines.append(
            f"{n}: {said(stats.compute_median_interval, samples)} {said(formulas.compute_percentiles, samples)} {said(formulas.summarize_latencies, samples)}"
        )
        rule = stats.StopRule(precision=0.2)
        stops = [said(rule.get_stop_reason, samples, elapsed) for elapsed in (9.9, 10.0)] if n else []
        lines.append(
            f"  {said(stats.compute_percentile, samples, 0)} {said(stats.compute_percentile, samples, 49.9)} {stops}"
        )
    lines += [f"p{p}: {said(stats.compute_min_samples, p)}" for p in (-1, 0, 50, 50.1, 75, 90, 99, 99.9, 100, 100.1)]
    lines += [
        str(stats.has_settled(before, now))
        for before, now in ((None, 1.0), (100.0, 101.0), (100.0, 101.1), (-100.0, -99.0), (0.0, 0.0))
    ]
    lines += [
        said(stats.compute_median_distance, *(Interval(median=m, low=m, high=m, samples=1) for m in pair))
        for pair in ((1.0, 1.02), (3.0, 1.0), (0.0, 1.0), (1.0, -1.0))
    ]
    lines += [said(stats.compute_median_interval, [1.0, math.nan]), said(formulas.summarize_latencies, [math.inf])]
    hold("stats.txt", "\n".join(lines), tmp_path)


def test_formulas_of_requests(tmp_path: Path) -> None:
    """Of made-up requests: latencies, windows, rates and goodput; and what is refused."""
    rng = np.random.default_rng(9)

    def request(start: float, tokens: int, *, finished: bool = True, gap: float = 0.1) -> formulas.RequestTimes:
        return formulas.RequestTimes(start, start + 0.5 + np.cumsum(rng.uniform(0, 2 * gap, tokens)), finished=finished)

    lines = []
    for tokens in (1, 2, 101):
        one = request(1.0, tokens)
        numbers = [of(one) for of in (formulas.compute_ttft_ms, formulas.compute_tpot_ms, formulas.compute_e2el_ms)]
        lines.append(f"{tokens}: {json.dumps(rounded(numbers))} {said(formulas.compute_itl_ms, one)[:80]}")
        limits = [
            {"ttft": numbers[0]},
            {"ttft": 1.0},
            {"e2el": numbers[2], "tpot": 150.0},
            {"itl": 150.0},
            {"itl": 199.9},
            {"itl": 1.0, "e2el": 1e9},
            {},
        ]
        lines.append(f"  {[formulas.has_met_slo(one, limit) for limit in limits]}")
    for clients in (1, 2, 4):
        runs = [request(0.3 * i, int(rng.integers(1, 30)), finished=i % 5 > 0) for i in range(12)]
        for more in ((), (0.5, 1.0)):
            window = formulas.find_steady_window(runs, clients, more)
            lines.append(
                f"{clients} {more}: {json.dumps(rounded(list(window or ())))} {said(formulas.compute_tok_s_within, runs, window) if window else ''}"
            )
        lines.append(f"  {said(formulas.compute_wall_s, runs)} {said(formulas.compute_goodput, runs, {'ttft': 600.0})}")
    for ends in ([1.0, 2.0, 4.0], []):
        lines += [
            said(formulas.compute_token_times, ends, counts)
            for counts in ([1, 1, 1], [3, 1, 4], [2, 2, 0])[: len(ends) or 1]
        ]
    lines += [said(formulas.validate_objectives, slo) for slo in ({"ttft": 1.0}, {"ttft": 0.0}, {"x": 1.0})]
    lines += [said(formulas.compute_tok_s_per_gpu, 10.0, tp) for tp in (0, 1, 4)]
    lines += [said(formulas.compute_tok_s_per_user, ms) for ms in (0.0, 8.0)]
    lines += [said(formulas.find_steady_window, [], n) for n in (0, 1)] + [said(formulas.compute_wall_s, [])]
    lines += [
        said(formulas.compute_decode_metrics, [4.0, 5.0, 6.0], n, tp, unsure)
        for n, tp, unsure in ((0, 1, (0, 0)), (3, 2, (0.1, 0.3)), (1, 1, (0, 0)))
    ]
    lines += [said(formulas.compute_decode_metrics, [0.0, 1.0], 1, 1), said(formulas.compute_decode_metrics, [], 1, 1)]
    hold("formulas.txt", "\n".join(lines), tmp_path)


LAYOUTS = [
    Layout(1),
    Layout(4),
    Layout(8),
    Layout(8, dcp=8),
    Layout(8, 2, 4),
    Layout(8, 8),
    Layout(3),
    Layout(16, 4, 2),
]


def test_memory_of_layouts(tmp_path: Path) -> None:
    """Bytes of weights by their part, of pages, of windows and of chunks: for each model, in bf16, in fp32 and in fp8."""
    lines = []
    for name, shape in SHAPES.items():
        for layout in LAYOUTS:
            parts = {
                f"{size}{'s' if fp8 else ''}": [
                    memory.compute_attention_bytes(shape, layout, size, fp8=fp8),
                    memory.compute_moe_bytes(shape, layout, size, fp8=fp8, ep="tp"),
                    memory.compute_moe_bytes(shape, layout, size, fp8=fp8, ep="1"),
                    memory.compute_shared_expert_bytes(shape, layout, size, fp8=fp8),
                    memory.compute_dense_mlp_bytes(shape, layout, size, fp8=fp8),
                    memory.compute_certain_bytes(shape, layout, size, GroupWide(query=True, value=True), fp8=fp8),
                    memory.compute_weight_bytes(shape, layout, size, *memory.count_all_layers(shape), fp8=fp8),
                    [*memory.compute_min_layers(shape, layout, size, 60 << 20, fp8=fp8)],
                ]
                for size, fp8 in ((2, False), (4, False), (2, True))
            }
            steps = [
                memory.compute_prefill_bytes(shape, layout, n, 2, ep, kv_itemsize=kv)
                for n, ep, kv in ((512, "tp", None), (40_000, "1", 1))
            ]
            windows = [memory.compute_window_bytes(shape, layout, n, 2, kv) for n, kv in ((100, None), (100, 1))]
            pages = [memory.count_pages(n, layout, 16) for n in (0, 1, 16, 17, 4000)]
            pages += [memory.count_kv_pages(layout, n, 4000, 64) for n in (1, 7, 8)]
            outer = [
                memory.compute_outer_bytes(shape, layout, 2),
                memory.compute_vocab_rows(shape, layout),
                memory.compute_page_bytes(shape, 16, 2),
            ]
            lines.append(f"{name} {layout}: {json.dumps(parts)} {steps} {windows} {pages} {outer}")
    for inputs, outputs, heights, cut in (
        (128, 128, (128,), {}),
        (129, 256, (256,), {}),
        (200, 300, (100, 200), {}),
        (576, 7168, (512, 64), {}),
        (1000, 96, (96,), {"rows": 3}),
        (1000, 96, (96,), {"columns": 8}),
    ):
        lines.append(
            f"{inputs} × {outputs} {heights} {cut}: {memory.compute_scaled_bytes(memory.Product(inputs, outputs), heights, **cut)}"
        )
    hold("memory.txt", "\n".join(lines), tmp_path)


def test_ranks_and_rows_of_layouts(tmp_path: Path) -> None:
    """Groups of ranks, who owns which token, and to how many rows steps are padded."""
    lines = []
    for layout in LAYOUTS:
        about = [
            [of(rank) for rank in range(layout.tp)]
            for of in (layout.get_dp_rank, layout.get_attn_rank, layout.get_dcp_rank)
        ]
        lines.append(
            f"{layout} {layout.format_vllm_name} {layout.attn_tp}: {about} {layout.list_attn_groups()} {layout.list_dcp_groups()} {layout.list_dp_groups()}"
        )
    for dcp, interleave in ((1, 1), (2, 1), (4, 2), (3, 4)):
        tokens = np.arange(30)
        lines.append(
            f"{dcp} by {interleave}: {get_owner(tokens, dcp, interleave).tolist()} {get_row(tokens, dcp, interleave).tolist()}"
        )
        lines += [
            f"  {rank}: {[compute_local_length(n, rank, dcp, interleave) for n in range(14)]} {list_local_tokens(13, rank, dcp, interleave)}"
            for rank in range(dcp)
        ]
    for lengths, dcp in (((5, 0, 9), 2), ((4, 4), 4)):
        prefix = Prefix(lengths, dcp)
        lines.append(
            f"{lengths}: {prefix.starts} {prefix.tokens} {prefix.part_rows} {[prefix.list_first_rows(rank) for rank in range(dcp)]}"
        )
    lines.append(f"{Prefix.make_uneven(100, 3, 4)} {Prefix.make_uneven(7, 2, 2)}")
    lines += [
        f"{n}: {compute_batch_rows(n)} {pad_batch(n)} {compute_chunk_rows(n)}"
        for n in (1, 2, 3, 8, 9, 17, 255, 256, 257, 511, 512)
    ]
    lines += [f"{n}: {compute_batch_rows(n)} {compute_chunk_rows(n)}" for n in (513, 576, 577, 1000, 4096, 8191)]
    lines += [str(list_chunk_rows(n)) for n in (1, 16, 17, 300, 5000)]
    lines += [
        f"{text}: {said(lambda t=text: [str(parse_instances(t)), parse_instances(t).label, parse_instances(t).count, parse_instances(t).serving, parse_instances(t).disaggregated, str(parse_instances(t).convert_to_both())])}"
        for text in ("", "1", "3", "1:1", "2:3", "0:1", "1:0", "x", "1:2:3", "257", "128:128", "200:57")
    ]
    lines += [
        f"{size}: {format_size(size)} {format_size(size, '')}"
        for size in (0, 1, 1023, 1024, 1025, 1 << 20, 1.5 * (1 << 30), (1 << 40) - 1, 1 << 44)
    ]
    for name, shape in SHAPES.items():
        for tp in (1, 2, 6, 8):
            lines.append(
                f"{name} {tp}: {[str(x) for x in list_valid_layouts(shape, tp)]} {place_experts(CUT, tp)} {place_experts('tp', tp)}"
            )
    hold("layouts.txt", "\n".join(lines), tmp_path)
