"""The case study padded-slots: what padding rows overwrite, what a padding slot costs, and how both are told."""

import io

import pytest
import torch
from rich.console import Console

from dcpbench.bench.cases import BenchOptions, list_padded_slots_cases
from dcpbench.bench.operators.padded_slots import KNOWN, LIVE, PADDING, PaddedSlots
from dcpbench.bench.record import BenchRecord, Case, Graph, Overwritten, Result
from dcpbench.bench.shown.findings import describe_findings
from dcpbench.bench.shown.table import make_table
from dcpbench.engine import decode
from dcpbench.errors import UsageError
from tests.unit.bench_builder import timing

CONTEXT = 16
NOTHING = {"requests": None, "context": None, "ids": None, "variant": None}


def case(variant: str, ids: str, requests: int = 3, context: int = CONTEXT) -> Case:
    """A step of three requests in a graph of four rows, unless said otherwise."""
    sizes = {"requests": requests, "context": context, "ids": ids}
    return Case(variant=variant, sizes=sizes, calls=1)


@pytest.fixture(scope="module")
def workload() -> PaddedSlots:
    """The tiny model in fp32: 3 layers, KV rows of 48 numbers, pages of 4."""
    return PaddedSlots(torch.device("cpu"), 0)


def overwritten(workload: PaddedSlots, of: Case) -> Overwritten:
    """What a step overwrites, which is what is said of the variant."""
    calls = workload.build_calls(of)
    assert calls.check(calls.run) == ""
    assert calls.overwritten is not None
    return calls.overwritten()


class TestWorkload:
    @pytest.mark.parametrize("requests", [3, 5])
    @pytest.mark.parametrize("ids", [KNOWN, "elsewhere"])
    def test_with_a_padding_slot_nothing_changes_at_the_cost_of_a_row(self, workload, ids, requests):
        """16 locations of 4 bytes and 17 ids of 8; a page is 3 layers × 4 rows × 48 numbers × 4 bytes."""
        found = overwritten(workload, case(PADDING, ids, requests))
        assert (found.kv_rows, found.token_ids, found.logit_error < 1e-5) == (0, 0, True)
        assert (found.table_bytes, found.page_bytes) == (16 * 4 + 17 * 8, 3 * 4 * 48 * 4)

    def test_without_it_a_prefilled_request_loses_its_first_kv_row_in_every_layer(self, workload):
        """The padding row reads token id 0 at position 0, writes its KV row over request 0's, and an id behind it."""
        found = overwritten(workload, case(LIVE, "elsewhere"))
        assert (found.kv_rows, found.token_ids, found.table_bytes) == (3, 1, 0)
        assert found.logit_error > 0.01

    def test_where_the_ids_are_known_the_same_row_is_computed_again_but_an_id_is_lost(self, workload):
        """A first token attends to itself alone: its row comes out as it was, but for rounding. Not so the id."""
        found = overwritten(workload, case(LIVE, KNOWN))
        assert (found.kv_rows <= 3, found.token_ids) == (True, 1)
        assert found.logit_error < 1e-5

    def test_a_padding_slot_that_is_not_used_is_noticed(self, workload, monkeypatch):
        """The engine has set slot 0 aside, and pads with slot 1."""
        monkeypatch.setattr(decode, "PADDING_SLOT", 1)
        calls = workload.build_calls(case(PADDING, "elsewhere"))
        assert calls.check(calls.run) == "padding rows changed a request that is not in slot 0"

    def test_harm_to_another_request_than_the_one_in_slot_0_is_noticed(self, workload, monkeypatch):
        monkeypatch.setattr(decode, "PADDING_SLOT", 2)
        calls = workload.build_calls(case(LIVE, "elsewhere"))
        assert calls.check(calls.run) == "padding rows changed a request that is not in slot 0"

    def test_harm_to_another_token_than_the_first_is_noticed(self, workload, monkeypatch):
        monkeypatch.setattr(decode, "PADDING_POSITION", 4)
        calls = workload.build_calls(case(LIVE, "elsewhere"))
        assert "changed other tokens of the request in slot 0" in calls.check(calls.run)

    def test_a_step_without_harm_is_noticed_where_harm_is_what_is_shown(self, workload):
        """Four requests in a graph of four rows: nothing is padded."""
        calls = workload.build_calls(case(LIVE, "elsewhere", requests=4))
        assert "did not change the first KV row of slot 0 in every layer" in calls.check(calls.run)


class TestCases:
    def test_both_variants_with_and_without_ids_at_every_size(self):
        """Graphs of 4 and 40 rows, short and long: 2 × 2 × 2 × 2."""
        cases = list_padded_slots_cases(BenchOptions(cpu=False, typed=NOTHING))
        assert len(cases) == 16
        assert {(c.sizes["requests"], c.sizes["rows"]) for c in cases} == {(3, 4), (33, 40)}

    @pytest.mark.parametrize(
        ("typed", "says"),
        [
            ({"requests": "4"}, "--requests 4 fill a graph of 4 rows, and nothing is padded; try --requests 3."),
            ({"requests": "9999"}, "9999 requests per replica are more than the largest graph, 512"),
            ({"context": "2"}, "--context 2 leaves nothing to overwrite; try --context 3."),
            ({"ids": "knwon"}, "did you mean known?"),
            ({"variant": "slot-1"}, "Write a comma list of: slot-0-live, slot-0-padding."),
        ],
    )
    def test_what_cannot_show_anything_is_answered_with_what_can(self, typed, says):
        with pytest.raises(UsageError) as caught:
            list_padded_slots_cases(BenchOptions(cpu=True, typed=NOTHING | typed))
        assert says in str(caught.value)


def record() -> BenchRecord:
    """Of a GPU: the step takes 1,000 µs without and 1,010 µs with a padding slot."""
    harm = Overwritten(kv_rows=27, token_ids=1, logit_error=0.125, table_bytes=0, page_bytes=1_990_656)
    none = Overwritten(kv_rows=0, token_ids=0, logit_error=0.0, table_bytes=776, page_bytes=1_990_656)
    results = [
        Result(
            case=Case(variant=variant, sizes={"requests": 3, "context": 64}, calls=1),
            correct=True,
            overwritten=found,
            graph=Graph(captured=True, time=timing(us), correct=True),
        )
        for variant, found, us in ((LIVE, harm, 1000.0), (PADDING, none, 1010.0))
    ]
    return BenchRecord(bench="padded-slots", performance=True, results=results)


class TestReport:
    def test_sentences_say_what_was_lost_what_was_not_and_what_it_costs(self):
        """1,000 / 1,010 = 0.99."""
        lost, kept, speed = describe_findings(record())
        assert lost == (
            "slot-0-live: in 1 of 1 case padding rows wrote over a live request, up to 27 of its stored KV rows and 1 "
            "of its token ids; its logits are off by up to 12.5 % of their norm."
        )
        assert kept == (
            "slot-0-padding: padding rows changed nothing that a live request had stored, and its logits by 0 % of "
            "their norm; the slot takes up to 776 bytes, in addition to the 1,990,656 bytes of the KV pool's padding page."
        )
        assert speed == "slot-0-padding is 0.99× as fast as slot-0-live."

    def test_harm_that_was_to_be_shown_is_not_called_correct(self):
        text = io.StringIO()
        Console(width=200, no_color=True, file=text).print(make_table(record(), 200))
        live, padding = (line for line in text.getvalue().splitlines() if "slot-0-" in line.split("×")[0][:18])
        assert "corrupts, as expected" in live
        assert "1.2e-01" in live
        assert "yes" in padding
        assert "corrupts" not in padding
