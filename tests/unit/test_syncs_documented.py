"""Test that the list of documented and profiled calls is complete, and that its tables follow from the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tools.results import unpack
from tools.syncs.operators.cases import list_groups, make_cases
from tools.syncs.operators.compare import Measurement, read_measurement
from tools.syncs.operators.documentation import UNMEASURED, find_documented_names
from tools.syncs.operators.documented import DOCSTRING, SGLANG, VLLM, list_documented
from tools.syncs.operators.measure import RANGE, count_events
from tools.syncs.operators.predict import predict
from tools.syncs.operators.table import format_calls, format_operators, name_waits

RESULTS = Path(__file__).parents[2] / "results"
ENGINES = RESULTS / "engines_H200" / "engine-syncs_H200_2026-11-29"
SYNCS = RESULTS / "syncs-graphs_H200"
MET = {  # rule and operator of a site in an engine's profile -> the place that the case of this kind names
    ("SYNC001", "aten::_local_scalar_dense"): f"{SGLANG}, update",
    ("SYNC003", "aten::copy_"): f"{SGLANG}, plan of flashinfer",
    ("SYNC005", "aten::copy_"): f"{SGLANG}, alloc_for_extend and init_new; {VLLM}, build_mla_chunked_context_metadata",
    ("SYNC007", ""): f"{VLLM}, get_output; {SGLANG}, process_batch_result",
    ("SYNC008", ""): f"{VLLM} and {SGLANG}, profiler",
}


REFUSED = {  # calls that a dry run refuses: nested and CSR tensors, and storages made on a GPU
    "torch.UntypedStorage.cuda",
    "torch.nested.nested_tensor from a list",
    "torch.nested.nested_tensor_from_jagged",
    "torch.Tensor.to_sparse_csr",
}
DIFFERENT = {  # calls for which a dry run predicts what was not measured
    "torch.UntypedStorage.cpu",  # the storage of a device tensor is the host's
    "torch.autograd.graph.save_on_cpu pin_memory=True",  # torch 2.11 waits for the copy, 2.13 does not
}


def test_documented_synchronising_functions_are_measured_or_have_a_reason() -> None:
    named = set(find_documented_names())
    assert {"torch.nonzero", "torch.linalg.inv", "torch.cuda.Event.synchronize"} <= named
    assert named - {case.api for case in list_documented().values()} - set(UNMEASURED) == set()


def test_no_function_is_both_measured_and_left_out() -> None:
    assert {case.api for case in list_documented().values()} & set(UNMEASURED) == set()


def test_every_kind_of_site_in_engine_profiles_has_a_case() -> None:
    unpack(ENGINES)
    met = {
        (site["rule"], site["op_chain"][-1] if site["op_chain"] else "")
        for path in ENGINES.glob("scan-*.json")
        for site in json.loads(path.read_text())["sites"]
    }
    assert met == set(MET)
    assert set(MET.values()) <= {case.named_by for case in list_documented().values()}


def test_documented_calls_need_no_test_database_of_torch() -> None:
    assert list_groups(["documented"]) == [f"documented:{name}" for name in list_documented()]
    (case,) = make_cases("documented:torch.linalg.inv", "cpu")
    assert case.run().shape == (8, 8)


@pytest.mark.filterwarnings("ignore:barrier")  # torch's hint to name a device
@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("torch.linalg.inv_ex", False),
        ("torch.linalg.inv_ex check_errors=True", True),
        ("torch.linalg.cond", True),
        ("torch.repeat_interleave", True),
        ("torch.repeat_interleave output_size=", False),
        ("torch.amp.GradScaler.get_scale", True),
        ("torch.amp.GradScaler.unscale_", False),
        ("torch.normal std tensor", True),
        ("torch.argwhere", True),
        ("torch._assert_async", False),
        ("torch.Stream.synchronize", True),
        ("torch.distributed.barrier", True),
        ("torch.distributed.Work.block_current_stream", False),
        ("torch.Tensor.record_stream", False),
    ],
)
def test_dry_run_predicts_the_documented_waits(name: str, waits: bool) -> None:
    (call,) = predict(f"documented:{name}")["calls"]
    assert list_documented()[name].named_by == DOCSTRING
    assert bool(call["waits"]) == waits


def record(*calls: dict[str, Any]) -> Measurement:
    """Return a record of 10 ms of queued work; a call that waits for them takes 9 ms."""
    group = {"group": "documented:x", "calls": [{"leaf": False, "warned": 0, **call} for call in calls]}
    return Measurement({"device": "G", "torch": "2", "queued_ms": 10.0, "margin_ms": 2.0}, [group])


class TestTables:
    def test_debug_mode_warns_at_the_synchronisation_of_a_stream(self) -> None:
        assert name_waits({"warned": 1, "events": {"Memcpy DtoH (Device -> Pinned)": 1}}) == ["cudaStreamSynchronize"]

    def test_other_waits_are_named_by_their_recorded_events(self) -> None:
        """The order is a query of an event, a copy through pageable memory, and last the device, which may be that of
        the measurement.
        """
        device = {"cudaDeviceSynchronize": 1}
        assert name_waits({"warned": 0, "events": {"cudaEventSynchronize": 1, **device}}) == ["cudaEventSynchronize"]
        assert name_waits({"warned": 0, "events": {"Event Sync": 8}}) == ["cudaEventQuery"]
        assert name_waits({"warned": 0, "events": {"Memcpy DtoH (Device -> Pageable)": 1}}) == ["cudaMemcpyAsync"]
        assert name_waits({"warned": 0, "events": device}) == ["cudaDeviceSynchronize"]
        assert name_waits({"warned": 0, "events": {"Memcpy DtoD (Device -> Device)": 1}}) == []

    def test_operator_row_has_its_waiting_calls_and_recorded_events(self) -> None:
        """Two of three calls are held up for at least 6.5 ms; one of them makes no synchronising call."""
        slow = {"what": "aten.nonzero.default", "leaf": True, "ms": 9.0}
        events = {"cudaStreamSynchronize": 1, "Memcpy DtoH (Device -> Pinned)": 1, "Memcpy DtoD (Device -> Device)": 1}
        measured = record(slow | {"events": events}, slow, slow | {"ms": 0.1, "events": {"cudaFree": 1}})
        assert "aten::nonzero 1/3 DtoH-pinned,cudaStreamSynchronize" in format_operators([measured]).splitlines()

    def test_record_without_margins_names_copies_only(self) -> None:
        """Other events of the record may be those of the calls before and after."""
        events = {"cudaStreamSynchronize": 1, "Memcpy HtoD (Pageable -> Device)": 1}
        call = {"what": "aten.nonzero.default", "leaf": True, "ms": 9.0, "events": events}
        older = Measurement({"device": "G", "torch": "2", "queued_ms": 10.0}, [{"group": "op:1", "calls": [call]}])
        assert "aten::nonzero 1/1 HtoD-pageable" in format_operators([older]).splitlines()

    def test_unmeasured_calls_are_marked(self) -> None:
        calls = [
            {"what": "torch.nonzero", "ms": 9.0, "events": {"cudaStreamSynchronize": 1}, "warned": 1},
            {"what": "torch.linalg.qr", "ms": 0.2},
        ]
        lines = format_calls([record(*calls)]).splitlines()
        assert "| torch.nonzero | performance tuning guide | yes | cudaStreamSynchronize | 1 |" in lines
        assert "| torch.linalg.qr | related | no | | 0 |" in lines
        assert "| torch.argwhere | docstring | not measured | | |" in lines
        assert "| torch.cuda.comm.broadcast_coalesced | docstring | not measured: needs several GPUs | | |" in lines


class Event(NamedTuple):
    """Stand for an event of the profiler."""

    title: str
    start: int
    duration: int = 0
    number: int = 0
    link: int = 0

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def correlation_id(self) -> int:
        return self.number

    def linked_correlation_id(self) -> int:
        return self.link


def test_linked_events_belong_to_their_operator_despite_clock_differences() -> None:
    """CUDA's clock is 50 ahead: the wait of the first call is before it, and that of the next operator within it."""
    events = [
        Event(f"{RANGE}0", start=100, duration=100, number=1),
        Event("aten::item", start=120, duration=60, number=2),
        Event("cudaStreamSynchronize", start=75, duration=55, number=9, link=2),
        Event("cudaStreamSynchronize", start=160, duration=5, number=10, link=3),
        Event("aten::item", start=210, number=3),
        Event("Stream Sync", start=150),
        Event(f"{RANGE}1", start=300, duration=100, number=4),
    ]
    assert count_events(events) == {0: {"cudaStreamSynchronize": 1, "Stream Sync": 1}}


