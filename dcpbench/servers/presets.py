"""Command lines of engines: presets for vLLM and SGLang, and engine files of the user. No torch.

    name = "vllm"
    command = "vllm serve {model} --host {host} --port {port}"
    ready = "/health"
    profiler = "--profiler-config.torch_profiler_dir {traces}"    # added with --traces
    step_profiler = "…"            # in its place for `sweep`: a profiler without Python stacks
    [layout]                       # flags of degrees and of the exchange, added if a degree exceeds 1 or an exchange is set
    tp = "--tensor-parallel-size {attn_tp}"
    dcp = "--decode-context-parallel-size {dcp}"
    [weights]                      # flags added with --weights synthetic and --weights dummy
    synthetic = "--load-format dcpbench"
    dummy = "--load-format dummy"
    [flags]                        # axes: each combination is a separate server
    max-num-seqs = [32, 64]
    [variants]                     # further flags by name, for `verify --variant NAME`
    eager = "--enforce-eager"
    [env]
    VLLM_LOGGING_LEVEL = "WARNING"

`{tp}` counts all GPUs of a layout, `{attn_tp}` is tp / dp, which vLLM calls tensor parallel.
"""

from __future__ import annotations

import itertools
import shlex
import string
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.models import REPOSITORIES
from dcpbench.plan.option_parsers import split_command
from dcpbench.points.engine_points import format_settings
from dcpbench.points.layout import DEGREES, OUTER_DEGREES
from dcpbench.points.names import (
    DUMMY,
    FP8,
    MOE_TP,
    NO_EXCHANGE,
    SGLANG,
    SYNTHETIC,
    UNKNOWN,
    VLLM,
    format_flag,
    format_setting,
)
from dcpbench.points.point import SETTING
from dcpbench.points.redaction import redact, register_command_line
from dcpbench.servers.engine_log import ROUTING_VARIABLE, SYNTHETIC_VARIABLE
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.point import Point

