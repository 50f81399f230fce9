"""`dcpbench compare`: whether B is faster or slower than A. `ab` judges and shows in the same way."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, panel
from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from dcpbench.compare.judging import Options

JUDGE = panel("How it is judged")


class Judged(Group):
    """How two sides are held against each other."""

    fail_on: str | None = JUDGE(
        "End with 1 where B is proven worse than this: slower:2%, itl_p99:5%, syncs:+0, memory:+1 (its unit), …; "
        "undecided: also where a rule cannot be decided, alone where any verdict is UNDECIDED; missing: also where B "
        "lacks a point. Points that fail in B alone always count. Default: none.",
        metavar="RULE,…",
    )
    margin: str = JUDGE("Ratios within it are as good as the same.", default="1%", metavar="PERCENT")
    launch_noise: str = JUDGE(
        "Standard deviation of the difference of two launches of the same thing, assumed where each side has one; with "
        "several it is measured.",
        default="2%",
        metavar="PERCENT",
    )
    alpha: float = JUDGE(
        "Chance of any FASTER or SLOWER where nothing differs, over all rows.", default=0.03, metavar="P"
    )
    metric: str | None = JUDGE(
        "Compare these alone: fewer tests at once find smaller differences. Default: all.", metavar="NAME,…"
    )
    allow_cpu: bool = JUDGE("Judge times of CPU runs, too, which say nothing about performance.", default=False)

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


class Shown(Group):
    """Where a comparison goes."""

    folder: Path | None = opt.OUTPUT(
        "Write compare.md, compare.json and the forest plot (PNG, SVG) there.", "-o", "--output", metavar="DIR"
    )
    junit: Path | None = opt.OUTPUT("Write JUnit XML there.", metavar="FILE")
    github: bool = opt.OUTPUT("Print annotations of GitHub Actions, and append to the step summary.", default=False)
    every: bool = opt.OUTPUT("Show every point, not the first 40.", "--all", default=False)
    as_json: bool = opt.JSON


class Matched(Group):
    """What the sides are, and which of their points and launches belong together."""

    with_a: list[Path] | None = opt.OPTION("One more launch of A; may be repeated.", metavar="RUN")
    with_b: list[Path] | None = opt.OPTION("One more launch of B; may be repeated.", metavar="RUN")
    paired: bool = JUDGE("The n-th launches of A and B belong together, as `ab` makes them.", default=False)
    across: str | None = JUDGE(
        "Match points without regard to these, such as exchange or backend, to compare variants. Default: none.",
        metavar="FIELD,…",
    )


def compare(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="A run's folder, or a folder that holds several runs of the same points: its launches."
        ),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same, to be compared with A.")],
    matched: Matched,
    judged: Judged,
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
    from dcpbench.commands.runs import say_left_out
    from dcpbench.compare import outputs
    from dcpbench.compare.sides import read_side

    options = judged.options(paired=matched.paired, across=matched.across)
    out = outputs.Out(fail_on=judged.fail_on, **vars(shown))
    outputs.check(options, out)
    first, second = read_side([a, *(matched.with_a or [])]), read_side([b, *(matched.with_b or [])])
    say_left_out([*first, *second])
    return outputs.conclude(first, second, options, out)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _share(option: str, text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        percent = float(number)
    except ValueError:
        raise UsageError(f"{option} {text} is no share; give one such as {option} 1%.") from None
    if percent >= 0 and "%" not in text:
        raise UsageError(f"{option} {text} has no unit; write {option} {number}%.")
    return percent / 100
