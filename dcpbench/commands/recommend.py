"""Implement `dcpbench recommend`: choose a layout for a machine, which may be another one than this."""

import itertools
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, make_structured
from dcpbench.models import REPOSITORIES
from dcpbench.points.names import UNKNOWN, format_flag
from dcpbench.points.structured_options import Mtp, Prefill, Stages
from dcpbench.show.terminal import ProgressLine, make_console
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from dcpbench.points.point import Load
    from dcpbench.recommend.advise import Evidence, Query
    from dcpbench.recommend.answer_formats import Start
    from dcpbench.recommend.estimate import Steps
    from dcpbench.recommend.forecast import Forecast
    from dcpbench.recommend.layout_choice import Choice
    from dcpbench.records.runs import Run

CLIENTS, PROMPTS, ANSWERS = "32", "32000", "uniform:900-1100"  # defaults: a long context, at which capacity matters
EXCHANGES = ("ag_rs", "a2a")
REQUESTS = 200  # default of --num-requests, for loads with a request rate
SERVED = ("input_tokens", "output_tokens", "request_rate", "num_requests", "prefill")  # not for --context (decode only)


class QueryOptions(Group):
    """Hold the options for the model, the machine and the load."""

    model: str = opt.LOAD(
        f"{', '.join(REPOSITORIES)}, or a folder with a config.json.",
        default="deepseek-v3",
        metavar="NAME",
    )
    machine: str | None = opt.MACHINES(
        "A GPU of `dcpbench machines`, with +LINK for several hosts (H200+rdma-400), or a file written by `dcpbench bench calibrate`. "
        "Default: this machine's GPUs.",
        "--machine",
        "--gpu",
        metavar="MACHINE",
    )
    gpus: str | None = opt.MACHINES(
        "Number of GPUs of a layout. Several numbers are compared by throughput per GPU. Default: the GPUs of one host.",
        metavar="N,…",
    )
    stages: Stages | None = make_structured(opt.MACHINES, Stages)
    concurrency: str | None = opt.LOAD(f"Requests in flight. Default: {CLIENTS}.", metavar="N,…")
    context: str | None = opt.LOAD("Decode steps only, with this number of tokens for each request.", metavar="N,…")
    input_tokens: str | None = opt.LOAD(
        f"Length of prompts, such as 4000 or uniform:1000-7000, as in serve. Default: {PROMPTS}.", metavar="LEN"
    )
    output_tokens: str | None = opt.LOAD(f"Length of outputs, in the same notation. Default: {ANSWERS}.", metavar="LEN")
    request_rate: str | None = opt.LOAD(
        "Requests per second, instead of --concurrency; inf sends all at once.", metavar="R,…"
    )
    num_requests: int | None = opt.LOAD(f"With --request-rate: requests of a load. Default: {REQUESTS}.", metavar="N")
    prefill: Prefill | None = make_structured(opt.LOAD, Prefill, "chunk")
    mtp: Mtp | None = opt.MTP
    weights_dtype: str = opt.HOW(
        "Data type of weights: fp8, bf16, int4, nvfp4, mxfp4, or published (as the model was published).",
        default="published",
        metavar="NAME",
    )
    kv_dtype: str = opt.HOW("Data type of the KV cache: bf16 or fp8.", default="bf16", metavar="NAME")
    exchange: str | None = opt.HOW(
        f"Exchanges to consider for layouts with DCP. Default: {','.join(EXCHANGES)}.", metavar="NAME,…"
    )
    routing: str = opt.HOW(
        "How tokens are routed to experts: even, zipf:S or a file, as in sweep.", default="even", metavar="NAME"
    )
    kv_memory: str | None = opt.HOW("KV pool of each GPU. Default: the memory that the weights leave.", metavar="SIZE")
    cycled: bool = opt.HOW(
        "Also consider layouts with weights that do not fit into memory; sweep measures them by holding part of the layers and running these repeatedly.",
        default=False,
    )
    slo: str | None = opt.OPTION(
        "Limits of ttft, itl, tpot and e2el in ms, such as ttft=2000,itl=60. With --context, only itl is allowed.",
        metavar="NAME=MS,…",
    )
    price: float | None = opt.OPTION(
        "Price of a GPU per hour, to compute $ per million output tokens.", metavar="DOLLARS"
    )


