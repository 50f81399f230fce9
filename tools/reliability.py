"""Writes docs/reliability.md from what the table of faults, kills, fuzzing and mutants left.

    python -m tools.reliability results/reliability_CPU_2026-11-25

The folder holds `faults.xml` (pytest --junitxml of tests/faults), `kills-*.jsonl` (tools.kills --out), `fuzz.jsonl`
(tools.fuzz --out), `mutants-first-SEED.jsonl` (tools.mutation run --out) and `mutants-again-*.jsonl` (run --again); each row of the page comes from one of them, and what
is not there is said to be missing.
"""

from __future__ import annotations

import collections
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from tools.mutation import EQUIVALENT, EQUIVALENTS

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
HEAD = """# How reliable it is, as measured

Written by `python -m tools.reliability {folder}` from the raw records there; do not edit. All of it ran on CPUs, and none of it says
anything about performance. Times that processes took to end are those of a busy machine of two cores.
"""
ABSENT = "Not measured: the folder holds no such file.\n"


def rows(paths: list[Path]) -> list[dict[str, Any]]:
    """All lines of files of JSON lines."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def table(head: tuple[str, ...], lines: list[tuple[object, ...]]) -> str:
    """A table of Markdown."""
    texts = [f"| {' | '.join(map(str, line))} |" for line in [head, ("---",) * len(head), *lines]]
    return "\n".join(texts) + "\n"


def faults(folder: Path) -> str:
    """The table of faults: how many lines of it are green, by whom it hits and by moment."""
    path = folder / "faults.xml"
    text = (
        "\n## Faults\n\n`tests/faults/table.py` has what goes wrong, at which moment, and what is expected then. After each, the same "
        "command with `--resume` must end with 0, with one good record of each point, and no process left. "
        "`make test` has a short form, `make soak` all.\n\n"
    )
    if not path.exists():
        return text + ABSENT
    cases = ET.parse(path).getroot().iter("testcase")  # noqa: S314 -- as above
    green: collections.Counter[str] = collections.Counter()
    red: collections.Counter[str] = collections.Counter()
    for case in cases:
        whom = re.search(r"\[(\w+?)[-\]]", case.get("name", ""))
        kind = whom[1] if whom and "survived" in case.get("name", "") else "records" if whom else ""
        if kind:
            bad = case.find("failure") is not None or case.find("error") is not None
            (red if bad else green)[kind] += 1
    kinds = sorted({*green, *red})
    lines: list[tuple[object, ...]] = [(kind, green[kind], red[kind]) for kind in kinds]
    return text + table(("hit", "green", "red"), [*lines, ("all", green.total(), red.total())])


def kills(folder: Path) -> str:
    """Random kills."""
    text = (
        "\n## Random kills\n\n`python -m tools.kills --points 200`: the command, torchrun's agent, ranks and the processes that keep "
        "account of them are killed at random moments, one or several at once, with signals 9, 15 and 2; the command is repeated with "
        "`--resume`. Quick ranks and their agent are processes without torch; real ones are torchrun and gloo.\n\n"
    )
    found: list[tuple[object, ...]] = []
    for path in sorted(folder.glob("kills-*.jsonl")):
        count = next((row for row in rows([path]) if "count" in row), None)
        if count is None:
            continue
        c = count["count"]
        whole = f"{c['sweeps']} of {count['points']} points, {c['commands']} commands"
        zeros = tuple(c[name] for name in ("lost", "duplicated", "alive", "refused", "late", "other"))
        found.append((count["ranks"], c["kills"], whole, *zeros, f"{c['noticed_s']:.1f} s", f"{c['longest_s']:.1f} s"))
    head = (
        *(
            "ranks",
            "kills",
            "sweeps",
            "records lost",
            "twice",
            "strays after 5 s",
            "resumes refused",
            "noticed after 5 s",
        ),
        *("other", "longest until a killed rank was noticed", "longest that anything outlived its parent"),
    )
    return text + (table(head, found) if found else ABSENT)


def fuzz(folder: Path) -> str:
    """Damaged files."""
    path = folder / "fuzz.jsonl"
    text = (
        "\n## Damaged files\n\n`python -m tools.fuzz`: files of every kind that is read, damaged at random, are to be read or refused in a "
        "sentence. Wrong is any other exception; slow, over 2 s of a CPU; large, over 1 GiB of memory. Of a sealed record each single bit "
        "was flipped, and each flip is to be noticed.\n\n"
    )
    if not path.exists():
        return text + ABSENT
    found = rows([path])
    total: collections.Counter[str] = collections.Counter()
    lines: list[tuple[object, ...]] = []
    for row in found:
        numbers = [row[name] for name in ("inputs", "read", "refused", "wrong", "slow", "memory")]
        lines.append(
            (row["kind"], *(f"{n:,}" for n in numbers), f"{row['slowest_s']:.2f} s", f"{row['peak_bytes'] >> 20} MiB")
        )
        total.update({name: row[name] for name in ("inputs", "read", "refused", "wrong", "slow", "memory")})
    lines.append(("all", *(f"{total[n]:,}" for n in ("inputs", "read", "refused", "wrong", "slow", "memory")), "", ""))
    return text + table(
        ("kind", "inputs", "read", "refused", "wrong", "slow", "large", "slowest", "most memory"), lines
    )


def mutants(folder: Path) -> str:
    """Changed lines: of each round at first sight, and of each room with what was tried again afterwards."""
    firsts = sorted(folder.glob("mutants-first-*.jsonl"))
    text = (
        "\n## Changed lines\n\n`python -m tools.mutation run`: lines of the rooms without a GPU, changed at random by cosmic-ray's operators; a "
        "change is seen where a test fails that passes without it. Tests that start processes of their own are not asked, so that what only "
        "they run counts as not reached; of a line that many tests run, those that take 60 s together are (20 s up to seed 116). Equivalent are "
        "changes that nobody could see, each listed with its reason in tools/mutation_equivalents.txt, most of them once they had survived; gone "
        "are those of lines that are no more. The aim is 500 mutants and 90 %.\n\n"
    )
    if not firsts:
        return text + ABSENT
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    lines: list[tuple[object, ...]] = []
    newest: collections.Counter[str] = collections.Counter()
    together: list[str] = []
    for path in firsts:
        own = _judged(rows([path]))
        lines.append((path.stem.rpartition("-")[2], *_score(collections.Counter(row["what"] for row in own))))
        found |= {_which(row): row for row in own}
    for path in reversed(firsts):  # the newest rounds, as many as the aim takes
        if newest.total() < AIM:
            newest.update(row["what"] for row in _judged(rows([path])))
            together.insert(0, path.stem.rpartition("-")[2])
    lines.append((f"{together[0]} to {together[-1]}", *_score(newest)))
    text += (
        "The rounds as they were first tried, each by a seed of its own, while tests were written for what earlier rounds showed:\n\n"
        + table(("seed", *SCORE), lines)
    )
    later = _judged(rows(sorted(folder.glob("mutants-again-*.jsonl"))))
    tried = {_which(row): row for row in later}
    found |= tried
    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in found.values():
        rooms[row["path"].split("/")[1]][row["what"]] += 1
    rooms = dict(sorted(rooms.items())) | {"all": sum(rooms.values(), collections.Counter())}
    text += (
        f"\nThe same mutants by room, with {len(tried)} of them tried again after further tests had been written; what became seen by that "
        "says nothing of lines that were not drawn: for those the last line above is the better guess.\n\n"
    )
    return text + table(("room", *SCORE), [(room, *_score(c)) for room, c in rooms.items()])


AIM = 500
SCORE = ("mutants", "seen", "survived", "not reached", "equivalent", "gone", "seen of the others")


def _score(c: collections.Counter[str]) -> tuple[object, ...]:
    counted = c.total() - c["equivalent"] - c["gone"]
    score = f"{100 * c['seen'] / counted:.0f} %" if counted else "–"
    return c.total(), c["seen"], c["survived"], c["not reached"], c["equivalent"], c["gone"], score


def _judged(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What came of mutants, by what is known to be equivalent today."""
    known = set(EQUIVALENTS.read_text(encoding="utf-8").splitlines())
    same = [f"{row['path']}: {row['was'].strip()} => {row['now'].strip()}" in known for row in tried]
    return [row | ({"what": EQUIVALENT} if equal else {}) for row, equal in zip(tried, same, strict=True)]


def _which(row: dict[str, Any]) -> tuple[object, ...]:
    """What tells mutants apart, however lines have moved since."""
    return row["path"], row["operator"], row["occurrence"] if row.get("first") is None else row["first"], row["now"]


def main(arguments: list[str]) -> int:
    """Write the page."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    text = (
        HEAD.format(folder=arguments[0].rstrip("/")) + faults(folder) + kills(folder) + fuzz(folder) + mutants(folder)
    )
    PAGE.write_text(text, encoding="utf-8")
    print(f"Wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
