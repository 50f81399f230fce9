"""Compare served token streams with `transformers` in real torchrun jobs, with caching, chunks and preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.launch import launcher
from dcpbench.launch.torchrun import RendezvousOptions
from dcpbench.points.budget import plan_engines
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings
from dcpbench.records.file import read_records
from dcpbench.serving.loads import make_requests
from dcpbench.serving.samples import read_samples
from tests.distributed.checkpoints import VOCAB, write_changed_deepseek_v3
from tests.distributed.verifying import continue_greedily

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record
    from dcpbench.serving.outcome import Row

pytestmark = pytest.mark.distributed

LAYERS = 2  # one dense and one MoE layer; test_oracle.py tests more layers
LONGEST, OUTPUT = 40, 20
LOAD = Load(
    requests=12,
    input_tokens=f"uniform:1-{LONGEST}",
    output_tokens="uniform:1-8",
    chunk=16,
    prefix_share=0.5,
)
EXCHANGES = {True: "ag_rs", False: "none"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint") / "v3"
    write_changed_deepseek_v3(folder, {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 0}, {})
    return str(folder)


@pytest.fixture(scope="module")
def truth(checkpoint: str):
    """Return a function that continues a load's prompts greedily with `transformers`, as far as the load needs."""
    known: dict[tuple[int, ...], list[int]] = {}

    def continue_prompts(load: Load) -> list[list[int]]:
        requests = make_requests(load, VOCAB)
        prompts = [tuple(r.prompt.tolist()) for r in requests]
        longest = max(r.output_tokens for r in requests)
        for prompt in dict.fromkeys(prompts):
            if len(known.get(prompt, [])) < longest:
                known[prompt] = continue_greedily(checkpoint, prompt, longest)
        return [known[p][: r.output_tokens] for p, r in zip(prompts, requests, strict=True)]

    return continue_prompts


def make_point(checkpoint: str, layout: Layout, load: Load, concurrency: int = 6, **fields: object) -> Point:
    """Return a point in fp32 on the checkpoint."""
    return Point(
        model=checkpoint,
        weights=checkpoint,
        workload="serve",
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        concurrency=concurrency,
        context=LONGEST + OUTPUT,
        load=load,
        **{"exchange": EXCHANGES[layout.dcp > 1], "backend": "reference", "dtype": "fp32", "page_size": 2} | fields,
    )


def serve(points: list[Point], folder: Path, settings: Settings = Settings()) -> list[Record]:  # noqa: B008 - frozen
    """Run a job of these points, and return its records."""
    engines = tuple(plan_engines(points, settings, Probe(device="cpu", count=0, name="CPU")))
    options = launcher.JobOptions(
        folder=folder, settings=settings, device="cpu", worker="tests.distributed.rank", engines=engines
    )
    launcher.run_points(points, options, RendezvousOptions(), lambda _: None)
    return read_records(folder)


def read_streams(record: Record, folder: Path) -> list[list[int]]:
    """Return the tokens of all requests by number."""
    assert record.outcome == "ok", record.detail
    rows: list[Row] = sorted(read_samples(folder / record.serve.samples_file), key=lambda row: row.number)
    return [row.tokens for row in rows]


CUT = {"ep": "1"}
A2A_WIDE = {"exchange": "a2a", "q_replicate": True, "project_first": True}
TIGHT = {"prefix_cache": False, "policy": "prefill-first", "prefix_share": 0.0}

CASES: dict[str, tuple[Layout, dict[str, object], dict[str, object]]] = {
    "forty": (Layout(4, dcp=4), CUT, {"requests": 40}),
    "tp2-dp2": (Layout(2, dp=2), CUT, {"chunk": 8}),
    "tp2-dcp2-symm": (
        Layout(2, dcp=2),
        {"exchange": "symm", "page_size": 4, "interleave": 2},
        {"policy": "prefill-first"},
    ),
    "tp4-dp2-dcp2-a2a": (Layout(4, dp=2, dcp=2), A2A_WIDE, {}),
    "tp4-dcp4-tight": (Layout(4, dcp=4), {"page_size": 1}, TIGHT),
    "tp2-dcp2-drafts": (Layout(2, dcp=2), {"mtp": 3, "acceptance": "0/0/0"}, {}),
    "tp4-dp2-dcp2-drafts": (Layout(4, dp=2, dcp=2), {"mtp": 1, "acceptance": "0"}, {"policy": "prefill-first"}),
}
"""Layout, fields of the point and changes of LOAD. Two cases use tensor-parallel experts, the others expert parallelism. With drafts
that are all rejected, a step yields the same token as without drafts.
"""