def recommend(
    wanted: QueryOptions,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run or of several runs, with measured, replayed or emulated layouts; or a file of step times.",
        ),
    ] = None,
    score: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Print how often estimates pick the best measured layout of this run, instead of a recommendation.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for the answer as a Markdown page with a picture, and as JSON.",
        ),
    ] = None,
    force: bool = opt.OUTPUT("Overwrite files in --output.", default=False),
    as_json: bool = opt.JSON,
) -> int:
    """Recommend a layout, with its confidence and cost, and print how to start SGLang and vLLM in it.

    Layouts without a record are estimated: the minimum time of each step on the machine (its floor) is multiplied by the ratio of measured to minimum time of similar steps.
    Exit codes: 0 success · 2 options or records that cannot be used · 3 no layout can be recommended.

    For example:

      dcpbench recommend --model deepseek-v3 --machine H200 --concurrency 8,32,64 --price 3.5 --slo itl=60

      dcpbench recommend --machine H200 --gpus 4 --weights-dtype bf16 --cycled --context 4000 runs/measured
    """
    from dcpbench.commands.point_runner import print_json
    from dcpbench.errors import ExitCode, OutputError, UsageError
    from dcpbench.recommend import answer_formats
    from dcpbench.recommend.advise import choose_layouts
    from dcpbench.recommend.estimate import load_published_steps
    from dcpbench.records.disks import convert_output_errors
    from dcpbench.show.whole_files import write_output_file

    steps = load_published_steps()
    if score is not None:
        _check_score_alone(wanted, [name for name, value in (("RUN", runs), ("-o", output)) if value])
        return _print_score(score, wanted, as_json=as_json)
    if force and output is None:
        raise UsageError("--force overwrites files in the folder of -o; add -o, or leave --force out.")
    query, known = _make_query(wanted), _load_evidence(runs or [])
    names = ("recommendation.md", "recommendation.json", "recommendation.png")
    if output is not None and not force and (there := [n for n in names if (output / n).exists()]):
        raise OutputError(f"{output / there[0]} would be written over; add --force, or name another folder with -o.")
    if output is not None and output.exists() and not output.is_dir():
        raise OutputError(f"{output} is not a folder; name another one with -o.")
    with ProgressLine() as line:
        choices, notes = choose_layouts(query, known, steps, line)
    starts = {
        best.label: [_make_start(name, query, choice, best, steps) for name in answer_formats.STARTED_ENGINES]
        for choice, best in answer_formats.list_recommended(choices)
    }
    forecasts = {f.label: f for choice in choices for f in choice.ranked}
    flags = {who: _make_commands(query, f) for who, f in forecasts.items()}
    found = answer_formats.convert_to_json(query, choices, notes, steps, starts, flags)
    if output is not None:
        import json

        with convert_output_errors(output, "name another folder with -o"):
            output.mkdir(parents=True, exist_ok=True)
            write_output_file(
                output / names[0], answer_formats.render_markdown(query, choices, notes, steps, starts, flags)
            )
            write_output_file(output / names[1], json.dumps(found, indent=1) + "\n")
            answer_formats.draw_picture(query, choices, output / names[2])
    if as_json:
        print_json(found)
    else:
        answer_formats.show(query, choices, notes, steps, starts, flags, make_console())
        if output is not None:
            sys.stdout.write("".join(f"Wrote {output / name}\n" for name in names))
    return ExitCode.OK if any(choice.best for choice in choices) else ExitCode.NO_ANSWER


