
from bench import *
mode=sys.argv[1]
R=dict(REGS=(176,104,56))
K32=dict(BLOCK_K=32,STAGES=4,P_SLOTS=2,LEAST=4,SLACK=4)
V={"k64":{}, "r104":R, "P":dict(R,P_REGS=True), "Q":dict(Q_REGS=True,REGS=(160,144,48)), "k64a":dict(AHEAD=True), "k32":K32, "k32a":dict(K32,AHEAD=True)}
N=Nothing()
if mode=="c": correctness({k:V[k] for k in ("k64","P","Q")})
if mode=="hot":
    print("L2-resident rows"); table([16,64,128],[(128,4096)],[64],["triton"],V,hot=256)
    print("cold"); table([16,64,128],[(128,4096)],[64],["triton"],V)
if mode=="m":
    A=dict(V["k64"]); 
    def M(a,b,c): return dict(A,MERGE=(a,b,c))
    table([16,64,128],[(1,8192),(1,131072)],[1],["triton"],{"none":dict(merge_kernel=N),"64,128,8":A,"128,32,4":M(0,0,(128,32,4)),"32,128,4":M(0,0,(32,128,4)),"128,128,16":M(0,0,(128,128,16)),"64,64,4":M(0,0,(64,64,4))})
    table([16,64,128],[(8,4096),(8,32768)],[1],["triton"],{"none":dict(merge_kernel=N),"128,16,1":M((128,16,1),(128,16,1),0),"128,16,2":M((128,16,2),(128,16,2),0),"128,8,1":M((128,8,1),(128,8,1),0),"256,8,1":M((256,8,1),(256,8,1),0),"256,16,4":M((256,16,4),(256,16,4),0),"512,8,4":M((512,8,4),(512,8,4),0)})
    table([16,64,128],[(32,8192),(48,4000)],[1],["triton"],{"none":dict(merge_kernel=N),"256,8,1":A,"512,4,4":M((512,4,4),0,0),"256,4,1":M((256,4,1),0,0),"128,8,1":M((128,8,1),0,0),"512,4,2":M((512,4,2),0,0)})
