"""Test that FSDP2 trains in a dry run with a process group without other processes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcpbench.syncs.dry_run import DryRun, dry_run

SIZES = (1, 2, 8)


@pytest.fixture(params=SIZES)
def run(request: pytest.FixtureRequest) -> Iterator[DryRun]:
    """Start a dry run with a process group of `request.param` ranks, none of which is another process."""
    with dry_run() as seen:
        dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
        try:
            yield seen
        finally:
            dist.destroy_process_group()


def layers() -> nn.Sequential:
    """Return the same small model at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def shard(model: nn.Sequential, **options: object) -> nn.Sequential:
    """Shard each layer and the whole model; without a mesh, the default one is on the GPU."""
    for layer in (model[0], model[2], model):
        fully_shard(layer, **options)
    return model


def train(model: nn.Module, x: torch.Tensor) -> None:
    """Take two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def test_fsdp_training_has_no_waits_and_uses_measured_operators_only(run: DryRun) -> None:
    model, x = shard(layers()), torch.ones(4, 8, device="cuda")
    run.syncs.clear()
    train(model, x)
    assert all(p.to_local().is_cuda for p in model.parameters())
    assert [sync.rule for sync in run.syncs] == []
    assert run.unmeasured == set()


@pytest.mark.parametrize("run", [1], indirect=True)
@pytest.mark.usefixtures("run")
def test_single_rank_trains_as_without_sharding() -> None:
    host, x = layers(), torch.ones(4, 8)
    train(host, x)
    model = shard(layers())
    train(model, x.cuda())
    for mine, theirs in zip(model.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor().detach().cpu(), theirs.detach())


@pytest.mark.parametrize("run", [8], indirect=True)
def test_reading_the_gradient_norm_of_all_ranks_waits(run: DryRun) -> None:
    model = shard(layers(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x = torch.ones(4, 8, device="cuda")
    run.syncs.clear()
    model(x).float().square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm.full_tensor().item()
    assert [(s.rule, s.function) for s in run.syncs] == [
        ("SYNC001", "test_reading_the_gradient_norm_of_all_ranks_waits")
    ]


@pytest.mark.parametrize("run", [2], indirect=True)
@pytest.mark.usefixtures("run")
def test_model_on_the_meta_device_is_sharded_and_then_allocated() -> None:
    with torch.device("meta"):
        model = layers()
    shard(model).to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    train(model, torch.ones(4, 8, device="cuda"))
    assert all(p.to_local().is_cuda for p in model.parameters())
