
from bench import *
V={"new":{}, "prev":dict(KERNEL="prev"), "r120":dict(REGS=(168,120,56))}
table([64,128,16],GRID,[64,1],["flashinfer","triton"],V)
