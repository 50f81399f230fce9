"""Print a Markdown table of a file that tools.attention_versions or tools.linear_versions wrote.

    python -m tools.versions_table FILE --base now
    python -m tools.versions_table FILE --base now --layers qkv_a,q_b,o,shared-gate-up,shared-down

A row is a case. It has the median µs of a call of the base version, and the time of each other version divided by that of the base: above 1
the base is faster. With --layers, a row has the sums over these layers for a tensor-parallel degree and a number of rows. Exit code 2: the
file cannot be read, or has no such version or layer.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError, RecordsError
from dcpbench.records.lines import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Times = dict[str, dict[str, float]]  # µs of a call by case and version


class Time(msgspec.Struct):
    """Hold the measured time of a version."""

    median_us: float


class Line(msgspec.Struct):
    """Hold a case with the times of its versions."""

    sizes: dict[str, object]
    versions: dict[str, Time]


def read_lines(file: Path) -> list[Line]:
    """Return the cases of a file. Raise RecordsError if it has none, or cannot be read."""
    remedy = "name a file that tools.attention_versions or tools.linear_versions wrote with -o."
    try:
        found = [msgspec.json.decode(line, type=Line) for line in file.read_bytes().splitlines()]
    except OSError as e:
        raise RecordsError(f"{file} cannot be read ({e.strerror}); {remedy}") from e
    except UNREADABLE as e:
        raise RecordsError(f"{file} has a line that is no case ({e}); {remedy}") from e
    if not found:
        raise RecordsError(f"{file} has no case; {remedy}")
    return found


def collect_times(lines: Sequence[Line]) -> Times:
    """Return the median times of each case. The name of a case has the sizes that differ between cases."""
    varied = [name for name in lines[0].sizes if len({str(line.sizes.get(name)) for line in lines}) > 1]
    found: Times = {}
    for line in lines:
        name = ", ".join(f"{size} {line.sizes.get(size)}" for size in varied)
        found[name] = {version: times.median_us for version, times in line.versions.items()}
    return found


def sum_layers(lines: Sequence[Line], layers: Sequence[str]) -> Times:
    """Return the sums of the median times over layers, by tensor-parallel degree and number of rows.

    Raise RecordsError for a case without a layer.
    """
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        for name in str(line.sizes.get("layer", "")).split(", "):
            tp, _, layer = name.partition(" ")
            if not layer:
                raise RecordsError(
                    "--layers needs times of layers, and the file has none; name a file of tools.linear_versions."
                )
            if layer in layers:
                for version, times in line.versions.items():
                    sums[f"{tp}, rows {line.sizes.get('rows')}"][version] += times.median_us
    return {name: dict(times) for name, times in sums.items()}


def format_table(times: Times, base: str) -> Iterator[str]:
    """Yield the lines of a table with a row for each case that has the base version."""
    others = list(dict.fromkeys(version for found in times.values() for version in found if version != base))
    yield f"| case | {base}, µs | {' | '.join(others)} |"
    yield f"|---|--:|{'--:|' * len(others)}"
    for name, found in times.items():
        if base in found:
            ratios = (f"{found[version] / found[base]:.2f}" if version in found else "" for version in others)
            yield f"| {name} | {found[base]:.1f} | {' | '.join(ratios)} |"


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file that one of these tools wrote with -o")
    parser.add_argument("--base", default="now", help="version that others are compared with; default: %(default)s")
    parser.add_argument("--layers", default="", help="layers to sum, for a file of tools.linear_versions")
    args = parser.parse_args(arguments)
    try:
        lines = read_lines(args.file)
        times = sum_layers(lines, args.layers.split(",")) if args.layers else collect_times(lines)
    except DcpbenchError as e:
        parser.error(str(e))
    if not any(args.base in found for found in times.values()):
        versions = dict.fromkeys(version for found in times.values() for version in found)
        parser.error(f"{args.file} has no times of {args.base}; --base takes one of {', '.join(versions)}")
    for row in format_table(times, args.base):
        sys.stdout.write(f"{row}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
