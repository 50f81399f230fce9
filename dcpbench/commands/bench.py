"""`dcpbench bench …`: single operators. What each measures is in bench/, the same way for all."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dcpbench.commands.command import command, group, panel

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure single operators in several variants: time, share of what this machine can do, host time and "
    "synchronisations, and correctness of each.\n\nStart with: dcpbench bench attention",
)

TITLE = "What is run (comma lists)"
WHAT, COUNTS, NAMES = panel(TITLE), panel(TITLE, metavar="N,…"), panel(TITLE, metavar="NAME,…")
MEASURE = panel("How it is measured")
OUTPUT = panel("Output")

Heads = Annotated[
    str | None, COUNTS("--heads", help="Query heads of a DCP group. Default: 128 on a GPU; 8 on the CPU.")
]
Requests = Annotated[
    str | None,
    COUNTS(
        "--requests",
        help="Requests of a decode step. Default: 1,8,32,128 on a GPU, 512 for merge and collectives, too; a few "
        "on the CPU.",
    ),
]
Layers = Annotated[
    int | None,
    WHAT(
        "--layers",
        metavar="N",
        help="Calls of a pass. Default: as many sets of tensors as keep the L2 cache cold, or 16 where inputs "
        "were just written in an engine, too; 2 on the CPU.",
    ),
]
Ranks = Annotated[
    int | None,
    WHAT("--ranks", metavar="N", help="Processes, one for each GPU. Default: all visible GPUs; 2 on the CPU."),
]


@group
class Run:
    """What all benches share."""

    seconds: Annotated[
        float,
        MEASURE(
            "--seconds",
            metavar="SECONDS",
            help="Time limit of each of a case's up to three timings; one stops earlier once its median is known "
            "within ±1 %, and is marked noisy otherwise.",
        ),
    ] = 0.3
    backlog: float = dataclasses.field(default=100.0, init=False)
    timeout: Annotated[
        float,
        MEASURE(
            "--timeout",
            metavar="SECONDS",
            help="A bench of which nothing is heard for this long is hung, and ended; until its first case 300 s are "
            "allowed, however short this is.",
        ),
    ] = 300.0
    device: Annotated[
        str,
        MEASURE(
            "--device",
            metavar="NAME",
            help="auto, cuda or cpu. auto takes the GPU where there is one. On the CPU results are checked and "
            "synchronisations counted by the dry run; nothing is timed.",
        ),
    ] = "auto"
    output: Annotated[
        Path | None,
        OUTPUT(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for the raw record (bench-NAME.json, every sample in it), a picture (bench-NAME.png) and the "
            "log. On the CPU, where nothing is timed, only benches that count synchronisations have a picture. "
            "Default: only print.",
        ),
    ] = None
    force: Annotated[bool, OUTPUT("--force", help="Write over what is in -o.")] = False
    as_json: Annotated[bool, OUTPUT("--json", help="Print the record as JSON on stdout, without samples.")] = False


@group
class RunWithHost(Run):
    """Of benches that time the host, too."""

    backlog: Annotated[
        float,
        MEASURE(
            "--backlog",
            metavar="MICROSECONDS",
            help="GPU work queued before each call whose host time is taken: what a call that waits has to wait for.",
        ),
    ] = 100.0


@group
class Attention:
    """Sizes of a decode step on one rank."""

    heads: Annotated[
        str | None,
        COUNTS("--heads", help="Query heads that one rank attends with. Default: 16,64,128 on a GPU; 16 on the CPU."),
    ] = None
    requests: Annotated[
        str | None, COUNTS("--requests", help="Requests of a decode step. Default: 1,8,64 on a GPU; 1,3 on the CPU.")
    ] = None
    context: Annotated[
        str | None,
        COUNTS("--context", help="KV rows of a request on this rank. Default: 8192,131072 on a GPU; 16 on the CPU."),
    ] = None
    page: Annotated[str | None, COUNTS("--page", help="Rows of a page. Default: 64 on a GPU; 4 on the CPU.")] = None
    lengths: Annotated[
        str,
        NAMES(
            "--lengths", help="even: all requests have --context rows. uneven: from 1/8 to 15/8 of it, the same in all."
        ),
    ] = "even"
    backend: Annotated[
        str | None,
        NAMES(
            "--backend",
            help="reference, triton, flashinfer. Default: flashinfer,triton on a GPU; reference,triton on the CPU.",
        ),
    ] = None
    layers: Layers = None


@command(app, name="attention")
def attention(sizes: Attention, run: Run) -> int:
    """Paged MLA decode attention by each backend: bytes and operations per second, against what this GPU can do.

    The picture is a roofline. docs/benches.md says how to read it.

    For example:

      dcpbench bench attention --heads 16,128 --requests 1,64 --context 8192 -o results
    """
    return _measure("attention", sizes, run)


@group
class Exchange:
    """Sizes of a DCP group."""

    heads: Heads = None
    requests: Requests = None
    ranks: Ranks = None
    variant: Annotated[
        str | None,
        NAMES(
            "--variant",
            help="Exchanges as --exchange of a sweep names them, and ag_rs-bf16, which reduces partial outputs in "
            "bf16. Default: all.",
        ),
    ] = None
    q_replicate: Annotated[
        bool,
        WHAT("--q-replicate/--no-q-replicate", help="Every rank has all heads' queries already: none are gathered."),
    ] = False
    project_first: Annotated[
        bool,
        WHAT(
            "--project-first/--no-project-first",
            help="Partial outputs are projected before they are exchanged: 128 columns instead of 512. The projection "
            "itself is not in the time.",
        ),
    ] = False
    layers: Layers = None


@command(app, name="exchange")
def exchange(sizes: Exchange, run: Run) -> int:
    """What a decode attention layer sends between the ranks of a DCP group, by each exchange: q, partial outputs, lse.

    Held against two barriers and the bytes that a rank must receive. docs/benches.md says how to read it.

    For example:

      dcpbench bench exchange --ranks 4 --heads 128 --requests 1,8,32,128 -o results
    """
    return _measure("exchange", sizes, run)


@group
class Collectives:
    """Sizes of messages."""

    requests: Requests = None
    width: Annotated[
        str | None,
        COUNTS(
            "--width",
            help="Columns of a message in bf16, which has a row for each request. Default: 7168 on a GPU, "
            "DeepSeek-V3's hidden size; 64 on the CPU.",
        ),
    ] = None
    ranks: Ranks = None
    variant: Annotated[
        str | None,
        NAMES("--variant", help="all-gather, reduce-scatter, all-to-all, all-reduce, all-reduce-symm. Default: all."),
    ] = None
    layers: Layers = None


@command(app, name="collectives")
def collectives(sizes: Collectives, run: Run) -> int:
    """Collectives at the sizes of a decode step: time and bus bandwidth, against what a peer's memory can be read at.

    For example:

      dcpbench bench collectives --ranks 4 --requests 1,32,128 -o results
    """
    return _measure("collectives", sizes, run)


@group
class Merge:
    """Sizes of what is merged."""

    heads: Heads = None
    requests: Requests = None
    dcp: Annotated[
        str | None,
        COUNTS(
            "--dcp", help="Ranks of the DCP group whose partial outputs are merged. Default: 4 on a GPU; 2 on the CPU."
        ),
    ] = None
    variant: Annotated[
        str | None, NAMES("--variant", help="head-order, correct, pack, combine, value-proj. Default: all.")
    ] = None
    layers: Layers = None


@command(app, name="merge")
def merge(sizes: Merge, run: Run) -> int:
    """The kernels around the collectives of an exchange, each by itself, against the speed of a copy.

    docs/benches.md says what each of them does.

    For example:

      dcpbench bench merge --heads 128 --requests 8,128 --dcp 4 -o results
    """
    return _measure("merge", sizes, run)


@group
class Moe:
    """A model's experts and what they get."""

    model: Annotated[
        str | None,
        WHAT(
            "--model",
            metavar="NAME",
            help="Model whose experts are multiplied: a published one or a config.json. Default: deepseek-v3 on a "
            "GPU; tiny on the CPU.",
        ),
    ] = None
    tp: Annotated[
        str | None,
        COUNTS(
            "--tp",
            help="Ranks over which each expert is cut by width; one rank's share runs. Default: 1,4,8 on a GPU; 1,2 "
            "on the CPU.",
        ),
    ] = None
    requests: Annotated[
        str | None, COUNTS("--requests", help="Requests of a decode step. Default: 8,32,128 on a GPU; 1,4 on the CPU.")
    ] = None
    rows: Annotated[
        str,
        NAMES(
            "--rows",
            help="uniform: experts are drawn alike. skewed: expert i with a chance of 1 / (i + 1). few: one in four "
            "is drawn, the others have no row.",
        ),
    ] = "uniform"
    variant: Annotated[
        str | None, NAMES("--variant", help="triton, torch, deepgemm. Default: all that are installed.")
    ] = None
    layers: Layers = None


