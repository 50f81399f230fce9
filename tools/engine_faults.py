"""Count how often `dcpbench verify --engine` finds injected faults of a stand-in engine, and how often it rejects a correct one.

    python -m tools.engine_faults --runs 10 [--cases right,cache] [--results FILE.jsonl]

Each run starts two or three servers (tests/servers/dcp_engine.py) with another seed. A fault is found if the verdict is DIFFER and the
smallest setting in the verdict is the one at which the fault begins. A correct engine must get AGREE with the noise of bf16; with the noise
of fp8, or of vLLM with fp8 and experts (flips), UNDECIDED is allowed, too. Exit code 1: a fault was missed, or a correct engine got another
verdict. FILE gets a line for each run, and its earlier lines are counted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dcpbench import cli

ROOT = Path(__file__).parents[1]
CORRECT, CORRECT_FP8, CORRECT_FLIPS = "right", "right fp8", "right flips"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Hold the flags of a stand-in engine, and the smallest setting that shows its fault."""

    flags: str = ""  # flags of the stand-in engine
    noise: str = "bf16"  # bf16, fp8 or flips
    options: str  # options of `dcpbench verify`
    smallest: tuple[int, int, str] | None = (
        None  # length, batch and cache; None for a correct engine and for a sporadic fault
    )
    period: int | None = None  # requests with a number divisible by `period` are wrong
    wrong: str = "engine tp2·dcp2"  # setting that differs
    effect: str = "servers"


CASES = {
    CORRECT: Case(options="--context 1,17,300,4096 --concurrency 1,2,8"),
    CORRECT_FP8: Case(noise="fp8", options="--context 1,17,300,4096 --concurrency 1,2,8"),
    CORRECT_FLIPS: Case(noise="flips", options="--context 1,17,300,4096 --concurrency 1,2,8"),
    "cache flips": Case(
        flags="--fault cache",
        noise="flips",
        options="--context 1,16,17,300 --concurrency 1,2,8 --num-prompts 8",
        smallest=(17, 1, "again"),
    ),
    "batch flips": Case(
        flags="--fault batch",
        noise="flips",
        options="--context 1,17,300 --concurrency 1,2,8 --num-prompts 8",
        smallest=(1, 8, "new"),
    ),
    "long flips": Case(
        flags="--fault long",
        noise="flips",
        options="--context 17,2048,4095,4096,4097 --concurrency 1,2,8 --num-prompts 8",
        smallest=(4096, 1, "new"),
    ),
    "every33 flips": Case(
        flags="--fault every33", noise="flips", options="--context 40,300 --concurrency 1 --num-prompts 48", period=33
    ),
    "page flips": Case(
        flags="--fault page",
        noise="flips",
        options="--context 15,16,17,64,300 --concurrency 1,2,8 --num-prompts 8",
        smallest=(16, 1, "new"),
    ),
    "exchange flips": Case(
        flags="--fault exchange",
        noise="flips",
        options="--context 1,64,300 --concurrency 1,2,8 --exchange ag_rs,a2a --num-prompts 8",
        smallest=(1, 1, "new"),
        wrong="engine tp2·dcp2 a2a",
    ),
    "scores flips": Case(
        flags="--fault scores",
        noise="flips",
        options="--context 15,16,17,64,300 --concurrency 1,8",
        smallest=(15, 1, "new"),
        effect="scores",
    ),
    "cache fp8": Case(
        flags="--fault cache",
        noise="fp8",
        options="--context 1,16,17,300 --concurrency 1,2",
        smallest=(17, 1, "again"),
    ),
    "long fp8": Case(
        flags="--fault long",
        noise="fp8",
        options="--context 17,2048,4095,4096,4097 --concurrency 1,2",
        smallest=(4096, 1, "new"),
    ),
    "cache": Case(flags="--fault cache", options="--context 1,16,17,300 --concurrency 1,2", smallest=(17, 1, "again")),
    "batch": Case(flags="--fault batch", options="--context 1,17 --concurrency 1,2,8", smallest=(1, 8, "new")),
    "long": Case(
        flags="--fault long", options="--context 17,2048,4095,4096,4097 --concurrency 1,2", smallest=(4096, 1, "new")
    ),
    "every33": Case(
        flags="--fault every33",
        options="--context 40,300 --concurrency 1 --num-prompts 24",
        period=33,
    ),
    "page": Case(flags="--fault page", options="--context 15,16,17,64 --concurrency 1,2", smallest=(16, 1, "new")),
    "exchange": Case(
        flags="--fault exchange",
        options="--context 1,17 --concurrency 1,8 --exchange ag_rs,a2a",
        smallest=(1, 1, "new"),
        wrong="engine tp2·dcp2 a2a",
    ),
    "scores": Case(
        flags="--fault scores",
        options="--context 15,16,17,64 --concurrency 1",
        smallest=(15, 1, "new"),
        effect="scores",
    ),
}


