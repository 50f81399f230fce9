"""`dcpbench serve`: its options; those that it shares with sweep are in cli_options.py. Nothing heavy at the top."""

from pathlib import Path
from typing import Annotated

import typer

from dcpbench.commands import options as opt

WHEN = "When requests come"
WHAT = "What requests are"
SERVED = "How requests are served"

Tp = Annotated[
    str | None,
    typer.Option(
        "--tp",
        metavar="N,…",
        rich_help_panel=opt.LAYOUT,
        help="GPUs that share one copy of the model; each "
        "is one torchrun job. Default: all GPUs of this machine; 4 on the CPU.",
    ),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="N,…",
        rich_help_panel=WHEN,
        help="Closed loop: so many clients over the "
        "whole layout, each of which sends its next request when its last one is answered. With --request-rate: requests "
        "in flight at most, by default 512 for each dp replica. Default: 8,32,48 on GPUs; 4 on the CPU.",
    ),
]
RequestRate = Annotated[
    str | None,
    typer.Option(
        "--request-rate",
        metavar="R,…",
        rich_help_panel=WHEN,
        help="Open loop: requests per second on "
        "average, which come whether or not earlier ones are answered. Default: a closed loop.",
    ),
]
Burstiness = Annotated[
    str | None,
    typer.Option(
        "--burstiness",
        metavar="B",
        rich_help_panel=WHEN,
        help="With --request-rate: shape of the gamma "
        "distribution of the gaps. 1 is Poisson, less comes in bursts, more regularly. Default: 1.",
    ),
]
Requests = Annotated[
    Path | None,
    typer.Option(
        "--requests",
        metavar="FILE",
        rich_help_panel=WHEN,
        help="Requests of a file: Mooncake JSONL, our "
        "JSONL or CSV. They come at the file's times; with --concurrency in a closed loop, with --request-rate at that "
        "rate. Default: none, requests are made up.",
    ),
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="N|Ns",
        rich_help_panel=WHEN,
        help="Stop early: 200 takes the first 200 "
        "requests; 60s ends each run then and counts what has not finished as cancelled. Default: no limit.",
    ),
]
NumRequests = Annotated[
    str | None,
    typer.Option(
        "--num-requests",
        metavar="N",
        rich_help_panel=WHAT,
        help="Requests of each point. Default: 480 on GPUs; 16 on the CPU.",
    ),
]
InputTokens = Annotated[
    str | None,
    typer.Option(
        "--input-tokens",
        metavar="LEN,…",
        rich_help_panel=WHAT,
        help="Length of prompts: 4000, "
        "uniform:1000-7000 or lognormal:4000:0.5 (median and sigma; at least 1, no upper bound). Each of the list is a "
        "point. Default: 4000 on GPUs; 32 on the CPU.",
    ),
]
OutputTokens = Annotated[
    str | None,
    typer.Option(
        "--output-tokens",
        metavar="LEN,…",
        rich_help_panel=WHAT,
        help="Tokens that are sampled for a "
        "request, written likewise; nothing ends one earlier. Default: 1500 on GPUs; 8 on the CPU.",
    ),
]
PrefixShare = Annotated[
    str | None,
    typer.Option(
        "--prefix-share",
        metavar="S",
        rich_help_panel=WHAT,
        help="Share of each prompt, from 0 to less than 1, that begins like the prompts of its group. Default: 0.",
    ),
]
PrefixGroups = Annotated[
    str | None,
    typer.Option(
        "--prefix-groups",
        metavar="N",
        rich_help_panel=WHAT,
        help="With --prefix-share: groups, which take requests in turn. Default: 1.",
    ),
]
Seed = Annotated[
    str | None,
    typer.Option(
        "--seed",
        metavar="N",
        rich_help_panel=WHAT,
        help="Of lengths, gaps and tokens: the same requests for every layout and machine. Default: 0.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        rich_help_panel=SERVED,
        help="mixed: chunks of prompts ride with tokens "
        "of running requests; prefill-first: these wait while there are chunks. Default: mixed.",
    ),
]
Chunk = Annotated[
    str | None,
    typer.Option(
        "--chunk",
        metavar="TOKENS",
        rich_help_panel=SERVED,
        help="Prompt tokens of a step at most, over the "
        "whole layout; page size × dcp × dp at least. Default: 8192 on GPUs; 64 on the CPU.",
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        rich_help_panel=SERVED,
        help="Keep the KV of finished prompts for others that begin alike, as long as there is room. Default: yes.",
    ),
]
Prefill = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        metavar="NAME",
        rich_help_panel=SERVED,
        help="Attention of prompts: sdpa (torch) or flashinfer. Default: sdpa.",
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        rich_help_panel=SERVED,
        help="KV pool per GPU, such as 20GiB. Where it "
        "is less than the requests in flight need, they wait and are preempted. Default: all that the weights leave, where "
        "all of them fit; else what the requests in flight need, as far as there is room.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME,…",
        rich_help_panel=opt.HOW,
        help="Attention kernel of running requests: "
        "triton, flashinfer or, on the CPU, reference. Default: flashinfer where it is installed, else triton; reference "
        "on the CPU.",
    ),
]
Exchange = Annotated[
    str | None,
    typer.Option(
        "--exchange",
        metavar="NAME,…",
        rich_help_panel=opt.HOW,
        help="How partial attention is merged over "
        "dcp ranks: ag_rs, a2a or symm (symmetric memory, inside one machine). Default: ag_rs.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        rich_help_panel=opt.HOW,
        help="Of weights and KV cache: bf16 on GPUs; "
        "bf16, fp16 or fp32 on the CPU. Default: bf16 on GPUs; fp32 on the CPU.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="NAME,…",
        rich_help_panel=opt.MEASURE,
        help="live: every token is computed. replay: "
        "step times are measured once for a layout, then the same scheduler runs in virtual time. live,replay: both, and "
        "the report says how far they are apart. Default: live.",
    ),
]
StepTimes = Annotated[
    Path | None,
    typer.Option(
        "--step-times",
        metavar="FILE",
        rich_help_panel=opt.MEASURE,
        help="With --mode replay: step times that were measured before; no GPU is needed then. Default: measure them.",
    ),
]
Slo = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="NAME=MS,…",
        rich_help_panel=opt.MEASURE,
        help="Limits in ms, such as "
        "ttft=500,itl=50; also tpot and e2el. Goodput is the requests per second that keep all of them. Default: none.",
    ),
]
Profile = Annotated[
    bool | None,
    typer.Option(
        "--profile/--no-profile",
        rich_help_panel=opt.MEASURE,
        help="On GPUs, a separate profiled pass that "
        "says where the host waits; never touches the timings. Default: yes.",
    ),
]


