"""Compare logits and greedy tokens with `transformers` for models with grouped-query attention on every kind of
layout.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from dcpbench.engine import model
from dcpbench.engine.attention import gqa
from dcpbench.kernels.gqa import split_rows
from dcpbench.launch.jobs import Check, Job
from dcpbench.models import load_shape
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.workloads import verify as workload
from tests.distributed.checkpoints import VOCAB, convert_to_fp8, write_llama, write_qwen3, write_qwen3_moe
from tests.distributed.verifying import compare_alone, verify_by_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.distributed

PROMPTS = tuple(tuple((31 * i + 7 * k) % VOCAB for k in range(n)) for i, n in enumerate((13, 1, 3, 4)))
NEW = 5
LIMIT = 1e-4

PLAIN = {"page_size": 1, "interleave": 1}
PAGED = {"page_size": 4, "interleave": 1}
STRIPED = {"page_size": 4, "interleave": 2}

NONE: dict[str, object] = {"exchange": "none"}
AG_RS: dict[str, object] = {"exchange": "ag_rs"}
A2A: dict[str, object] = {"exchange": "a2a"}
SYMM: dict[str, object] = {"exchange": "symm"}
REPLICATED = {"q_replicate": True}
CUT = {"ep": "1"}
WHOLE = {"ep": "tp"}

WIDE = {"head_dim": 128}
TIED = {"tie_word_embeddings": True}

GRID = {
    Layout(1): [
        (functools.partial(write_qwen3, kv_heads=2, **TIED), PAGED, NONE),
        (functools.partial(write_qwen3_moe, kv_heads=1, **WIDE), PLAIN, NONE),
        (functools.partial(write_qwen3_moe, kv_heads=4, norm_topk_prob=False), PAGED, NONE),
        (functools.partial(write_llama, kv_heads=8, **WIDE), PAGED, NONE),
    ],
    Layout(2): [
        (functools.partial(write_qwen3, kv_heads=1, **WIDE), PAGED, NONE),
        (functools.partial(write_qwen3_moe, kv_heads=4), PLAIN, NONE | CUT),
        (functools.partial(write_llama, kv_heads=2, **TIED), PAGED, NONE),
    ],
    Layout(2, dcp=2): [
        (functools.partial(write_qwen3, kv_heads=1), STRIPED, AG_RS),
        (functools.partial(write_qwen3_moe, kv_heads=1, **WIDE), PLAIN, A2A | REPLICATED | WHOLE),
        (functools.partial(write_llama, kv_heads=1, **TIED), PAGED, A2A),
    ],
    Layout(2, dp=2): [(functools.partial(write_qwen3_moe, kv_heads=2), PAGED, NONE | WHOLE)],
    Layout(4): [
        (functools.partial(write_qwen3, kv_heads=2), PAGED, NONE),
        (functools.partial(write_llama, kv_heads=8), PLAIN, NONE),
    ],
    Layout(4, dcp=2): [
        (functools.partial(write_qwen3, kv_heads=2, **WIDE), STRIPED, A2A | REPLICATED),
        (functools.partial(write_qwen3_moe, kv_heads=1), PAGED, AG_RS | CUT),
        (functools.partial(write_llama, kv_heads=2), PLAIN, AG_RS | REPLICATED),
    ],
    Layout(4, dcp=4): [
        (functools.partial(write_qwen3_moe, kv_heads=1), STRIPED, A2A | WHOLE),
        (functools.partial(write_llama, kv_heads=1, **WIDE), PLAIN, AG_RS),
    ],
    Layout(4, dp=2, dcp=2): [(functools.partial(write_qwen3_moe, kv_heads=1, **TIED), PAGED, A2A | CUT)],
    Layout(8): [
        (functools.partial(write_qwen3, kv_heads=4), PAGED, NONE),
        (functools.partial(write_llama, kv_heads=8), PAGED, NONE),
    ],
    Layout(8, dcp=2): [(functools.partial(write_qwen3_moe, kv_heads=4), STRIPED, AG_RS | WHOLE)],
    Layout(8, dcp=4): [(functools.partial(write_llama, kv_heads=2), PAGED, A2A)],
    Layout(8, dcp=8): [(functools.partial(write_qwen3, kv_heads=1, **TIED), STRIPED, AG_RS)],
}
"""Checkpoint, storage and path of each point: more and fewer ranks than KV heads, heads of 64 and 128 columns, tied and
untied embeddings, every exchange, and pages and stripes of several sizes."""


def make_point(folder: Path, layout: Layout, storage: dict[str, int], exchange: dict[str, Any], backend: str) -> Point:
    """Return a point in fp32 on the checkpoint in a folder."""
    return Point(
        model=str(folder),
        weights=str(folder),
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        concurrency=4,
        context=37,
        backend=backend,
        dtype="fp32",
        **storage,
        **exchange,
    )


def write_points(tp: int, folder: Path, backend: str = "reference") -> list[Point]:
    """Write the checkpoints of all points on `tp` ranks, and return the points."""
    points = []
    for layout, cases in GRID.items():
        for write, storage, exchange in cases if layout.tp == tp else ():
            at = folder / f"checkpoint{len(points)}"
            write(at)
            points.append(make_point(at, layout, storage, exchange, backend))
    return points


def verify_alone(tested: Point) -> list[Check]:
    """Return the checks of `verify` for a point of one rank, in this process."""
    job = Job(
        kind="verify",
        tag="t",
        folder="",
        device="cpu",
        points=[tested],
        settings=Settings(),
        prompts=PROMPTS,
        new_tokens=NEW,
    )
    return workload.run(tested, load_shape(tested.weights), job, rank=0, device=torch.device("cpu"))


def assert_verified(points: list[Point], checks: list[Check], tokens_of_a_rank: int) -> None:
    """Check the results of all points, in order."""
    left = list(checks)
    for p in points:
        dense = load_shape(p.model).experts == 0
        names = ["attention", "kv_write", "layers", "logits", "tokens", *([] if dense else ["routing"])]
        made, left = left[: len(names)], left[len(names) :]
        assert [c.name for c in made] == names, p
        assert {(c.layout, c.exchange) for c in made} == {(str(p.layout), p.format_exchange_label() or "none")}
        found = {c.name: c for c in made}
        assert found["attention"].error <= LIMIT, p
        assert found["kv_write"].error == 0, p
        assert found["layers"].error <= found["layers"].limit <= LIMIT, (p, found["layers"])
        assert found["logits"].error <= LIMIT, p
        assert found["tokens"].error == 0, p
        assert found["tokens"].detail.startswith(
            f"of {tokens_of_a_rank * p.layout.attn_tp} greedy tokens on all ranks;"
        )
        assert dense or found["routing"].error == 0, p
    assert left == []


@pytest.mark.parametrize("tp", [1, 2, *(pytest.param(tp, marks=pytest.mark.long) for tp in (4, 8))])
def test_logits_and_greedy_tokens_equal_those_of_transformers(tp: int, tmp_path: Path) -> None:
    """Start four requests three steps apart, so that batches hold padding rows, token by token. Each of the 4 requests
    yields 5 tokens on each of the tp / dp ranks of its replica: 20 · tp / dp are compared.
    """
    points = write_points(tp, tmp_path)
    if tp == 1:
        checks = [check for p in points for check in verify_alone(p)]
    else:
        checks = verify_by_job(points, PROMPTS, NEW, tmp_path / "run")
    assert_verified(points, checks, len(PROMPTS) * NEW)


def draw_point(draw: random.Random, tp: int, folder: Path) -> Point | None:
    """Write a random checkpoint, and return a random point on it; None if its KV heads do not divide over the ranks."""
    kv_heads, dp = draw.choice((1, 2, 4, 8)), draw.choice([dp for dp in (1, 1, 2, 4) if tp % dp == 0])
    ranks = tp // dp
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        return None
    dcp = draw.choice([dcp for dcp in (1, 2, 4, 8) if max(1, ranks // kv_heads) % dcp == 0])
    changed = {
        "head_dim": draw.choice((64, 128)),
        "tie_word_embeddings": draw.choice((False, True)),
        "num_hidden_layers": draw.choice((1, 2, 3)),
        "hidden_size": draw.choice((64, 96, 160)),
        "seed": draw.randrange(1000),
    }
    path: dict[str, object] = dict(NONE)
    if dcp > 1:
        path = {"exchange": draw.choice(("ag_rs", "a2a", "symm")), "q_replicate": draw.choice((False, True))}
    write: Any = draw.choice((write_qwen3, write_qwen3_moe, write_llama))
    if write is write_qwen3_moe:
        changed["norm_topk_prob"] = draw.choice((False, True))
        path["ep"] = draw.choice(("1", "tp"))
    write(folder, kv_heads, **changed)
    page = draw.choice((1, 2, 4, 16))
    storage = {"page_size": page, "interleave": draw.choice([n for n in (1, 2, 4, 16) if page % n == 0])}
    return make_point(folder, Layout(tp, dp=dp, dcp=dcp), storage, path, "reference")


@pytest.mark.long
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_random_models_and_layouts_agree_with_transformers(tp: int, tmp_path: Path) -> None:
    """Ten points of one job: sizes of models, layouts, pages, stripes and exchanges at random."""
    draw = random.Random(tp)
    drawn = (draw_point(draw, tp, tmp_path / f"checkpoint{number}") for number in range(1000))
    points = list(itertools.islice((one for one in drawn if one is not None), 10))
    assert len({str(p.layout) for p in points}) > 1
    assert_verified(points, verify_by_job(points, PROMPTS, NEW, tmp_path / "run"), len(PROMPTS) * NEW)


@pytest.mark.long
def test_triton_backend_and_symmetric_memory_agree_with_transformers(tmp_path: Path) -> None:
    """Use few and short prompts, because Triton's interpreter is slow."""
    write: Callable[[Path], None] = functools.partial(write_qwen3, kv_heads=1, num_hidden_layers=1)
    write(tmp_path / "checkpoint")
    prompts, new = ((5, 90, 17), (202,)), 1
    points = [
        make_point(tmp_path / "checkpoint", Layout(2, dcp=2), PAGED, A2A, "triton"),
        make_point(tmp_path / "checkpoint", Layout(2, dcp=2), PLAIN, SYMM, "reference"),
        make_point(tmp_path / "checkpoint", Layout(2, dcp=2), PLAIN, SYMM | REPLICATED, "reference"),
    ]
    assert_verified(points, verify_by_job(points, prompts, new, tmp_path / "run"), len(prompts) * new)


