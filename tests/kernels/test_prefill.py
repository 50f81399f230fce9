"""Compare attention of prompts with fp64, one query at a time."""

import sys

import pytest
import torch

from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels.gqa import split_rows
from dcpbench.kernels.merge import merge_attn_states, merge_attn_states_fused, merge_attn_states_reference
from dcpbench.kernels.prefill import PrefillSpec, make_prefill
from dcpbench.kernels.prefill.reference import compute_attention

SCALE = 192**-0.5
SHAPES = {  # queries and keys of each request, and True if the last query belongs to the last key
    "one-token": ([1], [1], True),
    "own-chunks": ([5, 1, 17, 130], [5, 1, 17, 130], True),
    "behind-a-prefix": ([4, 9], [7, 40], True),
    "full": ([5, 1, 33], [64, 3, 130], False),
    "one-without-keys": ([3, 4, 2], [6, 0, 5], False),
    "none-with-keys": ([3, 2], [0, 0], False),
}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def make_inputs(q_lengths, kv_lengths, *, heads, width, value, padded, dtype, device, spare=5):
    """Return random q, k and v with NaN in the rows behind the last request."""
    generator = torch.Generator().manual_seed(0)
    rows = (sum(q_lengths), sum(kv_lengths), sum(kv_lengths))
    tensors = []
    for count, columns, used in zip(rows, (width, width, padded), (width, width, value), strict=True):
        x = torch.zeros(count + spare, heads, columns, dtype=dtype)
        x[:count, :, :used] = torch.randn(count, heads, used, generator=generator).to(dtype)
        x[count:] = float("nan")
        tensors.append(x.to(device))
    return tensors


def make_grouped_inputs(q_lengths, kv_lengths, spec):
    """Return inputs with grouped query heads: k and v are views of KV rows, K heads and then V heads."""
    sizes = {"width": spec.width, "value": spec.width, "padded": spec.width, "dtype": spec.dtype, "device": spec.device}
    q = make_inputs(q_lengths, kv_lengths, heads=spec.heads, **sizes)[0]
    rows = make_inputs(kv_lengths, kv_lengths, heads=2 * spec.kv_heads, **sizes)[0].flatten(1)
    return q, *split_rows(rows, spec.kv_heads)


def check(backend, spec, shape, o_limit, lse_limit):
    """Run one plan twice and compare o, lse and the positions of queries without keys with the reference."""
    q_lengths, kv_lengths, causal = SHAPES[shape]
    if spec.kv_heads is None:
        q, k, v = make_inputs(
            q_lengths,
            kv_lengths,
            heads=spec.heads,
            width=spec.width,
            value=spec.value,
            padded=backend.value_width,
            dtype=spec.dtype,
            device=spec.device,
        )
    else:
        q, k, v = make_grouped_inputs(q_lengths, kv_lengths, spec)
    plan = backend.plan(q_lengths, kv_lengths, causal=causal)
    backend.plan([2], [3], causal=False)  # must not change the first plan
    wanted_o, wanted_lse = compute_attention(
        q, k, v[..., : spec.value], q_lengths, kv_lengths, causal=causal, scale=spec.scale
    )
    empty = wanted_lse.isneginf()
    for _ in range(2):
        o, lse = plan.run(q, k, v)
        assert o.shape == wanted_o.shape
        assert o.dtype == spec.dtype
        assert lse.dtype == torch.float32
        assert torch.equal(lse.isneginf(), empty), "lse is -inf exactly for queries without keys"
        assert lse[~empty].isfinite().all()
        assert (lse - wanted_lse)[~empty].abs().amax().item() <= lse_limit if (~empty).any() else True
        assert (o - wanted_o)[~empty].abs().amax().item() <= o_limit if (~empty).any() else True
        for out in (None, torch.full_like(wanted_o, float("nan"), dtype=spec.dtype)):
            alone = plan.compute_output(q, k, v, out)
            assert out is None or alone.data_ptr() == out.data_ptr() or not len(out)
            assert torch.equal(alone[~empty], o[~empty]), "o without lse equals o with lse"


def make_spec(dtype, device, *, heads=4, width=192, value=128, kv_heads=None):
    """Return a spec with the sizes of the published models by default."""
    return PrefillSpec(
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value=value,
        scale=SCALE,
        dtype=dtype,
        device=torch.device(device),
    )


