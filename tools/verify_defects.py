"""List the defects that `dcpbench verify --checkpoint` finds at 61 layers, and its verdicts on correct engines.

    python -m tools.verify_defects -o FILE                 # both tables, in Markdown; half an hour on two cores
    python -m tools.verify_defects --layers 4 --few        # a shorter run

It generates small random checkpoints. The defects are those of tests/distributed/defects.py, in bf16, and with weights and KV cache in
fp8. Correct engines vary in model family, depth, sizes, published precision, layout, placement of experts, exchange and prompt lengths.
Everything runs on the CPU. Exit code 1: a defect is missed, or a correct engine fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dcpbench.models import load_shape
from dcpbench.points.layout import Layout
from dcpbench.points.names import FP8
from dcpbench.points.point import Point
from dcpbench.points.prompts import make_random_prompts
from tests import as_fork
from tests.distributed import checkpoints
from tests.distributed.defective_rank import DEFECT
from tests.distributed.defects import DEFECTS, IN_GROUPS
from tests.distributed.verifying import compare_alone, verify_by_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcpbench.launch.jobs import Check

BF16 = {"dtype": "bf16"}
FP8_BOTH = BF16 | {"weights_dtype": FP8, "kv_dtype": FP8}
FP8_PRECISIONS = (
    FP8_BOTH,
    BF16 | {"weights_dtype": FP8},
    BF16 | {"kv_dtype": FP8},
    {"dtype": "fp32", "weights_dtype": FP8, "kv_dtype": FP8},
)
WIDE_SIZES = {"hidden_size": 256, "intermediate_size": 320, "moe_intermediate_size": 160, "q_lora_rank": 136}
NEW_TOKENS = 3


def _make_v3_writer(**config: object) -> Callable[[Path], None]:
    return lambda folder: checkpoints.write_changed_deepseek_v3(folder, config, {})


def _make_v2_writer(**config: object) -> Callable[[Path], None]:
    return lambda folder: checkpoints.write_changed_deepseek_v2(folder, config, {})


def _make_published_writer(**config: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        checkpoints.write_changed_deepseek_v3(folder, config, {})
        checkpoints.convert_to_fp8(folder)

    return write


CORRECT: dict[str, Callable[[Path], None]] = {  # checkpoints, each with points of one rank in all fp8 precisions
    "V3, 2 layers": _make_v3_writer(num_hidden_layers=2),
    "V3, 9 layers": _make_v3_writer(num_hidden_layers=9, seed=1),
    "V3, 24 layers": _make_v3_writer(num_hidden_layers=24, first_k_dense_replace=3, seed=2),
    "V3, 61 layers": _make_v3_writer(num_hidden_layers=61, first_k_dense_replace=3, seed=3),
    "V3, small weights": _make_v3_writer(initializer_range=0.02, seed=4),
    "V3, large weights": _make_v3_writer(initializer_range=0.4, seed=5),
    "V3, wide": _make_v3_writer(**WIDE_SIZES, seed=6),
    "V3, one group, 32 experts": _make_v3_writer(n_group=1, topk_group=1, n_routed_experts=32, seed=7),
    "V2, grouped": checkpoints.write_deepseek_v2,
    "V2, greedy, 5 layers": _make_v2_writer(num_hidden_layers=5, seed=8),
    "V3 in fp8, 3 layers": checkpoints.write_deepseek_v3_fp8,
    "V3 in fp8, wide, 4 layers": _make_published_writer(**WIDE_SIZES, num_hidden_layers=4, seed=9),
    "V3 in fp8, 12 layers": _make_published_writer(num_hidden_layers=12, seed=10),
    "V3 in fp8, 61 layers": _make_published_writer(num_hidden_layers=61, first_k_dense_replace=3, seed=11),
}
MULTI_RANK_CHECKPOINTS = (
    "V3, 9 layers",
    "V2, grouped",
    "V3 in fp8, 3 layers",
)  # checkpoints with points of several ranks
LAYOUTS: tuple[tuple[Layout, dict[str, Any]], ...] = (
    (Layout(2), {"ep": "1"}),
    (Layout(2, dp=2), {"ep": "tp"}),
    (Layout(2, dcp=2), {"ep": "tp", "exchange": "ag_rs"}),
    (Layout(4, dcp=2), {"ep": "1", "exchange": "a2a", "q_replicate": True, "project_first": True}),
    (Layout(4, dcp=4), {"ep": "tp", "exchange": "a2a", "interleave": 2}),
    (Layout(4, dp=2, dcp=2), {"ep": "1", "exchange": "ag_rs", "project_first": True}),
    (Layout(8, dcp=8), {"ep": "tp", "exchange": "ag_rs", "q_replicate": True}),
    (Layout(8, dp=4), {"ep": "1"}),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold a row of the table: an engine at one point, with its failed checks."""

    name: str
    precision: str
    wrong: list[Check]
    worst: float  # largest error over limit of the checks with a limit above 0

    @classmethod
    def from_checks(cls, name: str, checks: list[Check]) -> Row:
        """Make the row of one point from its checks."""
        shares = [check.error / check.limit for check in checks if check.error is not None and check.limit]
        return cls(name, checks[0].dtype, [check for check in checks if not check.ok], max(shares, default=0.0))


