"""Compute the errors of published latency forecasts, and the coverage of bands from the cases of other machines.

    python -m tools.latency_check [--write]

It prints the bands of points/latency_bands.py and their coverage, which docs/recommend.md and docs/emulation.md have. --write estimates and
collects the cases again from results/ (three minutes, no GPU) and writes dcpbench/points/measured/latencies-h200.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcpbench.models import load_shape
from dcpbench.plan.grid import format_point_load
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points import latency_bands
from dcpbench.points.budget import plan_engine
from dcpbench.points.cluster_specs import MEASURED_ON, load_machine
from dcpbench.points.latency_bands import EMULATED, ESTIMATED, TOGETHER, Case, Kind, Metric, Published
from dcpbench.points.names import CLOSED, GAMMA
from dcpbench.points.settings import Settings
from dcpbench.recommend import estimate, forecast
from dcpbench.records.runs import read_run
from tools.results import unpack_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[1]
OUTPUT_FILE = ROOT / "dcpbench" / "points" / "measured" / f"latencies-{MEASURED_ON.lower()}.json"
FOLDER_4_GPUS, FOLDER_2_GPUS = "decode_4xH200/decode-serving-fp8_4xH200_2026-11-26", "decode-serving_2xH200_2026-11-26"
CHUNKS, LIVE, FOLDER_1_GPU = (
    "emulation_H200/emulated-chunks_4xH200_2026-11-26",
    "serving_4xH200/attention-dp-live_4xH200_2026-11-27",
    "replay_H100-H200/replay-against-live_H200_2026-11-26",
)
SERVED = (  # live runs without torch's grouped product of experts, which took up to three times as long
    f"{FOLDER_4_GPUS}/served/*",
    f"{FOLDER_2_GPUS}/served/*",
    f"{FOLDER_2_GPUS}/again/served/*",
    f"{CHUNKS}/served/*",
    *(f"{LIVE}/{name}" for name in ("dcp", "dp", "dpx")),
    f"{FOLDER_1_GPU}/live-*",
    f"{FOLDER_1_GPU}/before/live-*",
    f"{FOLDER_1_GPU}/v3-open/live-*",
)
REPLAYED = (f"{FOLDER_4_GPUS}/seed/*", f"{FOLDER_4_GPUS}/seed-k2/*", f"{FOLDER_4_GPUS}/seed-k2-4gib/*")
"""Replays with step times of all GPUs. Two thirds are of Kimi-K2, which has no live run with the present kernel of experts."""
FORECAST = {
    f"{FOLDER_4_GPUS}/replays/emulated-*": f"{FOLDER_4_GPUS}/served/*",
    f"{FOLDER_2_GPUS}/replays/emulated-*": f"{FOLDER_2_GPUS}/served/*",
    f"{FOLDER_2_GPUS}/again/replays/emulated-*": f"{FOLDER_2_GPUS}/again/served/*",
    f"{CHUNKS}/replays/emulated-*": f"{CHUNKS}/served/*",
    f"{CHUNKS}/calibrated/pair/emulated-*": f"{CHUNKS}/served/*",
    f"{LIVE}/replays/alone-*": f"{LIVE}/dcp",
    f"{LIVE}/replays/together-*": f"{LIVE}/dcp",
}
"""Replays with step times of one GPU, and the runs that served the same loads.

