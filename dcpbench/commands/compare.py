"""Implement `dcpbench compare`: judge whether B is faster or slower than A. `ab` shares its options."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, make_panel
from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from dcpbench.compare.judging import Options

JUDGE = make_panel("Statistics")


class JudgementOptions(Group):
    """Hold the options of how two sides are compared."""

    fail_on: str | None = JUDGE(
        "Exit with 1 if B is proven worse than this: slower:2%, itl_p99:5%, syncs:+0, memory:+1 (its unit), …, and with 3 if "
        "a rule could not be judged, as with fewer than 4 launches of each side. undecided: also exit with 1 if a rule is "
        "not decided, or, without other rules, if any verdict is UNDECIDED; missing: also if B lacks a point. Points that fail "
        "only in B always count. Default: none.",
        metavar="RULE,…",
    )
    margin: str = JUDGE("Ratios within this margin count as the same.", default="1%", metavar="PERCENT")
    launch_noise: str | None = JUDGE(
        "Standard deviation of the difference between two launches of the same variant, if known: then fewer than 4 launches "
        "of each side can be judged. Default: none; it is measured if there are at least 4 launches.",
        metavar="PERCENT",
    )
    alpha: float = JUDGE(
        "Probability of any FASTER or SLOWER over all rows if nothing differs.", default=0.05, metavar="P"
    )
    metric: str | None = JUDGE(
        "Compare only these metrics: with fewer tests, smaller differences are found. Default: all.", metavar="NAME,…"
    )
    allow_cpu: bool = JUDGE("Also judge times of CPU runs, which do not reflect GPU performance.", default=False)

    def make_options(self, *, paired: bool, across: str | None = None) -> "Options":
        """Return the options of the comparison. Raise UsageError if a value is not a percentage."""
        from dcpbench.compare.judging import Options

        return Options(
            margin=_parse_share("--margin", self.margin),
            launch_noise=None if self.launch_noise is None else _parse_share("--launch-noise", self.launch_noise),
            alpha=self.alpha,
            metrics=_split_words("--metric", self.metric),
            across=_split_words("--across", across),
            allow_cpu=self.allow_cpu,
            paired=paired,
        )


class OutputOptions(Group):
    """Hold the options for files and formats of a comparison."""

    folder: Path | None = opt.OUTPUT(
        "Write compare.md, compare.json and the forest plot (PNG, SVG) to this folder.", "-o", "--output", metavar="DIR"
    )
    junit: Path | None = opt.OUTPUT("Write JUnit XML to this file.", metavar="FILE")
    github: bool = opt.OUTPUT("Print annotations of GitHub Actions, and append to the step summary.", default=False)
    every: bool = opt.OUTPUT("Show every point, not the first 40.", "--all", default=False)
    as_json: bool = opt.JSON


class Matched(Group):
    """Hold the options that add launches and that match launches and points of both sides."""

    with_a: list[Path] | None = opt.OPTION("One more launch of A; may be repeated.", metavar="RUN")
    with_b: list[Path] | None = opt.OPTION("One more launch of B; may be repeated.", metavar="RUN")
    paired: bool = JUDGE("The n-th launches of A and B belong together, as `ab` makes them.", default=False)
    across: str | None = JUDGE(
        "Ignore these fields when points are matched, such as exchange or backend, to compare variants. Default: none.",
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
    judged: JudgementOptions,
    shown: OutputOptions,
) -> int:
    """Compare two sides, A and B, of one or more runs each: at each point B is FASTER, SLOWER, the SAME or UNDECIDED.

    A side is a folder with at least 4 launches: with fewer the variation between launches is unknown, and times stay
    UNDECIDED. `dcpbench ab` runs launches of both sides in turn. Exit codes: 0 success · 1 a rule of --fail-on fails · 2 options
    or records that cannot be used · 3 a rule could not be judged · 141 the output pipe was closed.
    docs/comparing.md explains the statistics.

    For example:

      dcpbench compare runs/main-launches/ runs/branch-launches/ --fail-on slower:2%,itl_p99:5%,syncs:+0 --github

      dcpbench compare runs/monday-launches/ runs/tuesday-launches/ --across exchange -o difference

      dcpbench compare runs/main runs/branch
    """
    from dcpbench.commands.point_runner import print_left_out
    from dcpbench.compare import outputs
    from dcpbench.compare.sides import read_side

    options = judged.make_options(paired=matched.paired, across=matched.across)
    out = outputs.OutputTargets(fail_on=judged.fail_on, **vars(shown))
    outputs.check_options(options, out)
    sides = [a, *(matched.with_a or [])], [b, *(matched.with_b or [])]
    first, second = map(read_side, sides)
    print_left_out([*first, *second])
    return outputs.run_comparison(first, second, options, out)


def _split_words(option: str, text: str | None) -> tuple[str, ...]:
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    if text is not None and not words:
        raise UsageError(f"{option} is empty; name something after it, or leave it out.")
    return words


def _parse_share(option: str, text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        percent = float(number)
    except ValueError:
        raise UsageError(f"{option} {text} is not a percentage; give one such as {option} 1%.") from None
    if percent >= 0 and "%" not in text:
        raise UsageError(f"{option} {text} has no unit; write {option} {number}%.")
    return percent / 100
