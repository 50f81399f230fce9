"""`verify --url`: differences of servers are found where they are, and none where there are none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from dcpbench import cli
from dcpbench.errors import UsageError
from dcpbench.servers.agreement import (
    AGREE,
    DIFFER,
    UNDECIDED,
    Answer,
    between,
    check_decides,
    compare,
    distance,
    drift,
    judge,
)
from dcpbench.servers.ask import answer_of, ask_all, contexts_for
from dcpbench.servers.client import Target
from dcpbench.servers.events import read_completion
from tests.servers.fake_server import Model, Running, Script
from tools.client_accuracy import served

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.servers.agreement import Found


def answer(*tokens: str, logprobs: tuple[float, ...] = (), gaps: tuple[float, ...] = ()) -> Answer:
    """An answer of these tokens."""
    return Answer(tokens=list(tokens), logprobs=list(logprobs), gaps=list(gaps))


def made(
    rng: np.random.Generator, *, flips: float = 0.0, noise: float = 0.0, wrong: int | None = None, off: float = 0.0
) -> Answer:
    """Of 32 tokens, of which some are others by chance, or from `wrong` on; log-probabilities that are off."""
    tokens = [f"t{i}" for i in range(32)]
    logprobs = list(rng.normal(-1 + off, noise, 32)) if noise else [-1.0 + off] * 32
    for i in np.flatnonzero(rng.random(32) < flips):
        tokens[i] = "other"
    if wrong is not None:
        tokens[wrong:] = ["wrong"] * (32 - wrong)
    return Answer(tokens=tokens, logprobs=logprobs, gaps=[1.0] * 32)


def compared(rng: np.random.Generator, context: int = 100, **b: float) -> Found:
    """Eight prompts, three answers of each side; B as said, both with chance."""
    usual = {"flips": 0.003, "noise": 0.02}
    sides = [[[made(rng, **(usual | how)) for _ in range(3)] for _ in range(8)] for how in ({}, b)]  # type: ignore[arg-type]
    return compare(context, *sides)


@pytest.mark.long
def test_a_server_compared_with_itself_gives_no_alarm() -> None:
    """20 times, with noise of both kinds, at eight lengths each."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        _, verdict, _ = judge([compared(rng) for _ in range(8)])
        assert verdict == AGREE


def test_a_wrong_token_and_a_drift_are_found_in_the_same_noise() -> None:
    """A token of 32, or 0.3 of log-probability."""
    rng = np.random.default_rng(2)
    judged, verdict, why = judge([compared(rng, 50), compared(rng, wrong=3)])
    assert verdict == DIFFER
    assert [f.tokens_differ for f in judged] == [False, True]
    assert "from prompts of 100 tokens on" in why
    judged, verdict, _ = judge([compared(rng, 50), compared(rng, off=0.3)])
    assert verdict == DIFFER
    assert [f.drifts for f in judged] == [False, True]


def test_what_rounding_does_is_no_difference() -> None:
    """Deterministic servers that are 0.01 apart, and a divergence where two tokens were nearly as likely."""
    a, b = (answer("x", "y", logprobs=(p, p), gaps=(1.0, 0.03)) for p in (-1.0, -1.01))
    _, verdict, _ = judge([compare(9, [[a] * 3] * 8, [[b] * 3] * 8)])
    assert verdict == AGREE
    other = answer("x", "z", logprobs=(-1.01, -1.0), gaps=(1.0, 0.03))
    _, verdict, why = judge([compare(9, [[a] * 3] * 8, [[other] * 3] * 8)])
    assert verdict == AGREE
    assert "near-ties" in why
    sure = answer("x", "y", logprobs=(-1.0, -1.0), gaps=(1.0, 2.0))
    _, verdict, _ = judge([compare(9, [[sure] * 3] * 8, [[other] * 3] * 8)])
    assert verdict == DIFFER


def test_a_server_that_does_not_repeat_itself_says_nothing() -> None:
    """Half of its own pairs differ."""
    rng = np.random.default_rng(3)
    _, verdict, why = judge(
        [
            compared(rng, flips=0.01),
            compare(200, *[[[made(rng, flips=0.3) for _ in range(3)] for _ in range(8)] for _ in "ab"]),
        ]
    )
    assert verdict == UNDECIDED
    assert "at prompts of 200 tokens" in why


