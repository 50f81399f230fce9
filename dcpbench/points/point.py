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
from dcpbench.points.layout import Layout, QueryReplication, find_ep_degree, format_layout_name
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
    prefix_share: Number | None = None  # share of prompt tokens an unbounded prefix cache would have; null: unknown
    failures: Count = 0  # requests of the file without output tokens, which are not sent


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe what the workload `serve` has to serve, and how; docs/serving.md describes each option."""

    mode: Annotated[  # `live`, or `replay`: the same scheduler in virtual time, with step times measured before
        str, Axis(LOAD, 60, title="live or replay", values=names.MODES)
    ] = names.LIVE
    requests: Annotated[Count, Axis(LOAD, 70, "{:,} requests")]  # number of requests submitted
    arrival: Annotated[  # `closed` (concurrency), `gamma` (request_rate, burstiness) or `trace` (times of the file)
        str, Axis(LOAD, 51)
    ] = names.CLOSED
    request_rate: Annotated[Number | None, Axis(LOAD, 52)] = None  # requests per second, on average
    burstiness: Annotated[Number, Axis(LOAD, 53, one=True)] = 1.0  # shape of gamma gaps: 1 is Poisson, less is bursty
    paced: Annotated[bool | None, Axis(LOAD, 59)] = False
    """True if the drawn gaps of an open loop are scaled so that the last request comes at the time that the rate
    implies.

    Without scaling the sum is random: it varies by 9 % for 120 requests. Null for an import, which does not have it.
    """
    input_tokens: Annotated[  # `4000`, `uniform:1000-7000`, `lognormal:4000:0.5` (median, sigma) or `trace`
        str, Axis(LOAD, 54)
    ]
    output_tokens: Annotated[str, Axis(LOAD, 55)]  # tokens sampled per request, as `input_tokens`
    prefix_share: Annotated[Number | None, Axis(LOAD, 56, one=True)] = 0.0
    """Share of each prompt, at its beginning, that is common to its group; null, like `prefix_cache` and `seed`, if an
    import lacks it.
    """
    prefix_groups: Annotated[Count, Axis(LOAD, 57, one=True)] = 1
    turns: Annotated[  # requests of a session, in the format of lengths: each continues the prompts and answers before
        str, Axis(LOAD, 61, "{} turns", one=True)
    ] = names.ONE_TURN
    turn_tokens: Annotated[  # length of a client's additions from the second turn on; if empty, `input_tokens` applies
        str, Axis(LOAD, 62, "{} a turn", one=True)
    ] = ""
    think_time: Annotated[  # seconds from an answer to the next turn: `2`, `uniform:0.5-3` or `lognormal:1.2:0.8`
        Number | str, Axis(LOAD, 63, "think {} s", one=True)
    ] = 0.0
    system_tokens: Annotated[Count, Axis(LOAD, 64, "{:,} system tokens", one=True)] = 0  # common start of all sessions
    branch: Annotated[  # probability with which a turn, from the third on, continues an earlier answer than the last
        Number, Axis(LOAD, 65, "branch {:g}", one=True)
    ] = 0.0
    subagents: Annotated[  # concurrent requests after each turn except the last; the next turn waits for them
        Count, Axis(LOAD, 66, "{} sub-agents", one=True)
    ] = 0
    trace: Annotated[str, Axis(LOAD, 58)] = ""  # name of the file of requests, without its folder
    trace_sha256: Annotated[str, Axis(LOAD, 76, "file {:.8}")] = ""
    trace_reading: Annotated[  # how that file was read: `format=mooncake,time-unit=ms,block-size=512`
        str, Axis(LOAD, 77, "read as {}")
    ] = ""
    trace_facts: TraceFacts | None = None  # facts of the requests in the file; null without a file
    chunk: Annotated[Count, Axis(LOAD, 71, "chunk {:,}")]  # maximum prompt tokens per step, over the whole layout
    policy: Annotated[str, Axis(LOAD, 72, "{}", values=names.POLICIES, one=True)] = names.MIXED
    prefix_cache: Annotated[bool | None, Axis(LOAD, 73, "prefix cache {}", one=True)] = True
    prefill: Annotated[  # attention of prompts: `sdpa` (torch) or `flashinfer` (ragged prefill)
        str, Axis(PATH, 74, "{} prefill", values=names.PREFILLS, one=True)
    ] = names.PREFILLS[0]
    seed: Annotated[Count | None, Axis(LOAD, 75, "seed {}", one=True)] = 0

    @property
    def sessions(self) -> bool:
        """Return True if requests are turns of sessions."""
        return self.turns != names.ONE_TURN or (self.trace_facts is not None and self.trace_facts.sessions > 0)


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe one layout × workload × load, as requested."""

    model: Annotated[str, Axis(ENGINE, 1, title="model")]
    tp: Annotated[Count, Axis(ENGINE, 2)]  # ranks; 0, like dp and dcp, if an import lacks the layout
    dp: Annotated[Count, Axis(ENGINE, 3)] = 1
    dcp: Annotated[Count, Axis(ENGINE, 4)] = 1
    workload: Annotated[str, Axis(LOAD, 5, "{}", title="workload")] = "decode"
    ep: Annotated[  # `1`: tensor-parallel experts, split by width; `tp`: expert parallel; an import's degree or unknown
        str, Axis(ENGINE | PATH, 6, "ep{}", title="experts (ep)")
    ] = names.MOE_EP
    concurrency: Annotated[Count, Axis(LOAD, 40, title="concurrency")]  # requests in flight, whole layout; `serve`: max
    context: Annotated[  # tokens in the KV cache of each request; `serve`: maximum tokens of a request, output included
        Count, Axis(LOAD, 41, title="context")
    ]
    exchange: Annotated[  # `ag_rs`, `a2a`, …; `auto` (see Record.choice); `none` without an exchange (dcp 1)
        str, Axis(PATH | EXCHANGE, 11, "{}", title="exchange", values=(*names.EXCHANGES, names.AUTO))
    ] = names.NO_EXCHANGE
    q_replicate: Annotated[  # True if every rank computes the queries of all heads of its DCP group: no gather
        bool, Axis(ENGINE | PATH | EXCHANGE, 12, "+q-replicate")
    ] = False
    project_first: Annotated[  # True if partial outputs are projected to values before they are exchanged
        bool, Axis(ENGINE | PATH | EXCHANGE, 13, "+project-first")
    ] = False
    all_reduce: Annotated[  # method that reduces partial sums of tensor parallelism
        str, Axis(PATH, 24, "{} all-reduce", values=names.ALL_REDUCES)
    ] = names.ALL_REDUCES[0]
    backend: Annotated[  # attention kernel; of an import its engine, which chose a kernel itself
        str, Axis(PATH, 10, "{}", values=(*names.BACKENDS, names.AUTO))
    ]
    dtype: Annotated[  # precision of activations, norms, router, embedding, head and all else that is not fp8
        str, Axis(ENGINE, 21, "{}", values=names.DTYPES, one=True)
    ]
    weights_dtype: Annotated[  # `fp8`: linear layers, experts as in DeepSeek-V3's checkpoint; see `weights_precision`
        str, Axis(ENGINE | PATH, 26, "{} weights")
    ] = names.AS_COMPUTED
    kv_dtype: Annotated[  # `fp8`: the KV cache; see `kv_precision`
        str, Axis(ENGINE | PATH, 27, "{} KV")
    ] = names.AS_COMPUTED
    routing: Annotated[  # experts that tokens take: `zipf:1`, or a file with its hash; empty: the router's choice
        str, Axis(LOAD | PATH, 29, "{} routing", title="routing", path=True)
    ] = ""
    emulate: Annotated[  # machine with modelled calls between ranks (cluster_specs.py) if one rank runs; else empty
        str, Axis(ENGINE | PATH, 28, "emulated on {}", path=True)
    ] = ""
    mtp: Annotated[  # drafts of a request that a step verifies, with mtp + 1 query rows of each request
        Count, Axis(ENGINE | PATH, 14, "mtp{}", title="draft tokens (mtp)")
    ] = 0
    acceptance: Annotated[  # probability of each draft after accepted ones, as `0.85/0.6/0.4`; empty: not stated
        str, Axis(ASSUMED, 15, "acceptance {}")
    ] = ""
    page_size: Annotated[Count, Axis(ENGINE, 22, "page {}", one=True)] = 1
    interleave: Annotated[  # consecutive tokens that one dcp rank stores
        Count, Axis(ENGINE | EXCHANGE, 23, "interleave {}", one=True)
    ] = 1
    weights: Annotated[str, Axis(ENGINE, 25, "weights {}", one=True)] = names.SYNTHETIC  # or the folder of a checkpoint
    repeat: Annotated[Count, Axis(REPEAT, 0)] = 0  # index of the pass over the complete sweep, from 0
    load: Load | None = None  # null for `decode`
    settings: Annotated[  # parameters of an imported server or load without a field: `max_num_seqs=4`; comma-separated
        str, Axis(SERVER, 30, "{}", title="server settings")
    ] = ""

    disaggregate: Annotated[str, Axis(DEPLOYED, 31)] = ""  # `1:2`: one prefills, two decode; `3`: all do both; or empty
    transfer_gb_s: Annotated[  # 10⁹ bytes/s at which a prefill GPU sends KV to decode instances; 0: nothing is sent
        Number, Axis(DEPLOYED, 32, "{:g} GB/s links")
    ] = 0.0
    transfer_ms: Annotated[  # additional time of each request's transfer, in ms
        Number, Axis(DEPLOYED, 33, "{:g} ms a transfer")
    ] = 0.0
    pp: Annotated[Count, Axis(SERVER, 34)] = 1  # pipeline stages of an import or plan, each with `tp` · `pcp` GPUs
    pcp: Annotated[Count, Axis(SERVER, 35)] = 1  # groups of `tp` GPUs; 1 for SGLang's, which lie inside tp
    prefill_gpus: Annotated[  # GPUs of an imported prefill instance with another layout than decode instances; else 0
        Count, Axis(SERVER, 36, "{} GPUs per prefill instance")
    ] = 0

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
    def query_replication(self) -> QueryReplication:
        """Return the projections that each rank holds for all heads of its DCP group."""
        return QueryReplication(query=self.q_replicate, value=self.project_first)

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

    @property
    def replayed(self) -> bool:
        """Return True if its requests are replayed in virtual time instead of served."""
        return self.load is not None and self.load.mode == names.REPLAY

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
        overrides = {"ep": str(self.ep_degree) if self.ep_label else names.MOE_EP}
        return axes.format_changed_values(select_point_axes(role, but), msgspec.structs.asdict(self) | overrides)

    def get_key(self) -> str:
        """Return the identity of this point, which `--resume` and comparisons match."""
        return "/".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__)

    def get_key_without_repeat(self) -> str:
        """Return the key without the repeat, equal for all measurements of the same thing."""
        return (msgspec.structs.replace(self, repeat=0) if self.repeat else self).get_key()


AXES, LOAD_AXES = axes.read_axes(Point), axes.read_axes(Load)  # fields of a point without its load; fields of a load


@functools.cache
def select_point_axes(role: Role, but: Role = axes.NOTHING) -> tuple[Axis, ...]:
    """Return the axes of a point's own fields that have any of `role`, and nothing of `but`."""
    return axes.select_axes(AXES, role, but)


@functools.cache
def select_load_axes(role: Role, but: Role = axes.NOTHING) -> tuple[Axis, ...]:
    """Return the axes of a load's fields that have any of `role`, and nothing of `but`."""
    return axes.select_axes(LOAD_AXES, role, but)


HOW = tuple(axis for axis in select_point_axes(ENGINE | PATH) if axis.label)  # how points are computed
OPTIONS = tuple(axis.name for axis in select_point_axes(EXCHANGE) if axis.kind is bool)  # switches of an exchange
