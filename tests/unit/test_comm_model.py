"""Test the communication model, machine files, and what `dcpbench bench calibrate` makes of benches."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from dcpbench import cli
from dcpbench.bench import calibration
from dcpbench.bench.shown import comm_model_fit
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.points import cluster_specs
from dcpbench.points.comm_model import (
    IN_STEP_FACTOR,
    Call,
    CommModel,
    Fit,
    Link,
    Prompts,
    Sample,
    _interpolate,
    fit_samples,
)
from dcpbench.points.gpus import GPUS
from dcpbench.records.record import Emulated
from dcpbench.serving.step_cases import Extent
from dcpbench.serving.step_times import LINE, StepTimes, write_step_times
from dcpbench.show import figure_style
from tests.unit.step_times_builder import make_step_times

RESULTS = Path(__file__).parents[2] / "results"
BENCHES = RESULTS / "decode-serving_2xH200_2026-11-26" / "wire"
FOUR, TWO = (
    RESULTS / "exchanges_H100-H200/kernels-exchanges_4xH200_2026-11-21",
    RESULTS / "emulation_H200/emulated-against-live_2xH200_2026-11-23",
)
BENCHES = [
    *(BENCHES / f"{bench}-{ranks}" for ranks in (2, 4) for bench in ("collectives", "exchange")),
    FOUR / "exchange-q-replicate",
]
OLDER = [FOUR / "exchange", TWO / "exchange-2"]  # used for calls that BENCHES lack
TRUE = Fit(launch_us=4.0, per_rank_us=0.8, us_per_byte=1 / 200e3)
SIZES = (10_000, 100_000, 1_000_000, 8_000_000)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    return int(end.value.code or 0), *capsys.readouterr()


def make_call(ranks: tuple[int, ...] = (2, 4), wrong: float = 0.0) -> Call:
    """Return a call with the times of TRUE, with every second sample off by a fraction."""
    samples = [
        Sample(n, m, size, TRUE.predict_us(n, m, size) * (1 + wrong * (i % 2)))
        for n in ranks
        for m in (1, 2)
        for i, size in enumerate(SIZES)
    ]
    return Call("made", tuple(samples))


def test_fit_recovers_known_parameters() -> None:
    """Recover launch time, time for each further rank, and bandwidth, from two numbers of ranks and of barriers."""
    found = fit_samples(make_call().samples)
    assert found.launch_us == pytest.approx(4.0)
    assert found.per_rank_us == pytest.approx(0.8)
    assert found.bytes_s == pytest.approx(200e9)


def test_fit_clips_a_negative_parameter_to_zero() -> None:
    """Fit calls that take less time the more ranks there are, so that a rank costs nothing."""
    found = fit_samples(
        [Sample(2, 1, 1000, 6.5), Sample(4, 1, 1000, 6.1), Sample(2, 1, 10**6, 12.0), Sample(4, 1, 10**6, 11.0)]
    )
    assert found.per_rank_us == 0
    assert found.launch_us > 0


def test_prediction_returns_measured_values_and_interpolates_between_them() -> None:
    """Check that measured values are returned even if the model misses them, because the residual is added."""
    call = make_call(wrong=0.1)
    for s in call.samples:
        assert call.predict_us(s.ranks, s.received_bytes, s.barriers) == pytest.approx(s.us, rel=1e-9)
    between = call.predict_us(2, 300_000)
    assert call.predict_us(2, 100_000) < between < call.predict_us(2, 1_000_000)


@pytest.mark.parametrize(("x", "y"), [(0.0, 5.0), (1.0, 5.0), (2.0, 6.0), (3.0, 7.0), (9.0, 7.0)])
def test_interpolation_is_linear_between_points_and_constant_outside(x: float, y: float) -> None:
    assert _interpolate(x, [(1.0, 5.0), (3.0, 7.0)]) == y


def test_errors_are_computed_with_each_measurement_left_out() -> None:
    """Expect the minimum error for exact samples and about the noise for noisy ones; two numbers of ranks are too few
    to measure the error over ranks.
    """
    assert max(make_call().compute_left_out_errors()) < 1e-9
    assert make_call().size_error == 0.01
    assert 0.05 < make_call(wrong=0.3).size_error < 0.3
    assert make_call((2, 4, 8)).ranks_error == 0.01
    assert 0.2 < make_call((2, 4)).ranks_error < 0.3


def test_error_grows_outside_the_measured_range() -> None:
    """Extrapolate over ranks, over sizes, and from a single number of ranks."""
    call = make_call(wrong=0.2)
    inside = call.estimate_error(4, 500_000)
    assert call.estimate_error(8, 500_000) == pytest.approx(inside + call.ranks_error)
    assert call.estimate_error(4, 32_000_000) == pytest.approx(inside + 2 * call.size_error)
    assert make_call((2,)).estimate_error(4, 500_000) >= 0.25


@pytest.mark.parametrize(
    ("ranks", "size", "barriers", "by_ranks", "by_size"),
    [
        (4, 500_000, 1, 0, 0),
        (8, 16_000_000, 2, 0, 0),
        (2, 500_000, 1, 1, 0),
        (32, 500_000, 1, 2, 0),
        (4, 32_000_000, 1, 0, 2),
        (4, 1_250, 1, 0, 2),
        (4, 2_500, 2, 0, 2),
        (16, 16_000_000, 1, 1, 1),
    ],
)
def test_each_doubling_or_halving_outside_the_range_adds_its_error(
    ranks: int, size: int, barriers: int, by_ranks: int, by_size: int
) -> None:
    """Extrapolate from measurements of 4 and 8 ranks and of 5,000 to 8,000,000 bytes a barrier."""
    call = make_call((4, 8), wrong=0.2)
    wider = by_ranks * call.ranks_error + (1 + by_size) * call.size_error
    assert call.estimate_error(ranks, size, barriers) == pytest.approx(wider)


def test_errors_without_measurements_have_assumed_values() -> None:
    """Assume 25 % a doubling for one number of ranks and 20 % for two sizes; no error is below 1 %."""
    one = Call("one", tuple(Sample(2, 1, size, TRUE.predict_us(2, 1, size)) for size in SIZES[:2]))
    assert (one.ranks_error, one.size_error) == (0.25, 0.2)
    assert (make_call().size_error, make_call((2, 4, 8)).ranks_error) == (0.01, 0.01)


def test_error_over_ranks_is_divided_by_the_number_of_doublings() -> None:
    """Measure 15 µs on 8 ranks where 10 are expected from 2 ranks, which is two doublings away."""
    far = tuple(Sample(n, 1, size, us) for n, us in ((2, 10.0), (8, 15.0)) for size in (1000, 2000, 4000))
    assert Call("far", far).ranks_error == pytest.approx((1 - 10 / 15) / 2)


def test_one_rank_takes_no_time_and_an_unknown_call_raises() -> None:
    """Check that the error lists the known calls."""
    comm_model = CommModel({"made": make_call()}, host=8)
    assert comm_model.predict_seconds("made", 1, 10**6).mean == 0
    with pytest.raises(UsageError, match=r"symm was not measured on this machine \(known: made\).*calibrate"):
        comm_model.predict_seconds("symm", 4, 1000)


def test_all_to_all_uses_one_link_and_ring_uses_all_links_between_hosts() -> None:
    """Check also that exchanges that read peers' memory are refused between hosts."""
    link = Link(name="x", bytes_s=50e9, latency_us=5.0, source="made up")
    comm_model = CommModel({name: make_call() for name in ("all-to-all", "all-gather", "symm")}, host=8, link=link)
    size = 64_000_000
    own, ring = comm_model.predict_seconds("all-to-all", 16, size), comm_model.predict_seconds("all-gather", 16, size)
    assert own.mean == pytest.approx(size * 8 / 15 / 40e9 + 5e-6)
    assert ring.mean < own.mean
    assert own.high == pytest.approx(2 * own.mean)
    with pytest.raises(
        UsageError, match="symm over 16 ranks leaves a host of 8 GPUs, and it reads the memory of peers"
    ):
        comm_model.predict_seconds("symm", 16, size)
    with pytest.raises(UsageError, match="no link between hosts is described"):
        CommModel(comm_model.calls, host=8).predict_seconds("all-gather", 16, size)


