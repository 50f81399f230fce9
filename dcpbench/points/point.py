"""Define a point: one layout × workload × load, as requested. No torch."""

from __future__ import annotations

import functools
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import msgspec

from dcpbench.errors import LayoutError
from dcpbench.points import axes, names
from dcpbench.points.axes import Axis, Role
from dcpbench.points.bounds import Count, Number
from dcpbench.points.instances import Instances, count_gpus, parse_instances
from dcpbench.points.layout import GroupWide, Layout, find_ep_degree, format_layout_name
from dcpbench.points.speculation import make_speculation

if TYPE_CHECKING:
    from dcpbench.points.axes import Value
    from dcpbench.points.speculation import Speculation

ENGINE, PATH, EXCHANGE, LOAD, REPEAT, SERVER, DEPLOYED, ASSUMED = Role
UNKNOWN_LAYOUT = "layout unknown"
SETTING = ", "  # separator between the settings of a point


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe the requests of a file that a load sends."""

    sessions: Count = 0  # sessions that the requests are turns of; 0 if each request is independent
    span_s: Number | None = None  # time from the first to the last arrival in the file, in s; null without times
    prefix_share: Number | None = None
    """Share of prompt tokens that were in earlier prompts, which a prefix cache that forgets nothing has; null if unknown."""
    failures: Count = 0  # requests of the file without output tokens, which are not sent


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe what the workload `serve` has to serve, and how; docs/serving.md describes each option."""

    mode: Annotated[str, Axis(LOAD, 60, title="live or replay", values=names.MODES)] = names.LIVE
    """`live`, or `replay`: the same scheduler in virtual time, with previously measured step times."""
    requests: Annotated[Count, Axis(LOAD, 70, "{:,} requests")]  # number of requests submitted
    arrival: Annotated[str, Axis(LOAD, 51)] = names.CLOSED
    """`closed` (point.concurrency clients), `gamma` (request_rate and burstiness) or `trace` (the file's times)."""
    request_rate: Annotated[Number | None, Axis(LOAD, 52)] = None  # requests per second, on average
    burstiness: Annotated[Number, Axis(LOAD, 53, one=True)] = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less comes in bursts, more is regular."""
    paced: Annotated[bool | None, Axis(LOAD, 59)] = False
    """True if the drawn gaps of an open loop are scaled so that the last request comes at the time that the rate
    implies.

    Without scaling the sum is random: it varies by 9 % for 120 requests. Null for an import, which does not have it.
    """
    input_tokens: Annotated[str, Axis(LOAD, 54)]
    """Length of prompts: `4000`, `uniform:1000-7000` or `lognormal:4000:0.5` (median and sigma); `trace`."""
    output_tokens: Annotated[str, Axis(LOAD, 55)]
    """Number of tokens sampled per request, in the format of `input_tokens`."""
    prefix_share: Annotated[Number | None, Axis(LOAD, 56, one=True)] = 0.0
    """Share of each prompt, at its beginning, that is common to its group; null, like `prefix_cache` and `seed`, if an
    import lacks it.
    """
    prefix_groups: Annotated[Count, Axis(LOAD, 57, one=True)] = 1
    turns: Annotated[str, Axis(LOAD, 61, "{} turns", one=True)] = names.ONE_TURN
    """Number of requests of a session, in the format of lengths: each begins with the session's earlier prompts and
    answers.
    """
    turn_tokens: Annotated[str, Axis(LOAD, 62, "{} a turn", one=True)] = ""
    """Length of a client's additions from the second turn on; if empty, `input_tokens` applies to all turns."""
    think_time: Annotated[Number | str, Axis(LOAD, 63, "think {} s", one=True)] = 0.0
    """Seconds from an answer's last token to the next turn, or their distribution: `uniform:0.5-3`, `lognormal:1.2:0.8`."""
    system_tokens: Annotated[Count, Axis(LOAD, 64, "{:,} system tokens", one=True)] = 0
    """Tokens with which every session begins: the same system prompt and tools."""
    branch: Annotated[Number, Axis(LOAD, 65, "branch {:g}", one=True)] = 0.0
    """Probability with which a turn, from the third on, continues an earlier answer of its session than the last one."""
    subagents: Annotated[Count, Axis(LOAD, 66, "{} sub-agents", one=True)] = 0
    """Number of requests that continue each turn but the last of a session at the same time, before the next turn."""
    trace: Annotated[str, Axis(LOAD, 58)] = ""  # name of the file of requests, without its folder
    trace_sha256: Annotated[str, Axis(LOAD, 76, "file {:.8}")] = ""
    trace_reading: Annotated[str, Axis(LOAD, 77, "read as {}")] = ""
    """How that file was read, given or found by its columns: `format=mooncake,time-unit=ms,block-size=512`."""
    trace_facts: TraceFacts | None = None  # facts of the requests in the file; null without a file
    chunk: Annotated[Count, Axis(LOAD, 71, "chunk {:,}")]
    """Maximum number of prompt tokens that a step prefills, over the whole layout."""
    policy: Annotated[str, Axis(LOAD, 72, "{}", values=names.POLICIES, one=True)] = names.MIXED
    prefix_cache: Annotated[bool | None, Axis(LOAD, 73, "prefix cache {}", one=True)] = True
    prefill: Annotated[str, Axis(PATH, 74, "{} prefill", values=names.PREFILLS, one=True)] = names.PREFILLS[0]
    """Attention of prompts: `sdpa` (torch) or `flashinfer` (ragged prefill)."""
    seed: Annotated[Count | None, Axis(LOAD, 75, "seed {}", one=True)] = 0

    @property
    def sessions(self) -> bool:
        """Return True if requests are turns of sessions."""
        return self.turns != names.ONE_TURN or (self.trace_facts is not None and self.trace_facts.sessions > 0)


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe one layout × workload × load, as requested."""

    model: Annotated[str, Axis(ENGINE, 1, title="model")]
    tp: Annotated[Count, Axis(ENGINE, 2)]
    """Number of ranks; 0 if the layout is unknown, as for an import without it. The same holds for dp and dcp."""
    dp: Annotated[Count, Axis(ENGINE, 3)] = 1
    dcp: Annotated[Count, Axis(ENGINE, 4)] = 1
    workload: Annotated[str, Axis(LOAD, 5, "{}", title="workload")] = "decode"
    ep: Annotated[str, Axis(ENGINE | PATH, 6, "ep{}", title="experts (ep)")] = names.WHOLE
    """`1`: tensor-parallel experts, split by width over the tp ranks. `tp`: expert parallel. Of an import the
    expert parallel degree, or unknown."""
    concurrency: Annotated[Count, Axis(LOAD, 40, title="concurrency")]
    """Number of requests in flight over the whole layout; for `serve` the maximum."""
    context: Annotated[Count, Axis(LOAD, 41, title="context")]
    """Tokens already in the KV cache of each request; for `serve` the maximum number of tokens of a request, output
    included.
    """
    exchange: Annotated[
        str, Axis(PATH | EXCHANGE, 11, "{}", title="exchange", values=(*names.EXCHANGES, names.AUTO))
    ] = names.NO_EXCHANGE
    """`ag_rs`, `a2a`, …; `auto` (see Record.choice); `none` where dcp is 1 and nothing is exchanged."""
    q_replicate: Annotated[bool, Axis(ENGINE | PATH | EXCHANGE, 12, "+q-replicate")] = False
    """True if every rank computes the queries of all heads of its DCP group, so that none are gathered."""
    project_first: Annotated[bool, Axis(ENGINE | PATH | EXCHANGE, 13, "+project-first")] = False
    """Partial outputs are projected to values before they are exchanged."""
    all_reduce: Annotated[str, Axis(PATH, 24, "{} all-reduce", values=names.ALL_REDUCES)] = names.ALL_REDUCES[0]
    """Method that reduces partial sums of tensor parallelism."""
    backend: Annotated[str, Axis(PATH, 10, "{}", values=(*names.BACKENDS, names.AUTO))]
    """The attention kernel; of an import the engine, which chose its own."""
    dtype: Annotated[str, Axis(ENGINE, 21, "{}", values=names.DTYPES, one=True)]
    """Precision of the computation: of activations, norms, the router, the embedding and the head, and of all that is
    not fp8.
    """
    weights_dtype: Annotated[str, Axis(ENGINE | PATH, 26, "{} weights")] = names.AS_COMPUTED
    """`fp8`: linear layers and experts as DeepSeek-V3's checkpoint has them; see `weights_precision`."""
    kv_dtype: Annotated[str, Axis(ENGINE | PATH, 27, "{} KV")] = names.AS_COMPUTED
    """`fp8`: the KV cache; see `kv_precision`."""
    routing: Annotated[str, Axis(LOAD | PATH, 29, "{} routing", title="routing", path=True)] = ""
    """Distribution of the experts that tokens take (points/expert_distribution.py): `zipf:1`, or a file with its hash; empty: the router's own."""
    emulate: Annotated[str, Axis(ENGINE | PATH, 28, "emulated on {}", path=True)] = ""
    """Machine for which calls between ranks are modelled (points/cluster_specs.py) if only one rank runs; empty if all ranks
    run.
    """
    mtp: Annotated[Count, Axis(ENGINE | PATH, 14, "mtp{}", title="draft tokens (mtp)")] = 0
    """Drafts of a request that a step verifies; the step has mtp + 1 query rows of each request."""
    acceptance: Annotated[str, Axis(ASSUMED, 15, "acceptance {}")] = ""
    """Probability that each draft is accepted if those before it were (points/speculation.py), such as `0.85/0.6/0.4`; empty if not stated."""
    page_size: Annotated[Count, Axis(ENGINE, 22, "page {}", one=True)] = 1
    interleave: Annotated[Count, Axis(ENGINE, 23, "interleave {}", one=True)] = 1
    weights: Annotated[str, Axis(ENGINE, 25, "weights {}", one=True)] = names.SYNTHETIC
    """`synthetic`, or the folder of a checkpoint."""
    repeat: Annotated[Count, Axis(REPEAT, 0)] = 0  # index of the pass over the complete sweep, from 0
    load: Load | None = None  # null for `decode`
    settings: Annotated[str, Axis(SERVER, 30, "{}", title="server settings")] = ""
    """Parameters of an imported server or load that no other field has, such as `max_num_seqs=4`; comma-separated."""

    disaggregate: Annotated[str, Axis(DEPLOYED, 31)] = ""
    """`1:2`: instances of the layout, each on tp GPUs of its own, of which one only prefills and two only decode. `3`: as
    many that do both. Empty: one that does both."""
    transfer_gb_s: Annotated[Number, Axis(DEPLOYED, 32, "{:g} GB/s links")] = 0.0
    """10⁹ bytes a second at which a GPU of an instance that prefills sends KV to one that decodes; 0 where nothing is sent."""
    transfer_ms: Annotated[Number, Axis(DEPLOYED, 33, "{:g} ms a transfer")] = 0.0
    """Additional time of each request's transfer, in ms."""
    pp: Annotated[Count, Axis(SERVER, 34)] = 1
    """Pipeline stages, each with `tp` · `pcp` GPUs of its own: of an import, or planned."""
    pcp: Annotated[Count, Axis(SERVER, 35)] = 1
    """Prefill context parallel degree: groups of `tp` GPUs, of an import or planned. SGLang's lie inside tp and count as 1."""
    prefill_gpus: Annotated[Count, Axis(SERVER, 36, "{} GPUs per prefill instance")] = 0
    """GPUs of each prefill instance of an imported server if they have another layout than the decode instances, else 0."""

    @property
    def layout(self) -> Layout:
        """Return the point's layout; raise LayoutError if degrees do not divide each other."""
        return Layout(tp=self.tp, dp=self.dp, dcp=self.dcp, pp=self.pp, pcp=self.pcp)

    @property
    def instances(self) -> Instances:
        """Return the instances that serve the point; raise UsageError if `disaggregate` describes none."""
        return parse_instances(self.disaggregate)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all instances; 0 if the layout is unknown."""
        return count_gpus(self.tp * self.pp * self.pcp, self.disaggregate, self.prefill_gpus)

    @property
    def world(self) -> int:
        """Return the number of ranks that run: all of an instance, or the one that represents them."""
        return 1 if self.emulate else self.tp

    @property
    def weights_precision(self) -> str:
        """Return the precision of linear layers and experts: `fp8`, or the dtype of the computation."""
        return self.weights_dtype or self.dtype

    @property
    def kv_precision(self) -> str:
        """Return the precision of the KV cache: `fp8`, or the dtype of the computation."""
        return self.kv_dtype or self.dtype

    @property
    def precision(self) -> str:
        """Return the precision of weights and KV, as printed: `bf16`; `fp8 weights, bf16 KV`; `fp8 weights and KV`.

        For an import only what is known: `fp8 weights`; `computed in bf16`, if weights may be smaller.
        """
        weights, kv = self.weights_precision, self.kv_precision
        if weights != kv:
            stored = ((weights, "weights"), (kv, "KV"))
            return ", ".join(f"{precision} {of}" for precision, of in stored if precision != names.UNKNOWN)
        if weights == names.UNKNOWN:
            return f"computed in {self.dtype}" if self.dtype != names.UNKNOWN else names.UNKNOWN
        return weights if weights == self.dtype else f"{weights} weights and KV"

    @property
    def model_label(self) -> str:
        """Return the model's name, or the name of its folder without the path."""
        if not self.model.startswith(("/", ".", "~")):
            return self.model
        path = PurePath(self.model)
        return (path.parent if path.name == "config.json" else path).name or self.model

    @property
    def layout_name(self) -> str:
        """Return the layout's name as printed, with the instances if there are several: `tp4·dcp4 1P2D`."""
        return f"{self.instance_name} {self.instances.label}" if self.disaggregate else self.instance_name

    @property
    def instance_name(self) -> str:
        """Return the layout of one instance, or of a decode instance if prefill instances have another one.

        With dp > 1 it ends with the expert parallel degree, if that is known: `tp4`, `tp4·pp2`, `tp4·dp4·ep1`, `tp4·dp4·ep4`.
        For degrees that do not divide each other it names the degrees that were given.
        """
        return format_layout_name(self.degrees_name, self.dp, self.ep_degree) if self.tp else UNKNOWN_LAYOUT

    @property
    def degrees_name(self) -> str:
        """Return `instance_name` without the expert parallel degree."""
        if not self.tp:
            return UNKNOWN_LAYOUT
        try:
            return str(self.layout)
        except LayoutError:
            outer = "".join(f"·{name}{degree}" for name, degree in (("pp", self.pp), ("pcp", self.pcp)) if degree > 1)
            return f"tp{self.tp}·dp{self.dp}·dcp{self.dcp}{outer}"

    @property
    def ep_degree(self) -> int | None:
        """Return the expert parallel degree: 1 for tensor-parallel experts, None if it is unknown."""
        return find_ep_degree(self.ep, self.tp * self.pcp)

    @property
    def ep_label(self) -> str:
        """Return `ep8` for expert parallel without attention data parallel; with it the layout's name has the degree."""
        return f"ep{self.ep_degree}" if self.dp <= 1 and self.ep_degree not in (None, 1) else ""

    @property
    def group_wide(self) -> GroupWide:
        """Return the projections that each rank holds for all heads of its DCP group."""
        return GroupWide(query=self.q_replicate, value=self.project_first)

    @property
    def speculation(self) -> Speculation | None:
        """Return the drafts of a step and their acceptance; None for steps of one token."""
        return make_speculation(self.mtp, self.acceptance)

    @property
    def tokens_per_step(self) -> float:
        """Return the expected tokens of a request and step by the stated acceptance; 1 for steps of one token."""
        found = self.speculation
        return 1.0 if found is None else found.expected_tokens or 1.0

    @property
    def clients(self) -> int | None:
        """Return the number of clients of a closed loop, each with one request in flight; None for open loops."""
        return self.concurrency if self.load is not None and self.load.arrival == names.CLOSED else None

    @property
    def max_requests(self) -> int:
        """Return the maximum number of requests in flight: in a closed loop those of the sub-agents of each client."""
        load = self.load
        return self.concurrency * max(load.subagents if load is not None and load.arrival == names.CLOSED else 0, 1)

    def format_exchange_label(self) -> str:
        """Return the exchange with the options that are on: `a2a +q-replicate`; empty if no exchange is known."""
        return " ".join(self.format_changed_fields(EXCHANGE))

    def get_values(self, role: Role, but: Role = axes.NOTHING) -> dict[str, Value]:
        """Return the values of all fields with such a role, in order; those of the load follow the point's own."""
        found = {axis.name: getattr(self, axis.name) for axis in select_point_axes(role, but)}
        load = select_load_axes(role, but) if self.load else ()
        return found | {axis.name: getattr(self.load, axis.name) for axis in load}

    def format_changed_fields(self, role: Role, but: Role = axes.NOTHING) -> list[str]:
        """Return the point's own fields with such a role that differ from their defaults; `ep` is compared with its
        layout's default.
        """
        overrides = {"ep": str(self.ep_degree) if self.ep_label else names.WHOLE}
        return axes.format_changed_values(select_point_axes(role, but), msgspec.structs.asdict(self) | overrides)

    def get_key(self) -> str:
        """Return the identity of this point, which `--resume` and comparisons match."""
        return "/".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__)

    def get_key_without_repeat(self) -> str:
        """Return the key without the repeat, equal for all measurements of the same thing."""
        return (msgspec.structs.replace(self, repeat=0) if self.repeat else self).get_key()


AXES, LOAD_AXES = axes.read_axes(Point), axes.read_axes(Load)
"""Fields of a point except its load, and fields of a load, in the order of lists."""


@functools.cache
def select_point_axes(role: Role, but: Role = axes.NOTHING) -> tuple[Axis, ...]:
    """Return the axes of a point's own fields that have any of `role`, and nothing of `but`."""
    return axes.select_axes(AXES, role, but)


@functools.cache
def select_load_axes(role: Role, but: Role = axes.NOTHING) -> tuple[Axis, ...]:
    """Return the axes of a load's fields that have any of `role`, and nothing of `but`."""
    return axes.select_axes(LOAD_AXES, role, but)


HOW = tuple(axis for axis in select_point_axes(ENGINE | PATH) if axis.label)
"""Fields for how a point is computed, besides its model and layout: options of `sweep` with these names."""
OPTIONS = tuple(axis.name for axis in select_point_axes(EXCHANGE) if axis.kind is bool)
"""Names of the switches of an exchange."""
