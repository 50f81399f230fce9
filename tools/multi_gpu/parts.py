"""List the commands for two, four and eight GPUs as parts with estimated minutes, the most valuable first."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from tools import emulation_live

ROOT = Path(__file__).parents[2]
GPU_MARK = "mark.gpu"
V3, K2 = "deepseek-v3", "kimi-k2"
MAX_GPUS = 8
FP8, BF16 = "--weights-dtype fp8 --kv-dtype fp8", "--weights-dtype bf16 --kv-dtype bf16"
MIXED = ("--weights-dtype fp8 --kv-dtype bf16", "--weights-dtype bf16 --kv-dtype fp8")
PRECISION_NAMES = {FP8: "fp8", BF16: "bf16", MIXED[0]: "fp8-bf16", MIXED[1]: "bf16-fp8"}
EXCHANGES = "ag_rs,symm,a2a"
POINT_MINUTES, ENGINE_MINUTES = (
    0.08,
    0.8,
)  # minutes of a decode point (2 to 6 s on 4 H200), and of an engine (job 15 s, engine 4 s)
REQUESTS = "--num-requests 120 --input-tokens uniform:1000-4000 --output-tokens uniform:20-60"
SESSIONS = (
    "--concurrency 16 --num-requests 48 --input-tokens uniform:1000-3000 --output-tokens uniform:20-60"
    " --sessions turns=3,tokens=uniform:100-300,think=0.5"
)
STEP_TIMES_LOAD = "--num-requests 480 --input-tokens 4000 --output-tokens 1500 --concurrency 8,32,48"
RATES = {2: "1.6,2.7", 4: "3.4,5.4", 8: "6.8,10.8"}  # requests/s by GPUs; the second is near the maximum of 2 and 4
KV_MEMORY = {"H200": "100GiB", "H100": "30GiB"}  # KV memory of a grid; a smaller pool lets engines start sooner
BF16_KV_MEMORY = KV_MEMORY | {
    "H200": "90GiB"
}  # KV memory in bf16; a larger pool leaves no memory for Kimi-K2 on two GPUs
SERVED_KV_MEMORY = {"H200": "40GiB", "H100": "20GiB"}


@dataclasses.dataclass(frozen=True)
class Command:
    """Hold a program with its arguments."""

    program: str  # `dcpbench`, or a module that `python -m` runs
    arguments: tuple[str, ...]
    minutes: float
    name: str  # name of its log and of its output folder
    only_one: bool = False  # True if it uses one GPU: consecutive ones run in parallel, one per GPU

    def format_command_line(self, device: str = "0") -> str:
        """Format the command line, with the given GPU if the command uses only one."""
        program = self.program if self.program == "dcpbench" else f"python -m {self.program}"
        arguments = " ".join(
            "*".join(part and shlex.quote(part) for part in word.split("*")) for word in self.arguments
        )
        return f"{f'CUDA_VISIBLE_DEVICES={device} ' if self.only_one else ''}{program} {arguments}"


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold commands that belong together."""

    name: str
    what: str
    commands: tuple[Command, ...]

    @property
    def minutes(self) -> float:
        """Return the estimated minutes of all commands in sequence."""
        return sum(command.minutes for command in self.commands)


