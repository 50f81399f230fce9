"""When the host waits for copies of pageable memory and for changes of memory: python staging.py > staging.json"""

import json
import time

import torch

QUEUED_CYCLES = 40_000_000  # about 20 ms of GPU work
DEVICE = torch.device("cuda")
MIB = 1 << 20


def held_ms(call, *, queued=True):
    """Host milliseconds of a call, behind queued GPU work or with an idle GPU."""
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(QUEUED_CYCLES)
    start = time.perf_counter()
    call()
    elapsed = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    return round(elapsed, 3)


def pair(size):
    """Pageable and GPU memory of so many bytes."""
    return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8, device=DEVICE)


def one_copy(size):
    """[host to GPU, GPU to host], both non_blocking, from and to pageable memory."""
    host, gpu = pair(size)
    return [held_ms(lambda: gpu.copy_(host, non_blocking=True)), held_ms(lambda: host.copy_(gpu, non_blocking=True))]


def burst(size, most=2000):
    """Copies to the GPU in a row until one takes more than 3 ms: [how many, how long the last took]."""
    host, gpu = pair(size)
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * QUEUED_CYCLES)
    for copies in range(1, most + 1):
        start = time.perf_counter()
        gpu.copy_(host, non_blocking=True)
        last = (time.perf_counter() - start) * 1e3
        if last > 3:
            break
    torch.cuda.synchronize()
    return [copies, round(last, 3)]


def cached():
    """Leave 1 GiB in the caching allocator."""
    block = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    del block


def pinned(size, kept=[]):
    """Pin memory that no earlier call has left."""
    kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))


one_copy(4)
held_ms(lambda: None)
result = {
    "torch": torch.__version__,
    "device": torch.cuda.get_device_name(),
    "queued_ms": held_ms(torch.cuda.synchronize),
    "one copy: size -> [to GPU ms, to host ms]": {size: one_copy(size) for size in (4, 4096, 65536, MIB, 2 * MIB)}
    | {f"{mib} MiB": one_copy(int(mib * MIB)) for mib in (2.2, 2.5, 3, 4, 8)},
    "burst to GPU: size -> [copies, last ms]": {size: burst(size) for size in (64, 4096, 65536, 262144, MIB, 2 * MIB)},
}
cached()
result["cudaFree, GPU idle, ms"] = held_ms(torch.cuda.empty_cache, queued=False)
cached()
result["cudaFree, GPU busy, ms"] = held_ms(torch.cuda.empty_cache)
result["cudaMalloc of 7 GiB, GPU busy, ms"] = held_ms(lambda: torch.empty(7 << 30, dtype=torch.uint8, device=DEVICE))
result["cudaHostAlloc: MiB -> [GPU idle ms, GPU busy ms]"] = {
    mib: [held_ms(lambda: pinned(mib * MIB), queued=False), held_ms(lambda: pinned(mib * MIB))] for mib in (1, 8, 64)
}
print(json.dumps(result, indent=1))
