"""Run the worker with one fault on one rank: `FAULT=KIND:RANK:CONCURRENCY`.

These kinds occur in layer 1 at the third measured step of the point with this concurrency:

    missing         omit the reduction after attention
    order           swap the two collectives of `merge`
    gather          omit the first collective of `merge`, an all-gather
    shape, dtype    reduce a tensor of another shape or dtype
    sleeps, spins   stall in the phase of the experts

These kinds occur in layer 1 from the first measured step on, also in captured steps:

    flag            take back the signal of the merge to its peers before they read it, with the exchange `symm`
    loops           start a kernel that never ends after attention, on a GPU

On GPUs all other kinds run without CUDA graphs, because a captured step cannot fail at one of its replays.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import triton
import triton.language as tl

from dcpbench import worker
from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.model import Model
from dcpbench.exchange.ag_rs import AllGatherReduceScatter
from dcpbench.exchange.symm import SymmetricMemory
from dcpbench.exchange.torch_collectives import Group
from dcpbench.kernels.merge import correct_attn_out
from dcpbench.kernels.symm_mem.barrier import _get_peer_counters
from dcpbench.measuring.ranges import record_range
from tests import as_fork, forks

FAULT, INSIDE = "FAULT", "--inside"
LOOPS, FLAG = "loops", "flag"
KINDS = ("missing", "gather", "order", "shape", "dtype", "sleeps", "spins", FLAG)
ON_GPUS = ("gather", "shape", LOOPS, FLAG)  # faults for several GPUs
LAYER, STEP = 1, 3
PHASES = {"order": "merge", "gather": "merge", "sleeps": "moe", "spins": "moe", FLAG: "merge"}
"""Phase in which each kind occurs; other kinds occur in attn_reduce."""
write_progress, step, attention, experts = (
    worker.Worker.write_progress,
    Model.run_step,
    Model.run_attention,
    Model.run_experts,
)
all_reduce, merge = Group.all_reduce, AllGatherReduceScatter.merge_partials
capture, merge_by_peers = DecodeEngine.capture_step, SymmetricMemory.merge_partials


class Fault:
    """Replace functions of the worker to inject the fault. The culprit and the other ranks execute the same lines."""

    def __init__(self, kind: str, concurrency: int, culprit: bool) -> None:
        self.kind, self.concurrency, self.culprit = kind, concurrency, culprit
        self.at, self.steps, self.layer, self.attending = False, 0, -1, False
        self.goes_on = torch.ones(1, dtype=torch.int32, pin_memory=kind == LOOPS)
        """Flag that ends the loop of the kernel."""
        self.takes_back = torch.zeros(1, dtype=torch.int32, pin_memory=kind == FLAG and torch.cuda.is_available())
        """Flag that makes a kernel take a signal back."""

    def is_due(self) -> bool:
        """Return True if the fault is due now."""
        return self.culprit and self.at and self.steps == STEP and self.layer == LAYER

    def write_progress(self, of: Any, stage: str, note: str = "") -> None:
        """Replace Worker.write_progress."""
        self.at = stage == "measure" and of.point is not None and of.point.concurrency == self.concurrency
        if self.at and self.culprit:
            self.goes_on.zero_()
            self.takes_back.fill_(1)
        write_progress(of, stage, note)

    def run_step(self, of: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace Model.run_step."""
        self.steps += self.at
        return step(of, *args, **kwargs)

    def run_attention(self, of: Any, q: Any, kv: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        """Replace Model.run_attention; the next all-reduce is the reduction after it."""
        self.layer = index
        found = attention(of, q, kv, index, *args, **kwargs)
        self.attending = True
        if self.kind == LOOPS and index == LAYER:
            _until_kernel[(1,)](self.goes_on)
        return found

    def all_reduce(self, of: Any, x: torch.Tensor) -> torch.Tensor:
        """Replace Group.all_reduce."""
        mine = x
        if self.kind in ("missing", "shape", "dtype") and self.attending and self.is_due():
            self.attending = False
            if self.kind == "missing":
                return x
            mine = x.flatten()[: x.numel() // 2] if self.kind == "shape" else x.double()
        all_reduce(of, mine)  # one line for all ranks
        return x  # the following code needs this shape; with NCCL the host continues

    def merge_partials(self, of: Any, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """Replace AllGatherReduceScatter.merge_partials."""
        if self.kind not in ("order", "gather") or not self.is_due():
            return merge(of, o_BHR, lse_BH)
        with record_range("merge"):
            lse_NBH = lse_BH.expand(of.group.size, *lse_BH.shape).contiguous()
            found = of.group.reduce_scatter(correct_attn_out(o_BHR, lse_NBH, of.group.rank, torch.float32))
            if self.kind == "order":
                of.group.all_gather(lse_BH)
            return found

    def merge_by_peers(self, of: Any, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> torch.Tensor:
        """Replace SymmetricMemory.merge_partials."""
        if self.kind == FLAG and self.layer == LAYER:
            sizes = {name: of.peers.launch_arguments[name] for name in ("N", "N_BLOCK")}
            _take_back_kernel[(1,)](
                self.takes_back, of.peers.addresses, of.peers.compute_offset(of.parts.o_counters), **sizes
            )
        return merge_by_peers(of, o_BHR, lse_BH)

    def capture_step(self, of: Any, batch: Any) -> None:
        """Replace DecodeEngine.capture_step."""
        if self.kind in (LOOPS, FLAG):
            capture(of, batch)

    def run_experts(self, of: Any, *args: Any) -> Any:
        """Replace Model.run_experts."""
        if self.kind in ("sleeps", "spins") and self.is_due():
            with record_range("moe"):
                stall(self.kind)
        return experts(of, *args)


@triton.jit
def _until_kernel(goes_on):
    flag = tl.load(goes_on, volatile=True)
    while flag == 0:
        flag = tl.load(goes_on, volatile=True)


@triton.jit
def _take_back_kernel(takes_back, peers, counters, N: tl.constexpr, N_BLOCK: tl.constexpr):
    n = tl.arange(0, N_BLOCK)
    others = (n > 0) & (n < N) & (tl.load(takes_back, volatile=True) != 0)
    tl.atomic_add(_get_peer_counters(peers, counters, n, N), -1, mask=others, sem="release", scope="sys")


def stall(kind: str) -> None:
    """Stall for ever."""
    while kind == "spins":
        pass
    while kind == "sleeps":
        time.sleep(60)


def install_fault(fault: Fault) -> None:
    """Install the fault in place of the worker's functions."""
    for of, name in (
        (worker.Worker, "write_progress"),
        (Model, "run_step"),
        (Model, "run_attention"),
        (Model, "run_experts"),
        (Group, "all_reduce"),
        (AllGatherReduceScatter, "merge_partials"),
        (DecodeEngine, "capture_step"),
    ):
        setattr(of, name, _make_method(getattr(fault, name)))
    SymmetricMemory.merge_partials = _make_method(fault.merge_by_peers)  # type: ignore[method-assign]


def _make_method(bound: Any) -> Any:
    return lambda self, *args, **kwargs: bound(self, *args, **kwargs)  # noqa: PLW0108 -- becomes a method


if __name__ == "__main__":
    if forks.ADDRESS_VARIABLE in os.environ and INSIDE not in sys.argv:
        sys.exit(as_fork.main([__spec__.name, *sys.argv[1:], INSIDE]))
    kind, rank, concurrency = os.environ[FAULT].split(":")
    install_fault(Fault(kind, int(concurrency), culprit=os.environ["RANK"] == rank))
    sys.exit(worker.main(sys.argv[1]))
