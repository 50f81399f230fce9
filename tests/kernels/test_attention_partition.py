"""Test the division of attention among programs: every row once, balanced shares, and every piece in its own slot."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.kernels.attention.partition import pieces, share, slot_of

TILE = 4
SLACK = 2


@triton.jit
def _walk_kernel(
    lengths,
    seen,
    longest,
    slots,
    pieces_of,
    batch,
    parts,
    most,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Count in `seen` [B, most] how often each tile is visited, in the order of the attention kernels."""
    part = tl.program_id(0)
    b_B = tl.arange(0, BLOCK_B)
    lengths_B = tl.load(lengths + b_B, mask=b_B < batch, other=0)
    b, start, begin, end, size = share(lengths_B, b_B, part, parts, batch, TILE, LEAST, SLACK)
    tl.store(longest + part, end - begin)
    while start < end:
        tiles = tl.cdiv(tl.load(lengths + b), TILE)
        t0 = tl.maximum(begin - start, 0)
        t1 = tl.minimum(tiles, end - start)
        if t0 < t1:
            for t in range(t0, t1):
                tl.atomic_add(seen + b * most + t, 1)
            if t0 == 0:
                tl.store(pieces_of + 2 * b, part)
                tl.store(pieces_of + 2 * b + 1, pieces(tiles, t1, size))
            if (t0 > 0) | (t1 < tiles):
                tl.atomic_add(slots + slot_of(part, t1 < tiles), 1 + 1000 * b)
        start += tiles
        b += 1


def walk_shares(lengths, parts, *, least, device):
    """Return the visits of each tile, the tiles of each share, the content of each slot, and the pieces of each
    request.
    """
    batch = len(lengths)
    tiles = [-(-n // TILE) for n in lengths]
    most = max(*tiles, 1, 1)
    new = {"dtype": torch.int32, "device": device}
    seen, longest = torch.zeros(batch, most, **new), torch.zeros(parts, **new)
    slots, pieces_of = torch.zeros(2 * parts, **new), torch.zeros(batch, 2, **new)
    _walk_kernel[(parts,)](
        torch.tensor(lengths, **new),
        seen,
        longest,
        slots,
        pieces_of,
        batch,
        parts,
        most,
        TILE=TILE,
        LEAST=least,
        SLACK=SLACK,
        BLOCK_B=triton.next_power_of_2(batch),
    )
    return tiles, seen.tolist(), longest.tolist(), slots.tolist(), pieces_of.tolist()


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=9),
    parts=st.integers(1, 12),
    least=st.integers(1, 3),
)
def test_each_tile_is_in_one_share_and_each_piece_in_its_own_slot(lengths, parts, least):
    """Check that the pieces of a request are in the slots of consecutive shares, where the merge reads them, and no
    other slot is used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiles, seen, _, slots, pieces_of = walk_shares(lengths, parts, least=least, device=device)
    found = {}
    for b, count in enumerate(tiles):
        assert seen[b] == [1] * count + [0] * (len(seen[b]) - count)
        first, many = pieces_of[b]
        for i in range(many if many > 1 else 0):
            found[2 * (first + i) + (i + 1 < many)] = 1 + 1000 * b
    assert {slot: mark for slot, mark in enumerate(slots) if mark} == found


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=9),
    parts=st.integers(1, 12),
)
def test_shares_exceed_an_equal_share_only_by_the_slack(lengths, parts):
    """Allow an equal share, a sixteenth more, and SLACK tiles, so that requests can stay whole."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiles, _, longest, _, _ = walk_shares(lengths, parts, least=1, device=device)
    equal = -(-sum(tiles) // parts)
    assert max(longest) <= equal + equal // 16 + SLACK


@pytest.mark.parametrize(
    ("lengths", "parts", "expected"),
    [
        # 2,500 tiles and three: four shares of 626 tiles, and the long request alone fills the first three.
        pytest.param((10_000, 3, 1, 2), 4, [626, 626, 626, 625], id="one-long-request-among-short-ones"),
        # Three requests of 10 tiles each: three shares, one request each, though four would have 8 tiles.
        pytest.param((40, 40, 40), 4, [10, 10, 10, 0], id="whole-within-the-slack"),
        # 40 tiles for 8 programs, four of them for each request.
        pytest.param((80, 80), 8, [5] * 8, id="each-request-in-equal-pieces"),
        # 20 tiles in requests of 5 for two programs.
        pytest.param((20, 20, 20, 20), 2, [10, 10], id="several-whole-requests-each"),
        pytest.param((0, 0), 3, [0, 0, 0], id="no-tiles"),
    ],
)
def test_shares_are_as_even_as_whole_requests_allow(lengths, parts, expected, device):
    """Compare the tiles of each share; a tile is 4 rows and the slack 2 tiles."""
    assert walk_shares(lengths, parts, least=1, device=device)[2] == expected
