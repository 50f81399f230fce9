"""Describe machines for forecasts: hosts of GPUs (gpus.py), the links between them, and measurements of their calls. No torch.

A machine is named, `H200` or `H200+rdma-400`, or is a file that `dcpbench bench calibrate` writes and that may be edited:

    name = "our H200 hosts"
    gpu = "H200"                   # of `dcpbench machines`
    gpus_per_host = 8
    link = "rdma-400"              # between hosts, of `dcpbench machines`; or a table with name, bytes_s, latency_us, source
    measured = "4 × NVIDIA H200, NCCL 2.28.9"
    prompts = [[128, 1.01], [4096, 1.05]]    # [prompt tokens of a step, times as long as one GPU takes that stands for several]
    [calls]                        # [ranks, barriers, bytes that a rank receives, µs] of each
    all-gather = [[2, 1, 7168, 5.84], …]

Built-in machines use the calls measured on H200, the only measured host, for everything without a file. On other GPUs the
bytes are scaled by the nominal rates of links, and the band reaches from the scaled to the measured time.
"""

from __future__ import annotations

import functools
import hashlib
import math
import tomllib
from importlib import resources
from pathlib import Path

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.comm_model import Call, CommModel, Link, Prompts, Sample, describe_invalid_prompts
from dcpbench.points.gpus import GPUS, Gpu

LINKS = (
    Link(
        name="rdma-400",
        bytes_s=50e9,
        latency_us=4.0,
        source="400 Gb/s a GPU (eight ConnectX-7 a host), https://www.nvidia.com/en-us/data-center/dgx-h100/; latency: NCCL's "
        "cost model of a ring takes 2.7, 4.0 and 9.6 µs for a hop over the network in LL, LL128 and Simple, "
        "https://github.com/NVIDIA/nccl, src/graph/tuning.cc",
    ),
    Link(
        name="rdma-800",
        bytes_s=100e9,
        latency_us=4.0,
        source="800 Gb/s a GPU (ConnectX-8), Hot Chips 2025, "
        "https://wccftech.com/nvidia-connectx-8-supernic-designed-for-blackwell-systems-pcie-g6-800gbe-speed; latency as above",
    ),
)
GPUS_PER_HOST = 8  # default number of GPUs: that of HGX and DGX boards
MEASURED_ON = "H200"
BORROWED_ERROR = 0.1  # relative error of another machine's calls: NCCL's small ones differ by up to 9 % between hosts
SCALE_ERROR = 0.1  # relative error of scaled rates, which GPUs reach to a similar share; see Machine.compute_scale
RATES = {  # limits by the names of points/roofline.py, each with the field of a GPU
    "read": "memory_bytes_s",
    "copy": "memory_bytes_s",
    "matmul": "bf16_flop_s",
    "matmul_fp8": "fp8_flop_s",
    "matmul_fp4": "fp4_flop_s",
    "peer": "nvlink_bytes_s",
}


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe identical hosts and the link between them."""

    name: str
    gpu: str  # name of the GPU, one of GPUS
    gpus_per_host: int = GPUS_PER_HOST  # number of GPUs that can read each other's memory
    link: str | Link | None = None  # link between hosts; None if there is only one host
    measured: str = ""  # hardware and software of the measured calls; empty if described by data sheets
    prompts: list[Prompts] = []  # prompt-step times on a host over those on one GPU, by tokens; or empty
    calls: dict[str, list[Sample]] = {}
    sha256: str = ""  # SHA-256 of the file

    @property
    def card(self) -> Gpu:
        """Return the GPU with its limits."""
        return next(gpu for gpu in GPUS if gpu.name == self.gpu)

    @property
    def on_paper(self) -> bool:
        """Return True if no figure of the machine was measured on such a machine."""
        return self.card.on_paper and not self.calls

    @property
    def label(self) -> str:
        """Return the name, marked if the machine is described on paper only: `B300+rdma-800 (on paper)`."""
        return f"{self.name} (on paper)" if self.on_paper else self.name

    @property
    def comm_source(self) -> str:
        """Return where the times of the machine's calls were measured."""
        return self.measured if self.calls else load_built_in(MEASURED_ON).measured

    @property
    def comm_model(self) -> CommModel:
        """Return the model of the machine's calls: its own if the file has calls, else that of H200."""
        link = (
            next((link for link in LINKS if link.name == self.link), None) if isinstance(self.link, str) else self.link
        )
        if self.calls:
            return CommModel(_make_calls(self), self.gpus_per_host, link)
        of = load_built_in(MEASURED_ON)
        scale = self.card.nvlink_bytes_s / of.card.nvlink_bytes_s
        return CommModel(_make_calls(of), self.gpus_per_host, link, scale=scale, borrowed=BORROWED_ERROR)

    def compute_scale(self, rate: str, measured_on: Gpu) -> tuple[float, float]:
        """Return (time on this GPU over the time on another one, relative error) for work bound by a named rate.

        Raise UsageError if either GPU lacks the rate, because nothing is known then.
        """
        here, there = (getattr(gpu, RATES[rate]) for gpu in (self.card, measured_on))
        if here is None or there is None:
            lacks = self.card if here is None else measured_on
            raise UsageError(
                f"{lacks.name} has no {rate} rate in the table of GPUs, so the time on it is unknown: {self.gpu}; "
                "use --weights-dtype bf16, or another GPU."
            )
        ratio = there / here
        return ratio, 0.0 if ratio == 1 else SCALE_ERROR * (1 + abs(math.log2(ratio)))


