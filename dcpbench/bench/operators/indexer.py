"""Bench indexer: the scores of an indexer of sparse attention over one rank's stored keys, in a decode step.

    logits[b, s] = Σ_h w[b, h] · max(0, q[b, h] · k[s])                 (DeepSeek-V3.2, arXiv 2512.02556, equation 1)

    deepgemm   DeepGEMM's `fp8_paged_mqa_logits`; its schedule of a step is made before, as engines make it once a step
    reference  torch in fp32, for CPUs

A page holds the e4m3 keys of its tokens and behind them an fp32 scale for each, as DeepGEMM, vLLM and SGLang store them.
The work of a call: every key with its scale, q, w and the logits once, two operations for each key, head and number.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from dcpbench.bench.operators.attention import make_lengths, make_shards
from dcpbench.bench.operators.calls import compute_relative_error, count_cold_sets, make_checked_calls
from dcpbench.errors import MissingPackageError
from dcpbench.kernels.block_scaled import quantize_rows_reference
from dcpbench.models.shapes import SCALE_BYTES, Indexer
from dcpbench.points.roofline import compute_indexer_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.bench_record import Case
    from dcpbench.bench.operators.calls import Calls
    from dcpbench.kernels.attention import Shards

    Call = Callable[[], tuple[torch.Tensor]]

LIMIT = 2.0**-9  # relative error; fp8 products are exact, Hopper sums keep 14 bits (arXiv 2412.19437, 3.5.2)
NAN_BYTE = 0x7F  # NaN of e4m3
WEIGHT_BYTES = LOGIT_BYTES = torch.float32.itemsize


def pack_keys(keys_NSI: torch.Tensor) -> torch.Tensor:
    """Return pages of quantised keys, uint8 [N, S·(I + 4)]: the e4m3 numbers of S keys, then their fp32 scales."""
    width = keys_NSI.shape[-1]
    scaled = quantize_rows_reference(keys_NSI.flatten(0, 1), width)
    parts = (part.view(torch.uint8).view(len(keys_NSI), -1) for part in (scaled.data, scaled.scale.contiguous()))
    return torch.cat(list(parts), 1)


def unpack_keys(pages: torch.Tensor, width: int) -> torch.Tensor:
    """Return the represented keys of pages in fp32 [N, S, I]."""
    tokens = pages.shape[-1] // (width + SCALE_BYTES)
    data, scale = pages.split([tokens * width, tokens * SCALE_BYTES], -1)
    numbers = data.contiguous().view(torch.float8_e4m3fn).view(len(pages), tokens, width)
    return numbers.float() * scale.contiguous().view(torch.float32).unsqueeze(-1)


def compute_logits(q_HI: torch.Tensor, w_H: torch.Tensor, keys_SI: torch.Tensor) -> torch.Tensor:
    """Return the logits of one query over the keys of its request, [S]."""
    return w_H @ torch.relu(q_HI @ keys_SI.T)


def make_reference_call(
    q_BHI: torch.Tensor, w_BH: torch.Tensor, pages: torch.Tensor, table_BP: torch.Tensor, lengths_B: torch.Tensor
) -> Call:
    """Return a call of `compute_logits` for each request, in fp32."""
    longest = int(lengths_B.max())

    def run_reference() -> tuple[torch.Tensor]:
        out = torch.full((len(q_BHI), longest), float("-inf"), device=pages.device)
        for b, length in enumerate(lengths_B.tolist()):
            keys_SI = unpack_keys(pages[table_BP[b].long()], q_BHI.shape[-1]).flatten(0, 1)[:length]
            out[b, :length] = compute_logits(q_BHI[b].float(), w_BH[b], keys_SI)
        return (out,)

    return run_reference


def make_deepgemm_call(
    q_BHI: torch.Tensor, w_BH: torch.Tensor, pages: torch.Tensor, table_BP: torch.Tensor, lengths_B: torch.Tensor
) -> Call:
    """Return a call of DeepGEMM's kernel. Raise MissingPackageError without it."""
    try:
        import deep_gemm
    except ImportError as e:
        raise MissingPackageError(
            f"--variant deepgemm needs DeepGEMM, which is not installed ({e}); install sgl-deep-gemm, or use "
            "--variant reference, which only checks."
        ) from e
    row = q_BHI.shape[-1] + SCALE_BYTES
    cache = pages.view(len(pages), -1, 1, row)
    q, lengths = q_BHI.unsqueeze(1), lengths_B.unsqueeze(1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, cache.shape[1], deep_gemm.get_num_sms())
    longest = int(lengths_B.max())
    return lambda: (deep_gemm.fp8_paged_mqa_logits(q, cache, w_BH, lengths, table_BP, schedule, longest),)


