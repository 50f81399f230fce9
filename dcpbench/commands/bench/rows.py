"""Case studies: `kv-write`, `dp-slice` and `padded-slots`."""

from typing import Annotated

import typer

from dcpbench.commands.bench.options import WHAT, Backlog, Device, Force, Json, Output, Seconds, Timeout

Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="New tokens of a step. Default: 16,256,4096,65536 on a GPU; 16,64 on the CPU.",
    ),
]
Dcp = Annotated[
    str | None,
    typer.Option(
        "--dcp",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Ranks that share the KV cache: of N entries, N - 1 are -1. Default: 1,8 on a GPU; 1,4 on the CPU.",
    ),
]
Empty = Annotated[
    bool,
    typer.Option(
        "--empty/--no-empty",
        rich_help_panel=WHAT,
        help="Also a rank that owns none of the tokens, for the largest dcp.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="What the pool holds: bf16, or fp8 (float8_e4m3fn, kept as bytes). Default: both.",
    ),
]
Scale = Annotated[
    float,
    typer.Option("--scale", metavar="X", rich_help_panel=WHAT, help="fp8 holds numbers divided by this."),
]
PoolLayers = Annotated[
    int | None,
    typer.Option(
        "--layers",
        metavar="N",
        rich_help_panel=WHAT,
        help="Layers of a pass, each with a pool of its own. Default: 61 on a GPU; 2 on the CPU.",
    ),
]
KvVariant = Annotated[
    str | None,
    typer.Option(
        "--variant", metavar="NAME,…", rich_help_panel=WHAT, help="check-all, filter, masked-kernel. Default: all."
    ),
]
SliceTokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Tokens of the busiest rank, which is the batch "
        "of a CUDA graph. Default: 16,256,4096 on a GPU; 16,64 on the CPU.",
    ),
]
Dp = Annotated[
    str | None,
    typer.Option(
        "--dp",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Attention data parallel ranks, with uneven tokens. Default: 8 on a GPU; 4 on the CPU.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", metavar="N", rich_help_panel=WHAT, help="Calls of a pass. Default: 16 on a GPU; 2 on the CPU."
    ),
]
SliceVariant = Annotated[
    str | None,
    typer.Option("--variant", metavar="NAME,…", rich_help_panel=WHAT, help="cuda-slice, host-slice. Default: both."),
]
PaddedRequests = Annotated[
    str | None,
    typer.Option(
        "--requests",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Requests of a decode step, fewer than the "
        "rows of its CUDA graph. Default: 3,33 on a GPU, in graphs of 4 and 40; 3 on the CPU.",
    ),
]
PaddedContext = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="N,…",
        rich_help_panel=WHAT,
        help="Tokens of each request. Default: 64,8192 on a GPU; 16 on the CPU.",
    ),
]
PromptIds = Annotated[
    str | None,
    typer.Option(
        "--ids",
        metavar="NAME,…",
        rich_help_panel=WHAT,
        help="elsewhere: prompts were prefilled by another "
        "server, and their token ids are 0 here. known: they are in the request table. Default: both.",
    ),
]
PaddedVariant = Annotated[
    str | None,
    typer.Option(
        "--variant", metavar="NAME,…", rich_help_panel=WHAT, help="slot-0-live, slot-0-padding. Default: both."
    ),
]


def kv_write(
    tokens: Tokens = None,
    dcp: Dcp = None,
    empty: Empty = True,
    dtype: Dtype = None,
    scale: Scale = 1.0,
    layers: PoolLayers = None,
    variant: KvVariant = None,
    seconds: Seconds = 0.3,
    backlog: Backlog = 100.0,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write new KV rows on a rank that owns some of them: check first, filter always, or mask in the kernel.

    `check-all` looks at the mask on the host and filters if it must, `filter` always filters, `masked-kernel` keeps the
    mask on the GPU. docs/case-studies.md tells the story.

    For example:

      dcpbench bench kv-write

      dcpbench bench kv-write --tokens 16,65536 --dcp 1,8 --dtype bf16 -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import kv_write_cases

    raise typer.Exit(
        command.run(
            "kv-write",
            lambda machine: kv_write_cases(
                machine, tokens=tokens, dcp=dcp, dtype=dtype, variant=variant, layers=layers, scale=scale, empty=empty
            ),
            command.options(
                seconds=seconds,
                backlog=backlog,
                timeout=timeout,
                device=device,
                output=output,
                force=force,
                as_json=as_json,
            ),
        )
    )


def dp_slice(
    tokens: SliceTokens = None,
    dp: Dp = None,
    steps: Steps = None,
    variant: SliceVariant = None,
    seconds: Seconds = 0.3,
    backlog: Backlog = 100.0,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Take a rank's own tokens out of a batch gathered over ranks: slice by GPU numbers, or by the host's.

    `cuda-slice` reads start and length from the GPU, `host-slice` adds up the counts that the host has; under CUDA
    graphs the start is rank × graph batch. docs/case-studies.md tells the story.

    For example:

      dcpbench bench dp-slice --tokens 16,4096 --dp 8 -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import dp_slice_cases

    raise typer.Exit(
        command.run(
            "dp-slice",
            lambda machine: dp_slice_cases(machine, tokens=tokens, dp=dp, variant=variant, steps=steps),
            command.options(
                seconds=seconds,
                backlog=backlog,
                timeout=timeout,
                device=device,
                output=output,
                force=force,
                as_json=as_json,
            ),
        )
    )


def padded_slots(
    requests: PaddedRequests = None,
    context: PaddedContext = None,
    ids: PromptIds = None,
    variant: PaddedVariant = None,
    seconds: Seconds = 0.3,
    timeout: Timeout = 300.0,
    device: Device = "auto",
    output: Output = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Decode fewer requests than a CUDA graph has rows, with slot 0 of the request table live or set aside.

    `slot-0-live` gives slot 0 to a request, which the unused rows then write to; `slot-0-padding` gives it to nobody.
    A step of deepseek-v2-lite on one GPU, of a tiny model on the CPU. docs/case-studies.md tells the story.

    For example:

      dcpbench bench padded-slots --requests 3,33 --context 64,8192 -o results
    """
    from dcpbench.bench import command
    from dcpbench.bench.cases import padded_slots_cases

    raise typer.Exit(
        command.run(
            "padded-slots",
            lambda machine: padded_slots_cases(machine, requests=requests, context=context, ids=ids, variant=variant),
            command.options(
                seconds=seconds, timeout=timeout, device=device, output=output, force=force, as_json=as_json
            ),
        )
    )