def test_ring_between_hosts_adds_the_latency_of_each_further_host() -> None:
    """Send 64 MB over 8 links of 1 GB/s at 80 %: 10 ms; three further hosts and two barriers: 6 messages of 5 µs."""
    link = Link(name="x", bytes_s=1e9, latency_us=5.0, source="made up")
    comm_model = CommModel({"all-gather": make_call(), "all-to-all": make_call()}, host=8, link=link)
    found = comm_model.predict_seconds("all-gather", 32, 64_000_000, 2)
    assert found.mean == pytest.approx(10e-3 + 30e-6)
    assert (found.low, found.high) == (pytest.approx(found.mean / 2), pytest.approx(found.mean * 2))
    small = comm_model.predict_seconds("all-to-all", 16, 1000, 2)
    assert small.mean == pytest.approx(make_call().predict_us(16, 1000, 2) * 1e-6 + 10e-6)
    assert comm_model.predict_seconds("all-gather", 8, 64_000_000).mean < 1e-3


def test_model_of_another_machine_scales_the_rate_and_widens_the_error() -> None:
    """Double the links' rate, which halves the time of the bytes; the error includes that of the scaling."""
    call, size = make_call(), 1_000_000
    comm_model = CommModel({"made": call}, host=8, scale=2.0, borrowed=0.1)
    us, bytes_us = call.predict_us(2, size), size / 200e3
    found = comm_model.predict_seconds("made", 2, size)
    assert found.mean == pytest.approx((us - bytes_us / 2) * 1e-6)
    error = call.estimate_error(2, size) + 0.1 + us / (us - bytes_us / 2) - 1
    assert found.high / found.mean == pytest.approx(1 + error)
    assert found.mean / found.low == pytest.approx(1 + error)


