"""Greedy tokens of engines are compared up to the first difference, and fp32 decides which engine is right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import UsageError, WorkerError
from dcpbench.models import load_shape
from dcpbench.servers.answer_noise import MIN_NOISE
from dcpbench.servers.answer_pairs import Answer
from tools.greedy_tokens import __main__ as command
from tools.greedy_tokens.answers import Answers, Position, WeightsKey, compute_sizes_key, make_prompts, read_answers
from tools.greedy_tokens.comparison import (
    BEYOND,
    DIFFER,
    FEW,
    MIN_POSITIONS,
    NEAR_TIES,
    ROUNDING,
    ROUTING,
    SAME,
    UNDECIDED,
    WIDE,
    Verdict,
    decide,
)
from tools.greedy_tokens.engines import list_positions
from tools.greedy_tokens.model_folder import write_model_folder
from tools.greedy_tokens.scores import Judgement, ScoredAnswer, ScoredPosition

if TYPE_CHECKING:
    from pathlib import Path

KEY = WeightsKey(sizes="0", seed=0, dtype="bf16", format="bf16", device="cpu")
LENGTH, PROMPTS = 10, 30
BEST, NEXT, FAR = 2, 3, 4
FP32 = {BEST: -1.0, NEXT: -1.01, FAR: -3.0}
MOVE = (
    0.005  # change of a log-probability by rounding: two tokens move by 0.01, and those up to 0.02 apart are near-ties
)


def make_fp32(prompt: int, gap: float) -> dict[int, float]:
    """Return log-probabilities of fp32: in all prompts but the first BEST is ahead by `gap`."""
    return FP32 if prompt == 0 else FP32 | {NEXT: FP32[BEST] - gap}


def make_answers(
    name: str, changes: dict[tuple[int, int], int] | None = None, shift: float = MOVE, gap: float = 2.0
) -> Answers:
    """Return answers with the token BEST except at changed (prompt, place); listed log-probabilities are off by
    `shift`.
    """
    rows = [
        [
            Position(
                (changes or {}).get((prompt, place), BEST),
                {token: p + shift for token, p in make_fp32(prompt, gap).items()},
            )
            for place in range(LENGTH)
        ]
        for prompt in range(PROMPTS)
    ]
    return Answers(name=name, weights=KEY, prompts=[[9]] * PROMPTS, answers=rows)


def judge(*files: Answers, gap: float = 2.0, ties: float = 0.0) -> Judgement:
    """Score the answers; `ties` is the share of prompts with near-ties of experts, which are the last ones."""
    scored = []
    for prompt in range(PROMPTS):
        fp32 = make_fp32(prompt, gap)
        rounded = fp32 | {BEST: fp32[BEST] - MOVE, NEXT: fp32[NEXT] + MOVE, FAR: fp32[FAR] + MOVE}
        tie = prompt >= round(PROMPTS * (1 - ties))
        place = ScoredPosition(fp32=fp32, rounded=rounded, rerouted=False, routing_tie=tie)
        texts = sorted({tuple(one.list_tokens(prompt)) for one in files})
        scored += [ScoredAnswer(prompt=prompt, tokens=list(text), positions=[place] * LENGTH) for text in texts]
    return Judgement(weights=KEY, prompts=[[9]] * PROMPTS, answers=scored)


def compute_verdict(*files: Answers, gap: float = 2.0, ties: float = 0.0) -> Verdict:
    return decide(files, judge(*files, gap=gap, ties=ties))


def test_equal_tokens_of_several_engines_are_the_same() -> None:
    """Three engines are three pairs with all 30 · 10 positions each."""
    found = compute_verdict(make_answers("a"), make_answers("b"), make_answers("c"))
    assert (found.verdict, found.exit_code, found.reasons) == (SAME, 0, [])
    assert [(p.left, p.right, p.positions, p.equal) for p in found.pairs] == [
        ("a", "b", 300, 300), ("a", "c", 300, 300), ("b", "c", 300, 300)
    ]  # fmt: skip
    assert [e.ratio for e in found.engines] == [pytest.approx(1.0)] * 3


def test_tokens_within_twice_the_rounding_in_fp32_are_a_near_tie() -> None:
    """The first prompt has the two tokens 0.01 apart. Positions after the difference are left out: 300 - 6."""
    found = compute_verdict(make_answers("a"), make_answers("b", {(0, 3): NEXT}))
    (pair,) = found.pairs
    assert (found.exit_code, pair.positions, pair.equal, pair.near_ties, pair.beyond_near_tie) == (0, 294, 293, 1, 0)
    assert pair.near_tie_share == pytest.approx(1 / 294)
    (difference,) = pair.differences
    assert (difference.prompt, difference.position, difference.best) == (0, 3, BEST)
    assert difference.ahead == pytest.approx(0.01)
    assert found.tie_limit == pytest.approx(4 * MOVE)


@pytest.mark.parametrize("wrong", [0, 1])
def test_engine_with_the_less_likely_token_is_wrong(wrong: int) -> None:
    names = ["a", "b"]
    found = compute_verdict(
        *(make_answers(name, {(5, 9): FAR} if n == wrong else None) for n, name in enumerate(names))
    )
    assert (found.verdict, found.exit_code) == (DIFFER, 1)
    assert [(r.kind, r.engines) for r in found.reasons] == [(BEYOND, [names[wrong]]), (BEYOND, ["a", "b"])]
    assert found.pairs[0].differences[0].ahead == pytest.approx(-2.0 if wrong == 0 else 2.0)


def test_engines_with_the_same_wrong_token_differ_from_fp32() -> None:
    found = compute_verdict(make_answers("a", {(5, 9): FAR}), make_answers("b", {(5, 9): FAR}))
    assert (found.exit_code, found.pairs[0].equal) == (1, 300)
    assert [r.engines for r in found.reasons] == [["a"], ["b"]]


def test_other_token_is_a_near_tie_if_rounding_could_change_experts() -> None:
    changed = make_answers("b", {(PROMPTS - 1, 9): FAR})
    found = compute_verdict(make_answers("a"), changed, ties=0.1)
    assert (found.exit_code, found.pairs[0].near_ties, found.pairs[0].differences[0].routing) == (0, 1, True)
    assert compute_verdict(make_answers("a"), changed).exit_code == 1


@pytest.mark.parametrize(("shift", "code"), [(1.9 * MOVE, 0), (2.1 * MOVE, 1)])
def test_log_probabilities_may_differ_from_fp32_by_twice_the_rounding(shift: float, code: int) -> None:
    found = compute_verdict(make_answers("a"), make_answers("b", shift=shift))
    assert found.exit_code == code
    assert [r.kind for r in found.reasons] == [ROUNDING] * code


def test_exact_engine_may_differ_by_the_noise_of_fp32() -> None:
    """Without any rounding the difference is compared with MIN_NOISE, and a near-tie is up to twice as much."""
    one = make_answers("a", shift=MIN_NOISE)
    exact = judge(one)
    for scored in exact.answers:
        scored.positions[:] = [msgspec.structs.replace(p, rounded=p.fp32) for p in scored.positions]
    found = decide([one], exact)
    assert (found.verdict, found.tie_limit) == (SAME, 2 * MIN_NOISE)
    assert found.engines[0].ratio == pytest.approx(1.0)


def test_verdict_is_undecided_with_too_many_near_ties() -> None:
    """15 of 30 answers end at their first token: 15 of 15 + 150 positions are near-ties. These positions are also too
    few.
    """
    changed = make_answers("b", {(prompt, 0): NEXT for prompt in range(15)}, gap=0.015)
    found = compute_verdict(make_answers("a", gap=0.015), changed, gap=0.015)
    assert (found.verdict, found.exit_code, found.pairs[0].near_ties) == (UNDECIDED, 3, 15)
    assert [r.kind for r in found.reasons] == [NEAR_TIES, FEW, WIDE]
    assert found.reasons[1].limit == MIN_POSITIONS


def test_verdict_is_undecided_if_rounding_could_change_most_experts() -> None:
    found = compute_verdict(make_answers("a"), ties=0.6)
    assert (found.exit_code, [r.kind for r in found.reasons]) == (3, [ROUTING])


def write(folder: Path, *files: Answers) -> list[Path]:
    paths = [folder / f"{number}.json" for number in range(len(files))]
    for path, one in zip(paths, files, strict=True):
        path.write_bytes(msgspec.json.encode(one))
    return paths


def test_files_of_other_prompts_or_weights_are_refused(tmp_path: Path) -> None:
    base = make_answers("a")
    others = {
        "answer different prompts .* give all commands the same --prompts": {"prompts": [[8]] * PROMPTS},
        "different weights .sizes: 1 and 0.* same --model folder": {"weights": msgspec.structs.replace(KEY, sizes="1")},
        "seed: 7 and 0.*DCPBENCH_WEIGHTS_SEED": {"weights": msgspec.structs.replace(KEY, seed=7)},
        "device: GPU and cpu.*same kind of GPU": {"weights": msgspec.structs.replace(KEY, device="GPU")},
        "answers of different lengths; .* same --new-tokens": {"answers": [base.answers[0][:1], *base.answers[1:]]},
        "has 29 answers to 30 prompts": {"answers": [[], *base.answers[1:]]},
    }
    for message, change in others.items():
        with pytest.raises(UsageError, match=message):
            read_answers(write(tmp_path, base, msgspec.structs.replace(base, **change)))
    (tmp_path / "old.json").write_text('{"name": "a", "answers": []}')
    with pytest.raises(UsageError, match=r"not a file of answers.*`ask -o"):
        read_answers([tmp_path / "old.json"])


def test_engines_with_the_same_name_are_distinguished_by_their_files(tmp_path: Path) -> None:
    assert [one.name for one in read_answers(write(tmp_path, make_answers("a"), make_answers("a"), make_answers("b")))] == [
        "a (0)", "a (1)", "b"
    ]  # fmt: skip


def run(*words: object) -> int:
    return command.run_command(command.parse_arguments(list(map(str, words))))


def test_command_prints_a_table_of_pairs_and_exits_with_the_verdicts_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [make_answers("a"), make_answers("b", {(0, 3): NEXT}), make_answers("c", {(5, 9): FAR})]
    paths, scores = write(tmp_path, *files), tmp_path / "judge"
    scores.write_bytes(msgspec.json.encode(judge(*files)))
    assert run("compare", "--judge", scores, *paths) == 1
    shown = capsys.readouterr().out
    assert "| a and b | 30      | 294       | 293   | 1 (0.3%)           | 0                 |" in shown
    assert "prompt 1, token 4: fp32 has t2 of a ahead of t3 of b by 0.0100 (near-tie)\n" in shown
    assert "prompt 6, token 10: fp32 has t2 of a ahead of t4 of c by 2.0000 (beyond a near-tie)\n" in shown
    assert "\nDIFFER\n" in shown
    assert run("compare", "--judge", scores, "--json", *paths[:2]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["pairs"][0]["equal"], found["pairs"][0]["near_ties"]) == (SAME, 293, 1)
    assert found["engines"][0]["ratio"] == pytest.approx(1.0)


def test_scores_of_other_answers_are_refused(tmp_path: Path) -> None:
    one, scores = make_answers("a"), tmp_path / "judge"
    (path,) = write(tmp_path, one)
    scores.write_bytes(msgspec.json.encode(judge(make_answers("a", {(0, 0): NEXT}))))
    with pytest.raises(UsageError, match="lacks the answer of a to prompt 1; run `judge` again with all files"):
        run("compare", "--judge", scores, path)
    scores.write_text("{}")
    with pytest.raises(UsageError, match="not a file of scores"):
        run("compare", "--judge", scores, path)


def test_model_folder_has_the_changed_sizes_and_a_word_for_each_id(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    assert run("model", tmp_path, "--fp8", "--set", "vocab_size=512", "--set", "num_hidden_layers=3") == 0
    shape = load_shape(str(tmp_path))
    assert (shape.vocab, shape.layers, shape.first_k_dense_replace, shape.published.name) == (512, 3, 1, "fp8")
    words = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert words.get_vocab_size() == 512
    assert words.encode("t511 t0 t17").ids == [511, 0, 17]
    assert words.decode([511, 0, 17]) == "t511 t0 t17"


@pytest.mark.parametrize("change", ["heads=3", "vocab_size", "vocab_size=x"])
def test_unknown_or_invalid_field_of_config_json_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--set"):
        write_model_folder(tmp_path, [change], fp8=False)


def test_key_of_sizes_depends_on_config_json_and_not_on_the_folder(tmp_path: Path) -> None:
    for name, change in (("a", []), ("b", []), ("c", ["n_routed_experts=32"])):
        write_model_folder(tmp_path / name, change, fp8=False)
    keys = [compute_sizes_key(load_shape(str(tmp_path / name))) for name in "abc"]
    assert keys[0] == keys[1] != keys[2]


def test_prompts_are_the_same_for_every_engine() -> None:
    prompts = make_prompts(100, 9, 20, seed=3)
    assert prompts == make_prompts(100, 9, 20, seed=3)
    assert [len(prompt) for prompt in prompts] == [20, 19, 18, 17, 16, 15, 14, 20, 19]
    assert min(min(prompt) for prompt in prompts) >= 2


def test_position_keeps_the_likeliest_tokens_and_the_sampled_one() -> None:
    """The 5 likeliest of 7 listed tokens stay; the answer's own token is added if it is not among them."""
    tops = {f"t{n}": -float(n) for n in range(7)}
    answer = Answer(tokens=["t9"], names=["t9"], logprobs=[-9.0], tops=[tops])
    assert list_positions(answer) == [Position(9, {n: -float(n) for n in range(5)} | {9: -9.0})]
    with pytest.raises(WorkerError, match="lists no log-probabilities"):
        list_positions(Answer(tokens=["9"]))


def test_special_token_without_text_is_identified_by_its_id() -> None:
    tops = {"": -0.5, " t8": -1.0}
    answer = Answer(tokens=["1"], names=[""], logprobs=[-0.5], tops=[tops])
    assert list_positions(answer) == [Position(1, {1: -0.5, 8: -1.0})]
    with pytest.raises(WorkerError, match="answered '', which is not one of t0"):
        list_positions(msgspec.structs.replace(answer, tokens=[""]))
