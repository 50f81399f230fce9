"""Make calls of torch's operators with small arguments, from torch's test database and from a list of our own.

The same cases run on a GPU, where waits are measured, and in a dry run, where they are predicted.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.syncs.operators.documented import list_documented

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

MAX_SAMPLES = 16  # calls of one operator for each dtype
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
MAX_DTYPES = 2
SKIPPED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Operators that are left out, because their results are uninitialised memory."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold one call of one operator."""

    name: str
    run: Callable[[], Any]

    def make_backward(self, result: Any) -> Callable[[], None] | None:
        """Return the backward pass of the result; None if it has no gradient."""
        tensors = [t for t in _list_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn]
        tensors = [t for t in tensors if t.layout == torch.strided]
        if not tensors:
            return None
        grads = [torch.ones_like(t) for t in tensors]
        return lambda: torch.autograd.backward(tensors, grads, retain_graph=True)


KINDS = (
    "op",
    "module",
    "own",
    "documented",
)  # torch's two databases, our calls, and calls in documentation or profiles


def list_groups(kinds: Collection[str] = KINDS) -> list[str]:
    """Return the name of each group of cases of these kinds."""
    names = [f"documented:{name}" for name in list_documented()] if "documented" in kinds else []
    names += [f"own:{name}" for name in OWN] if "own" in kinds else []
    if not {"op", "module"}.isdisjoint(kinds):
        db, modules = _load_databases()
        names += [f"op:{n}" for n, info in enumerate(db) if info.name not in SKIPPED and "op" in kinds]
        names += [f"module:{n}" for n in range(len(modules)) if "module" in kinds]
    return names


def make_cases(group: str, device: str) -> Iterator[Case]:
    """Yield the cases of a group, with their arguments on the device."""
    kind, _, which = group.partition(":")
    if kind == "own":
        yield Case(which, OWN[which](device))
        return
    if kind == "documented":
        yield Case(which, list_documented()[which].make(device))
        return
    db, modules = _load_databases()
    yield from (
        _make_operator_cases(db[int(which)], device)
        if kind == "op"
        else _make_module_cases(modules[int(which)], device)
    )


def _load_databases() -> tuple[list[Any], list[Any]]:
    if "expecttest" not in sys.modules:  # torch's tests need it, and its operator database does not
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return op_db, module_db


def _make_operator_cases(info: Any, device: str) -> Iterator[Case]:
    name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
    dtypes = [dtype for dtype in DTYPES if dtype in info.dtypes] or sorted(info.dtypes, key=str)
    for dtype in dtypes[:MAX_DTYPES]:
        torch.manual_seed(0)
        grad = info.supports_autograd and dtype.is_floating_point
        kind = str(dtype).removeprefix("torch.")
        for n, sample in enumerate(
            itertools.islice(info.sample_inputs(device, dtype, requires_grad=grad), MAX_SAMPLES)
        ):
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            yield Case(f"{name} {kind} {n}", _bind_call(info.op, args, kwargs))
            if info.inplace_variant is not None and isinstance(sample.input, torch.Tensor) and n < MAX_SAMPLES // 2:
                yield Case(f"{name} {kind} {n} in place", _bind_in_place_call(info.inplace_variant, args, kwargs))


