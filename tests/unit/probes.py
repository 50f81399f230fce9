"""Define probes of a machine without GPUs and of one with GPUs."""

from dcpbench.points.device_probe import Probe
from dcpbench.points.memory import GIB

CPU = Probe(device="cpu", count=0, name="CPU")
H200X4 = Probe(
    device="cuda",
    count=4,
    name="NVIDIA H200",
    memory_bytes=139 * GIB,
    l2_bytes=60 << 20,
    packages={"flashinfer": "0.6.18"},
)
