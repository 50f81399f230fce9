"""Measure one server with dcpbench and another tool at the same time, and compare their results.

    python -m tools.server_agreement run --url http://127.0.0.1:8000 --vllm PATH/TO/vllm --model NAME -o FOLDER
    python -m tools.server_agreement run --url … --guidellm PATH/TO/guidellm --tokenizer FOLDER --prompts FILE --model NAME -o FOLDER
    python -m tools.server_agreement show FOLDER
    python -m tools.server_agreement faults --runs 50 [--results FILE.jsonl]

`run` starts both tools, which send the same number of requests of the same lengths at even intervals, so that disturbances of the machine
affect both. FILE has GuideLLM's prompts of 100 tokens each, as JSON lines with `prompt`, `prompt_tokens_count` and `output_tokens_count`.
FOLDER gets the summaries of both tools in agreement.json, without names of models and commands. `show` prints the table of FOLDER.

`faults` runs `dcpbench verify --url A --url B` against stand-in engines (tests/servers/faulty_engine.py): pairs with injected faults, and a
correct pair with the noise of bf16. It prints how often each verdict was given. Exit code 1: a fault was found in less than 96 % of the runs
or ever got AGREE, or the correct pair got AGREE in less than 90 % of the runs or ever got DIFFER. FILE gets a line for each run, and its
earlier lines are counted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench import cli
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD = {"requests": 150, "rate": 3, "input": 100, "output": 50, "even": 1000}
VLLM, GUIDELLM = "vllm bench serve", "GuideLLM"
START_S = {VLLM: 9, GUIDELLM: 22}  # start-up time of the other tool in s
COUNTS = ("completed", "failed")
NAMES = ("ttft", "itl", "tpot", "e2el")
GUIDELLM_METRICS = {  # GuideLLM's names by metric; its ITL is a mean over requests weighted by tokens, as dcpbench's TPOT
    "TTFT mean ms": "time_to_first_token_ms",
    "TTFT p50 ms": "time_to_first_token_ms",
    "ITL mean ms": "inter_token_latency_ms",
    "TPOT p50 ms": "inter_token_latency_ms",
    "E2EL p50 ms": "request_latency",
}

PAIRS = {
    "prefix cache": ("good", "cache"),
    "batch": ("good", "batch"),
    "long prompts": ("good", "long"),
    "prefix cache, both": ("cache", "cache"),
    "prefix cache, one server": ("cache",),
    "right, bf16 noise": ("noise", "noise2"),
    "right, one server, bf16 noise": ("noise",),
}
CORRECT_PAIRS = ("right, bf16 noise", "right, one server, bf16 noise")
MIN_FOUND, MIN_AGREED = 0.96, 0.9  # minimum shares of runs
CONTEXTS = (
    "64,240,272,4080,4096"  # on both sides of the lengths at which the faults begin, so that `verify` adds no length
)


@contextlib.contextmanager
def start_faulty_engine() -> Iterator[str]:
    """Run the stand-in engines inside the block; yield their address."""
    command = [sys.executable, "-m", "tests.servers.faulty_engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def run_verify(base: str, modes: tuple[str, ...], *options: str) -> dict[str, Any]:
    """Run `dcpbench verify` against stand-in engines; return its JSON with its exit code."""
    out = io.StringIO()
    bases = (base, base.replace("127.0.0.1", "localhost"))  # of one server, which `verify` refuses as A and B
    urls = [word for place, mode in zip(bases, modes, strict=False) for word in ("--url", f"{place}/{mode}")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(["verify", *urls, "--json", *options])
        except SystemExit as e:
            return {**json.loads(out.getvalue()), "exit_code": e.code or 0}
    raise AssertionError("a command ends with an exit code")


def run_faults(runs: int, results: Path | None) -> list[dict[str, Any]]:
    """Run all pairs `runs` times; return a line for each run, including the earlier ones in `results`."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []
    with start_faulty_engine() as base:
        for name, modes in (pair for _ in range(runs) for pair in PAIRS.items()):
            began = time.perf_counter()
            found = run_verify(base, modes, "--context", CONTEXTS)
            line = {"pair": name, "seconds": round(time.perf_counter() - began, 1)}
            line |= {key: found[key] for key in ("verdict", "exit_code", "seed")}
            judgement = found["results"][-1]["judgement"]
            lines.append(line | {key: judgement[key] for key in ("undecided", "coverage")})
            if results:
                with results.open("a") as f:
                    f.write(json.dumps(lines[-1]) + "\n")
    return lines


def format_verdicts(lines: list[dict[str, Any]]) -> tuple[str, bool]:
    """Format the verdicts of each pair as a Markdown table; return True as well if their shares are within the documented limits."""
    rows, ok = ["| pair | runs | AGREE or CONSISTENT | DIFFER | UNDECIDED |", "|---|---:|---:|---:|---:|"], True
    for name in PAIRS:
        verdicts = collections.Counter(line["verdict"] for line in lines if line["pair"] == name)
        runs, agreed = verdicts.total(), verdicts["AGREE"] + verdicts["CONSISTENT"]
        rows.append(f"| {name} | {runs} | {agreed} | {verdicts['DIFFER']} | {verdicts['UNDECIDED']} |")
        if name in CORRECT_PAIRS:
            ok &= agreed >= MIN_AGREED * runs and not verdicts["DIFFER"]
        else:
            ok &= verdicts["DIFFER"] >= MIN_FOUND * runs and not agreed
    return "\n".join(rows) + "\n", ok


