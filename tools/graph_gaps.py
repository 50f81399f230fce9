"""When do the kernels of a captured graph follow each other with longer gaps: graph by graph, what is captured before it varied.

    python -m tools.graph_gaps -o FILE                     # all ways, each in a separate process
    python -m tools.graph_gaps -o FILE --ways kept,freed --graphs 12 --nodes 2300

A graph is a chain of small kernels. Each is timed as soon as it is captured, and all that live once more at the end; a line
of FILE is a way, with µs per kernel. docs/methodology.md says what sweeps saw. Needs one GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.measuring.timing import Timer, use_two_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPLAYS = 30
LEFT_FREE = 4 << 30  # bytes of a GPU's memory that `full` leaves free
LARGE = 1 << 22  # number of elements of a tensor with kernels of more blocks than a GPU runs at once


class Found(msgspec.Struct, kw_only=True):
    """Hold the result of one way."""

    way: str
    device: str
    nodes: int
    first_us: list[float]  # µs per kernel of each graph immediately after its capture
    again_us: list[float]  # µs per kernel of the graphs that still exist at the end, in the order of capture


@dataclasses.dataclass(frozen=True)
class Way:
    """Describe how graphs are captured."""

    what: str
    keeps: bool = True  # True if graphs stay while others are captured
    full: bool = False  # True if the GPU's memory is occupied before
    shares: bool = False  # True if graphs allocate from one pool
    one_kernel: bool = True
    streams_at: int | None = None  # graph before which kernels run on two streams in turn; None: for no graph
    primed: int = 0  # number of nodes of a graph that is captured before all others and kept
    flags: int = 0  # flags of cudaGraphInstantiate: 4 prepares for launches by kernels, which uses the GPU's memory
    queues: str = ""  # value of CUDA_SCALE_LAUNCH_QUEUES, which scales CUDA's queues for launches


WAYS = {
    "kept": Way("all graphs live"),
    "freed": Way("each is dropped before the next", keeps=False),
    "full": Way("all live, memory nearly full", full=True),
    "freed-full": Way("each is dropped, memory nearly full", keeps=False, full=True),
    "pool": Way("all live, allocate from one pool", shares=True),
    "kinds": Way("all live, of eight kinds of kernels", one_kernel=False),
    "streams": Way("all live, kernels ran on two streams before", streams_at=0),
    "streams-second": Way("all live, kernels ran on two streams behind the first", streams_at=1),
    "primed": Way("all live, behind a graph of 20,000 nodes", primed=20000),
    "device": Way("all live, cudaGraphInstantiateFlagDeviceLaunch", flags=4),
    "queues-4x": Way("all live, CUDA_SCALE_LAUNCH_QUEUES=4x", queues="4x"),
    "queues-0.25x": Way("all live, CUDA_SCALE_LAUNCH_QUEUES=0.25x", queues="0.25x"),
}


def chain(way: Way, nodes: int) -> Callable[[], None]:
    """Return a function that runs this many kernels in sequence."""
    x = torch.ones(64, device="cuda")
    y = torch.ones(LARGE, device="cuda")
    kinds: list[Callable[[], object]] = [lambda: x.add_(1)]
    if not way.one_kernel:
        kinds += [
            lambda: x.mul_(1.0),
            lambda: y.add_(1),
            lambda: y.clamp_(-1e9, 1e9),
            lambda: x.sub_(1),
            lambda: torch.sin_(x),
            lambda: torch.cos_(y),
            lambda: x.fill_(1),
        ]

    def run() -> None:
        for i in range(nodes):
            kinds[i % len(kinds)]()

    return run


def captured(
    run: Callable[[], None], pool: torch.cuda._POOL_HANDLE | None = None, flags: int = 0
) -> tuple[object, Callable[[], object]]:
    """Return a graph, to be kept, and the function that replays it."""
    graph = torch.cuda.CUDAGraph(keep_graph=bool(flags))
    with torch.cuda.graph(graph, pool=pool):
        run()
    if not flags:
        return graph, graph.replay
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    instance = ctypes.c_void_p()
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    if code := runtime.cudaGraphInstantiate(ctypes.byref(instance), raw, ctypes.c_ulonglong(flags)):
        sys.exit(f"cudaGraphInstantiate with flags {flags} returned {code}")
    return graph, lambda: runtime.cudaGraphLaunch(instance, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def us_per_kernel(replay: Callable[[], object], nodes: int) -> float:
    """Return the median over consecutive replays."""
    samples_ms, _ = Timer(replay, torch.device("cuda")).measure_chunk(REPLAYS)
    return round(statistics.median(samples_ms) * 1e3 / nodes, 4)


def measure(name: str, graphs: int, nodes: int) -> Found:
    """Measure one way in this process."""
    way = WAYS[name]
    run = chain(way, nodes)
    run()
    torch.cuda.synchronize()
    taken = None
    if way.full:
        taken = torch.empty(torch.cuda.mem_get_info()[0] - LEFT_FREE, dtype=torch.uint8, device="cuda")
    pool = torch.cuda.graph_pool_handle() if way.shares else None
    primer = captured(chain(way, way.primed)) if way.primed else None
    alive: list[tuple[object, Callable[[], object]]] = []
    first = []
    for i in range(graphs):
        if i == way.streams_at:
            use_two_streams()
        if not way.keeps:
            alive.clear()
            gc.collect()
            torch.cuda.synchronize()
        alive.append(captured(run, pool, way.flags))
        first.append(us_per_kernel(alive[-1][1], nodes))
    again = [us_per_kernel(replay, nodes) for _, replay in alive]
    del primer
    del taken
    return Found(way=name, device=torch.cuda.get_device_name(), nodes=nodes, first_us=first, again_us=again)


def table(found: list[Found]) -> Iterator[str]:
    """Yield a line for each way."""
    yield "| way | nodes | µs per kernel: graph by graph as captured | those that live, once more |"
    yield "|---|---:|---|---|"
    for f in found:
        first, again = (", ".join(f"{us:.2f}" for us in values) for values in (f.first_us, f.again_us))
        yield f"| `{f.way}`: {WAYS[f.way].what} | {f.nodes:,} | {first} | {again} |"


def main() -> int:
    """Run each way in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--graphs", type=int, default=10)
    parser.add_argument(
        "--nodes", type=int, default=2300, help="kernels of a graph; default: as in a step of DeepSeek-V3"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    ways = asked.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"there are no ways {', '.join(unknown)}; --ways takes {', '.join(WAYS)}")
    if min(asked.graphs, asked.nodes) < 1:
        parser.error("--graphs and --nodes must be at least 1")
    if not torch.cuda.is_available():
        parser.error("a GPU is needed: graphs of a CPU do not exist")
    if asked.here:
        with asked.output.open("ab") as out:
            out.write(msgspec.json.encode(measure(ways[0], asked.graphs, asked.nodes)) + b"\n")
        return 0
    asked.output.unlink(missing_ok=True)
    for way in ways:
        more = ["--graphs", str(asked.graphs), "--nodes", str(asked.nodes), "--here"]
        words = [sys.executable, "-m", "tools.graph_gaps", "-o", str(asked.output), "--ways", way, *more]
        environment = os.environ | ({"CUDA_SCALE_LAUNCH_QUEUES": WAYS[way].queues} if WAYS[way].queues else {})
        if subprocess.run(words, check=False, env=environment).returncode:
            sys.stdout.write(f"{way}: failed\n")
    lines = asked.output.read_bytes().splitlines() if asked.output.exists() else []
    found = [msgspec.json.decode(line, type=Found) for line in lines]
    sys.stdout.write("\n".join(table(found)) + "\n")
    return 0 if len(found) == len(ways) else 1


if __name__ == "__main__":
    sys.exit(main())
