"""Block sums, which measure how fast memory can be read, against the slow ones."""

import torch

from dcpbench.kernels.read import BLOCK, read_fused, read_memory


def test_every_number_of_a_block_is_in_its_sum(device):
    """A kernel that read less than all would measure a limit that there is not."""
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


def test_the_reference_says_the_same():
    x = torch.arange(2.0 * BLOCK)
    out = torch.empty(2)
    read_memory(x, out)
    assert out.tolist() == [BLOCK * (BLOCK - 1) / 2, BLOCK * (BLOCK - 1) / 2 + BLOCK * BLOCK]
