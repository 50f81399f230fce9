"""Define the command line of `dcpbench bench …`, which measures single operators with the code in bench/."""

from pathlib import Path

import typer

from dcpbench.commands.calibrate import calibrate
from dcpbench.commands.command import Group, make_panel, register_command

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure single operators: time, share of the machine's maximum rate, and correctness of each variant.\n\nStart with: dcpbench bench attention",
)

TITLE = "Cases (comma-separated lists)"
WHAT, COUNTS, NAMES = make_panel(TITLE), make_panel(TITLE, metavar="N,…"), make_panel(TITLE, metavar="NAME,…")
MEASURE = make_panel("Measurement")
OUTPUT = make_panel("Output")

HEADS = COUNTS("Query heads of a DCP group. Default: 128 on a GPU; 8 on the CPU.")
REQUESTS = COUNTS(
    "Requests of a decode step. Default: 1,8,32,128 on a GPU, 512 for merge and collectives, too; a few on the CPU."
)
FEW_REQUESTS = COUNTS("Requests of a decode step. Default: 1,8,64 on a GPU; 1,3 on the CPU.")
CONTEXT = COUNTS("KV rows of a request on this rank. Default: 8192,131072 on a GPU; 16 on the CPU.")
PAGE = COUNTS("Rows of a page. Default: 64 on a GPU; 4 on the CPU.")
LENGTHS = NAMES(
    "even: all requests have --context rows. uneven: from 1/8 to 15/8 of it, with the same total.", default="even"
)
LAYERS = WHAT(
    "Calls of a pass, each with tensors of its own. Default: as many as keep the L2 cache cold, or 16 for inputs that an "
    "engine, too, has just written; 2 on the CPU.",
    metavar="N",
)
QUERY_LENGTH = COUNTS(
    "Query rows of a request, from 1 to 8: 1 + the drafts that a step verifies. Each row sees one KV row more than the row before it. Above 1 each backend also takes the rows as separate requests (NAME-rows). Default: 1."
)
RANKS = WHAT("Processes, one for each GPU. Default: all visible GPUs; 2 on the CPU.", metavar="N")


class Run(Group):
    """Hold the options that all benches share."""

    seconds: float = MEASURE(
        "Time limit of each timing of a case; a timing stops earlier once its median is known within ±1 %, "
        "and is marked noisy otherwise.",
        default=0.3,
        metavar="SECONDS",
    )
    timeout: float = MEASURE(
        "A bench that makes no progress for this long is treated as hung and ended; at least 300 s are allowed until its first case, "
        "however short this is.",
        default=300.0,
        metavar="SECONDS",
    )
    device: str = MEASURE(
        "auto, cuda or cpu. auto uses the GPU if there is one. On the CPU results are checked but not timed.",
        default="auto",
        metavar="NAME",
    )
    output: Path | None = OUTPUT(
        "Folder for the raw record (bench-NAME.json, every sample in it), a picture (bench-NAME.png) and the log. On the CPU there is no picture. Default: only print.",
        "-o",
        "--output",
        metavar="DIR",
    )
    force: bool = OUTPUT("Write over what is in -o.", default=False)
    as_json: bool = OUTPUT("Print the record as JSON on stdout, without samples.", "--json", default=False)


class Attention(Group):
    """Measure paged MLA decode attention with each backend: bytes and operations per second, against this GPU's limits.

    The picture is a roofline plot. docs/benches.md explains the results.

    For example:

      dcpbench bench attention --heads 16,128 --requests 1,64 --context 8192 -o results
    """

    heads: str | None = COUNTS("Query heads that one rank attends with. Default: 16,64,128 on a GPU; 16 on the CPU.")
    requests: str | None = FEW_REQUESTS
    context: str | None = CONTEXT
    page: str | None = PAGE
    kv_dtype: str | None = NAMES("bf16, fp8: e4m3 with a scale, read by triton and flashmla. Default: bf16.")
    lengths: str = LENGTHS
    query_length: str | None = QUERY_LENGTH
    backend: str | None = NAMES(
        "reference, triton, flashinfer, flashmla. Default: triton and those that are installed; reference,triton on the CPU."
    )
    layers: int | None = LAYERS


class Gqa(Group):
    """Measure paged decode attention with grouped query heads (GQA), as bench attention measures MLA.

    For example:

      dcpbench bench gqa --heads 64 --kv-heads 4,8 --requests 8,48 --context 8192,32768 -o results
    """

    heads: str | None = COUNTS("Query heads that one rank attends with. Default: 64 on a GPU; 8 on the CPU.")
    kv_heads: str | None = COUNTS("KV heads of one rank, which divide --heads. Default: 4,8 on a GPU; 2 on the CPU.")
    head_dim: str | None = COUNTS("Columns of a head. Default: 128 on a GPU; 16 on the CPU.")
    requests: str | None = COUNTS("Requests of a decode step. Default: 8,48 on a GPU; 1,3 on the CPU.")
    context: str | None = COUNTS("KV rows of a request on this rank. Default: 8192,32768 on a GPU; 16 on the CPU.")
    page: str | None = PAGE
    kv_dtype: str | None = NAMES("bf16, fp8: e4m3 with a scale, read by triton. Default: bf16.")
    lengths: str = LENGTHS
    query_length: str | None = QUERY_LENGTH
    backend: str | None = NAMES(
        "reference, triton, flashinfer. Default: triton, and flashinfer if it is installed; reference,triton on the CPU."
    )
    layers: int | None = LAYERS


