"""Write docs/coverage.md: which models, precisions, layouts and loads dcpbench covers, and how.

    python -m tools.coverage -o docs/coverage.md

The planner decides each cell: models, weight formats and options are those that the package declares, and a cell has a letter if points of
that kind pass the planner's checks. Run it after a change to a declaration; a test compares the page.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.engine_plugins import find_lack
from dcpbench.errors import DcpbenchError
from dcpbench.models import FAMILIES, NOT_PLANNED, load_shape
from dcpbench.models.weight_formats import BF16
from dcpbench.plan.grid import Candidate, expand_grid
from dcpbench.plan.serve_spec import make_serve_spec
from dcpbench.plan.spec import make_planned_probe, make_spec
from dcpbench.plan.validate import find_live_limit
from dcpbench.points.layout import OUTER_DEGREES
from dcpbench.points.names import ENGINE_NAMES, MOE_EP, MOE_TP, REPLAY, SYNTHETIC, WEIGHT_FORMATS
from dcpbench.servers.presets import PRESETS
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.models.family import Family

LIVE, REPLAYED, EMULATED, PLANNED, SERVED = LETTERS = "LREPS"
NONE, UNKNOWN = "–", "?"
MACHINE, GPUS = "H200", 8
WHOLE_MODEL = [
    {"tp": tp, "dcp": 1} for tp in (8, 4, 2, 1)
]  # small models use fewer GPUs, because fp8 blocks are never split
PARALLEL: dict[str, list[dict[str, Any]]] = {  # options of the tried layouts of each kind
    "tp": [{"tp": tp, "dcp": 1} for tp in (8, 4, 2)],
    "tp, ep": [{"tp": tp, "dcp": 1, "ep": MOE_EP} for tp in (8, 4, 2)],
    "dcp": [{"tp": tp, "dcp": dcp} for tp in (8, 4, 2) for dcp in (2, tp)],
    "dp": [{"tp": tp, "dp": tp, "dcp": 1, "ep": MOE_TP} for tp in (8, 4, 2)],
    "dp, ep": [{"tp": tp, "dp": tp, "dcp": 1, "ep": MOE_EP} for tp in (8, 4, 2)],
    "dp, dcp": [{"tp": tp, "dp": 2, "dcp": tp // 2} for tp in (8, 4)],
    "pp": [{"tp": tp, "dcp": 1, "pp": 2} for tp in (4, 2)],
    "pcp": [{"tp": tp, "dcp": 1, "pcp": 2} for tp in (4, 2)],
}
LOADS: dict[str, dict[str, Any]] = {  # options of each kind of served load
    "closed loop": {"concurrency": 8},
    "open loop": {"request_rate": 2.0},
    "sessions": {"concurrency": 8, "turns": "4"},
    "shared prefixes": {"concurrency": 8, "prefix_share": 0.5},
    "other engines' policies": {"concurrency": 8, "policy": "vllm"},
    "several instances": {"concurrency": 8, "disaggregate": "2"},
    "disaggregated prefill": {"concurrency": 8, "disaggregate": "1:1", "transfer_gb_s": 50.0},
    "stated routing": {"concurrency": 8, "routing": "zipf:1"},
}
HEAD = """# What is covered

Written by `python -m tools.coverage -o docs/coverage.md`; do not edit. The planner decides each cell on {gpus} × {machine}.

- **L**: live in dcpbench's engine: `sweep`, and `serve` for loads. **R**: replayed (`serve --mode replay`).
- **E**: emulated by one GPU (`--emulate`). **P**: planned (`--dry-run`) and estimated (`recommend`).
- **S**: {engines} with dcpbench's synthetic weights. Servers with weights of their own are measured over HTTP, for any model.
- {none}: not supported. {unknown}: depends on its config.json; dcpbench has no published sizes of the family.

`ep`: expert parallel; `dp`: attention DP; `pp`, `pcp`: `--stages`.
"""


@functools.cache
def plan_points(model: str, served: bool, gpus: int, **options: Any) -> tuple[Candidate, ...]:  # noqa: ANN401 -- options
    """Return the points of these options on a machine with this many GPUs; none if the options are refused."""
    probe = make_planned_probe(MACHINE, gpus)
    make = make_serve_spec if served else make_spec
    all_options = (
        {"model": model, "baseline": False} | ({} if served else {"concurrency": 8, "context": 4000}) | options
    )
    try:
        return tuple(expand_grid(make(all_options, probe), probe))
    except DcpbenchError:
        return ()


def is_planned(model: str, *, served: bool = False, gpus: int = GPUS, **options: Any) -> bool:  # noqa: ANN401 -- options
    """Return True if a point of these options passes the planner's checks."""
    return any(found.error is None for found in plan_points(model, served, gpus, **options))


