"""The tracked tree: its size, and the links between its documents."""

from __future__ import annotations

import collections
import functools
import re
import subprocess
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools import results

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MAX_TREE_BYTES = 20 << 20  # a transfer to a GPU machine is limited to 64 MiB and also carries parts of a serving engine
MAX_RESULT_FOLDERS = 15
MAX_RESULT_WORDS = 900  # one page, with its tables
PROGRAMS = {".py", ".pyc", ".sh", ".cu", ".cpp"}
CODE = re.compile(r"^(```|~~~).*?^\1|(`+)[^`\n]+\2", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


@functools.cache
def tracked() -> tuple[Path, ...]:
    """Return the files that git tracks and that exist; skip the test outside a clone, where nothing is tracked."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git clone of the repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def documents() -> list[Path]:
    """Return the Markdown files of the project; those under tests/data are expected outputs without their pictures."""
    return [path for path in tracked() if path.suffix == ".md" and not path.is_relative_to(ROOT / "tests")]


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
    text = "".join(c for c in text.lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
    return text.replace(" ", "-")


@functools.cache
def anchors(document: Path) -> frozenset[str]:
    """Return a document's anchors; a repeated heading has a number behind it."""
    text = re.sub(r"^(```|~~~).*?^\1", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    seen: collections.Counter[str] = collections.Counter()
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", text, re.MULTILINE):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def broken(document: Path, existing: frozenset[Path]) -> Iterator[str]:
    """Yield the relative links of a document that have no tracked file, folder or heading."""
    for link in LINK.findall(CODE.sub("", document.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z][a-z+.-]*:", path):
            continue
        target = (document.parent / path).resolve() if path else document
        if target not in existing or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


def test_every_relative_link_has_its_file_and_heading() -> None:
    """A file that is not tracked exists here at most, so that its link fails for everyone else."""
    existing = frozenset(folder for path in tracked() for folder in (path, *path.parents))
    found = {str(path.relative_to(ROOT)): links for path in documents() if (links := list(broken(path, existing)))}
    assert found == {}


def test_a_link_to_an_absent_file_or_heading_is_found(tmp_path: Path) -> None:
    there, page = tmp_path / "there.md", tmp_path / "page.md"
    there.write_text("# 4 × H200, `fp8`: a & b\n## Twice\n## Twice\n```\n# no heading\n```\n")
    page.write_text(
        "# Own\n[a](there.md) [b](there.md#4--h200-fp8-a--b) [c](there.md#twice-1) [d](#own) [e](https://x.org/#y)\n"
        "[f](gone.md) [g](there.md#no-heading) [h](there.md#twice-2) [i](#other) `[code](gone.md)`\n"
        "```\n[k](gone.md)\n```\n"
    )
    found = list(broken(page, frozenset({there, page})))
    assert found == ["gone.md", "there.md#no-heading", "there.md#twice-2", "#other"]


def test_the_tracked_tree_is_small() -> None:
    sizes = {path: path.stat().st_size for path in tracked()}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    assert sum(sizes.values()) <= MAX_TREE_BYTES, (
        f"the tracked files hold {sum(sizes.values()):,} bytes, and at most {MAX_TREE_BYTES:,} are allowed. Pack the raw records of new "
        "results (python -m tools.results pack results/SUBJECT_HARDWARE), remove pictures that no document shows, and remove "
        f"results that newer ones replace. The largest files: {', '.join(str(path.relative_to(ROOT)) for path in largest)}"
    )


def list_result_folders() -> set[Path]:
    """Return the folders below results/ that have tracked files, a folder per subject."""
    inside = (path.relative_to(results.RESULTS) for path in tracked() if path.is_relative_to(results.RESULTS))
    return {results.RESULTS / path.parts[0] for path in inside if len(path.parts) > 1}


def test_results_have_few_folders_with_a_page_and_raw_records_each() -> None:
    """An archive lies in the folder of a subject, or in each of its subfolders."""
    folders = list_result_folders()
    assert 0 < len(folders) <= MAX_RESULT_FOLDERS, "add the measurement to the folder of its subject"
    for folder in folders:
        page = folder / "README.md"
        assert page in tracked(), folder.name
        assert len(page.read_text(encoding="utf-8").split()) <= MAX_RESULT_WORDS, folder.name
        assert any(path.name == results.ARCHIVE and path.is_relative_to(folder) for path in tracked()), folder.name


def test_no_program_lies_in_results() -> None:
    """Programs that measure or that print tables belong into tools/."""
    held = {folder: {Path(name).suffix for name in results.read_members(folder)} for folder in results.packed_folders()}
    found = {folder.name for folder, suffixes in held.items() if suffixes & PROGRAMS}
    assert found == set()
    assert [path for path in tracked() if path.is_relative_to(results.RESULTS) and path.suffix in PROGRAMS] == []


def test_each_archive_holds_the_files_of_its_folder_alone() -> None:
    """Unpacking overwrites no tracked file."""
    for folder in results.packed_folders():
        assert set(tracked()).isdisjoint(folder / name for name in results.read_members(folder)), folder.name


class TestArchives:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A result folder of a repository, with raw records, a report and a picture."""
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        folder = tmp_path / "results" / "decode_H200_2026-01-01"
        for name in ("README.md", "run/records.jsonl", "tables.py", "report/report.md", "run/bench.png"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        subprocess.run(["git", "add", "results/decode_H200_2026-01-01/README.md"], cwd=tmp_path, check=True)
        return folder

    def test_raw_files_come_back(self, folder: Path) -> None:
        assert [str(path) for path in results.pack(folder)] == ["run/records.jsonl", "tables.py"]
        (folder / "run" / "records.jsonl").unlink()
        (folder / results.STAMP).unlink()
        results.unpack(folder)
        assert (folder / "run" / "records.jsonl").read_text() == "run/records.jsonl"

    def test_the_same_files_give_the_same_archive(self, folder: Path) -> None:
        results.pack(folder)
        before = (folder / results.ARCHIVE).read_bytes()
        (folder / "tables.py").touch()
        results.pack(folder)
        assert (folder / results.ARCHIVE).read_bytes() == before

    def test_another_archive_is_unpacked_again(self, folder: Path) -> None:
        results.pack(folder)
        old = (folder / results.ARCHIVE).read_bytes()
        (folder / "tables.py").write_text("new")
        results.pack(folder)
        (folder / results.ARCHIVE).write_bytes(old)
        results.unpack(folder)
        assert (folder / "tables.py").read_text() == "tables.py"

    def test_reports_of_a_measurement_are_left_out(self, folder: Path) -> None:
        """A measurement is a folder inside the folder of its subject; `make results` writes its reports again."""
        for name in ("fp8_H200_2026-01-01/records.jsonl", "fp8_H200_2026-01-01/report-bf16/points.csv"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(name)
        assert "fp8_H200_2026-01-01/records.jsonl" in map(str, results.pack(folder))
        assert not [name for name in results.read_members(folder) if "report" in name]

    def test_a_subfolder_may_have_an_archive_of_its_own(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        results.pack(folder)
        monkeypatch.setattr(results, "RESULTS", folder.parent.parent)
        assert results.packed_folders() == [folder]

    def test_packing_refuses_to_lose_a_file(self, folder: Path) -> None:
        results.pack(folder)
        (folder / "tables.py").unlink()
        with pytest.raises(
            SystemExit, match=r"holds 1 files that .* does not, tables\.py among them\. Unpack it first"
        ):
            results.pack(folder)

    def test_a_folder_without_raw_files_is_refused(self, folder: Path) -> None:
        (folder / "tables.py").unlink()
        (folder / "run" / "records.jsonl").unlink()
        with pytest.raises(SystemExit, match="holds no raw file"):
            results.pack(folder)