class Indexer(Group):
    """Measure the scores of an indexer of sparse attention (DeepSeek-V3.2, GLM-5) over one rank's stored keys.

    DeepGEMM's kernel is compared with fp64 and with this GPU's limits. docs/sparse-attention.md explains the operator.

    For example:

      dcpbench bench indexer --heads 64 --requests 1,64 --context 131072 -o results
    """

    heads: str | None = COUNTS("Query heads of the indexer. Default: 64 on a GPU; 8 on the CPU.")
    width: str | None = COUNTS("Columns of a head and of a key. Default: 128 on a GPU; 16 on the CPU.")
    requests: str | None = FEW_REQUESTS
    context: str | None = COUNTS("Keys of a request on this rank. Default: 8192,131072 on a GPU; 16 on the CPU.")
    page: str | None = COUNTS("Keys of a page. Default: 64 on a GPU; 4 on the CPU.")
    lengths: str = NAMES(
        "even: all requests have --context keys. uneven: from 1/8 to 15/8 of it, with the same total.", default="even"
    )
    variant: str | None = NAMES("reference, deepgemm. Default: deepgemm on a GPU; reference on the CPU.")
    layers: int | None = LAYERS


class SparseAttention(Group):
    """Measure MLA decode over the tokens that an indexer chose (DeepSeek-V3.2, GLM-5).

    FlashMLA's kernel over its fp8 rows is compared with fp64 and with this GPU's limits.

    For example:

      dcpbench bench sparse-attention --heads 64,128 --requests 8,64 --context 131072 -o results
    """

    heads: str | None = COUNTS("Query heads that one rank attends with. Default: 64,128 on a GPU; 16 on the CPU.")
    requests: str | None = FEW_REQUESTS
    context: str | None = CONTEXT
    top_k: str | None = COUNTS("Rows that a request attends to. Default: 2048 on a GPU; 8 on the CPU.")
    page: str | None = PAGE
    lengths: str = LENGTHS
    variant: str | None = NAMES("reference, flashmla. Default: flashmla on a GPU; reference on the CPU.")
    layers: int | None = LAYERS


class Exchange(Group):
    """Measure what a decode attention layer exchanges between the ranks of a DCP group: q, partial outputs and lse.

    The limits are two barriers and the bytes that a rank must receive. docs/benches.md explains the results.

    For example:

      dcpbench bench exchange --ranks 4 --heads 128 --requests 1,8,32,128 -o results
    """

    heads: str | None = HEADS
    requests: str | None = REQUESTS
    ranks: int | None = RANKS
    variant: str | None = NAMES(
        "Exchanges as --exchange of a sweep names them, and ag_rs-bf16, which reduces partial outputs in bf16. "
        "Default: all but ag_rs_registered."
    )
    q_replicate: bool = WHAT(
        "Every rank has all heads' queries already: none are gathered.", "--q-replicate/--no-q-replicate", default=False
    )
    project_first: bool = WHAT(
        "Partial outputs are projected before they are exchanged: 128 columns instead of 512. The projection itself is "
        "not in the time.",
        "--project-first/--no-project-first",
        default=False,
    )
    layers: int | None = LAYERS


class Collectives(Group):
    """Measure collectives at the sizes of a decode step: time and bus bandwidth, against the rate of peer memory reads.

    For example:

      dcpbench bench collectives --ranks 4 --requests 1,32,128 -o results
    """

    requests: str | None = REQUESTS
    width: str | None = COUNTS(
        "Columns of a message in bf16, which has a row for each request. Default: 7168 on a GPU, DeepSeek-V3's hidden "
        "size; 64 on the CPU."
    )
    ranks: int | None = RANKS
    variant: str | None = NAMES(
        "all-gather, reduce-scatter, all-to-all, all-reduce, all-reduce-symm, and the first four with -registered behind "
        "them: input and output in memory that NCCL has registered. Default: all but those."
    )
    layers: int | None = LAYERS


class Merge(Group):
    """Measure each kernel around the collectives of an exchange, against the speed of a copy.

    docs/benches.md describes each of them.

    For example:

      dcpbench bench merge --heads 128 --requests 8,128 --dcp 4 -o results
    """

    heads: str | None = HEADS
    requests: str | None = REQUESTS
    dcp: str | None = COUNTS(
        "Ranks of the DCP group whose partial outputs are merged. Default: 4 on a GPU; 2 on the CPU."
    )
    variant: str | None = NAMES("head-order, correct, pack, combine, value-proj. Default: all.")
    layers: int | None = LAYERS