EXPECTED_CODES = {
    CORRECT: (0,),
    CORRECT_FP8: (0, 3),
    CORRECT_FLIPS: (0, 3),
}  # exit codes for correct engines; 1 for all others


def write_engine_file(folder: Path, flags: str, noise: str = "bf16") -> Path:
    """Write the engine file of the stand-in engine with these flags; return its path."""
    path = folder / "engine.toml"
    command = f"{sys.executable} -m tests.servers.dcp_engine --port {{port}} --noise {noise} {flags}"
    path.write_text(
        f'name = "engine"\ncommand = {json.dumps(command)}\n'
        '[layout]\ndcp = "--dcp {dcp}"\nexchange = "--exchange {exchange}"\n'
        f"[env]\nPYTHONPATH = {json.dumps(os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]))}\n"
        '[variants]\nsame = "--exchange ag_rs"\n'
    )
    return path


def run_verify(folder: Path, flags: str, *options: str, noise: str = "bf16") -> tuple[int, dict[str, Any]]:
    """Run `dcpbench verify --engine` on the stand-in engine; return its exit code and its JSON."""
    out, err = io.StringIO(), io.StringIO()
    command = [
        "verify",
        "--engine",
        str(write_engine_file(folder, flags, noise)),
        "--model",
        "m",
        "--tp",
        "2",
        "--json",
        "--force",
    ]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main([*command, "--new-tokens", "6", "-o", str(folder / "out"), *options])
        except SystemExit as e:
            assert out.getvalue(), err.getvalue()
            return int(e.code or 0), json.loads(out.getvalue())
    raise AssertionError("a command ends with an exit code")


def run_case(name: str, folder: Path, *more_options: str, options: str = "") -> dict[str, Any]:
    """Run a case, with `options` instead of its own if given; return its line: the verdict, and `right`, which is True if the verdict is expected."""
    case = CASES[name]
    start = time.perf_counter()
    code, found = run_verify(folder, case.flags, *(options or case.options).split(), *more_options, noise=case.noise)
    line = {
        "case": name,
        "seconds": round(time.perf_counter() - start, 1),
        "verdict": found["verdict"],
        "exit_code": code,
    }
    return line | {"seed": found["seed"], "right": code in EXPECTED_CODES.get(name, (1,)) and is_expected(case, found)}


def is_expected(case: Case, found: dict[str, Any]) -> bool:
    """Return True if the faulty setting alone differs, because of the injected fault. All other settings must agree; with noise of fp8 or flips they may be undecided."""
    verdicts = {one["name"]: one["verdict"] for one in found["results"]}
    if case.smallest is None and case.period is None:
        return set(verdicts.values()) <= {"CONSISTENT", "AGREE", *(["UNDECIDED"] if case.noise != "bf16" else [])}
    others = ("CONSISTENT", "AGREE", *(["UNDECIDED"] if case.noise != "bf16" else []))
    if [name for name, verdict in verdicts.items() if verdict not in others] != [case.wrong]:
        return False
    (judgement,) = [one["judgement"] for one in found["results"] if one["name"] == case.wrong]
    finding = judgement["findings"][0]
    cell = finding["smallest"]
    setting = (cell["length"], cell["batch"], cell["cache"])
    is_smallest = setting == case.smallest or case.smallest is None
    return finding["effect"] == case.effect and is_smallest and finding["period"] == case.period


def format_table(lines: list[dict[str, Any]]) -> tuple[str, bool]:
    """Format the runs of each case as a Markdown table; return True as well if all verdicts are as expected."""
    rows = [
        "| stand-in engine | runs | AGREE | DIFFER | UNDECIDED | as expected, with the smallest setting |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(line["case"] for line in lines):
        runs = [line for line in lines if line["case"] == name]
        verdicts = collections.Counter(line["verdict"] for line in runs)
        counts = " | ".join(str(verdicts[verdict]) for verdict in ("AGREE", "DIFFER", "UNDECIDED"))
        rows.append(f"| {name} | {len(runs)} | {counts} | {sum(line['right'] for line in runs)} |")
    return "\n".join(rows) + "\n", all(line["right"] for line in lines)


def main() -> int:
    """Run the cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of each case; default: %(default)s")
    parser.add_argument("--cases", default=",".join(CASES), help="cases, separated by commas; default: all")
    parser.add_argument("--results", type=Path, help="file that gets a line of JSON for each run")
    args = parser.parse_args()
    if unknown := [name for name in args.cases.split(",") if name not in CASES]:
        parser.error(f"there are no cases {', '.join(unknown)}; --cases takes {', '.join(CASES)}")
    earlier = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    lines = [json.loads(line) for line in earlier]
    for _ in range(args.runs):
        for name in args.cases.split(","):
            with tempfile.TemporaryDirectory() as folder:
                lines.append(run_case(name, Path(folder)))
            if args.results:
                with args.results.open("a") as f:
                    f.write(json.dumps(lines[-1]) + "\n")
    table, right = format_table(lines)
    sys.stdout.write(table)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