def test_faster_links_shorten_only_the_transfer_time() -> None:
    """Predict for B200, which has no measurement of its own, so that the band includes the time measured on H200."""
    here, there = (
        cluster_specs.load_machine(name).comm_model.predict_seconds("symm", 4, 20_000_000, 2)
        for name in ("H200", "B200")
    )
    assert here.mean / 2 < there.mean < here.mean
    assert there.high > here.mean
    small = [
        cluster_specs.load_machine(name).comm_model.predict_seconds("symm", 4, 1000, 2).mean
        for name in ("H200", "B200")
    ]
    assert small[1] == pytest.approx(small[0], rel=0.05)


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_every_known_gpu_is_a_machine_with_predictions(gpu: str) -> None:
    """Check that other GPUs have a wider error band than H200, and that a link can be named."""
    machine = cluster_specs.load_machine(f"{gpu}+rdma-400")
    assert machine.card.name == gpu
    inside, own = (
        machine.comm_model.predict_seconds("a2a", 8, 10**6, 2),
        cluster_specs.load_machine("H200").comm_model.predict_seconds("a2a", 8, 10**6, 2),
    )
    assert inside.low < inside.mean < inside.high
    assert gpu == "H200" or inside.high / inside.mean > own.high / own.mean
    assert machine.comm_model.predict_seconds("a2a", 16, 10**6, 2).mean > inside.mean


def test_compute_is_scaled_by_the_ratio_of_the_named_rate() -> None:
    """Scale H200's reads to H100 by 4.8 / 3.35, and refuse fp8 on A100, which has none."""
    h200 = cluster_specs.load_machine("H200").card
    ratio, error = cluster_specs.load_machine("H100").compute_scale("read", h200)
    assert ratio == pytest.approx(4.8 / 3.35)
    assert 0.1 < error < 0.2
    assert cluster_specs.load_machine("H200").compute_scale("matmul", h200) == (1.0, 0.0)
    with pytest.raises(UsageError, match="A100 has no matmul_fp8 rate"):
        cluster_specs.load_machine("A100").compute_scale("matmul_fp8", h200)


