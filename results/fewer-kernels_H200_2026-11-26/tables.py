"""The table of README.md, from the records beside this file and those of four H200 before: `python tables.py`."""

from pathlib import Path

from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
FOUR = HERE.parent / "decode-serving-fp8_4xH200_2026-11-26"
PHASES = ("norm", "qkv_proj", "moe")


def cut(run):
    """Points with experts cut by width, or on one GPU, by layout and requests; 4,000 tokens."""
    return {
        (r.point.layout_name, r.point.concurrency): r
        for r in read_run(run).records
        if r.outcome == "ok" and r.point.context == 4000 and (r.point.ep == "1" or r.point.tp == 1)
    }


def row(*cells):
    print(f"| {' | '.join(map(str, cells))} |")


def ms(record):
    """Of kernels' gaps, of phases, and of what is left of a step."""
    us = record.phases.phase_us
    rest = sum(us.values()) - sum(us[phase] for phase in PHASES)
    return [
        record.phases.idle_us / 1e3,
        *[us[phase] / 1e3 for phase in PHASES],
        rest / 1e3,
        record.metrics.step_ms.median,
    ]


if __name__ == "__main__":
    row(
        "before → after",
        "kernels",
        "idle, ms",
        *[f"{phase}, ms" for phase in PHASES],
        "other phases, ms",
        "step, ms",
        "less",
    )
    row("---", *["---:"] * 8)
    for before, after in (
        (cut(HERE / "one-before"), cut(HERE / "one-after")),
        (cut(FOUR / "experts" / "deepseek-v3") | cut(FOUR / "grid-tp" / "deepseek-v3"), cut(HERE / "four-after")),
    ):
        for (layout, requests), r in after.items():
            old, new = ms(before[layout, requests]), ms(r)
            row(
                f"{layout}, {requests} × 4,000",
                f"{before[layout, requests].phases.kernels:,} → {r.phases.kernels:,}",
                *[f"{a:.2f} → {b:.2f}" for a, b in zip(old, new, strict=True)],
                f"{1 - new[-1] / old[-1]:.1%}".replace("%", " %"),
            )
