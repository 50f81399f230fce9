"""Implement `dcpbench serve`: serve requests over a grid of layouts and loads."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dcpbench.commands import options as opt
from dcpbench.commands.command import Group, collect_typed, make_panel
from dcpbench.serving.load_words import ANSWERS, CHUNK, CPU_ANSWERS, CPU_CHUNK, CPU_PROMPTS, PROMPTS, USUAL_REQUESTS
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from dcpbench.launch.launcher import Work
    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.machine import Probe
    from dcpbench.points.point import Load as PointLoad
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.servers.measure import ClientConfig

USUAL_STEP_S = 0.05  # order of magnitude of a step of a large model, to estimate how long a live run takes
LONG_S = 600.0
MAX_CLIENT_PROCESSES = 64

WHEN = make_panel("When requests come")
WHAT = make_panel("What requests are")
SERVED = make_panel("How requests are served")
REMOTE = make_panel("Real servers")


class Layouts(opt.Layouts):
    """Hold the options of layouts, with fewer ranks on the CPU than for sweep."""

    tp: str | None = opt.LAYOUT(f"{opt.TP} Default: all GPUs of this machine; 4 on the CPU.")


class Load(Group):
    """Hold the options for requests and for the scheduler."""

    model: str | None = opt.MODEL
    weights: str | None = opt.WEIGHTS
    concurrency: str | None = WHEN(
        "Closed loop: number of clients over the whole layout (--max-concurrency of vLLM's and SGLang's benches), each of "
        "which sends its next request when its last one is answered. With --request-rate: requests in flight at most, by default 512 for each dp replica. Default: "
        "8,32,48 on GPUs; 4 on the CPU.",
        metavar="N,…",
    )
    request_rate: str | None = WHEN(
        "Open loop: requests per second on average, sent whether or not earlier ones are answered. inf sends all at once or, "
        "with --concurrency, as a closed loop of so many, as vLLM's bench does. Default: a closed loop.",
        metavar="R,…",
    )
    burstiness: str | None = WHEN(
        "With --request-rate: shape of the gamma distribution of the gaps. 1 is Poisson, smaller values give bursts, larger "
        "ones even gaps. Default: 1.",
        metavar="B",
    )
    requests: Path | None = WHEN(
        "Requests of a file: Mooncake JSONL, our JSONL or CSV. They come at the file's times; with --concurrency in a "
        "closed loop, with --request-rate at that rate. Default: none, requests are made up.",
        metavar="FILE",
    )
    limit: str | None = WHEN(
        "Stop early: 200 takes the first 200 requests; 60s ends each run then and counts what has not finished as "
        "cancelled. Default: no limit.",
        metavar="N|Ns",
    )
    num_requests: str | None = WHAT(
        f"Requests of each point: --num-prompts of vLLM's and SGLang's benches. Default: {USUAL_REQUESTS} on GPUs; 16 on the CPU.",
        metavar="N",
    )
    input_tokens: str | None = WHAT(
        "Length of prompts: 4000, uniform:1000-7000 or lognormal:4000:0.5 (median and sigma; at least 1, no upper "
        f"bound). Each of the list is a point. Default: {PROMPTS} on GPUs; {CPU_PROMPTS} on the CPU.",
        metavar="LEN,…",
    )
    output_tokens: str | None = WHAT(
        "Tokens that are sampled for a request, in the same notation; no request ends earlier. With identical lengths of outputs and "
        "prompts, clients of a closed loop run in lock-step: they prefill and decode at the same time, which can change the order of layouts. Default: "
        f"{ANSWERS} on GPUs; {CPU_ANSWERS} on the CPU.",
        metavar="LEN,…",
    )
    prefix_share: str | None = WHAT(
        "Share of each prompt, from 0 to less than 1, that begins like the prompts of its group. Default: 0.",
        metavar="S",
    )
    prefix_groups: str | None = WHAT(
        "With --prefix-share: groups, which take requests in turn. Default: 1.", metavar="N"
    )
    turns: str | None = WHAT(
        "Turns of a session, in the notation of lengths: each prompt begins with the whole conversation so far, so that "
        "the prefix cache can hold it. --concurrency and --request-rate then count sessions, --num-requests counts "
        "their turns. Default: 1, requests are independent.",
        metavar="LEN",
    )
    turn_tokens: str | None = WHAT(
        "With --turns: tokens that each turn after the first adds to the prompt. Default: as --input-tokens.",
        metavar="LEN",
    )
    think_time: str | None = WHAT("With --turns: seconds from an answer to the next turn. Default: 0.", metavar="S")
    seed: str | None = WHAT(
        "Seed of lengths, gaps and tokens: the same requests for every layout and machine. Default: 0.", metavar="N"
    )
    policy: str | None = SERVED(
        "mixed: a step holds chunks of prompts and tokens of running requests; prefill-first: running requests wait while "
        "there are chunks. Default: mixed.",
        metavar="NAME",
    )
    chunk: str | None = SERVED(
        "Prompt tokens of a step at most, over the whole layout: SGLang's --chunked-prefill-size; vLLM's "
        "--max-num-batched-tokens, which bounds each replica and counts decode tokens, too. Page size × dcp × dp at "
        f"least. Each of the list is a point. Default: {CHUNK} on GPUs; {CPU_CHUNK} on the CPU.",
        metavar="TOKENS,…",
    )
    prefix_cache: bool | None = SERVED(
        "Keep the KV of finished prompts for prompts with the same prefix, while memory allows. Default: yes."
    )
    prefill: str | None = SERVED(
        "Attention of prompts: sdpa (torch) or flashinfer, about three times as fast. Default: flashinfer on GPUs where "
        "it is installed; else sdpa.",
        metavar="NAME",
    )
    disaggregate: str | None = SERVED(
        "With --mode replay: instances of the layout, each on tp GPUs of its own, of which P only prefill and D only decode: "
        "disaggregated prefill of vLLM, PD disaggregation of SGLang, 1P2D. A number such as 3: as many that do both, which a "
        "P:D has as its baseline. Each of the list is a point. Default: one instance that does both.",
        metavar="P:D,…",
    )
    transfer_gb_s: str | None = SERVED(
        "With --disaggregate: rate at which a GPU sends KV, in 10⁹ bytes per second, such as 50 for 400 Gb/s; each GPU sends "
        "what it holds of a request to the one in its place, requests one after another. Each of the list is a point.",
        metavar="RATE,…",
    )
    transfer_ms: str | None = SERVED(
        "With --disaggregate: fixed latency of each request's transfer. Default: 0.", metavar="MS"
    )
    kv_memory: str | None = SERVED(
        "KV pool per GPU, such as 20GiB. Where it is less than the requests in flight need, they wait and are "
        "preempted. Default: all that the weights leave, where all of them fit; else what the requests in flight need, "
        "as far as there is room.",
        metavar="SIZE",
    )


class How(opt.How):
    """Hold the options of how a layer is computed, without `auto`."""

    backend: str | None = opt.HOW(
        "Attention kernel of running requests: triton, flashinfer, flashmla (Hopper GPUs, pages of 64) or, on the CPU, "
        "reference. Default: triton on Hopper GPUs and over an fp8 KV cache, elsewhere flashinfer where it is installed, else triton; "
        "reference on the CPU.",
        metavar="NAME,…",
    )
    exchange: str | None = opt.HOW(
        "How partial attention is merged over dcp ranks: ag_rs, a2a, symm (symmetric memory, inside one machine) or "
        "ag_rs_registered (ag_rs in memory that NCCL has registered). "
        "Default: ag_rs.",
        metavar="NAME,…",
    )
    emulate: str | None = opt.HOW(
        "With --mode replay: step times of one rank on one GPU, with modelled communication, for layouts of "
        "any size. MACHINE as for dcpbench sweep. Such points are forecasts, and marked.",
        metavar="MACHINE,…",
    )


class Measured(Group):
    """Hold the options for the mode, the objectives and the repeats."""

    mode: str | None = opt.MEASURE(
        "live: every token is computed. replay: step times are measured once for a layout, then the same scheduler "
        "runs in virtual time. live,replay: both, and the report shows their difference. Default: live.",
        metavar="NAME,…",
    )
    step_times: Path | None = opt.MEASURE(
        "With --mode replay: step times that were measured before; no GPU is needed then. Default: measure them.",
        metavar="FILE",
    )
    slo: str | None = opt.MEASURE(
        "Limits in ms, such as ttft=500,itl=50; also tpot and e2el. Goodput is the rate of requests that meet all "
        "of them. Default: none.",
        metavar="NAME=MS,…",
    )
    repeats: int | None = opt.REPEATS
    baseline: bool | None = opt.BASELINE
    profile: bool | None = opt.MEASURE(
        "On GPUs, a separate profiled pass that finds where the host waits; it does not affect the timings. Default: yes."
    )


class Remote(Group):
    """Hold the options for a server that is measured instead of dcpbench's own engine."""

    url: str | None = REMOTE(
        "Measure the server at this address, by OpenAI's API, instead of an engine of our own: vLLM, SGLang or another. "
        "--tp, --dp and --dcp then describe its layout, --model selects one of its models.",
        metavar="URL",
    )
    engine: str | None = REMOTE(
        "Start servers of this engine instead, one for each layout, serve all loads on each, and end it: vllm, sglang, or a "
        ".toml file with its command and flags (docs/servers.md). --model names the model to serve.",
        metavar="NAME",
    )
    serve_cmd: str | None = REMOTE(
        "The same with a command of your own, in which {port}, {model}, {tp}, {dp}, {dcp} and {attn_tp} (tp / dp) are filled in.",
        metavar="COMMAND",
    )
    start_timeout: float = REMOTE(
        "Time after which a server that accepts no requests has failed.", default=1800.0, metavar="SECONDS"
    )
    endpoint: str = REMOTE("completions or chat.", default="completions", metavar="NAME")
    api_key_env: str = REMOTE(
        "Environment variable that holds the API key. The key is never recorded.",
        default="OPENAI_API_KEY",
        metavar="NAME",
    )
    header: list[str] | None = REMOTE(
        "Header that is sent with every request; can be given several times. Records keep its name, never its value.",
        metavar="'NAME: VALUE'",
    )
    extra_body: str | None = REMOTE(
        "JSON object whose fields are added to every request, such as '{\"top_k\": 20}'. Fields that dcpbench sets itself, such as "
        "model, prompt, stream and max_tokens, are refused.",
        metavar="JSON",
    )
    tokenizer: Path | None = REMOTE(
        "Folder with the model's tokenizer.json, for servers that accept no token ids. Default: words; the server counts "
        "their tokens.",
        metavar="FOLDER",
    )
    request_timeout: float = REMOTE(
        "Time without a token after which a request has failed.", default=600.0, metavar="SECONDS"
    )
    warm_up: int = REMOTE("Requests before the clock starts, with short answers.", default=8, metavar="N")
    retries: int = REMOTE(
        "How often a request is sent again while the server is busy (429, 503, connection refused); also the short ones "
        "before the load. Each is counted, and the wait is in its latency.",
        default=0,
        metavar="N",
    )
    traces: Path | None = REMOTE(
        "Folder into which the server's profiler writes its traces, as seen from here; it is created if it does not exist. After each load a few of its requests "
        "are served again under the profiler, and where the host waits is in the record, as of our own points. Default: no "
        "profile.",
        metavar="FOLDER",
    )
    client_processes: int | None = REMOTE(
        "Processes that send the load, with an event loop each. Default: one for each 8,000 chunks a second that are "
        "expected, as far as there are cores.",
        metavar="N",
    )
    client_realtime: bool = REMOTE(
        "Let the client run before everything else on its cores (SCHED_RR) while a load is sent, where the kernel allows it: to "
        "root, CAP_SYS_NICE or an RLIMIT_RTPRIO. The record says whether it did.",
        default=True,
    )
    check_client: bool = REMOTE(
        "After each load, read the same number of streams from an idle local server for a second, to measure the client's "
        "own share of TTFT and ITL.",
        default=True,
    )


