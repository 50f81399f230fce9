"""Norm, rope, routing and experts: the fused versions against their references."""

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
    """Rows that are a part of wider ones, as the q and kv latents are."""
    x = torch.randn(3, width + 40, device=device)[:, :width]
    weight = torch.rand(width, device=device)
    expected = normalize_reference(x, None, weight, 1e-6)
    assert torch.allclose(normalize_fused(x, None, weight, 1e-6), expected, atol=2e-6)


def test_fused_add_norm_updates_the_residual(device):
    """Both versions leave residual + x behind."""
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


def test_a_norm_leaves_its_mark_and_computes_the_same(device):
    """In memory of the host, which on a GPU is pinned; a norm without one leaves what is there."""
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
    """From the tail of q's columns into the tail of a wider buffer, whose head stays untouched."""
    table = make_rope_table(SHAPES["deepseek-v3"], 128, device)
    x = torch.randn(5, heads, 80, device=device)[..., 16:]
    positions = torch.tensor([0, 127, 1, 64, 64], device=device)
    outs = [torch.full((5, heads, 100), 7.0, device=device) for _ in range(2)]
    apply_rope_reference(x, positions, table, outs[0][..., 36:], interleaved=interleaved)
    apply_rope_fused(x, positions, table, outs[1][..., 36:], interleaved=interleaved)
    assert torch.allclose(outs[0], outs[1], atol=1e-6)
    assert bool((outs[1][..., :36] == 7.0).all())


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_in_place_is_rope_into_another_tensor(interleaved, device):
    """The tail of q's columns; its head stays untouched."""
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
    """Rotation preserves length: table without YaRN's attention factor."""
    table = make_rope_table(SHAPES["tiny"], 10, device)
    x = torch.randn(2, 1, 16, device=device)
    out = torch.empty_like(x)
    apply_rope_fused(x, torch.tensor([0, 9], device=device), table, out, interleaved=True)
    assert torch.allclose(out[0], x[0], atol=1e-6)
    assert torch.allclose(out[1].norm(), x[1].norm(), atol=1e-5)


def test_softmax_scale_of_v3_has_mscale_squared():
    """(128 + 64)^-0.5 · (0.1·ln 40 + 1)² = 0.07217 · 1.3689² = 0.13523."""
    assert compute_softmax_scale(SHAPES["deepseek-v3"]) == pytest.approx(0.135234, abs=1e-6)


def ungrouped(top_k, scale=1.0):
    """V3's rule without groups: sigmoid, and normalised."""
    return dataclasses.replace(SHAPES["deepseek-v3"], top_k=top_k, groups=1, top_groups=1, routed_scale=scale)


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "tiny"])
def test_fused_routing_chooses_the_same_experts_with_the_same_weights(model, device):
    """Every published rule: softmax and sigmoid, grouped and not; 160 and 384 experts are no powers of two."""
    rule = SHAPES[model]
    generator = torch.Generator(device).manual_seed(1)
    logits = torch.randn(17, rule.experts, generator=generator, device=device)
    bias = torch.randn(rule.experts, generator=generator, device=device) * 0.1
    expected_weights, expected_ids = select_experts_reference(logits, bias, rule)
    weights, ids = select_experts_fused(logits, bias, rule)
    by_id, expected_by_id = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(1, by_id), expected_ids.gather(1, expected_by_id))
    assert torch.allclose(weights.gather(1, by_id), expected_weights.gather(1, expected_by_id), atol=1e-5)


@pytest.mark.parametrize("by", [select_experts_fused, select_experts_reference])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"])
def test_tokens_past_the_number_of_their_part_go_to_nobody(model, by, device):
    """Three parts of 6 tokens, of which 4, none and all count: those choose as ever, bit by bit, and the others weigh 0."""
    rule = SHAPES[model]
    generator = torch.Generator(device).manual_seed(2)
    logits = torch.randn(18, rule.experts, generator=generator, device=device)
    bias = torch.zeros(rule.experts, device=device)
    live = torch.tensor([4, 0, 6], device=device)
    weights, ids = by(logits, bias, rule, live)
    all_weights, all_ids = by(logits, bias, rule)
    counts = torch.tensor([True] * 4 + [False] * 8 + [True] * 6, device=device)
    assert torch.equal(weights[counts], all_weights[counts])
    assert torch.equal(ids[counts], all_ids[counts])
    assert (ids[~counts] == NO_EXPERT).all()
    assert (weights[~counts] == 0).all()
    assert (all_ids >= 0).all()


