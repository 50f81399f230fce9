"""Hardware and versions of installed packages, from CUDA's driver and from metadata, and the cost of finding them."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dcpbench.measuring import hardware
from dcpbench.points.device_probe import Probe

ROOT = Path(__file__).parents[2]


def test_missing_package_is_reported_with_the_install_command_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test covers each package of each user extra; `dcpbench[…]` is in no package index."""
    monkeypatch.setattr(hardware, "get_version", lambda _: None)
    problems = hardware.get_hardware().problems
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "pip install '.[flashinfer]'" in (ROOT / "README.md").read_text(encoding="utf-8")
    for extra in ("flashinfer", "flashmla", "dashboard"):
        for package in project["optional-dependencies"][extra]:
            distribution = re.split(r"[<=>]", package)[0]
            name = {"sgl-flash-mla": "flash_mla", "flashinfer-python": "flashinfer"}.get(distribution, distribution)
            (problem_text,) = (problem for problem in problems if problem.startswith(f"{name} is missing"))
            assert f"pip install '.[{extra}]'" in problem_text


def test_no_text_names_an_extra_of_a_package_index() -> None:
    texts = [*(ROOT / "dcpbench").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert [path.name for path in texts if "'dcpbench[" in path.read_text(encoding="utf-8")] == []


def test_missing_package_has_version_none() -> None:
    assert hardware.get_version("no_such_package") is None


def test_package_whose_distribution_has_another_name_is_found_without_reading_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading every installed package takes most of a second; every rank looks up ten packages."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: pytest.fail("read"))
    assert hardware.get_version("pynvml") == importlib.metadata.version("nvidia-ml-py")


def test_packages_with_unknown_names_are_looked_up_in_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    read = importlib.metadata.packages_distributions
    calls = []
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: calls.append(1) or read())
    monkeypatch.setattr(hardware, "DISTRIBUTIONS", {})
    hardware._list_distributions.cache_clear()
    assert [hardware.get_version("pynvml") for _ in range(2)] == [importlib.metadata.version("nvidia-ml-py")] * 2
    assert calls == [1]


class Driver:
    """Replace libcuda.so.1: its functions write through pointers and return an error code."""

    def __init__(self, *, code: int = 0, version: int = 13000, count: int = 2, failing: str = "") -> None:
        self.code, self.version, self.count, self.failing = code, version, count, failing

    def cuInit(self, _flags: int) -> int:
        return self.code

    def _write(self, name: str, pointer: object, value: int) -> int:
        pointer._obj.value = value  # type: ignore[attr-defined]
        return 999 if name == self.failing else 0

    def cuDriverGetVersion(self, pointer: object) -> int:
        return self._write("cuDriverGetVersion", pointer, self.version)

    def cuDeviceGetCount(self, pointer: object) -> int:
        return self._write("cuDeviceGetCount", pointer, self.count)

    def cuDeviceGet(self, pointer: object, ordinal: int) -> int:
        found = self._write("cuDeviceGet", pointer, 7 + ordinal)
        return found if ordinal < self.count else 101

    def cuDeviceGetName(self, name: object, _size: int, device: int) -> int:
        assert device == 7
        name.value = b"NVIDIA H200"  # type: ignore[attr-defined]
        return 0

    def cuDeviceTotalMem_v2(self, pointer: object, _device: int) -> int:
        return self._write("cuDeviceTotalMem_v2", pointer, 150_000_000_000)

    def cuDeviceGetAttribute(self, pointer: object, attribute: int, _device: int) -> int:
        return self._write("cuDeviceGetAttribute", pointer, {38: 60 << 20, 75: 9, 76: 0}[attribute])


TORCH = Probe(device="cuda", count=1, name="by torch")


def get_hardware(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, **version: object) -> Probe:
    """Return the hardware with this driver, None without one, and this torch.version."""

    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError
        return driver

    monkeypatch.setattr(hardware.ctypes, "CDLL", load)
    monkeypatch.setattr(hardware, "_read_torch_version", lambda: version or None)
    monkeypatch.setattr(hardware, "get_torch_hardware", lambda: TORCH)
    return hardware.get_hardware()


def test_driver_describes_the_gpus_for_a_torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    found = get_hardware(monkeypatch, Driver(), cuda="13.0")
    assert (found.device, found.count, found.name, found.capability) == ("cuda", 2, "NVIDIA H200", "9.0")
    assert (found.memory_bytes, found.l2_bytes) == (150_000_000_000, 60 << 20)
    assert found.packages["torch"] == importlib.metadata.version("torch")


@pytest.mark.parametrize(
    ("driver", "version"),
    [
        (None, {"cuda": "13.0"}),
        (Driver(code=100), {"cuda": "13.0"}),
        (Driver(version=12090), {"cuda": "13.0"}),
        (Driver(count=0), {"cuda": "13.0"}),
        (Driver(failing="cuDeviceTotalMem_v2"), {"cuda": "13.0"}),
        (Driver(failing="cuDeviceGetAttribute"), {"cuda": "13.0"}),
        (Driver(), {"cuda": None, "hip": "6.4"}),
        (Driver(), {}),
    ],
    ids=["no driver", "no CUDA", "older driver", "no GPU", "no memory", "no attribute", "ROCm", "no version file"],
)
def test_torch_describes_the_machine_in_case_of_doubt(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, version: dict[str, object]
) -> None:
    assert get_hardware(monkeypatch, driver, **version) == TORCH


def test_torch_without_cuda_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = get_hardware(monkeypatch, None, cuda=None)
    assert (found.device, found.count, found.name) == ("cpu", 0, "CPU")
    assert found.problems[0].startswith("no GPU: this torch is built without CUDA; ")


def test_version_of_torch_is_read_without_importing_it() -> None:
    code = "import sys; from dcpbench.measuring import hardware as h; print(h._read_torch_version()['__version__'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [importlib.metadata.version("torch"), "False"]


def test_quick_description_equals_the_one_of_torch() -> None:
    """Names, numbers and problems, on the machine of this test, with or without a GPU."""
    assert hardware.get_hardware() == hardware.get_torch_hardware()
