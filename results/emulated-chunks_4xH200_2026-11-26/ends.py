"""Whether live loads lie within the ends of forecasts: `python ends.py FOLDER`, which gets copies of the step times that say 9 % of prompts.

It replays the five loads by each GPU's step times and prints how many of 20 lie within.
"""

import json
import subprocess
import sys
from pathlib import Path

from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
REQUESTS = "--num-requests 120 --input-tokens uniform:1000-4000 --output-tokens uniform:20-60"
LOADS = {
    "open": f"--request-rate 1.6,2.7 --concurrency 48 {REQUESTS}",
    "closed": f"--concurrency 8,32 {REQUESTS}",
    "turns": "--concurrency 16 --num-requests 48 --input-tokens uniform:1000-3000 --output-tokens uniform:20-60 --turns 3 "
    "--turn-tokens uniform:100-300 --think-time 0.5",
}


def main(folder: Path) -> None:
    inside = {"output_tok_s": 0, "ttft_p50_ms": 0, "itl_p50_ms": 0}
    for gpu in range(4):
        (file,) = (HERE / f"emulated-{gpu}" / "step-times").glob("*.json")
        times = json.loads(file.read_text())
        times["emulated"]["chunks_high"] = 0.09
        copy = folder / f"{gpu}.json"
        copy.write_text(json.dumps(times))
        for kind, load in LOADS.items():
            out = folder / f"{gpu}-{kind}"
            words = f"serve --mode replay --step-times {copy} --kv-memory 40GiB --no-baseline {load} -o {out}"
            subprocess.run([sys.executable, "-m", "dcpbench.cli", *words.split()], check=True, capture_output=True)
            live = {(r.point.concurrency, r.point.load.request_rate): r.serve for r in read_run(HERE / f"served/live-{kind}").records}
            for r in read_run(out).records:
                one = live[r.point.concurrency, r.point.load.request_rate]
                now = {"output_tok_s": one.output_tok_s, "ttft_p50_ms": one.ttft_ms.p50, "itl_p50_ms": one.itl_ms.p50}
                for name, value in now.items():
                    low, high = (getattr(r.emulated, f"{name}_{end}") for end in ("low", "high"))
                    inside[name] += low <= value <= high
                    if not low <= value <= high:
                        print(f"GPU {gpu}, {kind} {r.point.concurrency} {r.point.load.request_rate}: {name} {value:.1f}, {low:.1f} to {high:.1f}")
    print(inside)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