@pytest.mark.parametrize("published", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "stored", [{}, {"kv_dtype": "fp8"}, {"weights_dtype": "fp8"}], ids=["", "fp8-kv", "fp8-weights"]
)
def test_other_precisions_agree_with_equally_rounded_transformers(
    published: bool, stored: dict[str, str], tmp_path: Path
) -> None:
    """Run an engine in bf16 on a checkpoint in bf16, and on one in fp8 blocks with an incomplete last block."""
    write_qwen3_moe(tmp_path / "checkpoint", kv_heads=2, hidden_size=160, num_hidden_layers=2)
    if published:
        convert_to_fp8(tmp_path / "checkpoint")
    tested = make_point(tmp_path / "checkpoint", Layout(1), PAGED, NONE, "reference")
    tested = msgspec.structs.replace(tested, dtype="bf16", **stored)
    assert {name for name, check in compare_alone(tested, PROMPTS, NEW).items() if not check.ok} == set()


def _forget_norm(split: Any, *arguments: Any, **options: Any) -> None:
    qkv, q_norm, _, *rest = arguments
    split(qkv, q_norm, torch.ones_like(q_norm), *rest, **options)


def _swap_kv_heads(split: Any, *arguments: Any, **options: Any) -> None:
    split(*arguments, **options)
    for part in split_rows(arguments[6], 2):
        part.copy_(part.flip(1))


