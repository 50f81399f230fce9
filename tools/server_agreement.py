"""Ask one server through dcpbench and through another tool at the same time, and hold what both say side by side.

    python -m tools.server_agreement run --url http://127.0.0.1:8000 --vllm PATH/TO/vllm --model NAME -o FOLDER
    python -m tools.server_agreement run --url … --guidellm PATH/TO/guidellm --tokenizer FOLDER --prompts FILE --model NAME -o FOLDER
    python -m tools.server_agreement show FOLDER

Both send as many requests of the same lengths at even intervals, so that whatever the machine does happens to both. FILE holds GuideLLM's
prompts, of 100 tokens each: JSON lines with `prompt`, `prompt_tokens_count` and `output_tokens_count`. FOLDER gets each tool's own
summary, without names of models and commands: agreement.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dcpbench.records.runs import read_run

LOAD = {"requests": 150, "rate": 3, "input": 100, "output": 50, "even": 1000}
VLLM, GUIDELLM = "vllm bench serve", "GuideLLM"
STARTING_S = {VLLM: 9, GUIDELLM: 22}
"""What the other tool takes to begin."""
COUNTS = ("completed", "failed")
NAMES = ("ttft", "itl", "tpot", "e2el")
GUIDELLMS = {
    "TTFT mean ms": "time_to_first_token_ms",
    "TTFT p50 ms": "time_to_first_token_ms",
    "ITL mean ms": "inter_token_latency_ms",
    "TPOT p50 ms": "inter_token_latency_ms",
    "E2EL p50 ms": "request_latency",
}
"""Where GuideLLM says what we say. Its ITL is a mean of each request, which is our TPOT, weighted by tokens."""


def command_of(asked: argparse.Namespace, folder: Path, number: int) -> str:
    """What the other tool is typed as."""
    if asked.guidellm:
        return (
            f"{asked.guidellm} run --backend kind=openai_http,target={asked.url},model={asked.model},request_format=/v1/completions "
            f"--profile kind=constant,rate={LOAD['rate']} --constraint kind=max_requests,count={LOAD['requests']} "
            f"--tokenizer kind=huggingface_auto,model={asked.tokenizer} --data kind=json_file,path={asked.prompts} "
            f"--output kind=json,path={folder}/theirs{number}.json --disable-progress"
        )
    return (
        f"{asked.vllm} bench serve --backend vllm --base-url {asked.url} --model {asked.model} --dataset-name random "
        f"--random-input-len {LOAD['input']} --random-output-len {LOAD['output']} --random-range-ratio 0 "
        f"--num-prompts {LOAD['requests']} --request-rate {LOAD['rate']} "
        f"--burstiness {LOAD['even']} --ignore-eos --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 "
        f"--save-result --result-dir {folder} --result-filename theirs{number}.json"
    )


def run(asked: argparse.Namespace, folder: Path, number: int) -> None:
    """One round of both."""
    wait = STARTING_S[GUIDELLM if asked.guidellm else VLLM]
    ours = (
        f"sleep {wait}; {sys.executable} -m dcpbench.cli serve --url {asked.url} --device cpu --request-rate {LOAD['rate']} "
        f"--burstiness {LOAD['even']} --num-requests {LOAD['requests']} --input-tokens {LOAD['input']} "
        f"--output-tokens {LOAD['output']} --no-check-client -o {folder}/ours{number}"
    )
    commands = (command_of(asked, folder, number), ours)
    started = [subprocess.Popen(command, shell=True) for command in commands]  # noqa: S602 - as typed by whoever runs it
    for process in started:
        process.wait()


def of_guidellm(said: dict[str, Any]) -> dict[str, Any]:
    """What it says of a load that it sent."""
    (benchmark,) = said["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    found = {"completed": totals["successful"], "failed": totals["errored"]}
    found |= {"output tok/s": metrics["output_token_count"]["successful"]["total_sum"] / benchmark["duration"]}
    for what, name in GUIDELLMS.items():
        scale = 1e3 if name == "request_latency" else 1.0
        found[what] = metrics[name]["successful"]["mean" if "mean" in what else "median"] * scale
    return found


def of_vllm(said: dict[str, Any]) -> dict[str, Any]:
    """The same of `vllm bench serve`."""
    return (
        {name: said[name] for name in COUNTS}
        | {"output tok/s": said["output_throughput"]}
        | {f"{name.upper()} p50 ms": said[f"median_{name}_ms"] for name in NAMES}
    )


def gather(folder: Path) -> list[dict[str, Any]]:
    """Both summaries of each round in a folder."""
    rounds = []
    for path in sorted(folder.glob("theirs*.json")):
        said = json.loads(path.read_text())
        (record,) = read_run(path.with_name(path.stem.replace("theirs", "ours"))).records
        assert record.serve is not None
        ours: dict[str, Any] = {"output tok/s": record.serve.output_tok_s}
        ours |= {"completed": record.serve.finished, "failed": record.serve.failed}
        for name in NAMES:
            latency = getattr(record.serve, f"{name}_ms")
            ours |= {f"{name.upper()} p50 ms": latency.p50, f"{name.upper()} mean ms": latency.mean}
        tool, theirs = (GUIDELLM, of_guidellm(said)) if "benchmarks" in said else (VLLM, of_vllm(said))
        rounds.append({tool: theirs, "dcpbench": {what: ours[what] for what in theirs}})
    return rounds


def table(rounds: list[dict[str, Any]]) -> str:
    """As Markdown."""
    tool = next(iter(rounds[0]))
    lines = [f"| round | what | {tool} | dcpbench | apart |", "|---|---|---:|---:|---:|"]
    for number, both in enumerate(rounds, 1):
        for what, a in both[tool].items():
            b = both["dcpbench"][what]
            if what in COUNTS:
                continue
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
    parser.add_argument("--guidellm")
    parser.add_argument("--tokenizer")
    parser.add_argument("--prompts")
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    folder = asked.output or asked.folder
    if folder is None or (asked.what == "run" and not (asked.url and asked.model)):
        parser.error("name a FOLDER, and for run --url and --model")
    if asked.what == "run":
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, asked.rounds + 1):
            run(asked, folder, number)
    kept = folder / "agreement.json"
    if any(folder.glob("theirs*.json")):
        kept.write_text(json.dumps({"load": LOAD, "rounds": gather(folder)}, indent=1) + "\n")
    sys.stdout.write(table(json.loads(kept.read_text())["rounds"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