class Linear(Group):
    """Measure the linear layers of a model on one rank, against this GPU's memory bandwidth and peak FLOP/s.

    fp8 weights have a scale for each 128 × 128 block. docs/benches.md lists what each variant leaves out.

    For example:

      dcpbench bench linear --tp 8 --rows 16,128 -o results
    """

    model: str | None = WHAT(
        "Model whose layers are multiplied: a published one or a config.json. Default: deepseek-v3 on a GPU; tiny on "
        "the CPU.",
        metavar="NAME",
    )
    tp: str | None = COUNTS(
        "Ranks that share the model; one rank's layers run. Default: 1,2,4,8 on a GPU; 1,2 on the CPU."
    )
    rows: str | None = COUNTS("Tokens of a step. Default: 1,16,32,64,128 on a GPU; 1,5 on the CPU.")
    matrix: str | None = NAMES(
        "qkv, qkv_a, q_b, o, shared-gate-up, shared-down, dense-gate-up, dense-down. Default: all that the model has."
    )
    weights: str | None = NAMES("bf16 (with the variant torch) or fp8 (with the others). Default: fp8.")
    variant: str | None = NAMES(
        "triton, torch, deepgemm, flashinfer. Default: all that are installed and support the weights."
    )
    layers: int | None = LAYERS


class Moe(Group):
    """Measure the two matrix products of a rank's experts at decode sizes, against this GPU's memory bandwidth.

    Only experts with at least one row count as read. docs/benches.md lists what each variant leaves out.

    For example:

      dcpbench bench moe --tp 8 --requests 8,32,128 --rows uniform,skewed,few -o results

      dcpbench bench moe --tp 1,8 --requests 32,128 --weights bf16,fp8,int4 --variant triton
    """

    model: str | None = WHAT(
        "Model whose experts are multiplied: a published one or a config.json. Default: deepseek-v3 on a GPU; tiny on "
        "the CPU.",
        metavar="NAME",
    )
    tp: str | None = COUNTS(
        "Ranks over which each expert is split by width; one rank's share runs. Default: 1,4,8 on a GPU; 1,2 on the CPU."
    )
    requests: str | None = COUNTS("Requests of a decode step. Default: 8,32,128 on a GPU; 1,4 on the CPU.")
    rows: str = NAMES(
        "uniform: all experts are equally likely. skewed: expert i has probability 1 / (i + 1). few: one expert in four "
        "is drawn, the others have no row.",
        default="uniform",
    )
    weights: str = NAMES(
        "bf16; fp8: e4m3 with a scale for each 128 × 128; int4: 4 bits with a bf16 scale for each --group-size inputs, times rows "
        "in bf16. torch has products for bf16, deepgemm for bf16 and fp8.",
        default="bf16",
    )
    group_size: str | None = COUNTS("Inputs per scale of int4 weights: 32, 128 or both. Default: 32.")
    variant: str | None = NAMES("triton, torch, deepgemm. Default: all that are installed.")
    layers: int | None = LAYERS


class KvGather(Group):
    """Measure gathering the interleaved KV prefixes of several requests into token order on all ranks.

    The eager time includes the allocation of the buffer, the time in a CUDA graph does not.

    For example:

      dcpbench bench kv-gather --ranks 4 --tokens 131072,4194304 --pool-bytes 4GiB -o results
    """

    requests: str | None = COUNTS(
        "Requests whose prefixes are gathered, of uneven lengths. Default: 1,16 on a GPU; 3 on the CPU."
    )
    tokens: str | None = COUNTS("Tokens of all requests. Default: 8192,131072,4194304 on a GPU; 64 on the CPU.")
    ranks: int | None = RANKS
    variant: str | None = NAMES("nccl (all-gather) or direct (peers' memory is read). Default: both.")
    buffer: str | None = NAMES(
        "pool (a reserve of symmetric memory, taken at start), plain (allocated in every eager call) or registered (a "
        "reserve registered with NCCL; nccl alone, on GPUs). Default: pool,plain."
    )
    pool_bytes: str | None = WHAT(
        "Size of the pool; what does not fit is allocated at run time, and its case is marked outgrown or registered-outgrown. Default: 4GiB on a "
        "GPU; 1MiB on the CPU.",
        metavar="SIZE",
    )
    layers: int | None = LAYERS


def _register_bench(name: str, sizes: type[Group]) -> None:
    """Register the command of a bench. Its help is the docstring of its class of sizes."""

    def measure(sizes: Group, run: Run) -> int:
        from dcpbench.bench import runner as benches

        return benches.run_bench(name, vars(sizes), benches.Options(**vars(run)))

    measure.__doc__ = sizes.__doc__
    measure.__annotations__ |= {"sizes": sizes, "run": Run}
    register_command(app, name=name)(measure)


BENCHES: dict[str, type[Group]] = {
    "attention": Attention,
    "gqa": Gqa,
    "indexer": Indexer,
    "sparse-attention": SparseAttention,
    "exchange": Exchange,
    "collectives": Collectives,
    "merge": Merge,
    "linear": Linear,
    "moe": Moe,
    "kv-gather": KvGather,
}
for bench, its_sizes in BENCHES.items():
    _register_bench(bench, its_sizes)
register_command(app, name="calibrate")(calibrate)
