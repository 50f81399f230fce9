"""Tests of `dcpbench doctor` with fake drivers and systems: each fault is reported, and a failed query is never
reported as good.
"""

from __future__ import annotations

import errno
import json
import resource
import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from dcpbench import cli
from dcpbench.commands import doctor as command
from dcpbench.doctor import BAD, NOTE, OK, UNREAD, check_at_start, check_machine, gpu_checks, host, software
from dcpbench.points.device_probe import Probe

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.doctor.health_report import Report

GIB = 1 << 30
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
HEALTHY = {
    "nvmlInit": None,
    "nvmlDeviceGetCount": 2,
    "nvmlSystemGetDriverVersion": "580.65.06",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=400 << 20, total=141 * GIB),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetComputeMode": pynvml.NVML_COMPUTEMODE_DEFAULT,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetApplicationsClock": 1980,
    "nvmlDeviceGetTemperature": 35,
    "nvmlDeviceGetTemperatureThreshold": 87,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetCpuAffinity": [2**64 - 1],
    "nvmlDeviceGetGpuFabricInfo": UNSUPPORTED,
    "nvmlDeviceGetP2PStatus": pynvml.NVML_P2P_STATUS_OK,
}


class Driver:
    """A fake pynvml that returns these answers; GPU n has the handle n."""

    def __init__(self, **answers: Any) -> None:
        self.answers = HEALTHY | answers

    def __dir__(self) -> list[str]:
        return dir(pynvml)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name == "nvmlMemory_v2":
            return getattr(pynvml, name)
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: index
        answer = self.answers[name]

        def answered(*args: Any) -> Any:
            found = answer(*args) if callable(answer) else answer
            if isinstance(found, Exception):
                raise found
            return found

        return answered


class System(host.Host):
    """A fake host in good order, except for the given answers."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "get_limit": resource.RLIM_INFINITY,
            "get_free_bytes": 500 * GIB,
            "count_cores": 64,
            "get_load": 0.5,
            "read_clock": (True, 900),
            "bind": None,
            "check_lock": None,
        } | answers
        self.files = {
            "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
            "/proc/sys/kernel/numa_balancing": "0",
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
        } | answers.get("files", {})

    def _answer(self, name: str, *args: Any) -> Any:
        found = self.answers[name]
        found = found(*args) if callable(found) else found
        if isinstance(found, Exception):
            raise found
        return found

    def read_text(self, path: str) -> str:
        if isinstance(self.files[path], Exception):
            raise self.files[path]
        return self.files[path]

    get_limit = lambda self, which: self._answer("get_limit", which)  # noqa: E731
    get_free_bytes = lambda self, folder: self._answer("get_free_bytes", folder)  # noqa: E731
    count_cores = lambda self: self._answer("count_cores")  # noqa: E731
    get_load = lambda self: self._answer("get_load")  # noqa: E731
    read_clock = lambda self: self._answer("read_clock")  # noqa: E731
    bind = lambda self, *place: self._answer("bind", *place)  # noqa: E731
    check_lock = lambda self, folder: self._answer("check_lock", folder)  # noqa: E731


@pytest.fixture(autouse=True)
def good_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report versions without known problems."""
    monkeypatch.setattr(software, "read_torch_cuda", lambda: "13.0")
    monkeypatch.setattr(
        software, "find_installed_version", lambda *names: "2.13.0" if names == ("torch",) else "2.28.9"
    )
    monkeypatch.setattr(software.platform, "release", lambda: "6.8.0-90-generic")


def list_findings(level: str, report: Report) -> list[str]:
    """Return check, place and sentence of all findings of a level."""
    return [f"{f.check} {f.where}: {f.what}" for f in report.findings if f.level == level]


def run_checks(
    tmp_path: Path, *, env: dict[str, str] | None = None, system: System | None = None, nnodes: int = 1, **answers: Any
) -> Report:
    return check_machine(tmp_path, nnodes=nnodes, nvml=Driver(**answers), system=system or System(), env=env or {})


def test_healthy_machine_has_only_ok_findings(tmp_path: Path) -> None:
    report = run_checks(tmp_path)
    assert {f.level for f in report.findings} == {OK}
    assert report.exit_code == 0
    assert {"clocks", "power", "MIG", "ECC", "peer access", "NUMA", "disk", "ports", "clock", "NCCL", "driver"} <= {
        f.check for f in report.findings
    }