def test_built_in_model_equals_the_calibration_of_the_kept_records() -> None:
    """Compare the file in the package with the calibration of results/."""
    records, older = calibration.read_records(BENCHES), calibration.read_records(OLDER)
    calls = calibration.collect_samples(older) | calibration.collect_samples(records)
    assert calls == cluster_specs.load_built_in("H200").calls
    assert calibration.describe_hardware([*records, *older]) == ("H200", cluster_specs.load_built_in("H200").measured)


def test_machine_file_round_trips(tmp_path: Path) -> None:
    """Write a machine with its own link and with special characters in its name."""
    link = Link(name="our fabric", bytes_s=25e9, latency_us=6.0, source="ib_write_bw")
    made_up = cluster_specs.Machine(
        name='a "b" ü',
        gpu="H200",
        gpus_per_host=4,
        link=link,
        prompts=[Prompts(128, 1.01), Prompts(4096, 1.05)],
        calls={"a2a": [Sample(2, 2, 10, 1.5)]},
    )
    path = tmp_path / "machine.toml"
    path.write_text(cluster_specs.format_machine(made_up))
    found = cluster_specs.load_machine(str(path))
    assert len(found.sha256) == 64
    assert msgspec.structs.replace(found, sha256="") == made_up


GOOD = 'name = "x"\ngpu = "H200"\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('gpu = "H200"\n', "missing required field `name`"),
        ('name = "x"\ngpu = "H300"\n', "gpu = 'H300' is none of A100"),
        (GOOD + "gpus_per_host = 0\n", "gpus_per_host = 0: write how many"),
        (GOOD + 'gpus_per_host = "8"\n', "gpus_per_host: Expected `int`, got `str`"),
        (GOOD + 'link = "token-ring"\n', "link = 'token-ring' is none of rdma-400"),
        (
            GOOD + '[link]\nname = "x"\nbytes_s = 1e9\nsource = "y"\n',
            "link: Object missing required field `latency_us`",
        ),
        (
            GOOD + '[link]\nname = "x"\nbytes_s = -1.0\nlatency_us = 1.0\nsource = "y"\n',
            "link: bytes_s and latency_us are positive",
        ),
        (GOOD + "nvlink = 3\n", "unknown field `nvlink`"),
        (
            GOOD + "prompts = [[128, 1.01], [128, 1.02]]\n",
            "prompts[1] = [128, 1.02] cannot be: each has more prompt tokens",
        ),
        (GOOD + "prompts = [[128, 0.0]]\n", "prompts[0] = [128, 0] cannot be"),
        (GOOD + "prompts = [[128]]\n", "prompts"),
        (GOOD + "[calls]\na2a = []\n", "calls.a2a is empty"),
        (GOOD + "[calls]\na2a = [[2, 1, 100]]\n", "calls"),
        (GOOD + "[calls]\na2a = [[1, 1, 100, 2.0]]\n", r"calls.a2a[0] = [1, 1, 100, 2] cannot be"),
        (GOOD + "[calls]\na2a = [[2, 1, 100, -2.0]]\n", r"calls.a2a[0] = [2, 1, 100, -2] cannot be"),
        ("name = \n", "is not valid TOML"),
        ("name = " + "[" * 3000, "is not valid TOML: it is nested too deep"),
        ("\xff", "is not valid TOML"),
    ],
)
def test_invalid_machine_file_raises_an_error_with_file_and_field(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError) as error:
        cluster_specs.read_machine(path)
    assert expected in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["H2000", "", "H200+", "H200+sneakernet", "nowhere.toml"])
def test_unknown_machine_raises_an_error_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"rdma-400|dcpbench bench calibrate writes such a file"):
        cluster_specs.load_machine(name)


