"""Test that ordinary and difficult programs run in a dry run, compute the right values, and have the right waits."""

import copy
import io
import pickle
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader, TensorDataset

from dcpbench.syncs.dry_run import DryRun, dry_run
from dcpbench.syncs.dry_run.device_tensor import DeviceTensor


@pytest.fixture
def run() -> Iterator[DryRun]:
    """Start a dry run around the test."""
    with dry_run() as seen:
        yield seen


def list_rules(run: DryRun) -> list[str]:
    """Return the rules of the waits so far, in order, without calls that only may block."""
    return [sync.rule for sync in run.syncs if not sync.may_block]


class TestModules:
    def test_training_has_no_waits_and_equals_the_host(self, run: DryRun) -> None:
        """Both take the same three AdamW steps; parameters stay the same objects when the module moves."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        host, x, y = copy.deepcopy(layers), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        optimizer = torch.optim.AdamW(layers.parameters())
        layers.cuda()
        x_gpu, y_gpu = x.cuda(), y.cuda()
        run.syncs.clear()
        for model, inputs, labels, steps in (
            (layers, x_gpu, y_gpu, optimizer),
            (host, x, y, torch.optim.AdamW(host.parameters())),
        ):
            for _ in range(3):
                functional.cross_entropy(model(inputs), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                steps.step()
                steps.zero_grad()
        assert list_rules(run) == []
        assert all(isinstance(p, nn.Parameter) and p.is_cuda for p in layers.parameters())
        for mine, theirs in zip(layers.parameters(), host.parameters(), strict=True):
            torch.testing.assert_close(mine.detach().cpu(), theirs.detach())

    def test_attention_has_no_waits(self, run: DryRun) -> None:
        embedding = nn.Embedding(10, 16, device="cuda")
        attention = nn.MultiheadAttention(16, 4, batch_first=True, device="cuda")
        x = embedding(torch.arange(6, device="cuda").view(2, 3))
        attention(x, x, x)[0].sum().backward()
        q = torch.randn(2, 4, 8, 16, device="cuda", requires_grad=True)
        functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert q.grad is not None
        assert q.grad.is_cuda
        assert list_rules(run) == []

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
    def test_recurrent_layers_equal_the_host(self, run: DryRun, kind: type[nn.RNNBase]) -> None:
        """GPUs have a fused cell that the CPU lacks."""
        layer = kind(4, 5)
        x = torch.randn(3, 2, 4)
        expected = layer(x)[0]
        expected.sum().backward()
        grads = [p.grad for p in layer.parameters()]
        device = copy.deepcopy(layer).cuda()
        device.zero_grad()
        x = x.cuda()
        run.syncs.clear()
        out = device(x)[0]
        out.sum().backward()
        assert list_rules(run) == []
        torch.testing.assert_close(out.detach().cpu(), expected.detach())
        for parameter, grad in zip(device.parameters(), grads, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.cpu(), grad)

    def test_module_moves_there_and_back_with_a_copy_per_parameter(self, run: DryRun) -> None:
        module = nn.Linear(2, 2)
        weight = module.weight
        module.cuda().half().cpu()
        assert list_rules(run) == ["SYNC004", "SYNC004", "SYNC003", "SYNC003"]
        assert module.weight is weight
        assert type(weight) is nn.Parameter

    @pytest.mark.usefixtures("run")
    def test_module_with_a_weak_reference_can_be_moved(self) -> None:
        module = nn.Linear(2, 2)
        weight = weakref.ref(module.weight)
        module.cuda()
        assert weight() is module.weight
        assert module.weight.is_cuda

    def test_parameters_can_be_moved_by_their_data(self, run: DryRun) -> None:
        parameter = nn.Parameter(torch.ones(3))
        parameter.data = parameter.data.cuda()
        assert (parameter.is_cuda, isinstance(parameter, nn.Parameter)) == (True, True)
        parameter.data = parameter.data.half()
        assert parameter.dtype == torch.half
        parameter.data = parameter.data.cpu()
        assert not parameter.is_cuda
        assert list_rules(run) == ["SYNC004", "SYNC003"]

    def test_gradient_scaling_reads_one_flag_per_step(self, run: DryRun) -> None:
        model, scaler = nn.Linear(3, 3, device="cuda"), torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.float16):
            y = model(torch.ones(2, 3, device="cuda"))
        assert y.dtype == torch.float16
        scaler.scale(y.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert list_rules(run) == ["SYNC001"]


class TestTensors:
    def test_views_share_values_and_update_shapes(self, run: DryRun) -> None:
        x = torch.zeros(4, 6, device="cuda")
        x[1:3].view(2, 2, 3).transpose(0, 1).add_(1)
        assert x.t_().shape == (6, 4)
        assert x.unsqueeze_(0).shape == (1, 6, 4)
        assert list_rules(run) == []
        assert x.sum().item() == 12
        assert x.resize_(8, 8).shape == (8, 8)
        out = torch.empty(0, device="cuda")
        torch.add(torch.ones(3, device="cuda"), 1, out=out)
        assert out.tolist() == [2, 2, 2]

    def test_moving_a_tensor_to_its_own_device_returns_the_same_object(self, run: DryRun) -> None:
        x = torch.ones(3, device="cuda")
        assert x.to("cuda") is x
        assert x.cuda() is x
        assert x.to(torch.bfloat16).long().dtype == torch.long
        assert copy.copy(x).data_ptr() == x.data_ptr() != copy.deepcopy(x).data_ptr()
        assert run.syncs == []

    def test_number_assigned_by_indices_is_copied_unlike_a_masked_fill(self, run: DryRun) -> None:
        x = torch.zeros(4, device="cuda")
        index = torch.zeros(2, dtype=torch.long).to("cuda")
        run.syncs.clear()
        x[x < 1] = 2.0
        x[0:2] = 1.0
        torch.where(x > 1, x, 0.0)
        assert list_rules(run) == []
        x[index] = 5.0
        x[torch.tensor([1, 2])]
        assert list_rules(run) == ["SYNC004", "SYNC004"]

    def test_numpy_and_mixed_devices_fail_as_on_a_gpu(self, run: DryRun) -> None:
        x = torch.ones(3, device="cuda")
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            x.numpy()
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            np.asarray(x)
        with pytest.raises(RuntimeError, match="same device"):
            _ = x + torch.ones(3)
        with pytest.raises(RuntimeError, match="cannot pin"):
            x.pin_memory()
        assert run.syncs == []

    def test_formatting_reads_the_value(self, run: DryRun) -> None:
        x = torch.full((), 3, device="cuda")
        assert f"{x} {x:d}" == "3 3"
        assert list_rules(run) == ["SYNC001", "SYNC001"]

    def test_lists_of_device_values_are_read_one_by_one(self, run: DryRun) -> None:
        x = torch.arange(3, device="cuda")
        assert torch.tensor([x[0], x[1]]).tolist() == [0, 1]
        assert list_rules(run) == ["SYNC001", "SYNC001"]

    def test_inference_mode_has_the_same_waits(self, run: DryRun) -> None:
        """Composed operators are not decomposed in inference mode, and views of ordinary tensors stay ordinary."""
        x, layer = torch.randn(3, 3, device="cuda"), nn.Linear(3, 3, device="cuda")
        with torch.inference_mode():
            y = layer(x).t().reshape(-1)[1:]
            y.add_(1)
            x[0].mul_(2)
            assert not x.t().is_inference()
            functional.one_hot(torch.ones(2, dtype=torch.long, device="cuda"), 3)
            assert list_rules(run) == []
            bool((x > 0).all())
            torch.ones(2).cuda()
            y.to("cpu")
        assert list_rules(run) == ["SYNC001", "SYNC004", "SYNC003"]

    def test_pickles_go_through_the_host(self, run: DryRun) -> None:
        x = torch.ones(3, device="cuda")
        again = pickle.loads(pickle.dumps(x))  # noqa: S301 - our own bytes
        assert again.is_cuda
        assert list_rules(run) == ["SYNC003", "SYNC004"]

    def test_checkpoints_load_on_their_map_location(self, run: DryRun) -> None:
        file = io.BytesIO()
        torch.save({"weight": torch.ones(3, device="cuda"), "step": 3}, file)
        for where, is_cuda in ((None, True), ("cuda", True)):
            file.seek(0)
            assert torch.load(file, map_location=where)["weight"].is_cuda is is_cuda
        host = io.BytesIO()
        torch.save(torch.ones(3), host)
        host.seek(0)
        run.syncs.clear()
        assert isinstance(torch.load(host, map_location="cuda:0"), DeviceTensor)
        assert list_rules(run) == ["SYNC004"]


@torch.library.custom_op("dcpbench_test::add_sum", mutates_args=())
def add_sum(x: torch.Tensor) -> torch.Tensor:
    """Add the sum to a tensor, as an operator with a Python body that reads a value."""
    return x + int(x.sum())


class TestPrograms:
    def test_waits_in_the_body_of_a_custom_operator_are_found(self, run: DryRun) -> None:
        y = add_sum(torch.ones(3, device="cuda"))
        assert y.is_cuda
        assert [(s.rule, s.function) for s in run.syncs] == [("SYNC001", "add_sum")]

    def test_waits_in_backward_of_an_autograd_function_are_found(self, run: DryRun) -> None:
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad * 2 * x if (x > 0).all() else grad

        x = torch.ones(3, device="cuda", requires_grad=True)
        Square.apply(x).sum().backward()
        assert [(s.rule, s.function) for s in run.syncs] == [("SYNC001", "backward")]

    def test_graph_replay_computes_again(self, run: DryRun) -> None:
        x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = (x + 1) * 2
        run.syncs.clear()
        x.fill_(4)
        graph.replay()
        assert list_rules(run) == []
        assert z.tolist() == [10, 10, 10]

    def test_waits_in_thread_pools_are_found(self, run: DryRun) -> None:
        with ThreadPoolExecutor(2) as pool:
            sums = list(pool.map(lambda i: torch.full((2,), i, device="cuda").sum().item(), range(4)))
        assert sums == [0, 2, 4, 6]
        assert list_rules(run) == ["SYNC001"] * 4

    def test_pinning_data_loader_has_copies_without_waits(self, run: DryRun) -> None:
        data = TensorDataset(torch.ones(4, 2))
        for (batch,) in DataLoader(data, batch_size=2, pin_memory=True):
            assert batch.cuda(non_blocking=True).is_cuda
        assert run.syncs == []

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_flex_attention_runs_its_eager_version(self, run: DryRun) -> None:
        """The eager version creates a scalar on the host and copies it; the comparison below reads one value."""
        q = torch.randn(1, 2, 16, 16, device="cuda")
        mine = flex_attention(q, q, q)
        torch.testing.assert_close(mine, functional.scaled_dot_product_attention(q, q, q))
        assert list_rules(run) == ["SYNC004", "SYNC001"]

    def test_legacy_type_names_move_a_tensor(self, run: DryRun) -> None:
        moved = torch.ones(3).type("torch.cuda.HalfTensor")
        assert (moved.is_cuda, moved.dtype) == (True, torch.half)
        assert list_rules(run) == ["SYNC004"]

    def test_compiled_functions_run_eagerly(self, run: DryRun) -> None:
        @torch.compile(dynamic=True)
        def total(x):
            return x.sum().item()

        assert total(torch.ones(3, device="cuda")) == 3
        assert list_rules(run) == ["SYNC001"]

    def test_generators_and_default_devices_are_on_the_virtual_gpu(self, run: DryRun) -> None:
        generator = torch.Generator(device="cuda").manual_seed(1)
        assert generator.device == torch.device("cuda:0")
        a = torch.randn(3, device="cuda", generator=generator)
        torch.set_default_device("cuda")
        try:
            b = torch.ones(3)
        finally:
            torch.set_default_device(None)
        assert (a.is_cuda, b.is_cuda) == (True, True)
        assert run.syncs == []

    def test_narrow_dtypes_that_the_cpu_lacks_still_run(self, run: DryRun) -> None:
        """Integer histograms exist on GPUs only; with both limits given there is nothing to wait for."""
        counts = torch.histc(torch.tensor([0, 1, 1], dtype=torch.int32).cuda(), bins=2, min=0, max=1)
        run.syncs.clear()
        assert counts.dtype == torch.int32
        assert counts.tolist() == [1, 2]
        assert list_rules(run) == ["SYNC003"]


@pytest.mark.usefixtures("run")
class TestRefusals:
    """Test that calls which a GPU refuses fail, and that errors for unsupported calls suggest an alternative."""

    def test_host_tensor_indexed_by_a_gpu_tensor_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="same device as the indexed tensor"):
            _ = torch.ones(5)[torch.zeros(1, dtype=torch.long, device="cuda")]

    @pytest.mark.parametrize("convert", [torch.Tensor.to_sparse_csr, torch.from_dlpack])
    def test_unknown_layouts_and_foreign_libraries_are_refused(self, convert) -> None:
        with pytest.raises(NotImplementedError, match="A dry run"):
            convert(torch.eye(3, device="cuda"))

    def test_operator_without_a_cpu_implementation_is_named(self) -> None:
        with pytest.raises(NotImplementedError, match=r"_cudnn_init_dropout_state.*dcpbench syncs run"):
            torch.ops.aten._cudnn_init_dropout_state(0.5, True, 0, dtype=torch.uint8, device="cuda")  # noqa: FBT003


class TestTransformers:
    def test_generation_of_a_small_model_has_waits_with_lines(self, run: DryRun) -> None:
        """Each of six tokens tests once if all sequences are finished; the result is that of the host."""
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        ids = torch.arange(10).view(2, 5)
        settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert run.syncs == []
        model.cuda()
        tokens = ids.cuda()
        mask = torch.ones_like(tokens)
        run.syncs.clear()
        out = model.generate(tokens, attention_mask=mask, **settings)
        assert out.is_cuda
        assert "transformers" in {s.file.split("/site-packages/")[-1].split("/")[0] for s in run.syncs}
        assert all(s.user is not None for s in run.syncs)
        assert torch.equal(out.cpu(), expected)