def test_distances() -> None:
    """Earlier differences are larger; drift is that of what came before."""
    assert distance(answer("a", "b"), answer("a", "b")) == 0
    assert distance(answer("a", "b"), answer("x", "b")) == 1
    assert distance(answer("a", "b"), answer("a", "x")) == 0.5
    assert distance(answer("a", "b"), answer("a")) == 0.5
    assert drift(answer("a", "b", logprobs=(-1.0, -2.0)), answer("a", "x", logprobs=(-1.5, -9.0))) == 0.5
    assert drift(answer("a"), answer("a", logprobs=(-1.0,))) is None
    with pytest.raises(UsageError, match="use --repeats 2"):
        compare(1, [[answer("a")]], [[answer("a")]])


@pytest.mark.parametrize(
    ("prompts", "runs", "lengths", "said"),
    [
        (8, 3, 10, ""),
        (5, 3, 10, ""),
        (4, 3, 10, "use --num-prompts 5 or more"),
        (9, 2, 1, "use --num-prompts 10 or more"),
        (10, 2, 1, ""),
        (
            8,
            2,
            10,
            "by --num-prompts 8 and --repeats 2 no difference could be told from chance at 10 lengths; use --num-prompts 11",
        ),
        (11, 2, 10, ""),
        (8, 1, 1, "use --repeats 3 or more"),
        (8, 3, 40, ""),
        (8, 3, 41, "41 lengths of prompts are too many for one comparison; name fewer with --context."),
    ],
)
def test_a_comparison_that_could_find_no_difference_is_refused(
    prompts: int, runs: int, lengths: int, said: str
) -> None:
    """Of n prompts with r answers of each side there are C(2r − 1, r)ⁿ relabellings, and the least p is 1 of them."""
    if not said:
        check_decides(prompts, runs, lengths)
        return
    with pytest.raises(UsageError) as error:
        check_decides(prompts, runs, lengths)
    assert said in str(error.value)


def test_only_near_ties_are_called_so() -> None:
    """Two prompts cannot show that an answer that is sure to differ does, but it is no tie."""
    sure, other = answer("x", "y", gaps=(1.0, 2.0)), answer("x", "z", gaps=(1.0, 2.0))
    _, verdict, why = judge([compare(9, [[sure] * 3] * 2, [[other] * 3] * 2)])
    assert (verdict, "near-ties" in why) == (AGREE, False)


def test_the_first_difference_is_looked_for() -> None:
    """Between the last length that agrees and the first that differs, until an answer reaches from one to the other."""
    rng = np.random.default_rng(4)
    judged, _, _ = judge([compared(rng), compared(rng, wrong=0)])
    good, bad = judged
    lengths = [replace(good, context=256), replace(bad, context=512)]
    assert between(lengths, 32) == 384
    assert between([replace(good, context=480), lengths[1]], 32) is None
    assert between([good], 32) is None
    assert between([bad], 32) is None


def test_lengths_of_prompts() -> None:
    """As far as the servers take them, or as typed."""
    assert contexts_for(None, 300, 32) == [64, 128, 256]
    assert contexts_for(None, None, 32)[-1] == 32768
    assert contexts_for([9, 3], 300, 32) == [3, 9]
    with pytest.raises(UsageError, match="can be up to 268"):
        contexts_for([300], 300, 32)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (
            b'{"choices":[{"text":" a b","logprobs":{"tokens":[" a"," b"],"token_logprobs":[-1,-2],"top_logprobs":[{" a":-1," c":-1.5},{" b":-2}]}}]}',
            Answer(tokens=[" a", " b"], logprobs=[-1.0, -2.0], gaps=[0.5, float("inf")]),
        ),
        (
            b'{"choices":[{"message":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-1,"top_logprobs":[{"token":"a","logprob":-1},{"token":"b","logprob":-3}]}]}}]}',
            Answer(tokens=["a"], logprobs=[-1.0], gaps=[2.0]),
        ),
        (b'{"choices":[{"text":"some words"}]}', Answer(tokens=["some", "words"])),
        (b'{"choices":[{"text":"x","token_ids":[5,6]}]}', Answer(tokens=["5", "6"])),
    ],
    ids=["completions", "chat", "text", "ids"],
)
def test_answers_as_apis_put_them(data: bytes, wanted: Answer) -> None:
    """With as much as each says."""
    choices = read_completion(data).choices
    assert choices
    assert answer_of(choices[0]) == wanted


