"""Build the command that measures a single point of a report again."""

from __future__ import annotations

import shlex
from decimal import Decimal
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.points.axes import Role
from dcpbench.points.layout import DEGREES, OUTER_DEGREES, place_experts
from dcpbench.points.memory import GIB
from dcpbench.points.names import (
    COMPUTED,
    GAMMA,
    MOE_TP,
    NO_EXCHANGE,
    STORED,
    SYNTHETIC,
    TRACE,
    WEIGHT_FORMATS,
    format_flag,
    format_setting,
)
from dcpbench.points.point import AXES, select_point_axes
from dcpbench.points.structured_options import KEYS, RequestFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.points.point import Point

LISTS = [axis.name for axis in AXES if axis.kind is str and not axis.one]  # options that take a list of names
UNTYPED: dict[str, object] = {"exchange": NO_EXCHANGE, "weights": SYNTHETIC, "emulate": "", "routing": "", "mtp": 0}
UNTYPED |= {axis.name: axis.default for axis in select_point_axes(Role.DEPLOYED | Role.ASSUMED)}
"""Values for which an option is left out."""


def build_command(point: Point, settings: Mapping[str, object], *, cpu: bool = False) -> str:
    """Return `dcpbench sweep …` or `dcpbench serve …` for a shell, with this point as the only one, as its first repeat.

    `settings` are Record.measured_with; those that have an option are included. If the point's KV pool was sized for a
    larger point of its sweep (kv_memory_bytes is null), it is sized for this point alone. Raise UsageError for a point
    that no option can express: a name with a comma, or an empty one.
    """
    words = ["dcpbench", "serve" if point.load else "sweep"]
    roles = Role.ENGINE | Role.PATH | Role.DEPLOYED | Role.ASSUMED
    how = {axis.name: getattr(point, axis.name) for axis in select_point_axes(roles)}
    untyped = dict(UNTYPED)
    if not settings.get("step_times"):  # a file of step times has its own defaults
        untyped["ep"] = place_experts(MOE_TP, point.tp)
    how |= {name: how[name] or point.dtype for name in STORED}
    dtype = how.pop(COMPUTED)
    if all(how[name] in WEIGHT_FORMATS for name in STORED) and dtype != ("fp32" if cpu else "bf16"):
        raise UsageError(f"no option selects {dtype} for the computation if weights and KV are fp8.")
    how = {name: value for name, value in how.items() if untyped.get(name) != value}
    layout = {name: how.pop(name) for name in ("model", *DEGREES, "ep", "weights") if name in how}
    options = layout | _collect_load_options(point, settings) | how | _collect_measure_options(point, settings)
    for name, value in _join_keys(options).items():
        words += _format_option(name, value)
    words += ["--no-baseline"]
    words += ["--device", "cpu"] if cpu else []
    return shlex.join(words)


def _collect_load_options(point: Point, settings: Mapping[str, object]) -> dict[str, object]:
    load = point.load
    if load is None:
        return {"concurrency": point.concurrency, "context": point.context}
    found: dict[str, object] = {"mode": load.mode}
    if load.arrival != TRACE:  # a file's own times are the default if no option sets the arrival
        found["concurrency"] = point.concurrency
    if load.arrival == GAMMA:
        found |= {"request_rate": load.request_rate, "burstiness": load.burstiness}
    seconds = settings.get("limit_seconds")
    found |= {"num_requests": load.requests}
    if load.trace:
        found |= {"requests": settings.get("trace_path") or load.trace}
        found |= RequestFile.parse(load.trace_reading).collect_fields() if load.trace_reading else {}
    else:
        found |= {name: getattr(load, name) for name in ("input_tokens", "output_tokens")}
    found |= {} if seconds is None else {"limit_seconds": f"{Decimal(str(seconds)):f}"}
    if load.prefix_share:
        found |= {"prefix_share": load.prefix_share, "prefix_groups": load.prefix_groups}
    if load.sessions and not load.trace:
        found |= {"turns": load.turns, "think_time": load.think_time}
        more = {name: getattr(load, name) for name in ("turn_tokens", "system_tokens", "branch", "subagents")}
        found |= {name: value for name, value in more.items() if value}
    found |= {name: getattr(load, name) for name in ("chunk", "policy", "prefill", "seed")}
    stages = {name: getattr(point, name) for name in OUTER_DEGREES if getattr(point, name) > 1}
    if stages and settings.get("micro_batches"):
        stages["micro_batches"] = settings["micro_batches"]
    return found | stages | ({} if load.prefix_cache else {"prefix_cache": False})


def _collect_measure_options(point: Point, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the measurement settings that differ from the defaults of the command."""
    found: dict[str, object] = {}
    memory, slo = settings.get("kv_memory_bytes"), settings.get("slo")
    if isinstance(memory, int):
        found["kv_memory"] = f"{memory}B" if memory % GIB else f"{memory // GIB}GiB"
    if point.load is None and "seconds" in settings:
        found["seconds"] = settings["seconds"]
    if point.load and isinstance(slo, dict) and slo:
        found["slo"] = ",".join(f"{name}={limit!r}" for name, limit in slo.items())
    if point.load and settings.get("step_times"):
        found["step_times"] = settings["step_times"]
    return found | ({"no_profile": True} if settings.get("profile") is False else {})


def _join_keys(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with those that are keys of a structured option joined into one, at the place of the first."""
    found: dict[str, object] = {}
    for name, value in options.items():
        if name not in KEYS:
            found[name] = value
            continue
        declared, key = KEYS[name]
        text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
        if "," in text or not text:
            raise UsageError(
                f"{format_setting(name, repr(text))} cannot be typed: a comma, and nothing, have another meaning."
            )
        if value is False and name != "prefix_cache":
            continue
        option = declared.option[2:].replace("-", "_")
        before = f"{found[option]}," if option in found else ""
        found[option] = before + (text if not before and key == declared.bare else f"{key}={text}")
    return found


def _format_option(name: str, value: object) -> list[str]:
    """Return an option as command-line words; switches that are off are left out."""
    if isinstance(value, bool):
        return [format_flag(name)] if value else []
    text = str(value)
    if not text or ("," in text and name in LISTS):
        raise UsageError(f"{format_flag(name)} cannot be {text!r}: a comma list, and nothing, have another meaning.")
    return [f"{format_flag(name)}={text}"] if text.startswith("-") else [format_flag(name), text]