class Plan:
    """Make the parts for a machine with this many GPUs, which write to a folder."""

    def __init__(self, gpus: int, folder: Path, gpu: str, backend: str = "") -> None:
        """Set the options of all parts: `gpu` is a name of `dcpbench machines`, `backend` the attention backend; if it is
        empty, dcpbench chooses.
        """
        self.n, self.folder, self.gpu = gpus, folder, gpu
        self.backend = ["--backend", backend] if backend else []
        self.loads = {
            "closed": f"--concurrency 8,32 {REQUESTS}",
            "open": f"--request-rate {RATES[gpus]} --concurrency 48 {REQUESTS}",
            "turns": SESSIONS,
        }
        """Loads that can be replayed with the step times of STEP_TIMES_LOAD, because their requests are no longer and no more numerous."""
        self.grid_kv, self.bf16_kv, self.served_kv = (
            f"--kv-memory {memory[gpu]}" for memory in (KV_MEMORY, BF16_KV_MEMORY, SERVED_KV_MEMORY)
        )
        self.machine = folder / "comm" / emulation_live.MACHINE_FILE
        self.dcps = ",".join(str(d) for d in (1, 2, 4, 8) if d <= gpus and (gpus < MAX_GPUS or d in (1, MAX_GPUS)))

    def list_parts(self) -> list[Part]:
        """Return the parts, the most valuable first."""
        by_gpus = {
            2: [
                self.make_comm_part(), self.make_grid_part("grid"), self.make_emulated_part(), self.make_seed_part("seed", V3), self.make_served_part(), self.make_steps_part(), self.make_hangs_part(),
                self.make_tests_part(), self.make_grid_part("bf16", precision=BF16), self.make_experts_part(), self.make_all_reduce_part(), self.make_remaining_part(), self.make_replays_part(),
            ],
            4: [
                self.make_comm_part(), self.make_grid_part("grid"), self.make_seed_part("seed", V3), self.make_served_part(), self.make_grid_part("bf16", V3, precision=BF16),
                self.make_emulated_part(), self.make_experts_part(), self.make_all_reduce_part(), self.make_grid_part("bf16-k2", K2, precision=BF16), self.make_seed_part("seed-k2", K2),
                self.make_hangs_part(), self.make_remaining_part(), self.make_replays_part(),
            ],
            8: [
                self.make_comm_part(), self.make_grid_part("grid", V3), self.make_seed_part("seed", V3), self.make_live_part(), self.make_repeats_part(),
                self.make_grid_part("grid-k2", K2), self.make_seed_part("seed-k2", K2), self.make_emulated_part(), self.make_hangs_part(),
            ],
        }  # fmt: skip
        return by_gpus[self.n]

    def make_sweep(self, part: str, name: str, options: str, points: int, *, only_one: bool = False) -> Command:
        """Return the command of a decode sweep of at most `points` points."""
        output = str(self.folder / part / name)
        arguments = ["sweep", *shlex.split(options), "--no-baseline", *self.backend, "-o", output, "--resume"]
        return Command("dcpbench", tuple(arguments), ENGINE_MINUTES + POINT_MINUTES * points, name, only_one)

    def make_serve(self, part: str, name: str, options: str, minutes: float, *, only_one: bool = False) -> Command:
        """Return the command of a served load."""
        output = str(self.folder / part / name)
        arguments = ["serve", *shlex.split(options), "--no-baseline", *self.backend, "-o", output, "--resume"]
        return Command("dcpbench", tuple(arguments), minutes, name, only_one)

    def make_steps_part(self) -> Part:
        """Return the two decode steps that have a limit."""
        found = []
        for precision in (BF16, FP8):
            requests = 24 if precision == BF16 and self.gpu == "H100" else 32  # 80 GB hold no more
            options = f"--model {V3} --tp {self.n} --dcp 1 --concurrency {requests} --context 32000 --seconds 1"
            found.append(self.make_sweep("steps", PRECISION_NAMES[precision], f"{options} {precision}", 1))
        return Part("steps", "32 × 32,000 in bf16 (24 on 80 GB) and in fp8", tuple(found))

    def make_hangs_part(self) -> Part:
        """Return the injected hangs, each with a separate command, so that a hang that does not end leaves the others alone."""
        return Part(
            "hangs",
            "injected hangs: checks that the diagnosis names the faulty rank, and how soon",
            tuple(
                Command(
                    "tools.hangs",
                    ("--gpu", self.gpu, "--ranks", str(self.n), "--faults", fault, "--timeout", "10", "--reasons"),
                    1.0,
                    fault,
                )
                for fault in ("gather", "shape", "loops", "flag")
            ),
        )

    def make_comm_part(self) -> Part:
        """Return the communication benches between the GPUs, and the machine file made from them."""
        commands = emulation_live.list_bench_commands(self.folder / "comm", self.n)
        names, minutes = ("collectives", "exchange", "calibrate"), (0.8, 0.6, 0.1)
        found = [
            Command("dcpbench", tuple(command.arguments), m, name, command.only_one)
            for command, name, m in zip(commands, names, minutes, strict=True)
        ]
        return Part("comm", "communication benches, and the machine file for forecasts", tuple(found))

    def make_emulated_part(self) -> Part:
        """Return emulated points of the grid, and emulated step times for the served loads, on one GPU."""
        emulate = f"--emulate {shlex.quote(str(self.machine))}"
        layouts, points = f"--dp 1,{self.n} --dcp 1,{self.n} --exchange ag_rs,symm", 16
        found = [
            self.make_sweep(
                "emulated",
                model,
                f"--model {model} --tp {self.n} {layouts} --concurrency 8,32 --context 4000,32000 --seconds 0.5"
                f" {FP8} {self.grid_kv} {emulate}",
                points,
                only_one=True,
            )
            for model in (V3, K2)
        ]
        options = f"{self.format_dcp_options()} {STEP_TIMES_LOAD} --mode replay {emulate}"
        found.append(self.make_serve("emulated", "times", options, 2.7, only_one=True))
        return Part("emulated", "points emulated on one GPU, with communication times from benches", tuple(found))

    def format_dcp_options(self) -> str:
        """Format the options of the layout with DCP for served loads."""
        return f"--model {V3} --tp {self.n} --dcp {self.n} --exchange symm {FP8} {self.served_kv}"

    def make_served_part(self) -> Part:
        """Return the live served loads."""
        live = [
            self.make_serve("served", f"live-{name}", f"{self.format_dcp_options()} {load} --no-profile", 2.6)
            for name, load in self.loads.items()
        ]
        return Part("served", "served loads, live", tuple(live))

    def make_replays_part(self) -> Part:
        """Return replays of the loads with the step times of STEP_TIMES_LOAD, measured on all GPUs and emulated on one."""
        found = []
        for name, run in (("replay", self.folder / "seed" / V3), ("emulated", self.folder / "emulated" / "times")):
            times = f"{run}/step-times/*-dcp{self.n}-*.json"
            for load, load_options in self.loads.items():
                options = f"--mode replay --step-times {times} {load_options} {self.served_kv}"
                output = str(self.folder / "replays" / f"{name}-{load}")
                arguments = ("serve", *shlex.split(options), "--no-baseline", "-o", output, "--resume")
                found.append(Command("dcpbench", arguments, 0.3, f"{name}-{load}"))
        return Part("replays", "served loads replayed with step times of another load, without a GPU", tuple(found))

    def make_grid_part(self, part: str, *models: str, precision: str = FP8) -> Part:
        """Return the grid that compares layouts with and without DCP: a command per model, with all layouts in one job."""
        found = []
        concurrency, loads = ("8,32,48,128", 9) if self.n == MAX_GPUS else ("8,32", 5)
        contexts = "4000,32000" if precision == BF16 else "4000,32000,128000"
        for model in models or (V3, K2):
            exchanges = EXCHANGES if self.n == MAX_GPUS or (model, precision) == (V3, FP8) else "ag_rs,symm"
            layouts = 2 + len(exchanges.split(",")) * (len(self.dcps.split(",")) - 1)
            options = f"--model {model} --tp {self.n} {precision} --concurrency {concurrency} --context {contexts}"
            options += f" --dp 1,{self.n} --dcp {self.dcps} --exchange {exchanges} --seconds 0.5"
            options += f" {self.bf16_kv if precision == BF16 else self.grid_kv}"
            found.append(self.make_sweep(part, f"{model}-{PRECISION_NAMES[precision]}", options, loads * layouts))
        return Part(part, f"decode over requests × context, {PRECISION_NAMES[precision]}", tuple(found))

    def make_experts_part(self) -> Part:
        """Return expert-parallel and tensor-parallel experts at three loads."""
        layouts = f"--dp 1,{self.n} --dcp 1,{self.n} --exchange symm --ep 1,tp"
        load = f"--concurrency 8,32,128 --context 4000 --seconds 0.5 {FP8} {self.grid_kv}"
        found = [
            self.make_sweep("experts", model, f"--model {model} --tp {self.n} {layouts} {load}", 18)
            for model in (V3, K2)
        ]
        return Part("experts", "--ep 1 and tp at three loads", tuple(found))

    def make_all_reduce_part(self) -> Part:
        """Return both all-reduces of tensor parallelism."""
        options = f"--model {V3} --tp {self.n} {FP8} {self.grid_kv} --dcp 1,{self.n} --exchange symm --collectives all-reduce=nccl/symm"
        load = "--concurrency 8,32 --context 4000 --seconds 0.5"
        return Part(
            "reduce", "--collectives all-reduce=nccl/symm", (self.make_sweep("reduce", V3, f"{options} {load}", 8),)
        )

    def make_tests_part(self) -> Part:
        """Return all tests that need a GPU. Only files with such tests are named, because each worker collects all named
        files first.
        """
        files = [
            str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests").rglob("test_*.py")) if GPU_MARK in f.read_text()
        ]
        workers = ("-n", "12", "--dist", "worksteal", "-p", "no:benchmark")  # a plugin that warns if there are workers
        arguments = ("-m", "gpu", *workers, "--durations=15", "-q", *files)
        return Part("tests", "all tests that need a GPU", (Command("pytest", arguments, 1.5, "gpu"),))

    def make_seed_part(self, part: str, *models: str) -> Part:
        """Return the load that measures step times: 480 requests of 4,000/1,500 tokens at 8, 32 and 48 clients, in replay."""
        found = [
            self.make_serve(
                part,
                model,
                f"--model {model} --tp {self.n} {FP8} {self.served_kv} {STEP_TIMES_LOAD} --mode replay --dp 1,{self.n} --dcp 1,{self.n} --exchange symm",
                7.0,
            )
            for model in models
        ]
        return Part(part, "480 × 4,000/1,500 at 8, 32 and 48 clients, in replay", tuple(found))

    def make_live_part(self) -> Part:
        """Return a live point of 96 requests and its replay for each layout."""
        options = f"--model {V3} --tp {self.n} {FP8} --mode live,replay --concurrency 48 --num-requests 96"
        options += " --input-tokens 4000 --output-tokens 1500"
        layouts = {
            "dcp": f"--dcp {self.n} --exchange symm",
            "tp": "--dcp 1",
            "dp": f"--dp {self.n} --dcp 1",
        }
        found = [self.make_serve("live", name, f"{options} {layout}", 3.5) for name, layout in layouts.items()]
        return Part("live", "96 × 4,000/1,500 at 48 clients, live and in replay", tuple(found))

    def make_repeats_part(self) -> Part:
        """Return two passes over the same six points."""
        options = f"--model {V3} --tp {self.n} --dcp 1,{self.n} --exchange symm {FP8} --seconds 1 --repeats 2"
        load = "--concurrency 8,32,48 --context 4000"
        return Part("again", "two passes over six points", (self.make_sweep("again", V3, f"{options} {load}", 12),))

    def make_remaining_part(self) -> Part:
        """Return the rest of the grid: a2a, 128 requests, mixed precisions, and tensor-parallel experts."""
        found = []
        for precision in (FP8, BF16):
            for model in (V3, K2):
                options = f"--model {model} --tp {self.n} {precision} --seconds 0.5 --dcp {self.dcps}"
                options += f" --concurrency 8,32,128 --context 4000,32000 --exchange {EXCHANGES}"
                found.append(self.make_sweep("more", f"{model}-{PRECISION_NAMES[precision]}-wide", options, 20))
        for model in (V3, K2):
            for precision in MIXED:
                options = f"--model {model} --tp {self.n} {precision} --seconds 0.5"
                options += f" --concurrency 8,32,128 --context 4000,32000 --dcp 1,{self.n} --exchange ag_rs,symm"
                found.append(self.make_sweep("more", f"{model}-{PRECISION_NAMES[precision]}", options, 16))
        for precision in (FP8, BF16):
            for model in (V3, K2):
                options = f"--model {model} --tp {self.n} {precision} --seconds 0.5 --ep tp"
                options += f" --concurrency 8,32,128 --context 32000,128000 --dcp 1,{self.n} --exchange {EXCHANGES}"
                found.append(self.make_sweep("more", f"{model}-{PRECISION_NAMES[precision]}-ep", options, 16))
        return Part(
            "more",
            "the rest of the grid: a2a, 128 requests, mixed precisions, tensor-parallel experts at long contexts",
            tuple(found),
        )


