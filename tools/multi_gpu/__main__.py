"""Run the prepared measurements on two, four or eight GPUs: the most valuable first, resumable, with a deadline.

    python -m tools.multi_gpu -o FOLDER --gpus 2 --dry-run       # print every command with its estimated minutes
    python -m tools.multi_gpu -o FOLDER --gpus 2 --minutes 9     # run what fits; repeat the command to continue
    python -m tools.multi_gpu -o FOLDER --gpus 2 --only hangs,comm
    python -m tools.multi_gpu -o FOLDER --gpus 2 --report        # only write README.md, from the records in FOLDER
    python -m tools.multi_gpu -o FOLDER --gpus 2 --rehearse      # run a tiny model on the CPU, without a report of times
    python -m tools.multi_gpu -o FOLDER --gpus 4 --engines FILES --model MODEL     # compare vLLM, SGLang and dcpbench's engine

FILES is a folder with vllm.toml and sglang.toml (docs/servers.md), MODEL a folder of DeepSeek-V3 with fewer layers.

FOLDER gets a folder with raw records and logs for each part, state.json, and README.md. A command that is done is not run
again, one that failed twice is skipped, and one that ran out of time continues at the next call.
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
from tools.multi_gpu.parts import Part, Plan, make_rehearsal
from tools.multi_gpu.running import Runner, print_line

DEFAULT_GPUS = {2: "H100", 4: "H200", 8: "H200"}
KNOWN_GPUS = ("H200", "H100")


def detect_gpu(gpus: int) -> str:
    """Return the GPU of this machine by its name in `dcpbench machines`; without a known GPU, the planned one."""
    if shutil.which("nvidia-smi") is None:
        return DEFAULT_GPUS[gpus]
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return next((name for name in KNOWN_GPUS if name in names), DEFAULT_GPUS[gpus])


def list_devices(gpus: int) -> list[str]:
    """Return the first `gpus` GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:gpus] if visible else [str(i) for i in range(gpus)]


def select_parts(parts: list[Part], only: str) -> list[Part]:
    """Return the parts that `only` names, in the order of value. Exit with a message if there is no such part."""
    names = [name for name in only.split(",") if name]
    if unknown := [name for name in names if name not in {part.name for part in parts}]:
        sys.exit(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(p.name for p in parts)}.")
    return [part for part in parts if not names or part.name in names]


def make_parts(args: argparse.Namespace, gpu: str) -> list[Part]:
    """Return the parts for these arguments. Exit with a message for arguments that do not fit together."""
    if args.engines is None:
        return Plan(args.gpus, args.output, gpu, args.backend).list_parts()
    if missing := [name for name in ("vllm.toml", "sglang.toml") if not (args.engines / name).is_file()]:
        sys.exit(
            f"--engines {args.engines} has no {' and no '.join(missing)}; write the engine files as in docs/servers.md."
        )
    sizes = read_model_sizes(str(args.model)) if args.model else None
    if not isinstance(sizes, ModelSizes) or not sizes.layers:
        sys.exit("--engines needs --model FOLDER, with the config.json of the model that all engines serve.")
    if args.rehearse:
        sys.exit("--rehearse is for dcpbench's own engine; with --engines, try --dry-run.")
    return EnginePlan(args.gpus, args.output, args.engines, args.model, sizes.layers).list_parts()


def main(arguments: list[str] | None = None) -> int:
    """Run the selected parts, and write README.md."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.multi_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=DEFAULT_GPUS, required=True)
    parser.add_argument("--minutes", type=float, default=25.0, help="deadline of this call; default: %(default)s")
    parser.add_argument("--only", default="", help="parts, separated by commas; default: all")
    parser.add_argument("--gpu", default="", help="H100 or H200; default: the GPU of this machine")
    parser.add_argument("--backend", default="", help="attention backend; default: dcpbench's choice")
    parser.add_argument("--engines", type=Path, help="compare engines: folder with vllm.toml and sglang.toml")
    parser.add_argument("--model", type=Path, help="with --engines: folder of the model that all of them serve")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("--report", action="store_true", help="only write README.md")
    parser.add_argument("--rehearse", action="store_true", help="run a tiny model on the CPU")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        sys.exit("--minutes must be above 0, such as --minutes 25.")
    gpu = args.gpu or detect_gpu(args.gpus)
    all_parts = make_parts(args, gpu)
    if args.rehearse:
        all_parts = [
            dataclasses.replace(part, commands=tuple(filter(None, (make_rehearsal(c, gpu) for c in part.commands))))
            for part in all_parts
        ]
    parts = select_parts(all_parts, args.only)
    print_line(report.format_installed())
    if args.dry_run:
        for part in parts:
            print_line(f"# {part.name}: {part.what}, about {part.minutes:.1f} min")
            for command in part.commands:
                print_line(f"{command.minutes:5.1f}  {command.format_command_line()}")
        print_line(f"# in all about {sum(part.minutes for part in parts):.0f} min")
        return 0
    runner = Runner(args.output, args.minutes, list_devices(args.gpus))
    try:
        if not args.report:
            runner.run(parts)
    finally:
        title = f"{args.gpus} × {gpu}: a rehearsal on the CPU" if args.rehearse else f"{args.gpus} × {gpu}"
        text = report.format_report(args.output, all_parts, runner.state, title)
        (args.output / "README.md").write_text(text + "\n")
        print_line(f"Wrote {args.output / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
