"""Emulation of a layout by one rank: it holds a rank's share, its collectives are modelled, and its records are marked
as emulated.
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from dcpbench import cli
from dcpbench.engine.groups import make_emulated_groups
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.exchange import ExchangeSpec, make_exchange
from dcpbench.exchange.emulated import Emulation
from dcpbench.kernels.moe.busiest import rotate_busiest_first
from dcpbench.kernels.moe.routing import NO_EXPERT
from dcpbench.measuring.environment import collect_environment
from dcpbench.measuring.gpu_state import GpuSampler
from dcpbench.models import SHAPES
from dcpbench.plan import grid, validate
from dcpbench.plan.serve_spec import make_serve_spec
from dcpbench.plan.spec import make_planned_probe, make_spec
from dcpbench.points.budget import plan_engine
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.comm_model import CallTime, CommModel
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.point import Load, Point
from dcpbench.points.roofline import Sharding
from dcpbench.points.settings import Settings
from dcpbench.records.record import Gpu, Kv
from dcpbench.workloads import decode, replay_job, serve
from dcpbench.workloads.session import build_session
from tests.unit import serve_record_builder as served

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

CPU, TINY = torch.device("cpu"), SHAPES["tiny"]
PROBE = Probe(device="cpu", count=0, name="CPU")
ONE_GPU = make_planned_probe("H200", 1)


@dataclasses.dataclass
class CountingNetwork:
    """A network model that records its calls."""

    requested: list[tuple[str, int, int, int]] = dataclasses.field(default_factory=list)

    def predict_seconds(self, what: str, ranks: int, received_bytes: int, barriers: int = 1) -> CallTime:
        """Return a nanosecond for each byte, with an interval from half to twice as much."""
        self.requested.append((what, ranks, received_bytes, barriers))
        return CallTime.from_mean(received_bytes * 1e-9, 1.0)


def make_point(layout: Layout, exchange: str = "none", **changes: object) -> Point:
    """Make an emulated point of the tiny model."""
    same = {
        "model": "tiny",
        "backend": "reference",
        "dtype": "fp32",
        "concurrency": 6,
        "context": 40,
        "emulate": "H200",
    }
    return Point(tp=layout.tp, dp=layout.dp, dcp=layout.dcp, exchange=exchange, **(same | changes))  # type: ignore[arg-type]


def measure(emulated_point: Point) -> Record:
    """Measure one point in this process alone."""
    settings = Settings(seconds=0.05, profile=False)
    plan = plan_engine([emulated_point], settings, TINY, PROBE)
    with torch.inference_mode():
        session = build_session(emulated_point, TINY, plan, rank=0, device=CPU, seed=0)
        return decode.run(session, emulated_point, settings, collect_environment(CPU, "x"), tell=lambda _: None)


def count_calls(layout: Layout, exchange: str) -> int:
    """Return the number of collectives in a step: of the embedding, of each layer, and of choosing a token."""
    reduces, merges = int(layout.attn_tp > 1), 0 if exchange == "none" else 2
    return reduces + TINY.layers * (2 * reduces + merges + 2 * (layout.dp > 1)) + reduces


@pytest.mark.parametrize(
    ("layout", "exchange"),
    [
        (Layout(8), "none"),
        (Layout(8, dcp=8), "ag_rs"),
        (Layout(8, dcp=8), "a2a"),
        (Layout(8, dcp=4), "symm"),
        (Layout(4, dp=4), "none"),
        (Layout(8, dp=2, dcp=2), "a2a"),
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_step_of_any_layout_runs_on_one_rank_and_is_marked_emulated(layout: Layout, exchange: str) -> None:
    """Every collective is counted, the KV pool is that of one rank of the layout, and the modelled network time is
    recorded.
    """
    emulated_point = make_point(layout, exchange)
    record = measure(emulated_point)
    assert record.outcome == "ok"
    assert "emulated" in record.warnings
    assert not {"inaccurate", "graph_differs", "oversubscribed"} & {*record.warnings}
    emulated = record.emulated
    assert emulated is not None
    assert emulated.calls == count_calls(layout, exchange)
    assert 0 < emulated.comm_low_us < emulated.comm_us < emulated.comm_high_us
    assert "NVIDIA H200" in emulated.measured
    real_point = msgspec.structs.replace(emulated_point, emulate="")
    plan = plan_engine([real_point], Settings(), TINY, PROBE)
    own = Kv.from_plan(plan, 41)
    assert record.kv is not None
    assert record.kv.bytes_per_token_per_gpu == own.bytes_per_token_per_gpu
    again = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
    assert again.emulated == emulated
    assert again.point.world == 1
    assert again.point.tp == layout.tp


@pytest.mark.parametrize("exchange", ["ag_rs", "a2a", "symm"])
@pytest.mark.parametrize(("project_first", "q_replicate"), [(False, False), (True, False), (False, True)])
def test_emulated_exchange_takes_the_modelled_time_of_its_bytes(
    exchange: str, project_first: bool, q_replicate: bool
) -> None:
    """The exchange sends the bytes of its formula: q (N−1)/N·H·Q, o (N−1)/N·H·R, lse. Its output is finite and has the
    shape that the next layers take.
    """
    ranks, batch, heads, width, value = 4, 3, 16, 24, 128
    network = CountingNetwork()
    emulation = Emulation(network)  # type: ignore[arg-type]
    groups = make_emulated_groups(Layout(8, dcp=ranks), 0, emulation)
    spec = ExchangeSpec(
        batch=batch,
        heads=heads,
        width=width,
        value=value,
        dtype=torch.bfloat16,
        device=CPU,
        project_first=project_first,
        q_replicate=q_replicate,
    )
    made = make_exchange(exchange, groups.dcp, spec)
    others, own = ranks - 1, batch * heads // ranks
    q_bytes, o_numbers, lse_bytes = others * own * width * 2, others * own * value, others * own * 4
    o_bytes = o_numbers * 4 + lse_bytes * ranks if exchange == "ag_rs" else o_numbers * 2 + lse_bytes
    q = made.gather_q(made.get_query_buffer(batch).normal_())
    assert emulation.tally.us == pytest.approx(0.0 if q_replicate else q_bytes / 1e3)
    o, lse = made.get_partial_buffers(batch)
    merged = made.merge_partials(o.normal_(), lse.normal_())
    tally = emulation.tally
    expected_us = o_bytes / 1e3 + (0.0 if q_replicate else q_bytes / 1e3)
    assert (tally.us, tally.low_us, tally.high_us) == pytest.approx((expected_us, expected_us / 2, expected_us * 2))
    assert q.shape == (batch, heads, width)
    assert merged.shape == (heads // ranks, batch, value)
    assert torch.isfinite(q.float()).all()
    assert torch.isfinite(merged.float()).all()
    gather = "symm" if exchange == "symm" else "all-gather"
    both = [(exchange, ranks, q_bytes + o_bytes, 2), (gather, ranks, q_bytes, 1)]
    assert network.requested == (2 * [(exchange, ranks, o_bytes, 1)] if q_replicate else 3 * both)


def test_exchange_without_measured_times_is_refused() -> None:
    """The refusal lets `--exchange auto` skip the exchange."""
    spec = ExchangeSpec(batch=1, heads=4, width=8, value=8, dtype=torch.bfloat16, device=CPU)
    groups = make_emulated_groups(Layout(2, dcp=2), 0, Emulation(CommModel({}, host=8)))
    with pytest.raises(UsageError, match="symm was not measured"):
        make_exchange("symm", groups.dcp, spec)


def test_gathering_queries_takes_at_most_the_whole_exchange() -> None:
    """If the models of the two disagree, merging takes no time, and never a negative one."""
    spec = ExchangeSpec(batch=1, heads=4, width=8, value=8, dtype=torch.bfloat16, device=CPU)

    slow = SimpleNamespace(
        predict_seconds=lambda what, *_, **__: CallTime.from_mean(9e-6 if what == "all-gather" else 4e-6, 1.0)
    )
    emulation = Emulation(slow)  # type: ignore[arg-type]
    made = make_exchange("ag_rs", make_emulated_groups(Layout(2, dcp=2), 0, emulation).dcp, spec)
    made.gather_q(made.get_query_buffer(1).normal_())
    assert emulation.tally.us == pytest.approx(4.0)
    o, lse = made.get_partial_buffers(1)
    made.merge_partials(o.normal_(), lse.normal_())
    assert emulation.tally.us == pytest.approx(4.0)


def test_emulated_collectives_use_the_groups_of_the_layout() -> None:
    """A sum leaves x unchanged, and all gathered parts are those of this rank."""
    network = CountingNetwork()
    groups = make_emulated_groups(Layout(8, dp=2), 0, Emulation(network))  # type: ignore[arg-type]
    x = torch.arange(24.0).view(4, 6)
    assert torch.equal(groups.attn.all_reduce(x.clone()), x)
    assert torch.equal(groups.dp.all_gather(x), torch.stack([x, x]))
    assert torch.equal(groups.dp.reduce_scatter(x), x[:2])
    assert network.requested == [
        ("all-reduce", 4, 2 * 3 * x.nbytes // 4, 1),
        ("all-gather", 2, x.nbytes, 1),
        ("reduce-scatter", 2, x.nbytes // 2, 1),
    ]
    assert groups.dcp.size == 1
    assert groups.dcp.all_reduce(x) is x


@pytest.mark.parametrize(("experts", "ranks", "tokens", "k"), [(16, 4, 3, 2), (256, 8, 32, 8), (384, 16, 5, 8)])
def test_routing_of_the_busiest_rank_is_rotated_to_this_rank(experts: int, ranks: int, tokens: int, k: int) -> None:
    """This rank gets as many active experts and as many rows as the busiest rank, and no row of another rank is lost."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=random)[:k] for _ in range(tokens)])
    turned = rotate_busiest_first(ids, experts, ranks)
    experts_of_ranks = [{int(i) for i in ids.flatten() if int(i) * ranks // experts == rank} for rank in range(ranks)]
    mine = {int(i) for i in turned.flatten() if int(i) * ranks // experts == 0}
    assert len(mine) == max(map(len, experts_of_ranks))
    assert sorted(turned.flatten().bincount(minlength=experts)) == sorted(ids.flatten().bincount(minlength=experts))


def test_tokens_without_an_expert_do_not_count_as_load(device: torch.device) -> None:
    """The second of four ranks has two experts, as the last has; NO_EXPERT would be a third one of the last, and stays
    NO_EXPERT.
    """
    ids = torch.tensor([[4, 5], [NO_EXPERT, NO_EXPERT], [12, 13]], dtype=torch.int32, device=device)
    assert rotate_busiest_first(ids, 16, 4).tolist() == [[0, 1], [NO_EXPERT, NO_EXPERT], [8, 9]]


def test_expert_parallel_layout_computes_experts_of_the_busiest_rank() -> None:
    """Each layer has as many experts as the busiest rank of the real layout."""
    emulated_point = make_point(Layout(4, dp=4), ep="tp", concurrency=8)
    settings = Settings(seconds=0.05, profile=False)
    plan = plan_engine([emulated_point], settings, TINY, PROBE)
    with torch.inference_mode():
        session = build_session(emulated_point, TINY, plan, rank=0, device=CPU, seed=0)
        assert session.engine.model.stands_for == 4
        record = decode.run(session, emulated_point, settings, collect_environment(CPU, "x"), tell=lambda _: None)
        random = torch.Generator().manual_seed(1)
        ids = torch.stack([torch.randperm(TINY.experts, generator=random)[: TINY.top_k] for _ in range(8)])
    sharding = Sharding.from_point(emulated_point, TINY)
    most = max(load.active_experts for load in sharding.count_expert_loads(ids.flatten().tolist()))
    first = TINY.experts // 4
    assert len({int(i) for i in rotate_busiest_first(ids, TINY.experts, 4).flatten() if i < first}) == most
    assert record.conditions is not None
    assert record.conditions.busiest_rank_experts is not None


def get_refusal(**options: object) -> str:
    """Return the message that refuses all points on one H200."""
    with pytest.raises(DcpbenchError) as error:
        grid.require_runnable(grid.expand_grid(make_spec({"concurrency": "8"} | options, ONE_GPU), ONE_GPU, 1))
    return str(error.value)


def test_emulate_option_lets_one_gpu_run_layouts_of_many() -> None:
    """Without the option, the message that refuses the layouts names it at its end."""
    refusal = get_refusal(tp="8", dcp="8")
    assert "needs 8 GPUs and there are 1" in refusal
    assert refusal.endswith("To forecast tp8·dcp8 from one GPU, add --emulate H200.")
    found = grid.expand_grid(
        make_spec({"tp": "8", "dcp": "8", "emulate": "H200", "concurrency": "8"}, ONE_GPU), ONE_GPU, 1
    )
    assert [str(c.point.layout) for c in found if c.error is None] == ["tp8", "tp8·dcp8"]
    assert {c.point.world for c in found} == {1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"emulate": "H2000"}, "'H2000' is no machine that is known"),
        ({"emulate": "H200", "exchange": "ag_rs_registered"}, "ag_rs_registered cannot be emulated"),
        ({"emulate": "H200", "tp": "16", "dcp": "16"}, "over 16 ranks leaves a host of 8 GPUs, and no link"),
        (
            {"emulate": "H200", "tp": "16", "dcp": "16"},
            "use a machine with +LINK, such as H200+rdma-400, a file with link, or",
        ),
        ({"tp": "16", "dcp": "16"}, "To forecast tp16·dcp16 from one GPU, add --emulate H200+rdma-400."),
        (
            {"emulate": "H200+rdma-400", "tp": "16", "dcp": "16", "exchange": "symm"},
            "it reads the memory of peers; use another exchange",
        ),
    ],
)
def test_impossible_emulation_is_refused_with_advice(options: dict[str, object], expected: str) -> None:
    assert expected in get_refusal(**({"tp": "8", "dcp": "8"} | options))