GROUPS = pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
HEAD_DIMS = pytest.mark.parametrize("width", [64, 128])


class TestGroupedQueries:
    """Test keys and values read from KV rows in place, without a copy."""

    @GROUPS
    @pytest.mark.parametrize("device", ["cpu", GPU])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_sdpa_in_fp32_agrees_with_fp64(self, shape, device, heads, kv_heads):
        made = make_spec(torch.float32, device, heads=heads, width=16, value=16, kv_heads=kv_heads)
        check(make_prefill("sdpa", made), made, shape, 1e-4, 1e-4)

    @pytest.mark.gpu
    @GROUPS
    @HEAD_DIMS
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["sdpa", "flashinfer"])
    def test_bf16_backends_agree_with_fp64(self, name, shape, width, heads, kv_heads):
        if name == "flashinfer":
            pytest.importorskip("flashinfer")
        made = make_spec(torch.bfloat16, "cuda", heads=heads, width=width, value=width, kv_heads=kv_heads)
        check(make_prefill(name, made), made, shape, 0.03, 2e-3)


class TestSdpa:
    @pytest.mark.parametrize("device", ["cpu", GPU])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_fp32_agrees_with_fp64(self, shape, device):
        made = make_spec(torch.float32, device, heads=3, width=24, value=20)
        check(make_prefill("sdpa", made), made, shape, 1e-4, 1e-4)

    def test_blocks_of_queries_agree_with_fp64(self, monkeypatch):
        """Limit scores to 1,024, which are 2 of 130 queries at a time with 130 keys and 3 heads."""
        monkeypatch.setattr("dcpbench.kernels.prefill.sdpa.SCORES", 1024)
        made = make_spec(torch.float32, "cpu", heads=3, width=24, value=20)
        check(make_prefill("sdpa", made), made, "own-chunks", 1e-5, 1e-5)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_half_precision_agrees_with_fp64(self, shape, dtype):
        """Allow 0.03: o is below 4, bf16 rounds by 2^-8 of that, and weights are rounded once more."""
        made = make_spec(dtype, "cuda")
        check(make_prefill("sdpa", made), made, shape, 0.03, 2e-3)

    @pytest.mark.gpu
    def test_head_size_unsupported_by_flash_attention_is_rejected(self):
        with pytest.raises(UsageError, match="not 260 and 128"):
            make_prefill("sdpa", make_spec(torch.bfloat16, "cuda", width=260))


