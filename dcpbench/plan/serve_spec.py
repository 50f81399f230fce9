"""Convert the options of `serve`, from the command line and a file, to loads for points. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dcpbench.errors import UnusedOptionsError, UsageError
from dcpbench.plan import option_parsers as read
from dcpbench.plan.option_parsers import check_known, check_positive, check_seconds
from dcpbench.plan.spec import PARSERS, SPEC_PARSERS, PointLoad, build_spec, get_defaults
from dcpbench.plan.used_options import list_changed_options
from dcpbench.points.batches import CHUNK, CPU_CHUNK, GRAPH_BATCHES
from dcpbench.points.instances import parse_instances
from dcpbench.points.names import (
    CLOSED,
    COMPUTED,
    ENGINE_POLICIES,
    GAMMA,
    LIVE,
    MIXED,
    ONE_TURN,
    PREFILLS,
    REPLAY,
    TRACE,
    format_flag,
    format_setting,
)
from dcpbench.points.pipeline import check_micro_batches
from dcpbench.points.point import LOAD_AXES, Load
from dcpbench.records.stats import OBJECTIVE, compute_min_samples, find_highest_percentile
from dcpbench.serving.load_words import (
    ANSWERS,
    CPU_ANSWERS,
    CPU_PROMPTS,
    FIXED,
    MAX_TOKENS,
    PRESETS,
    PROMPTS,
    TRACE_LENGTHS,
    USUAL_CLIENTS,
    USUAL_REQUESTS,
    parse_delays,
    parse_lengths,
    parse_slo,
)
from dcpbench.serving.loads import compute_extent, count_sessions
from dcpbench.serving.request_files import check_reading, read_requests
from dcpbench.serving.trace_formats import Reading
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from dcpbench.models.shapes import ModelShape
    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.axes import Value
    from dcpbench.points.device_probe import Probe
    from dcpbench.serving.request_files import Trace

OTHERS = ("context", "seconds")  # options that only `sweep` has
SHARED_AXES = [axis for axis in LOAD_AXES if axis.one]  # equal for all loads of a run; options with the same names
MAX_REQUESTS = 10_000_000  # maximum generated requests: their prompts of 100 tokens each are 4 GB on each rank
OF_TOKENS = ("itl", "tpot")  # objectives that an answer of one token does not have
MAX_TURNS = 10_000
MAX_SUBAGENTS = 1_000
MIN_GB_S, MAX_GB_S, MAX_TRANSFER_MS = 1e-3, 1e6, 60_000
MIN_BURSTINESS = 1e-3  # gaps are then 32 times as uneven as Poisson's; below, floating point leaves only gaps of 0


def check_request_count(count: int) -> None:
    """Raise UsageError for more requests than can be generated."""
    if count > MAX_REQUESTS:
        raise UsageError(
            f"--num-requests {count} is more than {MAX_REQUESTS:,}, which would not fit in memory; lower it."
        )


def check_rates(rates: Iterable[float]) -> None:
    """Raise UsageError for a number of requests per second that is not positive."""
    for rate in rates:
        if not rate > 0:
            raise UsageError(
                f"--request-rate {rate:g} is not a positive number of requests per second; try --request-rate 2, or "
                "--request-rate inf for all requests at once."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeLoads:
    """Describe the loads to send: every combination of concurrency or rate, prompts and answers.
    See docs/serving.md.
    """

    concurrency: tuple[int, ...] = ()  # clients; empty: not given, open loops have as many requests as fit a layout
    request_rate: tuple[float, ...] = ()
    burstiness: float = 1.0
    num_requests: int
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    prefix_share: float = 0.0
    prefix_groups: int = 1
    turns: str = ONE_TURN
    turn_tokens: str = ""
    think_time: float | str = 0.0
    system_tokens: int = 0
    branch: float = 0.0
    subagents: int = 0
    policy: str = MIXED
    chunk: tuple[int, ...]
    prefix_cache: bool = True
    prefill: str = PREFILLS[0]
    mode: tuple[str, ...] = (LIVE,)
    disaggregate: tuple[str, ...] = ("",)
    transfer_gb_s: tuple[float, ...] = ()  # rates of transfers in GB/s; empty if nothing is sent
    transfer_ms: float = 0.0
    seed: int = 0
    trace: Trace | None = None
    limit: int | None = None  # maximum number of requests of a file

    def __post_init__(self) -> None:
        for name in ("num_requests", "prefix_groups"):
            check_positive(name, getattr(self, name))
        for value in self.chunk:
            check_positive("chunk", value)
        check_request_count(self.num_requests)
        for value in self.concurrency:
            check_positive("concurrency", value)
        for axis in (axis for axis in LOAD_AXES if axis.values):
            value = getattr(self, axis.name)
            for name in (value,) if axis.one else value:
                check_known(axis.name, name, axis.values)
        if self.seed < 0:
            raise UsageError(f"--requests seed={self.seed} is negative; write seed=0 or more.")
        self._check_arrivals()
        self._check_prefixes()
        self._check_sessions()
        self._check_transfers()
        self._check_policy()

    def _check_policy(self) -> None:
        """Raise UsageError for the policy of another engine in a live run, or with instances that only prefill."""
        if self.policy not in ENGINE_POLICIES:
            return
        if LIVE in self.mode:
            raise UsageError(
                f"--prefill policy={self.policy}: only replays follow the policies of other engines; add --mode replay, or use policy="
                f"{MIXED}."
            )
        if any(parse_instances(text).disaggregated for text in self.disaggregate):
            raise UsageError(
                f"--prefill policy={self.policy} has no instances that only prefill; leave out --disaggregate, or use policy={MIXED}."
            )

    def _check_arrivals(self) -> None:
        check_rates(self.request_rate)
        if not MIN_BURSTINESS <= self.burstiness < math.inf:
            raise UsageError(
                f"--burstiness {self.burstiness:g} is no number from {MIN_BURSTINESS:g} on; write 1 for Poisson arrivals, a smaller "
                "number for bursts, or a larger one for even gaps."
            )
        if self.burstiness != 1 and self.request_rate == (math.inf,):
            raise UnusedOptionsError(
                "--burstiness shapes gaps, and --request-rate inf has none; leave --burstiness out.", ["--burstiness"]
            )
        if self.burstiness != 1 and not self.request_rate:
            raise UnusedOptionsError(
                "--burstiness shapes --request-rate, which was not given; add for example --request-rate 2.",
                ["--burstiness"],
            )

    def _check_prefixes(self) -> None:
        if not 0 <= self.prefix_share < 1:
            raise UsageError(
                f"--prefix-share {self.prefix_share:g} is not a share of a prompt; write for example --prefix-share "
                "0.5, less than 1."
            )
        if self.prefix_groups > 1 and not self.prefix_share:
            raise UnusedOptionsError(
                "--prefix-share groups without a share have no common prefix; add for example share=0.5.",
                ["--prefix-share groups"],
            )
        if self.trace:
            self._check_trace(self.trace)

    def _check_sessions(self) -> None:
        parse_delays("--sessions think", self.think_time)
        if not 0 <= self.branch <= 1:
            raise UsageError(f"--sessions branch={self.branch:g}: not a probability; write for example branch=0.1.")
        if not 0 <= self.system_tokens <= MAX_TOKENS:
            raise UsageError(
                f"--sessions system={self.system_tokens}: not 0 to {MAX_TOKENS:,} tokens; write for example system=8000."
            )
        if not 0 <= self.subagents <= MAX_SUBAGENTS:
            raise UsageError(
                f"--sessions subagents={self.subagents}: not 0 to {MAX_SUBAGENTS:,} requests; write for example subagents=4."
            )
        if self.subagents and self.branch:
            raise UsageError("--sessions subagents and branch are for different sessions; leave one of them out.")
        if self.turns == ONE_TURN:
            for name in ("turn_tokens", "think_time", "system_tokens", "branch", "subagents"):
                if getattr(self, name):
                    raise UnusedOptionsError(
                        f"{format_flag(name)} without turns: no request has a next turn; add for example turns=4.",
                        [format_flag(name)],
                    )
        elif self.trace:
            raise UsageError(
                f"--sessions and --requests {self.trace.path} contradict each other, as the file defines the requests; leave --sessions out."
            )
        elif compute_max_turns(self.turns) > MAX_TURNS:
            raise UsageError(f"--sessions turns={self.turns}: a session has at most {MAX_TURNS:,} turns; try turns=4.")

    def _check_transfers(self) -> None:
        """Raise UsageError if the rate at which KV is sent is missing, or given although nothing is sent."""
        split = [text for text in self.disaggregate if parse_instances(text).disaggregated]
        if split and not self.transfer_gb_s:
            raise UsageError(
                f"--disaggregate {split[0]} needs the rate at which a GPU sends KV: for example, add gb-s=50 for a link "
                "of 400 Gb/s for each GPU; `dcpbench machines` lists links."
            )
        for name, values in (("transfer_gb_s", self.transfer_gb_s), ("transfer_ms", (self.transfer_ms,))):
            if not split and any(values):
                raise UnusedOptionsError(
                    f"{format_flag(name)} without instances that prefill for others: no KV is sent; add for example --disaggregate 1:1.",
                    [format_flag(name)],
                )
        for rate in self.transfer_gb_s:
            if not MIN_GB_S <= rate <= MAX_GB_S:
                raise UsageError(
                    f"--disaggregate gb-s={rate:g}: not {MIN_GB_S:g} to {MAX_GB_S:,.0f} GB/s; 400 Gb/s are gb-s=50."
                )
        if not 0 <= self.transfer_ms <= MAX_TRANSFER_MS:
            raise UsageError(
                f"--disaggregate ms={self.transfer_ms:g}: not 0 to {MAX_TRANSFER_MS:,} ms; write for example ms=2."
            )

    def _check_trace(self, trace: Trace) -> None:
        if trace.has_groups and not trace.supports_prefix_share:
            raise UsageError(
                f"{trace.path} has prefix_group in some requests, and prompt or hash_ids in others; use a file with one of them."
            )
        if self.prefix_share and not trace.supports_prefix_share:
            raise UsageError(f"{trace.path} states what its prompts share; leave --prefix-share out.")
        if trace.has_groups and not self.prefix_share:
            raise UsageError(
                f"{trace.path} has prefix_group; add the share of a prompt that its group has in common, for example --prefix-share 0.5."
            )

    @property
    def count(self) -> int:
        """Return the maximum number of requests that are sent."""
        count = self.num_requests if self.trace is None else len(self.trace.rows)
        return min(count, self.limit or count)

    def make_loads(self, dp: int, shape: ModelShape) -> list[PointLoad]:
        """Return the loads of a model's points in `dp` replicas, in the given order."""
        if self.trace and self.trace.largest_id >= shape.vocab:
            raise UsageError(
                f"{self.trace.path} has token id {self.trace.largest_id}, and {shape.name} has {shape.vocab:,} of them."
            )
        found = []
        for concurrency, load in self.iter_loads():
            max_concurrency = concurrency or min(GRAPH_BATCHES[-1] * dp, load.requests)
            served = compute_extent(load, str(self.trace.path) if self.trace else "").find_longest_served(
                shape.max_position
            )
            found += [PointLoad(max_concurrency, served, load, deployed) for deployed in self._iter_deployments()]
        return found

    def _iter_deployments(self) -> Iterator[dict[str, Value]]:
        """Yield the instances, and how KV is sent between them if it is."""
        for text in self.disaggregate:
            if not parse_instances(text).disaggregated:
                yield {"disaggregate": text}
                continue
            for rate in self.transfer_gb_s:
                yield {"disaggregate": text, "transfer_gb_s": rate, "transfer_ms": self.transfer_ms}

    def iter_loads(self) -> Iterator[tuple[int | None, Load]]:
        """Yield (concurrency, load); concurrency is None if nothing limits an open loop."""
        count = self.count
        file = self._describe_file(count)
        lengths = [(TRACE_LENGTHS, TRACE_LENGTHS)] if self.trace else itertools.product(*self._parse_lengths())
        for (inputs, outputs), rate, concurrency, chunk, mode in itertools.product(
            lengths, self.request_rate or (None,), self.concurrency or (None,), self.chunk, self.mode
        ):
            arrival = self._choose_arrival(rate)
            rate = None if rate == math.inf else rate  # noqa: PLW2901 -- not a rate: see _arrival
            if arrival == CLOSED and concurrency and concurrency > count:
                raise UsageError(
                    f"--concurrency {concurrency} is more than there are requests ({count}); use "
                    f"{self._suggest_more_requests(concurrency)}a smaller --concurrency."
                )
            load = Load(
                mode=mode,
                requests=count,
                arrival=arrival,
                request_rate=rate,
                paced=arrival == GAMMA,
                input_tokens=inputs,
                output_tokens=outputs,
                chunk=chunk,
                **file,
                **{axis.name: getattr(self, axis.name) for axis in SHARED_AXES},
            )
            if arrival == CLOSED and concurrency and concurrency > (held := count_sessions(load)):
                of = f"of {self.trace.path}" if self.trace else f"of --sessions turns={self.turns}"
                raise UsageError(
                    f"--concurrency {concurrency} is more than there are sessions {of} ({held}, with {format_count(count, 'request')}); use "
                    f"{self._suggest_more_requests(concurrency)}a smaller --concurrency."
                )
            yield concurrency or (count_sessions(load) if arrival == CLOSED else None), load

    def _describe_file(self, count: int) -> dict[str, Any]:
        """Return the fields of a load about the file of its first `count` requests; none without a file."""
        if self.trace is None:
            return {}
        return {
            "trace": self.trace.path.name,
            "trace_sha256": self.trace.sha256,
            "trace_reading": str(self.trace.reading),
            "trace_facts": self.trace.describe_requests(count),
        }

    def _suggest_more_requests(self, concurrency: int) -> str:
        """Return `--num-requests N, or ` for a session or ten requests for each client; empty if that is too many."""
        turns = compute_max_turns(self.turns)
        count = concurrency * max(10, turns + (turns - 1) * self.subagents)
        return f"{self.suggest_requests(count)}, or " if count <= MAX_REQUESTS else ""

    def suggest_requests(self, count: int) -> str:
        """Return the option with which `count` requests are sent."""
        if self.limit == self.count:
            return f"--num-requests {count}, or none"
        return "a longer file" if self.trace else f"--num-requests {count}"

    def _choose_arrival(self, rate: float | None) -> str:
        """Return when requests come. A rate of inf sends all at once: a closed loop with one client for each request.

        With --concurrency that many are in flight, as with --max-concurrency of `vllm bench serve`.
        """
        if rate == math.inf:
            return CLOSED
        if rate is not None:
            return GAMMA
        return TRACE if self.trace and self.trace.has_times and not self.concurrency else CLOSED

    def _parse_lengths(self) -> list[list[str]]:
        axes = ("input_tokens", "output_tokens")
        return [[str(parse_lengths(format_flag(name), text)) for text in getattr(self, name)] for name in axes]


