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


@pytest.fixture(scope="module", params=ranks.CASES)
def run(request, tmp_path_factory):
    """The number of ranks, and the folder of what they found."""
    world, folder = request.param, tmp_path_factory.mktemp("mtp")
    forked("tests.distributed.mtp_ranks", str(world), str(folder), log=folder / "log")
    return world, folder


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """The drafts of one rank: behind decoded tokens, and of served requests."""
    folder = tmp_path_factory.mktemp("alone")
    forked("tests.distributed.mtp_ranks", "1", str(folder), log=folder / "log")
    return json.loads((folder / "drafted-1-0.json").read_text()), json.loads((folder / "served-1-0.json").read_text())


@pytest.mark.distributed
def test_verified_steps_are_steps_of_one_token(run):
    """Logits within 1e-4 of the largest, the same tokens, and the drafts accepted that are right.

    Requests have 1 to 19 tokens at first, so that ranks hold none of the tokens of some; all KV rows that belong to no
    token are NaN before and after each step, so also those of rejected drafts.
    """
    world, folder = run
    for rank in range(world):
        for case, found in zip(
            ranks.CASES[world], json.loads((folder / f"{world}-{rank}.json").read_text()), strict=True
        ):
            assert found["error"] <= LIMIT, case
            assert found["tokens"] == found["truth"], case
            assert len({token for own in found["truth"] for token in own}) > ranks.NEW // 2, "tokens differ"
            for wrong, accepted in zip(ranks.WRONG_AT, found["accepted"], strict=True):
                enough = next(n for n in range(ranks.NEW + 1) if sum(accepted[:n]) + n >= ranks.NEW - case.drafts)
                assert accepted[:enough] == count_accepted(wrong, case.drafts, enough), case


@pytest.mark.distributed
def test_drafts_do_not_depend_on_the_layout_or_on_how_tokens_were_divided_into_steps(run, drafted):
    """A layer drafts behind steps of one token, which rejected all drafts, and of four, which accepted all: the same
    tokens behind the same ones, and on every rank those of one rank alone.
    """
    world, folder = run
    layout = ranks.DRAFTING[world].layout
    for rank in range(world):
        found = json.loads((folder / f"drafted-{world}-{rank}.json").read_text())
        for right, wrong in zip(found["right"], found["wrong"], strict=True):
            both = right.keys() & wrong.keys()
            assert both
            assert [right[at] for at in both] == [wrong[at] for at in both]
            assert len({tuple(tokens) for tokens in wrong.values()}) > len(wrong) // 2, "drafts differ"
        if layout.get_dp_rank(rank) == 0:
            assert found == drafted[0]


@pytest.mark.distributed
def test_served_requests_have_the_drafts_of_one_rank(run, drafted):
    """Steps hold decodes and prompts, whole and in parts, on replicas with different ones; unused KV rows are NaN. Each rank of a
    replica has the same drafts, and all replicas together those behind all tokens.
    """
    world, folder = run
    layout = ranks.DRAFTING[world].layout
    found = [json.loads((folder / f"served-{world}-{rank}.json").read_text()) for rank in range(world)]
    for group in layout.list_attn_groups():
        assert all(found[rank] == found[group[0]] for rank in group)
    together = {at: drafts for one in found for at, drafts in one.items()}
    assert together == drafted[1]
    assert len(together) == len(ranks.SERVED) * (ranks.NEW - 1)
    assert len({tuple(drafts) for drafts in together.values()}) > len(together) // 2, "drafts differ"
