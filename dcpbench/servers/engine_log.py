"""Read an engine's resolved settings and the phases of its start from the log of its server. No torch.

The patterns match the logs of vLLM 0.26 and SGLang 0.5.17; settings that a log does not hold stay unknown.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import WorkerError
from dcpbench.points.names import DUMMY, SYNTHETIC
from dcpbench.records.record import EngineSettings, StartPhase
from dcpbench.servers.kv_capacity import find_page_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROUTING_VARIABLE = "DCPBENCH_ROUTING"  # distribution of experts of dcpbench's plugins, as Point.routing
SYNTHETIC_VARIABLE = "DCPBENCH_SYNTHETIC_WEIGHTS"  # turns on dcpbench's plugin for SGLang
UNIFORM_ROUTING: Mapping[str, tuple[str, ...]] = {
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ("uniform_random", "normal_routing"),
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": ("1", "true", "True"),
}  # variables of the engines that replace the router's choice of experts by an even one

PHASES = (
    ("loading weights", re.compile(r"Starting to load model|Load weight begin")),
    ("compiling", re.compile(r"Dynamo bytecode transform|Start compiling|torch\.compile takes|Compiling a graph")),
    ("allocating the KV cache", re.compile(r"Model loading took|Load weight end")),
    ("capturing CUDA graphs", re.compile(r"(?:Capturing|Profiling) CUDA graph|Capture .*CUDA graph begin")),
    ("warming up", re.compile(r"Graph capturing finished|Capture .*CUDA graph end|Application startup complete")),
)  # phases of a start with the line that begins each. A phase that began stays until a later one begins
STARTING = "starting"

VALUE = r"('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^,()\s]+)"
SGLANG_ARGUMENTS = re.compile(r"server_args=ServerArgs\((.*)\)")
VLLM_CONFIG = re.compile(r"Initializing a V1 LLM engine \(v[^)]*\) with config: (.*)")
VLLM_GIVEN = re.compile(r"non-default args: (\{.*\})")
RESOLVED = {
    "attention_backend": re.compile(r"Using (\w+) attention backend"),
    "moe_backend": re.compile(r"Using (\w+) (?:\w+ )?MoE backend"),
    "max_batched_tokens": re.compile(r"max_num_batched_tokens=(\d+)"),
    "kv_dtype": re.compile(r"KV Cache is allocated\. dtype: torch\.(\w+)"),
    "weights_dtype": re.compile(r"Load weight end\..* quant=([\w-]+)"),
}  # lines in which an engine names a setting that it chose
SGLANG_FIELDS = {
    "load_format": "load_format",
    "dtype": "dtype",
    "weights_dtype": "quantization",
    "kv_dtype": "kv_cache_dtype",
    "page_size": "page_size",
    "max_batched_tokens": "chunked_prefill_size",
    "attention_backend": "attention_backend",
    "moe_backend": "moe_runner_backend",
    "exchange": "dcp_comm_backend",
}
VLLM_FIELDS = {name: SGLANG_FIELDS[name] for name in ("load_format", "dtype", "weights_dtype", "kv_dtype", "exchange")}
VLLM_GIVEN_FIELDS = {"page_size": "block_size", "moe_backend": "moe_backend"}
NUMBERS = ("page_size", "max_batched_tokens")
GRAPH_BATCHES = re.compile(  # sizes of captured graphs; vLLM writes those given first, then the resolved ones
    r"(?:'cudagraph_capture_sizes': |Capture .*decode CUDA graph begin\..* bs=|Capture cuda graph bs )\[([\d, ]*)\]"
)
UNRESOLVED = ("", "auto", "None")  # values that only state that the engine chooses


def read_settings(log: str) -> EngineSettings | None:
    """Return the settings that a server's log states, with the engine's choices; None if it states none.

    A setting that the engine chooses by itself (`auto`) is unknown unless a line of the log names the choice. `log` is the
    text of the log from its beginning.
    """
    found: dict[str, str] = {}
    flags: dict[str, str] = {}
    if arguments := SGLANG_ARGUMENTS.search(log):
        found |= _read_fields(arguments[1], SGLANG_FIELDS, "=")
        flags = _read_fields(
            arguments[1], {"disable": "disable_radix_cache", "blocking": "disable_overlap_schedule"}, "="
        )
        cache = {"False": True, "True": False}.get(flags.get("disable", ""))
        asynchronous = {"False": True, "True": False}.get(flags.get("blocking", ""))
    elif config := VLLM_CONFIG.search(log):
        found |= _read_fields(config[1], VLLM_FIELDS, "=")
        if given := VLLM_GIVEN.search(log):
            found |= _read_fields(given[1], VLLM_GIVEN_FIELDS, ":")
        flags = _read_fields(config[1], {"cache": "enable_prefix_caching"}, "=")
        cache = {"True": True, "False": False}.get(flags.get("cache", ""))
        asynchronous = True if "Asynchronous scheduling is enabled" in log else None
    else:
        return None
    for name, pattern in RESOLVED.items():
        if match := pattern.search(log):
            found[name] = match[1]
    known = {name: value.removeprefix("torch.") for name, value in found.items() if value not in UNRESOLVED}
    numbers = {name: int(value) if value.isdecimal() else None for name, value in known.items() if name in NUMBERS}
    graph_batches = [
        sorted({int(size) for size in sizes.split(",") if size.strip()}) for sizes in GRAPH_BATCHES.findall(log)
    ]
    return EngineSettings(
        **{**known, **numbers},  # type: ignore[arg-type]
        graph_batches=graph_batches[-1] if graph_batches else None,
        prefix_caching=cache,
        async_scheduling=asynchronous,
        weights_fingerprints=sorted(set(WEIGHTS_REPORT.findall(log))),
    )


def complete_settings(settings: EngineSettings, facts: Mapping[str, str]) -> EngineSettings:
    """Return the settings with those that only the server's reports state: the page size, and the KV data type of vLLM.

    vLLM's `auto` is the model's data type. `facts` are those of servers.info.ServerInfo.
    """
    cache = facts.get("cache_dtype", "")
    return msgspec.structs.replace(
        settings,
        page_size=find_page_size(settings, facts),
        kv_dtype=settings.kv_dtype or (settings.dtype if cache == "auto" else cache or None),
    )


def _read_fields(text: str, names: Mapping[str, str], separator: str) -> dict[str, str]:
    """Return the values of `key=value` or `'key': value` pairs by our names; keys that are absent are left out."""
    found = {}
    for ours, theirs in names.items():
        key = rf"(?<![\w'])'?{theirs}'?\s*{separator}\s*"
        if match := re.search(key + VALUE, text):
            found[ours] = match[1].strip("'\"")
    return found


def format_weights_report(seed: int, fingerprint: str) -> str:
    """Return the line that dcpbench's plugins write into an engine's log once a rank has synthetic weights."""
    return f"dcpbench: synthetic weights of seed {seed}, fingerprint {fingerprint}"


WEIGHTS_REPORT = re.compile(format_weights_report(0, "X").replace("0", r"\d+").replace("X", "([0-9a-f]+)"))


def has_dummy_weights(settings: EngineSettings, environment: Mapping[str, str]) -> bool:
    """Return whether an engine serves its own dummy weights with the router's own choice of experts.

    With such weights all tokens take the same few experts, so that layers with experts read far fewer weights than those
    of a trained model. `environment`: the variables of the server.
    """
    if settings.load_format != DUMMY or settings.weights_fingerprints:
        return False
    return not any(environment.get(name) in values for name, values in UNIFORM_ROUTING.items())


def read_started_settings(log: str, weights: str, environment: Mapping[str, str]) -> tuple[EngineSettings | None, bool]:
    """Return the settings in the log of a started server, and whether it has its engine's own dummy weights.

    Args:
        log: Text of the log from its beginning.
        weights: Weights that the server was started with, as a point has them.
        environment: Variables that the server got in addition to those of this process.

    Raises:
        WorkerError: The server should have synthetic weights, and no rank reports them.
    """
    found = read_settings(log)
    if weights == SYNTHETIC and not (found and found.weights_fingerprints):
        raise WorkerError(
            "the server has no synthetic weights, because its engine did not load dcpbench's plugin; install dcpbench in the "
            "engine's Python environment, or add --weights model"
        )
    return found, found is not None and has_dummy_weights(found, {**os.environ, **environment})


class StartWatch:
    """Find the phases of a server's start from its log as it grows, and time them.

    `feed` is called with the new part of the log and the seconds since the start.
    """

    def __init__(self) -> None:
        self._began = [(STARTING, 0.0)]
        self._rest = ""

    @property
    def phase(self) -> str:
        """Return the present phase."""
        return self._began[-1][0]

    def feed(self, text: str, now_s: float) -> None:
        """Take the new part of the log; a line is read once it is complete."""
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()[-(1 << 16) :]
        for line in lines:
            for place, (name, pattern) in enumerate(PHASES):
                if place > self._find_place() and pattern.search(line):
                    self._began.append((name, now_s))

    def _find_place(self) -> int:
        """Return the index of the present phase in PHASES, -1 before the first one."""
        return next((i for i, (name, _) in enumerate(PHASES) if name == self.phase), -1)

    def finish(self, now_s: float) -> list[StartPhase]:
        """Return all phases with their durations, once the server is ready."""
        ends: Sequence[float] = [at for _, at in self._began[1:]] + [now_s]
        return [
            StartPhase(name=name, seconds=round(end - at, 1)) for (name, at), end in zip(self._began, ends, strict=True)
        ]
