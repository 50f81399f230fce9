"""Versions of our attention kernels beside one another and other libraries', timed in turns so that all meet the same clocks.

    git worktree add /tmp/before main~3
    python -m tools.attention_versions now=. before=/tmp/before flashmla flashinfer -o versions.jsonl
    python -m tools.attention_versions now=. before=/tmp/before --kv fp8 --cases 48x8192,8x32768 --heads 16,64 -o versions.jsonl
    python -m tools.attention_versions triton flashmla --kv fp8 --mean 1 --cases 132x16384 -o mean.jsonl

A version is a checkout of this project, of which the attention kernels are taken and nothing else; a bare word is a backend. Each line
of FILE is a case: µs of a call of each, from a CUDA graph, with the interval of its median, its error against fp64, and what was wrong.
A version that cannot be compiled, or is wrong, says so and is not timed; the command then ends with 1. Without a GPU all are checked and
none is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import torch

from dcpbench.bench.operators import attention
from dcpbench.bench.operators.calls import gpu_times
from dcpbench.bench.record import BenchSettings, Case
from dcpbench.kernels import attention as kernels
from dcpbench.measuring.timing import capture
from dcpbench.points.names import BACKENDS, FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from dcpbench.bench.operators.calls import Calls
    from dcpbench.kernels.attention import AttentionSpec, Backend

    Make = Callable[[str, AttentionSpec], Backend]
    """As kernels.attention.make_backend."""

ROOM = Path("dcpbench/kernels/attention")
OURS = ("partition", "plain_mla", "hopper_mla", "hopper_mla_fp8", "hopper_pairs", "triton_mla")
"""Modules of a version, each behind those that it imports."""
CASES = "8x8192,48x8192,8x32768,48x32768"


def loaded(checkout: Path) -> Make:
    """What makes a checkout's own backend; its modules stand in for ours while one of them is loaded or run."""
    found: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def instead() -> Iterator[None]:
        names = {f"{kernels.__name__}.{name}": module for name, module in found.items()}
        parents = [mock.patch.object(kernels, name, module, create=True) for name, module in found.items()]
        before = {name: sys.modules.get(name) for name in names}
        with contextlib.ExitStack() as all_of_them:
            for parent in parents:
                all_of_them.enter_context(parent)
            sys.modules.update(names)
            try:
                yield
            finally:  # these alone: what else was imported meanwhile stays, or its classes would be there twice
                for name, module in before.items():
                    if module is None:
                        del sys.modules[name]
                    else:
                        sys.modules[name] = module

    for name in OURS:
        path = checkout / ROOM / f"{name}.py"
        if not path.is_file() or (name.startswith("hopper_mla") and not torch.cuda.is_available()):
            continue  # of another version, or written in what needs a GPU
        spec = importlib.util.spec_from_file_location(f"{kernels.__name__}.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with instead():
            spec.loader.exec_module(module)
        found[name] = module

    def make(_: str, spec: AttentionSpec) -> Backend:
        backend: Backend = found["triton_mla"].TritonBackend(spec)
        run = backend.run

        def as_it_was(*tensors: Any) -> None:  # noqa: ANN401 - of Backend.run
            with instead():
                run(*tensors)

        backend.run = as_it_was  # type: ignore[method-assign,assignment]
        return backend

    return make


def measured(
    case: Case, ways: dict[str, Make | None], work: attention.Attention, settings: BenchSettings
) -> dict[str, Any]:
    """A line of the file. `ways`: what makes each one's backend; None for the backend of that name."""
    wrong: dict[str, str] = {}
    ready: dict[str, tuple[Calls, Callable[[], None]]] = {}
    for name, make in ways.items():
        try:
            with mock.patch.object(attention, "make_backend", make or kernels.make_backend):
                calls = work.build(Case(variant=name, sizes=case.sizes, calls=case.calls))
            said = calls.check(calls.run)
            replay = capture(calls.run).replay if work.device.type == "cuda" else calls.run
            said = said or calls.check(replay)
        except Exception as e:  # noqa: BLE001 -- a version that is being written may raise anything
            lines = str(e).strip().split("\n")
            said = f"{type(e).__name__}: {lines[-1]}"  # compilers say what is wrong at the end
        if said:
            wrong[name] = said
        else:
            ready[name] = calls, replay
    passes = [(replay, len(calls.calls)) for calls, replay in ready.values()] if work.device.type == "cuda" else []
    times, gpu = gpu_times(passes, work.device, settings) if passes else ([], None)
    found = {name: {"error": calls.error()} for name, (calls, _) in ready.items() if calls.error is not None}
    for name, time in zip(ready if times else (), times, strict=True):
        found[name] |= {"median_us": time.median_us, "low_us": time.low_us, "high_us": time.high_us}
    return {"sizes": case.sizes, "found": found, "wrong": wrong, "gpu": msgspec.to_builtins(gpu)}


def said(line: dict[str, Any]) -> str:
    """A case in a line: µs, and how many times as fast as the first that was timed; without a GPU errors alone."""
    sizes, found = line["sizes"], line["found"]
    us = {name: one["median_us"] for name, one in found.items() if "median_us" in one}
    first = next(iter(us.values()), math.nan)
    told = [f"{name} {t:.1f} µs ({first / t:.3f})" for name, t in us.items()]
    told = told or [f"{name} is right, error {one['error']:.2g}" for name, one in found.items()]
    told += [f"{name} WRONG: {why}" for name, why in line["wrong"].items()]
    mean = f", values with a mean of {sizes['mean']:g}" if sizes.get("mean") else ""
    return f"{sizes['requests']} × {sizes['context']:,}, H={sizes['heads']}, {sizes['kv']}{mean}: {', '.join(told)}"


def cases(asked: argparse.Namespace) -> list[Case]:
    """Of all sizes that were asked for."""
    loads = [
        (int(requests), int(context))
        for requests, _, context in (load.partition("x") for load in asked.cases.split(","))
    ]
    return [
        Case(
            variant="",
            sizes={
                "kv": kv,
                "heads": int(heads),
                "requests": requests,
                "context": context,
                "page": asked.page,
                "lengths": "even",
                "mean": asked.mean,
            },
            calls=0,
        )
        for kv in asked.kv.split(",")
        for requests, context in loads
        for heads in asked.heads.split(",")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", metavar="NAME=CHECKOUT or BACKEND")
    parser.add_argument("--cases", default=CASES, help="requests x context of each; default: %(default)s")
    parser.add_argument("--heads", default="16,64,128", help="default: %(default)s")
    parser.add_argument("--kv", default="bf16", help=f"bf16, {FP8} or both; default: %(default)s")
    parser.add_argument("--mean", type=float, default=0.0, help="of values, whose deviation is 1; default: %(default)s")
    parser.add_argument("--page", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each case and way at most; default: %(default)s")
    parser.add_argument("-o", "--out", type=Path, required=True, help="append a line of JSON for each case")
    asked = parser.parse_args(arguments)
    ways: dict[str, Make | None] = {}
    for way in asked.ways:
        name, _, checkout = way.partition("=")
        if checkout and not (Path(checkout) / ROOM).is_dir():
            parser.error(f"{checkout} is no checkout of this project: it has no {ROOM}")
        if not checkout and name not in BACKENDS:
            parser.error(f"{name} is no backend ({', '.join(BACKENDS)}); a version is NAME=CHECKOUT")
        ways[name] = loaded(Path(checkout)) if checkout else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work, settings = attention.Attention(device, seed=0, mean=asked.mean), BenchSettings(seconds=asked.seconds)
    ok = True
    with asked.out.open("a", encoding="utf-8") as file:
        for case in cases(asked):
            line = measured(case, ways, work, settings)
            sys.stdout.write(f"{said(line)}\n")
            sys.stdout.flush()
            file.write(json.dumps(line) + "\n")
            ok = ok and not line["wrong"]
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
