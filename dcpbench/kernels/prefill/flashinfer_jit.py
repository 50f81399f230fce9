"""Find and compile the module of FlashInfer that has the ragged prefill kernels of some columns and dtype.

FlashInfer compiles a module at its first call. These functions use its internals, those of versions 0.6.15 to 0.6.18, to
do the same earlier: with its flags, into its folder, under its lock. Every difference of another version is an exception
here, and then FlashInfer compiles as it does without them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import MutableMapping

NVCC_FLAGS = "NVCC_APPEND_FLAGS"  # nvcc's variable; flags in it do not count as a change of FlashInfer's command lines
CONCURRENT = "--threads=4"  # nvcc runs the front ends of host and device code of a file at the same time


def find_module(width: int, value: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return FlashInfer's description of the module for keys of `width` and values of `value` columns."""
    from flashinfer.jit.attention import gen_batch_prefill_module
    from flashinfer.utils import determine_attention_backend

    backend = determine_attention_backend(
        device, 0, False, False, dtype, dtype, head_dim_qk=width, head_dim_vo=value
    )  # no position encoding, fp32 products, no custom mask
    return gen_batch_prefill_module(
        backend, dtype, dtype, dtype, torch.int32, width, value, 0, False, False, False
    )  # as above, no sliding window, no cap of logits


def is_compiled(width: int, value: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the module exists as a file, or if this version of FlashInfer does not tell."""
    try:
        return bool(find_module(width, value, dtype, device).is_compiled)
    except Exception:  # noqa: BLE001 -- internals of FlashInfer may raise anything
        return True


def compile_module(
    width: int, value: int, dtype: torch.dtype, device: torch.device, env: MutableMapping[str, str] = os.environ
) -> None:
    """Compile the module unless it exists; other processes that need it wait for FlashInfer's lock."""
    module = find_module(width, value, dtype, device)
    if not module.is_compiled:
        env.setdefault(NVCC_FLAGS, CONCURRENT)
        module.build(verbose=False)
