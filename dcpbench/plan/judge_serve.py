"""What the workload `serve` asks of a point beyond judge.py, and what to type where it is not so. No torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import CapacityError, MissingPackageError, UsageError, how_to_install
from dcpbench.points import memory
from dcpbench.points.budget import ITEMSIZE, kv_pages, least_pages, memory_plan, most_pages
from dcpbench.points.names import AUTO
from dcpbench.points.shapes import NOPE, ROPE, VALUE
from dcpbench.points.sizes import size_text
from dcpbench.serving.loads import extent
from dcpbench.serving.step_times import read_step_times

if TYPE_CHECKING:
    from dcpbench.points.machine import Probe
    from dcpbench.points.point import Load, Point
    from dcpbench.points.settings import Settings
    from dcpbench.points.shapes import ModelShape
    from dcpbench.serving.step_times import StepTimes

ROW_UNIT = 16
"""Bytes that a thread of kernels/kv_gather reads at once; a test holds the two together."""


def check_serve(point: Point, load: Load, settings: Settings, shape: ModelShape, probe: Probe) -> None:
    """Raise an error that says what to type instead, unless the load can be served by this model in this layout."""
    if settings.step_times:
        known_times(settings.step_times).must_be_of(point, settings.step_times)
    open_ = [f"--{name} {AUTO}" for name in ("backend", "exchange") if getattr(point, name) == AUTO]
    if open_:
        raise UsageError(
            f"{' and '.join(open_)}: serve takes what is named; dcpbench sweep {' '.join(open_)} says which is fastest."
        )
    if point.context > shape.max_position:
        raise UsageError(
            f"requests of {_tokens(load)}, {point.context:,} tokens together, pass {shape.name}'s "
            f"{shape.max_position:,} positions; lower --input-tokens or --output-tokens."
        )
    _check_rows(point, shape)
    _check_chunk(point, load)
    _check_chunk_memory(point, load, shape, probe)
    _check_prefill(point, load, shape, probe)


@functools.cache
def known_times(path: str) -> StepTimes:
    """The step times of --step-times, read once."""
    return read_step_times(Path(path))


def check_serve_memory(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> None:
    """Raise CapacityError unless the pool holds the longest request; with --kv-memory, any request."""
    pages = kv_pages(point, [point], settings, shape, probe)
    one = memory.page_bytes(shape, point.page_size, ITEMSIZE[point.dtype])
    try:
        plan = memory_plan(point, pages, shape, probe)
    except CapacityError as e:
        room = most_pages(point, shape, probe) * one
        more = f" --kv-memory can be up to {size_text(room, '')} here." if settings.kv_memory_bytes is not None else ""
        raise CapacityError(f"{e}.{more}") from e
    if settings.kv_memory_bytes is None:
        return  # sized for the longest request, or more
    assert point.load is not None
    shortest = extent(point.load, settings.trace_path).shortest
    need = memory.pages_for(shortest - 1, point.layout, point.page_size) + memory.PAGES_OF_PADDING
    if need > pages:
        raise CapacityError(
            f"{point.layout}: --kv-memory holds {size_text(plan.kv_bytes)} of KV cache per GPU, and the shortest "
            f"request, {shortest:,} tokens, needs {size_text(need * one)}; all requests here need "
            f"{size_text(least_pages(point) * one, '')} or more."
        )


def _check_rows(point: Point, shape: ModelShape) -> None:
    """A stored prefix comes from the DCP ranks in whole units of the kernel that puts its rows in token order."""

    def row_bytes(dtype: str) -> int:
        return shape.kv_width * ITEMSIZE[dtype]

    if point.dcp == 1 or row_bytes(point.dtype) % ROW_UNIT == 0:
        return
    fits = [f"--dtype {dtype}, " for dtype in ITEMSIZE if row_bytes(dtype) % ROW_UNIT == 0]
    raise UsageError(
        f"--dcp {point.dcp}: the prefix of a prompt is gathered from the ranks in rows that are multiples of "
        f"{ROW_UNIT} bytes, and {shape.name} has KV rows of {shape.kv_width} {point.dtype} numbers, "
        f"{row_bytes(point.dtype)} bytes; use {''.join(fits)}--dcp 1, or dcpbench sweep for decode steps alone."
    )


def _check_chunk(point: Point, load: Load) -> None:
    page = point.page_size * point.dcp
    if load.chunk // point.dp < page:
        of = f" for each of {point.dp} replicas" if point.dp > 1 else ""
        raise UsageError(
            f"--chunk {load.chunk} leaves {load.chunk // point.dp} tokens{of}, and {point.layout} cuts prompts at "
            f"multiples of page size × dcp = {page}; use --chunk {page * point.dp} or more, or a smaller --page-size."
        )


def _check_chunk_memory(point: Point, load: Load, shape: ModelShape, probe: Probe) -> None:
    """A step's chunks must leave something of the GPU; whether weights and KV fit beside them is judged later."""
    total = probe.memory_bytes if probe.device == "cuda" else None
    need = memory.prefill_bytes(shape, point.layout, load.chunk, ITEMSIZE[point.dtype])
    if total is not None and need > total:
        raise CapacityError(
            f"--chunk {load.chunk}: a step of so many prompt tokens needs {size_text(need)} on a GPU of "
            f"{size_text(total)}; use a smaller one, such as --chunk 8192."
        )


def _check_prefill(point: Point, load: Load, shape: ModelShape, probe: Probe) -> None:
    if load.prefill != "flashinfer":
        return
    if probe.device == "cpu":
        raise UsageError("--prefill flashinfer needs a GPU; use --prefill sdpa.")
    if not probe.packages.get("flashinfer"):
        raise MissingPackageError(
            f"--prefill flashinfer: FlashInfer cannot be imported; {how_to_install('flashinfer')}, or use --prefill "
            "sdpa."
        )
    if (shape.nope + shape.rope, shape.value) != (NOPE + ROPE, VALUE) or point.dtype not in ("bf16", "fp16"):
        raise UsageError(
            f"--prefill flashinfer takes keys of {NOPE + ROPE} and values of {VALUE} numbers in bf16 or fp16, and "
            f"{shape.name} has {shape.nope + shape.rope} and {shape.value} in {point.dtype}; use --prefill sdpa."
        )


def _tokens(load: Load) -> str:
    return f"{load.trace}" if load.trace else f"--input-tokens {load.input_tokens} --output-tokens {load.output_tokens}"
