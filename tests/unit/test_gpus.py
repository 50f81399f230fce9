"""The table of GPUs, and plans for machines of it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dcpbench import cli
from dcpbench.errors import UsageError
from dcpbench.launch.progress import format_plan_note
from dcpbench.plan import grid
from dcpbench.plan.spec import make_planned_probe, make_spec
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.device_probe import Probe
from dcpbench.points.gpus import GPUS, Gpu, format_machine_label
from dcpbench.points.sizes import format_size

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "results").rglob("records.jsonl"))
ON_PAPER_GIB = {"A100": 80, "H20": 96, "H100": 80, "H200": 141, "B200": 180} | {  # GB on data sheets
    "B300": 270,
    "GB200": 186,
    "GB300": 279,
    "MI355X": 288,
}
for_each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


@for_each_gpu
def test_usable_memory_is_slightly_below_the_data_sheet(gpu: Gpu) -> None:
    """The driver takes 1 %: 79.2 of 80, 139.8 of 141, 178.3 of 180 are left."""
    assert 0.98 < gpu.memory_bytes / (ON_PAPER_GIB[gpu.name] << 30) < 1


@for_each_gpu
def test_rates_are_dense_and_in_one_direction(gpu: Gpu) -> None:
    """The fp8 rate is twice that of bf16, and a link is slower than memory; mixing rates with and without sparsity
    would violate this.
    """
    assert gpu.fp8_flop_s is None or gpu.fp8_flop_s == pytest.approx(2 * gpu.bf16_flop_s, rel=0.01)
    assert gpu.nvlink_bytes_s < gpu.memory_bytes_s / 5
    assert gpu.source
    assert gpu.memory_source


@pytest.mark.parametrize(
    ("name", "bits", "mhz"), [("A100", 5120, 1593), ("H100", 5120, 2619), ("B200", 7680, 3996)], ids=str
)
def test_memory_rate_equals_that_of_the_reported_bus(name: str, bits: int, mhz: int) -> None:
    """With two transfers a clock, 7,680 / 8 bytes × 2 × 3.996 GHz = 7.672 TB/s, less than the 8 of the B200's sheet."""
    (gpu,) = (gpu for gpu in GPUS if gpu.name == name)
    assert gpu.memory_bytes_s == pytest.approx(bits / 8 * 2 * mhz * 1e6, rel=1e-3)


def test_names_of_gpus_are_distinct() -> None:
    assert len({name for gpu in GPUS for name in (gpu.name, gpu.device)}) == 2 * len(GPUS)


def test_h200_memory_and_cache_equal_those_in_committed_records() -> None:
    """Records of servers, which have no sizes measured by torch, are left out; a plan and a run must not differ."""
    (h200,) = (gpu for gpu in GPUS if gpu.name == "H200")
    environments = [
        json.loads(line).get("environment") or {} for path in RECORDS for line in path.read_text().splitlines()
    ]
    measured = [e for e in environments if e.get("device") == h200.device and e.get("l2_bytes") is not None]
    found = {(e["device_memory_bytes"], e["l2_bytes"]) for e in measured}
    assert found == {(h200.memory_bytes, h200.l2_bytes)}


@for_each_gpu
def test_machines_command_prints_the_figures_of_the_table(
    gpu: Gpu, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit):
        cli.main(["machines"])
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    fp8 = "—" if gpu.fp8_flop_s is None else f"{gpu.fp8_flop_s / 1e12:,.0f}"
    rates = f"{gpu.memory_bytes_s / 1e12:.3g} {gpu.bf16_flop_s / 1e12:,.0f} {fp8} {gpu.nvlink_bytes_s / 1e9:.0f}"
    memory = f"{format_size(gpu.memory_bytes)} {gpu.l2_bytes / 2**20:.1f} MiB"
    assert f"{format_machine_label(gpu.name)} {gpu.gpus_per_host} {memory} {rates} {gpu.watts}" in rows


