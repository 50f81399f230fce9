"""µs of the experts of one layer of DeepSeek-V3 in fp8 by tokens and by how they are cut, a line each."""

import json
import statistics
import sys

import torch

from dcpbench.kernels.block_scaled import Scaled
from dcpbench.kernels.moe import experts, scaled

CUDA = torch.device("cuda")
EXPERTS, TOP_K, HIDDEN, WIDTH = 256, 8, 7168, 2048


def sorted_by_torch(ids_Tk, first, local):
    """As kernels.moe.prompts.sort_by_expert did it."""
    key = ids_Tk.flatten() - first
    key = key.masked_fill_((key < 0) | (key >= local), local)
    ordered, source = torch.sort(key, stable=True)
    rows = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    place = torch.empty_like(rows).scatter_(0, source, rows)
    each = torch.arange(local, dtype=ordered.dtype, device=key.device)
    return source.int(), place, torch.searchsorted(ordered, each, right=True, out_int32=True)


def timed(run, times=12):
    """Median µs of a graph's replay."""
    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(found), 1)


def weight(rows, columns):
    """Of all experts, in e4m3 with scales."""
    wide = torch.randn(EXPERTS, rows, columns, device=CUDA, dtype=torch.bfloat16) * 90
    scale = torch.rand(EXPERTS, rows // 128, columns // 128, device=CUDA) * 1e-4
    return Scaled(wide.clamp(-448, 448).to(torch.float8_e4m3fn), scale, (128, 128))


with torch.inference_mode():
    up, down, by_kernels = weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH), scaled.sort_by_expert
    for tokens in (256, 384, 448, 512, 544, 640, 768, 896, 1024, 1280, 1536, 1600, 2048):
        x = torch.randn(tokens, HIDDEN, device=CUDA).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS, device=CUDA)[:TOP_K] for _ in range(tokens)]).int()
        given = x, up, down, torch.rand(tokens, TOP_K, device=CUDA), ids, 0, torch.zeros_like(x)
        row = {"T": tokens}
        for name, most, few in (("decode", 10**9, 48), ("rows64", 0, 10**9), ("rows128", 0, 0)):
            scaled.MOST_ASSIGNMENTS, scaled.FEW_ROWS = most, few
            row[name] = timed(lambda given=given: experts(*given))
        for name, most, by in (
            ("plan_new", 0, by_kernels),
            ("plan_old", 0, sorted_by_torch),
            ("plan_decode", 10**9, by_kernels),
        ):
            scaled.MOST_ASSIGNMENTS, scaled.FEW_ROWS, scaled.sort_by_expert = most, 48, by
            row[name] = timed(lambda ids=ids: scaled.plan(ids, 0, EXPERTS))
        sys.stdout.write(json.dumps(row) + "\n")
