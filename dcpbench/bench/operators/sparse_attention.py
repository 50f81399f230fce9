"""Bench sparse-attention: MLA decode over the tokens that an indexer chose, from one rank's pages.

    flashmla   FlashMLA's `flash_mla_with_kvcache` with indices, from sgl-flash-mla; its schedule is made at the first call
    reference  torch in fp32, for CPUs

A row has 656 bytes: 512 latent numbers in e4m3, four fp32 scales of 128 each, and 64 bf16 numbers of the rope key, which is
FlashMLA's format for fp8 and `fp8_ds_mla` in vLLM. Each request attends to `top_k` of its rows in random order, or to all of a
shorter one. The work of a call: every chosen row, its index, q and o once, two products with every head.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from dcpbench.bench.operators.attention import LIMIT, SCALE, make_lengths, make_shards
from dcpbench.bench.operators.calls import compute_relative_error, count_cold_sets, make_checked_calls
from dcpbench.errors import MissingPackageError, UsageError, format_install_hint
from dcpbench.kernels.attention.reference import compute_mla_decode
from dcpbench.kernels.block_scaled import Scaled, dequantize_rows, quantize_rows_reference
from dcpbench.models.shapes import KV_WIDTH, LATENT, ROPE, ROPE_BYTES, SCALE_BYTES
from dcpbench.models.weight_formats import SCALE_BLOCK
from dcpbench.points.roofline import compute_attention_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.bench_record import Case
    from dcpbench.bench.operators.calls import Calls
    from dcpbench.kernels.attention import Shards

    Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]

PARTS = (LATENT, LATENT // SCALE_BLOCK * SCALE_BYTES, ROPE * ROPE_BYTES)  # bytes of a row, by part
ROW_BYTES = sum(PARTS)
NO_TOKEN = -1  # index of a place without a token, for requests with fewer tokens than `top_k`
NAN_BYTE = 0xFF  # NaN of e4m3; two of them are NaN of bf16, four NaN of fp32
KERNEL_HEADS, INDEX_BLOCK = (64, 128), 64  # query heads and indices of a block that FlashMLA's kernel takes


def pack_rows(rows_NQ: torch.Tensor) -> torch.Tensor:
    """Return rows as they are stored, uint8 [N, 656]."""
    latent, rope = rows_NQ.split([LATENT, ROPE], -1)
    scaled = quantize_rows_reference(latent, SCALE_BLOCK)
    parts = (scaled.data, scaled.scale.contiguous(), rope.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack_rows(stored_NR: torch.Tensor) -> torch.Tensor:
    """Return the represented rows in fp32 [N, Q]."""
    data, scale, rope = (part.contiguous() for part in stored_NR.split(PARTS, -1))
    scaled = Scaled(data.view(torch.float8_e4m3fn), scale.view(torch.float32), (1, SCALE_BLOCK))
    return torch.cat([dequantize_rows(scaled), rope.view(torch.bfloat16).float()], -1)


def choose_tokens(shards: Shards, page: int, top_k: int, seed: int) -> torch.Tensor:
    """Return the places of the chosen tokens of each request in its pool, page · rows of a page + row, int32 [B, top_k]."""
    random = np.random.default_rng(seed)
    chosen = np.full((len(shards.lengths), top_k), NO_TOKEN, np.int32)
    for row, pages, length in zip(chosen, shards.pages, shards.lengths, strict=True):
        tokens = random.permutation(length)[:top_k]
        row[: len(tokens)] = pages[tokens // page] * page + tokens % page
    return torch.from_numpy(chosen)


def make_reference_call(q_BHQ: torch.Tensor, pages: torch.Tensor, chosen_BK: torch.Tensor) -> Call:
    """Return a call of the reference of MLA decode for each request, in fp32."""

    def run_reference() -> tuple[torch.Tensor, torch.Tensor]:
        found = [compute_truth(q_HQ.float(), pages, row_K) for q_HQ, row_K in zip(q_BHQ, chosen_BK, strict=True)]
        return torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found])

    return run_reference


def make_flashmla_call(q_BHQ: torch.Tensor, pages: torch.Tensor, chosen_BK: torch.Tensor) -> Call:
    """Return a call of FlashMLA's kernel. Raise MissingPackageError without it, UsageError for sizes that it lacks."""
    heads, top_k = q_BHQ.shape[1], chosen_BK.shape[1]
    if heads not in KERNEL_HEADS or top_k % INDEX_BLOCK:
        raise UsageError(
            f"flashmla takes {' or '.join(map(str, KERNEL_HEADS))} heads and a multiple of {INDEX_BLOCK} indices, not {heads} "
            f"and {top_k}; use --heads 64,128 --top-k 2048."
        )
    try:
        from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata
    except ImportError as e:
        raise MissingPackageError(
            f"--variant flashmla needs sgl-flash-mla 1.0, which is not installed ({e}); {format_install_hint('flashmla')}, or "
            "use --variant reference, which only checks."
        ) from e
    schedule, _ = get_mla_metadata()
    q, cache, indices = q_BHQ.unsqueeze(1), pages.unsqueeze(2), chosen_BK.unsqueeze(1)

    def run_kernel() -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = flash_mla_with_kvcache(
            q,
            cache,
            None,
            None,
            LATENT,
            schedule,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=indices,
            use_legacy=True,
        )
        return o.squeeze(1), lse.squeeze(-1)

    return run_kernel


