"""Convert the options of `server --url` and `--engine` to points of the server's engine. No torch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, cast

import msgspec

from dcpbench.errors import LayoutError, UsageError
from dcpbench.plan import option_parsers as read
from dcpbench.plan.grid import Candidate
from dcpbench.plan.option_parsers import check_positive
from dcpbench.plan.serve_spec import FILE, SERVE_SPEC_PARSERS, get_default_clients, get_serve_defaults, read_loads
from dcpbench.plan.used_options import check_used
from dcpbench.points.device_probe import Probe
from dcpbench.points.engine_points import UNKNOWN_FIELDS, make_engine_load, make_engine_point
from dcpbench.points.layout import DEGREES, Layout, place_experts
from dcpbench.points.names import MOE_EP, UNKNOWN, format_flag
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.serving.loads import compute_extent
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.serving.step_times import StepTimes

OPTIONS = [  # options of `server` about its layout and the loads, which a configuration file may hold
    "model",
    "tp",
    "dp",
    "dcp",
    "ep",
    "dtype",
    "exchange",
    "concurrency",
    "request_rate",
    "burstiness",
    *FILE,
    "limit_seconds",
    "num_requests",
    "input_tokens",
    "output_tokens",
    "prefix_share",
    "prefix_groups",
    "turns",
    "turn_tokens",
    "think_time",
    "system_tokens",
    "branch",
    "subagents",
    "session_preset",
    "seed",
    "mode",
    "slo",
    "repeats",
]
SERVER_PARSERS = {name: SERVE_SPEC_PARSERS[name] for name in OPTIONS} | {"exchange": read.parse_names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Describe the loads for one server, and its layout as the user gives it."""

    model: str | None  # name of the model on the server; None: the only one that it serves
    layout: Mapping[str, int]
    wrong: LayoutError | None  # error if no server can have this layout
    ep: str
    dtype: str | None
    exchange: str  # exchange of layouts with dcp, by the engine's name for it, or UNKNOWN
    weights: str  # SYNTHETIC, DUMMY, or UNKNOWN for the model's own weights
    loads: ServeLoads
    repeats: int
    settings: Settings

    def make_points(self, engine: str, model: str, settings: Mapping[str, str] | None = None) -> list[Point]:
        """Return the points of this engine in the order in which they run. `settings`: flags of the server that are varied."""
        found = []
        for repeat in range(self.repeats):
            for concurrency, load in self.loads.iter_loads():
                fields = {
                    name: value for name, value in msgspec.structs.asdict(load).items() if name not in UNKNOWN_FIELDS
                }
                found.append(
                    make_engine_point(
                        model=model,
                        layout=self.layout,
                        ep=self.ep,
                        weights=self.weights,
                        exchange=self.exchange,
                        precision={"dtype": self.dtype} if self.dtype else {},
                        backend=engine,
                        concurrency=concurrency or load.requests,
                        context=compute_extent(load, self.settings.trace_path).longest,
                        load=make_engine_load(**fields),
                        settings=settings,
                        repeat=repeat,
                    )
                )
        return found

    def make_candidates(self, engine: str, model: str, settings: Mapping[str, str] | None = None) -> list[Candidate]:
        """Return the same points, with the error if the degrees do not divide each other."""
        return [Candidate(point=point, error=self.wrong) for point in self.make_points(engine, model, settings)]


def make_step_time_points(spec: ServerSpec, times: StepTimes) -> list[Point]:
    """Return the points of a spec as points of the server that the step times were measured on."""
    assert times.engine is not None
    found = []
    for point in spec.make_points(times.engine.engine, str(times.path["model"])):
        assert point.load is not None
        own = {name: times.path[name] for name in Point.__struct_fields__ if name in times.path}
        load = msgspec.structs.replace(point.load, prefill=str(times.path["prefill"]))
        found.append(msgspec.structs.replace(point, **own, load=load, settings=times.engine.settings))
    return found


def split_layouts(given: Mapping[str, object]) -> list[dict[str, object]]:
    """Return options for each server, with one value of each degree, of --ep and of --exchange, for all combinations of their lists.

    Without decode context parallelism there is no exchange, and one server stands for all of them. The options have --tp.
    """
    axes = {
        name: cast("Sequence[object]", SERVER_PARSERS[name](name, given[name]))
        for name in (*DEGREES, "ep", "exchange")
        if given.get(name) is not None
    }
    rest = {name: value for name, value in given.items() if name not in axes}
    found = [rest | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    layouts = [tuple(cast("int", one.get(name, 1)) for name in DEGREES) for one in found]
    check_used({"exchange"} & axes.keys(), cast("list[tuple[int, int, int]]", layouts))
    for one in found:
        if one.get("dcp", 1) == 1:
            one.pop("exchange", None)
        if "ep" in one:
            one["ep"] = place_experts(str(one["ep"]), cast("int", one["tp"]))
    return [one for i, one in enumerate(found) if one not in found[:i]]


def make_server_spec(given: Mapping[str, object], *, cpu: bool, weights: str = UNKNOWN) -> ServerSpec:
    """Parse the given options; `cpu` is True if the server runs on a CPU, for which loads are small by default.

    Raise UsageError for several values of an option of which one server has one.
    """
    probe = Probe(device="cpu" if cpu else "cuda", count=0, name="")
    options = {name: SERVER_PARSERS[name](name, value) for name, value in given.items() if value is not None}
    loads, settings = read_loads(options, get_serve_defaults(probe) | get_default_clients(probe.device))
    layout = _parse_layout({name: _get_single(name, options.pop(name)) for name in DEGREES if name in options})
    check_used({"exchange"} & options.keys(), [(layout["tp"], layout["dp"], layout["dcp"])])
    ep = str(_get_single("ep", options.pop("ep"))) if "ep" in options else UNKNOWN
    repeats = cast("int", options.pop("repeats", 1))
    check_positive("repeats", repeats)
    return ServerSpec(
        model=cast("str | None", _get_single("model", options.pop("model"))) if "model" in options else None,
        layout=layout,
        wrong=_find_layout_error(layout),
        ep=str(layout["tp"]) if ep == MOE_EP and layout["tp"] else ep,
        dtype=cast("str | None", options.pop("dtype", None)),
        exchange=str(_get_single("exchange", options.pop("exchange"))) if "exchange" in options else UNKNOWN,
        weights=weights,
        loads=loads,
        repeats=repeats,
        settings=Settings(**settings, profile=False),  # type: ignore[arg-type]
    )


def _parse_layout(typed: Mapping[str, object]) -> dict[str, int]:
    """Return the given degrees, all 0 without --tp; raise UsageError for other degrees without --tp."""
    if "tp" not in typed:
        if typed:
            given = format_list([format_flag(name) for name in typed])
            raise UsageError(f"{given} without --tp: add the number of the server's GPUs, for example --tp 8.")
        return dict.fromkeys(DEGREES, 0)
    return {name: cast("int", typed.get(name, 1)) for name in DEGREES}


def _find_layout_error(layout: Mapping[str, int]) -> LayoutError | None:
    try:
        if any(layout.values()):
            Layout(**layout)
    except LayoutError as e:
        return e
    return None


def _get_single(name: str, value: object) -> object:
    values = value if isinstance(value, tuple) else (value,)
    if len(values) > 1:
        raise UsageError(
            f"{format_flag(name)} {','.join(map(str, values))}: a server has one value; give that one, and measure another server by "
            "another command."
        )
    return values[0]
