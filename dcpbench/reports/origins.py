"""Points that another tool measured: which they are, and how their numbers differ from ours."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dcpbench.points.names import SGLANG, VLLM
from dcpbench.records.provenance import OURS
from dcpbench.show.text import counted

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.reports.frames import Frames

TOOLS = {VLLM: "vLLM (`vllm bench serve`)", SGLANG: "SGLang (`bench_serving`)"}


def some_imported(table: pd.DataFrame) -> bool:
    """Whether a table holds points of others, so that each row must say whose it is."""
    return not table.empty and bool((table["origin"] != OURS).any())


def sentence(frames: Frames) -> str:
    """Whose points stand beside ours, and what keeps them from being compared digit by digit; empty without any."""
    table = frames.served
    if not some_imported(table):
        return ""
    counts = Counter(name for name in table["origin"] if name != OURS)
    whose = " and ".join(f"{counted(n, 'point')} of {TOOLS.get(name, name)}" for name, n in counts.items())
    others = len(table) - counts.total()
    beside = f", beside {counted(others, 'point')} of dcpbench" if others else ""
    return (
        f"Imported: {whose}{beside}. Engines are measured through HTTP and with a tokenizer, dcpbench without either, "
        "so that more than the layout differs. What their files do not say is a dash."
    )