def make_point(folder: str, layout: Layout, **fields: Any) -> Point:  # noqa: ANN401
    """Return a point on the CPU with the weights of a checkpoint."""
    defaults: dict[str, Any] = {
        "backend": "reference",
        "page_size": 4,
        "concurrency": 4,
        "context": 37,
        "exchange": "none",
    }
    return Point(model=folder, weights=folder, tp=layout.tp, dp=layout.dp, dcp=layout.dcp, **(defaults | fields))


def try_defects(folder: str, jobs: Path) -> Iterator[Row]:
    """Yield a row for the correct engine and for each defect, in bf16 and in fp8."""
    prompts = make_random_prompts(load_shape(folder), 2, 9)
    for precision in (BF16, FP8_BOTH):
        alone = make_point(folder, Layout(1), **precision)
        yield Row.from_checks("(correct engine)", list(compare_alone(alone, prompts, 2).values()))
        for name, defect in DEFECTS.items():
            with pytest.MonkeyPatch.context() as patch:
                if name in IN_GROUPS:
                    patch.setenv(DEFECT, name)
                    grouped = make_point(folder, Layout(2, dcp=2), **precision, exchange="ag_rs")
                    job = jobs / f"{name}-{grouped.weights_precision}"
                    checks = verify_by_job([grouped], prompts, 2, job, "tests.distributed.defective_rank")
                else:
                    defect(patch.setattr)
                    checks = list(compare_alone(alone, prompts, 2).values())
            yield Row.from_checks(name, checks)


def try_correct_engines(folder: Path, *, few: bool) -> Iterator[Row]:
    """Yield a row for each point of a correct engine; prompt lengths differ between points."""
    for number, (name, write) in enumerate(CORRECT.items()):
        if few and "61" in name:
            continue
        checkpoint = folder / str(number)
        write(checkpoint)
        shape = load_shape(str(checkpoint))
        for turn, precision in enumerate(FP8_PRECISIONS):
            prompts = make_random_prompts(shape, 1 + turn, 5 + 7 * ((number + turn) % 4))
            tested = make_point(str(checkpoint), Layout(1), **precision)
            yield Row.from_checks(f"{name}, tp1", list(compare_alone(tested, prompts, NEW_TOKENS).values()))
        if name in MULTI_RANK_CHECKPOINTS:
            prompts = make_random_prompts(shape, 5, 13)
            for index, (layout, options) in enumerate(LAYOUTS):
                precision = FP8_PRECISIONS[index % 2]
                tested = make_point(str(checkpoint), layout, **precision, **options)
                checks = verify_by_job([tested], prompts, NEW_TOKENS, folder / f"job-{number}-{index}")
                yield Row.from_checks(f"{name}, {layout}·ep{tested.ep_degree}", checks)


def format_table(rows: list[Row]) -> str:
    """Format the rows as a Markdown table."""
    lines = ["| engine | precision | verdict | largest error / limit |", "|---|---|---|---|"]
    for row in rows:
        verdict = ", ".join(check.name for check in row.wrong) or ("**missed**" if row.name in DEFECTS else "ok")
        lines.append(f"| {row.name} | {row.precision} | {verdict} | {row.worst:.3g} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run all points, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=61, help="layers of the checkpoint with defects; default: %(default)s"
    )
    parser.add_argument("--few", action="store_true", help="leave out correct engines of 61 layers")
    parser.add_argument("-o", "--out", type=Path, help="also write the tables to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    as_fork.replace_agents(setattr)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        checkpoints.write_changed_deepseek_v3(
            folder / "deep", {"num_hidden_layers": args.layers, "first_k_dense_replace": 3}, {}
        )
        defects = list(_print_rows(try_defects(str(folder / "deep"), folder)))
        correct = list(_print_rows(try_correct_engines(folder, few=args.few)))
    missed = [row for row in defects if not row.wrong and row.name in DEFECTS]
    wrong = [row for row in (*correct, *defects) if row.wrong and row.name not in DEFECTS]
    text = (
        f"## Defects at {args.layers} layers: {len(missed)} missed\n\n{format_table(defects)}\n\n"
        f"## Correct engines: {len(wrong)} of {len(correct)} fail\n\n{format_table(correct)}\n"
    )
    print(text)
    print(f"{time.monotonic() - started:.0f} s")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return 1 if missed or wrong else 0


def _print_rows(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        print(
            f"{row.name}: {row.precision}: {', '.join(c.name for c in row.wrong) or 'ok'}", file=sys.stderr, flush=True
        )
        yield row


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(main(sys.argv[1:]))
