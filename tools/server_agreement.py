"""Ask one server through dcpbench and through another tool at the same time, and hold what both say side by side.

    python -m tools.server_agreement run --url http://127.0.0.1:8000 --vllm PATH/TO/vllm --model NAME -o FOLDER
    python -m tools.server_agreement run --url … --guidellm PATH/TO/guidellm --tokenizer FOLDER --prompts FILE --model NAME -o FOLDER
    python -m tools.server_agreement show FOLDER
    python -m tools.server_agreement faults --runs 50 [--results FILE.jsonl]

`faults` runs `dcpbench verify --url A --url B` against stand-in engines (tests/servers/faulty_engine.py): right ones with planted faults,
and a right pair with noise as of bf16. It prints how often each verdict was given, and ends with 1 if a fault was not found in at least
96 % of the runs or was ever called AGREE, or if the right pair was not called AGREE in at least 90 % or was ever called DIFFER. FILE gets a
line for each run, and its earlier lines are counted.

`run` and `show`: both send as many requests of the same lengths at even intervals, so that whatever the machine does happens to both. FILE holds GuideLLM's
prompts, of 100 tokens each: JSON lines with `prompt`, `prompt_tokens_count` and `output_tokens_count`. FOLDER gets each tool's own
summary, without names of models and commands: agreement.json.
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
STARTING_S = {VLLM: 9, GUIDELLM: 22}  # startup time of the other tool in s
COUNTS = ("completed", "failed")
NAMES = ("ttft", "itl", "tpot", "e2el")
GUIDELLMS = {  # GuideLLM's names by metric; its ITL averages requests, as dcpbench's TPOT, weighted by tokens
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
RIGHT = ("right, bf16 noise", "right, one server, bf16 noise")
MIN_FOUND, MIN_AGREED = 0.96, 0.9  # shares of runs
CONTEXTS = "64,240,272,4080,4096"  # close on both sides of where the faults begin, so that no length has to be added


@contextlib.contextmanager
def faulty_engine() -> Iterator[str]:
    """Start the stand-in engines, and yield their address."""
    command = [sys.executable, "-m", "tests.servers.faulty_engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def verify(base: str, modes: tuple[str, ...], *more: str) -> dict[str, Any]:
    """Run `dcpbench verify` against stand-in engines; return its JSON, with its exit code."""
    out = io.StringIO()
    urls = [word for mode in modes for word in ("--url", f"{base}/{mode}")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(["verify", *urls, "--json", *more])
        except SystemExit as e:
            return {**json.loads(out.getvalue()), "exit_code": e.code or 0}
    raise AssertionError("a command ends with an exit code")


def run_faults(runs: int, results: Path | None) -> list[dict[str, Any]]:
    """Run all pairs so often; returns a line for each run, those of `results` included."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []
    with faulty_engine() as base:
        for name, modes in (pair for _ in range(runs) for pair in PAIRS.items()):
            began = time.perf_counter()
            found = verify(base, modes, "--context", CONTEXTS)
            line = {"pair": name, "seconds": round(time.perf_counter() - began, 1)}
            line |= {key: found[key] for key in ("verdict", "exit_code", "seed")}
            judgement = found["results"][-1]["judgement"]
            lines.append(line | {key: judgement[key] for key in ("undecided", "coverage")})
            if results:
                with results.open("a") as f:
                    f.write(json.dumps(lines[-1]) + "\n")
    return lines


def table_of_faults(lines: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the verdicts of each pair as Markdown, and whether the bounds of the module's docstring hold."""
    shown, held = ["| pair | runs | AGREE or CONSISTENT | DIFFER | UNDECIDED |", "|---|---:|---:|---:|---:|"], True
    for name in PAIRS:
        verdicts = collections.Counter(line["verdict"] for line in lines if line["pair"] == name)
        runs, agreed = verdicts.total(), verdicts["AGREE"] + verdicts["CONSISTENT"]
        shown.append(f"| {name} | {runs} | {agreed} | {verdicts['DIFFER']} | {verdicts['UNDECIDED']} |")
        if name in RIGHT:
            held &= agreed >= MIN_AGREED * runs and not verdicts["DIFFER"]
        else:
            held &= verdicts["DIFFER"] >= MIN_FOUND * runs and not agreed
    return "\n".join(shown) + "\n", held


def command_of(asked: argparse.Namespace, folder: Path, number: int) -> str:
    """Return the command line of the other tool."""
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
    """Run one round of both."""
    wait = STARTING_S[GUIDELLM if asked.guidellm else VLLM]
    ours = (
        f"sleep {wait}; {sys.executable} -m dcpbench.cli server --url {asked.url} --device cpu --request-rate {LOAD['rate']} "
        f"--burstiness {LOAD['even']} --num-requests {LOAD['requests']} --input-tokens {LOAD['input']} "
        f"--output-tokens {LOAD['output']} -o {folder}/ours{number}"
    )
    commands = (command_of(asked, folder, number), ours)
    started = [subprocess.Popen(command, shell=True) for command in commands]  # noqa: S602 - as typed by whoever runs it
    for process in started:
        process.wait()


def of_guidellm(said: dict[str, Any]) -> dict[str, Any]:
    """Return GuideLLM's results for a load that it sent."""
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
    """Return the results of `vllm bench serve`."""
    return (
        {name: said[name] for name in COUNTS}
        | {"output tok/s": said["output_throughput"]}
        | {f"{name.upper()} p50 ms": said[f"median_{name}_ms"] for name in NAMES}
    )


def gather(folder: Path) -> list[dict[str, Any]]:
    """Return both summaries of each round in a folder."""
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
    """Return the table as Markdown."""
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
    """Run, or print an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__)
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
    asked = parser.parse_args()
    if asked.what == "faults":
        shown, held = table_of_faults(run_faults(asked.runs, asked.results))
        sys.stdout.write(shown)
        return 0 if held else 1
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
