"""Implement operators that torch has only for GPUs and that ordinary modules need, in terms of others."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (h, c, activations) of one step; gates are (batch, 4 · hidden) in torch's order input, forget, cell,
    output.
    """
    gates = _add_bias(input_gates, input_bias) + _add_bias(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the gates before activation, of the cell, and of both biases."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_h * o * (1 - tanh * tanh) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat(
        [grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_h * tanh * o * (1 - o)], 1
    )
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (h, activations) of one step; gates are (batch, 3 · hidden) in torch's order reset, update, new."""
    ir, iz, inew = _add_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hnew = _add_bias(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (inew + reset * hnew).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, hnew], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the input's gates, the hidden gates, the hidden state, and both biases."""
    reset, update, new, hx, hnew = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_reset = grad_new * hnew * reset * (1 - reset)
    inputs = torch.cat([grad_reset, grad_update, grad_new], 1)
    hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    return inputs, hidden, grad_hy * update, inputs.sum(0) if has_bias else None, hidden.sum(0) if has_bias else None


def histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002  (torch's names)
    """Compute torch.histc for integers, which torch implements only on a GPU."""
    return torch.histc(values.double(), bins, min, max).to(values.dtype)


def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return a product in a wider dtype than its factors."""
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    _max_q: int,
    _max_k: int,
    _dropout: float,
    is_causal: bool,
    *_: bool,
    scale: float | None = None,
    **_others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute attention of packed sequences, (tokens, heads, width) each; the last query attends to the last key."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.zeros_like(query), query.new_full((query.shape[1], len(query)), float("inf"), dtype=torch.float32)
    ends = zip(itertools.pairwise(cum_seq_q.tolist()), itertools.pairwise(cum_seq_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in ends:
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1].float(), key[k0:k1].float()) * scale
        if is_causal:
            hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(k1 - k0 - (q1 - q0) + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        if k1 > k0:
            lse[:, q0:q1] = scores.logsumexp(-1)
            out[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[k0:k1].float()).to(out.dtype)
    state = torch.zeros(2, dtype=torch.int64)
    return out, lse, state, state, query.new_empty(0)


def run_in_float32(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that the CPU lacks for a narrow dtype in float32, with results in the dtype
    of its first tensor.
    """
    narrow = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and _is_narrow(t)]
    if not narrow or func._schema.is_mutable:
        return NotImplemented
    wide = tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and _is_narrow(t) else t, (args, kwargs))
    result = func(*wide[0], **wide[1])
    dtype = narrow[0].dtype
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype == torch.float32 else t, result)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < torch.float32.itemsize


def _add_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


_OURS: dict[str, Callable[..., Any]] = {
    "aten::histc": histc,
    "aten::mm": mm,
    "aten::_flash_attention_forward": flash_attention_forward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
}


def find_slow_version(func: Any) -> Callable[..., Any] | None:
    """Return a Python version of an operator that the CPU does not have, ours or torch's own; None without one."""
    if ours := _OURS.get(func._schema.name):
        return ours
    from torch._decomp import decomposition_table  # late, as that takes a second

    return decomposition_table.get(func)
