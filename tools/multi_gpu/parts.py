"""List the commands for two, four and eight GPUs, most valuable first: parts, each with commands
and estimated minutes.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from tools import emulation_live

ROOT = Path(__file__).parents[2]
MARK = "mark.gpu"
V3, K2 = "deepseek-v3", "kimi-k2"
EIGHT = 8
FP8, BF16 = "--weights-dtype fp8 --kv-dtype fp8", "--weights-dtype bf16 --kv-dtype bf16"
MIXED = ("--weights-dtype fp8 --kv-dtype bf16", "--weights-dtype bf16 --kv-dtype fp8")
NAMES = {FP8: "fp8", BF16: "bf16", MIXED[0]: "fp8-bf16", MIXED[1]: "bf16-fp8"}
EXCHANGES = "ag_rs,symm,a2a"
POINT_MINUTES, ENGINE_MINUTES = 0.08, 0.8  # per decode point (2 to 6 s on 4 H200), per engine (job 15 s, engine 4 s)
REQUESTS = "--num-requests 120 --input-tokens uniform:1000-4000 --output-tokens uniform:20-60"
TURNS = (
    "--concurrency 16 --num-requests 48 --input-tokens uniform:1000-3000 --output-tokens uniform:20-60"
    " --sessions turns=3,tokens=uniform:100-300,think=0.5"
)
SEED = "--num-requests 480 --input-tokens 4000 --output-tokens 1500 --concurrency 8,32,48"
RATES = {2: "1.6,2.7", 4: "3.4,5.4", 8: "6.8,10.8"}  # requests/s by GPUs; the second is near the maximum of 2 and 4
KV = {"H200": "100GiB", "H100": "30GiB"}  # KV memory of a grid; with fewer weights, engines are built sooner
BF16_KV = KV | {"H200": "90GiB"}  # KV memory in bf16, where a larger pool leaves no memory for Kimi-K2 on two GPUs
SERVED_KV = {"H200": "40GiB", "H100": "20GiB"}


@dataclasses.dataclass(frozen=True)
class Command:
    """Hold one program with its arguments."""

    program: str  # `dcpbench`, or a module that `python -m` runs
    words: tuple[str, ...]
    minutes: float
    name: str  # name of its log, and of the folder that it writes
    only_one: bool = False  # True if it takes one GPU: consecutive ones run in parallel, on a GPU each

    def said(self, device: str = "0") -> str:
        """Return the command line, on the given GPU if it takes only one."""
        program = self.program if self.program == "dcpbench" else f"python -m {self.program}"
        words = " ".join("*".join(part and shlex.quote(part) for part in word.split("*")) for word in self.words)
        return f"{f'CUDA_VISIBLE_DEVICES={device} ' if self.only_one else ''}{program} {words}"


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold commands that belong together."""

    name: str
    what: str
    commands: tuple[Command, ...]

    @property
    def minutes(self) -> float:
        """Return the total minutes of its commands, run in sequence."""
        return sum(command.minutes for command in self.commands)


