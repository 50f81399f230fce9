"""Compare the write of KV rows of one rank with the reference: the bits of stored rows, and of all unchanged memory."""

import pytest
import torch

from dcpbench.kernels.kv_indices import DcpShard
from dcpbench.kernels.kv_write import (
    Tiling,
    choose_tiling,
    write_kv,
    write_kv_fused,
    write_kv_reference,
)

BF16, E4M3, BYTES = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
ALONE = DcpShard(rank=0, dcp=1)
POISON = 0xA5  # byte that fills a pool before a write; no row of these tests consists of it


def make_poisoned(count: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a pool filled with the byte POISON."""
    return torch.full((count, width * dtype.itemsize), POISON, dtype=BYTES, device=device).view(dtype)


def get_bytes(pool: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a pool, because NaN is not equal to itself."""
    return pool.view(BYTES)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [BF16, E4M3, BYTES], ids=str)
@pytest.mark.parametrize("width", [48, 576])
@pytest.mark.parametrize("share", [1, 4, 8])
@pytest.mark.sample(5)
def test_own_rows_are_stored_and_all_others_stay_unchanged(share, width, dtype, scale, index, device):
    """Store every `share`-th of 24 tokens in a separate row, in random order; the other tokens hold NaN."""
    tokens = 24
    generator = torch.Generator().manual_seed(share)
    mine = torch.arange(tokens) % share == share - 1
    row = torch.where(mine, torch.randperm(tokens + 7, generator=generator)[:tokens], -1).to(index).to(device)
    new = torch.randn(tokens, width, generator=generator, dtype=torch.float32)
    new[~mine] = float("nan")
    new = new.to(BF16).to(device)
    wanted, got = (make_poisoned(tokens + 7, width, dtype, device) for _ in range(2))
    write_kv_reference(wanted, new, row, ALONE, scale)
    write_kv_fused(got, new, row, ALONE, scale)
    assert torch.equal(get_bytes(wanted), get_bytes(got))
    assert int((get_bytes(got) != POISON).any(dim=1).sum()) == tokens // share


@pytest.mark.parametrize("tiles", [Tiling(16, 16, 4), Tiling(32, 4, 1), Tiling(8, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, BYTES], ids=str)
@pytest.mark.parametrize("share", [1, 3, 50])
@pytest.mark.sample(5)
def test_every_tiling_stores_the_same_rows(share, dtype, tiles, device):
    """Store every `share`-th of 100 tokens: programs have more rows than they store at a time, fewer, or none."""
    tokens = 100
    mine = torch.arange(tokens) % share == share - 1
    row = torch.where(mine, torch.randperm(tokens + 7, generator=torch.Generator().manual_seed(1))[:tokens], -1)
    new = torch.randn(tokens, 576, generator=torch.Generator().manual_seed(2))
    new[~mine] = float("nan")
    new, row = new.to(BF16).to(device), row.to(device)
    wanted, got = (make_poisoned(tokens + 7, 576, dtype, device) for _ in range(2))
    write_kv_reference(wanted, new, row, ALONE, 0.5)
    write_kv_fused(got, new, row, ALONE, 0.5, tiles)
    assert torch.equal(get_bytes(wanted), get_bytes(got))


def test_tiling_numbers_rows_first_if_few_of_many_are_stored():
    """Expect programs that store all rows they read below 8,192 tokens, or if every second row may be stored."""
    assert choose_tiling(8191, 8) == choose_tiling(65536, 1) == choose_tiling(65536, 2)
    assert choose_tiling(8192, 8).tile > choose_tiling(8192, 8).rows


@pytest.mark.parametrize("dtype", [BF16, BYTES], ids=str)
@pytest.mark.parametrize("tokens", [0, 6])
def test_step_without_valid_rows_leaves_the_pool_unchanged(tokens, dtype, device):
    """Use a rank that owns none of the tokens, and a step without tokens."""
    pool = make_poisoned(4, 48, dtype, device)
    row = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    write_kv_fused(pool, torch.ones(tokens, 48, dtype=BF16, device=device), row, ALONE)
    assert bool((get_bytes(pool) == POISON).all())


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0])
def test_every_bf16_is_converted_to_float8_as_by_torch(scale, device):
    """Convert all 65,536 values: NaN, infinities (±448), subnormals of both types and every tie. The sign of NaN has
    no meaning, and a product loses it on a GPU: it is not compared.
    """
    new = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16).view(64, 1024).to(device)
    pool = make_poisoned(64, 1024, E4M3, device)
    write_kv_fused(pool, new, torch.arange(64, device=device), ALONE, scale)
    numbers = (new.cpu().float() * (1.0 / scale)).clamp(-448.0, 448.0).to(E4M3)
    wanted, got = (torch.where(x & 0x7F == 0x7F, 0x7F, x) for x in (get_bytes(numbers), get_bytes(pool.cpu())))
    assert torch.equal(wanted, got)


def test_float8_rounds_to_nearest_and_ties_to_even(device):
    """Use a step of 2 between 16 and 32: 17 lies between 16 and 18, with the last bits 0 and 1; 19 between 18 and 20.
    1,000 exceeds the largest number, 448. With scale 2 the values are halved first, and between 8 and 16 the step is
    1: 8.5 becomes 8 and 9.5 becomes 10; 34 becomes 17, then 16; 500 still exceeds 448.
    """
    new = torch.tensor([[17.0, 19.0, 1000.0, -17.0, -1000.0, 34.0]], dtype=BF16, device=device)
    pool = make_poisoned(1, 6, E4M3, device)
    write_kv_fused(pool, new, torch.zeros(1, dtype=torch.int64, device=device), ALONE)
    assert pool.float().tolist() == [[16.0, 20.0, 448.0, -16.0, -448.0, 32.0]]
    write_kv_fused(pool, new, torch.zeros(1, dtype=torch.int64, device=device), ALONE, 2.0)
    assert pool.float().tolist() == [[8.0, 10.0, 448.0, -8.0, -448.0, 16.0]]


def test_write_kv_uses_the_reference_on_cpu_and_the_kernel_on_gpu(device):
    pool = make_poisoned(3, 8, BF16, device)
    new, locs = torch.ones(2, 8, dtype=BF16, device=device), torch.tensor([2, -1], device=device)
    write_kv(pool, new, locs, DcpShard(rank=0, dcp=1))
    assert pool[2].tolist() == [1.0] * 8
    assert bool((get_bytes(pool[:2]) == POISON).all())


@pytest.mark.gpu
def test_row_beyond_two_to_the_31_elements_is_written():
    """Use 4,000,000 rows of 576: row 3,999,999 starts at element 2,303,999,424, past 2^31 = 2,147,483,648."""
    pool = torch.zeros(4_000_000, 576, dtype=BYTES, device="cuda")
    row = torch.tensor([3_999_999], dtype=torch.int32, device="cuda")
    write_kv_fused(pool, torch.ones(1, 576, dtype=BF16, device="cuda"), row, ALONE)
    assert int((pool[3_999_999] == 0x38).sum()) == 576, "1.0 in float8_e4m3fn"
    assert int(pool[:3_999_999].count_nonzero()) == 0
