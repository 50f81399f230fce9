"""Export for InferenceX: a row per served point as its `process_result.py` makes them from vLLM's file. Times in
seconds.

A row counts input and output tokens in `tput_per_gpu`, and `*_intvty` is 1000 / TPOT in ms. Only points that were
measured on GPUs are written, because rows are compared in a public ranking.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dcpbench.exports import RenderedFiles, bench_files, encode_json_list
from dcpbench.exports.measured_points import PUBLIC, MeasuredPoint, Rule
from dcpbench.points.names import CLOSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.bench_files import ServedPoint

FILE = "inferencex.json"
GPU = re.compile(r"\b(?:gb|mi|h|b|a)\d{2,3}[a-z]?\b")  # hardware as InferenceX names it: `h200`, `mi355x`, `gb200`
SPECULATION = re.compile(r"\bspec=([^,]+)")  # in the settings of an import from InferenceX
OPEN_LOOPS = Rule(
    "with an open loop, while a row has one concurrency",
    lambda m: not (m.record.point.load and m.record.point.load.arrival == CLOSED),
)
NO_LAYOUT_NOR_HARDWARE = Rule(
    "without layout and hardware (import again with --tp N --gpu NAME)",
    lambda m: not m.record.point.tp and not m.device,
)
NO_LAYOUT = Rule(
    "without a layout, so that nothing is known per GPU (import again with --tp N)", lambda m: not m.record.point.tp
)
NO_HARDWARE = Rule("without hardware (import again with --gpu NAME)", lambda m: not m.device)
UNEVEN = Rule(
    "with requests of different lengths, while a row has one isl and one osl", lambda m: None in _get_lengths(m)
)


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return one file with a list of rows."""
    rules = (*PUBLIC, OPEN_LOOPS, NO_LAYOUT_NOR_HARDWARE, NO_LAYOUT, NO_HARDWARE, UNEVEN)
    kept, left_out = bench_files.collect_served(points, *rules)
    return RenderedFiles({FILE: encode_json_list(_build_row(p) for p in kept)} if kept else {}, left_out)


def _build_row(p: ServedPoint) -> dict[str, Any]:
    point, totals, wall = p.m.record.point, p.totals, p.wall_s
    isl, osl = _get_lengths(p.m)
    times = bench_files.collect_statistics(p)
    found: dict[str, Any] = {
        "hw": _find_hardware_name(p.m.device),
        "conc": point.concurrency,
        "image": None,
        "model": point.model,
        "infmax_model_prefix": point.model,
        "framework": p.m.origin,
        "precision": point.weights_precision,
        "spec_decoding": _describe_speculation(p),
        "disagg": False,
        "isl": isl,
        "osl": osl,
        "is_multinode": False,
        "tp": point.tp,
        "pp": point.pp,
        "dcp_size": point.dcp,
        "pcp_size": point.pcp,
        "ep": point.ep_degree,
        "dp_attention": "true" if point.dp > 1 else "false",
        "tput_per_gpu": (totals.input_tokens + totals.output_tokens) / wall / point.gpus,
        "output_tput_per_gpu": totals.output_tokens / wall / point.gpus,
        "input_tput_per_gpu": totals.input_tokens / wall / point.gpus,
    }
    found |= {name.removesuffix("_ms"): ms / 1e3 for name, ms in times.items()}
    found |= {
        name.replace("tpot_ms", "intvty"): 1e3 / ms
        for name, ms in times.items()
        if name.endswith("tpot_ms") and not name.startswith("std") and ms > 0
    }
    return found


def _describe_speculation(p: ServedPoint) -> str:
    """Return `mtp`, the method that an import states, `unknown` for a server that verified drafts, or `none`."""
    stated = SPECULATION.search(p.m.record.point.settings)
    return "mtp" if p.m.record.point.mtp else stated[1] if stated else "unknown" if p.serve.speculation else "none"


def _get_lengths(m: MeasuredPoint) -> tuple[int | None, int | None]:
    load = m.record.point.load
    return (
        (bench_files.parse_fixed_length(load.input_tokens), bench_files.parse_fixed_length(load.output_tokens))
        if load
        else (None, None)
    )


def _find_hardware_name(device: str) -> str:
    found = GPU.search(device.lower())
    return found.group() if found else device.lower()
