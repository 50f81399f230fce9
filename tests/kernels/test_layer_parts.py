"""Compare the fused norm, rope, routing and experts with their references."""

import dataclasses
import math

import pytest
import torch

from dcpbench.kernels.block_scaled import quantize_weight
from dcpbench.kernels.moe import apply_experts, apply_experts_reference, decode_experts, prefill_experts, scaled
from dcpbench.kernels.moe.routing import NO_EXPERT, select_experts_fused, select_experts_reference
from dcpbench.kernels.norm import Mark, normalize_fused, normalize_reference
from dcpbench.kernels.rope import apply_rope_fused, apply_rope_reference, compute_softmax_scale, make_rope_table
from dcpbench.models import SHAPES


@pytest.mark.parametrize("width", [24, 512, 7168])
def test_fused_norm_agrees_on_strided_rows(width, device):
    """Use rows that are part of wider ones, as the q and kv latents are."""
    x = torch.randn(3, width + 40, device=device)[:, :width]
    weight = torch.rand(width, device=device)
    expected = normalize_reference(x, None, weight, 1e-6)
    assert torch.allclose(normalize_fused(x, None, weight, 1e-6), expected, atol=2e-6)


def test_fused_add_norm_updates_the_residual(device):
    """Check that both versions write residual + x to the residual."""
    x, residual, weight = (
        torch.randn(4, 96, device=device),
        torch.randn(4, 96, device=device),
        torch.rand(96, device=device),
    )
    kept = [residual.clone(), residual.clone()]
    expected = normalize_reference(x, kept[0], weight, 1e-6)
    assert torch.allclose(normalize_fused(x, kept[1], weight, 1e-6), expected, atol=2e-6)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], residual + x)


def test_norm_writes_its_mark_without_changing_its_result(device):
    """Write the mark to host memory, which is pinned for a GPU; a norm without one leaves the old mark."""
    x, weight = torch.randn(3, 96, device=device), torch.rand(96, device=device)
    marks = torch.zeros(1, dtype=torch.int32, pin_memory=device.type != "cpu")
    plain = normalize_fused(x, None, weight, 1e-6)
    for number in (1, 16, 33):
        assert torch.equal(normalize_fused(x, None, weight, 1e-6, Mark(marks, number)), plain)
        normalize_fused(x, None, weight, 1e-6)
        if device.type != "cpu":
            torch.cuda.synchronize()
        assert marks.tolist() == [number]
    normalize_reference(x, None, weight, 1e-6, Mark(marks, 7))
    assert marks.tolist() == [7]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 40])
def test_fused_rope_agrees_between_strided_views(heads, interleaved, device):
    """Rotate from the tail of q's columns into the tail of a wider buffer; its head must not change."""
    table = make_rope_table(SHAPES["deepseek-v3"], 128, device)
    x = torch.randn(5, heads, 80, device=device)[..., 16:]
    positions = torch.tensor([0, 127, 1, 64, 64], device=device)
    outs = [torch.full((5, heads, 100), 7.0, device=device) for _ in range(2)]
    apply_rope_reference(x, positions, table, outs[0][..., 36:], interleaved=interleaved)
    apply_rope_fused(x, positions, table, outs[1][..., 36:], interleaved=interleaved)
    assert torch.allclose(outs[0], outs[1], atol=1e-6)
    assert bool((outs[1][..., :36] == 7.0).all())


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_in_place_equals_rope_into_another_tensor(interleaved, device):
    """Rotate the tail of q's columns; the head must not change."""
    table = make_rope_table(SHAPES["deepseek-v3"], 128, device)
    q = torch.randn(5, 40, 80, device=device)
    positions = torch.tensor([0, 127, 1, 64, 64], device=device)
    expected = q.clone()
    apply_rope_reference(q[..., 16:], positions, table, expected[..., 16:], interleaved=interleaved)
    for version in (apply_rope_reference, apply_rope_fused):
        found = q.clone()
        version(found[..., 16:], positions, table, found[..., 16:], interleaved=interleaved)
        assert torch.allclose(found, expected, atol=1e-6)


