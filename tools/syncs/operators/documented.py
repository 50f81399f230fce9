"""List calls that torch's documentation names as synchronising, calls in profiles of real engines, and similar calls.

Each is a separate case (`documented:NAME`), which measure.py runs on a GPU and predict.py in a dry run.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[str], Callable[[], Any]]

DOCSTRING = "docstring"
GUIDE = "performance tuning guide"
SEMANTICS = "CUDA semantics"
DEBUG_MODE = "set_sync_debug_mode"  # its documentation names torch.sparse and torch.distributed
RELATED = "related"  # similar to a documented call


@dataclasses.dataclass(frozen=True)
class Documented:
    """Hold one call, and the place that names it."""

    api: str  # name of the function in torch
    variant: str  # difference from other calls of the function
    named_by: str
    make: Make

    @property
    def name(self) -> str:
        """Return the name of the case."""
        return f"{self.api} {self.variant}".strip()


_CASES: list[Documented] = []


def _add(api: str, variant: str, named_by: str, call: Callable[..., Any], *arguments: Callable[[str], Any]) -> None:
    """Add a case that calls a function with arguments that are made on the device for each call."""

    def make(device: str) -> Callable[[], Any]:
        torch.manual_seed(0)
        made = [argument(device) for argument in arguments]
        return lambda: call(*made)

    _CASES.append(Documented(api, variant, named_by, make))


def _make_floats(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.randn(*shape, dtype=dtype).to(device).requires_grad_(grad)


def _make_ints(*shape: int, high: int = 8) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.randint(high, shape).to(device)


def _make_mask(*shape: int) -> Callable[[str], torch.Tensor]:
    return lambda device: (torch.arange(torch.Size(shape).numel()).reshape(shape) % 4 == 0).to(device)


def _make_definite(
    *shape: int, grad: bool = False, dtype: torch.dtype = torch.float32
) -> Callable[[str], torch.Tensor]:
    """Make symmetric positive definite matrices."""

    def make(device: str) -> torch.Tensor:
        x = torch.randn(*shape, dtype=dtype)
        return (x @ x.mH + torch.eye(shape[-1], dtype=dtype)).to(device).requires_grad_(grad)

    return make


def _make_scalar(value: float, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.tensor(value, dtype=dtype).to(device)


def _make_host_ones(*shape: int, pinned: bool = False) -> Callable[[str], torch.Tensor]:
    def make(device: str) -> torch.Tensor:  # noqa: ARG001 - on the host
        x = torch.ones(*shape, device="cpu")
        return x.pin_memory() if pinned else x

    return make


def _get_device(device: str) -> str:
    return device


def _add_linalg() -> None:
    """Add the functions of torch.linalg, with and without the check of errors."""
    linalg, square = torch.linalg, _make_definite(8, 8)
    for name in (
        "cholesky",
        "eig",
        "eigh",
        "eigvals",
        "eigvalsh",
        "inv",
        "ldl_factor",
        "lu_factor",
        "matrix_rank",
        "pinv",
    ):
        _add(f"torch.linalg.{name}", "", DOCSTRING, getattr(linalg, name), square)
    for name in ("svdvals", "cond"):
        _add(f"torch.linalg.{name}", "", DOCSTRING, getattr(linalg, name), square)
    for p in ("fro", "nuc", float("inf"), 1, -2):
        _add("torch.linalg.cond", f"p={p}", DOCSTRING, lambda x, p=p: linalg.cond(x, p), square)
    for name in ("cholesky_ex", "inv_ex", "ldl_factor_ex", "lu_factor_ex"):
        function = getattr(linalg, name)
        _add(f"torch.linalg.{name}", "", DOCSTRING, function, square)
        _add(
            f"torch.linalg.{name}",
            "check_errors=True",
            DOCSTRING,
            lambda x, f=function: f(x, check_errors=True),
            square,
        )
    _add("torch.linalg.lu_factor_ex", "of a wide matrix", DOCSTRING, linalg.lu_factor_ex, _make_floats(4, 8))
    _add("torch.linalg.solve", "", DOCSTRING, linalg.solve, square, _make_floats(8, 2))
    _add("torch.linalg.solve_ex", "", DOCSTRING, linalg.solve_ex, square, _make_floats(8, 2))
    _add(
        "torch.linalg.solve_ex",
        "check_errors=True",
        DOCSTRING,
        lambda a, b: linalg.solve_ex(a, b, check_errors=True),
        square,
        _make_floats(8, 2),
    )
    complex64, real = torch.complex64, torch.float32
    for dtype in (real, complex64):
        kind = str(dtype).removeprefix("torch.")
        matrix = _make_definite(8, 8, grad=True, dtype=dtype)
        _add("torch.linalg.eig", f"gradient {kind}", DOCSTRING, lambda x: linalg.eig(x).eigenvectors.abs(), matrix)
        _add("torch.linalg.eigh", f"gradient {kind}", DOCSTRING, lambda x: linalg.eigh(x).eigenvectors.abs(), matrix)
        _add("torch.linalg.svd", f"gradient {kind}", DOCSTRING, lambda x: linalg.svd(x).U.abs(), matrix)
    for name in ("eigh", "cholesky", "inv", "svdvals", "pinv"):
        _add(f"torch.linalg.{name}", "of three matrices", DOCSTRING, getattr(linalg, name), _make_definite(3, 8, 8))
    for name in ("svd", "qr", "det", "slogdet", "lu", "matrix_exp", "tensorinv"):
        call = (lambda x: linalg.tensorinv(x, ind=1)) if name == "tensorinv" else getattr(linalg, name)
        _add(f"torch.linalg.{name}", "", RELATED, call, square)
    _add("torch.linalg.lu", "of a wide matrix", RELATED, linalg.lu, _make_floats(4, 8))
    _add("torch.linalg.matrix_power", "3", RELATED, lambda x: linalg.matrix_power(x, 3), square)
    _add("torch.linalg.matrix_power", "-1", RELATED, lambda x: linalg.matrix_power(x, -1), square)
    _add("torch.linalg.matrix_norm", "ord=2", RELATED, lambda x: linalg.matrix_norm(x, 2), square)
    _add("torch.linalg.matrix_norm", "ord=nuc", RELATED, lambda x: linalg.matrix_norm(x, "nuc"), square)
    _add("torch.linalg.matrix_norm", "", RELATED, linalg.matrix_norm, square)
    _add("torch.linalg.lstsq", "", RELATED, linalg.lstsq, square, _make_floats(8, 2))
    _add("torch.linalg.tensorsolve", "", RELATED, linalg.tensorsolve, square, _make_floats(8))
    _add("torch.linalg.multi_dot", "", RELATED, lambda x: linalg.multi_dot([x, x, x]), square)
    _add(
        "torch.linalg.ldl_solve",
        "",
        RELATED,
        lambda f: linalg.ldl_solve(f[0], f[1], f[0]),
        _make_factors(linalg.ldl_factor_ex),
    )
    _add(
        "torch.linalg.lu_solve",
        "",
        RELATED,
        lambda f: linalg.lu_solve(f[0], f[1], f[0]),
        _make_factors(linalg.lu_factor_ex),
    )
    _add(
        "torch.linalg.solve_triangular",
        "",
        RELATED,
        lambda a, b: linalg.solve_triangular(a, b, upper=False),
        square,
        _make_floats(8, 2),
    )
    _add("torch.cholesky_solve", "", RELATED, torch.cholesky_solve, _make_floats(8, 2), square)
    _add("torch.cholesky_inverse", "", RELATED, torch.cholesky_inverse, square)
    _add("torch.cholesky_inverse", "of three matrices", RELATED, torch.cholesky_inverse, _make_definite(3, 8, 8))
    _add("torch.cholesky", "", RELATED, torch.cholesky, square)
    _add("torch.svd_lowrank", "", RELATED, lambda x: torch.svd_lowrank(x, q=3), square)


def _make_factors(function: Callable[..., Any]) -> Callable[[str], Any]:
    return lambda device: function(_make_definite(8, 8)(device))


def _add_shapes() -> None:
    """Add operators with result sizes that depend on values, and similar ones that do not wait."""
    x, mask, ints = _make_floats(64, 16), _make_mask(64), _make_ints(64)
    for function, named_by in ((torch.nonzero, GUIDE), (torch.argwhere, DOCSTRING), (torch.where, RELATED)):
        _add(f"torch.{function.__name__}", "", named_by, function, mask)
    _add("torch.nonzero", "as_tuple=True", DOCSTRING, lambda m: torch.nonzero(m, as_tuple=True), mask)
    _add("torch.nonzero_static", "", RELATED, lambda m: torch.nonzero_static(m, size=16), mask)
    _add("torch.repeat_interleave", "", DOCSTRING, lambda a, r: torch.repeat_interleave(a, r, dim=0), x, ints)
    _add(
        "torch.repeat_interleave",
        "output_size=",
        DOCSTRING,
        lambda a, r: torch.repeat_interleave(a, r % 1 + 1, dim=0, output_size=64),
        x,
        ints,
    )
    _add("torch.repeat_interleave", "of a number", RELATED, lambda a: torch.repeat_interleave(a, 3, dim=0), x)
    for name in ("unique", "unique_consecutive", "bincount"):
        _add(f"torch.{name}", "", RELATED, getattr(torch, name), ints)
    _add("torch.unique", "dim=0", RELATED, lambda a: torch.unique(a, dim=0), x)
    _add("torch.unique_consecutive", "dim=0", RELATED, lambda a: torch.unique_consecutive(a, dim=0), x)
    _add("torch.bincount", "minlength=", RELATED, lambda a: torch.bincount(a, minlength=8), ints)
    _add("torch.histc", "", RELATED, torch.histc, x)
    _add("torch.histc", "min=, max=", RELATED, lambda a: torch.histc(a, 8, min=-1, max=1), x)
    _add("torch.nn.functional.one_hot", "", RELATED, torch.nn.functional.one_hot, ints)
    _add("torch.nn.functional.one_hot", "num_classes=", RELATED, lambda a: torch.nn.functional.one_hot(a, 8), ints)
    _add("torch.masked_select", "", RELATED, torch.masked_select, x, _make_mask(64, 16))
    _add("torch.Tensor.masked_scatter_", "", RELATED, lambda a, m, b: a.masked_scatter_(m, b), x, _make_mask(64, 16), x)
    _add(
        "torch.Tensor.masked_scatter",
        "gradient",
        RELATED,
        lambda a, m, b: a.masked_scatter(m, b),
        x,
        _make_mask(64, 16),
        _make_floats(64, 16, grad=True),
    )
    _add("torch.Tensor.masked_fill_", "", RELATED, lambda a, m: a.masked_fill_(m, 0.0), x, _make_mask(64, 16))
    _add(
        "torch.Tensor.masked_fill_",
        "of a tensor",
        RELATED,
        lambda a, m, v: a.masked_fill_(m, v),
        x,
        _make_mask(64, 16),
        _make_scalar(1),
    )
    _add(
        "torch.Tensor.index_fill_",
        "of a tensor",
        RELATED,
        lambda a, n, v: a.index_fill_(0, n, v),
        x,
        ints,
        _make_scalar(1),
    )
    _add("torch.Tensor.index_put_", "mask", RELATED, lambda a, m, b: a.index_put_((m,), b[:16]), x, mask, x)
    _add("torch.Tensor.index_put_", "indices", RELATED, lambda a, n, b: a.index_put_((n,), b), x, ints, x)
    _add("torch.Tensor.__getitem__", "mask", RELATED, lambda a, m: a[m], x, mask)
    _add("torch.Tensor.__getitem__", "indices", RELATED, lambda a, n: a[n], x, ints)
    _add("torch.Tensor.__getitem__", "list", RELATED, lambda a: a[[1, 2, 3]], x)
    _add("torch.Tensor.__getitem__", "indices on the host", RELATED, lambda a: a[torch.tensor([1, 2], device="cpu")], x)
    _add("torch.Tensor.__getitem__", "slice to a tensor", RELATED, lambda a, n: a[:n], x, _make_scalar(5, torch.int64))
    _add("torch.Tensor.__setitem__", "number by mask", RELATED, lambda a, m: a.__setitem__(m, 1.0), x, mask)
    _add("torch.Tensor.__setitem__", "tensor by mask", RELATED, lambda a, m, b: a.__setitem__(m, b[:16]), x, mask, x)
    _add("torch.Tensor.__setitem__", "number into an element", RELATED, lambda a: a.__setitem__((3, 2), 1.0), x)
    _add(
        "torch.tensor_split",
        "by a tensor",
        RELATED,
        lambda a: torch.tensor_split(a, torch.tensor([2, 5], device="cpu")),
        x,
    )
    _add("torch.isin", "few", RELATED, torch.isin, ints, _make_ints(4))
    _add("torch.isin", "many", RELATED, torch.isin, ints, _make_ints(64))
    _add("torch.mode", "", RELATED, torch.mode, x)
    _add("torch.mode", "of 4,096", RELATED, torch.mode, _make_floats(4096))
    _add("torch.combinations", "", RELATED, torch.combinations, _make_floats(6))
    _add("torch.multinomial", "without replacement", RELATED, lambda a: torch.multinomial(a.abs(), 4), x)
    _add("torch.randperm", "of 100,000", RELATED, lambda d: torch.randperm(100_000, device=d), _get_device)
    _add("torch.cov", "aweights=", RELATED, lambda a, w: torch.cov(a, aweights=w.abs()), x, _make_floats(16))
    _add("torch.cov", "fweights=", RELATED, lambda a, w: torch.cov(a, fweights=w), x, _make_ints(16))
    for name in ("topk", "sort", "cumsum", "median", "quantile", "searchsorted", "bucketize"):
        _add(f"torch.{name}", "", RELATED, _BOUNDED[name], x)


_BOUNDED: dict[str, Callable[[torch.Tensor], Any]] = {  # operators whose result has a size that the host knows
    "topk": lambda a: torch.topk(a, 4),
    "sort": torch.sort,
    "cumsum": lambda a: torch.cumsum(a, 0),
    "median": torch.median,
    "quantile": lambda a: torch.quantile(a, 0.5),
    "searchsorted": lambda a: torch.searchsorted(a[:, 0].contiguous(), a[:, 1].contiguous()),
    "bucketize": lambda a: torch.bucketize(a, a[:, 0].contiguous()),
}


def _print(tensor: torch.Tensor) -> None:
    with Path(os.devnull).open("w") as nowhere:
        print(tensor, file=nowhere)


def _add_values() -> None:
    """Add reads of values into Python, and operators that check values."""
    x, ints, one = _make_floats(4, 4), _make_ints(8), _make_scalar(1, torch.int64)
    _add("print", "", GUIDE, _print, x)
    _add("torch.Tensor.item", "", GUIDE, lambda a: a[0, 0].item(), x)
    _add("torch.Tensor.__bool__", "", GUIDE, lambda a: bool((a != 0).all()), x)
    for name in ("__int__", "__float__", "__index__"):
        _add(f"torch.Tensor.{name}", "", RELATED, lambda a, n=name: getattr(a, n)(), one)
    _add("torch.Tensor.tolist", "", RELATED, lambda a: a.tolist(), x)
    _add("torch.Tensor.numpy", "force=True", RELATED, lambda a: a.numpy(force=True), x)
    _add("torch.is_nonzero", "", RELATED, torch.is_nonzero, one)
    _add("torch.equal", "", RELATED, torch.equal, x, x)
    _add("torch.allclose", "", RELATED, torch.allclose, x, x)
    _add("torch.testing.assert_close", "", RELATED, lambda a: torch.testing.assert_close(a, a.clone()), x)
    _add("torch._assert_async", "", DOCSTRING, lambda a: torch._assert_async((a >= 0).all()), ints)
    _add("torch.normal", "std tensor", DOCSTRING, lambda a: torch.normal(0.0, a.abs() + 1), x)
    _add("torch.normal", "mean tensor", RELATED, lambda a: torch.normal(a, 1.0), x)
    _add("torch.arange", "of a tensor", RELATED, lambda n: torch.arange(n, device=n.device), one)
    _add("torch.full", "of a tensor", RELATED, lambda n: torch.full((3,), n, device=n.device), one)
    _add("torch.linspace", "of tensors", RELATED, lambda n: torch.linspace(n, 3, 4, device=n.device), one)
    _add("torch.clamp", "of tensors", RELATED, lambda a, n: torch.clamp(a, n, n), x, one)
    _add("torch.sub", "alpha of a tensor", RELATED, lambda a, n: torch.sub(a, a, alpha=n), x, one)
    _add("torch.segment_reduce", "", RELATED, _reduce_segments(unsafe=False), _make_floats(4), _make_ints(2, high=1))
    _add(
        "torch.segment_reduce",
        "unsafe=True",
        RELATED,
        _reduce_segments(unsafe=True),
        _make_floats(4),
        _make_ints(2, high=1),
    )
    _add(
        "torch.distributions.Categorical", "", RELATED, lambda a: torch.distributions.Categorical(logits=a).sample(), x
    )
    _add(
        "torch.distributions.Categorical",
        "validate_args=False",
        RELATED,
        lambda a: torch.distributions.Categorical(logits=a, validate_args=False).sample(),
        x,
    )
    for check in (False, True):
        _add(
            "torch.nn.utils.clip_grad_norm_",
            f"error_if_nonfinite={check}",
            RELATED,
            lambda a, c=check: torch.nn.utils.clip_grad_norm_(a, 1.0, error_if_nonfinite=c),
            _make_with_gradient,
        )


def _reduce_segments(*, unsafe: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda a, n: torch.segment_reduce(a, "sum", lengths=n + 2, unsafe=unsafe)


def _make_with_gradient(device: str) -> torch.Tensor:
    weight = torch.ones(4, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    return weight


def _add_copies() -> None:
    """Add copies between host and GPU, in both directions, with both kinds of memory, waiting or not."""
    there = _make_floats(64, 16)
    for pinned in (False, True):
        kind = "pinned" if pinned else "pageable"
        for wait in (False, True):
            how = f"from {kind}, non_blocking={not wait}"
            host = _make_host_ones(64, 16, pinned=pinned)
            _add("torch.Tensor.to", how, DOCSTRING, lambda a, d, w=wait: a.to(d, non_blocking=not w), host, _get_device)
            _add("torch.Tensor.cuda", how, DOCSTRING, lambda a, w=wait: a.cuda(non_blocking=not w), host)
            _add("torch.Tensor.copy_", how, DOCSTRING, lambda a, b, w=wait: a.copy_(b, non_blocking=not w), there, host)
            into = f"into {kind}, non_blocking={not wait}"
            _add(
                "torch.Tensor.copy_", into, DOCSTRING, lambda a, b, w=wait: b.copy_(a, non_blocking=not w), there, host
            )
    large = _make_host_ones(1 << 20)
    _add("torch.Tensor.to", "4 MiB from pageable, non_blocking=True", RELATED, _copy_at_once, large, _get_device)
    _add("torch.Tensor.to", "cpu", GUIDE, lambda a: a.to("cpu"), there)
    _add("torch.Tensor.to", "cpu, non_blocking=True", DOCSTRING, lambda a: a.to("cpu", non_blocking=True), there)
    _add("torch.Tensor.to", "dtype", RELATED, lambda a: a.to(torch.float16), there)
    _add("torch.Tensor.cpu", "", GUIDE, lambda a: a.cpu(), there)
    _add("torch.Tensor.type", "on the GPU", RELATED, lambda a: a.type("torch.cuda.HalfTensor"), there)
    _add("torch.Tensor.pin_memory", "", DOCSTRING, lambda a: a.pin_memory(), _make_host_ones(64, 16))
    _add("torch.UntypedStorage.cuda", "", DOCSTRING, lambda a: a.untyped_storage().cuda(), _make_host_ones(64, 16))
    _add("torch.UntypedStorage.cpu", "", RELATED, lambda a: a.untyped_storage().cpu(), there)
    _add("torch.tensor", "device=", RELATED, lambda d: torch.tensor([1, 2, 3], device=d), _get_device)
    _add("torch.as_tensor", "device=", RELATED, lambda d: torch.as_tensor([1, 2, 3], device=d), _get_device)
    _add("torch.Tensor.new_tensor", "", RELATED, lambda a: a.new_tensor([1, 2, 3]), there)
    _add("torch.full", "of a number", RELATED, lambda d: torch.full((3,), 1, device=d), _get_device)
    _add("torch.nn.Module.to", "", RELATED, lambda d: torch.nn.Linear(8, 8, device="cpu").to(d), _get_device)
    for pin in (False, True):
        _add(
            "torch.autograd.graph.save_on_cpu",
            f"pin_memory={pin}",
            DOCSTRING,
            _save_on_cpu(pin=pin),
            _make_floats(8, 8, grad=True),
        )


def _copy_at_once(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)


def _save_on_cpu(*, pin: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return (x * x).exp()

    return run


def _add_waits() -> None:
    """Add calls that wait explicitly, and calls by which one stream waits for another."""
    _add("torch.cuda.synchronize", "", DOCSTRING, lambda d: torch.cuda.synchronize(d), _get_device)
    _add("torch.accelerator.synchronize", "", DOCSTRING, lambda d: torch.accelerator.synchronize(d), _get_device)
    _add(
        "torch.cuda.Stream.synchronize",
        "",
        DOCSTRING,
        lambda d: torch.cuda.current_stream(d).synchronize(),
        _get_device,
    )
    _add(
        "torch.Stream.synchronize",
        "",
        DOCSTRING,
        lambda d: torch.accelerator.current_stream(d).synchronize(),
        _get_device,
    )
    _add("torch.cuda.Event.synchronize", "", DOCSTRING, _wait_for_event(lambda: torch.cuda.Event()), _get_device)
    _add(
        "torch.cuda.Event.synchronize",
        "blocking=True",
        DOCSTRING,
        _wait_for_event(lambda: torch.cuda.Event(blocking=True)),
        _get_device,
    )
    _add("torch.Event.synchronize", "", DOCSTRING, _wait_for_event(lambda: torch.Event("cuda")), _get_device)
    _add(
        "torch.cuda.Event.query",
        "",
        RELATED,
        lambda d: torch.cuda.current_stream(d).record_event().query(),
        _get_device,
    )
    _add("torch.cuda.Stream.query", "", RELATED, lambda d: torch.cuda.current_stream(d).query(), _get_device)
    _add("torch.cuda.Stream.wait_stream", "", DOCSTRING, _wait_for_stream, _get_device)
    _add("torch.Stream.wait_stream", "", DOCSTRING, _wait_for_stream, _get_device)
    _add("torch.cuda.Stream.wait_event", "", RELATED, _wait_event, _get_device)
    _add("torch.Tensor.record_stream", "", DOCSTRING, lambda a: a.record_stream(torch.cuda.Stream()), _make_floats(8))
    _add("torch.cuda.Event", "", DOCSTRING, lambda d: torch.cuda.current_stream(d).record_event(), _get_device)
    _add("torch.cuda.memory_stats", "", DOCSTRING, lambda d: torch.cuda.memory_stats(d), _get_device)
    _add("torch.cuda.empty_cache", "of 64 MiB", RELATED, _empty_cache, _get_device)
    _add("torch.cuda.graph", "", SEMANTICS, _capture, _make_floats(8))


def _wait_for_event(make: Callable[[], Any]) -> Callable[[str], None]:
    def run(device: str) -> None:
        event = make()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()

    return run


def _wait_for_stream(device: str) -> None:
    torch.cuda.Stream(device).wait_stream(torch.cuda.current_stream(device))


def _wait_event(device: str) -> None:
    torch.cuda.Stream(device).wait_event(torch.cuda.current_stream(device).record_event())


def _empty_cache(device: str) -> None:
    torch.empty(1 << 26, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()


def _capture(x: torch.Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add(1)


def _add_training() -> None:
    """Add calls of training: gradient scaling, losses, and layers that read values."""
    functional = torch.nn.functional
    for name, call in (
        ("unscale_", lambda s: s[0].unscale_(s[1])),
        ("get_scale", lambda s: s[0].get_scale()),
        ("step", lambda s: (s[0].step(s[1]), s[0].update())),
    ):
        _add(f"torch.amp.GradScaler.{name}", "", DOCSTRING, _call_with_scaler(call), _get_device)
    _add(
        "torch.nn.functional.ctc_loss",
        "",
        RELATED,
        lambda x, y: functional.ctc_loss(
            x.log_softmax(2), y + 1, torch.full_like(y[:, 0], 10), torch.full_like(y[:, 0], 3)
        ),
        _make_floats(10, 2, 5, grad=True),
        _make_ints(2, 3, high=2),
    )
    _add("torch.nn.functional.embedding", "max_norm=", RELATED, _embed, _make_ints(8), _make_floats(8, 4))
    _add(
        "torch.nn.AdaptiveLogSoftmaxWithLoss",
        "",
        RELATED,
        _compute_adaptive_loss,
        _make_floats(8, 16),
        _make_ints(8, high=20),
    )
    _add("torch.nn.TransformerEncoder", "src_key_padding_mask=", RELATED, _run_encoder, _get_device)
    for name in ("LSTM", "GRU"):
        _add(f"torch.nn.{name}", "gradient", RELATED, _run_recurrent(name), _make_floats(5, 2, 8, grad=True))
    _add("torch.optim.LBFGS", "", RELATED, _make_lbfgs_step, _get_device)
    _add("torch.nested.nested_tensor_from_jagged", "", DOCSTRING, _make_jagged, _make_floats(12, 5), _get_device)
    _add(
        "torch.nested.nested_tensor",
        "from a list",
        RELATED,
        lambda a: torch.nested.nested_tensor([a, a]),
        _make_floats(3, 2),
    )
    _add(
        "torch.nn.utils.rnn.pack_padded_sequence",
        "",
        RELATED,
        lambda a: torch.nn.utils.rnn.pack_padded_sequence(a, torch.tensor([5, 3], device="cpu")),
        _make_floats(5, 2, 3),
    )


def _call_with_scaler(call: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a function that calls `call` with a new scaler, which has scaled a loss, and its optimizer."""

    def run(device: str) -> Any:
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        return call((scaler, optimizer))

    return run