def test_calibrate_writes_a_machine_file_and_a_picture_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calibrate from folders of benches with --json."""
    out = tmp_path / "m.toml"
    code, printed, _ = run(
        capsys, "bench", "calibrate", *map(str, BENCHES), "-o", str(out), "--link", "rdma-400", "--json"
    )
    assert code == 0
    summary = json.loads(printed)
    assert {row["call"] for row in summary["calls"]} >= {"all-gather", "a2a", "symm"}
    assert cluster_specs.read_machine(out).link == "rdma-400"
    assert out.with_suffix(".png").stat().st_size > 10_000
    code, _, error = run(capsys, "bench", "calibrate", str(BENCHES[0]), "-o", str(out))
    assert code == 2
    assert "would be written over; add --force" in error


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-o", "there"], "there is a folder; name another file with --out"),
        (["-o", "none/m.toml"], "none/m.toml cannot be written: there is no folder none; name another file with --out"),
        (["-o", "m.png"], "m.png is the name of its picture; name another file with --out"),
        (["--gpus-per-host", "0"], "Invalid value for '--gpus-per-host'"),
        (["--link", "string"], "link = 'string' is none of rdma-400"),
        (["--gpu", "H2000"], "gpu = 'H2000' is none of A100"),
    ],
)
def test_calibrate_rejects_invalid_options_before_measuring(
    options: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Reject options first, because measuring takes minutes; measuring itself would fail here with exit code 3, for
    want of GPUs.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    code, _, error = run(capsys, "bench", "calibrate", "--force", *options)
    assert code == 2
    assert expected in error
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_calibrate_names_missing_calls_and_the_command_that_measures_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calibrate from exchanges alone, which cannot emulate tensor parallelism; the suggested command's bench completes
    the file.
    """
    collectives, exchange = BENCHES[0], TWO / "exchange-2"
    code, printed, message = run(capsys, "bench", "calibrate", str(exchange), "-o", str(tmp_path / "m.toml"), "--json")
    assert code == 0
    lacks = ["all-gather", "reduce-scatter", "all-to-all", "all-reduce", "all-reduce-symm"]
    assert json.loads(printed)["lacks"] == lacks
    words = message.partition("GPUs: dcpbench ")[2].partition(", and name")[0].split()
    assert words[:4] == ["bench", "collectives", "--variant", ",".join(lacks)]
    assert words[-2:] == ["-o", "FOLDER"]
    measured = cluster_specs.read_machine(tmp_path / "m.toml").calls.values()
    assert int(words[words.index("--ranks") + 1]) == max(sample.ranks for samples in measured for sample in samples)
    _, _, message = run(
        capsys, "bench", "calibrate", str(collectives), str(exchange), "-o", str(tmp_path / "whole.toml")
    )
    assert "all-gather" not in message


def make_emulated(times: StepTimes, shorter: float) -> StepTimes:
    """Return step times as of one emulating GPU: steps with prompts are shorter by a factor."""
    scaled = times.apply_factors(1.0, 1 / shorter)
    emulation = Emulated(machine="H200", calls=3, comm_us=1.0, comm_low_us=1.0, comm_high_us=1.0)
    return msgspec.structs.replace(scaled, emulated=emulation, path=times.path | {"emulate": "machine.toml"})


def write_run(folder: Path, times: StepTimes) -> Path:
    """Write a run with these step times, and return its folder."""
    write_step_times(folder / "step-times" / "tiny.json", times)
    return folder


SMALL = Extent(requests=4, context=300, pages=100, virtual_page=64, chunk=256, targets=(2,), prompts=(200,))


