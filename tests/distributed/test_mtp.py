"""Test steps that verify drafts over 1 to 4 gloo ranks: they compute the same as decoding one token at a time."""

import json

import pytest

from tests.distributed import mtp_ranks as ranks
from tests.distributed.forked import run_forked

LIMIT = 1e-4


def count_accepted(wrong: tuple[int, ...], drafts: int, steps: int) -> list[int]:
    """Return the drafts accepted in each step: those before the next wrong one, at most `drafts`; the next step starts
    after its token.
    """
    found, at = [], 0
    for _ in range(steps):
        right = next((k for k in range(drafts) if at + k in wrong), drafts)
        found.append(right)
        at += right + 1
    return found


def test_count_accepted_stops_at_each_wrong_draft():
    """Use 3 drafts a step, with tokens 1, 2 and 5 drafted wrongly. Step 1 accepts token 0, and samples 1; step 2
    begins with token 2, which is wrong, and samples it; step 3 accepts 3 and 4, and samples 5; step 4 accepts 6, 7 and
    8.
    """
    assert count_accepted((1, 2, 5), 3, 4) == [1, 0, 2, 3]


@pytest.fixture(scope="module", params=ranks.CASES)
def run(request, tmp_path_factory):
    """Return the number of ranks, and the folder of their results."""
    world, folder = request.param, tmp_path_factory.mktemp("mtp")
    run_forked("tests.distributed.mtp_ranks", str(world), str(folder), log=folder / "log")
    return world, folder


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """Return the drafts of one rank: behind decoded tokens, and of served requests."""
    folder = tmp_path_factory.mktemp("alone")
    run_forked("tests.distributed.mtp_ranks", "1", str(folder), log=folder / "log")
    return json.loads((folder / "drafted-1-0.json").read_text()), json.loads((folder / "served-1-0.json").read_text())


@pytest.mark.distributed
def test_steps_with_drafts_equal_steps_of_one_token(run):
    """Allow 1e-4 of the largest logit; tokens are equal, and correct drafts are accepted. Requests start with 1 to 19
    tokens, so that ranks hold none of the tokens of some; unused KV rows, with those of rejected drafts, are NaN
    before and after each step.
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
def test_drafts_do_not_depend_on_layout_or_division_into_steps(run, drafted):
    """Compare drafts behind steps of one token, which rejected all drafts, and of four, which accepted all, with those
    of a single rank.
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
        if rank // layout.attn_tp == 0:
            assert found == drafted[0]


@pytest.mark.distributed
def test_served_requests_have_the_same_drafts_as_on_one_rank(run, drafted):
    """Serve decodes and prompts, whole and in chunks, on replicas with different ones; unused KV rows are NaN. Each
    rank of a replica has the same drafts, and all replicas together have those behind all tokens.
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
