"""Query a server for its engine and version, its models, its KV cache, and its counters."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError, WorkerError
from dcpbench.points.names import OPENAI, SGLANG, VLLM
from dcpbench.records.lines import decode_or_none
from dcpbench.records.record import format_server_origin
from dcpbench.servers import draft_counters
from dcpbench.servers.client import KEY_ERRORS, KEY_HINT, MAX_BODY, NO_ENDPOINT, OK, RequestError, make_status_error
from dcpbench.servers.draft_counters import MAX_COUNT, DraftCounters
from dcpbench.servers.kv_capacity import KvReport, compute_capacity, describe_conflicts, read_sglang, read_vllm
from dcpbench.servers.load import retry_while_busy
from dcpbench.show.text import fit_line, fit_name, format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Collection

    from dcpbench.records.record import KvSources
    from dcpbench.servers.client import Client

TIMEOUT_S = 10.0  # for all of a server's reports about itself, which are cheap
LINE = re.compile(r"^[^#\n][^\n]*", re.MULTILINE)  # without comments
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
MAX_METRICS, MAX_LINE = 1 << 24, 1 << 14  # bytes of /metrics, characters of a line; 64 engines of vLLM write 4 MB
MAX_NAMES, MAX_SERIES = 4096, 4096  # names of metrics, and series of each name, that are kept
MAX_NAME, MAX_MODELS = 512, 1024  # characters of a model's name, and models of a server
MAX_MODEL_LEN = 1 << 40
MAX_LISTED = 10  # models named in a message
PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total", "sglang:num_retractions_total")
CACHED = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
CACHE_CONFIG = "vllm:cache_config_info"
PROCESS_START = "process_start_time_seconds"  # of Prometheus' client, if a server has one process with metrics
READ = {
    *PREEMPTIONS,
    *CACHED,
    CACHE_CONFIG,
    PROCESS_START,
    *draft_counters.NAMES,
}  # metrics with series to keep; for all others only the names are kept
SGLANG_INFO = ("/server_info", "/get_server_info")
METRICS_FLAGS = {SGLANG: "with --enable-metrics", VLLM: "without --disable-log-stats"}  # for counters at /metrics
MAX_FACT_LENGTH = 200
KEPT = """
    tp_size dp_size dcp_size ep_size enable_dp_attention attention_backend kv_cache_dtype quantization dtype
    chunked_prefill_size max_running_requests mem_fraction_static schedule_policy disable_radix_cache page_size
    speculative_algorithm speculative_num_steps speculative_num_draft_tokens model_path
