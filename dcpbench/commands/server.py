"""Implement `dcpbench server`: measure vLLM, SGLang and other servers over a grid of layouts and loads."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, collect_typed, list_changed, make_panel, make_structured
from dcpbench.commands.load_options import FIND, SLO, Requests, print_load_notes, take_bounds
from dcpbench.errors import UnusedOptionsError, UsageError
from dcpbench.points.layout import DEGREES
from dcpbench.points.names import ENGINE_POLICIES, LIVE, MODES, REPLAY, format_flag
from dcpbench.points.structured_options import Client, Find, Gpu, Prefill, Timeout
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.launch.launcher import JobOptions
    from dcpbench.plan.grid import Candidate
    from dcpbench.plan.load_search import LoadRange
    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.plan.server_spec import ServerSpec
    from dcpbench.points.point import Point
    from dcpbench.servers.measure import ClientConfig
    from dcpbench.servers.presets import Engine

MAX_CLIENT_PROCESSES = 64

SERVER = make_panel("The server")
CLIENT = make_panel("The client")


class Layouts(opt.Layouts):
    """Hold the degrees of the servers' layouts."""

    tp: str | None = opt.LAYOUT(
        f"{opt.TP_DEGREE} With --url it states the server's layout, which no API reports. Default: "
        "1 with --engine or --serve-cmd; unknown with --url."
    )
    dcp: str | None = opt.LAYOUT(f"{opt.DCP_DEGREE} Default: 1.")
    ep: str | None = opt.EXPERTS(
        f"{opt.EP_DEGREE} Default: 1 for vllm and sglang with --dp and without a flag for expert parallelism, "
        "else unknown."
    )
    exchange: str | None = make_panel("Layouts (comma-separated lists)")(
        "How partial attention outputs are merged over dcp ranks, in the engine's own names: ag_rs or a2a, with SGLang also fi_a2a. A server is started for each value. Default: the engine's default; unknown with --url.",
        metavar="NAME,…",
    )


class Model(Group):
    """Hold the option for the model."""

    model: str | None = SERVER(
        "With --url: name of one of the server's models. Default: the server's only model. With --engine: model to serve, as a folder or a name that the engine knows.",
        metavar="NAME",
    )
    dtype: str | None = SERVER("Data type of weights and KV cache, for the records. Default: unknown.", metavar="NAME")


class MeasurementOptions(Group):
    """Hold the options for the mode, the objectives and the repeats."""

    mode: str | None = opt.MEASURE(
        "live: the loads are sent to the server. replay: the times of its steps are measured once for a layout, then its "
        "engine's scheduling policy runs in virtual time. live,replay: both, the replay first, and the report shows their "
        "difference. Default: live.",
        metavar="NAME,…",
    )
    slo: str | None = SLO
    find: Find | None = FIND
    repeats: int | None = opt.REPEATS


class Replays(Group):
    """Hold the options for replays."""

    step_times: Path | None = opt.MEASURE(
        "With --mode replay: file with step times of a server from an earlier run; no server is needed then. Default: measure them.",
        metavar="FILE",
    )
    prefill: Prefill | None = make_structured(
        opt.MEASURE,
        Prefill,
        "policy",
        about="How a replay schedules prompts.",
        policy=f"with --mode replay: scheduling policy, {' or '.join(ENGINE_POLICIES)}. Default: that of the server's engine.",
    )
    token_budget: int | None = opt.MEASURE(
        "With --mode replay and --url: maximum number of tokens in a step of the server, the value of vLLM's "
        "--max-num-batched-tokens or SGLang's --chunked-prefill-size. Default: as the server reports it.",
        metavar="N",
    )

    @property
    def policy(self) -> str | None:
        """Return the policy of --prefill."""
        return None if self.prefill is None else self.prefill.policy


class Run(opt.Run):
    """Hold the options of how the command runs. The hardware is that of the server."""

    timeout: Timeout | None = make_structured(
        opt.MEASURE,
        Timeout,
        "stall",
        "load",
        "start",
        stall="time without a token after which a request has failed. Default: 600.",
    )
    gpu: Gpu | None = make_structured(
        opt.MACHINES,
        Gpu,
        about="GPUs of the server, for the records.",
        name="their name, such as H200. Default: unknown.",
        count="their number. Default: --tp.",
    )
    device: str = opt.MACHINES(
        "cpu: the server runs on a CPU. Its points are marked, as their timings do not reflect GPU performance.",
        default="auto",
        metavar="NAME",
    )
    dry_run: bool = opt.OUTPUT(
        "Only print each point, or the reason why it cannot run, and the commands of the servers.",
        default=False,
    )