@pytest.fixture(scope="module")
def load_record() -> Measurement:
    """Return the record of an H200."""
    unpack(SYNCS)
    return read_measurement(SYNCS / "documented-calls_H200_2026-11-30/documented.jsonl")


class TestPublishedRecord:
    def test_published_table_equals_the_record(self, load_record: Measurement) -> None:
        """The command `python -m tools.syncs.operators.table calls RECORD > FILE` writes the table again."""
        assert (SYNCS / "documented-calls.md").read_text() == format_calls([load_record])

    def test_recorded_cases_are_complete_and_none_failed(self, load_record: Measurement) -> None:
        assert {group["group"] for group in load_record.groups} == set(list_groups(["documented"]))
        assert [group["failed"] for group in load_record.groups if group["failed"]] == []

    @pytest.mark.filterwarnings("ignore")  # of beta and deprecated functions
    def test_dry_run_predicts_all_waits_except_the_listed_ones(self, load_record: Measurement) -> None:
        measured = {
            call["what"]: load_record.is_held_up(call)
            for group in load_record.groups
            for call in group["calls"]
            if not call["leaf"]
        }
        calls = {call["what"]: call for group in list_groups(["documented"]) for call in predict(group)["calls"]}
        assert set(measured) - set(calls) == REFUSED
        assert {name for name, call in calls.items() if bool(call["waits"]) != measured[name]} == DIFFERENT