def test_the_bias_chooses_but_does_not_weigh():
    """Scores of ½ each and a bias that lifts expert 3: it is chosen, with weight ½ of the normalised two."""
    rule = ungrouped(top_k=2)
    bias = torch.tensor([0.1, 0.0, 0.0, 5.0])
    weights, ids = select_experts_reference(torch.zeros(1, 4), bias, rule)
    assert ids.tolist() == [[3, 0]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_sorting_by_expert_is_a_stable_permutation(tokens, device):
    """Places are all different; local experts come first, in order, and `ends` counts them."""
    ids = torch.randint(0, 8, (tokens, 3), dtype=torch.int32, device=device)
    _, place, ends = prefill_experts.sort_by_expert(ids, 2, 4)
    assert (place.dtype, ends.dtype) == (torch.int32, torch.int32)
    keys = [e - 2 if 2 <= e < 6 else 4 for e in ids.flatten().tolist()]
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    assert place.tolist() == [order.index(i) for i in range(len(keys))]
    assert ends.tolist() == [sum(k <= e for k in keys) for e in range(4)]


@pytest.mark.parametrize(("tokens", "first", "local"), [(1, 0, 64), (40, 16, 16), (512, 16, 16), (40, 64, 3)])
def test_decode_sorts_as_prompts_do_and_cuts_experts_into_tiles(tokens, first, local, device):
    """Tiles hold every row of every local expert once, none of two experts, none of other ranks; 64 is nobody's."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (tokens, 8), dtype=torch.int32, generator=generator)
    ids[: tokens // 2, 0] = first  # one expert of many rows
    ids = ids.to(device)
    _, place, ends = prefill_experts.sort_by_expert(ids, first, local)
    plan = decode_experts.plan_product(ids, first, local, rows=16)
    assert torch.equal(plan.place, place)
    assert torch.equal(plan.source[place.long()], torch.arange(ids.numel(), dtype=torch.int32, device=device))
    begins = [0, *ends.tolist()]
    expected = [(e, row, begins[e + 1]) for e in range(local) for row in range(begins[e], begins[e + 1], 16)]
    tiles = [tuple(tile) for tile in plan.tiles.T.tolist() if tile[0] >= 0]
    assert tiles == expected


def poisoned(empty):
    """`torch.empty`, with NaN in what it leaves undefined."""

    def made(*size, **options):
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return made


def numbers(device, seed):
    """Random tensors in what experts are computed in: bf16 on a GPU, fp32 in the interpreter, which has no bf16."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return lambda *size: torch.randn(*size, generator=generator, device=device).to(dtype)


def error(found, truth):
    """‖found − truth‖ / ‖truth‖, as a share of what rounding to its dtype explains."""
    relative = (found.double() - truth).norm() / truth.norm()
    return float(relative) / (1e-2 if found.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("tokens", [9, 40])
@pytest.mark.parametrize("first", [0, 4, 8])
@pytest.mark.parametrize("way", ["decode", "prompts"])
@pytest.mark.sample(5)
def test_experts_agree_and_ignore_other_ranks_tokens(way, first, tokens, device, monkeypatch):
    """Experts [first, first+4) of 12, 3 for each token; 40 widths of 24 fill no block; undefined rows must not leak."""
    make = numbers(device, first)
    x, shared = make(tokens, 40), make(tokens, 40)
    gate_up, down = make(4, 48, 40) * 0.2, make(4, 40, 24) * 0.2
    rule = ungrouped(top_k=3, scale=2.0)
    bias = torch.zeros(12, device=device)
    bias[5] = 9.0  # an expert that all tokens choose: more rows than a tile has
    weights, ids = select_experts_reference(make(tokens, 12), bias, rule)
    truth = apply_experts_reference(*(t.double() for t in (x, gate_up, down)), weights, ids, first, shared.double())
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    found = {"decode": decode_experts, "prompts": prefill_experts}[way].apply_experts(
        x, gate_up, down, weights, ids, first, shared
    )
    assert error(found, truth) < 1


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("way", ["decode", "prompts", "scaled", "scaled-prompts"])
@pytest.mark.sample(3)
def test_tokens_that_go_to_nobody_cost_no_tile_and_change_no_other(way, first, device, monkeypatch):
    """
    Every second of 40 tokens: theirs is the shared expert's row alone, others' are what they are without them, bit by bit,
    and tiles are those of 20 tokens.
    """
    make = numbers(device, first)
    x, shared = make(40, 128), make(40, 128)
    gate_up, down = make(4, 256, 128) * 0.1, make(4, 128, 128) * 0.1
    weights, ids = select_experts_reference(make(40, 12), torch.zeros(12, device=device), ungrouped(top_k=3))
    weights[1::2], ids[1::2] = 0.0, NO_EXPERT
    few = [tensor[::2].contiguous() for tensor in (x, weights, ids, shared)]
    if way.startswith("scaled"):
        gate_up, down = quantize_weight(gate_up.float()), quantize_weight(down.float())
    if way == "scaled-prompts":
        monkeypatch.setattr(scaled, "MAX_ASSIGNMENTS", 0)
    of = {"decode": decode_experts, "prompts": prefill_experts}.get(way, scaled).apply_experts
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    found = of(x, gate_up, down, weights, ids, first, shared)
    assert torch.equal(found[1::2], shared[1::2])
    assert torch.equal(found[::2], of(few[0], gate_up, down, few[1], few[2], first, few[3]))
    if "prompts" in way:
        totals = [
            prefill_experts.split_tiles(prefill_experts.sort_by_expert(i, first, 4)[2], i.numel(), 64)[1]
            for i in (ids, few[2])
        ]
    else:
        totals = [(decode_experts.plan_product(i, first, 4, 16).tiles[0] >= 0).sum() for i in (ids, few[2])]
    assert int(totals[0]) == int(totals[1]) > 0


@pytest.mark.parametrize("way", ["decode", "prompts"])
def test_slices_of_experts_add_up_to_whole_ones(way, device):
    """As ranks of --ep 1 do: 48 columns of each of 4 experts in three slices of 16; the first rank has the shared one."""
    make = numbers(device, 0)
    x, shared = make(9, 40), make(9, 40)
    gate_up, down = make(4, 2, 48, 40) * 0.2, make(4, 40, 48) * 0.2
    weights, ids = select_experts_reference(make(9, 4), torch.zeros(4, device=device), ungrouped(top_k=3, scale=2.0))
    whole = (t.double() for t in (x, gate_up.flatten(1, 2), down))
    truth = apply_experts_reference(*whole, weights, ids, 0, shared.double())
    of, total = {"decode": decode_experts, "prompts": prefill_experts}[way].apply_experts, 0
    for rank in range(3):
        mine = slice(16 * rank, 16 * (rank + 1))
        slices = gate_up[:, :, mine].flatten(1, 2).contiguous(), down[..., mine].contiguous()
        total = total + of(x, *slices, weights, ids, 0, shared if rank == 0 else torch.zeros_like(shared)).double()
    assert error(total.to(x.dtype), truth) < 1


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("depth", [200, 304, 600])
def test_every_shape_of_the_product_gives_the_same(rows, depth, device):
    """Down products of each kernel shape against fp64: 3 experts of which one has no row; depths are no blocks' sum."""
    make = numbers(device, depth)
    ids = torch.tensor([[0], [2], [0]] * 12, dtype=torch.int32, device=device)
    plan = decode_experts.plan_product(ids, 0, 3, rows)
    x, weight = make(36, depth), make(3, 130, depth)
    found = decode_experts.compute_product(x, weight, plan, 1, gated=False)
    truth = torch.stack([weight[0 if row < 24 else 2].double() @ x[row].double() for row in range(36)])
    assert error(found, truth) < 1


@pytest.mark.parametrize("rows", [20, 60, 150, 200])
@pytest.mark.parametrize(("columns", "gated", "wide"), [(130, False, 73), (130, False, 72), (72, True, 73)])
def test_every_tiling_of_prompts_gives_the_same(columns, gated, wide, rows, device, monkeypatch):
    """Against fp64: 4 experts, the first with half of the rows and one with none; 72 deep is no multiple of a step.

    151 and 400 rows end in a tile of 128 and some more; 72 is deep enough for the tilings of `WIDE` where that is 72.
    """
    monkeypatch.setattr(prefill_experts, "WIDE", wide)
    make = numbers(device, rows)
    ends = torch.tensor([2 * rows, 2 * rows, 3 * rows + 1, 4 * rows], dtype=torch.int32, device=device)
    x, weight = make(4 * rows, 72) * 0.3, make(4, 2 * columns if gated else columns, 72) * 0.3
    found = prefill_experts.compute_product(x, weight, ends, gated=gated)
    expert = torch.searchsorted(ends, torch.arange(4 * rows, dtype=torch.int32, device=device), right=True).tolist()
    truth = torch.stack([weight[e].double() @ row.double() for e, row in zip(expert, x, strict=True)])
    if gated:
        truth = torch.nn.functional.silu(truth[:, :columns]) * truth[:, columns:]
    assert error(found, truth) < 1


def test_tiles_of_prompts_hold_each_row_of_each_expert_once(device):
    """Tiles of 64: 130 rows are three, none is none, and what follows the last expert is nobody's."""
    ends = torch.tensor([130, 130, 131, 195], dtype=torch.int32, device=device)
    tiles, total = prefill_experts.split_tiles(ends, 300, 64)
    assert total.tolist() == [5]
    assert tiles[:, :5].T.tolist() == [[0, 0, 130], [0, 64, 130], [0, 128, 130], [2, 130, 131], [3, 131, 195]]


def test_the_last_tile_of_an_expert_may_be_longer(device):
    """Tiles of 64 and up to 32 more: 96 rows are one, 97 and 130 two, and one row is one."""
    ends = torch.tensor([96, 193, 193, 323, 324], dtype=torch.int32, device=device)
    tiles, total = prefill_experts.split_tiles(ends, 400, 64, 32)
    assert total.tolist() == [6]
    found = [[0, 0, 96], [1, 96, 193], [1, 160, 193], [3, 193, 323], [3, 257, 323], [4, 323, 324]]
    assert tiles[:, :6].T.tolist() == found


def experts_by_torch(x, gate_up, down, weights, ids, first, shared):
    """Experts by torch's grouped product."""
    _, place, ends = prefill_experts.sort_by_expert(ids, first, len(gate_up))
    rows = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    rows[place.long()] = x.repeat_interleave(ids.shape[1], 0)
    both = torch._grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends)
    y = torch._grouped_mm(prefill_experts.silu_mul(both), down.transpose(-2, -1), offs=ends)
    return prefill_experts.merge_expert_outputs(y, weights, ids, place, shared, first, len(gate_up))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 48, 300, 2000])
