"""Steps that verify drafts, over 1 to 4 gloo ranks: they compute what decoding one token at a time computes."""

import json

import pytest

from tests.distributed import mtp_ranks as ranks
from tests.distributed.forked import forked

LIMIT = 1e-4


def count_accepted(wrong: tuple[int, ...], drafts: int, steps: int) -> list[int]:
    """Drafts accepted in each step: those before the next wrong one, of `drafts`; the step then goes on behind its own token."""
    found, at = [], 0
    for _ in range(steps):
        right = next((k for k in range(drafts) if at + k in wrong), drafts)
        found.append(right)
        at += right + 1
    return found


def test_rejections_of_the_requests_by_hand():
    """3 drafts a step, tokens 1, 2 and 5 drafted wrongly. Step 1 accepts token 0, and samples 1; step 2 begins with token 2, which
    is wrong, and samples it; step 3 accepts 3 and 4, and samples 5; step 4 accepts 6, 7 and 8.
    """
    assert count_accepted((1, 2, 5), 3, 4) == [1, 0, 2, 3]


@pytest.mark.distributed
@pytest.mark.parametrize("world", ranks.CASES)
def test_verified_steps_are_steps_of_one_token(world, tmp_path):
    """Logits within 1e-4 of the largest, the same tokens, and the drafts accepted that are right.

    Requests have 1 to 19 tokens at first, so that ranks hold none of the tokens of some; all KV rows that belong to no
    token are NaN before and after each step, so also those of rejected drafts.
    """
    forked("tests.distributed.mtp_ranks", str(world), str(tmp_path), log=tmp_path / "log")
    for rank in range(world):
        for case, found in zip(
            ranks.CASES[world], json.loads((tmp_path / f"{world}-{rank}.json").read_text()), strict=True
        ):
            assert found["error"] <= LIMIT, case
            assert found["tokens"] == found["truth"], case
            assert len({token for own in found["truth"] for token in own}) > ranks.NEW // 2, "tokens differ"
            for wrong, accepted in zip(ranks.WRONG_AT, found["accepted"], strict=True):
                enough = next(n for n in range(ranks.NEW + 1) if sum(accepted[:n]) + n >= ranks.NEW - case.drafts)
                assert accepted[:enough] == count_accepted(wrong, case.drafts, enough), case