@pytest.mark.parametrize(
    ("left_out", "exchange", "expected"),
    [
        ("a2a", "a2a", "a2a was not measured"),
        ("ag_rs", "ag_rs", "ag_rs was not measured"),
        ("all-gather", "a2a", "all-gather was not measured"),
        ("reduce-scatter", "ag_rs", ""),
        ("all-to-all", "a2a", ""),
    ],
)
def test_machine_file_needs_times_of_the_exchange_and_of_its_gather(
    left_out: str, exchange: str, expected: str, tmp_path: Path
) -> None:
    """The other collectives of an exchange are not needed. Missing times are refused before an engine is built."""
    calls = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "ag_rs", "a2a")
    rows = "".join(f"    [{ranks}, 1, 100000, 20.0],\n" for ranks in (2, 8))
    file = tmp_path / "m.toml"
    known = "".join(f"{call} = [\n{rows}]\n" for call in calls if call != left_out)
    file.write_text(f'name = "ours"\ngpu = "H200"\n[calls]\n{known}')
    options = {"tp": "8", "dcp": "8", "exchange": exchange, "emulate": str(file), "concurrency": "8"}
    found = grid.expand_grid(make_spec(options, ONE_GPU), ONE_GPU, 1)
    (error,) = [c.error for c in found if c.point.dcp == 8]
    assert expected in str(error) if expected else error is None


