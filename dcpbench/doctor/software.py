"""Compare versions of driver, kernel and packages with those that have known problems. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcpbench.doctor.health_report import BAD, NOTE, OK, UNREAD, Report

if TYPE_CHECKING:
    from collections.abc import Callable

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
MIN_DRIVER = {13: (580,), 12: (525, 60, 13)}
"""Minimum driver version by major version of CUDA;
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
"""


class KnownProblem(NamedTuple):
    """Describe versions of a component with a known problem."""

    thing: str
    since: tuple[int, ...]
    before: tuple[int, ...]  # the first that does not hurt any more
    level: str
    what: str
    remedy: str
    source: str


KNOWN_PROBLEMS = (  # known problems as reported in `source`
    KnownProblem(
        "Linux", (), (5, 5), BAD, "ranks have hung on kernels before 5.5", "start a newer kernel",
        "https://github.com/huggingface/accelerate/issues/2573",
    ),
    KnownProblem(
        "NCCL", (2, 21, 5), (2, 22), BAD, "ranks have hung in it", "pip install 'nvidia-nccl-cu12>=2.22.3'",
        "https://github.com/sgl-project/sglang/issues/7602, https://github.com/NVIDIA/nccl/issues/1251",
    ),
    KnownProblem(
        "NCCL", (2, 22), (2, 27, 3), NOTE, "a race is possible where captured and eager collectives mix",
        "pip install a torch with a newer one", "NCCL's release notes of 2.27.3",
    ),
    KnownProblem(
        "NCCL", (2, 26, 2), (2, 27, 5), NOTE, "capturing large CUDA graphs takes longer than before and after",
        "pip install a torch with a newer one", "NCCL's release notes of 2.27.5",
    ),
    KnownProblem("torch", (), (2, 9), BAD, "dcpbench needs 2.9", "pip install 'torch>=2.9'", "pyproject.toml"),
)  # fmt: skip


def parse_version(version: str) -> tuple[int, ...]:
    """Return `2.27.5+cuda12.9` as (2, 27, 5). Raise ValueError without a leading number."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if not found:
        raise ValueError(f"{version!r} is no version")
    return tuple(map(int, found[1].split(".")))


def find_installed_version(*names: str) -> str:
    """Return the version of the first of these packages that is installed. Raise PackageNotFoundError if none is."""
    for name in names[:-1]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return importlib.metadata.version(names[-1])


def read_torch_cuda() -> str | None:
    """Return the version of CUDA that the installed torch was built for; None without CUDA. Raise OSError or ValueError
    on failure.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("no torch is installed")
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*= *(?:'([\d.]+)'|None)", text, re.MULTILINE)
    if not found:
        raise ValueError("torch's version.py does not say it")
    return found[1]


def check_versions(report: Report, nvml: Any) -> None:  # noqa: ANN401 -- a module with pynvml's functions
    """Run all checks."""
    versions: dict[str, Callable[[], str]] = {
        "Linux": platform.release,
        "torch": lambda: find_installed_version("torch"),
        "NCCL": lambda: find_installed_version(*NCCL_PACKAGES),
    }
    built_for = report.read("CUDA of torch", read_torch_cuda)
    if built_for is None and not any(f.check == "CUDA of torch" for f in report.findings):
        report.add(
            "CUDA of torch",
            NOTE,
            "this torch is built without CUDA: it uses no GPU.",
            "https://pytorch.org says what to type for your CUDA",
        )
        del versions["NCCL"]
    for name, ask in versions.items():
        version = report.read(name, ask)
        if version is not None:
            _check_version(report, name, version)
    _check_driver(report, nvml, built_for)


def _check_version(report: Report, name: str, version: str) -> None:
    now = report.read(name, lambda: parse_version(version))
    if now is None:
        return
    hurts = [known for known in KNOWN_PROBLEMS if known.thing == name and known.since <= now < known.before]
    for known in hurts:
        report.add(name, known.level, f"{version}: {known.what} ({known.source}).", known.remedy)
    if not hurts:
        report.add(name, OK, f"{version}; nothing is known against it.")


def _check_driver(report: Report, nvml: Any, built_for: str | None) -> None:  # noqa: ANN401 -- as examine's
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        now = parse_version(driver)
    except Exception:  # noqa: BLE001 - a driver that does not answer fails in many ways
        report.add("driver", UNREAD, "its version is not known: it does not answer.")
        return
    min_version = MIN_DRIVER.get(parse_version(built_for)[0]) if built_for else None
    if min_version is None:
        unknown = f"what CUDA {built_for} needs is not known here."
        if built_for is None:
            unknown = "nothing says for which CUDA torch is built, so nothing about both together."
        report.add("driver", UNREAD, f"{driver}; {unknown}")
        return
    what = f"{driver} is too old for CUDA {built_for} of torch, which needs {'.'.join(map(str, min_version))}."
    remedy = "update the driver, or install a torch for an older CUDA: https://pytorch.org."
    report.add_verdict(
        "driver", what if now < min_version else "", remedy, f"{driver}, new enough for CUDA {built_for}."
    )