def serve(layouts: Layouts, load: Load, how: How, measured: Measured, remote: Remote, run: opt.RunOnMachines) -> int:
    """Serve requests over layouts and loads: TTFT, ITL, throughput and goodput, with prefill and a real scheduler.

    Every combination of the comma lists is a point; those that cannot run are listed with the reason. The times of every
    request are kept as Parquet next to the records; after Ctrl-C, those of finished requests.

    For example:

      dcpbench serve --model kimi-k2 --tp 8 --dcp 8 --concurrency 8,32,48

      dcpbench serve --tp 4 --dcp 4 --request-rate 0.5,1,2 --slo ttft=2000,itl=60

      dcpbench serve --tp 4 --dcp 4 --requests trace.jsonl --limit 600s

      dcpbench serve --tp 4 --input-tokens lognormal:8000:0.7 --mode replay

      dcpbench serve --mode replay --step-times FILE --concurrency 64

      dcpbench serve --url http://127.0.0.1:8000 --tp 8 --dcp 8 --concurrency 8,32

      dcpbench serve --url http://127.0.0.1:8000 --tp 8 --traces /tmp/traces

      dcpbench serve --engine vllm --model deepseek-ai/DeepSeek-V3 --tp 8 --dcp 1,8 --gpu H200
    """
    import msgspec

    from dcpbench.commands import runs
    from dcpbench.errors import UsageError
    from dcpbench.plan.judge import load_step_times
    from dcpbench.plan.serve_spec import OTHERS, SERVE_PARSERS, make_serve_spec, resolve_step_times
    from dcpbench.plan.spec import read_options
    from dcpbench.points.names import NO_EXCHANGE, STORED

    runs.check_run(run, remote=remote.url is not None or remote.engine is not None or remote.serve_cmd is not None)
    given = read_options(run.config, SERVE_PARSERS) if run.config else {}
    given |= collect_typed(layouts, load, how, measured)
    check_one_server(remote)
    if remote.url is not None:
        return _measure_remote(remote.url, remote, given, run)
    if remote.engine is not None or remote.serve_cmd is not None:
        return _measure_started(remote, given, run)
    check_local(remote)
    path = resolve_step_times(given)
    if path is None:
        probe = runs.get_probe(run)
        spec = make_serve_spec(given, probe)
        _print_notes(spec, probe, run)
        return runs.measure(spec, probe, run, given=given)
    if run.gpu is not None:
        raise UsageError(f"--step-times {path} records the GPUs of its steps; leave --gpu out.")
    times = load_step_times(path)
    probe = msgspec.structs.replace(
        times.make_probe(),
        count=max(times.make_probe().count, int(times.path["tp"])),
        packages={"flashinfer": times.environment.flashinfer, "flash_mla": times.environment.flash_mla},
    )
    unsaid = OTHERS + (("exchange",) if times.path["exchange"] == NO_EXCHANGE else ())
    unsaid += tuple(name for name in (*STORED, "emulate") if not times.path[name])
    own = {name: value for name, value in times.path.items() if name not in unsaid}
    spec = make_serve_spec({"baseline": "disaggregate" in given, **own, **given}, probe)
    _print_notes(spec, probe, run)
    return runs.measure(spec, probe, run, _replay_points, given={**own, **given})


