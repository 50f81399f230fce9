import sys, time, os, statistics, json
import numpy as np, torch
from dcpbench.kernels.attention import AttentionSpec, Shards, make_backend
from dcpbench.kernels.attention import triton_mla
dev=torch.device("cuda")
T0=time.time()
BASE=dict(triton_mla.HOPPER)
from dcpbench.kernels.attention import hopper_mla
import hopper_prev
NEW=hopper_mla.hopper_kernel
def setv(v):
    triton_mla.HOPPER.clear(); triton_mla.HOPPER.update(BASE); hopper_mla.hopper_kernel=NEW
    if v.get("KERNEL")=="prev":
        hopper_mla.hopper_kernel=hopper_prev.hopper_kernel
        triton_mla.HOPPER.update(AHEAD=False,EARLY=False,P_REGS=False,Q_REGS=False)
    for k,x in v.items():
        if k in BASE: triton_mla.HOPPER[k]=x
def spec_of(B,S,H,page,copies=1):
    return AttentionSpec(batch=B,heads=H,latent=512,rope=64,page_size=page,max_pages=-(-S//page)+2,scale=576**-0.5,dtype=torch.bfloat16,device=dev)
POOL=None
def pool(rows=1_600_000):
    global POOL
    if POOL is None:
        POOL=torch.empty(rows,576,dtype=torch.bfloat16,device=dev)
        for i in range(0,rows,100_000): POOL[i:i+100_000].normal_()
    return POOL
def shards_of(B,S,page,seed=0):
    per=-(-S//page); rng=np.random.default_rng(seed)
    ids=rng.permutation(B*per).astype(np.int32).reshape(B,per)
    return Shards(pages=list(ids),lengths=[S]*B)
def capture(fn, copies):
    for i in range(min(copies,3)): fn(i)
    torch.cuda.synchronize()
    n=copies*max(1,int(np.ceil(6/copies)))
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n): fn(i%copies)
    return g,n
def case(B,S,H,page,names,variants,check=True,rounds=7,hot=0):
    n=B*S; P=pool(); copies=max(1,min(32,P.shape[0]//n))
    copies=max(1,min(copies,-(-300_000_000//(n*1152)))) if n*1152<300e6 else min(copies,2)
    spec=spec_of(B,S,H,page); sh=shards_of(B,S,page)
    if hot: sh=Shards(pages=[x%hot for x in sh.pages],lengths=sh.lengths); copies=1
    rows=-(-S//page)*page*B
    kvs=[P[i*rows:(i+1)*rows].view(-1,page,576) for i in range(copies)]
    q=torch.randn(B,H,576,dtype=torch.bfloat16,device=dev)
    o=torch.empty(B,H,512,dtype=torch.bfloat16,device=dev); lse=torch.empty(B,H,device=dev)
    first=None; graphs=[]; keep=[]
    for name in names:
        vs=variants if name=="triton" else {"fa3":{}}
        for vname,v in vs.items():
            setv(v)
            be=make_backend(name,spec); be.plan(sh); keep.append(be)
            o.fill_(float("nan")); be.run(q,kvs[0],o,lse); torch.cuda.synchronize()
            if check:
                if first is None: first=(o.float().clone(),lse.clone())
                else:
                    eo=((o.float()-first[0]).norm()/first[0].norm()).item(); el=(lse-first[1]).abs().max().item()
                    if not(eo<2e-2 and el<1e-2) and 'merge_kernel' not in v and 'SKIP' not in v: print("MISMATCH",B,S,H,page,vname,eo,el)
            graphs.append((vname,)+capture(lambda i:be.run(q,kvs[i],o,lse),copies))
    ts={k:[] for k,_,_ in graphs}
    for r in range(rounds+1):
        for k,g,m in graphs:
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            a.record(); g.replay(); b.record(); b.synchronize()
            if r: ts[k].append(a.elapsed_time(b)*1e3/m)
    return {k:statistics.median(v) for k,v in ts.items()}
GRID=[(1,8192),(1,131072),(8,4096),(8,32768),(32,8192),(48,4000),(48,32000),(128,4096)]
def table(hs,grid,pages,names,variants,hot=0):
    for page in pages:
        for H in hs:
            for B,S in grid:
                r=case(B,S,H,page,names,variants,hot=hot)
                f=r.get("fa3")
                s=f"p{page:<2} H{H:<3} B{B:<3} S{S:<6}"
                for k,us in r.items():
                    s+=f" | {k} {us:7.1f}us {B*S*1152/us/1e6:5.2f}TB/s {2*B*S*H*1088/us/1e6:4.0f}TF"+(f" x{f/us:4.2f}" if f and k!="fa3" else "")
                print(s,flush=True)
def correctness(variants):
    sys.path.insert(0,"tests/kernels")
    import test_attention as ta
    for vname,v in variants.items():
        setv(v)
        bad=0; worst=0
        for page in (1,64):
            for heads in (8,20,128):
                for lengths in ((5,),(1,4099,0,777,64,0),(0,0),(64,63,65,33,31,32),(3000,3,500,1)):
                    c=ta.problem(dev,torch.bfloat16,lengths,heads=heads,latent=512,rope=64,page_size=page)
                    be=make_backend("triton",c[0]); assert be.kernel=="hopper"
                    be.plan(c[3])
                    try:
                        for _ in range(2):
                            found=ta.run(be,*c[:3]); ta.assert_agrees(*c,found,limit=1e-2)
                    except AssertionError as e:
                        bad+=1
                        if bad<6: print("BAD",vname,page,heads,lengths,str(e)[:200].replace("\n"," "))
        print("correct",vname,"bad",bad,"t %.1f"%(time.time()-T0),flush=True)