class Plan:
    """Hold the parts of a machine with this many GPUs, in a folder."""

    def __init__(self, gpus: int, folder: Path, gpu: str, backend: str = "") -> None:
        """Make the parts; `gpu` is a name of `dcpbench machines`, `backend` the attention backend, dcpbench's default
        if empty.
        """
        self.n, self.folder, self.gpu = gpus, folder, gpu
        self.backend = ["--backend", backend] if backend else []
        self.loads = {
            "closed": f"--concurrency 8,32 {REQUESTS}",
            "open": f"--request-rate {RATES[gpus]} --concurrency 48 {REQUESTS}",
            "turns": TURNS,
        }
        """Five loads, none of which needs a step time that SEED lacks: they have no longer requests, and no more of
        them.
        """
        self.grid_kv, self.bf16_kv, self.served_kv = (f"--kv-memory {of[gpu]}" for of in (KV, BF16_KV, SERVED_KV))
        self.machine = folder / "comm" / emulation_live.MACHINE
        self.dcps = ",".join(str(d) for d in (1, 2, 4, 8) if d <= gpus and (gpus < EIGHT or d in (1, EIGHT)))

    def parts(self) -> list[Part]:
        """Return the parts, most valuable first."""
        by_gpus = {
            2: [
                self.comm(), self.grid("grid"), self.emulated(), self.seed("seed", V3), self.served(), self.steps(), self.hangs(),
                self.tests(), self.grid("bf16", precision=BF16), self.experts(), self.reduce(), self.more(), self.replays(),
            ],
            4: [
                self.comm(), self.grid("grid"), self.seed("seed", V3), self.served(), self.grid("bf16", V3, precision=BF16),
                self.emulated(), self.experts(), self.reduce(), self.grid("bf16-k2", K2, precision=BF16), self.seed("seed-k2", K2),
                self.hangs(), self.more(), self.replays(),
            ],
            8: [
                self.comm(), self.grid("grid", V3), self.seed("seed", V3), self.live(), self.again(),
                self.grid("grid-k2", K2), self.seed("seed-k2", K2), self.emulated(), self.hangs(),
            ],
        }  # fmt: skip
        return by_gpus[self.n]

    def sweep(self, part: str, name: str, words: str, points: int, *, only_one: bool = False) -> Command:
        """Return a decode sweep; `points` is the maximum number of measured points."""
        there = str(self.folder / part / name)
        words_ = ["sweep", *shlex.split(words), "--no-baseline", *self.backend, "-o", there, "--resume"]
        return Command("dcpbench", tuple(words_), ENGINE_MINUTES + POINT_MINUTES * points, name, only_one)

    def serve(self, part: str, name: str, words: str, minutes: float, *, only_one: bool = False) -> Command:
        """Return a served load."""
        there = str(self.folder / part / name)
        words_ = ["serve", *shlex.split(words), "--no-baseline", *self.backend, "-o", there, "--resume"]
        return Command("dcpbench", tuple(words_), minutes, name, only_one)

    def steps(self) -> Part:
        """Return the two steps that have a bar."""
        found = []
        for precision in (BF16, FP8):
            requests = 24 if precision == BF16 and self.gpu == "H100" else 32  # 80 GB have no room for more
            words = f"--model {V3} --tp {self.n} --dcp 1 --concurrency {requests} --context 32000 --seconds 1"
            found.append(self.sweep("steps", NAMES[precision], f"{words} {precision}", 1))
        return Part("steps", "32 × 32,000 in bf16 (24 on 80 GB) and in fp8", tuple(found))

    def hangs(self) -> Part:
        """Return injected hangs, a command for each, so that one that does not end does not affect the others."""
        return Part(
            "hangs",
            "one rank goes wrong: is it named, and how soon",
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

    def comm(self) -> Part:
        """Return benchmarks of calls between the GPUs, and a machine file made from them alone."""
        steps = emulation_live.list_bench_steps(self.folder / "comm", self.n)
        names, minutes = ("collectives", "exchange", "calibrate"), (0.8, 0.6, 0.1)
        found = [
            Command("dcpbench", tuple(step.words), m, name, step.only_one)
            for step, name, m in zip(steps, names, minutes, strict=True)
        ]
        return Part("comm", "calls between the GPUs, and what forecasts are made of", tuple(found))

    def emulated(self) -> Part:
        """Return points of the grid, and step times for the served loads, on one GPU."""
        emulate = f"--emulate {shlex.quote(str(self.machine))}"
        layouts, points = f"--dp 1,{self.n} --dcp 1,{self.n} --exchange ag_rs,symm", 16
        found = [
            self.sweep(
                "emulated",
                model,
                f"--model {model} --tp {self.n} {layouts} --concurrency 8,32 --context 4000,32000 --seconds 0.5"
                f" {FP8} {self.grid_kv} {emulate}",
                points,
                only_one=True,
            )
            for model in (V3, K2)
        ]
        words = f"{self.of_dcp()} {SEED} --mode replay {emulate}"
        found.append(self.serve("emulated", "times", words, 2.7, only_one=True))
        return Part("emulated", "one GPU against all, by calls that were measured in benches alone", tuple(found))

    def of_dcp(self) -> str:
        """Return the layout of served loads."""
        return f"--model {V3} --tp {self.n} --dcp {self.n} --exchange symm {FP8} {self.served_kv}"

    def served(self) -> Part:
        """Return the loads served live."""
        live = [
            self.serve("served", f"live-{name}", f"{self.of_dcp()} {load} --no-profile", 2.6)
            for name, load in self.loads.items()
        ]
        return Part("served", "served loads, live", tuple(live))

    def replays(self) -> Part:
        """Return the loads replayed with the step times of the seed's load: of all GPUs, and of one."""
        found = []
        for name, run in (("replay", self.folder / "seed" / V3), ("emulated", self.folder / "emulated" / "times")):
            times = f"{run}/step-times/*-dcp{self.n}-*.json"
            for load, typed in self.loads.items():
                words = f"--mode replay --step-times {times} {typed} {self.served_kv}"
                there = str(self.folder / "replays" / f"{name}-{load}")
                typed_ = ("serve", *shlex.split(words), "--no-baseline", "-o", there, "--resume")
                found.append(Command("dcpbench", typed_, 0.3, f"{name}-{load}"))
        return Part("replays", "served loads by step times of another load; no GPU is needed", tuple(found))

    def grid(self, part: str, *models: str, precision: str = FP8) -> Part:
        """Return the grid on where DCP pays; a model at a time, all layouts in one job."""
        found = []
        concurrency, loads = ("8,32,48,128", 9) if self.n == EIGHT else ("8,32", 5)
        contexts = "4000,32000" if precision == BF16 else "4000,32000,128000"
        for model in models or (V3, K2):
            exchanges = EXCHANGES if self.n == EIGHT or (model, precision) == (V3, FP8) else "ag_rs,symm"
            layouts = 2 + len(exchanges.split(",")) * (len(self.dcps.split(",")) - 1)
            words = f"--model {model} --tp {self.n} {precision} --concurrency {concurrency} --context {contexts}"
            words += f" --dp 1,{self.n} --dcp {self.dcps} --exchange {exchanges} --seconds 0.5"
            words += f" {self.bf16_kv if precision == BF16 else self.grid_kv}"
            found.append(self.sweep(part, f"{model}-{NAMES[precision]}", words, loads * layouts))
        return Part(part, f"decode over requests × context, {NAMES[precision]}", tuple(found))

    def experts(self) -> Part:
        """Return both placements of experts, at three loads."""
        layouts = f"--dp 1,{self.n} --dcp 1,{self.n} --exchange symm --ep 1,tp"
        load = f"--concurrency 8,32,128 --context 4000 --seconds 0.5 {FP8} {self.grid_kv}"
        found = [
            self.sweep("experts", model, f"--model {model} --tp {self.n} {layouts} {load}", 18) for model in (V3, K2)
        ]
        return Part("experts", "--ep 1 and tp at three loads", tuple(found))

    def reduce(self) -> Part:
        """Return both ways to reduce the partial sums of tp."""
        words = f"--model {V3} --tp {self.n} {FP8} {self.grid_kv} --dcp 1,{self.n} --exchange symm --collectives all-reduce=nccl/symm"
        load = "--concurrency 8,32 --context 4000 --seconds 0.5"
        return Part("reduce", "--collectives all-reduce=nccl/symm", (self.sweep("reduce", V3, f"{words} {load}", 8),))

    def tests(self) -> Part:
        """Return all tests that need a GPU, limited to the files that have any, as each worker would collect all of
        them first.
        """
        files = [str(f.relative_to(ROOT)) for f in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in f.read_text()]
        how = ("-n", "12", "--dist", "worksteal", "-p", "no:benchmark")  # a plugin that warns if there are workers
        words = ("-m", "gpu", *how, "--durations=15", "-q", *files)
        return Part("tests", "all tests that need a GPU", (Command("pytest", words, 1.5, "gpu"),))

    def seed(self, part: str, *models: str) -> Part:
        """Return the load with which DCP was first measured: 480 × 4,000/1,500 at 8, 32 and 48, in replay."""
        found = [
            self.serve(
                part,
                model,
                f"--model {model} --tp {self.n} {FP8} {self.served_kv} {SEED} --mode replay --dp 1,{self.n} --dcp 1,{self.n} --exchange symm",
                7.0,
            )
            for model in models
        ]
        return Part(part, "480 × 4,000/1,500 at 8, 32 and 48 clients, in replay", tuple(found))

    def live(self) -> Part:
        """Return one live point of 96 requests for each layout, and its replay."""
        words = f"--model {V3} --tp {self.n} {FP8} --mode live,replay --concurrency 48 --num-requests 96"
        words += " --input-tokens 4000 --output-tokens 1500"
        layouts = {
            "dcp": f"--dcp {self.n} --exchange symm",
            "tp": "--dcp 1",
            "dp": f"--dp {self.n} --dcp 1",
        }
        found = [self.serve("live", name, f"{words} {layout}", 3.5) for name, layout in layouts.items()]
        return Part("live", "96 × 4,000/1,500 at 48 clients, live and in replay", tuple(found))

    def again(self) -> Part:
        """Return two passes over six loads."""
        words = f"--model {V3} --tp {self.n} --dcp 1,{self.n} --exchange symm {FP8} --seconds 1 --repeats 2"
        load = "--concurrency 8,32,48 --context 4000"
        return Part("again", "two passes of six loads", (self.sweep("again", V3, f"{words} {load}", 12),))

    def more(self) -> Part:
        """Return the rest of the grid: a2a, 128 requests, other precisions of the KV cache, expert parallel."""
        found = []
        for precision in (FP8, BF16):
            for model in (V3, K2):
                words = f"--model {model} --tp {self.n} {precision} --seconds 0.5 --dcp {self.dcps}"
                words += f" --concurrency 8,32,128 --context 4000,32000 --exchange {EXCHANGES}"
                found.append(self.sweep("more", f"{model}-{NAMES[precision]}-wide", words, 20))
        for model in (V3, K2):
            for precision in MIXED:
                words = f"--model {model} --tp {self.n} {precision} --seconds 0.5"
                words += f" --concurrency 8,32,128 --context 4000,32000 --dcp 1,{self.n} --exchange ag_rs,symm"
                found.append(self.sweep("more", f"{model}-{NAMES[precision]}", words, 16))
        for precision in (FP8, BF16):
            for model in (V3, K2):
                words = f"--model {model} --tp {self.n} {precision} --seconds 0.5 --ep tp"
                words += f" --concurrency 8,32,128 --context 32000,128000 --dcp 1,{self.n} --exchange {EXCHANGES}"
                found.append(self.sweep("more", f"{model}-{NAMES[precision]}-ep", words, 16))
        return Part(
            "more",
            "the rest of the grid: a2a, 128 requests, mixed precisions, expert parallel at long contexts",
            tuple(found),
        )


TINY = {  # options of a rehearsal; those without a value are left out
    "--model": "tiny", "--concurrency": "1,2", "--context": "16", "--seconds": "0.05", "--num-requests": "4",
    "--input-tokens": "16", "--output-tokens": "4", "--sessions": "",
    "--request-rate": "20", "--kv-memory": "", "--weights-dtype": "", "--kv-dtype": "", "--backend": "",
    "--heads": "8", "--requests": "1,2",
}  # fmt: skip
NO_REHEARSAL = ("calibrate",)  # programs that a rehearsal skips: a CPU has no times for a machine file


def rehearsed(command: Command, like: str) -> Command | None:
    """Return the command on the CPU with a tiny model, or None if there is none; `like` is a built-in machine."""
    if command.name in NO_REHEARSAL:
        return None
    words = list(command.words)
    if command.program == "pytest":
        return dataclasses.replace(command, words=(*words, "--collect-only"))
    if command.program == "tools.hangs":
        if command.name == "loops":
            return None
        return dataclasses.replace(command, words=tuple(w for w in words if w not in ("--gpu", like)))
    kept: list[str] = []
    for word in words:
        option = kept[-1] if kept and kept[-1] in {*TINY, "--emulate", "--variant"} else ""
        if option == "--variant":
            kept.append(",".join(name for name in word.split(",") if not name.endswith("registered")))
        elif option:
            value = like if option == "--emulate" else TINY[option]
            kept[-1:] = [option, value] if value else []
        else:
            kept.append(word)
    return dataclasses.replace(command, words=(*kept, "--device", "cpu"), only_one=False)