def list_letters(model: str, options: Mapping[str, Any]) -> str:
    """Return the letters of decode steps of a model with these options."""
    weights = options.get("weights_dtype", "published")
    shape = load_shape(model)
    name = shape.published.name if weights == "published" else weights
    staged = any(options.get(degree, 1) > 1 for degree in OUTER_DEGREES)
    engine = not staged and find_live_limit(shape, "" if name == BF16 else name) is None
    found = {
        LIVE: engine and is_planned(model, **options),
        REPLAYED: engine and is_planned(model, served=True, mode=REPLAY, concurrency=8, **options),
        EMULATED: engine and is_planned(model, gpus=1, emulate=MACHINE, **options),
        PLANNED: is_planned(model, **options),
        SERVED: not staged
        and name == shape.published.name
        and find_lack(shape, name) is None
        and is_planned(model, **options),
    }
    return "".join(letter for letter, covered in found.items() if covered)


def list_best_letters(models: Sequence[str], options_list: Sequence[Mapping[str, Any]], **common: Any) -> str:  # noqa: ANN401 -- options
    """Return the letters that any of the models has with any of these options; UNKNOWN without a model."""
    found = {
        letter for model in models for options in options_list for letter in list_letters(model, {**options, **common})
    }
    return "".join(letter for letter in LETTERS if letter in found) or (NONE if models else UNKNOWN)


def list_models(family: Family) -> list[str]:
    """Return the published models of a family or, without any, of the first family with the same parser of config.json."""
    families = [family, *(other for other in FAMILIES if other.parse_shape is family.parse_shape)]
    presets = next((one.presets for one in families if one.presets), ())
    return [preset.shape.name for preset in presets]


def format_models(family: Family) -> str:
    """Format the names of a family's published models on the command line."""
    names = list(itertools.chain.from_iterable(preset.repositories for preset in family.presets))
    return ", ".join(f"`{name}`" for name in names) or "by config.json"


def format_models_table() -> Iterator[str]:
    """Yield the table of families by weight format, and the models that are refused by name."""
    formats = (BF16, *WEIGHT_FORMATS)
    yield f"## Models and weights\n\n| family | `model_type` | models | {' | '.join(formats)} |\n|---|---|---|{'---|' * len(formats)}"
    for family in FAMILIES:
        cells = [list_best_letters(list_models(family), WHOLE_MODEL, weights_dtype=name) for name in formats]
        yield f"| {family.title} | `{family.model_type}` | {format_models(family)} | {' | '.join(cells)} |"
    yield f"\nRefused by name, with the reason: {', '.join(f'`{name}`' for name in NOT_PLANNED)}."


def format_layouts_table() -> Iterator[str]:
    """Yield the table of families by kind of layout, in the published weights."""
    yield f"\n## Layouts, in the published weights\n\n| family | {' | '.join(PARALLEL)} |\n|---|{'---|' * len(PARALLEL)}"
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        cells = tuple(list_best_letters(list_models(family), tried) for tried in PARALLEL.values())
        rows.setdefault(cells, []).append(family.title)
    yield from (f"| {', '.join(titles)} | {' | '.join(cells)} |" for cells, titles in rows.items())


def format_loads_table() -> Iterator[str]:
    """Yield the table of loads, for DeepSeek-V3."""
    yield "\n## Loads, with DeepSeek-V3 at tp8\n\n| covered | loads |\n|---|---|"
    rows: dict[str, list[str]] = {list_best_letters(["deepseek-v3"], WHOLE_MODEL[:1]): ["decode steps"]}
    for name, options in LOADS.items():
        same = {"tp": 8, "dcp": 1, **options}
        letters = {
            LIVE: is_planned("deepseek-v3", served=True, **same),
            REPLAYED: is_planned("deepseek-v3", served=True, mode=REPLAY, **same),
            EMULATED: is_planned("deepseek-v3", served=True, gpus=1, mode=REPLAY, emulate=MACHINE, **same),
        }
        covered = "".join(letter for letter, found in letters.items() if found) or NONE
        rows.setdefault(covered, []).append(name)
    yield from (f"| {covered} | {', '.join(names)} |" for covered, names in rows.items())
    yield "\n`dcpbench server` sends the same requests to a server."


def format_page() -> str:
    """Format the page."""
    engines = format_list([ENGINE_NAMES[name] for name, engine in PRESETS.items() if SYNTHETIC in engine.weights])
    head = HEAD.format(gpus=GPUS, machine=MACHINE, engines=engines, none=NONE, unknown=UNKNOWN)
    return "\n".join([head, *format_models_table(), *format_layouts_table(), *format_loads_table()]) + "\n"


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="page to write; default: stdout")
    output = parser.parse_args().output
    if output:
        output.write_text(format_page(), encoding="utf-8")
    else:
        sys.stdout.write(format_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
