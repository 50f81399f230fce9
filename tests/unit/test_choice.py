"""`auto`: the fastest candidate is used, all candidates are in the record and the report, with reasons for those that
cannot run.
"""

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
    """Return an engine of one rank in a separate group, where exchanges merge nothing; session.py builds it in the
    same way.
    """
    built = engine_builder.make_engine()
    built.select_path(*choice.get_initial_candidate(POINT))
    return built


@pytest.fixture
def timed_candidates(monkeypatch, engine):
    """Return the timed candidates in order; a pass over the three layers takes the SLOWEST_MS of its exchange."""
    candidates = []

    def chunk(timer, steps):
        timer.step()
        name = next(name for name, made in engine.exchange_cache.items() if made is engine.exchange)
        candidates.append((engine.backend_name, name))
        return [SLOWEST_MS[name]] * steps, 0.1

    monkeypatch.setattr(Timer, "measure_chunk", chunk)
    monkeypatch.setattr(choice, "TIMED_BACKENDS", ("reference", "flashinfer"))
    return candidates


def add_three_requests(engine):
    """Return three requests in four rows."""
    requests = [engine.add_request(4) for _ in range(3)]
    for number, request in enumerate(requests):
        engine.write_random_kv(request, number, seed=0)
    return requests


def choose(engine, point=POINT, alive=lambda: None):
    """Return the choice of `choose_fastest`."""
    with torch.inference_mode():
        requests = add_three_requests(engine)
        return choose_fastest(engine, point, lambda: engine.plan_step(requests, 3), alive)


class TestChoose:
    def test_fastest_exchange_is_used_and_all_are_recorded(self, engine, timed_candidates):
        """Three layers take 6, 3 and 4.5 ms: 2,000, 1,000 and 1,500 µs each."""
        alive = []
        found = choose(engine, alive=lambda: alive.append(1))
        assert (found.backend, found.exchange) == ("reference", "a2a")
        assert {c.exchange: c.layer_us for c in found.candidates} == {
            "ag_rs": pytest.approx(2000),
            "a2a": pytest.approx(1000),
            "symm": pytest.approx(1500),
        }
        assert list(dict.fromkeys(timed_candidates)) == [("reference", name) for name in SLOWEST_MS]
        assert engine.exchange is engine.exchange_cache["a2a"]
        assert engine.batches == {}, "plans and graphs of other candidates are dropped"
        assert alive, "the watchdog is notified"

    @pytest.mark.usefixtures("timed_candidates")
    def test_only_the_backend_is_chosen_if_the_exchange_is_given(self, engine):
        """FlashInfer is recorded and skipped if it is missing or cannot take these widths."""
        found = choose(engine, msgspec.structs.replace(POINT, backend="auto", exchange="a2a"))
        assert str(found) == "reference a2a"
        first, second = found.candidates
        assert (first.layer_us, first.reason) == (pytest.approx(1000), None)
        assert (second.backend, second.layer_us) == ("flashinfer", None)
        assert "--backend flashinfer" in second.reason

    @pytest.mark.usefixtures("timed_candidates")
    def test_exchange_that_cannot_run_is_skipped_with_reason(self, engine, monkeypatch):
        """Every rank gets the same error; the engine continues with its previous exchange."""

        def use(backend, exchange, really=engine.select_path):
            if exchange == "a2a":
                raise CapacityError("these GPUs cannot")
            really(backend, exchange)

        monkeypatch.setattr(engine, "select_path", use)
        found = choose(engine)
        assert found.exchange == "symm"
        assert [(c.exchange, c.reason) for c in found.candidates if c.reason] == [("a2a", "these GPUs cannot")]

    @pytest.mark.usefixtures("timed_candidates")
    def test_exchange_that_fails_on_another_rank_is_skipped_on_all(self, engine, monkeypatch):
        """If one DCP group of several has no access to its peers, an exchange that runs here would wait for it."""

        def everyone(mine):
            fails = engine.exchange is engine.exchange_cache.get("a2a")
            return [mine, CapacityError("rank 1 cannot") if fails else None]

        monkeypatch.setattr(choice, "gather_objects", everyone)
        found = choose(engine)
        assert found.exchange == "symm"
        assert [(c.exchange, c.reason) for c in found.candidates if c.reason] == [("a2a", "rank 1 cannot")]

    @pytest.mark.usefixtures("timed_candidates")
    def test_last_reason_is_raised_if_no_candidate_can_run(self, engine, monkeypatch):
        """A point with this backend by name fails with the same error."""
        monkeypatch.setattr(choice, "TIMED_BACKENDS", ("flashinfer",))
        with pytest.raises(DcpbenchError, match="--backend flashinfer"):
            choose(engine, msgspec.structs.replace(POINT, backend="auto", exchange="none"))

    def test_point_with_given_backend_and_exchange_has_no_choice(self, engine, timed_candidates):
        assert choose(engine, msgspec.structs.replace(POINT, exchange="none")) is None
        assert timed_candidates == []


def test_report_has_the_chosen_candidate_and_its_lead(tmp_path):
    """50 against 55 µs: the next is 10 % slower."""
    point = record_builder.make_point(Layout(4, dcp=4), backend="auto", exchange="auto", q_replicate=True)
    found = Choice(
        backend="triton",
        exchange="symm",
        candidates=[
            Candidate(backend="triton", exchange="ag_rs", layer_us=55.0),
            Candidate(backend="triton", exchange="symm", layer_us=50.0),
            Candidate(backend="flashinfer", exchange="symm", reason="is not installed"),
        ],
    )
    record = record_builder.make_ok_record(point, choice=found)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    read = dataframes.load_frames(
        [record_builder.write_records(tmp_path, [record, record_builder.make_ok_record(record_builder.make_point())])]
    )
    table = record_tables.build_choice_table(read)
    assert table.columns[-6:] == ["layout", "requested", "chosen", "others", "µs per layer", "next slower by"]
    (row,) = table.rows
    assert row[-6:] == [
        "tp4·dcp4",
        "auto auto +q-replicate",
        "triton symm",
        "triton ag_rs 55.0 µs; flashinfer symm: is not installed",
        "50.0",
        "10.0 %",
    ]


def test_report_without_auto_has_an_empty_choice_table(tmp_path):
    """The report leaves out an empty table."""
    read = dataframes.load_frames(
        [record_builder.write_records(tmp_path, [record_builder.make_ok_record(record_builder.make_point())])]
    )
    assert record_tables.build_choice_table(read).rows == []