class Options(Group):
    """Hold the options for the server and for the client that sends its load."""

    url: str | None = SERVER(
        "Measure the running server at this address, through OpenAI's API: vLLM, SGLang or another. "
        "--tp, --dp and --dcp then describe its layout, --model selects one of its models.",
        metavar="URL",
    )
    engine: str | None = SERVER(
        "Start a server of this engine for each layout, serve all loads on it, and stop it: vllm, sglang, or a "
        ".toml file with its command and flags (docs/servers.md). --model names the model to serve.",
        metavar="NAME",
    )
    serve_cmd: str | None = SERVER(
        "As --engine, but with this command to start the server; {port}, {model}, {tp}, {dp}, {dcp} and {attn_tp} (tp / dp) are replaced by their values.",
        metavar="COMMAND",
    )
    engine_args: str | None = SERVER(
        "Further arguments of the engine's command, as one quoted string, such as '--max-model-len 70000'.",
        metavar="ARGS",
    )
    weights: str | None = SERVER(
        "Weights of servers that dcpbench starts. model: the weights of --model. synthetic: seeded random weights that route tokens "
        "to different experts, as a trained model does; dcpbench must be installed in vLLM's or SGLang's Python environment. dummy: the weights that the engine makes with --load-format dummy; all tokens then take the same few experts. Default: synthetic if --model is a folder "
        "without weight files, else model.",
        metavar="NAME",
    )
    endpoint: str = CLIENT("completions or chat.", default="completions", metavar="NAME")
    api_key_env: str = CLIENT(
        "Environment variable that holds the API key. The key is never recorded.",
        default="OPENAI_API_KEY",
        metavar="NAME",
    )
    header: list[str] | None = CLIENT(
        "Header that is sent with every request; can be given several times. Records keep its name, never its value.",
        metavar="'NAME: VALUE'",
    )
    extra_body: str | None = CLIENT(
        "JSON object whose fields are added to every request, such as '{\"top_k\": 20}'. Fields that dcpbench sets itself, such as "
        "model, prompt, stream and max_tokens, are refused.",
        metavar="JSON",
    )
    tokenizer: Path | None = CLIENT(
        "Folder with the model's tokenizer.json, for servers that accept no token ids. Default: such servers get prompts of words, and report how many tokens these have.",
        metavar="FOLDER",
    )
    client: Client | None = make_structured(CLIENT, Client)
    traces: Path | None = SERVER(
        "Folder into which the server's profiler writes its traces, on this machine; it is created if it does not exist. After each load a few of its requests "
        "are served again under the profiler, and the record states where the host waits. Default: no profile.",
        metavar="FOLDER",
    )


def server(
    layouts: Layouts,
    model: Model,
    options: Options,
    requests: Requests,
    measured: MeasurementOptions,
    replays: Replays,
    run: Run,
) -> int:
    """Send requests to a server of vLLM, SGLang or another engine: TTFT, ITL, throughput and goodput.

    --url measures a running server. --engine and --serve-cmd start a server for each layout, send all loads to it and stop it. `dcpbench serve` sends the same loads to dcpbench's own engine, so that the records are comparable.

    For example:

      dcpbench server --url http://127.0.0.1:8000 --tp 8 --dcp 8 --concurrency 8,32

      dcpbench server --url http://127.0.0.1:8000 --tp 8 --traces /tmp/traces

      dcpbench server --engine vllm --model deepseek-ai/DeepSeek-V3 --tp 8 --dcp 1,8 --gpu H200

      dcpbench server --engine vllm --model /models/v3 --tp 2 --dcp 1,2 --mode live,replay --concurrency 8,32

      dcpbench server --mode replay --step-times runs/NAME/step-times/FILE.json --request-rate 0.5,1,2

      dcpbench server --url http://127.0.0.1:8000 --find rate=0.5-20 --slo ttft=2000,itl=60

      dcpbench server --serve-cmd 'our-engine {model} --port {port} --tp {tp}' --model /models/v3 --tp 4,8
    """
    from dcpbench.commands import point_runner
    from dcpbench.plan.server_spec import SERVER_PARSERS
    from dcpbench.plan.spec import read_options

    point_runner.check_server_run(run)
    given = read_options(run.config, SERVER_PARSERS) if run.config else {}
    given |= collect_typed(layouts, model, requests, measured, opt.Limits(timeout=run.timeout))
    bounds = take_bounds(measured.find, given, run)
    _check_replay(replays, options, given)
    if replays.step_times is not None:
        _check_no_source(replays, options, run)
        return replay_step_times(replays.step_times, given, run, replays.policy or "", bounds)
    _check_one_source(options, run)
    if options.url is not None:
        return _measure_running(options.url, options, given, run, replays, bounds)
    return _measure_started(options, given, run, replays, bounds)