VARIANTS: dict[str, Callable[..., Call]] = {"reference": make_reference_call, "flashmla": make_flashmla_call}


def compute_truth(q_HQ: torch.Tensor, pages: torch.Tensor, chosen_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o_HR, lse_H) of a request in q's dtype, over the stored values of its chosen rows."""
    rows = pages.flatten(0, 1)[chosen_K[chosen_K != NO_TOKEN].long()]
    return compute_mla_decode(q_HQ, unpack_rows(rows).to(q_HQ.dtype), LATENT, SCALE)


class SparseAttentionBench:
    """Build cases with sizes heads, requests, context, top_k, page and lengths."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case, one for each of enough pools to keep the L2 cache cold."""
        heads, page, top_k = (int(case.sizes[name]) for name in ("heads", "page", "top_k"))
        shards = make_shards(make_lengths(case, self.seed), page, self.seed)
        requests = len(shards.lengths)
        attended = [min(length, top_k) for length in shards.lengths]
        attention = compute_attention_work(heads, attended, self.dtype.itemsize, kv_itemsize=1, row_bytes=ROW_BYTES)
        index_bytes = sum(attended) * torch.int32.itemsize
        work = msgspec.structs.replace(attention, memory_bytes=attention.memory_bytes + index_bytes)
        random = torch.Generator(self.device).manual_seed(self.seed)
        q_BHQ = torch.randn(requests, heads, KV_WIDTH, generator=random, device=self.device).to(self.dtype)
        chosen_BK = choose_tokens(shards, page, top_k, self.seed).to(self.device)
        count = case.calls or count_cold_sets(work.memory_bytes, self.device)
        pools = [self._make_pool(1 + sum(map(len, shards.pages)), page, chosen_BK, random) for _ in range(count)]
        calls = [functools.partial(VARIANTS[case.variant], q_BHQ)(pool, chosen_BK) for pool in pools]
        checked = sorted({0, requests // 2, requests - 1})

        def compute_error(results: Sequence[tuple[torch.Tensor, ...]]) -> float:
            errors: list[float] = []
            for number in (0, count - 1):
                o_BHR, lse_BH = results[number]
                for b in checked:
                    truth = compute_truth(q_BHQ[b].double(), pools[number], chosen_BK[b])
                    errors += map(compute_relative_error, (o_BHR[b], lse_BH[b]), truth)
            return max(errors)

        return make_checked_calls(calls, compute_error, LIMIT, work=work, written_bytes=count * work.memory_bytes)

    def _make_pool(self, pages: int, page: int, chosen_BK: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """Return pages [pages, page, 656] with random rows where tokens were chosen, and NaN in all others."""
        pool = torch.full((pages * page, ROW_BYTES), NAN_BYTE, dtype=torch.uint8, device=self.device)
        used = chosen_BK[chosen_BK != NO_TOKEN].long()
        pool[used] = pack_rows(torch.randn(len(used), KV_WIDTH, generator=random, device=self.device))
        return pool.view(pages, page, ROW_BYTES)
