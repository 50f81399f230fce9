"""Test the tracked tree: its size, and the links between its documents."""

from __future__ import annotations

import collections
import functools
import re
import subprocess
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import UsageError
from tools import results

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MAX_TREE_BYTES = 20 << 20  # a transfer to a GPU machine is limited to 64 MiB and also carries parts of a serving engine
MAX_RESULT_FOLDERS = 15
MAX_RESULT_WORDS = 900  # one printed page, with its tables
PROGRAMS = {".py", ".pyc", ".sh", ".cu", ".cpp"}
CODE = re.compile(r"^(```|~~~).*?^\1|(`+)[^`\n]+\2", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


@functools.cache
def list_tracked() -> tuple[Path, ...]:
    """Return the files that git tracks and that exist; skip the test outside a clone, where nothing is tracked."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git clone of the repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def list_documents() -> list[Path]:
    """Return the Markdown files of the project; those under tests/data are expected outputs without their pictures."""
    return [path for path in list_tracked() if path.suffix == ".md" and not path.is_relative_to(ROOT / "tests")]


def make_slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
    text = "".join(c for c in text.lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
    return text.replace(" ", "-")


@functools.cache
def list_anchors(document: Path) -> frozenset[str]:
    """Return a document's anchors; a repeated heading is followed by a number."""
    text = re.sub(r"^(```|~~~).*?^\1", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    seen: collections.Counter[str] = collections.Counter()
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", text, re.MULTILINE):
        name = make_slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def find_broken_links(document: Path, existing: frozenset[Path]) -> Iterator[str]:
    """Yield the relative links of a document that have no tracked file, folder or heading."""
    for link in LINK.findall(CODE.sub("", document.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z][a-z+.-]*:", path):
            continue
        target = (document.parent / path).resolve() if path else document
        if target not in existing or (anchor and target.suffix == ".md" and anchor not in list_anchors(target)):
            yield link


def test_every_relative_link_has_its_file_and_heading() -> None:
    """Use tracked files only: an untracked file exists at most here, so that its link fails for everyone else."""
    existing = frozenset(folder for path in list_tracked() for folder in (path, *path.parents))
    found = {
        str(path.relative_to(ROOT)): links
        for path in list_documents()
        if (links := list(find_broken_links(path, existing)))
    }
    assert found == {}


def test_link_to_an_absent_file_or_heading_is_found(tmp_path: Path) -> None:
    there, page = tmp_path / "there.md", tmp_path / "page.md"
    there.write_text("# 4 × H200, `fp8`: a & b\n## Twice\n## Twice\n```\n# no heading\n```\n")
    page.write_text(
        "# Own\n[a](there.md) [b](there.md#4--h200-fp8-a--b) [c](there.md#twice-1) [d](#own) [e](https://x.org/#y)\n"
        "[f](gone.md) [g](there.md#no-heading) [h](there.md#twice-2) [i](#other) `[code](gone.md)`\n"
        "```\n[k](gone.md)\n```\n"
    )
    found = list(find_broken_links(page, frozenset({there, page})))
    assert found == ["gone.md", "there.md#no-heading", "there.md#twice-2", "#other"]


def test_tracked_tree_stays_below_its_size_limit() -> None:
    sizes = {path: path.stat().st_size for path in list_tracked()}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    assert sum(sizes.values()) <= MAX_TREE_BYTES, (
        f"the tracked files hold {sum(sizes.values()):,} bytes, and at most {MAX_TREE_BYTES:,} are allowed. Pack the raw records of new "
        "results (python -m tools.results pack results/SUBJECT_HARDWARE), remove pictures that no document shows, and remove "
        f"results that newer ones replace. The largest files: {', '.join(str(path.relative_to(ROOT)) for path in largest)}"
    )


def list_result_folders() -> set[Path]:
    """Return the folders below results/ that have tracked files, a folder per subject."""
    inside = (path.relative_to(results.RESULTS) for path in list_tracked() if path.is_relative_to(results.RESULTS))
    return {results.RESULTS / path.parts[0] for path in inside if len(path.parts) > 1}


def test_each_results_folder_has_a_short_page_and_raw_records() -> None:
    """Look for an archive in the folder of a subject, or in each of its subfolders."""
    folders = list_result_folders()
    assert 0 < len(folders) <= MAX_RESULT_FOLDERS, "add the measurement to the folder of its subject"
    for folder in folders:
        page = folder / "README.md"
        assert page in list_tracked(), folder.name
        assert len(page.read_text(encoding="utf-8").split()) <= MAX_RESULT_WORDS, folder.name
        assert any(path.name == results.ARCHIVE and path.is_relative_to(folder) for path in list_tracked()), folder.name


def test_results_contain_no_programs() -> None:
    """Programs that measure or print tables belong in tools/."""
    suffixes_by_folder = {
        folder: {Path(name).suffix for name in results.read_members(folder)} for folder in results.list_packed_folders()
    }
    found = {folder.name for folder, suffixes in suffixes_by_folder.items() if suffixes & PROGRAMS}
    assert found == set()
    assert [path for path in list_tracked() if path.is_relative_to(results.RESULTS) and path.suffix in PROGRAMS] == []


def test_archives_contain_no_tracked_file() -> None:
    """Unpacking must not overwrite a tracked file."""
    for folder in results.list_packed_folders():
        assert set(list_tracked()).isdisjoint(folder / name for name in results.read_members(folder)), folder.name


class TestArchives:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Return a result folder of a repository, with raw records, a report and a picture."""
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        folder = tmp_path / "results" / "decode_H200_2026-01-01"
        for name in ("README.md", "run/records.jsonl", "tables.py", "report/report.md", "run/bench.png"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        subprocess.run(["git", "add", "results/decode_H200_2026-01-01/README.md"], cwd=tmp_path, check=True)
        return folder

    def test_unpack_restores_raw_files(self, folder: Path) -> None:
        assert [str(path) for path in results.pack(folder)] == ["run/records.jsonl", "tables.py"]
        (folder / "run" / "records.jsonl").unlink()
        (folder / results.STAMP).unlink()
        results.unpack(folder)
        assert (folder / "run" / "records.jsonl").read_text() == "run/records.jsonl"

    def test_packing_the_same_files_gives_the_same_archive(self, folder: Path) -> None:
        results.pack(folder)
        before = (folder / results.ARCHIVE).read_bytes()
        (folder / "tables.py").touch()
        results.pack(folder)
        assert (folder / results.ARCHIVE).read_bytes() == before

    def test_changed_archive_is_unpacked_again(self, folder: Path) -> None:
        results.pack(folder)
        old = (folder / results.ARCHIVE).read_bytes()
        (folder / "tables.py").write_text("new")
        results.pack(folder)
        (folder / results.ARCHIVE).write_bytes(old)
        results.unpack(folder)
        assert (folder / "tables.py").read_text() == "tables.py"

    def test_archive_leaves_out_reports_of_a_measurement(self, folder: Path) -> None:
        """Leave them out, because `make results` writes them again. A measurement is a folder inside the folder of its
        subject.
        """
        for name in ("fp8_H200_2026-01-01/records.jsonl", "fp8_H200_2026-01-01/report-bf16/points.csv"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(name)
        assert "fp8_H200_2026-01-01/records.jsonl" in map(str, results.pack(folder))
        assert not [name for name in results.read_members(folder) if "report" in name]

    def test_subfolder_may_have_its_own_archive(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        results.pack(folder)
        monkeypatch.setattr(results, "RESULTS", folder.parent.parent)
        assert results.list_packed_folders() == [folder]

    def test_packing_without_an_archived_file_is_rejected(self, folder: Path) -> None:
        results.pack(folder)
        (folder / "tables.py").unlink()
        with pytest.raises(UsageError, match=r"has 1 files that are not in .*, such as tables\.py\. Unpack it first"):
            results.pack(folder)

    def test_packing_a_folder_without_raw_files_is_rejected(self, folder: Path) -> None:
        (folder / "tables.py").unlink()
        (folder / "run" / "records.jsonl").unlink()
        with pytest.raises(UsageError, match="has no raw file"):
            results.pack(folder)
