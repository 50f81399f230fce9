"""Convert the options of each bench to its cases, with defaults by device. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import itertools
from typing import TYPE_CHECKING, Any

from dcpbench.bench.bench_record import Case
from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.models.shapes import KV_WIDTH, LATENT, VALUE
from dcpbench.models.weight_formats import BF16, FP8, INT4, INT4_GROUPS, SCALE_BLOCK
from dcpbench.plan.option_parsers import parse_bytes
from dcpbench.points.counts import parse_count, suggest_counts
from dcpbench.points.layout import Layout, Prefix
from dcpbench.points.memory import make_attention_products, make_mlp_products
from dcpbench.points.names import AS_REQUESTS, BACKENDS, EXCHANGES, GQA_BACKENDS, LIBRARIES, OVER_FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.memory import LinearShape

DTYPES = ("bf16", "fp8")
MERGE_VARIANTS = ("head-order", "correct", "pack", "combine", "value-proj")
LINEAR_VARIANTS = ("triton", "torch", "deepgemm", "flashinfer")
LINEAR_PACKAGES = {"deepgemm": "deep_gemm", "flashinfer": "flashinfer"}
LAYERS_BY_NAME = ("qkv", "qkv_a", "q_b", "o", "shared-gate-up", "shared-down", "dense-gate-up", "dense-down")
INDEXER_VARIANTS = ("reference", "deepgemm")
SPARSE_VARIANTS = ("reference", "flashmla")
MOE_VARIANTS = ("triton", "torch", "deepgemm")
MOE_WEIGHTS = {BF16: MOE_VARIANTS, FP8: ("triton", "deepgemm"), INT4: ("triton",)}  # variants of experts by format
MOE_PRODUCTS = ("gate-up", "down")
MOE_ROWS = ("uniform", "skewed", "few")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "all-reduce-symm")
REGISTERED_COLLECTIVES = tuple(f"{name}-registered" for name in COLLECTIVES[:4])  # run only if named
EXCHANGE_VARIANTS = tuple(  # `ag_rs-bf16` reduces in bf16, unlike the engine; the last one runs only if named
    dict.fromkeys(("ag_rs", "ag_rs-bf16", *EXCHANGES))
)
AUTO_VARIANTS = EXCHANGE_VARIANTS[:-1]
KV_GATHER_VARIANTS = ("nccl", "direct")
BUFFERS = ("pool", "plain", "registered")
POOL_BYTES = 4 << 30  # bytes that SGLang reserves for it (#24040)
CPU_POOL_BYTES = 1 << 20
ROW_BYTES = 2 * KV_WIDTH  # bytes of a KV row in bf16
LENGTHS = ("even", "uneven")
MAX_COUNT = 999_999_999
MAX_QUERY_LENGTH = 8
TOGETHER = ("reference", "triton")  # backends that take the query rows of a request together


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a bench by name, and the values on which the defaults of others depend.

    Its functions, and those that make cases from it, raise UsageError for values that cannot work.
    """

    cpu: bool
    ranks: int = 1
    typed: Mapping[str, Any]

    def parse_counts(self, name: str, cpu: Sequence[int], gpu: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of a comma list such as `16,64k`, each once; without one, the default of the device."""
        typed, default, flag = self.typed[name], cpu if self.cpu else gpu, _format_flag(name)
        if typed is None:
            return tuple(default)
        items = [item.strip() for item in typed.split(",")]
        found = [parse_count(item) or 0 for item in items]
        for item, count in zip(items, found, strict=True):
            if choices := suggest_counts(item):
                raise UsageError(f"{flag} {typed}: {choices}.")
            if not 0 < count <= MAX_COUNT:
                example = f"{flag} {','.join(map(str, default))}"
                wrong = f"is above {MAX_COUNT:,}" if count > 0 else "is not a positive whole number"
                raise UsageError(f"{flag} {typed}: '{item}' {wrong}; write for example {example}.")
        return tuple(dict.fromkeys(found))

    def parse_names(self, name: str, known: Sequence[str], default: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return a comma list of known names, in their usual order; by default all of them, or `default`."""
        if self.typed[name] is None:
            return tuple(known if default is None else default)
        items = [item.strip() for item in self.typed[name].split(",")]
        for item in items:
            if item not in known:
                near = difflib.get_close_matches(item, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise UsageError(
                    f"{_format_flag(name)} '{item}' is unknown{hint} Write a comma list of: {', '.join(known)}."
                )
        return tuple(one for one in known if one in items)

    def parse_heads(self, option: str, ranks: int) -> tuple[int, ...]:
        """Return the numbers of heads, each divisible by the ranks of a DCP group, which `option` sets."""
        counts = self.parse_counts("heads", (8,), (128,))
        for h in counts:
            if h % ranks:
                raise UsageError(
                    f"--heads {h} cannot be divided among {ranks} ranks; try --heads {-(-h // ranks) * ranks} or "
                    f"another {option}."
                )
        return counts

    def parse_query_lengths(self, contexts: Sequence[int]) -> tuple[dict[str, int], ...]:
        """Return the size of a case that each of --query-length adds; one query row of a request adds none.

        Raise UsageError for fewer KV rows in a request than query rows, each of which has a KV row.
        """
        counts = self.parse_counts("query_length", (1,), (1,))
        if most := next((n for n in counts if n > MAX_QUERY_LENGTH), 0):
            raise UsageError(f"--query-length {most} is above {MAX_QUERY_LENGTH}, the most query rows of a request.")
        if min(contexts) < max(counts):
            raise UsageError(
                f"--context {min(contexts)} with --query-length {max(counts)}: each query row has a KV row; use --context "
                f"{max(counts)} or more."
            )
        return tuple({"query_length": n} if n > 1 else {} for n in counts)

    def make_case(self, variant: str, **sizes: float | str) -> Case:
        """Return a case with --layers calls; without --layers the bench chooses their number."""
        layers: int | None = self.typed["layers"]
        if layers is not None and layers < 1:
            raise UsageError(f"--layers {layers} is not a positive number; try --layers 16.")
        return Case(variant=variant, calls=layers or 0, sizes=sizes)


def _format_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def list_row_variants(backend: str, query: Mapping[str, int]) -> list[str]:
    """Return the variants of a backend for a number of query rows of a request: together if it can, and as requests."""
    if not query:
        return [backend]
    return [*([backend] if backend in TOGETHER else []), backend + AS_REQUESTS]


def list_attention_cases(options: BenchOptions) -> list[Case]:
    """Return every backend at every size, with those of one pool adjacent, so that they can share it."""
    installed = [name for name, package in LIBRARIES.items() if importlib.util.find_spec(package)]
    usual = ("reference", "triton") if options.cpu else (*installed, "triton")
    backends = options.parse_names("backend", BACKENDS, usual)
    contexts = options.parse_counts("context", (16,), (8192, 131072))
    grid = itertools.product(
        options.parse_names("kv_dtype", DTYPES, ("bf16",)),
        options.parse_names("lengths", LENGTHS),
        options.parse_counts("page", (4,), (64,)),
        contexts,
        options.parse_counts("requests", (1, 3), (1, 8, 64)),
        options.parse_counts("heads", (16,), (16, 64, 128)),
        options.parse_query_lengths(contexts),
        backends,
    )
    cases = [
        options.make_case(variant, heads=h, requests=b, context=s, page=p, lengths=division, kv=kv, **query)
        for kv, division, p, s, b, h, query, name in grid
        if kv == "bf16" or name in OVER_FP8
        for variant in list_row_variants(name, query)
    ]
    _check_backends(cases, backends)
    return cases


def _check_backends(cases: Sequence[Case], backends: Sequence[str]) -> None:
    """Raise UsageError if none of the backends reads the only data type of the KV cache."""
    if not cases:
        raise UsageError(f"--backend {','.join(backends)} does not read rows in fp8; use --backend triton.")


def list_gqa_cases(options: BenchOptions) -> list[Case]:
    """Return every backend of grouped-query attention at every size, with those of one pool adjacent."""
    libraries = ["flashinfer"] if importlib.util.find_spec("flashinfer") else []
    usual = ("reference", "triton") if options.cpu else (*libraries, "triton")
    backends = options.parse_names("backend", GQA_BACKENDS, usual)
    heads, kv_heads = options.parse_counts("heads", (8,), (64,)), options.parse_counts("kv_heads", (2,), (4, 8))
    for h, n in itertools.product(heads, kv_heads):
        if h % n:
            raise UsageError(f"--heads {h} cannot be divided among --kv-heads {n}; try --heads {-(-h // n) * n}.")
    contexts = options.parse_counts("context", (16,), (8192, 32768))
    grid = itertools.product(
        options.parse_names("kv_dtype", DTYPES, ("bf16",)),
        options.parse_names("lengths", LENGTHS),
        options.parse_counts("head_dim", (16,), (128,)),
        options.parse_counts("page", (4,), (64,)),
        contexts,
        options.parse_counts("requests", (1, 3), (8, 48)),
        kv_heads,
        heads,
        options.parse_query_lengths(contexts),
        backends,
    )
    cases = [
        options.make_case(
            variant, heads=h, kv_heads=n, head_dim=x, requests=b, context=s, page=p, lengths=division, kv=kv, **query
        )
        for kv, division, x, p, s, b, n, h, query, name in grid
        if kv == "bf16" or name in OVER_FP8
        for variant in list_row_variants(name, query)
    ]
    _check_backends(cases, backends)
    return cases


def list_indexer_cases(options: BenchOptions) -> list[Case]:
    """Return every variant of an indexer's scores at every size; DeepGEMM's is there on a GPU even if it is not installed."""
    grid = itertools.product(
        options.parse_names("lengths", LENGTHS),
        options.parse_counts("width", (16,), (128,)),
        options.parse_counts("page", (4,), (64,)),
        options.parse_counts("context", (16,), (8192, 131072)),
        options.parse_counts("requests", (1, 3), (1, 8, 64)),
        options.parse_counts("heads", (8,), (64,)),
        options.parse_names("variant", INDEXER_VARIANTS, INDEXER_VARIANTS[:1] if options.cpu else INDEXER_VARIANTS[1:]),
    )
    return [
        options.make_case(name, heads=h, width=x, requests=b, context=s, page=p, lengths=division)
        for division, x, p, s, b, h, name in grid
    ]


def list_sparse_attention_cases(options: BenchOptions) -> list[Case]:
    """Return every variant of sparse MLA decode at every size; FlashMLA's is there on a GPU even if it is not installed."""
    grid = itertools.product(
        options.parse_names("lengths", LENGTHS),
        options.parse_counts("page", (4,), (64,)),
        options.parse_counts("top_k", (8,), (2048,)),
        options.parse_counts("context", (16,), (8192, 131072)),
        options.parse_counts("requests", (1, 3), (1, 8, 64)),
        options.parse_counts("heads", (16,), (64, 128)),
        options.parse_names("variant", SPARSE_VARIANTS, SPARSE_VARIANTS[:1] if options.cpu else SPARSE_VARIANTS[1:]),
    )
    return [
        options.make_case(name, heads=h, requests=b, context=s, top_k=k, page=p, lengths=division)
        for division, p, k, s, b, h, name in grid
    ]


def list_exchange_cases(options: BenchOptions) -> list[Case]:
    """Return every exchange at every size."""
    value = VALUE if options.typed["project_first"] else LATENT
    q = "replicated" if options.typed["q_replicate"] else "gathered"
    grid = itertools.product(
        options.parse_heads("--ranks", options.ranks),
        options.parse_counts("requests", (1, 4), (1, 8, 32, 128)),
        options.parse_names("variant", EXCHANGE_VARIANTS, AUTO_VARIANTS),
    )
    return [options.make_case(name, heads=h, requests=b, ranks=options.ranks, value=value, q=q) for h, b, name in grid]


def list_merge_cases(options: BenchOptions) -> list[Case]:
    """Return every kernel at every size; one request's queries are in the order of heads already."""
    cases = []
    for n in options.parse_counts("dcp", (2,), (4,)):
        counts = options.parse_heads("--dcp", n)
        batches = options.parse_counts("requests", (1, 3), (1, 8, 32, 128, 512))
        cases += [
            options.make_case(name, heads=h, requests=b, dcp=n)
            for h, name, b in itertools.product(counts, options.parse_names("variant", MERGE_VARIANTS), batches)
            if (name, b) != ("head-order", 1)
        ]
    return cases


def list_linear_cases(options: BenchOptions) -> list[Case]:
    """Return the linear layers of a model on one rank, by number of rows, for the variants that support its weights."""
    shape = load_shape(options.typed["model"] or ("tiny" if options.cpu else "deepseek-v3"))
    usable = [
        name
        for name in LINEAR_VARIANTS
        if name not in LINEAR_PACKAGES or (not options.cpu and importlib.util.find_spec(LINEAR_PACKAGES[name]))
    ]
    names = options.parse_names("variant", LINEAR_VARIANTS, usable)
    wanted = options.parse_names("matrix", LAYERS_BY_NAME)
    cases = []
    for n, weights in itertools.product(
        options.parse_counts("tp", (1, 2), (1, 2, 4, 8)), options.parse_names("weights", DTYPES, ("fp8",))
    ):
        if shape.heads % n or shape.intermediate_size % n or shape.moe_intermediate_size % n:
            raise UsageError(f"--tp {n} does not divide {shape.name}'s heads and widths; try --tp 1.")
        for layer, product in list_linear_layers(shape, n).items():
            cases += [
                options.make_case(
                    name, layer=layer, inputs=product.inputs, outputs=product.outputs, rows=rows, weights=weights
                )
                for rows in options.parse_counts("rows", (1, 5), (1, 16, 32, 64, 128))
                for name in names
                if layer in wanted and (options.typed["variant"] or (name == "torch") == (weights == "bf16"))
            ]
    if not cases:
        raise UsageError(f"{shape.name} has no {options.typed['matrix']}; try --matrix o.")
    return cases


def list_linear_layers(shape: ModelShape, tp: int) -> dict[str, LinearShape]:
    """Return the linear layers of one of tp ranks, by name, that are quantised in a published checkpoint."""
    attention = make_attention_products(shape, Layout(tp=tp))
    found: dict[str, LinearShape] = {
        name: attention[name] for name in ("qkv", "qkv_a", "q_b", "o") if name in attention
    }
    dense = shape.intermediate_size if shape.first_k_dense_replace else 0
    for name, width in ("shared", shape.shared_experts * shape.moe_intermediate_size), ("dense", dense):
        if not width:
            continue
        found |= dict(zip((f"{name}-gate-up", f"{name}-down"), make_mlp_products(shape, width // tp), strict=True))
    return found


def list_moe_cases(options: BenchOptions) -> list[Case]:
    """Return both products of a model's experts, with each expert divided by width over tp, at every size.

    DeepGEMM is included if it is installed.
    """
    shape = load_shape(options.typed["model"] or ("tiny" if options.cpu else "deepseek-v3"))
    if not shape.experts:
        raise UsageError(f"--model {shape.name} has no experts; try --model qwen3-30b-a3b.")
    usable = MOE_VARIANTS if importlib.util.find_spec("deep_gemm") and not options.cpu else MOE_VARIANTS[:-1]
    names = options.parse_names("variant", MOE_VARIANTS, usable)
    cases = []
    for n, b, kind, (weights, block, group), product, name in itertools.product(
        options.parse_counts("tp", (1, 2), (1, 4, 8)),
        options.parse_counts("requests", (1, 4), (8, 32, 128)),
        options.parse_names("rows", MOE_ROWS),
        list_expert_formats(options),
        MOE_PRODUCTS,
        names,
    ):
        if shape.moe_intermediate_size % n:
            raise UsageError(
                f"--tp {n} does not divide {shape.name}'s experts, {shape.moe_intermediate_size} wide; try --tp 1."
            )
        model = {
            "experts": shape.experts,
            "top_k": shape.top_k,
            "hidden": shape.hidden,
            "width": shape.moe_intermediate_size // n,
        }
        if name not in MOE_WEIGHTS[weights] and not options.typed["variant"]:
            continue
        odd = model["width"] % block or shape.hidden % block
        # The CPU's tiny model is a default, and options are checked before the device is known.
        if odd and options.typed["model"]:
            whole = shape.moe_intermediate_size % block == shape.hidden % block == 0
            raise UsageError(
                f"--weights {weights} needs widths that are multiples of {block}, and {shape.name}'s experts are "
                f"{model['width']} of {shape.hidden} wide at --tp {n}; try {'--tp 1' if whole else '--weights bf16'}."
            )
        if odd and n > 1 and not options.typed["tp"]:
            continue
        cases.append(options.make_case(name, product=product, **model, requests=b, weights=weights, **group, rows=kind))
    return cases


def list_expert_formats(options: BenchOptions) -> list[tuple[str, int, dict[str, int]]]:
    """Return each format of experts with the number that must divide widths, and the size of a case that it adds: of int4 the
    inputs per scale.
    """
    found: list[tuple[str, int, dict[str, int]]] = []
    groups = options.parse_counts("group_size", INT4_GROUPS[:1], INT4_GROUPS[:1])
    for group in groups:
        if group not in INT4_GROUPS:
            raise UsageError(
                f"--group-size {group} is none of {', '.join(map(str, INT4_GROUPS))}; write --group-size {INT4_GROUPS[0]}."
            )
    formats = options.parse_names("weights", tuple(MOE_WEIGHTS))
    if options.typed["group_size"] and INT4 not in formats:
        raise UsageError(
            f"--group-size {options.typed['group_size']} is for int4; add --weights int4, or leave it out."
        )
    for weights in formats:
        if weights == INT4:
            found += [(weights, group, {"group_size": group}) for group in groups]
        else:
            found.append((weights, SCALE_BLOCK if weights == FP8 else 1, {}))
    return found


def list_collectives_cases(options: BenchOptions) -> list[Case]:
    """Return every collective at every size."""
    ranks, widths = options.ranks, options.parse_counts("width", (64,), (7168,))
    for w in widths:
        if w % ranks:
            raise UsageError(
                f"--width {w} cannot be divided among {ranks} ranks; try --width {-(-w // ranks) * ranks}."
            )
    grid = itertools.product(
        widths,
        options.parse_names("variant", (*COLLECTIVES, *REGISTERED_COLLECTIVES), COLLECTIVES),
        options.parse_counts("requests", (1, 4), (1, 8, 32, 128, 512)),
    )
    return [options.make_case(name, requests=b, width=w, ranks=ranks) for w, name, b in grid]


def list_kv_gather_cases(options: BenchOptions) -> list[Case]:
    """Return both ways with every buffer at every size; `outgrown` is a pool that is too small for a case."""
    ranks, typed = options.ranks, options.typed["pool_bytes"]
    default = CPU_POOL_BYTES if options.cpu else POOL_BYTES
    pool = default if typed is None else parse_bytes("pool_bytes", typed)
    cases = []
    for r, t, kind, name in itertools.product(
        options.parse_counts("requests", (3,), (1, 16)),
        options.parse_counts("tokens", (64,), (8192, 131072, 4194304)),
        options.parse_names("buffer", BUFFERS, BUFFERS[:2]),
        options.parse_names("variant", KV_GATHER_VARIANTS),
    ):
        if t < r:
            raise UsageError(f"--tokens {t} are fewer than --requests {r}; try --tokens {64 * r}.")
        if (kind, name) == ("registered", "direct"):
            continue  # it is NCCL that memory is registered with
        part_bytes = Prefix.make_uneven(t, r, ranks).part_rows * ROW_BYTES
        received = part_bytes * ranks
        # In registered memory the own part follows the received ones, at a multiple of 256 bytes.
        need = -(-received // 256) * 256 + -(-part_bytes // 256) * 256 if kind == "registered" else received
        fits = (part_bytes if name == "direct" else need) <= pool
        grown = {"pool": "outgrown", "registered": "registered-outgrown"}
        buffer = kind if fits else grown.get(kind, kind)
        cases.append(options.make_case(name, requests=r, tokens=t, ranks=ranks, buffer=buffer, pool_bytes=pool))
    if not cases:
        raise UsageError(
            "--buffer registered is memory that NCCL knows, which direct does not use; try --variant nccl."
        )
    return cases


CASES: dict[str, Callable[[BenchOptions], list[Case]]] = {  # makes the cases of a bench from its options
    "attention": list_attention_cases,
    "gqa": list_gqa_cases,
    "indexer": list_indexer_cases,
    "sparse-attention": list_sparse_attention_cases,
    "exchange": list_exchange_cases,
    "collectives": list_collectives_cases,
    "merge": list_merge_cases,
    "linear": list_linear_cases,
    "moe": list_moe_cases,
    "kv-gather": list_kv_gather_cases,
}