def _check_replay(replays: Replays, options: Options, given: dict[str, object]) -> None:
    """Raise UsageError for options of replays without --mode replay, --traces without a live load, or an unknown policy."""
    from dcpbench.plan.option_parsers import check_known, check_positive, parse_names

    modes = parse_names("mode", given["mode"]) if given.get("mode") is not None else (LIVE,)
    for name in modes:
        check_known("mode", name, MODES)
    typed = {
        "--step-times": replays.step_times,
        "--prefill policy": replays.policy,
        "--token-budget": replays.token_budget,
    }
    named = [name for name, value in typed.items() if value is not None]
    if named and REPLAY not in modes:
        raise UnusedOptionsError(f"{named[0]} is for replays; add --mode replay, or leave it out.", named)
    if replays.step_times is not None and set(modes) != {REPLAY}:
        raise UsageError(
            "--step-times are replayed without a server; use --mode replay alone, or leave --step-times out."
        )
    if options.traces is not None and LIVE not in modes:
        raise UnusedOptionsError(
            "--traces is for loads that are sent; add --mode live,replay, or leave it out.", ["--traces"]
        )
    if replays.policy is not None:
        check_known("policy", replays.policy, ENGINE_POLICIES)
    if replays.token_budget is not None:
        check_positive("token_budget", replays.token_budget)


def _check_no_source(replays: Replays, options: Options, run: Run) -> None:
    """Raise UsageError for an option about a server or its client, next to --step-times."""
    others = {
        "--token-budget": replays.token_budget,
        "--gpu": run.gpu,
        "--timeout stall": run.limits.stall,
        "--timeout start": run.limits.start,
    }
    given = [*list_changed(options), *(name for name, value in others.items() if value is not None)]
    if given:
        raise UsageError(
            f"--step-times {replays.step_times} needs no server; leave out {given[0]}, or measure its steps without --step-times."
        )


