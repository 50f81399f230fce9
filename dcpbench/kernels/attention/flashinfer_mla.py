"""FlashInfer's paged MLA decode (fa3 on Hopper, fa2 elsewhere). Its log2 LSE becomes natural log here, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec, Shards

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommended size for split-KV partials
_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


def get_workspace(device: torch.device, nbytes: int = WORKSPACE_BYTES) -> torch.Tensor:
    """Return the workspace of a device of so many bytes, which calls in one stream share."""
    # One per device and size, never freed: a workspace freed under a captured graph is an illegal access (vLLM #45487).
    if (device, nbytes) not in _workspaces:
        _workspaces[device, nbytes] = torch.empty(nbytes, dtype=torch.int8, device=device)
    return _workspaces[device, nbytes]


def allocate_ints(count: int, device: torch.device) -> torch.Tensor:
    """Return `count` int32 zeros on the device."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def copy_to_pinned(values: np.ndarray) -> torch.Tensor:
    """Return the values as int32 in pinned memory."""
    return torch.from_numpy(values.astype(np.int32)).pin_memory()


class FlashInferBackend:
    """BatchMLAPagedAttentionWrapper in CUDA-graph mode. `plan` copies from pinned memory, without waiting."""

    tables = None
    rounds: tuple[str, ...] = ()

    def __init__(self, spec: AttentionSpec) -> None:
        if (spec.latent, spec.rope) != (512, 64) or spec.dtype not in (torch.bfloat16, torch.float16):
            raise UsageError(
                f"--backend flashinfer takes latent 512, rope 64 in bf16 or fp16, not {spec.latent}, {spec.rope} in "
                f"{str(spec.dtype).removeprefix('torch.')}; use --backend triton."
            )
        self.spec = spec
        self.wrapper = BatchMLAPagedAttentionWrapper(
            get_workspace(spec.device),
            use_cuda_graph=True,
            qo_indptr=allocate_ints(spec.batch + 1, spec.device),
            kv_indptr=allocate_ints(spec.batch + 1, spec.device),
            kv_indices=allocate_ints(spec.batch * spec.max_pages, spec.device),
            kv_len_arr=allocate_ints(spec.batch, spec.device),
            backend="auto",
        )
        # A plan is copied to the device from the wrapper's pinned buffer, behind the step that may still run; the next
        # plan must not be written over it. The host is never two steps ahead, so two buffers are enough.
        first = self.wrapper._pin_memory_int_workspace_buffer  # noqa: SLF001 - there is no other way to it
        self.staging = (first, torch.empty_like(first, pin_memory=True))
        self.plans = 0

    def plan_on_device(self) -> None:
        """Implement Backend.plan_on_device. `plan` does the work."""

    def plan(self, shards: Shards) -> None:
        """Implement Backend.plan."""
        spec = self.spec
        used = [-(-length // spec.page_size) for length in shards.lengths]
        pages = np.concatenate([p[:n] for p, n in zip(shards.pages, used, strict=True)])
        self.wrapper._pin_memory_int_workspace_buffer = self.staging[self.plans % 2]  # noqa: SLF001 - see __init__
        self.plans += 1
        self.wrapper.plan(
            copy_to_pinned(np.arange(spec.batch + 1)),
            copy_to_pinned(np.cumsum([0, *used])),
            copy_to_pinned(pages),
            copy_to_pinned(np.asarray(shards.lengths)),
            spec.heads,
            spec.latent,
            spec.rope,
            spec.page_size,
            False,
            spec.scale,
            spec.dtype,
            spec.dtype,
        )

    def run(self, q_BHQ: torch.Tensor, kv: torch.Tensor, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Implement Backend.run. The kernel itself writes the natural logarithm into `lse_BH`."""
        latent = self.spec.latent
        self.wrapper.run(
            q_BHQ[..., :latent],
            q_BHQ[..., latent:],
            kv[..., :latent],
            kv[..., latent:],
            out=o_BHR,
            lse=lse_BH,
            return_lse=True,
            return_lse_base_on_e=True,
        )
