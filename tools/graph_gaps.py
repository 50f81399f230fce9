"""Measure the gaps between kernels of captured CUDA graphs, for several ways of capturing graphs before them.

    python -m tools.graph_gaps -o FILE                     # all ways, each in a separate process
    python -m tools.graph_gaps -o FILE --ways kept,freed --graphs 12 --nodes 2300

A graph is a chain of small kernels. Each graph is timed immediately after its capture, and all graphs that still exist are timed again at
the end. FILE gets a line for each way, with µs per kernel. docs/methodology.md describes the gaps in sweeps. It needs one GPU.
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
FREE_BYTES = 4 << 30  # bytes of GPU memory that `full` leaves free
LARGE_TENSOR_NUMEL = 1 << 22  # elements of a tensor whose kernels have more blocks than a GPU runs at once


class Result(msgspec.Struct, kw_only=True):
    """Hold the times of the graphs that were captured in one way."""

    way: str
    device: str
    nodes: int
    first_us: list[float]  # µs per kernel of each graph immediately after its capture
    again_us: list[float]  # µs per kernel of the graphs that still exist at the end, in the order of capture


@dataclasses.dataclass(frozen=True)
class Way:
    """Describe how graphs are captured."""

    description: str
    keeps: bool = True  # True if graphs exist while others are captured
    full: bool = False  # True if the GPU's memory is nearly full before the first capture
    shares: bool = False  # True if graphs allocate from one pool
    one_kernel: bool = True
    streams_at: int | None = None  # number of the graph before which kernels run on two streams; None: they never do
    primed: int = 0  # nodes of a graph that is captured before all others and kept
    flags: int = 0  # flags of cudaGraphInstantiate: 4 prepares for launches by kernels, which uses the GPU's memory
    queues: str = ""  # value of CUDA_SCALE_LAUNCH_QUEUES, which scales CUDA's queues for launches


WAYS = {
    "kept": Way("all graphs exist"),
    "freed": Way("each is freed before the next", keeps=False),
    "full": Way("all exist, memory nearly full", full=True),
    "freed-full": Way("each is freed, memory nearly full", keeps=False, full=True),
    "pool": Way("all exist, in one memory pool", shares=True),
    "kinds": Way("all exist, with eight kinds of kernels", one_kernel=False),
    "streams": Way("all exist, after kernels on two streams", streams_at=0),
    "streams-second": Way("all exist, with kernels on two streams after the first", streams_at=1),
    "primed": Way("all exist, after a graph of 20,000 nodes", primed=20000),
    "device": Way("all exist, cudaGraphInstantiateFlagDeviceLaunch", flags=4),
    "queues-4x": Way("all exist, CUDA_SCALE_LAUNCH_QUEUES=4x", queues="4x"),
    "queues-0.25x": Way("all exist, CUDA_SCALE_LAUNCH_QUEUES=0.25x", queues="0.25x"),
}


def make_chain(way: Way, nodes: int) -> Callable[[], None]:
    """Return a function that runs this many kernels in sequence."""
    x = torch.ones(64, device="cuda")
    y = torch.ones(LARGE_TENSOR_NUMEL, device="cuda")
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


def capture_graph(
    run: Callable[[], None], pool: torch.cuda._POOL_HANDLE | None = None, flags: int = 0
) -> tuple[object, Callable[[], object]]:
    """Capture a graph; return it, as the caller must keep it, and the function that replays it."""
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


def measure_kernel_us(replay: Callable[[], object], nodes: int) -> float:
    """Return the median time per kernel of consecutive replays, in µs."""
    samples_ms, _ = Timer(replay, torch.device("cuda")).measure_chunk(REPLAYS)
    return round(statistics.median(samples_ms) * 1e3 / nodes, 4)


def measure_way(name: str, graphs: int, nodes: int) -> Result:
    """Measure one way in this process."""
    way = WAYS[name]
    run = make_chain(way, nodes)
    run()
    torch.cuda.synchronize()
    filler = None
    if way.full:
        filler = torch.empty(torch.cuda.mem_get_info()[0] - FREE_BYTES, dtype=torch.uint8, device="cuda")
    pool = torch.cuda.graph_pool_handle() if way.shares else None
    primer = capture_graph(make_chain(way, way.primed)) if way.primed else None
    alive: list[tuple[object, Callable[[], object]]] = []
    first = []
    for i in range(graphs):
        if i == way.streams_at:
            use_two_streams()
        if not way.keeps:
            alive.clear()
            gc.collect()
            torch.cuda.synchronize()
        alive.append(capture_graph(run, pool, way.flags))
        first.append(measure_kernel_us(alive[-1][1], nodes))
    again = [measure_kernel_us(replay, nodes) for _, replay in alive]
    del primer
    del filler
    return Result(way=name, device=torch.cuda.get_device_name(), nodes=nodes, first_us=first, again_us=again)


def format_table(found: list[Result]) -> Iterator[str]:
    """Yield the lines of a table with a row for each way."""
    yield "| way | nodes | µs per kernel of each graph after its capture | of existing graphs at the end |"
    yield "|---|---:|---|---|"
    for f in found:
        first, again = (", ".join(f"{us:.2f}" for us in values) for values in (f.first_us, f.again_us))
        yield f"| `{f.way}`: {WAYS[f.way].description} | {f.nodes:,} | {first} | {again} |"


def main() -> int:
    """Measure each way in a separate process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="file that gets a line for each way")
    parser.add_argument(
        "--ways",
        default=",".join(WAYS),
        help=f"ways of capturing, separated by commas: {', '.join(WAYS)}; default: all",
    )
    parser.add_argument(
        "--graphs", type=int, default=10, help="graphs that are captured in each way; default: %(default)s"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=2300,
        help="kernels of a graph; default: %(default)s, the number in a step of DeepSeek-V3",
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"there is no way {', '.join(unknown)}; --ways takes {', '.join(WAYS)}")
    if min(args.graphs, args.nodes) < 1:
        parser.error("--graphs and --nodes must be at least 1")
    if not torch.cuda.is_available():
        parser.error("this measurement needs a CUDA GPU")
    if args.here:
        with args.output.open("ab") as out:
            out.write(msgspec.json.encode(measure_way(ways[0], args.graphs, args.nodes)) + b"\n")
        return 0
    args.output.unlink(missing_ok=True)
    for way in ways:
        options = ["--graphs", str(args.graphs), "--nodes", str(args.nodes), "--here"]
        command = [sys.executable, "-m", "tools.graph_gaps", "-o", str(args.output), "--ways", way, *options]
        environment = os.environ | ({"CUDA_SCALE_LAUNCH_QUEUES": WAYS[way].queues} if WAYS[way].queues else {})
        if subprocess.run(command, check=False, env=environment).returncode:
            sys.stdout.write(f"{way}: failed\n")
    lines = args.output.read_bytes().splitlines() if args.output.exists() else []
    found = [msgspec.json.decode(line, type=Result) for line in lines]
    sys.stdout.write("\n".join(format_table(found)) + "\n")
    return 0 if len(found) == len(ways) else 1


if __name__ == "__main__":
    sys.exit(main())
