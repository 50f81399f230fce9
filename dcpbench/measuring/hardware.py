"""Describe the hardware and the packages of a machine: `python -m dcpbench.measuring.hardware` writes a Probe as JSON.

Importing torch and starting CUDA takes seconds, so the properties of GPUs are read from CUDA's driver, where torch reads them, too.
torch is imported only where its result may differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import format_install_hint
from dcpbench.points.device_probe import Probe

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGES = (
    "torch",
    "triton",
    "flashinfer",
    "flash_mla",
    "nvtx",
    "pynvml",
    "safetensors",
    "transformers",
    "pandas",
    "matplotlib",
    "ruptures",
    "starlette",
    "uvicorn",
)
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "flashinfer": "flashinfer-python", "flash_mla": "sgl-flash-mla"}
WANTED_FOR = {
    "triton": "--backend triton and every run on a GPU",
    "flashinfer": f"--backend flashinfer, the default on GPUs other than Hopper, and prompts; {format_install_hint('flashinfer')}",
    "flash_mla": f"--backend flashmla, on Hopper GPUs; {format_install_hint('flashmla')}",
    "pynvml": "clocks, power and throttling in records; pip install nvidia-ml-py",
    "transformers": f"comparing logits with `dcpbench verify --checkpoint`; {format_install_hint('test')}",
    "ruptures": f"the change points of `dcpbench dashboard`; {format_install_hint('dashboard')}",
    "starlette": f"`dcpbench dashboard serve`; {format_install_hint('dashboard')}",
    "uvicorn": f"`dcpbench dashboard serve`; {format_install_hint('dashboard')}",
}
WITHOUT_CUDA = "this torch is built without CUDA"
L2_BYTES, MAJOR, MINOR = 38, 75, 76  # values of CUdevice_attribute
MAX_NAME = 256
VERSION_UNIT = 1000  # CUDA's version numbers: 13.0 is 13000


def get_hardware() -> Probe:
    """Return the hardware and the packages of this machine, without torch if CUDA's driver answers."""
    torch = _read_torch_version()
    if torch is not None and torch["cuda"] is None and not torch.get("hip"):
        return _make_probe(Probe(device="cpu", count=0, name="CPU"), WITHOUT_CUDA)
    found = None
    if torch is not None and torch["cuda"] is not None:
        found = _ask_driver(str(torch["cuda"]))
    return get_torch_hardware() if found is None else _make_probe(found)


def get_torch_hardware() -> Probe:
    """Return the hardware and the packages of this machine as torch describes it."""
    import torch

    if not torch.cuda.is_available():
        why = WITHOUT_CUDA if torch.version.cuda is None else "torch finds no usable GPU"
        return _make_probe(Probe(device="cpu", count=0, name="CPU"), why)
    properties = torch.cuda.get_device_properties(0)
    return _make_probe(
        Probe(
            device="cuda",
            count=torch.cuda.device_count(),
            name=properties.name,
            memory_bytes=properties.total_memory,
            l2_bytes=properties.L2_cache_size,
            capability=f"{properties.major}.{properties.minor}",
        )
    )


def get_version(package: str) -> str | None:
    """Return the version of an installed package, or None. It is not imported, because some imports take seconds."""
    if importlib.util.find_spec(package) is None:
        return None
    for name in (package, DISTRIBUTIONS.get(package, package)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(_list_distributions().get(package, [package])[0])
    return "unknown"


@functools.cache
def _list_distributions() -> Mapping[str, list[str]]:
    """Return a mapping of import names to distributions.

    It reads every installed package, which takes most of a second: once, and only for packages with unknown names.
    """
    return importlib.metadata.packages_distributions()


def _make_probe(found: Probe, no_gpu: str = "") -> Probe:
    """Return the probe with the packages of this machine; `no_gpu`: why there is no GPU."""
    packages = {name: get_version(name) for name in PACKAGES}
    problems = [f"{name} is missing, needed for {WANTED_FOR[name]}" for name in WANTED_FOR if packages[name] is None]
    if no_gpu:
        problems.insert(0, f"no GPU: {no_gpu}; runs are functional, on the CPU, and say nothing about performance")
    return msgspec.structs.replace(found, packages=packages, problems=problems)


def _read_torch_version() -> dict[str, Any] | None:
    """Return the contents of torch.version, from its file; None if that is not where it should be."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except Exception:  # noqa: BLE001 -- torch itself reports what is wrong with it
        return None
    return found if "cuda" in found else None


def _ask_driver(built_for: str) -> Probe | None:
    """Return the GPUs that CUDA's driver sees; None if torch, built for this version of CUDA, may see others."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or _read_number(driver.cuDriverGetVersion) // VERSION_UNIT < int(
            built_for.split(".", maxsplit=1)[0]
        ):
            return None
        count, first = _read_number(driver.cuDeviceGetCount), _read_number(driver.cuDeviceGet, 0)
        name, memory = ctypes.create_string_buffer(MAX_NAME), ctypes.c_size_t()
        if driver.cuDeviceGetName(name, MAX_NAME, first) or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), first):
            return None
        l2_bytes, major, minor = (_read_number(driver.cuDeviceGetAttribute, a, first) for a in (L2_BYTES, MAJOR, MINOR))
    except (OSError, AttributeError, ValueError):
        return None
    return Probe(
        device="cuda",
        count=count,
        name=name.value.decode(),
        memory_bytes=memory.value,
        l2_bytes=l2_bytes,
        capability=f"{major}.{minor}",
    )


def _read_number(function: Any, *arguments: int) -> int:  # noqa: ANN401 -- a function of ctypes
    """Return the number that a function of the driver writes through its first argument. Raise OSError if it fails."""
    found = ctypes.c_int()
    if code := function(ctypes.byref(found), *arguments):
        raise OSError(code, "CUDA's driver failed")
    return found.value


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(get_hardware()).decode() + "\n")
