"""Collect the hardware and software facts of a record, which `dcpbench doctor` shows as well."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import dcpbench
from dcpbench.errors import format_install_hint
from dcpbench.points.device_probe import Probe
from dcpbench.records.record import Environment

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
ON_LOOPBACK = ("NCCL_SOCKET_IFNAME", "lo")  # NCCL's interface (ranks.make_environment), without effect on results
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


def get_gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of a GPU in NVML's form, `GPU-1a2b…`; None for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def collect_environment(device: torch.device, command: str) -> Environment:
    """Return the environment of this process."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return Environment(
        device=properties.name if properties else "CPU",
        device_count=torch.cuda.device_count() if cuda else 0,
        device_memory_bytes=properties.total_memory if properties else None,
        l2_bytes=properties.L2_cache_size if properties else None,
        driver=_get_driver_version() if cuda else None,
        cuda=torch.version.cuda,
        torch=str(torch.__version__),
        triton=_get_version("triton"),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        flashinfer=_get_version("flashinfer"),
        flash_mla=_get_version("flash_mla"),
        python=platform.python_version(),
        dcpbench=dcpbench.__version__,
        settings={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "TORCH_NCCL_")) and (name, value) != ON_LOOPBACK
        },
        git_commit=_get_git_commit(),
        host_hash=_compute_host_hash(torch.cuda.device_count() if cuda else 0),
        command=command,
    )


def get_hardware() -> Probe:
    """Return the hardware of this machine, for packages that must not import torch."""
    packages = {name: _get_version(name) for name in PACKAGES}
    problems = [f"{name} is missing, needed for {WANTED_FOR[name]}" for name in WANTED_FOR if packages[name] is None]
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
        problems.insert(0, f"no GPU: {why}; runs are functional, on the CPU, and say nothing about performance")
        return Probe(device="cpu", count=0, name="CPU", packages=packages, problems=problems)
    properties = torch.cuda.get_device_properties(0)
    return Probe(
        device="cuda",
        count=torch.cuda.device_count(),
        name=properties.name,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        capability=f"{properties.major}.{properties.minor}",
        packages=packages,
        problems=problems,
    )


def _get_version(package: str) -> str | None:
    """Return the version of an installed package, or None. It is not imported, because some imports take seconds."""
    if importlib.util.find_spec(package) is None:
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(_list_distributions().get(package, [package])[0])
    return "unknown"


@functools.cache
def _list_distributions() -> Mapping[str, list[str]]:
    """Return a mapping of import names to distributions.

    It reads every installed package, which takes most of a second: once, and only for packages with other import names.
    """
    return importlib.metadata.packages_distributions()


def _compute_host_hash(gpus: int) -> str:
    """Return a hash of the host. Virtual machines often share a host name, so the system's own id and the GPUs are
    included.
    """
    machine_id = Path("/etc/machine-id")
    own = machine_id.read_text() if machine_id.is_file() else ""
    names = [socket.gethostname(), own, *(str(torch.cuda.get_device_properties(i).uuid) for i in range(gpus))]
    return hashlib.sha256("/".join(names).encode()).hexdigest()[:12]


def _get_driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 - without NVML the driver's version is not known
        return None


def _get_git_commit() -> str | None:
    """Return the commit of the running dcpbench, with `-dirty` if its files differ; None for an installed wheel.

    DCPBENCH_GIT_COMMIT overrides it, for files copied without their repository, for example into a container.
    """
    if "DCPBENCH_GIT_COMMIT" in os.environ:
        return os.environ["DCPBENCH_GIT_COMMIT"]
    folder = Path(dcpbench.__file__).parent
    if not (folder.parent / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607 - git of the PATH
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
