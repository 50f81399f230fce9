"""Replace torch.distributed in a dry run: NCCL's groups use gloo, and waits that NCCL's collectives would cause are reported.

A collective of NCCL is queued on a stream, so the host does not wait for it. It does wait for a barrier, and for objects,
which travel through device tensors. Groups of another backend than NCCL, such as "fake", are left as they are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dcpbench.syncs import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.dry_run import DryRun
    from dcpbench.syncs.dry_run.virtual_cuda import Patches

NCCL, GLOO = "nccl", "gloo"
MEASURED_ITERATIONS, SAMPLE_RATE = 10, 100  # DDP waits in the first ones and each 100th (torch's reducer.hpp)


def install_distributed(patches: Patches, run: DryRun) -> None:
    """Replace parts of torch.distributed until `patches.restore()`."""
    _apply_group_patches(patches, run)
    _apply_data_parallel_patches(patches, run)


class _Barrier:
    """Wrap the work of an asynchronous barrier: its wait() blocks the host."""

    def __init__(self, work: Any, run: DryRun) -> None:
        self._work, self._run = work, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Report the wait, and wait for the other ranks."""
        _record_barrier(self._run)
        return self._work.wait(*args, **kwargs)


def _record_barrier(run: DryRun) -> None:
    run.record_named_wait(rules.STREAM, "torch.distributed.barrier", "cudaStreamSynchronize")


def _apply_group_patches(patches: Patches, run: DryRun) -> None:
    from torch import distributed as dist
    from torch.distributed import distributed_c10d as c10d

    start, group, barrier = c10d.init_process_group, c10d.new_group, c10d.barrier
    backends: dict[int, str] = {}  # id of a group -> backend that the program requested

    def is_on_gpu(made: Any) -> bool:
        """Return True if barriers and objects of the group go through the GPU: torch prefers the host if both are
        possible.
        """
        return backends.get(id(made or c10d.group.WORLD)) == NCCL

    @functools.wraps(start)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        _drop_devices(kwargs)
        start(_choose_backend(backend) or GLOO, *args, **kwargs)
        backends[id(c10d.group.WORLD)] = str(backend or "").lower()

    @functools.wraps(group)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        _drop_devices(kwargs)
        made = group(ranks, timeout, _choose_backend(backend), *args, **kwargs)
        backends[id(made)] = str(backend).lower() if backend else backends.get(id(c10d.group.WORLD), "")
        return made

    @functools.wraps(barrier)
    def wait_at_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        waits = is_on_gpu(group) or (device_ids and NCCL in backends.get(id(group or c10d.group.WORLD), ""))
        if waits and not async_op:
            _record_barrier(run)
        work = barrier(group, async_op)
        return _Barrier(work, run) if waits and async_op else work

    for module in (c10d, dist):
        patches.set_attributes(
            module, init_process_group=init_process_group, new_group=new_group, barrier=wait_at_barrier
        )
    if hasattr(dist, "Work"):
        _apply_work_patches(patches, run, lambda: NCCL in backends.values())
    patches.set_existing(c10d, _get_object_coll_device=lambda group=None: "cuda" if is_on_gpu(group) else "cpu")


def _apply_work_patches(patches: Patches, run: DryRun, has_nccl: Callable[[], bool]) -> None:
    """Report a wait for NCCL's work with a time limit, for which torch polls the work on the host."""
    from torch import distributed as dist

    wait = dist.Work.wait

    def wait_for_work(work: Any, *limit: Any, **named: Any) -> Any:
        if any((*limit, *named.values())) and has_nccl():  # a limit of 0 is none
            run.record_named_wait(rules.EVENT, "torch.distributed.Work.wait", "cudaEventQuery")
        return wait(work, *limit, **named)

    # gloo's own blocking of a stream needs the memory of a GPU.
    patches.set_existing(dist.Work, wait=wait_for_work, block_current_stream=lambda work: work.wait())


def _choose_backend(backend: Any) -> str | None:
    """Return the backend with which a group works without a GPU; None for torch's default."""
    return GLOO if backend and NCCL in str(backend).lower() else backend


def _drop_devices(options: dict[str, Any]) -> None:
    """Remove options that bind a group to a GPU, which gloo does not take."""
    for name in ("device_id", "pg_options"):
        options.pop(name, None)


def _apply_data_parallel_patches(patches: Patches, run: DryRun) -> None:
    """Report where DistributedDataParallel waits to read the times of an iteration before; a build for the CPU has no timer."""
    from torch import distributed as dist

    if not hasattr(dist, "Logger"):
        return
    seen: dict[int, int] = {}  # id of a logger -> iterations

    def set_runtime_stats_and_log(self: Any) -> None:
        iteration = seen[id(self)] = seen.get(id(self), -1) + 1
        if 0 < iteration <= MEASURED_ITERATIONS or (iteration and iteration % SAMPLE_RATE == 0):
            name = "torch.nn.parallel.DistributedDataParallel"
            run.record_named_wait(rules.EVENT, name, "cudaEventSynchronize", explicit=False)

    patches.set_attributes(dist.Logger, set_runtime_stats_and_log=set_runtime_stats_and_log)