def check_one_server(remote: Remote) -> None:
    """Raise UsageError if --engine or --serve-cmd is given together with --url."""
    from dcpbench.errors import UsageError

    started = {"--engine": remote.engine, "--serve-cmd": remote.serve_cmd}
    if remote.url is not None and (given := [name for name, value in started.items() if value is not None]):
        raise UsageError(
            f"{given[0]} starts a server, and --url measures one that runs already; leave out --url {remote.url} to start "
            f"one, or leave out {given[0]}."
        )


def check_local(remote: Remote) -> None:
    """Raise UsageError for an option that needs a server."""
    from dcpbench.errors import UsageError
    from dcpbench.points.names import format_flag

    usual = vars(Remote())
    if alone := [format_flag(name) for name, value in vars(remote).items() if value != usual[name]]:
        raise UsageError(f"{alone[0]} is for a server that runs already; add for example --url http://127.0.0.1:8000.")


def _measure_remote(url: str, remote: Remote, given: dict[str, object], run: opt.Run) -> int:
    """Measure a server that runs already."""
    from dcpbench.commands import runs
    from dcpbench.launch import folders
    from dcpbench.plan.server_spec import make_server_spec
    from dcpbench.points.machine import Probe
    from dcpbench.servers.measure import fetch_server_info, make_candidates, measure_points, resolve_prompt_format
    from dcpbench.servers.profile import make_traces_folder

    spec = make_server_spec(given, cpu=run.device == "cpu")
    if spec.wrong is not None:
        raise spec.wrong
    probe = Probe(device="cpu" if run.device == "cpu" else "cuda", count=spec.layout["tp"], name=run.gpu or "")
    asked = _make_client_config(url, remote, run, spec.layout["tp"])
    if runs.is_elsewhere():
        return 0
    info = fetch_server_info(asked.target, asked.retries).with_kv_capacity(dp=spec.layout["dp"], dcp=spec.layout["dcp"])
    card = info.find_model(spec.model)
    if run.dry_run or not runs.is_part():
        for note in (f"{asked.target.url}: {info.origin.removeprefix('engine ')}, model {card.id}.", *info.notes):
            print_stderr(note)
    runs.record_device(probe)
    if run.dry_run or not runs.is_part():
        _print_load_notes(spec.loads, spec.settings, cpu=run.device == "cpu")
    candidates = make_candidates(spec.make_points(info.engine, card.id), card.max_model_len)
    if runs.finish_if_planned(candidates, probe, run):
        return 0
    if remote.traces is not None:
        make_traces_folder(remote.traces)
    manner = resolve_prompt_format(asked, card.id)
    folder = run.output or folders.choose_folder(f"{info.engine}-{Path(card.id).name}", (spec.layout["tp"],))

    def run_all(points: "Sequence[Point]", work: "Work", run: opt.Run) -> None:
        del run
        with runs.handle_stop(work), runs.make_progress_bar(points) as bar:
            measure_points(points, asked, info, manner, work.settings, work.folder, bar)

    return runs.run_candidates(
        candidates, folder, runs.make_work(folder, spec.settings, probe, run), probe, run, run_all
    )


