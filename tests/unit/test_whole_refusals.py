"""What is said of files with one wrong value, whole, as tests/data/said/refused/ has it.

Each value of a good file of each kind in turn is another one that may not be there. `SAID=write` writes the files anew, as for
test_whole_outputs.py.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import DcpbenchError
from tests.unit.hostile_files import KINDS, spoiled
from tests.unit.test_whole_outputs import hold

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VALUES = ("-1", "0", "null", '"x"', "true", "0.5", "[]", "{}", "1e308", "99999999999")
KEPT = (
    *(
        "checks",
        "model",
        "job",
        "step times",
        "options in TOML",
        "options of serve",
        "machine",
        "requests",
        "requests of Mooncake",
    ),
    *(
        "requests in CSV",
        "prompts",
        "results of vLLM",
        "results of SGLang",
        "results of InferenceX",
        "signals of a hang",
    ),
    *("flight recorder", "baseline of syncs", "pyproject"),
)
TOLD = (
    "model",
    "requests",
    "requests of Mooncake",
    "requests in CSV",
    "prompts",
    "machine",
    "baseline of syncs",
    "pyproject",
)
"""Of these what was read is told, too."""
SLOW = (
    "results of vLLM",
    "results of SGLang",
    "results of InferenceX",
    "step times",
    "job",
    "flight recorder",
    "machine",
    "checks",
)
"""Of these fewer places and values are tried."""


def places(content: bytes, most: int) -> Iterator[int]:
    """Before each value, as far as so many."""
    marks = [m.start() for m in re.finditer(rb"[:=,\[]", content)]
    step = -(-len(marks) // most)
    yield from marks[::step]


@pytest.mark.parametrize("kind", KEPT)
def test_a_wrong_value_is_refused_in_these_words(kind: str, tmp_path: Path) -> None:
    """Of sentences that differ in numbers alone the first three."""
    of = KINDS[kind]
    folder = tmp_path / "of-one-name"  # a model is called as its folder
    folder.mkdir()
    content, path = of.content(folder), folder / of.name
    values, most = (VALUES[:5], 16) if kind in SLOW else (VALUES, 48)
    lines = []
    seen: collections.Counter[str] = collections.Counter()
    for at in places(content, most):
        for value in values:
            path.write_bytes(wrong := spoiled(content, at, value.encode()))
            try:
                found = of.read(path)
                said = f"read: {str(found).replace(str(folder), 'FOLDER')[:160]}" if kind in TOLD else "read"
            except DcpbenchError as e:
                said = f"{type(e).__name__}: {e}"
                said = re.sub(r"not valid TOML: .*?([;.])", r"not valid TOML: …\1", said)  # Python's own words
            alike = re.sub(r"[\d.,]+|'[^']*'", "#", said)
            seen[alike] += 1
            if seen[alike] <= 3 and said != "read":
                changed = wrong[max(at - 14, 0) : at + len(value) + 3].decode(errors="replace").replace("\n", "⏎")
                lines.append(f"{changed} → {said}")
    counts = f"{sum(seen.values()) - seen['read']} of {sum(seen.values())} refused or told"
    hold(f"refused/{kind.replace(' ', '-')}.txt", "\n".join([counts, *lines]), folder)