def get_limits(machine: Machine) -> dict[str, float]:
    """Return the nominal rates of the machine's GPU, by the names of points/roofline.py."""
    found = {name: getattr(machine.card, field) for name, field in RATES.items()}
    return {name: rate for name, rate in found.items() if rate is not None}


def load_machine(name_or_file: str) -> Machine:
    """Return a machine by its name, such as `H200` or `H100+rdma-400`, or by its file; raise UsageError if there is
    none.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml" or path.is_file():
        return read_machine(path)
    name, plus, link = name_or_file.partition("+")
    gpu = next((g.name for g in GPUS if name.strip().lower() in (g.name.lower(), g.device.lower())), None)
    if gpu is None or (plus and link not in [known.name for known in LINKS]):
        gpus, links = (", ".join(thing.name for thing in things) for things in (GPUS, LINKS))
        raise UsageError(
            f"{name_or_file!r} is no machine that is known: name a GPU ({gpus}), with +LINK ({links}) for more than one host, "
            "or a file that dcpbench bench calibrate wrote."
        )
    found = load_built_in(gpu)
    return msgspec.structs.replace(found, name=name_or_file, link=link) if link else found


@functools.cache
def load_built_in(gpu: str) -> Machine:
    """Return a host of such GPUs; the one of H200 has our measurements."""
    if gpu == MEASURED_ON:
        file = resources.files("dcpbench.points.measured") / f"{gpu.lower()}.toml"
        return parse_machine(file.read_bytes(), f"built-in {gpu}")
    return Machine(name=gpu, gpu=gpu, gpus_per_host=next(known.gpus_per_host for known in GPUS if known.name == gpu))


def read_machine(path: Path) -> Machine:
    """Read a machine from its file; raise UsageError that names the field."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}; dcpbench bench calibrate writes such a file.") from e
    return parse_machine(content, str(path))


