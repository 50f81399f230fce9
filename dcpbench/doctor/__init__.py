"""Examine a machine before a long sweep: its GPUs, its system and its versions, without changes. No torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from dcpbench.doctor import gpu_checks, host, software
from dcpbench.doctor.health_report import BAD, NOTE, OK, UNREAD, Finding, Report

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["BAD", "NOTE", "OK", "UNREAD", "Finding", "Report", "check_at_start", "check_machine"]

DRIVER_TIMEOUT_S = 1.0  # time in s that the start of a sweep waits for a driver that may not answer


def check_machine(
    folder: Path,
    *,
    nnodes: int = 1,
    endpoint: tuple[str, int] | None = None,
    nvml: Any = None,  # noqa: ANN401 -- a module with pynvml's functions
    system: host.Host | None = None,
    env: Mapping[str, str] | None = None,
) -> Report:
    """Return the complete report on this machine, for a run on `nnodes` nodes that writes into `folder`."""
    report, driver, env = Report(), nvml or _import_driver(), os.environ if env is None else env
    gpu_checks.check_gpus(report, driver, env)
    host.check_host(report, system or host.Host(), folder, nnodes=nnodes, endpoint=endpoint)
    host.check_environment(report, env)
    software.check_versions(report, driver)
    return report


def check_at_start(
    folder: Path,
    *,
    cuda: bool,
    nvml: Any = None,  # noqa: ANN401 -- as above
    system: host.Host | None = None,
    env: Mapping[str, str] | None = None,
    patience_s: float = DRIVER_TIMEOUT_S,
) -> list[Finding]:
    """Return the findings that would invalidate a run about to start, from the quick checks.

    Among unknown facts it only contains a driver that does not answer within `patience_s`; `dcpbench doctor` reports
    the others.
    """
    report, env = Report(), os.environ if env is None else env

    def run_checks() -> None:
        host.check_essentials(report, system or host.Host(), folder)
        host.check_environment(report, env)
        if cuda:
            gpu_checks.check_gpus(report, nvml or _import_driver(), env, brief=True)

    asking = threading.Thread(
        target=run_checks, daemon=True
    )  # a driver that has lost a GPU may keep its caller for good
    asking.start()
    asking.join(patience_s)
    found = [finding for finding in list(report.findings) if finding.level == BAD]
    if asking.is_alive():
        what = f"the machine did not answer all questions within {patience_s:g} s."
        found.append(Finding(check="driver", level=UNREAD, what=what, remedy="dcpbench doctor waits for them."))
    return found


def _import_driver() -> Any:  # noqa: ANN401 -- as above
    try:
        import pynvml
    except ImportError as e:
        return _MissingNvml(f"{e}: pip install nvidia-ml-py")
    return pynvml


class _MissingNvml:
    """Replace pynvml if it is not installed."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- as above
        raise ImportError(self._why)
