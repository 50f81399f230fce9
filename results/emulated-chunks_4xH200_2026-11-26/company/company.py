"""torchrun --nproc-per-node 2 company.py OUT CHECKOUT: how long the same work takes at the power limit, with all-reduces between or held as long without them."""
import json, os, sys, time
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[2])
from dcpbench.kernels import hold as H
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank); d = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=d)
torch.manual_seed(rank)
ROWS = 4096
x = torch.randn(ROWS, 7168, device=d, dtype=torch.bfloat16); ws = [torch.randn(7168, 7168, device=d, dtype=torch.bfloat16) for _ in range(4)]
message = torch.randn(ROWS, 7168, device=d, dtype=torch.bfloat16) * 1e-3
out = torch.empty(ROWS, 7168, device=d, dtype=torch.bfloat16)
small = torch.zeros(8, device=d)
def work(n):
    for i in range(n): torch.mm(x, ws[i % 4], out=out)
def call(kind):
    if kind == "all-reduce": dist.all_reduce(message); 
    elif kind == "hold": H.hold(message, None, CALL_S)
    elif kind == "busy": H.hold(message, None, CALL_S)
f = open(f"{sys.argv[1]}-{rank}.jsonl", "w")
# how long a call takes
for _ in range(5): dist.all_reduce(message)
torch.cuda.synchronize(); a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
a.record()
for _ in range(100): dist.all_reduce(message)
b.record(); torch.cuda.synchronize(); CALL_S = a.elapsed_time(b) / 100 * 1e-3
t = torch.tensor([CALL_S], device=d); dist.all_reduce(t, op=dist.ReduceOp.MAX); CALL_S = float(t); message.mul_(1e-3)
H.hold(message, None, CALL_S); torch.cuda.synchronize()
def arm(kind, products, seconds):
    """Steps of so many products and a call, for so long; the later half counts."""
    H.mode(d).fill_(132 if kind == "busy" else 0)
    dist.all_reduce(small); torch.cuda.synchronize()
    took, began = [], time.perf_counter()
    per = max(1, int(0.1 / (products * 0.6e-3 + CALL_S)))
    rounds = max(2, int(seconds / (per * (products * 0.6e-3 + CALL_S))))
    for r in range(rounds):
        ev = []
        for _ in range(per):
            e = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            e[0].record(); work(products); e[1].record(); call(kind); e[2].record(); ev.append(e)
        torch.cuda.synchronize()
        took += [(e[0].elapsed_time(e[1]), e[1].elapsed_time(e[2])) for e in ev]
    took = took[len(took) // 2:]
    w = sorted(t[0] for t in took)[len(took) // 2]; c = sorted(t[1] for t in took)[len(took) // 2]
    line = {"kind": kind, "products": products, "work_ms": w, "call_ms": c, "asked_call_ms": CALL_S * 1e3, "steps": len(took), "took_s": time.perf_counter() - began}
    f.write(json.dumps(line) + "\n"); f.flush()
    print(rank, line, flush=True)
for products, kinds in ((8, ("hold", "all-reduce", "busy", "all-reduce", "hold", "none")), (2, ("hold", "all-reduce", "busy", "hold", "all-reduce"))):
    for kind in kinds:
        arm(kind, products, 3.0)
dist.barrier(); dist.destroy_process_group()
