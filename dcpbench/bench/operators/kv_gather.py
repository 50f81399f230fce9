"""Bench kv-gather: gather the KV prefix of several requests, interleaved on the ranks of a DCP group, into token order.

    nccl     pack this rank's rows, all-gather the parts padded to the largest, put them in token order
    direct   pack this rank's rows where peers can read them, barrier, read all parts in token order, barrier

The transferred data, the received parts (nccl) or the own part (direct), lies in a buffer:

    pool       a reserve of symmetric memory, allocated at start
    outgrown   the reserve is too small: symmetric memory, allocated at run time in every eager call and freed again
    registered           a reserve registered with NCCL, allocated at start, including the own part (nccl only)
    registered-outgrown  the registered reserve is too small: allocated, registered and freed in every eager call
    plain      no reserve: torch's caching allocator for nccl; for direct as `outgrown`, because peers need such memory

A captured call has allocated its buffer before. The eager time of `outgrown` minus its time in a graph is therefore the
cost of the allocation, and minus that of `pool` the saving of a larger reserve.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import Calls, count_cold_sets
from dcpbench.bench.operators.rendezvous import get_world_group
from dcpbench.engine.request_pool import RequestPool
from dcpbench.errors import CapacityError
from dcpbench.exchange.prefix import Gatherer, Task, allocate_symmetric
from dcpbench.exchange.registered_memory import RegisteredBuffer, register_buffer
from dcpbench.kernels.kv_gather import make_request_table
from dcpbench.kernels.kv_indices import DcpShard, write_pages
from dcpbench.models.shapes import KV_WIDTH
from dcpbench.points.layout import Prefix
from dcpbench.points.memory import GIB
from dcpbench.points.roofline import OperatorCost
from dcpbench.serving.allocator import DcpAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from dcpbench.bench.bench_record import Case
    from dcpbench.exchange.torch_collectives import Group
    from dcpbench.kernels.symm_mem import Peers

    Buffer = Peers | RegisteredBuffer | torch.Tensor
    Lend = Callable[[], AbstractContextManager[Buffer]]

PAGE = 64
SPARE_ROWS = 8  # rows after the gathered ones, which must stay unchanged
POISON = 0x7FEB  # bf16 bits of a NaN that no row holds
ALLOCATING_CALLS = 4  # most calls of a pass in which each allocates symmetric memory, which takes milliseconds
TURNS = 4  # parts in which requests are given their pages, so that those of one lie apart


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors of a size."""

    task: Task
    wanted: torch.Tensor  # [tokens, 576]: all tokens' rows in token order
    pools: torch.Tensor  # [layers, rows, 576]: this rank's, with rows of other requests that are NaN
    results: torch.Tensor  # [layers, tokens and spare rows, 576]

    def check_pass(self, layers: int, run: Callable[[], None]) -> str:
        """Poison the results of `layers` layers, run a pass, compare every bit."""
        got_LTQ = self.results[:layers].view(torch.int16)
        got_LTQ.fill_(POISON)
        run()
        wanted_TQ = self.wanted.view(torch.int16)
        for layer, got_TQ in enumerate(got_LTQ):
            differs_T = (got_TQ[: len(wanted_TQ)] != wanted_TQ).any(dim=1)
            if count := int(differs_T.sum()):
                first = int(differs_T.nonzero()[0])
                return f"layer {layer}: {count} of {len(wanted_TQ)} rows differ, the first is token {first}"
            if bool((got_TQ[len(wanted_TQ) :] != POISON).any()):
                return f"layer {layer}: it wrote behind the last row"
        return ""


