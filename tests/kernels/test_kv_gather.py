"""Compare packing a rank's rows and gathering all ranks' parts in token order with references that copy row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.kernels.kv_gather import (
    gather_in_token_order,
    gather_in_token_order_reference,
    make_request_table,
    pack_rows,
    pack_rows_fused,
    pack_rows_reference,
)
from dcpbench.points import layout
from dcpbench.points.layout import Prefix

NAN = float("nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_numbered_parts(prefix: Prefix, width: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the rows of all tokens in order, each filled with its number, and the ranks' parts of them, padded with
    NaN.
    """
    rows = torch.arange(prefix.tokens, dtype=torch.float32)[:, None].repeat(1, width)
    parts = [torch.full((prefix.part_rows, width), NAN) for _ in range(prefix.dcp)]
    for rank, part in enumerate(parts):
        for first, start, length in zip(prefix.list_first_rows(rank), prefix.starts, prefix.lengths, strict=False):
            mine = layout.list_local_tokens(length, rank, prefix.dcp, prefix.interleave)
            part[first : first + len(mine)] = rows[[start + token for token in mine]]
    return rows.to(device), [part.to(device) for part in parts]


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    dcp=st.sampled_from([1, 2, 3, 8]),
    interleave=st.sampled_from([1, 4]),
    width=st.sampled_from([16, 20, 576]),
)
def test_gather_returns_rows_in_token_order_and_writes_no_others(lengths, dcp, interleave, width):
    """Use requests of all lengths, some empty, seen from each rank, with its own part first."""
    prefix = Prefix(tuple(lengths), dcp, interleave)
    rows, parts = make_numbered_parts(prefix, width, DEVICE)
    slow = torch.full((prefix.tokens + 3, width), NAN, device=DEVICE)
    gather_in_token_order_reference(slow, parts, prefix)
    assert torch.equal(slow[: prefix.tokens], rows)
    for rank in range(dcp):
        out = torch.full_like(slow, NAN)
        around = [parts[(rank + n) % dcp] for n in range(dcp)]
        addresses = [part.data_ptr() for part in around]
        gather_in_token_order(out, around[0], addresses, rank, prefix, make_request_table(prefix, DEVICE))
        assert torch.equal(out[: prefix.tokens], rows)
        assert bool(out[prefix.tokens :].isnan().all())


def test_prefix_offsets_of_three_requests_on_four_ranks():
    """Use requests of 6, 0 and 3 tokens on 4 ranks: shares 2 2 1 1, none, 1 1 1 0; the largest part has 3 rows."""
    prefix = Prefix((6, 0, 3), 4)
    assert prefix.starts == [0, 6, 6, 9]
    assert [prefix.list_first_rows(rank) for rank in range(4)] == [
        [0, 2, 2, 3],
        [0, 2, 2, 3],
        [0, 1, 1, 2],
        [0, 1, 1, 1],
    ]
    assert (prefix.tokens, prefix.part_rows) == (9, 3)
    assert make_request_table(prefix, torch.device("cpu")).tolist() == [
        [0, 0, 0, 0, 0],
        [6, 2, 2, 1, 1],
        [6, 2, 2, 1, 1],
    ]


def test_uneven_lengths_add_up_to_the_tokens():
    """Divide 10 tokens in proportion to 1 2 3 4; 7 tokens begin at 7 · 0, 2, 6 and 12 twentieths."""
    assert Prefix.make_uneven(10, 4, 1).lengths == (1, 2, 3, 4)
    assert Prefix.make_uneven(7, 4, 1).lengths == (0, 2, 2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("width", [48, 576])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_packing_copies_the_named_rows_in_order(count, width, dtype, device):
    """Fill rows that are not named with 0xFF, NaN in bf16; rows behind the packed ones must keep it."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(64, generator=generator)[:count].to(torch.int32).to(device)
    kv = torch.full((64, width * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
    kv[rows.long()] = torch.randint(0, 100, (count, kv.shape[1]), generator=generator).to(torch.uint8).to(device)
    for pick in (pack_rows, pack_rows_fused, pack_rows_reference):
        part = torch.full((count + 2, width * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
        pick(part.view(dtype), kv.view(dtype), rows)
        assert torch.equal(part[:count], kv[rows.long()])
        assert bool((part[count:] == 0xFF).all())


def test_rows_of_unaligned_sizes_are_rejected(device):
    """Reject them, because a kernel that reads 16 bytes at a time would read past them."""
    prefix = Prefix((3,), 1)
    out = torch.zeros(3, 5, device=device)
    with pytest.raises(ValueError, match="20 bytes"):
        gather_in_token_order(out, out.clone(), [out.data_ptr()], 0, prefix, make_request_table(prefix, device))


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements_are_gathered_and_packed():
    """Use 4,000,000 tokens of 576: the last one starts at element 2,303,999,424, past 2^31 = 2,147,483,648."""
    prefix = Prefix((4_000_000,), 2)
    parts = [torch.zeros(2_000_000, 576, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    parts[1][-1] = 1.0
    out = torch.full((4_000_000, 576), 2.0, dtype=torch.bfloat16, device="cuda")
    table = make_request_table(prefix, torch.device("cuda"))
    gather_in_token_order(out, parts[0], [part.data_ptr() for part in parts], 0, prefix, table)
    assert int(out[-1].sum()) == 576
    assert int(out[:-1].count_nonzero()) == 0
    back = torch.zeros(1, 576, dtype=torch.bfloat16, device="cuda")
    pack_rows(back, out, torch.tensor([3_999_999], dtype=torch.int32, device="cuda"))
    assert int(back.sum()) == 576
