"""Check by NVML whether the GPUs are able to run at full speed and undisturbed. No torch.

NVML is passed as a module with pynvml's functions, so that a test can replace the driver.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.doctor.health_report import BAD, NOTE, OK, UNREAD, Report, format_error
from dcpbench.records.record import decode_throttle_reasons
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GIB = 1 << 30
MAX_USED_BYTES = GIB  # maximum memory in use on an idle GPU; the driver itself uses less
MAX_BUSY_PERCENT = 5
HOT_BELOW_SLOWDOWN_C = 10
HARMFUL_THROTTLES = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")  # reasons that no idle GPU has
NO_GPU = "so clocks, power, other processes, MIG, ECC and peer access are unknown"
READ, WRITE, NVLINK = 0, 1, 2  # NVML_P2P_CAPS_INDEX_* of nvml.h, which pynvml 13 defines as tuples
FABRIC = {1: "has not been started", 2: "is still at work"}  # states of nvmlDeviceGetGpuFabricInfo before its end


@dataclasses.dataclass(frozen=True)
class Card:
    """Query one GPU through NVML."""

    nvml: Any
    index: int
    handle: Any
    report: Report

    @property
    def name(self) -> str:
        """Return the name of the GPU in findings."""
        return f"GPU {self.index}"

    def fetch(self, check: str, function: str, *args: object) -> Any:  # noqa: ANN401 -- any result of NVML
        """Return the result of an NVML function for this GPU; without one, add a finding and return None."""
        return self.report.read(check, lambda: getattr(self.nvml, function)(self.handle, *args), where=self.name)

    def fetch_if_supported(self, check: str, function: str, *args: object, without: str) -> Any:  # noqa: ANN401 -- as above
        """Return the result of an NVML function that not all GPUs support; if unsupported, add the finding `without`
        and return None.
        """
        return self.query_if_supported(check, lambda: getattr(self.nvml, function)(self.handle, *args), without)

    def query_if_supported(self, check: str, query: Callable[[], Any], without: str) -> Any:  # noqa: ANN401 -- as above
        """Return the result of a query that not all GPUs support; see fetch_if_supported."""
        try:
            return query()
        except Exception as e:  # noqa: BLE001 - as Report.read
            if getattr(e, "value", None) == self.nvml.NVML_ERROR_NOT_SUPPORTED:
                self.add_verdict(check, "", "", without)
            else:
                self.report.add(check, UNREAD, f"not known: {format_error(e)}.", where=self.name)
            return None

    def add_verdict(self, check: str, wrong: str, remedy: str, right: str, *, level: str = BAD) -> None:
        """Add a finding about this GPU; see Report.add_verdict."""
        self.report.add_verdict(check, wrong, remedy, right, where=self.name, level=level)


def check_gpus(report: Report, nvml: Any, env: Mapping[str, str], *, brief: bool = False) -> None:  # noqa: ANN401 -- as Card's
    """Run all checks; with `brief` only quick ones for conditions that would invalidate a run."""
    cards = find_visible(report, nvml, env)
    for card in cards:
        for check in QUICK if brief else (*QUICK, *SLOW):
            check(card)
    _check_peers(report, nvml, cards)
    if not brief and cards:
        _check_same_kind(report, cards)


def find_visible(report: Report, nvml: Any, env: Mapping[str, str]) -> list[Card]:  # noqa: ANN401 -- as Card's
    """Return the GPUs that a run would use; if the driver does not answer, add a finding and return none."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception as e:  # noqa: BLE001 - as Report.read
        report.add("GPUs", UNREAD, f"NVIDIA's driver does not answer ({format_error(e)}), {NO_GPU}.")
        return []
    cards = []
    for index in range(count):
        handle = report.read("GPUs", lambda i=index: nvml.nvmlDeviceGetHandleByIndex(i), where=f"GPU {index}")  # type: ignore[misc]
        if handle is not None:
            cards.append(Card(nvml, index, handle, report))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        cards = _select_cards(cards, [word.strip() for word in visible.split(",") if word.strip()], report)
    seen = f"{count} in all" if visible is None else f"{len(cards)} of {count}, by CUDA_VISIBLE_DEVICES"
    remedy = "unset CUDA_VISIBLE_DEVICES, or look with nvidia-smi whether the driver has lost a GPU."
    report.add_verdict("GPUs", "" if cards else f"a run would see none: {seen}.", remedy, f"{seen}.")
    return cards


