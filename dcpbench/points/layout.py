"""Define Layout(tp, dp, dcp) and the integer arithmetic of interleaved KV storage. No torch.

Rank order inside one layout: replicas of attention DP are outermost, DCP ranks innermost, so that a DCP
group is a run of neighbouring ranks (the fastest links):

    rank = dp_rank · attn_tp + attn_rank,   attn_rank = dcp_group · dcp + dcp_rank

Interleaved storage (stripes of I tokens; I = 1 by default, N = dcp):

    owner(loc) = (loc // I) % N
    row(loc)   = (loc // (I·N))·I + loc % I
    loc        = (row // I)·I·N + owner·I + row % I
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

from dcpbench.errors import LayoutError
from dcpbench.points.names import MOE_EP, MOE_TP, SGLANG, VLLM, format_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from dcpbench.models.shapes import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryReplication:
    """Describe which projections a rank holds for all heads of its DCP group, instead of for its own heads alone."""

    query: bool = False  # W_UQ, W_UK (--collectives q-replicate): each rank computes all heads' queries without gather
    value: bool = False  # W_UV (--collectives project-first): partial outputs are projected before they are exchanged


MAX_RANKS = 1 << 16  # maximum ranks of a layout: more than any model needs, few enough to list all divisors
MAX_SUGGESTED = 72  # largest number of ranks that errors suggest: those of an NVL72
OWN_HEADS = QueryReplication()  # default of QueryReplication: each rank holds projections for its own heads only

Ints = TypeVar("Ints", int, "np.ndarray[Any, np.dtype[np.int32]]")


DEGREES = ("tp", "dp", "dcp")  # fields of a Layout, and of points, that divide the GPUs of a stage
OUTER_DEGREES = ("pp", "pcp")  # further fields that multiply the GPUs: pipeline, prefill context parallel


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describe why a model cannot take a layout."""

    text: str  # without what to use instead
    remedies: tuple[str, ...]  # degrees, or `ep`, of which another value may solve it


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describe one way to place a model on `tp` GPUs; raise LayoutError if the degrees do not divide each other."""

    tp: int  # number of GPUs that share one copy of the model; the world size
    dp: int = 1  # number of attention data parallel replicas inside `tp`
    dcp: int = 1  # ranks that share the KV cache of a request: in an attention replica or, with PCP, over the PCP ranks
    pp: int = 1  # number of pipeline stages, each on its own `tp` · `pcp` GPUs
    pcp: int = 1  # groups of `tp` GPUs among which prompts' tokens are divided (prefill context parallelism)
    shared_kv: int = 1  # PCP ranks that share a KV cache, in a layout that has them as attention replicas (`spread`)

    def __post_init__(self) -> None:
        for name in (*DEGREES, *OUTER_DEGREES):
            degree = getattr(self, name)
            given = format_setting(name, degree)
            if degree < 1:
                raise LayoutError(f"{given} is not a positive number; try {format_setting(name, 1)}.")
            if degree > MAX_RANKS:
                raise LayoutError(
                    f"{given} is more than the {MAX_RANKS:,} ranks that a layout can have; try {format_setting(name, 8)}."
                )
        if self.tp % self.dp:
            problem = f"--dp {self.dp} does not divide --tp {self.tp}"
            raise LayoutError(f"{problem}; with --tp {self.tp} these do: {_format_divisors(self.tp)}.", problem)
        if self.pcp == 1 and self.attn_tp % self.dcp:
            of = f"--tp {self.tp}" if self.dp == 1 else f"--tp {self.tp} / --dp {self.dp} = {self.attn_tp}"
            problem = f"--dcp {self.dcp} does not divide {of}"
            raise LayoutError(f"{problem}; these do: {_format_divisors(self.attn_tp)}.", problem)

    @property
    def gpus(self) -> int:
        """Number of GPUs, as vLLM counts them: tp · pp · pcp."""
        return self.tp * self.pp * self.pcp

    @property
    def spread(self) -> Layout:
        """Return the layout of a stage's weights: experts and dense MLPs are divided over the PCP ranks too, attention is not.

        So are they over replicas of attention DP, as which the PCP ranks appear. Unlike these they have copies of the KV cache, or
        with DCP share one: its degree is then that inside a PCP rank.
        """
        inner, shared = (self.dcp // self.pcp, self.pcp) if self.pcp > 1 and self.dcp > 1 else (self.dcp, 1)
        return Layout(tp=self.tp * self.pcp, dp=self.dp * self.pcp, dcp=inner, shared_kv=shared)

    @property
    def kv_ranks(self) -> int:
        """Number of ranks that share the KV cache of one request, those of other PCP ranks included."""
        return self.dcp * self.shared_kv

    @property
    def attn_tp(self) -> int:
        """Number of ranks that share the heads of one attention replica."""
        return self.tp // self.dp

    def __str__(self) -> str:
        """Return `tp8`, `tp8·dcp8` or `tp8·dp2·dcp4`."""
        inner = f"tp{self.tp}" + (f"·dp{self.dp}" if self.dp > 1 else "") + (f"·dcp{self.dcp}" if self.dcp > 1 else "")
        return f"{inner}{self._outer_name}"

    def format_vllm_name(self) -> str:
        """Return the layout in vLLM's terms, in which tp counts the ranks of one attention replica."""
        return f"dp{self.dp}·tp{self.attn_tp}·dcp{self.dcp}{self._outer_name}"

    @property
    def _outer_name(self) -> str:
        """Pipeline stages and PCP ranks, where there are several."""
        return "".join(f"·{name}{getattr(self, name)}" for name in OUTER_DEGREES if getattr(self, name) > 1)

    def format_engine_name(self, engine: str) -> str:
        """Return the layout by the degrees of an engine's own flags; empty for an engine with unknown flags.

        SGLang's --tp-size counts all ranks of its attention replicas, as --tp does.
        """
        names = {VLLM: self.format_vllm_name(), SGLANG: f"tp{self.tp}·dp{self.dp}·dcp{self.dcp}{self._outer_name}"}
        return names.get(engine, "")

    def get_attn_rank(self, rank: int) -> int:
        """Return the position of a rank inside its attention replica; it holds heads [attn_rank·h, (attn_rank+1)·h)."""
        return rank % self.attn_tp

    def get_dcp_rank(self, rank: int) -> int:
        """Return which residue of the tokens a rank stores."""
        return rank % self.dcp

    def list_attn_groups(self) -> list[list[int]]:
        """Return the ranks of each attention replica."""
        return [list(range(d * self.attn_tp, (d + 1) * self.attn_tp)) for d in range(self.dp)]

    def list_dcp_groups(self) -> list[list[int]]:
        """Return the groups of ranks that together hold one full KV cache."""
        return [list(range(start, start + self.dcp)) for start in range(0, self.tp, self.dcp)]

    def list_dp_groups(self) -> list[list[int]]:
        """Return the groups of ranks with the same heads in different replicas; tokens are gathered over them for the
        MoE.
        """
        return [list(range(a, self.tp, self.attn_tp)) for a in range(self.attn_tp)]

    def check_model(self, shape: ModelShape, ep: str = MOE_EP) -> None:
        """Raise LayoutError, with degrees that work, unless heads and the experts placed by `ep` divide evenly."""
        if (problem := self.find_problem(shape, ep)) is not None:
            found = [self._suggest(shape, ep, name) for name in problem.remedies]
            if not any(found):  # as several degrees are wrong
                found = [self._suggest(shape, ep, name) for name in ("tp", "pcp")]
            advice = ", or ".join(filter(None, found)) or "other degrees"
            raise LayoutError(f"{problem.text}; use {advice}.", problem.text)

    def accepts(self, shape: ModelShape, ep: str = MOE_EP, **degrees: int) -> bool:
        """Return whether the model can take the layout with these degrees changed."""
        try:
            return dataclasses.replace(self, **degrees).find_problem(shape, ep) is None
        except LayoutError:
            return False

    def _suggest(self, shape: ModelShape, ep: str, name: str) -> str:
        """Return an option with the values with which the model can take the layout; empty if it has none."""
        if name == "ep":
            return ", or ".join(f"--ep {n}" for n in (MOE_TP, MOE_EP) if n != ep and self.accepts(shape, n))
        tries: list[tuple[str, dict[str, int]]] = [("", {})]
        if name == "tp":
            tries.append((" with --dp 1 and --dcp 1", {"dp": 1, "dcp": 1}))
        for others, degrees in tries:
            values = range(1, MAX_SUGGESTED + 1)
            if found := [n for n in values if self.accepts(shape, ep, **{name: n}, **degrees)]:
                return f"{format_setting(name, _format_values(found))}{others}"
        return ""

    def find_problem(self, shape: ModelShape, ep: str) -> Problem | None:
        """Return why the model cannot take the layout; None if it can."""
        if self.pp > shape.layers:
            text = f"{shape.name} has {shape.layers} layers, fewer than --stages pp={self.pp}"
            return Problem(text, ("pp",))
        if self.pcp > 1:
            return self._find_pcp_problem(shape) or self.spread.find_problem(shape, ep)
        if shape.heads % self.attn_tp:
            return Problem(
                f"{shape.name} has {shape.heads} heads, which {self} would split over {self.attn_tp} ranks",
                ("tp", "dp", "dcp"),
            )
        if (problem := self._find_kv_head_problem(shape)) is not None:
            return problem
        if ep not in (MOE_EP, MOE_TP):
            return Problem(
                f"--ep {ep} with --tp {self.tp}: experts are tensor-parallel over all ranks (--ep 1), or expert parallel over "
                f"all ranks (--ep tp, here {self.tp})",
                ("ep",),
            )
        experts = {
            MOE_EP: (shape.experts, f"{shape.experts} experts, which do"),
            MOE_TP: (shape.moe_intermediate_size, f"experts with a width of {shape.moe_intermediate_size}, which does"),
        }
        dense = shape.intermediate_size if shape.first_k_dense_replace else 0
        shared = shape.shared_experts * shape.moe_intermediate_size
        for size, text in (
            experts[ep],
            (dense, f"a dense width of {dense}, which does"),
            (shared, f"a shared expert width of {shared}, which does"),
        ):
            if size % self.tp:
                return Problem(f"{shape.name} has {text} not divide over --tp {self.tp}", ("tp", "ep"))
        return None

    def _find_pcp_problem(self, shape: ModelShape) -> Problem | None:
        """Return a degree that vLLM 0.29 does not combine with PCP, or a model with which PCP is not planned."""
        if self.dp > 1:
            return Problem(
                f"--stages pcp={self.pcp} is planned without attention DP, which vLLM 0.29 does not combine with it",
                ("dp", "pcp"),
            )
        if self.dcp not in (1, self.pcp, self.tp * self.pcp):
            return Problem(
                f"--dcp {self.dcp} with --stages pcp={self.pcp}: DCP spans the PCP ranks, or all ranks of a stage, as in vLLM 0.29",
                ("dcp",),
            )
        if self.dcp > 1 and (shape.gqa or shape.indexer):
            kind = "grouped-query" if shape.gqa else "sparse"
            return Problem(
                f"--dcp {self.dcp} with --stages pcp={self.pcp} is planned for MLA alone, and {shape.name} has {kind} attention",
                ("dcp",),
            )
        return None

    def _find_kv_head_problem(self, shape: ModelShape) -> Problem | None:
        """Return why the ranks cannot hold a model's KV heads, or those with copies of a head cannot share its cache.

        Ranks beyond the number of KV heads hold copies, and DCP stores the tokens of one copy on several ranks, as in vLLM and
        SGLang: dcp ≤ tp / KV heads.
        """
        if shape.gqa is None:
            return None
        kv_heads, ranks = shape.gqa.kv_heads, self.attn_tp
        if max(kv_heads, ranks) % min(kv_heads, ranks):
            text = f"{shape.name} has {kv_heads} KV heads, which {self} would split over {ranks} ranks"
            return Problem(text, ("tp", "dp", "dcp"))
        most = shape.compute_max_dcp(ranks)
        if most % self.dcp == 0:
            return None
        if shape.gqa.window_layers:
            return Problem(
                f"{shape.name} has layers with a sliding window, and DCP does not divide the tokens of a window",
                ("dcp",),
            )
        return Problem(
            f"{shape.name} has {kv_heads} KV heads, of which {self} has {most} {'copy' if most == 1 else 'copies'} each, and DCP "
            "divides the tokens over the ranks that hold copies",
            ("dcp", "tp"),
        )


