"""Run the ranks of test_prefill.py, and define the load that the test and its ranks share.

Started as `python -m tests.distributed.prefill_ranks WORLD FOLDER`, where FOLDER has the checkpoints `v3` and `v2`;
ranks are forks of that process, so that torch is imported once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dcpbench.engine.piecewise_graph import Pieces
from dcpbench.engine.prefill import Prefiller
from dcpbench.kernels import kv_gather
from dcpbench.kernels.moe.routing import NO_EXPERT
from dcpbench.models import load_shape
from dcpbench.points import memory
from dcpbench.points.batches import compute_chunk_rows
from dcpbench.points.budget import plan_whole
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.workloads.session import build_session
from tests.distributed.forked import fork_ranks
from tests.unit.engine_builder import CPU
from tests.unit.prefill_builder import Prompt, make_prompt_tokens, run_step

LENGTH = 40
CONTEXT = 96

Step = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
LOAD: tuple[tuple[Step, ...], tuple[Step, ...]] = (
    (((), ((0, 16),)), ((), ((0, 16), (1, 16))), ((), ((0, 5), (1, 16))), ((0,), ((1, 5),)), ((0, 1), ())),
    (((), ((0, 32),)), ((), ((1, 3),)), ((1,), ((0, 8),)), ((1,), ()), ((), ())),
)
"""For each of two replicas, steps of prompts that decode a token, and of prompts with the tokens of their chunk.

Chunks begin at multiples of 16, the largest page_size · dcp here. Rows are 16, 32, 21, 6, 2 and 32, 3, 9, 1, 0, so that
with attention DP both are padded, and padding rows go to no expert. The third step has two prefixes, 32 and 16 tokens."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Describe a layout with its storage and exchange on a checkpoint, and how prefixes are gathered."""

    model: str
    layout: Layout
    gather: str = "nccl"
    page_size: int = 4
    interleave: int = 1
    window: int = CONTEXT  # tokens
    exchange: str = "ag_rs"
    q_replicate: bool = False
    project_first: bool = False
    all_reduce: str = "nccl"
    kv: str = ""
    """dtype of stored rows, such as `fp8`; chunks attend to stored rows of their prefix, and to their own rows before storing."""
    pieces: bool = False  # True if steps run in pieces, as they are captured on GPUs

    @property
    def truth(self) -> str:
        """Return the name of the expected logits: those of transformers, or with fp8 rows those of one rank with all rows."""
        return f"{self.model}-{self.kv}" if self.kv else self.model

    def point(self, folder: Path) -> Point:
        """Return the point in fp32."""
        layout, weights = self.layout, str(folder / self.model)
        return Point(
            model=weights,
            weights=weights,
            tp=layout.tp,
            dp=layout.dp,
            dcp=layout.dcp,
            concurrency=2 * layout.dp,
            context=CONTEXT,
            backend="reference",
            dtype="fp32",
            kv_dtype=self.kv,
            page_size=self.page_size,
            interleave=self.interleave,
            exchange=self.exchange if layout.dcp > 1 else "none",
            q_replicate=self.q_replicate,
            project_first=self.project_first,
            all_reduce=self.all_reduce,
        )


CASES = {
    2: [
        Case("v3", Layout(2)),
        Case("v3", Layout(2, dcp=2), window=8),
        Case("v3", Layout(2, dcp=2), "direct", q_replicate=True, exchange="a2a"),
        Case("v2", Layout(2, dcp=2), "direct", interleave=2, window=24, project_first=True),
        Case("v2", Layout(2, dp=2), window=12),
        Case("v3", Layout(2, dp=2), window=12, pieces=True),
        Case("v2", Layout(2, dcp=2), "direct", window=16, exchange="symm", all_reduce="symm"),
        Case("v3", Layout(2, dcp=2), window=8, kv="fp8"),
        Case("v3", Layout(2, dcp=2), "direct", interleave=2, window=24, kv="fp8"),
        Case("v3", Layout(2, dcp=2), window=16, pieces=True),
        Case("v2", Layout(2, dcp=2), "direct", q_replicate=True, pieces=True),
    ],
    4: [
        Case("v3", Layout(4, dcp=4), "direct", window=16),
        Case("v2", Layout(4, dcp=4), interleave=4, window=32, q_replicate=True, project_first=True, exchange="a2a"),
        Case("v3", Layout(4, dp=2, dcp=2), interleave=2, window=24),
        Case("v2", Layout(4, dp=2, dcp=2), "direct", page_size=1),
        Case("v3", Layout(4, dcp=2), "direct", page_size=8, window=16, q_replicate=True),
        Case("v3", Layout(4, dp=2, dcp=2), window=16, kv="fp8"),
        Case("v3", Layout(4, dp=2, dcp=2), kv="fp8", pieces=True),
    ],
}


