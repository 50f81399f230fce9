"""Load kernels of other checkouts of this project into one process, to check and time them in turns, for the *_versions
tools.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from dcpbench.bench.operators.calls import measure_gpu_times
from dcpbench.errors import UsageError
from dcpbench.measuring.timing import capture_graph

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import ModuleType

    import torch

    from dcpbench.bench.bench_record import BenchSettings, Case
    from dcpbench.bench.operators.calls import Calls


class Version:
    """Hold modules of a checkout, which replace the present ones while one of them is loaded or run."""

    def __init__(self, checkout: Path, package: ModuleType, names: Sequence[str]) -> None:
        """Load `names`, modules of the package, each after those that it imports; modules that the checkout lacks are
        left out.
        """
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
        """Replace imports of these modules by this version's inside the block."""
        names = {f"{self.package.__name__}.{name}": module for name, module in self.modules.items()}
        parents = [mock.patch.object(self.package, name, module, create=True) for name, module in self.modules.items()]
        before = {name: sys.modules.get(name) for name in names}
        with contextlib.ExitStack() as stack:
            for parent in parents:
                stack.enter_context(parent)
            sys.modules.update(names)
            try:
                yield
            finally:  # other modules that were imported meanwhile stay, or their classes would exist twice
                for name, module in before.items():
                    if module is None:
                        del sys.modules[name]
                    else:
                        sys.modules[name] = module


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
    sizes: dict[str, Any], builds: dict[str, Callable[[], Calls]], device: torch.device, settings: BenchSettings
) -> dict[str, Any]:
    """Return a line of a file: µs of a call of each, from a CUDA graph, and its error, or the problem; without a GPU no
    times.
    """
    wrong: dict[str, str] = {}
    ready: dict[str, tuple[Calls, Callable[[], None]]] = {}
    for name, build in builds.items():
        try:
            calls = build()
            problem = calls.check(calls.run)
            replay = capture_graph(calls.run).replay if device.type == "cuda" else calls.run
            problem = problem or calls.check(replay)
        except Exception as e:  # noqa: BLE001 -- a version that is being written may raise anything
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
    """Return the last line of an exception's message, where compilers state the error, or else the place that raised
    it.
    """
    lines = str(e).strip().split("\n")
    if not lines[-1]:
        at = traceback.extract_tb(e.__traceback__)[-1]
        lines = [f"{Path(at.filename).name}:{at.lineno}: {at.line}"]
    return f"{type(e).__name__}: {lines[-1]}"


def write_lines(lines: Iterable[dict[str, Any]], out: Path, format_line: Callable[[dict[str, Any]], str]) -> int:
    """Print each line at once, and append it to the file; return 1 if there was a problem."""
    ok = True
    with out.open("a", encoding="utf-8") as file:
        for line in lines:
            sys.stdout.write(f"{format_line(line)}\n")
            sys.stdout.flush()
            file.write(json.dumps(line) + "\n")
            ok = ok and not line["wrong"]
    return 0 if ok else 1


def format_times(line: dict[str, Any]) -> str:
    """Format the result in a line: µs, and the speed relative to the first that was timed; without
    a GPU only errors.
    """
    found = line["versions"]
    us = {name: one["median_us"] for name, one in found.items() if "median_us" in one}
    first = next(iter(us.values()), math.nan)
    texts = [f"{name} {t:.1f} µs ({first / t:.3f})" for name, t in us.items()]
    texts = texts or [f"{name} is right, error {one['error']:.2g}" for name, one in found.items()]
    return ", ".join(texts + [f"{name} WRONG: {why}" for name, why in line["wrong"].items()])