FILE = ("requests", "trace_format", "trace_columns", "trace_time_unit", "trace_block_size")  # fields of --requests
SERVED = {field.name for field in dataclasses.fields(ServeLoads)} - {"trace", "limit"} | {*FILE, "session_preset"}
"""Options that define the loads."""


def make_serve_spec(given: Mapping[str, object], probe: Probe, own: Mapping[str, object] | None = None) -> SweepSpec:
    """Build a SweepSpec from options as given (None = not given; comma-separated strings, numbers or lists) and the
    device's defaults. `own`: options of a file of step times, which apply where `given` has none.
    """
    options = {name: SERVE_SPEC_PARSERS[name](name, value) for name, value in given.items() if value is not None}
    typed = list_changed_options(options)
    more = {name: value for name, value in (own or {}).items() if options.get(name) is None}
    options |= {name: SERVE_SPEC_PARSERS[name](name, value) for name, value in more.items() if value is not None}
    options.pop("step_times", None)
    check_micro_batches(
        cast("int | None", options.get("micro_batches")), cast("tuple[int, ...]", options.get("pp", (1,)))
    )
    base = get_defaults(probe) | get_serve_defaults(probe)
    loads, settings = read_loads(options, get_serve_defaults(probe) | get_default_clients(probe.device))
    settings |= {"step_times": resolve_step_times(given) or ""}
    rest = {name: value for name, value in base.items() if name not in (*SERVED, *OTHERS)}
    return build_spec(options | {"serve": loads}, rest, settings, typed)