def test_experts_on_gpu_agree_in_bf16(tokens):
    """16 experts of which 8 are local, one chosen by all tokens and some by none; no worse than torch's product.

    Of few tokens several batches count together: of a single one, roundings may fall either way.
    """
    torch.manual_seed(0)
    make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    gate_up, down = make(8, 512, 512) * 0.05, make(8, 512, 256) * 0.05
    rule = ungrouped(top_k=4)
    bias = torch.zeros(16, device="cuda")
    bias[9] = 9.0
    ours, by_torch = [], []
    for _ in range(max(1, 48 // tokens)):
        x, shared = make(tokens, 512), make(tokens, 512)
        weights, ids = select_experts_reference(torch.randn(tokens, 16, device="cuda"), bias, rule)
        expected = apply_experts_reference(*(t.double() for t in (x, gate_up, down)), weights, ids, 8, shared.double())
        ours.append(error(apply_experts(x, gate_up, down, weights, ids, 8, shared), expected))
        by_torch.append(error(experts_by_torch(x, gate_up, down, weights, ids, 8, shared), expected))
    assert math.hypot(*ours) <= math.hypot(*by_torch)
    assert max(by_torch) < 1


@pytest.mark.long
def test_prompts_of_any_length_need_few_kernels_compiled(device):
    """How far rows of tiles lie apart is a constant of kernels: 1,600 lengths have five, of 64 experts and 6 of a token."""
    ends = torch.zeros(64, dtype=torch.int32, device=device)
    apart = {prefill_experts.split_tiles(ends, 6 * tokens, 64)[0].stride(0) for tokens in range(200, 1800, 40)}
    apart |= {
        decode_experts.plan_product(torch.zeros(tokens, 6, dtype=torch.int32, device=device), 0, 64).tiles.stride(0)
        for tokens in range(1, 60, 7)
    }
    assert apart <= {8, 16, 32, 64, 128, 256}


class TestSort:
    @pytest.mark.parametrize("tokens", [1, 5, 127, 700])
    @pytest.mark.parametrize(("experts", "first", "local"), [(12, 0, 12), (12, 4, 4), (256, 64, 64), (300, 0, 300)])
    def test_it_is_stable_by_expert_and_others_assignments_come_last(self, tokens, experts, first, local, device):
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, experts, (tokens, 8), generator=generator).to(device)
        ids[: tokens // 2, 0] = first  # one expert has many
        found = prefill_experts.sort_by_expert(ids, first, local)
        expected = prefill_experts.sort_by_expert_reference(ids.cpu(), first, local)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
            assert one.dtype == torch.int32