Of `calibrated/` these are the forecasts with `prompts` from the other pair of GPUs.
"""


def read_served(pattern: str) -> Iterator[tuple[str, Record]]:
    """Yield the folder, relative to the repository, and the record of each served load of the runs."""
    results = unpack_all()
    for folder in sorted(results.glob(pattern)):
        if not (folder / "records.jsonl").is_file():
            continue
        for record in read_run(folder).records:
            if record.outcome == "ok" and record.serve is not None:
                yield str(folder.relative_to(ROOT)), record


def estimate_case(source: str, record: Record) -> Case | None:
    """Return the case of a record with the estimate of `recommend`, fitted without its model; None without an ITL."""
    point, serve = record.point, record.serve
    assert serve is not None
    assert point.load is not None
    assert record.environment is not None
    kv = record.measured_with.get("kv_memory_bytes")
    settings = Settings(kv_memory_bytes=kv if isinstance(kv, int) else None)
    steps, machine = estimate.load_published_steps(), load_machine(MEASURED_ON)
    plan = plan_engine(
        [point], settings, load_shape(point.model), make_planned_probe(MEASURED_ON, machine.gpus_per_host)
    )
    estimator = forecast.Estimator(point, machine, steps.without[point.model])
    found = forecast.replay_estimated(estimator, forecast.limit_requests(point), plan, settings)
    expected = found.serve
    if not (serve.itl_ms.p50 and serve.ttft_ms.p50 and expected.itl_ms.p50 and expected.ttft_ms.p50):
        return None
    return Case(
        kind=ESTIMATED,
        source=source,
        forecast="",
        machine=record.environment.host_hash,
        load=format_load(record),
        arrival=point.load.arrival,
        ttft=round(serve.ttft_ms.p50 / expected.ttft_ms.p50, 4),
        itl=round(serve.itl_ms.p50 / expected.itl_ms.p50, 4),
        mixed_share=round(found.mixed_share, 4),
        mixed_share_measured=measure_mixed_share(record),
    )


def measure_mixed_share(record: Record) -> float | None:
    """Return the share of token gaps whose step has prompts; None if the record has no number of steps."""
    serve = record.serve
    if serve is None or not serve.decode_steps or None in (serve.decode_batch, serve.output_tokens, serve.finished):
        return None
    assert serve.decode_batch is not None
    assert serve.output_tokens is not None
    assert serve.finished is not None
    return round(1 - serve.decode_batch * serve.decode_steps / (serve.output_tokens - serve.finished), 4)


def format_load(record: Record) -> str:
    """Format model, layout, exchange and load."""
    point = record.point
    return f"{point.model} {point.layout_name} {point.format_exchange_label()}, {format_point_load(point)}"


def iter_emulated_cases() -> Iterator[Case]:
    """Yield the cases of loads that all GPUs served, with the forecast from one GPU."""
    for pattern, served in FORECAST.items():
        live = {make_load_key(record): (source, record) for source, record in read_served(served)}
        for folder, forecast_record in read_served(pattern):
            source, record = live[make_load_key(forecast_record)]
            assert forecast_record.emulated is not None
            assert forecast_record.point.load is not None
            assert record.environment is not None
            measured, expected = record.serve, forecast_record.serve
            assert measured is not None
            assert expected is not None
            assert measured.ttft_ms.p50
            assert expected.ttft_ms.p50
            assert measured.itl_ms.p50
            assert expected.itl_ms.p50
            yield Case(
                kind=TOGETHER if forecast_record.emulated.prompts else EMULATED,
                source=source,
                forecast=folder,
                machine=record.environment.host_hash,
                load=format_load(record),
                arrival=forecast_record.point.load.arrival,
                ttft=round(measured.ttft_ms.p50 / expected.ttft_ms.p50, 4),
                itl=round(measured.itl_ms.p50 / expected.itl_ms.p50, 4),
            )


def make_load_key(record: Record) -> tuple[object, ...]:
    """Return the fields that are equal for a forecast and a served point of one load."""
    point, load = record.point, record.point.load
    assert load is not None
    load_fields = (load.arrival, load.request_rate, load.input_tokens, load.output_tokens, load.requests, load.turns)
    return (point.model, point.layout_name, point.exchange, point.concurrency, *load_fields)


def collect_cases() -> list[Case]:
    """Return all cases, estimated ones first."""
    estimated = [
        case
        for pattern in (*SERVED, *REPLAYED)
        for source, record in read_served(pattern)
        if not record.point.emulate and (case := estimate_case(source, record))
    ]
    return [*estimated, *iter_emulated_cases()]


class Coverage(NamedTuple):
    """Count cases inside the band of the cases of other machines."""

    inside: int
    cases: int  # cases with a band
    without_number: int  # cases without a forecast of this metric


def compute_coverage(kind: Kind, metric: Metric, arrival: str, cases: Sequence[Case]) -> Coverage:
    """Count the cases of each machine inside the band of the cases of all other machines."""
    inside = known = unknown = 0
    for case in (c for c in cases if c.kind == kind and c.arrival == arrival):
        others = [c for c in cases if c.machine != case.machine]
        band = latency_bands.find_band(kind, metric, arrival, others, case.mixed_share)
        if band is None:
            unknown += 1
            continue
        low, high = band.compute_ends(1.0)
        known += 1
        inside += low <= getattr(case, metric) <= high
    return Coverage(inside=inside, cases=known, without_number=unknown)


def format_table(cases: list[Case]) -> list[str]:
    """Format the bands and their coverage as a Markdown table."""
    lines = [
        "| forecast | arrivals | p50 of | cases, machines | measured / forecast | band | left-out cases inside | without estimate |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for kind in (ESTIMATED, EMULATED, TOGETHER):
        for arrival, arrival_text in ((CLOSED, "closed loop"), (GAMMA, "at a rate")):
            for metric in ("ttft", "itl"):
                band = latency_bands.find_band(kind, metric, arrival, cases, 0.0)
                if band is None:
                    continue
                found = compute_coverage(kind, metric, arrival, cases)
                inside = f"{found.inside} of {found.cases}"
                lines.append(
                    f"| {kind} | {arrival_text} | {metric.upper()} | {band.cases}, {band.machines} | {band.low:.2f} to {band.high:.2f} | "
                    f"× or / {band.factor:.2f} | "
                    f"{inside} | {found.without_number} |"
                )
    max_share = latency_bands.compute_max_sure_share(cases)
    return [
        *lines,
        "",
        f"ITL p50 is estimated if less than {max_share * 100:.0f} % of gaps contain a step with prompts; else the",
    ]


def main() -> int:
    """Print the table; with --write, collect the cases again before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"collect the cases again, and write {OUTPUT_FILE.name}")
    if parser.parse_args().write:
        content = msgspec.json.encode(Published(gpu=MEASURED_ON, cases=collect_cases()))
        OUTPUT_FILE.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
        latency_bands.load_published.cache_clear()
    sys.stdout.write("\n".join(format_table(list(latency_bands.load_published()))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