def read_loads(options: dict[str, object], usual: Mapping[str, object]) -> tuple[ServeLoads, dict[str, object]]:
    """Return the loads, and fields of Settings; remove both from the parsed options.

    `usual` holds the defaults. The default number of clients applies only if no option sets when requests come.
    """
    typed = {name: options.pop(name) for name in SERVED if name in options}
    seconds = cast("float | None", options.pop("limit_seconds", None))
    if seconds is not None:
        check_seconds("--timeout load", seconds, 60)
    _apply_preset(typed)
    trace = _load_trace(typed)
    limit = cast("int | None", typed.pop("num_requests", None)) if trace else None
    if limit is not None:
        check_positive("num_requests", limit)
    base = {name: value for name, value in usual.items() if name in SERVED and name != "concurrency"}
    loads = ServeLoads(**(base | typed), trace=trace, limit=limit)  # type: ignore[arg-type]
    if not loads.concurrency and not loads.request_rate and not (trace and trace.has_times):
        some = cast("tuple[int, ...]", usual["concurrency"])
        max_clients = max(loads.count // compute_max_turns(loads.turns), 1)
        loads = dataclasses.replace(loads, concurrency=tuple(c for c in some if c <= max_clients) or (max_clients,))
    settings: dict[str, object] = {
        "slo": options.pop("slo", {}),
        "limit_seconds": seconds,
        "trace_path": str(trace.path.absolute()) if trace else "",
    }
    check_objectives(loads, cast("dict[str, float]", settings["slo"]), str(settings["trace_path"]))
    return loads, settings


def check_objectives(loads: ServeLoads, slo: Mapping[str, float], trace_path: str, *, each: bool = False) -> None:
    """Raise UsageError for objectives about the time between tokens if no answer has two tokens: in all loads, or `each`, in one."""
    if not slo.keys() & set(OF_TOKENS):
        return
    single = (compute_extent(load, trace_path).longest_output == 1 for _, load in loads.iter_loads())
    if any(single) if each else all(single):
        where = f"the answers of --requests {trace_path}" if trace_path else "answers of --output-tokens 1"
        refuse_objectives(slo, OF_TOKENS, f"{where} have one token", "use longer answers")


def refuse_objectives(slo: Mapping[str, float], lacks: Collection[str], why: str, instead: str) -> None:
    """Raise UsageError if objectives are among those that requests lack, with the others as the value to type, or another remedy."""
    if unknown := [name for name in slo if name in lacks]:
        rest = ",".join(f"{name}={ms:g}" for name, ms in slo.items() if name not in lacks)
        remedy = f"write --slo {rest}" if rest else "leave out --slo"
        raise UsageError(f"{why}, without {format_list(unknown, 'or')}; {remedy}, or {instead}.")


def get_default_clients(device: str) -> dict[str, object]:
    """Return the default of --concurrency for closed loops."""
    return {"concurrency": (4,) if device == "cpu" else USUAL_CLIENTS}


def get_serve_defaults(probe: Probe) -> dict[str, object]:
    """Return the default of each option, by device; `dcpbench serve --help` prints the same.

    On GPUs the mean lengths are those with which DCP was first measured in an engine.
    """
    if probe.device == "cpu":
        return {
            "tp": (4,),
            "num_requests": 16,
            "input_tokens": (CPU_PROMPTS,),
            "output_tokens": (CPU_ANSWERS,),
            "chunk": (CPU_CHUNK,),
        }
    prefill = "flashinfer" if probe.packages.get("flashinfer") else PREFILLS[0]
    return {
        "num_requests": USUAL_REQUESTS,
        "input_tokens": (PROMPTS,),
        "output_tokens": (ANSWERS,),
        "chunk": (CHUNK,),
        "prefill": prefill,
    }


@dataclasses.dataclass(frozen=True)
class ShortSlo:
    """Hold objectives for which a load has too few requests, so that they are judged at a lower percentile than p99."""

    objectives: tuple[str, ...]
    percentile: int
    samples: int  # number of samples, which are too few: requests, or for ITL gaps between tokens
    gaps: bool
    remedy: str

    def describe(self) -> str:
        """Return a sentence with the options to use."""
        of = "gap between tokens" if self.gaps else "request"
        names = format_list([name.upper() for name in self.objectives])
        return (
            f"Warning: --slo {names}: with {format_count(self.samples, of)} the SLO is judged at p{self.percentile}, not at "
            f"p{OBJECTIVE}, which needs {compute_min_samples(OBJECTIVE)} {'gaps' if self.gaps else 'completed requests'}. "
            f"For p{OBJECTIVE} use {self.remedy}."
        )


def find_short_slos(loads: ServeLoads, slo: Mapping[str, float], trace_path: str) -> list[ShortSlo]:
    """Return the objectives of `slo` that no load can be judged by at p99, even if all of its requests finish."""
    sizes = [compute_extent(load, trace_path) for _, load in loads.iter_loads()]
    gaps = max(0, *(size.output - loads.count for size in sizes))
    found = []
    for of_gaps, samples in ((False, loads.count), (True, gaps)):
        named = tuple(name for name in slo if (name == "itl") is of_gaps)
        percentile = find_highest_percentile(samples)
        if named and percentile < OBJECTIVE:
            remedy = "longer outputs, or more requests" if of_gaps else loads.suggest_requests(USUAL_REQUESTS)
            found.append(ShortSlo(named, percentile, samples, of_gaps, remedy))
    return found


def _load_trace(typed: dict[str, object]) -> Trace | None:
    """Return the file of --requests; raise UsageError for options that set what the file defines."""
    path, form, columns, unit, block = (typed.pop(name, None) for name in FILE)
    size = block if isinstance(block, int) else 0
    reading = Reading(format=str(form or ""), columns=str(columns or ""), unit=str(unit or ""), block_size=size)
    if block is not None:
        check_positive("trace_block_size", reading.block_size)
    check_reading(reading)
    if path is None:
        if reading != Reading():
            raise UsageError(
                "--requests names no file; write --requests file=trace.jsonl, with the other keys after it."
            )
        return None
    for name in ("input_tokens", "output_tokens"):
        if name in typed:
            raise UsageError(
                f"{format_flag(name)} and --requests {path} contradict each other, as the file has them; leave {format_flag(name)} out."
            )
    return read_requests(Path(str(path)), reading)


def _apply_preset(typed: dict[str, object]) -> None:
    """Set the options of --sessions preset that were not given. Raise UsageError for an unknown preset."""
    name = typed.pop("session_preset", None)
    if name is None:
        return
    if name not in PRESETS:
        raise UsageError(f"--sessions preset={name}: not one of {', '.join(PRESETS)}.")
    for option, value in PRESETS[str(name)].items():
        typed.setdefault(option, SERVE_PARSERS[option](option, value))


def resolve_step_times(given: Mapping[str, object]) -> str | None:
    """Return the absolute path of --step-times, if given; raise UsageError if step times cannot be used."""
    path = given.get("step_times")
    if path is None:
        return None
    if set(read.parse_names("mode", given.get("mode", LIVE))) != {REPLAY}:
        raise UnusedOptionsError(
            f"--step-times {path} is for replays alone; add --mode replay, or leave it out.", ["--step-times"]
        )
    if Path(str(path)).is_dir():
        files = sorted(Path(str(path)).glob("**/step-times/*.json")) or sorted(Path(str(path)).glob("*.json"))
        such = f"a file in it, such as {files[0]}" if files else "a file below step-times/ of a run"
        raise UsageError(f"--step-times {path} is a folder; name {such}.")
    if not Path(str(path)).is_file():
        raise UsageError(f"--step-times {path}: no such file; without it a replay measures them.")
    return str(Path(str(path)).absolute())


def _parse_turns(name: str, value: object) -> str:
    try:
        return str(parse_lengths(format_flag(name), value))
    except UsageError as e:
        raise UsageError(
            f"{format_setting(name, value)}: no number of turns; write 4, uniform:2-8 or lognormal:4:0.5."
        ) from e


def _parse_think(_: str, value: object) -> float | str:
    """Return a constant number of seconds, or the text of a distribution."""
    delays = parse_delays("--sessions think", value)
    return delays.low if delays.kind == FIXED else str(delays)


def compute_max_turns(turns: str) -> int:
    """Return the maximum number of turns of a session; the median if the distribution is unbounded."""
    lengths = parse_lengths("--sessions turns", turns)
    return max(lengths.low, lengths.high)


def _parse_specs(name: str, value: object) -> tuple[str, ...]:
    words = (item if isinstance(item, str) else read.format_value(item) for item in read.split_items(name, value))
    return tuple(dict.fromkeys(words))


def parse_rates(name: str, value: object) -> tuple[float, ...]:
    """Parse `0.5,2`, each number once."""
    return tuple(dict.fromkeys(_parse_real(name, item) for item in read.split_items(name, value)))


def _parse_instances(name: str, value: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(parse_instances(one)) for one in read.split_items(name, value)))