def parse_machine(content: bytes, where: str) -> Machine:
    """Parse the content of a machine's file; raise UsageError that names the field."""
    try:
        found = msgspec.convert(tomllib.loads(content.decode()), Machine)
    except msgspec.ValidationError as e:
        message, _, place = str(e).partition(" - at `$.")
        field = place.rstrip("`")
        raise UsageError(
            f"{where}: {f'{field}: ' if field else ''}{message}; docs/comm-model.md shows a whole file."
        ) from e
    except (ValueError, RecursionError) as e:
        why = "it is nested too deep" if isinstance(e, RecursionError) else str(e)
        raise UsageError(f"{where} is not valid TOML: {why}; docs/comm-model.md shows a whole file.") from e
    wrong = _describe_invalid_field(found)
    if wrong:
        raise UsageError(f"{where}: {wrong}")
    return msgspec.structs.replace(found, sha256=hashlib.sha256(content).hexdigest())


def format_machine(machine: Machine) -> str:
    """Return the text of a machine's file."""
    import json

    lines = [
        f"{name} = {json.dumps(getattr(machine, name), ensure_ascii=False)}"
        for name in ("name", "gpu", "gpus_per_host")
    ]
    if isinstance(machine.link, str):
        lines.append(f"link = {json.dumps(machine.link)}")
    lines.append(f"measured = {json.dumps(machine.measured, ensure_ascii=False)}")
    if machine.prompts:
        lines.append("# [prompt tokens of a step, times as long as one GPU takes that stands for several]")
        lines += ["prompts = [", *(f"    [{p.tokens}, {p.times:.4f}]," for p in machine.prompts), "]"]
    if isinstance(machine.link, Link):
        lines += [
            "",
            "[link]",
            *(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in msgspec.to_builtins(machine.link).items()),
        ]
    lines += ["", "[calls]  # [ranks, barriers, bytes that a rank receives, µs] of each"]
    for name, samples in machine.calls.items():
        rows = (f"    [{s.ranks}, {s.barriers}, {s.received_bytes}, {s.us:.2f}]," for s in samples)
        lines += [f"{name} = [", *rows, "]"]
    return "\n".join(lines) + "\n"


def _make_calls(machine: Machine) -> dict[str, Call]:
    return {name: _model_call(name, tuple(samples)) for name, samples in machine.calls.items()}


@functools.cache
def _model_call(name: str, samples: tuple[Sample, ...]) -> Call:
    """Return the model of one kind of call; its fits take long, so each is made once in a process."""
    return Call(name, samples)


def _describe_invalid_field(machine: Machine) -> str:
    """Return a sentence with the first invalid field of a file and what to write instead; empty if all are valid."""
    gpus, links = [g.name for g in GPUS], [link.name for link in LINKS]
    if machine.gpu not in gpus:
        return (
            f"gpu = {machine.gpu!r} is none of {', '.join(gpus)}; write the one whose limits this machine's GPUs have."
        )
    if machine.gpus_per_host < 1:
        return f"gpus_per_host = {machine.gpus_per_host}: write how many GPUs read each other's memory, such as 8."
    if isinstance(machine.link, str) and machine.link not in links:
        return f"link = {machine.link!r} is none of {', '.join(links)}; name one, or write a table [link] with name, bytes_s, latency_us and source."
    if isinstance(machine.link, Link) and not (
        0 < machine.link.bytes_s < math.inf and 0 <= machine.link.latency_us < math.inf
    ):
        return "link: bytes_s and latency_us are positive numbers, such as 50e9 and 5.0."
    return describe_invalid_prompts(machine.prompts) or _describe_invalid_call(machine.calls)


def _describe_invalid_call(calls: dict[str, list[Sample]]) -> str:
    for name, samples in calls.items():
        if not samples:
            return (
                f"calls.{name} is empty; write [ranks, barriers, bytes, µs] of each measurement, or leave the call out."
            )
        for number, s in enumerate(samples):
            if s.ranks <= 1 or s.barriers < 1 or s.received_bytes < 1 or not 0 < s.us < math.inf:
                return (
                    f"calls.{name}[{number}] = [{s.ranks}, {s.barriers}, {s.received_bytes}, {s.us:g}] cannot be: 2 or more ranks, "
                    "1 or more barriers and bytes, and a positive time in µs are needed."
                )
    return ""