def _bind_call(op: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    return lambda: op(*args, **kwargs)


def _bind_in_place_call(op: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return op(args[0].detach().clone(), *args[1:], **kwargs)

    return run


def _make_module_cases(info: Any, device: str) -> Iterator[Case]:
    dtype = torch.float32 if torch.float32 in info.dtypes else next(iter(info.dtypes))
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=training)
        for n, sample in enumerate(itertools.islice(inputs, MAX_SAMPLES // 2)):
            if sample.forward_input is None:
                continue
            given = sample.constructor_input
            module = info.module_cls(*given.args, **given.kwargs).to(device=device, dtype=dtype).train(training)
            forward = sample.forward_input
            yield Case(
                f"{info.name} {'train' if training else 'eval'} {n}", _bind_call(module, forward.args, forward.kwargs)
            )


def _list_leaves(value: Any) -> list[Any]:
    from torch.utils._pytree import tree_leaves

    return tree_leaves(value)


def _make_optimizer_step(kind: str, **options: Any) -> Callable[[str], Callable[[], Any]]:
    def make(device: str) -> Callable[[], Any]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return lambda: optimizer.step()

    return make


def _make_scaler_step(device: str) -> Callable[[], Any]:
    model, scaler = torch.nn.Linear(8, 8).to(device), torch.amp.GradScaler("cuda")
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 8, device=device)

    def run() -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return run


def _make_expression(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = False) -> Any:
    """Return a decorator that makes a case from a function, called with random tensors of these shapes."""

    def decorate(function: Callable[..., Any]) -> Callable[[str], Callable[[], Any]]:
        def make(device: str) -> Callable[[], Any]:
            torch.manual_seed(0)
            made = [torch.randn(*shape, device=device).to(dtype).requires_grad_(grad) for shape in shapes]
            return lambda: function(*made)

        return make

    return decorate


def _make_sdpa(backend: str) -> Callable[[str], Callable[[], Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    @_make_expression(*[(2, 4, 64, 64)] * 3, dtype=torch.bfloat16, grad=True)
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def _make_api_call(function: Callable[[], Any]) -> Callable[[str], Callable[[], Any]]:
    """Make a case from a call of torch.cuda."""
    return lambda _: function


def _make_graphed_callable(device: str) -> Callable[[], Any]:
    x = torch.ones(2, 8, device=device)
    return lambda: torch.cuda.make_graphed_callables(torch.nn.Linear(8, 8).to(x.device), (torch.ones_like(x),))(x)


def _make_capture(device: str) -> Callable[[], Any]:
    x = torch.ones(2, 8, device=device)

    def run() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add(1)

    return run


def _make_replay(device: str) -> Callable[[], Any]:
    x, graph = torch.ones(2, 8, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x.add(1)

    def run() -> Any:
        graph.replay()
        return y

    return run


def _make_pool_use(device: str) -> Callable[[], Any]:
    def run() -> None:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            torch.ones(8, device=device)

    return run


def _take_snapshot() -> Any:
    torch.cuda.memory._record_memory_history()
    found = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return found


def _empty_cache() -> None:
    torch.ones(1 << 22, device="cuda")
    torch.cuda.empty_cache()


def connect() -> Any:
    """Return torch.distributed with a process group of one rank."""
    import tempfile

    from torch import distributed as dist

    if not dist.is_initialized():
        path = Path(tempfile.mkdtemp(), "store")
        dist.init_process_group("nccl", rank=0, world_size=1, init_method=path.as_uri())
    return dist


def _make_collective(name: str) -> Callable[[str], Callable[[], Any]]:
    def make(device: str) -> Callable[[], Any]:
        dist, x = connect(), torch.ones(4, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(x),
            "all_reduce async": lambda: dist.all_reduce(x, async_op=True).wait(),
            "broadcast": lambda: dist.broadcast(x, 0),
            "reduce": lambda: dist.reduce(x, 0),
            "all_gather": lambda: dist.all_gather([torch.empty_like(x)], x),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty_like(x), x),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty_like(x), x),
            "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(x), x),
            "barrier": lambda: dist.barrier(),
            "barrier async": lambda: dist.barrier(async_op=True).wait(),
            "monitored": lambda: dist.all_gather_object([None], {"a": 1}),
            "broadcast_object_list": lambda: dist.broadcast_object_list([1, 2], 0),
            "new_group": lambda: dist.new_group([0]),
        }
        return calls[name]

    return make


def _make_ddp(what: str) -> Callable[[str], Callable[[], Any]]:
    def make(device: str) -> Callable[[], Any]:
        connect()
        kind = torch.nn.parallel.DistributedDataParallel
        x = torch.ones(2, 8, device=device)
        if what == "construct":
            return lambda: kind(torch.nn.Linear(8, 8).to(device))
        model = kind(torch.nn.Linear(8, 8).to(device))
        return lambda: model(x)

    return make


COLLECTIVES = (
    "all_reduce",
    "all_reduce async",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
    "barrier async",
    "monitored",
    "broadcast_object_list",
    "new_group",
)
OWN: dict[str, Callable[[str], Callable[[], Any]]] = {  # calls that torch's database does not have
    **{f"dist {name}": _make_collective(name) for name in COLLECTIVES},
    "ddp construct": _make_ddp("construct"),
    "ddp forward": _make_ddp("forward"),
    "make_graphed_callables": _make_graphed_callable,
    "graph capture": _make_capture,
    "graph replay": _make_replay,
    "MemPool": _make_pool_use,
    "memory history and snapshot": _make_api_call(_take_snapshot),
    "mem_get_info": _make_api_call(lambda: torch.cuda.mem_get_info()),
    "memory_stats": _make_api_call(lambda: torch.cuda.memory_stats()),
    "memory_summary": _make_api_call(lambda: torch.cuda.memory_summary()),
    "reset_peak_memory_stats": _make_api_call(lambda: torch.cuda.reset_peak_memory_stats()),
    "cudaProfilerStart": _make_api_call(lambda: torch.cuda.cudart().cudaProfilerStart()),
    "cudaProfilerStop": _make_api_call(lambda: torch.cuda.cudart().cudaProfilerStop()),
    "cudaMemGetInfo": _make_api_call(lambda: torch.cuda.cudart().cudaMemGetInfo(0)),
    "get_device_properties": _make_api_call(lambda: torch.cuda.get_device_properties(0)),
    "current_blas_handle": _make_api_call(lambda: torch.cuda.current_blas_handle()),
    "manual_seed_all": _make_api_call(lambda: torch.cuda.manual_seed_all(1)),
    "ipc_collect": _make_api_call(lambda: torch.cuda.ipc_collect()),
    "empty_cache": _make_api_call(_empty_cache),
    "host_memory_stats": _make_api_call(lambda: torch.cuda.host_memory_stats()),
    "caching_allocator_alloc": _make_api_call(
        lambda: torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(64))
    ),
    "Stream": _make_api_call(lambda: torch.cuda.Stream().wait_stream(torch.cuda.current_stream())),
    "Event": _make_api_call(lambda: torch.cuda.Event(enable_timing=True).record()),
    "LazyLinear": _make_expression((2, 8))(lambda x: torch.nn.LazyLinear(4).to(x.device)(x)),
    "jit trace": _make_expression((2, 8))(lambda x: torch.jit.trace(torch.nn.Linear(8, 8).to(x.device), x)(x)),
    "Linear from host": _make_expression((2, 8))(lambda x: torch.nn.Linear(8, 8).to(x.device)),
    **{
        f"{kind} {' '.join(options)}".strip(): _make_optimizer_step(kind, **options)
        for kind in ("SGD", "Adam", "AdamW", "Adagrad")
        for options in ({}, {"foreach": True}, {"fused": True})
    },
    **{
        kind: _make_optimizer_step(kind)
        for kind in ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
    },
    "GradScaler": _make_scaler_step,
    **{
        f"sdpa {name}": _make_sdpa(name)
        for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    },
    "prod backward": _make_expression((4,), grad=True)(lambda x: x.prod()),
    "prod backward with zeros": _make_expression((4,), grad=True)(lambda x: (x * (x > 0)).prod()),
    "prod dim backward": _make_expression((4, 3), grad=True)(lambda x: x.prod(1)),
    "_int_mm": _make_expression((32, 32), (32, 32), dtype=torch.int8)(lambda a, b: torch._int_mm(a, b)),
    "_scaled_mm": _make_expression((32, 32), (32, 32), dtype=torch.float8_e4m3fn)(
        lambda a, b: torch._scaled_mm(
            a,
            b.t(),
            scale_a=torch.ones((), device=a.device),
            scale_b=torch.ones((), device=a.device),
            out_dtype=torch.bfloat16,
        )
    ),
    "_grouped_mm": _make_expression((64, 32), (2, 32, 64), dtype=torch.bfloat16)(
        lambda a, b: torch._grouped_mm(
            a, b, offs=torch.full((2,), 32, dtype=torch.int32, device=a.device).cumsum(0, dtype=torch.int32)
        )
    ),
    "random_": _make_expression((8,))(lambda x: x.clone().random_(0, 5)),
    "bernoulli_": _make_expression((8,))(lambda x: x.clone().bernoulli_(0.5)),
    "log_normal_": _make_expression((8,))(lambda x: x.clone().log_normal_()),
    "geometric_": _make_expression((8,))(lambda x: x.clone().geometric_(0.5)),
    "uniform_": _make_expression((8,))(lambda x: x.clone().uniform_()),
    "set_": _make_expression((8,))(lambda x: torch.empty(0, device=x.device).set_(x)),
    "resize_": _make_expression((8,))(lambda x: x.clone().resize_(16)),
    "to_sparse": _make_expression((4, 4))(lambda x: x.to_sparse()),
    "coalesce": _make_expression((4, 4))(lambda x: (x.to_sparse() + x.to_sparse()).coalesce()),
    "sparse mm": _make_expression((4, 4))(lambda x: torch.sparse.mm(x.to_sparse(), x)),
    "sparse to_dense": _make_expression((4, 4))(lambda x: x.to_sparse().to_dense()),
    "lobpcg": _make_expression((12, 12))(lambda x: torch.lobpcg(x @ x.t() + torch.eye(12, device=x.device), k=2)),
    "pca_lowrank": _make_expression((8, 6))(lambda x: torch.pca_lowrank(x, q=3)),
    "fft": _make_expression((8,))(lambda x: torch.fft.ifft(torch.fft.fft(x))),
    "stft": _make_expression((64,))(
        lambda x: torch.stft(x, 16, window=torch.ones(16, device=x.device), return_complex=True)
    ),
    "embedding_bag offsets": _make_expression((8, 4))(
        lambda w: torch.nn.functional.embedding_bag(
            torch.zeros(6, dtype=torch.long, device=w.device), w, torch.zeros(2, dtype=torch.long, device=w.device)
        )
    ),
    "ctc_loss": _make_expression((10, 2, 5), grad=True)(
        lambda x: torch.nn.functional.ctc_loss(
            x.log_softmax(2),
            torch.ones(2, 3, dtype=torch.long, device=x.device),
            torch.full((2,), 10, device=x.device),
            torch.full((2,), 3, device=x.device),
        )
    ),
    "pack_padded_sequence": _make_expression((5, 2, 3))(
        lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    ),
    "clip_grad_value_": _make_expression((3,), grad=True)(lambda x: torch.nn.utils.clip_grad_value_([x], 1.0)),
    "generator seed": _make_expression((3,))(
        lambda x: torch.randn(3, device=x.device, generator=torch.Generator(x.device))
    ),
    "rng state": _make_expression((3,))(lambda x: torch.cuda.get_rng_state()),
    "rng state set": _make_expression((3,))(lambda x: torch.cuda.set_rng_state(torch.cuda.get_rng_state())),
    "multinomial one": _make_expression((8,))(lambda x: torch.multinomial(x.abs(), 1)),
    "multinomial many": _make_expression((8,))(lambda x: torch.multinomial(x.abs(), 4, replacement=True)),
    "categorical": _make_expression((2, 8))(lambda x: torch.distributions.Categorical(logits=x).sample()),
    "categorical unchecked": _make_expression((2, 8))(
        lambda x: torch.distributions.Categorical(logits=x, validate_args=False).sample()
    ),
    "checkpoint": _make_expression((4, 4), grad=True)(
        lambda x: torch.utils.checkpoint.checkpoint(lambda y: (y * y).relu(), x, use_reentrant=False)
    ),
}