def _select_cards(cards: list[Card], words: list[str], report: Report) -> list[Card]:
    """Return the GPUs that CUDA selects by the variable: all up to the first invalid entry."""
    found: list[Card] = []
    for word in words:
        match = [card for card in cards if str(card.index) == word]
        if not match and word.startswith("GPU-"):
            match = [c for c in cards if str(c.fetch("GPUs", "nvmlDeviceGetUUID")).startswith(word)]
        if not match:
            what = f"CUDA_VISIBLE_DEVICES names {word}, which is no GPU that NVML lists."
            report.add("GPUs", BAD, what, "name GPUs by the numbers or UUIDs that nvidia-smi -L shows.")
            break
        found += match
    return found


def _check_processes(card: Card) -> None:
    """Check for other users of the GPU, visible as processes or only by their memory."""
    check, nvml = "other processes", card.nvml
    remedy = f"end them, or leave the GPU out: CUDA_VISIBLE_DEVICES. nvidia-smi -i {card.index} shows them."
    running = card.fetch(check, "nvmlDeviceGetComputeRunningProcesses")
    memory = card.fetch(check, "nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2)
    if running is None or memory is None:
        return
    wrong = ""
    if running:
        shown = ", ".join(f"{p.pid} ({_read_command(p.pid)}, {_format_gib(p.usedGpuMemory)})" for p in running[:4])
        wrong = f"{len(running)} other: {shown}{', …' if len(running) > 4 else ''}."  # noqa: PLR2004 -- as many as shown
    elif memory.used > MAX_USED_BYTES:
        wrong = f"{_format_gib(memory.used)} of its memory are in use, by processes that cannot be seen from here."
    card.add_verdict(check, wrong, remedy, f"none; {_format_gib(memory.used)} in use.")


def _check_utilisation(card: Card) -> None:
    found = card.fetch_if_supported(
        "utilisation", "nvmlDeviceGetUtilizationRates", without="NVML has none of this GPU."
    )
    if found is not None:
        busy = found.gpu > MAX_BUSY_PERCENT
        wrong = f"it is busy {found.gpu} % of the time before dcpbench runs anything." if busy else ""
        card.add_verdict(
            "utilisation", wrong, "end the program that uses it, possibly in another container.", f"{found.gpu} %."
        )


def _read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "of another container or user"


def _format_gib(size: int | None) -> str:
    return "memory not known" if size is None else f"{size / GIB:.1f} GiB"


def _check_mig(card: Card) -> None:
    mode = card.fetch_if_supported("MIG", "nvmlDeviceGetMigMode", without="it has none.")
    if mode is not None:
        wrong = "it is divided into MIG instances, none of which is the whole GPU." if mode[0] else ""
        card.add_verdict("MIG", wrong, f"sudo nvidia-smi -i {card.index} -mig 0", "off.")


def _check_throttling(card: Card) -> None:
    bits = card.fetch("throttling", "nvmlDeviceGetCurrentClocksThrottleReasons")
    if bits is None:
        return
    reasons = decode_throttle_reasons(bits)
    hurts = [reason for reason in reasons if reason in HARMFUL_THROTTLES]
    remedy = "check its cooling and its power supply before a measurement; nvidia-smi -q -d PERFORMANCE shows details."
    wrong = f"slowed down while idle: {', '.join(reasons)}." if hurts else ""
    card.add_verdict("throttling", wrong, remedy, f"none{', but sw_power_cap' if reasons else ''}.")


def _check_power(card: Card) -> None:
    limit = card.fetch("power", "nvmlDeviceGetEnforcedPowerLimit")
    usual = card.fetch("power", "nvmlDeviceGetPowerManagementDefaultLimit")
    if limit is None or usual is None:
        return
    wrong = f"capped at {limit / 1e3:,.0f} W, below its default of {usual / 1e3:,.0f} W." if limit < usual else ""
    card.add_verdict(
        "power", wrong, f"sudo nvidia-smi -i {card.index} -pl {usual / 1e3:.0f}", f"limit of {limit / 1e3:,.0f} W."
    )


def _check_ecc(card: Card) -> None:
    nvml = card.nvml
    mode = card.fetch_if_supported("ECC", "nvmlDeviceGetEccMode", without="its memory has none.")
    if mode is None:
        return
    if not mode[0]:
        what = "off: no error of its memory is noticed."
        card.add_verdict("ECC", what, f"sudo nvidia-smi -i {card.index} -e 1, and restart", "", level=NOTE)
        return
    errors = card.fetch(
        "ECC", "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    rows = card.fetch_if_supported("memory rows", "nvmlDeviceGetRemappedRows", without="none can be remapped.")
    if errors is not None:
        what = f"{format_count(errors, 'error')} of its memory since the last restart that could not be corrected."
        remedy = "restart the machine; if the errors recur, have the GPU replaced."
        card.add_verdict("ECC", what if errors else "", remedy, "on, no errors.")
    if rows is not None:
        _, _, pending, failed = rows
        wrong = "a row could not be remapped." if failed else "rows wait to be remapped." if pending else ""
        remedy = "have the GPU replaced." if failed else "reset the GPU, or restart the machine."
        card.add_verdict("memory rows", wrong, remedy, "none waits to be remapped.")


def _check_clocks(card: Card) -> None:
    nvml, check = card.nvml, "clocks"
    top = card.fetch(check, "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
    now = card.fetch(check, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
    set_mhz = card.fetch_if_supported(
        check, "nvmlDeviceGetApplicationsClock", nvml.NVML_CLOCK_SM, without="no clocks are set for applications."
    )
    if top is None or now is None or set_mhz is None:
        return
    wrong = f"set to {set_mhz:,} MHz for applications, of {top:,} MHz." if set_mhz < top else ""
    card.add_verdict(check, wrong, f"sudo nvidia-smi -i {card.index} -rac", f"up to {top:,} MHz, now {now:,} MHz.")


def _check_temperature(card: Card) -> None:
    nvml, check = card.nvml, "temperature"
    now = card.fetch(check, "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    slow = card.fetch(check, "nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if now is None or slow is None:
        return
    wrong = f"{now} °C, and it slows down at {slow} °C." if now > slow - HOT_BELOW_SLOWDOWN_C else ""
    card.add_verdict(check, wrong, "check its cooling, or wait.", f"{now} °C.")


def _check_persistence(card: Card) -> None:
    mode = card.fetch_if_supported("persistence", "nvmlDeviceGetPersistenceMode", without="its driver has none.")
    if mode is not None:
        wrong = "" if mode else "off: the driver lets go of the GPU between two jobs, and each start takes longer."
        card.add_verdict("persistence", wrong, f"sudo nvidia-smi -i {card.index} -pm 1", "on.", level=NOTE)


def _check_compute_mode(card: Card) -> None:
    mode = card.fetch("compute mode", "nvmlDeviceGetComputeMode")
    if mode is not None:
        wrong = "no process may compute on it." if mode == card.nvml.NVML_COMPUTEMODE_PROHIBITED else ""
        card.add_verdict("compute mode", wrong, f"sudo nvidia-smi -i {card.index} -c DEFAULT", "open to processes.")


def _check_pcie(card: Card) -> None:
    now, most = (card.fetch("PCIe", f"nvmlDeviceGet{which}PcieLinkWidth") for which in ("Curr", "Max"))
    if now is None or most is None:
        return
    wrong = f"{now} of its {most} lanes are in use: copies from and to the host take longer." if now < most else ""
    card.add_verdict(
        "PCIe", wrong, "look with lspci -vv where lanes are lost; reseat the card.", f"{now} lanes.", level=NOTE
    )


def _check_numa(card: Card) -> None:
    """Check whether this process may run on cores near the GPU."""
    cpus = os.cpu_count() or 1
    words = card.fetch("NUMA", "nvmlDeviceGetCpuAffinity", -(-cpus // 64))
    if words is None:
        return
    near = {64 * i + bit for i, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1}
    mine = os.sched_getaffinity(0)
    wrong = "" if near & mine else "this process may not use any of the cores near it."
    remedy = "start without taskset or numactl, or let the container have cores of both sockets."
    card.add_verdict("NUMA", wrong, remedy, f"{len(near & mine)} cores near it.", level=NOTE)


def _check_fabric(card: Card) -> None:
    """Check the fabric of GPUs with NVSwitch: CUDA fails until it is up."""

    def read_state() -> int:
        found = card.nvml.c_nvmlGpuFabricInfo_t()
        card.nvml.nvmlDeviceGetGpuFabricInfo(card.handle, ctypes.byref(found))
        return int(found.state)

    found = card.query_if_supported("fabric", read_state, "it has none.")
    if found is not None:
        wrong = f"what joins the GPUs {FABRIC[found]}." if found in FABRIC else ""
        right = "up." if found else "it has none."
        card.add_verdict("fabric", wrong, "sudo systemctl restart nvidia-fabricmanager", right)


QUICK: tuple[Callable[[Card], None], ...] = (
    _check_processes,
    _check_utilisation,
    _check_mig,
    _check_throttling,
    _check_power,
    _check_ecc,
    _check_compute_mode,
)
SLOW: tuple[Callable[[Card], None], ...] = (
    _check_clocks,
    _check_temperature,
    _check_persistence,
    _check_pcie,
    _check_numa,
    _check_fabric,
)


def _check_peers(report: Report, nvml: Any, cards: list[Card]) -> None:  # noqa: ANN401 -- as Card's
    """Check whether each GPU reads and writes the memory of each other one, and by NVLink."""
    statuses = {
        getattr(nvml, name): name.removeprefix("NVML_P2P_STATUS_").replace("_", " ").lower()
        for name in (dir(nvml) if cards else ())
        if name.startswith("NVML_P2P_STATUS_")
    }
    for one, other in itertools.combinations(cards, 2):
        where = f"{one.name} and {other.index}"
        found = [
            report.read(
                "peer access",
                lambda a=one, b=other, index=index: nvml.nvmlDeviceGetP2PStatus(a.handle, b.handle, index),  # type: ignore[misc]
                where=where,
            )
            for index in (READ, WRITE, NVLINK)
        ]
        if any(status is None for status in found):
            continue
        refused = [statuses.get(status, str(status)) for status in found[:2] if status != nvml.NVML_P2P_STATUS_OK]
        if refused:
            what = f"they cannot read and write each other's memory ({refused[0]})."
            remedy = (
                "take IOMMU and ACS out of the way, share GPUs of one NVSwitch; nvidia-smi topo -p2p r shows all pairs."
            )
            report.add("peer access", BAD, what, remedy, where)
        elif found[2] != nvml.NVML_P2P_STATUS_OK:
            what = "they reach each other, but not by NVLink, which takes several times as long."
            report.add("peer access", NOTE, what, "use GPUs that nvidia-smi topo -m shows joined by NV.", where)
        else:
            report.add("peer access", OK, "by NVLink.", where=where)


def _check_same_kind(report: Report, cards: list[Card]) -> None:
    names = [card.fetch("kind of GPU", "nvmlDeviceGetName") for card in cards]
    if None in names:
        return
    kinds = sorted(set(map(str, names)))
    wrong = f"they differ: {', '.join(kinds)}; the slowest decides each step." if len(kinds) > 1 else ""
    report.add_verdict("kind of GPU", wrong, "choose GPUs of one kind with CUDA_VISIBLE_DEVICES.", f"all {names[0]}.")
