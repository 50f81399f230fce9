"""A point: one layout × workload × load, as asked for. No torch."""

from __future__ import annotations

import msgspec

from dcpbench.errors import LayoutError
from dcpbench.points.layout import GroupWide, Layout
from dcpbench.points.names import CLOSED, LIVE, MIXED, NO_EXCHANGE, OPTIONS, PREFILLS, UNKNOWN, with_options

UNKNOWN_LAYOUT = "layout unknown"
SETTING = ", "
"""Stands between the settings of a point."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload `serve` is asked to serve, and how; docs/serving.md has a sentence for each option."""

    mode: str = LIVE
    """`live`, or `replay`: the same scheduler in virtual time, with step times that were measured before."""
    requests: int
    """How many are submitted."""
    arrival: str = CLOSED
    """`closed` (point.concurrency clients), `gamma` (request_rate and burstiness) or `trace` (the file's times)."""
    request_rate: float | None = None
    """Requests per second, on average."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less comes in bursts, more is regular."""
    input_tokens: str
    """Length of prompts: `4000`, `uniform:1000-7000` or `lognormal:4000:0.5` (median and sigma); `trace`."""
    output_tokens: str
    """Tokens sampled per request, likewise."""
    prefix_share: float | None = 0.0
    """Share of each prompt that it has in common with others of its group, at the beginning. Null, like `prefix_cache`
    and `seed`, where an import does not say."""
    prefix_groups: int = 1
    trace: str = ""
    """Name of the file of requests, without its folder."""
    trace_sha256: str = ""
    chunk: int
    """Prompt tokens that a step prefills at most, over the whole layout."""
    policy: str = MIXED
    prefix_cache: bool | None = True
    prefill: str = PREFILLS[0]
    """Attention of prompts: `sdpa` (torch) or `flashinfer` (ragged prefill)."""
    seed: int | None = 0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One layout × workload × load, as asked for."""

    model: str
    tp: int
    """0 where nobody knows the layout: of an import that does not say; dp and dcp likewise."""
    dp: int = 1
    dcp: int = 1
    workload: str = "decode"
    concurrency: int
    """Requests in flight over the whole layout; `serve`: at most."""
    context: int
    """Tokens already in the KV cache of each request; `serve`: the most tokens of a request, output included."""
    exchange: str = "none"
    """`ag_rs`, `a2a`, …; `auto` (see Record.choice); `none` where dcp is 1 and nothing is exchanged."""
    q_replicate: bool = False
    """Every rank computes the queries of all heads of its DCP group, and none are gathered."""
    project_first: bool = False
    """Partial outputs are projected to values before they are exchanged."""
    overlap: bool = False
    """The batch in two halves, one half's exchange beside the other half's attention."""
    all_reduce: str = "nccl"
    """How partial sums of tensor parallelism are reduced."""
    backend: str
    """The attention kernel; of an import the engine, which chose its own."""
    dtype: str
    page_size: int = 1
    interleave: int = 1
    weights: str = "synthetic"
    """`synthetic`, or the folder of a checkpoint."""
    repeat: int = 0
    """Which pass over the whole sweep this is, from 0."""
    load: Load | None = None
    """Null for `decode`."""
    settings: str = ""
    """Of an import: what its benchmark varied of the server or the load and no other field says, such as
    `max_num_seqs=4`; comma list."""

    @property
    def layout(self) -> Layout:
        """The point's layout. Raises LayoutError where degrees do not nest."""
        return Layout(tp=self.tp, dp=self.dp, dcp=self.dcp)

    @property
    def layout_name(self) -> str:
        """As printed; for degrees that do not nest, those that were asked for."""
        if not self.tp:
            return UNKNOWN_LAYOUT
        try:
            return str(self.layout)
        except LayoutError:
            return f"tp{self.tp}·dp{self.dp}·dcp{self.dcp}"

    @property
    def group_wide(self) -> GroupWide:
        """What each rank holds for all heads of its DCP group."""
        return GroupWide(query=self.q_replicate, value=self.project_first)

    @property
    def clients(self) -> int | None:
        """Of a closed loop, each with one request in flight; None where requests come whatever is answered."""
        return self.concurrency if self.load is not None and self.load.arrival == CLOSED else None

    def exchange_label(self) -> str:
        """The exchange with the options that are on: `a2a +q-replicate`; empty without one that is known."""
        if self.exchange in (NO_EXCHANGE, UNKNOWN):
            return ""
        return with_options(self.exchange, [name for name in OPTIONS if getattr(self, name)])

    def key(self) -> str:
        """Everything that makes this point itself; `--resume` and comparisons match on it.

        The same for a point for ever: what was added to points later is in it only where it says something.
        """
        names = (name for name in self.__struct_fields__ if name != "settings" or self.settings)
        return "/".join(f"{name}={getattr(self, name)}" for name in names)

    def same_but_repeat(self) -> str:
        """Key without the repeat, equal for all measurements of the same thing."""
        return msgspec.structs.replace(self, repeat=0).key()
