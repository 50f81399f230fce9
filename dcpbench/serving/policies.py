"""Make the scheduler of a scheduling policy: dcpbench's own, vLLM's or SGLang's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.names import SGLANG, VLLM
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.sglang_scheduler import SglangScheduler
from dcpbench.serving.vllm_scheduler import VllmScheduler

if TYPE_CHECKING:
    from dcpbench.serving.scheduler import SchedulerConfig

SCHEDULERS: dict[str, type[Scheduler]] = {VLLM: VllmScheduler, SGLANG: SglangScheduler}  # others: own scheduler


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """Return a scheduler with the policy of `config`. Raise UsageError for a layout that the policy does not model."""
    return SCHEDULERS.get(config.policy, Scheduler)(config)
