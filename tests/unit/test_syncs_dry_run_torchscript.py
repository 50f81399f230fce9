"""Traced and scripted modules on the virtual GPU run, are saved and are loaded as on a GPU."""

import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from dcpbench.syncs.dry_run import DryRun, dry_run

Save = Callable[[nn.Module, torch.Tensor], torch.jit.ScriptModule]


@pytest.fixture
def run() -> Iterator[DryRun]:
    """Start a dry run around the test."""
    with dry_run() as seen:
        yield seen


def list_rules(run: DryRun) -> list[str]:
    """Return the rules of the waits so far, and forget the waits."""
    found = [sync.rule for sync in run.syncs]
    run.syncs.clear()
    return found


class Scaled(nn.Module):
    """Provide a module with parameters, a buffer that is a view, and a tensor among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.arange(8.0)[2:5])
        self.shift = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.shift


def trace(module: nn.Module, x: torch.Tensor) -> torch.jit.ScriptModule:
    """Trace a module."""
    return torch.jit.trace(module, x)


def script(module: nn.Module, _: torch.Tensor) -> torch.jit.ScriptModule:
    """Script a module."""
    return torch.jit.script(module)


def freeze(module: nn.Module, _: torch.Tensor) -> torch.jit.ScriptModule:
    """Script and freeze a module, so that its parameters become constants of the graph."""
    return torch.jit.freeze(torch.jit.script(module.eval()))


def on_gpu(module: Scaled) -> Scaled:
    """Move a module and its attribute to the virtual GPU."""
    module.shift = module.shift.cuda()
    return module.cuda()


def save(module: torch.jit.ScriptModule) -> io.BytesIO:
    """Return a file with the module."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return file


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit")
class TestSaved:
    @pytest.mark.parametrize("compile_module", [trace, script, freeze])
    def test_saved_and_loaded_module_computes_the_same(self, run: DryRun, compile_module: Save) -> None:
        """Saving copies each storage to the host, and loading copies it to the GPU."""
        module, x = Scaled(), torch.arange(8.0).view(2, 4)
        expected = module(x).detach()
        x = x.cuda()
        compiled = compile_module(on_gpu(module), x)
        run.syncs.clear()
        file = save(compiled)
        assert "SYNC003" in list_rules(run)
        loaded = torch.jit.load(file, map_location="cuda")
        assert "SYNC004" in list_rules(run)
        for _ in range(3):  # the first runs optimise the graph, which compares constants
            run.syncs.clear()
            result = loaded(x)
        assert list_rules(run) == []
        assert result.is_cuda
        torch.testing.assert_close(result.detach().cpu(), expected)

    @pytest.mark.parametrize(("where", "is_cuda"), [("cuda:0", True), (None, True), ("cpu", False)])
    def test_module_is_loaded_on_the_requested_device(self, run: DryRun, where: str | None, *, is_cuda: bool) -> None:
        file = save(torch.jit.script(nn.Linear(4, 3).cuda()))
        assert list_rules(run) == ["SYNC004", "SYNC004", "SYNC003", "SYNC003"]
        loaded = torch.jit.load(file, map_location=where)
        assert [p.is_cuda for p in loaded.parameters()] == [is_cuda, is_cuda]
        assert list_rules(run) == ["SYNC004", "SYNC004"] * is_cuda

    def test_waits_of_saving_and_loading_have_lines_of_the_program(self, run: DryRun) -> None:
        module = torch.jit.script(nn.Linear(4, 3).cuda())
        run.syncs.clear()
        torch.jit.load(save(module), map_location="cuda")
        assert [sync.function for sync in run.syncs] == ["save"] * 2 + [
            "test_waits_of_saving_and_loading_have_lines_of_the_program"
        ] * 2

    @pytest.mark.usefixtures("run")
    def test_parameter_changed_after_a_save_is_saved_with_new_values(self) -> None:
        layer = nn.Linear(4, 3).cuda()
        module = torch.jit.script(layer)
        save(module)
        with torch.no_grad():
            layer.weight.fill_(2)
            layer.bias = nn.Parameter(torch.full((3,), 3.0, device="cuda"))
            module.bias = layer.bias
        loaded = torch.jit.load(save(module), map_location="cpu")
        assert (loaded.weight.unique().tolist(), loaded.bias.unique().tolist()) == ([2], [3])

    @pytest.mark.usefixtures("run")
    def test_function_with_a_constant_on_the_gpu_is_saved(self) -> None:
        constant = torch.full((2,), 5.0, device="cuda")
        traced = torch.jit.trace(lambda x: x + constant, torch.zeros(2, device="cuda"))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        assert torch.jit.load(file)(torch.ones(2, device="cuda")).tolist() == [6, 6]


@pytest.mark.usefixtures("run")
def test_tensor_resized_in_place_keeps_its_values() -> None:
    """The storage in C++ is as large as that of the values."""
    x = torch.ones(2, device="cuda")
    x.resize_(64).fill_(3)
    assert x.as_strided((2,), (32,)).tolist() == [3, 3]
    assert torch._C.TensorBase.untyped_storage(x).nbytes() == 256


def test_wait_inside_a_scripted_function_is_reported(run: DryRun) -> None:
    @torch.jit.script
    def double_positive(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool((x > 0).any()) else x

    assert double_positive(torch.ones(2, device="cuda")).is_cuda
    assert list_rules(run) == ["SYNC001"]
