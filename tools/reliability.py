"""Print the tables of fault injection, random kills, fuzzing and mutation testing from their raw records, in Markdown.

    python -m tools.reliability results/reliability_CPU-H100-H200/reliability_CPU_2026-11-25

The folder has `faults.xml` (pytest --junitxml of tests/faults), `kills-*.jsonl` (tools.kills --out), `fuzz.jsonl` (tools.fuzz --out),
`mutants-first-SEED.jsonl` (tools.mutation run --out) and `mutants-again-*.jsonl` (run --again). A section says so if its files are missing.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from tools.mutation import EQUIVALENT, EQUIVALENTS, read_rows

ABSENT = "Not measured: the folder has no such file.\n"


def format_table(head: tuple[str, ...], lines: list[tuple[object, ...]]) -> str:
    """Format a Markdown table."""
    texts = [f"| {' | '.join(map(str, line))} |" for line in [head, ("---",) * len(head), *lines]]
    return "\n".join(texts) + "\n"


def format_faults(folder: Path) -> str:
    """Format the section on injected faults: passed and failed tests by the process that is hit."""
    path = folder / "faults.xml"
    text = (
        "\n## Injected faults\n\n`tests/faults/table.py` lists each fault, its moment and the expected outcome. After each fault, the same "
        "command with `--resume` must exit with 0, with one valid record per point and no process left. "
        "`make test` runs a short form, `make soak` all faults.\n\n"
    )
    if not path.exists():
        return text + ABSENT
    cases = ET.parse(path).getroot().iter("testcase")  # noqa: S314 -- pytest wrote the file
    passed: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    for case in cases:
        whom = re.search(r"\[(\w+?)[-\]]", case.get("name", ""))
        kind = whom[1] if whom and "survived" in case.get("name", "") else "records" if whom else ""
        if kind:
            has_failed = case.find("failure") is not None or case.find("error") is not None
            (failed if has_failed else passed)[kind] += 1
    kinds = sorted({*passed, *failed})
    lines: list[tuple[object, ...]] = [(kind, passed[kind], failed[kind]) for kind in kinds]
    return text + format_table(("process hit", "passed", "failed"), [*lines, ("all", passed.total(), failed.total())])


def format_kills(folder: Path) -> str:
    """Format the section on random kills."""
    text = (
        "\n## Random kills\n\n`python -m tools.kills --points 200` kills the command, torchrun's agent, ranks and their supervising "
        "processes at random moments, one or several at once, with signals 9, 15 and 2, and repeats the command with `--resume`. "
        "`quick` ranks are processes without torch; `real` ones use torchrun and gloo.\n\n"
    )
    found: list[tuple[object, ...]] = []
    for path in sorted(folder.glob("kills-*.jsonl")):
        count = next((row for row in read_rows([path]) if "count" in row), None)
        if count is None:
            continue
        c = count["count"]
        whole = f"{c['sweeps']} of {count['points']} points, {c['commands']} commands"
        zeros = tuple(c[name] for name in ("lost", "duplicated", "alive", "refused", "late", "other"))
        found.append((count["ranks"], c["kills"], whole, *zeros, f"{c['noticed_s']:.1f} s", f"{c['longest_s']:.1f} s"))
    head = (
        *("ranks", "kills", "sweeps", "lost records", "duplicates", "strays after 5 s", "refused resumes"),
        *("kills unnoticed after 5 s", "other", "longest time to notice", "longest survival of a parent's end"),
    )
    return text + (format_table(head, found) if found else ABSENT)


def format_fuzz(folder: Path) -> str:
    """Format the section on damaged input files, with columns of violations only if there are any."""
    path = folder / "fuzz.jsonl"
    text = (
        "\n## Damaged files\n\n`python -m tools.fuzz` damages files of every format at random. Each must be read or refused with a message. "
        "Wrong: any other exception; slow: over 2 s of CPU time; large: over 1 GiB of memory. In a record with a checksum each bit is "
        "flipped, and each flip must be detected.\n\n"
    )
    if not path.exists():
        return text + ABSENT
    found = read_rows([path])
    keys = ("inputs", "read", "refused", "wrong", "slow", "memory")
    total = {key: sum(row[key] for row in found) for key in keys}
    faulty = [key for key in ("wrong", "slow", "memory") if total[key]]
    shown = ["inputs", "refused", *faulty]
    lines: list[tuple[object, ...]] = [
        (
            row["kind"],
            *(f"{row[key]:,}" for key in shown),
            f"{row['slowest_s']:.2f} s",
            f"{row['peak_bytes'] >> 20} MiB",
        )
        for row in found
    ]
    lines.append(("all", *(f"{total[key]:,}" for key in shown), "", ""))
    text += "" if faulty else "No input was wrong, slow or large.\n\n"
    names = ["large" if key == "memory" else key for key in shown]
    return text + format_table(("format", *names, "slowest", "peak memory"), lines)


def format_mutants(folder: Path) -> str:
    """Format the section on mutation tests: the newest rounds, and all mutants by subpackage."""
    firsts = sorted(folder.glob("mutants-first-*.jsonl"))
    text = (
        "\n## Mutation tests\n\n`python -m tools.mutation run` changes lines of the subpackages without GPU code at random, by cosmic-ray's "
        "operators. A mutant is killed if a test fails that passes without the change. Tests that start processes are excluded, so "
        "lines that only they run are not reached. Of a line that many tests run, tests of 60 s in total are selected (20 s up to seed 116). "
        "Equivalent mutants are listed with reasons in tools/mutation_equivalents.txt; the lines of obsolete ones no longer exist. "
        "The aim is 500 mutants and 90 %. The tests of these rounds also compared 272 whole outputs, of which 20 remain; the rounds have not "
        "been repeated since.\n\n"
    )
    if not firsts:
        return text + ABSENT
    judged = {path: _mark_equivalents(read_rows([path])) for path in firsts}
    found = {_make_key(row): row for rows in judged.values() for row in rows}
    newest: collections.Counter[str] = collections.Counter()
    lines: list[tuple[object, ...]] = []
    for path in reversed(firsts):  # the newest rounds, until they have TARGET_MUTANTS
        if newest.total() < TARGET_MUTANTS:
            rows = collections.Counter(row["what"] for row in judged[path])
            newest += rows
            lines.insert(0, (path.stem.rpartition("-")[2], *_format_score(rows)))
    text += f"The newest of {len(firsts)} rounds, each with a separate seed, at their first run:\n\n" + format_table(
        ("seed", *SCORE_COLUMNS), [*lines, ("together", *_format_score(newest))]
    )
    later = _mark_equivalents(read_rows(sorted(folder.glob("mutants-again-*.jsonl"))))
    tried = {_make_key(row): row for row in later}
    found |= tried
    packages: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in found.values():
        packages[row["path"].split("/")[1]][row["what"]] += 1
    packages = dict(sorted(packages.items())) | {"all": sum(packages.values(), collections.Counter())}
    text += (
        f"\nMutants of all rounds by subpackage, with {len(tried)} of them repeated after further tests were written. "
        "For lines without a mutant, the table above is the better estimate.\n\n"
    )
    return text + format_table(
        ("subpackage", *SCORE_COLUMNS), [(name, *_format_score(c)) for name, c in packages.items()]
    )


TARGET_MUTANTS = 500
SCORE_COLUMNS = ("mutants", "killed", "survived", "not reached", "equivalent", "obsolete", "killed of the rest")


def _format_score(c: collections.Counter[str]) -> tuple[object, ...]:
    counted = c.total() - c["equivalent"] - c["gone"]
    score = f"{100 * c['seen'] / counted:.0f} %" if counted else "–"
    return c.total(), c["seen"], c["survived"], c["not reached"], c["equivalent"], c["gone"], score


def _mark_equivalents(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, with the outcome EQUIVALENT for listed mutants."""
    known = set(EQUIVALENTS.read_text(encoding="utf-8").splitlines())
    same = [f"{row['path']}: {row['was'].strip()} => {row['now'].strip()}" in known for row in tried]
    return [row | ({"what": EQUIVALENT} if equal else {}) for row, equal in zip(tried, same, strict=True)]


def _make_key(row: dict[str, Any]) -> tuple[object, ...]:
    """Return a key of a mutant that is valid even if its line moves."""
    return row["path"], row["operator"], row["occurrence"] if row.get("first") is None else row["first"], row["now"]


def main(arguments: list[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder; unpack results first: python -m tools.results unpack")
    print(format_faults(folder) + format_kills(folder) + format_fuzz(folder) + format_mutants(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
