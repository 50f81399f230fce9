import sys, os, time, itertools, statistics

import torch, triton
from concurrent.futures import ThreadPoolExecutor
import kern
torch.manual_seed(0)
dev="cuda"; SM=132
def graph_of(fn):
    fn(); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): fn()
    return g
def timed(g, reps=15):
    for _ in range(2): g.replay()
    ev=[(torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for a,b in ev:
        a.record(); g.replay(); b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a,b in ev)*1e3
x=torch.empty(2<<30,dtype=torch.uint8,device=dev).random_(); y=torch.empty_like(x)
g=graph_of(lambda: y.copy_(x)); BW=2*x.numel()/timed(g,7)*1e-6  # GB/ms? bytes/us*1e-6=TB/s
print(f"copy {BW:.3f} TB/s"); del x,y,g
L=61
e=torch.zeros(16,device=dev)
for grid in (132,528,2048):
    for pdl in (0,1):
        def f():
            for _ in range(L): kern.empty_kernel[(grid,)](e,PDL=pdl,num_warps=4,launch_pdl=bool(pdl))
        print(f"empty grid {grid} pdl {pdl}: {timed(graph_of(f))/L:.2f} us")
def launch(pool,new,loc,*,warps,tile,rows,pdl,hint,dcp=1,owned=False,rank=0):
    n=loc.shape[0]; fp8=pool.element_size()==1
    kern.write_kernel[(triton.cdiv(n,tile),)](pool,new,loc,n,pool.stride(0),new.stride(0),1.0,rank,WIDTH=576,MAIN=512,TAIL=64,OWNED=owned,DCP=dcp,INTERLEAVE=1,
        FP8=fp8,NATIVE=True,TILE=tile,ROWS=rows,PDL=pdl,HINT=hint,num_warps=warps,launch_pdl=pdl>0)
# variants
shapes=[(4096,1,"bf16"),(4096,8,"bf16"),(4096,1,"fp8"),(16384,1,"bf16"),(65536,1,"bf16"),(65536,8,"bf16"),(65536,1,"fp8"),(65536,8,"fp8"),(256,1,"bf16"),(16,1,"bf16")]
cfg=[(1,2,2),(1,4,4),(1,8,8),(2,4,4),(2,8,8),(2,16,16),(4,4,4),(4,8,8),(4,16,16),(4,32,32),(8,16,16),(8,32,32),(1,32,4),(1,32,8),(1,16,4),(1,64,4),(2,32,8),(2,64,8),(4,64,8)]
variants=[(*c,2,0) for c in cfg]
variants+=[(w,t,r,p,h) for (w,t,r) in [(1,4,4),(2,8,8),(4,16,16)] for (p,h) in [(0,0),(1,0),(3,0),(2,1),(2,2),(2,3)]]
t0=time.time()
# compile in threads
tiny_new=torch.randn(64,576,device=dev).bfloat16(); tl64=torch.full((64,),-1,device=dev)
pools={"bf16":torch.zeros(64,576,dtype=torch.bfloat16,device=dev),"fp8":torch.zeros(64,576,dtype=torch.uint8,device=dev)}
def comp(a):
    (w,t,r,p,h),d=a
    torch.cuda.set_device(0)
    launch(pools[d],tiny_new,tl64,warps=w,tile=t,rows=r,pdl=p,hint=h)
with ThreadPoolExecutor(16) as ex: list(ex.map(comp, itertools.product(variants,("bf16","fp8"))))
torch.cuda.synchronize()
print("compiled", len(variants)*2, f"{time.time()-t0:.1f}s")
out=open(os.environ["OUT"]+"/tune.txt","w")
budget=float(sys.argv[1]); start=time.time()
for tokens,dcp,dt in shapes:
    dtype={"bf16":torch.bfloat16,"fp8":torch.uint8}[dt]
    pool=torch.zeros(L,tokens+64,576,dtype=dtype,device=dev)
    new=torch.randn(L,tokens,576,device=dev,dtype=torch.bfloat16)
    loc=torch.randperm(tokens+64,device=dev)[:tokens]
    mine=torch.arange(tokens,device=dev)%dcp==0
    loc=torch.where(mine,loc,-1)
    if dcp>1: new[:,~mine]=float("nan")
    owned=int(mine.sum()); nbytes=owned*576*(2+pool.itemsize)+8*tokens
    want=torch.zeros_like(pool[0]); w=new[0][mine]
    want[loc[mine]]=(w if dt=="bf16" else w.float().clamp(-448,448).to(torch.float8_e4m3fn).view(torch.uint8))
    res=[]
    for v in variants:
        if time.time()-start>budget: break
        (wp,t,r,p,h)=v
        if tokens>=16384 and (p!=2 or h!=0) and (wp,t,r)!=(4,16,16): continue
        kw=dict(warps=wp,tile=t,rows=r,pdl=p,hint=h)
        pool[0].zero_()
        def cold():
            for l in range(L): launch(pool[l],new[l],loc,**kw)
        def hot():
            for l in range(L): launch(pool[l],new[0],loc,**kw)
        g=graph_of(cold); ok=torch.equal(pool[0].view(torch.uint8),want.view(torch.uint8))
        tc=timed(g)/L; th=timed(graph_of(hot))/L
        res.append((tc,th,v,ok)); out.write(f"{tokens} {dcp} {dt} {v} cold {tc:.3f} hot {th:.3f} ok {ok} {nbytes/tc*1e-6/BW:.3f}\n")
    floor=nbytes/BW*1e-6
    res.sort(key=lambda z:z[0])
    print(f"== {tokens} dcp{dcp} {dt} floor {floor:.2f} us")
    for tc,th,v,ok in res[:5]: print(f"   {v} cold {tc:.2f} ({100*floor/tc:.0f}%) hot {th:.2f} ok {ok}")
    h=min(res,key=lambda z:z[1]); print(f"   best hot {h[2]} {h[1]:.2f}")
    if not all(z[3] for z in res): print("   WRONG", [z[2] for z in res if not z[3]])
    del pool,new
# neighbours in a graph: torch's copy of the same bytes
a=torch.randn(L,4096*576,device=dev).bfloat16(); b=torch.empty_like(a)
print("torch copy_ 4096 rows", timed(graph_of(lambda: [b[l].copy_(a[l]) for l in range(L)]))/L)
del a,b
# producer -> write: what the write adds behind an elementwise kernel that makes its rows
new=torch.randn(L,4096,576,device=dev).bfloat16(); pool=torch.zeros(L,4160,576,dtype=torch.bfloat16,device=dev); loc=torch.randperm(4160,device=dev)[:4096]
base=timed(graph_of(lambda: [new[l].mul_(1.0) for l in range(L)]))/L
for p in (0,2):
    both=timed(graph_of(lambda: [(new[l].mul_(1.0), launch(pool[l],new[l],loc,warps=4,tile=16,rows=16,pdl=p,hint=0)) for l in range(L)]))/L
    print(f"producer {base:.2f} us, with write pdl {p}: {both:.2f}, added {both-base:.2f}")
del new,pool
# index build
from dcpbench.kernels.kv_indices import Share, fused
B,C=48,131072
table=torch.randint(0,1<<24,(B*3+1,C),device=dev,dtype=torch.int32)
locs=torch.arange(C,device=dev,dtype=torch.int32)
lengths=torch.full((B,),C,dtype=torch.int32,device=dev); loc_l=torch.zeros_like(lengths)
slotsets=[torch.arange(1,B+1,device=dev)+B*i for i in range(3)]
for blk in (512,1024,2048):
  fused.BLOCK=blk
  for page in (1,64):
    for dcp in (1,4,8):
        sh=Share(rank=dcp-1,dcp=dcp,page_size=page)
        M=C//dcp//page
        pg=torch.zeros(3,B,M,dtype=torch.int32,device=dev); ptr=torch.zeros(B+1,dtype=torch.int32,device=dev); idx=torch.zeros(3,B*M,dtype=torch.int32,device=dev)
        def tab():
            for i in range(12): fused.fill_page_tables(pg[i%3],loc_l,table,slotsets[i%3],lengths,sh)
        def csr():
            for i in range(12): fused.fill_kv_indices(idx[i%3],ptr,loc_l,table,slotsets[i%3],lengths,sh)
        ta=timed(graph_of(tab))/12; tb=timed(graph_of(csr))/12
        per=32//4
        rd=B*C*4 if page==1 else B*M*32
        wr=B*M*4
        print(f"index block {blk} page {page} dcp {dcp}: table {ta:.2f} csr {tb:.2f} us, floor {(rd+wr)/BW*1e-6:.2f}", torch.equal(idx.flatten(1).view(3,B,M),pg))
print("total", time.time()-t0)
