"""Find waits of backward passes that take another branch for tensor subclasses, and so for the tensors of a dry run.

torch computes some gradients without a wait for tensor subclasses and with one for tensors of a GPU
(torch/csrc/autograd/FunctionsManual.cpp: `prod_backward`, `cumprod_backward`, `masked_fill_backward`, `linalg_eig_backward`). The
operators that arrive here are those of the first branch, so the waits are found by the name of the node that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs import rules
from dcpbench.syncs.dry_run.device_tensor import DeviceTensor
from dcpbench.syncs.dry_run.waits import COUNT, READ, make_wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.sites import Sync


def find_backward_waits(node: Any, args: Sequence[Any]) -> list[Sync]:
    """Return the waits of a node of autograd; `args` are the arguments of its first operator."""
    name = node.name()
    if name == "ProdBackward0" and _get_input_shape(node):
        return [make_wait(rules.SHAPE, "aten::prod_backward", COUNT, direction="DtoH")]
    if name == "ProdBackward1" and _get_input_shape(node):
        return [make_wait(rules.SCALAR, "aten::prod_backward", READ, direction="DtoH")]
    if name == "CumprodBackward0":
        return _find_cumprod_waits(node, args)
    if name == "MaskedFillBackward1" and node.next_functions[1][0] is not None:
        return [make_wait(rules.SHAPE, "aten::masked_fill_backward", "aten::masked_select", direction="DtoH")]
    return []


EIGENVECTORS = frozenset({"LinalgEigBackward0", "LinalgEighBackward0"})  # nodes that check complex gradients


def find_gradient_check(node: Any, func: Any, args: Sequence[Any]) -> list[Sync]:
    """Return the wait of a node that checks the gradient of eigenvectors, at its first `diagonal` of a complex matrix.

    Without a gradient of the eigenvectors there is no such operator, and no check.
    """
    if node.name() in EIGENVECTORS and func is torch.ops.aten.diagonal.default and args[0].is_complex():
        return [make_wait(rules.SCALAR, "aten::allclose", READ, direction="DtoH")]
    return []


def _find_cumprod_waits(node: Any, args: Sequence[Any]) -> list[Sync]:
    """Return one read, and two selections by mask where the product contains a zero and has no second gradient."""
    if _get_input_shape(node).numel() <= 1:
        return []
    read = make_wait(rules.SCALAR, "aten::cumprod_backward", READ, direction="DtoH")
    product = next((a for a in args if isinstance(a, DeviceTensor)), None)
    if product is None or torch.is_grad_enabled() or not bool((product.host_values == 0).any()):
        return [read]
    return [read, *[make_wait(rules.SHAPE, "aten::cumprod_backward", "aten::masked_select", direction="DtoH")] * 2]


def _get_input_shape(node: Any) -> torch.Size:
    """Return the shape of the node's first input; reading the saved tensor would run the program's hooks."""
    function, index = node.next_functions[0]
    return torch.Size(() if function is None else function._input_metadata[index].shape)
