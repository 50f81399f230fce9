"""Implement `dcpbench doctor`: show what is installed, and check whether this machine is fit for a long sweep."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.commands.command import make_structured
from dcpbench.points.structured_options import Nodes
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.doctor import Finding

SIGNS = {"bad": "✗", "note": "•", "unread": "?"}
NODES = make_structured(
    opt.OPTION,
    Nodes,
    "count",
    "endpoint",
    about="Machines of the run. Repeat the command on each.",
    endpoint="address at which the machines meet in the run; its port is checked.",
)
OF_ONE_GPU = re.compile(r"-i \d+")


def doctor(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder that a run would write into, for its disk.")
    ] = Path("runs"),
    nodes: Nodes | None = NODES,
    as_json: bool = opt.JSON,
) -> int:
    """Show what is installed and visible, check this machine before a long sweep, and print a remedy for each finding.

    Nothing is changed. GPUs: other processes, clocks, power caps, throttling, MIG, ECC, peer access. The system: limits, shared memory, disk,
    ports, clock, cores, NUMA, environment. Versions with known problems. A check that could not be read is reported and
    never counts as passed. A sweep runs the most important of these checks when it starts.

    Exit codes: 1 if something would distort a measurement, 4 if nothing was found but some checks could not be read, and
    0 if all checks were read and passed.

    Example: dcpbench doctor -o runs/monday
    """
    import msgspec

    from dcpbench.commands import point_runner
    from dcpbench.doctor import OK, check_machine
    from dcpbench.errors import UsageError
    from dcpbench.launch import launcher
    from dcpbench.launch.nodes import split_endpoint
    from dcpbench.launch.progress import make_probe_table
    from dcpbench.show.terminal import make_console

    run_on = nodes or Nodes()
    if run_on.count < 1:
        raise UsageError(f"--nodes {run_on.count} is not positive; try --nodes 2, or leave it out.")
    endpoint = split_endpoint(run_on.endpoint) if run_on.endpoint else None
    report = check_machine(output, nnodes=run_on.count, endpoint=endpoint)  # first, as the probe itself uses a GPU
    probe = launcher.run_torch_probe(point_runner.WORKER)
    if as_json:
        findings = [msgspec.to_builtins(f) for f in report.findings]
        point_runner.print_json(
            {"exit_code": report.exit_code, "machine": msgspec.to_builtins(probe), "findings": findings}
        )
        return report.exit_code
    terminal = make_console()
    terminal.print(make_probe_table(probe))
    for problem in probe.problems:
        terminal.print(f"• {problem}", soft_wrap=True)
    for line in format_findings(report.findings):
        terminal.print(line, soft_wrap=True)
    well = list(dict.fromkeys(f.check for f in report.findings if f.level == OK))
    wrong = {f.check for f in report.findings if f.level != OK}
    clear = [check for check in well if check not in wrong]
    if clear:
        terminal.print(f"Checked, without findings: {', '.join(clear)}.", soft_wrap=True)
    return report.exit_code


def format_findings(findings: "Sequence[Finding]") -> list[str]:
    """Format the findings that need attention, the worst first. A finding of several GPUs is one line."""
    texts: list[str] = []
    for level, sign in SIGNS.items():
        same: dict[tuple[str, str, str], list[Finding]] = {}
        for finding in findings:
            if finding.level == level:
                remedy = OF_ONE_GPU.sub("-i …", finding.remedy)
                same.setdefault((finding.check, finding.what, remedy), []).append(finding)
        for (check, what, _), found in same.items():
            where = ", ".join(f.where for f in found if f.where)
            ids = ",".join(m[0][3:] for f in found if (m := OF_ONE_GPU.search(f.remedy)))
            remedy = OF_ONE_GPU.sub(f"-i {ids}", found[0].remedy)
            texts.append(
                f"{sign} {check}{f' ({where})' if where else ''}: {what}{f' To do: {remedy}' if remedy else ''}"
            )
    return texts


def report_at_start(folder: Path, *, cuda: bool) -> None:
    """Print each finding that would distort the run that is starting."""
    from dcpbench.doctor import check_at_start

    for line in format_findings(check_at_start(folder, cuda=cuda)):
        print_stderr(f"doctor: {line}")
