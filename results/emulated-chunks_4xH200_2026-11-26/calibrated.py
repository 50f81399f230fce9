"""Forecasts by what steps with prompts took the other pair of GPUs: `python calibrated.py`, which writes `calibrated/` and prints its tables.

Step times of each GPU get what `dcpbench calibrate` makes of the other pair's live step times and of those of this GPU alone (`own`), or of
those of the other pair's GPUs (`pair`), as `--emulate` with such a machine's file writes it down, and the five loads are replayed by them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from ends import LOADS

from dcpbench.bench import calibration
from dcpbench.points.wire import PROMPTS_APART
from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
OTHERS = {
    "own": {0: ("live-2", "emulated-0"), 1: ("live-2", "emulated-1"), 2: ("live-0", "emulated-2"), 3: ("live-0", "emulated-3")},
    "pair": dict.fromkeys((0, 1), ("live-2", "emulated-2", "emulated-3")) | dict.fromkeys((2, 3), ("live-0", "emulated-0", "emulated-1")),
}
SAID = ("output_tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")


def key(record):
    return record.point.concurrency, record.point.load.request_rate


def values(serve):
    return dict(zip(SAID, (serve.output_tok_s, serve.ttft_ms.p50, serve.itl_ms.p50, serve.itl_ms.p99), strict=True))


def replay(way):
    for gpu, others in OTHERS[way].items():
        prompts = calibration.prompts_in(calibration.step_times_in([HERE / name for name in others]))
        (file,) = (HERE / f"emulated-{gpu}" / "step-times").glob("*.json")
        times = json.loads(file.read_text())
        times["emulated"] |= {"prompts": msgspec.to_builtins(prompts), "chunks_low": PROMPTS_APART, "chunks_high": PROMPTS_APART}
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / f"emulated-{gpu}.json"
            copy.write_text(json.dumps(times))
            for kind, load in LOADS.items():
                out = HERE / "calibrated" / way / f"emulated-{gpu}-{kind}"
                words = f"serve --mode replay --step-times {copy} --kv-memory 40GiB --no-baseline {load} -o {out} --force"
                subprocess.run([sys.executable, "-m", "dcpbench.cli", *words.split()], check=True, capture_output=True)


def table(way):
    inside = dict.fromkeys(SAID[:3], 0)
    print("| load | GPU | output tok/s | TTFT p50 | ITL p50 | ITL p99 |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for kind in LOADS:
        live = {key(r): r for r in read_run(HERE / f"served/live-{kind}").records}
        for of, record in live.items():
            now = values(record.serve)
            name = f"{of[1]} requests/s" if of[1] else f"{of[0]} clients"
            for gpu in OTHERS[way]:
                (one,) = [r for r in read_run(HERE / "calibrated" / way / f"emulated-{gpu}-{kind}").records if key(r) == of]
                its = values(one.serve)
                cells = [f"{its[n] / now[n] - 1:+.1%}".replace("%", " %") for n in SAID]
                print(f"| {name + (', 3 turns' if kind == 'turns' else '') if gpu == 0 else ''} | {gpu} | {' | '.join(cells)} |")
                for n in inside:
                    inside[n] += getattr(one.emulated, f"{n}_low") <= now[n] <= getattr(one.emulated, f"{n}_high")
    print(f"\nWithin the ends of 20: {inside}")


if __name__ == "__main__":
    for way in OTHERS:
        replay(way)
        print(f"\n{way}\n")
        table(way)
