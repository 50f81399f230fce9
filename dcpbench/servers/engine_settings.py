"""List the settings of engines that `dcpbench verify --engine` compares: layouts, exchanges and variants. No torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dcpbench.errors import UsageError
from dcpbench.plan import option_parsers as read
from dcpbench.plan.used_options import check_used, list_changed_options
from dcpbench.points.engine_points import format_settings, make_engine_load, make_engine_point
from dcpbench.points.expert_distribution import EVEN
from dcpbench.points.layout import DEGREES, Layout
from dcpbench.points.names import FP8, MOE_EP, SYNTHETIC, UNKNOWN, format_flag
from dcpbench.points.redaction import register_command_line
from dcpbench.servers.presets import check_commands_differ, choose_ep, choose_weights, make_environment
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.points.point import Point
    from dcpbench.servers.presets import Engine

_T = TypeVar("_T")

ENGINE_OPTIONS = (
    "model",
    "tp",
    "dp",
    "dcp",
    "ep",
    "exchange",
    "q_replicate",
    "kv_dtype",
    "interleave",
    "concurrency",
    "context",
)  # options of dcpbench's own engine that other engines have as well


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a server that is started: an engine, a layout with its exchange, and further flags."""

    engine: Engine
    point: Point
    variant: str = ""
    flags: tuple[str, ...] = ()  # words that are added to the command
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # values of the lists in the file's [flags]

    @property
    def name(self) -> str:
        """Return the name in tables, such as `vllm tp2·dcp2 a2a eager`."""
        exchange = "" if self.point.dcp <= 1 or self.point.exchange == UNKNOWN else self.point.exchange
        return " ".join(filter(None, (self.engine.name, str(self.point.layout), exchange, self.variant)))

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that the server gets in addition to those of this process."""
        return make_environment(self.engine, self.point)

    def make_command(self, model: str, port: int) -> list[str]:
        """Return the command line of the server. Raise UsageError if the engine cannot run it."""
        return [*self.engine.make_command(self.point, self.settings, model, port), *self.flags]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Describe the layouts that are compared, as the options give them."""

    model: str
    layouts: Sequence[Layout]
    exchanges: Sequence[str] = ()  # of layouts with dcp; empty: the engine's default
    ep: str = UNKNOWN
    weights: str | None = None  # value of --weights; None: the default of each engine
    kv_dtype: str = ""
    q_replicate: bool = False
    interleave: int = 1
    routing: str = ""  # distribution of experts, with synthetic weights


def list_all_settings(engines: Sequence[Engine], grid: Grid, variants: Sequence[str]) -> list[Setting]:
    """Return all settings; the others are compared with the first. Variants run in the last layout of each engine.

    Raise UsageError for a variant that an engine does not have.
    """
    found: list[Setting] = []
    for engine in engines:
        points = [point for layout in grid.layouts for point in _list_points(engine, layout, grid)]
        check_commands_differ(engine, points, grid.model)
        combinations = list(zip(engine.list_labels(), engine.list_settings(), strict=True))
        usual = combinations[0][1]
        found += [Setting(engine=engine, point=point, settings=usual) for point in points]
        last = functools.partial(Setting, engine=engine, point=points[-1])
        found += [last(variant=format_settings(label), settings=values) for label, values in combinations[1:]]
        own = _read_variants(engine, variants, len(engines))
        found += [last(variant=name, flags=tuple(flags), settings=usual) for name, flags in own.items()]
    for setting in found:
        setting.make_command(grid.model, 1)
    if repeated := [one.name for i, one in enumerate(found) if one.name in [other.name for other in found[:i]]]:
        raise UsageError(f"{repeated[0]} is listed twice; name each engine, layout and variant once.")
    return found


def _list_points(engine: Engine, layout: Layout, grid: Grid) -> list[Point]:
    """Return the points of a layout: one for each exchange if its ranks share the KV cache."""
    ep = choose_ep(engine, layout.dp, str(layout.tp) if grid.ep == MOE_EP else grid.ep)
    point = make_engine_point(
        model=grid.model,
        layout={"tp": layout.tp, "dp": layout.dp, "dcp": layout.dcp},
        ep=ep,
        backend=engine.name,
        load=make_engine_load(requests=1, input_tokens="1", output_tokens="1"),
        concurrency=1,
        context=1,
        precision={"kv_dtype": grid.kv_dtype} if grid.kv_dtype else {},
        weights=choose_weights(engine, grid.model, grid.weights),
    )
    if grid.routing and point.weights != SYNTHETIC:
        raise UsageError(
            f"--routing {grid.routing} with --engine needs --weights {SYNTHETIC}: other weights have their own routers."
        )
    point = msgspec.structs.replace(point, interleave=1, routing=grid.routing)
    if layout.dcp <= 1:
        return [point]
    point = msgspec.structs.replace(point, q_replicate=grid.q_replicate, interleave=grid.interleave)
    if not grid.exchanges:
        return [point]
    return [msgspec.structs.replace(point, exchange=exchange) for exchange in grid.exchanges]


