"""Calls that torch's documentation or engines' profiles name: the list is complete, and its tables follow from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.results import unpack
from tools.syncs.operators.cases import cases, groups
from tools.syncs.operators.compare import Measurement
from tools.syncs.operators.documentation import UNMEASURED, find_named
from tools.syncs.operators.documented import DOCSTRING, SGLANG, VLLM, documented
from tools.syncs.operators.predict import predict
from tools.syncs.operators.table import format_calls, format_operators, name_waits

ENGINES = Path(__file__).parents[2] / "results" / "engines_H200" / "engine-syncs_H200_2026-11-29"
MET = {
    ("SYNC001", "aten::_local_scalar_dense"): f"{SGLANG}, update",
    ("SYNC003", "aten::copy_"): f"{SGLANG}, plan of flashinfer",
    ("SYNC005", "aten::copy_"): f"{SGLANG}, alloc_for_extend and init_new; {VLLM}, build_mla_chunked_context_metadata",
    ("SYNC007", ""): f"{VLLM}, get_output; {SGLANG}, process_batch_result",
    ("SYNC008", ""): f"{VLLM} and {SGLANG}, profiler",
}
"""Rule and operator of a site in an engine's profile -> the place that the case of this kind names."""


def test_every_function_whose_docstring_speaks_of_synchronisation_is_measured_or_has_a_reason() -> None:
    named = set(find_named())
    assert {"torch.nonzero", "torch.linalg.inv", "torch.cuda.Event.synchronize"} <= named
    assert named - {case.api for case in documented().values()} - set(UNMEASURED) == set()


def test_no_function_is_both_measured_and_left_out() -> None:
    assert {case.api for case in documented().values()} & set(UNMEASURED) == set()


def test_every_kind_of_site_of_the_engines_profiles_has_a_case() -> None:
    unpack(ENGINES)
    met = {
        (site["rule"], site["op_chain"][-1] if site["op_chain"] else "")
        for path in ENGINES.glob("scan-*.json")
        for site in json.loads(path.read_text())["sites"]
    }
    assert met == set(MET)
    assert set(MET.values()) <= {case.named_by for case in documented().values()}


def test_groups_of_documented_calls_need_no_test_database_of_torch() -> None:
    assert groups(["documented"]) == [f"documented:{name}" for name in documented()]
    (case,) = cases("documented:torch.linalg.inv", "cpu")
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
def test_a_dry_run_predicts_what_the_documentation_says(name: str, waits: bool) -> None:
    (call,) = predict(f"documented:{name}")["calls"]
    assert documented()[name].named_by == DOCSTRING
    assert bool(call["waits"]) == waits


def record(*calls: dict[str, Any], group: str = "documented:torch.nonzero", margins: bool = True) -> Measurement:
    """Return a record of 10 ms of queued work; a call that waits for them takes 9 ms."""
    head = {"device": "G", "torch": "2", "queued_ms": 10.0} | ({"margin_ms": 2.0} if margins else {})
    return Measurement(head, [{"group": group, "calls": [{"leaf": False, "warned": 0, **call} for call in calls]}])


class TestTables:
    def test_a_wait_is_named_by_its_runtime_call_else_by_the_driver_else_by_the_copy(self) -> None:
        assert name_waits({"cudaStreamSynchronize": 1, "Stream Sync": 1, "cudaMemcpyAsync": 1}) == [
            "cudaStreamSynchronize"
        ]
        assert name_waits({"Stream Sync": 1}) == ["cuStreamSynchronize"]
        assert name_waits({"cudaMemcpyAsync": 1, "Memcpy DtoH (Device -> Pageable)": 1}) == ["cudaMemcpyAsync"]
        assert name_waits({}) == []

    def test_an_operator_has_its_calls_that_waited_and_how(self) -> None:
        """Two of three calls are held up for at least 6.5 ms; one of them makes no synchronising call."""
        slow = {"what": "aten.nonzero.default", "leaf": True, "ms": 9.0}
        measured = record(
            slow | {"events": {"cudaStreamSynchronize": 1}}, slow, slow | {"ms": 0.1, "events": {"cudaFree": 1}}
        )
        assert "aten::nonzero 1/3 cudaStreamSynchronize" in format_operators([measured]).splitlines()

    def test_a_record_without_margins_names_no_call(self) -> None:
        """Its events may be those of the calls before and after."""
        call = {"what": "aten.nonzero.default", "leaf": True, "ms": 9.0, "events": {"cudaStreamSynchronize": 1}}
        lines = format_operators([record(call, margins=False), record(call)]).splitlines()
        assert "aten::nonzero 2/2 cudaStreamSynchronize" in lines
        assert "aten::nonzero 1/1" in format_operators([record(call, margins=False)]).splitlines()

    def test_a_device_synchronisation_counts_only_with_margins(self) -> None:
        call = {"what": "x", "ms": 9.0, "events": {"cudaDeviceSynchronize": 1}}
        assert record(call).cases() == {"x": True}
        assert record(call, margins=False).cases() == {"x": False}

    def test_calls_that_were_not_measured_are_marked(self) -> None:
        waited = {"what": "torch.nonzero", "ms": 9.0, "events": {"cudaStreamSynchronize": 1}, "warned": 1}
        lines = format_calls([record(waited)]).splitlines()
        assert "| torch.nonzero | performance tuning guide | yes | cudaStreamSynchronize | 1 |" in lines
        assert "| torch.argwhere | docstring | not measured | | |" in lines
        assert "| torch.cuda.comm.broadcast_coalesced | docstring | not measured: needs several GPUs | | |" in lines