@pytest.fixture(scope="module")
def served(checkpoint: str, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that returns load, record and folder of a case; all cases with the same number of ranks are
    points of one job.
    """
    known: dict[str, tuple[Load, Record, Path]] = {}

    def serve_case(name: str) -> tuple[Load, Record, Path]:
        if name not in known:
            mine = {n: case for n, case in CASES.items() if case[0].tp == CASES[name][0].tp}
            loads = {n: msgspec.structs.replace(LOAD, **changes) for n, (_, _, changes) in mine.items()}
            points = {n: make_point(checkpoint, mine[n][0], load, **mine[n][1]) for n, load in loads.items()}
            folder = tmp_path_factory.mktemp("run")
            records = {record.point.get_key(): record for record in serve(list(points.values()), folder)}
            known.update({n: (load, records[points[n].get_key()], folder) for n, load in loads.items()})
        return known[name]

    return serve_case


@pytest.mark.long
def test_forty_requests_on_tp4_dcp4_match_transformers(served, truth):
    """Use 40 prompts, half of each shared, six at a time: chunks of two pages, hits in the prefix cache, mixed steps."""
    load, record, folder = served("forty")
    assert read_streams(record, folder) == truth(load)
    assert (record.serve.finished, record.serve.rejected, record.serve.cancelled) == (40, 0, 0)
    assert record.serve.cached_tokens > 0
    assert record.serve.decode_steps < record.serve.steps
    assert record.warnings[0] == "cpu"


@pytest.mark.parametrize("case", [name for name in CASES if name != "forty"])
@pytest.mark.long
def test_answers_of_every_layout_match_transformers(case, served, truth):
    """Use replicas with unequal rows, stripes, both policies, each exchange and its options."""
    load, record, folder = served(case)
    assert read_streams(record, folder) == truth(load)


@pytest.mark.long
def test_step_with_accepted_drafts_yields_one_more_token(checkpoint, tmp_path):
    """Expect three tokens from a step of two drafts with acceptance 1. The prompt yields one of 8 answer tokens, so
    that the others take three steps.
    """
    load = msgspec.structs.replace(LOAD, output_tokens="8")
    (record,) = serve([make_point(checkpoint, Layout(2, dcp=2), load, mtp=2, acceptance="1/1")], tmp_path)
    assert [len(tokens) for tokens in read_streams(record, tmp_path)] == [8] * 12
    assert record.serve.speculation.steps == 3 * 12
    assert record.serve.speculation.accepted == [36, 36]
    assert record.serve.speculation.tokens_per_step == 3


@pytest.mark.long
def test_preempted_requests_match_transformers(checkpoint, truth, tmp_path):
    """Use a pool of 11 pages of 2 · 2 tokens with requests that grow by five pages each: they are preempted, and those
    that need more than all 44 tokens are rejected with their size and the limit.
    """
    layout = Layout(2, dcp=2)
    page_bytes = 2 * LAYERS * (32 + 16) * 4
    load = msgspec.structs.replace(LOAD, input_tokens="uniform:1-30", output_tokens=f"{OUTPUT}", prefix_share=0.0)
    settings = Settings(kv_memory_bytes=12 * page_bytes)
    (record,) = serve([make_point(checkpoint, layout, load)], tmp_path, settings)
    rejected = [i for i, r in enumerate(make_requests(load, VOCAB)) if r.kv_tokens > 11 * 4]
    assert record.serve.preemptions > 0
    assert (record.serve.rejected, record.serve.finished) == (len(rejected), 12 - len(rejected))
    found = read_streams(record, tmp_path)
    assert [t for i, t in enumerate(found) if i not in rejected] == [
        t for i, t in enumerate(truth(load)) if i not in rejected
    ]
    assert all(not found[i] for i in rejected)


@pytest.mark.long
def test_time_limit_ends_an_open_loop_and_cancels_pending_requests(checkpoint, tmp_path):
    """Send a request every thousand seconds: one is served, and the limit of a second ends the run."""
    load = msgspec.structs.replace(LOAD, arrival="gamma", request_rate=0.001, output_tokens="2")
    (record,) = serve([make_point(checkpoint, Layout(1), load)], tmp_path, Settings(limit_seconds=1.0))
    assert record.outcome == "ok"
    assert (record.serve.submitted, record.serve.finished) == (1, 1)
    assert record.serve.steady_tok_s is None


@pytest.mark.long
def test_sessions_match_transformers_and_reuse_cached_answers(checkpoint, tmp_path):
    """Use two replicas of two ranks: each prompt contains the actual earlier answers, partly cached, with the same
    hits as in a replay of the load.
    """
    load = msgspec.structs.replace(
        LOAD, turns="3", turn_tokens="5", input_tokens="9", output_tokens="7", prefix_share=0.0
    )
    session_point = make_point(checkpoint, Layout(4, dp=2, dcp=2), load, 4, **A2A_WIDE)
    (record,) = serve([session_point], tmp_path)
    rows = sorted(read_samples(tmp_path / record.serve.samples_file), key=lambda row: row.number)
    requests = make_requests(load, VOCAB)
    prompts: list[tuple[int, ...]] = []
    for request, row in zip(requests, rows, strict=True):
        own = request.prompt[len(request.prompt) - (5 if request.turn else 9) :].tolist()
        before = (*prompts[-1], *rows[request.number - 1].tokens) if request.turn else ()
        prompts.append((*before, *own))
        stored = len(before) - 1 if request.turn else 0
        assert row.cached_tokens == stored // 4 * 4
    assert [row.tokens for row in rows] == [continue_greedily(checkpoint, prompt, 7) for prompt in prompts]


def test_only_the_first_load_of_an_engine_has_the_phases_of_its_start(checkpoint, tmp_path):
    """Serve two loads by one engine, and a third by an engine with other pages, which is built for it."""
    loads = [msgspec.structs.replace(LOAD, requests=count, output_tokens="2") for count in (2, 3)]
    points = [make_point(checkpoint, Layout(1), load) for load in loads]
    points.append(make_point(checkpoint, Layout(1), loads[0], page_size=4))
    starts = [record.start or [] for record in serve(points, tmp_path)]
    first = ["starting", "building the engine", "capturing CUDA graphs", "warming up"]
    assert [[phase.name for phase in start] for start in starts] == [first, [], first[1:]]
    assert all(phase.seconds >= 0 for start in starts for phase in start)
