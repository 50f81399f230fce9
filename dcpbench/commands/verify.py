"""Implement `dcpbench verify`: check layouts, backends and exchanges against a slow fp64 reference on one rank."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, collect_typed, list_changed, make_panel, make_structured
from dcpbench.errors import ExitCode, UsageError
from dcpbench.points.structured_options import Timeout
from dcpbench.servers.edge_lengths import MAX_CONTEXT
from dcpbench.show.terminal import make_console, print_stderr
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.layout import Layout
    from dcpbench.points.point import Point
    from dcpbench.points.prompts import Prompts

NEW_TOKENS = 8
USUAL = ((1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4), (4, 2, 2))  # default layouts, as (tp, dp, dcp)
SERVERS = make_panel("Servers")
STALL = f"{Timeout.list_keys()['stall'].text} With --url or --engine: time without an answer after which a request has failed. Default: 300."
USUAL_LOAD = {"concurrency": "4", "context": "37"}


class Layouts(opt.Layouts):
    """Hold the options of layouts to check. A degree that is left out takes all valid values."""

    tp: str | None = opt.LAYOUT(
        "Ranks of a layout. Default: the largest --dp times the largest --dcp. If neither is given: the six layouts above. With --engine: 1."
    )
    dp: str | None = opt.LAYOUT("Attention data parallel replicas inside tp. Default: every valid number.")
    dcp: str | None = opt.LAYOUT(
        "Ranks that share the KV cache of one request; divides tp / dp. Default: every valid number; with --engine 1 and "
        "tp / dp."
    )


class Load(Group):
    """Hold the options for the load and for a checkpoint that is compared with transformers."""

    model: str | None = opt.LOAD(
        "Model, with the same names and default as in sweep. With --url: name of one of the servers' models. Default: the only one.",
        metavar="NAME",
    )
    checkpoint: Path | None = opt.LOAD(
        "Also compare every operation of every layer, logits and greedy tokens with transformers, for this Hugging Face "
        "checkpoint (config.json and safetensors).",
        metavar="FOLDER",
    )
    prompts: Path | None = opt.LOAD(
        "With --checkpoint: JSON lists of token ids. Default: seeded random prompts of uneven lengths.", metavar="FILE"
    )
    new_tokens: int | None = opt.LOAD(
        "With --checkpoint, --url or --engine: number of greedy tokens to compare. Default: 8; 32 with --url; 16 with --engine.",
        metavar="N",
        min=1,
    )
    concurrency: str | None = opt.LOAD(
        "With --checkpoint: number of random prompts (default: 4). With --engine or --url: batch sizes (default: 1,2,8,33,64 with --engine; 1,8 with --url).",
        metavar="N",
    )
    context: str | None = opt.LOAD(
        "Length of the longest request; the others are shorter, so that shards are uneven (default: 37). With --url: lengths of prompts (default: 64, 128, … up to 32,768, as far as the servers accept them). With --engine: lengths of prompts. Default: lengths at the edges of pages, of interleaving over dcp, of tiles and of prefill chunks, powers of two, 32k and 128k.",
        metavar="TOKENS",
    )


class ServerOptions(Group):
    """Hold the options for servers that are compared instead of dcpbench's own engine."""

    engine: list[str] | None = SERVERS(
        "Engine to compare: vllm, sglang, or a .toml file with its command and flags (docs/servers.md). One server is started for each "
        "layout of --tp, --dp and --dcp, and its greedy answers are compared with those of the first server. --model names the model to "
        "serve. Given twice, both engines are compared, each in all layouts.",
        metavar="NAME",
    )
    variant: list[str] | None = SERVERS(
        "With --engine: also compare the last layout with these flags added to its command, such as 'eager=--enforce-eager', or with "
        "a variant of the engine's file by its name. vllm and sglang have eager (no CUDA graphs). Can be given several times.",
        metavar="NAME[=FLAGS]",
    )
    engine_args: str | None = SERVERS(
        "With --engine: further arguments of the engine's command, as one quoted string, such as '--max-model-len 70000'.",
        metavar="ARGS",
    )
    weights: str | None = SERVERS(
        "With --engine: model, synthetic or dummy, as in dcpbench server. Default: synthetic for a folder without a checkpoint, "
        "else model.",
        metavar="NAME",
    )
    max_context: int | None = SERVERS(
        f"With --engine, without --context: maximum number of tokens of a prompt and its answer together. Default: {MAX_CONTEXT}.",
        metavar="N",
        min=1,
    )
    url: list[str] | None = SERVERS(
        "Address of a running server. If the option is given twice, the greedy answers of the two servers, A and B, are compared. Each server is also compared with itself: when a prompt is sent again (prefix cache), and in a batch. If it is given once, the server is only compared with itself.",
        metavar="URL",
    )
    num_prompts: int | None = SERVERS(
        "Minimum number of prompts for each length and batch size. Default: 8 with --url, 4 with --engine.",
        metavar="N",
        min=1,
    )
    repeats: int = SERVERS(
        "Number of rounds in which all prompts are sent again, in the same batches.", default=2, metavar="N", min=1
    )
    tolerance: float = SERVERS(
        "Difference between log-probabilities that always counts as rounding. Two tokens within twice this difference are a near-tie. A larger difference is allowed if one server's own log-probabilities differ more between batches, or between prefix-cache hits and misses.",
        default=0.1,
        metavar="X",
        min=0.0,
    )
    seed: int | None = SERVERS(
        "Seed of the prompts. With the seed of an earlier run, prompts may be in the server's prefix cache from the beginning. Default: a new one.",
        metavar="N",
        min=0,
    )
    endpoint: str = SERVERS("completions or chat.", default="completions", metavar="NAME")
    api_key_env: str = SERVERS("Environment variable with the API key.", default="OPENAI_API_KEY", metavar="NAME")
    header: list[str] | None = SERVERS(
        "Header that is sent with every request; can be given several times.", metavar="'NAME: VALUE'"
    )
    extra_body: str | None = SERVERS("JSON object whose fields are added to every request.", metavar="JSON")


