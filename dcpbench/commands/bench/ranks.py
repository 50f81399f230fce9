"""Benches of what ranks send to each other: `exchange`, `collectives` and `kv-gather`."""

from typing import Annotated

import typer

from dcpbench.commands.bench.options import (
    WHAT,
    Device,
    Force,
    Heads,
    Json,
    Layers,
    Output,
    Ranks,
    Requests,
    Seconds,
    Timeout,
)

ExchangeVariant = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="Exchanges as --exchange of a sweep names "
        "them, and ag_rs-bf16, which reduces partial outputs in bf16. Default: all.",
    ),
]
QReplicate = Annotated[
    bool,
    typer.Option(
        "--q-replicate/--no-q-replicate",
        rich_help_panel=WHAT,
        help="Every rank has all heads' queries already: none are gathered.",
    ),
]
ProjectFirst = Annotated[
    bool,
    typer.Option(
        "--project-first/--no-project-first",
        rich_help_panel=WHAT,
        help="Partial outputs are projected "
        "before they are exchanged: 128 columns instead of 512. The projection itself is not in the time.",
    ),
]
Collective = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="all-gather, reduce-scatter, all-to-all, all-reduce, all-reduce-symm. Default: all.",
    ),
]
Width = Annotated[
    str | None,
    typer.Option(
        "--width",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Columns of a message in bf16, which has a row "
        "for each request. Default: 7168 on a GPU, DeepSeek-V3's hidden size; 64 on the CPU.",
    ),
]
GatherRequests = Annotated[
    str | None,
    typer.Option(
        "--requests",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Requests whose prefixes are gathered, of uneven lengths. Default: 1,16 on a GPU; 3 on the CPU.",
    ),
]
GatherTokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Tokens of all requests. Default: 8192,131072,4194304 on a GPU; 64 on the CPU.",
    ),
]
Way = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="nccl (all-gather) or direct (peers' memory is read). Default: both.",
    ),
]
Buffer = Annotated[
    str | None,
    typer.Option(
        "--buffer",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="pool (a reserve of symmetric memory, taken "
        "at start) or plain (allocated in every eager call). Default: both.",
    ),
]
PoolBytes = Annotated[
    str | None,
    typer.Option(
        "--pool-bytes",
        metavar="SIZE",
        rich_help_panel=WHAT,
        help="Size of the pool; what does not fit is "
        "allocated at run time, and its case says outgrown. Default: 4GiB on a GPU; 1MiB on the CPU.",
    ),
]


def exchange(
    heads: Heads = None,
    requests: Requests = None,
    ranks: Ranks = None,
    variant: ExchangeVariant = None,
    q_replicate: QReplicate = False,
    project_first: ProjectFirst = False,
    layers: Layers = None,
    seconds: Seconds = 0.3,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """What a decode attention layer sends between the ranks of a DCP group, by each exchange: q, partial outputs, lse.

    Held against two barriers and the bytes that a rank must receive. docs/benches.md says how to read it.

    For example:

      dcpbench bench exchange --ranks 4 --heads 128 --requests 1,8,32,128 -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import exchange_cases

    raise typer.Exit(
        command.run(
            "exchange",
            lambda machine: exchange_cases(
                machine,
                heads=heads,
                requests=requests,
                variant=variant,
                layers=layers,
                q_replicate=q_replicate,
                project_first=project_first,
            ),
            command.options(
                seconds=seconds,
                timeout=timeout,
                device=device,
                output=output,
                force=force,
                as_json=as_json,
                between_ranks=True,
                ranks=ranks,
            ),
        )
    )


def collectives(
    requests: Requests = None,
    width: Width = None,
    ranks: Ranks = None,
    variant: Collective = None,
    layers: Layers = None,
    seconds: Seconds = 0.3,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Collectives at the sizes of a decode step: time and bus bandwidth, against what a peer's memory can be read at.

    For example:

      dcpbench bench collectives --ranks 4 --requests 1,32,128 -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import collectives_cases

    raise typer.Exit(
        command.run(
            "collectives",
            lambda machine: collectives_cases(machine, requests=requests, width=width, variant=variant, layers=layers),
            command.options(
                seconds=seconds,
                timeout=timeout,
                device=device,
                output=output,
                force=force,
                as_json=as_json,
                between_ranks=True,
                ranks=ranks,
            ),
        )
    )


def kv_gather(
    requests: GatherRequests = None,
    tokens: GatherTokens = None,
    ranks: Ranks = None,
    variant: Way = None,
    buffer: Buffer = None,
    pool_bytes: PoolBytes = None,
    layers: Layers = None,
    seconds: Seconds = 0.3,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Bring the KV prefix of several requests, which is interleaved over the ranks, into token order on all of them.

    The eager time has the allocation of the buffer in it, the time in a CUDA graph has not.

    For example:

      dcpbench bench kv-gather --ranks 4 --tokens 131072,4194304 --pool-bytes 4GiB -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import kv_gather_cases

    raise typer.Exit(
        command.run(
            "kv-gather",
            lambda machine: kv_gather_cases(
                machine,
                requests=requests,
                tokens=tokens,
                variant=variant,
                buffer=buffer,
                pool_bytes=pool_bytes,
                layers=layers,
            ),
            command.options(
                seconds=seconds,
                timeout=timeout,
                device=device,
                output=output,
                force=force,
                as_json=as_json,
                between_ranks=True,
                ranks=ranks,
            ),
        )
    )
