"""Set up all tests: a fixed environment (tests/environment.py), no deadlines, and GPU tests only on machines with a GPU.

PyTorch uses one thread, because tensors are tiny, and threads of several processes would wait for each other. Python
writes bytecode, because otherwise hundreds of processes would compile the same files. Without a GPU, Triton kernels run
in Triton's interpreter. Both the environment and the choice of the interpreter must precede all other imports.
"""

# ruff: noqa: E402 -- the environment comes first

from tests import environment

environment.prepare_process()

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import interpreter
from tools import results

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        interpreter.prepare_once()

sys.dont_write_bytecode = False

torch.set_num_threads(1)

# A shell ignores these signals in programs that it starts in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.fsync = lambda _: None  # no test depends on it, and a busy disk takes a second

settings.register_profile("dcpbench", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dcpbench")


def pytest_configure() -> None:
    """Unpack the raw records of results, which many tests read."""
    results.unpack_all()


@pytest.fixture
def device() -> torch.device:
    """Return the GPU, or the CPU on a machine without a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.hookimpl(tryfirst=True)  # run before pytest deselects tests by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA, and mark the cases that a sample leaves out as `long`."""
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sample"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.long)
            seen[test] += 1
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Exclude all collected objects from garbage collections."""
    gc.collect()
    gc.freeze()