def test_calibrate_measures_how_much_longer_prompts_take_on_all_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expect 1.04, the median of 1.05 and 1.03 from two emulating GPUs; the calls of the given machine file are kept."""
    live = make_step_times(SMALL)
    runs = [write_run(tmp_path / "live", live)]
    runs += [write_run(tmp_path / f"gpu-{shorter}", make_emulated(live, shorter)) for shorter in (1.05, 1.03)]
    first, out = tmp_path / "first.toml", tmp_path / "out.toml"
    assert run(capsys, "bench", "calibrate", *map(str, BENCHES[:1]), "-o", str(first))[0] == 0
    code, printed, message = run(capsys, "bench", "calibrate", str(first), *map(str, runs), "-o", str(out), "--json")
    assert code == 0, message
    made, before = cluster_specs.read_machine(out), cluster_specs.read_machine(first)
    assert {p.times for p in made.prompts} == {1.04}
    assert [p.tokens for p in made.prompts] == sorted(
        {m.case.compute_work().tokens for m in live.select_cases(LINE)} - {0}
    )
    assert [[p.tokens, p.times] for p in made.prompts] == json.loads(printed)["prompts"]
    assert msgspec.structs.replace(made, prompts=[], sha256="") == msgspec.structs.replace(before, sha256="")
    again = run(capsys, "bench", "calibrate", str(out), "--name", "ours", "-o", str(out), "--force")
    assert again[0] == 0
    assert "up to 1.040 times as long on these GPUs as on one emulating GPU" in again[2]
    assert (cluster_specs.read_machine(out).name, cluster_specs.read_machine(out).prompts) == ("ours", made.prompts)


def test_calibrate_accepts_a_folder_with_benches_and_step_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = make_step_times(SMALL)
    write_run(tmp_path / "all" / "live", live)
    write_run(tmp_path / "all" / "alone", make_emulated(live, 1.05))
    shutil.copytree(BENCHES[0], tmp_path / "all" / "bench")
    code, _, message = run(capsys, "bench", "calibrate", str(tmp_path / "all"), "-o", str(tmp_path / "m.toml"))
    assert code == 0, message
    made = cluster_specs.read_machine(tmp_path / "m.toml")
    assert made.calls == calibration.collect_samples(calibration.read_records([BENCHES[0]]))
    assert {p.times for p in made.prompts} == {1.05}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["live"], "can be held against nothing: measure step times of the same layout and load with --emulate"),
        (
            ["alone"],
            "can be held against nothing: measure step times of the same layout and load on the GPUs themselves",
        ),
        (["live", "other"], "can be held against nothing"),
        (["cpu"], "was measured on a CPU, and CPU times say nothing about GPUs; leave it out."),
        (["machine", "machine2"], "a machine's file cannot be combined with others; name one such file, or benches."),
        (["machine"], "machine.toml has no [calls] that were measured; name benches, or a file that has."),
    ],
)
def test_calibrate_rejects_step_times_without_a_counterpart(
    files: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = make_step_times(SMALL)
    made = {
        "live": live,
        "alone": make_emulated(live, 1.05),
        "other": msgspec.structs.replace(make_emulated(live, 1.05), path=live.path | {"tp": 8}),
        "cpu": make_step_times(SMALL, device="CPU"),
    }
    paths = [write_run(tmp_path / name, made[name]) if name in made else tmp_path / f"{name}.toml" for name in files]
    for path in paths:
        if path.suffix == ".toml":
            path.write_text(GOOD)
    code, _, error = run(capsys, "bench", "calibrate", *map(str, paths), "-o", str(tmp_path / "m.toml"))
    assert code == 2
    assert expected in error
    assert not (tmp_path / "m.toml").exists()


def test_bench_named_twice_counts_once() -> None:
    """Count a bench once: its sizes would otherwise predict themselves without an error."""
    assert calibration.read_records([BENCHES[0], BENCHES[0]]) == calibration.read_records([BENCHES[0]])


def test_calibrate_rejects_a_bench_with_another_schema_version(tmp_path: Path) -> None:
    content = json.loads((BENCHES[0] / "bench-collectives.json").read_text())
    path = tmp_path / "bench-collectives.json"
    path.write_text(json.dumps(content | {"schema_version": 99}))
    with pytest.raises(UsageError, match="schema_version 99, while this dcpbench reads 1"):
        calibration.read_records([path])


def test_name_of_machine_for_another_gpu_names_the_measured_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.toml"
    code, _, _ = run(capsys, "bench", "calibrate", str(BENCHES[0]), "--gpu", "H100", "-o", str(out))
    assert code == 0
    assert cluster_specs.read_machine(out).name == "H100, its communication measured on H200"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is no record of a bench"),
        ("{}", "is no record of a bench"),
        ('{"bench": "moe", "performance": true}', "no times of bench"),
    ],
)
def test_calibrate_rejects_files_without_a_bench_between_ranks(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "bench-exchange.json"
    path.write_text(content)
    with pytest.raises(DcpbenchError, match=expected):
        calibration.read_records([path])
    with pytest.raises(DcpbenchError, match="No such file"):
        calibration.read_records([tmp_path / "none.json"])
    with pytest.raises(DcpbenchError, match=r"no times of bench|is no record"):
        calibration.read_records([tmp_path])


def test_calibrate_rejects_benches_of_different_gpus(tmp_path: Path) -> None:
    shutil.copy(BENCHES[0] / "bench-collectives.json", tmp_path / "bench-collectives.json")
    other = json.loads((BENCHES[1] / "bench-exchange.json").read_text())
    other["environment"]["device"] = "NVIDIA H100 80GB HBM3"
    (tmp_path / "bench-exchange.json").write_text(json.dumps(other))
    with pytest.raises(UsageError, match="NVIDIA H100 80GB HBM3 and NVIDIA H200; calibrate each"):
        calibration.collect_samples(calibration.read_records([tmp_path]))


def test_calibrate_leaves_out_wrong_results(tmp_path: Path) -> None:
    record = json.loads((BENCHES[0] / "bench-collectives.json").read_text())
    right = calibration.collect_samples(calibration.read_records([BENCHES[0]]))
    for result in record["results"]:
        result["correct"] = result["case"]["variant"] != "all-gather"
    (tmp_path / "bench-collectives.json").write_text(json.dumps(record))
    assert right.keys() - calibration.collect_samples(calibration.read_records([tmp_path])).keys() == {"all-gather"}


def test_machines_command_lists_built_in_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the list as text and as JSON."""
    code, printed, _ = run(capsys, "machines")
    assert code == 0
    assert all(word in printed for word in ("B200", "rdma-800", "Nothing was measured between hosts"))
    listed = json.loads(run(capsys, "machines", "--json")[1])
    assert [gpu["name"] for gpu in listed["gpus"]] == [gpu.name for gpu in GPUS]