def replay_step_times(
    path: Path, given: dict[str, object], run: opt.Run, policy: str = "", bounds: "LoadRange | None" = None
) -> int:
    """Replay loads with the step times of another engine's server, in this process; with `bounds`, search the load.

    Raise UsageError for an option that the step times determine, or for a file of dcpbench's own engine.
    """
    import msgspec

    from dcpbench.commands import point_runner
    from dcpbench.commands.find_loads import make_search
    from dcpbench.launch import folders
    from dcpbench.plan.grid import Candidate
    from dcpbench.plan.option_parsers import check_known
    from dcpbench.plan.serve_spec import resolve_step_times
    from dcpbench.plan.server_spec import SERVER_PARSERS, make_server_spec, make_step_time_points
    from dcpbench.plan.validate import load_step_times
    from dcpbench.points.device_probe import Probe
    from dcpbench.records.record import CPU

    resolved = resolve_step_times({**given, "step_times": path})
    assert resolved is not None
    times = load_step_times(resolved)
    if times.engine is None:
        raise UsageError(
            f"{path} has steps of dcpbench's own engine; use dcpbench serve --mode replay --step-times {path}."
        )
    loads = set(SERVER_PARSERS) - {"model", "dtype", "exchange", "ep", *DEGREES}
    if other := [name for name, value in given.items() if name not in {*loads, "step_times"} and value is not None]:
        raise UsageError(
            f"{', '.join(map(format_flag, other))}: these options are fixed in {path}, which has the steps of one server of "
            f"{times.engine.engine}; leave them out."
        )
    if policy:
        check_known("policy", policy, ENGINE_POLICIES)
    load_options = {name: value for name, value in given.items() if name in loads}
    degrees = {name: times.path[name] for name in DEGREES if times.path["tp"]}
    cpu = times.environment.device == CPU
    spec = make_server_spec({**load_options, **degrees}, cpu=cpu)
    settings = msgspec.structs.replace(spec.settings, step_times=resolved)
    probe = Probe(device="cpu" if cpu else "cuda", count=int(times.path["tp"]), name=times.environment.device)
    point_runner.record_device(run, probe)
    if run.prints_notes:
        print_load_notes(spec.loads, settings, cpu=cpu)

    def expand(loads: "ServeLoads", repeats: int) -> "list[Candidate]":
        changed = dataclasses.replace(spec, loads=loads, repeats=repeats)
        return [Candidate(point=point) for point in make_step_time_points(changed, times)]

    candidates = expand(spec.loads, spec.repeats)
    if point_runner.finish_if_planned(candidates, probe, run):
        return 0
    folder = run.output or folders.choose_folder(
        f"{times.engine.engine}-{Path(str(times.path['model'])).name}", (int(times.path["tp"]),)
    )

    def run_all(points: "Sequence[Point]", options: "JobOptions", run: opt.Run) -> None:
        from dcpbench.records.file import RecordFile
        from dcpbench.servers.engine_replay import replay_server_point
        from dcpbench.servers.measure import list_point_progress

        with point_runner.show_progress(run, points, options) as bar:
            for progress in list_point_progress(points, bar):
                record = replay_server_point(
                    progress.point,
                    times,
                    resolved,
                    options.settings,
                    options.folder,
                    command=options.command,
                    policy=policy,
                )
                progress.show_record(RecordFile(options.folder).append(record))

    options = point_runner.make_work(folder, settings, probe, run)
    search = make_search(bounds, spec.loads, settings, expand)
    return point_runner.run_candidates(candidates, folder, options, probe, run, run_all, search=search)


def _check_one_source(options: Options, run: Run) -> None:
    """Raise UsageError unless exactly one of --url, --engine and --serve-cmd is given, and for options that do not apply to it."""
    sources = {"--url": options.url, "--engine": options.engine, "--serve-cmd": options.serve_cmd}
    given = [name for name, value in sources.items() if value is not None]
    if not given:
        raise UsageError(
            "there is no server to measure; add for example --url http://127.0.0.1:8000 for one that runs, or --engine vllm "
            "--model NAME to start servers."
        )
    if len(given) > 1 and options.url is not None:
        raise UsageError(
            f"{given[1]} starts a server, and --url measures one that runs already; leave out --url {options.url} to start "
            f"one, or leave out {given[1]}."
        )
    started = {"--weights": options.weights, "--engine-args": options.engine_args, "--timeout start": run.limits.start}
    if options.url is not None and (alone := [name for name, value in started.items() if value is not None]):
        raise UsageError(f"{alone[0]} is for servers that dcpbench starts; leave it out with --url.")
    if options.url is None and run.gpu_count is not None:
        raise UsageError("--gpu count is for --url; a server that dcpbench starts has the GPUs of --tp.")


