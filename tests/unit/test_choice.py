"""`auto`: the fastest candidate stays, all are in the record and the report, and those that cannot run say why."""

import msgspec
import pytest
import torch

from dcpbench.errors import CapacityError, DcpbenchError
from dcpbench.measuring.timing import Timer
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.records.record import Candidate, Choice, Record
from dcpbench.reports import dataframes, record_tables
from dcpbench.workloads import choice
from dcpbench.workloads.choice import choose_fastest
from tests.unit import engine_builder, record_builder

POINT = Point(model="tiny", tp=1, concurrency=3, context=9, backend="reference", exchange="auto", dtype="fp32")
SLOWEST_MS = {"ag_rs": 6.0, "a2a": 3.0, "symm": 4.5}


@pytest.fixture
def engine():
    """One rank in a group of its own, where every exchange merges with nobody; built as session.py does."""
    built = engine_builder.engine()
    built.select_path(*choice.get_initial_candidate(POINT))
    return built


@pytest.fixture
def ran(monkeypatch, engine):
    """What was timed, in order; a pass over the three layers takes as long as SLOWEST_MS says of the exchange."""
    timed = []

    def chunk(timer, steps):
        timer.step()
        name = next(name for name, made in engine.made.items() if made is engine.exchange)
        timed.append((engine.backend_name, name))
        return [SLOWEST_MS[name]] * steps, 0.1

    monkeypatch.setattr(Timer, "measure_chunk", chunk)
    monkeypatch.setattr(choice, "TIMED_BACKENDS", ("reference", "flashinfer"))
    return timed


def three_requests(engine):
    """Three requests in four rows."""
    requests = [engine.add_request(4) for _ in range(3)]
    for number, request in enumerate(requests):
        engine.write_random_kv(request, number, seed=0)
    return requests


def chosen_by(engine, point=POINT, alive=lambda: None):
    """What `choose` says."""
    with torch.inference_mode():
        requests = three_requests(engine)
        return choose_fastest(engine, point, lambda: engine.plan_step(requests, 3), alive)


class TestChoose:
    def test_the_fastest_exchange_stays_and_all_are_noted(self, engine, ran):
        """Three layers in 6, 3 and 4.5 ms: 2,000, 1,000 and 1,500 µs each."""
        alive = []
        found = chosen_by(engine, alive=lambda: alive.append(1))
        assert (found.backend, found.exchange) == ("reference", "a2a")
        assert {c.exchange: c.layer_us for c in found.candidates} == {
            "ag_rs": pytest.approx(2000),
            "a2a": pytest.approx(1000),
            "symm": pytest.approx(1500),
        }
        assert list(dict.fromkeys(ran)) == [("reference", name) for name in SLOWEST_MS]
        assert engine.exchange is engine.made["a2a"]
        assert engine.batches == {}, "the others' plans and graphs are gone"
        assert alive, "a watchdog hears of it"

    @pytest.mark.usefixtures("ran")
    def test_a_named_exchange_and_an_open_backend(self, engine):
        """FlashInfer is noted and passed over if it is missing or cannot take these widths."""
        found = chosen_by(engine, msgspec.structs.replace(POINT, backend="auto", exchange="a2a"))
        assert str(found) == "reference a2a"
        first, second = found.candidates
        assert (first.layer_us, first.reason) == (pytest.approx(1000), None)
        assert (second.backend, second.layer_us) == ("flashinfer", None)
        assert "--backend flashinfer" in second.reason

    @pytest.mark.usefixtures("ran")
    def test_an_exchange_that_cannot_work_here_is_passed_over(self, engine, monkeypatch):
        """Every rank hears the same error; the engine goes on with what it had."""

        def use(backend, exchange, really=engine.select_path):
            if exchange == "a2a":
                raise CapacityError("these GPUs cannot")
            really(backend, exchange)

        monkeypatch.setattr(engine, "select_path", use)
        found = chosen_by(engine)
        assert found.exchange == "symm"
        assert [(c.exchange, c.reason) for c in found.candidates if c.reason] == [("a2a", "these GPUs cannot")]

    @pytest.mark.usefixtures("ran")
    def test_what_another_rank_cannot_use_is_passed_over_on_all(self, engine, monkeypatch):
        """Where one DCP group of several has no access to its peers: what runs here would wait for it there."""

        def everyone(mine):
            fails = engine.exchange is engine.made.get("a2a")
            return [mine, CapacityError("rank 1 cannot") if fails else None]

        monkeypatch.setattr(choice, "gather_objects", everyone)
        found = chosen_by(engine)
        assert found.exchange == "symm"
        assert [(c.exchange, c.reason) for c in found.candidates if c.reason] == [("a2a", "rank 1 cannot")]

    @pytest.mark.usefixtures("ran")
    def test_where_nothing_can_run_the_last_reason_is_raised(self, engine, monkeypatch):
        """As a point that names it would fail."""
        monkeypatch.setattr(choice, "TIMED_BACKENDS", ("flashinfer",))
        with pytest.raises(DcpbenchError, match="--backend flashinfer"):
            chosen_by(engine, msgspec.structs.replace(POINT, backend="auto", exchange="none"))

    def test_a_point_that_names_both_has_no_choice(self, engine, ran):
        """Nothing is timed."""
        assert chosen_by(engine, msgspec.structs.replace(POINT, exchange="none")) is None
        assert ran == []


def test_the_report_says_what_was_chosen_and_by_how_much(tmp_path):
    """50 against 55 µs: the next is 10 % slower."""
    point = record_builder.point(Layout(4, dcp=4), backend="auto", exchange="auto", q_replicate=True)
    found = Choice(
        backend="triton",
        exchange="symm",
        candidates=[
            Candidate(backend="triton", exchange="ag_rs", layer_us=55.0),
            Candidate(backend="triton", exchange="symm", layer_us=50.0),
            Candidate(backend="flashinfer", exchange="symm", reason="is not installed"),
        ],
    )
    record = record_builder.ok(point, choice=found)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    read = dataframes.load_frames([record_builder.write(tmp_path, [record, record_builder.ok(record_builder.point())])])
    table = record_tables.build_choice_table(read)
    assert table.columns[-6:] == ["layout", "asked for", "chosen", "others", "µs per layer", "next slower by"]
    (row,) = table.rows
    assert row[-6:] == [
        "tp4·dcp4",
        "auto auto +q-replicate",
        "triton symm",
        "triton ag_rs 55.0 µs; flashinfer symm: is not installed",
        "50.0",
        "10.0 %",
    ]


def test_without_auto_the_report_has_no_such_table(tmp_path):
    """An empty table is left out."""
    read = dataframes.load_frames([record_builder.write(tmp_path, [record_builder.ok(record_builder.point())])])
    assert record_tables.build_choice_table(read).rows == []
