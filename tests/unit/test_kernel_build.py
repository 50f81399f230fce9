"""Background compilation of FlashInfer's kernels at the start of a job."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.launch.jobs import Job
from dcpbench.launch.kernel_build import LOG, KernelBuild, PrefillModule, find_first_module
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
FLASHINFER = {
    "__init__.py": "",
    "jit/__init__.py": "",
    "utils.py": "def determine_attention_backend(*_, **__):\n    return 'fa3'\n",
    "jit/attention.py": """
import os, pathlib, subprocess

class Module:
    is_compiled = False

    def build(self, verbose):
        child = subprocess.Popen(["sleep", "3600"])
        found = pathlib.Path(os.environ["KERNEL_BUILD_TEST"])
        found.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
        found.with_suffix(".new").rename(found)
        child.wait()

def gen_batch_prefill_module(*options):
    print(options[5:7])
    return Module()
""",
}
"""A stand-in for FlashInfer, a compiler of which runs until it is ended."""


def serve_point(model: str = "deepseek-v3", prefill: str = "flashinfer", dtype: str = "bf16") -> Point:
    """Return a point that serves."""
    load = Load(requests=2, input_tokens="90", output_tokens="10", chunk=64, prefill=prefill)
    return Point(
        model=model,
        workload="serve",
        tp=2,
        concurrency=2,
        context=100,
        backend="triton",
        dtype=dtype,
        load=load,
    )


def job(*points: Point, folder: str = "/nowhere", device: str = "cuda", kind: str = "sweep") -> Job:
    """Return a job of these points."""
    return Job(kind=kind, tag="tp2-0", folder=folder, device=device, points=[*points], settings=Settings())


@pytest.mark.parametrize(
    ("model", "dtype", "module"),
    [("deepseek-v3", "bf16", (192, 128, "bf16")), ("qwen3-32b", "fp16", (128, 128, "fp16"))],
)
def test_module_has_the_columns_of_the_model(model: str, dtype: str, module: tuple[int, int, str]) -> None:
    assert find_first_module(job(serve_point(model, dtype=dtype))) == PrefillModule(*module)


def test_jobs_without_flashinfer_at_their_first_point_compile_nothing() -> None:
    """A later point would be compiled for while earlier ones are measured."""
    served, torch_only = serve_point(), serve_point(prefill="sdpa")
    decode = msgspec.structs.replace(served, workload="decode", load=None)
    others = [job(torch_only, served), job(decode), job(served, device="cpu"), job(served, kind="verify")]
    assert [find_first_module(other) for other in others] == [None] * 4


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[KernelBuild, list[int]]]:
    """Start a build; return it and, as soon as its compiler runs, the ids of both processes."""
    for name, text in FLASHINFER.items():
        path = tmp_path / "packages" / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = tmp_path / "found"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), str(ROOT)]))
    monkeypatch.setenv("KERNEL_BUILD_TEST", str(found))

    def start() -> tuple[KernelBuild, list[int]]:
        one = job(serve_point(), folder=str(tmp_path))
        one.get_log_folder().mkdir(parents=True)
        build = KernelBuild(one)
        end = time.monotonic() + PATIENCE_S
        while not found.exists():
            assert time.monotonic() < end, (one.get_log_folder() / LOG).read_text()
            time.sleep(0.05)
        return build, [int(word) for word in found.read_text().split()]

    return start


def test_end_of_a_job_ends_the_compilers(compiling: Callable[[], tuple[KernelBuild, list[int]]]) -> None:
    build, pids = compiling()
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    build.end()
    end = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)
    build.end()  # once more has no effect


def is_running(pid: int) -> bool:
    """Return True if a process exists that has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_job_without_flashinfer_has_no_process_to_end(tmp_path: Path) -> None:
    build = KernelBuild(job(serve_point(prefill="sdpa"), folder=str(tmp_path)))
    build.end()
    assert not list(tmp_path.iterdir())
