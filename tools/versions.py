"""Check and time several variants of a kernel in one process, for the *_versions and *_tilings tools.

Kernels of other checkouts of this project are loaded next to the present ones. All variants are timed alternately, so that they run at the same
GPU clocks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import msgspec

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators.calls import measure_gpu_times
from dcpbench.errors import UsageError
from dcpbench.measuring.timing import capture_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

    import torch

    from dcpbench.bench.bench_record import BenchSettings
    from dcpbench.bench.operators.calls import Calls, Workload

T = TypeVar("T")


class Version:
    """Hold modules of a checkout; they replace the present modules while one of them is loaded or run."""

    def __init__(self, checkout: Path, package: ModuleType, names: Sequence[str]) -> None:
        """Load the modules `names` of a package, each after the modules that it imports. Skip modules that the checkout lacks."""
        self.package = package
        self.modules: dict[str, ModuleType] = {}
        folder = checkout.joinpath(*package.__name__.split("."))
        for name in names:
            path = folder / f"{name}.py"
            if path.is_file():
                spec = importlib.util.spec_from_file_location(f"{package.__name__}.{name}", path)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                with self.replace_modules():
                    spec.loader.exec_module(module)
                self.modules[name] = module

    @contextlib.contextmanager
    def replace_modules(self) -> Iterator[None]:
        """Make imports of these modules return the modules of this version inside the block."""
        names = {f"{self.package.__name__}.{name}": module for name, module in self.modules.items()}
        parents = [mock.patch.object(self.package, name, module, create=True) for name, module in self.modules.items()]
        before = {name: sys.modules.get(name) for name in names}
        with contextlib.ExitStack() as stack:
            for parent in parents:
                stack.enter_context(parent)
            sys.modules.update(names)
            try:
                yield
            finally:  # other modules that were imported in the block stay, because a second import would create their classes again
                for name, module in before.items():
                    if module is None:
                        del sys.modules[name]
                    else:
                        sys.modules[name] = module


def make_parser(doc: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all tools share; `seconds` is the default of --seconds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "maximum measuring time of one variant in one case, in s; default: %(default)s"
    parser.add_argument("--seconds", type=float, default=seconds, help=text)
    parser.add_argument("-o", "--out", type=Path, required=True, help="file that gets a line of JSON for each case")
    return parser


def make_builders(
    case: Case,
    variants: Mapping[str, T],
    workload: Workload,
    select: Callable[[str, T], AbstractContextManager[object]],
) -> dict[str, Callable[[], Calls]]:
    """Return a function for each variant that builds its calls; `select` makes the workload use a variant inside a block."""

    def build_calls(name: str, variant: T) -> Calls:
        with select(name, variant):
            return workload.build_calls(Case(variant=name, sizes=case.sizes, calls=case.calls))

    return {name: functools.partial(build_calls, name, variant) for name, variant in variants.items()}


def select_cases(parser: argparse.ArgumentParser, cases: Callable[[], list[Case]]) -> list[Case]:
    """Return the cases to measure; exit with the parser's error for invalid options."""
    try:
        found = cases()
    except UsageError as e:
        parser.error(str(e))
    except ValueError as e:
        parser.error(f"{e}: sizes are whole numbers; --help has the defaults")
    if not found:
        parser.error("no case has these sizes; --help has the defaults")
    return found


def measure_versions(
    sizes: dict[str, Any], builders: Mapping[str, Callable[[], Calls]], device: torch.device, settings: BenchSettings
) -> dict[str, Any]:
    """Return the line of a case: for each variant the µs of a call in a CUDA graph and its error, or why it is wrong.

    There are no times without a GPU.
    """
    wrong: dict[str, str] = {}
    ready: dict[str, tuple[Calls, Callable[[], None]]] = {}
    for name, build_calls in builders.items():
        try:
            calls = build_calls()
            problem = calls.check(calls.run)
            replay = capture_graph(calls.run).replay if device.type == "cuda" else calls.run
            problem = problem or calls.check(replay)
        except Exception as e:  # noqa: BLE001 -- an unfinished kernel may raise any exception
            problem = _format_error(e)
        if problem:
            wrong[name] = problem
        else:
            ready[name] = calls, replay
    passes = [(replay, len(calls.calls)) for calls, replay in ready.values()] if device.type == "cuda" else []
    times, gpu = measure_gpu_times(passes, device, settings) if passes else ([], None)
    found = {name: {"error": calls.error()} for name, (calls, _) in ready.items() if calls.error is not None}
    for name, time in zip(ready if times else (), times, strict=True):
        found[name] |= {"median_us": time.median_us, "low_us": time.low_us, "high_us": time.high_us}
    return {"sizes": sizes, "versions": found, "wrong": wrong, "gpu": msgspec.to_builtins(gpu)}


def _format_error(e: Exception) -> str:
    """Return the last line of the message, in which compilers state the error; without a message, the line that raised it."""
    lines = str(e).strip().split("\n")
    if not lines[-1]:
        at = traceback.extract_tb(e.__traceback__)[-1]
        lines = [f"{Path(at.filename).name}:{at.lineno}: {at.line}"]
    return f"{type(e).__name__}: {lines[-1]}"


def write_lines(lines: Iterable[dict[str, Any]], out: Path, format_line: Callable[[dict[str, Any]], str]) -> int:
    """Print each line as soon as it is measured, and append it to the file. Return 1 if a variant is wrong."""
    ok = True
    with out.open("a", encoding="utf-8") as file:
        for line in lines:
            sys.stdout.write(f"{format_line(line)}\n")
            sys.stdout.flush()
            file.write(json.dumps(line) + "\n")
            ok = ok and not line["wrong"]
    return 0 if ok else 1


def format_times(line: dict[str, Any]) -> str:
    """Format the time of each variant with its speed relative to the first timed one; without a GPU, format the errors."""
    found = line["versions"]
    us = {name: one["median_us"] for name, one in found.items() if "median_us" in one}
    first = next(iter(us.values()), math.nan)
    texts = [f"{name} {t:.1f} µs ({first / t:.3f})" for name, t in us.items()]
    texts = texts or [f"{name} is right, error {one['error']:.2g}" for name, one in found.items()]
    return ", ".join(texts + [f"{name} WRONG: {why}" for name, why in line["wrong"].items()])
