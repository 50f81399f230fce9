"""What `serve --url` was asked to send to a running server: options as points of that server's engine. No torch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, cast

import msgspec

from dcpbench.errors import LayoutError, UsageError
from dcpbench.plan import options as read
from dcpbench.plan.grid import Candidate
from dcpbench.plan.options import check_positive
from dcpbench.plan.serve_spec import SERVE_PARSERS, read_loads, serve_defaults, usual_clients
from dcpbench.points.engines import UNTOLD, engine_load, engine_point
from dcpbench.points.layout import DEGREES, Layout
from dcpbench.points.machine import Probe
from dcpbench.points.names import UNKNOWN, WHOLE, flag
from dcpbench.points.settings import Settings
from dcpbench.serving.loads import extent
from dcpbench.show.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.points.point import Point

TAKEN = [
    "model",
    "tp",
    "dp",
    "dcp",
    "ep",
    "dtype",
    "concurrency",
    "request_rate",
    "burstiness",
    "requests",
    "limit",
    "num_requests",
    "input_tokens",
    "output_tokens",
    "prefix_share",
    "prefix_groups",
    "turns",
    "turn_tokens",
    "think_time",
    "seed",
    "slo",
    "repeats",
]
"""Options of `serve` that make sense of a server that runs already; all others are our own engine's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What is sent to one server, and what the user says of it."""

    model: str | None
    """As the server calls it; None: the only one that it serves."""
    layout: Mapping[str, int]
    wrong: LayoutError | None
    """Why no server can have this layout."""
    ep: str
    dtype: str | None
    loads: ServeLoads
    repeats: int
    settings: Settings

    def points(self, engine: str, model: str, settings: Mapping[str, str] | None = None) -> list[Point]:
        """The points of this engine, in the order in which they run. `settings`: what was varied of the server."""
        found = []
        for repeat in range(self.repeats):
            for concurrency, load in self.loads.each():
                fields = {name: value for name, value in msgspec.structs.asdict(load).items() if name not in UNTOLD}
                found.append(
                    engine_point(
                        model=model,
                        layout=self.layout,
                        ep=self.ep,
                        precision={"dtype": self.dtype} if self.dtype else {},
                        backend=engine,
                        concurrency=concurrency or load.requests,
                        context=extent(load, self.settings.trace_path).longest,
                        load=engine_load(**fields),
                        settings=settings,
                        repeat=repeat,
                    )
                )
        return found

    def candidates(self, engine: str, model: str, settings: Mapping[str, str] | None = None) -> list[Candidate]:
        """The same points, with the reason where the degrees do not nest."""
        return [Candidate(point=point, error=self.wrong) for point in self.points(engine, model, settings)]


def split_layouts(given: Mapping[str, object]) -> list[dict[str, object]]:
    """Options with one value of each degree for each server that lists of them ask for, also where they do not nest."""
    axes = {name: read.ints(name, given[name]) for name in DEGREES if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in axes}
    return [rest | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def make_server_spec(given: Mapping[str, object], *, cpu: bool) -> ServerSpec:
    """Options as typed. `cpu`: whether the server is said to run on one, for which loads are small by default.

    Raises UsageError for options that only our own engine has, and for several values where one server has one.
    """
    if own := [flag(name) for name in given if name not in TAKEN]:
        raise UsageError(
            f"{listed(own)}: that is an option of dcpbench's own engine, and --url measures a server as it runs; leave "
            f"{'it' if len(own) == 1 else 'them'} out, or --url."
        )
    probe = Probe(device="cpu" if cpu else "cuda", count=0, name="")
    options = {name: SERVE_PARSERS[name](name, value) for name, value in given.items() if value is not None}
    loads, settings = read_loads(options, serve_defaults(probe) | usual_clients(probe.device))
    layout = _layout({name: _one(name, options.pop(name)) for name in DEGREES if name in options})
    ep = str(_one("ep", options.pop("ep"))) if "ep" in options else UNKNOWN
    repeats = cast("int", options.pop("repeats", 1))
    check_positive("repeats", repeats)
    return ServerSpec(
        model=cast("str | None", _one("model", options.pop("model"))) if "model" in options else None,
        layout=layout,
        wrong=_wrong(layout),
        ep=str(layout["tp"]) if ep == WHOLE and layout["tp"] else ep,
        dtype=cast("str | None", options.pop("dtype", None)),
        loads=loads,
        repeats=repeats,
        settings=Settings(**settings, profile=False),  # type: ignore[arg-type]
    )


def _layout(typed: Mapping[str, object]) -> dict[str, int]:
    """As typed; 0 for each degree where nobody says --tp. Raises UsageError for degrees without it."""
    if "tp" not in typed:
        if typed:
            given = listed([flag(name) for name in typed])
            raise UsageError(f"{given} without --tp: say how many GPUs the server has, for example --tp 8.")
        return dict.fromkeys(DEGREES, 0)
    return {name: cast("int", typed.get(name, 1)) for name in DEGREES}


def _wrong(layout: Mapping[str, int]) -> LayoutError | None:
    try:
        if any(layout.values()):
            Layout(**layout)
    except LayoutError as e:
        return e
    return None


def _one(name: str, value: object) -> object:
    values = value if isinstance(value, tuple) else (value,)
    if len(values) > 1:
        raise UsageError(
            f"{flag(name)} {','.join(map(str, values))}: the server at --url has one; name it, and measure another server "
            "by another command."
        )
    return values[0]