TINY = {  # options of a rehearsal; options with an empty value are left out
    "--model": "tiny", "--concurrency": "1,2", "--context": "16", "--seconds": "0.05", "--num-requests": "4",
    "--input-tokens": "16", "--output-tokens": "4", "--sessions": "",
    "--request-rate": "20", "--kv-memory": "", "--weights-dtype": "", "--kv-dtype": "", "--backend": "",
    "--heads": "8", "--requests": "1,2",
}  # fmt: skip
NOT_REHEARSED = ("calibrate",)  # commands that a rehearsal skips: a CPU has no times for a machine file


def make_rehearsal(command: Command, like: str) -> Command | None:
    """Return the command with a tiny model on the CPU; None if it cannot run there. `like` is a built-in machine."""
    if command.name in NOT_REHEARSED:
        return None
    arguments = list(command.arguments)
    if command.program == "pytest":
        return dataclasses.replace(command, arguments=(*arguments, "--collect-only"))
    if command.program == "tools.hangs":
        if command.name == "loops":
            return None
        return dataclasses.replace(command, arguments=tuple(w for w in arguments if w not in ("--gpu", like)))
    kept: list[str] = []
    for word in arguments:
        option = kept[-1] if kept and kept[-1] in {*TINY, "--emulate", "--variant"} else ""
        if option == "--variant":
            kept.append(",".join(name for name in word.split(",") if not name.endswith("registered")))
        elif option:
            value = like if option == "--emulate" else TINY[option]
            kept[-1:] = [option, value] if value else []
        else:
            kept.append(word)
    return dataclasses.replace(command, arguments=(*kept, "--device", "cpu"), only_one=False)