def test_position_zero_is_not_rotated_and_norms_are_kept(device):
    """Use a table without YaRN's attention factor, as rotation then preserves length."""
    table = make_rope_table(SHAPES["tiny"], 10, device)
    x = torch.randn(2, 1, 16, device=device)
    out = torch.empty_like(x)
    apply_rope_fused(x, torch.tensor([0, 9], device=device), table, out, interleaved=True)
    assert torch.allclose(out[0], x[0], atol=1e-6)
    assert torch.allclose(out[1].norm(), x[1].norm(), atol=1e-5)


def test_softmax_scale_of_v3_has_mscale_squared():
    """Expect (128 + 64)^-0.5 · (0.1·ln 40 + 1)² = 0.07217 · 1.3689² = 0.13523."""
    assert compute_softmax_scale(SHAPES["deepseek-v3"]) == pytest.approx(0.135234, abs=1e-6)


def make_ungrouped_rule(top_k, scale=1.0):
    """Return V3's normalised sigmoid rule without groups."""
    return dataclasses.replace(SHAPES["deepseek-v3"], top_k=top_k, n_group=1, topk_group=1, routed_scaling_factor=scale)


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "tiny"])
def test_fused_routing_chooses_the_same_experts_with_the_same_weights(model, device):
    """Use every published rule: softmax and sigmoid, grouped and not; 160 and 384 experts are not powers of two."""
    rule = SHAPES[model]
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randn(17, rule.experts, generator=generator, device=device)
    bias = torch.randn(rule.experts, generator=generator, device=device) * 0.1
    expected_weights, expected_ids = select_experts_reference(logits, bias, rule)
    weights, ids = select_experts_fused(logits, bias, rule)
    by_id, expected_by_id = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(1, by_id), expected_ids.gather(1, expected_by_id))
    assert torch.allclose(weights.gather(1, by_id), expected_weights.gather(1, expected_by_id), atol=1e-5)


@pytest.mark.parametrize("select_experts", [select_experts_fused, select_experts_reference])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"])
def test_tokens_beyond_the_live_count_are_routed_to_no_expert(model, select_experts, device):
    """Use three parts of 6 tokens, of which 4, none and all are live: live tokens are routed bitwise as before, and
    others have weight 0.
    """
    rule = SHAPES[model]
    generator = torch.Generator(device).manual_seed(2)
    logits = torch.randn(18, rule.experts, generator=generator, device=device)
    bias = torch.zeros(rule.experts, device=device)
    live = torch.tensor([4, 0, 6], device=device)
    weights, ids = select_experts(logits, bias, rule, live)
    all_weights, all_ids = select_experts(logits, bias, rule)
    counts = torch.tensor([True] * 4 + [False] * 8 + [True] * 6, device=device)
    assert torch.equal(weights[counts], all_weights[counts])
    assert torch.equal(ids[counts], all_ids[counts])
    assert (ids[~counts] == NO_EXPERT).all()
    assert (weights[~counts] == 0).all()
    assert (all_ids >= 0).all()