def _read_variants(engine: Engine, variants: Sequence[str], engines: int) -> dict[str, list[str]]:
    """Return the flags of each --variant: NAME of the engine's own, or NAME=FLAGS."""
    found: dict[str, list[str]] = {}
    for text in variants:
        name, equals, flags = text.partition("=")
        if equals and engines > 1:
            raise UsageError(
                f"--variant {name}=… with {engines} engines: flags belong to one engine; write them into [variants] of its file, "
                f"and give --variant {name}."
            )
        if not equals and name not in engine.variants:
            known = format_list(sorted(engine.variants)) or "none"
            raise UsageError(
                f"--variant {name}: {engine.name} has no such variant (it has {known}); write for example "
                f"--variant {name or 'eager'}=--enforce-eager."
            )
        if not name or name in found:
            raise UsageError(
                f"--variant {text}: each variant needs its own name, as in --variant eager=--enforce-eager."
            )
        found[name] = read.split_command(f"--variant {name}", flags if equals else engine.variants[name])
        register_command_line(found[name])
    return found


def parse_layouts(given: Mapping[str, object]) -> list[Layout]:
    """Return the layouts of the options --tp, --dp and --dcp. Without --dcp they are dcp 1 and the largest dcp of each tp."""
    degrees = {name: read.parse_positive_ints(name, given[name]) for name in DEGREES if name in given}
    return [
        Layout(tp=tp, dp=dp, dcp=dcp)
        for tp, dp in itertools.product(degrees.get("tp", (1,)), degrees.get("dp", (1,)))
        for dcp in degrees.get("dcp") or dict.fromkeys((1, max(tp // dp, 1)))
    ]


def parse_grid(given: Mapping[str, object], model: str, layouts: Sequence[Layout]) -> Grid:
    """Return the layouts with the options that all of them share. Raise UsageError for several values of such an option."""
    interleave = int(str(given.get("interleave", 1)))
    read.check_positive("interleave", interleave)
    kv_dtype = _get_single(
        "kv_dtype", read.parse_names("kv_dtype", given["kv_dtype"]) if "kv_dtype" in given else ("",)
    )
    if kv_dtype not in ("", FP8):
        raise UsageError(f"--kv-dtype {kv_dtype}: with --engine it is fp8, or left out for the engine's default.")
    weights = given.get("weights")
    q_replicate = _get_single("q_replicate", read.parse_bools("q_replicate", given.get("q_replicate", False)))
    exchanges = read.parse_names("exchange", given["exchange"]) if "exchange" in given else ()
    typed = list_changed_options({"exchange": exchanges, "q_replicate": q_replicate, "interleave": interleave})
    check_used(typed, ((layout.tp, layout.dp, layout.dcp) for layout in layouts))
    return Grid(
        model=model,
        layouts=layouts,
        exchanges=exchanges,
        ep=_get_single("ep", read.parse_degrees("ep", given["ep"]) if "ep" in given else (UNKNOWN,)),
        weights=None if weights is None else str(weights),
        kv_dtype=kv_dtype,
        q_replicate=q_replicate,
        interleave=interleave,
        routing=_get_single("routing", read.parse_routings("routing", given.get("routing", EVEN))),
    )


def _get_single(name: str, values: Sequence[_T]) -> _T:
    if len(values) > 1:
        raise UsageError(
            f"{format_flag(name)}: with --engine it has one value; measure the others by further commands."
        )
    return values[0]


def list_decode_points(
    engine: Engine, grid: Grid, concurrency: Sequence[int], context: Sequence[int], repeats: int
) -> list[Point]:
    """Return the decode points of all servers: layouts, exchanges and combinations of the engine's flags."""
    servers = [point for layout in grid.layouts for point in _list_points(engine, layout, grid)]
    return [
        msgspec.structs.replace(
            server,
            workload="decode",
            load=None,
            concurrency=requests,
            context=tokens,
            settings=format_settings(label),
            repeat=repeat,
        )
        for repeat, server, label in itertools.product(range(repeats), servers, engine.list_labels())
        for tokens, requests in itertools.product(context, concurrency)
    ]
