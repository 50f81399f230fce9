
from bench import *
V={"k32":{}, "k64":dict(BLOCK_K=64,STAGES=2,P_SLOTS=1)}
mode=sys.argv[1]
if mode=="c": correctness(V)
if mode=="t":
    V["ef"]=dict(EVICT="evict_first")
    table([64,128,16],GRID,[1],["triton"],V)
if mode=="f":
    table([64,128,16],GRID,[1,64],["flashinfer","triton"],V)
