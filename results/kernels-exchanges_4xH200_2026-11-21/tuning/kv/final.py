import sys, os, time, statistics
sys.path.insert(0, ".")
import torch, triton
from dcpbench.kernels.kv_write import masked
from dcpbench.kernels.kv_indices import Share, fused
torch.manual_seed(0); dev="cuda"
def graph_of(fn):
    fn(); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): fn()
    return g
def timed(g, reps=21):
    for _ in range(3): g.replay()
    ev=[(torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for a,b in ev:
        a.record(); g.replay(); b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a,b in ev)*1e3
m=torch.randn(8192,8192,device=dev,dtype=torch.bfloat16)
for _ in range(200): m@m
del m
x=torch.randint(0,1<<30,(1<<29,),dtype=torch.int32,device=dev); y=torch.empty_like(x)
ev=[torch.cuda.Event(enable_timing=True) for _ in range(2)]
for _ in range(5): y.copy_(x)
ev[0].record()
for _ in range(10): y.copy_(x)
ev[1].record(); torch.cuda.synchronize()
e=2*x.numel()*4*10/ev[0].elapsed_time(ev[1])*1e-9
k=2*x.numel()*4/timed(graph_of(lambda: torch.add(x,0,out=y)),11)*1e-6
BW=max(e,k); print(f"copy eager {e:.3f} kernel-in-graph {k:.3f} TB/s"); del x,y
L=61
print("tokens dcp dtype floor | settled cold % hot | waiting cold % hot %")
for tokens,dcp,dt in [(16,1,"bf16"),(256,1,"bf16"),(4096,1,"bf16"),(4096,8,"bf16"),(4096,1,"fp8"),(4096,8,"fp8"),(8192,1,"bf16"),(16384,1,"bf16"),(16384,8,"bf16"),(65536,1,"bf16"),(65536,4,"bf16"),(65536,8,"bf16"),(65536,1,"fp8"),(65536,8,"fp8")]:
    dtype={"bf16":torch.bfloat16,"fp8":torch.uint8}[dt]
    pool=torch.zeros(L,tokens+64,576,dtype=dtype,device=dev)
    new=torch.randn(L,tokens,576,device=dev,dtype=torch.bfloat16)
    loc=torch.randperm(tokens+64,device=dev)[:tokens]
    mine=torch.arange(tokens,device=dev)%dcp==0
    loc=torch.where(mine,loc,-1)
    if dcp>1: new[:,~mine]=float("nan")
    owned=int(mine.sum()); nbytes=owned*576*(2+pool.itemsize)+8*tokens; floor=nbytes/BW*1e-6
    want=torch.zeros_like(pool[0]); w=new[L-1][mine]
    want[loc[mine]]=(w if dt=="bf16" else w.float().clamp(-448,448).to(torch.float8_e4m3fn).view(torch.uint8))
    line=f"{tokens:6d} {dcp} {dt} {floor:6.2f} |"
    for s in (True,False):
        pool[L-1].zero_()
        c=timed(graph_of(lambda: [masked.write_rows(pool[l],new[l],loc,share=dcp,settled=s) for l in range(L)]))/L
        ok=torch.equal(pool[L-1].view(torch.uint8),want.view(torch.uint8))
        h=timed(graph_of(lambda: [masked.write_rows(pool[l],new[0],loc,share=dcp,settled=s) for l in range(L)]))/L
        line+=f" {c:6.2f} {100*floor/c:3.0f}% {h:6.2f} {100*floor/h:3.0f}% {'' if ok else 'WRONG'} |"
    print(line)
    del pool,new
B,C=48,131072
table=torch.randint(0,1<<24,(B*3+1,C),device=dev,dtype=torch.int32)
lengths=torch.full((B,),C,dtype=torch.int32,device=dev); loc_l=torch.zeros_like(lengths)
sl=[torch.arange(1,B+1,device=dev)+B*i for i in range(3)]
for page in (1,64):
    for dcp in (1,4,8):
        sh=Share(rank=dcp-1,dcp=dcp,page_size=page); M=C//dcp//page
        pg=torch.zeros(3,B,M,dtype=torch.int32,device=dev); ptr=torch.zeros(B+1,dtype=torch.int32,device=dev); idx=torch.zeros(3,B*M,dtype=torch.int32,device=dev)
        ta=timed(graph_of(lambda: [fused.fill_page_tables(pg[i%3],loc_l,table,sl[i%3],lengths,sh) for i in range(12)]))/12
        tb=timed(graph_of(lambda: [fused.fill_kv_indices(idx[i%3],ptr,loc_l,table,sl[i%3],lengths,sh) for i in range(12)]))/12
        rd=B*C*4 if page*dcp<=8 else B*M*32
        print(f"index page {page} dcp {dcp}: table {ta:.2f} csr {tb:.2f} us, floor {(rd+B*M*4)/BW*1e-6:.2f}", torch.equal(idx.view(3,B,M),pg))
del table,pg,idx
from dcpbench.layout import Prefix
from dcpbench.kernels.kv_gather import pack, in_token_order, request_table
for T,R in ((131072,16),(1048576,1),(1048576,16)):
    p=Prefix.uneven(T,R,4); parts=[torch.randn(p.part_rows,576,device=dev).bfloat16() for _ in range(4)]; out=torch.empty(T,576,dtype=torch.bfloat16,device=dev)
    tb=request_table(p,torch.device(dev)); ad=[q.data_ptr() for q in parts]
    t=timed(graph_of(lambda: [in_token_order(out,parts[0],ad,0,p,tb) for _ in range(4)]),9)/4
    rows=torch.randperm(p.part_rows,device=dev).int(); dst=torch.empty_like(parts[0])
    tp=timed(graph_of(lambda: [pack(dst,parts[i],rows) for i in range(4)]),9)/4
    print(f"gather {T} tokens of {R}: order {t:.1f} us {2*T*1152/t*1e-6:.2f} TB/s, pack {tp:.1f} us {2*p.part_rows*1152/tp*1e-6:.2f} TB/s")
