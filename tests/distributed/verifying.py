"""Checks of engines against checkpoints, in this process or by a job of several ranks, and greedy texts of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.launch import launcher
from dcpbench.launch.jobs import Check, Job, decode_check
from dcpbench.launch.torchrun import RendezvousOptions
from dcpbench.models import load_shape
from dcpbench.points.settings import Settings
from dcpbench.records.folder import FAILED_FILE
from dcpbench.records.runs import read_last_records
from dcpbench.workloads import oracle
from dcpbench.workloads.checkpoint_checks import compare_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.points.prompts import Prompts


def compare_alone(point: Point, prompts: Prompts, new: int) -> dict[str, Check]:
    """Return the checks of a point of one rank against its checkpoint, by name, as they are read from checks.jsonl."""
    job = Job(
        kind="verify",
        tag="t",
        folder="",
        device="cpu",
        points=[point],
        settings=Settings(),
        prompts=prompts,
        new_tokens=new,
    )
    checks = compare_checkpoint(point, load_shape(point.weights), job, 0, torch.device("cpu"))
    return {check.name: check for check in msgspec.json.decode(msgspec.json.encode(checks), type=list[Check])}


def verify_by_job(
    points: Sequence[Point], prompts: Prompts, new: int, folder: Path, worker: str = "tests.distributed.rank"
) -> list[Check]:
    """Run `verify` on points of several ranks, in this order; return all checks. No point may fail."""
    options = launcher.JobOptions(
        folder=folder,
        settings=Settings(),
        device="cpu",
        worker=worker,
        kind="verify",
        prompts=prompts,
        new_tokens=new,
    )
    launcher.run_points(list(points), options, RendezvousOptions(), lambda _: None)
    assert {r.point.get_key(): r.reason for r in read_last_records(folder, FAILED_FILE).values()} == {}, (
        "no point failed"
    )
    return [decode_check(line) for line in (folder / "checks.jsonl").read_bytes().splitlines()]


def continue_greedily(folder: str, prompt: tuple[int, ...], new: int) -> list[int]:
    """Return the new tokens that transformers in fp32 gives one by one."""
    text = list(prompt)
    for _ in range(new):
        text.append(int(oracle.compute_logits(folder, text)[-1].argmax()))
    return text[len(prompt) :]