def test_served_loads_are_emulated_in_replay_mode_only() -> None:
    """An emulated rank computes no answers that could be served."""
    options = {"emulate": "H200", "tp": "8", "dcp": "8", "requests": None, "concurrency": "8"}
    given = {name: value for name, value in options.items() if value is not None}
    spec = make_serve_spec(given, ONE_GPU)
    with pytest.raises(UsageError, match="one has no answers; add --mode replay"):
        grid.require_runnable(grid.expand_grid(spec, ONE_GPU, 1))
    found = grid.expand_grid(make_serve_spec(given | {"mode": "replay"}, ONE_GPU), ONE_GPU, 1)
    assert [(str(c.point.layout), c.error) for c in found] == [("tp8", None), ("tp8·dcp8", None)]


@pytest.mark.parametrize(
    ("layout", "exchange", "ep"),
    [(Layout(8, dp=2, dcp=2), "symm", "tp")],
    ids=str,
)
def test_served_load_is_replayed_with_step_times_of_an_emulated_rank(
    layout: Layout, exchange: str, ep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load includes chunked prompts after stored prefixes; the step times keep the state of their GPU."""
    gpu = Gpu(sm_clock_mhz_min=1830, sm_clock_mhz_max=1980, power_w_max=612.0, temperature_c_max=61)
    monkeypatch.setattr(GpuSampler, "get_state", lambda _: gpu)
    load = Load(mode="replay", requests=3, input_tokens="20", output_tokens="3", chunk=16)
    emulated_point = make_point(
        layout, exchange, workload="serve", load=load, context=23, concurrency=2, ep=ep, page_size=1
    )
    settings = Settings(profile=False)
    plan = plan_engine([emulated_point], settings, TINY, PROBE)
    with torch.inference_mode():
        session = build_session(emulated_point, TINY, plan, rank=0, device=CPU, seed=0)
        serving = serve.get_serving(session, emulated_point)
        here, known = collect_environment(CPU, "x"), {}  # type: ignore[var-annotated]
        record = replay_job.run(
            serving, emulated_point, [emulated_point], settings, here, tmp_path, known, tell=lambda *_, **__: None
        )
    (times,) = known.values()
    assert "emulated" in record.warnings
    assert record.emulated is not None
    assert record.emulated.calls == count_calls(layout, exchange)
    assert record.emulated.output_tok_s_low == record.emulated.output_tok_s_high
    assert record.serve is not None
    assert record.emulated.ttft_p50_ms_low == record.emulated.ttft_p50_ms_high == record.serve.ttft_ms.p50
    assert record.emulated.itl_p50_ms_low == record.emulated.itl_p50_ms_high == record.serve.itl_ms.p50
    assert (record.serve.finished, record.serve.output_tokens) == (3, 9)
    assert {m.floor_ms for m in times.cases} == {None}
    assert times.path["emulate"] == "H200"
    assert times.gpu == gpu


def test_step_times_are_replayed_without_the_machine_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network time was modelled when the steps were measured."""
    point = served.make_point(served.DCP, changed={"mode": "replay"}, dtype="bf16", emulate="/gone/machine.toml")
    machine = validate.Machine(probe=make_planned_probe("H200", 8))
    with pytest.raises(UsageError, match=r"/gone/machine\.toml: No such file"):
        validate.check_runnable(point, Settings(), SHAPES[point.model], machine)
    files = []

    def known(path: str) -> SimpleNamespace:
        files.append(path)
        return SimpleNamespace(check_point=lambda *_: None)

    monkeypatch.setattr(validate, "load_step_times", known)
    validate.check_runnable(point, Settings(step_times="times.json"), SHAPES[point.model], machine)
    assert files == ["times.json"]
    with pytest.raises(UsageError, match="leave --nodes out"):
        validate.check_runnable(
            point, Settings(step_times="times.json"), SHAPES[point.model], dataclasses.replace(machine, nnodes=3)
        )


def test_two_hosts_with_a_link_can_be_emulated() -> None:
    """The layout has 16 ranks on hosts of 8 GPUs."""
    options = {"tp": "16", "dcp": "16", "emulate": "H200+rdma-400", "concurrency": "8"}
    found = grid.expand_grid(make_spec(options, ONE_GPU), ONE_GPU, 1)
    assert [c.error for c in found] == [None, None]


def test_emulated_point_is_refused_for_verify_weights_and_nodes() -> None:
    """A checkpoint's weights are of no use to an emulated rank."""
    emulated_point = make_point(Layout(8), backend="triton", dtype="bf16")
    for machine, changed, expected in (
        (validate.Machine(probe=ONE_GPU, timed=False), emulated_point, "verify compares results"),
        (
            validate.Machine(probe=ONE_GPU),
            msgspec.structs.replace(emulated_point, weights="folder"),
            "leave --weights out",
        ),
        (validate.Machine(probe=ONE_GPU, nnodes=2), emulated_point, "leave --nodes out"),
    ):
        with pytest.raises(UsageError, match=expected):
            validate.check_runnable(changed, Settings(), TINY, machine)


def test_emulated_point_has_another_key_than_the_measured_one() -> None:
    emulated_point = make_point(Layout(8))
    real_point = msgspec.structs.replace(emulated_point, emulate="")
    assert emulated_point.get_key() != real_point.get_key()
    assert real_point.world == 8


@pytest.mark.long
def test_plan_record_and_report_of_an_emulated_sweep_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exports to formats that others compare results in are refused."""
    run = tmp_path / "run"

    def dcpbench(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([*words])
        return int(end.value.code or 0), *capsys.readouterr()

    code, out, _ = dcpbench(
        *("sweep", "--dry-run", "--gpu", "H200,count=1", "--tp", "8", "--dcp", "8", "--emulate", "H200")
    )
    assert code == 0
    assert "emulated on H200" in " ".join(out.split())
    code, _, _ = dcpbench(
        *("sweep", "--device", "cpu", "--tp", "8", "--dcp", "8", "--emulate", "H200", "--concurrency", "2"),
        *("--no-baseline", "--no-profile", "--seconds", "0.05", "-o", str(run)),
    )
    assert code == 0
    record = json.loads((run / "records.jsonl").read_text().splitlines()[0])
    assert record["emulated"]["calls"] == count_calls(Layout(8, dcp=8), "ag_rs")
    page = (run / "report" / "report.html").read_text()
    assert "forecast: one rank ran, its communication modelled as of H200" in page
    assert "· a forecast" in page
    code, _, _ = dcpbench("export", str(run), "--to", "inferencex", "-o", str(tmp_path / "x"))
    assert code != 0
    code, _, _ = dcpbench("export", str(run), "--to", "csv", "-o", str(tmp_path / "x.csv"))
    assert code == 0
    assert load_machine("H200").name == record["emulated"]["machine"]
