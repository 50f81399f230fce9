"""List the runs under results/ that have records."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"
RUNS_WITH_REMOVED_OPTIONS = [
    RESULTS / "linear-experts_H200/experts_H200_2026-11-22" / "v3-tp2" / "overlap",
    RESULTS / "exchanges_H100-H200/kernels-exchanges_4xH200_2026-11-21" / "overlap",
]
"""Runs measured with `--overlap`, which was removed because of their results (docs/kernels.md). Only the version that wrote
them can read them."""
RUNS = sorted({path.parent for path in RESULTS.rglob("records.jsonl")} - set(RUNS_WITH_REMOVED_OPTIONS))