PLACEHOLDER_NAMES = ("model", "host", "port", *DEGREES, *OUTER_DEGREES, "attn_tp", "exchange", "interleave", "nnodes")
TRACES = "traces"  # further name in the profiler's flags: the folder of --traces
EXAMPLE = "--serve-cmd 'vllm serve {model} --host {host} --port {port} --tensor-parallel-size {tp}'"
LAYOUT = (
    *DEGREES,
    *OUTER_DEGREES,
    "ep",
    "exchange",
    "q_replicate",
    "interleave",
    "kv",
    "nodes",
)  # parts that have flags
Value = str | int | float | bool


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine, and the command line of its servers."""

    name: str
    command: str
    ready: str = "/health"  # path that answers 200 once requests are taken
    layout: dict[str, str] = {}  # flags by the names in LAYOUT
    exchanges: list[str] = []  # exchanges that the engine has, by its names; empty: unknown
    sparse_dcp: bool = True  # False if it has no DCP for models with sparse attention
    flags: dict[str, Value | list[Value]] = {}  # further flags, without their dashes; a list is an axis
    weights: dict[str, str] = {}  # flags by the values of --weights, SYNTHETIC and DUMMY
    variants: dict[str, str] = {}  # flags of a server that `verify --variant NAME` adds, by name
    profiler: str = ""  # flags for a profiler that is started by HTTP and writes into the folder {traces}
    step_profiler: str = ""  # the same without Python stacks, which slow short steps down; empty: `profiler`
    env: dict[str, str] = {}

    @property
    def axes(self) -> dict[str, list[str]]:
        """Return the values of the flags that are lists."""
        return {name: list(map(str, values)) for name, values in self.flags.items() if isinstance(values, list)}

    def list_settings(self) -> list[dict[str, str]]:
        """Return the settings of each server: one combination of the flags that are lists."""
        return [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]

    def list_labels(self) -> list[dict[str, str]]:
        """Return the same as points and file names have it: a number in the place of each secret."""
        shown = map(_make_labels, self.axes.values())
        return [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*shown)]

    def find_settings(self, point: Point) -> dict[str, str]:
        """Return the flags of the server of a point, with the secrets that its settings represent."""
        by_label = {
            format_settings(label): server
            for label, server in zip(self.list_labels(), self.list_settings(), strict=True)
        }
        if point.settings in by_label:
            return by_label[point.settings]
        pairs = (text.partition("=") for text in point.settings.split(SETTING) if text)
        return {name: value for name, _, value in pairs}

    def find_lacking(self, point: Point, shape: ModelShape | None = None) -> list[str]:
        """Return the parts of a point that this engine cannot run, by their options: `--exchange symm`.

        An engine that does not list its exchanges may have any. `shape` is that of the point's model, if it is known.
        """
        outer = {name: getattr(point, name) for name in OUTER_DEGREES}
        lacking = [format_setting(name, n) for name, n in outer.items() if n > 1 and name not in self.layout]
        if point.ep_degree not in (None, 1, point.tp * point.pcp):
            lacking.append(format_setting("ep", point.ep))
        if point.kv_dtype == FP8 and "kv" not in self.layout:
            lacking.append(format_setting("kv_dtype", FP8))
        if point.dcp <= 1:
            return lacking
        if shape is not None and shape.indexer and not self.sparse_dcp:
            lacking.append(f"{format_setting('dcp', point.dcp)} with sparse attention")
        if self.exchanges and point.exchange not in (*self.exchanges, NO_EXCHANGE, UNKNOWN):
            lacking.append(format_setting("exchange", point.exchange))
        if point.project_first:
            lacking.append(format_flag("project_first"))
        if point.q_replicate and "q_replicate" not in self.layout:
            lacking.append(format_flag("q_replicate"))
        if point.interleave > 1 and "interleave" not in self.layout:
            lacking.append(format_setting("interleave", point.interleave))
        return lacking

    def make_lacking_error(self, lacking: Sequence[str]) -> UsageError:
        """Return the error for options that `find_lacking` returns."""
        flag = format_flag("exchange")
        has = f" It has {flag} {','.join(self.exchanges)}." if any(name.startswith(flag) for name in lacking) else ""
        return UsageError(
            f"{self.name} has no {format_list(lacking, 'or')}; leave that out, or name another engine.{has}"
        )

    @property
    def secrets(self) -> list[str]:
        """Return the words of a command line that come from keys in the file: its flags and its environment."""
        flags = {name: value if isinstance(value, list) else [value] for name, value in self.flags.items()}
        words = [word for name, values in flags.items() for value in values for word in (f"--{name}", str(value))]
        return [*words, *(f"{name}={value}" for name, value in self.env.items())]

    def make_command(
        self,
        point: Point,
        settings: Mapping[str, str],
        model: str,
        port: int,
        *,
        nnodes: int = 1,
        traces: str = "",
    ) -> list[str]:
        """Return the command line of the server for a point, on the first of several machines. `traces`: folder of its profiler.

        Raises UsageError for a point that the engine cannot run.
        """
        if lacking := self.find_lacking(point):
            raise self.make_lacking_error(lacking)
        exchange = point.exchange if point.exchange not in (NO_EXCHANGE, UNKNOWN) else ""
        known = {
            "model": model,
            "host": "127.0.0.1",
            "port": port,
            **{name: getattr(point, name) or 1 for name in DEGREES},
            **{name: getattr(point, name) for name in OUTER_DEGREES},
            "attn_tp": max(point.tp, 1) // max(point.dp, 1),
            "exchange": exchange,
            "interleave": point.interleave,
            "nnodes": nnodes,
            TRACES: traces,
        }
        present = {
            **{name: getattr(point, name) > 1 for name in (*DEGREES, *OUTER_DEGREES)},
            "ep": point.ep not in (MOE_TP, UNKNOWN) and point.ep_degree != 1,
            "exchange": bool(exchange) and point.dcp > 1,
            "q_replicate": point.q_replicate and point.dcp > 1,
            "interleave": point.interleave > 1 and point.dcp > 1,
            "kv": point.kv_dtype == FP8,
            "nodes": nnodes > 1,
        }
        words = shlex.split(self.command)
        for name, text in self.layout.items():
            words += shlex.split(text) if present[name] else []
        words += shlex.split(self.weights.get(point.weights, ""))
        words += shlex.split(self.profiler) if traces else []
        words = [word.format_map(known) for word in words]
        same = {name: value for name, value in self.flags.items() if not isinstance(value, list)}
        for name, value in (same | dict(settings)).items():
            if value not in (True, "True"):
                words += [f"--{name}", str(value)] if value not in (False, "False") else []
            else:
                words.append(f"--{name}")
        return words


def check_commands_differ(engine: Engine, points: Iterable[Point], model: str) -> None:
    """Raise UsageError if servers of different layouts or exchanges would have the same command."""
    seen: dict[tuple[str, ...], Point] = {}
    for point in points:
        other = seen.setdefault(tuple(engine.make_command(point, engine.find_settings(point), model, 0)), point)
        for names in (DEGREES, ("ep", "exchange")):
            if differing := [name for name in names if getattr(point, name) != getattr(other, name)]:
                raise UsageError(
                    f"{engine.name}: servers with different {format_list([format_flag(name) for name in differing])} would have the "
                    "same command; write an engine's file with these flags under [layout] (docs/servers.md), or give one value."
                )


WITHOUT_STACKS = {"SGLANG_PROFILE_WITH_STACK": "false", "SGLANG_PROFILE_RECORD_SHAPES": "false"}  # of its profiler


def use_step_profiler(engine: Engine) -> Engine:
    """Return the engine with the profiler that slows its steps down the least.

    An engine's file with the profiler of the preset of its name gets the preset's.
    """
    preset = PRESETS.get(engine.name)
    same = preset is not None and preset.profiler == engine.profiler
    found = engine.step_profiler or (preset.step_profiler if preset is not None and same else "")
    return msgspec.structs.replace(engine, profiler=found or engine.profiler, env={**WITHOUT_STACKS, **engine.env})


MODEL = "model"  # value of --weights: the model's own
CHECKPOINT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def choose_weights(engine: Engine, model: str, requested: str | None) -> str:
    """Return SYNTHETIC, DUMMY, or UNKNOWN for the model's own weights.

    By default a folder without a checkpoint gets synthetic weights, if the engine has flags for them. Raises UsageError for
    weights that are no choice or for which the engine has no flags.
    """
    if requested is None:
        folder = Path(model)
        empty = folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in CHECKPOINT_FILES)
        return SYNTHETIC if empty and SYNTHETIC in engine.weights else UNKNOWN
    if requested == MODEL:
        return UNKNOWN
    if requested not in (SYNTHETIC, DUMMY):
        raise UsageError(f"--weights {requested} is none of {MODEL}, {SYNTHETIC}, {DUMMY}.")
    if requested not in engine.weights:
        raise UsageError(
            f"--weights {requested}: {engine.name} has no flags for it; add them to the engine's file, under [weights], such as "
            f'{requested} = "--load-format dummy".'
        )
    return requested


EP_FLAGS = {
    VLLM: ("--enable-expert-parallel", "-ep"),
    SGLANG: ("--ep-size", "--ep", "--expert-parallel-size", "--moe-a2a-backend"),
}  # flags with which vLLM 0.26 and SGLang 0.5.17 place whole experts on ranks; without them they split every expert


def choose_ep(engine: Engine, dp: int, requested: str | None = None) -> str:
    """Return the expert-parallel degree of a server, as points store it: `requested`, or the engine's default.

    vLLM and SGLang split experts over all ranks of a layout with attention data parallelism (MOE_TP) unless one of EP_FLAGS is in
    the engine's command or flags. UNKNOWN for other engines, and for layouts without attention data parallelism.
    """
    if requested not in (None, UNKNOWN):
        return str(requested)
    known = engine.name in EP_FLAGS and dp > 1 and not _has_ep_flag(engine)
    return MOE_TP if known else UNKNOWN


def _has_ep_flag(engine: Engine) -> bool:
    """Return True if the engine's command, flags or flags of a layout with data parallelism contain one of EP_FLAGS."""
    words = shlex.split(engine.command) + shlex.split(engine.layout.get("dp", ""))
    words += [f"--{name}" for name, value in engine.flags.items() if value is not False]
    return any(word.partition("=")[0] in EP_FLAGS[engine.name] for word in words)


