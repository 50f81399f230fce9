"""Define the options that several commands share: their names, their titles in the help, and their help texts.

A class is a group of options that a command takes as one value; a command that changes or omits an option derives a
class of its own (command.py).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpbench.commands.caller import Caller
from dcpbench.commands.command import Group, make_panel, make_structured
from dcpbench.errors import UsageError
from dcpbench.models import ALIASES, SHAPES
from dcpbench.points.structured_options import Collectives, Gpu, Mtp, Nodes, PageSize, Timeout

if TYPE_CHECKING:
    from dcpbench.launch.torchrun import RendezvousOptions

OPTION = make_panel(None)
LAYOUT = make_panel("Layouts (comma-separated lists)", metavar="N,…")
LOAD = make_panel("Model and load")
HOW = make_panel("Computation")
MEASURE = make_panel("Measurement")
OUTPUT = make_panel("Output")
MACHINES = make_panel("Machines")

TP_DEGREE = "Number of GPUs of a layout, which together hold one copy of the model; dp and dcp divide this number. SGLang's --tp-size; vLLM's --data-parallel-size × --tensor-parallel-size."
TP = f"{TP_DEGREE} Each value is one torchrun job."
DCP_DEGREE = "Ranks that share the KV cache of one request (vLLM's --decode-context-parallel-size): a divisor of tp / dp. It adds no GPUs."
"""Help texts of --tp and --dcp, without their defaults."""
MODEL = LOAD(
    f"{', '.join([*SHAPES, *ALIASES])}, or a folder with a Hugging Face config.json. "
    "Default: the config.json of the checkpoint if --weights is a folder, else deepseek-v3; tiny on the CPU.",
    metavar="NAME,…",
)
WEIGHTS = LOAD(
    "Folder of a checkpoint (safetensors), or synthetic for seeded random weights of full size. Default: synthetic.",
    metavar="FOLDER",
)
REPEATS = MEASURE("Number of times that every point is measured. Default: 1.", metavar="N")
BASELINE = MEASURE(
    "Also measure the baseline of each layout under the same load: the same layout with dcp 1, or tp alone for a layout with dp and without dcp. Default: yes."
)
RESUME = OUTPUT("Continue the run in --output: measured points are skipped, failed points are retried.", default=False)
FORCE = OUTPUT("Start over in a folder that already holds records.", default=False)
JSON = OUTPUT("Print the result as JSON on stdout.", "--json", default=False)
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or records.jsonl files.")]


EXPERTS = make_panel("Layouts (comma-separated lists)", metavar="1|tp,…")
EP_DEGREE = "Expert parallel degree. 1 splits each expert over all tp ranks (tensor-parallel experts, the default of vLLM and SGLang). tp gives each rank some of the experts (vLLM's --enable-expert-parallel, SGLang's --ep-size)."


MTP = make_structured(HOW, Mtp)
STALL_S = 300.0  # default time without progress after which a point is treated as hung


class Layouts(Group):
    """Hold the degrees of parallelism of the layouts."""

    tp: str | None = LAYOUT(f"{TP} Default: all GPUs of this machine; 8 on the CPU.")
    dp: str | None = LAYOUT(
        "Attention data parallel replicas inside tp: SGLang's --dp-size with --enable-dp-attention; vLLM's --data-parallel-size, with tp / dp as --tensor-parallel-size. Default: 1."
    )
    dcp: str | None = LAYOUT(
        f"{DCP_DEGREE} Default: tp / dp, and dcp 1 as the baseline. --dcp 1 measures only layouts without DCP."
    )
    ep: str | None = EXPERTS(f"{EP_DEGREE} Default: 1.")


class LayerOptions(Group):
    """Hold the options of how a layer is computed."""

    backend: str | None = HOW(
        "Attention kernel: triton, flashinfer, flashmla (Hopper GPUs, pages of 64), reference (on GPUs only for verify), "
        "or auto: the fastest one at each point. Default on GPUs: triton on Hopper, with an fp8 KV cache or with --mtp; otherwise flashinfer if it is installed, else triton. Default on the CPU: reference.",
        metavar="NAME,…",
    )
    exchange: str | None = HOW(
        "How partial attention outputs are merged over dcp ranks: ag_rs, a2a, symm (symmetric memory, inside one machine), "
        "ag_rs_registered (ag_rs in memory that NCCL has registered), or auto: the fastest one at each point. Default: ag_rs.",
        metavar="NAME,…",
    )
    collectives: Collectives | None = make_structured(HOW, Collectives)
    weights_dtype: str | None = HOW(
        "Data type of the weights of linear layers and experts: bf16, or fp8 (e4m3 with a scale for each block of 128 × 128, as DeepSeek-V3 and Kimi-K2 are published). int4 runs only for models that are published with int4 experts and no other int4 weights (Kimi-K2.6). Other int4 models, nvfp4 and mxfp4 are accepted only with --dry-run. On GPUs, only verify accepts fp16 and fp32. Default on GPUs: as the model is published; on the CPU: as --kv-dtype if it is given and not fp8, else fp32.",
        metavar="NAME,…",
    )
    kv_dtype: str | None = HOW(
        "Data type of the KV cache: bf16, or fp8 (e4m3, vLLM's --kv-cache-dtype fp8). On GPUs, only verify accepts fp16 and fp32. Default: as --weights-dtype if it is bf16, fp16 or fp32; else bf16 on GPUs, fp32 on the CPU.",
        metavar="NAME,…",
    )
    routing: str | None = HOW(
        "How tokens are routed to experts, with synthetic weights: even; zipf:S (the r-th most frequent expert gets tokens in proportion to r^-S); or a JSON file with the number of tokens of each expert by layer, in the format of SGLang's --init-expert-location. Default: even.",
        metavar="NAME,…",
    )
    page_size: PageSize | None = make_structured(HOW, PageSize)


EMULATE = HOW(
    "Forecast layouts of any size: run one rank's work on one GPU and model its communication. MACHINE is a GPU "
    "of `dcpbench machines`, with +LINK for several hosts (H200+rdma-400), or a file written by `dcpbench bench calibrate`. Records mark these points as forecasts.",
    metavar="MACHINE,…",
)


class Run(Group):
    """Hold the options of how a command runs, and the command that calls it."""

    caller: Caller = Caller()

    timeout: Timeout | None = make_structured(MEASURE, Timeout, "stall")
    config: Path | None = OUTPUT(
        "TOML or YAML file with these options by name, such as `tp = [4, 8]`; the command line overrides it.",
        metavar="FILE",
    )
    output: Path | None = OUTPUT(
        "Folder for records, logs and report. Default: runs/DATE-TIME-…, printed at the start.",
        "-o",
        "--output",
        metavar="DIR",
    )
    resume: bool = RESUME
    force: bool = FORCE
    dry_run: bool = OUTPUT(
        "Only print each point with its memory per GPU, or with the reason why it cannot run. --gpu plans for another machine.",
        default=False,
    )
    as_json: bool = JSON
    device: str = MACHINES(
        "auto, cuda or cpu. auto uses the GPUs if there are any. On the CPU everything runs, but the timings do not reflect GPU performance.",
        default="auto",
        metavar="NAME",
    )

    gpu: Gpu | None = make_structured(MACHINES, Gpu)
    nodes: Nodes | None = None

    @property
    def machines(self) -> "RendezvousOptions":
        """Return the machines of the run: this one only, unless the command has an option for several."""
        from dcpbench.launch.torchrun import RendezvousOptions

        nodes = self.nodes or Nodes()
        return RendezvousOptions(nnodes=nodes.count, node_rank=nodes.rank, rdzv_endpoint=nodes.endpoint)

    @property
    def prints_notes(self) -> bool:
        """Return False for a command that is only validated, and for a run inside another command, which prints them itself."""
        return self.caller.elsewhere is None and (self.caller.part is None or self.dry_run)

    @property
    def gpu_name(self) -> str | None:
        """Return the GPU of --gpu."""
        return None if self.gpu is None else self.gpu.name

    @property
    def gpu_count(self) -> int | None:
        """Return the number of GPUs of --gpu."""
        return None if self.gpu is None else self.gpu.count

    @property
    def limits(self) -> Timeout:
        """Return the time limits of --timeout, or their defaults."""
        return self.timeout or Timeout()

    @property
    def stall_s(self) -> float:
        """Return the time without progress after which a point is treated as hung."""
        return STALL_S if self.limits.stall is None else self.limits.stall


def check_output_options(output: Path | None, *, resume: bool, force: bool) -> None:
    """Raise UsageError if --output, --resume and --force contradict each other."""
    if resume and force:
        raise UsageError("--resume and --force contradict each other; --resume continues a run, --force starts over.")
    if resume and output is None:
        raise UsageError("--resume needs the run to continue; add for example -o runs/NAME.")


class RunOnMachines(Run):
    """Hold the options of a command that can run on several machines."""

    nodes: Nodes | None = make_structured(MACHINES, Nodes)
    timeout: Timeout | None = make_structured(MEASURE, Timeout, "stall", "point", "retries")


class Limits(Group):
    """Hold the time limits among the options of a run, some of which are fields of a spec."""

    timeout: Timeout | None = None


class JoinedReportOptions(Group):
    """Hold the options for a report of several runs."""

    as_repeats: bool = OPTION(
        "The runs are repeats of the same grid: show them as one run, and how well they agree.",
        default=False,
    )
    slo: str | None = OPTION(
        "Objectives for the answer: ttft, itl, tpot, e2el in ms, such as ttft=2000,itl=60, compared with p99, "
        "or with a lower percentile if there are too few samples. Default: those that the runs were measured with, else none.",
        metavar="NAME=MS,…",
    )

    @property
    def of_runs(self) -> dict[str, Any]:
        """Return these options as keyword arguments of a report. Raise UsageError for an invalid objective."""
        from dcpbench.serving.load_words import parse_slo

        return {"as_repeats": self.as_repeats, "slo": {} if self.slo is None else parse_slo(self.slo)}