class Run(opt.Run):
    """Hold the options of how a command runs, without --config and --resume."""

    config = None
    resume = False
    timeout: Timeout | None = make_structured(opt.MEASURE, Timeout, "stall", "start", stall=STALL)


def verify(layouts: Layouts, load: Load, how: opt.LayerOptions, remote: ServerOptions, run: Run) -> int:
    """Check layouts, backends and exchanges against a slow fp64 reference on one rank.

    Without --tp, --dp and --dcp the layouts are tp1, tp2, tp2·dcp2, tp4·dcp2, tp4·dcp4 and tp4·dp2·dcp2, as far as the
    GPUs suffice. With --tp all valid layouts of that many ranks are checked. The exit code is 1 if a check fails, and 4 if none
    fails but some points could not be checked.

    With --url or --engine, the greedy answers of servers are compared instead. The exit code is 0 if the answers agree (for
    one server: if they repeat), 1 if they differ or a server fails at a request, and 3 if that could not be decided.

    For example:

      dcpbench verify --tp 4 --backend reference,triton

      dcpbench verify --tp 4 --dcp 4 --exchange ag_rs,a2a,symm --collectives q-replicate=yes

      dcpbench verify --tp 4 --ep 1,tp

      dcpbench verify --checkpoint ~/models/deepseek-v2-lite --tp 4 --dcp 4

      dcpbench verify --url http://127.0.0.1:8000 --url http://127.0.0.1:8001

      dcpbench verify --engine vllm --model /models/v3 --tp 8 --dcp 1,8 --exchange ag_rs,a2a --variant eager

      dcpbench verify --engine vllm --engine sglang --model /models/v3 --tp 8 --dcp 1
    """
    import msgspec

    from dcpbench.commands import point_runner
    from dcpbench.launch import folders
    from dcpbench.models.checkpoint_folder import check_checkpoint
    from dcpbench.plan import grid
    from dcpbench.plan.spec import PARSERS, make_spec

    if remote.engine:
        from dcpbench.commands.verify_servers import compare_engines

        return compare_engines(remote, collect_typed(layouts, how, load), load, run)
    _check_servers(remote, run)
    if remote.url:
        from dcpbench.commands.verify_servers import compare_servers

        return compare_servers(remote, collect_typed(layouts, how, load), load, run)
    point_runner.check_run(run)
    probe = point_runner.get_probe(run)
    if load.checkpoint:
        check_checkpoint(load.checkpoint, "--checkpoint")
    elif load.prompts:
        raise UsageError("--prompts needs a checkpoint; add --checkpoint FOLDER.")
    given = {name: value for name, value in collect_typed(layouts, load, how).items() if name in PARSERS}
    given |= {name: given.get(name) or value for name, value in USUAL_LOAD.items()}
    spec = make_spec(given | {"weights": str(load.checkpoint) if load.checkpoint else None, "baseline": False}, probe)
    if point_runner.is_values_only(run, spec.tp if layouts.tp else (), spec.dp, spec.dcp, spec.typed):
        return 0
    candidates = grid.expand_layouts(_list_layouts(spec, layouts, probe), spec, probe, run.caller.argv)
    if stored := grid.format_precision_note(spec, candidates):
        print_stderr(stored)
    if not run.dry_run:
        grid.check_live(candidates, spec.settings)
    if point_runner.finish_if_planned(candidates, probe, run):
        return 0
    texts = _load_prompts(spec, load)
    folder = run.output or folders.choose_folder("verify", spec.tp)
    points = [c.point for c in candidates if c.error is None]
    options = point_runner.make_work(folder, spec.settings, probe, run)
    options = msgspec.structs.replace(options, kind="verify", new_tokens=load.new_tokens or NEW_TOKENS, prompts=texts)
    with folders.lock_folder(folder) as lock:
        with folders.convert_write_errors(folder):
            folders.prepare_checks(folder, force=run.force)
            point_runner.print_start(candidates, points, folder, probe, cpu_note=False)
            point_runner.run_points(points, msgspec.structs.replace(options, lock=lock), run)
        return _print_checks(points, folder, run)


