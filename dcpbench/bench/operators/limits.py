"""Measure the limits of this machine, in the same run as the times that are compared with them.

    read      device memory: block sums of a tensor many times the L2 cache
    copy      device memory: a copy of one; its bytes count twice, read and written
    matmul    8192 × 8192 × 8192 in bf16, on random numbers
    matmul_fp8  the same in e4m3, with one scale for each operand
    peer      every rank reads its neighbour's memory at the same time, through symmetric memory, by a kernel or a copy
    barrier   all ranks wait for each other in symmetric memory
    smallest  NCCL's collectives of a few bytes

With several ranks each is the slowest rank's. A limit that this machine does not have is left out with its reason.
Steps of a model are compared with the same limits, `measure_rates`.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dcpbench.bench.bench_record import Limit
from dcpbench.bench.operators import collectives
from dcpbench.bench.operators.rendezvous import RankError, get_world_group, run_together
from dcpbench.errors import CapacityError
from dcpbench.kernels.read import BLOCK, read_memory
from dcpbench.measuring.timing import Timer, capture_graph
from dcpbench.records.record import Rates
from dcpbench.records.stats import compute_median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcpbench.exchange.torch_collectives import Group

    Run = Callable[[], object]

BUFFER_BYTES = 2 << 30
PEER_BYTES = 256 << 20
SIDE = 8192
REPEATS = 32  # barriers or smallest collectives in one graph
ALONE, BETWEEN = ("read", "copy", "matmul"), ("peer", "barrier")  # limits of each rank alone, and those between ranks
FP8_ALONE = ("matmul_fp8",)  # limits of each rank alone, if weights or KV are fp8
WARM_UP, SAMPLES = 5, 30
PAUSE_S = 0.1


def measure_limits(wanted: Sequence[str], device: torch.device) -> tuple[list[Limit], list[str]]:
    """Return the limits named in `wanted`, and the reasons for missing ones. Collective."""
    found: list[Limit] = []
    unmeasured = []
    for name in wanted:
        try:
            found += run_together(lambda name=name: list(MEASURES[name](device)))  # type: ignore[misc]
        except RankError as e:
            unmeasured.append(f"{name}: {e}")
        torch.cuda.empty_cache()
    return found, unmeasured


def measure_rates(device: torch.device, ranks: int, *, fp8: bool = False) -> Rates:
    """Return the rates with which the steps of a job are compared. Collective; takes some 2 s and keeps no memory.

    `fp8`: include the rate of products with fp8 operands.
    """
    wanted = ALONE + (FP8_ALONE if fp8 else ()) + (() if ranks == 1 else BETWEEN)
    found, unmeasured = measure_limits(wanted, device)
    known = {limit.name: limit.median for limit in found}
    barrier_s = known.get("barrier")
    return Rates(
        read_bytes_s=known.get("read"),
        copy_bytes_s=known.get("copy"),
        matmul_flop_s=known.get("matmul"),
        matmul_fp8_flop_s=known.get("matmul_fp8"),
        peer_bytes_s=known.get("peer"),
        barrier_us=None if barrier_s is None else barrier_s * 1e6,
        unmeasured=unmeasured,
    )


def measure_best(name: str, unit: str, amount: float, steps: Sequence[Run], device: torch.device) -> Limit:
    """Return the best of several equivalent steps: `amount` per second, or the seconds per amount if the unit is `s`.

    A short burst after a rest, before the power cap of the chip slows a matrix product down.
    """
    found = []
    for step in steps:
        timer = Timer(step, device)
        timer.measure_chunk(WARM_UP)
        time.sleep(PAUSE_S)
        samples_ms, _ = timer.measure_chunk(SAMPLES)
        samples = [ms / 1e3 / amount if unit == "s" else amount / ms * 1e3 for ms in samples_ms]
        of = compute_median_interval(samples)
        found.append(Limit(name=name, unit=unit, median=of.median, low=of.low, high=of.high, samples=SAMPLES))
    return (min if unit == "s" else max)(found, key=lambda limit: limit.median)


def _measure_read(device: torch.device) -> Iterator[Limit]:
    x = torch.randn(BUFFER_BYTES // 4, device=device)  # never zeros: the same kernels run faster on them
    out = torch.empty(len(x) // BLOCK, device=device)
    yield measure_best("read", "B/s", x.nbytes, [lambda: read_memory(x, out)], device)


def _measure_copy(device: torch.device) -> Iterator[Limit]:
    x = torch.randn(BUFFER_BYTES // 4, device=device)
    yield measure_best("copy", "B/s", 2 * x.nbytes, [functools.partial(torch.empty_like(x).copy_, x)], device)


def _measure_matmul(device: torch.device) -> Iterator[Limit]:
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    steps = [functools.partial(torch.mm, a, second, out=out) for second in (b, b.T)]
    yield measure_best("matmul", "FLOP/s", 2 * SIDE**3, steps, device)


def _measure_matmul_fp8(device: torch.device) -> Iterator[Limit]:
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise CapacityError("this GPU does not multiply fp8.")
    a, b = (torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.empty(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    one = torch.ones((), device=device)
    multiply = torch._scaled_mm  # noqa: SLF001 - has no public name
    step = functools.partial(multiply, a, b.T, one, one, out_dtype=out.dtype, use_fast_accum=True, out=out)
    yield measure_best("matmul_fp8", "FLOP/s", 2 * SIDE**3, [step], device)


def _measure_peer(device: torch.device) -> Iterator[Limit]:
    group = get_world_group()
    x, memory = _allocate_symmetric(PEER_BYTES // 4, group, device)
    x.normal_()
    neighbour = memory.get_buffer((group.rank + 1) % group.size, x.shape, x.dtype)
    out = torch.empty(len(x) // BLOCK, device=device)
    copy = functools.partial(torch.empty_like(x).copy_, neighbour)
    yield measure_best("peer", "B/s", x.nbytes, [functools.partial(read_memory, neighbour, out), copy], device)


def _measure_barrier(device: torch.device) -> Iterator[Limit]:
    _, memory = _allocate_symmetric(BLOCK, get_world_group(), device)
    barriers = _make_repeated(memory.barrier)
    barriers()
    yield measure_best("barrier", "s", REPEATS, [capture_graph(barriers).replay], device)


def _measure_smallest(device: torch.device) -> Iterator[Limit]:
    group = get_world_group()
    x = torch.randn(1, 8 * group.size, dtype=torch.bfloat16, device=device)
    for name, collective in collectives.NCCL.items():
        calls = _make_repeated(functools.partial(collective, group, x))
        calls()
        yield measure_best(name, "s", REPEATS, [capture_graph(calls).replay], device)


def _make_repeated(call: Run) -> Callable[[], None]:
    def run_calls() -> None:
        for _ in range(REPEATS):
            call()

    return run_calls


def _allocate_symmetric(numbers: int, group: Group, device: torch.device):  # noqa: ANN202 - torch's class has no public name
    """Return (fp32 numbers that peers can read, their symmetric memory). Raise CapacityError if peers cannot read them."""
    from torch.distributed import _symmetric_memory as symmetric

    if group.handle is None:
        raise CapacityError("there is no peer to read from.")
    if not all(torch.cuda.can_device_access_peer(device, peer) for peer in range(group.size) if peer != device.index):
        raise CapacityError("the GPUs of this machine cannot read each other's memory.")
    x = symmetric.empty(numbers, dtype=torch.float32, device=device)
    memory = symmetric.rendezvous(x, group.handle)
    dist.barrier(group.handle, device_ids=[device.index])
    return x, memory


MEASURES: dict[str, Callable[[torch.device], Iterator[Limit]]] = {
    "read": _measure_read,
    "copy": _measure_copy,
    "matmul": _measure_matmul,
    "matmul_fp8": _measure_matmul_fp8,
    "peer": _measure_peer,
    "barrier": _measure_barrier,
    "smallest": _measure_smallest,
}
