"""Ask one server through dcpbench and through `vllm bench serve` at the same time, and hold what both say side by side.

    python -m tools.server_agreement run --url http://127.0.0.1:8000 --vllm PATH/TO/vllm --model NAME -o FOLDER
    python -m tools.server_agreement show FOLDER

Both send as many requests of the same lengths at even intervals, so that whatever the machine does happens to both. FOLDER gets each
tool's own summary, without names of models and commands: agreement.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dcpbench.records.runs import read_run

LOAD = {"requests": 180, "rate": 3, "input": 100, "output": 50, "even": 1000}
STARTING_S = 9
"""What `vllm bench serve` takes to begin."""
THEIRS = ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput")
NAMES = ("ttft", "itl", "tpot", "e2el")


def run(url: str, vllm: str, model: str, folder: Path, number: int) -> None:
    """One round of both."""
    theirs = (
        f"{vllm} bench serve --backend vllm --base-url {url} --model {model} --dataset-name random --random-input-len {LOAD['input']} "
        f"--random-output-len {LOAD['output']} --random-range-ratio 0 --num-prompts {LOAD['requests']} --request-rate {LOAD['rate']} "
        f"--burstiness {LOAD['even']} --ignore-eos --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 "
        f"--save-result --result-dir {folder} --result-filename theirs{number}.json"
    )
    ours = (
        f"sleep {STARTING_S}; {sys.executable} -m dcpbench.cli serve --url {url} --device cpu --request-rate {LOAD['rate']} --burstiness {LOAD['even']} "
        f"--num-requests {LOAD['requests']} --input-tokens {LOAD['input']} --output-tokens {LOAD['output']} -o {folder}/ours{number}"
    )
    started = [subprocess.Popen(command, shell=True) for command in (theirs, ours)]  # noqa: S602 - as typed by whoever runs it
    for process in started:
        process.wait()


def gather(folder: Path) -> list[dict[str, Any]]:
    """Both summaries of each round in a folder."""
    rounds = []
    for path in sorted(folder.glob("theirs*.json")):
        theirs = json.loads(path.read_text())
        (record,) = read_run(path.with_name(path.stem.replace("theirs", "ours"))).records
        assert record.serve is not None
        serve = record.serve
        rounds.append(
            {
                "vllm bench serve": {name: theirs[name] for name in THEIRS}
                | {n: theirs[f"median_{n}_ms"] for n in NAMES},
                "dcpbench": {
                    "completed": serve.finished,
                    "failed": serve.failed,
                    "duration": serve.wall_s,
                    "total_input_tokens": serve.input_tokens,
                    "total_output_tokens": serve.output_tokens,
                    "output_throughput": serve.output_tok_s,
                }
                | {n: getattr(serve, f"{n}_ms").p50 for n in NAMES},
            }
        )
    return rounds


def table(rounds: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| round | what | vllm bench serve | dcpbench | apart |", "|---|---|---:|---:|---:|"]
    for number, both in enumerate(rounds, 1):
        for name in ("output_throughput", *NAMES):
            a, b = both["vllm bench serve"][name], both["dcpbench"][name]
            what = "output tok/s" if name == "output_throughput" else f"{name.upper()} p50 ms"
            lines.append(f"| {number} | {what} | {a:,.2f} | {b:,.2f} | {b / a - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run, or show what was run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    folder = asked.output or asked.folder
    if folder is None or (asked.what == "run" and not (asked.url and asked.model)):
        parser.error("name a FOLDER, and for run --url and --model")
    if asked.what == "run":
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, asked.rounds + 1):
            run(asked.url, asked.vllm, asked.model, folder, number)
    kept = folder / "agreement.json"
    if any(folder.glob("theirs*.json")):
        kept.write_text(json.dumps({"load": LOAD, "rounds": gather(folder)}, indent=1) + "\n")
    sys.stdout.write(table(json.loads(kept.read_text())["rounds"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