@command(app, name="moe")
def moe(sizes: Moe, run: Run) -> int:
    """The two products of a rank's experts at decode sizes, against the rate at which this GPU reads memory.

    Only experts that have a row count as read. docs/benches.md says what each variant leaves out.

    For example:

      dcpbench bench moe --tp 8 --requests 8,32,128 --rows uniform,skewed,few -o results
    """
    return _measure("moe", sizes, run)


@group
class KvGather:
    """Sizes of the prefixes and of the pool."""

    requests: Annotated[
        str | None,
        COUNTS(
            "--requests",
            help="Requests whose prefixes are gathered, of uneven lengths. Default: 1,16 on a GPU; 3 on the CPU.",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        COUNTS("--tokens", help="Tokens of all requests. Default: 8192,131072,4194304 on a GPU; 64 on the CPU."),
    ] = None
    ranks: Ranks = None
    variant: Annotated[
        str | None, NAMES("--variant", help="nccl (all-gather) or direct (peers' memory is read). Default: both.")
    ] = None
    buffer: Annotated[
        str | None,
        NAMES(
            "--buffer",
            help="pool (a reserve of symmetric memory, taken at start) or plain (allocated in every eager call). "
            "Default: both.",
        ),
    ] = None
    pool_bytes: Annotated[
        str | None,
        WHAT(
            "--pool-bytes",
            metavar="SIZE",
            help="Size of the pool; what does not fit is allocated at run time, and its case says outgrown. Default: "
            "4GiB on a GPU; 1MiB on the CPU.",
        ),
    ] = None
    layers: Layers = None


@command(app, name="kv-gather")
def kv_gather(sizes: KvGather, run: Run) -> int:
    """Bring the KV prefix of several requests, which is interleaved over the ranks, into token order on all of them.

    The eager time has the allocation of the buffer in it, the time in a CUDA graph has not.

    For example:

      dcpbench bench kv-gather --ranks 4 --tokens 131072,4194304 --pool-bytes 4GiB -o results
    """
    return _measure("kv-gather", sizes, run)


@group
class KvWrite:
    """Sizes of a step, and of the pool that is written."""

    tokens: Annotated[
        str | None,
        COUNTS("--tokens", help="New tokens of a step. Default: 16,256,4096,65536 on a GPU; 16,64 on the CPU."),
    ] = None
    dcp: Annotated[
        str | None,
        COUNTS(
            "--dcp",
            help="Ranks that share the KV cache: of N entries, N - 1 are -1. Default: 1,8 on a GPU; 1,4 on the CPU.",
        ),
    ] = None
    empty: Annotated[
        bool, WHAT("--empty/--no-empty", help="Also a rank that owns none of the tokens, for the largest dcp.")
    ] = True
    dtype: Annotated[
        str | None,
        NAMES("--dtype", help="What the pool holds: bf16, or fp8 (float8_e4m3fn, kept as bytes). Default: both."),
    ] = None
    scale: Annotated[float, WHAT("--scale", metavar="X", help="fp8 holds numbers divided by this.")] = 1.0
    layers: Annotated[
        int | None,
        WHAT(
            "--layers",
            metavar="N",
            help="Layers of a pass, each with a pool of its own. Default: 61 on a GPU; 2 on the CPU.",
        ),
    ] = None
    variant: Annotated[str | None, NAMES("--variant", help="check-all, filter, masked-kernel. Default: all.")] = None


@command(app, name="kv-write")
def kv_write(sizes: KvWrite, run: RunWithHost) -> int:
    """Write new KV rows on a rank that owns some of them: check first, filter always, or mask in the kernel.

    `check-all` looks at the mask on the host and filters if it must, `filter` always filters, `masked-kernel` keeps the
    mask on the GPU. docs/case-studies.md tells the story.

    For example:

      dcpbench bench kv-write

      dcpbench bench kv-write --tokens 16,65536 --dcp 1,8 --dtype bf16 -o results
    """
    return _measure("kv-write", sizes, run)


@group
class DpSlice:
    """Sizes of a gathered batch."""

    tokens: Annotated[
        str | None,
        COUNTS(
            "--tokens",
            help="Tokens of the busiest rank, which is the batch of a CUDA graph. Default: 16,256,4096 on a GPU; "
            "16,64 on the CPU.",
        ),
    ] = None
    dp: Annotated[
        str | None,
        COUNTS("--dp", help="Attention data parallel ranks, with uneven tokens. Default: 8 on a GPU; 4 on the CPU."),
    ] = None
    steps: Annotated[
        int | None, WHAT("--steps", metavar="N", help="Calls of a pass. Default: 16 on a GPU; 2 on the CPU.")
    ] = None
    variant: Annotated[str | None, NAMES("--variant", help="cuda-slice, host-slice. Default: both.")] = None


@command(app, name="dp-slice")
def dp_slice(sizes: DpSlice, run: RunWithHost) -> int:
    """Take a rank's own tokens out of a batch gathered over ranks: slice by GPU numbers, or by the host's.

    `cuda-slice` reads start and length from the GPU, `host-slice` adds up the counts that the host has; under CUDA
    graphs the start is rank × graph batch. docs/case-studies.md tells the story.

    For example:

      dcpbench bench dp-slice --tokens 16,4096 --dp 8 -o results
    """
    return _measure("dp-slice", sizes, run)


@group
class PaddedSlots:
    """Sizes of a decode step."""

    requests: Annotated[
        str | None,
        COUNTS(
            "--requests",
            help="Requests of a decode step, fewer than the rows of its CUDA graph. Default: 3,33 on a GPU, in graphs "
            "of 4 and 40; 3 on the CPU.",
        ),
    ] = None
    context: Annotated[
        str | None, COUNTS("--context", help="Tokens of each request. Default: 64,8192 on a GPU; 16 on the CPU.")
    ] = None
    ids: Annotated[
        str | None,
        NAMES(
            "--ids",
            help="elsewhere: prompts were prefilled by another server, and their token ids are 0 here. known: they "
            "are in the request table. Default: both.",
        ),
    ] = None
    variant: Annotated[str | None, NAMES("--variant", help="slot-0-live, slot-0-padding. Default: both.")] = None


@command(app, name="padded-slots")
def padded_slots(sizes: PaddedSlots, run: Run) -> int:
    """Decode fewer requests than a CUDA graph has rows, with slot 0 of the request table live or set aside.

    `slot-0-live` gives slot 0 to a request, which the unused rows then write to; `slot-0-padding` gives it to nobody.
    A step of deepseek-v2-lite on one GPU, of a tiny model on the CPU. docs/case-studies.md tells the story.

    For example:

      dcpbench bench padded-slots --requests 3,33 --context 64,8192 -o results
    """
    return _measure("padded-slots", sizes, run)


def _measure(bench: str, sizes: object, run: Run) -> int:
    from dcpbench.bench import command as benches

    return benches.run(bench, vars(sizes), benches.Options(**vars(run)))
