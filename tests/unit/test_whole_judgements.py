"""What is said of points made at random on several machines, whole, as tests/data/said/judged/ has it.

Sizes lie at and next to what kernels, graphs, positions and memory take. `SAID=write` writes the files anew, as for
test_whole_outputs.py.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.errors import DcpbenchError
from dcpbench.plan import judge
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points.machine import Probe
from dcpbench.points.names import EXCHANGES
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings
from dcpbench.points.shapes import SHAPES, ModelShape
from tests.unit.test_whole_outputs import hold

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
CPU = Probe(device="cpu", count=0, name="CPU")
NO_FP8 = msgspec.structs.replace(make_planned_probe("H100", 8), name="NVIDIA A100", capability="8.0", gpu=None)
SMALL = msgspec.structs.replace(make_planned_probe("H200", 4), memory_bytes=20 * GIB, packages={"flashinfer": "0.6"})
MACHINES = {
    "8 H200": make_planned_probe("H200", 8),
    "4 H200 of 20 GiB": SMALL,
    "8 A100": NO_FP8,
    "1 B200": make_planned_probe("B200", 1),
    "CPU": CPU,
    "CPU beside 2 H200": dataclasses.replace(CPU, count=2)
    if dataclasses.is_dataclass(CPU)
    else msgspec.structs.replace(CPU, count=2),
}
WIDTHS = {
    "latent": 48,
    "rope": 24,
    "value": 96,
    "moe_inter": 24,
    "nope": 48,
    "heads": 12,
    "max_position": 4_000,
    "hidden": 320,
}


def shape_of(rng: random.Random, model: str) -> tuple[ModelShape, str]:
    """A model's shape, now and then with one width that something does not take."""
    if rng.random() < 0.7:
        return SHAPES[model], ""
    name = rng.choice([*WIDTHS])
    return dataclasses.replace(SHAPES[model], **{name: WIDTHS[name]}), f" {name} {WIDTHS[name]}"


LOADS: dict[str, list[Any]] = {
    "input_tokens": ["400", "uniform:50-4000", "3960", "131033", "163000"],
    "output_tokens": ["1", "40", "lognormal:300:0.8"],
    "chunk": [64, 127, 256, 8192, 1 << 20],
    "mode": ["live", "replay"],
    "prefill": ["sdpa", "flashinfer"],
    "turns": ["1", "3"],
}
AXES: dict[str, list[Any]] = {
    "tp": [1, 2, 4, 6, 8, 16],
    "dp": [1, 2, 8],
    "dcp": [1, 2, 4, 8],
    "ep": ["1", "tp"],
    "concurrency": [1, 2, 3, 48, 200, 511, 512, 513, 1024, 1025],
    "context": [100, 3_999, 4_000, 32_000, 131_071, 131_072, 163_839, 163_840],
    "exchange": [*EXCHANGES, "auto"],
    "backend": ["triton", "flashinfer", "flashmla", "reference", "auto"],
    "dtype": ["bf16", "fp16", "fp32"],
    "weights_dtype": ["", "fp8"],
    "kv_dtype": ["", "fp8"],
    "page_size": [1, 16, 32, 64],
    "all_reduce": ["nccl", "symm"],
    "project_first": [True],
    "emulate": ["H200", "H200+rdma-400", "B200"],
    "disaggregate": ["1:1"],
}


def point_of(rng: random.Random, model: str, tp: int) -> Point:
    """A point of a model that mostly runs, with up to three axes changed."""
    load = None
    if rng.random() < 0.4:
        changed = {name: rng.choice(LOADS[name]) for name in rng.sample([*LOADS], rng.choice([0, 1, 2]))}
        load = Load(
            **{
                "requests": 20,
                "input_tokens": "400",
                "output_tokens": "40",
                "chunk": 8192,
                "turn_tokens": "20",
                **changed,
            }
        )
    fields: dict[str, Any] = {
        "model": model,
        "tp": tp,
        "dcp": rng.choice([1, tp]),
        "ep": "1",
        "concurrency": 8,
        "context": 4_000,
        "exchange": "ag_rs",
        "backend": "triton",
        "dtype": "bf16",
        "page_size": 16,
    }
    fields |= {name: rng.choice(AXES[name]) for name in rng.sample([*AXES], rng.choice([0, 1, 2, 2, 3]))}
    fields |= {} if fields["dcp"] > 1 else {"exchange": "none"}
    return Point(**fields, **({"workload": "serve", "load": load} if load else {}))


def judged(point: Point, settings: Settings, shape: ModelShape, machine: judge.Machine) -> str:
    """The sentence, with the name of its error."""
    try:
        judge.check_runnable(point, settings, shape, machine)
    except DcpbenchError as e:
        return f"{type(e).__name__}: {e}"
    return "runs"


@pytest.mark.parametrize("machine", MACHINES)
def test_points_made_at_random_are_judged(machine: str, tmp_path: Path) -> None:
    """Of 500 those of which nothing alike was said three times before: as they were drawn, and what is said."""
    rng = random.Random(machine)
    probe = MACHINES[machine]
    lines = []
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(500):
        model = rng.choice(["tiny", "tiny", "deepseek-v2-lite", "deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
        (shape, wide), point = shape_of(rng, model), point_of(rng, model, min(probe.count or 8, 8))
        settings = Settings(kv_memory_bytes=rng.choice([None, None, 1 << 20, 200 << 20, 4 * GIB, 100 * GIB]))
        against = judge.Machine(probe=probe, nnodes=rng.choice([1] * 7 + [2]), timed=rng.random() < 0.85)
        said = judged(point, settings, shape, against)
        alike = re.sub(r"[\d,.]+|auto|tiny|deepseek-v\d(-lite)?|kimi-k2", "#", said)
        seen[alike] += 1
        if seen[alike] > 3:
            continue
        named = [v for k, v in msgspec.structs.asdict(point).items() if k != "load" and v not in ("", 0, False, None)]
        of_load = [getattr(point.load, name) for name in LOADS] if point.load else ""
        lines.append(
            f"{' '.join(map(str, named))}{wide} {of_load} kv {settings.kv_memory_bytes} {against.nnodes} {against.timed:d}\n  {said}"
        )
    hold(f"judged/{machine.replace(' ', '-')}.txt", "\n".join(lines), tmp_path)
