"""Implement `dcpbench env`: show installed packages and visible GPUs."""

from typing import Annotated

import typer

from dcpbench.show.terminal import make_console


def env(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> int:
    """Show what is installed and visible, and what is missing.

    Example: dcpbench env
    """
    import msgspec

    from dcpbench.commands import runs
    from dcpbench.launch import launcher

    probe = launcher.run_probe(runs.WORKER)
    if as_json:
        runs.print_json(msgspec.to_builtins(probe))
        return 0
    from dcpbench.launch.progress import make_env_table

    terminal = make_console()
    terminal.print(make_env_table(probe))
    for problem in probe.problems:
        terminal.print(f"• {problem}", soft_wrap=True)
    if not probe.problems:
        terminal.print("Nothing is missing.")
    return 0