def place_experts(ep: str, tp: int) -> str:
    """Return --ep as points store it: MOE_EP if it is the number of ranks of the layout."""
    return MOE_EP if ep == str(tp) else ep


def find_ep_degree(ep: str, tp: int) -> int | None:
    """Return the expert parallel degree of `ep` in a layout of `tp` ranks; None if it is unknown."""
    if ep == MOE_EP:
        return tp or None
    return int(ep) if ep.isdecimal() else None


def format_layout_name(degrees: object, dp: int, ep_degree: int | None) -> str:
    """Return the name of a layout: with attention data parallel it ends with the expert parallel degree, if that is known.

    `tp4·dp4·ep1` has tensor-parallel experts and `tp4·dp4·ep4` is expert parallel. The name `tp4·dp4` means that the source of
    the figures does not state it.
    """
    return str(degrees) if dp <= 1 or ep_degree is None else f"{degrees}·ep{ep_degree}"


def list_valid_layouts(shape: ModelShape | None, tp: int, ep: str = MOE_TP, pp: int = 1, pcp: int = 1) -> list[Layout]:
    """Return every layout of `tp` ranks a stage that the model can take with experts placed by `ep`, smallest degrees first.

    Without a model, degrees have to divide each other. Raise LayoutError for a `tp` that no layout has.
    """
    Layout(tp=tp)
    found = []
    for dp in _list_divisors(tp):
        for dcp in _list_divisors(tp // dp * pcp):
            layout = Layout(tp=tp, dp=dp, dcp=dcp, pp=pp, pcp=pcp)
            if shape is None or layout.accepts(shape, place_experts(ep, tp * pcp)):
                found.append(layout)
    return found


def iter_smaller_layouts(shape: ModelShape, tp: int, like: Layout, ep: str) -> Iterator[Layout]:
    """Yield the valid layouts of at most `tp` ranks with no larger dp and dcp than `like`: most ranks first, then the largest dp, then dcp."""
    for ranks in range(tp, 0, -1):
        found = [x for x in list_valid_layouts(shape, ranks, ep) if x.dp <= like.dp and x.dcp <= like.dcp]
        yield from sorted(found, key=lambda x: (x.dp, x.dcp), reverse=True)


def find_nearest_layout(
    shape: ModelShape | None, like: Layout, ep: str, wanted: Callable[[Layout], bool], max_ranks: int
) -> Layout | None:
    """Return the valid layout with a property that has the fewest ranks, at least those of `like`, and preferably its dp."""
    for tp in range(like.tp, max_ranks // (like.pp * like.pcp) + 1):
        found = [x for x in list_valid_layouts(shape, tp, ep, like.pp, like.pcp) if wanted(x)]
        if found:
            return min(found, key=lambda x: (x.dp != like.dp, -x.dp, x.dcp))
    return None


def get_owner(loc: Ints, dcp: int, interleave: int = 1) -> Ints:
    """Return the DCP rank that stores virtual location (or token index) `loc`; also for arrays."""
    return (loc // interleave) % dcp


def get_row(loc: Ints, dcp: int, interleave: int = 1) -> Ints:
    """Return the physical row of `loc` in its owner's pool; also for arrays."""
    return loc // (interleave * dcp) * interleave + loc % interleave


def get_loc(row: int, rank: int, dcp: int, interleave: int = 1) -> int:
    """Return the virtual location that `rank` stores in `row`: the inverse of (`get_owner`, `row`)."""
    return row // interleave * interleave * dcp + rank * interleave + row % interleave


def compute_local_length(tokens: int, rank: int, dcp: int, interleave: int = 1) -> int:
    """Return how many of the first `tokens` tokens of a request `rank` stores."""
    stripe = interleave * dcp
    return tokens // stripe * interleave + min(max(tokens % stripe - rank * interleave, 0), interleave)


def list_local_tokens(tokens: int, rank: int, dcp: int, interleave: int = 1) -> list[int]:
    """Return the token indices that `rank` stores, in row order: the inverse map for a complete request."""
    return [get_loc(r, rank, dcp, interleave) for r in range(compute_local_length(tokens, rank, dcp, interleave))]


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Describe prefixes of several requests; a rank packs their rows into its part, request by
    request in token order.
    """

    lengths: tuple[int, ...]  # number of tokens of each request; 0 for one without a prefix
    dcp: int
    interleave: int = 1

    @classmethod
    def make_uneven(cls, tokens: int, requests: int, dcp: int) -> Prefix:
        """Return `tokens` tokens of `requests` requests with lengths in the ratio 1 : 2 : 3 …, rounded."""
        ends = [tokens * i * (i + 1) // (requests * (requests + 1)) for i in range(requests + 1)]
        return cls(tuple(end - start for start, end in itertools.pairwise(ends)), dcp)

    @functools.cached_property
    def starts(self) -> list[int]:
        """Start of each request in the tokens of all, followed by the end."""
        return list(itertools.accumulate(self.lengths, initial=0))

    @property
    def tokens(self) -> int:
        """Number of tokens of all requests."""
        return self.starts[-1]

    def list_first_rows(self, rank: int) -> list[int]:
        """Return the first row of each request in a rank's part, followed by the end."""
        shares = (compute_local_length(n, rank, self.dcp, self.interleave) for n in self.lengths)
        return list(itertools.accumulate(shares, initial=0))

    @functools.cached_property
    def part_rows(self) -> int:
        """Number of rows of the largest part."""
        return max(self.list_first_rows(rank)[-1] for rank in range(self.dcp))


def _list_divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _format_divisors(n: int) -> str:
    return ", ".join(map(str, _list_divisors(n)))


def _format_values(values: Sequence[int]) -> str:
    """Return `1, 2 or 4`, or `1 to 61` for many consecutive values."""
    if len(values) > 3 and values[-1] - values[0] == len(values) - 1:  # noqa: PLR2004 -- a list is as short
        return f"{values[0]} to {values[-1]}"
    return " or ".join(filter(None, (", ".join(map(str, values[:-1])), str(values[-1]))))