def format_command(args: argparse.Namespace, folder: Path, number: int) -> str:
    """Format the command line of the other tool."""
    if args.guidellm:
        return (
            f"{args.guidellm} run --backend kind=openai_http,target={args.url},model={args.model},request_format=/v1/completions "
            f"--profile kind=constant,rate={LOAD['rate']} --constraint kind=max_requests,count={LOAD['requests']} "
            f"--tokenizer kind=huggingface_auto,model={args.tokenizer} --data kind=json_file,path={args.prompts} "
            f"--output kind=json,path={folder}/theirs{number}.json --disable-progress"
        )
    return (
        f"{args.vllm} bench serve --backend vllm --base-url {args.url} --model {args.model} --dataset-name random "
        f"--random-input-len {LOAD['input']} --random-output-len {LOAD['output']} --random-range-ratio 0 "
        f"--num-prompts {LOAD['requests']} --request-rate {LOAD['rate']} "
        f"--burstiness {LOAD['even']} --ignore-eos --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 "
        f"--save-result --result-dir {folder} --result-filename theirs{number}.json"
    )


def run_round(args: argparse.Namespace, folder: Path, number: int) -> None:
    """Run one round of both tools."""
    wait = START_S[GUIDELLM if args.guidellm else VLLM]
    own_command = (
        f"sleep {wait}; {sys.executable} -m dcpbench.cli server --url {args.url} --device cpu --request-rate {LOAD['rate']} "
        f"--burstiness {LOAD['even']} --num-requests {LOAD['requests']} --input-tokens {LOAD['input']} "
        f"--output-tokens {LOAD['output']} -o {folder}/ours{number}"
    )
    commands = (format_command(args, folder, number), own_command)
    started = [subprocess.Popen(command, shell=True) for command in commands]  # noqa: S602 - the options come from the user of this tool
    for process in started:
        process.wait()


def read_guidellm(report: dict[str, Any]) -> dict[str, Any]:
    """Read the metrics of GuideLLM's report."""
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    found = {"completed": totals["successful"], "failed": totals["errored"]}
    found |= {"output tok/s": metrics["output_token_count"]["successful"]["total_sum"] / benchmark["duration"]}
    for metric, name in GUIDELLM_METRICS.items():
        scale = 1e3 if name == "request_latency" else 1.0
        found[metric] = metrics[name]["successful"]["mean" if "mean" in metric else "median"] * scale
    return found


def read_vllm(report: dict[str, Any]) -> dict[str, Any]:
    """Read the metrics of the report of `vllm bench serve`."""
    return (
        {name: report[name] for name in COUNTS}
        | {"output tok/s": report["output_throughput"]}
        | {f"{name.upper()} p50 ms": report[f"median_{name}_ms"] for name in NAMES}
    )


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of both tools for each round in a folder."""
    rounds = []
    for path in sorted(folder.glob("theirs*.json")):
        report = json.loads(path.read_text())
        (record,) = read_run(path.with_name(path.stem.replace("theirs", "ours"))).records
        assert record.serve is not None
        ours: dict[str, Any] = {"output tok/s": record.serve.output_tok_s}
        ours |= {"completed": record.serve.finished, "failed": record.serve.failed}
        for name in NAMES:
            latency = getattr(record.serve, f"{name}_ms")
            ours |= {f"{name.upper()} p50 ms": latency.p50, f"{name.upper()} mean ms": latency.mean}
        tool, theirs = (GUIDELLM, read_guidellm(report)) if "benchmarks" in report else (VLLM, read_vllm(report))
        rounds.append({tool: theirs, "dcpbench": {metric: ours[metric] for metric in theirs}})
    return rounds


def format_table(rounds: list[dict[str, Any]]) -> str:
    """Format the rounds as a Markdown table."""
    tool = next(iter(rounds[0]))
    lines = [f"| round | metric | {tool} | dcpbench | difference |", "|---|---|---:|---:|---:|"]
    for number, both in enumerate(rounds, 1):
        for metric, theirs in both[tool].items():
            ours = both["dcpbench"][metric]
            if metric in COUNTS:
                continue
            lines.append(f"| {number} | {metric} | {theirs:,.2f} | {ours:,.2f} | {ours / theirs - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "show", "faults"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--guidellm")
    parser.add_argument("--tokenizer")
    parser.add_argument("--prompts")
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.what == "faults":
        table, ok = format_verdicts(run_faults(args.runs, args.results))
        sys.stdout.write(table)
        return 0 if ok else 1
    folder = args.output or args.folder
    if folder is None or (args.what == "run" and not (args.url and args.model)):
        parser.error("name a FOLDER, and for run --url and --model")
    if args.what == "run":
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, args.rounds + 1):
            run_round(args, folder, number)
    file = folder / "agreement.json"
    if any(folder.glob("theirs*.json")):
        file.write_text(json.dumps({"load": LOAD, "rounds": read_rounds(folder)}, indent=1) + "\n")
    sys.stdout.write(format_table(json.loads(file.read_text())["rounds"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
