"""Implement `dcpbench sweep`: measure decode over layouts and loads."""

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, collect_typed


class Load(Group):
    """Hold the options for the model and the load."""

    model: str | None = opt.MODEL
    concurrency: str | None = opt.LOAD(
        "Requests in flight over the whole layout. Default: 8,32,48 on GPUs; 2,8 on the CPU.", metavar="N,…"
    )
    context: str | None = opt.LOAD(
        "Tokens already in the KV cache of each request. Default: 4000 on GPUs; 100 on the CPU.", metavar="TOKENS,…"
    )
    weights: str | None = opt.WEIGHTS


class How(opt.How):
    """Hold the options of how a layer is computed, with the size of the KV pool."""

    kv_memory: str | None = opt.HOW(
        "KV pool per GPU, such as 100GiB or 40GB. Default: all that the weights leave, if all of them fit together with "
        "the largest point of the layout; else what that point needs.",
        metavar="SIZE",
    )


class Emulation(Group):
    """Hold the option that emulates the other ranks."""

    emulate: str | None = opt.EMULATE


class Measured(Group):
    """Hold the options for the duration, the repeats, the baseline and the profile."""

    seconds: float | None = opt.MEASURE(
        "Time limit of one point's measurement; it stops earlier once the median is known within ±1 %, and is marked "
        "noisy otherwise. Default: 10.",
        metavar="SECONDS",
    )
    repeats: int | None = opt.REPEATS
    baseline: bool | None = opt.BASELINE
    profile: bool | None = opt.MEASURE(
        "A separate profiled pass for the phase breakdown and host synchronisations; it does not affect the timings. "
        "Default: yes."
    )


def sweep(
    layouts: opt.Layouts, load: Load, how: How, emulation: Emulation, measured: Measured, run: opt.RunOnMachines
) -> int:
    """Measure decode over layouts and loads, then write a report.

    Every combination of the comma lists is a point; those that cannot run are listed with the reason. One torchrun job
    per tp runs them; a point that dies or hangs is recorded and the others go on.

    For example:

      dcpbench sweep --tp 8 --dcp 8

      dcpbench sweep --model kimi-k2 --tp 4 --dcp 2,4 --context 4000,32000 --concurrency 8,32,48

      dcpbench sweep --tp 8 --dcp 8 --emulate H200

      dcpbench sweep --config sweep.toml --dry-run
    """
    from dcpbench.commands import runs
    from dcpbench.plan.spec import make_spec, read_options

    runs.check_run(run)
    from_file = read_options(run.config) if run.config else {}
    probe = runs.get_probe(run)
    given = from_file | collect_typed(layouts, load, how, emulation, measured)
    return runs.measure(make_spec(given, probe), probe, run, given=given)