def make_environment(engine: Engine, point: Point, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that a server of a point gets: `more`, those of dcpbench's plugins, and the engine's own."""
    plugin = {SYNTHETIC_VARIABLE: "1"} if point.weights == SYNTHETIC else {}
    plugin |= {ROUTING_VARIABLE: point.routing} if point.routing else {}
    return {**(more or {}), **plugin, **engine.env}


def _make_labels(values: list[str]) -> list[str]:
    """Return values as they may be recorded. Of several secrets each has a number, so that their points differ."""
    shown = [redact(value) for value in values]
    secret = [value for value, label in zip(values, shown, strict=True) if value != label]
    numbers = (
        {value: f" {number}" for number, value in enumerate(dict.fromkeys(secret), 1)} if len(set(secret)) > 1 else {}
    )
    return [f"{label}{numbers.get(value, '')}" for value, label in zip(values, shown, strict=True)]


PRESETS = {  # presets by --engine; vLLM's tensor parallel degree is of a replica, ours and SGLang's of all GPUs
    VLLM: Engine(
        name=VLLM,
        command="vllm serve {model} --host {host} --port {port}",
        layout={
            "tp": "--tensor-parallel-size {attn_tp}",
            "dp": "--data-parallel-size {dp}",
            "dcp": "--decode-context-parallel-size {dcp}",
            "pp": "--pipeline-parallel-size {pp}",
            "pcp": "--prefill-context-parallel-size {pcp}",
            "ep": "--enable-expert-parallel",
            "exchange": "--dcp-comm-backend {exchange}",
            "interleave": "--cp-kv-cache-interleave-size {interleave}",
            "kv": "--kv-cache-dtype fp8",
            "nodes": "--nnodes {nnodes} --node-rank 0 --master-addr NODE0",
        },
        exchanges=["ag_rs", "a2a"],
        weights={SYNTHETIC: "--load-format dcpbench", DUMMY: "--load-format dummy"},
        variants={"eager": "--enforce-eager"},
        profiler="--profiler-config.profiler torch --profiler-config.torch_profiler_dir {traces}",
        step_profiler=(
            "--profiler-config.profiler torch --profiler-config.torch_profiler_dir {traces} "
            "--profiler-config.torch_profiler_with_stack false --profiler-config.torch_profiler_dump_cuda_time_total false "
            "--profiler-config.ignore_frontend true"
        ),
    ),
    SGLANG: Engine(
        name=SGLANG,
        command="python3 -m sglang.launch_server --model-path {model} --host {host} --port {port} --enable-metrics",
        layout={
            "tp": "--tp-size {tp}",
            "dp": "--dp-size {dp} --enable-dp-attention",
            "dcp": "--dcp-size {dcp}",
            "pp": "--pp-size {pp}",
            "ep": "--ep-size {tp}",
            "exchange": "--dcp-comm-backend {exchange}",
            "q_replicate": "--dcp-replicate-q-proj",
            "kv": "--kv-cache-dtype fp8_e4m3",
            "nodes": "--nnodes {nnodes} --node-rank 0 --dist-init-addr NODE0:29500",
        },
        exchanges=["ag_rs", "a2a", "fi_a2a"],
        sparse_dcp=False,
        weights={SYNTHETIC: "--load-format dummy", DUMMY: "--load-format dummy"},
        variants={"eager": "--disable-cuda-graph"},
    ),
}

PORT = 8000


def format_command(name: str, point: Point, nnodes: int) -> str:
    """Return the command line of a preset for the layout of a point and the model's own weights, on the first of several machines.

    Raises UsageError for a point that the engine cannot run.
    """
    model = REPOSITORIES.get(point.model, point.model)
    point = msgspec.structs.replace(point, weights=UNKNOWN)
    return shlex.join(PRESETS[name].make_command(point, {}, model, PORT, nnodes=nnodes))


def resolve_engine(named: str | None, command: str | None, arguments: str | None = None) -> Engine:
    """Return the engine of --engine (a preset or a file) or of --serve-cmd, with --engine-args behind its command.

    Raises UsageError.
    """
    if command is not None:
        if named is not None:
            raise UsageError("--engine and --serve-cmd contradict each other; give one of them.")
        words = split_command("--serve-cmd", command)
        if not words:
            raise UsageError(f"--serve-cmd is empty; write for example {EXAMPLE}.")
        found = Engine(name=Path(words[0]).name, command=command)
    else:
        found = PRESETS.get(str(named)) or _read_engine(str(named))
    if arguments is not None:
        found = msgspec.structs.replace(found, command=f"{found.command} {_escape_arguments(arguments)}")
    _check_engine(found, named or "--serve-cmd")
    register_command_line(shlex.split(found.command))
    register_command_line(found.secrets)
    return found


def _escape_arguments(text: str) -> str:
    """Return the value of --engine-args for a command, in which braces of its own are doubled. Raises UsageError."""
    return shlex.join(split_command("--engine-args", text)).replace("{", "{{").replace("}", "}}")


def _read_engine(named: str) -> Engine:
    path, known = Path(named), ", ".join(PRESETS)
    if path.suffix != ".toml":
        raise UsageError(f"--engine {named!r} is none of {known}, and no .toml file; docs/servers.md has an example.")
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Engine)
    except OSError as e:
        raise UsageError(f"--engine {path}: {e.strerror}; name {known} or a file that is there.") from e
    except msgspec.ValidationError as e:
        raise UsageError(f"--engine {path}: {e}; docs/servers.md has an example.") from e
    except (ValueError, RecursionError) as e:
        why = "it is nested too deep" if isinstance(e, RecursionError) else str(e)
        raise UsageError(f"--engine {path} is not valid TOML: {why}.") from e


def _check_placeholders(where: str, text: str, known: Sequence[str]) -> None:
    """Raise UsageError if a text has an open quote, a single brace, or a placeholder that is not known."""
    split_command(where, text)
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as e:
        raise UsageError(f"{where}: {text!r} cannot be read: {e}; write {{{{ for a literal brace.") from e
    for _, name, form, conversion in parts:
        if name is not None and (name not in known or form or conversion):
            shown = f"{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
            raise UsageError(f"{where}: {{{shown}}} is no placeholder; these are: {', '.join(known)}.")


def _check_engine(found: Engine, where: str) -> None:
    profilers = found.profiler, found.step_profiler
    for text in (found.command, *found.layout.values(), *found.weights.values(), *profilers):
        _check_placeholders(where, text, (*PLACEHOLDER_NAMES, TRACES) if text in profilers else PLACEHOLDER_NAMES)
    if "{port}" not in found.command:
        raise UsageError(f"{where}: the command has no {{port}}, which dcpbench chooses; write for example {EXAMPLE}.")
    if wrong := [name for name in found.layout if name not in LAYOUT]:
        raise UsageError(f"{where}: layout.{wrong[0]} is none of {', '.join(LAYOUT)}.")
    if wrong := [name for name in found.weights if name not in (SYNTHETIC, DUMMY)]:
        raise UsageError(f"{where}: weights.{wrong[0]} is none of {SYNTHETIC}, {DUMMY}.")
    if empty := [name for name, value in found.flags.items() if value == []]:
        raise UsageError(f"{where}: flags.{empty[0]} is empty; write its values, or leave it out.")
    if wrong := [name for name in found.env if not name or "=" in name or "\0" in name + found.env[name]]:
        raise UsageError(f'{where}: env.{wrong[0]} is no environment variable; write for example HF_HUB_OFFLINE = "1".')
    if not found.name:
        raise UsageError(f'{where}: name is empty; write for example name = "vllm".')
    if not found.ready.startswith("/"):
        raise UsageError(f"{where}: ready = {found.ready!r} is no path; write for example /health.")