def _check_servers(remote: ServerOptions, run: Run) -> None:
    """Raise UsageError for an option that needs a started engine, or, without --url, any server."""
    started = {
        "--variant": remote.variant,
        "--engine-args": remote.engine_args,
        "--weights": remote.weights,
        "--max-context": remote.max_context,
        "--timeout start": run.limits.start,
    }
    if alone := [name for name, value in started.items() if value is not None]:
        raise UsageError(f"{alone[0]} needs an engine that is started; add for example --engine vllm.")
    if not remote.url and (alone := list_changed(remote)):
        raise UsageError(f"{alone[0]} is for servers; add for example --url http://127.0.0.1:8000, or leave it out.")


def _list_layouts(spec: "SweepSpec", layouts: Layouts, probe: "Probe") -> list["Layout"]:
    """Return the default layouts that fit these GPUs, or every valid layout with the given degrees."""
    from dcpbench.models import load_shape
    from dcpbench.points.layout import Layout, list_valid_layouts, place_experts

    if not (layouts.tp or layouts.dp or layouts.dcp):
        usual = [Layout(tp=tp, dp=dp, dcp=dcp) for tp, dp, dcp in USUAL]
        return [x for x in usual if probe.device == "cpu" or x.tp <= probe.count]
    shape = load_shape(spec.model[0])
    dps = spec.dp if layouts.dp else (None,)
    tps = spec.tp if layouts.tp else (max(spec.dp) * max(spec.dcp or (1,)),)
    found: list[Layout] = []
    eps = [str(ep) for ep in spec.how["ep"]]
    for tp, dp, dcp in itertools.product(tps, dps, spec.dcp or (None,)):
        valid = [
            x for ep in eps for x in list_valid_layouts(shape, tp, ep) if dp in (None, x.dp) and dcp in (None, x.dcp)
        ]
        if not valid:
            Layout(tp=tp, dp=dp or 1, dcp=dcp or 1).check_model(shape, place_experts(eps[0], tp))
        found += dict.fromkeys(valid)
    return found


def _load_prompts(spec: "SweepSpec", load: Load) -> "Prompts":
    from dcpbench.models import load_shape
    from dcpbench.points.prompts import make_random_prompts, read_prompts

    if load.checkpoint is None:
        return ()
    shape = load_shape(str(load.checkpoint))
    if load.prompts:
        return read_prompts(load.prompts, shape, load.new_tokens or NEW_TOKENS)
    return make_random_prompts(shape, max(spec.concurrency), max(spec.context))


def _print_checks(points: Sequence["Point"], folder: Path, run: opt.Run) -> int:
    import msgspec

    from dcpbench.commands import point_runner
    from dcpbench.launch.jobs import read_checks
    from dcpbench.plan import grid
    from dcpbench.records.folder import FAILED_FILE
    from dcpbench.records.record import format_reason
    from dcpbench.records.runs import read_last_records

    checks = read_checks(folder)
    failed = list(read_last_records(folder, FAILED_FILE).values())
    reported = {f"{c.layout}·ep{c.ep}" for c in checks} | {f"{r.point.layout}·ep{r.point.ep_degree}" for r in failed}
    silent = {f"{p.layout}·ep{p.ep_degree}" for p in points} - reported
    ok = bool(checks) and all(c.ok for c in checks) and not failed and not silent
    if run.as_json:
        broken = [{"point": msgspec.to_builtins(r.point), "reason": format_reason(r)} for r in failed]
        point_runner.print_json(
            {"ok": ok, "checks": msgspec.to_builtins(checks), "failed": broken, "unchecked": sorted(silent)}
        )
    elif checks:
        from dcpbench.launch.progress import make_checks_table

        make_console().print(make_checks_table(checks))
    for r in failed:
        print_stderr(f"{r.outcome}: {grid.format_point_name(r.point)}: {format_reason(r)}")
    if silent:
        print_stderr(f"no check ran for: {', '.join(sorted(silent))}; read {folder / 'logs'}")
    wrong = sum(not c.ok for c in checks)
    summary = f"{len(checks) - wrong} checks ok, {wrong} wrong, {format_count(len(failed), 'point')} failed"
    print_stderr(f"{summary}. Output: {folder}")
    return 0 if ok else ExitCode.WRONG if wrong else ExitCode.FAILED
