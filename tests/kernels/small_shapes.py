"""Run each fast kernel once with small shapes on one GPU, under a checker of memory accesses or races.

    compute-sanitizer --tool memcheck python -m tests.kernels.small_shapes [FAMILY…]
    compute-sanitizer --tool racecheck python -m tests.kernels.small_shapes [FAMILY…]

Families: attention, exchange, gqa, kv, moe, peers, rows. Other tests compare results; this program only executes every kernel.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import torch

from dcpbench.kernels.attention import AttentionSpec, Shards, make_backend
from dcpbench.kernels.gqa import GqaSpec, make_gqa_backend
from dcpbench.kernels.head_order import to_head_order
from dcpbench.kernels.int4 import quantize
from dcpbench.kernels.kv_gather import gather_in_token_order, make_request_table, pack_rows
from dcpbench.kernels.kv_indices import DcpShard, write_pages
from dcpbench.kernels.kv_up_proj import decompress_latents, gather_rows
from dcpbench.kernels.kv_write import write_kv
from dcpbench.kernels.merge import correct_attn_out
from dcpbench.kernels.moe import apply_experts
from dcpbench.kernels.moe.prefill_experts import silu_mul_rows
from dcpbench.kernels.norm import normalize_rows
from dcpbench.kernels.pack import Message, merge_messages, pack_messages
from dcpbench.kernels.qk_norm_rope import split_heads
from dcpbench.kernels.qkv_norm_rope import split_latent_fused
from dcpbench.kernels.symm_mem.all_reduce import reduce_one_shot, reduce_two_shot
from dcpbench.kernels.symm_mem.gather import gather_queries
from dcpbench.kernels.symm_mem.pull_merge import merge_from_peers
from dcpbench.kernels.value_proj import project_values
from dcpbench.models.weight_formats import INT4_GROUPS
from dcpbench.points.layout import Prefix
from tests.kernels.test_peers import Ranks

REACHED_BARRIERS = 1000
"""Number of barriers that all peers have already reached. Ranks run one after another, and must not wait."""
MERGE_COUNTERS = 1  # index of the counters of merge_from_peers: the first row has the signals, and further rows count calls of blocks


def run_attention() -> None:
    """Run attention over a split request, an empty one and one with a single row, for several numbers of heads and both KV dtypes."""
    lengths, page = [700, 0, 70, 1], 16
    used = [-(-n // page) for n in lengths]
    pages = np.split(np.arange(sum(used), dtype=np.int32), np.cumsum(used)[:-1])
    rows = _draw_normal(sum(used), page, 576)
    for heads, kv in itertools.product((20, 40, 128), (rows, rows.to(torch.float8_e4m3fn))):
        spec = AttentionSpec(
            batch=len(lengths),
            heads=heads,
            latent=512,
            rope=64,
            page_size=page,
            max_pages=max(used),
            scale=576**-0.5,
            dtype=rows.dtype,
            device=kv.device,
            kv_dtype=kv.dtype,
        )
        backend = make_backend("triton", spec)
        backend.plan(Shards(pages=pages, lengths=lengths))
        o = torch.empty(len(lengths), heads, 512, dtype=rows.dtype, device=kv.device)
        backend.run(_draw_normal(len(lengths), heads, 576), kv, o, torch.empty(len(lengths), heads, device=kv.device))


def run_gqa() -> None:
    """Run grouped-query attention over a split request, an empty one and one with a single row, for several groups and pages."""
    lengths = [700, 0, 70, 1]
    for page, (heads, kv_heads), dtype in itertools.product(
        (16, 64), ((16, 8), (64, 4), (64, 1)), (torch.bfloat16, torch.float8_e4m3fn)
    ):
        used = [-(-n // page) for n in lengths]
        pages = np.split(np.arange(sum(used), dtype=np.int32), np.cumsum(used)[:-1])
        kv = _draw_normal(sum(used), page, 2 * kv_heads * 128).to(dtype)
        spec = GqaSpec(
            batch=len(lengths),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=128,
            page_size=page,
            max_pages=max(used),
            scale=128**-0.5,
            dtype=torch.bfloat16,
            device=kv.device,
            kv_dtype=dtype,
        )
        backend = make_gqa_backend("triton", spec)
        backend.plan(Shards(pages=pages, lengths=lengths))
        q = _draw_normal(len(lengths), heads, 128)
        backend.run(q, kv, torch.empty_like(q), torch.empty(len(lengths), heads, device=kv.device))
        qkv, positions = _draw_normal(5, (heads + 2 * kv_heads) * 128), torch.arange(5, device="cuda")
        q, row, table = (
            _draw_normal(5, heads, 128),
            _draw_normal(5, 2 * kv_heads * 128),
            torch.rand(8, 128, device="cuda"),
        )
        split_heads(qkv, _draw_normal(128), _draw_normal(128), positions, table, q, row, eps=1e-6)


def run_exchange() -> None:
    """Run the kernels around NCCL's collectives, for 4 ranks."""
    batch, heads, ranks = 5, 12, 4
    o, lse = _draw_normal(batch, heads, 512), _draw_normal(batch, heads).float()
    correct_attn_out(o, lse.expand(ranks, -1, -1).contiguous(), 1, torch.float32)
    out = torch.empty(heads // ranks, batch, 512, device="cuda")
    merge_messages(pack_messages(o, lse, ranks), Message(batch, heads // ranks, 512, o.dtype), out)
    project_values(out, _draw_normal(heads // ranks, 512, 128), torch.bfloat16)
    to_head_order(_draw_normal(ranks, batch, heads // ranks, 576))


def run_kv() -> None:
    """Write KV rows and both page tables, gather prefixes in token order, and decompress keys of two tiles."""
    new = _draw_normal(77, 576)
    locs = torch.arange(77, device="cuda")
    locs[::3] = -1
    for dtype in (torch.bfloat16, torch.uint8):
        pool = torch.zeros(77, 576, dtype=dtype, device="cuda")
        write_kv(pool, new, locs, DcpShard(rank=0, dcp=2))
    table = torch.zeros(5, 3000, dtype=torch.int32, device="cuda")
    slots, lengths = torch.arange(5, device="cuda"), torch.tensor([0, 1, 3000, 2999, 17], device="cuda")
    counts, starts = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 6))
    for dcp in (1, 3):
        shard = DcpShard(rank=dcp - 1, dcp=dcp)
        write_pages(torch.zeros_like(table), None, counts, table, slots, lengths, shard)
        write_pages(torch.zeros_like(table).flatten(), starts, counts, table, slots, lengths, shard)
    for requests in ((50, 0, 7), (3,)):
        prefix = Prefix(requests, 4)
        parts = [_draw_normal(prefix.part_rows, 576) for _ in range(4)]
        sources = [part.data_ptr() for part in parts]
        table_of = make_request_table(prefix, parts[0].device)
        gather_in_token_order(_draw_normal(prefix.tokens, 576), parts[0], sources, 0, prefix, table_of)
        rows = torch.arange(prefix.list_first_rows(0)[-1], dtype=torch.int32, device="cuda")
        pack_rows(parts[0], _draw_normal(60, 576), rows)
    places = torch.cat((torch.arange(70), -1 - torch.arange(77))).int().to("cuda")
    keys, values, count = (
        _draw_normal(150, 3, 192),
        _draw_normal(150, 3, 192),
        torch.tensor([147], dtype=torch.int32, device="cuda"),
    )
    for pool in (_draw_normal(77, 576), _draw_normal(77, 576).to(torch.float8_e4m3fn)):
        laid = _draw_normal(150, 576)
        gather_rows(laid, pool, new, count, places)
        decompress_latents(laid, count, _draw_normal(3, 128, 512), _draw_normal(3, 512, 128), keys, values)


def run_peers() -> None:
    """Run kernels that read and write peers' memory, for 2 and 4 ranks."""
    for size in (2, 4):
        ranks = Ranks(size)
        kernel_counters = [ranks.counters() for _ in range(4)]
        for i, counters in enumerate(kernel_counters):
            for own in counters:
                (own[:1] if i == MERGE_COUNTERS else own)[:, 1:] = REACHED_BARRIERS
        everyone = ranks.take(5, 3 * size, 576, dtype=torch.bfloat16)
        o, lse = ranks.take(5, 3 * size, 512, dtype=torch.bfloat16), ranks.take(5, 3 * size, dtype=torch.float32)
        slots = ranks.take(2, 1 << 16, dtype=torch.uint8)
        parts, sums = ranks.take(1 << 16, dtype=torch.uint8), ranks.take(1 << 16, dtype=torch.uint8)
        for rank in range(size):
            gather_queries(ranks.peers[rank], kernel_counters[0][rank], _draw_normal(5, 3, 576), everyone[rank])
            merge_from_peers(
                ranks.peers[rank], kernel_counters[1][rank], o[rank], lse[rank], torch.empty(3, 5, 512, device="cuda")
            )
            reduce_one_shot(ranks.peers[rank], kernel_counters[2][rank], slots[rank], _draw_normal(3, 1001))
            reduce_two_shot(ranks.peers[rank], kernel_counters[3][rank], parts[rank], sums[rank], _draw_normal(3, 1001))


def run_moe() -> None:
    """Run experts 8 to 15 of 16 with one full and some empty experts, widths that fill no block, and all sizes of tiles."""
    gate_up, down = _draw_normal(8, 176, 200), _draw_normal(8, 200, 88)
    quantised = [(quantize(_draw_normal(8, 768, 384), n), quantize(_draw_normal(8, 384, 384), n)) for n in INT4_GROUPS]
    for tokens, pair in itertools.product((5, 300, 1100), quantised):
        ids = torch.stack([torch.randperm(15, device="cuda")[:4] for _ in range(tokens)]).int()
        x = _draw_normal(tokens, 384)
        apply_experts(x, *pair, torch.rand(tokens, 4, device="cuda"), ids, 8, x)
    for tokens in (5, 300):
        ids = torch.stack([torch.randperm(15, device="cuda")[:4] for _ in range(tokens)]).int()
        ids[:, 0] = 9
        x = _draw_normal(tokens, 200)
        apply_experts(x, gate_up, down, torch.rand(tokens, 4, device="cuda"), ids, 8, x)


def run_rows() -> None:
    """Run norms, latents and silu with quantised outputs, on rows that are part of wider rows."""
    x, weight = _draw_normal(3, 448), _draw_normal(384)
    normalize_rows(x[:, :384], _draw_normal(3, 384), weight, 1e-6)
    normalize_rows(x[:, :384], None, weight, 1e-6, keep=False)
    qkv, positions = _draw_normal(3, 384 + 576), torch.arange(3, device="cuda")
    table = torch.rand(8, 64, device="cuda")
    for quantise in (True, False):
        row = torch.zeros(3, 600, dtype=torch.bfloat16, device="cuda")[:, :576]
        split_latent_fused(
            qkv, weight, _draw_normal(512), positions, table, row, 1e-6, interleaved=True, quantise=quantise
        )
    silu_mul_rows(_draw_normal(5, 2 * 1408))


FAMILIES = {
    "attention": run_attention,
    "exchange": run_exchange,
    "gqa": run_gqa,
    "kv": run_kv,
    "moe": run_moe,
    "peers": run_peers,
    "rows": run_rows,
}


def _draw_normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        FAMILIES[name]()
        torch.cuda.synchronize()
        sys.stdout.write(f"{name} ran\n")