def _measure_started(remote: Remote, given: dict[str, object], run: opt.Run) -> int:
    """Start a server for each layout and each combination of flags, and measure all loads on it."""
    import itertools
    import shutil

    from dcpbench.commands import runs
    from dcpbench.errors import MissingPackageError, UsageError
    from dcpbench.launch import folders
    from dcpbench.plan.options import check_seconds
    from dcpbench.plan.server_spec import make_server_spec, split_layouts
    from dcpbench.points import redaction
    from dcpbench.points.machine import Probe
    from dcpbench.servers.presets import resolve_engine
    from dcpbench.servers.profile import make_traces_folder
    from dcpbench.servers.sweep import measure_started

    if not given.get("model"):
        raise UsageError("--engine needs --model: a folder, or a name that the engine knows.")
    check_seconds("--start-timeout", remote.start_timeout, 1800)
    preset = resolve_engine(remote.engine, remote.serve_cmd)
    split = [_add_default_ep(remote.engine, one) for one in split_layouts({"tp": 1, **given})]
    specs = [make_server_spec(one, cpu=run.device == "cpu") for one in split]
    spec, model = specs[0], str(specs[0].model)
    asked = _make_client_config("http://127.0.0.1:1", remote, run, spec.layout["tp"])
    if runs.is_values_only((), ()):
        return 0
    tps = tuple(dict.fromkeys(one.layout["tp"] for one in specs))
    candidates = [
        candidate
        for one, settings in itertools.product(specs, preset.list_labels())
        for candidate in one.make_candidates(preset.name, model, settings)
    ]
    probe = Probe(device="cpu" if run.device == "cpu" else "cuda", count=max(tps), name=run.gpu or "")
    runs.record_device(probe)
    if run.dry_run or not runs.is_part():
        _print_load_notes(spec.loads, spec.settings, cpu=run.device == "cpu")
    runs.note_plan(candidates, given)
    if runs.finish_if_planned(candidates, probe, run):
        able = [c.point for c in candidates if c.error is None]
        if not run.as_json:
            traces = str(remote.traces or "")
            for words in dict.fromkeys(
                redaction.format_command_line(preset.make_command(p, preset.find_settings(p), model, 0, traces=traces))
                for p in able
            ):
                print_stderr(words)
        return 0
    first = candidates[0].point
    program = preset.make_command(first, preset.find_settings(first), model, 0)[0]
    if shutil.which(program, path=preset.env.get("PATH")) is None:
        raise MissingPackageError(
            f"{preset.name} cannot be started: there is no program {program} here; install it, or begin PATH with the "
            "folder that holds it."
        )
    if remote.traces is not None:
        make_traces_folder(remote.traces)
    folder = run.output or folders.choose_folder(f"{preset.name}-{Path(model).name}", tps)

    def run_all(points: "Sequence[Point]", work: "Work", run: opt.Run) -> None:
        del run
        with runs.handle_stop(work), runs.make_progress_bar(points) as bar:
            measure_started(points, preset, model, asked, work.settings, work.folder, bar, limit_s=remote.start_timeout)

    work = runs.make_work(folder, spec.settings, probe, run)
    return runs.run_candidates(candidates, folder, work, probe, run, run_all, given=given)


