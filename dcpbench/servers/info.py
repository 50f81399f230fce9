"""What a server says of itself: its engine and version, its models, its KV cache, and what it has counted."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError, WorkerError
from dcpbench.points.names import OPENAI, SGLANG, VLLM
from dcpbench.redaction import redact_part
from dcpbench.servers.client import OK, RequestError, status_error
from dcpbench.show.text import listed, short

if TYPE_CHECKING:
    from dcpbench.servers.client import Client

TIMEOUT_S = 10.0
"""Of what a server says of itself, which costs it nothing."""
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total", "sglang:num_retractions_total")
CACHED = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
CACHE_CONFIG = "vllm:cache_config_info"
SGLANG_INFO = ("/server_info", "/get_server_info")
LONGEST_FACT = 200
KEPT = """
    tp_size dp_size dcp_size ep_size enable_dp_attention attention_backend kv_cache_dtype quantization dtype
    chunked_prefill_size max_running_requests mem_fraction_static schedule_policy disable_radix_cache page_size
    speculative_algorithm model_path
"""
"""Of what SGLang says of its arguments, what bears on speed."""


class Card(msgspec.Struct):
    """One model of /v1/models."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Card]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server is."""

    engine: str = OPENAI
    """VLLM, SGLANG, or OPENAI where it does not say."""
    version: str = ""
    models: tuple[Card, ...] = ()
    kv_capacity_tokens: int | None = None
    facts: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def origin(self) -> str:
        """Of its records: `engine vllm 0.32.0`."""
        return " ".join(filter(None, ("engine", self.engine, self.version)))

    def model(self, name: str | None) -> Card:
        """The one that is asked for, or the only one. Raises UsageError."""
        names = [card.id for card in self.models]
        if name is None and len(names) == 1:
            return self.models[0]
        for card in self.models:
            if card.id == name:
                return card
        serves = f"the server serves {listed([short(n) for n in names])}" if names else "the server names no model"
        if name is None:
            raise UsageError(f"{serves}; say with --model which is meant.")
        if not names:
            return Card(name)
        raise UsageError(f"--model {name}: {serves}; leave --model out, or name one of these.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """What a server has counted since it started; None where it does not say."""

    preemptions: float | None = None
    cached_tokens: float | None = None

    def since(self, before: Counters) -> dict[str, int | None]:
        """What came in between, by the names of record.ServeMetrics; of a server that was started anew, nothing."""
        found: dict[str, int | None] = {}
        for field in dataclasses.fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            known = now is not None and then is not None and now >= then
            found[field.name] = round(now - then) if known else None
        return found


async def ask(client: Client) -> ServerInfo:
    """What a server is. Raises WorkerError where none answers, or one that has no /v1/models refuses."""
    try:
        answer = await client.get("/v1/models", TIMEOUT_S)
        if answer.status != OK and answer.status not in (404, 405, 501):
            raise status_error(answer.status, answer.headers, answer.data)
    except RequestError as e:
        raise WorkerError(_unusable(client, e)) from e
    models = _decoded(answer.data, _Models) if answer.status == OK else None
    info = ServerInfo(models=tuple(models.data) if models else ())
    version = await _json(client, "/version")
    if isinstance(version.get("version"), str):
        info = dataclasses.replace(info, engine=VLLM, version=_fact(version["version"]))
    for path in SGLANG_INFO:
        said = await _json(client, path)
        if "max_total_num_tokens" in said or "internal_states" in said or "model_path" in said:
            info = _of_sglang(info, said)
            break
    metrics = await samples(client)
    return dataclasses.replace(info, **_of_metrics(info, metrics))


async def samples(client: Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What /metrics says, by name; nothing where there is none."""
    try:
        answer = await client.get("/metrics", TIMEOUT_S)
    except RequestError:
        return {}
    return read_metrics(answer.data.decode("utf-8", "replace")) if answer.status == OK else {}


async def counters(client: Client) -> Counters:
    """What a server has counted so far."""
    found = await samples(client)
    return Counters(preemptions=_sum(found, PREEMPTIONS), cached_tokens=_sum(found, CACHED))


def read_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Prometheus' text: of each name its labels and values. What is none is left out."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := SAMPLE.match(line)):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        found.setdefault(match[1], []).append((dict(LABEL.findall(match[2] or "")), value))
    return found


def _sum(found: dict[str, list[tuple[dict[str, str], float]]], names: tuple[str, ...]) -> float | None:
    """Over all engines of a server, of the first of these names that it has."""
    return next((sum(value for _, value in found[name]) for name in names if name in found), None)


def _of_metrics(info: ServerInfo, found: dict[str, list[tuple[dict[str, str], float]]]) -> dict[str, Any]:
    """The KV cache as vLLM says it, whose blocks are counted for each replica of data parallelism."""
    if info.engine == OPENAI and any(name.startswith("vllm:") for name in found):
        info = dataclasses.replace(info, engine=VLLM)
    capacity, facts = info.kv_capacity_tokens, dict(info.facts)
    for labels, _ in found.get(CACHE_CONFIG, ()):
        size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if size.isdecimal() and blocks.isdecimal():
            capacity = (capacity or 0) + int(size) * int(blocks)
        facts |= {
            name: _fact(labels[name])
            for name in ("cache_dtype", "block_size", "enable_prefix_caching")
            if name in labels
        }
    return {"engine": info.engine, "kv_capacity_tokens": capacity, "facts": facts}


def _of_sglang(info: ServerInfo, said: dict[str, Any]) -> ServerInfo:
    states = said.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    capacity = next(
        (n for n in (said.get("max_total_num_tokens"), first.get("max_total_num_tokens")) if _whole(n)), None
    )
    version = said.get("version")
    return dataclasses.replace(
        info,
        engine=SGLANG,
        version=_fact(version) if isinstance(version, str) else "",
        kv_capacity_tokens=capacity,
        facts={name: _fact(str(said[name])) for name in KEPT.split() if said.get(name) not in (None, "")},
    )


def _fact(text: str) -> str:
    """Return what a server says of itself, without secrets and then cut."""
    return redact_part(text)[:LONGEST_FACT]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


async def _json(client: Client, path: str) -> dict[str, Any]:
    """An object that a server says of itself; empty where it does not."""
    try:
        answer = await client.get(path, TIMEOUT_S)
    except RequestError:
        return {}
    found = _decoded(answer.data, dict[str, Any]) if answer.status == OK else None
    return found or {}


def _decoded(data: bytes, kind: Any) -> Any:  # noqa: ANN401 -- as msgspec has it
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _unusable(client: Client, error: RequestError) -> str:
    url = client.target.url
    more = ""
    if error.status in (401, 403):
        more = " Put its API key into the environment variable that --api-key-env names, OPENAI_API_KEY by default."
    return f"{url} cannot be measured: {error.sentence}{more}"
