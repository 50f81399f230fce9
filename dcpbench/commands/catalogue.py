"""List the commands with what the help of `dcpbench` shows of each, so that this help imports none of them."""

from __future__ import annotations

import dataclasses

MEASURE, READ, CHECK = "Measure", "Read results", "Check"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Describe one command or group of commands."""

    name: str
    panel: str  # title of the box of the help in which it is listed
    summary: str  # first paragraph of its own help
    is_group: bool = False

    @property
    def function(self) -> str:
        """Return the name of the function of a command, and of its module below dcpbench.commands."""
        return "import_" if self.name == "import" else self.name


ENTRIES = (
    Entry("sweep", MEASURE, "Measure decode steps, without prefill, over layouts and loads, then write a report."),
    Entry(
        "serve",
        MEASURE,
        "Serve requests with dcpbench's own engine, including prefill and scheduling: TTFT, ITL, throughput and goodput.",
    ),
    Entry(
        "server",
        MEASURE,
        "Send requests to a server of vLLM, SGLang or another engine: TTFT, ITL, throughput and goodput.",
    ),
    Entry(
        "ab",
        MEASURE,
        "Alternate between two variants on this machine, so that drift affects both equally, and compare them round by round.",
    ),
    Entry(
        "recommend",
        READ,
        "Recommend a layout, with its confidence and cost, and print how to start SGLang and vLLM in it.",
    ),
    Entry(
        "compare",
        READ,
        "Compare two sides, A and B, of one or more runs each: at each point B is FASTER, SLOWER, the SAME or UNDECIDED.",
    ),
    Entry(
        "report",
        READ,
        "Write a report of one or several runs: which layout to take, tables, figures and one self-contained HTML page.",
    ),
    Entry("show", READ, "Print the results of one or several runs as a table."),
    Entry("top", READ, "Watch a running sweep, serve, server or verify from another terminal."),
    Entry("export", READ, "Write the points of runs in another tool's format."),
    Entry(
        "import", READ, "Convert the results of another benchmark tool to a run, to show them with those of dcpbench."
    ),
    Entry("verify", CHECK, "Check layouts, backends and exchanges against a slow fp64 reference on one rank."),
    Entry(
        "doctor",
        CHECK,
        "Show what is installed and visible, check this machine before a long sweep, and print a remedy for each finding.",
    ),
    Entry(
        "machines",
        CHECK,
        "Show the GPUs and links that --gpu, --emulate and recommend accept, with the source of each figure.",
    ),
    Entry(
        "bench",
        MEASURE,
        "Measure single operators: time, share of the machine's maximum rate, and correctness of each variant.",
        is_group=True,
    ),
    Entry(
        "submit",
        MEASURE,
        "Run sweep, serve, server or verify as a job of Slurm or Kubernetes, on one or several machines.",
        is_group=True,
    ),
    Entry(
        "syncs",
        CHECK,
        "Find hidden CUDA synchronisation: where the host waits for the GPU, and what it costs.",
        is_group=True,
    ),
    Entry(
        "hang",
        CHECK,
        "Find which rank blocked a job that hung: a run of dcpbench, or any program with stack dumps.",
        is_group=True,
    ),
    Entry(
        "dashboard",
        READ,
        "Show many runs together: the history of each point with its changes, and a page for each run.",
        is_group=True,
    ),
    Entry("records", CHECK, "Check the records of runs line by line, and remove damaged lines.", is_group=True),
)
BY_NAME = {entry.name: entry for entry in ENTRIES}
