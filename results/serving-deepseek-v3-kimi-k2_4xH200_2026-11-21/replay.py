"""More loads from the step times that measure.py left: `python replay.py NAME FOLDER` in this folder; needs no GPU.

What `dcpbench serve --mode replay --step-times FILE` does for one engine path, for all paths of a model into one folder,
so that the report compares them. `python replay.py v3-open v3-open` adds to that folder the replay of its live load.
"""

import sys
from pathlib import Path

import msgspec

from dcpbench.jobs import Settings
from dcpbench.errors import DcpbenchError
from dcpbench.records import Point, Record, RecordFile
from dcpbench.serve_records import Load
from dcpbench.serving.replay_point import replay_from_file
from dcpbench.serving.step_times import read_step_times

GIB = 1 << 30
CONCURRENCY = (4, 8, 16, 24, 32, 40, 48)
LENGTHS = (1000, 2000, 4000, 8000, 16000, 32000)


def step_times(*folders, name="*.json"):
    return [file for folder in folders for file in sorted((Path(folder) / "step-times").glob(name))]


V3 = step_times("v3", "v3-symm", "v3-a2a")
K2 = step_times("k2", "k2-dp")


def load(inputs, outputs, requests, **arrivals):
    return Load(
        mode="replay",
        requests=requests,
        input_tokens=str(inputs),
        output_tokens=str(outputs),
        chunk=8192,
        prefill="flashinfer",
        **arrivals,
    )


# (clients, context, load) of each point
SEED = [(c, 5500, load(4000, 1500, 480)) for c in CONCURRENCY]
BREAK_EVEN = [(c, n + 500, load(n, 500, 96)) for n in LENGTHS for c in CONCURRENCY]
OPEN = [(64, 4060, load("uniform:1000-4000", "uniform:20-60", 200, arrival="gamma", request_rate=2.5))]
# files of step times, GiB of KV per GPU, TTFT in ms that an answer has to keep, points
SETS = {
    "v3-seed-8gib": (V3, 8, 5000.0, SEED), "k2-seed-8gib": (K2, 8, 5000.0, SEED),
    "v3-break-even-8gib": (V3, 8, 5000.0, BREAK_EVEN), "k2-break-even-8gib": (K2, 8, 5000.0, BREAK_EVEN),
    "v3-open": (step_times("v3", name="*-ag_rs-*.json"), 32, 2000.0, OPEN),
}  # fmt: skip

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=name == "v3-open")
    files, kv_gib, ttft, loads = SETS[name]
    out = RecordFile(folder)
    for file in files:
        path = read_step_times(file).path
        same = {k: v for k, v in msgspec.to_builtins(path).items() if k in Point.__struct_fields__}
        points = [Point(workload="serve", concurrency=c, context=context, load=x, **same) for c, context, x in loads]
        settings = Settings(kv_memory_bytes=kv_gib * GIB, slo={"ttft": ttft, "itl": 150.0}, step_times=str(file))
        for point in points:
            try:
                record = replay_from_file(point, points, file, settings, folder, f"python replay.py {name} {folder}")
            except DcpbenchError as e:
                record = Record(point=point, outcome="failed", reason=str(e))
            out.append(record)
            print(
                point.layout,
                point.exchange,
                point.concurrency,
                point.load.input_tokens,
                record.outcome,
                record.reason or "",
            )
