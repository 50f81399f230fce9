"""Run programs under vLLM's own check for synchronisation, which `VLLM_GPU_SYNC_CHECK=warn` or `error` turns on in a server.

The check is `vllm/utils/gpu_sync_debug.py` of a release, unpacked from its wheel and unchanged. vLLM itself is not
needed: the two modules that the file imports from it have stand-ins here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from dcpbench.syncs.python_frames import is_detector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODES = ("warn", "error")
SYNC_TEXTS = ("called a synchronizing CUDA operation", "GPU<->CPU sync detected - ")  # of torch, and of vLLM's errors
COPY_TEXT = "Implicit GPU<->CPU sync detected"  # of vLLM's check of non-blocking copies
PATCHED = ("to", "cuda", "copy_")  # methods of torch.Tensor that newer releases replace


@dataclasses.dataclass(frozen=True)
class Reports:
    """Count what the check reports about one call."""

    syncs: int = 0
    copies: int = 0  # non-blocking copies that may block; the check does not distinguish them from those that do


@contextlib.contextmanager
def load_check(file: Path, mode: str) -> Iterator[Callable[[Callable[[], object]], Reports]]:
    """Load the check in a mode; yield a function that runs a call under it and counts its reports.

    torch.Tensor's methods are restored at the end.
    """
    module = _load_module(file, mode)
    before = {name: vars(torch.Tensor).get(name) for name in PATCHED}
    try:
        module.enable_gpu_sync_check()
        yield lambda run: _run(module.with_gpu_sync_check(run))
    finally:
        for name, method in before.items():
            if method is not None:
                setattr(torch.Tensor, name, method)
            elif name in vars(torch.Tensor):
                delattr(torch.Tensor, name)


def _load_module(file: Path, mode: str) -> Any:
    platforms: Any = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cuda_alike=lambda: True)
    vllm: Any = types.ModuleType("vllm")
    vllm.envs = types.ModuleType("vllm.envs")
    vllm.envs.VLLM_GPU_SYNC_CHECK = mode
    stand_ins = {"vllm": vllm, "vllm.envs": vllm.envs, "vllm.platforms": platforms}
    spec = importlib.util.spec_from_file_location("gpu_sync_debug", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


def _run(checked: Callable[[], object]) -> Reports:
    """Run the call with Python's default filter of warnings, which shows a line's warning once, as in a server."""
    texts: list[str] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(threading, "excepthook", lambda error: texts.append(str(error.exc_value))),
    ):
        warnings.simplefilter("default")
        try:
            checked()
        except RuntimeError as error:
            if not _is_report(str(error)):
                raise
            texts.append(str(error))
    # In a dry run the check of copies sees each copy a second time, from within.
    texts += [str(warning.message) for warning in caught if not is_detector(warning.filename)]
    copies = sum(COPY_TEXT in text for text in texts)
    return Reports(syncs=sum(map(_is_report, texts)) - copies, copies=copies)


def _is_report(text: str) -> bool:
    return any(part in text for part in (*SYNC_TEXTS, COPY_TEXT))
