"""Every point of these results: `python measure.py PART FOLDER` runs one part as one torchrun job on 4 GPUs.

Points as `dcpbench serve` makes them, but of several loads and modes in one job, so that they share weights, graphs and
step times.
"""

import sys
from pathlib import Path

from dcpbench import launch
from dcpbench.jobs import Settings
from dcpbench.records import Point
from dcpbench.serve_records import Load
from dcpbench.torchrun import Machines

GIB = 1 << 30
V3, K2 = "deepseek-v3", "kimi-k2"
DCP = {"dcp": 4, "exchange": "ag_rs"}
A2A = {"dcp": 4, "exchange": "a2a"}
SYMM = {"dcp": 4, "exchange": "symm"}
TP = {}
DP = {"dp": 4}
MOST_32K, MOST_128K = 33_000, 129_000


def point(model, layout, mode, concurrency, inputs, outputs, requests, context, *, rate=None, policy="mixed"):
    arrival = "closed" if rate is None else "gamma"
    load = Load(
        mode=mode, requests=requests, arrival=arrival, request_rate=rate, input_tokens=inputs, output_tokens=outputs,
        chunk=8192, prefill="flashinfer", policy=policy,
    )
    return Point(
        model=model, workload="serve", tp=4, concurrency=concurrency, context=context, backend="triton", dtype="bf16",
        page_size=64, load=load, **layout,
    )


def seed(model, layout, *concurrencies):
    """The load with which DCP was first measured in an engine: 480 prompts of 4,000 tokens, answers of 1,500."""
    return [point(model, layout, "replay", c, "4000", "1500", 480, 5500) for c in concurrencies]


def long(model, layout, inputs, *concurrencies):
    return [point(model, layout, "replay", c, str(inputs), "1000", 96, inputs + 1000) for c in concurrencies]


def both(model, layout, *args, **options):
    return [point(model, layout, mode, *args, **options) for mode in ("live", "replay")]


CLOSED = (32, "uniform:1000-4000", "uniform:20-60", 72, 4060)
OPEN = (64, "uniform:1000-4000", "uniform:20-60", 72, 4060)
PARTS = {
    "v3": [
        *both(V3, DCP, *CLOSED), *both(V3, DCP, *OPEN, rate=2.5), *seed(V3, DCP, 48, 32, 8), *long(V3, DCP, 32000, 8, 32, 48),
        *both(V3, TP, 24, *CLOSED[1:]), *seed(V3, TP, 8, 32, 48), *long(V3, TP, 32000, 8, 32),
        *both(V3, DP, *CLOSED, policy="prefill-first"), *seed(V3, DP, 8, 32, 48), *long(V3, DP, 32000, 8, 32, 48),
    ],
    "v3-symm": [*seed(V3, SYMM, 48, 32, 8), *long(V3, SYMM, 32000, 8, 32, 48)],
    "v3-a2a": [*seed(V3, A2A, 48, 32, 8), *long(V3, A2A, 32000, 8, 32, 48)],
    "v3-128k": [*long(V3, DCP, 128000, 1, 4, 8), *long(V3, TP, 128000, 1, 4)],
    "k2": [
        *seed(K2, DCP, 48, 32, 8), *long(K2, DCP, 32000, 8, 32, 48),
        *seed(K2, SYMM, 48, 32, 8), *long(K2, SYMM, 32000, 8, 32, 48),
        *seed(K2, TP, 8, 32, 48), *long(K2, TP, 32000, 8, 32),
    ],
    "k2-dp": [
        *both(K2, DP, *CLOSED, policy="prefill-first"), *seed(K2, DP, 8, 32, 48), *long(K2, DP, 32000, 8, 32, 48),
    ],
    "v3-open": both(V3, DCP, 64, "uniform:1000-4000", "uniform:20-60", 200, 4060, rate=2.5),
    "v3-pressure": both(V3, TP, 32, "uniform:1000-4000", "uniform:20-100", 66, 4100),
}  # fmt: skip
KV = {"v3-pressure": 3 * GIB}
DEFAULT_KV = 32 * GIB

if __name__ == "__main__":
    part, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(kv_memory_bytes=KV.get(part, DEFAULT_KV), slo={"ttft": 2000.0, "itl": 150.0})
    command = f"python measure.py {part} {sys.argv[2]}"
    points = PARTS[part]
    work = launch.Work(
        folder=folder, settings=settings, device="cuda", command=command, pool_points=tuple(points), timeout=120
    )
    launch.run(points, work, Machines(), lambda e: print(e.stage, e.index, e.note, flush=True))