def _embed(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(indices, weight, max_norm=1.0)


def _compute_adaptive_loss(x: torch.Tensor, target: torch.Tensor) -> Any:
    layer = torch.nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], device=x.device)
    return layer(x, target).loss


def _run_encoder(device: str) -> torch.Tensor:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, device=device)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()
    padding = torch.zeros(2, 4, dtype=torch.bool, device=device)
    padding[1, 3:] = True
    with torch.inference_mode():
        return encoder(torch.ones(2, 4, 16, device=device), src_key_padding_mask=padding)


def _run_recurrent(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        layer = getattr(torch.nn, name)(8, 8, device=x.device)
        return layer(x)[0]

    return run


def _make_lbfgs_step(device: str) -> Any:
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.LBFGS([weight], max_iter=2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = (weight * weight).sum()
        found.backward()
        return found

    return float(optimizer.step(loss))


def _make_jagged(values: torch.Tensor, device: str) -> Any:
    offsets = torch.arange(4, device=device) * 4
    return torch.nested.nested_tensor_from_jagged(values, offsets) + 1


def _add_sparse() -> None:
    """Add torch.sparse, which the debug mode does not cover."""
    dense, sparse = _make_floats(8, 8), lambda device: _make_floats(8, 8)(device).relu().to_sparse()
    _add("torch.Tensor.to_sparse", "", DEBUG_MODE, lambda a: a.to_sparse(), dense)
    _add("torch.Tensor.to_sparse_csr", "", DEBUG_MODE, lambda a: a.to_sparse_csr(), dense)
    _add("torch.Tensor.to_dense", "", DEBUG_MODE, lambda a: a.to_dense(), sparse)
    _add("torch.Tensor.coalesce", "", DEBUG_MODE, lambda a: (a + a).coalesce(), sparse)
    _add(
        "torch.sparse_coo_tensor",
        "",
        DEBUG_MODE,
        lambda n, v: torch.sparse_coo_tensor(n, v),
        _make_ints(2, 8),
        _make_floats(8),
    )
    _add("torch.sparse.mm", "", DEBUG_MODE, torch.sparse.mm, sparse, dense)
    _add("torch.sparse.addmm", "", DEBUG_MODE, torch.sparse.addmm, dense, sparse, dense)
    _add("torch.sparse.sum", "", DEBUG_MODE, torch.sparse.sum, sparse)
    _add("torch.sparse.sum", "dim=0", DEBUG_MODE, lambda a: torch.sparse.sum(a, dim=0), sparse)
    _add("torch.sparse.softmax", "", DEBUG_MODE, lambda a: torch.sparse.softmax(a, dim=1), sparse)
    _add("torch.Tensor.sparse_mask", "", DEBUG_MODE, lambda a, b: a.sparse_mask(b), dense, sparse)


def _add_distributed() -> None:
    """Add torch.distributed with one rank, which the debug mode does not cover."""
    from datetime import timedelta

    from tools.syncs.operators.cases import connect

    x = _make_floats(4)
    _add("torch.distributed.barrier", "", DOCSTRING, lambda _: connect().barrier(), _get_device)
    _add("torch.distributed.all_reduce", "", DEBUG_MODE, lambda a: connect().all_reduce(a), x)
    _add(
        "torch.distributed.all_gather_object",
        "",
        DEBUG_MODE,
        lambda _: connect().all_gather_object([None], {"a": 1}),
        _get_device,
    )
    for name, call in (
        ("wait", lambda work: work.wait()),
        ("synchronize", lambda work: work.synchronize()),
        ("block_current_stream", lambda work: work.block_current_stream()),
    ):
        _add(
            f"torch.distributed.Work.{name}",
            "",
            DOCSTRING,
            lambda a, c=call: c(connect().all_reduce(a, async_op=True)),
            x,
        )
    _add(
        "torch.distributed.Work.wait",
        "timeout=",
        DOCSTRING,
        lambda a: connect().all_reduce(a, async_op=True).wait(timedelta(seconds=60)),
        x,
    )


VLLM, SGLANG = "vLLM 0.26.0", "SGLang 0.5.17"


def _add_engines() -> None:
    """Add calls at which profiles of real engines have waits, or copies that may block."""
    lengths = _make_ints(8)
    _add("torch.Tensor.to", "cpu, lengths of a plan", f"{SGLANG}, plan of flashinfer", lambda a: a.to("cpu"), lengths)
    _add("torch.Tensor.item", "longest of a batch", f"{SGLANG}, update", lambda a: a.max().item(), lengths)
    _add(
        "torch.Tensor.to",
        "lengths from pageable, non_blocking=True",
        f"{SGLANG}, alloc_for_extend and init_new; {VLLM}, build_mla_chunked_context_metadata",
        lambda d: torch.tensor([3, 1, 2], device="cpu").to(d, non_blocking=True),
        _get_device,
    )
    _add(
        "torch.cuda.Event.synchronize",
        "behind a copy to pinned memory",
        f"{VLLM}, get_output; {SGLANG}, process_batch_result",
        _read_late,
        lengths,
    )
    _add(
        "torch.cuda.Event.synchronize",
        "of a past step",
        f"{VLLM}, synchronize_input_prep",
        _wait_for_past_event,
        _get_device,
    )
    _add(
        "torch.cuda.synchronize",
        "at a profile's end",
        f"{VLLM} and {SGLANG}, profiler",
        lambda d: torch.cuda.synchronize(d),
        _get_device,
    )


def _read_late(tokens: torch.Tensor) -> None:
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tokens.to("cpu", non_blocking=True)
        done.record()
    done.synchronize()


_PAST: list[torch.cuda.Event] = []


def _wait_for_past_event(device: str) -> None:
    """Wait for an event that was recorded in the call before, behind work that has ended."""
    if _PAST:
        _PAST.pop().synchronize()
    _PAST.append(torch.cuda.current_stream(device).record_event())


def list_documented() -> dict[str, Documented]:
    """Return all cases by name."""
    if not _CASES:
        for add in (
            _add_linalg,
            _add_shapes,
            _add_values,
            _add_copies,
            _add_waits,
            _add_training,
            _add_sparse,
            _add_distributed,
            _add_engines,
        ):
            add()
    return {case.name: case for case in _CASES}
