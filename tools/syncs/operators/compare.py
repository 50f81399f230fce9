"""Compare predicted with measured waits, case by case: `python -m tools.syncs.operators.compare MEASURED PREDICTED …`.

MEASURED is the record that measure.py writes, PREDICTED what predict.py writes, in one or several parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_WAIT_SHARE = 0.65  # minimum share of the queued work for which a waiting call holds the host up
SYNCHRONISING = frozenset(
    {"cudaStreamSynchronize", "Stream Sync", "cudaEventSynchronize", "cudaMemcpy", "cudaFree", "Event Sync"}
)
COPIES = ("Memcpy DtoH", "Memcpy HtoD (Pageable")


@dataclasses.dataclass
class Measurement:
    """Hold the record of one GPU."""

    head: dict[str, Any]
    groups: list[dict[str, Any]]

    def is_held_up(self, call: dict[str, Any]) -> bool:
        """Return True if the call returned only after most of the queued work."""
        return bool(call["ms"] > MIN_WAIT_SHARE * self.head["queued_ms"])

    def has_waited(self, call: dict[str, Any]) -> bool:
        """Return True if the call held the host up and made a synchronising call; loading a kernel only holds the host up."""
        known = any(name in SYNCHRONISING or name.startswith(COPIES) for name in call.get("events", {}))
        return self.is_held_up(call) and (known or bool(call.get("warned")))

    def map_cases(self) -> dict[str, bool]:
        """Return True for each case that waited, by name."""
        calls = (call for group in self.groups for call in group["calls"])
        return {call["what"]: self.has_waited(call) for call in calls if not call["leaf"]}

    def iter_operator_calls(self) -> Iterator[dict[str, Any]]:
        """Yield the calls of single overloads."""
        for group in self.groups:
            yield from (call for call in group["calls"] if call["leaf"])


def read_measurement(path: Path) -> Measurement:
    """Read a record, which may be compressed with gzip."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    head, *groups = map(json.loads, text.splitlines())
    return Measurement(head, groups)


def read_predictions(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the predicted call of each case."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return {call["what"]: call for line in lines for call in json.loads(line)["calls"]}


def main(measured: Path, predicted: list[Path]) -> None:
    """Print the cases in which prediction and measurement differ, and their number."""
    cases, predictions = read_measurement(measured).map_cases(), read_predictions(predicted)
    both = [name for name in cases if name in predictions]
    missed = [name for name in both if cases[name] and not predictions[name]["waits"]]
    false = [name for name in both if predictions[name]["waits"] and not cases[name]]
    for kind, names in (("missed", missed), ("false", false)):
        for name in names:
            sys.stdout.write(f"{kind}: {name} {predictions[name]['waits']}\n")
    waiting = sum(cases[name] for name in both)
    sys.stdout.write(
        f"{len(both)} cases in both files, {waiting} waited, {len(missed)} missed, {len(false)} false; "
        f"{len(cases) - len(both)} measured ones have no prediction\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, metavar="MEASURED")
    parser.add_argument("predicted", nargs="+", type=Path, metavar="PREDICTED")
    args = parser.parse_args()
    main(args.measured, args.predicted)
