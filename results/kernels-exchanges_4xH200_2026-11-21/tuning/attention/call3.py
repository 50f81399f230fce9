
from bench import *
mode=sys.argv[1]
K32=dict(BLOCK_K=32,STAGES=4,P_SLOTS=2,LEAST=4,SLACK=4)
V={"k64":{}, "k32":K32, "k32a":dict(K32,AHEAD=True)}
if mode=="c": correctness({k:V[k] for k in ("k64","k32a")})
if mode=="t":
    M={"E":dict(EARLY=True),"L1":dict(LEAST=1),"L4":dict(LEAST=4),"m8":dict(MERGE=((256,8,4),(512,4,4))),"m32":dict(MERGE=((128,32,4),(256,8,4))),"mw":dict(MERGE=((64,32,4),(512,8,8)))}
    table([64,16],[(1,64),(1,8192),(1,131072),(8,4096),(8,32768),(48,4000),(128,4096)],[64],["triton"],dict(V,**M))
    table([128],[(1,8192),(8,4096),(48,4000),(128,4096)],[64],["triton"],dict(V,**M))
if mode=="f":
    table([64,128,16],GRID,[64,1],["flashinfer","triton"],V)
