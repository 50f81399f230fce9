"""`dcpbench doctor`: whether this machine is fit for a long sweep."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.doctor import Finding

SIGNS = {"bad": "✗", "note": "•", "unread": "?"}
OF_ONE_GPU = re.compile(r"-i \d+")


def doctor(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder that a run would write into, for its disk.")
    ] = Path("runs"),
    nnodes: Annotated[
        int, typer.Option("--nnodes", metavar="N", min=1, help="Machines of the run. Repeat the command on each.")
    ] = 1,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where they would meet: its port is tried."),
    ] = None,
    as_json: bool = opt.JSON,
) -> int:
    """Look this machine over before a long sweep, and say of each finding what to do about it. Nothing is changed.

    GPUs: other processes, clocks, power caps, throttling, MIG, ECC, peer access. The system: limits, shared memory, disk,
    ports, clock, cores, NUMA, environment. Versions that are known to hurt. What could not be read is said, and is never
    taken for well. A sweep looks at the worst of this by itself when it starts.

    Ends with 1 where something would spoil a measurement, with 4 where nothing would as far as is known, but something could
    not be read, and with 0 where everything was read and nothing would.

    Example: dcpbench doctor -o runs/monday
    """
    import msgspec

    from dcpbench.commands.runs import print_json
    from dcpbench.doctor import OK, check_machine
    from dcpbench.launch.nodes import split_endpoint
    from dcpbench.show.terminal import make_console

    endpoint = split_endpoint(rdzv_endpoint) if rdzv_endpoint else None
    report = check_machine(output, nnodes=nnodes, endpoint=endpoint)
    if as_json:
        print_json({"exit_code": report.exit_code, "findings": [msgspec.to_builtins(f) for f in report.findings]})
        return report.exit_code
    terminal = make_console()
    for line in format_findings(report.findings):
        terminal.print(line, soft_wrap=True)
    well = list(dict.fromkeys(f.check for f in report.findings if f.level == OK))
    wrong = {f.check for f in report.findings if f.level != OK}
    clear = [check for check in well if check not in wrong]
    if clear:
        terminal.print(f"Read, and as it should be: {', '.join(clear)}.", soft_wrap=True)
    return report.exit_code


def format_findings(findings: "Sequence[Finding]") -> list[str]:
    """What is not as it should be, the worst first; what is the same of several GPUs once."""
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
    """What of this machine would spoil the run that begins, a line each."""
    from dcpbench.doctor import check_at_start

    for line in format_findings(check_at_start(folder, cuda=cuda)):
        print_stderr(f"doctor: {line}")
