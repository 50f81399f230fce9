"""Compare greedy tokens of dcpbench's engine with transformers in fp32 on the same synthetic weights, with and without
defects.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from tests import forks
from tools.greedy_tokens import __main__ as command
from tools.greedy_tokens.answers import Answers, Position, read_answers
from tools.greedy_tokens.comparison import BEYOND, ROUNDING, SAME, decide
from tools.greedy_tokens.reference import draw_weights, judge_answers

if TYPE_CHECKING:
    from pathlib import Path

    from tools.greedy_tokens.scores import Judgement

pytestmark = pytest.mark.distributed

SMALL = (
    "hidden_size=64", "intermediate_size=96", "moe_intermediate_size=32", "num_attention_heads=4", "num_key_value_heads=4",
    "q_lora_rank=32", "kv_lora_rank=32", "qk_nope_head_dim=16", "qk_rope_head_dim=8", "v_head_dim=16", "vocab_size=211",
    "n_routed_experts=8", "num_experts_per_tok=2", "n_group=2", "topk_group=1",
)  # fmt: skip
ASKED = ("--prompts", "26", "--length", "9", "--new-tokens", "10")
"""26 prompts of 10 new tokens are 260 positions, of which at least 250 must be compared."""


def run(*words: object) -> int:
    return command.run_command(command.parse_arguments(list(map(str, words))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model folder of two small layers, the second with experts."""
    made = tmp_path_factory.mktemp("model")
    assert run("model", made, *(word for change in SMALL for word in ("--set", change))) == 0
    return made


def decode_on_one_rank(folder: Path, out: Path, *more: str) -> Path:
    """Decode with the engine of one rank, in this process."""
    assert run("own", "--model", folder, *ASKED, *more, "-o", out) == 0
    return out


