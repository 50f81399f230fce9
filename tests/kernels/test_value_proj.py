"""Test the W_UV projection with activations wider than the weights."""

import pytest
import torch

from dcpbench.kernels.value_proj import project_values, project_values_fused, project_values_reference


@pytest.mark.parametrize("batch", [1, 5, 70])
@pytest.mark.parametrize("heads", [1, 3])
def test_fused_projection_agrees_with_the_reference(heads, batch, device):
    """Use fp32 activations, 16-bit weights, and a transposed view as an attention without exchange returns it."""
    o = torch.randn(batch, heads, 64, device=device).transpose(0, 1)
    w = torch.randn(heads, 64, 32, device=device).half()
    outs = [torch.empty(batch, heads, 32, device=device) for _ in range(2)]
    project_values_reference(o, w, outs[0])
    project_values_fused(o, w, outs[1], precision="ieee")
    assert torch.allclose(outs[0], outs[1], atol=1e-4)


def test_equal_dtypes_use_the_library_product(device):
    """Compute o · w for one head: [1, 2] · [[1, 0], [0, 3]] = [1, 6]."""
    o = torch.tensor([[[1.0, 2.0]]], device=device)
    w = torch.tensor([[[1.0, 0.0], [0.0, 3.0]]], device=device)
    assert project_values(o, w, torch.float32).tolist() == [[[1.0, 6.0]]]
