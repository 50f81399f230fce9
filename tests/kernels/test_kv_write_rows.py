"""Test the write of KV rows of one rank against the reference: bits of stored rows, and of all that must not change."""

import pytest
import torch

from dcpbench.kernels.kv_indices import Share
from dcpbench.kernels.kv_write import (
    Tiling,
    choose_tiling,
    launch_kernel,
    write_kv,
    write_kv_fused,
    write_kv_reference,
)

BF16, E4M3, BYTES = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
ALONE = Share(rank=0, dcp=1)
POISON = 0xA5  # byte that fills a pool before a write; no row of these tests consists of it


def poisoned(count: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A pool whose every byte is POISON."""
    return torch.full((count, width * dtype.itemsize), POISON, dtype=BYTES, device=device).view(dtype)


def bits(pool: torch.Tensor) -> torch.Tensor:
    """The bytes of a pool, as NaN is unlike itself."""
    return pool.view(BYTES)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [BF16, E4M3, BYTES], ids=str)
@pytest.mark.parametrize("width", [48, 576])
@pytest.mark.parametrize("share", [1, 4, 8])
@pytest.mark.sample(5)
def test_own_rows_are_stored_and_all_others_stay_bit_identical(share, width, dtype, scale, index, device):
    """Of 24 tokens every `share`-th goes to a row of its own, in no order; what the others hold is NaN."""
    tokens = 24
    generator = torch.Generator().manual_seed(share)
    mine = torch.arange(tokens) % share == share - 1
    row = torch.where(mine, torch.randperm(tokens + 7, generator=generator)[:tokens], -1).to(index).to(device)
    new = torch.randn(tokens, width, generator=generator, dtype=torch.float32)
    new[~mine] = float("nan")
    new = new.to(BF16).to(device)
    wanted, got = (poisoned(tokens + 7, width, dtype, device) for _ in range(2))
    write_kv_reference(wanted, new, row, ALONE, scale)
    write_kv_fused(got, new, row, ALONE, scale)
    assert torch.equal(bits(wanted), bits(got))
    assert int((bits(got) != POISON).any(dim=1).sum()) == tokens // share


@pytest.mark.parametrize("tiles", [Tiling(16, 16, 4), Tiling(32, 4, 1), Tiling(8, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, BYTES], ids=str)
@pytest.mark.parametrize("share", [1, 3, 50])
@pytest.mark.sample(5)
def test_however_tokens_are_dealt_to_programs_the_same_rows_are_stored(share, dtype, tiles, device):
    """Of 100 tokens every `share`-th: programs with more rows than they store at a time, with fewer, and with none."""
    tokens = 100
    mine = torch.arange(tokens) % share == share - 1
    row = torch.where(mine, torch.randperm(tokens + 7, generator=torch.Generator().manual_seed(1))[:tokens], -1)
    new = torch.randn(tokens, 576, generator=torch.Generator().manual_seed(2))
    new[~mine] = float("nan")
    new, row = new.to(BF16).to(device), row.to(device)
    wanted, got = (poisoned(tokens + 7, 576, dtype, device) for _ in range(2))
    write_kv_reference(wanted, new, row, ALONE, 0.5)
    launch_kernel(got, new, row, tiles, 0.5, ALONE)
    assert torch.equal(bits(wanted), bits(got))


def test_many_tokens_of_which_few_are_stored_are_numbered_first():
    """Below 8,192 tokens, or where every second may be stored, a program stores all that it looks at."""
    assert choose_tiling(8191, 8) == choose_tiling(65536, 1) == choose_tiling(65536, 2)
    assert choose_tiling(8192, 8).tile > choose_tiling(8192, 8).rows


@pytest.mark.parametrize("dtype", [BF16, BYTES], ids=str)
@pytest.mark.parametrize("tokens", [0, 6])
def test_no_valid_row_at_all_is_no_write(tokens, dtype, device):
    """A rank that owns none of the tokens, and a step without tokens."""
    pool = poisoned(4, 48, dtype, device)
    row = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    write_kv_fused(pool, torch.ones(tokens, 48, dtype=BF16, device=device), row, ALONE)
    assert bool((bits(pool) == POISON).all())


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0])
def test_every_bf16_becomes_the_float8_that_torch_makes_of_it(scale, device):
    """All 65,536 of them: NaN, infinities (±448), subnormals of both types and every tie.

    The sign of NaN means nothing, and a product loses it on a GPU: it is left out of the comparison.
    """
    new = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16).view(64, 1024).to(device)
    pool = poisoned(64, 1024, E4M3, device)
    write_kv_fused(pool, new, torch.arange(64, device=device), ALONE, scale)
    numbers = (new.cpu().float() * (1.0 / scale)).clamp(-448.0, 448.0).to(E4M3)
    wanted, got = (torch.where(x & 0x7F == 0x7F, 0x7F, x) for x in (bits(numbers), bits(pool.cpu())))
    assert torch.equal(wanted, got)


def test_float8_rounds_to_nearest_and_ties_to_even(device):
    """Between 16 and 32 the step is 2: 17 lies between 16 and 18, whose last bits are 0 and 1; 19 between 18 and 20.

    1,000 passes the largest number, 448. With scale 2 the values are halved first, and between 8 and 16 the step is 1:
    8.5 becomes 8 and 9.5 becomes 10; 34 becomes 17, then 16; 500 passes 448 still.
    """
    new = torch.tensor([[17.0, 19.0, 1000.0, -17.0, -1000.0, 34.0]], dtype=BF16, device=device)
    pool = poisoned(1, 6, E4M3, device)
    write_kv_fused(pool, new, torch.zeros(1, dtype=torch.int64, device=device), ALONE)
    assert pool.float().tolist() == [[16.0, 20.0, 448.0, -16.0, -448.0, 32.0]]
    write_kv_fused(pool, new, torch.zeros(1, dtype=torch.int64, device=device), ALONE, 2.0)
    assert pool.float().tolist() == [[8.0, 10.0, 448.0, -8.0, -448.0, 16.0]]


def test_the_operator_takes_the_reference_on_the_cpu_and_the_kernel_on_a_gpu(device):
    pool = poisoned(3, 8, BF16, device)
    new, locs = torch.ones(2, 8, dtype=BF16, device=device), torch.tensor([2, -1], device=device)
    write_kv(pool, new, locs, Share(rank=0, dcp=1))
    assert pool[2].tolist() == [1.0] * 8
    assert bool((bits(pool[:2]) == POISON).all())


@pytest.mark.gpu
def test_row_addresses_past_two_to_the_31_elements_are_right():
    """4,000,000 rows of 576: row 3,999,999 starts at element 2,303,999,424, past 2^31 = 2,147,483,648."""
    pool = torch.zeros(4_000_000, 576, dtype=BYTES, device="cuda")
    row = torch.tensor([3_999_999], dtype=torch.int32, device="cuda")
    write_kv_fused(pool, torch.ones(1, 576, dtype=BF16, device="cuda"), row, ALONE)
    assert int((pool[3_999_999] == 0x38).sum()) == 576, "1.0 in float8_e4m3fn"
    assert int(pool[:3_999_999].count_nonzero()) == 0
