"""Test that parameters and tensor subclasses keep their class, attributes and hooks in a dry run, as on a GPU."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Self

import pytest
import torch
from torch import nn

from dcpbench.syncs.dry_run import DryRun, dry_run


@pytest.fixture
def run() -> Iterator[DryRun]:
    """Start a dry run around the test."""
    with dry_run() as seen:
        yield seen


class EngineParameter(nn.Parameter):
    """Imitate vLLM's `BasevLLMParameter`: the constructor takes a loader, and methods use it."""

    def __new__(cls, data: torch.Tensor, **_: object) -> Self:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: torch.Tensor, weight_loader: object, output_dim: int = 0) -> None:  # noqa: ARG002 -- vLLM's
        self._weight_loader, self.output_dim = weight_loader, output_dim

    @property
    def weight_loader(self) -> object:
        """Return the loader that fills the parameter."""
        return self._weight_loader

    def load(self, loaded: torch.Tensor) -> None:
        """Copy a loaded weight into it."""
        self.data.narrow(self.output_dim, 0, loaded.shape[self.output_dim]).copy_(loaded)


class RowParameter(EngineParameter):
    """Provide a second class of parameters."""


class Labelled(torch.Tensor):
    """Provide a tensor subclass with torch's own rule: results are instances of it."""

    label = "none"