def _measure_running(
    url: str, options: Options, given: dict[str, object], run: opt.Run, replays: Replays, bounds: "LoadRange | None"
) -> int:
    """Measure a server that runs already; with `bounds`, search the load."""
    from dcpbench.commands import point_runner
    from dcpbench.commands.find_loads import make_search
    from dcpbench.launch import folders
    from dcpbench.plan.server_spec import make_server_spec
    from dcpbench.points.device_probe import Probe
    from dcpbench.servers.engine_replay import ReplayOptions, replay_on_server
    from dcpbench.servers.measure import (
        MeasuredServer,
        fetch_server_info,
        list_point_progress,
        make_candidates,
        measure_points,
        resolve_prompt_format,
    )
    from dcpbench.servers.profile import make_traces_folder

    cpu = run.device == "cpu"
    spec = make_server_spec(given, cpu=cpu)
    if spec.wrong is not None:
        raise spec.wrong
    probe = Probe(device="cpu" if cpu else "cuda", count=spec.layout["tp"], name=run.gpu_name or "")
    config = _make_client_config(url, options, run, spec.layout["tp"])
    if run.caller.elsewhere is not None:
        return 0
    info = fetch_server_info(config.target, config.retries).with_kv_capacity(
        dp=spec.layout["dp"], dcp=spec.layout["dcp"]
    )
    card = info.find_model(spec.model)
    point_runner.record_device(run, probe)
    if run.prints_notes:
        for note in (f"{config.target.url}: {f'{info.engine} {info.version}'.rstrip()}, model {card.id}.", *info.notes):
            print_stderr(note)
        print_load_notes(spec.loads, spec.settings, cpu=cpu)

    def expand(loads: "ServeLoads", repeats: int) -> "list[Candidate]":
        points = dataclasses.replace(spec, loads=loads, repeats=repeats).make_points(info.engine, card.id)
        return _reject_replays(make_candidates(points, card.max_model_len))

    candidates = expand(spec.loads, spec.repeats)
    if point_runner.finish_if_planned(candidates, probe, run):
        return 0
    if options.traces is not None:
        make_traces_folder(options.traces)
    prompt_format = resolve_prompt_format(config, card.id)
    folder = run.output or folders.choose_folder(f"{info.engine}-{Path(card.id).name}", (spec.layout["tp"],))
    options_of_replays = ReplayOptions(policy=replays.policy or "", token_budget=replays.token_budget)

    def run_all(points: "Sequence[Point]", options: "JobOptions", run: opt.Run) -> None:
        server = MeasuredServer(
            config=config, info=info, prompt_format=prompt_format, settings=options.settings, folder=options.folder
        )
        with point_runner.show_progress(run, points, options) as bar:
            replay = functools.partial(replay_on_server, options=options_of_replays)
            measure_points(list_point_progress(points, bar), server, replay=replay)

    work = point_runner.make_work(folder, spec.settings, probe, run)
    search = make_search(bounds, spec.loads, spec.settings, expand)
    return point_runner.run_candidates(candidates, folder, work, probe, run, run_all, search=search)


def _measure_started(
    options: Options, given: dict[str, object], run: opt.Run, replays: Replays, bounds: "LoadRange | None"
) -> int:
    """Start a server for each layout and each combination of flags, and measure all loads on it; with `bounds`, search the load."""
    from dcpbench.commands import point_runner
    from dcpbench.commands.find_loads import make_search
    from dcpbench.commands.started_servers import check_programs, get_start_s, list_commands, print_commands
    from dcpbench.launch import folders
    from dcpbench.plan.server_spec import make_server_spec, split_layouts
    from dcpbench.points.device_probe import Probe
    from dcpbench.servers.engine_replay import ReplayOptions
    from dcpbench.servers.presets import check_commands_differ, choose_weights, resolve_engine
    from dcpbench.servers.profile import make_traces_folder
    from dcpbench.servers.server_sweep import KeptServer, ServerSweep

    if not given.get("model"):
        source = "--engine" if options.serve_cmd is None else "--serve-cmd"
        raise UsageError(f"{source} needs --model: a folder, or a name that the engine knows.")
    preset = resolve_engine(options.engine, options.serve_cmd, options.engine_args)
    split = [_add_default_ep(preset, one) for one in split_layouts({"tp": 1, **given})]
    weights = choose_weights(preset, str(given["model"]), options.weights)
    cpu = run.device == "cpu"
    specs = [make_server_spec(one, cpu=cpu, weights=weights) for one in split]
    spec, model = specs[0], str(specs[0].model)
    config = _make_client_config("http://127.0.0.1:1", options, run, spec.layout["tp"])
    if point_runner.is_values_only(run, ()):
        return 0

    tps = tuple(dict.fromkeys(one.layout["tp"] for one in specs))

    def expand(loads: "ServeLoads", repeats: int) -> "list[Candidate]":
        return _list_candidates(
            [dataclasses.replace(one, loads=loads, repeats=repeats) for one in specs], preset, model
        )

    candidates = expand(spec.loads, spec.repeats)
    check_commands_differ(preset, [c.point for c in candidates if c.error is None], model)
    probe = Probe(device="cpu" if cpu else "cuda", count=max(tps), name=run.gpu_name or "")
    point_runner.record_device(run, probe)
    if run.prints_notes:
        print_load_notes(spec.loads, spec.settings, cpu=cpu)
    if point_runner.finish_if_planned(candidates, probe, run):
        if not run.as_json:
            print_commands(list_commands(candidates, preset, model, str(options.traces or "")))
        return 0
    check_programs(preset, list_commands(candidates, preset, model))
    if options.traces is not None:
        make_traces_folder(options.traces)
    folder = run.output or folders.choose_folder(f"{preset.name}-{Path(model).name}", tps)

    def run_all(points: "Sequence[Point]", options: "JobOptions", run: opt.Run) -> None:
        with point_runner.show_progress(run, points, options) as bar:
            servers = ServerSweep(
                engine=preset,
                model=model,
                config=config,
                settings=options.settings,
                folder=options.folder,
                limit_s=get_start_s(run.limits),
                replay=ReplayOptions(policy=replays.policy or "", token_budget=replays.token_budget),
                kept=kept if bounds else None,
            )
            servers.measure(points, bar)

    work = point_runner.make_work(folder, spec.settings, probe, run)
    search = make_search(bounds, spec.loads, spec.settings, expand, one_by_one=True)
    with KeptServer() as kept:
        return point_runner.run_candidates(candidates, folder, work, probe, run, run_all, given=given, search=search)


