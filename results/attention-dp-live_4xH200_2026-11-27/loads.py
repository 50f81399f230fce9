"""Several commands of `dcpbench serve` that share an engine, as one job that builds it once; it writes no report.

    python loads.py -o FOLDER [--check] "OPTIONS THAT ALL HAVE" "OPTIONS OF ONE COMMAND" "OPTIONS OF THE NEXT" ...

Points are those that the commands would make, in their order; records, samples and step times land in FOLDER as each point
ends, and what is there is not measured again. --check only says what would run.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from pathlib import Path

import msgspec
from typer.main import get_command

from dcpbench.cli import app
from dcpbench.commands import runs
from dcpbench.commands.command import ended
from dcpbench.plan import grid
from dcpbench.points.budget import engine_of, plan_engines


@functools.cache
def probed():
    return runs.launcher.probe(runs.WORKER)


def machine(run):
    return runs.effective(runs.planned(run.gpu, run.gpus or 8) if run.gpu else probed(), run.device)


def asked(common, each, folder):
    """(spec, probe, run) of each command, as `dcpbench serve` reads it."""
    found = []
    runs.measure = lambda spec, probe, run, work_off=None: found.append((spec, probe, run)) or 0
    runs.machine = machine
    for words in each:
        ended(get_command(app), ["serve", *common, *words, "--no-baseline", "-o", folder, "--resume"], "dcpbench")
    return found


def main():
    words = [w for w in sys.argv[1:] if w != "--check"]
    assert words[0] == "-o", __doc__
    folder, common, each = words[1], shlex.split(words[2]), [shlex.split(w) for w in words[3:]]
    found = asked(common, each, folder)
    spec, probe, run = found[0]
    assert all(other.settings == spec.settings for other, _, _ in found), "options of all points must be common ones"
    able, not_able = {}, []
    for other, _, _ in found:
        for c in grid.expand(other, probe):
            if c.error is None:
                able.setdefault(c.point.key(), c)
            else:
                not_able.append(c)
    engines = plan_engines([c.point for c in able.values()], spec.settings, probe)
    candidates = [dataclasses.replace(c, plan=engine_of(c.point, engines)) for c in able.values()]
    for c in [*candidates, *not_able]:
        plan = c.plan and f"{c.plan.layers_held} of {c.plan.layers} layers beside {c.plan.kv_bytes / 2**30:.1f} GiB of KV"
        print(f"{grid.point_name(c.point)}: {plan or c.error}", flush=True)
    if "--check" in sys.argv:
        return 0
    work = msgspec.structs.replace(
        runs.work_of(Path(folder), spec.settings, probe, run), command=shlex.join(["python", "loads.py", *sys.argv[1:]])
    )
    with runs.as_part():
        return runs.carry_out([*candidates, *not_able], Path(folder), work, probe, run)


if __name__ == "__main__":
    sys.exit(main())