def serve(
    tp: Tp = None,
    dp: opt.Dp = None,
    dcp: opt.Dcp = None,
    model: opt.Model = None,
    weights: opt.Weights = None,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = None,
    requests: Requests = None,
    limit: Limit = None,
    num_requests: NumRequests = None,
    input_tokens: InputTokens = None,
    output_tokens: OutputTokens = None,
    prefix_share: PrefixShare = None,
    prefix_groups: PrefixGroups = None,
    seed: Seed = None,
    policy: Policy = None,
    chunk: Chunk = None,
    prefix_cache: PrefixCache = None,
    prefill: Prefill = None,
    kv_memory: KvMemory = None,
    backend: Backend = None,
    exchange: Exchange = None,
    q_replicate: opt.QReplicate = None,
    project_first: opt.ProjectFirst = None,
    all_reduce: opt.AllReduce = None,
    dtype: Dtype = None,
    page_size: opt.PageSize = None,
    interleave: opt.Interleave = None,
    mode: Mode = None,
    step_times: StepTimes = None,
    slo: Slo = None,
    repeats: opt.Repeats = None,
    baseline: opt.Baseline = None,
    profile: Profile = None,
    timeout: opt.Timeout = 300.0,
    config: opt.Config = None,
    output: opt.Output = None,
    resume: opt.Resume = False,
    force: opt.Force = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    nnodes: opt.Nnodes = 1,
    node_rank: opt.NodeRank = 0,
    rdzv_endpoint: opt.RdzvEndpoint = "",
    rdzv_id: opt.RdzvId = "dcpbench",
) -> None:
    """Serve requests over layouts and loads: TTFT, ITL, throughput and goodput, with prefill and a real scheduler.

    Every combination of the comma lists is a point; those that cannot run are
    listed with the reason. The times of every request are kept as Parquet beside
    the records, of those that finished also where Ctrl-C ends the run.

    For example:

      dcpbench serve --model kimi-k2 --tp 8 --dcp 8 --concurrency 8,32,48

      dcpbench serve --tp 4 --dcp 4 --request-rate 0.5,1,2 --slo ttft=2000,itl=60

      dcpbench serve --tp 4 --dcp 4 --requests trace.jsonl --limit 600s

      dcpbench serve --tp 4 --input-tokens lognormal:8000:0.7 --mode replay

      dcpbench serve --mode replay --step-times FILE --concurrency 64
    """
    from dcpbench.commands import runs, serve_actions
    from dcpbench.launch.torchrun import Machines

    given: dict[str, object] = {
        "model": model,
        "tp": tp,
        "dp": dp,
        "dcp": dcp,
        "weights": weights,
        "concurrency": concurrency,
        "request_rate": request_rate,
        "burstiness": burstiness,
        "requests": requests and str(requests),
        "limit": limit,
        "num_requests": num_requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "prefix_share": prefix_share,
        "prefix_groups": prefix_groups,
        "seed": seed,
        "policy": policy,
        "chunk": chunk,
        "prefix_cache": prefix_cache,
        "prefill": prefill,
        "kv_memory": kv_memory,
        "backend": backend,
        "exchange": exchange,
        "q_replicate": q_replicate,
        "project_first": project_first,
        "all_reduce": all_reduce,
        "dtype": dtype,
        "page_size": page_size,
        "interleave": interleave,
        "mode": mode,
        "step_times": step_times and str(step_times),
        "slo": slo,
        "repeats": repeats,
        "baseline": baseline,
        "profile": profile,
    }
    machines = Machines(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id)
    run = runs.Run(
        output=output,
        config=config,
        device=device,
        timeout=timeout,
        resume=resume,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
        machines=machines,
    )
    raise typer.Exit(serve_actions.serve(given, run))
