"""Compare the block sums that measure memory bandwidth with a reference."""

import torch

from dcpbench.kernels.read import BLOCK, read_fused, read_memory


def test_block_sum_includes_every_number(device):
    """Check all numbers, because a kernel that read fewer would report a bandwidth that does not exist."""
    x = torch.randn(3 * BLOCK, device=device)
    out = torch.full((3,), float("nan"), device=device)
    read_fused(x, out)
    assert torch.allclose(out.double(), x.double().view(3, BLOCK).sum(1), atol=1e-2)
    for place in (0, BLOCK - 1, BLOCK, 3 * BLOCK - 1):
        more = x.clone()
        more[place] += 1000
        changed = torch.empty(3, device=device)
        read_fused(more, changed)
        assert (changed - out).abs().argmax() == place // BLOCK


def test_reference_returns_block_sums():
    x = torch.arange(2.0 * BLOCK)
    out = torch.empty(2)
    read_memory(x, out)
    assert out.tolist() == [BLOCK * (BLOCK - 1) / 2, BLOCK * (BLOCK - 1) / 2 + BLOCK * BLOCK]
