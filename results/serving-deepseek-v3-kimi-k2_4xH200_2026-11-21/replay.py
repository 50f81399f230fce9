"""More loads from the step times that measure.py left: `python replay.py NAME FOLDER` in this folder; needs no GPU.

What `dcpbench serve --mode replay --step-times FILE` does for one engine path, for all paths of a model into one folder,
so that the report compares them.
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
HERE = Path()
FILES = {
    "v3": [*sorted((HERE / "v3" / "step-times").glob("*.json")), *sorted((HERE / "v3-symm" / "step-times").glob("*.json"))],
    "k2": sorted((HERE / "k2" / "step-times").glob("*.json")),
}
CONCURRENCY = (4, 8, 16, 24, 32, 40, 48)
LENGTHS = (1000, 2000, 4000, 8000, 16000, 32000)


def load(inputs, outputs, requests):
    return Load(
        mode="replay", requests=requests, input_tokens=str(inputs), output_tokens=str(outputs), chunk=8192,
        prefill="flashinfer",
    )


SEED = [(c, 5500, load(4000, 1500, 480)) for c in CONCURRENCY]
BREAK_EVEN = [(c, n + 500, load(n, 500, 96)) for n in LENGTHS for c in CONCURRENCY]
SETS = {
    "v3-seed-8gib": ("v3", 8 * GIB, SEED), "k2-seed-8gib": ("k2", 8 * GIB, SEED),
    "v3-break-even-8gib": ("v3", 8 * GIB, BREAK_EVEN), "k2-break-even-8gib": ("k2", 8 * GIB, BREAK_EVEN),
}  # fmt: skip

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True)
    model, kv_memory, loads = SETS[name]
    out = RecordFile(folder)
    for file in FILES[model]:
        path = read_step_times(file).path
        same = {k: v for k, v in msgspec.to_builtins(path).items() if k in Point.__struct_fields__}
        points = [Point(workload="serve", concurrency=c, context=context, load=x, **same) for c, context, x in loads]
        settings = Settings(kv_memory_bytes=kv_memory, slo={"ttft": 5000.0, "itl": 150.0}, step_times=str(file))
        for point in points:
            try:
                record = replay_from_file(point, points, file, settings, folder, f"python replay.py {name} {folder}")
            except DcpbenchError as e:
                record = Record(point=point, outcome="failed", reason=str(e))
            out.append(record)
            print(point.layout, point.exchange, point.concurrency, point.load.input_tokens, record.outcome, record.reason or "")