def _add_default_ep(engine: str | None, given: dict[str, object]) -> dict[str, object]:
    """Return the options of a server, with --ep if it is started with attention data parallel and by a preset.

    vLLM and SGLang split experts over all ranks unless they are given their flag for expert parallel.
    """
    from dcpbench.points.names import CUT
    from dcpbench.servers.presets import PRESETS

    spread = engine in PRESETS and given.get("dp") not in (None, 1)
    return {"ep": CUT, **given} if spread else given


def _make_client_config(url: str, remote: Remote, run: opt.Run, tp: int) -> "ClientConfig":
    """Return the settings of the client. Raise UsageError for an invalid option."""
    from dcpbench.errors import UsageError
    from dcpbench.plan.options import check_known, check_seconds
    from dcpbench.plan.typed import get_typed_command
    from dcpbench.records.record import CPU
    from dcpbench.servers.client import Target, load_api_key
    from dcpbench.servers.measure import ClientConfig
    from dcpbench.servers.prompts import ENDPOINTS
    from dcpbench.servers.request_options import parse_extra_body, parse_headers

    check_known("endpoint", remote.endpoint, ENDPOINTS)
    check_seconds("--request-timeout", remote.request_timeout, 600)
    for option, value in (("--warm-up", remote.warm_up), ("--retries", remote.retries)):
        if value < 0:
            raise UsageError(f"{option} {value} is negative; write 0 or more.")
    if remote.client_processes is not None and not 1 <= remote.client_processes <= MAX_CLIENT_PROCESSES:
        raise UsageError(
            f"--client-processes {remote.client_processes} cannot be; write 1 to {MAX_CLIENT_PROCESSES}, or leave it out."
        )
    headers, extra_body = parse_headers(remote.header or ()), parse_extra_body(remote.extra_body)
    key = load_api_key(remote.api_key_env)
    return ClientConfig(
        target=Target.from_url(url, key=key, headers=headers, timeout_s=remote.request_timeout),
        endpoint=remote.endpoint,
        tokenizer=remote.tokenizer,
        extra_body=extra_body,
        warm_up=remote.warm_up,
        retries=remote.retries,
        processes=remote.client_processes,
        realtime=remote.client_realtime,
        check_client=remote.check_client,
        traces=remote.traces,
        command=get_typed_command(),
        device=CPU if run.device == "cpu" else run.gpu or "",
        device_count=run.gpus or tp,
    )


