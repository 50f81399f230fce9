"""Write the list of measured operators: `python -m tools.syncs.operators.table MEASURED > FILE`.

MEASURED is the record that measure.py writes, FILE is dcpbench/syncs/dry_run/measured_operators.txt.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.syncs.operators.compare import Measurement, read_measurement

IN_CORPUS = (
    "aten::_assert_async",
    "aten::randperm",
)  # used by programs of tools/syncs/corpus, with measured waits
HEAD = (
    "# Operators whose waits were measured: {device}, torch {torch}.",
    "# Written by `python -m tools.syncs.operators.table results/syncs-graphs_H200/hidden-syncs-operators_H200_2026-11-28/ops.jsonl`,",
    "# which `make unpack` unpacks. Some operators are in programs of tools/syncs/corpus alone.",
)


def format_table(measured: Measurement) -> str:
    """Return the operators in alphabetical order, one in a line, below a comment."""
    names = {"::".join(overload.split(".")[:2]) for overload in measured.operators()}
    head = "\n".join(HEAD).format(**measured.head)
    return "\n".join([head, *sorted({*names, *IN_CORPUS})]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(format_table(read_measurement(Path(sys.argv[1]))))