def on_gpu(index: int, wrong: Any, right: Any) -> Any:
    """Return an answer function that is `wrong` for one GPU and `right` for all others."""
    return lambda handle, *_: wrong if handle == index else right


GPU_FAULTS = {
    "power": (
        {"nvmlDeviceGetEnforcedPowerLimit": on_gpu(1, 500_000, 700_000)},
        "capped at 500 W",
        "nvidia-smi -i 1 -pl 700",
    ),
    "MIG": ({"nvmlDeviceGetMigMode": on_gpu(1, [1, 1], [0, 0])}, "instances", "nvidia-smi -i 1 -mig 0"),
    "ECC": ({"nvmlDeviceGetTotalEccErrors": on_gpu(1, 1, 0)}, "1 error of its", "replaced"),
    "memory rows": (
        {"nvmlDeviceGetRemappedRows": on_gpu(1, (0, 1, 1, 0), (0, 0, 0, 0))},
        "wait to be",
        "reset the GPU",
    ),
    "throttling": ({"nvmlDeviceGetCurrentClocksThrottleReasons": on_gpu(1, 0x40, 1)}, "hw_thermal", "cooling"),
    "compute mode": ({"nvmlDeviceGetComputeMode": on_gpu(1, 2, 0)}, "no process", "-c DEFAULT"),
    "clocks": ({"nvmlDeviceGetApplicationsClock": on_gpu(1, 1200, 1980)}, "1,200 MHz", "-rac"),
    "temperature": ({"nvmlDeviceGetTemperature": on_gpu(1, 80, 35)}, "80 °C", "wait"),
    "utilisation": (
        {"nvmlDeviceGetUtilizationRates": on_gpu(1, SimpleNamespace(gpu=97), SimpleNamespace(gpu=0))},
        "busy 97 %",
        "end the program",
    ),
    "other processes": (
        {"nvmlDeviceGetComputeRunningProcesses": on_gpu(1, [SimpleNamespace(pid=1, usedGpuMemory=3 * GIB)], [])},
        "1 other: 1 (",
        "CUDA_VISIBLE_DEVICES",
    ),
}


@pytest.mark.parametrize("check", GPU_FAULTS)
def test_fault_of_one_gpu_is_reported_with_gpu_number_and_remedy(check: str, tmp_path: Path) -> None:
    answers, expected, remedy = GPU_FAULTS[check]
    report = run_checks(tmp_path, **answers)
    (bad,) = [f for f in report.findings if f.level != OK]
    assert (bad.check, bad.level, bad.where) == (check, BAD, "GPU 1")
    assert expected in bad.what
    assert remedy in bad.remedy
    assert report.exit_code == 1


def test_memory_in_use_without_visible_processes_is_reported_as_other_processes(tmp_path: Path) -> None:
    full, empty = SimpleNamespace(used=9 * GIB), SimpleNamespace(used=0)
    (bad,) = list_findings(BAD, run_checks(tmp_path, nvmlDeviceGetMemoryInfo=on_gpu(0, full, empty)))
    assert bad == "other processes GPU 0: 9.0 GiB of its memory are in use, by processes that cannot be seen from here."