def _parse_real(name: str, value: object) -> float:
    """Parse a number, also as the text of a comma-separated list."""
    try:
        return float(value) if isinstance(value, str) else read.parse_number(name, value)
    except ValueError as e:
        raise UsageError(
            f"{format_setting(name, value)}: not a number; write for example {read.format_example(name)}."
        ) from e


def _parse_micro_batches(name: str, value: object) -> int:
    found = read.parse_int(name, value)
    check_positive(name, found)
    return found


SERVE_PARSERS: dict[str, Callable[[str, object], object]] = {  # fields of a spec set by options, with parsers
    **{name: parser for name, parser in PARSERS.items() if name not in OTHERS},
    **{axis.name: _parse_real if axis.kind is float else read.get_parser(axis) for axis in SHARED_AXES},
    "turns": _parse_turns,
    "think_time": _parse_think,
    "session_preset": read.parse_name,
    "trace_format": read.parse_name,
    "trace_columns": read.parse_name,
    "trace_time_unit": read.parse_name,
    "trace_block_size": read.parse_int,
    "turn_tokens": lambda name, value: str(parse_lengths(format_flag(name), value)),
    "request_rate": parse_rates,
    "requests": read.parse_name,
    "num_requests": read.parse_int,
    "chunk": read.parse_ints,
    "input_tokens": _parse_specs,
    "output_tokens": _parse_specs,
    "mode": read.parse_names,
    "disaggregate": _parse_instances,
    "transfer_gb_s": parse_rates,
    "transfer_ms": _parse_real,
    "step_times": read.parse_name,
    "slo": lambda _, value: parse_slo(value),
    "limit_seconds": _parse_real,
    "micro_batches": _parse_micro_batches,
}
SERVE_SPEC_PARSERS = SERVE_PARSERS | {COMPUTED: SPEC_PARSERS[COMPUTED]}