VARIANTS: dict[str, Callable[..., Call]] = {"reference": make_reference_call, "deepgemm": make_deepgemm_call}


def make_page_table(shards: Shards, device: torch.device) -> torch.Tensor:
    """Return the pages of each request, int32 [B, most pages]; unused places name page 0."""
    table = np.zeros((len(shards.pages), max(map(len, shards.pages))), np.int32)
    for row, pages in zip(table, shards.pages, strict=True):
        row[: len(pages)] = pages
    return torch.from_numpy(table).to(device)


class IndexerBench:
    """Build cases with sizes heads, width, requests, context, page and lengths."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case, one for each of enough pools to keep the L2 cache cold."""
        heads, width, page = (int(case.sizes[name]) for name in ("heads", "width", "page"))
        shards = make_shards(make_lengths(case, self.seed), page, self.seed)
        requests, keys = len(shards.lengths), sum(shards.lengths)
        scores = compute_indexer_work(Indexer(heads=heads, width=width, top_k=1, layers=1), keys, keys)
        moved = requests * heads * (width + WEIGHT_BYTES) + keys * LOGIT_BYTES
        work = msgspec.structs.replace(scores, memory_bytes=scores.memory_bytes + moved)
        random = torch.Generator(self.device).manual_seed(self.seed)
        q_BHI = torch.randn(requests, heads, width, generator=random, device=self.device).to(torch.float8_e4m3fn)
        w_BH = torch.randn(requests, heads, generator=random, device=self.device)
        count = case.calls or count_cold_sets(work.memory_bytes, self.device)
        pools = [self._make_pool(shards, page, width, random) for _ in range(count)]
        table_BP = make_page_table(shards, self.device)
        lengths_B = torch.tensor(shards.lengths, dtype=torch.int32, device=self.device)
        make_call = functools.partial(VARIANTS[case.variant], q_BHI, w_BH)
        calls = [make_call(pool, table_BP, lengths_B) for pool in pools]
        checked = sorted({0, requests // 2, requests - 1})

        def compute_error(results: Sequence[tuple[torch.Tensor, ...]]) -> float:
            found, wanted = [], []
            for number in (0, count - 1):
                for b in checked:
                    length = shards.lengths[b]
                    keys_SI = unpack_keys(pools[number][table_BP[b].long()], width).flatten(0, 1)[:length]
                    found.append(results[number][0][b, :length].double())
                    wanted.append(compute_logits(q_BHI[b].double(), w_BH[b].double(), keys_SI.double()))
            return compute_relative_error(torch.cat(found), torch.cat(wanted))

        return make_checked_calls(calls, compute_error, LIMIT, work=work, written_bytes=count * work.memory_bytes)

    def _make_pool(self, shards: Shards, page: int, width: int, random: torch.Generator) -> torch.Tensor:
        """Return pages of random keys, with NaN in all rows that no request has."""
        count = 1 + sum(map(len, shards.pages))
        pages = pack_keys(torch.randn(count, page, width, generator=random, device=self.device))
        unused = [(0, 0), *((int(own[-1]), n % page) for own, n in zip(shards.pages, shards.lengths, strict=True))]
        for number, used in unused:
            if number == 0 or used:
                pages[number, used * width : page * width] = NAN_BYTE
                pages[number, page * width :].view(torch.float32)[used:] = float("nan")
        return pages