def _replay_points(points: Sequence["Point"], work: "Work", run: opt.Run) -> None:
    """Replay each point in virtual time, in this process."""
    from dcpbench.commands.runs import handle_stop, make_progress_bar
    from dcpbench.errors import DcpbenchError
    from dcpbench.launch.jobs import Progress
    from dcpbench.points.budget import find_engine_plan
    from dcpbench.records.file import RecordFile
    from dcpbench.records.record import Record, format_omitted_note
    from dcpbench.serving.outcome import format_summary
    from dcpbench.serving.replay import replay_from_file

    del run
    out = RecordFile(work.folder)
    with handle_stop(work), make_progress_bar(points) as bar:
        for point in points:
            try:
                record = replay_from_file(
                    point,
                    find_engine_plan(point, work.engines),
                    Path(work.settings.step_times),
                    work.settings,
                    work.folder,
                    work.command,
                )
            except DcpbenchError as e:
                detail = {"device": work.hardware}
                record = Record(point=point, outcome="failed", reason=str(e), detail=detail)
            record = out.append(record)
            stage = "done" if record.outcome == "ok" else record.outcome
            note = (record.reason or (format_summary(record.serve) if record.serve else "")) + format_omitted_note(
                record
            )
            bar(Progress(stage=stage, key=point.get_key(), note=note, at=time.time()))


