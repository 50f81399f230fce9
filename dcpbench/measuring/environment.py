"""Collect the hardware and software facts of a record."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
from pathlib import Path

import torch

import dcpbench
from dcpbench.measuring.hardware import get_version
from dcpbench.records.record import Environment

ON_LOOPBACK = ("NCCL_SOCKET_IFNAME", "lo")  # NCCL's interface (ranks.make_environment), without effect on results


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
        triton=get_version("triton"),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        flashinfer=get_version("flashinfer"),
        flash_mla=get_version("flash_mla"),
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