class TestFlashInfer:
    @pytest.mark.gpu
    @pytest.mark.parametrize("shape", SHAPES)
    def test_flashinfer_agrees_with_fp64(self, shape):
        """Check also that FlashInfer's log2 is converted to the natural log, or lse would be off by a factor of 1.44."""
        pytest.importorskip("flashinfer")
        made = make_spec(torch.bfloat16, "cuda")
        check(make_prefill("flashinfer", made), made, shape, 0.03, 2e-3)

    @pytest.mark.gpu
    def test_simultaneous_plans_are_independent(self):
        """Make more plans than initial wrappers before the first one runs, three times."""
        pytest.importorskip("flashinfer")
        made = make_spec(torch.bfloat16, "cuda")
        backend = make_prefill("flashinfer", made)
        q, k, v = make_inputs(
            [40], [40], heads=4, width=192, value=128, padded=128, dtype=torch.bfloat16, device="cuda"
        )
        for _ in range(3):
            plans = [backend.plan([n, 20], [n, 20], causal=True) for n in range(1, 13)]
            assert len({id(plan.wrapper) for plan in plans}) == 12
            for n, plan in enumerate(plans, start=1):
                o, _ = plan.run(q, k, v)
                wanted, _ = compute_attention(q, k, v, [n, 20], [n, 20], causal=True, scale=SCALE)
                assert (o - wanted).abs().max() <= 0.03

    @pytest.mark.gpu
    def test_windows_of_equal_lengths_share_a_plan(self):
        """Expect one wrapper for sixty windows of a prefix, and another one for each other length."""
        pytest.importorskip("flashinfer")
        backend = make_prefill("flashinfer", make_spec(torch.bfloat16, "cuda"))
        plans = [backend.plan([8], [32], causal=False) for _ in range(60)]
        others = [
            backend.plan([8], [32], causal=True),
            backend.plan([8], [31], causal=False),
            backend.plan([7], [32], causal=False),
        ]
        assert len({id(plan) for plan in plans}) == 1
        assert len({id(plan.wrapper) for plan in plans + others}) == 4
        del plans
        assert len(backend.planned) == 3, "unused plans are released"

    @pytest.mark.gpu
    def test_planning_and_running_do_not_synchronize_with_the_device(self):
        pytest.importorskip("flashinfer")
        made = make_spec(torch.bfloat16, "cuda")
        backend = make_prefill("flashinfer", made)
        q, k, v = make_inputs(
            [40], [40], heads=4, width=192, value=128, padded=128, dtype=torch.bfloat16, device="cuda"
        )
        backend.plan([40], [40], causal=True).run(q, k, v)
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.plan([30, 10], [30, 10], causal=True).run(q, k, v)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_missing_flashinfer_raises_an_error_with_the_install_command(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flashinfer.prefill", None)
        monkeypatch.delitem(sys.modules, "dcpbench.kernels.prefill.flashinfer_ragged", raising=False)
        with pytest.raises(MissingPackageError, match=r"pip install '\.\[flashinfer\]'"):
            make_prefill("flashinfer", make_spec(torch.bfloat16, "cpu"))


class TestMergeAttnStates:
    @pytest.mark.parametrize(
        ("lse", "more"),
        [(0.0, 1.0), (-3.0, 80.0), (float("-inf"), 2.0), (2.0, float("-inf"))],
        ids=["similar", "far-apart", "empty-first", "empty-second"],
    )
    def test_states_are_merged_by_their_weights(self, lse, more, device):
        """Expect (exp(a)·x + exp(b)·y) / (exp(a) + exp(b)), and the logarithm of the divisor as lse; -inf hides even a
        NaN.
        """
        o = torch.full((3, 5, 12), 2.0, device=device)
        other = torch.full((3, 5, 12), 6.0, device=device)
        if lse == float("-inf"):
            o.fill_(float("nan"))
        if more == float("-inf"):
            other.fill_(float("nan"))
        lse_a, lse_b = (torch.full((3, 5), x, device=device) for x in (lse, more))
        total = torch.logsumexp(torch.tensor([lse, more], dtype=torch.float64), 0)
        first, second = ((torch.tensor(x, dtype=torch.float64) - total).exp() for x in (lse, more))
        merge_attn_states(o, lse_a, other, lse_b)
        assert torch.allclose(o.cpu().double(), first * 2 + second * 6, atol=1e-5)
        assert torch.allclose(lse_a.cpu().double(), total, atol=1e-5)

    def test_merging_two_empty_states_gives_zeros(self, device):
        o, other = (torch.full((2, 3, 4), float("nan"), device=device) for _ in range(2))
        lse, more = (torch.full((2, 3), float("-inf"), device=device) for _ in range(2))
        merge_attn_states(o, lse, other, more)
        assert not o.any()
        assert lse.isneginf().all()

    @pytest.mark.parametrize("heads", [1, 5, 8, 11])
    def test_kernel_agrees_with_the_reference_for_any_strides(self, heads, device):
        """Use numbers of heads that no block divides, transposed log-sum-exps, and a second o with further columns."""
        generator = torch.Generator().manual_seed(0)

        def random(*size):
            return torch.randn(size, generator=generator).to(device)

        o, lse, more = random(7, heads, 20), random(heads, 7).T, random(heads, 7).T
        other = random(7, heads, 24).to(torch.bfloat16)[..., :20]
        lse[2:5] = float("-inf")
        more[3:6] = float("-inf")
        expected_o, expected_lse = o.clone(), lse.clone()
        merge_attn_states_reference(expected_o, expected_lse, other, more)
        merge_attn_states_fused(o, lse, other, more)
        assert torch.allclose(o, expected_o, atol=1e-5)
        assert torch.equal(lse.isneginf(), expected_lse.isneginf())
        assert torch.allclose(lse[~lse.isneginf()], expected_lse[~lse.isneginf()], atol=1e-5)
