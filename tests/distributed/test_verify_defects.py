"""Test that `verify` finds engines with one defect at any depth. `python -m tools.verify_defects` makes the whole
table.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.errors import ModelError
from dcpbench.points.layout import Layout
from dcpbench.points.names import FP8
from dcpbench.points.point import Point
from tests.distributed.checkpoints import VOCAB, write_changed_deepseek_v3
from tests.distributed.defective_rank import DEFECT
from tests.distributed.defects import DEFECTS, FIVE, IN_GROUPS
from tests.distributed.verifying import compare_alone, verify_by_job

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

pytestmark = pytest.mark.distributed

PROMPTS = (tuple(7 * k % VOCAB for k in range(7)), (11,))
NEW = 2
IN_BF16, IN_FP8 = {"dtype": "bf16"}, {"dtype": "bf16", "weights_dtype": FP8, "kv_dtype": FP8}
ALONE = [name for name in DEFECTS if name not in IN_GROUPS]


def write_checkpoint(folder: Path, layers: int) -> str:
    write_changed_deepseek_v3(folder, {"num_hidden_layers": layers}, {})
    return str(folder)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a checkpoint of two layers, one of them with experts."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "v3", 2)


def make_point(folder: str, layout: Layout = Layout(1), **precision: str) -> Point:  # noqa: B008 - frozen
    """Return a point on the CPU with pages of four rows."""
    return Point(
        model=folder,
        weights=folder,
        tp=layout.tp,
        dcp=layout.dcp,
        concurrency=2,
        context=11,
        backend="reference",
        page_size=4,
        exchange="ag_rs" if layout.dcp > 1 else "none",
        **precision,
    )


def list_failed_checks(tested: Point, defect: str = "") -> list[str]:
    """Return the names of the failed checks of an engine with a defect."""
    with pytest.MonkeyPatch.context() as patch:
        if defect:
            DEFECTS[defect](patch.setattr)
        return [name for name, check in compare_alone(tested, PROMPTS, NEW).items() if not check.ok]


@pytest.mark.parametrize("precision", [IN_BF16, IN_FP8], ids=["bf16", "fp8"])
def test_correct_engine_passes_all_checks(precision, shallow):
    assert list_failed_checks(make_point(shallow, **precision)) == []


@pytest.mark.parametrize("defect", ALONE)
@pytest.mark.sample(3)
def test_defect_is_found_in_fp8(defect, shallow):
    assert list_failed_checks(make_point(shallow, **IN_FP8), defect)


@pytest.mark.parametrize("defect", ["no_yarn", "experts_swapped", "wrong_block_scale", "second_best_token"])
def test_defect_is_found_in_bf16(defect, shallow):
    assert list_failed_checks(make_point(shallow, **IN_BF16), defect)


@pytest.mark.long
def test_defect_of_one_rank_fails_verification(shallow, tmp_path, monkeypatch):
    """Let two ranks share a request's KV, and the second return its log-sum-exp to base 2."""
    monkeypatch.setenv(DEFECT, "lse_of_base_2")
    tested = make_point(shallow, Layout(2, dcp=2), **IN_FP8)
    checks = verify_by_job([tested], PROMPTS, NEW, tmp_path, "tests.distributed.defective_rank")
    wrong = [check for check in checks if not check.ok]
    assert [check.name for check in wrong] == ["attention", "layers"]
    assert "first attention of layer 0" in wrong[1].detail


@pytest.mark.long
@pytest.mark.parametrize("precision", [IN_BF16, IN_FP8], ids=["bf16", "fp8"])
def test_defects_are_found_at_61_layers(precision, tmp_path):
    """Check that limits are those of one operation at any depth."""
    tested = make_point(write_checkpoint(tmp_path / "v3", 61), **precision)
    assert list_failed_checks(tested) == []
    assert [defect.__name__ for defect in FIVE if not list_failed_checks(tested, defect.__name__)] == []


def test_defect_is_found_in_fp8_at_61_layers(tmp_path, monkeypatch):
    """Check that limits do not grow with the depth. One short prompt keeps this within seconds; the test above has all
    of FIVE.
    """
    monkeypatch.setattr("tests.distributed.test_verify_defects.PROMPTS", ((3, 5, 7),))
    monkeypatch.setattr("tests.distributed.test_verify_defects.NEW", 1)
    tested = make_point(write_checkpoint(tmp_path / "v3", 61), **IN_FP8)
    assert list_failed_checks(tested) == []
    assert list_failed_checks(tested, "no_yarn") == ["layers"]


def test_experts_that_no_token_chooses_are_compared_too(shallow, monkeypatch):
    """Use a single token, which takes 4 of 16 experts."""
    tested = make_point(shallow, **IN_BF16)
    monkeypatch.setattr("tests.distributed.test_verify_defects.PROMPTS", ((3,),))
    monkeypatch.setattr("tests.distributed.test_verify_defects.NEW", 1)
    assert list_failed_checks(tested) == []
    assert list_failed_checks(tested, "experts_swapped") == ["layers"]


def test_engine_that_computes_nan_fails_verification(shallow, monkeypatch):
    """Fail the check although comparisons with NaN, and so `error > limit`, are never true."""
    monkeypatch.setattr(CheckpointSource, "get_tensor", put_nan_into_o_proj(CheckpointSource.get_tensor))
    assert list_failed_checks(make_point(shallow, **IN_BF16)) == ["layers", "logits", "tokens"]


def put_nan_into_o_proj(get: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `get` so that one number of an output projection becomes NaN after it is read."""

    def read(source: CheckpointSource, name: str, *arguments: object, **options: object) -> torch.Tensor:
        tensor = get(source, name, *arguments, **options)
        if name == "model.layers.1.self_attn.o_proj.weight":
            tensor[0, 0] = float("nan")
        return tensor

    return read


def test_checkpoint_with_nan_is_rejected(tmp_path):
    folder = write_checkpoint(tmp_path / "v3", 2)
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = float("nan")
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.self_attn\.o_proj\.weight' holds NaN or infinity"):
        list_failed_checks(make_point(folder, **IN_BF16))