@pytest.mark.parametrize(
    "function", sorted(set(HEALTHY) - {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetGpuFabricInfo"})
)
def test_failed_driver_query_makes_its_check_unread_and_never_ok(function: str, tmp_path: Path) -> None:
    """Each query alone fails as for a GPU that is no longer on its bus."""
    all_checks = {f.check for f in run_checks(tmp_path).findings}
    report = run_checks(tmp_path, **{function: LOST})
    unread = {f.check for f in report.findings if f.level == UNREAD}
    assert unread
    assert not list_findings(BAD, report)
    assert report.exit_code == 4
    assert unread <= all_checks
    assert not unread & {f.check for f in report.findings if f.level == OK}


def test_missing_driver_makes_all_gpu_checks_unread(tmp_path: Path) -> None:
    missing = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    report = run_checks(tmp_path, nvmlInit=missing, nvmlSystemGetDriverVersion=missing)
    unread = list_findings(UNREAD, report)
    assert len(unread) == 2
    assert "clocks, power, other processes, MIG, ECC and peer access are unknown" in unread[0]
    assert not {"clocks", "power", "MIG", "ECC", "peer access"} & {f.check for f in report.findings}
    assert report.exit_code == 4


def test_unsupported_gpu_features_are_ok(tmp_path: Path) -> None:
    report = run_checks(tmp_path, nvmlDeviceGetMigMode=UNSUPPORTED, nvmlDeviceGetEccMode=UNSUPPORTED)
    assert report.exit_code == 0
    assert "MIG GPU 0: it has none." in list_findings(OK, report)


@pytest.mark.parametrize(("now", "after_a_reset", "level"), [(1, 0, BAD), (0, 1, OK)])
def test_current_mig_mode_counts_and_pending_mode_does_not(
    now: int, after_a_reset: int, level: str, tmp_path: Path
) -> None:
    report = run_checks(tmp_path, nvmlDeviceGetMigMode=[now, after_a_reset])
    assert {f.level for f in report.findings if f.check == "MIG"} == {level}


@pytest.mark.parametrize(
    ("state", "level", "expected"),
    [(0, OK, "it has none."), (1, BAD, "has not been started"), (2, BAD, "is still at work"), (3, OK, "up.")],
)
def test_fabric_state_decides_level_of_fabric_finding(state: int, level: str, expected: str, tmp_path: Path) -> None:
    """The states of a fabric in NVML are: not supported, not started, in progress, completed."""

    def fabric(_: int, info: Any) -> None:
        info._obj.state = state

    report = run_checks(tmp_path, nvmlDeviceGetGpuFabricInfo=fabric)
    (one, _) = [f for f in report.findings if f.check == "fabric"]
    assert (one.level, expected in one.what) == (level, True)


def test_process_of_another_container_is_reported_by_its_id(tmp_path: Path) -> None:
    """Process ids are below 2²², so that this id belongs to no process here. NVML does not always report a process's
    memory.
    """
    other = SimpleNamespace(pid=(1 << 22) + 1, usedGpuMemory=None)
    others = list_findings(BAD, run_checks(tmp_path, nvmlDeviceGetComputeRunningProcesses=on_gpu(0, [other], [])))
    assert others == ["other processes GPU 0: 1 other: 4194305 (of another container or user, memory not known)."]


def test_missing_or_slow_peer_access_is_reported_per_pair_of_gpus(tmp_path: Path) -> None:
    def status(one: int, other: int, _: int) -> int:
        return pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED if (one, other) == (0, 2) else pynvml.NVML_P2P_STATUS_OK

    report = run_checks(tmp_path, nvmlDeviceGetCount=3, nvmlDeviceGetP2PStatus=status)
    assert list_findings(BAD, report) == [
        "peer access GPU 0 and 2: they cannot read and write each other's memory (chipset not supported)."
    ]
    slow = run_checks(tmp_path, nvmlDeviceGetP2PStatus=lambda *a: int(a[2] == gpu_checks.NVLINK))
    assert list_findings(NOTE, slow) == [
        "peer access GPU 0 and 1: they reach each other, but not by NVLink, which takes several times as long."
    ]


def test_only_gpus_in_cuda_visible_devices_are_checked(tmp_path: Path) -> None:
    answers = {"nvmlDeviceGetMigMode": on_gpu(1, [1, 1], [0, 0])}
    assert run_checks(tmp_path, env={"CUDA_VISIBLE_DEVICES": "0"}, **answers).exit_code == 0
    report = run_checks(tmp_path, env={"CUDA_VISIBLE_DEVICES": "7"}, **answers)
    assert "CUDA_VISIBLE_DEVICES names 7, which is no GPU that NVML lists." in list_findings(BAD, report)[0]


HOST_FAULTS = {
    "shared memory": (System(get_free_bytes=lambda p: 64 << 20 if p == host.SHARED else 500 * GIB), 1, BAD, "0.1 GiB"),
    "disk": (System(get_free_bytes=5 * GIB), 1, NOTE, "5.0 GiB"),
    "open files": (System(get_limit=lambda which: 256 if which == resource.RLIMIT_NOFILE else -1), 1, BAD, "256"),
    "file size": (
        System(get_limit=lambda which: 64 << 20 if which == resource.RLIMIT_FSIZE else -1),
        1,
        BAD,
        "64.0 MiB",
    ),
    "locked memory": (
        System(get_limit=lambda which: 64 << 10 if which == resource.RLIMIT_MEMLOCK else -1),
        2,
        BAD,
        "limited to 64.0 KiB: RDMA",
    ),
    "locks": (System(check_lock=OSError(errno.ENOLCK, "No locks available")), 1, BAD, "No locks available"),
    "ports": (System(bind=OSError(errno.EADDRNOTAVAIL, "Cannot assign")), 1, BAD, "where ranks meet"),
    "clock": (System(read_clock=(False, 0)), 2, BAD, "no service synchronises it"),
    "cores": (System(get_load=40.0), 1, NOTE, "the load average is 40.0 on 64 cores."),
    "NUMA balancing": (System(files={"/proc/sys/kernel/numa_balancing": "1"}), 1, NOTE, "numa_balancing"),
}


@pytest.mark.parametrize("below", ["", "run"])
def test_file_at_or_above_output_folder_is_reported(below: str, tmp_path: Path) -> None:
    """A file above the folder is reported as well, as the run could not create the folder."""
    (tmp_path / "file").write_text("")
    report = run_checks(tmp_path / "file" / below)
    assert [(f.check, f.what, f.where) for f in report.findings if f.level == BAD] == [
        ("locks", "it is a file, and a run needs a folder.", str(tmp_path / "file"))
    ]


@pytest.mark.parametrize("check", HOST_FAULTS)
def test_fault_of_the_host_is_reported_with_remedy(check: str, tmp_path: Path) -> None:
    system, nnodes, level, expected = HOST_FAULTS[check]
    wrong = [f for f in run_checks(tmp_path, system=system, nnodes=nnodes).findings if f.level != OK]
    assert {(f.check, f.level) for f in wrong} == {(check, level)}
    if check in ("shared memory", "disk"):
        need = {"shared memory": 1, "disk": 10}[check]
        assert wrong[0].what.endswith(f"GiB are free, of the {need} GiB that a long run should have.")
    assert expected in wrong[0].what
    assert all(f.remedy for f in wrong)


@pytest.mark.parametrize("name", ["get_limit", "get_free_bytes", "count_cores", "get_load", "read_clock"])
def test_failed_host_query_makes_its_check_unread(name: str, tmp_path: Path) -> None:
    report = run_checks(tmp_path, system=System(**{name: OSError(errno.EPERM, "Operation not permitted")}))
    assert any("Operation not permitted" in text for text in list_findings(UNREAD, report))
    assert report.exit_code == 4


@pytest.mark.parametrize(
    ("env", "level"),
    [({"CUDA_LAUNCH_BLOCKING": "1"}, BAD), ({"NCCL_DEBUG": "info"}, NOTE), ({"NCCL_ALGO": "Ring"}, NOTE)],
)
def test_harmful_environment_variable_is_reported(env: dict[str, str], level: str, tmp_path: Path) -> None:
    assert [s.split("=")[0] for s in list_findings(level, run_checks(tmp_path, env=env))] == [
        f"environment {n}: {n}" for n in env
    ]


def test_environment_without_harmful_variables_is_ok(tmp_path: Path) -> None:
    assert "environment : no variable that is known to hurt." in list_findings(
        OK, run_checks(tmp_path, env={"NCCL_DEBUG": "WARN"})
    )
    assert not [
        s for s in list_findings(OK, run_checks(tmp_path, env={"NCCL_DEBUG": "INFO"})) if s.startswith("environment")
    ]


class TestVersions:
    @pytest.mark.parametrize(
        ("nccl", "levels"),
        [
            ("2.21.5", {BAD}),
            ("2.26.2", {NOTE}),
            ("2.27.3", {NOTE}),
            ("2.27.5", {OK}),
            ("2.28.9+cuda13", {OK}),
            ("?", {UNREAD}),
        ],
    )
    def test_nccl_version_decides_level(
        self, nccl: str, levels: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            software, "find_installed_version", lambda *names: "2.13.0" if names == ("torch",) else nccl
        )
        assert {f.level for f in run_checks(tmp_path).findings if f.check == "NCCL"} == levels

    @pytest.mark.parametrize(
        ("driver", "cuda", "level"),
        [
            ("570.1", "13.0", BAD),
            ("570.1", "12.8", OK),
            ("525.60.13", "12.8", OK),
            ("525.60", "12.8", BAD),
            ("580", "14.0", UNREAD),
        ],
    )
    def test_driver_too_old_for_cuda_of_torch_is_bad(
        self, driver: str, cuda: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(software, "read_torch_cuda", lambda: cuda)
        report = run_checks(tmp_path, nvmlSystemGetDriverVersion=driver)
        assert [f.level for f in report.findings if f.check == "driver"] == [level]

    def test_cuda_version_of_torch_is_read_without_importing_torch(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.undo()
        (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n")
        spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(software.importlib.util, "find_spec", lambda _: spec)
        assert software.read_torch_cuda() == "13.0"
        (tmp_path / "version.py").write_text("cuda: Optional[str] = None\n")
        assert software.read_torch_cuda() is None


class TestChecksAtSweepStart:
    def test_only_faults_that_would_spoil_the_run_are_reported(self, tmp_path: Path) -> None:
        driver = Driver(nvmlDeviceGetMigMode=on_gpu(1, [1, 1], [0, 0]), nvmlDeviceGetPersistenceMode=0)
        findings = check_at_start(
            tmp_path, cuda=True, nvml=driver, system=System(get_load=60.0), env={"NCCL_DEBUG": "INFO"}
        )
        assert [(f.check, f.where) for f in findings] == [("MIG", "GPU 1")]
        assert check_at_start(tmp_path, cuda=False, nvml=driver, system=System(), env={}) == []

    def test_full_disk_is_reported_without_a_gpu(self, tmp_path: Path) -> None:
        findings = check_at_start(tmp_path, cuda=False, system=System(get_free_bytes=1 << 20), env={})
        assert {f.check for f in findings} == {"shared memory", "disk"}

    def test_hung_driver_does_not_delay_the_sweep(self, tmp_path: Path) -> None:
        answer = threading.Event()
        driver = Driver(nvmlDeviceGetCount=lambda: answer.wait() and 0)
        (finding,) = check_at_start(tmp_path, cuda=True, nvml=driver, system=System(), env={}, patience_s=0.05)
        answer.set()
        assert finding.level == UNREAD
        assert "did not answer" in finding.what


class TestCommand:
    def test_same_finding_of_several_gpus_is_one_line_with_one_command(self, tmp_path: Path) -> None:
        shown = command.format_findings(run_checks(tmp_path, nvmlDeviceGetPersistenceMode=0).findings)
        (line,) = shown
        assert line.startswith("• persistence (GPU 0, GPU 1): off: the driver lets go of the GPU between two jobs")
        assert line.endswith("To do: sudo nvidia-smi -i 0,1 -pm 1")

    def test_json_output_and_exit_code_report_bad_gpus(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("dcpbench.doctor._import_driver", lambda: Driver(nvmlDeviceGetMigMode=[1, 1]))
        monkeypatch.setattr(host, "Host", System)
        monkeypatch.setattr(
            "dcpbench.launch.launcher.run_torch_probe", lambda _: Probe(device="cuda", count=2, name="H200")
        )
        with pytest.raises(SystemExit) as end:
            cli.main(["doctor", "-o", str(tmp_path), "--json"])
        report = json.loads(capsys.readouterr().out)
        assert end.value.code == report["exit_code"] == 1
        assert (report["machine"]["count"], report["machine"]["name"]) == (2, "H200")
        assert [f["where"] for f in report["findings"] if f["level"] == BAD] == ["GPU 0", "GPU 1"]

    def test_doctor_runs_on_this_machine_and_changes_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["doctor", "-o", str(tmp_path / "new")])
        assert end.value.code in (0, 1, 4)
        assert "Checked, without findings: " in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []


def test_cores_near_a_gpu_are_counted_from_words_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit 3 of the second word is core 67, the only one that this process may use."""
    verdicts: list[tuple[str, str]] = []
    card = SimpleNamespace(
        fetch=lambda *_: [0, 1 << 3], add_verdict=lambda _, wrong, __, fine, **___: verdicts.append((wrong, fine))
    )
    monkeypatch.setattr(gpu_checks.os, "cpu_count", lambda: 128)
    monkeypatch.setattr(gpu_checks.os, "sched_getaffinity", lambda _: {67})
    gpu_checks._check_numa(card)
    assert verdicts == [("", "1 cores near it.")]


@pytest.mark.parametrize(
    ("kept", "error_us", "nnodes", "level", "expected"),
    [
        (True, 900, 1, OK, "synchronised, wrong by 0.9 ms at most."),
        (False, 0, 1, NOTE, "no service synchronises it"),
        (False, 0, 2, BAD, "no service synchronises it"),
        (True, host.MAX_CLOCK_OFFSET_US, 2, OK, "synchronised, wrong by"),
        (
            True,
            host.MAX_CLOCK_OFFSET_US + 1_000_000,
            2,
            BAD,
            f"kept, but it may be {host.MAX_CLOCK_OFFSET_US / 1e3 + 1000:,.0f} ms wrong.",
        ),
    ],
)
def test_unsynchronised_clock_is_bad_with_several_nodes_only(
    kept: bool, error_us: int, nnodes: int, level: str, expected: str, tmp_path: Path
) -> None:
    report = run_checks(tmp_path, system=System(read_clock=(kept, error_us)), nnodes=nnodes)
    (one,) = [f for f in report.findings if f.check == "clock"]
    assert (one.level, expected in one.what) == (level, True)


@pytest.mark.parametrize(
    ("error", "level", "expected"),
    [
        (None, OK, "node 0 can listen there."),
        (errno.EADDRINUSE, BAD, "something listens there already."),
        (errno.EADDRNOTAVAIL, NOTE, "node 0 cannot listen there (no); right where this is another node."),
    ],
)
def test_endpoint_of_the_job_is_bound_as_a_trial(error: int | None, level: str, expected: str, tmp_path: Path) -> None:
    def bind(name: str, _: int) -> OSError | None:
        return OSError(error, "no") if error and name == "10.0.0.1" else None

    report = check_machine(tmp_path, nvml=Driver(), system=System(bind=bind), env={}, endpoint=("10.0.0.1", 29500))
    assert f"ports 10.0.0.1:29500: {expected}" in list_findings(level, report)


@pytest.mark.parametrize("first", [300, 32768])
@pytest.mark.parametrize(("count", "level"), [(host.PORTS, OK), (host.PORTS - 1, BAD)])
def test_too_few_ephemeral_ports_are_bad(first: int, count: int, level: str, tmp_path: Path) -> None:
    files = {"/proc/sys/net/ipv4/ip_local_port_range": f"{first}\t{first + count - 1}"}
    texts = list_findings(level, run_checks(tmp_path, system=System(files=files)))
    assert any(f" {count:,} " in text for text in texts if text.startswith("ports"))


class TestThisHost:
    """Tests of the queries of a real host."""

    def test_clock_state_and_error_are_read_from_adjtimex(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """State 5 is an error, and bit 0x40 means that no service keeps the clock; the largest error is in µs."""
        for state, status, kept in ((0, 0, True), (5, 0, False), (0, 0x40, False), (1, 0x2001, True)):

            def adjtimex(timex: Any, state: int = state, status: int = status) -> int:
                timex._obj.status, timex._obj.maxerror = status, 1234
                return state

            monkeypatch.setattr(host.ctypes, "CDLL", lambda *_, call=adjtimex, **__: SimpleNamespace(adjtimex=call))
            assert host.Host().read_clock() == (kept, 1234)
        monkeypatch.setattr(host.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=lambda _: -1))
        monkeypatch.setattr(host.ctypes, "get_errno", lambda: errno.EPERM)
        with pytest.raises(OSError, match="Operation not permitted"):
            host.Host().read_clock()

    def test_trials_of_ports_and_locks_leave_no_trace(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
            host.Host().bind("127.0.0.1", server.getsockname()[1])
        host.Host().bind("127.0.0.1", 0)
        host.Host().check_lock(tmp_path)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.27.5+cuda12.9", (2, 27, 5)), ("v6.8.0-90-generic", (6, 8, 0)), ("580", (580,)), ("x1", None)],
)
def test_versions_are_compared_by_their_numbers(text: str, numbers: tuple[int, ...] | None) -> None:
    if numbers is None:
        with pytest.raises(ValueError, match="'x1' is no version"):
            software.parse_version(text)
    else:
        assert software.parse_version(text) == numbers


def test_first_installed_package_name_gives_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert software.find_installed_version("no-such-package", "pytest") == pytest.__version__
    assert software.find_installed_version("pytest", "msgspec") == pytest.__version__
    with pytest.raises(software.importlib.metadata.PackageNotFoundError):
        software.find_installed_version("no-such-package", "nor-this")


def test_torch_without_cuda_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing NCCL is not reported then."""
    monkeypatch.setattr(software, "read_torch_cuda", lambda: None)
    report = run_checks(tmp_path)
    assert list_findings(NOTE, report) == ["CUDA of torch : this torch is built without CUDA: it uses no GPU."]
    assert "NCCL" not in {f.check for f in report.findings}


def with_used_memory(size: int) -> dict[str, Any]:
    """Return the answer of a GPU with this many bytes in use."""
    return {"nvmlDeviceGetMemoryInfo": SimpleNamespace(used=size)}


def with_utilisation(percent: int) -> dict[str, Any]:
    """Return the answer of a GPU with this utilisation."""
    return {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=percent)}


def with_system(**answers: Any) -> dict[str, Any]:
    """Return the options of a host with these answers."""
    return {"system": System(**answers)}


LIMITS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("other processes", BAD, with_used_memory(GIB), with_used_memory(GIB + 1)),
    ("utilisation", BAD, with_utilisation(5), with_utilisation(6)),
    ("power", BAD, {"nvmlDeviceGetEnforcedPowerLimit": 700_000}, {"nvmlDeviceGetEnforcedPowerLimit": 699_999}),
    ("clocks", BAD, {"nvmlDeviceGetApplicationsClock": 1980}, {"nvmlDeviceGetApplicationsClock": 1979}),
    ("temperature", BAD, {"nvmlDeviceGetTemperature": 77}, {"nvmlDeviceGetTemperature": 78}),
    ("PCIe", NOTE, {"nvmlDeviceGetCurrPcieLinkWidth": 16}, {"nvmlDeviceGetCurrPcieLinkWidth": 15}),
    ("ECC", BAD, {"nvmlDeviceGetTotalEccErrors": 0}, {"nvmlDeviceGetTotalEccErrors": 1}),
    ("ECC", NOTE, {"nvmlDeviceGetEccMode": [1, 0]}, {"nvmlDeviceGetEccMode": [0, 1]}),
    (
        "memory rows",
        BAD,
        {"nvmlDeviceGetRemappedRows": (9, 9, 0, 0)},
        {"nvmlDeviceGetRemappedRows": (0, 0, 0, 1)},
    ),
    ("persistence", NOTE, {"nvmlDeviceGetPersistenceMode": 1}, {"nvmlDeviceGetPersistenceMode": 0}),
    ("throttling", BAD, {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x4}, {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x8}),
    ("disk", NOTE, with_system(get_free_bytes=10 * GIB), with_system(get_free_bytes=10 * GIB - 1)),
    ("disk", BAD, with_system(get_free_bytes=10 * GIB), with_system(get_free_bytes=GIB - 1)),
    ("disk", NOTE, with_system(get_free_bytes=10 * GIB), with_system(get_free_bytes=GIB)),
    ("shared memory", BAD, with_system(get_free_bytes=GIB), with_system(get_free_bytes=GIB - 1)),
    ("open files", NOTE, with_system(get_limit=4096), with_system(get_limit=4095)),
    ("open files", NOTE, with_system(get_limit=4096), with_system(get_limit=1024)),
    ("open files", BAD, with_system(get_limit=4096), with_system(get_limit=1023)),
    ("file size", NOTE, with_system(get_limit=10 * GIB), with_system(get_limit=10 * GIB - 1)),
    ("file size", BAD, with_system(get_limit=-1), with_system(get_limit=GIB - 1)),
    ("cores", NOTE, with_system(get_load=16.0), with_system(get_load=16.1)),
    ("clock", NOTE, with_system(read_clock=(True, 100_000)), with_system(read_clock=(True, 100_001))),
]  # fmt: skip
"""Check, level of a finding, and two machines: one at the limit, which is OK, and one just beyond it."""


@pytest.mark.parametrize(("check", "level", "at_limit", "beyond"), LIMITS)
def test_value_at_the_limit_is_ok_and_beyond_it_is_not(
    check: str, level: str, at_limit: dict[str, Any], beyond: dict[str, Any], tmp_path: Path
) -> None:
    def levels(answers: dict[str, Any]) -> set[str]:
        return {f.level for f in run_checks(tmp_path, **answers).findings if f.check == check and f.where != "/tmp"}  # noqa: S108

    assert levels(at_limit) == {OK}
    assert levels(beyond) - {OK} == {level}


@pytest.mark.parametrize(
    ("software_name", "versions", "levels"),
    [
        ("Linux", ("5.4.99", "5.5"), (BAD, OK)),
        ("torch", ("2.8.1", "2.9"), (BAD, OK)),
        ("NCCL", ("2.21.4", "2.21.5", "2.21.9", "2.22", "2.26.1", "2.27.4"), (OK, BAD, BAD, NOTE, NOTE, NOTE)),
    ],
)
def test_version_ranges_decide_level(software_name: str, versions: tuple[str, ...], levels: tuple[str, ...]) -> None:
    for version, level in zip(versions, levels, strict=True):
        report = software.Report()
        software._check_version(report, software_name, version)
        assert {f.level for f in report.findings} == {level}, version


def test_at_most_four_other_processes_are_named(tmp_path: Path) -> None:
    def describe(count: int) -> str:
        others = [SimpleNamespace(pid=(1 << 22) + n, usedGpuMemory=n * GIB) for n in range(1, count + 1)]
        return list_findings(BAD, run_checks(tmp_path, nvmlDeviceGetComputeRunningProcesses=on_gpu(0, others, [])))[0]

    four = ", ".join(f"{(1 << 22) + n} (of another container or user, {n}.0 GiB)" for n in range(1, 5))
    assert describe(4) == f"other processes GPU 0: 4 other: {four}."
    assert describe(5) == f"other processes GPU 0: 5 other: {four}, …."


@pytest.mark.parametrize(
    ("visible", "numbers", "wrong"),
    [
        ("1", [1], 0),
        (" 2 , 0 ,", [2, 0], 0),
        ("0,7,1", [0], 1),
        ("GPU-b", [1], 0),
        ("GPU-x,0", [], 1),
        ("", [], 0),
    ],
)
def test_visible_gpus_follow_the_rules_of_cuda_visible_devices(visible: str, numbers: list[int], wrong: int) -> None:
    """GPUs are taken in the given order, up to the first invalid entry; an entry is a number or the start of a UUID."""
    report = software.Report()
    driver = Driver(nvmlDeviceGetCount=3, nvmlDeviceGetUUID=lambda gpu: f"GPU-{'abc'[gpu]}0")
    cards = gpu_checks.find_visible(report, driver, {"CUDA_VISIBLE_DEVICES": visible})
    assert [card.index for card in cards] == numbers
    assert sum("which is no GPU that NVML lists" in f.what for f in report.findings) == wrong
    summary = report.findings[-1]
    seen = f"{len(numbers)} of 3, by CUDA_VISIBLE_DEVICES."
    assert summary.what == (seen if numbers else f"a run would see none: {seen}")


@pytest.mark.parametrize(("cpus", "words"), [(None, 1), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_cpu_affinity_is_requested_in_words_of_64_bits(
    cpus: int | None, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(gpu_checks.os, "cpu_count", lambda: cpus)
    gpu_checks._check_numa(SimpleNamespace(fetch=lambda *args: calls.append(args)))
    assert calls == [("NUMA", "nvmlDeviceGetCpuAffinity", words)]


def test_error_is_formatted_in_at_most_200_characters() -> None:
    assert software.Report().read("x", lambda: 1 // 0) is None
    assert gpu_checks.format_error(ValueError(" no such thing. ")) == "no such thing"
    assert gpu_checks.format_error(ValueError("x" * 300)) == "x" * 200
    assert gpu_checks.format_error(ValueError()) == "ValueError"


def test_host_files_are_read_without_surrounding_whitespace(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(" 1\n")
    assert host.Host().read_text(str(tmp_path / "one")) == "1"


def test_value_of_a_variable_decides_whether_it_is_harmful() -> None:
    """Some variables are harmful with any value, of which a part is shown; most only if they are switched on."""
    report = software.Report()
    harmful = {"CUDA_LAUNCH_BLOCKING": "true", "NCCL_P2P_DISABLE": "on", "TORCH_DISTRIBUTED_DEBUG": "detail"}
    noted = {"NCCL_ALGO": "R" * 70, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_SHM_DISABLE": "yes"}
    harmless = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0", "NCCL_DEBUG": "WARN"}
    host.check_environment(report, harmful | noted | harmless)
    assert {f.where for f in report.findings if f.level == BAD} == set(harmful)
    assert {f.where for f in report.findings if f.level == NOTE} == set(noted)
    assert next(f.what for f in report.findings if f.where == "NCCL_ALGO").startswith(f"NCCL_ALGO={'R' * 60}: ")
