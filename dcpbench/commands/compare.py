"""`dcpbench compare`: whether B is faster or slower than A. `ab` judges and shows in the same way."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.commands.command import group, panel
from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from dcpbench.compare.judging import Options

JUDGE = panel("How it is judged")


@group
class Judged:
    """How two sides are held against each other."""

    fail_on: Annotated[
        str,
        JUDGE(
            "--fail-on",
            metavar="RULE,…",
            help="End with 1 where B is proven worse than this: slower:2%, itl_p99:5%, syncs:+0, memory:+1 (its "
            "unit), …; undecided: also where a rule cannot be decided; missing: also where B lacks a point. "
            "Points that fail in B alone always count. Default: none.",
        ),
    ] = ""
    margin: Annotated[str, JUDGE("--margin", metavar="PERCENT", help="Ratios within it are as good as the same.")] = (
        "1%"
    )
    launch_noise: Annotated[
        str,
        JUDGE(
            "--launch-noise",
            metavar="PERCENT",
            help="Standard deviation of the difference of two launches of the same thing, assumed where each side "
            "has one; with several it is measured.",
        ),
    ] = "2%"
    alpha: Annotated[
        float,
        JUDGE("--alpha", metavar="P", help="Chance of any FASTER or SLOWER where nothing differs, over all rows."),
    ] = 0.03
    metric: Annotated[
        str | None,
        JUDGE(
            "--metric",
            metavar="NAME,…",
            help="Compare these alone: fewer tests at once find smaller differences. Default: all.",
        ),
    ] = None
    allow_cpu: Annotated[
        bool, JUDGE("--allow-cpu", help="Judge times of CPU runs, too, which say nothing about performance.")
    ] = False

    def options(self, *, paired: bool, across: str | None = None) -> "Options":
        """What judges them. Raises UsageError for what is no share."""
        from dcpbench.compare.judging import Options

        return Options(
            margin=_share("--margin", self.margin),
            launch_noise=_share("--launch-noise", self.launch_noise),
            alpha=self.alpha,
            metrics=_words(self.metric),
            across=_words(across),
            allow_cpu=self.allow_cpu,
            paired=paired,
        )


@group
class Shown:
    """Where a comparison goes."""

    junit: Annotated[Path | None, opt.OUTPUT("--junit", metavar="FILE", help="Write JUnit XML there.")] = None
    github: Annotated[
        bool, opt.OUTPUT("--github", help="Print annotations of GitHub Actions, and append to the step summary.")
    ] = False
    every: Annotated[bool, opt.OUTPUT("--all", help="Show every point, not the first 40.")] = False
    as_json: opt.Json = False


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
        bool, JUDGE("--paired", help="The n-th launches of A and B belong together, as `ab` makes them.")
    ] = False,
    across: Annotated[
        str | None,
        JUDGE(
            "--across",
            metavar="FIELD,…",
            help="Match points without regard to these, such as exchange or backend, to compare variants. "
            "Default: none.",
        ),
    ] = None,
    *,
    judged: Judged,
    output: Annotated[
        Path | None,
        opt.OUTPUT(
            "-o", "--output", metavar="DIR", help="Write compare.md, compare.json and the forest plot (PNG, SVG) there."
        ),
    ] = None,
    shown: Shown,
) -> int:
    """Say for every point that two runs share whether B is FASTER, SLOWER or the SAME, or that this is UNDECIDED.

    One launch of each side cannot tell what differs from launch to launch; give several, or use `dcpbench ab`. Exit
    codes: 0 · 1 a rule of --fail-on fails · 2 options or records that cannot be used · 141 whoever read the output went
    away, which is no verdict. docs/comparing.md says how it is computed.

    For example:

      dcpbench compare runs/main runs/branch

      dcpbench compare runs/main-launches/ runs/branch-launches/ --fail-on slower:2%,itl_p99:5%,syncs:+0 --github

      dcpbench compare runs/monday runs/tuesday --across exchange -o difference
    """
    from dcpbench.compare import outputs
    from dcpbench.compare.sides import read_side

    options = judged.options(paired=paired, across=across)
    out = outputs.Out(fail_on=judged.fail_on, folder=output, **vars(shown))
    outputs.check(options, out)
    return outputs.conclude(read_side([a, *(with_a or [])]), read_side([b, *(with_b or [])]), options, out)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _share(option: str, text: str) -> float:
    try:
        return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{option} {text} is no share; give one such as {option} 1%.") from None