def test_routing_bias_affects_the_choice_but_not_the_weights():
    """Use scores of ½ and a bias that lifts expert 3: it is chosen, with weight ½ of the normalised two."""
    rule = make_ungrouped_rule(top_k=2)
    bias = torch.tensor([0.1, 0.0, 0.0, 5.0])
    weights, ids = select_experts_reference(torch.zeros(1, 4), bias, rule)
    assert ids.tolist() == [[3, 0]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_sort_by_expert_is_a_stable_permutation(tokens, device):
    """Check that places are distinct, local experts come first, in order, and `ends` counts them."""
    ids = torch.randint(0, 8, (tokens, 3), dtype=torch.int32, device=device)
    _, place, ends = prefill_experts.sort_by_expert(ids, 2, 4)
    assert (place.dtype, ends.dtype) == (torch.int32, torch.int32)
    keys = [e - 2 if 2 <= e < 6 else 4 for e in ids.flatten().tolist()]
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    assert place.tolist() == [order.index(i) for i in range(len(keys))]
    assert ends.tolist() == [sum(k <= e for k in keys) for e in range(4)]


@pytest.mark.parametrize(("tokens", "first", "local"), [(1, 0, 64), (40, 16, 16), (512, 16, 16), (40, 64, 3)])
def test_decode_plan_sorts_like_prompts_and_splits_experts_into_tiles(tokens, first, local, device):
    """Check that tiles hold each row of each local expert once, and never rows of two experts or other ranks; expert
    64 has no rows.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (tokens, 8), dtype=torch.int32, generator=generator)
    ids[: tokens // 2, 0] = first  # one expert of many rows
    ids = ids.to(device)
    _, place, ends = prefill_experts.sort_by_expert(ids, first, local)
    plan = decode_experts.align_tokens_to_experts(ids, first, local, rows=16)
    assert torch.equal(plan.inverse_permutation, place)
    assert torch.equal(plan.sorted_token_ids[place.long()], torch.arange(ids.numel(), dtype=torch.int32, device=device))
    begins = [0, *ends.tolist()]
    expected = [(e, row, begins[e + 1]) for e in range(local) for row in range(begins[e], begins[e + 1], 16)]
    tiles = [tuple(tile) for tile in plan.tiles.T.tolist() if tile[0] >= 0]
    assert tiles == expected


def fill_with_nan(empty):
    """Return `torch.empty` with NaN in place of undefined numbers."""

    def make(*size, **options):
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return make


def make_random(device, seed):
    """Return a generator of random tensors in the experts' dtype: bf16 on a GPU, fp32 in the interpreter, which has no
    bf16.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return lambda *size: torch.randn(*size, generator=generator, device=device).to(dtype)


def compute_error(found, truth):
    """Return ‖found − truth‖ / ‖truth‖ divided by the relative error that rounding to the dtype explains."""
    relative = (found.double() - truth).norm() / truth.norm()
    return float(relative) / (1e-2 if found.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("tokens", [9, 40])
@pytest.mark.parametrize("first", [0, 4, 8])
@pytest.mark.parametrize("way", ["decode", "prompts"])
@pytest.mark.sample(5)
def test_experts_agree_and_ignore_other_ranks_tokens(way, first, tokens, device, monkeypatch):
    """Use experts [first, first+4) of 12, 3 for each token; 40 columns and widths of 24 fill no block; undefined rows
    must not leak.
    """
    make = make_random(device, first)
    x, shared = make(tokens, 40), make(tokens, 40)
    gate_up, down = make(4, 48, 40) * 0.2, make(4, 40, 24) * 0.2
    rule = make_ungrouped_rule(top_k=3, scale=2.0)
    bias = torch.zeros(12, device=device)
    bias[5] = 9.0  # an expert that all tokens choose: more rows than a tile has
    weights, ids = select_experts_reference(make(tokens, 12), bias, rule)
    truth = apply_experts_reference(*(t.double() for t in (x, gate_up, down)), weights, ids, first, shared.double())
    monkeypatch.setattr(torch, "empty", fill_with_nan(torch.empty))
    found = {"decode": decode_experts, "prompts": prefill_experts}[way].apply_experts(
        x, gate_up, down, weights, ids, first, shared
    )
    assert compute_error(found, truth) < 1


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("way", ["decode", "prompts", "scaled", "scaled-prompts"])
@pytest.mark.sample(3)
def test_tokens_without_an_expert_cost_no_tile_and_change_no_other_token(way, first, device, monkeypatch):
    """Leave every second of 40 tokens without an expert: they get the shared expert's row alone, the others are
    bitwise unchanged, and tiles are those of 20 tokens.
    """
    make = make_random(device, first)
    x, shared = make(40, 128), make(40, 128)
    gate_up, down = make(4, 256, 128) * 0.1, make(4, 128, 128) * 0.1
    weights, ids = select_experts_reference(make(40, 12), torch.zeros(12, device=device), make_ungrouped_rule(top_k=3))
    weights[1::2], ids[1::2] = 0.0, NO_EXPERT
    few = [tensor[::2].contiguous() for tensor in (x, weights, ids, shared)]
    if way.startswith("scaled"):
        gate_up, down = quantize_weight(gate_up.float()), quantize_weight(down.float())
    if way == "scaled-prompts":
        monkeypatch.setattr(scaled, "MAX_ASSIGNMENTS", 0)
    apply_experts = {"decode": decode_experts, "prompts": prefill_experts}.get(way, scaled).apply_experts
    monkeypatch.setattr(torch, "empty", fill_with_nan(torch.empty))
    found = apply_experts(x, gate_up, down, weights, ids, first, shared)
    assert torch.equal(found[1::2], shared[1::2])
    assert torch.equal(found[::2], apply_experts(few[0], gate_up, down, few[1], few[2], first, few[3]))
    if "prompts" in way:
        totals = [
            prefill_experts.split_tiles(prefill_experts.sort_by_expert(i, first, 4)[2], i.numel(), 64)[1]
            for i in (ids, few[2])
        ]
    else:
        totals = [(decode_experts.align_tokens_to_experts(i, first, 4, 16).tiles[0] >= 0).sum() for i in (ids, few[2])]
    assert int(totals[0]) == int(totals[1]) > 0


@pytest.mark.parametrize("way", ["decode", "prompts"])
def test_tensor_parallel_experts_add_up_to_whole_experts(way, device):
    """Split 48 columns of each of 4 experts into three slices of 16, as with --ep 1; the first rank has the shared
    expert.
    """
    make = make_random(device, 0)
    x, shared = make(9, 40), make(9, 40)
    gate_up, down = make(4, 2, 48, 40) * 0.2, make(4, 40, 48) * 0.2
    weights, ids = select_experts_reference(
        make(9, 4), torch.zeros(4, device=device), make_ungrouped_rule(top_k=3, scale=2.0)
    )
    whole = (t.double() for t in (x, gate_up.flatten(1, 2), down))
    truth = apply_experts_reference(*whole, weights, ids, 0, shared.double())
    apply_experts, total = {"decode": decode_experts, "prompts": prefill_experts}[way].apply_experts, 0
    for rank in range(3):
        mine = slice(16 * rank, 16 * (rank + 1))
        slices = gate_up[:, :, mine].flatten(1, 2).contiguous(), down[..., mine].contiguous()
        total = (
            total
            + apply_experts(x, *slices, weights, ids, 0, shared if rank == 0 else torch.zeros_like(shared)).double()
        )
    assert compute_error(total.to(x.dtype), truth) < 1


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("depth", [200, 304, 600])
def test_decode_product_agrees_with_fp64_for_every_tiling(rows, depth, device):
    """Compute down projections of 3 experts, one of which has no row; no depth is a multiple of a block."""
    make = make_random(device, depth)
    ids = torch.tensor([[0], [2], [0]] * 12, dtype=torch.int32, device=device)
    plan = decode_experts.align_tokens_to_experts(ids, 0, 3, rows)
    x, weight = make(36, depth), make(3, 130, depth)
    found = decode_experts.compute_grouped_gemm(x, weight, plan, 1, gated=False)
    truth = torch.stack([weight[0 if row < 24 else 2].double() @ x[row].double() for row in range(36)])
    assert compute_error(found, truth) < 1


@pytest.mark.parametrize("rows", [20, 60, 150, 200])
@pytest.mark.parametrize(("columns", "gated", "wide"), [(130, False, 73), (130, False, 72), (72, True, 73)])
def test_prompt_product_agrees_with_fp64_for_every_tiling(columns, gated, wide, rows, device, monkeypatch):
    """Use 4 experts, the first with half of the rows and one with none; a depth of 72 is no multiple of a step. 151
    and 400 rows end in a tile of 128 and some more; 72 is deep enough for the tilings of `WIDE` if that is 72.
    """
    monkeypatch.setattr(prefill_experts, "WIDE", wide)
    make = make_random(device, rows)
    ends = torch.tensor([2 * rows, 2 * rows, 3 * rows + 1, 4 * rows], dtype=torch.int32, device=device)
    x, weight = make(4 * rows, 72) * 0.3, make(4, 2 * columns if gated else columns, 72) * 0.3
    found = prefill_experts.compute_grouped_gemm(x, weight, ends, gated=gated)
    expert = torch.searchsorted(ends, torch.arange(4 * rows, dtype=torch.int32, device=device), right=True).tolist()
    truth = torch.stack([weight[e].double() @ row.double() for e, row in zip(expert, x, strict=True)])
    if gated:
        truth = torch.nn.functional.silu(truth[:, :columns]) * truth[:, columns:]
    assert compute_error(found, truth) < 1


def test_prompt_tiles_contain_each_row_of_each_expert_once(device):
    """Use tiles of 64: 130 rows need three tiles, none needs none, and rows after the last expert belong to no tile."""
    ends = torch.tensor([130, 130, 131, 195], dtype=torch.int32, device=device)
    tiles, total = prefill_experts.split_tiles(ends, 300, 64)
    assert total.tolist() == [5]
    assert tiles[:, :5].T.tolist() == [[0, 0, 130], [0, 64, 130], [0, 128, 130], [2, 130, 131], [3, 131, 195]]


def test_last_tile_of_an_expert_may_be_longer(device):
    """Use tiles of 64 and up to 32 more: 96 rows need one tile, 97 and 130 two, and one row needs one."""
    ends = torch.tensor([96, 193, 193, 323, 324], dtype=torch.int32, device=device)
    tiles, total = prefill_experts.split_tiles(ends, 400, 64, 32)
    assert total.tolist() == [6]
    found = [[0, 0, 96], [1, 96, 193], [1, 160, 193], [3, 193, 323], [3, 257, 323], [4, 323, 324]]
    assert tiles[:, :6].T.tolist() == found


def apply_experts_with_torch(x, gate_up, down, weights, ids, first, shared):
    """Apply the experts with torch's grouped product."""
    _, place, ends = prefill_experts.sort_by_expert(ids, first, len(gate_up))
    rows = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    rows[place.long()] = x.repeat_interleave(ids.shape[1], 0)
    both = torch._grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends)
    y = torch._grouped_mm(prefill_experts.silu_mul(both), down.transpose(-2, -1), offs=ends)
    return prefill_experts.merge_expert_outputs(y, weights, ids, place, shared, first, len(gate_up))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 48, 300, 2000])