def _print_notes(spec: "SweepSpec", probe: "Probe", run: opt.Run) -> None:
    """Print notes about the options: unordered traces, and long live runs."""
    from dcpbench.commands.runs import is_elsewhere, is_part
    from dcpbench.points.names import LIVE

    if is_elsewhere() or (is_part() and not run.dry_run):
        return
    loads = cast("ServeLoads", spec.serve)
    if loads.trace and loads.trace.sorted:
        print_stderr(f"{loads.trace.path}: its times were out of order; the requests are sent by time.")
    _print_load_notes(loads, spec.settings, cpu=probe.device == "cpu")
    if LIVE not in loads.mode or probe.device == "cpu":
        return
    seconds = max(_estimate_seconds(concurrency, load, spec.settings) for concurrency, load in loads.iter_loads())
    if seconds > LONG_S:
        print_stderr(
            f"A live run takes long: about {seconds / 60:,.0f} min for the longest load of each layout, at "
            f"{USUAL_STEP_S * 1000:g} ms per step. --mode replay measures step times and needs seconds for a load; --limit 60s "
            "ends a run early."
        )


def _print_load_notes(loads: "ServeLoads", settings: "Settings", *, cpu: bool) -> None:
    """Print how --request-rate inf is served and, unless on a CPU, which objectives have too few samples for p99."""
    from dcpbench.plan.serve_spec import find_short_slos

    if math.inf in loads.request_rate and not loads.concurrency:
        print_stderr(
            "--request-rate inf: all requests are sent at once, as a closed loop with one client for each of them."
        )
    if not cpu:
        for short in find_short_slos(loads, settings.slo, settings.trace_path):
            print_stderr(short.describe())


def _estimate_seconds(concurrency: int | None, load: "PointLoad", settings: "Settings") -> float:
    """Return the minimum duration of a live run, in s: until the last arrival, or until all tokens are sampled."""
    from dcpbench.serving.loads import compute_extent

    size = compute_extent(load, settings.trace_path)
    steps = size.output / (concurrency or load.requests)
    return min(max(size.ends_s, steps * USUAL_STEP_S), settings.limit_seconds or math.inf)
