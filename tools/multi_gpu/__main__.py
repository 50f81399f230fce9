"""The prepared run of two, four or eight GPUs: most valuable first, resumable, under a deadline.

    python -m tools.multi_gpu -o FOLDER --gpus 2 --dry-run       # every command with its estimated minutes
    python -m tools.multi_gpu -o FOLDER --gpus 2 --minutes 9     # what fits; the same again goes on
    python -m tools.multi_gpu -o FOLDER --gpus 2 --only hangs,comm
    python -m tools.multi_gpu -o FOLDER --gpus 2 --report        # README.md alone, from what lies there
    python -m tools.multi_gpu -o FOLDER --gpus 2 --rehearse      # a tiny model on the CPU; its times are no measure
    python -m tools.multi_gpu -o FOLDER --gpus 4 --engines FILES --model MODEL     # vLLM and SGLang beside dcpbench's engine

FILES is a folder with vllm.toml and sglang.toml (docs/servers.md), MODEL a folder of DeepSeek-V3 with fewer layers.

FOLDER gets a folder for each part with raw records and logs, state.json, and README.md. A command that is done is not
run again; one that failed twice is passed over, and one that ran out of time goes on at the next call.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dcpbench.records.model_sizes import ModelSizes, read_model_sizes
from tools.multi_gpu import report
from tools.multi_gpu.engine_parts import EnginePlan
from tools.multi_gpu.parts import Part, Plan, rehearsed
from tools.multi_gpu.running import Runner, say

PLANNED = {2: "H100", 4: "H200", 8: "H200"}
KNOWN = ("H200", "H100")


def gpu_here(gpus: int) -> str:
    """Return the name that `dcpbench machines` has for the GPU of this machine, or else for the planned one."""
    if shutil.which("nvidia-smi") is None:
        return PLANNED[gpus]
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return next((name for name in KNOWN if name in names), PLANNED[gpus])


def devices(gpus: int) -> list[str]:
    """Return the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:gpus] if named else [str(i) for i in range(gpus)]


def chosen(parts: list[Part], only: str) -> list[Part]:
    """Return the parts named in `only`, in the order of value; exit with a message if there is no such part."""
    names = [name for name in only.split(",") if name]
    if unknown := [name for name in names if name not in {part.name for part in parts}]:
        sys.exit(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(p.name for p in parts)}.")
    return [part for part in parts if not names or part.name in names]


def make_parts(asked: argparse.Namespace, gpu: str) -> list[Part]:
    """Return the parts that the options describe; exit with a message for options that do not fit together."""
    if asked.engines is None:
        return Plan(asked.gpus, asked.output, gpu, asked.backend).parts()
    if missing := [name for name in ("vllm.toml", "sglang.toml") if not (asked.engines / name).is_file()]:
        sys.exit(
            f"--engines {asked.engines} has no {' and no '.join(missing)}; write the engines' files as in docs/servers.md."
        )
    sizes = read_model_sizes(str(asked.model)) if asked.model else None
    if not isinstance(sizes, ModelSizes) or not sizes.layers:
        sys.exit("--engines needs --model: a folder with the config.json of the model that all engines serve.")
    if asked.rehearse:
        sys.exit("--rehearse is for dcpbench's own engine; with --engines, try --dry-run.")
    return EnginePlan(asked.gpus, asked.output, asked.engines, asked.model, sizes.layers).parts()


def main(arguments: list[str] | None = None) -> int:
    """Run the selected parts, and write README.md."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.multi_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=PLANNED, required=True)
    parser.add_argument("--minutes", type=float, default=25.0, help="deadline of this call; default: %(default)s")
    parser.add_argument("--only", default="", help="parts, as a comma list; default: all")
    parser.add_argument("--gpu", default="", help="H100 or H200; default: the one that is here")
    parser.add_argument("--backend", default="", help="attention kernel; default: dcpbench's own choice")
    parser.add_argument("--engines", type=Path, help="compare engines: folder with vllm.toml and sglang.toml")
    parser.add_argument("--model", type=Path, help="with --engines: folder of the model that all of them serve")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("--report", action="store_true", help="only write README.md")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    asked = parser.parse_args(arguments)
    if asked.minutes <= 0:
        sys.exit("--minutes must be above 0, such as --minutes 25.")
    gpu = asked.gpu or gpu_here(asked.gpus)
    everything = make_parts(asked, gpu)
    if asked.rehearse:
        everything = [
            dataclasses.replace(part, commands=tuple(filter(None, (rehearsed(c, gpu) for c in part.commands))))
            for part in everything
        ]
    parts = chosen(everything, asked.only)
    say(report.installed())
    if asked.dry_run:
        for part in parts:
            say(f"# {part.name}: {part.what}, about {part.minutes:.1f} min")
            for command in part.commands:
                say(f"{command.minutes:5.1f}  {command.said()}")
        say(f"# in all about {sum(part.minutes for part in parts):.0f} min")
        return 0
    runner = Runner(asked.output, asked.minutes, devices(asked.gpus))
    try:
        if not asked.report:
            runner.run(parts)
    finally:
        title = f"{asked.gpus} × {gpu}: a rehearsal on the CPU" if asked.rehearse else f"{asked.gpus} × {gpu}"
        text = report.written(asked.output, everything, runner.state, title)
        (asked.output / "README.md").write_text(text + "\n")
        say(f"Wrote {asked.output / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