def test_experts_on_gpu_are_no_less_accurate_than_torch(tokens):
    """Use 16 experts of which 8 are local, one chosen by all tokens and some by none. Several batches of few tokens
    count together, because roundings of a single one may fall either way.
    """
    torch.manual_seed(0)
    make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    gate_up, down = make(8, 512, 512) * 0.05, make(8, 512, 256) * 0.05
    rule = make_ungrouped_rule(top_k=4)
    bias = torch.zeros(16, device="cuda")
    bias[9] = 9.0
    ours, by_torch = [], []
    for _ in range(max(1, 48 // tokens)):
        x, shared = make(tokens, 512), make(tokens, 512)
        weights, ids = select_experts_reference(torch.randn(tokens, 16, device="cuda"), bias, rule)
        expected = apply_experts_reference(*(t.double() for t in (x, gate_up, down)), weights, ids, 8, shared.double())
        ours.append(compute_error(apply_experts(x, gate_up, down, weights, ids, 8, shared), expected))
        by_torch.append(compute_error(apply_experts_with_torch(x, gate_up, down, weights, ids, 8, shared), expected))
    assert math.hypot(*ours) <= math.hypot(*by_torch)
    assert max(by_torch) < 1


@pytest.mark.long
def test_prompts_of_any_length_need_few_compiled_kernels(device):
    """Count the distances between rows of tiles, which are constants of kernels: 64 experts and 6 of them per token."""
    ends = torch.zeros(64, dtype=torch.int32, device=device)
    strides = {prefill_experts.split_tiles(ends, 6 * tokens, 64)[0].stride(0) for tokens in range(200, 1800, 40)}
    strides |= {
        decode_experts.align_tokens_to_experts(
            torch.zeros(tokens, 6, dtype=torch.int32, device=device), 0, 64
        ).tiles.stride(0)
        for tokens in range(1, 60, 7)
    }
    assert strides <= {8, 16, 32, 64, 128, 256}


class TestSort:
    @pytest.mark.parametrize("tokens", [1, 5, 127, 700])
    @pytest.mark.parametrize(("experts", "first", "local"), [(12, 0, 12), (12, 4, 4), (256, 64, 64), (300, 0, 300)])
    def test_sort_is_stable_and_places_other_ranks_assignments_last(self, tokens, experts, first, local, device):
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, experts, (tokens, 8), generator=generator).to(device)
        ids[: tokens // 2, 0] = first  # one expert has many
        found = prefill_experts.sort_by_expert(ids, first, local)
        expected = prefill_experts.sort_by_expert_reference(ids.cpu(), first, local)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
            assert one.dtype == torch.int32
