
from bench import *
mode=sys.argv[1]
ON=dict(EARLY=True)
V={"k32":dict(ON), "ah":dict(ON,AHEAD=True), "k64":dict(ON,BLOCK_K=64,STAGES=2,P_SLOTS=1,LEAST=2,SLACK=2)}
if mode=="c": correctness(V)
if mode=="t":
    table([64,128,16],[(1,64)]+GRID,[64],["triton"],dict(V,noE=dict(EARLY=False),L2=dict(ON,LEAST=2),L8=dict(ON,LEAST=8)))
if mode=="f":
    table([64,128,16],GRID,[1,64],["flashinfer","triton"],V)