async def found_between(a: Model, b: Model, contexts: list[int], script: Script | None = None) -> list[Found]:
    """Of two servers in this process."""
    async with Running(script, a) as first, Running(script, b) as second:
        return await ask_all(
            [Target.at(first.url, timeout_s=5), Target.at(second.url, timeout_s=5)],
            contexts=contexts,
            prompts=5,
            tokens=16,
            repeats=3,
            seed=0,
            endpoint="completions",
        )


@pytest.mark.parametrize(
    ("b", "wrong"),
    [
        (Model(), []),
        (Model(wrong_from=300), [290, 400]),
        (Model(drift_from=300, drift=0.5), [290, 400]),
        (Model(version="9"), []),
    ],
    ids=["same", "token", "drift", "other-version"],
)
def test_injected_faults_are_found_at_their_place(b: Model, wrong: list[int]) -> None:
    """From 300 tokens of context on: at prompts of 290 in the eleventh token."""
    found = asyncio.run(found_between(Model(), b, [100, 200, 290, 400]))
    judged, _, why = judge(found)
    assert [f.context for f in judged if f.differs] == wrong
    if b.wrong_from:
        assert "first in token 11 of an answer (after 300 tokens of context)" in why


def test_servers_without_logprobs_are_judged_by_tokens() -> None:
    """Also where they take no token ids."""
    strict = Model(strict=True, wrong_from=60)
    found = asyncio.run(found_between(Model(strict=True), strict, [20, 100], Script(takes_ids=False, token_ids=False)))
    judged, verdict, _ = judge(found)
    assert verdict == DIFFER
    assert [f.differs for f in judged] == [False, True]


def test_the_command_ends_as_it_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mistakes are sentences."""
    for words, said in (
        (["--url", "http://127.0.0.1:9", "--tp", "2"], "--tp is an option of dcpbench's own engine"),
        (["--url", "http://127.0.0.1:9", "--url", "x", "--url", "y"], "--url is given 3 times"),
        (["--url", "http://127.0.0.1:9", "--context", "0"], "--context"),
        (["--url", "http://127.0.0.1:9", "--num-prompts", "2"], "use --num-prompts 5 or more"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["verify", *words])
        assert end.value.code
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
    with served("", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["verify", "--url", url, "--context", "16,32", "--new-tokens", "4", "--num-prompts", "5", "--json"])
    assert not end.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == AGREE
    assert [c["context"] for c in said["contexts"]] == [16, 32]


def test_where_one_server_takes_no_ids_both_get_the_same_text() -> None:
    """Else differences would be those of two tokenizers."""

    async def main() -> tuple[list[object], list[object]]:
        async with Running(Script()) as one, Running(Script(takes_ids=False)) as other:
            targets = [Target.at(one.url), Target.at(other.url)]
            await ask_all(targets, contexts=[16], prompts=1, tokens=4, repeats=2, seed=0, endpoint="completions")
            of_one, of_other = ([sent.body["prompt"] for sent in server.server.sent] for server in (one, other))
            return of_one, of_other

    one, other = asyncio.run(main())
    assert isinstance(one[-1], str)
    assert one[-1] == other[-1]


def test_the_shortest_prompts_at_which_a_server_differs_from_itself_are_named() -> None:
    """Of three lengths the second and third are too noisy to say anything."""
    rng = np.random.default_rng(1)
    found = [compared(rng, 100), compared(rng, 200), compared(rng, 400)]
    noisy = [replace(f, differ_within=within) for f, within in zip(found, (0.0, 0.6, 0.7), strict=True)]
    _, verdict, said = judge(noisy)
    assert verdict == UNDECIDED
    assert "at prompts of 200 tokens 60% of a server's own answers differ" in said
