"""The options of `dcpbench compare` and `dcpbench ab`. What they do lies in compare/ and commands_ab.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt

if TYPE_CHECKING:
    from dcpbench.compare.judging import Options

JUDGE = "How it is judged"
RUNS = "What is run"
OUTPUT = opt.OUTPUT

FailOn = Annotated[
    str,
    typer.Option(
        "--fail-on",
        metavar="RULE,…",
        rich_help_panel=JUDGE,
        help="End with 1 where B is proven worse than "
        "this: slower:2%, itl_p99:5%, syncs:+0, memory:+1 (its unit), …; undecided: also where a rule cannot be decided; "
        "missing: also where B lacks a point. Points that fail in B alone always count. Default: none.",
    ),
]
Margin = Annotated[
    str,
    typer.Option(
        "--margin", metavar="PERCENT", rich_help_panel=JUDGE, help="Ratios within it are as good as the same."
    ),
]
LaunchNoise = Annotated[
    str,
    typer.Option(
        "--launch-noise",
        metavar="PERCENT",
        rich_help_panel=JUDGE,
        help="Standard deviation of the "
        "difference of two launches of the same thing, assumed where each side has one; with several it is measured.",
    ),
]
Alpha = Annotated[
    float,
    typer.Option(
        "--alpha",
        metavar="P",
        rich_help_panel=JUDGE,
        help="Chance of any FASTER or SLOWER where nothing differs, over all rows.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME,…",
        rich_help_panel=JUDGE,
        help="Compare these alone: fewer tests at once find smaller differences. Default: all.",
    ),
]
AllowCpu = Annotated[
    bool,
    typer.Option(
        "--allow-cpu", rich_help_panel=JUDGE, help="Judge times of CPU runs, too, which say nothing about performance."
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", rich_help_panel=OUTPUT, help="Write JUnit XML there."),
]
GitHub = Annotated[
    bool,
    typer.Option(
        "--github", rich_help_panel=OUTPUT, help="Print annotations of GitHub Actions, and append to the step summary."
    ),
]
Every = Annotated[bool, typer.Option("--all", rich_help_panel=OUTPUT, help="Show every point, not the first 40.")]


def compare(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="A run's folder, or a folder that holds several runs of the same points: its launches."
        ),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same, to be compared with A.")],
    with_a: Annotated[
        list[Path] | None, typer.Option("--with-a", metavar="RUN", help="One more launch of A; may be repeated.")
    ] = None,
    with_b: Annotated[
        list[Path] | None, typer.Option("--with-b", metavar="RUN", help="One more launch of B; may be repeated.")
    ] = None,
    paired: Annotated[
        bool,
        typer.Option(
            "--paired", rich_help_panel=JUDGE, help="The n-th launches of A and B belong together, as `ab` makes them."
        ),
    ] = False,
    across: Annotated[
        str | None,
        typer.Option(
            "--across",
            metavar="FIELD,…",
            rich_help_panel=JUDGE,
            help="Match points without "
            "regard to these, such as exchange or backend, to compare variants. Default: none.",
        ),
    ] = None,
    fail_on: FailOn = "",
    margin: Margin = "1%",
    launch_noise: LaunchNoise = "2%",
    alpha: Alpha = 0.03,
    metric: Metric = None,
    allow_cpu: AllowCpu = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="Write compare.md, compare.json and the forest plot (PNG, SVG) there.",
        ),
    ] = None,
    junit: Junit = None,
    github: GitHub = False,
    every: Every = False,
    as_json: opt.Json = False,
) -> None:
    """Say for every point that two runs share whether B is FASTER, SLOWER or the SAME, or that this is UNDECIDED.

    One launch of each side cannot tell what differs from launch to launch; give several, or use `dcpbench ab`. Exit
    codes: 0 · 1 a rule of --fail-on fails · 2 options or records that cannot be used · 141 whoever read the output went
    away, which is no verdict. docs/comparing.md says how it is computed.

    For example:

      dcpbench compare runs/main runs/branch

      dcpbench compare runs/main-launches/ runs/branch-launches/ --fail-on slower:2%,itl_p99:5%,syncs:+0 --github

      dcpbench compare runs/monday runs/tuesday --across exchange -o difference
    """
    from dcpbench.compare import commands

    options = _options(margin, launch_noise, alpha, metric, across, allow_cpu=allow_cpu, paired=paired)
    out = commands.Out(
        fail_on=fail_on,
        folder=output,
        junit=junit,
        github=github,
        as_json=as_json,
        every=every,
    )
    raise typer.Exit(commands.compare([a, *(with_a or [])], [b, *(with_b or [])], options, out))


def ab(
    context: typer.Context,
    a: Annotated[
        str,
        typer.Option(
            "--a", metavar="OPTIONS", rich_help_panel=RUNS, help="Options of variant A, as one word in quotes."
        ),
    ] = "",
    b: Annotated[str, typer.Option("--b", metavar="OPTIONS", rich_help_panel=RUNS, help="Options of variant B.")] = "",
    both: Annotated[str, typer.Option("--both", metavar="OPTIONS", rich_help_panel=RUNS, help="Options of both.")] = "",
    workload: Annotated[
        str,
        typer.Option(
            "--workload", metavar="NAME", rich_help_panel=RUNS, help="sweep or serve: the command that is run."
        ),
    ] = "sweep",
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            metavar="N",
            rich_help_panel=RUNS,
            help="Each round launches both variants once: A B, B A, A B, …",
        ),
    ] = 8,
    fail_on: FailOn = "",
    margin: Margin = "1%",
    alpha: Alpha = 0.03,
    metric: Metric = None,
    allow_cpu: AllowCpu = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="Folder for a/, b/ and the comparison. Default: runs/DATE-TIME-ab-….",
        ),
    ] = None,
    resume: opt.Resume = False,
    force: opt.Force = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=OUTPUT,
            help="Only print the points of both variants and the order of launches.",
        ),
    ] = False,
    junit: Junit = None,
    github: GitHub = False,
    every: Every = False,
    as_json: opt.Json = False,
) -> None:
    """Run two variants in turn on this machine, so that drift cancels, and compare them round by round.

    Every round is a launch of its own on each side, and their order alternates (A B, B A, …), which takes out whatever
    drifts evenly. Ctrl-C keeps what was measured; --resume goes on. Exit codes: those of compare, and 4 where points
    failed.

    For example:

      dcpbench ab --both "--tp 4 --dcp 4 --context 32000" --a "--exchange ag_rs" --b "--exchange symm"

      dcpbench ab --workload serve --both "--tp 4 --concurrency 32" --a "--policy mixed" --b "--policy prefill-first"
    """
    from dcpbench.commands import ab
    from dcpbench.compare import commands

    options = _options(margin, "2%", alpha, metric, None, allow_cpu=allow_cpu, paired=True)
    out = commands.Out(fail_on=fail_on, junit=junit, github=github, as_json=as_json, every=every)
    wanted = ab.Wanted(
        workload=workload,
        a=a,
        b=b,
        both=both,
        rounds=rounds,
        output=output,
        resume=resume,
        force=force,
        dry_run=dry_run,
    )
    group = context.find_root().command
    raise typer.Exit(ab.ab(wanted, options, out, getattr(group, "commands", {})))


def _options(
    margin: str,
    launch_noise: str,
    alpha: float,
    metric: str | None,
    across: str | None,
    *,
    allow_cpu: bool,
    paired: bool,
) -> "Options":
    from dcpbench.compare.judging import Options

    return Options(
        margin=_share("--margin", margin),
        launch_noise=_share("--launch-noise", launch_noise),
        alpha=alpha,
        metrics=_words(metric),
        across=_words(across),
        allow_cpu=allow_cpu,
        paired=paired,
    )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _share(option: str, text: str) -> float:
    from dcpbench.errors import UsageError

    try:
        return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{option} {text} is no share; give one such as {option} 1%.") from None
