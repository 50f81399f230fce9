"""The tables of README.md, from the records beside this file: `python tables.py`."""

from pathlib import Path

from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
PHASES = {
    "attention": ("attention",),
    "experts": ("moe",),
    "projections": ("qkv_proj", "o_proj"),
    "dense MLP": ("dense_mlp",),
}


def points(run):
    return {(r.point.concurrency, r.point.context): r for r in read_run(HERE / run).records if r.outcome == "ok"}


def row(*cells):
    print(f"| {' | '.join(map(str, cells))} |")


def step(r):
    """ms, and in brackets the share of the floor."""
    ms = r.metrics.step_ms.median
    return f"{ms:.1f}{'*' if 'throttled' in r.marks else ''} ({r.floor.floor_ms / ms:.2f})"


def interval(r):
    return f"{r.metrics.step_ms.low:.1f}–{r.metrics.step_ms.high:.1f}"


def phase(r, names):
    """ms of a profiled step, and in brackets the share of the limit."""
    ms, limit = (sum(of[name] for name in names) / 1e3 for of in (r.phases.phase_us, r.floor.phase_floor_us))
    return f"{ms:.2f} ({limit / ms:.2f})"


if __name__ == "__main__":
    before, now = points("before"), points("now")
    assert before.keys() == now.keys()
    row("requests × context", "before", "now", "less", "intervals", "idle before → now, %", "kernels")
    row("---", *["---:"] * 6)
    for load, r in now.items():
        old = before[load]
        row(
            f"{load[0]} × {load[1]:,}",
            step(old),
            step(r),
            f"{1 - r.metrics.step_ms.median / old.metrics.step_ms.median:.1%}".replace("%", " %"),
            f"{interval(old)}, {interval(r)}",
            f"{old.phases.idle_us / old.phases.step_us:.2%} → {r.phases.idle_us / r.phases.step_us:.2%}".replace("%", ""),
            f"{old.phases.kernels:,} → {r.phases.kernels:,}",
        )
    print()
    row("requests × context", *[f"{name}, ms" for name in PHASES])
    row("---", *["---:"] * len(PHASES))
    for load, r in now.items():
        row(
            f"{load[0]} × {load[1]:,}",
            *[f"{phase(before[load], names)} → {phase(r, names)}" for names in PHASES.values()],
        )
    print()
    for name, run in (("before", before), ("now", now)):
        rates = next(iter(run.values())).rates
        print(f"{name}: reads {rates.read_bytes_s / 1e12:.3f} TB/s, {rates.matmul_fp8_flop_s / 1e12:.0f} TFLOP/s in e4m3")
        for load, r in run.items():
            assert r.host_syncs_per_step == 0
            assert r.allocations_per_step == 0
            ms, gpu = r.metrics.step_ms.median, r.gpu
            loss = {
                name: sum(r.phases.phase_us[p] - r.floor.phase_floor_us[p] for p in names) / 1e3
                for name, names in PHASES.items()
            }
            print(
                f"  {load[0]} × {load[1]:,}: {ms:.2f} ms, {r.floor.floor_ms / ms:.3f} of its floor of {r.floor.floor_ms:.1f}; "
                f"profiled {r.phases.step_us / 1e3:.2f}; {gpu.sm_clock_mhz_min} to {gpu.sm_clock_mhz_max} MHz, "
                f"{gpu.temperature_c_max} °C; {', '.join(r.marks) or 'no mark'}; "
                f"over limits, ms: {', '.join(f'{name} {ms:.1f}' for name, ms in loss.items())}"
            )
    held = {r.honesty.layers_held for run in (before, now) for r in run.values()}
    errors = [r.honesty.attention_error for run in (before, now) for r in run.values()]
    print(f"layers held: {held}; errors of attention {min(errors):.3f} to {max(errors):.3f}")
    gains = [before[load].phases.phase_us["attention"] / r.phases.phase_us["attention"] for load, r in now.items()]
    print(f"attention before over now: {min(gains):.4f} to {max(gains):.4f}")
    shorter = [1 - r.metrics.step_ms.median / before[load].metrics.step_ms.median for load, r in now.items()]
    print(f"steps shorter by {min(shorter):.3%} to {max(shorter):.3%}")
    for name, run in (("before", before), ("now", now)):
        cooler = max(r.metrics.step_ms.median - r.phases.step_us / 1e3 for r in run.values())
        print(f"{name}: a profiled step is up to {cooler:.2f} ms shorter")
    for load, r in now.items():
        old, new = before[load].phases, r.phases
        less = {
            name: sum(old.phase_us[p] - new.phase_us[p] for p in names) / 1e3
            for name, names in (*PHASES.items(), ("all", new.phase_us), ("all and gaps", ()))
        }
        less["all and gaps"] = less["all"] + (old.idle_us - new.idle_us) / 1e3
        print(f"{load[0]} × {load[1]:,}, ms less: {', '.join(f'{name} {ms:.2f}' for name, ms in less.items())}")