def test_unmeasured_machines_are_labelled_on_paper() -> None:
    """A machine file with measured calls is not on paper, independent of its GPU."""
    assert [gpu.name for gpu in GPUS if not gpu.on_paper] == ["H100", "H200"]
    assert format_machine_label("GB300+rdma-800") == load_machine("GB300+rdma-800").label == "GB300+rdma-800 (on paper)"
    assert format_machine_label("H200+rdma-400") == load_machine("H200+rdma-400").label == "H200+rdma-400"
    ours = msgspec.structs.replace(load_machine("B300"), calls=load_machine("H200").calls)
    assert (load_machine("B300").on_paper, ours.on_paper, ours.label) == (True, False, "B300")
    (b300,) = (gpu for gpu in GPUS if gpu.name == "B300")
    assert "known only from data sheets" in format_plan_note(b300, 8, 1)


def test_rack_is_one_host_of_72_gpus() -> None:
    assert [load_machine(name).gpus_per_host for name in ("H200", "B300", "GB200", "GB300", "MI355X")] == [
        8,
        8,
        72,
        72,
        8,
    ]
    assert load_machine("GB300").comm_model.predict_seconds("all-reduce", 16, 1 << 20).mean > 0


def test_amd_gpu_is_planned_without_cuda_libraries() -> None:
    probe = make_planned_probe("MI355X", 8)
    assert probe.packages == {}
    assert probe.gpu is not None
    assert "does not run CUDA" in format_plan_note(probe.gpu, 8, 1)


@pytest.mark.parametrize("typed", ["H200", "h200", " h200 ", "NVIDIA H200"])
def test_gpu_is_found_by_short_name_and_device_name(typed: str) -> None:
    probe = make_planned_probe(typed, 8)
    assert (probe.device, probe.count, probe.name) == ("cuda", 8, "NVIDIA H200")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            "h2000",
            "--gpu h2000 is unknown; did you mean H200? Known: A100, H20, H100, H200, B200, B300, GB200, GB300, MI355X.",
        ),
        (
            "",
            "--gpu is empty; type one of A100, H20, H100, H200, B200, B300, GB200, GB300 or MI355X, as in --gpu H200.",
        ),
        ("  ", "--gpu is empty; type one of A100"),
        ("nvidia nvidia h200", "is unknown. Known: A100"),
        ("mi300x" * 99, "Known: A100"),
    ],
    ids=["near", "empty", "blank", "twice", "long"],
)
def test_unknown_gpu_is_refused_with_known_names(typed: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        make_planned_probe(typed, 8)
    assert words in str(error.value)
    assert len(str(error.value)) < 300


def test_machine_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="--gpu count=0 is not positive; try count=8"):
        make_planned_probe("H200", 0)


@pytest.mark.parametrize("many", [73, 10**12, 10**400], ids=["73", "a-trillion", "400-digits"])
def test_more_gpus_than_an_nvlink_domain_are_refused(many: int) -> None:
    with pytest.raises(UsageError, match=r"is more than the 72 of the largest machine; for several, add --nodes") as e:
        make_planned_probe("H200", many)
    assert len(str(e.value)) < 300
    assert make_planned_probe("H200", 72).count == 72


def test_planned_machine_gives_the_same_plan_as_a_real_one() -> None:
    """The plans have the same bytes as those for the probe of such a machine, in bf16."""
    real = Probe(
        device="cuda",
        count=8,
        name="NVIDIA H200",
        memory_bytes=150_109_880_320,
        l2_bytes=60 << 20,
        capability="9.0",
        packages={"flashinfer": "0.6.18"},
    )
    plans = [
        [c.plan for c in grid.expand_grid(make_spec({"concurrency": 8}, probe), probe)]
        for probe in (make_planned_probe("H200", 8), real)
    ]
    assert plans[0] == plans[1]
    assert all(plan and plan.point.dtype == "bf16" for plan in plans[0])
