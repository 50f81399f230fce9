"""Bench collectives: the NVLink traffic of a decode step, collective by collective, on messages of B × 7168 numbers.

    all-gather       every rank has 1/N of the message, all get the whole
    reduce-scatter   every rank has a message, each gets 1/N of their sum
    all-to-all       every rank has a message, each gets its 1/N of all of them
    all-reduce       every rank has a message, all get the sum
    all-reduce-symm  the same over symmetric memory, in place of NCCL

    …-registered     one of the first four with input and output in memory that is registered with NCCL

The size of a message is the same for all: [B, width] in bf16. Received bytes are those of the best known algorithm, so
that received bytes / time is the bus bandwidth of nccl-tests: (N−1)/N of the message, twice that for all-reduce.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import FRESH_CALLS, compute_relative_error, make_checked_calls
from dcpbench.bench.operators.rendezvous import get_world_group
from dcpbench.exchange.registered_memory import get_shared_buffer
from dcpbench.exchange.symmetric_all_reduce import ReduceSpec, make_all_reduce
from dcpbench.kernels.symm_mem import BufferAllocator
from dcpbench.points.roofline import compute_all_reduce_work, compute_gather_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.bench_record import Case
    from dcpbench.bench.operators.calls import Calls
    from dcpbench.exchange.torch_collectives import Group

ROUNDING = 2.0**-8  # largest relative error of a number in bf16; of a sum over ranks it is mostly smaller


NCCL: dict[str, Callable[[Group, torch.Tensor], torch.Tensor]] = {
    "all-gather": lambda group, x: group.all_gather(x.flatten()[: x.numel() // group.size]),
    "reduce-scatter": lambda group, x: group.reduce_scatter(x.flatten()),
    "all-to-all": lambda group, x: group.all_to_all(x.view(group.size, -1)),
    "all-reduce": lambda group, x: group.all_reduce(x),
}
"""NCCL collectives of a message; names of other variants begin with one of these. The sum of all-reduce is in place as
in a step: repeated, it grows beyond the range of bf16, which costs no time.
"""


INTO: dict[str, Callable[[Group, torch.Tensor, torch.Tensor], torch.Tensor]] = {  # collectives into a flat buffer
    "all-gather": lambda group, x, out: group.all_gather(
        x.flatten()[: x.numel() // group.size], out.view(group.size, -1)
    ),
    "reduce-scatter": lambda group, x, out: group.reduce_scatter(x.flatten(), out[: x.numel() // group.size]),
    "all-to-all": lambda group, x, out: group.all_to_all(x.view(group.size, -1), out.view(group.size, -1)),
    "all-reduce": lambda group, x, _out: group.all_reduce(x),
}
SUFFIX = "-registered"


def compute_expected(variant: str, messages: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Return the expected result of a rank from all ranks' messages, in fp64."""
    flat_NM = torch.stack([m.flatten().double() for m in messages])
    parts_NNP = flat_NM.unflatten(1, (len(messages), -1))
    if variant.startswith("all-gather"):
        return parts_NNP[:, 0].flatten()
    if variant.startswith("all-to-all"):
        return parts_NNP[:, rank].flatten()
    total_M = flat_NM.sum(0)
    return total_M if variant.startswith("all-reduce") else total_M.unflatten(0, (len(messages), -1))[rank]


class RegisteredMemoryOwner:
    """Owner of registered memory for its own lifetime."""


class Collectives:
    """Build cases."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed, self.group = device, seed, get_world_group()
        self._memory_owner: RegisteredMemoryOwner | None = None

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case with sizes requests, width and ranks."""
        shape = int(case.sizes["requests"]), int(case.sizes["width"])
        messages = [self._make_message(shape, rank) for rank in range(self.group.size)]
        wanted = compute_expected(case.variant, messages, self.group.rank)
        mine = messages[self.group.rank]
        inputs = [mine.clone() for _ in range(case.calls or FRESH_CALLS)]
        collective: Callable[[torch.Tensor], torch.Tensor]
        if case.variant.endswith(SUFFIX):
            inputs, outputs = self._allocate_registered(mine, len(inputs))
            into = INTO[case.variant.removesuffix(SUFFIX)]
            places = {x.data_ptr(): out for x, out in zip(inputs, outputs, strict=True)}

            def run_into_place(x: torch.Tensor) -> torch.Tensor:
                return into(self.group, x, places[x.data_ptr()])

            collective = run_into_place

        elif case.variant in NCCL:
            collective = functools.partial(NCCL[case.variant], self.group)
        else:
            spec = ReduceSpec(rows=shape[0], columns=shape[1], dtype=mine.dtype, device=mine.device)
            collective = make_all_reduce("symm", self.group, spec)

        def compute_error(results: Sequence[tuple[torch.Tensor, ...]]) -> float:
            return max(compute_relative_error(got.flatten(), wanted) for (got,) in results)

        def copy_messages() -> None:  # after the poison, because in-place collectives have their result here
            for x in inputs:
                x.copy_(mine)

        work_of = compute_all_reduce_work if case.variant.startswith("all-reduce") else compute_gather_work
        return make_checked_calls(
            [lambda x=x: (collective(x),) for x in inputs],  # type: ignore[misc]
            compute_error,
            ROUNDING if "reduce" in case.variant else 0.0,
            work=work_of(mine.nbytes, self.group.size),
            before=copy_messages,
        )

    def _allocate_registered(self, message: torch.Tensor, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return `count` messages, and as much memory for their results, in registered memory lent to this bench."""

        def split_buffer(allocator: BufferAllocator) -> list[torch.Tensor]:
            return [allocator.allocate_tensor(message.numel(), dtype=message.dtype) for _ in range(2 * count)]

        size = BufferAllocator()
        split_buffer(size)
        lent = self._memory_owner = RegisteredMemoryOwner()  # the memory of the last case is free
        own = get_shared_buffer(
            lent, self.group, size.used, self.device, "a variant with -registered", "the one without"
        )
        parts = split_buffer(BufferAllocator(own))
        return [part.view_as(message) for part in parts[:count]], parts[count:]

    def _make_message(self, shape: tuple[int, int], rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(self.device)
