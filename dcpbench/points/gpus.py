"""List GPUs with their nominal limits and the memory that remains after the driver's share. No torch.

Rates are those of vendors' data sheets: dense products, without sparsity, and NVLink in one direction, while sheets
state the sum of both. Memory bandwidth is the sheet's, too, unless the bus width that the driver reports allows less:
width / 8 × twice the memory clock. `dcpbench bench` measures how much of these rates a machine reaches. Memory is the
total that CUDA reports (torch's `total_memory`); it differs by some MiB between drivers, and the table has the lowest
value seen.
"""

from __future__ import annotations

import msgspec

MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a GPU with its limits, in bytes, and in bytes, FLOP or J per second."""

    name: str  # name for --gpu
    device: str  # name that the driver reports
    capability: str
    memory_bytes: int
    l2_bytes: int
    memory_bytes_s: float
    bf16_flop_s: float
    fp8_flop_s: float | None  # dense fp8 FLOP/s; None if the GPU has no fp8 products
    nvlink_bytes_s: float  # NVLink bandwidth in one direction, in bytes/s
    watts: int
    source: str  # source of the rates and the power
    memory_source: str  # source of the memory size
    fp4_flop_s: float | None = None  # dense fp4 FLOP/s; None: no fp4 products, weights are widened to bf16
    gpus_per_host: int = 8  # GPUs that read each other's memory: those of an HGX or DGX board, or of a rack
    on_paper: bool = True  # True if dcpbench has never run on one: all figures are from data sheets or others
    cuda: bool = True  # True if the GPU runs CUDA, and so dcpbench's engine; others are only planned and estimated


GPUS = (  # known GPUs. A capability of an AMD GPU is its gfx number, gfx950, and is only printed.
    Gpu(
        name="A100",
        device="NVIDIA A100-SXM4-80GB",
        capability="8.0",
        memory_bytes=84_987_740_160,
        l2_bytes=40 * MIB,
        memory_bytes_s=2.039e12,
        bf16_flop_s=312e12,
        fp8_flop_s=None,
        nvlink_bytes_s=300e9,
        watts=400,
        source="https://www.nvidia.com/en-us/data-center/a100/ (80GB SXM); 5,120 bit at 1,593 MHz are 2.039 TB/s, too",
        memory_source="NVIDIA's deviceQuery in public logs: 84987740160 bytes, L2 41943040; with other drivers up to 81158 MiB, "
        "https://github.com/thamada/nvidia-smi",
    ),
    Gpu(
        name="H20",
        device="NVIDIA H20",
        capability="9.0",
        memory_bytes=97_285 * MIB,
        l2_bytes=60 * MIB,
        memory_bytes_s=4.0e12,
        bf16_flop_s=148e12,
        fp8_flop_s=296e12,
        nvlink_bytes_s=450e9,
        watts=400,
        source="https://willitrunai.com/es/gpus/h20-96gb, as NVIDIA has published no sheet; NVLink: "
        "https://github.com/deepseek-ai/DeepEP/issues/16; bf16 products of 142 TFLOP/s were measured: "
        "https://github.com/zzc0721/torch-performance-test-data/issues/77",
        memory_source="torch's properties of one in public code: 97285 MB, 78 SMs; its errors of full GPUs: 95.00 GiB",
    ),
    Gpu(
        name="H100",
        device="NVIDIA H100 80GB HBM3",
        capability="9.0",
        memory_bytes=85_017_493_504,
        l2_bytes=50 * MIB,
        memory_bytes_s=3.35e12,
        bf16_flop_s=989e12,
        fp8_flop_s=1979e12,
        nvlink_bytes_s=450e9,
        watts=700,
        source="https://www.nvidia.com/en-us/data-center/h100/ (SXM; products without sparsity); 5,120 bit at "
        "2,619 MHz are 3.352 TB/s, too",
        on_paper=False,
        memory_source="measured by us with driver 580.159.04, as its L2 cache; in public logs 81082 to 81106 MB, "
        "https://github.com/thamada/nvidia-smi",
    ),
    Gpu(
        name="H200",
        device="NVIDIA H200",
        capability="9.0",
        memory_bytes=150_109_880_320,
        l2_bytes=60 * MIB,
        memory_bytes_s=4.8e12,
        bf16_flop_s=989e12,
        fp8_flop_s=1979e12,
        nvlink_bytes_s=450e9,
        watts=700,
        source="https://www.nvidia.com/en-us/data-center/h200/ (SXM; products without sparsity)",
        on_paper=False,
        memory_source="records of our own runs, results/, as its L2 cache",
    ),
    Gpu(
        name="B200",
        device="NVIDIA B200",
        capability="10.0",
        memory_bytes=182_630 * MIB,
        l2_bytes=126 * MIB + MIB // 2,
        memory_bytes_s=7.672e12,
        bf16_flop_s=2250e12,
        fp8_flop_s=4500e12,
        fp4_flop_s=9000e12,
        nvlink_bytes_s=900e9,
        watts=1000,
        source="https://www.nvidia.com/en-us/data-center/dgx-b200/ (an eighth; products without sparsity). Not its 8 TB/s: "
        "those need a bus of 8,192 bit, and drivers report 7,680 at 3,996 MHz, https://github.com/pytorch/ao/pull/4002; "
        "NVIDIA corrected its own model to 7.7 by a later sheet, https://github.com/ai-dynamo/aiconfigurator/pull/1246",
        memory_source="https://github.com/pytorch/ao/pull/4002: 178.35 GiB, an L2 cache of 126.5 MiB; 182631 and 182642 MB in "
        "public logs",
    ),
    Gpu(
        name="B300",
        device="NVIDIA B300 SXM6 AC",
        capability="10.3",
        memory_bytes=274_109 * MIB,
        l2_bytes=126 * MIB + MIB // 2,
        memory_bytes_s=7.7e12,
        bf16_flop_s=2250e12,
        fp8_flop_s=4500e12,
        fp4_flop_s=13500e12,
        nvlink_bytes_s=900e9,
        watts=1100,
        source="https://www.nvidia.com/en-us/data-center/dgx-b300/ (an eighth; products without sparsity, 108 PFLOP/s in fp4); memory and power: "
        "https://verda.com/blog/gb300-nvl72-architecture, and drivers report 1,100 W. NVIDIA's sheets state up to 8 TB/s for the family",
        memory_source="torch's errors of full GPUs in public logs: 267.69 GiB; nvidia-smi: 275040 MiB; L2 cache: cudaDeviceProp in "
        "public notes, 132644864 bytes",
    ),
    Gpu(
        name="GB200",
        device="NVIDIA GB200",
        capability="10.0",
        memory_bytes=188_728 * MIB,
        l2_bytes=126 * MIB + MIB // 2,
        memory_bytes_s=8.0e12,
        bf16_flop_s=2500e12,
        fp8_flop_s=5000e12,
        fp4_flop_s=10000e12,
        nvlink_bytes_s=900e9,
        watts=1200,
        gpus_per_host=72,
        source="https://www.nvidia.com/en-us/data-center/gb200-nvl72/ (a 72nd of 576 TB/s, 130 TB/s, 360 PFLOP/s in bf16, 720 in fp8 and 1,440 in "
        "fp4; half of these products, which have sparsity); power: drivers' limit in public logs",
        memory_source="torch's errors of full GPUs in public logs: 184.31 GiB; nvidia-smi: 189471 MiB; L2 cache: as B200",
    ),
    Gpu(
        name="GB300",
        device="NVIDIA GB300",
        capability="10.3",
        memory_bytes=283_130 * MIB,
        l2_bytes=126 * MIB + MIB // 2,
        memory_bytes_s=8.0e12,
        bf16_flop_s=2500e12,
        fp8_flop_s=5000e12,
        fp4_flop_s=15000e12,
        nvlink_bytes_s=900e9,
        watts=1400,
        gpus_per_host=72,
        source="https://www.nvidia.com/en-us/data-center/gb300-nvl72/ (a 72nd of up to 576 TB/s, 130 TB/s, 360 PFLOP/s in bf16 and 720 in "
        "fp8, half of which have no sparsity, and 1,080 in fp4 without); power: drivers' limit in public logs",
        memory_source="torch's errors of full GPUs in public logs: 276.50 GiB; nvidia-smi: 284208 MiB; L2 cache: as B300",
    ),
    Gpu(
        name="MI355X",
        device="AMD Instinct MI355X",
        capability="9.5",
        memory_bytes=309_220_868_096,
        l2_bytes=256 * MIB,
        memory_bytes_s=8.0e12,
        bf16_flop_s=2500e12,
        fp8_flop_s=5000e12,
        fp4_flop_s=10000e12,
        nvlink_bytes_s=537.6e9,
        watts=1400,
        cuda=False,
        source="https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html (products without sparsity); its link is Infinity "
        "Fabric: seven links of 76.8 GB/s in one direction, each to one other GPU",
        memory_source="rocm-smi in public logs: 309220868096 bytes; in place of the L2 cache the last level, its Infinity Cache of 256 MB: "
        "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/white-papers/amd-cdna-4-architecture-whitepaper.pdf",
    ),
)


def format_machine_label(name: str) -> str:
    """Return the name of a machine, such as `B300+rdma-800 (on paper)`: marked if its GPU is in the table on paper only."""
    on_paper = any(gpu.on_paper for gpu in GPUS if gpu.name == name.partition("+")[0])
    return f"{name} (on paper)" if on_paper else name
