"""Read results of SGLang's bench_one_batch, with the fields of python/sglang/bench_one_batch.py (`latency_test_run_once`).

A result is one batch without a server: all prompts are prefilled in one step, then each step gives every request a token. So all
requests have the same TTFT, which is the time of prefill, and the same gaps. Times are in s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import field_names, result
from dcpbench.imports.result import Result
from dcpbench.points.names import CLOSED, SGLANG, SGLANG_ONE_BATCH, TOOLS
from dcpbench.records.record import Latencies

if TYPE_CHECKING:
    from dcpbench.imports.documents import Document


class File(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the fields of a result, which are all that it has but rates that follow from them."""

    batch_size: int
    input_len: int
    output_len: int
    prefill_latency: float
    total_latency: float
    median_decode_latency: float | None = None
    run_name: str = ""


def read(document: Document) -> Result:
    """Read one result. Raise RecordsError for a document of another tool."""
    found: File = result.convert(document, File, TOOLS[SGLANG_ONE_BATCH])
    if min(found.batch_size, found.input_len, found.output_len) < 1:
        raise RecordsError(f"{document.where}: a batch has at least 1 request with 1 token in and 1 out.")
    batch, steps = found.batch_size, found.output_len - 1
    prefill_ms, total_ms = found.prefill_latency * 1e3, found.total_latency * 1e3
    mean_ms = (total_ms - prefill_ms) / steps if steps else None
    median_ms = None if found.median_decode_latency is None else found.median_decode_latency * 1e3
    return Result(
        where=document.where,
        backend=SGLANG,
        arrival=CLOSED,
        concurrency=batch,
        submitted=batch,
        completed=batch,
        failed=0,
        duration_s=found.total_latency,
        input_tokens=batch * found.input_len,
        output_tokens=batch * found.output_len,
        lengths=(str(found.input_len), str(found.output_len)),
        summary={
            "ttft": _make_equal(prefill_ms, batch),
            "itl": Latencies(mean=mean_ms, p50=median_ms, samples=batch * steps) if steps else Latencies(),
            "tpot": _make_equal(mean_ms, batch),
            "e2el": _make_equal(total_ms, batch),
        },
        settings={"bench": "one batch"},
        hints={"run": field_names.shorten_label(found.run_name)} if found.run_name not in ("", "default") else {},
        facts={"run_name": found.run_name},
    )


def _make_equal(ms: float | None, requests: int) -> Latencies:
    """Return the statistics of a time that all requests have in common."""
    return Latencies() if ms is None else Latencies(mean=ms, p50=ms, p90=ms, p95=ms, p99=ms, samples=requests)