"""  # arguments of SGLang that affect performance


class Card(msgspec.Struct, frozen=True):
    """A model of /v1/models."""

    id: str
    max_model_len: int | None = None
    root: str = ""  # folder or name of its weights, if the server reports it


class _Card(msgspec.Struct, frozen=True):
    """A model as a server describes it."""

    id: str
    max_model_len: int | float | str | None = None
    root: object = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Card]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Description of a server."""

    engine: str = OPENAI  # VLLM, SGLANG, or OPENAI if the server does not report its engine
    version: str = ""
    models: tuple[Card, ...] = ()
    kv: KvReport = dataclasses.field(default_factory=KvReport)  # numbers about the KV cache, as reported
    kv_capacity_tokens: int | None = None  # total capacity; None before `with_kv_capacity`, or if it is unknown
    kv_sources: KvSources | None = None
    metrics: bool = False  # True if /metrics has the engine's counters
    answers_metrics: bool = False  # whether /metrics answered in time; only then its counters are read again
    started_s: float | None = None  # start of the server's process, in s since 1970; None if it is not reported
    facts: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def metrics_hint(self) -> str:
        """Return how the server has to be started so that /metrics has its counters; empty if it has them."""
        if self.metrics or self.engine not in METRICS_FLAGS:
            return ""
        return (
            f"/metrics has no counters of {self.engine}, so cache hits and preemptions stay unknown; "
            f"start it {METRICS_FLAGS[self.engine]}"
        )

    @property
    def notes(self) -> list[str]:
        """Return sentences for the user about missing or contradictory reports of the server."""
        conflicts = describe_conflicts(self.kv_sources, self.kv_capacity_tokens) if self.kv_sources else ""
        return [f"{note}." for note in (self.metrics_hint, conflicts) if note]

    def with_kv_capacity(self, *, dp: int, dcp: int, pcp: int = 1, log: str = "") -> ServerInfo:
        """Return this with the total KV capacity; parameters as those of kv_capacity.compute_capacity."""
        longest = max((card.max_model_len for card in self.models if card.max_model_len), default=None)
        tokens, sources = compute_capacity(
            self.kv, self.engine, dp=dp, dcp=dcp, pcp=pcp, max_model_len=longest, log=log
        )
        return dataclasses.replace(self, kv_capacity_tokens=tokens, kv_sources=sources)

    @property
    def origin(self) -> str:
        """Return the origin of its records, such as `engine vllm 0.32.0`."""
        return format_server_origin(self.engine, self.version)

    def find_model(self, name: str | None) -> Card:
        """Return the named model, or the only one. Raise UsageError if there is no such model."""
        names = [card.id for card in self.models]
        if name is None and len(names) == 1:
            return self.models[0]
        for card in self.models:
            if card.id == name:
                return card
        shown = [fit_name(n) for n in names[:MAX_LISTED]]
        shown += [format_count(len(names) - MAX_LISTED, "other")] if len(names) > MAX_LISTED else []
        serves = f"the server serves {format_list(shown)}" if names else "the server names no model"
        if name is None:
            raise UsageError(f"{serves}; name one with --model.")
        if not names:
            return Card(name)
        raise UsageError(f"--model {name}: {serves}; leave --model out, or name one of these.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """Counters of a server since its start; None if it does not report them."""

    answered: bool = True  # True if /metrics answered: SGLang reports a counter only once it has been increased
    preemptions: float | None = None
    cached_tokens: float | None = None
    drafts: DraftCounters = dataclasses.field(default_factory=DraftCounters)

    def compute_increase(self, before: Counters) -> dict[str, int | None]:
        """Return the increases since `before`, by the names of record.ServeMetrics; None for a server that was
        restarted.
        """
        found: dict[str, int | None] = {}
        for name in ("preemptions", "cached_tokens"):
            now, then = getattr(self, name), getattr(before, name)
            then = 0.0 if then is None and before.answered else then
            known = now is not None and then is not None and 0 <= then <= now <= MAX_COUNT
            found[name] = round(now - then) if known else None
        return found


async def fetch_info(client: Client, retries: int = 0) -> ServerInfo:
    """Return a server's reports about itself, within TIMEOUT_S in all.

    `retries` is the number of retries while it is busy. Raise WorkerError if no answer comes, or if /v1/models refuses.
    """
    try:
        models = await _fetch_models(client, retries)
    except RequestError as e:
        hint = f" {KEY_HINT}" if e.status in KEY_ERRORS else ""
        raise WorkerError(f"{client.target.url} cannot be measured: {e.sentence}{hint}") from e
    until_s = time.monotonic() + TIMEOUT_S
    info = ServerInfo(models=models)
    version = await _fetch_json(client, "/version", until_s)
    if isinstance(version.get("version"), str):
        info = dataclasses.replace(info, engine=VLLM, version=fit_line(version["version"], MAX_FACT_LENGTH))
    for path in SGLANG_INFO:
        reply = await _fetch_json(client, path, until_s)
        if "max_total_num_tokens" in reply or "internal_states" in reply or "model_path" in reply:
            info = _add_sglang_info(info, reply)
            break
    metrics = await fetch_metrics(client, until_s)
    if metrics is None:
        return info
    return dataclasses.replace(info, answers_metrics=True, **_read_metrics_fields(info, metrics))


async def _fetch_models(client: Client, retries: int) -> tuple[Card, ...]:
    """Return the models that a server lists, none if it has no list. Raise RequestError if it does not answer."""

    async def send_request() -> bytes:
        answer = await client.get("/v1/models", TIMEOUT_S)
        if answer.status == OK:
            return answer.data
        if answer.status in NO_ENDPOINT:
            return b""
        raise make_status_error(answer.status, answer.headers, answer.data)

    models = decode_or_none(await retry_while_busy(send_request, retries), _Models)
    cards = models.data[:MAX_MODELS] if models else ()
    return tuple(
        Card(
            card.id,
            _read_length(card.max_model_len),
            fit_line(card.root, MAX_NAME) if isinstance(card.root, str) else "",
        )
        for card in cards
        if card.id.isprintable() and 0 < len(card.id) <= MAX_NAME
    )


def _read_length(value: object) -> int | None:
    """Return a context length, None for one that cannot be."""
    return value if type(value) is int and 0 < value <= MAX_MODEL_LEN else None


async def _fetch_body(client: Client, path: str, until_s: float, limit: int = MAX_BODY) -> bytes | None:
    """Return the body of an answer of status 200, None if there is none until `until_s` of time.monotonic()."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        return None
    try:
        answer = await client.get(path, left_s, limit)
    except RequestError:
        return None
    return answer.data if answer.status == OK else None


async def fetch_metrics(client: Client, until_s: float) -> dict[str, list[tuple[dict[str, str], float]]] | None:
    """Return the metrics of /metrics by name; None if there is no answer until `until_s` of time.monotonic()."""
    found = await _fetch_body(client, "/metrics", until_s, MAX_METRICS)
    return None if found is None else read_metrics(found.decode("utf-8", "replace"))


async def fetch_counters(client: Client) -> Counters:
    """Return the current counters of a server."""
    until_s = time.monotonic() + TIMEOUT_S
    metrics, reply = await fetch_metrics(client, until_s), dict[str, Any]()
    found = metrics or {}
    if any(name.startswith(f"{SGLANG}:") for name in found):
        reply = await _fetch_json(client, SGLANG_INFO[0], until_s) or await _fetch_json(client, SGLANG_INFO[1], until_s)
    return Counters(
        answered=metrics is not None,
        preemptions=_sum_values(found, PREEMPTIONS),
        cached_tokens=_sum_values(found, CACHED),
        drafts=draft_counters.read_draft_counters(found, reply),
    )


def read_metrics(text: str, names: Collection[str] = READ) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the labels and values of these `names` in Prometheus' text format, and all other names without values.

    Lines that are no samples, and values that are not finite, are left out.
    """
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in LINE.finditer(text):
        if len(line[0]) > MAX_LINE or (match := SAMPLE.match(line[0])) is None:
            continue
        if match[1] not in found and len(found) >= MAX_NAMES and match[1] not in names:
            continue
        series = found.setdefault(match[1], [])
        if match[1] in names and len(series) < MAX_SERIES and (value := _read_float(match[3])) is not None:
            series.append((dict(LABEL.findall(match[2] or "")), value))
    return found


def _read_float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _sum_values(found: dict[str, list[tuple[dict[str, str], float]]], names: tuple[str, ...]) -> float | None:
    """Return the sum over all engines of a server, of the first of these names that it has."""
    return next((sum(value for _, value in found[name]) for name in names if found.get(name)), None)


def _read_metrics_fields(info: ServerInfo, found: dict[str, list[tuple[dict[str, str], float]]]) -> dict[str, Any]:
    """Return the fields of ServerInfo that /metrics holds: the engine, the KV cache as vLLM reports it, and facts."""
    if info.engine == OPENAI and any(name.startswith("vllm:") for name in found):
        info = dataclasses.replace(info, engine=VLLM)
    facts, configs = dict(info.facts), [labels for labels, _ in found.get(CACHE_CONFIG, ())]
    for labels in configs:
        facts |= {
            name: fit_line(labels[name], MAX_FACT_LENGTH)
            for name in ("cache_dtype", "block_size", "enable_prefix_caching")
            if name in labels
        }
    counters = any(name.startswith(f"{info.engine}:") for name in found)
    starts = [value for _, value in found.get(PROCESS_START, ())]
    return {
        "engine": info.engine,
        "kv": info.kv or read_vllm(configs),
        "metrics": counters,
        "started_s": starts[0] if len(starts) == 1 else None,
        "facts": facts,
    }


def _add_sglang_info(info: ServerInfo, reply: dict[str, Any]) -> ServerInfo:
    version = reply.get("version")
    return dataclasses.replace(
        info,
        engine=SGLANG,
        version=fit_line(version, MAX_FACT_LENGTH) if isinstance(version, str) else "",
        kv=read_sglang(reply),
        facts={
            name: fit_line(_format_fact(reply[name]), MAX_FACT_LENGTH)
            for name in KEPT.split()
            if reply.get(name) not in (None, "")
        },
    )


def _format_fact(value: object) -> str:
    """Return a value as Python writes it; lists and objects may be long, and are left out."""
    return str(value) if isinstance(value, str | int | float) else type(value).__name__


async def _fetch_json(client: Client, path: str, until_s: float) -> dict[str, Any]:
    """Return an object that a server reports about itself; empty if it does not."""
    data = await _fetch_body(client, path, until_s)
    return decode_or_none(data, dict[str, Any]) or {} if data is not None else {}
