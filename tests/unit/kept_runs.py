"""Load runs with records kept under results/."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"
OF_OPTIONS_THAT_ARE_GONE = [
    RESULTS / "linear-experts_H200/experts_H200_2026-11-22" / "v3-tp2" / "overlap",
    RESULTS / "exchanges_H100-H200/kernels-exchanges_4xH200_2026-11-21" / "overlap",
]
"""Measured with `--overlap`, which was removed because of them (docs/kernels.md). They are kept as they were written, for the
version that wrote them; today's refuses them."""
RUNS = sorted({path.parent for path in RESULTS.rglob("records.jsonl")} - set(OF_OPTIONS_THAT_ARE_GONE))
