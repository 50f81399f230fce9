"""Limits of options, files and records: the largest value is accepted and the next is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.compare.judging import Options
from dcpbench.compare.outputs import OutputTargets, check_options
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.hangs import heartbeats
from dcpbench.imports import Overrides, check_overrides, result
from dcpbench.plan import option_parsers
from dcpbench.plan.serve_spec import make_serve_spec
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points.layout import Layout
from dcpbench.records import checks
from dcpbench.serving import load_words, request_files, step_times
from dcpbench.syncs.gating.gate import check_limits
from tests.unit import record_builder as build
from tests.unit.probes import CPU

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = build.make_ok_record(build.make_point())


def refuse(problem: str) -> None:
    """Raise a problem that is returned instead of raised."""
    if problem:
        raise UsageError(problem)


def check_serve_options(**options: object) -> object:
    return make_serve_spec({"baseline": False, **options}, CPU)


def check_compare_options(**options: float) -> None:
    check_options(Options(**options), OutputTargets())


def parse_row(**fields: object) -> object:
    """Read a line of a file of requests."""
    length = {} if "prompt" in fields else {"input_tokens": 1}
    given = length | {"output_tokens": 1} | fields
    return request_files._make_reader(Path("f"), 1, given, request_files.Reading()).parse_row(1, given)


def check_step_case(requests: int = 1, context: int = 1, prefix: int = 0, tokens: int = 1) -> None:
    """Check a case of measured steps."""
    case = step_times.Case(
        decodes=(step_times.Decodes(requests=requests, context=context),),
        chunks=(step_times.Chunks(chunks=1, tokens=tokens, prefix=prefix),),
    )
    refuse(step_times._find_problem(step_times.MeasuredCase(case=case, samples_ms=[1.0]), replicas=1))


def check_step_times(sample_ms: float = 1.0, host_ms: float = 0.0, floor_ms: float = 0.0) -> None:
    """Check a step of one request with these times."""
    case = step_times.Case(decodes=(step_times.Decodes(requests=1, context=1),))
    found = step_times.MeasuredCase(case=case, samples_ms=[1.0, sample_ms], host_ms=[1.0, host_ms], floor_ms=floor_ms)
    refuse(step_times._find_problem(found, replicas=1))


def check_marks(count: int) -> None:
    refuse(checks._check_entry_counts(msgspec.structs.replace(RECORD, warnings=["m"] * count)))


def check_record_tp(degree: int) -> None:
    refuse(
        checks._check_layout(msgspec.structs.replace(RECORD, point=msgspec.structs.replace(RECORD.point, tp=degree)))
    )


def check_heartbeat_ranks(last: int) -> None:
    refuse("" if len(heartbeats.parse_ranks(f"0-{last}")) == last + 1 else "none")


LIMITS: dict[str, tuple[Callable[[Any], object], list[object], list[object]]] = {
    "--num-requests": (lambda n: check_serve_options(num_requests=n), [1, 10_000_000], [0, 10_000_001]),
    "--burstiness": (lambda x: check_serve_options(burstiness=x, request_rate=(1,)), [1e-3, 1e6], [0.9e-3, math.inf]),
    "--request-rate": (lambda x: check_serve_options(request_rate=(x,)), [1e-9, 1e9, math.inf], [0, -1]),
    "--prefix-share": (lambda x: check_serve_options(prefix_share=x), [0, 0.99], [-0.01, 1]),
    "--sessions think": (lambda x: check_serve_options(think_time=x, turns="4"), [0, 86_400], [-0.1, 86_401]),
    "--sessions turns": (lambda n: check_serve_options(turns=str(n)), [1, 10_000], [0, 10_001]),
    "--requests seed": (lambda n: check_serve_options(seed=n), [0], [-1]),
    "--gpu count": (lambda n: make_planned_probe("H200", n), [1, 72], [0, 73]),
    "--tp": (Layout, [1, 65_536], [0, 65_537]),
    "--margin": (lambda x: check_compare_options(margin=x), [0, 0.5], [-0.01, 0.51]),
    "--launch-noise": (lambda x: check_compare_options(launch_noise=x), [0, 0.5], [-0.01, 0.51]),
    "--max-per-step": (lambda x: check_limits(x, None), [None, 0, 1e9], [-1e-9, math.nan, math.inf]),
    "--max-bubble-us": (lambda x: check_limits(None, x), [None, 0, 1e9], [-1e-9, math.nan, math.inf]),
    "--alpha": (lambda x: check_compare_options(alpha=x), [0.5], [0, 0.51]),
    "--model": (lambda n: option_parsers.parse_name("model", "m" * n), [1, 1_000], [0, 1_001]),
    "--input-tokens": (lambda n: load_words._parse_tokens("--input-tokens", "", str(n)), [1, 10**9], [0, 10**9 + 1]),
    "sigma": (lambda x: load_words._parse_sigma("--input-tokens", "", str(x)), [0.001, 3], [0, 3.001, "x"]),
    "--input-len": (lambda n: check_overrides(Overrides(input_len=n)), [1, 1_000_000_000], [0, 1_000_000_001]),
    "prompt": (lambda n: parse_row(prompt=[n]), [0, 2**31 - 1], [-1, 2**31, True]),
    "input_tokens": (lambda n: parse_row(input_tokens=n), [1, 10**9], [0, 10**9 + 1, 1.5, True]),
    "arrival_s": (lambda x: parse_row(arrival_s=x), [-1e15, 0, 1e15], [-1.1e15, 1.1e15, True, "1", math.nan]),
    "prefix_group": (lambda n: parse_row(prefix_group=n), [0, 10**12], [-1, 0.5]),
    "context of a step": (lambda n: check_step_case(context=n), [1, 10**9], [0, 10**9 + 1]),
    "tokens of a chunk": (lambda n: check_step_case(tokens=n), [1, 10**9], [0, 10**9 + 1]),
    "prefix of a chunk": (lambda n: check_step_case(prefix=n), [0, 10**9], [-1, 10**9 + 1]),
    "requests of a step": (lambda n: check_step_case(requests=n), [1, (1 << 20) - 1], [0, 1 << 20]),
    "time of a step": (lambda x: check_step_times(sample_ms=x), [1e-9, 1e15], [0, 1.1e15]),
    "time of the host": (lambda x: check_step_times(host_ms=x), [0, 1e15], [-1e-9, 1.1e15]),
    "floor of a step": (lambda x: check_step_times(floor_ms=x), [0, 1e15], [-1e-9, 1.1e15]),
    "marks of a record": (check_marks, [0, 4096], [4097]),
    "tp of a record": (check_record_tp, [1, 65_536], [65_537]),
    "ranks of a job": (check_heartbeat_ranks, [0, 65_535], [65_536]),
    "text of a result": (lambda n: result._check_values("m" * n, "it"), [0, 1_000], [1_001]),
    "number of a result": (lambda x: result._check_values(x, "it", limit=1e6), [0, 1e6], [-1, 1e6 + 1, math.nan]),
}
ACCEPTED = [(name, value) for name, (_, accepted, _) in LIMITS.items() for value in accepted]
REFUSED = [(name, value) for name, (_, _, refused) in LIMITS.items() for value in refused]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_value_at_the_limit_is_accepted(name: str, value: object) -> None:
    LIMITS[name][0](value)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_value_beyond_the_limit_is_refused(name: str, value: object) -> None:
    with pytest.raises(DcpbenchError):
        LIMITS[name][0](value)
