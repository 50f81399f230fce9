"""What reading a layer's weights takes by itself, beside the layer as it is and as hopper_few_rows.cu does it.

    PYTHONPATH=CHECKOUT python limits.py limits.jsonl

µs a call of CUDA graphs of 40 calls or more over cold weights, medians of 11 replays in turns. `read`: kernels/read.py over as many bytes; `read-early`:
the same, each launched while the one before it runs, and read before that has ended; `linear`: rows are quantised and multiplied; `product`: of
quantised rows; `quantise`: rows alone; `copied`: the layer by hopper_few_rows.cu, the fastest of its cuts, and which that is.
"""
import itertools, json, sys
import torch
import triton
import triton.language as tl
from dcpbench.bench.cases import linear_layers
from dcpbench.kernels import hopper_few_rows as few, linear as ours, read
from dcpbench.kernels.block_scaled import Scaled, quantise_rows
from dcpbench.points.shapes import load_shape

device = torch.device("cuda", 0)

@triton.jit
def _early(x, out, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    numbers = tl.load(x + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    total = tl.sum(numbers, 0)
    tl.extra.cuda.gdc_wait()
    tl.store(out + tl.program_id(0), total)

def graphed(calls):
    calls = calls * -(-40 // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls: call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls: call()
    graph.replay()
    return graph

def medians(graphs, sets, rounds=11):
    calls = sets * -(-40 // sets)
    took = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record(); graph.replay(); ended.record(); torch.cuda.synchronize()
            took[name].append(begun.elapsed_time(ended) * 1e3 / calls)
    return {name: sorted(all_)[len(all_) // 2] for name, all_ in took.items()}

def ways(rows, k, n):
    most = few.rows_of(rows)
    for width, (parts, clusters), programs in itertools.product((64, 128), ((1, (132, 264)), (2, (66,)), (4, (33,)), (8, (16,))), (1, 2)):
        for some in clusters:
            if parts > -(-k // 128 // few.deep(width)): continue
            some = min(some, -(-n // width))
            room = 228 * 1024 // programs - 1024 - few.shared_bytes(most, width, 0)
            stages = min(few.MOST_STAGES, room // few.stage_bytes(most, width))
            if stages >= 2: yield f"w{width}c{some}p{parts}s{stages}", (width, some, parts, stages)

sizes = {}
for tp in (1, 4, 8):
    for layer, product in linear_layers(load_shape("deepseek-v3"), tp).items():
        sizes.setdefault((product.inputs, product.outputs), []).append(f"tp{tp} {layer}")
with open(sys.argv[1], "w") as out:
    for (k, n), names in sizes.items():
        count = max(4, min(40, int(300e6 / (n * k))))
        weights = [Scaled(torch.randint(0, 100, (n, k), device=device, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.rand(-(-n // 128), k // 128, device=device), (128, 128)) for _ in range(count)]
        blocks = n * k // 65536
        lent, sums = [torch.zeros(blocks * 16384, device=device) for _ in range(count)], torch.empty(blocks, device=device)
        reading = graphed([lambda x=x: read.read(x, sums) for x in lent])
        early = graphed([lambda x=x: _early[(blocks,)](x, sums, BLOCK=16384, num_warps=8, launch_pdl=True) for x in lent])
        for rows in (1, 16, 64):
            x = torch.randn(rows, k, device=device).to(torch.bfloat16)
            q, y = quantise_rows(x), torch.empty(rows, n, dtype=x.dtype, device=device)
            graphs = {
                "read": reading,
                "read-early": early,
                "quantise": graphed([lambda: quantise_rows(x)] * count),
                "product": graphed([lambda w=w: ours.product(q, w, x.dtype) for w in weights]),
                "linear": graphed([lambda w=w: ours.product(quantise_rows(x), w, x.dtype) for w in weights]),
            }
            tried = {name: graphed([lambda w=w: few.product(quantise_rows(x), w, y, *how) for w in weights]) for name, how in (ways(rows, k, n) if "tp1" in names[0] else ())}
            us = medians(graphs | tried, count)
            best = min(tried, key=us.get, default=None)
            line = {"layers": names, "inputs": k, "outputs": n, "rows": rows, "read_bytes": blocks * 65536, "us": {name: round(us[name], 3) for name in graphs}}
            if best: line |= {"copied": round(us[best], 3), "cut": best, "copied_all": {name: round(us[name], 3) for name in tried}}
            out.write(json.dumps(line) + "\n"); out.flush()
            print(names[0], rows, line["us"], best and (best, round(us[best], 2)), flush=True)
            del graphs, tried
        del lent, weights
x = torch.zeros(1 << 30, device=device); sums = torch.empty((1 << 30) // 16384, device=device)
print("4 GiB at", 4 * (1 << 30) / medians({"read": graphed([lambda: read.read(x, sums)] * 2)}, 2)["read"] / 1e6, "TB/s")
