"""Which launches keep the host: python -m torch.distributed.run --nproc-per-node 2 launches.py OUT NAME [nccl]
Pieces of ~1 ms in CUDA graphs, launched one after the other: host ms until the last is launched, ms until all have run."""
import json, os, sys, time
import torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(rank); D = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=D)
x = torch.randn(4096, 4096, device=D, dtype=torch.bfloat16); y = torch.empty_like(x)
buf = torch.zeros(2048, 7168, device=D, dtype=torch.bfloat16)
try:
    import torch.distributed._symmetric_memory as sm
    sym = sm.empty(2048 * 7168, device=D, dtype=torch.bfloat16); sm.rendezvous(sym, dist.group.WORLD)
except Exception as e:
    sym = None; print("no symm", e)
def work(n=4):
    for _ in range(n): torch.mm(x, x, out=y)
def nccl(): dist.all_reduce(buf)
def symm(): torch.ops.symm_mem.two_shot_all_reduce_(sym, "sum", dist.group.WORLD.group_name)
def piece(call, after=None):
    def run():
        work(); call(); (after or (lambda: None))()
    return run
WAYS = {"none": (lambda: None, False), "nccl": (nccl, False), "nccl, eager between": (nccl, True)}
side = torch.cuda.Stream()
def fork():
    e = torch.cuda.Event(); e.record(); side.wait_event(e)
    with torch.cuda.stream(side): torch.mm(x, x, out=z)
    torch.cuda.current_stream().wait_stream(side)
z = torch.empty_like(y)
def three(): nccl(); nccl(); nccl()
if len(sys.argv) > 3: WAYS = {"nccl": (nccl, False)}
else: WAYS |= {"fork and join": (fork, False), "three nccl": (three, False)}
if sym is not None and len(sys.argv) <= 3: WAYS["symm"] = (symm, False)
out = {}
for name, (call, eager) in WAYS.items():
    body = (lambda: work()) if eager else piece(call)
    call(); body(); torch.cuda.synchronize(); dist.barrier()
    graphs = []
    for i in range(40):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): body()
        graphs.append(g)
    def go():
        for g in graphs:
            g.replay()
            if eager: call()
    for _ in range(2): go(); torch.cuda.synchronize()
    dist.barrier(); torch.cuda.synchronize()
    found = []
    for _ in range(3):
        t = time.perf_counter(); go(); h = time.perf_counter(); torch.cuda.synchronize(); e = time.perf_counter()
        found.append((round((h - t) * 1e3, 2), round((e - t) * 1e3, 2))); dist.barrier(); torch.cuda.synchronize()
    # again while the launch before is still under way
    again = []
    for _ in range(3):
        go(); t = time.perf_counter(); go(); h = time.perf_counter(); torch.cuda.synchronize(); e = time.perf_counter()
        again.append((round((h - t) * 1e3, 2), round((e - t) * 1e3, 2))); dist.barrier(); torch.cuda.synchronize()
    # when each replay returned
    stamps = []; t = time.perf_counter()
    for g in graphs:
        g.replay(); stamps.append(round((time.perf_counter() - t) * 1e3, 2))
        if eager: call()
    torch.cuda.synchronize()
    out[name] = {"host, all ms": found, "returned_ms": stamps, "again, host, all ms": again}
    if rank == 0: print(sys.argv[2], name, found, "again", again, "returned", stamps[::8], flush=True)
    del graphs
if rank == 0: json.dump(out, open(f"{sys.argv[1]}/{sys.argv[2]}.json", "w"), indent=1)
sys.stdout.flush(); os._exit(0)