def test_collectives_in_steps_take_longer_by_the_lateness_factor():
    """Apply one factor to collectives of any number of ranks, and none to exchanges."""
    comm_model = CommModel({"made": make_call(), "symm": dataclasses.replace(make_call(), name="symm")}, host=8)
    alone, late = (of.predict_seconds("made", 2, 10**6) for of in (comm_model, comm_model.in_step))
    assert (late.mean / alone.mean, late.high / alone.high) == pytest.approx((IN_STEP_FACTOR, IN_STEP_FACTOR))
    assert comm_model.in_step.predict_seconds("symm", 2, 10**6) == comm_model.predict_seconds("symm", 2, 10**6) == alone


def test_picture_names_each_curve_by_ranks_and_barriers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [Call(name, tuple(samples)) for name, samples in cluster_specs.load_built_in("H200").calls.items()]
    drawn = []
    monkeypatch.setattr(figure_style, "save_figure", lambda figure, *_: drawn.append(figure))
    comm_model_fit.write_picture(calls, tmp_path / "x.png", "Title")
    for call, ax in zip(calls, drawn[0].axes, strict=True):
        pairs = {(s.ranks, s.barriers) for s in call.samples}
        labels = [line.get_label() for line in ax.lines]
        assert len(labels) == len(set(labels)) == len(pairs) + len(call.ranks)
        several = len({barriers for _, barriers in pairs}) > 1
        assert sum("barrier" in label for label in labels) == (len(pairs) if several else 0)
