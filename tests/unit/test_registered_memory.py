"""Memory registered with NCCL, on a machine without GPUs: refusals, reuse of windows, and agreement of ranks."""

import gc
import re

import pytest
import torch

from dcpbench.errors import CapacityError
from dcpbench.exchange import registered_memory, symmetric_memory
from dcpbench.exchange.registered_memory import RegisteredBuffer, close_all, get_shared_buffer, register_buffer
from dcpbench.exchange.torch_collectives import Group
from dcpbench.points import names

CPU = torch.device("cpu")
GROUP = Group(size=2, rank=0, handle=object())


class Owner:
    """An object that borrows a window."""


class Backend:
    """A replacement of torch's NCCL backend that records registrations or refuses them."""

    def __init__(self) -> None:
        self.registered: list[object] = []
        self.refuses = ""

    def register_mem_pool(self, pool, symm):
        """Record the pool or raise an error."""
        assert symm
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.registered.append(pool)

    def deregister_mem_pool(self, pool):
        """Remove the pool."""
        self.registered.remove(pool)


@pytest.fixture
def backend(monkeypatch):
    """Replace NCCL by `Backend`, with the same answers from both ranks."""
    backend = Backend()
    monkeypatch.setattr(registered_memory, "_open", [])
    monkeypatch.setattr(symmetric_memory, "gather_values", lambda _group, value: [value, value])
    monkeypatch.setattr(registered_memory, "find_missing_support", lambda _group, _device: "")
    monkeypatch.setattr(registered_memory, "get_backend", lambda _group, _device: backend)
    monkeypatch.setattr(
        registered_memory, "allocate_window", lambda _backend, n, _device: (torch.zeros(n, dtype=torch.uint8), object())
    )
    monkeypatch.setattr(Group, "all_reduce", lambda _group, x: x)
    monkeypatch.setattr(registered_memory.torch.cuda, "synchronize", lambda _device: None)
    return backend


def test_window_is_registered_once_and_closed_once(backend):
    window = register_buffer(GROUP, 512, CPU, "--buffer registered", "--buffer pool")
    assert window.own.nbytes == 512
    assert backend.registered == [window.pool]
    window.close()
    window.close()
    assert backend.registered == []


def test_released_window_is_reused_if_it_is_large_enough(backend):
    first, second = Owner(), Owner()
    one = get_shared_buffer(first, GROUP, 512, CPU, "a", "b")
    assert get_shared_buffer(second, GROUP, 256, CPU, "a", "b").data_ptr() != one.data_ptr(), "the window is in use"
    del first
    gc.collect()
    third, fourth = Owner(), Owner()
    assert get_shared_buffer(third, GROUP, 1024, CPU, "a", "b").data_ptr() != one.data_ptr(), "the window is too small"
    assert get_shared_buffer(fourth, GROUP, 300, CPU, "a", "b").data_ptr() == one.data_ptr()
    assert len(backend.registered) == 3
    close_all()
    assert backend.registered == []


@pytest.mark.usefixtures("backend")
def test_window_free_on_only_one_rank_is_not_reused(monkeypatch):
    """Ranks with different windows would have different offsets."""
    one = get_shared_buffer(Owner(), GROUP, 512, CPU, "a", "b")
    gc.collect()
    monkeypatch.setattr(
        symmetric_memory, "gather_values", lambda _group, value: [value, set() if isinstance(value, set) else value]
    )
    assert get_shared_buffer(Owner(), GROUP, 512, CPU, "a", "b").data_ptr() != one.data_ptr()


def test_refused_registration_raises_error_with_an_alternative(backend):
    backend.refuses = "NCCL error: invalid usage\nmore"
    message = r"--buffer registered: registering .* refused \(NCCL error: invalid usage\); use --buffer pool instead\."
    with pytest.raises(CapacityError, match=message):
        register_buffer(GROUP, 512, CPU, "--buffer registered", "--buffer pool")


def test_registration_without_gpus_raises_capacity_error(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "gather_values", lambda _group, value: [value, value])
    with pytest.raises(CapacityError, match="registered with NCCL, which needs GPUs; use --exchange ag_rs instead"):
        register_buffer(GROUP, 512, CPU, "--exchange ag_rs_registered", "--exchange ag_rs")


def test_registration_on_a_single_rank_raises_capacity_error():
    with pytest.raises(CapacityError, match="one rank has no peers"):
        register_buffer(Group(size=1, rank=0, handle=None), 512, CPU, "a", "b")


@pytest.mark.parametrize(
    ("version", "signature", "pattern"),
    [
        ((2, 26, 2), "register_mem_pool(pool, symm)", r"NCCL 2\.26\.2.*from 2\.27 on"),
        ((2, 28, 9), "register_mem_pool(pool)", r"torch .* cannot register memory with NCCL .*torch 2\.9"),
        ((2, 28, 9), "register_mem_pool(pool, symm)", "^$"),
    ],
)
def test_old_torch_or_nccl_is_named(monkeypatch, version, signature, pattern):
    def method(pool, symm):
        pass

    method.__doc__ = signature
    backend = type("Nccl", (), {"register_mem_pool": staticmethod(method)})()
    monkeypatch.setattr(registered_memory, "get_backend", lambda _group, _device: backend)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    found = registered_memory.find_missing_support(GROUP, torch.device("cuda"))
    assert re.search(pattern, found)


def test_windows_are_compared_by_identity():
    """Two windows of equal size are different."""
    own = torch.zeros(1, dtype=torch.uint8)
    assert RegisteredBuffer(GROUP, own, None) != RegisteredBuffer(GROUP, own, None)


def test_auto_tries_all_exchanges_except_the_registered_one():
    """The registered exchange must be named, as it has not been measured."""
    assert set(names.EXCHANGES) - set(names.AUTO_EXCHANGES) == {names.REGISTERED}