def make_prompts(replica: int) -> list[list[int]]:
    """Return two prompts, different for each replica."""
    return [make_prompt_tokens(2 * replica + number, LENGTH) for number in range(2)]


def compute_error(case: Case, folder: Path, truth: dict[str, torch.Tensor], rank: int) -> float:
    """Return the largest difference of a logit of any step from the truth [replicas · prompts, tokens, vocab]."""
    point, shape = case.point(folder), load_shape(str(folder / case.model))
    session = build_session(point, shape, plan_whole(point, [CONTEXT] * 2, shape), rank=rank, device=CPU, seed=0)
    engine = session.engine
    with mock.patch.object(memory, "PREFILL_WINDOW", case.window):
        prefiller = Prefiller(engine.model, backend="sdpa", tokens=CONTEXT, gather=case.gather)
    pieces = Pieces(prefiller, None) if case.pieces else None
    replica = rank // case.layout.attn_tp
    requests = [Prompt.admit(engine, tokens) for tokens in make_prompts(replica)]
    known = truth[case.truth][2 * replica : 2 * replica + 2]
    worst = 0.0
    for steps in zip(*LOAD[: case.layout.dp], strict=True):
        rows = [len(decodes) + sum(count for _, count in chunks) for decodes, chunks in steps]
        live = [compute_chunk_rows(count) if pieces else count for count in rows]
        engine.model.chosen_experts = chosen = []
        decodes, chunks = steps[replica]
        expected = [known[n, requests[n].stored] for n in decodes]
        expected += [known[n, requests[n].stored + i] for n, count in chunks for i in range(count)]
        logits = run_step(
            engine,
            prefiller,
            [requests[n] for n in decodes],
            [(requests[n], count) for n, count in chunks],
            padding=max(rows) - rows[replica],
            pieces=pieces,
            live=live if case.layout.dp > 1 else None,
        )
        assert len(logits) == (compute_chunk_rows(max(rows)) if pieces else max(rows))
        if case.layout.dp > 1:
            assert all(count_unrouted(ids_Tk) == [max(live) - count for count in live] for _, ids_Tk in chosen)
        assert bool(logits.isfinite().all())
        if expected:
            worst = max(worst, float((logits[: len(expected)] - torch.stack(expected)).abs().max()))
    return worst


def count_unrouted(ids_Tk: torch.Tensor) -> list[int]:
    """Return the number of rows without an expert for each of two replicas."""
    return (ids_Tk == NO_EXPERT).all(-1).view(2, -1).sum(-1).tolist()


def compute_logits_alone(case: Case, folder: Path, replica: int) -> torch.Tensor:
    """Return the logits [prompts, tokens, vocab] of a replica's prompts, in the same steps on one rank; NaN if not
    computed.
    """
    point, shape = case.point(folder), load_shape(str(folder / case.model))
    engine = build_session(point, shape, plan_whole(point, [CONTEXT] * 2, shape), rank=0, device=CPU, seed=0).engine
    prefiller = Prefiller(engine.model, backend="sdpa", tokens=CONTEXT)
    requests = [Prompt.admit(engine, tokens) for tokens in make_prompts(replica)]
    found = torch.full((2, LENGTH, shape.vocab), torch.nan)
    for decodes, chunks in LOAD[replica]:
        places = [(n, requests[n].stored) for n in decodes]
        places += [(n, requests[n].stored + i) for n, count in chunks for i in range(count)]
        if places:
            logits = run_step(
                engine, prefiller, [requests[n] for n in decodes], [(requests[n], count) for n, count in chunks]
            )
            for place, row in zip(places, logits, strict=True):
                found[place] = row
    return found


def main(rank: int, world: int, folder: Path) -> None:
    """Run every case, and save its error."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    truth = torch.load(folder / "truth.pt")
    found = [compute_error(case, folder, truth, rank) for case in CASES[world]]
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    kv_gather.ROWS = 256  # fewer programs, which are faster in Triton's interpreter
    fork_ranks(main, int(sys.argv[1]), int(sys.argv[1]), Path(sys.argv[2]))
