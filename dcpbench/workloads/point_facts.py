"""Fields of a record that describe the device and the weights of a point, for all workloads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.exchange.torch_collectives import gather_objects
from dcpbench.records.record import Conditions

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.workloads.session import Session


def count_device_allocations(device: torch.device) -> int:
    """Return the number of calls of cudaMalloc, cudaFree and the like so far, over all ranks."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(device)
    return sum(gather_objects(stats["num_device_alloc"] + stats["num_device_free"]))


def describe_weights(session: Session, **used: Any) -> Conditions:  # noqa: ANN401 -- fields of several types
    """Return the description of the weights, with further fields in `used`."""
    return Conditions(
        weights=session.point.weights,
        layers=session.plan.layers,
        layers_held=session.plan.layers_held,
        full_weights_bytes_per_gpu=session.plan.full_weight_bytes,
        **used,
    )


def list_warnings(**holds: bool) -> list[str]:
    """Return the names of the warnings that apply."""
    return [name for name, does in holds.items() if does]


def list_device_warnings(point: Point, device: torch.device) -> list[str]:
    """Return the warnings of a point that did not run on a GPU."""
    if device.type != "cpu":
        return []
    return ["cpu", "oversubscribed"] if point.world > (os.cpu_count() or 1) else ["cpu"]


def get_memory_in_use(device: torch.device) -> int | None:
    """Return the bytes in use on the fullest GPU, including NCCL, graphs and the context; None on CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(gather_objects(total - free))