def _list_candidates(specs: "Sequence[ServerSpec]", preset: "Engine", model: str) -> "list[Candidate]":
    """Return the points of all servers; those with an option that the engine lacks are rejected."""
    found = []
    for spec, settings in itertools.product(specs, preset.list_labels()):
        for candidate in spec.make_candidates(preset.name, model, settings):
            lacking = preset.find_lacking(candidate.point)
            error = preset.make_lacking_error(lacking) if lacking else candidate.error
            found.append(dataclasses.replace(candidate, error=error))
    return _reject_replays(found)


def _reject_replays(candidates: "Sequence[Candidate]") -> "list[Candidate]":
    """Return the candidates; those that would be replayed in a layout that no policy models are rejected."""
    from dcpbench.servers.engine_replay import find_unsupported

    return [
        dataclasses.replace(one, error=one.error or find_unsupported(one.point)) if one.point.replayed else one
        for one in candidates
    ]


def _add_default_ep(preset: "Engine", given: dict[str, object]) -> dict[str, object]:
    """Return the options of a server with --ep, if it is given or its default is known."""
    from dcpbench.points.names import UNKNOWN
    from dcpbench.servers.presets import choose_ep

    dp = given.get("dp")
    ep = UNKNOWN if given.get("ep") is not None else choose_ep(preset, dp if isinstance(dp, int) else 1)
    return given if ep == UNKNOWN else {**given, "ep": ep}


def _make_client_config(url: str, options: Options, run: opt.Run, tp: int) -> "ClientConfig":
    """Return the settings of the client. Raise UsageError for an invalid option."""
    from dcpbench.commands.started_servers import check_server_limits, get_request_s
    from dcpbench.plan.command_line import get_typed_command
    from dcpbench.plan.option_parsers import check_known
    from dcpbench.records.record import CPU
    from dcpbench.servers.client import Target, load_api_key
    from dcpbench.servers.measure import ClientConfig
    from dcpbench.servers.prompt_format import ENDPOINTS
    from dcpbench.servers.request_options import parse_extra_body, parse_headers

    check_known("endpoint", options.endpoint, ENDPOINTS)
    check_server_limits(run.limits)
    client = options.client or Client()
    for key, value in (("warm-up", client.warm_up), ("retries", client.retries)):
        if value < 0:
            raise UsageError(f"--client {key}={value} is negative; write 0 or more.")
    if client.processes is not None and not 1 <= client.processes <= MAX_CLIENT_PROCESSES:
        raise UsageError(
            f"--client processes={client.processes} cannot be; write 1 to {MAX_CLIENT_PROCESSES}, or leave it out."
        )
    if run.gpu_count is not None and run.gpu_count < max(tp, 1):
        raise UsageError(
            f"--gpu count={run.gpu_count}: a server has at least {max(tp, 1)}; write count={max(tp, 1)} or more."
        )
    headers, extra_body = parse_headers(options.header or ()), parse_extra_body(options.extra_body)
    key = load_api_key(options.api_key_env)
    return ClientConfig(
        target=Target.from_url(url, key=key, headers=headers, timeout_s=get_request_s(run.limits)),
        endpoint=options.endpoint,
        tokenizer=options.tokenizer,
        extra_body=extra_body,
        warm_up=client.warm_up,
        retries=client.retries,
        processes=client.processes,
        realtime=client.realtime,
        traces=options.traces,
        command=get_typed_command(),
        device=CPU if run.device == "cpu" else run.gpu_name or "",
        device_count=run.gpu_count or tp,
    )