def decode_on_two_ranks(folder: Path, out: Path, *more: str) -> Path:
    """Decode with two ranks that have torchrun's environment."""
    words = ["-m", "tools.greedy_tokens", "own", "--model", str(folder), *ASKED, *more, "-o", str(out)]
    ranks = {"WORLD_SIZE": "2", "MASTER_PORT": f"test-{os.getpid()}-{out.stem}"}
    environments = [os.environ | ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    log = str(out.with_suffix(".log"))
    assert forks.run_programs(*(forks.Program(words, env, log) for env in environments)) == [0, 0], out.with_suffix(
        ".log"
    ).read_text()
    return out


@pytest.fixture(scope="module")
def in_bf16(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Judgement]:
    """Return answers of one rank in bf16, and their scores."""
    (one,) = read_answers([decode_on_one_rank(folder, tmp_path_factory.mktemp("bf16") / "one.json")])
    return one, judge_answers([one], str(folder), load_shape(str(folder)))


def test_fp32_layouts_have_the_tokens_of_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expect 260 equal tokens, and log-probabilities that differ by less than the noise of fp32."""
    files = [
        decode_on_one_rank(folder, tmp_path / "tp1.json", "--dtype", "fp32"),
        decode_on_two_ranks(folder, tmp_path / "tp2.json", "--dtype", "fp32"),
        decode_on_two_ranks(folder, tmp_path / "tp2-dcp2.json", "--dtype", "fp32", "--dcp", "2"),
    ]
    assert run("judge", "--model", folder, *files, "-o", tmp_path / "judge") == 0
    assert run("compare", "--judge", tmp_path / "judge", *files) == 0
    shown = capsys.readouterr().out
    for pair in (
        "dcpbench tp1 and dcpbench tp2 ",
        "dcpbench tp1 and dcpbench tp2·dcp2",
        "dcpbench tp2 and dcpbench tp2·dcp2",
    ):
        line = next(line for line in shown.splitlines() if pair in line)
        assert [cell.strip() for cell in line.split("|")[2:-1]] == ["26", "260", "260", "0 (0.0%)", "0"]
    assert run("compare", "--model", folder, "--json", *files[:2]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert max(engine["ratio"] for engine in found["engines"]) < 0.1


@pytest.mark.parametrize("tensor", ["layers.0.self_attn.kv_b_proj.weight", "layers.1.mlp.experts.3.down_proj.weight"])
def test_perturbed_weight_is_found(
    tensor: str, folder: Path, in_bf16: tuple[Answers, Judgement], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scale one weight matrix of the engine by 1.33."""
    right = SyntheticSource.get_tensor

    def perturb(source: SyntheticSource, name: str, *sizes: object, **part: object) -> torch.Tensor:
        found = right(source, name, *sizes, **part)
        return found * 1.33 if name.endswith(tensor) else found

    good, scores = in_bf16
    assert decide([good], scores).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(SyntheticSource, "get_tensor", perturb)
        path = decode_on_one_rank(folder, tmp_path / "wrong.json")
    (wrong,) = read_answers([path])
    found = decide([wrong], judge_answers([wrong], str(folder), load_shape(str(folder))))
    assert found.exit_code == 1
    assert {reason.kind for reason in found.reasons} <= {BEYOND, ROUNDING}


def change_last_token(one: Answers, scores: Judgement, *, near: bool) -> tuple[Answers, int, float]:
    """Give one answer fp32's second choice as its last token, where the two choices are closest (`near`) or farthest
    apart. Return the answers, the prompt, and the gap between the choices in fp32.
    """
    lasts = {prompt: scores.get(prompt, one)[-1] for prompt in range(len(one.prompts))}
    fit = {p: last for p, last in lasts.items() if not last.routing_tie and one.answers[p][-1].token == last.best}
    prompt = (min if near else max)(fit, key=lambda p: fit[p].gap)
    second = sorted(fit[prompt].fp32, key=lambda token: -fit[prompt].fp32[token])[1]
    answers = [list(answer) for answer in one.answers]
    answers[prompt][-1] = Position(second, answers[prompt][-1].logprobs)
    return msgspec.structs.replace(one, name="changed", answers=answers), prompt, fit[prompt].gap


@pytest.mark.parametrize("near", [True, False])
def test_fp32_decides_a_planted_near_tie_and_a_planted_wrong_token(
    near: bool, folder: Path, in_bf16: tuple[Answers, Judgement]
) -> None:
    good, scores = in_bf16
    changed, prompt, gap = change_last_token(good, scores, near=near)
    found = decide([good, changed], judge_answers([good, changed], str(folder), load_shape(str(folder))))
    (pair,) = found.pairs
    (difference,) = pair.differences
    assert (difference.prompt, difference.position, difference.left) == (prompt, 9, difference.best)
    assert difference.ahead == pytest.approx(gap)
    assert (found.exit_code, pair.near_ties, pair.beyond_near_tie) == ((0, 1, 0) if near else (1, 0, 1))
    assert (gap <= found.tie_limit) is near


def test_judge_uses_the_dequantised_fp8_weights(folder: Path, tmp_path: Path) -> None:
    """Expect fp8 weights to differ from the drawn ones by up to half a step of e4m3, 1/16 of their size; vectors and
    embedding do not.
    """
    fp8 = tmp_path / "fp8"
    assert run("model", fp8, "--fp8", *(word for change in SMALL for word in ("--set", change))) == 0
    (one,) = read_answers([decode_on_one_rank(fp8, tmp_path / "fp8.json")])
    (other,) = read_answers([decode_on_one_rank(folder, tmp_path / "bf16.json")])
    drawn, rounded = (
        draw_weights(load_shape(str(folder)), other.weights),
        draw_weights(load_shape(str(fp8)), one.weights),
    )
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    error = (rounded[name] - drawn[name]).norm() / drawn[name].norm()
    assert 0.01 < error < 0.06
    assert torch.equal(rounded["model.embed_tokens.weight"], drawn["model.embed_tokens.weight"])
    found = decide([one], judge_answers([one], str(fp8), load_shape(str(fp8))))
    assert found.engines[0].beyond_near_tie == 0
    assert found.engines[0].ratio < 1.5


def test_answers_of_another_model_or_device_are_rejected(
    folder: Path, in_bf16: tuple[Answers, Judgement], tmp_path: Path
) -> None:
    other, path = tmp_path / "other", tmp_path / "one.json"
    assert run("model", other, "--set", "vocab_size=300") == 0
    path.write_bytes(msgspec.json.encode(in_bf16[0]))
    with pytest.raises(UsageError, match="are from different weights"):
        run("compare", "--model", other, path)
    on_gpu = msgspec.structs.replace(in_bf16[0].weights, device="Another GPU")
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(in_bf16[0], weights=on_gpu)))
    with pytest.raises(UsageError, match="drawn on Another GPU, and this machine has"):
        run("compare", "--model", folder, path)
    assert decide([in_bf16[0]], in_bf16[1]).verdict == SAME