class KvGather:
    """Build cases; the reserve and the last size's tensors are kept."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed, self.group = device, seed, get_world_group()
        self._reserve: Peers | None = None
        self._registered: RegisteredBuffer | None = None
        self._key: tuple[object, ...] = ()
        self._inputs: Inputs | None = None

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case with sizes requests, tokens (of all of them), ranks, buffer and pool_bytes."""
        key = (case.sizes["requests"], case.sizes["tokens"], case.calls)
        if key != self._key or self._inputs is None:
            self._inputs = None  # frees the old tensors before the new ones are made
            self._inputs, self._key = self._make_inputs(case), key
        inputs, task = self._inputs, self._inputs.task
        lend, kept = self._make_buffers(case, task)
        allocates = str(case.sizes["buffer"]).endswith("outgrown") or (case.sizes["buffer"], case.variant) == (
            "plain",
            "direct",
        )
        layers = min(len(inputs.pools), ALLOCATING_CALLS) if allocates else len(inputs.pools)
        row_bytes = KV_WIDTH * task.dtype.itemsize
        own = len(task.rows)
        received = (task.prefix.tokens - own) * row_bytes
        return Calls(
            calls=self._make_calls(case.variant, inputs, lend)[:layers],
            to_capture=self._make_calls(case.variant, inputs, lambda: contextlib.nullcontext(kept))[:layers],
            check=functools.partial(inputs.check_pass, layers),
            written_bytes=layers * (own + task.prefix.tokens) * row_bytes,
            work=OperatorCost(
                memory_bytes=(own + task.prefix.tokens) * row_bytes,
                received_bytes=received,
                comm_bytes=(self.group.size - 1) * task.compute_part_bytes() if case.variant == "nccl" else received,
                barriers=1,
            ),
        )

    def _make_buffers(self, case: Case, task: Task) -> tuple[Lend, Buffer]:
        """Return (context manager that provides the buffer of an eager call, buffer of captured calls)."""
        nbytes, kind = task.compute_buffer_bytes(case.variant), case.sizes["buffer"]
        if kind == "pool":
            reserve, pool_bytes = self._reserve, int(case.sizes["pool_bytes"])
            if reserve is None or len(reserve.own) != pool_bytes:
                reserve = self._reserve = allocate_symmetric(self.group, pool_bytes, self.device)
            assert nbytes <= len(reserve.own), "the case says pool, and the pool is too small"
            return lambda: contextlib.nullcontext(reserve), reserve
        if str(kind).startswith("registered"):
            need = task.compute_registered_bytes()
            outgrown = kind == "registered-outgrown"
            kept = self._get_window(need if outgrown else int(case.sizes["pool_bytes"]))
            assert need <= len(kept.own), "the case says registered, and the pool is too small"
            return (lambda: self._register_window(need)) if outgrown else (lambda: contextlib.nullcontext(kept)), kept
        if kind == "plain" and case.variant == "nccl":
            plain = functools.partial(torch.empty, nbytes, dtype=torch.uint8, device=self.device)
            return lambda: contextlib.nullcontext(plain()), plain()
        return lambda: self._allocate_peers(nbytes), allocate_symmetric(self.group, nbytes, self.device)

    def _get_window(self, nbytes: int) -> RegisteredBuffer:
        """Return the kept registered buffer of this size."""
        if self._registered is None or len(self._registered.own) != nbytes:
            if self._registered is not None:
                self._registered.close()
                self._registered = None
            self._registered = self._open_window(nbytes)
        return self._registered

    def _open_window(self, nbytes: int) -> RegisteredBuffer:
        return register_buffer(self.group, nbytes, self.device, "--buffer registered", "--buffer pool,plain")

    @contextlib.contextmanager
    def _register_window(self, nbytes: int) -> Iterator[RegisteredBuffer]:
        """Yield a registered buffer for one call; closing it waits for the work on it."""
        window = self._open_window(nbytes)
        yield window
        window.close()

    @contextlib.contextmanager
    def _allocate_peers(self, nbytes: int) -> Iterator[Peers]:
        """Yield symmetric memory, and free it after waiting for the work on it, which no allocator would do."""
        yield allocate_symmetric(self.group, nbytes, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _make_calls(self, way: str, inputs: Inputs, lend: Lend) -> list[Callable[[], None]]:
        gatherer = Gatherer(self.group, way, self.device)

        def gather_layer(kv_KQ: torch.Tensor, out_TQ: torch.Tensor) -> None:
            with lend() as buffer:
                gatherer.gather_layer(inputs.task, kv_KQ, out_TQ, buffer)

        return [functools.partial(gather_layer, kv, out) for kv, out in zip(inputs.pools, inputs.results, strict=True)]

    def _make_inputs(self, case: Case) -> Inputs:
        group = self.group
        prefix = Prefix.make_uneven(int(case.sizes["tokens"]), int(case.sizes["requests"]), group.size)
        rows, pool_rows = find_stored_rows(prefix, group, self.device)
        layers = case.calls or count_cold_sets(prefix.part_rows * KV_WIDTH * 2, self.device)
        sizes = ((layers, pool_rows, KV_WIDTH), (layers, prefix.tokens + SPARE_ROWS, KV_WIDTH))
        generator = torch.Generator(self.device).manual_seed(self.seed)
        try:
            rows_TQ = torch.randn(prefix.tokens, KV_WIDTH, generator=generator, device=self.device).to(torch.bfloat16)
            kv_LKQ, out_LTQ = (torch.empty(size, dtype=torch.bfloat16, device=self.device) for size in sizes)
        except torch.OutOfMemoryError as e:
            need = sum(math.prod(size) for size in sizes) * 2 / GIB
            raise CapacityError(f"pools and results of {need:.1f} GiB do not fit; lower --tokens or --layers.") from e
        kv_LKQ.view(torch.int16).fill_(POISON)
        kv_LKQ[:, rows.long()] = rows_TQ[list_own_tokens(prefix, group.rank).to(self.device)]
        table = make_request_table(prefix, self.device)
        task = Task(prefix=prefix, table=table, rows=rows, width=KV_WIDTH, dtype=torch.bfloat16)
        return Inputs(task, rows_TQ, kv_LKQ, out_LTQ)


def find_stored_rows(prefix: Prefix, group: Group, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return (rows of this rank's pool that hold the prefix, in token order; rows of the pool), by the engine's pools."""
    lengths = prefix.lengths
    pages = sum(-(-length // (PAGE * group.size)) for length in lengths)
    allocator = DcpAllocator(pages + 1, PAGE, group.size)
    request_pool = RequestPool(len(lengths), max(lengths), device)
    slots = [request_pool.allocate_slot() for _ in lengths]
    allocations = [allocator.allocate(-(-length // TURNS)) if length else None for length in lengths]
    for turn in range(2, TURNS + 1):
        for allocation, length in zip(allocations, lengths, strict=True):
            if allocation is not None:
                allocator.extend(allocation, -(-length * turn // TURNS) - allocation.tokens)
    for slot, allocation in zip(slots, allocations, strict=True):
        if allocation is not None:
            request_pool.set_locs(slot, 0, allocation.compute_locs(0, allocation.tokens))
    own = prefix.list_first_rows(group.rank)[-1]
    rows = torch.empty(own, dtype=torch.int32, device=device)
    ends, shares = (torch.empty(len(lengths) + 1, dtype=torch.int32, device=device) for _ in range(2))
    shard = DcpShard(rank=group.rank, dcp=group.size)  # of pages of one row: the indices are rows
    slots_B, lengths_B = (torch.tensor(numbers, device=device) for numbers in (slots, lengths))
    write_pages(rows, ends, shares, request_pool.table, slots_B, lengths_B, shard)
    return rows, (pages + 1) * PAGE


def list_own_tokens(prefix: Prefix, rank: int) -> torch.Tensor:
    """Return a rank's tokens, int64, in the numbering of all requests' tokens."""
    requests = zip(prefix.starts, prefix.lengths, strict=False)
    shares = [torch.arange(start + min(rank, length), start + length, prefix.dcp) for start, length in requests]
    return torch.cat(shares)