class Counting(torch.Tensor):
    """Count torch functions in a tensor subclass."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counting.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class TestModules:
    @pytest.mark.parametrize(
        "move", [nn.Module.cuda, nn.Module.half, nn.Module.double, lambda m: m.to("cuda", torch.bfloat16)]
    )
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.usefixtures("run")
    def test_parameter_stays_the_same_object_with_its_attributes(self, move, device: str) -> None:
        module = nn.Linear(3, 3, device=device)
        module.weight.tensor_model_parallel, weight = True, module.weight
        move(module)
        assert module.weight is weight
        assert module.weight.tensor_model_parallel is True
        assert module.weight.__class__ is nn.Parameter
        assert type(module.weight) == nn.Parameter  # noqa: E721 - what programs write
        assert "weight" in dict(module.named_parameters())

    @pytest.mark.usefixtures("run")
    def test_buffers_are_new_tensors_as_on_a_gpu(self) -> None:
        module = nn.Module()
        module.register_buffer("scale", torch.ones(2))
        module.scale.tag = 1
        assert not hasattr(module.cuda().scale, "tag")

    def test_hooks_of_a_parameter_move_with_it(self, run: DryRun) -> None:
        module, seen = nn.Linear(2, 2), []
        module.weight.register_hook(lambda grad: seen.append(grad.is_cuda))
        module.cuda()
        module(torch.ones(1, 2, device="cuda")).sum().backward()
        assert seen == [True]
        assert run.ops

    def test_module_is_unchanged_after_moving_there_and_back(self, run: DryRun) -> None:
        module = nn.Linear(2, 2)
        module.weight.tag, before = "kept", module.weight.detach().clone()
        module.cuda().cpu()
        assert type(module.weight) is nn.Parameter
        assert (module.weight.tag, module.weight.is_cuda) == ("kept", False)
        assert vars(module.weight) == {"tag": "kept"}
        assert torch.equal(module.weight, before)
        assert run.ops

    @pytest.mark.usefixtures("run")
    def test_lazy_module_is_materialised_on_the_gpu(self) -> None:
        layer = nn.LazyLinear(4).cuda()
        assert layer(torch.ones(2, 8, device="cuda")).shape == (2, 4)
        assert type(layer) is nn.Linear
        assert layer.weight.__class__ is nn.Parameter
        assert layer.weight.is_cuda
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
        assert layer.weight.grad is not None


class TestEngineParameters:
    @pytest.mark.parametrize("moved", [False, True])
    def test_parameter_subclass_keeps_class_methods_and_attributes(self, run: DryRun, moved: bool) -> None:
        """Engines create such parameters on the GPU; tests create them on the host and move the module."""
        module = nn.Module()
        device = "cpu" if moved else "cuda"
        module.weight = EngineParameter(torch.zeros(4, 2, device=device), weight_loader=print, output_dim=0)
        if moved:
            module.cuda()
        weight = module.weight
        assert weight.is_cuda
        assert isinstance(weight, EngineParameter)
        assert not isinstance(weight, RowParameter)
        assert type(weight) in (EngineParameter, RowParameter)
        assert type(weight) not in (RowParameter, nn.Parameter)
        assert {EngineParameter: "found"}[type(weight)] == "found"
        assert type(weight).__name__ == "EngineParameter"
        assert (weight.weight_loader, weight.requires_grad) == (print, False)
        weight.load(torch.ones(2, 2, device="cuda"))
        assert weight.sum().item() == 4
        assert run.ops

    @pytest.mark.usefixtures("run")
    def test_type_of_a_parameter_subclass_creates_another_one(self) -> None:
        weight = EngineParameter(torch.zeros(2, device="cuda"), weight_loader=print)
        for data in (torch.ones(2, device="cuda"), torch.ones(2)):
            other = type(weight)(data, weight_loader=len)
            assert (isinstance(other, EngineParameter), other.weight_loader) == (True, len)
            assert other.device == data.device

    @pytest.mark.usefixtures("run")
    def test_copied_attributes_do_not_replace_the_values(self) -> None:
        """Engines replace a parameter and copy all attributes of the old one."""
        old = nn.Parameter(torch.zeros(2, device="cuda"))
        old.weight_loader = print
        new = nn.Parameter(torch.ones(3, device="cuda"))
        new.__dict__.update(old.__dict__)
        for name, value in vars(old).items():
            setattr(new, name, value)
        assert vars(new) == {"weight_loader": print}
        assert new.tolist() == [1, 1, 1]

    @pytest.mark.usefixtures("run")
    def test_data_and_class_can_be_assigned(self) -> None:
        weight = EngineParameter(torch.zeros(2, device="cuda"), weight_loader=print)
        weight.data = torch.ones(3, device="cuda")
        weight.__class__ = RowParameter
        assert isinstance(weight, RowParameter)
        assert (weight + 1).tolist() == [2, 2, 2]
        weight.data = torch.ones(1)
        assert (type(weight), weight.is_cuda, weight.weight_loader) == (RowParameter, False, print)

    @pytest.mark.usefixtures("run")
    def test_two_tensors_are_swapped_across_devices(self) -> None:
        a = EngineParameter(torch.zeros(2), weight_loader=print)
        b = nn.Parameter(torch.ones(3, device="cuda"))
        b.tag = 1
        torch.utils.swap_tensors(a, b)
        assert (a.__class__, a.is_cuda, a.tag, a.tolist()) == (nn.Parameter, True, 1, [1, 1, 1])
        assert (type(b), b.is_cuda, b.weight_loader, b.tolist()) == (EngineParameter, False, print, [0, 0])


class TestSubclasses:
    @pytest.mark.parametrize(
        "make", [lambda x, kind: x.as_subclass(kind), lambda x, kind: torch.Tensor._make_subclass(kind, x)]
    )
    def test_tensor_subclass_is_kept_on_the_gpu_and_in_results(self, run: DryRun, make) -> None:
        x = torch.arange(3.0, device="cuda")
        mine = make(x, Labelled)
        mine.label = "kept"
        assert (isinstance(mine, Labelled), mine.is_cuda, mine.label) == (True, True, "kept")
        assert isinstance(mine * 2, Labelled)
        assert not isinstance(mine.as_subclass(torch.Tensor), Labelled)
        x.add_(1)
        assert mine.tolist() == [1, 2, 3], "it shares memory with the tensor it was made of"
        assert run.ops

    @pytest.mark.usefixtures("run")
    def test_tensor_subclass_has_the_history_of_its_tensor(self) -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        (x * 2).as_subclass(Labelled).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2, 2]

    @pytest.mark.usefixtures("run")
    def test_torch_function_of_a_subclass_is_called(self) -> None:
        mine = torch.ones(3, device="cuda").as_subclass(Counting)
        before = Counting.calls
        assert isinstance(torch.add(mine, 1), Counting)
        assert Counting.calls > before

    @pytest.mark.usefixtures("run")
    def test_host_subclasses_are_unchanged(self) -> None:
        mine = torch.ones(3).as_subclass(Labelled)
        assert type(mine) is Labelled
        assert type(torch.Tensor._make_subclass(Labelled, torch.ones(2))) is Labelled


class TestCopies:
    @pytest.mark.usefixtures("run")
    def test_deep_copies_keep_class_attributes_and_shared_memory(self) -> None:
        x = torch.zeros(4, device="cuda")
        x.tag = ["a"]
        mine, view = x.as_subclass(Labelled), x[1:]
        mine.label = "kept"
        a, b, c = copy.deepcopy([x, mine, view])
        assert (a.tag, a.tag is x.tag, isinstance(b, Labelled), b.label) == (["a"], False, True, "kept")
        a.add_(1)
        assert (b.tolist(), c.tolist(), x.tolist()) == ([1] * 4, [1] * 3, [0] * 4)
        weight = copy.deepcopy(nn.Linear(2, 2, device="cuda")).weight
        assert (isinstance(weight, nn.Parameter), weight.requires_grad) == (True, True)

    @pytest.mark.usefixtures("run")
    def test_pickles_keep_class_and_attributes(self) -> None:
        mine = torch.ones(3, device="cuda").as_subclass(Labelled)
        mine.label = "kept"
        again = pickle.loads(pickle.dumps(mine))  # noqa: S301 - our own bytes
        assert (isinstance(again, Labelled), again.label, again.is_cuda, again.tolist()) == (
            True,
            "kept",
            True,
            [1] * 3,
        )
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        weight.tag = 3
        again = pickle.loads(pickle.dumps(weight))  # noqa: S301
        assert (isinstance(again, nn.Parameter), again.tag, vars(again)) == (True, 3, {"tag": 3})

    def test_checkpoint_of_a_dry_run_can_be_loaded_without_it(self) -> None:
        """The file names nothing of dcpbench, so that a program on a GPU can read it."""
        file = io.BytesIO()
        with dry_run():
            torch.save(nn.Linear(2, 2, device="cuda").state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        assert {name: type(value) for name, value in loaded.items()} == {"weight": torch.Tensor, "bias": torch.Tensor}
        assert b"dcpbench" not in file.getvalue()


def test_dry_run_restores_classes_of_torch() -> None:
    before = (nn.Parameter.__new__, torch.Tensor.as_subclass, torch.Tensor._make_subclass, torch.utils.swap_tensors)
    with dry_run():
        pass
    assert before == (
        nn.Parameter.__new__,
        torch.Tensor.as_subclass,
        torch.Tensor._make_subclass,
        torch.utils.swap_tensors,
    )
    assert "as_subclass" not in vars(torch.Tensor)
