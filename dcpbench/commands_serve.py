"""What `dcpbench serve` does once its options are read: a grid as of sweep, with loads. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dcpbench.runs import check_run, machine, measure, say
from dcpbench.serve_spec import SERVE_PARSERS, ServeLoads, make_serve_spec
from dcpbench.spec import read_options

if TYPE_CHECKING:
    from dcpbench.runs import Run


def serve(given: dict[str, object], run: Run) -> int:
    """`dcpbench serve`: returns the exit code."""
    check_run(run)
    from_file = read_options(run.config, SERVE_PARSERS) if run.config else {}
    probe = machine(run)
    spec = make_serve_spec(from_file | {name: value for name, value in given.items() if value is not None}, probe)
    loads = cast("ServeLoads", spec.serve)
    if loads.trace and loads.trace.sorted:
        say(f"{loads.trace.path}: its times were out of order; the requests are sent by time.")
    return measure(spec, probe, run)