def _rotate_values(split: Any, *arguments: Any, **options: Any) -> None:
    split(*arguments, **options)
    _, values = split_rows(arguments[6], 2)
    values.copy_(values.roll(1, dims=-1))


def _leave_positions_out(split: Any, *arguments: Any, **options: Any) -> None:
    qkv, q_norm, k_norm, positions, *rest = arguments
    split(qkv, q_norm, k_norm, torch.zeros_like(positions), *rest, **options)


@pytest.mark.parametrize("defect", [_forget_norm, _swap_kv_heads, _rotate_values, _leave_positions_out])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_defective_engine_fails_verification(
    defect: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use keys without norm or rope, KV heads in another order, and values with shifted columns."""
    write_qwen3(tmp_path / "checkpoint", kv_heads=2, num_hidden_layers=1)
    tested = msgspec.structs.replace(
        make_point(tmp_path / "checkpoint", Layout(1), PAGED, NONE, "reference"), dtype=dtype
    )
    assert all(check.ok for check in compare_alone(tested, PROMPTS, NEW).values())
    monkeypatch.setattr(gqa, "split_heads", functools.partial(defect, gqa.split_heads))
    assert not compare_alone(tested, PROMPTS, NEW)["layers"].ok


def test_missing_rope_scaling_fails_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the scaling of Llama's frequencies, which changes only the slow ones."""
    write_llama(tmp_path / "checkpoint", kv_heads=2, num_hidden_layers=1)
    tested = make_point(tmp_path / "checkpoint", Layout(1), PAGED, NONE, "reference")
    assert all(check.ok for check in compare_alone(tested, PROMPTS, NEW).values())
    table = model.make_rope_table
    monkeypatch.setattr(
        model, "make_rope_table", lambda shape, *rest: table(dataclasses.replace(shape, llama3_rope=None), *rest)
    )
    assert not compare_alone(tested, PROMPTS, NEW)["layers"].ok
