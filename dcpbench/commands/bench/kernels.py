"""Benches of kernels on one GPU: `attention`, `merge` and `moe`."""

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
    Requests,
    Seconds,
    Timeout,
)

AttentionHeads = Annotated[
    str | None,
    typer.Option(
        "--heads",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Query heads that one rank attends with. Default: 16,64,128 on a GPU; 16 on the CPU.",
    ),
]
AttentionRequests = Annotated[
    str | None,
    typer.Option(
        "--requests",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Requests of a decode step. Default: 1,8,64 on a GPU; 1,3 on the CPU.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="KV rows of a request on this rank. Default: 8192,131072 on a GPU; 16 on the CPU.",
    ),
]
Page = Annotated[
    str | None,
    typer.Option(
        "--page", metavar="N,…", rich_help_panel=WHAT, help="Rows of a page. Default: 64 on a GPU; 4 on the CPU."
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        "--lengths",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="even: all requests have --context rows. uneven: from 1/8 to 15/8 of it, the same in all.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="reference, triton, flashinfer. Default: flashinfer,triton on a GPU; reference,triton on the CPU.",
    ),
]
Dcp = Annotated[
    str | None,
    typer.Option(
        "--dcp",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Ranks of the DCP group whose partial outputs are merged. Default: 4 on a GPU; 2 on the CPU.",
    ),
]
MergeVariant = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="head-order, correct, pack, combine, value-proj. Default: all.",
    ),
]

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        rich_help_panel=WHAT,
        help="Model whose experts are multiplied: a "
        "published one or a config.json. Default: deepseek-v3 on a GPU; tiny on the CPU.",
    ),
]
Tp = Annotated[
    str | None,
    typer.Option(
        "--tp",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Ranks over which each expert is cut by width; one "
        "rank's share runs. Default: 1,4,8 on a GPU; 1,2 on the CPU.",
    ),
]
MoeRequests = Annotated[
    str | None,
    typer.Option(
        "--requests",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Requests of a decode step. Default: 8,32,128 on a GPU; 1,4 on the CPU.",
    ),
]
Rows = Annotated[
    str,
    typer.Option(
        "--rows",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="uniform: experts are drawn alike. skewed: "
        "expert i with a chance of 1 / (i + 1). few: one in four is drawn, the others have no row.",
    ),
]
MoeVariant = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="triton, torch, deepgemm. Default: all that are installed.",
    ),
]


def attention(
    heads: AttentionHeads = None,
    requests: AttentionRequests = None,
    context: Context = None,
    page: Page = None,
    lengths: Lengths = "even",
    backend: Backend = None,
    layers: Layers = None,
    seconds: Seconds = 0.3,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Paged MLA decode attention by each backend: bytes and operations per second, against what this GPU can do.

    The picture is a roofline. docs/benches.md says how to read it.

    For example:

      dcpbench bench attention --heads 16,128 --requests 1,64 --context 8192 -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import attention_cases

    raise typer.Exit(
        command.run(
            "attention",
            lambda machine: attention_cases(
                machine,
                heads=heads,
                requests=requests,
                context=context,
                page=page,
                lengths=lengths,
                backend=backend,
                layers=layers,
            ),
            command.options(
                seconds=seconds, timeout=timeout, device=device, output=output, force=force, as_json=as_json
            ),
        )
    )


def merge(
    heads: Heads = None,
    requests: Requests = None,
    dcp: Dcp = None,
    variant: MergeVariant = None,
    layers: Layers = None,
    seconds: Seconds = 0.3,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """The kernels around the collectives of an exchange, each by itself, against the speed of a copy.

    docs/benches.md says what each of them does.

    For example:

      dcpbench bench merge --heads 128 --requests 8,128 --dcp 4 -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import merge_cases

    raise typer.Exit(
        command.run(
            "merge",
            lambda machine: merge_cases(
                machine, heads=heads, requests=requests, dcp=dcp, variant=variant, layers=layers
            ),
            command.options(
                seconds=seconds, timeout=timeout, device=device, output=output, force=force, as_json=as_json
            ),
        )
    )


def moe(
    model: Model = None,
    tp: Tp = None,
    requests: MoeRequests = None,
    rows: Rows = "uniform",
    variant: MoeVariant = None,
    layers: Layers = None,
    seconds: Seconds = 0.3,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """The two products of a rank's experts at decode sizes, against the rate at which this GPU reads memory.

    Only experts that have a row count as read. docs/benches.md says what each variant leaves out.

    For example:

      dcpbench bench moe --tp 8 --requests 8,32,128 --rows uniform,skewed,few -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import moe_cases

    raise typer.Exit(
        command.run(
            "moe",
            lambda machine: moe_cases(
                machine, model=model, tp=tp, requests=requests, rows=rows, variant=variant, layers=layers
            ),
            command.options(
                seconds=seconds, timeout=timeout, device=device, output=output, force=force, as_json=as_json
            ),
        )
    )
