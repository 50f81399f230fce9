"""Implement `dcpbench sweep`: measure decode over layouts and loads."""

from pathlib import Path

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, collect_typed, list_changed, make_panel, make_structured
from dcpbench.points.structured_options import Mtp, Stages, Timeout

ENGINE = make_panel("Another engine")


class Load(Group):
    """Hold the options for the model and the load."""

    model: str | None = opt.MODEL
    concurrency: str | None = opt.LOAD(
        "Requests in flight over the whole layout. Default: 8,32,48 on GPUs; 2,8 on the CPU.", metavar="N,…"
    )
    context: str | None = opt.LOAD(
        "Tokens already in the KV cache of each request. Default: 4000 on GPUs; 100 on the CPU.", metavar="TOKENS,…"
    )
    weights: str | None = opt.LOAD(
        "Folder of a checkpoint (safetensors), or synthetic for seeded random weights of full size. Default: synthetic. With --engine: model, synthetic or dummy, as in dcpbench server; the default is then synthetic for a folder without weight files, else model.",
        metavar="FOLDER",
    )


class Engines(Group):
    """Hold the options for another engine that is measured instead of dcpbench's own."""

    engine: str | None = ENGINE(
        "Measure the decode steps of this engine, through its server, instead of dcpbench's own engine: vllm, sglang, or a .toml file with its command and flags (docs/servers.md). One server is started for each layout. --model then takes one model: a folder, or a name that the engine knows. The default of --tp is then 1.",
        metavar="NAME",
    )
    engine_args: str | None = ENGINE(
        "With --engine: further arguments of its command, as one quoted string, such as '--max-model-len 140000'.",
        metavar="ARGS",
    )
    rates: Path | None = ENGINE(
        "With --engine: folder of a run of dcpbench's own engine on this machine. The report computes the minimum time of each step (its floor) from the memory bandwidth and FLOP/s measured in that run. Default: no floors.",
        metavar="RUN",
    )
    traces: Path | None = ENGINE(
        "With --engine: folder in which the traces of the profiled steps are kept; it is created if it does not exist. Default: they "
        "are deleted after they have been read.",
        metavar="FOLDER",
    )


class LayerOptions(opt.LayerOptions):
    """Hold the options of how a layer is computed, with the size of the KV pool."""

    mtp: Mtp | None = opt.MTP
    kv_memory: str | None = opt.HOW(
        "KV pool per GPU, such as 100GiB or 40GB. Default: all memory that the weights leave. If the GPUs cannot hold all "
        "layers, each step repeats those that fit, and the default is the size that the layout's largest point needs.",
        metavar="SIZE",
    )


class Run(opt.RunOnMachines):
    """Hold the options of how the command runs, with the start of another engine's server."""

    timeout: Timeout | None = make_structured(
        opt.MEASURE,
        Timeout,
        "stall",
        "point",
        "retries",
        "start",
        stall=f"{Timeout.list_keys()['stall'].text} With --engine: time without a token after which a request has failed. Default: 300; 600 with --engine.",
    )


class Emulation(Group):
    """Hold the options for layouts that this machine does not run."""

    emulate: str | None = opt.EMULATE
    stages: Stages | None = make_structured(
        opt.HOW,
        Stages,
        "pp",
        "pcp",
        about="With --dry-run: pipeline stages and prefill context parallelism. Values separated by / are separate points.",
    )


class MeasurementOptions(Group):
    """Hold the options for the duration, the repeats, the baseline and the profile."""

    seconds: float | None = opt.MEASURE(
        "Time limit of one point's measurement, which stops earlier once the median is known within ±1 %. A point that reaches the limit is marked noisy. Default: 10.",
        metavar="SECONDS",
    )
    repeats: int | None = opt.REPEATS
    baseline: bool | None = opt.MEASURE(
        "Also measure the baseline of each layout under the same load: the same layout with dcp 1, or tp alone for a layout with dp and without dcp. Default: yes. With --engine: only dcp 1 is added, and only if --dcp is not given."
    )
    profile: bool | None = opt.MEASURE(
        "Run a separate profiled pass for the phase breakdown and host synchronisations; it does not affect the timings. "
        "With --engine, the server's profiler records some steps after those that are timed. Default: yes."
    )


def sweep(
    layouts: opt.Layouts,
    load: Load,
    engines: Engines,
    how: LayerOptions,
    emulation: Emulation,
    measured: MeasurementOptions,
    run: Run,
) -> int:
    """Measure decode steps, without prefill, over layouts and loads, then write a report.

    Every combination of the values in comma-separated lists is a point; points that cannot run are listed with the reason. One torchrun job measures all points with the same --tp. If a point crashes or hangs, its record says so, and the other points are still measured.

    With --engine, dcpbench starts a server of vLLM, SGLang or another engine and measures its decode steps at the same layouts,
    concurrencies and contexts. The server prefills all prompts of a point first; a step's time is the gap between two
    tokens of a request while all requests decode.

    For example:

      dcpbench sweep --tp 8 --dcp 8

      dcpbench sweep --model kimi-k2 --tp 4 --dcp 2,4 --context 4000,32000 --concurrency 8,32,48

      dcpbench sweep --tp 8 --dcp 8 --emulate H200

      dcpbench sweep --config sweep.toml --dry-run

      dcpbench sweep --engine vllm --model /models/v3 --tp 2 --dcp 1,2 --concurrency 8,32 --context 4000,32000,128000
    """
    from dcpbench.commands import point_runner
    from dcpbench.errors import UsageError
    from dcpbench.plan.spec import make_spec, read_options

    point_runner.check_run(run)
    from_file = read_options(run.config) if run.config else {}
    given = from_file | collect_typed(layouts, load, how, emulation, measured)
    if engines.engine is not None:
        from dcpbench.commands.sweep_engines import measure_engine

        return measure_engine(engines, given, run)
    alone = list_changed(engines)
    if run.limits.start is not None:
        alone.append("--timeout start")
    if alone:
        raise UsageError(f"{alone[0]} needs an engine that is started; add for example --engine vllm.")
    probe = point_runner.get_probe(run)
    return point_runner.measure(make_spec(given, probe), probe, run, given=given)