def _make_start(name: str, query: "Query", choice: "Choice", best: "Forecast", steps: "Steps") -> "Start":
    """Return the command that starts an engine in a recommended layout, or in the nearest one that it supports."""
    from dcpbench.models import load_shape
    from dcpbench.recommend.advise import find_nearest
    from dcpbench.recommend.answer_formats import Start
    from dcpbench.servers.presets import PRESETS, format_command

    nodes = -(-best.point.gpus // query.machine.gpus_per_host)
    engine, shape = PRESETS[name], load_shape(query.model)
    lacking = engine.find_lacking(best.point, shape)
    if not lacking:
        return Start(engine=name, command=format_command(name, best.point, nodes))
    nearest = find_nearest(query, choice, best, engine.exchanges, steps)
    if nearest is None or engine.find_lacking(nearest.point, shape):
        return Start(engine=name, lacking=lacking)
    command = format_command(name, nearest.point, nodes)
    return Start(engine=name, command=command, lacking=lacking, nearest=nearest, load=choice.name)


def _make_commands(query: "Query", f: "Forecast") -> dict[str, str]:
    """Return the commands that start the engines in a layout, without engines that cannot run it."""
    from dcpbench.models import load_shape
    from dcpbench.recommend import answer_formats
    from dcpbench.servers.presets import PRESETS, format_command

    nodes = -(-f.point.gpus // query.machine.gpus_per_host)
    shape = load_shape(query.model)
    names = [name for name in answer_formats.STARTED_ENGINES if not PRESETS[name].find_lacking(f.point, shape)]
    return {name: format_command(name, f.point, nodes) for name in names}


def _make_query(wanted: QueryOptions) -> "Query":
    from dcpbench.errors import UsageError
    from dcpbench.models import get_published_precision, load_shape
    from dcpbench.plan import option_parsers as read
    from dcpbench.points.bounds import MAX_NUMBER
    from dcpbench.points.cluster_specs import GPUS_PER_HOST, load_machine
    from dcpbench.points.expert_distribution import parse_routing
    from dcpbench.points.names import AS_PUBLISHED, AUTO_EXCHANGES, FP8, WEIGHT_FORMATS
    from dcpbench.recommend.advise import Query

    named, here = (wanted.machine, 0) if wanted.machine is not None else _find_local_gpu()
    machine = load_machine(named)
    shape = load_shape(wanted.model)
    weights = get_published_precision(shape) if wanted.weights_dtype == AS_PUBLISHED else wanted.weights_dtype
    known = {"--weights-dtype": (weights, ("bf16", *WEIGHT_FORMATS)), "--kv-dtype": (wanted.kv_dtype, ("bf16", FP8))}
    for option, (value, names) in known.items():
        if value not in names:
            raise UsageError(f"{option} {value} is none of {', '.join(names)}; write one of them.")
    exchanges = EXCHANGES if wanted.exchange is None else tuple(map(str, read.split_items("exchange", wanted.exchange)))
    if unknown := [name for name in exchanges if name not in AUTO_EXCHANGES]:
        raise UsageError(
            f"--exchange {unknown[0]} is none of {', '.join(AUTO_EXCHANGES)}; write for example --exchange a2a."
        )
    if wanted.price is not None and not 0 < wanted.price <= MAX_NUMBER:
        raise UsageError(
            f"--price {wanted.price:g} is not a valid price of a GPU per hour; write for example --price 3.5."
        )
    gpus = (
        read.parse_positive_ints("gpus", wanted.gpus)
        if wanted.gpus is not None
        else (here or min(GPUS_PER_HOST, machine.gpus_per_host),)
    )
    stages = _read_stages(wanted.stages or Stages())
    drafts, acceptance = _parse_drafts(wanted.mtp)
    if routing := parse_routing(wanted.routing):
        from dcpbench.points.expert_choices import load_choices

        load_choices(routing, shape)
    return Query(
        model=wanted.model,
        stages=tuple(itertools.product(stages.pp or (1,), stages.pcp or (1,))),
        micro_batches=stages.micro_batches or 0,
        machine=machine,
        named=named,
        gpus=gpus,
        loads=tuple(_make_loads(wanted, shape.max_position)),
        weights_dtype=weights,
        kv_dtype=wanted.kv_dtype,
        exchanges=exchanges,
        typed=frozenset(() if wanted.exchange is None else ("exchange",)),
        mtp=drafts,
        acceptance=acceptance,
        routing=routing,
        slo=_parse_objectives(wanted),
        price=wanted.price,
        kv_memory=wanted.kv_memory,
        cycled=wanted.cycled,
    )


def _read_stages(stages: Stages) -> Stages:
    """Return --stages. Raise UsageError for a degree or a number of micro-batches below 1, or one that nothing uses."""
    from dcpbench.plan.option_parsers import check_positive
    from dcpbench.points.pipeline import check_micro_batches

    degrees = {"pp": stages.pp or (), "pcp": stages.pcp or ()}
    for name, given in (degrees | {"micro_batches": [n for n in [stages.micro_batches] if n is not None]}).items():
        for n in given:
            check_positive(name, n)
    check_micro_batches(stages.micro_batches, stages.pp or (1,))
    return stages


def _parse_drafts(mtp: Mtp | None) -> tuple[int, str]:
    """Return the drafts of a step and their acceptance, which has to be stated."""
    from dcpbench.errors import UsageError
    from dcpbench.points import speculation

    tokens = tuple(map(speculation.check_draft_tokens, (mtp.tokens if mtp else None) or (0,)))
    if len(tokens) > 1:
        raise UsageError(
            f"--mtp tokens={tokens[0]}/{tokens[1]}: recommend takes one number of drafts, as in --mtp {max(tokens)}."
        )
    acceptance = "" if mtp is None or mtp.acceptance is None else speculation.parse_acceptance(mtp.acceptance)
    speculation.check_acceptance(tokens, acceptance)
    speculation.require_acceptance(tokens, acceptance)
    return tokens[0], acceptance


def _find_local_gpu() -> tuple[str, int]:
    """Return the name and number of this machine's GPUs. Raise UsageError if there is no known GPU."""
    from dcpbench.commands import point_runner
    from dcpbench.errors import UsageError
    from dcpbench.launch import launcher
    from dcpbench.points.gpus import GPUS

    probe = launcher.run_probe(point_runner.WORKER)
    for gpu in GPUS:
        if probe.device == "cuda" and gpu.name in re.split(r"[\s-]", probe.name):
            return gpu.name, probe.count
    raise UsageError(
        "recommend needs a machine, and this one has no known GPU; add --machine H200, another name of `dcpbench machines`, "
        "or a file written by `dcpbench bench calibrate`."
    )


def _make_loads(wanted: QueryOptions, positions: int) -> "list[tuple[int, int, Load | None]]":
    """Return (concurrency, context, load) of each load, as Query holds them. `positions`: the model's maximum length."""
    from dcpbench.errors import UsageError
    from dcpbench.plan.option_parsers import check_positive, parse_positive_ints
    from dcpbench.plan.serve_spec import MAX_REQUESTS, check_rates, check_request_count, parse_rates
    from dcpbench.points.batches import CHUNK
    from dcpbench.points.names import CLOSED, GAMMA
    from dcpbench.points.point import Load
    from dcpbench.recommend.forecast import ROUNDS
    from dcpbench.serving.load_words import parse_lengths
    from dcpbench.serving.loads import compute_extent

    clients = parse_positive_ints("concurrency", CLIENTS if wanted.concurrency is None else wanted.concurrency)
    if wanted.context is not None:
        if no_use := [format_flag(name) for name in SERVED if getattr(wanted, name) is not None]:
            raise UsageError(
                f"--context measures decode steps only, which have no {format_list(no_use, 'or')}; "
                f"leave out --context, or {format_list(no_use)}."
            )
        return [(n, length, None) for length in parse_positive_ints("context", wanted.context) for n in clients]
    if wanted.num_requests is not None and wanted.request_rate is None:
        raise UsageError("--num-requests applies only with --request-rate; add --request-rate, or leave it out.")
    prompt = PROMPTS if wanted.input_tokens is None else wanted.input_tokens
    answer = ANSWERS if wanted.output_tokens is None else wanted.output_tokens
    requests = REQUESTS if wanted.num_requests is None else wanted.num_requests
    chunk, *others = wanted.prefill.chunk if wanted.prefill and wanted.prefill.chunk else (CHUNK,)
    if others:
        raise UsageError(f"--prefill chunk={chunk}/{others[0]}: recommend takes one; write --prefill chunk={chunk}.")
    for option, value in (("--input-tokens", prompt), ("--output-tokens", answer)):
        parse_lengths(option, value)
    check_positive("chunk", chunk)
    check_positive("num_requests", requests)
    check_request_count(requests)

    def make_load(requests: int, rate: float | None = None) -> Load:
        return Load(
            mode="replay",
            requests=requests,
            arrival=CLOSED if rate is None else GAMMA,
            request_rate=rate,
            paced=rate is not None,
            input_tokens=prompt,
            output_tokens=answer,
            chunk=chunk,
            prefill="flashinfer",
        )

    if wanted.request_rate is None:
        if max(clients) > (most := MAX_REQUESTS // ROUNDS):
            raise UsageError(
                f"--concurrency {max(clients)} is more than {most:,}, which would not fit in memory; lower it."
            )
        loads = [(n, make_load(ROUNDS * n)) for n in clients]
        return [(n, compute_extent(of).find_longest_served(positions), of) for n, of in loads]
    rates = parse_rates("request_rate", wanted.request_rate)
    check_rates(rates)
    if wanted.concurrency is not None:
        raise UsageError("--concurrency and --request-rate contradict each other; leave one of them out.")
    in_flight = min(requests, 512)
    timed = [
        (requests, make_load(requests)) if rate == math.inf else (in_flight, make_load(requests, rate))
        for rate in rates
    ]
    return [(n, compute_extent(of).find_longest_served(positions), of) for n, of in timed]


def _parse_objectives(wanted: QueryOptions) -> dict[str, float]:
    """Return the objectives in ms, by name. Raise UsageError for one that does not apply to these requests."""
    from dcpbench.plan.serve_spec import OF_TOKENS, refuse_objectives
    from dcpbench.points.names import OBJECTIVES
    from dcpbench.serving.load_words import parse_lengths, parse_slo

    slo = parse_slo(wanted.slo) if wanted.slo is not None else {}
    if wanted.context is not None:
        lacks = set(OBJECTIVES) - {"itl"}
        refuse_objectives(slo, lacks, "--context measures decode steps only", "leave out --context")
    elif wanted.output_tokens is not None and str(parse_lengths("--output-tokens", wanted.output_tokens)) == "1":
        asks = f"--output-tokens {wanted.output_tokens} asks for one token"
        refuse_objectives(slo, OF_TOKENS, asks, "leave out --output-tokens")
    return slo


def _load_evidence(paths: list[Path]) -> "Evidence":
    from dcpbench.recommend.advise import Evidence
    from dcpbench.serving.step_times import read_step_times

    files = [path for path in paths if path.suffix == ".json"]
    folders = dict.fromkeys(run for path in paths if path not in files for run in _find_runs(path))
    return Evidence(
        runs=[_read_run(run) for run in folders], times={str(path): read_step_times(path) for path in files}
    )


def _find_runs(path: Path) -> list[Path]:
    """Return the run, or all runs directly below a folder. Raise RecordsError if there are none."""
    from dcpbench.errors import RecordsError
    from dcpbench.records.folder import RECORDS_FILE, find_runs

    found = find_runs(path)
    if not found:
        raise RecordsError(
            f"{path} holds no {RECORDS_FILE}, nor do the folders in it; name a run such as those in runs/, or a folder of runs."
        )
    return found


def _read_run(path: Path) -> "Run":
    from dcpbench.errors import RecordsError
    from dcpbench.records.runs import read_run

    run = read_run(path)
    if not run.records:
        raise RecordsError(f"{path} holds no record yet; wait for its run, or leave it out.")
    return run


def _check_score_alone(wanted: QueryOptions, others: list[str]) -> None:
    """Raise UsageError for anything that --score does not use: it takes loads and layouts from its run."""
    from dcpbench.errors import UsageError

    defaults = vars(QueryOptions())
    given = [format_flag(name) for name, value in vars(wanted).items() if value != defaults[name] and name != "machine"]
    if unused := [*given, *others]:
        raise UsageError(
            f"--score takes loads and layouts from its run and does not use {format_list(unused, 'or')}; leave {'it' if len(unused) == 1 else 'them'} out."
        )


def _print_score(run: Path, wanted: QueryOptions, *, as_json: bool) -> int:
    from dcpbench.commands.point_runner import print_json
    from dcpbench.errors import UsageError
    from dcpbench.plan.spec import make_planned_probe
    from dcpbench.points.cluster_specs import load_machine
    from dcpbench.recommend.estimate import load_published_steps
    from dcpbench.recommend.score import compute_score
    from dcpbench.records.record import is_functional
    from dcpbench.records.runs import read_run

    steps = load_published_steps()
    machine = load_machine(wanted.machine or steps.machine)
    measured = [r for r in read_run(run).records if r.outcome == "ok" and not is_functional(r)]
    records = [r for r in measured if r.point.dtype != UNKNOWN]
    with ProgressLine() as line:
        found = compute_score(
            records, machine, make_planned_probe(machine.gpu, machine.gpus_per_host), steps, watch=line
        )
    if not found.loads and len(records) < len(measured):
        raise UsageError(
            f"{run} was measured through a server, which does not report its data types and page size, so there are no estimates to score; give "
            "a run of dcpbench's own engine, from `dcpbench sweep` or `dcpbench serve`."
        )
    if not found.loads:
        raise UsageError(f"{run} has no load that two layouts ran on a GPU; name a run with several layouts.")
    seen = sorted({r.point.model for r in records} & set(steps.without))
    if as_json:
        print_json(found.convert_to_json() | {"fitted_without": seen})
        return 0
    terminal = make_console()
    terminal.print(found.format_score(), soft_wrap=True)
    for load in found.loads:
        if not load.is_right(load.picked):
            behind = 1 - load.measured[load.picked] / load.measured[load.best]
            terminal.print(f"Wrong at {load.name}: {load.picked} for {load.best}, {behind:.1%} behind.", soft_wrap=True)
    if seen:
        terminal.print(f"The shares were fitted without the steps of {', '.join(seen)}.", soft_wrap=True)
    return 0
